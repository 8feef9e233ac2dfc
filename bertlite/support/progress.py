"""The progress of long work: a bar on a terminal, occasional lines in a log; durations and counts in words."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Self, TextIO, TypeVar

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0
BAR = "{l_bar}{bar}| {n:.0f}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}]"  # as tqdm's, but n is rounded
COUNTS = 52  # columns of a terminal for counts, rate and time left
T = TypeVar("T")


class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A bar of tqdm without its thread, which would not survive a fork."""

    monitor_interval = 0

    def refresh(self, nolock: bool = False, lock_args: Any = None) -> bool:
        """Draw the bar.  An interrupt meanwhile frees the lock of all bars, which tqdm's own method would keep."""
        with nullcontext() if nolock else self.get_lock():
            return bool(super().refresh(nolock=True))


class Lines:
    """A log: each drawing of a bar is a line."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=self.file, flush=True)


class Progress:
    """Count finished work, and show it with the rate and the time left.

    On a terminal this is tqdm's bar.  Elsewhere a line is written every `SECONDS_BETWEEN_LINES`, so that a log shows
    the progress of long work and short work writes nothing.  Work in stages with different units calls `stage` at the
    start of each, which writes a line.

    Args:
        total: the amount of work; None if it is not known yet and `total` is set later.
        unit: the things counted, in the plural: "cases".
        what: the work, which begins each line.
        done: work that an earlier command did, which does not count for the rate.
        shown: False shows nothing, as in every process except the first.
        file: the stream to write to; by default standard error.
    """

    def __init__(
        self,
        total: float | None,
        unit: str,
        *,
        what: str = "",
        done: float = 0,
        shown: bool = True,
        file: TextIO | None = None,
    ) -> None:
        self.work, self.shown, self.file = what, shown, sys.stderr if file is None else file
        self.open_bar(what, total, unit, done)

    def open_bar(self, what: str, total: float | None, unit: str, done: float) -> None:
        self.total, self.done = total, done
        options: dict[str, Any] = {"dynamic_ncols": True, "file": self.file}
        if self.file.isatty():
            room = shutil.get_terminal_size().columns - COUNTS
            what = what if len(what) <= room else f"{what[: max(room - 1, 8)]}…"
            options["bar_format"] = "{desc}" if total is None and unit == "" else BAR
        else:
            line = "{n:.0f} of {total_fmt}{unit}, {rate_noinv_fmt}, {remaining} left"
            options = {"bar_format": f"{{desc}}{': ' if what else ''}{line}", "file": Lines(self.file), "miniters": 0}
            options |= {"mininterval": SECONDS_BETWEEN_LINES, "delay": SECONDS_BETWEEN_LINES, "smoothing": 0}
        options |= {"desc": what, "total": total, "unit": f" {unit}", "initial": done}
        self.bar: Any = Bar(leave=False, disable=not self.shown, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def stage(self, name: str, total: float | None = None, unit: str = "", done: float = 0) -> None:
        """Begin a stage, with its own unit and time left; without a total only its name is shown."""
        self.bar.close()
        what = f"{self.work}: {name}"
        self.open_bar(what, total, unit, done)
        if self.shown and not self.file.isatty():
            known = total not in (None, 1) and unit != "%"
            print(f"{what}, {total:,.0f} {unit}" if known else what, file=self.file, flush=True)

    def over(self, name: str, items: Sequence[T], unit: str) -> Iterator[T]:
        """Yield items, the work of a stage."""
        self.stage(name, len(items), unit)
        for item in items:
            yield item
            self.advance()

    def advance(self, count: float = 1) -> None:
        """Count more work as done."""
        self.done += count
        self.bar.total = self.total
        self.bar.update(count)

    def print(self, text: str) -> None:
        """Print a line of results on standard output, above the bar."""
        self.bar.write(text, file=sys.stdout)
        sys.stdout.flush()


def in_words(seconds: float) -> str:
    """Return a duration: "8 s", "2 min 17 s", "1 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def short_time(seconds: float) -> str:
    """Return a measured time: "1.23 ms", "1500 ms", "12.3 s"."""
    return f"{1000 * seconds:.{3 if seconds < 0.9995 else 4}g} ms" if seconds < 9.9995 else f"{seconds:.1f} s"


def count_of(count: int, noun: str) -> str:
    """Return a count with its noun: "1 shard", "2 shards"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
