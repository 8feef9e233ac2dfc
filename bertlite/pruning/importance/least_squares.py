"""Repair without retraining: fit output projections so that layers give the dense model's outputs.

Shapes:  T real tokens · D hidden · W width of a projection's input: N·H of the heads kept, or the neurons kept
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from bertlite.config import check_known, pruned_neurons
from bertlite.models.structure import BertLike, Model, check_linear, check_model, copy_model, layers_of, unit_rows
from bertlite.pruning.importance.batches import Batch, eval_mode, flatten, read_batches, real_tokens
from bertlite.pruning.importance.moments import Tokens, choose_ridge, fit_matrix, gather, total
from bertlite.pruning.importance.predictions import divergence, predictions
from bertlite.pruning.importance.structures import EVERY_TOKEN, HEADS, STRUCTURES, Structure, arguments_of, run
from bertlite.stack.attention import LayerContext
from bertlite.stack.modules import BertLayer, normed

METHODS = ("mean", "refit")
KEPT = 5 * 2**23  # the most bytes of outputs of heads or neurons that are kept from the fit of their projection
FEWEST_TOKENS_OF_INPUT = 2  # tokens for each input of a matrix: with fewer, its fit is unreliable
WORSE, ROUNDING = 1.01, 1e-6  # a divergence, in nats, may grow by this factor and amount before a warning


def repair(
    pruned: Model, dense: BertLike, batches: Iterable[Batch], method: str = "refit", *, ridge: float | None = None
) -> Model:
    """Return a repaired copy of the pruned model; the model is not changed.  See `repair_`."""
    return repair_(copy_model(pruned), dense, batches, method, ridge=ridge)


def repair_(
    pruned: Model, dense: BertLike, batches: Iterable[Batch], method: str = "refit", *, ridge: float | None = None
) -> Model:
    """Bring a pruned model back towards the dense one it came from: no labels, no gradients, seconds.

    Layers are fitted from the bottom, on the outputs of the repaired layers below.  Least squares fits the output
    projection of the attention (and of the feed-forward network, if neurons are pruned), so that the LayerNorm gets
    the same input as in the dense model.  Sums are float64; padding does not count.

    Args:
        dense: the model before pruning, or any model of its shape; not changed.
        batches: inputs, such as a few hundred sentences; labels are ignored.
        method: "refit" fits the whole matrix and the bias (K-prune, Park et al. 2024); "mean", for a few dozen
            sentences, fits only the bias: the mean of the removed parts is added to it.
        ridge: the penalty that keeps the matrix close to its old values, as a share of the inputs' mean power.  By
            default cross-validation over sentences chooses it for each projection, from 1e-5 to 10 or infinity, which
            changes only the bias.  "mean" fits no matrix and does not read it.

    Returns:
        The given model.  In a layer without heads only the bias is fitted.  Warns if "refit" has fewer than two tokens
        for each input of a matrix, or if predictions on these batches are further from the dense model's than before.
        This can happen although the layers are closer.

    Raises:
        ValueError: no batches, an unknown method, a negative ridge, a single sentence for "refit" without a ridge, or
            models that do not belong together.
        TypeError: a projection is not a plain nn.Linear: merge adapters first.
    """
    check_pair(pruned, dense)
    check_known("method", method, METHODS)
    if ridge is not None and not ridge >= 0:
        raise ValueError(f"ridge is {ridge}; it must be 0 or more")

    read = read_batches(pruned, batches)
    structures = STRUCTURES if pruned_neurons(pruned.config) else (HEADS,)
    with eval_mode(pruned, dense), torch.no_grad():
        before = mean_divergence(pruned, dense, read)

        # Both models run side by side, so that each layer is fitted on what the repaired layers below give it.
        runs = start_runs(pruned, dense, read)
        if method == "refit":
            warn_of_few(runs, (each.dense(block).in_features for block in layers_of(pruned) for each in structures))
        for _ in fit_layers_(pruned, dense, runs, math.inf if method == "mean" else ridge, structures):
            pass
        after = mean_divergence(pruned, dense, read)

    # Layers that are nearer can still predict worse; on these batches that is measured, and told.
    if after > WORSE * before + ROUNDING:
        other = "" if method == "refit" else "use 'refit', or "
        warnings.warn(
            f"after repair {method!r} predictions are {after:.3g} nats from the dense model's; before, they were"
            f" {before:.3g}: {other}give more batches",
            stacklevel=2,
        )
    return pruned


def fit_layers_(
    pruned: BertLike,
    dense: BertLike,
    runs: "Sequence[PairedRun]",
    ridge: float | None,
    structures: Sequence[Structure] = STRUCTURES,
    *,
    start: int = 0,
    all_matrices: bool = False,
) -> Iterator[int]:
    """Fit layers from `start` on, from the bottom; yield each layer's number when it is done.

    Args:
        all_matrices: also fit the matrices that compute heads and neurons, to their outputs in the dense model; by
            default only the output projections.
    """
    for layer, (block, other) in enumerate(zip(layers_of(pruned), layers_of(dense), strict=True)):
        for structure in STRUCTURES:
            # The matrices that compute the units come first, since the projection reads their outputs.
            fits = layer >= start and structure in structures
            first = layer == 0 and structure is HEADS  # it reads the same in both models, so its matrices stay
            if fits and all_matrices and not first and structure.dense(block).in_features:
                every, kept = (structure.kept(each.config, layer) for each in (dense, pruned))
                rows = unit_rows([every.index(i) for i in kept], structure.width(block), pruned.device)
                tokens = (each.fit_readers(structure, block, other) for each in runs)
                parts = structure.readers(other)
                after = [torch.cat([getattr(x, name)[rows] for x in parts]).double() for name in ("weight", "bias")]
                refit_(structure.readers(block), tokens, ridge, after)
            else:
                for each in runs:
                    each.run_dense(structure, other)

            if fits:
                size = sum(each.real.numel() for each in runs) * structure.dense(block).in_features
                keeps = size * pruned.dtype.itemsize <= KEPT
                tokens = (each.fit(structure, block, keeps) for each in runs)
                refit_([structure.dense(block)], tokens, ridge)

            last = structure is not HEADS and layer + 1 == pruned.config.num_hidden_layers  # nothing reads its output
            for each in () if last else runs:
                each.step(structure, block, other)
        if layer >= start:
            yield layer


def warn_of_few(runs: "Sequence[PairedRun]", widths: Iterable[int]) -> None:
    """Warn if matrices are fitted to so few tokens that the fit may harm other texts."""
    tokens, widest = sum(len(each.sentence) for each in runs), max(widths, default=0)
    if 0 < tokens < FEWEST_TOKENS_OF_INPUT * widest:
        warnings.warn(
            f"matrices with {widest:,} inputs are fitted to {tokens:,} tokens, too few for other texts:"
            f" give {FEWEST_TOKENS_OF_INPUT * widest:,} tokens or more, or repair by 'mean'",
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
class Track:
    """The states of one batch on their way through the layers of one model."""

    x: Tensor  # the input of the next attention or feed-forward network
    inputs: LayerContext

    @classmethod
    def start(cls, model: BertLike, batch: Batch) -> "Track":
        """Return the states and the arguments of the first layer."""
        uncached = {"use_cache": False} if model.config.is_decoder else {}
        return cls(*arguments_of(model, 0, partial(run, model, batch, **EVERY_TOKEN, **uncached)))

    def units(self, structure: Structure, block: BertLayer) -> Tensor:
        """Return the outputs of a layer's heads or neurons, the inputs of their projection."""
        return structure.compute(block, self.x, self.inputs)

    def total(self, structure: Structure, block: BertLayer, units: Tensor) -> Tensor:
        """Return the input of the LayerNorm."""
        return structure.dense(block)(units) + self.x

    def step(self, structure: Structure, block: BertLayer, total: Tensor) -> None:
        """Continue from the input of the LayerNorm."""
        self.x = normed(structure.output(block), total)
        if structure is HEADS and self.inputs.encoder is not None:
            self.x = block.run_attention(block.crossattention, self.x, self.inputs.encoder)


