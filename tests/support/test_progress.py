"""The progress of long work, on a terminal and in a log."""

import io
import threading

import pytest

from bertlite.support.progress import Progress, count_of, in_words, short_time


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def now(monkeypatch):
    """Return the time, in a list, that tests set."""
    found = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: found[0])
    return found


def test_a_log_gets_a_line_now_and_then_and_for_each_stage_with_a_rate_of_its_own_and_the_time_left(now):
    log = io.StringIO()
    with Progress(220, "cases", what="parity", done=20, file=log) as bar:  # what was done before has no rate
        for _ in range(28):
            now[0] += 1
            bar.advance(2)
        bar.stage("gradients")
        now[0] += 100
        bar.stage("fitting", 12, "layers", done=2)
        now[0] += 40
        bar.advance()
    assert log.getvalue().splitlines() == [
        "parity: 40 of 220 cases,  2.00 cases/s, 01:30 left",
        "parity: 60 of 220 cases,  2.00 cases/s, 01:20 left",
        "parity: gradients",
        "parity: fitting, 12 layers",
        "parity: fitting: 3 of 12 layers,  0.03 layers/s, 06:00 left",
    ]


def test_an_interrupt_while_a_bar_is_drawn_leaves_the_lock_of_all_bars_free():
    """Or bars in other threads, other libraries' too, would wait for ever."""

    class Interrupted(Terminal):
        def write(self, text: str) -> int:
            if "50%" in text:
                raise KeyboardInterrupt
            return super().write(text)

    bar = Progress(2, "cases", file=Interrupted()).bar
    bar.n = 1
    with pytest.raises(KeyboardInterrupt):
        bar.refresh()
    other = threading.Thread(target=lambda: Progress(2, "cases", file=Terminal()).bar.close(), daemon=True)
    other.start()
    other.join(10)
    assert not other.is_alive()


@pytest.mark.parametrize(("shown", "file"), [(True, io.StringIO), (False, Terminal)])
def test_short_work_leaves_no_line_in_a_log_and_what_is_not_shown_writes_nothing(shown, file):
    written = file()
    with Progress(3, "cases", shown=shown, file=written) as bar:
        bar.advance(3)
    assert written.getvalue() == ""


def test_eighty_columns_keep_the_time_left_and_a_stage_without_a_total_counts_nothing(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Terminal, "fileno", lambda _: 10**6, raising=False)
    terminal = Terminal()
    with Progress(None, "steps", what="prune to 2x", file=terminal) as bar:
        bar.stage("gradients at the outputs of all layers", 24, "batches")
        bar.advance(3)
        bar.bar.refresh()
        assert "prune to 2x: " in terminal.getvalue()
        assert "3/24" in terminal.getvalue()
        assert "batches/s]" in terminal.getvalue().rpartition("\r")[2]
        terminal.truncate(0)
        bar.stage("timing the finished model")
        assert "steps/s" not in terminal.getvalue()


def test_durations_and_counts_in_words():
    assert [*map(in_words, (0.4, 59.4, 137, 3900))] == ["0 s", "59 s", "2 min 17 s", "1 h 5 min"]
    measured = (0.00123, 0.9994, 0.9996, 1.5, 12.34)
    assert [*map(short_time, measured)] == ["1.23 ms", "999 ms", "999.6 ms", "1500 ms", "12.3 s"], "no exponents"
    assert [count_of(count, "row") for count in (0, 1, 1200)] == ["0 rows", "1 row", "1,200 rows"]
