"""Prune a model to given sizes, and fit the rest to the dense model layer by layer, from the bottom.

The heads of a layer, and its neurons, are chosen jointly (`pruning.importance.selection`), once for all sizes.
For each sublayer of the dense model, `loss_curves` gives the order of removal and the loss at each size.
Choosing again after the layers below are pruned and fitted gains nothing.

The nearest method is ZipLM (Kurtic et al. 2023, arXiv:2302.04089), which removes structures by the same formulas.
ZipLM's loss is the squared error of a sublayer's output, and it alternates steps of pruning and training.  Here the
error is weighted by second moments of the gradient, and all matrices are fitted instead of trained.

Shapes:  L layers · D hidden · W inputs of an output projection, of n units with w inputs each
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.config import BertConfig
from bertlite.models.structure import BertLike, Model, check_linear, copy_model, layers_of
from bertlite.pruning.importance.allocation import BySize, UnitCosts, choose_sizes
from bertlite.pruning.importance.batches import Batch, count_examples, eval_mode, flatten, read_batches, real_tokens
from bertlite.pruning.importance.least_squares import check_pair, fit_layers_, start_runs, warn_of_few
from bertlite.pruning.importance.measurements import ScoringTask
from bertlite.pruning.importance.moments import Sums, add_gram_, add_ridge_, packed_zeros, unpack
from bertlite.pruning.importance.selection import Elimination, eliminate
from bertlite.pruning.importance.structures import HEADS, STRUCTURES, Reached, Structure, run_hooked
from bertlite.stack.modules import BertLayer
from bertlite.support.kinds import checked
from bertlite.support.memory import release_memory

GRID = 48  # sizes of a feed-forward network that are tried: multiples of 1/48 of its neurons
DRAWS, MOST_DRAWS = 1024, 8  # labels to estimate second moments of gradients from; at most so many of each example
TOKENS_TO_CHOOSE = 8  # tokens for each input of the widest matrix that sizes are chosen by: twice as many gain nothing
RIDGE = 1e-3  # the joint selection's ridge, as a share of the mean power of the inputs
Sizes = Sequence[tuple[int, int]]  # for each layer, the heads and the neurons that it keeps


def prune_layerwise_(
    model: Model,
    dense: BertLike,
    batches: Iterable[Batch],
    curves: "Curves",
    sizes: Sizes,
    *,
    ridge: float | None = None,
    start: int = 0,
    done: Callable[[int], object] | None = None,
) -> Model:
    """Prune a model to these sizes and fit it to the dense model; return it.

    All matrices of a layer are fitted by least squares to the dense model's outputs, on inputs from the pruned and
    fitted layers below: first those that compute heads or neurons, then the output projection, as in `repair`.

    Args:
        model: a copy of `dense`; changed in place.
        batches: inputs; labels are ignored.
        curves: from `loss_curves` of `dense`: the order in which units are removed.
        sizes: for each layer the heads and the neurons to keep, at most as many as the layer has.
        ridge: the ridge of the fit; by default chosen by cross-validation, as in `repair`.
        start: the first layer to prune; layers below are pruned and fitted already.
        done: called with each layer's number when it is pruned and fitted.

    Raises:
        ValueError: the sizes or the curves do not fit, there are no batches, or the models do not belong together.

    Warns if there are fewer than two tokens for each input of a fitted matrix.
    """
    check_pair(model, dense)
    check_sizes(model, dense, curves, sizes, start)
    with eval_mode(model, dense), torch.no_grad():
        runs = start_runs(model, dense, batches)
        width = model.config.hidden_size // model.config.num_attention_heads
        warn_of_few(runs, (size for heads, neurons in sizes for size in (heads * width, neurons)))
        fitted = fit_layers_(model, dense, runs, ridge, start=start, all_matrices=True)

        # A layer is pruned and then fitted on the outputs of the layers below, which are finished.
        for layer in range(start, len(sizes)):
            for structure, curve, count in zip(STRUCTURES, curves[layer], sizes[layer], strict=True):
                units = structure.kept(model.config, layer)
                structure.prune_(model, {layer: [units[i] for i in curve.removed(count)]})
            next(fitted)
            if done is not None:
                done(layer)
    return model


def check_sizes(model: BertLike, dense: BertLike, curves: "Curves", sizes: Sizes, start: int) -> None:
    """Raise ValueError for sizes that a model cannot be pruned to, or curves of another model."""
    layers = model.config.num_hidden_layers
    for what, given in (("sizes", sizes), ("curves", curves)):
        if len(given) != layers:
            raise ValueError(f"there are {what} for {len(given)} layers; the model has {layers}")

    # A curve holds for one model: the same units in the same layers, of which a size keeps some.
    for layer, block in list(enumerate(layers_of(model)))[start:]:
        for structure, curve, count in zip(STRUCTURES, curves[layer], sizes[layer], strict=True):
            for part in structure.readers(block):
                check_linear(f"a matrix for the {structure.unit}s of layer {layer}", part)
            units, unit = structure.kept(model.config, layer), structure.unit
            have = len(units)
            if units != structure.kept(dense.config, layer):
                raise ValueError(f"layer {layer} has other {unit}s than the dense model: prune a copy of it")
            if len(curve.order) != have:
                raise ValueError(f"layer {layer} has {have} {unit}s, its curve {len(curve.order)}")
            if not 0 <= count <= have:
                raise ValueError(f"layer {layer} cannot keep {count} {unit}s: it has {have}")


def root(metric: Tensor) -> Tensor:
    """Return R with R·Rᵀ = metric, for a positive semidefinite metric, without columns of zeros."""
    values, vectors = torch.linalg.eigh(metric)
    large = values > 1e-12 * values[-1].clamp(min=torch.finfo(values.dtype).tiny)
    return vectors[:, large] * values[large].sqrt()


Metrics = tuple[Tensor, Tensor]  # for a layer's attention and feed-forward outputs, (D, D) each
Curves = list[tuple[Elimination, Elimination]]  # for each layer's attention and feed-forward network


def loss_curves(
    model: BertLike,
    batches: Iterable[Batch],
    metrics: Sequence[Metrics] | None = None,
    *,
    inputs: Sequence[Sums] = (),
    done: Callable[[int, tuple[Elimination, Elimination]], object] | None = None,
) -> Curves:
    """Return for each layer the loss of removing heads, and of removing neurons, when the rest is fitted again.

    Args:
        metrics: from `output_metrics`; the losses are then nats per example, to second order.  Without them they are
            the squared error of the sublayer's output, as a share of the variance of that output.
        inputs: from `output_metrics` of the same batches, which then are not run again.
        done: called with each layer's number and losses when they are there.
    """
    read = read_batches(model, batches)
    if not inputs:
        inputs = input_sums(model)
        with eval_mode(model), torch.no_grad():
            for batch in read:
                add_inputs_(inputs, model, batch)
    release_memory()  # the tokens left gaps that large matrices do not fit into

    # To second order a loss is half of a quadratic form; it is the mean over the examples.
    examples = sum(len(real_tokens(batch)) for batch in read)
    every: Curves = []
    for layer, block in enumerate(layers_of(model)):
        scaled = []
        for place, (structure, sums) in enumerate(zip(STRUCTURES, inputs[2 * layer : 2 * layer + 2], strict=True)):
            metric, scale = (None, 1.0) if metrics is None else (metrics[layer][place], 0.5 / examples)
            scaled.append(curve(sums.gram, structure, block, metric, scale))
        every.append((scaled[0], scaled[1]))
        if done is not None:
            done(layer, every[-1])
    return every


@torch.no_grad()
def curve(gram: Tensor, structure: Structure, block: BertLayer, metric: Tensor | None, scale: float) -> Elimination:
    """Return the losses of removing the units of a sublayer; RIDGE keeps the fit close to the old weights.

    Outputs are fitted to the old weights' outputs: as long as nothing is removed, the old weights are the fit.
    """
    weight = structure.dense(block).weight.double()
    if metric is None:
        scale = 1 / float(((weight @ gram) * weight).sum().clamp(min=1e-300))
    fit = weight.T if metric is None else weight.T @ root(metric)
    found = eliminate(add_ridge_(gram, RIDGE), fit, structure.width(block))
    return Elimination(found.order, found.losses * scale)


def input_sums(model: BertLike) -> list[Sums]:
    """Return empty sums for the inputs of each layer's two output projections, which are the units' outputs."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    return [Sums(dtype) for _ in range(2 * model.config.num_hidden_layers)]


