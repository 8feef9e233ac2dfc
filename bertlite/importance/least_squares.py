"""Repair without retraining: output projections are fitted so that layers give what those of the dense model gave.

Shapes:  T real tokens · D hidden · W width of a projection's input: N·H of the heads kept, or the neurons kept
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.config import pruned_neurons
from bertlite.importance.batches import Batch, check_model, eval_mode, inputs_of, read_batches, real_tokens
from bertlite.importance.structures import EVERY_TOKEN
from bertlite.pruning import BertLike, Model, check_linear, layers_of
from bertlite.stack.modules import BertLayer

METHODS = ("mean", "scale", "refit")


def repair(
    pruned: Model, dense: BertLike, batches: Iterable[Batch], method: str = "refit", *, ridge: float = 1e-3
) -> Model:
    """Return a repaired copy of the pruned model; the model is not changed.  See `repair_`."""
    return repair_(copy.deepcopy(pruned), dense, batches, method, ridge=ridge)


def repair_(
    pruned: Model, dense: BertLike, batches: Iterable[Batch], method: str = "refit", *, ridge: float = 1e-3
) -> Model:
    """Bring a pruned model back towards the dense one it came from: no labels, no gradients, seconds.

    Layer by layer from the bottom, the output projection of the attention (and of the feed-forward network, in models
    with pruned neurons) is fitted by least squares so that the input of the LayerNorm is that of the dense model,
    given the outputs of the repaired layers below.  Sums are float64; padding does not count.

    Args:
        dense: the model before pruning, or any with its shape; not changed.
        batches: inputs; labels are ignored.  A few hundred sentences do.
        method: "mean" fits the bias alone, and so folds in the mean of what was removed; "scale" also a factor for
            each head (Kwon et al. 2022) or neuron; "refit" the whole matrix and the bias (K-prune, Park et al. 2024).
        ridge: how strongly factors or matrix are held to what they were, as a share of the mean power of the inputs.

    Returns:
        The model given.  In a layer without heads only the bias is fitted.

    Raises:
        ValueError: no batches, an unknown method, a negative ridge, or models that do not belong together.
        TypeError: a projection is not a plain nn.Linear: merge adapters first.
    """
    check_pair(pruned, dense)
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; have: {', '.join(METHODS)}")
    if not ridge >= 0:
        raise ValueError(f"ridge is {ridge}; it must be 0 or more")
    with eval_mode(pruned, dense), torch.no_grad():
        runs = [PairedRun.start(pruned, dense, batch) for batch in read_batches(pruned, batches)]
        feed_forward = bool(pruned_neurons(pruned.config))
        for own, other in zip(layers_of(pruned), layers_of(dense), strict=True):
            for run in runs:
                run.step_dense(other)
            heads = Moments.of(run.attention_fit(own) for run in runs)
            refit_(own.attention.output.dense, heads, method, own.attention.self.attention_head_size, ridge)
            if feed_forward:
                neurons = Moments.of(run.feed_forward_fit(own) for run in runs)
                refit_(own.output.dense, neurons, method, 1, ridge)
            for run in runs:
                run.step_pruned(own)
    return pruned


def check_pair(pruned: BertLike, dense: BertLike) -> None:
    """Refuse models that were built with other sizes, and projections that cannot be fitted.

    Raises:
        ValueError: the sizes differ.
        TypeError: a projection is not a plain nn.Linear, or a model is none of bertlite's.
    """
    for model in (pruned, dense):
        check_model(model)
    for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        mine, theirs = getattr(pruned.config, field), getattr(dense.config, field)
        if mine != theirs:
            raise ValueError(
                f"the pruned model has {field} {mine}, the dense one {theirs}: they do not belong together"
            )
    for layer, block in enumerate(layers_of(pruned)):
        check_linear(f"encoder.layer.{layer}.attention.output.dense", block.attention.output.dense)
        check_linear(f"encoder.layer.{layer}.output.dense", block.output.dense)


@dataclass
class PairedRun:
    """One batch on its way through the layers of both models."""

    real: Tensor  # (rows, S)
    x: Tensor  # the input of a layer of the pruned model
    arguments: tuple[Any, ...]  # the other arguments of its layers
    dense_x: Tensor
    dense_arguments: tuple[Any, ...]
    targets: tuple[Tensor, ...] = ()  # the inputs of the dense layer's two LayerNorms

    @classmethod
    def start(cls, pruned: BertLike, dense: BertLike, batch: Batch) -> "PairedRun":
        return cls(real_tokens(batch), *first_layer_inputs(pruned, batch), *first_layer_inputs(dense, batch))

    def step_dense(self, block: BertLayer) -> None:
        with recorded_inputs(block.attention.output.LayerNorm, block.output.LayerNorm) as inputs:
            out = block(self.dense_x, *self.dense_arguments)
        self.targets = tuple(target for (target,) in inputs())
        self.dense_x = out[0] if isinstance(out, tuple) else out

    def step_pruned(self, block: BertLayer) -> None:
        out = block(self.x, *self.arguments)
        self.x = out[0] if isinstance(out, tuple) else out

    def attention_fit(self, block: BertLayer) -> tuple[Tensor, Tensor]:
        """Return the input of the attention's output projection, (T, W), and its wanted output, (T, D)."""
        run = partial(block, self.x, *self.arguments)
        inputs, residual = first_call(block.attention.output, run)
        return self.fit(inputs, residual, self.targets[0])

    def feed_forward_fit(self, block: BertLayer) -> tuple[Tensor, Tensor]:
        """Return the input of the feed-forward network's output projection, (T, W), and its wanted output, (T, D)."""
        with recorded_inputs(block.output) as calls:
            block(self.x, *self.arguments)
        ((inputs, residual),) = calls()
        return self.fit(inputs, residual, self.targets[1])

    def fit(self, inputs: Tensor, residual: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.flat(inputs).double(), self.flat(target).double() - self.flat(residual).double()

    def flat(self, x: Tensor) -> Tensor:
        return x[self.real] if x.dim() == 3 else x  # else packed: there is no padding


class StopForward(Exception):  # noqa: N818  # no error
    """Ends a forward that need not go on."""


def first_layer_inputs(model: BertLike, batch: Batch) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the hidden states and the other arguments that the first layer is called with."""
    options = {"use_cache": False} if model.config.is_decoder else {}
    run = partial(model, **inputs_of(batch), **EVERY_TOKEN, **options)
    x, *others = first_call(model.base_model.encoder.layer[0], run)
    return x, tuple(others)


def first_call(module: nn.Module, run: Callable[[], Any]) -> tuple[Any, ...]:
    """Return the arguments that `run` calls a module with, and stop it there."""
    calls: list[tuple[Any, ...]] = []

    def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
        calls.append(args)
        raise StopForward

    hook = module.register_forward_pre_hook(stop)
    try:
        run()
    except StopForward:
        pass
    finally:
        hook.remove()
    (args,) = calls
    return args


@contextmanager
def recorded_inputs(*parts: nn.Module) -> Iterator[Callable[[], list[tuple[Tensor, ...]]]]:
    """Record the arguments that modules are called with; the function given returns them, chunks joined."""
    calls: list[list[tuple[Tensor, ...]]] = [[] for _ in parts]

    def record(calls: list[tuple[Tensor, ...]], module: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls.append(args)

    hooks = [part.register_forward_pre_hook(partial(record, each)) for part, each in zip(parts, calls, strict=True)]
    try:
        yield lambda: [tuple(torch.cat(chunks, -2) for chunks in zip(*each, strict=True)) for each in calls]
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Moments:
    """Second moments about the means, summed over tokens: of inputs C (T, W), and with targets Y (T, D)."""

    mean_c: Tensor  # (W,)
    mean_y: Tensor  # (D,)
    cc: Tensor  # (W, W)
    cy: Tensor  # (W, D)

    @classmethod
    def of(cls, pairs: Iterable[tuple[Tensor, Tensor]]) -> "Moments":
        count, sums = 0, [torch.zeros(())] * 4
        for c, y in pairs:
            count += len(c)
            sums = [old + new for old, new in zip(sums, (c.sum(0), y.sum(0), c.T @ c, c.T @ y), strict=True)]
        if not count:
            raise ValueError("the batches hold padding alone")
        c, y = sums[0] / count, sums[1] / count
        return cls(c, y, sums[2] - count * torch.outer(c, c), sums[3] - count * torch.outer(c, y))


def refit_(dense: nn.Linear, moments: Moments, method: str, width: int, ridge: float) -> None:
    """Fit a projection's bias and, by the method, its matrix, or factors of its columns in blocks of one width."""
    weight = dense.weight.double()  # (D, W)
    residual = moments.cy - moments.cc @ weight.T  # (W, D)
    if not weight.numel():
        pass
    elif method == "refit":
        weight = weight + ridge_solve(moments.cc, residual, ridge).T
    elif method == "scale":
        blocks = weight.shape[1] // width
        products = moments.cc * (weight.T @ weight)
        gram = products.unflatten(1, (blocks, width)).unflatten(0, (blocks, width)).sum((1, 3))
        wanted = (residual * weight.T).sum(1).unflatten(0, (blocks, width)).sum(1)
        weight = weight * (1 + ridge_solve(gram, wanted[:, None], ridge)[:, 0]).repeat_interleave(width)
    dense.weight.copy_(weight)
    dense.bias.copy_(moments.mean_y - weight @ moments.mean_c)


def ridge_solve(gram: Tensor, wanted: Tensor, ridge: float) -> Tensor:
    """Return the x of least |x| for which gram·x is nearest to `wanted`; a ridge draws it towards 0."""
    if not ridge:
        return torch.linalg.pinv(gram, hermitian=True) @ wanted
    power = gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
    return torch.linalg.solve(
        gram + ridge * power * torch.eye(len(gram), dtype=gram.dtype, device=gram.device), wanted
    )
