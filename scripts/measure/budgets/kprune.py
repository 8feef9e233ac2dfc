"""K-prune, Park et al. 2024 (arXiv:2308.03449): measure knowledge, prune one sublayer, tune its weights, and go on.

With the settings of the authors' example for BERT: λ = 1 and 2.5e-4 of predictive and representational knowledge,
μ = 64 for heads, temperature 2, batches of 32.  As in their code, predictive knowledge is half the squared gradient of
a batch's mean divergence, weights are fitted without a ridge, biases stay, and a sublayer without units loses its own.

Shapes:  W inputs of a sublayer's output projection, n units with w of them each
"""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bertlite.models.structure import layers_of
from bertlite.pruning import macs
from bertlite.pruning.importance.allocation import UnitCosts
from bertlite.pruning.importance.batches import Batch, count_examples, eval_mode
from bertlite.pruning.importance.least_squares import PairedRun, start_runs
from bertlite.pruning.importance.moments import gather, ridge_solve, total
from bertlite.pruning.importance.structures import EVERY_TOKEN, STRUCTURES, run, started_at

REPRESENTATIONAL, HEADS_WEIGHT, TEMPERATURE = 2.5e-4, 64.0, 2.0


def kprune(model: Any, batches: Sequence[Batch], share: float, length: int) -> Any:
    """Return the model pruned by the method to a share of the MACs."""
    pruned, budget = copy.deepcopy(model), share * macs(model.config, length)
    unit = UnitCosts.macs(model.config, [length])
    costs = unit.heads[0], unit.neuron
    with eval_mode(pruned, model), torch.no_grad():
        wanted = [run(model, batch).logits for batch in batches]
        runs = start_runs(pruned, model, batches)
        for layer, (block, other) in enumerate(zip(layers_of(pruned), layers_of(model), strict=True)):
            below = [each.pruned.x for each in runs]
            for kind, structure in enumerate(STRUCTURES):
                for each in runs:
                    each.run_dense(structure, other)
                found = knowledge(pruned, batches, runs, below, wanted, 2 * layer + kind)
                scores = [x * (HEADS_WEIGHT, 1)[i % 2] / costs[i % 2] for i, x in found]
                stays = chosen(scores, [costs[i % 2] for i, _ in found], budget)
                moments = total(gather(each.fit(structure, block) for each in runs))
                structure.prune_(pruned, {layer: (~stays).nonzero()[:, 0].tolist()})
                tune_(structure.dense(block), moments, stays.repeat_interleave(structure.width(block)))
                budget -= int(stays.sum()) * costs[kind]
                for each in runs:
                    each.step(structure, block, other)
    return pruned


def knowledge(
    model: Any,
    batches: Sequence[Batch],
    runs: Sequence[PairedRun],
    below: Sequence[Tensor],
    wanted: Sequence[Tensor],
    first: int,
) -> list[tuple[int, Tensor]]:
    """Return the number of each sublayer from `first` on, with the knowledge of its units, (n,).

    Args:
        below: for each run the input of the layer of sublayer `first`.
    """
    blocks, places = list(layers_of(model)), range(first, 2 * model.config.num_hidden_layers)
    parts = [STRUCTURES[place % 2].dense(blocks[place // 2]) for place in places]
    masks = [torch.ones(part.in_features, requires_grad=True) for part in parts]
    squares = [torch.zeros(part.in_features) for part in parts]
    slopes = [torch.zeros(part.in_features) for part in parts]
    real = torch.empty(0, dtype=torch.bool)

    def masked(i: int, module: Any, args: tuple[Tensor]) -> Tensor:
        flat = args[0].detach()[real] if args[0].dim() == 3 else args[0].detach()
        squares[i] += flat.square().sum(0)
        return args[0] * masks[i]

    with ExitStack() as hooks, torch.enable_grad():
        for i, part in enumerate(parts):
            hooks.enter_context(part.register_forward_pre_hook(partial(masked, i)))
        for batch, state, start, target in zip(batches, runs, below, wanted, strict=True):
            real = state.real
            with started_at(model, first // 2, start):
                loss = distance(run(model, batch, **EVERY_TOKEN).logits, target)
            for i, grad in enumerate(torch.autograd.grad(loss, masks)):
                slopes[i] += grad.square() / 2
    examples, tokens = sum(map(count_examples, batches)), sum(len(each.sentence) for each in runs)
    found = []
    for place, part, slope, square in zip(places, parts, slopes, squares, strict=True):
        each = slope / examples + REPRESENTATIONAL * square * part.weight.square().mean(0) / tokens
        width = STRUCTURES[place % 2].width(blocks[place // 2])
        found.append((place, each.unflatten(0, (-1, width)).mean(1).detach()))
    return found


def distance(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return a batch's mean divergence from the given model's predictions; of numbers, the squared error."""
    if logits.shape[-1] == 1:
        return F.mse_loss(logits, wanted)
    q, p = ((x / TEMPERATURE).log_softmax(-1) for x in (logits, wanted))
    return TEMPERATURE**2 * F.kl_div(q, p, reduction="batchmean", log_target=True)


def chosen(scores: Sequence[Tensor], costs: Sequence[int], budget: float) -> Tensor:
    """Return which units of the first sublayer stay: the lowest of all go until the rest is within the budget."""
    every = torch.cat(list(scores))
    cost = torch.cat([torch.full((len(each),), float(one)) for each, one in zip(scores, costs, strict=True)]).double()
    order = every.argsort(stable=True)
    left = cost.sum() - torch.cat([torch.zeros(1).double(), cost[order].cumsum(0)])
    gone = order[: int((left > budget).sum())]
    stays = torch.ones(len(every), dtype=torch.bool)
    stays[gone] = False
    return stays[: len(scores[0])]


def tune_(part: Any, moments: Any, rows: Tensor) -> None:
    """Fit the matrix of a projection to the given model's outputs, by the inputs that are left; the bias stays."""
    if not rows.any():
        part.bias.zero_()
        return
    wanted = moments.cy[rows] - torch.outer(moments.c[rows], part.bias.double())
    part.weight.copy_(ridge_solve(moments.cc[rows][:, rows], wanted, 0.0).T)
