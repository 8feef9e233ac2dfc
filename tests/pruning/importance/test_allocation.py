"""From scores to a choice: which units go, checked against every choice there is."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from conftest import F64, SIZES
from torch import Tensor

from bertlite import BertConfig
from bertlite.pruning import macs, rank_heads, rank_neurons, with_pruned
from bertlite.pruning.importance.allocation import Choice, UnitCosts, choose_sizes, knapsack

NAN = math.nan
SCORES = torch.tensor([[0.9, 0.1, 0.8, 0.2], [0.3, NAN, 0.7, 0.6], [0.4, 0.5, 1.0, 1.1]], dtype=F64)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# rank_heads


FOUR = {0: [1, 3], 1: [0], 2: [0]}
EQUAL = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("scores", "options", "wanted"),
    [
        (SCORES, {"count": 0}, {}),
        (SCORES, {"count": 1}, {0: [1]}),
        (SCORES, {"count": 4}, FOUR),
        (SCORES, {"count": np.int64(4)}, FOUR),
        (SCORES, {"share": 0.36}, FOUR),  # of the heads still there
        (SCORES, {"count": 6}, {0: [1, 3], 1: [0, 3], 2: [0, 1]}),
        (SCORES, {"share": 0.5}, {0: [1, 3], 1: [0, 3], 2: [0, 1]}),  # 5.5 of 11, to the even number
        (SCORES, {"count": 11}, {0: [0, 1, 2, 3], 1: [0, 2, 3], 2: [0, 1, 2, 3]}),
        (SCORES, {"share": 1.0}, {0: [0, 1, 2, 3], 1: [0, 2, 3], 2: [0, 1, 2, 3]}),
        (SCORES, {"count": 2, "uniform": True}, {0: [1], 2: [0]}),
        (SCORES, {"count": 3, "uniform": True}, {0: [1, 3], 2: [0]}),  # the lowest of equal ones
        (SCORES, {"count": 5, "uniform": True}, {0: [1, 3], 1: [0], 2: [0, 1]}),
        (SCORES, {"count": 1, "at_least": 3}, {0: [1]}),
        (SCORES, {"count": 2, "at_least": 3}, {0: [1], 2: [0]}),  # layer 1 has three already
        (SCORES, {"count": 8, "at_least": 1}, {0: [1, 2, 3], 1: [0, 3], 2: [0, 1, 2]}),
        (SCORES, {"count": 4, "protect": {0: [1], 2: [0]}}, {0: [3], 1: [0, 3], 2: [1]}),
        (SCORES, {"count": 9, "protect": {0: [1], 1: [1, 2]}}, {0: [0, 2, 3], 1: [0, 3], 2: [0, 1, 2, 3]}),
        (EQUAL, {"count": 5}, {0: [0, 1, 2, 3], 1: [0]}),  # of equals the later goes last
        (EQUAL, {"count": 5, "uniform": True}, {0: [0, 1], 1: [0, 1], 2: [0]}),
    ],
)
def test_the_lowest_scores_go_wherever_they_are(scores: Tensor, options: dict[str, Any], wanted: Choice) -> None:
    assert rank_heads(scores, **options) == wanted
    if [*options] == ["count"]:
        assert rank_heads(scores, options["count"]) == wanted


def test_uniform_takes_from_the_fullest_layers() -> None:
    for amount in range(12):
        chosen = rank_heads(SCORES, count=amount, uniform=True)
        left = [int((~row.isnan()).sum()) - len(chosen.get(layer, ())) for layer, row in enumerate(SCORES)]
        assert sum(map(len, chosen.values())) == amount
        assert max(left) - min(left) <= 1
        for layer, units in chosen.items():
            assert units == sorted(SCORES[layer].nan_to_num(nan=9).argsort()[: len(units)].tolist())


def test_neurons_are_ranked_alike() -> None:
    scores = draw(3, 37)
    options: dict[str, Any] = {"uniform": True, "at_least": 2, "protect": {1: [4]}}
    assert rank_neurons(scores, share=0.4, **options) == rank_heads(scores, share=0.4, **options)
    with pytest.raises(ValueError, match="layer 1 has no neuron 37"):
        rank_neurons(scores, count=1, protect={1: [37]})
    with pytest.raises(TypeError, match="at_leats"):
        rank_neurons(scores, count=1, at_leats=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        (SCORES, {"count": 12}, "count is 12; it must be a number of heads, from 0 to the 11 that are there"),
        (SCORES, {"count": -1}, "count is -1"),
        (SCORES, {"count": True}, "count is True"),
        (SCORES, {"count": 0.5}, "count is 0.5.* share= takes a share"),
        (SCORES, {"count": torch.tensor(2.5)}, "count is tensor"),
        (SCORES, {"count": torch.tensor(True)}, "count is tensor"),
        (SCORES, {"share": 1.5}, "share is 1.5; it must be from 0 to 1 of the 11 heads that are there"),
        (SCORES, {"share": NAN}, "share is nan"),
        (SCORES, {"count": 9, "at_least": 1}, "at_least 1 and the protected ones leave only 8 to remove"),
        (SCORES, {"count": 11, "protect": {0: [0]}}, "leave only 10 to remove"),
        (SCORES, {"count": 1, "at_least": -1}, "at_least is -1"),
        (SCORES, {"count": 1, "protect": {3: [0]}}, "there is no layer 3"),
        (SCORES, {"count": 1, "protect": {0: [4]}}, "layer 0 has no head 4"),
        (SCORES, {}, "give count=, a number of heads, or share="),
        (SCORES, {"count": 1, "share": 0.5}, "give count=, a number of heads, or share="),
        (SCORES.tolist(), {"count": 1}, r"scores is of type list; give a tensor, \(layers, heads\)"),
        (torch.zeros(3), {"count": 1}, r"shape \(3,\); expected \(layers, heads\)"),
        (torch.tensor([[1.0, math.inf]]), {"count": 1}, "hold infinity"),
    ],
)
def test_what_cannot_be_ranked_is_refused(scores: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        rank_heads(scores, **options)


# macs

CONFIG = BertConfig(**{**SIZES, "intermediate_size": 5, "num_hidden_layers": 2})
LENGTH = 11


def test_macs_are_the_products_of_the_layers() -> None:
    """Counted by shapes: query, key, value, output, the scores, the mixing, and the two feed-forward products."""
    S, D, H = LENGTH, 48, 12
    products = 4 * S * D * (4 * H) + 2 * S * S * (4 * H) + 2 * S * D * 5
    assert macs(CONFIG, LENGTH) == 2 * products
    smaller = with_pruned(CONFIG, {0: [1], 1: [0, 2]}, {1: [0, 1, 2]})
    assert macs(smaller, LENGTH) == 2 * products - 3 * (4 * S * D * H + 2 * S * S * H) - 3 * 2 * S * D


@pytest.mark.parametrize(("reach", "pairs"), [(0, 11), (3, 65), (9, 119), (10, 121), (50, 121)])
def test_macs_of_a_layer_with_a_window_are_of_the_keys_within_it(reach: int, pairs: int) -> None:
    """Counted by hand for 11 tokens and 3 on either side: 4 + 5 + 6 + 5 · 7 + 6 + 5 + 4 pairs."""
    S, D, H = LENGTH, 48, 12
    fields = {"position_embedding_type": "rotary_local", "local_layers": [1], "local_attention": reach, "gated": True}
    config = with_pruned(replace(CONFIG, **fields), {1: [2]}, {})
    heads = 4 * (4 * S * D * H + 2 * S * S * H) + 3 * (4 * S * D * H + 2 * pairs * H)
    assert macs(config, S) == heads + 2 * 3 * S * D * 5
    assert UnitCosts.macs(config, [S, S]).total([(4, 5), (3, 5)]) == 2 * macs(config, S)


# choose_sizes


def test_a_knapsack_is_within_its_cells_of_the_best() -> None:
    """The choice fits, and no choice that fits with a cell to spare for each group is better."""
    for seed in range(5):
        table = draw(4, 3, 2, seed=seed)
        groups = [[(float(c), float(v)) for c, v in group] for group in table]
        least = sum(min(c for c, _ in group) for group in groups)
        budget = least + 0.7
        picked = knapsack(groups, budget)
        assert sum(group[i][0] for group, i in zip(groups, picked, strict=True)) <= budget
        got = sum(group[i][1] for group, i in zip(groups, picked, strict=True))
        spare = 4 * (budget - least) / 10_000
        sums = [tuple(map(sum, zip(*choice, strict=True))) for choice in product(*groups)]
        assert max(v for c, v in sums if c <= budget - spare) <= got + 1e-12
        assert got <= max(v for c, v in sums if c <= budget) + 1e-12


def test_the_cheapest_choice_is_within_reach() -> None:
    assert knapsack([[(0.1, 1.0), (0.2, 2.0)]] * 3, 0.1 + 0.1 + 0.1) == [0, 0, 0]
    assert knapsack([[(1.1, 1.0), (2.0, 2.0)]] * 3, 3.3) == [0, 0, 0]
    assert knapsack([[(0.0, 1.0)]], 0.0) == [0]


@pytest.mark.parametrize(
    ("budget", "cost", "message"),
    [
        (2.9, 1.0, "the budget is 2.9; the cheapest choice takes 3"),
        (NAN, 1.0, "the budget is nan"),
        (9.0, -1.0, "the costs hold -1.0; a cost is a number of 0 or more"),
        (9.0, NAN, "the costs hold nan"),
    ],
)
def test_costs_that_cannot_be_met_are_refused(budget: float, cost: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        knapsack([[(cost, 1.0), (5.0, 2.0)]] * 3, budget)


def sizes_problem(seed: int) -> tuple[list[Any], list[Any]]:
    """Return losses, falling with the size, and costs in whole numbers, which layers need not share."""
    random = draw(2, 2, 4, seed=seed)
    losses = [tuple({size: float(x[size:].sum()) for size in range(4)} for x in pair) for pair in random]
    cost = draw(2, 2, 4, seed=seed + 1000).mul(9).round().cumsum(-1)
    costs = [tuple(dict(enumerate(each.tolist())) for each in pair) for pair in cost]
    return losses, costs


@pytest.mark.parametrize("budget", [0, 8, 20, 25, 200])  # divisors of the number of cells: nothing is rounded
def test_of_additive_losses_the_sizes_are_the_best_of_all(budget: int) -> None:
    for seed in range(10):
        losses, costs = sizes_problem(seed)
        groups = [(loss, cost) for two in zip(losses, costs, strict=True) for loss, cost in zip(*two, strict=True)]
        least = sum(min(cost.values()) for _, cost in groups)
        every = [
            (sum(loss[n] for (loss, _), n in zip(groups, sizes, strict=True)), sizes)
            for sizes in product(range(4), repeat=4)
            if sum(cost[n] for (_, cost), n in zip(groups, sizes, strict=True)) <= least + budget
        ]
        chosen = choose_sizes(losses, costs, least + budget)
        assert sum(chosen, ()) == min(every)[1]


def test_sizes_without_a_cost_are_not_chosen_and_none_is_refused() -> None:
    losses = [({0: 2.0, 1: 1.0, 2: 0.0}, {0: 9.0, 5: 0.0})]
    assert choose_sizes(losses, [({0: 0, 2: 5}, {0: 0, 5: 3})], 7) == [(0, 5)]
    with pytest.raises(ValueError, match="layer 0: no number of neurons has both a loss and a cost"):
        choose_sizes(losses, [({0: 0}, {3: 1})], 7)
    with pytest.raises(ValueError, match="the budget is 1; the cheapest choice takes 3"):
        choose_sizes(losses, [({2: 3}, {0: 0})], 1)
