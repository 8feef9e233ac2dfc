"""The ways to prune that are compared: each makes a model with at most a share of the MACs, without training."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bertlite import kept_heads, kept_neurons, prune_heads, prune_neurons
from bertlite.importance import (
    head_importance,
    macs,
    neuron_importance,
    rank_by_macs,
    rank_heads,
    rank_neurons,
    repair_,
)
from bertlite.importance.allocation import choose_sizes, head_macs, neuron_macs
from bertlite.importance.batches import Batch
from bertlite.importance.layerwise import (
    loss_curves,
    losses_by_size,
    output_metrics,
    prune_layerwise_,
    prune_to_macs,
)
from bertlite.pruning import layers_of
from scripts.measure.budgets.kwon import kwon

Batches = Sequence[Batch]
Method = Callable[[Any, Batches, float, int], Any]  # model, batches with labels, share of the MACs, length -> pruned


# Choosing by importance


def importance(model: Any, batches: Batches, share: float, length: int, *, repair: bool, target: str) -> Any:
    """Choose by Fisher information for each MAC, over all layers; then fit by least squares."""
    scores = [score(model, batches, "fisher", target=target) for score in (head_importance, neuron_importance)]
    heads, neurons = rank_by_macs(model.config, share, length, scores[0], scores[1])
    pruned = prune_neurons(prune_heads(model, heads), neurons)
    return repair_(pruned, model, batches) if repair else pruned


def group_scores(model: Any, batches: Batches, taylor: bool) -> tuple[Tensor, Tensor]:
    """Return the scores that Torch-Pruning 1.6 gives heads and neurons by default, each over the mean of its layer.

    A score is the mean, over a group's matrices, of the squares (the default, p = 2) or of |W·∂L/∂W| (taylor).
    """
    if taylor:
        model = copy.deepcopy(model).requires_grad_(True)
        for batch in batches:
            (model(**batch).loss / len(batches)).backward()

    def power(weight: Tensor) -> Tensor:
        value = weight.detach().double()
        if not taylor:
            return value.square()
        assert weight.grad is not None
        return (value * weight.grad.double()).abs()

    config, heads, neurons = model.config, [], []
    size = config.hidden_size // config.num_attention_heads
    for block in layers_of(model):
        own = block.attention.self
        parts = [power(each.weight).sum(1) for each in (own.query, own.key, own.value)]
        parts.append(power(block.attention.output.dense.weight).sum(0))
        each = torch.stack(parts).mean(0).unflatten(0, (-1, size)).mean(1)
        heads.append(each / each.mean())
        first, second = power(block.intermediate.dense.weight).sum(1), power(block.output.dense.weight).sum(0)
        each = torch.stack([first, second]).mean(0)
        neurons.append(each / each.mean())
    return torch.stack(heads), torch.stack(neurons)


def torch_pruning(model: Any, batches: Batches, share: float, length: int, *, taylor: bool) -> Any:
    """Prune the same share of all heads and of all neurons, the lowest anywhere, as Torch-Pruning's global pruning."""
    heads, neurons = group_scores(model, batches, taylor)
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        pruned = prune_neurons(prune_heads(model, rank_heads(heads, middle)), rank_neurons(neurons, middle))
        low, high = (
            (low, middle) if macs(pruned.config, length) <= share * macs(model.config, length) else (middle, high)
        )
    return prune_neurons(prune_heads(model, rank_heads(heads, high)), rank_neurons(neurons, high))


# Sublayer by sublayer


