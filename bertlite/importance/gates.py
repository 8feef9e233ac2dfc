"""Gates that are trained: what `head_mask` is given while a model learns which heads it needs.

gates = HardConcreteGates(model.config)
train_gates(model, gates, batches, steps=500, penalty=0.02)
smaller = prune_heads(model, gates.pruned())
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.config import ConfigLike


class HardConcreteGates(nn.Module):
    """A gate for each head that can be exactly 0 and still has a slope (Louizos et al. 2018; Voita et al. 2019).

    `forward()` gives (L, N): in training drawn anew, in eval mode the fixed value.
    """

    def __init__(
        self,
        config: ConfigLike,
        *,
        start: float = 2.0,
        beta: float = 0.33,
        gamma: float = -0.1,
        zeta: float = 1.1,
    ) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self) -> Tensor:
        raise NotImplementedError

    def penalty(self) -> Tensor:
        """The expected number of open gates: a scalar to add to the loss, times its weight."""
        raise NotImplementedError

    def pruned(self) -> dict[int, list[int]]:
        """The heads whose gates are closed, by layer; those the model has lost already are not named."""
        raise NotImplementedError


class SubsetGates(nn.Module):
    """Gates of which exactly `keep` are open in the end: differentiable subset pruning (Li et al. 2021).

    `forward()` gives (L, N): in training a relaxed top-K of weights plus Gumbel noise, whose sum is K; in eval mode
    the K largest weights as ones.
    """

    def __init__(self, config: ConfigLike, keep: int, *, temperature: float = 1.0) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self) -> Tensor:
        raise NotImplementedError

    def penalty(self) -> Tensor:
        """Nothing: the number of heads is exact."""
        raise NotImplementedError

    def pruned(self) -> dict[int, list[int]]:
        raise NotImplementedError


def train_gates(
    model: Any,
    gates: HardConcreteGates | SubsetGates,
    batches: Iterable[Any],
    *,
    steps: int,
    lr: float = 0.1,
    penalty: float = 0.0,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """Train gates by gradient descent, the model with them if it has an optimizer.

    Args:
        batches: with labels; begun again when used up.
        lr: of Adam, on the gates.
        penalty: the weight of `gates.penalty()`: nats for each open head.
        optimizer: of the model's own parameters; without one the model is left as found.

    Returns:
        The loss of every step, without the penalty.
    """
    raise NotImplementedError
