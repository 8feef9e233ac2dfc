"""Repair without retraining: output projections refitted so that layers give again what the dense ones gave.

Shapes:  T real tokens · D hidden · W width of what a projection reads: N·H heads kept, or neurons kept
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
from bertlite.importance.batches import Batch, as_found, check_model, inputs_of, read_batches, real_tokens
from bertlite.importance.structures import EVERY_TOKEN
from bertlite.pruning import Model, layers_of, refuse_other_than_linear

METHODS = ("mean", "scale", "refit")


def repair(
    pruned: Model, dense: Any, batches: Iterable[Batch], method: str = "refit", *, ridge: float = 1e-3
) -> Model:
    """A copy of the pruned model, repaired; the model is left alone.  See `repair_`."""
    return repair_(copy.deepcopy(pruned), dense, batches, method, ridge=ridge)


def repair_(
    pruned: Model, dense: Any, batches: Iterable[Batch], method: str = "refit", *, ridge: float = 1e-3
) -> Model:
    """Bring a pruned model back towards the dense one it came from: no labels, no gradients, seconds.

    Layer by layer from the bottom, the output projection of the attention (and of the feed-forward network, in models
    with pruned neurons) is fitted by least squares so that what goes into the LayerNorm is what the dense model has
    there, given what the repaired layers below now produce.  Sums are float64; padding does not count.

    Args:
        dense: the model before pruning, or any with its shape; not changed.
        batches: inputs; labels are ignored.  A few hundred sentences do.
        method: "mean" fits the bias alone, and so folds in the mean of what is gone; "scale" also a factor for each
            head (Kwon et al. 2022) or neuron; "refit" the whole matrix and the bias (K-prune, Park et al. 2024).
        ridge: how strongly factors or matrix are held to what they were, as a share of the mean power of the inputs.

    Returns:
        The model given.  In a layer without heads the bias is all there is to fit.

    Raises:
        ValueError: no batches, an unknown method, a negative ridge, or models that do not belong together.
        TypeError: a projection is not a plain nn.Linear: merge adapters first.
    """
    check_pair(pruned, dense)
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; have: {', '.join(METHODS)}")
    if not ridge >= 0:
        raise ValueError(f"ridge is {ridge}; it must be 0 or more")
    with as_found(pruned, dense), torch.no_grad():
        runs = [Run.start(pruned, dense, batch) for batch in read_batches(pruned, batches)]
        feed_forward = bool(pruned_neurons(pruned.config))
        for own, other in zip(layers_of(pruned), layers_of(dense), strict=True):
            for run in runs:
                run.step_dense(other)
            heads = Moments.of(run.pairs(own, 0) for run in runs)
            refit_(own.attention.output.dense, heads, method, own.attention.self.attention_head_size, ridge)
            if feed_forward:
                neurons = Moments.of(run.pairs(own, 1) for run in runs)
                refit_(own.output.dense, neurons, method, 1, ridge)
            for run in runs:
                run.step_pruned(own)
    return pruned


def check_pair(pruned: Any, dense: Any) -> None:
    """Refuse models of which one was not pruned from the other's shape, and projections that cannot be fitted."""
    for model in (pruned, dense):
        check_model(model)
    for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        mine, theirs = getattr(pruned.config, field), getattr(dense.config, field)
        if mine != theirs:
            raise ValueError(
                f"the pruned model has {field} {mine}, the dense one {theirs}: they do not belong together"
            )
    for layer, block in enumerate(layers_of(pruned)):
        refuse_other_than_linear(f"encoder.layer.{layer}.attention.output.dense", block.attention.output.dense)
        refuse_other_than_linear(f"encoder.layer.{layer}.output.dense", block.output.dense)


