"""Gates that are trained: what `head_mask` is given while a model learns which heads it needs.

    gates = HardConcreteGates(model.config)
    train_gates(model, gates, batches, steps=500, penalty=0.01)
    smaller = prune_heads(model, gates.pruned())

Shapes:  L layers · N heads as built
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.config import ConfigLike, kept_heads
from bertlite.importance.batches import as_found, check_model, read_batches
from bertlite.importance.structures import HEADS


class Gates(nn.Module):
    """What the kinds of gates share."""

    present: Tensor  # (L, N) bool

    def __init__(self, config: ConfigLike) -> None:
        super().__init__()
        layers, heads = range(config.num_hidden_layers), range(config.num_attention_heads)
        there = [[head in kept_heads(config, layer) for head in heads] for layer in layers]
        self.register_buffer("present", torch.tensor(there).reshape(len(layers), len(heads)), persistent=False)

    def penalty(self) -> Tensor:
        """What is added to the loss, times its weight: a scalar."""
        raise NotImplementedError

    @torch.no_grad()
    def pruned(self) -> dict[int, list[int]]:
        """The heads that are closed in eval mode, by layer; those the model had lost already are not named."""
        training = self.training
        closed = (self.eval()() == 0) & self.present
        self.train(training)
        return {layer: row.nonzero()[:, 0].tolist() for layer, row in enumerate(closed) if row.any()}


class HardConcreteGates(Gates):
    """A gate for each head that can be exactly 0 and still has a slope (Louizos et al. 2018, arXiv:1712.01312), with
    the beta, gamma and zeta of Voita et al. 2019 (arXiv:1905.09418).

    `forward()` gives (L, N) in 0 to 1: drawn anew in training, in eval mode the fixed value.

    Args:
        start: log α of every gate; at 2 it is open 94 times in 100.

    Raises:
        ValueError: beta, gamma or zeta for which gates would never be exactly 0 or 1.
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
        super().__init__(config)
        if not (beta > 0 and gamma < 0 and zeta > 1):
            raise ValueError(f"beta {beta}, gamma {gamma}, zeta {zeta}: expected beta > 0, gamma < 0 and zeta > 1")
        self.beta, self.gamma, self.zeta = beta, gamma, zeta
        self.log_alpha = nn.Parameter(torch.full(self.present.shape, float(start)))

    def forward(self) -> Tensor:
        if self.training:
            noise = torch.rand_like(self.log_alpha).clamp(1e-6, 1 - 1e-6)
            soft = ((noise.logit() + self.log_alpha) / self.beta).sigmoid()
        else:
            soft = self.log_alpha.sigmoid()
        return (soft * (self.zeta - self.gamma) + self.gamma).clamp(0, 1)

    def open_probability(self) -> Tensor:
        """(L, N): how likely each gate is to be above 0 in training."""
        return (self.log_alpha - self.beta * math.log(-self.gamma / self.zeta)).sigmoid()

    def penalty(self) -> Tensor:
        """The expected number of open gates."""
        return self.open_probability()[self.present].sum()


class SubsetGates(Gates):
    """Gates of which exactly `keep` are open in the end: differentiable subset pruning (Li et al. 2021,
    arXiv:2108.04657), by a relaxed top-K of Gumbel-perturbed weights (Xie & Ermon 2019, arXiv:1901.10517).

    `forward()` gives (L, N): in training relaxed gates that sum to K; in eval mode the K largest weights as ones.

    Args:
        keep: how many heads stay, of those the model still has.
        temperature: the lower, the closer to 0 and 1 the relaxed gates; an attribute, to be lowered on the way.

    Raises:
        ValueError: the model has not that many heads.
    """

    def __init__(self, config: ConfigLike, keep: int, *, temperature: float = 1.0) -> None:
        super().__init__(config)
        there = int(self.present.sum())
        if not 1 <= keep <= there:
            raise ValueError(f"{keep} heads cannot be kept: the model has {there}; give 1 to {there}")
        self.keep, self.temperature = keep, temperature
        self.weight = nn.Parameter(torch.zeros(self.present.shape))

    def forward(self) -> Tensor:
        keys = self.weight.masked_fill(~self.present, -torch.inf).flatten()
        if not self.training:
            best = keys.topk(self.keep).indices
            return torch.zeros_like(keys).index_fill(0, best, 1).view_as(self.weight)
        keys = keys - torch.empty_like(keys).exponential_().log()  # Gumbel noise
        gate = torch.zeros_like(keys)
        for _ in range(self.keep):  # K choices without replacement, each a softmax
            chosen = (keys / self.temperature).softmax(0)
            keys = keys + (1 - chosen).clamp(min=1e-20).log()
            gate = gate + chosen
        return gate.view_as(self.weight)

    def penalty(self) -> Tensor:
        """Nothing: the number of heads is exact."""
        return self.weight.new_zeros(())


def train_gates(
    model: Any,
    gates: Gates,
    batches: Iterable[Any],
    *,
    steps: int,
    lr: float = 0.1,
    penalty: float = 0.0,
    optimizer: torch.optim.Optimizer | None = None,
    before: Callable[[int], object] | None = None,
    seed: int = 0,
) -> list[float]:
    """Train gates by gradient descent, and the model with them if it has an optimizer.

    The same seed gives the same gates; the random state is left as found.

    Args:
        gates: trained in place; `gates.pruned()` then names the heads that are closed.
        batches: with labels; begun again when used up.
        lr: of Adam, on the gates.
        penalty: the weight of `gates.penalty()`; with HardConcreteGates nats for each open head.
        optimizer: of the model's own parameters, trained in training mode; without one the model is left as found.
        before: called with the number of each step before it, to lower `gates.temperature`, say.
        seed: of the gates' noise and, with an optimizer, of dropout.

    Returns:
        The loss of every step, without the penalty.

    Raises:
        ValueError: no batches, labels that do not fit, no steps, or gates of another model.
    """
    check_model(model)
    if not torch.equal(gates.present.cpu(), HEADS.present(model)):
        raise ValueError("the gates are not this model's: they were made for one with other heads")
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be 1 or more")
    read = read_batches(model, batches, labelled=True)
    gates.to(model.device).train()
    optimizers = [torch.optim.Adam(gates.parameters(), lr=lr), *([] if optimizer is None else [optimizer])]
    losses = []
    with as_found(model) if optimizer is None else in_training(model):
        torch.manual_seed(seed)
        for step, batch in enumerate(islice(cycle(read), steps)):
            if before is not None:
                before(step)
            loss = model(**batch, head_mask=gates(), return_dict=True).loss
            for each in optimizers:
                each.zero_grad()
            (loss + penalty * gates.penalty()).backward()
            for each in optimizers:
                each.step()
            losses.append(float(loss.detach()))
    for each in optimizers:
        each.zero_grad()
    gates.eval()
    return losses


@contextmanager
def in_training(model: Any) -> Iterator[None]:
    """A model in training mode; afterwards modes and the random state are what they were."""
    modes = [(module, module.training) for module in model.modules()]
    gpus = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(sorted(gpus)):
        try:
            model.train()
            yield
        finally:
            for module, mode in modes:
                module.training = mode
