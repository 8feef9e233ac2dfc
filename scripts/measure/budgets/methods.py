"""The ways to prune that are compared: each makes a model with at most a share of the MACs, without training."""

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from bertlite import kept_heads, kept_neurons, prune_heads, prune_neurons
from bertlite.importance import (
    head_importance,
    loss_curves,
    macs,
    neuron_importance,
    output_metrics,
    prune_layerwise_,
    rank_heads,
    rank_neurons,
    repair_,
)
from bertlite.importance.allocation import Choice, head_macs, neuron_macs
from bertlite.importance.batches import Batch, count_examples, eval_mode
from bertlite.importance.layerwise import Curves, Metrics, sizes_within
from bertlite.importance.least_squares import refit_, start_runs
from bertlite.importance.moments import gather
from bertlite.importance.predictions import predictions
from bertlite.importance.structures import EVERY_TOKEN, HEADS, NEURONS, STRUCTURES, run
from bertlite.pruning import layers_of
from scripts.measure.budgets.kwon import both_gradients, kwon, within_budget


class Subject:
    """A model with texts to calibrate by, and what several methods or shares need of them, measured once."""

    def __init__(self, model: Any, batches: Sequence[Batch], length: int) -> None:
        self.model, self.batches, self.length = model, batches, length
        self.examples = sum(count_examples(batch) for batch in batches)
        self.measured: dict[str, tuple[Curves, list[Metrics]]] = {}  # by target

    @cached_property
    def fisher(self) -> tuple[Tensor, Tensor]:
        heads = head_importance(self.model, self.batches, "fisher", target="kl")
        return heads, neuron_importance(self.model, self.batches, "fisher", target="kl")

    @cached_property
    def drawn(self) -> list[list[Tensor]]:
        """Labels of each batch, drawn from the model's own predictions."""
        generator = torch.Generator().manual_seed(0)
        with eval_mode(self.model), torch.no_grad():
            found = [predictions(self.model, run(self.model, batch), batch) for batch in self.batches]
        return [[each.draw(generator) for each in of_batch] for of_batch in found]

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        return both_gradients(self.model, self.batches)

    @cached_property
    def magnitudes(self) -> tuple[Tensor, Tensor]:
        return group_scores(self.model, self.batches, taylor=False)

    @cached_property
    def taylors(self) -> tuple[Tensor, Tensor]:
        return group_scores(self.model, self.batches, taylor=True)

    def curves(self, target: str) -> tuple[Curves, list[Metrics]]:
        """Return what sizes lose by a target, and the metrics that weigh it."""
        if target not in self.measured:
            metrics = output_metrics(self.model, self.batches, target=target)
            self.measured[target] = [*loss_curves(self.model, self.batches, metrics)], metrics
        return self.measured[target]

    def without(self, heads: Choice, neurons: Choice) -> Any:
        return prune_neurons(prune_heads(self.model, heads), neurons)


Method = Callable[[Subject, float], Any]  # the subject, the share of the MACs -> the pruned model


# Choosing by importance


def fisher(subject: Subject, share: float) -> Any:
    """Choose by Fisher information for each MAC, over all layers; then fit by least squares."""
    pruned = subject.without(*within_budget(subject.model.config, share, subject.length, *subject.fisher))
    return repair_(pruned, subject.model, subject.batches)


def group_scores(model: Any, batches: Sequence[Batch], taylor: bool) -> tuple[Tensor, Tensor]:
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


def torch_pruning(subject: Subject, share: float, *, taylor: bool) -> Any:
    """Prune the same share of all heads and of all neurons, the lowest anywhere, as Torch-Pruning's global pruning."""
    heads, neurons = subject.taylors if taylor else subject.magnitudes
    most = share * macs(subject.model.config, subject.length)
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        pruned = subject.without(rank_heads(heads, middle), rank_neurons(neurons, middle))
        low, high = (low, middle) if macs(pruned.config, subject.length) <= most else (middle, high)
    return subject.without(rank_heads(heads, high), rank_neurons(neurons, high))


def kwon_2022(subject: Subject, share: float) -> Any:
    return kwon(subject.model, subject.batches, subject.gradients, share, subject.length)


# Sublayer by sublayer


def rescored(subject: Subject, share: float) -> Any:
    """Go through the sublayers from the bottom; score all that are left anew, prune one, fit it (as K-prune does).

    The budget that remains is shared by Fisher information for each MAC among the sublayers that remain.
    """
    model, batches = subject.model, subject.batches
    pruned = copy.deepcopy(model)
    with eval_mode(pruned, model), torch.no_grad():
        runs = start_runs(pruned, model, batches)
        for layer, (block, other) in enumerate(zip(layers_of(pruned), layers_of(model), strict=True)):
            for each in runs:
                each.step_dense(other)
            for place, structure in enumerate(STRUCTURES):
                removed = choose_of_rest(subject, pruned, share, 2 * layer + place)[place].get(layer, [])
                structure.prune_(pruned, {layer: removed})
                refit_(structure.dense(block), gather(each.fit(structure, block) for each in runs), None)
            for each in runs:
                each.step_pruned(block)
    return pruned


