"""Budgets, and the work that they are for.

A budget is a speed ("2x" the dense model's), a share of its MACs ("40%"), a time ("15ms") or the size of the file with
the weights ("30MB", or a share of the given one's).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertlite.checkpoint.saving import file_size
from bertlite.experiments.budget.work import Work, full
from bertlite.experiments.files import units_kept
from bertlite.pruning.importance.allocation import BySize, head_macs, neuron_macs
from bertlite.stack.modules import DISTANCE_BUCKETS

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
BYTES = {"kb": 1e3, "mb": 1e6, "gb": 1e9}
FORM = re.compile(rf"(\d+(?:\.\d+)?)\s*(x|%|{'|'.join([*UNITS, *BYTES])})", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """What the pruned model must meet: `kind` is "speed", "macs", "time", "bytes" or "size", a share of the bytes."""

    text: str
    kind: str
    value: float  # times as fast; a share, 0 to 1; seconds; bytes

    @classmethod
    def parse(cls, text: str, of_size: bool = False) -> "Target":
        """Read "2x", "40%", "15ms" or "30MB".

        Args:
            of_size: a share is one of the bytes, not of the MACs.

        Raises:
            ValueError: it is none of these, a speed is below 1, or a share is not between 0 and 100 %.
        """
        found = FORM.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"the target {text!r} is not valid: write a speed (2x), a share of the MACs (40%), a time (15ms) or a"
                " size (30MB), and the checkpoint after it"
            )
        number, unit = float(found[1]), found[2].lower()
        if unit == "x":
            if number < 1:
                raise ValueError(f"the target {text!r} is slower than the dense model; write 1x or more")
            return cls(text, "speed", number)
        if unit == "%":
            if not 0 < number <= 100:
                of = "size" if of_size else "MACs"
                raise ValueError(f"the target {text!r} is not a share of the {of}; write more than 0% and up to 100%")
            return cls(text, "size" if of_size else "macs", number / 100)
        if not number:
            raise ValueError(f"the target {text!r} must be a {'size' if unit in BYTES else 'time'} above 0")
        if unit in BYTES:
            return cls(text, "bytes", number * BYTES[unit])
        return cls(text, "time", number * UNITS[unit])

    @property
    def is_timed(self) -> bool:
        return self.kind in ("speed", "time")

    @property
    def is_met_by_all(self) -> bool:
        """True for 1x, which the given model is as it is, whatever the clock says."""
        return self.kind == "speed" and self.value == 1

    @property
    def is_size(self) -> bool:
        return self.kind in ("bytes", "size")

    def seconds(self, dense: float) -> float:
        """Return the time that a forward may take, if the dense model takes `dense`; infinite if none is asked."""
        return {"speed": dense / self.value, "time": self.value}.get(self.kind, float("inf"))

    def bytes(self, dense: int) -> float:
        """Return the bytes that a target of size allows, if the given file has `dense`."""
        return self.value * (dense if self.kind == "size" else 1)


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
class UnitCosts:
    """The costs of one head and of one neuron."""

    head: int
    neuron: int

    @classmethod
    def macs(cls, config: Any, work: Work) -> "UnitCosts":
        """Return multiply-accumulates over the tokens of a work."""
        return cls(
            sum(head_macs(config, length) for length in work.lengths),
            sum(neuron_macs(config, length) for length in work.lengths),
        )

    @classmethod
    def bytes(cls, model: Any) -> "UnitCosts":
        """Return the bytes of the weights of a model's heads and neurons."""
        config, each = model.config, model.dtype.itemsize
        D, H = config.hidden_size, config.hidden_size // config.num_attention_heads
        distances = DISTANCE_BUCKETS if config.position_embedding_type == "bucketed" else 0
        if config.position_embedding_type == "disentangled" and not config.share_att_key:
            distances = (D + 1) * H * len(config.pos_att_type.split("|"))
        return cls(each * (4 * D * H + 3 * H + distances), each * (2 * D + 1))

    def total(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Return the cost of layers that keep so many heads and neurons."""
        return sum(heads * self.head + neurons * self.neuron for heads, neurons in sizes)

    def by_size(self, losses: Sequence[BySize]) -> list[BySize]:
        """Return the costs of the sizes of sublayers that have a loss."""
        return [({n: n * self.head for n in a}, {n: n * self.neuron for n in f}) for a, f in losses]


def spare_bytes(model: Any, target: Target, dense: int, others: int) -> float:
    """Return the bytes that a target of size leaves to heads and neurons.

    Args:
        dense: bytes of the file of which the target may be a share.
        others: bytes of what is written besides the model.

    Raises:
        ValueError: the file is larger without any.
    """
    smallest = others + file_size(model) - UnitCosts.bytes(model).total([*zip(*units_kept(model.config), strict=True)])
    allowed = target.bytes(dense)
    if allowed < smallest:
        raise ValueError(
            f"the target {target.text} cannot be met by removing heads and neurons: without any the weights take"
            f" {smallest / 1e6:.4g} MB; fewer tokens take less, by --vocabulary or `bertlite prune vocabulary`"
        )
    return allowed - smallest
