"""The quantities that criteria are computed from, measured on calibration data.

Every unit's output is multiplied by a gate ξ = 1, one for each example.  One backward pass gives the gradients ∂L/∂ξ
of every example.  Or gates are learned: drawn from the hard concrete distribution of Louizos et al. 2018.

Shapes:  L layers · N units as built · B examples · S positions · R rows, B or B·choices · K items of a mean;
         n units of one layer that are not pruned
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from bertlite.models.structure import BertLike, layers_of, scatter_heads
from bertlite.pruning.criteria import (
    ATTENTIONS,
    GATE_GRADIENTS,
    LEARNED_GATES,
    LOSS_INCREASES,
    NOISE,
    WEIGHTS,
    Criterion,
    Measurement,
)
from bertlite.pruning.importance.batches import (
    Batch,
    Loss,
    count_examples,
    example_losses,
    per_example,
    read_batches,
    real_tokens,
)
from bertlite.pruning.importance.predictions import divergence, pair_up, predictions, sum_terms
from bertlite.pruning.importance.structures import Structure, recorded_layers, run, started_at

Objective = Callable[[Any], Tensor]  # model output -> (B,)
TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1  # a gate is a sigmoid, stretched from 0…1 to LOW…HIGH and cut back to 0…1
PENALTY = 2.0  # nats if no gate is 0; for fewer in proportion
STEPS, RATE, START = 100, 0.1, 2.0  # Adam's steps and learning rate, and log α: gates begin open


@dataclass(frozen=True)
class ScoringTask:
    """The arguments of `head_importance`, without the criterion and the data."""

    model: BertLike
    structure: Structure
    reduction: str = "example"
    target: str = "loss"
    loss: Loss | None = None
    teacher: BertLike | None = None
    seed: int = 0

    @property
    def models(self) -> list[BertLike]:
        return [self.model] if self.teacher is None else [self.model, self.teacher]

    def labelled(self, batches: Iterable[Batch]) -> list[Batch]:
        """Check batches and move them to the model's device, with labels if the target needs them."""
        return read_batches(self.model, batches, labelled=self.target == "loss" and self.loss is None)

    def objective(self, batch: Batch, generator: torch.Generator | None = None) -> Objective:
        """Return the function of the model's output whose changes are measured, for one batch.

        For target "kl" it is the divergence from the teacher's prediction.  Given a generator, it is the negative
        log-likelihood of labels drawn from that prediction or, without a teacher, from the output itself.
        """
        if self.target == "loss":
            loss = self.loss or partial(example_losses, self.model)
            return lambda out: per_example("loss", loss(out, batch), batch)

        # Without a teacher, labels are drawn from the output that is being differentiated.
        if generator is not None and self.teacher is None:
            return lambda out: sum_terms(p.nll(p.draw(generator)) for p in predictions(self.model, out, batch))

        # The prediction to compare with is the teacher's, or the unchanged model's.
        teacher = self.model if self.teacher is None else self.teacher
        with torch.no_grad():
            dense = predictions(teacher, run(teacher, batch), batch)
        if generator is None:
            return lambda out: divergence(dense, predictions(self.model, out, batch))

        drawn = [p.draw(generator) for p in dense]
        return lambda out: sum_terms(
            p.nll(y) for (_, p), y in zip(pair_up(dense, predictions(self.model, out, batch)), drawn, strict=True)
        )


def mean(values: Iterable[Tensor]) -> Tensor:
    """Average the (K, L, N) of every batch to (L, N)."""
    total, count = torch.zeros((), dtype=torch.float32, device="cpu"), 0
    for each in values:
        total, count = total + each.sum(0), count + len(each)
    if not count:
        raise ValueError("no example has a label that counts: every loss is nan")
    return total / count


# Measured for each example, token or batch


