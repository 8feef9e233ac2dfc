"""Shapley values of heads: the mean increase of the loss when a head is ablated, over orders of ablating all.

Sources: Shapley 1953; sampling of orders, Castro et al. 2009; antithetic orders, Mitchell et al. 2022
(arXiv:2104.12199); truncation, Ghorbani & Zou 2019 (arXiv:1904.02868); heads as players, Held & Yang 2023 (EACL).

Shapes:  L layers · N heads as built · P players, the heads that are not pruned · K losses, of examples
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import factorial

import torch
from torch import Tensor

from bertlite.causal.ablation import Ablator
from bertlite.importance.batches import Batch, Loss, eval_mode
from bertlite.importance.structures import HEADS
from bertlite.pruning import BertLike

Losses = Callable[[Sequence[int]], Tensor]  # the players that have left -> (K,)
MOST_EXACT = 16  # players at most, to run all their 2^P coalitions


@dataclass(frozen=True)
class ShapleyValues:
    """Each head's share in the increase of the loss without any head.

    Args:
        values: (L, N), float64, nan for pruned heads; they add up to `empty - whole`, except for truncation.
        standard_errors: (L, N), over the orders that were drawn, on these examples; 0 if every coalition was run.
        whole, empty: the mean loss with every head, and with every head ablated.
        runs: how many times the model was run on all batches.
    """

    values: Tensor
    standard_errors: Tensor
    whole: float
    empty: float
    runs: int


def shapley_values(
    model: BertLike,
    batches: Iterable[Batch],
    *,
    orders: int = 32,
    antithetic: bool = True,
    tolerance: float = 0.0,
    exact: bool = False,
    method: str = "zero",
    reference: Iterable[Batch] | None = None,
    by_position: bool = False,
    target: str = "loss",
    loss: Loss | None = None,
    teacher: BertLike | None = None,
    seed: int = 0,
) -> ShapleyValues:
    """Compute the Shapley value of every head: its mean increase of the loss when it is ablated, over all orders.

    A head that others can replace gets a value here, although ablating it alone costs nothing.

    Args:
        model: of bertlite or bertlite.hf; restored afterwards, run in eval mode.
        orders: how many are drawn; each takes one run of the model for each head.
        antithetic: every second order is the previous one reversed, for smaller errors; `orders` must be even.
        tolerance: an order ends early once the mean loss is this close to that without any head; the remaining heads
            get 0.  0 never ends one early.
        exact: run every coalition rather than orders; for at most 16 heads.
        method, reference, by_position: how heads are ablated; as for `ablate`.
        target, loss, teacher: as for `head_importance`.
        seed: of the orders and of resampling.

    Raises:
        ValueError: as `ablate`; or fewer than two independent orders, too many heads, or a tolerance below 0.
    """
    step = 2 if antithetic else 1
    if not exact and (orders < 2 * step or orders % step):
        raise ValueError(f"orders is {orders}; give {2 * step} or more{', in pairs' if antithetic else ''}")
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}; it must be 0 or more")
    ablator = Ablator(
        model, batches, method, reference, by_position, target=target, loss=loss, teacher=teacher, seed=seed
    )
    players = HEADS.present(model).nonzero().tolist()
    with eval_mode(*ablator.task.models), torch.no_grad():
        prepared = ablator.prepared(seed)
        counted = ~ablator.losses(prepared, {}).isnan()

        def losses(gone: Sequence[int]) -> Tensor:
            by_layer: dict[int, list[int]] = {}
            for player in gone:
                by_layer.setdefault(players[player][0], []).append(players[player][1])
            return ablator.losses(prepared, by_layer)[counted]

        whole, empty = losses(()), losses(range(len(players)))
        if not len(whole):
            raise ValueError("no example has a label that counts: every loss is nan")
        if exact:
            samples, runs = exact_increases(losses, len(players)).mean(0)[None], 2 ** len(players)
        else:
            drawn, runs = [], 2
            for order in draw_orders(len(players), orders, antithetic, seed):
                added, count = increases_along(losses, order, whole, empty, tolerance)
                drawn.append(added.mean(0))
                runs += count
            samples = torch.stack(drawn).unflatten(0, (-1, step)).mean(1)  # a pair is one sample
    errors = torch.zeros_like(samples[0]) if exact else samples.std(0) / len(samples) ** 0.5
    return ShapleyValues(
        values=by_head(model, samples.mean(0)),
        standard_errors=by_head(model, errors),
        whole=float(whole.mean()),
        empty=float(empty.mean()),
        runs=runs,
    )


def by_head(model: BertLike, values: Tensor) -> Tensor:
    """Return values of the heads that are not pruned as (L, N)."""
    found = torch.full(HEADS.shape(model), torch.nan, dtype=torch.float64)
    found[HEADS.present(model)] = values
    return found


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
