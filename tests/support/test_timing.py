"""bertlite/support/timing.py: candidates are timed in turn, when nothing else runs, and ratios round by round."""

import itertools

import pytest

from bertlite.support import timing
from bertlite.support.timing import FEWEST, LONGEST_SPIN, SETTLE, alternate, quartiles, ratios, with_spread

COSTS = {"short": 0.003, "long": 0.03}  # seconds of a call


def test_candidates_run_in_turn_seven_rounds_or_more_until_their_time_is_over():
    ran = []
    runs = {"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}
    with pytest.raises(ValueError, match="rounds is 6; a median with its spread needs 7 or more"):
        alternate(runs, 6)
    assert ran == []
    times = alternate(runs, 9, seconds=0)
    assert ran == ["a", "b"] * (2 + FEWEST)  # two rounds do not count
    assert [len(each) for each in times.values()] == [FEWEST, FEWEST]
    assert max(times["a"]) < SETTLE  # the pause between them is not measured


class Clock:
    """The module time of a process whose threads use the processor for some seconds, and then no more."""

    def __init__(self, busy):
        self.now, self.busy = 100.0, busy

    def perf_counter(self):
        return self.now

    def process_time(self):
        return min(self.now - 100.0, self.busy)

    def sleep(self, seconds):
        self.now += seconds


def test_a_short_candidate_runs_several_times_in_a_round(monkeypatch):
    clock, ran = Clock(busy=0.0), []
    monkeypatch.setattr(timing, "time", clock)
    runs = {name: lambda name=name, took=took: (ran.append(name), clock.sleep(took)) for name, took in COSTS.items()}
    times = alternate(runs, FEWEST, warm=1, burst=0.02)
    bursts = [(name, len(list(group))) for name, group in itertools.groupby(ran)]
    assert bursts[:2] == [("short", 1), ("long", 1)]  # the warm round, which says how many calls a round has
    assert bursts[2:] == [("short", 8), ("long", 1)] * FEWEST  # a call that does not count, and as many as take 20 ms
    assert times == {name: pytest.approx([took] * FEWEST) for name, took in COSTS.items()}  # of one call
    with pytest.raises(ValueError, match="a burst needs a warm round"):
        alternate(runs, FEWEST, warm=0, burst=0.02)


def test_a_candidate_waits_until_the_threads_of_the_one_before_no_longer_spin(monkeypatch):
    for busy, waited in ((0.0, SETTLE), (0.2, 0.2 + SETTLE), (9.0, LONGEST_SPIN)):
        clock = Clock(busy)
        monkeypatch.setattr(timing, "time", clock)
        timing.wait_until_idle()
        assert clock.now - 100 == pytest.approx(waited, abs=1.01 * SETTLE)


def test_a_ratio_is_taken_round_by_round():
    """A machine that is slower in some rounds is slower for both, and the ratio is the same."""
    slowed = ratios({"a": [4.0, 1.0, 2.0], "b": [2.0, 0.5, 1.0]}, "a", "b")
    assert quartiles(slowed) == {"low": 2.0, "median": 2.0, "high": 2.0}
    assert with_spread(quartiles([4.0, 1.0, 2.0])) == "2.00 (1.00–4.00)"