def add_inputs_(sums: Sequence[Sums], model: BertLike, batch: Batch) -> None:
    """Run the layers on a batch and add the products of the inputs of their output projections."""
    real = real_tokens(batch)

    def see(place: int, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        sums[place].add_inputs(flatten(args[0], real))
        if place == len(sums) - 1:
            raise Reached

    with suppress(Reached):
        run_hooked(model, batch, see)


def batches_to_choose(batches: Sequence[Batch], width: int) -> Sequence[Batch]:
    """Return the batches to choose sizes by, evenly spaced: as many as have enough texts, and enough tokens for
    matrices with `width` inputs, but at least half.
    """
    texts, tokens = sum(map(count_examples, batches)), sum(int(real_tokens(batch).sum()) for batch in batches)
    share = max(0.5, DRAWS / 2 / max(texts, 1), TOKENS_TO_CHOOSE * width / max(tokens, 1))
    count = min(math.ceil(share * len(batches)), len(batches))
    return [batches[i * len(batches) // count] for i in range(count)]


def output_metrics(
    model: BertLike,
    batches: Iterable[Batch],
    *,
    target: str = "kl",
    draws: int | None = None,
    seed: int = 0,
    inputs: Sequence[Sums] = (),
    shown: Callable[[list[Batch]], Iterable[Batch]] = iter,
) -> list[Metrics]:
    """Return the second moments of the gradient at the outputs of each layer's sublayers, means over real tokens.

    An error E of a sublayer's output increases the KL divergence (with labels, the loss to second order) by about
    E·G·Eᵀ / 2, summed over tokens.  G is the Fisher information, with tokens assumed independent of each other and of
    the inputs (Martens and Grosse 2015).

    For the divergence, labels are drawn from the model's predictions: one for each example, or up to MOST_DRAWS of
    fewer than DRAWS examples.

    Args:
        draws: so many labels of each example instead.
        inputs: from `input_sums`; they get sums over the same forwards, for `loss_curves`.
        shown: may show the progress over the batches of all draws.
    """
    task = ScoringTask(model, HEADS, target=target, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    zero = torch.zeros(1, dtype=torch.float64, device=model.device)
    sums = [packed_zeros(width, zero) for _ in range(2 * layers)]
    read = task.labelled(batches)
    examples, tokens = sum(map(count_examples, read)), sum(int(real_tokens(batch).sum()) for batch in read)
    draws = draws or draws_of(target, examples)
    with eval_mode(model):
        for i, batch in enumerate(shown(read * draws)):
            objective = task.objective(batch, generator)
            add_gradients_(sums, model, batch, objective, inputs if i < len(read) else ())
    means = [unpack(x, width).div_(tokens * draws) for x in sums]
    return list(zip(means[::2], means[1::2], strict=True))


def draws_of(target: str, examples: int) -> int:
    """Return how often the gradients of each example are computed."""
    return 1 if target == "loss" or not examples else min(MOST_DRAWS, max(1, DRAWS // examples))


def add_gradients_(
    sums: Sequence[Tensor], model: BertLike, batch: Batch, objective: Callable[[Any], Tensor], inputs: Sequence[Sums]
) -> None:
    """Add the products of the gradients of a batch's summed loss at the output of each sublayer.

    Args:
        inputs: sums that get the products of the inputs of the output projections; none, if it is empty.
    """
    real, leaves = real_tokens(batch), []

    def see(place: int, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        if inputs:
            inputs[place].add_inputs(flatten(args[0].detach(), real))
        if not out.requires_grad:
            leaves.append(out.requires_grad_())
        dtype = torch.promote_types(out.dtype, torch.float32)
        out.register_hook(lambda grad: add_gram_(sums[place], flatten(grad, real).to(dtype)))

    losses = objective(run_hooked(model, batch, see))
    torch.autograd.grad(losses[~losses.detach().isnan()].sum(), leaves)


# To a budget


@checked
def prune_layerwise(
    model: Model, batches: Iterable[Batch], share: float, length: int, *, target: str = "kl", seed: int = 0
) -> Model:
    """Return a copy of the model with at most a share of the unpruned model's MACs; no weight is trained.

    Sizes have the least expected loss.  Heads and neurons are chosen jointly, and the remaining weights are fitted to
    the outputs of the model, layer by layer.  A layer may lose its attention, its feed-forward network, or both.

    Args:
        batches: about a thousand texts; labels are read only for target "loss".
        share: above 0 and up to 1.
        length: the length of the sequence that MACs are counted for, in tokens.
        target: "kl", the divergence from the model's own predictions, or "loss".

    Raises:
        ValueError: the share is not above 0 and up to 1, or there are no batches.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share is {share}; it must be above 0 and up to 1, of the unpruned model's MACs")
    read = read_batches(model, batches)
    curves = curves_to_choose(model, read, target=target, seed=seed)
    sizes = sizes_within(model.config, curves, share, length)
    return prune_layerwise_(copy_model(model), model, read, curves, sizes)


def curves_to_choose(model: BertLike, batches: Sequence[Batch], *, target: str = "kl", seed: int = 0) -> Curves:
    """Return the curves that sizes are chosen by, from `batches_to_choose`."""
    inputs, some = input_sums(model), batches_to_choose(batches, model.config.intermediate_size)
    draws = draws_of(target, sum(map(count_examples, batches)))
    metrics = output_metrics(model, some, target=target, draws=draws, seed=seed, inputs=inputs)
    return loss_curves(model, some, metrics, inputs=inputs)


def sizes_within(config: BertConfig, curves: Curves, share: float, length: int) -> list[tuple[int, int]]:
    """Return the sizes with the least expected loss and at most a share of the unpruned model's MACs."""
    losses, unit = losses_by_size(config, curves), UnitCosts.macs(config, [length])
    built = unit.total([(config.num_attention_heads, config.intermediate_size)] * len(losses))
    return choose_sizes(losses, unit.by_size(losses), share * built)


def losses_by_size(config: BertConfig, curves: Curves) -> list[BySize]:
    """Return the losses of all numbers of heads, and of evenly spaced numbers of neurons."""
    steps = {round(config.intermediate_size * i / GRID) for i in range(GRID + 1)}
    found: list[BySize] = []
    for attention, network in curves:
        heads = {n: attention.loss(n) for n in range(len(attention.order) + 1)}
        have = len(network.order)
        found.append((heads, {n: network.loss(n) for n in sorted({*steps, have}) if n <= have}))
    return found