def rescored(model: Any, batches: Batches, share: float, length: int) -> Any:
    """Go through the sublayers from the bottom; score all that are left anew, prune one, fit it (as K-prune does).

    The budget that remains is shared by Fisher information for each MAC among the sublayers that remain.
    """
    pruned = copy.deepcopy(model)
    config = model.config
    layers = range(config.num_hidden_layers)
    costs = head_macs(config, length), neuron_macs(config, length)
    for place in range(2 * len(layers)):
        layer, of_neurons = divmod(place, 2)
        heads = head_importance(pruned, batches, "fisher", target="kl", teacher=model)
        neurons = neuron_importance(pruned, batches, "fisher", target="kl", teacher=model)
        kept = [(len(kept_heads(pruned.config, i)), len(kept_neurons(pruned.config, i))) for i in layers]
        spent = sum(kept[i][0] for i in layers if 2 * i < place) * costs[0]
        spent += sum(kept[i][1] for i in layers if 2 * i + 1 < place) * costs[1]
        left = share * macs(config, length) - spent
        for i in layers:  # those that are done are out of the choice
            heads[i] = heads[i] if 2 * i >= place else torch.nan
            neurons[i] = neurons[i] if 2 * i + 1 >= place else torch.nan
        removed = cheapest(heads / costs[0], neurons / costs[1], costs, left)

        units = {layer: removed[of_neurons].get(layer, [])}
        pruned = (prune_neurons if of_neurons else prune_heads)(pruned, units)
        repair_(pruned, model, batches)
    return pruned


def cheapest(
    heads: Tensor, neurons: Tensor, costs: tuple[int, int], budget: float
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Remove the units with the lowest score for each MAC until the rest is within a budget."""
    every = [
        (float(scores[layer, unit]), kind, layer, unit)
        for kind, scores in enumerate((heads, neurons))
        for layer, unit in (~scores.isnan()).nonzero().tolist()
    ]
    total = sum(costs[kind] for _, kind, _, _ in every)
    removed: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
    for _, kind, layer, unit in sorted(every):
        if total <= budget:
            break
        removed[kind].setdefault(layer, []).append(unit)
        total -= costs[kind]
    return removed


# Joint selection


def joint(model: Any, batches: Batches, share: float, length: int) -> Any:
    """Choose jointly, all outputs counting alike: sizes by the share of each sublayer's variance that is lost."""
    pruned = copy.deepcopy(model)
    for _ in prune_layerwise_(
        pruned, model, batches, sizes_by(model, list(loss_curves(model, batches)), share, length)
    ):
        pass
    return pruned


def chosen_once(model: Any, batches: Batches, share: float, length: int) -> Any:
    """Choose on the given model's activations, all at once, and fit afterwards: joint, but not layer by layer."""
    curves = list(loss_curves(model, batches, output_metrics(model, batches)))
    sizes = sizes_by(model, curves, share, length)
    heads, neurons = (
        {layer: pair[kind].removed(size[kind]) for layer, (pair, size) in enumerate(zip(curves, sizes, strict=True))}
        for kind in range(2)
    )
    return repair_(prune_neurons(prune_heads(model, heads), neurons), model, batches)


def sizes_by(model: Any, curves: Any, share: float, length: int) -> list[tuple[int, int]]:
    """Return the sizes of least total loss within a share of the MACs."""
    config, losses = model.config, losses_by_size(model.config, curves)
    head, neuron = head_macs(config, length), neuron_macs(config, length)
    costs = [({n: n * head for n in heads}, {n: n * neuron for n in neurons}) for heads, neurons in losses]
    return choose_sizes(losses, costs, share * macs(config, length))


METHODS: dict[str, Method] = {
    "magnitude (as Torch-Pruning)": lambda *args: torch_pruning(*args, taylor=False),
    "taylor (as Torch-Pruning)": lambda *args: torch_pruning(*args, taylor=True),
    "Kwon 2022, search": lambda *args: kwon(*args, rearranged=False, tuned=False),
    "Kwon 2022, with rearrangement": lambda *args: kwon(*args, tuned=False),
    "Kwon 2022, with mask tuning": lambda *args: kwon(*args),
    "fisher for each MAC": lambda *args: importance(*args, repair=False, target="kl"),
    "fisher for each MAC, refit": lambda *args: importance(*args, repair=True, target="kl"),
    "sublayer by sublayer, rescored (as K-prune)": rescored,
    "joint, plain error": joint,
    "joint, chosen at once": chosen_once,
    "joint (prune to)": prune_to_macs,
    "joint, with labels (prune to --label)": lambda *args: prune_to_macs(*args, target="loss"),
}
