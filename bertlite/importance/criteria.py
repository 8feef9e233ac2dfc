"""How much each head or neuron matters: one number each, the larger the more it matters.

Every unit has a gate ξ = 1 that its output is multiplied by, for each example its own: one backward pass gives the
slopes g = ∂L/∂ξ of all examples apart, and a criterion is the mean of some function of these.

Shapes:  L layers · N units as built, heads or neurons · B examples · S positions · K things averaged over
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bertlite.importance.batches import Batch, Loss, as_found, check_model, examples, read_batches, real_tokens
from bertlite.importance.slopes import Question, mean, rises, slopes, weight_slopes
from bertlite.importance.structures import EVERY_TOKEN, HEADS, NEURONS, run
from bertlite.pruning import layers_of, scatter_heads

REDUCTIONS = ("example", "token", "batch")
TARGETS = ("loss", "kl")
NORMALISERS = ("none", "layer_l2", "layer_sum", "minmax", "cost")
TINY = 1e-20  # a layer of zeros stays one


def head_importance(
    model: Any,
    batches: Iterable[Batch] = (),
    criterion: str = "michel",
    *,
    reduction: str = "example",
    target: str = "loss",
    loss: Loss | None = None,
    teacher: Any = None,
    normaliser: str = "none",
    cost: Tensor | None = None,
    seed: int = 0,
    ignored_tokens: Iterable[int] = (),
) -> Tensor:
    """How much each head matters, by one criterion of the literature.

    With g = ∂L/∂ξ, the loss's slope in the gate ξ = 1 that multiplies a head's context:

    - "michel": mean |g| (Michel et al. 2019, arXiv:1905.10650); "signed": minus the mean g, the rise of the loss to
      first order, below 0 for a head that does harm; "fisher": mean g² (Kwon et al. 2022, arXiv:2204.09656).
    - "taylor": |Σ W_O · ∂L/∂W_O| over the head's block of the output projection; equal to |g| of a batch.
    - "leave_one_out": how much the target rises without the head, measured; one forward for every head.
    - "magnitude": ‖W_O‖ of the head's block.  "random": uniform in 0 to 1, by `seed`.  Neither looks at data.
    - "confidence": mean of the largest attention weight (Voita et al. 2019, arXiv:1905.09418); "entropy": minus
      the mean entropy of the attention, in nats; "context_norm": mean ‖context‖.  Padding does not count.

    Args:
        model: of bertlite or bertlite.hf; left as found, weights, gradients, training mode and random state included.
        batches: what the model takes, with its labels; scored in eval mode.
        reduction: what the mean is over: "example", the same however the examples are batched; "token" (Michel et
            al.'s code); or "batch", one slope for each batch (run_bertology, TextPruner).
        target: "loss", or "kl", label-free: how far the prediction moves from the dense model's.  At the dense model
            KL itself has no slope, so its curvature is taken, as the Fisher information does: L is -log p(y) with y
            drawn by `seed` from the teacher's prediction, and mean g² is twice the KL that the gate would cost, to
            second order.  Classes are drawn from their softmax, independent labels one by one; a regression's number,
            or the mean token vector of a BertModel, from a normal distribution of variance 1 about it.
        loss: (output, batch) -> (B,) for target "loss"; by default the model's own, of each example alone.
        teacher: for target "kl", the dense model; by default `model` itself.
        normaliser: see `normalise`; `cost` is for "cost".
        ignored_tokens: ids that "confidence" does not look at; Voita et al. leave out [SEP].

    Returns:
        (L, N), float64 on the CPU.  A pruned head is nan, not 0: "gone" and "unimportant" are different answers.

    Raises:
        ValueError: an unknown name, no batches, labels that are missing or do not fit the model, or a combination
            that means nothing; before anything is computed.
    """
    question = Question(model, HEADS, reduction, target, loss, teacher, seed, frozenset(ignored_tokens))
    return answer(question, criterion, CRITERIA, batches, normaliser, cost)


def neuron_importance(
    model: Any,
    batches: Iterable[Batch] = (),
    criterion: str = "michel",
    *,
    reduction: str = "example",
    target: str = "loss",
    loss: Loss | None = None,
    teacher: Any = None,
    normaliser: str = "none",
    cost: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """How much each intermediate (feed-forward) neuron matters: as `head_importance`, with a gate on its activation.

    Criteria: michel, signed, fisher, taylor, magnitude (‖its column of the output projection‖) and random; reductions:
    "example" and "batch".

    Returns:
        (L, I), float64 on the CPU, nan where a neuron is pruned.
    """
    question = Question(model, NEURONS, reduction, target, loss, teacher, seed)
    return answer(question, criterion, NEURON_CRITERIA, batches, normaliser, cost)


def head_gradients(
    model: Any,
    batches: Iterable[Batch],
    *,
    target: str = "loss",
    loss: Loss | None = None,
    teacher: Any = None,
    seed: int = 0,
) -> Tensor:
    """∂L/∂ξ of every example: (examples, L, N), float64, nan where a head is pruned; for `rearrange`."""
    question = Question(model, HEADS, "example", target, loss, teacher, seed)
    check(question, "michel", CRITERIA)
    with as_found(*question.models):
        found = torch.cat([*slopes(question, read_batches(model, batches, question.needs_labels))])
    return found.masked_fill(~HEADS.present(model), torch.nan)


def normalise(scores: Tensor, normaliser: str, cost: Tensor | None = None) -> Tensor:
    """Scores made comparable across layers; nan stays nan and counts for nothing.

    Args:
        normaliser: "none"; "layer_l2" and "layer_sum" divide each layer by its norm or its sum; "minmax" maps the
            whole to 0…1; "cost" divides by `cost`.
        cost: what each unit costs, in MACs or milliseconds; broadcasts to the scores.

    Raises:
        ValueError: an unknown name, or a cost that is missing, does not fit or is not above 0.
    """
    if normaliser not in NORMALISERS:
        raise ValueError(f"normaliser {normaliser!r} is unknown; have: {', '.join(NORMALISERS)}")
    if normaliser == "cost":
        return scores / checked_cost(cost, scores)
    if cost is not None:
        raise ValueError(f"a cost was given, but the normaliser is {normaliser!r}; use 'cost'")
    if normaliser == "layer_l2":
        return scores / (scores.square().nansum(1, keepdim=True).sqrt() + TINY)
    if normaliser == "layer_sum":
        return scores / (scores.nansum(1, keepdim=True) + TINY)
    if normaliser == "minmax":
        there = scores[~scores.isnan()]
        return scores if not len(there) else (scores - there.min()) / (there.max() - there.min() + TINY)
    return scores


def checked_cost(cost: Tensor | None, scores: Tensor) -> Tensor:
    if cost is None:
        raise ValueError("normaliser 'cost' divides by what each unit costs; pass cost=")
    try:
        full = torch.as_tensor(cost).broadcast_to(scores.shape)
    except RuntimeError:
        raise ValueError(f"cost has shape {tuple(cost.shape)}, which does not fit {tuple(scores.shape)}") from None
    if not bool((full > 0).all()):
        raise ValueError(f"cost holds {float(full[~(full > 0)][0])}; what a unit costs is above 0")
    return full


# The criteria: (question, batches) -> (L, N)

Criterion = Callable[[Question, Iterable[Batch]], Tensor]


def answer(
    question: Question,
    criterion: str,
    table: Mapping[str, Criterion],
    batches: Iterable[Batch],
    normaliser: str,
    cost: Tensor | None,
) -> Tensor:
    check(question, criterion, table)
    present = question.structure.present(question.model)
    normalise(torch.ones(present.shape), normaliser, cost)  # refuses before any work
    with as_found(*question.models):
        scores = table[criterion](question, batches)
    return normalise(scores.double().masked_fill(~present, torch.nan), normaliser, cost)


def check(question: Question, criterion: str, table: Mapping[str, Criterion]) -> None:
    """Refuse unknown names, and combinations that mean nothing."""
    for model in question.models:
        check_model(model)
    allowed = {
        "criterion": (criterion, table),
        "reduction": (question.reduction, question.structure.reductions),
        "target": (question.target, TARGETS),
    }
    for name, (value, known) in allowed.items():
        if value not in known:
            raise ValueError(f"{name} {value!r} is unknown for {question.structure.unit}s; have: {', '.join(known)}")
    if question.reduction == "token" and criterion in ("taylor", "leave_one_out"):
        raise ValueError(f"criterion {criterion!r} has no parts by token; use reduction 'example' or 'batch'")
    if question.target == "loss" and question.teacher is not None:
        raise ValueError("a teacher was given, but target is 'loss'; use target='kl'")
    if question.target == "kl" and question.loss is not None:
        raise ValueError("a loss was given, but target is 'kl'; leave one of them out")
    if criterion == "signed" and question.target == "kl" and question.teacher is None:
        raise ValueError(
            "at the dense model itself KL has no slope to take a sign of; pass the dense model as teacher="
            " for a pruned one, or use 'fisher', 'michel' or 'leave_one_out'"
        )


def by_slope(function: Callable[[Tensor], Tensor], question: Question, batches: Iterable[Batch]) -> Tensor:
    read = read_batches(question.model, batches, question.needs_labels)
    return mean(map(function, slopes(question, read)))


def taylor(question: Question, batches: Iterable[Batch]) -> Tensor:
    return mean(weight_slopes(question, read_batches(question.model, batches, question.needs_labels)))


def leave_one_out(question: Question, batches: Iterable[Batch]) -> Tensor:
    return mean(rises(question, read_batches(question.model, batches, question.needs_labels)))


def magnitude(question: Question, batches: Iterable[Batch]) -> Tensor:
    structure, config = question.structure, question.model.config
    norms = []
    for layer, block in enumerate(layers_of(question.model)):
        count, weight = len(structure.kept(config, layer)), structure.dense(block).weight.double()
        norms.append(weight.unflatten(1, (count, -1)).square().sum((0, 2)).sqrt() if count else weight.new_zeros(0))
    return structure.full(question.model, norms)


def random(question: Question, batches: Iterable[Batch]) -> Tensor:
    generator = torch.Generator().manual_seed(question.seed)
    return torch.rand(question.structure.shape(question.model), generator=generator, dtype=torch.float64)


def by_look(look: Callable[[Question, Batch], Tensor], question: Question, batches: Iterable[Batch]) -> Tensor:
    """The mean of what `look` sees, (rows, S, L, N), at tokens that are no padding."""

    @torch.no_grad()
    def units() -> Iterator[Tensor]:
        for batch in read_batches(question.model, batches):
            real, seen = real_tokens(batch).cpu(), look(question, batch)
            if question.reduction == "token":
                yield seen[real]
            elif question.reduction == "batch":
                yield seen[real].mean(0, keepdim=True)
            else:  # rows of one example, if they are several, are one
                real = real.reshape(examples(batch), -1)
                seen = seen.reshape(*real.shape, *seen.shape[2:])
                yield (seen * real[..., None, None]).sum(1) / real.sum(1)[:, None, None]

    return mean(units())


def attentions(question: Question, batch: Batch) -> Tensor:
    """(L, rows, N, S, S), nan for pruned heads."""
    found = run(question.model, batch, output_attentions=True).attentions
    return torch.stack(scatter_heads(found, question.model.config, fill=torch.nan)).double().cpu()


def confidence(question: Question, batch: Batch) -> Tensor:
    weights = attentions(question, batch)
    if question.ignored_tokens:
        ids = batch["input_ids"].reshape(-1, weights.shape[-1]).cpu()
        ignored = torch.isin(ids, torch.tensor(sorted(question.ignored_tokens)))
        weights = weights.masked_fill(ignored[None, :, None, None], 0)
    return weights.amax(-1).permute(1, 3, 0, 2)


def certainty(question: Question, batch: Batch) -> Tensor:
    weights = attentions(question, batch)
    return torch.xlogy(weights, weights).sum(-1).permute(1, 3, 0, 2)


def context_norm(question: Question, batch: Batch) -> Tensor:
    model, contexts = question.model, list[Tensor]()
    blocks = [block.attention.self for block in layers_of(model)]
    hooks = [block.register_forward_hook(lambda module, args, out: contexts.append(out[0])) for block in blocks]
    try:
        run(model, batch, **EVERY_TOKEN)
    finally:
        for hook in hooks:
            hook.remove()
    real = real_tokens(batch)
    contexts = [x if x.dim() == 3 else x.new_zeros(*real.shape, x.shape[-1]).index_put((real,), x) for x in contexts]
    sizes = [block.attention_head_size for block in blocks]
    norms = [
        x.unflatten(-1, (x.shape[-1] // size, size)).norm(dim=-1) for x, size in zip(contexts, sizes, strict=True)
    ]
    return HEADS.full(model, norms)


NEURON_CRITERIA: dict[str, Criterion] = {
    "michel": partial(by_slope, Tensor.abs),
    "signed": partial(by_slope, Tensor.neg),
    "fisher": partial(by_slope, Tensor.square),
    "taylor": taylor,
    "magnitude": magnitude,
    "random": random,
}
CRITERIA: dict[str, Criterion] = {
    **NEURON_CRITERIA,
    "leave_one_out": leave_one_out,
    "confidence": partial(by_look, confidence),
    "entropy": partial(by_look, certainty),
    "context_norm": partial(by_look, context_norm),
}
