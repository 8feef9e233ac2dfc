"""From scores to a choice: the heads or neurons to remove, so that a target is met.

A choice is {layer: [units]}, the units to remove, by their numbers in the unpruned model.  Scores are (layers, units),
nan where a unit is pruned already.  Units with the lowest scores are removed first; of equal scores, the first.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bertlite.config import BertConfig, kept_heads, kept_neurons, normalise_units, own_field, parse_index
from bertlite.models.structure import layers_of
from bertlite.stack.positions import DISTANCES

Choice = dict[int, list[int]]
Units = Mapping[int, Iterable[int]]  # {layer: units}
BySize = tuple[Mapping[int, float], Mapping[int, float]]  # a layer's {heads kept: value} and {neurons kept: value}
CELLS = 10_000  # a knapsack's budget has so many; costs are rounded up to whole cells, so it is never exceeded
ROUNDING = 1e-9  # the tolerance, as a share of a unit, a cell or a budget: three times 1.1 is 3.3


def rank_heads(
    scores: Tensor,
    count: int | None = None,
    *,
    share: float | None = None,
    uniform: bool = False,
    at_least: int = 0,
    protect: Units | None = None,
) -> Choice:
    """Choose the heads to remove: those with the lowest scores.

    Args:
        scores: (layers, heads), from `head_importance` of the model to prune.
        count: the number of heads to remove; or
        share: the share of the model's heads to remove, from 0 to 1; the number is rounded.
        uniform: take from the layers with most heads left, so that layers end with equal numbers; by default, take
            the lowest scores of all layers.
        at_least: heads that each layer keeps; a layer that has fewer before loses none.
        protect: {layer: heads} that are kept.

    Raises:
        TypeError: neither `count` nor `share` is given, or both.
        ValueError: the target cannot be met, the scores are not (layers, heads), or a layer or head is unknown.
    """
    return rank(scores, count, share, uniform, at_least, protect or {}, "head")


def rank_neurons(
    scores: Tensor,
    count: int | None = None,
    *,
    share: float | None = None,
    uniform: bool = False,
    at_least: int = 0,
    protect: Units | None = None,
) -> Choice:
    """Choose the intermediate neurons to remove; arguments as for `rank_heads`, with scores (layers, neurons)."""
    return rank(scores, count, share, uniform, at_least, protect or {}, "neuron")


def rank(
    scores: Tensor, count: int | None, share: float | None, uniform: bool, at_least: int, protect: Units, unit: str
) -> Choice:
    check_scores(scores, unit)
    if at_least < 0:
        raise ValueError(f"at_least is {at_least}; it must be a number of {unit}s, 0 or more")
    protected = normalise_units(protect, len(scores), scores.shape[1], unit)

    # The next unit of each layer to go, and how many the layer has left.
    free, table = ascending(scores, protected), scores.tolist()
    left = {layer: int((~row.isnan()).sum()) for layer, row in enumerate(scores)}
    total = count_units(count, share, sum(left.values()), unit)

    chosen: Choice = {}
    for step in range(total):
        layers = [layer for layer in left if free[layer] and left[layer] > at_least]
        if not layers:
            kept = f"at_least {at_least} and the protected ones"
            raise ValueError(f"{total} {unit}s cannot be removed: {kept} leave only {step} to remove")

        # Layers keep equally many: only those that still have the most may lose one.
        if uniform:
            fullest = max(left[layer] for layer in layers)
            layers = [layer for layer in layers if left[layer] == fullest]
        lowest = min(layers, key=lambda layer: table[layer][free[layer][0]])
        chosen.setdefault(lowest, []).append(free[lowest].pop(0))
        left[lowest] -= 1
    return {layer: sorted(chosen[layer]) for layer in sorted(chosen)}


def check_scores(scores: Tensor, unit: str) -> None:
    """Raise ValueError for scores of another shape, and for infinite ones; TypeError for no tensor."""
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores is of type {type(scores).__name__}; give a tensor, (layers, {unit}s)")
    if scores.dim() != 2:
        raise ValueError(f"the scores of {unit}s have shape {tuple(scores.shape)}; expected (layers, {unit}s)")
    if scores.isinf().any():
        raise ValueError(f"the scores of {unit}s hold infinity; to keep or remove some, use protect= or name them")


def count_units(count: int | None, share: float | None, total: int, unit: str) -> int:
    """Return the number of units that a count or a share stands for."""
    if (count is None) == (share is None):
        raise TypeError(f"give count=, a number of {unit}s, or share=, from 0 to 1; not {count!r} and {share!r}")
    if share is not None:
        if not 0 <= share <= 1:
            raise ValueError(f"share is {share!r}; it must be from 0 to 1 of the {total} {unit}s that are there")
        return round(float(share) * total)
    try:
        found = parse_index(count)
    except (TypeError, ValueError):
        found = -1
    if not 0 <= found <= total:
        way_out = f"a number of {unit}s, from 0 to the {total} that are there; share= takes a share"
        raise ValueError(f"count is {count!r}; it must be {way_out}")
    return found


def ascending(scores: Tensor, protected: Units) -> list[list[int]]:
    """Return each layer's units that are neither pruned nor protected, the lowest score first."""
    free = []
    for layer, row in enumerate(scores):
        present, kept = ~row.isnan(), set(protected.get(layer, ()))
        free.append([unit for unit in row.argsort(stable=True).tolist() if present[unit] and unit not in kept])
    return free


