"""Ablation: replace each head's context by zeros, by its mean, or by its context in another example.

    found = ablate(model, batches, "mean", reference=other_batches)
    found.increase, found.standard_error            # (layers, heads), of the loss
    with ablated(model, {0: [1, 5]}, mean_contexts(model, other_batches)):
        ...                                         # any use of the model

Zeros give later layers inputs that never occur; a mean removes only what differs between examples.

Shapes:  E examples · R rows of a batch · S positions · L layers · N heads as built · H head dim
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bertlite.causal.sites import SITES, edited, read_rows, read_values, run_edited
from bertlite.config import kept_heads, normalise_units
from bertlite.models.structure import BertLike
from bertlite.pruning.importance.batches import (
    Batch,
    Loss,
    check_model,
    eval_mode,
    input_shape,
    real_tokens,
    split_examples,
)
from bertlite.pruning.importance.measurements import ScoringTask
from bertlite.pruning.importance.scores import check_task
from bertlite.pruning.importance.structures import HEADS

HEAD = SITES["head"]
ABLATIONS = ("zero", "mean", "resample")


@dataclass(frozen=True)
class Ablation:
    """The increase of the loss of every example, in the order of the batches, with one head ablated.

    Args:
        increases: (E, L, N), float64, nan for pruned heads and for examples without a label.
        losses: (E,), of the model as it is.
    """

    increases: Tensor
    losses: Tensor

    @property
    def increase(self) -> Tensor:
        """The mean over examples, (L, N)."""
        return self.increases.nanmean(0)

    @property
    def standard_error(self) -> Tensor:
        """The standard error of the mean over examples, (L, N); nan for one example."""
        counted = self.increases[~self.losses.isnan()]
        return counted.std(0) / len(counted) ** 0.5


def replacement_contexts(
    model: BertLike, method: str, batches: list[Batch], reference: list[Batch], seed: int
) -> list[list[Tensor]]:
    """Return the contexts to put in place of each batch's: for each layer (R or 1, S or 1, n, H)."""
    if method == "resample":
        return resampled_contexts(model, batches, reference, seed)
    size = model.config.hidden_size // model.config.num_attention_heads
    zeros = torch.zeros(*HEADS.shape(model), size, device=model.device, dtype=torch.float32)
    return [kept_contexts(model, mean_of(model, reference) if method == "mean" else zeros)] * len(batches)


def replace_heads(
    model: BertLike, gone: Mapping[int, Sequence[int]], values: Sequence[Tensor], layer: int, x: Tensor
) -> Tensor | None:
    """Replace some heads' contexts, (R, S, n, H), by values."""
    kept = kept_heads(model.config, layer)
    indices = [kept.index(head) for head in gone.get(layer, ()) if head in kept]
    if not indices:
        return None
    new = x.clone()
    new[:, :, indices] = values[layer][:, :, indices].to(x).expand_as(x[:, :, indices])
    return new


def kept_contexts(model: BertLike, contexts: Tensor) -> list[Tensor]:
    """Return contexts, (L, N, H), of the heads that are not pruned: for each layer (1, 1, n, H)."""
    return [each[None, None, list(kept_heads(model.config, layer))] for layer, each in enumerate(contexts)]


def ablate(
    model: BertLike,
    batches: Iterable[Batch],
    method: str = "mean",
    *,
    reference: Iterable[Batch] | None = None,
    target: str = "loss",
    loss: Loss | None = None,
    teacher: BertLike | None = None,
    seed: int = 0,
) -> Ablation:
    """Ablate each head alone, and measure the increase of the loss: one forward for each head.

    Args:
        model: of bertlite or bertlite.hf; restored afterwards, run in eval mode.
        batches: inputs of the model, with labels if the target needs them.
        method: "zero"; "mean", of the reference; or "resample": the context of an example of the reference that has
            other tokens, drawn for each example, token by token.  If lengths differ, positions are scaled, so that
            first and last tokens correspond.
        reference: inputs; by default the batches themselves.
        target, loss, teacher: what is measured; as for `head_importance`.
        seed: of the examples drawn.

    Raises:
        ValueError: an unknown name, no batches, labels that are missing or do not fit, or a reference that has no
            other example.
    """
    if method not in ABLATIONS:
        raise ValueError(f"there is no ablation {method!r}; have: {', '.join(ABLATIONS)}")
    task = ScoringTask(model, HEADS, "example", seed=seed, target=target, loss=loss, teacher=teacher)
    check_task(task, "leave_one_out")
    read = read_rows(model, batches, task.needs_labels)
    known = read if reference is None else read_rows(model, reference)
    with eval_mode(*task.models), torch.no_grad():
        values = replacement_contexts(model, method, read, known, seed)
        objectives = [task.objective(batch) for batch in read]

        def losses(gone: Mapping[int, Sequence[int]]) -> Tensor:  # (E,), float64 on the CPU
            edits = [partial(replace_heads, model, gone, contexts) for contexts in values]
            each = zip(read, objectives, edits, strict=True)
            found = [objective(run_edited(model, batch, HEAD, edit)) for batch, objective, edit in each]
            return torch.cat([loss.double().cpu() for loss in found])

        whole = losses({})
        increases = torch.full((len(whole), *HEADS.shape(model)), torch.nan, dtype=torch.float64, device="cpu")
        for layer, head in HEADS.present(model).nonzero().tolist():
            increases[:, layer, head] = losses({layer: [head]}) - whole
    return Ablation(increases, whole)


