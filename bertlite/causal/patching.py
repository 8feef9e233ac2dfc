"""Patching: replace values of one run by those of another, and measure the effect on the output.

    found = patch(model, clean, corrupted)          # heads, one at a time
    found.effect                                    # (layers, heads): 0 changes nothing, 1 restores the clean run
    attribution_patch(model, clean, corrupted)      # first-order estimates of the changes, from one gradient

Sources: activation patching, Vig et al. 2020 (arXiv:2004.12265) and, on its choices, Zhang & Nanda 2023
(arXiv:2309.16042); attribution patching, Syed et al. 2023 (arXiv:2310.10348).

Shapes:  B examples · R rows, B or B·choices · S positions · P patched positions, each alone · L levels · U units ·
         C classes, or choices
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bertlite.causal.sites import Site, read_rows, read_values, run_edited, site_of
from bertlite.models.structure import BertLike
from bertlite.pruning.importance.batches import Batch, eval_mode, input_shape, per_example, real_tokens
from bertlite.pruning.importance.predictions import divergence, predictions

DIRECTIONS = ("denoise", "noise")
Batches = Batch | Iterable[Batch]
Metric = Callable[[Any, Batch], Tensor]  # (model output, batch) -> (B,)


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
    place, pairs = site_of(site), read_pairs(model, clean, corrupted, direction, positions, metric)
    found, ends, name = [], [], ""
    with eval_mode(model), torch.no_grad():
        for each in run_pairs(model, pairs, place, direction, metric):
            name = each.name
            ends.append(each.ends)
            found.append(measure_patches(model, each, place, positions))
    clean_value, corrupted_value = torch.cat(ends, 1)
    return Patching(join_batches(found, place, positions), clean_value, corrupted_value, direction, name)


def attribution_patch(
    model: BertLike,
    clean: Batches,
    corrupted: Batches,
    site: str = "head",
    *,
    direction: str = "denoise",
    positions: Sequence[int] | None = None,
    metric: str | Metric | None = None,
) -> Tensor:
    """Estimate by how much each patch of `patch` changes the metric, to first order, from one backward pass.

    The estimate is Σ (other value - value) · ∂metric/∂value over positions and features, at the run that is patched.
    How far it is from the truth, only `patch` shows.

    Args:
        all: as for `patch`.

    Returns:
        Estimates of values - base, in the shape of `Patching.values`.

    Raises:
        ValueError: as `patch`; or the metric has no gradient, as "kl" and "cosine" at the clean run.
    """
    place, pairs = site_of(site), read_pairs(model, clean, corrupted, direction, positions, metric)
    found = []
    with eval_mode(model):
        for each in run_pairs(model, pairs, place, direction, metric):
            if direction == "noise" and each.name in FLAT_AT_CLEAN and not callable(metric):
                raise ValueError(
                    f"metric {each.name!r} has no gradient at the clean run: take direction='denoise', or another"
                )
            found.append(estimate_effects(model, each, place, positions))
    return join_batches(found, place, positions)


@dataclass(frozen=True)
class PairRun:
    """The run of a pair that is patched, and the values of each level in the other run.

    Args:
        ends: (2, B), the metric of the clean and of the corrupted run.
        name: of the metric.
    """

    batch: Batch
    values: Sequence[Tensor]
    ends: Tensor
    name: str
    measure: Metric


def run_pairs(
    model: BertLike,
    pairs: Iterable[tuple[Batch, Batch]],
    site: Site,
    direction: str,
    metric: str | Metric | None,
) -> Iterator[PairRun]:
    """Run both batches of each pair, and choose its metric."""
    for clean_batch, corrupted_batch in pairs:
        with torch.no_grad():
            clean_out, clean_values = read_values(model, clean_batch, site)
            corrupted_out, corrupted_values = read_values(model, corrupted_batch, site)
            name, measure = metric_of(metric, Pair(model, clean_batch, corrupted_batch, clean_out, corrupted_out))
            ends = torch.stack([measure(clean_out, clean_batch), measure(corrupted_out, corrupted_batch)])
        denoise = direction == "denoise"
        batch, values = (corrupted_batch, clean_values) if denoise else (clean_batch, corrupted_values)
        yield PairRun(batch, values, ends.double().cpu(), name, measure)


def read_pairs(
    model: BertLike,
    clean: Batches,
    corrupted: Batches,
    direction: str,
    positions: Sequence[int] | None,
    metric: str | Metric | None,
) -> list[tuple[Batch, Batch]]:
    """Check the arguments of `patch`, and move batches to the model's device."""
    if direction not in DIRECTIONS:
        raise ValueError(f"there is no direction {direction!r}; have: {', '.join(DIRECTIONS)}")
    check_metric(metric)
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


def measure_patches(model: BertLike, pair: PairRun, site: Site, positions: Sequence[int] | None) -> Tensor:
    """Return the metric with one unit replaced at a time, (B, L, U, P); nan for pruned units."""
    columns = [slice(None)] if positions is None else [slice(position, position + 1) for position in positions]
    present = site.present(model)
    found = torch.full(
        (pair.ends.shape[1], *present.shape, len(columns)), torch.nan, dtype=torch.float64, device="cpu"
    )
    for level, unit in present.nonzero().tolist():
        index = site.kept(model.config, level).index(unit)
        for i, where in enumerate(columns):
            edit = partial(replace_unit, level, index, where, pair.values[level])
            out = run_edited(model, pair.batch, site, edit)
            found[:, level, unit, i] = pair.measure(out, pair.batch).double().cpu()
    return found


