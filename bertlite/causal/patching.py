"""Patching: replace values of one run by those of another, and measure the effect on the output.

    found = patch(model, clean, corrupted)          # heads, one at a time
    found.effect                                    # (layers, heads): 0 changes nothing, 1 restores the clean run
    quick = attribution_patch(model, clean, corrupted)  # first-order estimates, the largest verified

Sources: activation patching, Vig et al. 2020 (arXiv:2004.12265) and, on its choices, Zhang & Nanda 2023
(arXiv:2309.16042); attribution patching, Syed et al. 2023 (arXiv:2310.10348).

Shapes:  B examples · R rows, B or B·choices · S positions · P patched positions, each alone · L levels · U units
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bertlite.causal.metrics import FLAT_AT_CLEAN, Metric, Pair, check_metric, metric_of
from bertlite.causal.sites import read_rows, read_values, run_edited, site_of
from bertlite.importance.batches import Batch, count_examples, eval_mode, input_shape, real_tokens
from bertlite.pruning import BertLike

DIRECTIONS = ("denoise", "noise")
Batches = Batch | Iterable[Batch]
Spot = Sequence[int]  # level, unit, column of `positions`


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


@dataclass(frozen=True)
class Attribution:
    """First-order estimates of the effect of patching, with measured effects of some.  Pruned heads are nan.

    Args:
        estimates: (B, L, N), (B, L) or, with `positions`, one axis more: gradient times difference, the estimated
            change of the metric.
        exact: without B: the measured mean change of the metric; nan where it was not measured.
        direction, metric: as for `Patching`.
    """

    estimates: Tensor
    exact: Tensor
    direction: str
    metric: str

    @property
    def estimate(self) -> Tensor:
        """The estimated change of the mean metric."""
        return self.estimates.mean(0)

    @property
    def error(self) -> float:
        """The mean error of the verified estimates, relative to the mean measured change."""
        known = ~self.exact.isnan()
        gaps = (self.estimate[known] - self.exact[known]).abs().sum()
        return float(gaps / self.exact[known].abs().sum())


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
    exchange = Exchange(model, clean, corrupted, site, direction, positions, metric)
    found, ends, name = [], [], ""
    with eval_mode(model), torch.no_grad():
        for runs in exchange.runs():
            name = runs.metric
            ends.append(torch.stack(runs.ends()).double().cpu())
            found.append(runs.patched(exchange.spots()))
    clean_value, corrupted_value = torch.cat(ends, 1)
    return Patching(exchange.tidy(torch.cat(found)), clean_value, corrupted_value, direction, name)


def attribution_patch(
    model: BertLike,
    clean: Batches,
    corrupted: Batches,
    site: str = "head",
    *,
    direction: str = "denoise",
    positions: Sequence[int] | None = None,
    metric: str | Metric | None = None,
    verify: int = 10,
) -> Attribution:
    """Estimate the results of `patch` from one gradient, and verify the largest estimates by patching.

    The estimate is Σ (other value - value) · ∂metric/∂value over positions and features, at the run that is patched.

    Args:
        verify: how many of the largest absolute estimates to measure, with one forward each.
        the others: as for `patch`.

    Raises:
        ValueError: as `patch`; or a metric that has no gradient at the clean run, with direction "noise".
    """
    if verify < 0:
        raise ValueError(f"verify is {verify}; it is a number of units, 0 or more")
    exchange = Exchange(model, clean, corrupted, site, direction, positions, metric)
    estimates, name = [], ""
    with eval_mode(model):
        for runs in exchange.runs():
            name = runs.metric
            if direction == "noise" and name in FLAT_AT_CLEAN and not callable(metric):
                raise ValueError(
                    f"metric {name!r} has no gradient at the clean run; use direction='denoise', or another metric"
                )
            estimates.append(runs.first_order())
        whole = torch.cat(estimates)
        means = whole.mean(0)
        count = min(verify, int((~means.isnan()).sum()))
        largest = means.abs().nan_to_num(nan=-1).flatten().topk(count).indices
        spots = torch.stack(torch.unravel_index(largest, means.shape), 1).tolist()
        exact = verified(exchange, spots) if spots else torch.full(means.shape, torch.nan, dtype=torch.float64)
    return Attribution(exchange.tidy(whole), exchange.tidy(exact), direction, name)


@torch.no_grad()
def verified(exchange: "Exchange", spots: Sequence[Spot]) -> Tensor:
    """Measure the mean change of the metric, (L, U, P), by patching some spots; nan elsewhere."""
    changes = []
    for runs in exchange.runs():
        before = runs.measure(runs.out, runs.batch).double().cpu()
        changes.append(runs.patched(spots) - before[:, None, None, None])
    return torch.cat(changes).mean(0)


# Pairs


class Exchange:
    """The plan of an exchange of values between runs; its arguments are those of `patch`, checked before any work.

    Raises:
        ValueError: an unknown name or position, or inputs that do not fit together.
    """

    def __init__(
        self,
        model: BertLike,
        clean: Batches,
        corrupted: Batches,
        site: str,
        direction: str,
        positions: Sequence[int] | None,
        metric: str | Metric | None,
    ) -> None:
        self.model, self.site = model, site_of(site)
        self.direction, self.positions, self.metric = direction, positions, metric
        if direction not in DIRECTIONS:
            raise ValueError(f"there is no direction {direction!r}; have: {', '.join(DIRECTIONS)}")
        check_metric(metric)
        lists = [[batches] if isinstance(batches, Mapping) else list(batches) for batches in (clean, corrupted)]
        if len(lists[0]) != len(lists[1]):
            raise ValueError(
                f"there are {len(lists[0])} clean batches and {len(lists[1])} corrupted ones; give equally many"
            )
        ours, theirs = (read_rows(model, batches) for batches in lists)
        self.pairs = list(zip(ours, theirs, strict=True))
        for one, other in self.pairs:
            check_aligned(one, other, positions)

    def runs(self) -> Iterator["PatchedRun"]:
        """Run both batches of each pair, and choose its metric."""
        for clean, corrupted in self.pairs:
            with torch.no_grad():
                clean_out, clean_values = read_values(self.model, clean, self.site)
                corrupted_out, corrupted_values = read_values(self.model, corrupted, self.site)
            pair = Pair(self.model, clean, corrupted, clean_out, corrupted_out)
            denoise = self.direction == "denoise"
            batch, out = (corrupted, corrupted_out) if denoise else (clean, clean_out)
            values = clean_values if denoise else corrupted_values
            yield PatchedRun(self, pair, batch, out, values, *metric_of(self.metric, pair))

    @property
    def shape(self) -> tuple[int, ...]:
        """(L, U, P), with P = 1 for all positions together."""
        return *self.site.present(self.model).shape, 1 if self.positions is None else len(self.positions)

    def spots(self) -> list[Spot]:
        """Return every level, unit that is not pruned, and column."""
        units = self.site.present(self.model).nonzero().tolist()
        return [(level, unit, column) for level, unit in units for column in range(self.shape[-1])]

    def tidy(self, scores: Tensor) -> Tensor:
        """Return scores, (…, L, U, P), without axes that were not requested."""
        scores = scores if self.site.of_heads else scores.squeeze(-2)
        return scores[..., 0] if self.positions is None else scores


@dataclass(frozen=True)
class PatchedRun:
    """The run of a pair that is patched.

    Args:
        batch, out: of this run, unpatched.
        values: of each level in the other run.
        metric: its name.
    """

    exchange: Exchange
    pair: Pair
    batch: Batch
    out: Any
    values: list[Tensor]
    metric: str
    measure: Metric

    def ends(self) -> tuple[Tensor, Tensor]:
        """Return the metric of the unpatched clean and corrupted runs, (B,) each."""
        pair = self.pair
        return self.measure(pair.clean_out, pair.clean), self.measure(pair.corrupted_out, pair.corrupted)

    def patched(self, spots: Sequence[Spot]) -> Tensor:
        """Return the metric of the run patched at each of some spots, (B, L, U, P); nan elsewhere."""
        model, site, positions = self.pair.model, self.exchange.site, self.exchange.positions
        found = torch.full((count_examples(self.batch), *self.exchange.shape), torch.nan, dtype=torch.float64)
        for level, unit, column in spots:
            index = site.kept(model.config, level).index(unit)
            where = slice(None) if positions is None else slice(positions[column], positions[column] + 1)
            edit = partial(put, level, index, where, self.values[level])
            found[:, level, unit, column] = (
                self.measure(run_edited(model, self.batch, site, edit), self.batch).double().cpu()
            )
        return found

    def first_order(self) -> Tensor:
        """Return difference times gradient of every unit, (B, L, U, P), nan for pruned ones."""
        model, site, positions = self.pair.model, self.exchange.site, self.exchange.positions
        own: dict[int, Tensor] = {}
        probes: dict[int, Tensor] = {}

        def probe(level: int, x: Tensor) -> Tensor:
            own[level], probes[level] = x.detach(), torch.zeros_like(x, requires_grad=True)
            return x + probes[level]

        with torch.enable_grad():
            metrics = self.measure(run_edited(model, self.batch, site, probe), self.batch)
            if not metrics.requires_grad:
                raise ValueError(f"the metric does not depend on any {site.name}, or has no gradient")
            asked = [*probes.values()]
            grads = torch.autograd.grad(metrics.sum(), asked, allow_unused=True, materialize_grads=True)
        columns = slice(None) if positions is None else list(positions)
        found = torch.full((len(metrics), *self.exchange.shape), torch.nan, dtype=torch.float64)
        for level, grad in zip(probes, grads, strict=True):
            each = ((self.values[level] - own[level]).double() * grad.double()).sum(-1)[:, columns]  # (R, S or P, u)
            each = each.reshape(len(metrics), -1, *each.shape[1:]).sum(1)  # the rows of an example add up
            each = each.sum(1, keepdim=True) if positions is None else each
            found[:, level, list(site.kept(model.config, level))] = each.transpose(1, 2).cpu()
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
