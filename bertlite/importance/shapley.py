"""Shapley values: each player's mean increase of a loss when it leaves, over all orders of leaving.

Sources: Shapley 1953; sampling of orders, Castro et al. 2009; antithetic orders, Mitchell et al. 2022
(arXiv:2104.12199); truncation, Ghorbani & Zou 2019 (arXiv:1904.02868); heads as players, Held & Yang 2023 (EACL).

Shapes:  P players · K losses, of examples
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from math import factorial

import torch
from torch import Tensor

Losses = Callable[[Sequence[int]], Tensor]  # the players that have left -> (K,)
MOST_EXACT = 16  # players at most, to run all their 2^P coalitions


def draw_orders(players: int, count: int, antithetic: bool, seed: int) -> Iterator[list[int]]:
    """Yield seeded random orders of the players; with `antithetic` every second order is the previous one reversed."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for i in range(count):
        order = order[::-1] if antithetic and i % 2 else torch.randperm(players, generator=generator).tolist()
        yield order


def increases_along(
    losses: Losses, order: Sequence[int], whole: Tensor, empty: Tensor, tolerance: float = 0.0
) -> tuple[Tensor, int]:
    """Return the increase of the losses as each player leaves in this order, (K, P), and the number of runs.

    Args:
        whole, empty: (K,), the losses of all players and of none.
        tolerance: once the mean loss is this close to that of no players, the remaining ones add 0.
    """
    added = whole.new_zeros(len(whole), len(order))
    before, runs = whole, 0
    for i, player in enumerate(order):
        if tolerance and abs(float((before - empty).nanmean())) < tolerance:
            break
        last = i == len(order) - 1
        after = empty if last else losses(order[: i + 1])
        runs += not last
        added[:, player] = after - before
        before = after
    return added, runs


def exact_increases(losses: Losses, players: int) -> Tensor:
    """Return Shapley values from every coalition, (K, P).

    Raises:
        ValueError: there are more than MOST_EXACT players.
    """
    if players > MOST_EXACT:
        raise ValueError(
            f"{players} players have 2^{players} coalitions; sample orders, or keep at most {MOST_EXACT} players"
        )
    of = {frozenset(gone): losses(gone) for size in range(players + 1) for gone in combinations(range(players), size)}
    found = next(iter(of.values())).new_zeros(len(of[frozenset()]), players)
    for gone, before in of.items():
        if len(gone) < players:
            weight = factorial(len(gone)) * factorial(players - len(gone) - 1) / factorial(players)
            for player in set(range(players)) - gone:
                found[:, player] += weight * (of[gone | {player}] - before)
    return found
