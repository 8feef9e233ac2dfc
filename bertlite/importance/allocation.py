"""From scores to a choice: which heads or neurons go, so that a target is met.

A choice is {layer: [units]} of what to remove, numbered as in the unpruned model.  Scores are (layers, units), nan
where a unit is gone already; the higher, the longer it is kept, and of equals the later goes last.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from bertlite.config import ConfigLike, kept_heads, kept_neurons, normalise_units

Choice = dict[int, list[int]]
CELLS = 10_000  # a knapsack's budget is cut into so many; times are rounded up, so that it is never exceeded
ROUNDING = 1e-9  # of a unit, a cell or a budget: three times 1.1 is 3.3


def rank_heads(
    scores: Tensor,
    amount: int | float,
    *,
    uniform: bool = False,
    at_least: int = 0,
    at_most: int | None = None,
    protect: Mapping[int, Iterable[int]] | None = None,
) -> Choice:
    """The heads to remove: those with the lowest scores.

    Args:
        scores: (layers, heads); a model's own, as `head_importance` returns them.
        amount: of the heads still there, how many go: an int, or a float between 0 and 1 as a share, rounded.
        uniform: take from the layers with most heads left, so that layers end alike; else wherever scores are lowest.
        at_least, at_most: heads that each layer keeps; one that has fewer than `at_least` already loses none.
        protect: {layer: heads} that stay.

    Raises:
        ValueError: the target cannot be met, the scores are no (layers, heads) table, or a layer or head is unknown.
    """
    return rank(scores, amount, uniform, at_least, at_most, protect, "head")


def rank_neurons(
    scores: Tensor,
    amount: int | float,
    *,
    uniform: bool = False,
    at_least: int = 0,
    at_most: int | None = None,
    protect: Mapping[int, Iterable[int]] | None = None,
) -> Choice:
    """The intermediate neurons to remove; the arguments are those of `rank_heads`, scores (layers, neurons)."""
    return rank(scores, amount, uniform, at_least, at_most, protect, "neuron")


def rank(
    scores: Tensor,
    amount: int | float,
    uniform: bool,
    at_least: int,
    at_most: int | None,
    protect: Mapping[int, Iterable[int]] | None,
    unit: str,
) -> Choice:
    check_scores(scores, unit)
    if at_least < 0 or (at_most is not None and at_most < at_least):
        raise ValueError(f"at_least is {at_least} and at_most {at_most}; expected 0 <= at_least <= at_most")
    guarded = normalise_units(protect or {}, len(scores), scores.shape[1], unit)
    free, table = ascending(scores, guarded), scores.tolist()
    left = {layer: int((~row.isnan()).sum()) for layer, row in enumerate(scores)}
    total = count_of(amount, sum(left.values()), unit)
    chosen: Choice = {}

    def take(layer: int) -> None:
        chosen.setdefault(layer, []).append(free[layer].pop(0))
        left[layer] -= 1

    for layer in left:
        while at_most is not None and left[layer] > at_most:
            if not free[layer]:
                raise ValueError(f"layer {layer} cannot come down to {at_most} {unit}s: {left[layer]} are protected")
            take(layer)
    done = sum(map(len, chosen.values()))
    if done > total:
        raise ValueError(f"at_most {at_most} {unit}s a layer removes {done}, more than the {total} asked for")
    for _ in range(total - done):
        able = [layer for layer in left if free[layer] and left[layer] > at_least]
        if not able:
            gone = sum(map(len, chosen.values()))
            raise ValueError(
                f"{total} {unit}s cannot go: at_least {at_least} and the protected ones leave only {gone} to remove"
            )
        if uniform:
            fullest = max(left[layer] for layer in able)
            able = [layer for layer in able if left[layer] == fullest]
        take(min(able, key=lambda layer: table[layer][free[layer][0]]))
    return {layer: sorted(chosen[layer]) for layer in sorted(chosen)}


def check_scores(scores: Tensor, unit: str = "head", shape: tuple[int, int] | None = None) -> None:
    if scores.dim() != 2 or (shape is not None and tuple(scores.shape) != shape):
        wanted = f"(layers, {unit}s)" if shape is None else f"{shape}: they are another model's"
        raise ValueError(f"the scores of {unit}s have shape {tuple(scores.shape)}; expected {wanted}")
    if scores.isinf().any():
        raise ValueError(f"the scores of {unit}s hold infinity; to keep or remove some, use protect= or name them")


def check_gone(scores: Tensor, kept: Sequence[Sequence[int]], unit: str) -> None:
    for layer, there in enumerate(kept):
        if (~scores[layer].isnan()).nonzero()[:, 0].tolist() != list(there):
            raise ValueError(
                f"layer {layer} has scores for other {unit}s than the config has: they are another model's"
            )


def count_of(amount: int | float, there: int, unit: str) -> int:
    """How many units an amount is."""
    whole = isinstance(amount, int) and not isinstance(amount, bool)
    if isinstance(amount, bool) or not (0 <= amount <= (there if whole else 1)):
        raise ValueError(f"{amount!r} of {there} {unit}s cannot go: give an int up to {there}, or a share from 0 to 1")
    return int(amount) if whole else round(amount * there)


def ascending(scores: Tensor, guarded: Mapping[int, Iterable[int]]) -> list[list[int]]:
    """Each layer's units that are there and not guarded, the lowest score first."""
    free = []
    for layer, row in enumerate(scores):
        there, kept = ~row.isnan(), set(guarded.get(layer, ()))
        free.append([unit for unit in row.argsort(stable=True).tolist() if there[unit] and unit not in kept])
    return free


