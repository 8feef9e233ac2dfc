"""Repair without retraining: fit output projections so that layers give the outputs of the dense model's.

Shapes:  T real tokens · D hidden · W width of a projection's input: N·H of the heads kept, or the neurons kept
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.config import pruned_neurons
from bertlite.importance.batches import Batch, check_model, eval_mode, inputs_of, read_batches, real_tokens
from bertlite.importance.held_out import HeldOut, Linear, between
from bertlite.importance.moments import (
    Fit,
    Moments,
    choose_ridge,
    fit_factors,
    fit_matrix,
    fit_nothing,
    gather,
    total,
)
from bertlite.importance.predictions import divergence, predictions
from bertlite.importance.structures import EVERY_TOKEN, run
from bertlite.pruning import BertLike, Model, check_linear, layers_of
from bertlite.stack.modules import BertLayer

METHODS = ("mean", "scale", "refit")
FEW = 2  # tokens for each input of a matrix: with fewer, its fit is unreliable
WORSE, ROUNDING = 1.01, 1e-6  # a divergence, in nats, may grow by this factor and amount before a warning


def repair(
    pruned: Model, dense: BertLike, batches: Iterable[Batch], method: str = "refit", *, ridge: float | None = None
) -> Model:
    """Return a repaired copy of the pruned model; the model is not changed.  See `repair_`."""
    return repair_(copy.deepcopy(pruned), dense, batches, method, ridge=ridge)


def repair_(
    pruned: Model, dense: BertLike, batches: Iterable[Batch], method: str = "refit", *, ridge: float | None = None
) -> Model:
    """Bring a pruned model back towards the dense one it came from: no labels, no gradients, seconds.

    Layer by layer from the bottom, the output projection of the attention (and of the feed-forward network, in models
    with pruned neurons) is fitted by least squares so that the input of the LayerNorm is that of the dense model,
    given the outputs of the repaired layers below.  Sums are float64; padding does not count.

    Args:
        dense: the model before pruning, or any with its shape; not changed.
        batches: inputs, such as a few hundred sentences; labels are ignored.
        method: "mean" fits only the bias, which adds the mean of what was removed; "scale" also a factor for each head
            (Kwon et al. 2022) or neuron; "refit" the whole matrix and the bias (K-prune, Park et al. 2024).
        ridge: the regularisation of factors or matrix towards their old values, as a share of the inputs' mean power.
            By default cross-validation over sentences chooses it for each projection, from 1e-5 to 10 or infinity,
            which changes only the bias.  "mean" and "scale" then go only so far towards the fit as predictions for
            held-out sentences get significantly closer to the dense model's, with no more labels that differ.  With a
            ridge given, they go all the way ("mean" has no matrix to regularise and takes 0).

    Returns:
        The model given.  In a layer without heads only the bias is fitted.  Warns if "refit" has fewer than two tokens
        for each input of a matrix, and if predictions on these batches are further from the dense model's than before,
        which can happen although the layers are closer.

    Raises:
        ValueError: no batches, an unknown method, a negative ridge, a single sentence and no ridge, or models that do
            not belong together.
        TypeError: a projection is not a plain nn.Linear: merge adapters first.
    """
    check_pair(pruned, dense)
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; have: {', '.join(METHODS)}")
    if ridge is not None and not ridge >= 0:
        raise ValueError(f"ridge is {ridge}; it must be 0 or more")
    read, feed_forward = read_batches(pruned, batches), bool(pruned_neurons(pruned.config))
    with eval_mode(pruned, dense), torch.no_grad():
        before = mean_divergence(pruned, dense, read)
        runs = start_runs(pruned, dense, read)
        if method == "refit":
            parts = [block.attention.output.dense for block in layers_of(pruned)]
            parts += [block.output.dense for block in layers_of(pruned)] if feed_forward else []
            warn_of_few(runs, (part.in_features for part in parts))
        held_out = HeldOut.of(pruned, dense, read, runs) if method != "refit" and ridge is None else None
        for layer, (own, other) in enumerate(zip(layers_of(pruned), layers_of(dense), strict=True)):
            choose_share = None if held_out is None else partial(held_out.choose_share, layer)
            for each in runs:
                each.step_dense(other)
            heads = gather(each.attention_fit(own) for each in runs)
            refit_(
                own.attention.output.dense, heads, method, own.attention.self.attention_head_size, ridge, choose_share
            )
            if feed_forward:
                neurons = gather(each.feed_forward_fit(own) for each in runs)
                refit_(own.output.dense, neurons, method, 1, ridge, choose_share)
            for each in runs:
                each.step_pruned(own)
        after = mean_divergence(pruned, dense, read)
    if after > WORSE * before + ROUNDING:
        warnings.warn(
            f"after repair {method!r} predictions are {after:.3g} nats from the dense model's; before, they were"
            f" {before:.3g}: use 'refit', or give more batches",
            stacklevel=2,
        )
    return pruned


def warn_of_few(runs: "Sequence[PairedRun]", widths: Iterable[int]) -> None:
    """Warn if matrices are fitted to so few tokens that the fit may harm other texts."""
    tokens, widest = sum(len(each.sentence) for each in runs), max(widths, default=0)
    if 0 < tokens < FEW * widest:
        warnings.warn(
            f"matrices with {widest} inputs are fitted to {tokens} tokens, too few for other texts:"
            f" give {FEW * widest} tokens or more, or repair by 'mean' or 'scale'",
            stacklevel=3,
        )


def mean_divergence(model: BertLike, dense: BertLike, batches: Sequence[Batch]) -> float:
    """Return the mean divergence of a model's predictions from the dense model's, in nats per example."""
    found = []
    for batch in batches:
        p, q = (predictions(each, run(each, batch), batch) for each in (dense, model))
        found.append(divergence(p, q).double())
    return float(torch.cat(found).mean())


def check_pair(pruned: BertLike, dense: BertLike) -> None:
    """Check that two models have the same sizes, and that their projections can be fitted.

    Raises:
        ValueError: the sizes differ.
        TypeError: a projection is not a plain nn.Linear, or a model is not one of bertlite's.
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
    """The states of one batch in the layers of both models."""

    first: int  # the number of its first row among all
    real: Tensor  # (rows, S)
    sentence: Tensor  # (T,), the number of each token's row
    x: Tensor  # the input of a layer of the pruned model
    arguments: tuple[Any, ...]  # the other arguments of its layers
    dense_x: Tensor
    dense_arguments: tuple[Any, ...]
    below: Any = None  # the output of the pruned model's last layer that ran
    targets: tuple[Tensor, ...] = ()  # the inputs of the dense layer's two LayerNorms

    @classmethod
    def start(cls, pruned: BertLike, dense: BertLike, batch: Batch, before: int) -> "PairedRun":
        real = real_tokens(batch)
        sentence = real.nonzero()[:, 0] + before
        return cls(before, real, sentence, *first_layer_inputs(pruned, batch), *first_layer_inputs(dense, batch))

    def step_dense(self, block: BertLayer) -> None:
        with recorded_inputs(block.attention.output.LayerNorm, block.output.LayerNorm) as inputs:
            out = block(self.dense_x, *self.dense_arguments)
        self.targets = tuple(target for (target,) in inputs())
        self.dense_x = out[0] if isinstance(out, tuple) else out

    def step_pruned(self, block: BertLayer) -> None:
        self.below = out = block(self.x, *self.arguments)
        self.x = out[0] if isinstance(out, tuple) else out

    def attention_fit(self, block: BertLayer) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input of the attention's output projection, (T, W), its wanted output, (T, D), and sentences."""
        attend = partial(block, self.x, *self.arguments)
        inputs, residual = first_call(block.attention.output, attend)
        return self.fit(inputs, residual, self.targets[0])

    def feed_forward_fit(self, block: BertLayer) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same for the output projection of the feed-forward network."""
        with recorded_inputs(block.output) as calls:
            block(self.x, *self.arguments)
        ((inputs, residual),) = calls()
        return self.fit(inputs, residual, self.targets[1])

    def fit(self, inputs: Tensor, residual: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wanted = self.flat(target).double() - self.flat(residual).double()
        return self.flat(inputs).double(), wanted, self.sentence

    def flat(self, x: Tensor) -> Tensor:
        return x[self.real] if x.dim() == 3 else x  # else packed: there is no padding


def start_runs(pruned: BertLike, dense: BertLike, batches: Iterable[Batch]) -> list[PairedRun]:
    """Return the runs of all batches, before the first layer."""
    runs, before = [], 0
    for batch in read_batches(pruned, batches):
        runs.append(PairedRun.start(pruned, dense, batch, before))
        before += len(runs[-1].real)
    return runs


class StopForward(Exception):  # noqa: N818  # no error
    """Ends a forward early."""


def first_layer_inputs(model: BertLike, batch: Batch) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the hidden states and the other arguments that the first layer is called with."""
    options = {"use_cache": False} if model.config.is_decoder else {}
    call = partial(model, **inputs_of(batch), **EVERY_TOKEN, **options)
    x, *others = first_call(model.base_model.encoder.layer[0], call)
    return x, tuple(others)


