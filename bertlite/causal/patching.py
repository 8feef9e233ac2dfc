"""Patching: replace values of one run by those of another, and measure the effect on the output.

    found = patch(model, clean, corrupted)          # heads, one at a time
    found.effect                                    # (layers, heads): 0 changes nothing, 1 restores the clean run

Sources: activation patching, Vig et al. 2020 (arXiv:2004.12265) and, on its choices, Zhang & Nanda 2023
(arXiv:2309.16042).

Shapes:  B examples · R rows, B or B·choices · S positions · P patched positions, each alone · L levels · U units
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bertlite.causal.metrics import Metric, Pair, check_metric, metric_of
from bertlite.causal.sites import Site, read_rows, read_values, run_edited, site_of
from bertlite.importance.batches import Batch, count_examples, eval_mode, input_shape, real_tokens
from bertlite.pruning import BertLike

DIRECTIONS = ("denoise", "noise")
Batches = Batch | Iterable[Batch]


@dataclass(frozen=True)
class Patching:
    """The metric of every patched run.  Pruned heads are nan.

    Args:
        values: (B, L, N) for heads, (B, L) for other sites; with `positions` one more axis, P.
        clean, corrupted: (B,), of the runs as they are.
        direction: "denoise", clean values in the corrupted run, or "noise", the reverse.
        metric: its name.
    """

    values: Tensor
    clean: Tensor
    corrupted: Tensor
    direction: str
    metric: str

    @property
    def base(self) -> Tensor:
        """The metric of the run that is patched, (B,)."""
        return self.corrupted if self.direction == "denoise" else self.clean

    @property
    def effect(self) -> Tensor:
        """The change of the mean metric as a share of the difference between the runs: 0 is none, 1 all.

        Raises:
            ValueError: the two runs have the same mean metric.
        """
        other = self.clean if self.direction == "denoise" else self.corrupted
        gap = other.mean() - self.base.mean()
        if gap == 0:
            raise ValueError("clean and corrupted runs have the same mean metric, so no effect can be computed")
        return (self.values.mean(0) - self.base.mean()) / gap


def patch(
    model: BertLike,
    clean: Batches,
    corrupted: Batches,
    site: str = "head",
    *,
    direction: str = "denoise",
    positions: Sequence[int] | None = None,
    metric: str | Metric | None = None,
) -> Patching:
    """Patch each head of each layer, one at a time, and measure the effect exactly.

    This takes one forward for each head, or for each head and position with `positions`.

    Args:
        model: of bertlite or bertlite.hf, with any task head or none, pruned or not; restored, run in eval mode.
        clean, corrupted: a batch each, or equally many batches each, whose examples correspond in order.  Patched
            positions must be tokens in both, or padding in both.
        site: "head", "attention", "feed_forward" or "residual"; see `activations_at`.
        direction: "denoise" puts clean values into the corrupted run and finds what is sufficient; "noise" puts
            corrupted values into the clean run and finds what is necessary.
        positions: patch each of these alone, such as range(length); None patches all together.
        metric: "logit_difference", of the clean label minus the corrupted one, by predictions unless both batches have
            labels; "kl", of the clean prediction from this one, in nats; "cosine", of mean token vectors; or
            (output, batch) -> (B,).  The default is "logit_difference" for models that classify examples, "cosine" for
            models without a head, else "kl".

    Raises:
        ValueError: an unknown name or position, inputs that do not fit together, or a metric that does not fit the
            model.
    """
    place = site_of(site)
    if direction not in DIRECTIONS:
        raise ValueError(f"there is no direction {direction!r}; have: {', '.join(DIRECTIONS)}")
    check_metric(metric)
    pairs = read_pairs(model, clean, corrupted, positions)
    found, ends, name = [], [], ""
    with eval_mode(model), torch.no_grad():
        for clean_batch, corrupted_batch in pairs:
            clean_out, clean_values = read_values(model, clean_batch, place)
            corrupted_out, corrupted_values = read_values(model, corrupted_batch, place)
            name, measure = metric_of(metric, Pair(model, clean_batch, corrupted_batch, clean_out, corrupted_out))
            both = measure(clean_out, clean_batch), measure(corrupted_out, corrupted_batch)
            ends.append(torch.stack(both).double().cpu())
            denoise = direction == "denoise"
            batch, values = (corrupted_batch, clean_values) if denoise else (clean_batch, corrupted_values)
            found.append(patched(model, batch, place, values, positions, measure))
    clean_value, corrupted_value = torch.cat(ends, 1)
    whole = torch.cat(found) if place.of_heads else torch.cat(found).squeeze(-2)
    return Patching(whole[..., 0] if positions is None else whole, clean_value, corrupted_value, direction, name)


def read_pairs(
    model: BertLike, clean: Batches, corrupted: Batches, positions: Sequence[int] | None
) -> list[tuple[Batch, Batch]]:
    """Check batches and move them to the model's device; raise ValueError if they do not fit together."""
    lists = [[batches] if isinstance(batches, Mapping) else list(batches) for batches in (clean, corrupted)]
    if len(lists[0]) != len(lists[1]):
        raise ValueError(
            f"there are {len(lists[0])} clean batches and {len(lists[1])} corrupted ones; give equally many"
        )
    ours, theirs = (read_rows(model, batches) for batches in lists)
    pairs = list(zip(ours, theirs, strict=True))
    for pair in pairs:
        check_aligned(*pair, positions)
    return pairs