@dataclass(frozen=True)
class UnitCosts:
    """The costs of one head of each layer, and of one neuron."""

    heads: Sequence[int]
    neuron: int

    @classmethod
    def macs(cls, config: BertConfig, lengths: Sequence[int]) -> "UnitCosts":
        """Return multiply-accumulates over sequences of these lengths; `macs` says what counts."""
        D, H, tokens = config.hidden_size, config.hidden_size // config.num_attention_heads, sum(lengths)
        every = [attended_pairs(config, lengths, layer) for layer in range(config.num_hidden_layers)]
        neuron = (2 + own_field(config, "gated")) * tokens * D
        return cls([4 * tokens * D * H + 2 * pairs * H for pairs in every], neuron)

    @classmethod
    def bytes(cls, model: Any) -> "UnitCosts":
        """Return the bytes of the weights of a model's heads and neurons."""
        config, own, each = model.config, next(layers_of(model)).attention.self, model.dtype.itemsize
        D, H = config.hidden_size, config.hidden_size // config.num_attention_heads
        head = len(own.projections()) * (D + 1) * H + D * H
        if DISTANCES[config.position_embedding_type].per_head:
            head += own.distance_embedding.num_embeddings
        neuron = 2 * D + 1 + own_field(config, "gated") * (D + 1)
        return cls([each * head] * config.num_hidden_layers, each * neuron)

    def total(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Return the cost of layers that keep these numbers of heads and neurons."""
        return sum(n * head + neurons * self.neuron for (n, neurons), head in zip(sizes, self.heads, strict=True))

    def by_size(self, losses: Sequence[BySize]) -> list[BySize]:
        """Return the costs of the sizes of sublayers that have a loss."""
        pairs = zip(losses, self.heads, strict=True)
        return [({n: n * head for n in a}, {n: n * self.neuron for n in f}) for (a, f), head in pairs]


def attended_pairs(config: BertConfig, lengths: Sequence[int], layer: int) -> int:
    """Return how many pairs of a query and a key sequences of these lengths have in a layer."""
    if layer not in (own_field(config, "local_layers") or ()):
        return sum(length**2 for length in lengths)

    # With a window the first query attends to all keys but the last `outside`, the next to one more.
    outside = [max(length - 1 - own_field(config, "local_attention"), 0) for length in lengths]
    return sum(length**2 - n * (n + 1) for length, n in zip(lengths, outside, strict=True))


def kept_sizes(config: BertConfig) -> list[tuple[int, int]]:
    """Return the numbers of heads and neurons of each layer."""
    return [(len(kept_heads(config, i)), len(kept_neurons(config, i))) for i in range(config.num_hidden_layers)]


def macs(config: BertConfig, length: int) -> int:
    """Count the multiply-accumulates of the encoder's layers for one sequence of `length` tokens.

    A head costs 4·S·D·H + 2·S²·H and a neuron 2·S·D, or 3·S·D if it is gated.  In a layer with a window S² becomes the
    number of pairs within it.  Pruned parts, biases, norms, softmax, embeddings and task heads are not counted.
    """
    return UnitCosts.macs(config, [length]).total(kept_sizes(config))


def choose_sizes(losses: Sequence[BySize], costs: Sequence[BySize], budget: float) -> list[tuple[int, int]]:
    """Choose how many heads and neurons each layer keeps: the sizes with the lowest total loss within a budget.

    The losses of sublayers are assumed to add up.  The choice solves a knapsack, exactly except for rounding.

    Args:
        losses: for each layer {heads kept: loss} and {neurons kept: loss}.
        costs: for each layer {heads kept: cost of its attention} and {neurons kept: cost of its feed-forward
            network}, in MACs or seconds.  Sizes that have both a loss and a cost can be chosen; with 0 among them,
            whole sublayers may go.
        budget: the most that all sublayers together may cost.

    Returns:
        For each layer the heads and the neurons to keep.

    Raises:
        ValueError: the budget is below the cost of the cheapest choice, which the message names; or a sublayer has
            no size with both a loss and a cost.
    """
    options: list[list[int]] = []
    groups: list[list[tuple[float, float]]] = []
    for layer, pair in enumerate(losses):
        for unit, loss, cost in zip(("head", "neuron"), pair, costs[layer], strict=True):
            sizes = sorted(loss.keys() & cost.keys())
            if not sizes:
                raise ValueError(f"layer {layer}: no number of {unit}s has both a loss and a cost")
            options.append(sizes)
            groups.append([(cost[size], -loss[size]) for size in sizes])
    picked = knapsack(groups, budget)
    chosen = [sizes[i] for sizes, i in zip(options, picked, strict=True)]
    return list(zip(chosen[::2], chosen[1::2], strict=True))


def knapsack(options: Sequence[Sequence[tuple[float, float]]], budget: float) -> list[int]:
    """Return the index of one (cost, value) in each group, for the highest sum of values within the budget."""
    for cost, _ in (option for each in options for option in each):
        if not 0 <= cost < math.inf:
            raise ValueError(f"the costs hold {cost}; a cost is a number of 0 or more")

    # Every group must have an option, so the cheapest ones are bought first, and only the rest is shared out.
    cheapest = [min(cost for cost, _ in each) for each in options]
    slack = budget - sum(cheapest)
    if not slack >= -ROUNDING * budget:
        raise ValueError(f"the budget is {budget}; the cheapest choice takes {sum(cheapest):.6g}")

    # Money is counted in cells.  Group by group, the best value for each sum says which option to take.
    best = torch.zeros(CELLS + 1, dtype=torch.float64, device="cpu")  # the value for each number of cells to spend
    spendings, steps = [], []
    for each, least in zip(options, cheapest, strict=True):
        spendings.append([cells_of(cost - least, max(slack, 0.0)) for cost, _ in each])
        after = torch.full((len(each), CELLS + 1), -torch.inf, dtype=torch.float64, device="cpu")
        for i, (spent, (_, value)) in enumerate(zip(spendings[-1], each, strict=True)):
            after[i, spent:] = best[: CELLS + 1 - spent] + value
        best, taken = after.max(0)
        steps.append(taken)

    # Backwards, from all of the money, each group tells its option and passes on the rest.
    left, picked = CELLS, []
    for costs, taken in zip(reversed(spendings), reversed(steps), strict=True):
        i = int(taken[left])
        left -= costs[i]
        picked.append(i)
    return picked[::-1]


def cells_of(cost: float, slack: float) -> int:
    """Return the number of cells of the slack that a cost takes; CELLS + 1 if it does not fit."""
    if not cost:
        return 0
    return math.ceil(cost / slack * CELLS - ROUNDING) if cost <= slack else CELLS + 1
