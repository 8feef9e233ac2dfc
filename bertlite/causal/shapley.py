"""Shapley values of heads: the mean increase of the loss when a head is ablated, over orders of ablating all.

Sources: Shapley 1953; sampling of orders, Castro et al. 2009; antithetic orders, Mitchell et al. 2022
(arXiv:2104.12199); heads as players, Held & Yang 2023 (EACL).

Shapes:  L layers · N heads as built · P players, the heads that are not pruned · K losses, of examples
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bertlite.causal.ablation import ablation_losses
from bertlite.importance.batches import Batch, Loss
from bertlite.importance.structures import HEADS
from bertlite.pruning import BertLike

Losses = Callable[[Sequence[int]], Tensor]  # the players that have left -> (K,)


@dataclass(frozen=True)
class ShapleyValues:
    """Each head's share in the increase of the loss without any head.

    Args:
        values: (L, N), float64, nan for pruned heads; they add up to `empty - whole`.
        standard_errors: (L, N), over the orders that were drawn, on these examples.
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
    method: str = "zero",
    reference: Iterable[Batch] | None = None,
    target: str = "loss",
    loss: Loss | None = None,
    teacher: BertLike | None = None,
    seed: int = 0,
) -> ShapleyValues:
    """Compute the Shapley value of every head: its mean increase of the loss when it is ablated, over all orders.

    A head that others can replace gets a value here, although ablating it alone costs nothing.

    Args:
        model: of bertlite or bertlite.hf; restored afterwards, run in eval mode.
        orders: how many are drawn, in pairs of which one is the other reversed, for smaller errors; each takes one run
            of the model for each head.
        method, reference: how heads are ablated; as for `ablate`.
        target, loss, teacher: as for `head_importance`.
        seed: of the orders and of resampling.

    Raises:
        ValueError: as `ablate`; or fewer than two pairs of orders.
    """
    if orders < 4 or orders % 2:
        raise ValueError(f"orders is {orders}; give 4 or more, in pairs")
    options: dict[str, Any] = {"target": target, "loss": loss, "teacher": teacher}
    with ablation_losses(model, batches, method, reference, seed, **options) as losses_without:
        players = HEADS.present(model).nonzero().tolist()
        counted = ~losses_without({}).isnan()

        def losses(gone: Sequence[int]) -> Tensor:
            by_layer: dict[int, list[int]] = {}
            for player in gone:
                by_layer.setdefault(players[player][0], []).append(players[player][1])
            return losses_without(by_layer)[counted]

        whole, empty = losses(()), losses(range(len(players)))
        if not len(whole):
            raise ValueError("no example has a label that counts: every loss is nan")
        drawn = draw_orders(len(players), orders, seed)
        increases = torch.stack([increases_along(losses, order, whole, empty).mean(0) for order in drawn])
        pairs = increases.unflatten(0, (-1, 2)).mean(1)  # a pair is one sample
        values, errors = pairs.mean(0), pairs.std(0) / len(pairs) ** 0.5
        runs = 2 + orders * max(len(players) - 1, 0)
    return ShapleyValues(
        by_head(model, values), by_head(model, errors), float(whole.mean()), float(empty.mean()), runs
    )


def by_head(model: BertLike, values: Tensor) -> Tensor:
    """Return values of the heads that are not pruned as (L, N)."""
    found = torch.full(HEADS.shape(model), torch.nan, dtype=torch.float64)
    found[HEADS.present(model)] = values
    return found


def draw_orders(players: int, count: int, seed: int) -> Iterator[list[int]]:
    """Yield seeded random orders of the players, every second one the previous one reversed."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for i in range(count):
        order = order[::-1] if i % 2 else torch.randperm(players, generator=generator).tolist()
        yield order


def increases_along(losses: Losses, order: Sequence[int], whole: Tensor, empty: Tensor) -> Tensor:
    """Return the increase of the losses as each player leaves in this order, (K, P).

    Args:
        whole, empty: (K,), the losses of all players and of none.
    """
    added = whole.new_zeros(len(whole), len(order))
    before = whole
    for i, player in enumerate(order):
        after = empty if i == len(order) - 1 else losses(order[: i + 1])
        added[:, player] = after - before
        before = after
    return added