def head_macs(config: ConfigLike, length: int) -> int:
    D = config.hidden_size
    H = D // config.num_attention_heads
    return 4 * length * D * H + 2 * length**2 * H


def neuron_macs(config: ConfigLike, length: int) -> int:
    return 2 * length * config.hidden_size


def macs(config: ConfigLike, length: int) -> int:
    """Multiply-accumulates of the encoder's layers for one sequence of so many tokens, pruned parts left out.

    A head costs 4·S·D·H + 2·S²·H and a neuron 2·S·D; biases, norms, softmax, embeddings and task heads are not
    counted.
    """
    layers = range(config.num_hidden_layers)
    heads = sum(len(kept_heads(config, layer)) for layer in layers)
    neurons = sum(len(kept_neurons(config, layer)) for layer in layers)
    return heads * head_macs(config, length) + neurons * neuron_macs(config, length)


def rank_by_macs(
    config: ConfigLike,
    budget: float,
    length: int,
    head_scores: Tensor,
    neuron_scores: Tensor | None = None,
) -> tuple[Choice, Choice]:
    """The heads and neurons to remove so that the encoder stays within a budget of multiply-accumulates.

    Among all numbers of heads kept, each with as many neurons as the budget then allows, the one that keeps the
    highest sum of scores (Kwon et al. 2022, section 4.1): scores of both must be in one unit, such as "fisher" on the
    same data.  Without neuron scores all neurons stay.

    Args:
        config: of the model that was scored.
        budget: MACs as a share, above 0 and up to 1, of those of the model as built.
        length: tokens of the sequence that is counted.

    Raises:
        ValueError: the budget cannot be met.
    """
    layers, built = config.num_hidden_layers, config.num_attention_heads
    check_scores(head_scores, "head", (layers, built))
    check_gone(head_scores, [kept_heads(config, layer) for layer in range(layers)], "head")
    if neuron_scores is not None:
        check_scores(neuron_scores, "neuron", (layers, config.intermediate_size))
        check_gone(neuron_scores, [kept_neurons(config, layer) for layer in range(layers)], "neuron")
    if not 0 < budget <= 1:
        raise ValueError(f"the budget is {budget}; expected a share above 0 and up to 1 of the unpruned model's MACs")
    per_head, per_neuron = head_macs(config, length), neuron_macs(config, length)
    limit = budget * layers * (built * per_head + config.intermediate_size * per_neuron) + ROUNDING * per_neuron
    heads = ordered(head_scores)
    if neuron_scores is None:
        fixed = per_neuron * sum(len(kept_neurons(config, layer)) for layer in range(layers))
        room = math.floor((limit - fixed) / per_head)
        if room < 0:
            raise ValueError(
                f"a budget of {budget} cannot be met by removing heads alone:"
                f" the neurons take {fixed / limit * budget:.3f}"
            )
        return rank_heads(head_scores, max(0, len(heads) - room)), {}
    neurons = ordered(neuron_scores)
    kept_value = torch.cat([neurons.new_zeros(1), neurons.cumsum(0)])
    best, best_heads, best_neurons = -math.inf, 0, 0
    for count in range(min(len(heads), math.floor(limit / per_head)) + 1):
        beside = min(len(neurons), math.floor((limit - count * per_head) / per_neuron))
        value = float(heads[:count].sum() + kept_value[beside])
        if value > best:
            best, best_heads, best_neurons = value, count, beside
    return rank_heads(head_scores, len(heads) - best_heads), rank_neurons(neuron_scores, len(neurons) - best_neurons)


def ordered(scores: Tensor) -> Tensor:
    """All scores that there are, the highest first."""
    return scores[~scores.isnan()].double().sort(descending=True).values


