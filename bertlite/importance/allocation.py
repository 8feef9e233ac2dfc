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


def rank_heads(
    scores: Tensor,
    amount: int | float,
    *,
    uniform: bool = False,
    at_least: int = 0,
    at_most: int | None = None,
    protect: Mapping[int, Iterable[int]] | None = None,
    unit: str = "head",
) -> Choice:
    """The heads to remove: those with the lowest scores.

    Args:
        scores: (layers, heads); a model's own, as `head_importance` returns them.
        amount: of the heads still there, how many go: an int, or a float between 0 and 1 as a share, rounded.
        uniform: take from the layers with most heads left, so that layers end alike; else wherever scores are lowest.
        at_least, at_most: heads that each layer keeps; one that has fewer than `at_least` already loses none.
        protect: {layer: heads} that stay.
        unit: what errors call them.

    Raises:
        ValueError: the target cannot be met, the scores are no (layers, heads) table, or a layer or head is unknown.
    """
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


def rank_neurons(scores: Tensor, amount: int | float, **options: bool | int | Mapping[int, Iterable[int]]) -> Choice:
    """The intermediate neurons to remove; the arguments are those of `rank_heads`."""
    return rank_heads(scores, amount, **options, unit="neuron")  # type: ignore[arg-type]


def check_scores(scores: Tensor, unit: str = "head", shape: tuple[int, int] | None = None) -> None:
    if scores.dim() != 2 or (shape is not None and tuple(scores.shape) != shape):
        wanted = f"(layers, {unit}s)" if shape is None else f"{shape}: they are another model's"
        raise ValueError(f"the scores of {unit}s have shape {tuple(scores.shape)}; expected {wanted}")
    if scores.isinf().any():
        raise ValueError(f"the scores of {unit}s hold infinity; to keep or remove some, use protect= or name them")


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
    if neuron_scores is not None:
        check_scores(neuron_scores, "neuron", (layers, config.intermediate_size))
    if not 0 < budget <= 1:
        raise ValueError(f"the budget is {budget}; expected a share above 0 and up to 1 of the unpruned model's MACs")
    per_head, per_neuron = head_macs(config, length), neuron_macs(config, length)
    limit = budget * layers * (built * per_head + config.intermediate_size * per_neuron)
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

    Exact but for the budget being cut into 10,000 cells, to which times are rounded up.

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
    fastest = sum(min(cost for cost, _ in each) for each in options)
    if not (budget > 0 and fastest <= budget):
        raise ValueError(f"the budget is {budget}; the fastest choice takes {fastest:.6g}")
    if any(cost < 0 for each in options for cost, _ in each):
        raise ValueError("a time is below 0")
    best = torch.zeros(CELLS + 1, dtype=torch.float64)  # by cells spent, at most
    steps = []
    for each in options:
        after = torch.full((len(each), CELLS + 1), -torch.inf, dtype=torch.float64)
        for i, (cost, value) in enumerate(each):
            cells = math.ceil(cost / budget * CELLS - 1e-9)
            if cells <= CELLS:
                after[i, cells:] = best[: CELLS + 1 - cells] + value
        best, taken = after.max(0)
        steps.append(taken)
    if best[-1] == -torch.inf:
        raise ValueError(f"the budget is {budget}; the fastest choice takes {fastest:.6g}, too close to it")
    at, picked = CELLS, []
    for each, taken in zip(reversed(options), reversed(steps), strict=True):
        i = int(taken[at])
        at -= math.ceil(each[i][0] / budget * CELLS - 1e-9)
        picked.append(i)
    return picked[::-1]


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
