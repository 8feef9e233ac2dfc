"""Ablation: replace each head's context by zeros, by its mean, or by its context in another example.

    found = ablate(model, batches, "mean", reference=other_batches)
    found.increase, found.standard_error            # (layers, heads), of the loss
    with ablated(model, {0: [1, 5]}, mean_contexts(model, other_batches)):
        ...                                         # any use of the model

Zeros give later layers inputs that never occur; a mean removes only what differs between examples.

Shapes:  E examples · R rows of a batch · S positions · L layers · N heads as built · H head dim
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bertlite.causal.sites import SITES, edited, read_rows, read_values, run_edited
from bertlite.config import kept_heads, normalise_units
from bertlite.importance.batches import (
    Batch,
    Loss,
    check_model,
    eval_mode,
    input_shape,
    real_tokens,
    split_examples,
)
from bertlite.importance.measurements import Objective, ScoringTask
from bertlite.importance.scores import check_task
from bertlite.importance.structures import HEADS
from bertlite.pruning import BertLike

HEAD = SITES["head"]
ABLATIONS = ("zero", "mean", "resample")
Gone = Mapping[int, Sequence[int]]  # {layer: ablated heads}


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


@dataclass(frozen=True)
class AblatedBatch:
    """A batch with its objective, and the values that replace each layer's contexts."""

    batch: Batch
    objective: Objective
    values: list[Tensor]  # (R or 1, S or 1, n, H) of each layer, n its kept heads


class Ablator:
    """Runs a model with heads ablated.

    Args:
        others: target, loss, teacher and seed, as for `head_importance`.

    Raises:
        ValueError: names that are unknown or do not go together, or batches that do not fit the model.
    """

    def __init__(
        self,
        model: BertLike,
        batches: Iterable[Batch],
        method: str,
        reference: Iterable[Batch] | None,
        by_position: bool,
        **others: Any,
    ) -> None:
        if method not in ABLATIONS:
            raise ValueError(f"there is no ablation {method!r}; have: {', '.join(ABLATIONS)}")
        if by_position and method != "mean":
            raise ValueError(f"by_position needs method 'mean', not {method!r}")
        self.task = ScoringTask(model, HEADS, "example", **others)
        check_task(self.task, "leave_one_out")
        self.method, self.by_position = method, by_position
        self.batches = read_rows(model, batches, self.task.needs_labels)
        self.reference = self.batches if reference is None else read_rows(model, reference)

    def prepared(self, seed: int) -> list[AblatedBatch]:
        """Return the batches with the values that replace contexts."""
        model = self.task.model
        values: Callable[[int, Batch], list[Tensor]]
        if self.method == "zero":
            zero = torch.zeros((), device=model.device)
            none = [zero.expand(1, 1, len(kept_heads(model.config, i)), 1) for i in range(HEAD.levels(model))]
            values = lambda i, batch: none  # noqa: E731
        elif self.method == "mean":
            means = means_of(model, self.reference, self.by_position)
            values = lambda i, batch: positioned(means, batch) if self.by_position else means  # noqa: E731
        else:
            values = Donors.of(model, self.batches, self.reference, seed).values
        return [
            AblatedBatch(batch, self.task.objective(batch), values(i, batch)) for i, batch in enumerate(self.batches)
        ]

    def losses(self, prepared: Iterable[AblatedBatch], gone: Gone) -> Tensor:
        """Return the objective of every example with these heads ablated, (E,), float64 on the CPU."""
        found = []
        for each in prepared:
            edit = partial(replace_heads, self.task.model, gone, each.values)
            out = run_edited(self.task.model, each.batch, HEAD, edit)
            found.append(self.task.losses(each.objective, out, each.batch).double().cpu())
        return torch.cat(found)


def replace_heads(model: BertLike, gone: Gone, values: Sequence[Tensor], layer: int, x: Tensor) -> Tensor | None:
    """Replace some heads' contexts, (R, S, n, H), by values."""
    kept = kept_heads(model.config, layer)
    indices = [kept.index(head) for head in gone.get(layer, ()) if head in kept]
    if not indices:
        return None
    new = x.clone()
    new[:, :, indices] = values[layer][:, :, indices].to(x).expand_as(x[:, :, indices])
    return new