def choose_of_rest(subject: Subject, pruned: Any, share: float, done: int) -> tuple[Choice, Choice]:
    """Return what to remove of the sublayers above the first `done`, which are pruned, for a share of all MACs."""
    config, length = subject.model.config, subject.length
    costs = head_macs(config, length), neuron_macs(config, length)
    spent = 0
    for place in range(done):
        layer, kind = divmod(place, 2)
        spent += len((kept_heads, kept_neurons)[kind](pruned.config, layer)) * costs[kind]
    heads, neurons = fisher_of_rest(subject, pruned, done)
    return cheapest(heads / costs[0], neurons / costs[1], costs, share * macs(config, length) - spent)


def fisher_of_rest(subject: Subject, pruned: Any, done: int) -> tuple[Tensor, Tensor]:
    """Return "fisher" scores of heads and of neurons for target "kl", nan in the first `done` sublayers.

    One backward pass gives both, and ends where they begin.
    """
    shapes = HEADS.shape(pruned), NEURONS.shape(pruned)
    scores = tuple(torch.full(shape, torch.nan, dtype=torch.float64) for shape in shapes)
    places = range(done, 2 * pruned.config.num_hidden_layers)
    for place in places:
        scores[place % 2][place // 2] = 0
    gates: dict[int, Tensor] = {}

    def gated(place: int, width: int, module: Any, args: tuple[Tensor]) -> Tensor:
        (x,) = args
        gates[place] = torch.ones(len(x), x.shape[-1] // width, requires_grad=True)
        return x * gates[place].repeat_interleave(width, 1)[:, None]

    blocks = list(layers_of(pruned))
    with ExitStack() as hooks, torch.enable_grad():
        for place in places:
            structure, block = STRUCTURES[place % 2], blocks[place // 2]
            gate = partial(gated, place, structure.width(block))
            hooks.enter_context(structure.dense(block).register_forward_pre_hook(gate))
        for batch, labels in zip(subject.batches, subject.drawn, strict=True):
            found = predictions(pruned, run(pruned, batch, **EVERY_TOKEN), batch)
            losses = sum(p.nll(drawn) for p, drawn in zip(found, labels, strict=True))
            assert isinstance(losses, Tensor)
            grads = torch.autograd.grad(losses.sum(), [gates[place] for place in places])
            for place, grad in zip(places, grads, strict=True):
                scores[place % 2][place // 2] += grad.double().square().sum(0) / subject.examples
    return scores[0], scores[1]


def cheapest(heads: Tensor, neurons: Tensor, costs: tuple[int, int], budget: float) -> tuple[Choice, Choice]:
    """Remove the units with the lowest score for each MAC until the rest is within a budget."""
    every = [
        (float(scores[layer, unit]), kind, layer, unit)
        for kind, scores in enumerate((heads, neurons))
        for layer, unit in (~scores.isnan()).nonzero().tolist()
    ]
    total = sum(costs[kind] for _, kind, _, _ in every)
    removed: tuple[Choice, Choice] = ({}, {})
    for _, kind, layer, unit in sorted(every):
        if total <= budget:
            break
        removed[kind].setdefault(layer, []).append(unit)
        total -= costs[kind]
    return removed


# Joint selection


def joint(subject: Subject, share: float, target: str) -> Any:
    """Choose jointly, layer by layer, errors weighed by what they do to a target."""
    curves, metrics = subject.curves(target)
    sizes = sizes_within(subject.model.config, curves, share, subject.length)
    pruned = copy.deepcopy(subject.model)
    for _ in prune_layerwise_(pruned, subject.model, subject.batches, sizes, metrics=metrics):
        pass
    return pruned


def chosen_once(subject: Subject, share: float) -> Any:
    """Choose on the given model's activations, all at once, and fit afterwards: joint, but not layer by layer."""
    curves, _ = subject.curves("kl")
    sizes = sizes_within(subject.model.config, curves, share, subject.length)
    heads, neurons = (
        {layer: pair[kind].removed(size[kind]) for layer, (pair, size) in enumerate(zip(curves, sizes, strict=True))}
        for kind in range(2)
    )
    return repair_(subject.without(heads, neurons), subject.model, subject.batches)


METHODS: dict[str, Method] = {
    "magnitude (as Torch-Pruning)": partial(torch_pruning, taylor=False),
    "taylor (as Torch-Pruning)": partial(torch_pruning, taylor=True),
    "Kwon 2022, with mask tuning": kwon_2022,
    "fisher for each MAC, refit": fisher,
    "sublayer by sublayer, rescored (as K-prune)": rescored,
    "joint, chosen at once": chosen_once,
    "joint (prune to)": partial(joint, target="kl"),
    "joint, with labels (prune to --label)": partial(joint, target="loss"),
}
