"""Scores of heads and neurons: the higher, the more a unit matters.

Shapes:  L layers · N units as built, heads or neurons
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from bertlite.config import check_known
from bertlite.models.structure import BertLike, check_model
from bertlite.pruning.criteria import CRITERIA, NORMALISERS, REDUCTIONS_OF, TARGETS, Criterion, criteria_for
from bertlite.pruning.importance.batches import Batch, Loss, eval_mode
from bertlite.pruning.importance.measurements import SCORES, ScoringTask
from bertlite.pruning.importance.structures import HEADS, NEURONS

TINY = 1e-20  # a layer of zeros must not be divided by 0


def describe_criteria(unit: str) -> str:
    """Return the criteria that score heads or neurons, one a line, as a list for a docstring."""
    criteria = criteria_for(unit).values()
    lines = (f'- "{x.name}": {x.description}{f" ({x.source})" if x.source else ""}.' for x in criteria)
    return "\n    ".join(lines)


def head_importance(
    model: BertLike,
    batches: Iterable[Batch] = (),
    *,
    criterion: str = "michel",
    reduction: str = "example",
    target: str = "loss",
    loss: Loss | None = None,
    teacher: BertLike | None = None,
    normaliser: str = "none",
    seed: int = 0,
) -> Tensor:
    """Score each head by one criterion of the literature: the higher, the more it matters.

    The criteria, where ξ = 1 is a gate that multiplies a head's context; padding does not count:

    {criteria}

    Args:
        model: a model of bertlite or bertlite.hf; its weights, gradients, mode and the random state are restored.
        batches: inputs and labels of the model; scored in eval mode.
        reduction: the mean is over "example"s, the same however they are batched; "token"s (Michel et al.'s code); or
            "batch"es, one gradient for each (run_bertology, TextPruner).  Michel et al.'s code divides the last layer
            by examples, which "layer_l2" makes equal.  For "batch", g is the Taylor criterion Σ W·∂L/∂W of the head's
            weights in the output projection.
        target: "loss"; or "kl", without labels: the divergence of the prediction from the dense model's.  KL has no
            gradient at the dense model, so its curvature, the Fisher information, is used.  L is -log p(y), where
            `seed` draws y from the teacher's prediction; mean g² is to second order twice the KL of closing the gate.
            Classes are drawn from the softmax, independent labels one by one.  A regression's number, or the mean
            token vector of a BertModel, is drawn from a normal distribution of variance 1 about it.
        loss: (output, batch) -> (B,) for target "loss"; by default the model's own loss of each example.
        teacher: for target "kl", the dense model; by default `model` itself.
        normaliser: see `normalise`.

    Returns:
        (L, N), float64 on the CPU.  A pruned head is nan, not 0, since "gone" and "unimportant" differ.

    Raises:
        ValueError: an unknown name, no batches, labels that are missing or do not fit the model, or a combination
            without a meaning; before anything is computed.
    """
    task = ScoringTask(model, HEADS, reduction, target, loss, teacher, seed)
    return score(task, criterion, batches, normaliser)


def neuron_importance(
    model: BertLike,
    batches: Iterable[Batch] = (),
    *,
    criterion: str = "michel",
    reduction: str = "example",
    target: str = "loss",
    loss: Loss | None = None,
    teacher: BertLike | None = None,
    normaliser: str = "none",
    seed: int = 0,
) -> Tensor:
    """Score each intermediate (feed-forward) neuron by one criterion: the higher, the more it matters.

    The criteria, where ξ = 1 is a gate that multiplies a neuron's activation:

    {criteria}

    Args:
        reduction: "example" or "batch".
        batches, criterion, target, loss, teacher, normaliser, seed: as for `head_importance`.

    Returns:
        (L, I), float64 on the CPU, nan where a neuron is pruned.
    """
    task = ScoringTask(model, NEURONS, reduction, target, loss, teacher, seed)
    return score(task, criterion, batches, normaliser)


for function, unit in ((head_importance, "head"), (neuron_importance, "neuron")):
    function.__doc__ = (function.__doc__ or "").replace("{criteria}", describe_criteria(unit))


def normalise(scores: Tensor, normaliser: str) -> Tensor:
    """Make scores comparable across layers; nan stays nan and is ignored.

    Args:
        normaliser: "none"; "layer_l2" and "layer_sum" divide each layer by its norm or its sum; "minmax" maps all
            scores to 0…1.

    Raises:
        ValueError: an unknown name.
    """
    check_known("normaliser", normaliser, NORMALISERS)
    if normaliser == "layer_l2":
        return scores / (scores.square().nansum(1, keepdim=True).sqrt() + TINY)
    if normaliser == "layer_sum":
        return scores / (scores.nansum(1, keepdim=True) + TINY)
    if normaliser == "minmax":
        there = scores[~scores.isnan()]
        return scores if not len(there) else (scores - there.min()) / (there.max() - there.min() + TINY)
    return scores


def score(task: ScoringTask, criterion: str, batches: Iterable[Batch], normaliser: str) -> Tensor:
    """Score all units of a model, (L, N), nan where one is pruned."""
    entry = check_task(task, criterion)
    present = task.structure.present(task.model)
    normalise(torch.ones(present.shape, dtype=torch.float32, device="cpu"), normaliser)  # raises before any work
    with eval_mode(*task.models):
        scores = SCORES[entry.measurement](task, entry, batches)
    return normalise(scores.double().masked_fill(~present, torch.nan), normaliser)


def check_task(task: ScoringTask, criterion: str) -> Criterion:
    """Return the criterion with a name, after checking names and their combination.

    Raises:
        ValueError: a name is unknown, or names do not go together.
        TypeError: a model is not one of bertlite's.
    """
    for model in task.models:
        check_model(model)

    # Some criteria need what only one kind of unit has, such as attention weights.
    unit = task.structure.unit
    criteria = criteria_for(unit)
    if criterion in CRITERIA and criterion not in criteria:
        raise ValueError(
            f"{criterion!r} does not score {unit}s: it is computed from {CRITERIA[criterion].measurement.name}, which"
            f" {unit}s do not have; {', '.join(criteria)} do"
        )

    check_known(f"{unit} criterion", criterion, criteria)
    check_known(f"{unit} reduction", task.reduction, REDUCTIONS_OF[unit])
    check_known("target", task.target, TARGETS)

    # Names that are known one by one may still exclude each other.
    found = criteria[criterion]
    if task.reduction not in found.reductions(unit):
        have = " or ".join(repr(name) for name in found.reductions(unit))
        raise ValueError(f"criterion {criterion!r} has no parts by {task.reduction}; use reduction {have}")
    if task.target == "loss" and task.teacher is not None:
        raise ValueError("a teacher was given, but target is 'loss'; use target='kl'")
    if task.target == "kl" and task.loss is not None:
        raise ValueError("a loss was given, but target is 'kl'; leave one of them out")
    return found