def patched(
    model: BertLike,
    batch: Batch,
    site: Site,
    values: Sequence[Tensor],
    positions: Sequence[int] | None,
    measure: Metric,
) -> Tensor:
    """Return the metric of a batch with one unit replaced at a time, (B, L, U, P); nan for pruned units.

    Args:
        values: of each level in the other run.
        positions: each replaced alone; None is all together, P = 1.
    """
    columns = [slice(None)] if positions is None else [slice(position, position + 1) for position in positions]
    present = site.present(model)
    found = torch.full((count_examples(batch), *present.shape, len(columns)), torch.nan, dtype=torch.float64)
    for level, unit in present.nonzero().tolist():
        index = site.kept(model.config, level).index(unit)
        for i, where in enumerate(columns):
            edit = partial(put, level, index, where, values[level])
            found[:, level, unit, i] = measure(run_edited(model, batch, site, edit), batch).double().cpu()
    return found


def put(wanted: int, index: int, where: slice, values: Tensor, level: int, x: Tensor) -> Tensor | None:
    """Replace one unit of a level's values, (R, S, u, W), at some positions."""
    if level != wanted:
        return None
    new = x.clone()
    new[:, where, index] = values[:, where, index].to(x.dtype)
    return new


def check_aligned(clean: Batch, corrupted: Batch, positions: Sequence[int] | None) -> None:
    """Raise ValueError unless patched positions are tokens in both batches or padding in both."""
    if input_shape(clean) != input_shape(corrupted):
        raise ValueError(
            f"clean inputs are {input_shape(clean)}, corrupted ones {input_shape(corrupted)}; tokenize both together"
        )
    ours, theirs = real_tokens(clean), real_tokens(corrupted)
    length = ours.shape[1]
    for position in positions or ():
        if not 0 <= position < length:
            raise ValueError(f"there is no position {position}: the inputs have {length}, 0 to {length - 1}")
    columns = list(range(length)) if positions is None else list(positions)
    differing = (ours != theirs)[:, columns].any(1).nonzero()[:, 0].tolist()
    if differing:
        row = differing[0]
        raise ValueError(
            f"row {row} has {int(ours[row].sum())} tokens clean and {int(theirs[row].sum())} corrupted, so some"
            " positions are padding in one of them; pair texts with equally many tokens, or name positions that both"
            " have, such as positions=[0] for [CLS]"
        )
