"""Gates that are trained, as the `head_mask` of a model, to learn which heads it needs.

    gates = SubsetGates(model.config, keep=36)
    train_gates(model, gates, batches, steps=500)
    smaller = prune_heads(model, gates.pruned())

Shapes:  L layers · N heads as built
"""

from collections.abc import Callable, Iterable
from itertools import cycle, islice

import torch
from torch import Tensor, nn

from bertlite.config import ConfigLike, kept_heads
from bertlite.importance.batches import Batch, check_model, eval_mode, read_batches, training_mode
from bertlite.importance.structures import HEADS
from bertlite.pruning import BertLike


class SubsetGates(nn.Module):
    """Gates of which exactly `keep` are 1 in eval mode: differentiable subset pruning.

    Li et al. 2021 (arXiv:2108.04657), by a relaxed top-K of Gumbel-perturbed weights (Xie & Ermon 2019,
    arXiv:1901.10517).  `forward()` returns (L, N): in training relaxed gates that sum to K, in eval mode 1 for the K
    largest weights and 0 for the others.

    Args:
        keep: how many of the heads that the model has are kept.
        temperature: the lower, the closer the relaxed gates are to 0 and 1; an attribute that training may lower.

    Raises:
        ValueError: the model does not have that many heads.
    """

    present: Tensor  # (L, N) bool: the heads that are not pruned

    def __init__(self, config: ConfigLike, keep: int, *, temperature: float = 1.0) -> None:
        super().__init__()
        layers, heads = range(config.num_hidden_layers), range(config.num_attention_heads)
        present = [[head in kept_heads(config, layer) for head in heads] for layer in layers]
        self.register_buffer("present", torch.tensor(present).reshape(len(layers), len(heads)), persistent=False)
        count = int(self.present.sum())
        if not 1 <= keep <= count:
            raise ValueError(f"{keep} heads cannot be kept: the model has {count}; give 1 to {count}")
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

    @torch.no_grad()
    def pruned(self) -> dict[int, list[int]]:
        """Return the heads whose gates are 0 in eval mode, by layer; pruned heads are left out."""
        training = self.training
        closed = (self.eval()() == 0) & self.present
        self.train(training)
        return {layer: row.nonzero()[:, 0].tolist() for layer, row in enumerate(closed) if row.any()}


def train_gates(
    model: BertLike,
    gates: SubsetGates,
    batches: Iterable[Batch],
    *,
    steps: int,
    lr: float = 0.1,
    optimizer: torch.optim.Optimizer | None = None,
    before: Callable[[int], object] | None = None,
    seed: int = 0,
) -> list[float]:
    """Train gates by gradient descent, and the model with them if an optimizer of it is given.

    The same seed gives the same gates.  The random state is restored.

    Args:
        gates: trained in place; afterwards `gates.pruned()` names the heads to remove.
        batches: with labels; read again from the first when they end.
        lr: of Adam, on the gates.
        optimizer: of the model's own parameters, which are trained in training mode; without one the model is left
            as found.
        before: called before each step with its number, for example to lower `gates.temperature`.
        seed: of the gates' noise and, with an optimizer, of dropout.

    Returns:
        The loss of every step.

    Raises:
        ValueError: no batches, labels that do not fit, no steps, or gates of another model.
    """
    check_model(model)
    if not torch.equal(gates.present.cpu(), HEADS.present(model)):
        raise ValueError("the gates were made for a model with other heads; make them from this model's config")
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be 1 or more")
    read = read_batches(model, batches, labelled=True)
    gates.to(model.device).train()
    optimizers = [torch.optim.Adam(gates.parameters(), lr=lr), *([] if optimizer is None else [optimizer])]
    losses = []
    with eval_mode(model) if optimizer is None else training_mode(model):
        torch.manual_seed(seed)
        for step, batch in enumerate(islice(cycle(read), steps)):
            if before is not None:
                before(step)
            loss = model(**batch, head_mask=gates(), return_dict=True).loss
            for each in optimizers:
                each.zero_grad()
            loss.backward()
            for each in optimizers:
                each.step()
            losses.append(float(loss.detach()))
    for each in optimizers:
        each.zero_grad()
    gates.eval()
    return losses