def estimate_effects(model: BertLike, pair: PairRun, site: Site, positions: Sequence[int] | None) -> Tensor:
    """Return difference times gradient of every unit, (B, L, U, P); nan for pruned units."""
    before: dict[int, Tensor] = {}
    probes: dict[int, Tensor] = {}

    def probe(level: int, x: Tensor) -> Tensor:
        before[level], probes[level] = x.detach(), torch.zeros_like(x, requires_grad=True)
        return x + probes[level]

    with torch.enable_grad():
        metrics = pair.measure(run_edited(model, pair.batch, site, probe), pair.batch)
        if not metrics.requires_grad:
            raise ValueError(f"the metric does not depend on any {site.name}, or has no gradient")
        inputs = [*probes.values()]
        grads = torch.autograd.grad(metrics.sum(), inputs, allow_unused=True, materialize_grads=True)
    columns = slice(None) if positions is None else list(positions)
    shape = len(metrics), *site.present(model).shape, 1 if positions is None else len(positions)
    found = torch.full(shape, torch.nan, dtype=torch.float64, device="cpu")
    for level, grad in zip(probes, grads, strict=True):
        each = ((pair.values[level] - before[level]).double() * grad.double()).sum(-1)[:, columns]  # (R, S or P, u)
        each = each.reshape(len(metrics), -1, *each.shape[1:]).sum(1)  # the rows of an example add up
        each = each.sum(1, keepdim=True) if positions is None else each
        found[:, level, list(site.kept(model.config, level))] = each.transpose(1, 2).cpu()
    return found


def join_batches(found: Sequence[Tensor], site: Site, positions: Sequence[int] | None) -> Tensor:
    """Join what batches gave, (B, L, U, P), without the axes that were not requested."""
    whole = torch.cat([*found]) if site.of_heads else torch.cat([*found]).squeeze(-2)
    return whole[..., 0] if positions is None else whole


def replace_unit(wanted: int, index: int, where: slice, values: Tensor, level: int, x: Tensor) -> Tensor | None:
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


# Metrics: one number for each example, from a model's output


@dataclass(frozen=True)
class Pair:
    """A clean and a corrupted batch, with the model's outputs for them."""

    model: BertLike
    clean: Batch
    corrupted: Batch
    clean_out: Any
    corrupted_out: Any


def logit_difference(pair: Pair) -> Metric:
    """Return a metric: the logit of the clean label minus the logit of the corrupted label.

    Labels are those of the batches if both have some, or else the model's predictions.

    Raises:
        ValueError: the model does not choose one class for each example, or an example has the same label twice.
    """
    if not chooses_class(pair.model, pair.clean_out):
        raise ValueError(
            f"{type(pair.model).__name__} does not give each example the logits of classes; use metric='kl', or a"
            " function of (output, batch)"
        )
    given = [batch.get("labels") for batch in (pair.clean, pair.corrupted)]
    if any(labels is None for labels in given):
        given = [out.logits.argmax(-1) for out in (pair.clean_out, pair.corrupted_out)]
    right, wrong = (torch.as_tensor(labels) for labels in given)
    same = (right == wrong).nonzero()[:, 0].tolist()
    if same:
        raise ValueError(
            f"example {same[0]} has label {int(right[same[0]])} clean and corrupted, so no difference of logits;"
            " choose other pairs, give labels, or use metric='kl'"
        )

    def difference(out: Any, batch: Batch) -> Tensor:
        picked = (out.logits.gather(-1, label[:, None])[:, 0] for label in (right, wrong))
        return next(picked) - next(picked)

    return difference


def kl(pair: Pair) -> Metric:
    """Return a metric: the KL divergence of the prediction from the clean one, in nats."""
    with torch.no_grad():
        dense = predictions(pair.model, pair.clean_out, pair.clean)
    return lambda out, batch: divergence(dense, predictions(pair.model, out, batch))


def cosine(pair: Pair) -> Metric:
    """Return a metric: the cosine similarity of the mean token vector to the clean one.

    Raises:
        ValueError: the model has a task head.
    """
    if "last_hidden_state" not in pair.clean_out:
        raise ValueError(f"{type(pair.model).__name__} gives no token vectors; use metric='kl'")

    def vectors(out: Any, batch: Batch) -> Tensor:
        return predictions(pair.model, out, batch)[0].values[:, 0]

    wanted = vectors(pair.clean_out, pair.clean).detach()
    return lambda out, batch: F.cosine_similarity(vectors(out, batch), wanted, dim=-1)


METRICS: dict[str, Callable[[Pair], Metric]] = {
    "logit_difference": logit_difference,
    "kl": kl,
    "cosine": cosine,
}
FLAT_AT_CLEAN = ("kl", "cosine")  # at the clean run they are at their optimum, where their gradient is 0


def chooses_class(model: BertLike, out: Any) -> bool:
    """Return whether a model gives each example one distribution over classes."""
    logits = out.get("logits")
    return isinstance(logits, Tensor) and logits.dim() == 2 and getattr(model, "label_kind", None) == "class"


def default_metric(pair: Pair) -> str:
    """Return the name of the metric that fits the model."""
    if "last_hidden_state" in pair.clean_out:
        return "cosine"
    return "logit_difference" if chooses_class(pair.model, pair.clean_out) else "kl"


def check_metric(metric: str | Metric | None) -> None:
    """Raise ValueError for an unknown metric."""
    if not (metric is None or callable(metric) or metric in METRICS):
        raise ValueError(f"there is no metric {metric!r}; have: {', '.join(METRICS)}, or give a function")


def metric_of(metric: str | Metric | None, pair: Pair) -> tuple[str, Metric]:
    """Return the name and the function of a metric for a pair; it raises ValueError for numbers that are not (B,)."""
    if callable(metric):
        name, measure = getattr(metric, "__name__", "given"), metric
    else:
        name = default_metric(pair) if metric is None else metric
        measure = METRICS[name](pair)
    return name, lambda out, batch: per_example("metric", measure(out, batch), batch)
