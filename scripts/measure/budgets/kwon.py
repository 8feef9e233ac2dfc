"""Kwon et al. 2022 (arXiv:2204.09656): mask search by Fisher information, rearrangement, mask tuning.

With the settings of the authors' code: the teacher of the tuning is the model that a search at the square root of the
budget gives; factors solve the normal equations by LSMR with damp 1, about 1; the attention of layer 0 is left alone;
tuning ends for good at the first layer with a factor beyond 10.

Shapes:  L layers · n units of a layer · X examples
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertlite import prune_heads, prune_neurons
from bertlite.models.structure import layers_of
from bertlite.pruning import rank_heads, rank_neurons
from bertlite.pruning.importance.allocation import Choice, UnitCosts
from bertlite.pruning.importance.batches import Batch, eval_mode
from bertlite.pruning.importance.least_squares import start_runs
from bertlite.pruning.importance.moments import Moments, gather, total
from bertlite.pruning.importance.structures import EVERY_TOKEN, STRUCTURES

LARGEST = 10.0
DAMP = 1.0


def both_gradients(model: Any, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Return for heads and for neurons (X, L, n): the gradient of each example's loss in each unit's gate."""
    parts = [(each.dense(block), each.width(block)) for block in layers_of(model) for each in STRUCTURES]
    found: list[list[Tensor]] = [[] for _ in STRUCTURES]
    for batch in batches:
        gates: list[Tensor] = []

        def gated(width: int, module: Any, args: tuple[Tensor], gates: list[Tensor] = gates) -> Tensor:
            (x,) = args
            gates.append(torch.ones(len(x), x.shape[-1] // width, requires_grad=True))
            return x * gates[-1].repeat_interleave(width, 1)[:, None]

        with eval_mode(model), ExitStack() as hooks:
            for part, width in parts:
                hooks.enter_context(part.register_forward_pre_hook(partial(gated, width)))
            loss = model(**batch, **EVERY_TOKEN).loss * len(batch["labels"])  # the sum of the examples'
            grads = torch.autograd.grad(loss, gates)
        for kind, each in enumerate(found):
            each.append(torch.stack(grads[kind::2], 1).double())
    return {name: torch.cat(each) for name, each in zip(("heads", "neurons"), found, strict=True)}


def search(model: Any, grads: dict[str, Tensor], share: float, length: int) -> tuple[Choice, Choice]:
    """Return the heads and the neurons to remove: those with the least squared gradients within the budget."""
    scores = [grads[name].square().mean(0) for name in ("heads", "neurons")]
    return within_budget(model.config, share, length, *scores)


def within_budget(config: Any, share: float, length: int, heads: Tensor, neurons: Tensor) -> tuple[Choice, Choice]:
    """Choose heads and neurons to remove so that those kept have the highest sum of scores within a share of the MACs.

    Every number of heads is tried, with as many neurons as then fit (section 4.1).
    """
    unit = UnitCosts.macs(config, [length])
    costs = unit.heads[0], unit.neuron
    budget = (
        share
        * config.num_hidden_layers
        * (config.num_attention_heads * costs[0] + config.intermediate_size * costs[1])
    )
    sums = [
        torch.cat(
            [torch.zeros(1, dtype=torch.float64), each.double().flatten().sort(descending=True).values.cumsum(0)]
        )
        for each in (heads, neurons)
    ]
    numbers = [
        (count, min(neurons.numel(), int((budget - count * costs[0]) / costs[1] + 1e-9)))
        for count in range(heads.numel() + 1)
        if count * costs[0] <= budget * (1 + 1e-12)
    ]
    best = max(numbers, key=lambda pair: float(sums[0][pair[0]] + sums[1][pair[1]]))
    return rank_heads(heads, count=heads.numel() - best[0]), rank_neurons(neurons, count=neurons.numel() - best[1])


def rearrange(choice: Choice, grads: Tensor) -> Choice:
    """Exchange units of a choice within their layer, greedily, by the layer's block of the Fisher information."""
    better: Choice = {}
    for layer, gone in choice.items():
        own = grads[:, layer].double()
        fisher = own.T @ own / len(own)
        diagonal = fisher.diagonal()
        removed = [*gone]
        for unit in sorted({*range(len(fisher))} - {*gone}, key=lambda unit: float(diagonal[unit])):
            inside = torch.tensor(removed)
            row = fisher[inside].sum(0)  # of each unit, with all that are removed
            # with the unit in and i out, the sum of the block changes by this much
            change = diagonal[unit] + 2 * row[unit] + diagonal[inside] - 2 * row[inside] - 2 * fisher[unit, inside]
            at = int(change.argmin())
            if float(change[at]) < 0:
                removed[at] = unit
        better[layer] = sorted(removed)
    return better


@torch.no_grad()
def tune_(model: Any, teacher: Any, batches: Sequence[Batch]) -> int:
    """Multiply heads and neurons by their tuned factors; return how many sublayers were tuned."""
    done = 0
    with eval_mode(model, teacher), torch.no_grad():
        runs = start_runs(model, teacher, batches)
        for layer, (block, other) in enumerate(zip(layers_of(model), layers_of(teacher), strict=True)):
            for structure in STRUCTURES:
                for run in runs:
                    run.run_dense(structure, other)
                dense = structure.dense(block)
                if dense.weight.numel() and not (layer == 0 and structure is STRUCTURES[0]):
                    width = structure.width(block)
                    factors = factors_of(dense, width, total(gather(run.fit(structure, block) for run in runs)))
                    if float(factors.abs().max()) > LARGEST:
                        return done
                    dense.weight.mul_(factors.repeat_interleave(width).to(dense.weight.dtype))
                    done += 1
                for run in runs:
                    run.step(structure, block, other)
    return done


def factors_of(dense: Any, width: int, moments: Moments) -> Tensor:
    """Return the factors of units that have so many inputs of a projection."""
    from scipy.sparse.linalg import lsmr

    weight, units = dense.weight.double(), dense.weight.shape[1] // width
    products = moments.cc * (weight.T @ weight)
    ata = products.unflatten(1, (units, width)).unflatten(0, (units, width)).sum((1, 3))
    wanted = moments.cy - moments.c[:, None] * dense.bias.double()  # the bias is no unit
    atb = (wanted * weight.T).sum(1).unflatten(0, (units, width)).sum(1)
    return 1 + torch.from_numpy(np.asarray(lsmr(ata.numpy(), (atb - ata.sum(1)).numpy(), damp=DAMP)[0]))


def prune(model: Any, choice: tuple[Choice, Choice]) -> Any:
    """Return a copy without these heads and neurons."""
    return prune_neurons(prune_heads(model, choice[0]), choice[1])


def choose(model: Any, grads: dict[str, Tensor], share: float, length: int) -> tuple[Choice, Choice]:
    """Return the heads and the neurons that the method removes, by the gradients of `both_gradients`."""
    heads, neurons = search(model, grads, share, length)
    return rearrange(heads, grads["heads"]), rearrange(neurons, grads["neurons"])


def kwon(model: Any, batches: Sequence[Batch], grads: dict[str, Tensor], share: float, length: int) -> Any:
    """Return the model pruned by the method."""
    pruned = prune(model, choose(model, grads, share, length))
    tune_(pruned, prune(model, search(model, grads, share**0.5, length)), batches)
    return pruned