@dataclass
class PairedRun:
    """The states of one batch in the layers of both models, before an attention or a feed-forward network."""

    real: Tensor  # (rows, S)
    sentence: Tensor  # (T,), the number of each token's row
    pruned: Track
    dense: Track
    units: Tensor | None = None  # outputs of the pruned model's heads or neurons, if they are kept for `step`

    def run_dense(self, structure: Structure, block: BertLayer) -> None:
        """Run the dense model up to the LayerNorm."""
        self.dense.x = self.dense.total(structure, block, self.dense.units(structure, block))

    def fit_readers(self, structure: Structure, block: BertLayer, dense: BertLayer) -> Tokens:
        """Run the dense model up to the LayerNorm; return the inputs of the sublayer in both models, (T, D) each, and
        sentences.
        """
        mine = flatten(structure.normed(block, self.pruned.x), self.real)
        theirs = flatten(structure.normed(dense, self.dense.x), self.real)
        self.run_dense(structure, dense)
        return mine, theirs, self.sentence

    def fit(self, structure: Structure, block: BertLayer, keeps: bool = False) -> Tokens:
        """Return the input of an output projection, (T, W), its wanted output, (T, D), and sentences.

        The dense model has run up to the LayerNorm.

        Args:
            keeps: keep the input for `step`, before which no head or neuron may be changed.
        """
        wanted, units = flatten(self.dense.x - self.pruned.x, self.real), self.pruned.units(structure, block)
        if keeps:
            self.units = units
        return flatten(units, self.real), wanted, self.sentence

    def step(self, structure: Structure, block: BertLayer, dense: BertLayer) -> None:
        """Continue after the LayerNorm in both models; the dense model has run up to it."""
        units = self.pruned.units(structure, block) if self.units is None else self.units
        self.units = None
        self.pruned.step(structure, block, self.pruned.total(structure, block, units))
        self.dense.step(structure, dense, self.dense.x)


def start_runs(pruned: BertLike, dense: BertLike, batches: Iterable[Batch]) -> list[PairedRun]:
    """Return the runs of all batches, before the first layer."""
    runs, before = [], 0
    for batch in read_batches(pruned, batches):
        real = real_tokens(batch)
        sentence = real.nonzero()[:, 0] + before
        runs.append(PairedRun(real, sentence, Track.start(pruned, batch), Track.start(dense, batch)))
        before += len(real)
    return runs


def refit_(
    parts: Sequence[nn.Linear], tokens: Iterable[Tokens], ridge: float | None, after: Sequence[Tensor] = ()
) -> None:
    """Fit linear layers that read the same inputs.

    Args:
        tokens: as for `gather`.
        after: if given, the weight and the bias of a linear layer whose outputs for Y are wanted.
    """
    weight, folds = torch.cat([part.weight for part in parts]).double(), gather(tokens)
    if after:
        folds = [fold.through(*after) for fold in folds]
    if ridge is None and weight.numel():
        ridge = choose_ridge(folds, weight)
    moments = total(folds)
    del folds  # as large as everything computed below
    weight = fit_matrix(moments, weight, math.inf if ridge is None else ridge)
    bias = moments.bias(weight)
    sizes = [len(part.weight) for part in parts]
    for part, fit, shift in zip(parts, weight.split(sizes), bias.split(sizes), strict=True):
        part.weight.copy_(fit)
        part.bias.copy_(shift)
