"""Running a model over calibration data: what each example's loss does when a gate moves.

Shapes:  L layers · N units as built · B examples · S positions · K things to average over
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bertlite.importance.batches import Batch, Loss, example_losses, examples, real_tokens
from bertlite.importance.predictions import predictions
from bertlite.importance.structures import Structure, run
from bertlite.pruning import layers_of

Objective = Callable[[Any], Tensor]  # model output -> (B,)


@dataclass(frozen=True)
class Question:
    """What is asked of a model, but for the data."""

    model: Any
    structure: Structure
    reduction: str = "example"
    target: str = "loss"
    loss: Loss | None = None
    teacher: Any = None
    seed: int = 0
    ignored_tokens: frozenset[int] = frozenset()

    @property
    def models(self) -> list[Any]:
        return [self.model] if self.teacher is None else [self.model, self.teacher]

    @property
    def needs_labels(self) -> bool:
        return self.target == "loss" and self.loss is None

    def objective(self, batch: Batch, generator: torch.Generator | None = None) -> Objective:
        """What is asked about one batch; for "kl" the divergence itself or, given a generator, the surprise at labels
        drawn from the teacher's prediction."""
        if self.target == "loss":
            return lambda out: example_losses(self.model, out, batch) if self.loss is None else self.loss(out, batch)
        teacher = self.model if self.teacher is None else self.teacher
        with torch.no_grad():
            dense = predictions(teacher, run(teacher, batch), batch)
        if generator is None:
            said = predictions
            return lambda out: sum_of(
                p.divergence(q) for p, q in zip(dense, said(self.model, out, batch), strict=True)
            )
        drawn = [p.draw(generator) for p in dense]
        return lambda out: sum_of(
            p.surprise(labels) for p, labels in zip(predictions(self.model, out, batch), drawn, strict=True)
        )

    def losses(self, objective: Objective, out: Any, batch: Batch) -> Tensor:
        losses = objective(out)
        if not isinstance(losses, Tensor) or tuple(losses.shape) != (examples(batch),):
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(f"the loss returned {shape}; expected one number for each of {examples(batch)} examples")
        return losses


def sum_of(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum(0)


def mean(units: Iterable[Tensor]) -> Tensor:
    """(K, L, N) of every batch -> (L, N)."""
    total, count = torch.zeros(()), 0
    for each in units:
        total, count = total + each.sum(0), count + len(each)
    if not count:
        raise ValueError("no example has a label that counts: every loss is nan")
    return total / count


def slopes(question: Question, batches: Iterable[Batch]) -> Iterator[Tensor]:
    """(K, L, N) of every batch: ∂L/∂ξ by example, by token, or of the batch's mean loss.  An example without any label
    does not count."""
    model, structure = question.model, question.structure
    layers, built = structure.shape(model)
    generator = torch.Generator().manual_seed(question.seed)
    dtype = torch.promote_types(model.dtype, torch.float32)
    for batch in batches:
        real = real_tokens(batch)
        shape = (layers, *real.shape) if question.reduction == "token" else (layers, examples(batch))
        gate = torch.ones(*shape[:2], built, *shape[2:], dtype=dtype, device=model.device, requires_grad=True)
        objective = question.objective(batch, generator)
        losses = question.losses(objective, structure.gated(model, batch, gate), batch)
        if not losses.requires_grad:
            raise ValueError(f"the loss does not depend on any {structure.unit}: it has no gradient")
        counted = ~losses.detach().isnan()
        (slope,) = torch.autograd.grad(losses[counted].sum(), gate, allow_unused=True, materialize_grads=True)
        slope = slope.double()
        if question.reduction == "token":
            rows = counted.repeat_interleave(real.shape[0] // len(counted))
            slope = slope.permute(1, 3, 0, 2)[real & rows[:, None]]
        else:
            slope = slope.transpose(0, 1)[counted]
        if question.reduction == "batch" and len(slope):
            slope = slope.mean(0, keepdim=True)
        yield slope.cpu()


def weight_slopes(question: Question, batches: Iterable[Batch]) -> Iterator[Tensor]:
    """(1, L, N) of every batch, or of every example: |Σ W · ∂L/∂W| over the block of the output projection that a unit
    writes through."""
    model, structure = question.model, question.structure
    generator = torch.Generator().manual_seed(question.seed)
    weights = [structure.dense(layer).weight.requires_grad_() for layer in layers_of(model)]
    for whole in batches:
        for batch in rows_of(whole) if question.reduction == "example" else [whole]:
            out = run(model, batch)
            losses = question.losses(question.objective(batch, generator), out, batch)
            if losses.isnan().all():
                continue
            grads = torch.autograd.grad(losses.nanmean(), weights, allow_unused=True, materialize_grads=True)
            moved = [(weight * grad).double().sum(0) for weight, grad in zip(weights, grads, strict=True)]
            counts = [len(structure.kept(model.config, layer)) for layer in range(len(moved))]
            sums = [x.reshape(n, -1).sum(1).abs() if n else x for x, n in zip(moved, counts, strict=True)]
            yield structure.full(model, sums)[None]


def rows_of(batch: Batch) -> Iterator[Batch]:
    """A batch, one example at a time."""
    count = examples(batch)
    for i in range(count):
        yield {
            name: x[i : i + 1] if isinstance(x, Tensor) and x.dim() and len(x) == count else x
            for name, x in batch.items()
        }


@torch.no_grad()
def rises(question: Question, batches: Iterable[Batch]) -> Iterator[Tensor]:
    """(K, L, N) of every batch: how much the target rises when one unit is gated off, measured."""
    model, structure = question.model, question.structure
    present = structure.present(model)
    for batch in batches:
        objective = question.objective(batch)
        gate = torch.ones(len(present), examples(batch), present.shape[1], device=model.device)
        whole = question.losses(objective, structure.gated(model, batch, gate), batch)
        rise = torch.full((examples(batch), *present.shape), torch.nan, dtype=torch.float64)
        for layer, unit in present.nonzero().tolist():
            gate[layer, :, unit] = 0
            without = question.losses(objective, structure.gated(model, batch, gate), batch)
            rise[:, layer, unit] = (without - whole).double().cpu()
            gate[layer, :, unit] = 1
        rise = rise[~whole.isnan().cpu()]
        yield rise.mean(0, keepdim=True) if question.reduction == "batch" and len(rise) else rise
