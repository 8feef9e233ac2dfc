"""Fit 8-bit weights to texts: scale inputs before they are rotated, and let later columns take up rounding errors.

Two thirds of int8's error come from rounded weights, one third from rounded inputs.  For the second, inputs are
multiplied by factors that make them as large as the columns of the weight, which is divided by them (SmoothRot,
arXiv:2506.05413).  For the first, columns are rounded one after the other, and each takes up the errors that those
before it make on the inputs of texts (GPTQ, arXiv:2210.17323).

Let w be a weight and q its integers, in units of each row's scale, and let L L' be the Gram matrix of the inputs, with
a lower triangular L.  The squared error on them is |(w - q) L|².  Its column k does not depend on columns of q before
k.  So columns are rounded from the last to the first, each to the integer that is best given the later ones.  This
gives GPTQ's integers without an inverse of the Gram matrix.

Shapes:  T tokens of all texts · I inputs · O outputs
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import index
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bertlite.config import BertConfig
from bertlite.inference.native.weights import NativeWeights
from bertlite.models.base import BertModel
from bertlite.runtime.shapes import ROTATED
from bertlite.stack.attention import LayerContext
from bertlite.stack.modules import BertLayer, normed

log = logging.getLogger("bertlite")
Rows: TypeAlias = Sequence[Sequence[int]]
Sample: TypeAlias = Rows | Mapping[str, Rows]
MOST_TOKENS = 16_384  # in a sample
HELD_OUT = 5  # one text in so many is held out
DAMPING = 0.3  # added to the diagonal of a Gram matrix, as a share of its mean
LEAST = 0.01  # the size of an input or a column that counts as zero, relative to the root mean square of all
MOST_SCALED = 16.0  # the largest factor; the smallest is its inverse
AT_ONCE = 512  # tokens that are multiplied in float32 before they are added in float64; and columns of a Gram matrix
BLOCK = 32  # columns whose errors are taken up together


@dataclass(frozen=True)
class Rounded:
    """A weight in 8-bit integers.

    Args:
        integers: (O, I), of the rotated and scaled weight.
        scales: (O,), float32.
        factors: (I,), float32: inputs are multiplied by them before they are rotated.
    """

    integers: Tensor
    scales: Tensor
    factors: Tensor

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs for inputs, (T, I) -> (T, O), as the kernels round both."""
        return in_unsigned_8_bits(rotated(x * self.factors)) @ (self.integers * self.scales[:, None]).T


def fit_(weights: NativeWeights, model: BertModel, sample: Sample) -> None:
    """Fit packed 8-bit weights to the inputs that a sample of texts gives them; the float model computes these.

    A matrix keeps its plain rounding if its outputs for the texts that are held out, one in five, do not get nearer.

    Args:
        model: the model of these weights, in float32 and in eval mode.
        sample: as for `optimize_for_inference`.

    Raises:
        ValueError: the sample has too few texts, or something else than token ids.
    """
    # Whole texts are held out, so that no token of theirs has helped in the fit.
    texts = read_sample(sample, model.config)
    lengths = as_indices([len(text) for text in texts])
    held_out = (as_indices(range(len(texts))) % HELD_OUT == HELD_OUT - 1).repeat_interleave(lengths)

    def run_layer(layer: BertLayer, x: Tensor, inputs: LayerContext) -> Tensor:
        own, network = layer.attention, layer.intermediate
        read = normed(own, x)
        context, _ = own.self(read, inputs=inputs)
        attended = own.output(context, x)
        up, neurons = normed(network, attended), network(attended)

        # The matrices of a layer are fitted while its inputs are there: no other layer's need to be kept.
        seen = {"qkv": read, "output": weights.pad_heads(context.T).T, "up": up, "down": neurons}
        matrices = weights.matrices(layer)
        for name, given in seen.items():
            # The two matrices of gated neurons have the same rounded inputs, and are fitted as one.
            names = ["up", "factor"] if name == "up" and "factor" in matrices else [name]
            weight = torch.cat([matrices[each][0] for each in names])
            if weight.numel() and (found := fit(weight, given, held_out)) is not None:
                parts = found.integers.chunk(len(names)), found.scales.chunk(len(names))
                for each, integers, scales in zip(names, *parts, strict=True):
                    weights.replace_integers(inputs.layer, each, integers, scales, found.factors)
        return layer.output(neurons, attended)

    # One forward of the float model goes through all layers, with texts packed one behind the other.
    ids, segments = (as_indices([token[i] for text in texts for token in text]) for i in range(2))
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    vars(model)["attention_name"], vars(model.encoder)["run_layer"] = lambda: "packed", run_layer
    model(ids.clamp(max=model.config.vocab_size - 1), token_type_ids=segments, cu_seqlens=ends)
    del model.attention_name, model.encoder.run_layer

    log.info("int8: %s, to %s tokens of %s texts", weights.rounding, len(ids), len(texts))