# Means


def mean_contexts(model: BertLike, reference: Iterable[Batch]) -> Tensor:
    """Return the mean context of every head over the tokens of a reference; padding does not count.

    Returns:
        (L, N, H), float64, nan for pruned heads.
    """
    read = read_rows(model, reference)
    with eval_mode(model), torch.no_grad():
        return mean_of(model, read).cpu()


def mean_of(model: BertLike, reference: list[Batch]) -> Tensor:
    """Return the mean contexts of checked batches."""
    size = model.config.hidden_size // model.config.num_attention_heads
    means = torch.full((*HEADS.shape(model), size), torch.nan, dtype=torch.float64, device=model.device)
    for layer in range(len(means)):
        means[layer, list(kept_heads(model.config, layer))] = 0
    count = sum(int(real_tokens(batch).sum()) for batch in reference)
    for batch in reference:
        padding = ~real_tokens(batch)[:, :, None, None]
        for layer, x in enumerate(read_values(model, batch, HEAD)[1]):
            kept = list(kept_heads(model.config, layer))
            means[layer, kept] += x.double().masked_fill(padding, 0).sum((0, 1))
    return means / count


@contextmanager
def ablated(model: BertLike, heads: Mapping[int, Iterable[int]], contexts: Tensor | None = None) -> Iterator[None]:
    """Replace heads' contexts in every forward of a model within the block.

    Args:
        heads: {layer: heads}, by their numbers in the unpruned model; those that are pruned stay so.
        contexts: (L, N, H) from `mean_contexts`, for every token; None is zeros.

    Raises:
        ValueError: an unknown layer or head, or contexts that do not fit or lack a head.
        RuntimeError: at the end, if the model did not run, or ran without hooks.
    """
    check_model(model)
    config = model.config
    layers, built = HEADS.shape(model)
    chosen = normalise_units(heads, layers, built, "head")
    wanted = (layers, built, config.hidden_size // built)
    given = torch.zeros(wanted, dtype=torch.float32, device="cpu") if contexts is None else contexts
    if tuple(given.shape) != wanted:
        raise ValueError(f"contexts are {tuple(given.shape)}; expected {wanted}")
    for layer, gone in chosen.items():
        for head in {*gone} & {*kept_heads(config, layer)}:
            if given[layer, head].isnan().any():
                raise ValueError(f"the contexts lack head {head} of layer {layer}: compute them with this model")
    with edited(model, HEAD, partial(replace_heads, model, chosen, kept_contexts(model, given))):
        yield


# Other examples


def resampled_contexts(model: BertLike, batches: list[Batch], reference: list[Batch], seed: int) -> list[list[Tensor]]:
    """Return for each batch the contexts of other examples, (R, S, n, H) of each layer.

    An example of the reference is drawn for each example, never one with the same tokens, such as itself.

    Raises:
        ValueError: there is no other example.
    """
    generator = torch.Generator().manual_seed(seed)
    donors = [single for batch in reference for single in split_examples(batch)]
    known = [tokens_of(single) for single in donors]
    found = []
    for batch in batches:
        values = []
        for single in split_examples(batch):
            tokens = tokens_of(single)
            others = [j for j, other in enumerate(known) if other != tokens]
            if not others:
                raise ValueError("there is no other example to resample from; give a reference with other texts")
            drawn = int(torch.randint(len(others), (), generator=generator, device="cpu"))
            values.append(placed_contexts(model, single, donors[others[drawn]]))
        found.append([torch.cat(rows) for rows in zip(*values, strict=True)])
    return found


def placed_contexts(model: BertLike, single: Batch, donor: Batch) -> list[Tensor]:
    """Return the contexts of one example at the tokens of another, (R, S, n, H) of each layer."""
    real, theirs = real_tokens(single), real_tokens(donor)
    if len(theirs) != len(real):
        raise ValueError(f"an example of the reference has {len(theirs)} choices, and others {len(real)}")
    given = read_values(model, donor, HEAD)[1]
    found = [x.new_zeros(*real.shape, *x.shape[2:]) for x in given]
    for row in range(len(real)):
        targets, sources = real[row].nonzero()[:, 0], theirs[row].nonzero()[:, 0]
        if not len(sources):
            raise ValueError("an example of the reference has no token")
        sources = sources[scaled_positions(len(targets), len(sources)).to(sources.device)]
        for placed, x in zip(found, given, strict=True):
            placed[row, targets] = x[row, sources]
    return found


def tokens_of(single: Batch) -> list[Any]:
    """Return the tokens of each text of an example, ids or embeddings, without padding."""
    given = single["inputs_embeds"] if single.get("input_ids") is None else single["input_ids"]
    rows = given.flatten(0, len(input_shape(single)) - 2)  # (R, S), or of embeddings (R, S, D)
    return [x[mask].tolist() for x, mask in zip(rows, real_tokens(single), strict=True)]


def scaled_positions(count: int, others: int) -> Tensor:
    """Return the positions among `others` tokens of `count` tokens, evenly spaced from the first to the last."""
    steps = max(count - 1, 1)
    return (torch.arange(count, device="cpu") * (others - 1) + steps // 2) // steps