def ablate(
    model: BertLike,
    batches: Iterable[Batch],
    method: str = "mean",
    *,
    reference: Iterable[Batch] | None = None,
    by_position: bool = False,
    draws: int = 1,
    target: str = "loss",
    loss: Loss | None = None,
    teacher: BertLike | None = None,
    seed: int = 0,
) -> Ablation:
    """Ablate each head alone, and measure the increase of the loss: one forward for each head and draw.

    Args:
        model: of bertlite or bertlite.hf; restored afterwards, run in eval mode.
        batches: inputs of the model, with labels if the target needs them.
        method: "zero"; "mean", of the reference; or "resample": the context of an example of the reference that has
            other tokens, drawn for each example, token by token.  If lengths differ, positions are
            scaled, so that first and last tokens correspond.
        reference: inputs; by default the batches themselves.
        by_position: for "mean": one mean for each position, rather than one for all.
        draws: for "resample": the number of other examples whose increases are averaged.
        target, loss, teacher: what is measured; as for `head_importance`.
        seed: of the examples drawn.

    Raises:
        ValueError: an unknown name, no batches, labels that are missing or do not fit, or a reference that has no
            other example, or no token at a position.
    """
    if draws < 1 or (draws > 1 and method != "resample"):
        raise ValueError(f"draws is {draws}; it must be 1, or above 1 with method 'resample'")
    ablator = Ablator(
        model, batches, method, reference, by_position, target=target, loss=loss, teacher=teacher, seed=seed
    )
    with eval_mode(*ablator.task.models), torch.no_grad():
        found, whole = [], torch.empty(0)
        for draw in range(draws):
            prepared = ablator.prepared(seed + draw)
            whole = ablator.losses(prepared, {})
            increases = torch.full((len(whole), *HEADS.shape(model)), torch.nan, dtype=torch.float64)
            for layer, head in HEADS.present(model).nonzero().tolist():
                increases[:, layer, head] = ablator.losses(prepared, {layer: [head]}) - whole
            found.append(increases)
    return Ablation(torch.stack(found).mean(0), whole)


# Means


def mean_contexts(model: BertLike, reference: Iterable[Batch], *, by_position: bool = False) -> Tensor:
    """Return the mean context of every head over the tokens of a reference; padding does not count.

    Returns:
        (L, N, H), or with `by_position` (L, S, N, H), S of the longest batch; float64, nan for pruned heads and for
        positions without a token.
    """
    read = read_rows(model, reference)
    with eval_mode(model), torch.no_grad():
        found = means_of(model, read, by_position)
    size = model.config.hidden_size // model.config.num_attention_heads
    length = found[0].shape[1]
    full = torch.full((len(found), length, model.config.num_attention_heads, size), torch.nan, dtype=torch.float64)
    for layer, each in enumerate(found):
        if each.shape[2]:
            full[layer][:, list(kept_heads(model.config, layer))] = each[0].cpu()
    return full if by_position else full[:, 0]


def means_of(model: BertLike, reference: list[Batch], by_position: bool) -> list[Tensor]:
    """Return the means of each layer's heads that are not pruned, (1, S or 1, n, H), float64."""
    length = max(real_tokens(batch).shape[1] for batch in reference)
    sums: list[Tensor | None] = [None] * HEAD.levels(model)
    counts = torch.zeros(length, dtype=torch.float64, device=model.device)
    for batch in reference:
        real = real_tokens(batch)
        counts[: real.shape[1]] += real.sum(0)
        for layer, x in enumerate(read_values(model, batch, HEAD)[1]):
            total = x.double().masked_fill(~real[:, :, None, None], 0).sum(0)  # (S, n, H)
            padded = torch.cat([total, total.new_zeros(length - len(total), *total.shape[1:])])
            before = sums[layer]
            sums[layer] = padded if before is None else before + padded
    whole = [each for each in sums if each is not None]
    if by_position:
        return [each[None] / counts[:, None, None] for each in whole]
    return [each.sum(0)[None, None] / counts.sum() for each in whole]


def positioned(means: Sequence[Tensor], batch: Batch) -> list[Tensor]:
    """Return means by position for the positions of a batch.

    Raises:
        ValueError: the reference has no token at one of them.
    """
    real = real_tokens(batch)
    length, known = real.shape[1], means[0].shape[1]
    have = torch.zeros(max(length, known), dtype=torch.bool, device=real.device)
    for each in means:
        if each.numel():
            have[:known] |= ~each[0, :, 0, 0].isnan()
    lacking = (real.any(0) & ~have[:length]).nonzero()[:, 0].tolist()
    if lacking:
        raise ValueError(
            f"the reference has no token at position {lacking[0]}; give longer texts, or by_position=False"
        )
    short = max(0, length - known)
    return [torch.cat([x, x.new_zeros(1, short, *x.shape[2:])], 1)[:, :length].nan_to_num(nan=0.0) for x in means]