@dataclass
class Run:
    """One batch on its way through the layers of both models."""

    real: Tensor  # (rows, S)
    x: Tensor  # what comes into a layer of the pruned model
    rest: tuple[Any, ...]  # what its layers are given besides
    dense_x: Tensor
    dense_rest: tuple[Any, ...]
    targets: tuple[Tensor, ...] = ()  # the dense layer's sums before its two LayerNorms

    @classmethod
    def start(cls, pruned: Any, dense: Any, batch: Batch) -> "Run":
        return cls(real_tokens(batch), *first_layer(pruned, batch), *first_layer(dense, batch))

    def step_dense(self, block: Any) -> None:
        with watched(block.attention.output.LayerNorm, block.output.LayerNorm) as seen:
            out = block(self.dense_x, *self.dense_rest)
        self.targets = tuple(target for (target,) in seen())
        self.dense_x = out[0] if isinstance(out, tuple) else out

    def step_pruned(self, block: Any) -> None:
        out = block(self.x, *self.rest)
        self.x = out[0] if isinstance(out, tuple) else out

    def pairs(self, block: Any, which: int) -> tuple[Tensor, Tensor]:
        """What the projection of attention (0) or feed-forward network (1) reads, (T, W), and should make, (T, D)."""
        run = partial(block, self.x, *self.rest)
        if which:
            with watched(block.output) as seen:
                run()
            ((inputs, residual),) = seen()
        else:
            inputs, residual = reached(block.attention.output, run)
        return self.flat(inputs).double(), self.flat(self.targets[which]).double() - self.flat(residual).double()

    def flat(self, x: Tensor) -> Tensor:
        return x[self.real] if x.dim() == 3 else x  # else packed: there is no padding


class Reached(Exception):  # noqa: N818  # no error
    """A forward need not go on."""


def first_layer(model: Any, batch: Batch) -> tuple[Tensor, tuple[Any, ...]]:
    """What the first layer is called with."""
    options = {"use_cache": False} if model.config.is_decoder else {}
    run = partial(model, **inputs_of(batch), **EVERY_TOKEN, **options)
    x, *rest = reached(model.base_model.encoder.layer[0], run)
    return x, tuple(rest)


def reached(module: nn.Module, run: Callable[[], Any]) -> tuple[Any, ...]:
    """What a module is called with by `run`, which goes no further."""
    seen: list[tuple[Any, ...]] = []

    def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args)
        raise Reached

    hook = module.register_forward_pre_hook(stop)
    try:
        run()
    except Reached:
        pass
    finally:
        hook.remove()
    (args,) = seen
    return args


@contextmanager
def watched(*parts: nn.Module) -> Iterator[Callable[[], list[tuple[Tensor, ...]]]]:
    """What modules are called with; chunks are joined."""
    calls: list[list[tuple[Tensor, ...]]] = [[] for _ in parts]

    def watch(calls: list[tuple[Tensor, ...]], module: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls.append(args)

    hooks = [part.register_forward_pre_hook(partial(watch, each)) for part, each in zip(parts, calls, strict=True)]
    try:
        yield lambda: [tuple(torch.cat(chunks, -2) for chunks in zip(*each, strict=True)) for each in calls]
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Moments:
    """Sums over tokens, of inputs C (T, W) and targets Y (T, D), about their means."""

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
    """Fit a projection's bias and, by the method, factors of its columns in blocks of one width, or the matrix."""
    weight = dense.weight.double()  # (D, W)
    missed = moments.cy - moments.cc @ weight.T  # (W, D)
    if not weight.numel():
        pass
    elif method == "refit":
        weight = weight + ridge_solve(moments.cc, missed, ridge).T
    elif method == "scale":
        blocks = weight.shape[1] // width
        products = moments.cc * (weight.T @ weight)
        gram = products.unflatten(1, (blocks, width)).unflatten(0, (blocks, width)).sum((1, 3))
        wanted = (missed * weight.T).sum(1).unflatten(0, (blocks, width)).sum(1)
        weight = weight * (1 + ridge_solve(gram, wanted[:, None], ridge)[:, 0]).repeat_interleave(width)
    dense.weight.copy_(weight)
    dense.bias.copy_(moments.mean_y - weight @ moments.mean_c)


def ridge_solve(gram: Tensor, wanted: Tensor, ridge: float) -> Tensor:
    """The x of least |x| for which gram·x is nearest to `wanted`; with a ridge, held towards 0."""
    if not ridge:
        return torch.linalg.pinv(gram, hermitian=True) @ wanted
    power = gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
    return torch.linalg.solve(
        gram + ridge * power * torch.eye(len(gram), dtype=gram.dtype, device=gram.device), wanted
    )