def read_sample(sample: Sample, config: BertConfig) -> list[list[tuple[int, int]]]:
    """Return the tokens of each text, (id, segment), without padding; as many texts as `MOST_TOKENS` permits.

    Raises:
        ValueError: the sample has too few texts, or something else than ids and segments from 0 on.
    """
    given = sample if isinstance(sample, Mapping) else {"input_ids": sample}
    longest, texts, used = config.max_position_embeddings, [], 0

    # A sample may be lists, arrays, tensors or a tokenizer's output; what cannot be read as ids is a fault below.
    try:
        rows = [[[index(x) for x in row] for row in as_lists(given["input_ids"])]]
        for name, value in (("token_type_ids", 0), ("attention_mask", 1)):
            rows.append(as_lists(given.get(name, [[value] * len(ids) for ids in rows[0]])))
        for ids, segments, mask in zip(*rows, strict=True):
            # Texts are cut at the model's longest, and the rest of a large sample is left out.
            tokens = zip(ids, map(index, segments), mask, strict=True)
            text = [(token, segment) for token, segment, real in tokens if real][:longest]
            used += len(text)
            if text and used <= MOST_TOKENS:
                texts.append(text)

        least, kind = (min((token[i] for text in texts for token in text), default=0) for i in range(2))
        fault = f"has token id {least}" if least < 0 else f"has segment {kind}" if kind < 0 else ""
    except (TypeError, ValueError, KeyError):
        fault = f"is {sample!r:.80}"

    # All faults end in one message, which says what a sample is.
    if not fault and len(texts) < HELD_OUT:
        fault = f"has {len(texts)} texts; a hundred are better, and {HELD_OUT} the fewest"
    if fault:
        last = config.vocab_size - 1
        raise ValueError(
            f"sample {fault}; give token ids of texts, from 0 to {last}, or a tokenizer's output for them"
        )
    return texts


def as_indices(values: Iterable[int]) -> Tensor:
    return torch.tensor([*values], dtype=torch.long, device="cpu")


def as_lists(rows: Any) -> Any:
    return rows.tolist() if hasattr(rows, "tolist") else rows


def fit(weight: Tensor, x: Tensor, held_out: Tensor) -> Rounded | None:
    """Return a weight, (O, I), rounded for inputs, (T, I); None if plain rounding is as good on those held out."""
    weight = weight.float()
    seen, unseen = x[~held_out], x[held_out]
    factors = channel_factors(weight, seen)
    plain, scaled = round_plainly(weight, torch.ones_like(factors)), round_plainly(weight, factors)
    target = rotated(weight.double() / factors) / scaled.scales[:, None]
    gram = gram_matrix(rotated(seen * factors))
    if not gram.isfinite().all():
        return None  # verification then names the fault
    found = Rounded(round_for(target, gram), scaled.scales, factors)
    truth = unseen @ weight.T
    errors = [float((each.outputs(unseen) - truth).square().sum()) for each in (found, plain)]
    return found if errors[0] < errors[1] else None