@contextmanager
def ablated(model: BertLike, heads: Mapping[int, Iterable[int]], contexts: Tensor | None = None) -> Iterator[None]:
    """Replace heads' contexts in every forward of a model within the block.

    Args:
        heads: {layer: heads}, by their numbers in the unpruned model; those that are pruned stay so.
        contexts: (L, N, H) from `mean_contexts`, for every token; (L, S, N, H), by position; None is zeros.

    Raises:
        ValueError: an unknown layer or head, or contexts that do not fit; in a forward, positions without contexts, or
            packed tokens, which have no positions.
        RuntimeError: at the end, if the model did not run, or ran without hooks.
    """
    check_model(model)
    config = model.config
    layers, built = config.num_hidden_layers, config.num_attention_heads
    chosen = normalise_units(heads, layers, built, "head")
    size = config.hidden_size // built
    given = torch.zeros(layers, built, size) if contexts is None else contexts
    if given.dim() not in (3, 4) or (*given.shape[:1], *given.shape[-2:]) != (layers, built, size):
        raise ValueError(
            f"contexts are {tuple(given.shape)}; expected ({layers}, {built}, {size}) or, by position, ({layers},"
            f" positions, {built}, {size})"
        )
    by_position = given.dim() == 4
    rows = given if by_position else given[:, None]  # (L, S or 1, N, H)
    values = [rows[layer][None][:, :, list(kept_heads(config, layer))] for layer in range(layers)]

    def replace(layer: int, x: Tensor) -> Tensor | None:
        wanted = values[layer][:, : x.shape[1]] if by_position else values[layer]
        indices = [i for i, head in enumerate(kept_heads(config, layer)) if head in chosen.get(layer, ())]
        short = by_position and x.shape[1] > values[layer].shape[1]
        if indices and (short or bool(wanted[:, :, indices].isnan().any())):
            raise ValueError(
                f"the contexts lack some of the {x.shape[1]} positions of layer {layer}; compute them from longer"
                " texts, or with by_position=False"
            )
        return replace_heads(model, chosen, [*values[:layer], wanted], layer, x)

    with edited(model, HEAD, replace, rows_only=by_position):
        yield


# Other examples


@dataclass(frozen=True)
class Donors:
    """The example of a reference whose contexts replace each example's."""

    model: BertLike
    singles: list[Batch]  # the reference, each example alone
    drawn: list[list[int]]  # of each batch's examples

    @classmethod
    def of(cls, model: BertLike, batches: list[Batch], reference: list[Batch], seed: int) -> "Donors":
        """Draw a donor for each example, never one with the same tokens, such as itself.

        Raises:
            ValueError: there is no other example.
        """
        generator = torch.Generator().manual_seed(seed)
        singles = [single for batch in reference for single in split_examples(batch)]
        known = [tokens_of(single) for single in singles]
        drawn: list[list[int]] = []
        for batch in batches:
            drawn.append([])
            for single in split_examples(batch):
                own = tokens_of(single)
                others = [j for j, tokens in enumerate(known) if tokens != own]
                if not others:
                    raise ValueError("there is no other example to resample from; give a reference with other texts")
                drawn[-1].append(others[int(torch.randint(len(others), (), generator=generator))])
        return cls(model, singles, drawn)

    def values(self, number: int, batch: Batch) -> list[Tensor]:
        """Return the contexts of one batch's donors, (R, S, n, H) of each layer."""
        real = real_tokens(batch)
        choices = input_shape(batch)[1] if len(input_shape(batch)) == 3 else 1
        found: list[Tensor] = []
        for example, j in enumerate(self.drawn[number]):
            donor = self.singles[j]
            theirs, given = real_tokens(donor), read_values(self.model, donor, HEAD)[1]
            if len(theirs) != choices:
                raise ValueError(f"example {j} of the reference has {len(theirs)} choices, and others {choices}")
            found = found or [x.new_zeros(*real.shape, *x.shape[2:]) for x in given]
            for choice in range(choices):
                row = example * choices + choice
                targets, sources = real[row].nonzero()[:, 0], theirs[choice].nonzero()[:, 0]
                if not len(sources):
                    raise ValueError(f"example {j} of the reference has no token")
                sources = sources[scaled_positions(len(targets), len(sources)).to(sources.device)]
                for mine, x in zip(found, given, strict=True):
                    mine[row, targets] = x[choice, sources]
        return found


def tokens_of(single: Batch) -> list[Any]:
    """Return the tokens of each text of an example, ids or embeddings, without padding."""
    given = single["inputs_embeds"] if single.get("input_ids") is None else single["input_ids"]
    rows = given.flatten(0, len(input_shape(single)) - 2)  # (R, S), or of embeddings (R, S, D)
    return [x[mask].tolist() for x, mask in zip(rows, real_tokens(single), strict=True)]


def scaled_positions(count: int, others: int) -> Tensor:
    """Return the positions among `others` tokens of `count` tokens, evenly spaced from the first to the last."""
    steps = max(count - 1, 1)
    return (torch.arange(count) * (others - 1) + steps // 2) // steps
