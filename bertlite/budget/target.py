"""Budgets, and the work that they are for.

A budget is a speed ("2x" the dense model's), a share of its MACs ("40%") or a time ("15ms").
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertlite.bench.work import Work, full
from bertlite.importance.allocation import head_macs, neuron_macs

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(x|%|s|ms|us|µs)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """What the pruned model must meet: `kind` is "speed", "macs" or "time"."""

    text: str
    kind: str
    value: float  # times as fast; a share, 0 to 1; seconds

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Read "2x", "40%" or "15ms".

        Raises:
            ValueError: it is none of these, a speed is below 1, or a share is not between 0 and 100 %.
        """
        found = FORM.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"the target {text!r} is not valid: write a speed (2x), a share of the MACs (40%), a time (15ms)"
            )
        number, unit = float(found[1]), found[2].lower()
        if unit == "x":
            if number < 1:
                raise ValueError(f"the target {text!r} is slower than the dense model; write 1x or more")
            return cls(text, "speed", number)
        if unit == "%":
            if not 0 < number <= 100:
                raise ValueError(f"the target {text!r} is not a share of the MACs; write more than 0% and up to 100%")
            return cls(text, "macs", number / 100)
        if not number:
            raise ValueError(f"the target {text!r} must be a time above 0")
        return cls(text, "time", number * UNITS[unit])

    def seconds(self, dense: float) -> float:
        """Return the time that a forward may take, if the dense model takes `dense`; infinite for MACs."""
        return {"speed": dense / self.value, "time": self.value, "macs": float("inf")}[self.kind]


def read_work(shape: tuple[int, int] | None, lengths: str | None, batch_size: int) -> Work:
    """Return the batch that the budget is for: of one shape, or with the lengths in a file.

    Args:
        shape: (sequences, tokens).
        lengths: a file with a length in tokens on each line; the batch has `batch_size` of their quantiles.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: neither or both are given, or a line is not a length.
    """
    if (shape is None) == (lengths is None):
        raise ValueError("the work is stated by --at or by --lengths: give one of them")
    if shape is not None:
        return full(*shape)
    path = Path(str(lengths))
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        if not line.strip().isdecimal() or int(line) < 1:
            raise ValueError(f"{path}, line {number}: {line.strip()[:40]!r} is not a length in tokens")
        found.append(int(line))
    if not found:
        raise ValueError(f"{path} has no lengths")
    chosen = quantiles(found, batch_size)
    return Work(f"{batch_size} of {path.name}", chosen, max(chosen))


def quantiles(lengths: Sequence[int], count: int) -> tuple[int, ...]:
    """Return `count` lengths that represent these."""
    ordered = sorted(lengths)
    return tuple(ordered[int((i + 0.5) * len(ordered) / count)] for i in range(count))


def check_work(work: Work, config: Any) -> None:
    """Raise ValueError for sequences that are longer than the model's positions."""
    if work.width > config.max_position_embeddings:
        raise ValueError(
            f"the work has {work.width} tokens; the model has positions for {config.max_position_embeddings}"
        )


@dataclass(frozen=True)
class UnitMacs:
    """The multiply-accumulates of one head and of one neuron over the tokens of a work."""

    head: int
    neuron: int

    @classmethod
    def of(cls, config: Any, work: Work) -> "UnitMacs":
        return cls(
            sum(head_macs(config, length) for length in work.lengths),
            sum(neuron_macs(config, length) for length in work.lengths),
        )

    def total(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Return the MACs of layers that keep so many heads and neurons."""
        return sum(heads * self.head + neurons * self.neuron for heads, neurons in sizes)