def rank_by_latency(
    budget: float,
    head_scores: Tensor,
    head_times: Mapping[int, float],
    neuron_scores: Tensor | None = None,
    neuron_times: Mapping[int, float] | None = None,
) -> tuple[Choice, Choice]:
    """The heads and neurons to remove so that measured times add up to at most a budget: a knapsack.

    Exact but for what the budget leaves beyond the fastest choice being cut into 10,000 cells, to which times are
    rounded up.

    Args:
        budget: the time that all attention (and, with neurons, feed-forward) sublayers may take together.
        head_times: {heads kept: time of one attention sublayer}, in the unit of `budget`.  Only these numbers are
            chosen from; 0, the sublayer removed, has its own entry if it may be chosen.
        neuron_times: the same for neurons and feed-forward sublayers.

    Raises:
        ValueError: the budget is below the fastest choice, which is named; or a table does not fit the scores.
    """
    if (neuron_scores is None) != (neuron_times is None):
        raise ValueError("neuron_scores and neuron_times belong together; give both or neither")
    rows: list[tuple[str, int, Tensor, Mapping[int, float]]] = []
    check_scores(head_scores, "head")
    rows += [("head", layer, row, head_times) for layer, row in enumerate(head_scores)]
    if neuron_scores is not None and neuron_times is not None:
        check_scores(neuron_scores, "neuron", (len(head_scores), neuron_scores.shape[-1]))
        rows += [("neuron", layer, row, neuron_times) for layer, row in enumerate(neuron_scores)]
    options = []
    for unit, layer, row, times in rows:
        values = ordered(row)
        able = {n: time for n, time in times.items() if 0 <= n <= len(values)}
        if not able:
            raise ValueError(f"layer {layer} has {len(values)} {unit}s, and the times name no number that small")
        options.append([(n, time, float(values[:n].sum())) for n, time in sorted(able.items())])
    picked = knapsack([[(time, value) for _, time, value in each] for each in options], budget)
    chosen: dict[str, Choice] = {"head": {}, "neuron": {}}
    for (unit, layer, row, _), each, at in zip(rows, options, picked, strict=True):
        gone = ascending(row[None], {})[0]
        gone = gone[: len(gone) - each[at][0]]
        if gone:
            chosen[unit][layer] = sorted(gone)
    return chosen["head"], chosen["neuron"]


def knapsack(options: Sequence[Sequence[tuple[float, float]]], budget: float) -> list[int]:
    """Which of each group's (cost, value) to take, for the highest sum of values within the budget."""
    for cost, _ in (option for each in options for option in each):
        if not 0 <= cost < math.inf:
            raise ValueError(f"the times hold {cost}; a time is a number of 0 or more")
    fastest = [min(cost for cost, _ in each) for each in options]
    slack = budget - sum(fastest)
    if not slack >= -ROUNDING * budget:
        raise ValueError(f"the budget is {budget}; the fastest choice takes {sum(fastest):.6g}")
    best = torch.zeros(CELLS + 1, dtype=torch.float64)  # by cells spent, at most, beyond the fastest choice
    cells, steps = [], []
    for each, least in zip(options, fastest, strict=True):
        cells.append([cells_of(cost - least, max(slack, 0.0)) for cost, _ in each])
        after = torch.full((len(each), CELLS + 1), -torch.inf, dtype=torch.float64)
        for i, (spent, (_, value)) in enumerate(zip(cells[-1], each, strict=True)):
            after[i, spent:] = best[: CELLS + 1 - spent] + value
        best, taken = after.max(0)
        steps.append(taken)
    at, picked = CELLS, []
    for spent_by, taken in zip(reversed(cells), reversed(steps), strict=True):
        i = int(taken[at])
        at -= spent_by[i]
        picked.append(i)
    return picked[::-1]


def cells_of(more: float, slack: float) -> int:
    """How many cells of the slack a time takes; one more than there are, if it is too long."""
    if not more:
        return 0
    return math.ceil(more / slack * CELLS - ROUNDING) if more <= slack else CELLS + 1


def rearrange(choice: Mapping[int, Iterable[int]], gradients: Tensor) -> Choice:
    """As many heads of each layer, exchanged for others where that costs less, heads of a layer counted together.

    Greedy, on (1-m)ᵀ F (1-m) with F the layer's Fisher information (Kwon et al. 2022, section 4.2): never worse than
    what was given.

    Args:
        gradients: (examples, layers, heads), from `head_gradients`.

    Raises:
        ValueError: the gradients have another shape, or the choice names what is not there.
    """
    if gradients.dim() != 3 or not len(gradients):
        raise ValueError(f"the gradients have shape {tuple(gradients.shape)}; expected (examples, layers, heads)")
    chosen = normalise_units(choice, gradients.shape[1], gradients.shape[2], "head")
    better: Choice = {}
    for layer, heads in chosen.items():
        slopes = gradients[:, layer].double()
        there = [head for head in range(slopes.shape[1]) if not slopes[0, head].isnan()]
        if not set(heads) <= set(there):
            raise ValueError(f"layer {layer} has lost some of heads {list(heads)} already: it has {there}")
        fisher = (slopes.T @ slopes) / len(slopes)
        gone = list(heads)
        for head in sorted(set(there) - set(heads), key=lambda head: float(fisher[head, head])):
            trials = [gone, *([*gone[:i], *gone[i + 1 :], head] for i in range(len(gone)))]
            gone = min(trials, key=lambda trial: float(fisher[trial][:, trial].sum()))
        better[layer] = sorted(gone)
    return better