def gate_gradients(task: ScoringTask, batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Yield (K, L, N) of every batch: ∂L/∂ξ by example, by token, or of the batch's mean loss.

    An example without any label does not count.
    """
    model, structure = task.model, task.structure
    layers, built = structure.shape(model)
    generator = torch.Generator().manual_seed(task.seed)
    dtype = torch.promote_types(model.dtype, torch.float32)
    for batch in task.labelled(batches):
        real = real_tokens(batch)

        # One gate for each example, or for each token, and unit; its gradient is what the unit is worth.
        shape = (layers, *real.shape) if task.reduction == "token" else (layers, count_examples(batch))
        gate = torch.ones(*shape[:2], built, *shape[2:], dtype=dtype, device=model.device, requires_grad=True)

        objective = task.objective(batch, generator)
        losses = objective(structure.run_gated(model, batch, gate))
        if not losses.requires_grad:
            raise ValueError(f"the loss does not depend on any {structure.unit}: it has no gradient")

        # Losses are added up over examples, whose gates are apart, so one backward pass gives them all.
        counted = ~losses.detach().isnan()
        (grad,) = torch.autograd.grad(losses[counted].sum(), gate, allow_unused=True, materialize_grads=True)
        grad = grad.double()

        if task.reduction == "token":
            rows = counted.repeat_interleave(real.shape[0] // len(counted))
            grad = grad.permute(1, 3, 0, 2)[real & rows[:, None]]
        else:
            grad = grad.transpose(0, 1)[counted]
        if task.reduction == "batch" and len(grad):
            grad = grad.mean(0, keepdim=True)
        yield grad.cpu()


@torch.no_grad()
def loss_increases(task: ScoringTask, batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Yield (K, L, N) of every batch: the increase of the target when one unit's gate is 0.

    The layers below the unit's layer are computed once.
    """
    model, structure = task.model, task.structure
    present = structure.present(model)
    for batch in task.labelled(batches):
        objective, examples = task.objective(batch), count_examples(batch)
        gate = torch.ones(len(present), examples, present.shape[1], device=model.device, dtype=torch.float32)

        # The whole model once, with the states that each layer begins from.
        with recorded_layers(model) as known:
            whole = objective(structure.run_gated(model, batch, gate))
        increase = torch.full((examples, *present.shape), torch.nan, dtype=torch.float64, device="cpu")

        # A unit is off for one forward, which starts at its layer.
        for layer in range(len(present)):
            with started_at(model, layer, known[layer - 1] if layer else None):
                for unit in present[layer].nonzero()[:, 0].tolist():
                    gate[layer, :, unit] = 0
                    without = objective(structure.run_gated(model, batch, gate))
                    increase[:, layer, unit] = (without - whole).double().cpu()
                    gate[layer, :, unit] = 1

        increase = increase[~whole.isnan().cpu()]
        yield increase.mean(0, keepdim=True) if task.reduction == "batch" and len(increase) else increase


# Learned


def learned_gates(task: ScoringTask, batches: Iterable[Batch]) -> Tensor:
    """Return the chance that each unit's gate is not 0, (L, N), after training the gates with fixed weights.

    Reduction "example" draws the gates anew for each example, and "batch" once for each batch, as the papers do.
    """
    model, structure, read = task.model, task.structure, task.labelled(batches)
    generator = torch.Generator().manual_seed(task.seed)
    shift = TEMPERATURE * math.log(-LOW / HIGH)  # P(gate is not 0) = sigmoid(log α - shift)
    log_alpha = torch.full(structure.shape(model), START, dtype=torch.float64, device="cpu", requires_grad=True)
    optimizer = torch.optim.Adam([log_alpha], lr=RATE)
    dtype = torch.promote_types(model.dtype, torch.float32)

    for batch in islice(cycle(read), STEPS):
        # A gate is a function of log α and of noise, so it has a gradient in log α.
        rows = 1 if task.reduction == "batch" else count_examples(batch)
        noise = torch.rand(rows, *log_alpha.shape, generator=generator, dtype=torch.float64, device="cpu").logit(1e-12)
        gate = (((noise + log_alpha) / TEMPERATURE).sigmoid() * (HIGH - LOW) + LOW).clamp(0, 1)
        gates = gate.transpose(0, 1).expand(-1, count_examples(batch), -1).to(model.device, dtype)

        losses = task.objective(batch)(structure.run_gated(model, batch, gates))
        if not (counted := ~losses.detach().isnan()).any():
            continue
        loss = losses[counted].mean().double().cpu() + PENALTY * (log_alpha - shift).sigmoid().mean()
        (log_alpha.grad,) = torch.autograd.grad(loss, log_alpha)
        optimizer.step()

    if not optimizer.state:
        raise ValueError("no example has a label that counts: every loss is nan")
    return (log_alpha - shift).sigmoid().detach()


# Measured at every token


@torch.no_grad()
def attentions(task: ScoringTask, criterion: Criterion, batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Yield (K, L, N) of every batch: means of the criterion's statistic over tokens that are not padding."""
    for batch in read_batches(task.model, batches):
        found = run(task.model, batch, output_attentions=True).attentions
        weights = torch.stack(scatter_heads(found, task.model.config, fill=torch.nan)).double().cpu()

        # Weights are (L, R, N, S, S).  Heads that were pruned are nan, and padding has no rows.
        real, statistic = real_tokens(batch).cpu(), criterion.statistic(weights).permute(1, 3, 0, 2)  # (R, S, L, N)
        if task.reduction == "token":
            yield statistic[real]
        elif task.reduction == "batch":
            yield statistic[real].mean(0, keepdim=True)
        else:  # several rows of one example become one
            real = real.reshape(count_examples(batch), -1)
            statistic = statistic.reshape(*real.shape, *statistic.shape[2:])
            real, statistic = real[real.any(1)], statistic[real.any(1)]  # an example of padding has no weights
            yield (statistic * real[..., None, None]).sum(1) / real.sum(1)[:, None, None]


# Measured on the model, without data


def weight_statistic(task: ScoringTask, criterion: Criterion) -> Tensor:
    """Return the criterion's statistic of each unit's weights in the output projection, (L, N)."""
    structure = task.structure
    found = torch.full(structure.shape(task.model), torch.nan, dtype=torch.float64, device="cpu")
    for layer, block in enumerate(layers_of(task.model)):
        kept, weight = list(structure.kept(task.model.config, layer)), structure.dense(block).weight.detach().double()
        if kept:
            found[layer, kept] = criterion.statistic(weight.unflatten(1, (len(kept), -1))).cpu()
    return found


def noise(task: ScoringTask) -> Tensor:
    generator = torch.Generator().manual_seed(task.seed)
    return torch.rand(task.structure.shape(task.model), generator=generator, dtype=torch.float64, device="cpu")


Score = Callable[[ScoringTask, Criterion, Iterable[Batch]], Tensor]
SCORES: dict[Measurement, Score] = {  # {measurement of a criterion: the function that returns (L, N)}
    GATE_GRADIENTS: lambda task, criterion, batches: mean(map(criterion.statistic, gate_gradients(task, batches))),
    LOSS_INCREASES: lambda task, criterion, batches: mean(map(criterion.statistic, loss_increases(task, batches))),
    LEARNED_GATES: lambda task, criterion, batches: criterion.statistic(learned_gates(task, batches)),
    ATTENTIONS: lambda task, criterion, batches: mean(attentions(task, criterion, batches)),
    WEIGHTS: lambda task, criterion, batches: weight_statistic(task, criterion),
    NOISE: lambda task, criterion, batches: criterion.statistic(noise(task)),
}
