"""Budgets, and the work that they are for.

A budget is a speed ("2x" the dense model's; "2x+" is that or more), a share of its MACs ("40%"), a time ("15ms") or
the size of the weights file ("30MB", or a share of the given file's).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from bertlite.checkpoint.saving import file_size
from bertlite.experiments.budget.work import Work, full
from bertlite.pruning.importance.allocation import UnitCosts, kept_sizes

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
BYTES = {"kb": 1e3, "mb": 1e6, "gb": 1e9}
USUAL_SHAPE = (8, 128)  # sequences and tokens
FORM = re.compile(rf"(\d+(?:\.\d+)?)\s*(x|%|{'|'.join([*UNITS, *BYTES])})(\+?)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """The target of the pruned model: `kind` is "speed", "macs", "time", "bytes" or "size", a share of the bytes.

    With `at_least` any higher speed or shorter time meets it too, even the given model's.
    """

    text: str
    kind: str
    value: float  # times as fast; a share, 0 to 1; seconds; bytes
    at_least: bool = False

    @classmethod
    def parse(cls, text: str, of_size: bool = False) -> "Target":
        """Read "2x", "40%", "15ms" or "30MB"; "2x+" or "15ms+" may be exceeded.

        Args:
            of_size: a share is a share of the bytes, not of the MACs.

        Raises:
            ValueError: it is none of these, a speed is below 1, a share is not between 0 and 100 %, or a share
                or a size has a plus.
        """
        found = FORM.fullmatch(text.strip())
        if found is None:
            known = "a speed (2x), a share of the MACs (40%), a time (15ms) or a size (30MB)"
            raise ValueError(f"the target {text!r} is not valid: write {known}, then the checkpoint")

        # A plus asks for that speed or more; a share or a size is met by anything smaller.
        number, unit, more = float(found[1]), found[2].lower(), bool(found[3])
        if more and unit not in ("x", *UNITS):
            raise ValueError(f"the target {text!r} is met by any smaller model: leave out the plus")

        # Each unit has a range of its own.
        if unit == "x":
            if number < 1:
                raise ValueError(f"the target {text!r} is slower than the dense model; write 1x or more")
            return cls(text, "speed", number, more)
        if unit == "%":
            if not 0 < number <= 100:
                of = "size" if of_size else "MACs"
                raise ValueError(f"the target {text!r} is not a share of the {of}; write more than 0% and up to 100%")
            return cls(text, "size" if of_size else "macs", number / 100)

        if not number:
            raise ValueError(f"the target {text!r} must be a {'size' if unit in BYTES else 'time'} above 0")
        if unit in BYTES:
            return cls(text, "bytes", number * BYTES[unit])
        return cls(text, "time", number * UNITS[unit], more)

    @property
    def is_timed(self) -> bool:
        return self.kind in ("speed", "time")

    @property
    def is_met_by_all(self) -> bool:
        """True for 1x: the given model meets it, whatever the clock says."""
        return self.kind == "speed" and self.value == 1

    @property
    def is_size(self) -> bool:
        return self.kind in ("bytes", "size")

    def seconds(self, dense: float) -> float:
        """Return the time that a forward may take, if the dense model takes `dense`; infinite if none is asked."""
        return {"speed": dense / self.value, "time": self.value}.get(self.kind, float("inf"))


def read_work(shape: tuple[int, int] | None, lengths: str | PathLike[str] | None, batch_size: int) -> Work:
    """Return the batch that the budget is for: with one shape, or with the lengths in a file.

    Args:
        shape: (sequences, tokens); by default USUAL_SHAPE.
        lengths: a file with a length in tokens on each line; the batch has `batch_size` of their quantiles.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: both are given, or a line is not a length.
    """
    if lengths is None:
        return full(*(shape or USUAL_SHAPE))
    if shape is not None:
        raise ValueError("the work is stated by --at or by --lengths: give one of them")

    # The batch has as many lengths as it has rows: quantiles of all that the file lists.
    path = Path(lengths)
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
        most = config.max_position_embeddings
        raise ValueError(f"the work has {work.width} tokens; the model has positions for {most}: give --at 8x{most}")


def spare_bytes(model: Any, target: Target, dense: int, others: int) -> float:
    """Return the bytes that a target of size leaves to heads and neurons.

    Args:
        dense: bytes of the given file; the target may be a share of them.
        others: bytes that are written with the model.

    Raises:
        ValueError: the file is larger even without heads and neurons.
    """
    smallest = others + file_size(model) - UnitCosts.bytes(model).total(kept_sizes(model.config))
    allowed = target.value * (dense if target.kind == "size" else 1)
    if allowed < smallest:
        raise ValueError(
            f"the target {target.text} cannot be met by removing heads and neurons: without any the weights take"
            f" {smallest / 1e6:.4g} MB. Remove tokens too, with --vocabulary or `bertlite prune vocabulary`"
        )
    return allowed - smallest