def channel_factors(weight: Tensor, x: Tensor) -> Tensor:
    """Return factors of inputs that make inputs and columns of a weight equally large, (I,), with geometric mean 1."""

    def sizes(x: Tensor) -> Tensor:
        found = x.square().mean(0).sqrt()
        return found.clamp_min(LEAST * float(found.square().mean().sqrt()) or 1)

    factors = (sizes(weight) / sizes(x)).sqrt()
    return (factors / factors.log().mean().exp()).clamp(1 / MOST_SCALED, MOST_SCALED)


def round_plainly(weight: Tensor, factors: Tensor) -> Rounded:
    """Return a weight, (O, I), divided by factors and rounded to the nearest integers; the largest of a row is 127."""
    target = rotated(weight.double() / factors)
    scales = (target.abs().amax(1) / 127).float()
    scales.masked_fill_(scales == 0, 1)
    return Rounded((target / scales[:, None]).round().char(), scales, factors)


def gram_matrix(x: Tensor) -> Tensor:
    """Return the products of all pairs of inputs, summed over tokens, (T, I) -> (I, I), float64."""
    gram = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    for part in x.split(AT_ONCE):
        for start in range(0, len(gram), AT_ONCE):  # the lower triangle
            end = start + AT_ONCE
            gram[start:end, :end] += part[:, start:end].T @ part[:, :end]
    return gram.tril() + gram.tril(-1).T


def round_for(target: Tensor, gram: Tensor) -> Tensor:
    """Return integers near a weight in units of its scales, (O, I), that err least on inputs with this Gram matrix.

    The error is least for each column in turn, given those after it in the order of the diagonal.
    """
    # Damping keeps the decomposition possible for inputs that are always zero or equal.
    gram.diagonal().add_(DAMPING * gram.diagonal().mean())

    order = gram.diagonal().argsort()  # so that the largest inputs are rounded first, by the weight's own digits
    lower = torch.linalg.cholesky(gram[order][:, order])
    lower /= lower.diagonal().clone()  # each column in units of its own input

    # Blocks from the last column to the first: one product carries all earlier errors into a block.
    left, errors = target.T[order], target.new_zeros(target.T.shape)  # (I, O)
    for end in range(len(order), 0, -BLOCK):
        start = max(0, end - BLOCK)
        part = left[start:end].addmm_(lower[end:, start:end].T, errors[end:])

        # Within a block, each rounding error moves the columns that are still to be rounded.
        exact = target.T[order[start:end]]
        for k in reversed(range(end - start)):
            part[k].round_().clamp_(-127, 127)
            error = torch.sub(exact[k], part[k], out=errors[start + k])
            part[:k].addr_(lower[start + k, start : start + k], error)

    errors[order] = left  # which no longer needs its memory
    return errors.T.char()


def rotated(x: Tensor) -> Tensor:
    """Multiply each whole 64 numbers of rows by Hadamard's matrix over 8, as the kernels do, (…, I)."""
    whole = x.shape[-1] // ROTATED * ROTATED
    parts = x[..., :whole].unflatten(-1, (-1, ROTATED)) if whole else x[..., None, :0]
    return torch.cat([(parts @ hadamard(x.dtype)[: parts.shape[-1]]).flatten(-2)[..., :whole], x[..., whole:]], -1)


@cache
def hadamard(dtype: torch.dtype) -> Tensor:
    signs = torch.ones(1, 1, dtype=dtype, device="cpu")
    while len(signs) < ROTATED:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return signs / 8


def in_unsigned_8_bits(x: Tensor) -> Tensor:
    """Return rows, (T, I), rounded to 256 steps from their least number, or 0, to their largest, as the kernels do."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    step = ((high - low) / 255).clamp_min(torch.finfo(x.dtype).tiny)
    zero = (-low / step).round()
    return ((x / step + zero).round() - zero) * step
