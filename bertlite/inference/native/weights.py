"""The weights of all layers, packed for the kernels: one tensor of bytes, and the offset of each weight.

A head is padded with zeros to whole vectors.

Shapes:  D hidden · N heads · H head dim, padded · I neurons · P positions
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from bertlite.config import POSITIONS, BertConfig, kept_heads, pruned_neurons
from bertlite.inference.native.exact import Array, exact_linear, exact_table
from bertlite.runtime.packed import aligned, in_blocks, in_rotation, lay_in_blocks_, pack_matrix
from bertlite.runtime.shapes import ALIGNMENT, GROUP, LayerShape, Shape, round_up
from bertlite.runtime.structs import INPUT_NORM, TABLES, VECTORS, Blocks, Kernels
from bertlite.stack.modules import BertEncoder, BertLayer
from bertlite.stack.positions import DISTANCES


def stack_shape(config: BertConfig, numbers: str, blocks: Blocks) -> Shape:
    """Return the shape of the stack that a config describes."""
    gone, size = pruned_neurons(config), config.intermediate_size

    # Sizes are counted from what the config says is left, as for the modules of a pruned model.
    return Shape(
        numbers=numbers,
        blocks=blocks,
        hidden_size=config.hidden_size,
        head_size=config.hidden_size // config.num_attention_heads,
        activation=config.hidden_act,
        epsilon=config.layer_norm_eps,
        layers=tuple(
            LayerShape(len(kept_heads(config, i)), size - len({*gone.get(i, ())}), *rotation_of(config, i))
            for i in range(config.num_hidden_layers)
        ),
        # How the distance between two tokens enters their score.
        positions=config.position_embedding_type,
        max_positions=config.max_position_embeddings,
        kinds=tuple(config.pos_att_type.split("|")),
        buckets=config.position_buckets,
        reach=config.max_relative_positions,
        # The parts that today's encoders add to BERT's layers.
        norms_first=config.norm_first,
        first_norm=config.norm_first and config.first_norm,
        rotary_divisor=config.rotary_divisor,
        gated=config.gated,
    )


def rotation_of(config: BertConfig, layer: int) -> tuple[float | None, int | None]:
    """Return the base of angles of a layer and its window; None for none."""
    if not POSITIONS[config.position_embedding_type].rotates:
        return None, None
    if layer in (config.local_layers or ()):
        return float(config.local_rotary_base), config.local_attention
    return float(config.rotary_base), None


class NativeWeights:
    """The weights of all layers in one tensor of bytes, packed for the kernels."""

    def __init__(self, shape: Shape, data: Tensor) -> None:
        if data.numel() != shape.size():
            raise ValueError(f"packed weights have {data.numel()} bytes; a model of this shape has {shape.size()}")
        self.shape, self.data, self.at = shape, data, shape.offsets
        self.model = shape.describe(data.data_ptr())

    @classmethod
    def of(
        cls, encoder: BertEncoder, config: BertConfig, numbers: str, kernels: Kernels, scaled: bool = False
    ) -> "NativeWeights":
        """Pack the weights of a stack; `missing_for_native` must have found no fault in its modules.

        Args:
            scaled: multiply inputs of 8-bit integers by factors, which are 1 until `replace_integers`.
        """
        layers: Any = encoder.layer
        parts = [(layer.attention.self.num_attention_heads, layer.intermediate.dense.out_features) for layer in layers]
        left = tuple(LayerShape(*sizes, *rotation_of(config, i)) for i, sizes in enumerate(parts))
        shape = replace(stack_shape(config, numbers, kernels.blocks[numbers]), layers=left, scaled=scaled)

        # The tensor is filled layer by layer, and its gaps are zeros.
        weights = cls(shape, aligned_tensor(shape.size()))
        for start, count in weights.at.values():
            weights.data[start + count : start + round_up(count, ALIGNMENT)] = 0  # equal weights give equal files
        table = exact_table(encoder)
        for i, layer in enumerate(layers):
            weights.pack_layer(i, layer, table, kernels)

        # Norms that come first belong to the sums before them, as the other ones do.
        norms = [(layer.attention.output.LayerNorm, layer.output.LayerNorm) for layer in layers]
        if config.norm_first:
            before = [*(layer.attention.LayerNorm for layer in layers), encoder.final_norm]
            norms = [(layer.intermediate.LayerNorm, after) for layer, after in zip(layers, before[1:], strict=True)]
            if weights.shape.first_norm and layers:
                weights.copy_vectors_(0, INPUT_NORM, before[:1])
        for i, pair in enumerate(norms):
            weights.copy_vectors_(i, VECTORS, pair)
        return weights

    def in_blocks(self, blocks: Blocks) -> "NativeWeights":
        """Return these weights in blocks of this kind: themselves, or a copy."""
        if blocks == self.shape.blocks:
            return self
        data = aligned_tensor(len(self.data)).copy_(self.data)
        return NativeWeights(lay_in_blocks_(self.shape, data.numpy(), blocks), data)

    def pack_layer(self, i: int, layer: BertLayer, table: Array | None, kernels: Kernels) -> None:
        for name, matrix in self.matrices(layer).items():
            self.pack_matrix(i, name, *matrix, kernels)
        own, distances = layer.attention.self, DISTANCES[self.shape.positions]
        for name, x in distances.packed(own, self.shape, partial(exact_linear, table)).items():
            if x.dim() == 2:
                self.pack_matrix(i, TABLES.get(name, name), x, x.new_zeros(len(x)), kernels)
            else:
                self.part(i, name).copy_(x)

    def copy_vectors_(self, i: int, names: Sequence[str], norms: Sequence[Any]) -> None:
        """Copy the weights and biases of norms to the vectors of these names."""
        vectors = [vector for norm in norms for vector in (norm.weight, norm.bias)]
        for name, vector in zip(names, vectors, strict=True):
            self.part(i, name).copy_(vector)

    def matrices(self, layer: BertLayer) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the weight and the bias of each matrix of a layer, with padded heads."""
        own, up, down = layer.attention.self, layer.intermediate.dense, layer.output.dense
        heads = [self.pad_heads(x) for part in (own.query, own.key, own.value) for x in (part.weight, bias_of(part))]
        output, factor = layer.attention.output.dense, layer.intermediate.factor
        found = {
            "qkv": (torch.cat(heads[::2]), torch.cat(heads[1::2])),
            "output": (self.pad_heads(output.weight.T).T, bias_of(output)),
            "up": (up.weight, bias_of(up)),
            "down": (down.weight, bias_of(down)),
        }
        return found if factor is None else {**found, "factor": (factor.weight, bias_of(factor))}

    def pad_heads(self, x: Tensor) -> Tensor:
        """Pad each head of (N · head dim, …) with zeros, to (N · H, …)."""
        size, padded = self.shape.head_size, self.shape.padded_head
        return pad(x.unflatten(0, (-1, size)), (0, 0) * (x.dim() - 1) + (0, padded - size)).flatten(0, 1)

    def pack_matrix(self, i: int, name: str, weight: Tensor, bias: Tensor, kernels: Kernels) -> None:
        floats, biases = (x.detach().float().numpy() for x in (weight, bias))
        threads = torch.get_num_threads()
        pack_matrix(kernels, self.shape, self.data.numpy(), (i, name), floats, biases, threads)

    def replace_integers(self, i: int, name: str, integers: Tensor, scales: Tensor, factors: Tensor) -> None:
        """Replace the 8-bit integers of a matrix, (outputs, inputs), of a stack that is `scaled`.

        Args:
            scales: (outputs,), float32.
            factors: (inputs,), by which inputs are multiplied before they are rotated.
        """
        outputs, inputs = integers.shape
        padded = pad(integers, (0, -inputs % 4, 0, -outputs % GROUP)).contiguous().view(torch.int32)
        words = in_blocks(padded.numpy(), *self.shape.layout_of(i, name, self.shape.blocks))
        self.part(i, name, "words").view(torch.int32).copy_(torch.from_numpy(words))
        self.part(i, name, "scales")[:outputs] = scales
        self.part(i, name, "sums")[:outputs] = integers.sum(1).float() * scales
        if (i, name, "factors") in self.at:
            self.part(i, name, "factors")[:] = torch.from_numpy(in_rotation(factors.numpy()))

    @property
    def rounding(self) -> str | None:
        """How weights were rounded to 8-bit integers, in words; None if they are floats."""
        if not self.shape.scaled:
            return "plain" if self.shape.numbers == "int8" else None
        places = [(i, name) for i, name, part in self.at if part == "factors" and self.part(i, name, "words").numel()]
        plain = [in_rotation(np.ones(self.shape.matrix(self.shape.layers[i], name)[1])) for i, name in places]
        pairs = zip(places, plain, strict=True)
        fitted = sum(not np.array_equal(self.part(*place, "factors").numpy(), x) for place, x in pairs)
        return f"fitted in {fitted} of {len(places)} matrices"

    def part(self, i: int, name: str, part: str = "") -> Tensor:
        """Return a view of a vector of a layer, or of a part of a matrix, in its dtype."""
        start, count = self.at[i, name, part]
        dtype = getattr(torch, self.shape.dtype_of(i, name)) if part == "words" else torch.float32
        return self.data[start : start + count].view(dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights as tensors by name, in their dtypes."""
        return {f"layer {i} {name} {part}".rstrip(): self.part(i, name, part) for i, name, part in self.at}


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of embeddings as 8-bit integers, (V, D), and the scale of each row, (V,), float32.

    A scale has 17 bits, so that its product with an integer is exact on every processor, and rows that are such
    products give the same integers and scales again.
    """
    floats = weight.detach().float()
    scales = floats.abs().amax(1) / 127
    scales = (scales.view(torch.int32) + 127 & -128).view(torch.float32)
    scales.masked_fill_(scales == 0, 1)
    return (floats / scales[:, None]).round().to(torch.int8), scales


def from_int8_rows(rows: Tensor, scales: Tensor) -> Tensor:
    """Return rows of embeddings as floats, (V, D)."""
    return rows.float() * scales[:, None]


def bias_of(part: nn.Linear) -> Tensor:
    return part.weight.new_zeros(part.out_features) if part.bias is None else part.bias


def aligned_tensor(size: int) -> Tensor:
    """Return `size` bytes of memory, aligned to a cache line."""
    return torch.from_numpy(aligned(size))
