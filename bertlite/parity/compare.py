"""Comparing two runs of one model: which tensors differ, by how much, and in which module it began.

The rules, one per claim:

    exactly   the tensors are equal, bit for bit
    closely   max |ours - theirs| <= 1e-12: float64, where this separates right from wrong
    relatively  the same, of max |theirs| where that is above 1: gradients, which sum over the whole batch
    as_well   rms(ours - truth) <= FACTOR · rms(theirs - truth) + 1 ulp of max |truth|: where both must round, ours
              rounds no worse than a stated factor of theirs.  The truth is theirs in float64, of the same weights.
              One number's error can be 0 by luck, so a loss is held to the error of the logits it is made of, where
              that is larger
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CLOSE = 1e-12
FACTOR = 2.0  # the largest ratio seen stands in the record of every run
NOT_FINITE = "numbers that are not finite"

Tensors = Mapping[str, Tensor]
Measured = tuple[float, float, float | None]  # our error, what is allowed, and theirs where the rule looks at it
Rule = Callable[[Tensor, Tensor, Tensor | None, float], Measured]  # ours, theirs, truth, luck


def exactly(ours: Tensor, theirs: Tensor, truth: Tensor | None = None, luck: float = 0.0) -> Measured:
    return distance(ours, theirs), 0.0, None


def closely(ours: Tensor, theirs: Tensor, truth: Tensor | None = None, luck: float = 0.0) -> Measured:
    return distance(ours, theirs), CLOSE, None


def relatively(ours: Tensor, theirs: Tensor, truth: Tensor | None = None, luck: float = 0.0) -> Measured:
    return distance(ours, theirs), CLOSE * max(1.0, size(theirs)), None


def as_well(ours: Tensor, theirs: Tensor, truth: Tensor | None = None, luck: float = 0.0) -> Measured:
    """`luck`: an error that theirs could as well have had."""
    if truth is None:
        raise ValueError("as_well compares with a float64 truth; none was given")
    own = max(rms(theirs, truth), luck)
    return rms(ours, truth), FACTOR * own + torch.finfo(theirs.dtype).eps * size(truth), own


def distance(a: Tensor, b: Tensor) -> float:
    """max |a - b|, in float64; nan if either has one, inf if the shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def rms(a: Tensor, b: Tensor) -> float:
    """Root mean square of a - b, in float64; steadier than the maximum of a few rounding errors."""
    if a.shape != b.shape:
        return float("inf")
    return float((a.double() - b.double()).square().mean().sqrt()) if a.numel() else 0.0


def size(a: Tensor) -> float:
    return float(a.double().abs().max()) if a.numel() else 0.0


@dataclass(frozen=True)
class Row:
    """One tensor of a comparison."""

    tensor: str
    error: float
    allowed: float
    theirs: float | None = None  # their error against the truth

    @property
    def ratio(self) -> float | None:
        return self.error / self.theirs if self.theirs else None

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # False for nan


@dataclass(frozen=True)
class Report:
    """What comparing two runs found; falsy comparisons name the first module to differ."""

    name: str
    rows: tuple[Row, ...] = ()
    backend: str = ""  # the kernel that ran, as observed
    first_module: str | None = None
    not_checked: str = ""  # why nothing could be compared; such a report is not ok and not a failure
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def failed(self) -> bool:
        return not self.ok and not self.not_checked

    @property
    def largest_ratio(self) -> float | None:
        return max((row.ratio for row in self.rows if row.ratio is not None), default=None)

    @property
    def worst(self) -> Row:
        """The row nearest to its limit, or furthest beyond it."""
        return max(self.rows, key=lambda row: (not row.ok, row.error / row.allowed if row.allowed else row.error))

    def line(self) -> str:
        if self.not_checked:
            return f"  --   {self.name:<58} not checked: {self.not_checked}"
        worst = self.worst
        verdict = "  ok  " if self.ok else "DIFFER"
        return f"{verdict} {self.name:<58} {worst.error:9.2e} of {worst.allowed:8.2e} allowed, {worst.tensor}"

    def __str__(self) -> str:
        if self.not_checked or self.ok:
            return self.line()
        width = max(len(row.tensor) for row in self.rows)
        bad = [row for row in self.rows if not row.ok]
        lines = [self.line(), f"       {'tensor':<{width}}  {'error':>9}  {'allowed':>9}"]
        lines += [f"       {row.tensor:<{width}}  {row.error:9.2e}  {row.allowed:9.2e}" for row in bad[:20]]
        lines += [f"       and {len(bad) - 20} tensors more"] if len(bad) > 20 else []
        lines.append(
            f"       first module to differ: {self.first_module or 'none: every module agrees going forward'}"
        )
        return "\n".join(lines)


def compare(ours: Tensors, theirs: Tensors, truth: Tensors | None, rule: Callable[[str], Rule]) -> tuple[Row, ...]:
    """Compare two runs tensor by tensor.

    Args:
        truth: the same tensors in float64, for rules that want them.
        rule: gives the rule for a tensor of this name.

    Raises:
        ValueError: the runs do not hold tensors of the same names; a tensor left out would be a tensor not checked.
    """
    if set(ours) != set(theirs):
        lone = sorted(set(ours) ^ set(theirs))
        raise ValueError(f"only one of the two runs has {', '.join(lone[:5])}")
    logits = [rms(theirs[name], truth[name]) for name in theirs if "logits" in name] if truth else []
    rows = []
    for name, mine in ours.items():
        luck = max(logits, default=0.0) if name == "loss" else 0.0
        other, true = theirs[name].detach().to(mine.device), truth[name].detach().to(mine.device) if truth else None
        rows.append(Row(name, *rule(name)(mine.detach(), other, true, luck)))
    return tuple(rows)


def finite(name: str, x: Tensor) -> Row:
    """Of a tensor that has nothing to be compared with, how many numbers are nan or infinite; none is allowed."""
    return Row(f"{name}, {NOT_FINITE}", float(x.isfinite().logical_not().sum()), 0.0)


def trace(model: nn.Module, run: Callable[[], Any]) -> dict[str, Tensor]:
    """The output of every module in a run of the model, by module name, in the order in which they finished."""
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            first = out if isinstance(out, Tensor) else out[0] if isinstance(out, tuple) else None
            if isinstance(first, Tensor):
                seen[name] = first.detach().clone()

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def first_divergence(ours: Tensors, theirs: Tensors, truth: Tensors | None, rule: Rule) -> str | None:
    """The first module, in the order of running, whose output breaks the rule; inner ones come before outer ones."""
    for name, mine in ours.items():
        if name in theirs and theirs[name].shape == mine.shape and (truth is None or name in truth):
            error, allowed, _ = rule(mine, theirs[name], truth[name] if truth else None, 0.0)
            if not error <= allowed:
                return name
    return None
