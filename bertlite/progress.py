"""The progress of long work: a bar on a terminal, occasional lines in a log; durations and counts in words."""

import sys
import time
from typing import Any, Self, TextIO

SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Count finished work, and show it with the rate and the time left.

    On a terminal this is tqdm's bar.  Elsewhere a line is written every `SECONDS_BETWEEN_LINES`, so that a log shows
    the progress of long work and short work writes nothing.  Work in stages with different units calls `stage` at the
    start of each, which writes a line.

    Args:
        total: the amount of work; None if it is not known yet and `total` is set later.
        unit: what is counted, in the plural: "cases".
        what: the work, which begins each line.
        done: work done before by an earlier command, which does not count for the rate.
        shown: False shows nothing, such as in all processes but the first.
        file: where to write; by default standard error.
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
        self.total, self.unit, self.what, self.done, self.before, self.shown = total, unit, what, done, done, shown
        self.file = sys.stderr if file is None else file
        self.started = self.last_line = time.monotonic()
        self.work = what
        self.bar: Any = None

    def __enter__(self) -> Self:
        self.open_bar()
        return self

    def open_bar(self) -> None:
        if self.shown and self.file.isatty():
            from tqdm import tqdm

            self.bar = tqdm(
                total=self.total,
                initial=self.done,
                desc=self.what or None,
                unit=f" {self.unit}",
                file=self.file,
                leave=False,
                dynamic_ncols=True,
            )

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def stage(self, name: str, total: float | None = None, unit: str = "steps", done: float = 0) -> None:
        """Begin a stage, with its own unit and time left."""
        self.__exit__()
        self.what = f"{self.work}: {name}"
        self.total, self.unit, self.done, self.before = total, unit, done, done
        self.started = self.last_line = time.monotonic()
        self.open_bar()
        if self.shown and self.bar is None:
            print(self.what if total is None else f"{self.what}, {total:,.0f} {unit}", file=self.file, flush=True)

    def advance(self, count: float = 1) -> None:
        """Count more work as done."""
        self.done += count
        if self.bar is not None:
            self.bar.total = self.total
            self.bar.update(count)
        elif self.shown and time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            print(self.line(), file=self.file, flush=True)

    def print(self, text: str) -> None:
        """Print a line of results on standard output, above the bar."""
        if self.bar is None:
            print(text, flush=True)
        else:
            self.bar.write(text, file=sys.stdout)

    @property
    def rate(self) -> float:
        """Return the average rate in units per second."""
        return (self.done - self.before) / max(time.monotonic() - self.started, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Return how long the rest takes at this rate; None if the total or the rate is not known."""
        if self.total is None or self.rate <= 0:
            return None
        return max(self.total - self.done, 0) / self.rate

    def line(self) -> str:
        """Return the progress in words: "parity: 40 of 466 cases, 3.1 a second, 2 min 17 s left"."""
        start = f"{self.what}: " if self.what else ""
        of = "" if self.total is None else f" of {self.total:,.0f}"
        left = "" if self.seconds_left is None else f", {in_words(self.seconds_left)} left"
        if self.rate < 1:
            pace = f"{in_words(1 / max(self.rate, 1e-9))} each"
        else:
            pace = f"{self.rate:,.{1 if self.rate < 100 else 0}f} a second"
        return f"{start}{self.done:,.0f}{of} {self.unit}, {pace}{left}"


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
