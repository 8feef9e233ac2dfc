"""The progress of long work: a bar on a terminal, a line now and then in a log."""

import sys
import time
from typing import Any, Self, TextIO

SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Count what is done, and show it with the rate and the time left.

    On a terminal this is tqdm's bar.  Elsewhere a line is written after each `SECONDS_BETWEEN_LINES`, so that a log
    tells how the work stands and short work leaves nothing behind.

    Args:
        total: the amount of work; None where it is not known yet, in which case `total` is set later.
        unit: what is counted, in the plural: "cases".
        what: the work, which begins each line.
        done: what was done before, by an earlier command: it does not count for the rate.
        shown: False shows nothing, such as in a process that is not the first.
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
        self.bar: Any = None

    def __enter__(self) -> Self:
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
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def advance(self, count: float = 1) -> None:
        """Count more as done."""
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
        """Return what was done in a second, on average."""
        return (self.done - self.before) / max(time.monotonic() - self.started, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Return how long the rest takes at this rate; None where the total or the rate is not known."""
        if self.total is None or self.rate <= 0:
            return None
        return max(self.total - self.done, 0) / self.rate

    def line(self) -> str:
        """Return how the work stands in words: "parity: 40 of 466 cases, 3.1 a second, 2 min 17 s left"."""
        start = f"{self.what}: " if self.what else ""
        of = "" if self.total is None else f" of {self.total:,.0f}"
        left = "" if self.seconds_left is None else f", {in_words(self.seconds_left)} left"
        rate = f"{self.rate:,.1f}" if self.rate < 100 else f"{self.rate:,.0f}"
        return f"{start}{self.done:,.0f}{of} {self.unit}, {rate} a second{left}"


def in_words(seconds: float) -> str:
    """Return a duration: "8 s", "2 min 17 s", "1 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