def first_call(module: nn.Module, run: Callable[[], Any]) -> tuple[Any, ...]:
    """Run until a module is called; return its arguments."""
    calls: list[tuple[Any, ...]] = []

    def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
        calls.append(args)
        raise StopForward

    with module.register_forward_pre_hook(stop), suppress(StopForward):
        run()
    (args,) = calls
    return args


@contextmanager
def recorded_inputs(*parts: nn.Module) -> Iterator[Callable[[], list[tuple[Tensor, ...]]]]:
    """Record the arguments of modules; yield a function that returns them, chunks joined."""
    calls: list[list[tuple[Tensor, ...]]] = [[] for _ in parts]

    def record(calls: list[tuple[Tensor, ...]], module: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls.append(args)

    with ExitStack() as hooks:
        for part, each in zip(parts, calls, strict=True):
            hooks.enter_context(part.register_forward_pre_hook(partial(record, each)))
        yield lambda: [tuple(torch.cat(chunks, -2) for chunks in zip(*each, strict=True)) for each in calls]


def refit_(
    dense: nn.Linear,
    folds: Sequence[Moments],
    method: str,
    width: int,
    ridge: float | None,
    choose_share: Callable[[nn.Linear, Sequence[Linear]], float] | None = None,
) -> None:
    """Fit a projection's bias and, by the method, its matrix, or factors of blocks of `width` columns.

    With `choose_share`, it goes only that share of the way to the fit.
    """
    old, moments = (dense.weight.double(), dense.bias.double()), total(folds)
    fits: dict[str, Fit] = {"mean": fit_nothing, "scale": partial(fit_factors, width=width), "refit": fit_matrix}
    fit = fits[method]
    if ridge is None:
        ridge = choose_ridge(folds, old[0], fit) if method != "mean" and old[0].numel() else 0.0

    def fitted(moments: Moments) -> Linear:
        weight = fit(moments, old[0], ridge)
        return weight, moments.bias(weight)

    new = fitted(moments)
    if choose_share is not None:
        share = choose_share(dense, [fitted(moments - fold) for fold in folds])
        new = between(old, new, share)
    dense.weight.copy_(new[0])
    dense.bias.copy_(new[1])
