"""The comparison of two runs of one model: the tensors that differ, by how much, and the first module to differ.

The rules, one per claim:

    exactly     the tensors are equal, bit for bit
    closely     max |ours - theirs| <= 1e-12: float64, where this separates right from wrong
    relatively  the same, times max |theirs| if that is above 1: gradients, which sum over the whole batch
    as_well     rms(ours - truth) <= FACTOR · rms(theirs - truth) + eps · max |truth|: where both must round.  The
                truth is theirs in float64, with the same weights; eps is the dtype's.  The second term is one rounding
                step of the largest number, so our error may be slightly more than FACTOR times theirs.  The error of
                one number can be 0 by chance, so for a loss the first term takes the error of the logits, if that is
                larger.  The gradient of the keys' bias is 0 in exact arithmetic, since it shifts all scores of a query
                alike.  Both sides have only rounding there, so the first term takes eps times the largest gradient of
                the model, if that is larger
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

CLOSE = 1e-12
FACTOR = 2.0  # the largest ratio found is in every record
NOT_FINITE = "numbers that are not finite"

Tensors = Mapping[str, Tensor]
Measured = tuple[float, float, float | None]  # our error, the allowed error, and their error if the rule reads it
Rule = Callable[[Tensor, Tensor, Tensor | None, float], Measured]  # ours, theirs, truth, rounding_allowance


def exactly(ours: Tensor, theirs: Tensor, truth: Tensor | None = None, rounding_allowance: float = 0.0) -> Measured:
    return distance(ours, theirs), 0.0, None


def closely(ours: Tensor, theirs: Tensor, truth: Tensor | None = None, rounding_allowance: float = 0.0) -> Measured:
    return distance(ours, theirs), CLOSE, None


def relatively(ours: Tensor, theirs: Tensor, truth: Tensor | None = None, rounding_allowance: float = 0.0) -> Measured:
    return distance(ours, theirs), CLOSE * max(1.0, largest(theirs)), None


def as_well(ours: Tensor, theirs: Tensor, truth: Tensor | None = None, rounding_allowance: float = 0.0) -> Measured:
    """Compare the rounding errors of both; theirs counts as `rounding_allowance` or more."""
    if truth is None:
        raise ValueError("as_well compares with a float64 truth; none was given")
    reference = max(rms_distance(theirs, truth), rounding_allowance)
    return rms_distance(ours, truth), FACTOR * reference + torch.finfo(theirs.dtype).eps * largest(truth), reference


def distance(a: Tensor, b: Tensor) -> float:
    """Return max |a - b|, in float64; nan if either holds a nan, inf if the shapes differ."""
    return largest(a.double() - b.double()) if a.shape == b.shape else float("inf")


def rms_distance(a: Tensor, b: Tensor) -> float:
    """Return the root mean square of a - b, in float64; inf if the shapes differ.

    It is steadier than the maximum of a few rounding errors.
    """
    if a.shape != b.shape:
        return float("inf")
    return float((a.double() - b.double()).square().mean().sqrt()) if a.numel() else 0.0


def largest(a: Tensor) -> float:
    return float(a.double().abs().max()) if a.numel() else 0.0


@dataclass(frozen=True)
class Row:
    """The comparison of one tensor: a row of the report's table."""

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


@dataclass(frozen=True, repr=False)
class Report:
    """The comparison of two runs, tensor by tensor; if any differs, the first module to differ."""

    name: str
    rows: tuple[Row, ...] = ()
    backend: str = ""  # the attention that ran
    first_module: str | None = None
    not_checked: str = ""  # the reason why nothing could be compared; such a report is neither ok nor failed
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
        """Return the row nearest to its limit, or furthest beyond it."""
        return max(self.rows, key=lambda row: (not row.ok, row.error / row.allowed if row.allowed else row.error))

    def line(self) -> str:
        if self.not_checked:
            return f"  --   {self.name:<58} not checked: {self.not_checked}"
        if not self.rows:
            return f"DIFFER {self.name:<58} nothing was compared"
        worst = self.worst
        verdict = "  ok  " if self.ok else "DIFFER"
        return f"{verdict} {self.name:<58} {worst.error:9.2e} of {worst.allowed:8.2e} allowed, {worst.tensor}"

    def __repr__(self) -> str:
        if self.not_checked or self.ok or not self.rows:
            return self.line()
        width = max(len(row.tensor) for row in self.rows)
        bad = [row for row in self.rows if not row.ok]
        heading = f"       {'tensor':<{width}}  {'error':>9}  {'allowed':>9}"
        table = [f"       {row.tensor:<{width}}  {row.error:9.2e}  {row.allowed:9.2e}" for row in bad[:20]]
        more = [f"       and {len(bad) - 20} tensors more"] if len(bad) > 20 else []
        first = self.first_module or "none: every module agrees going forward"
        return "\n".join([self.line(), heading, *table, *more, f"       first module to differ: {first}"])


def compare(ours: Tensors, theirs: Tensors, truth: Tensors | None, rule: Callable[[str], Rule]) -> tuple[Row, ...]:
    """Compare two runs tensor by tensor.

    Args:
        truth: the same tensors in float64, for rules that need them.
        rule: returns the rule for a tensor's name.

    Raises:
        ValueError: the names of the runs' tensors differ; a missing tensor would not be checked.
    """
    if set(ours) != set(theirs):
        unmatched = sorted(set(ours) ^ set(theirs))
        raise ValueError(f"only one of the two runs has {', '.join(unmatched[:5])}")
    logits = [rms_distance(theirs[name], truth[name]) for name in theirs if "logits" in name] if truth else []
    gradient = max((largest(x) for name, x in (truth or {}).items() if name.startswith("grad.")), default=0.0)
    rows = []
    for name, mine in ours.items():
        rounding_allowance = max(logits, default=0.0) if name == "loss" else 0.0
        if truth and name.startswith("grad.") and largest(truth[name]) <= CLOSE * gradient:
            rounding_allowance = torch.finfo(theirs[name].dtype).eps * gradient
        other, true = theirs[name].detach().to(mine.device), truth[name].detach().to(mine.device) if truth else None
        rows.append(Row(name, *rule(name)(mine.detach(), other, true, rounding_allowance)))
    return tuple(rows)


def count_nonfinite(name: str, x: Tensor) -> Row:
    """Return a row that counts the numbers of x that are nan or infinite; none is allowed."""
    return Row(f"{name}, {NOT_FINITE}", float(x.isfinite().logical_not().sum()), 0.0)


def trace(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """Return the output of every module in a run of the model, by module name, in the order of finishing.

    If a module runs more than once, as DeBERTa's queries and keys do, its first output, for the tokens, is returned.
    """
    outputs: dict[str, Tensor] = {}

    def record(name: str, module: nn.Module, args: object, out: object) -> None:
        first = out if isinstance(out, Tensor) else out[0] if isinstance(out, tuple) else None
        if isinstance(first, Tensor):
            outputs.setdefault(name, first.detach().clone())

    with torch.no_grad(), ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(partial(record, name)))
        run()
    return outputs


def first_divergence(ours: Tensors, theirs: Tensors, truth: Tensors | None, rule: Rule) -> str | None:
    """Return the first module, in the order of running, whose output breaks the rule; inner before outer modules."""
    for name, mine in ours.items():
        if name in theirs and theirs[name].shape == mine.shape and (truth is None or name in truth):
            error, allowed, _ = rule(mine, theirs[name], truth[name] if truth else None, 0.0)
            if not error <= allowed:
                return name
    return None
