"""The weights of all layers, packed for the kernels: one tensor of bytes, and the offset of each weight.

Shapes:  D hidden · N heads · H head dim · I neurons
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bertlite.config import ConfigLike, kept_heads, pruned_neurons
from bertlite.inference.linear import ask_for_huge_pages
from bertlite.inference.native.calls import ACTIVATIONS, Kernels, Layer, Matrix, Model
from bertlite.stack.modules import BertLayer

ALIGNMENT = 64  # bytes: a cache line
BLOCK = 64  # outputs in a block, BLOCK of kernels/tiles.h
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # of one number of a weight
MATRICES = ("qkv", "output", "up", "down")
VECTORS = ("attention_norm_weight", "attention_norm_bias", "output_norm_weight", "output_norm_bias")


@dataclass(frozen=True)
class LayerShape:
    """The heads and neurons that a layer keeps."""

    heads: int
    neurons: int


@dataclass(frozen=True)
class Shape:
    """All sizes of a stack that the kernels need to know."""

    numbers: str  # float32, bfloat16 or int8
    hidden_size: int
    head_size: int
    activation: str
    epsilon: float
    layers: tuple[LayerShape, ...]

    @classmethod
    def of(cls, config: ConfigLike, numbers: str) -> "Shape":
        """Return the shape of the stack that a config describes."""
        neurons = {layer: len({*gone}) for layer, gone in pruned_neurons(config).items()}
        return cls(
            numbers=numbers,
            hidden_size=config.hidden_size,
            head_size=config.hidden_size // config.num_attention_heads,
            activation=config.hidden_act,
            epsilon=config.layer_norm_eps,
            layers=tuple(
                LayerShape(len(kept_heads(config, i)), config.intermediate_size - neurons.get(i, 0))
                for i in range(config.num_hidden_layers)
            ),
        )

    def matrix(self, layer: LayerShape, name: str) -> tuple[int, int]:
        """Return (outputs, inputs) of one matrix of a layer."""
        width, hidden = layer.heads * self.head_size, self.hidden_size
        sizes = {
            "qkv": (3 * width, hidden),
            "output": (hidden, width),
            "up": (layer.neurons, hidden),
            "down": (hidden, layer.neurons),
        }
        return sizes[name]

    def pieces(self) -> Iterator[tuple[int, str, str, int]]:
        """Yield (layer, matrix or vector, its part, bytes) of everything, in the order of the tensor."""
        per_word = 4 // BYTES[self.numbers]
        for i, layer in enumerate(self.layers):
            for name in MATRICES:
                outputs, inputs = self.matrix(layer, name)
                padded = round_up(outputs, BLOCK)
                yield i, name, "words", padded * round_up(inputs, per_word) // per_word * 4
                yield i, name, "bias", padded * 4
                if self.numbers == "int8":
                    yield i, name, "scales", padded * 4
                    yield i, name, "sums", padded * 4
            for name in VECTORS:
                yield i, name, "", self.hidden_size * 4

    def size(self) -> int:
        """Return how many bytes everything takes."""
        return sum(round_up(count, ALIGNMENT) for *_, count in self.pieces())


class NativeWeights:
    """The weights of all layers in one tensor of bytes, packed for the kernels."""

    def __init__(self, shape: Shape, data: Tensor) -> None:
        if data.numel() != shape.size():
            raise ValueError(f"packed weights have {data.numel()} bytes; a model of this shape has {shape.size()}")
        self.shape, self.data = shape, data
        self.at: dict[tuple[int, str, str], tuple[int, int]] = {}
        start = 0
        for i, name, part, count in shape.pieces():
            self.at[i, name, part] = start, count
            start += round_up(count, ALIGNMENT)
        self.model = self.describe()

    @classmethod
    def of(cls, layers: Sequence[BertLayer], config: ConfigLike, numbers: str, kernels: Kernels) -> "NativeWeights":
        """Pack the weights of a stack, in whose modules `missing_for_native` finds no fault."""
        left = (
            LayerShape(layer.attention.self.num_attention_heads, layer.intermediate.dense.out_features)
            for layer in layers
        )
        shape = replace(Shape.of(config, numbers), layers=tuple(left))
        data = aligned(shape.size())
        ask_for_huge_pages(data.data_ptr(), data.numel())
        weights = cls(shape, data)
        for start, count in weights.at.values():
            data[start + count : start + round_up(count, ALIGNMENT)] = 0  # so that equal weights are equal files
        for i, layer in enumerate(layers):
            weights.pack_layer(i, layer, kernels)
        return weights

    def pack_layer(self, i: int, layer: BertLayer, kernels: Kernels) -> None:
        own = layer.attention.self
        self.pack_matrix(i, "qkv", [own.query, own.key, own.value], kernels)
        self.pack_matrix(i, "output", [layer.attention.output.dense], kernels)
        self.pack_matrix(i, "up", [layer.intermediate.dense], kernels)
        self.pack_matrix(i, "down", [layer.output.dense], kernels)
        norms = (layer.attention.output.LayerNorm, layer.output.LayerNorm)
        vectors = [vector for norm in norms for vector in (norm.weight, norm.bias)]
        for name, vector in zip(VECTORS, vectors, strict=True):
            self.part(i, name).copy_(vector)

    def pack_matrix(self, i: int, name: str, parts: list[nn.Linear], kernels: Kernels) -> None:
        weight = torch.cat([part.weight.detach() for part in parts]) if len(parts) > 1 else parts[0].weight.detach()
        weight = weight.to(torch.float32).contiguous()
        bias = self.part(i, name, "bias").zero_()
        start = 0
        for part in parts:
            if part.bias is not None:
                bias[start : start + part.out_features] = part.bias.detach()
            start += part.out_features
        words, *others = (
            self.address(i, name, part) if (i, name, part) in self.at else 0 for part in ("words", "scales", "sums")
        )
        shape = (weight.shape[0], weight.shape[1])
        kernels.pack(
            self.shape.numbers, weight.data_ptr(), shape, words, others[0], others[1], torch.get_num_threads()
        )

    def part(self, i: int, name: str, part: str = "") -> Tensor:
        """Return a view of floats of a layer."""
        start, count = self.at[i, name, part]
        return self.data[start : start + count].view(torch.float32)

    def address(self, i: int, name: str, part: str = "") -> int:
        return self.data.data_ptr() + self.at[i, name, part][0]

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights as tensors by name, in their dtypes."""
        kinds = {"words": getattr(torch, self.shape.numbers)}
        return {
            f"layer {i} {name} {part}".rstrip(): self.data[start : start + count].view(kinds.get(part, torch.float32))
            for (i, name, part), (start, count) in self.at.items()
        }

    def describe(self) -> Model:
        """Return the struct with the addresses of all weights."""
        shape = self.shape
        layers = (Layer * len(shape.layers))()
        for i, sizes in enumerate(shape.layers):
            fields: dict[str, object] = {name: self.address(i, name) for name in VECTORS}
            for name in MATRICES:
                parts = [part for part in ("words", "bias", "scales", "sums") if (i, name, part) in self.at]
                outputs, inputs = shape.matrix(sizes, name)
                found = {part: self.address(i, name, part) for part in parts}
                fields[name] = Matrix(**found, outputs=outputs, inputs=inputs)
            layers[i] = Layer(**fields, head_count=sizes.heads)
        return Model(
            layers, len(layers), shape.hidden_size, shape.head_size, ACTIVATIONS[shape.activation], shape.epsilon
        )


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def aligned(size: int) -> Tensor:
    """Return so many bytes of memory, aligned to a cache line."""
    data = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    start = -data.data_ptr() % ALIGNMENT
    return data[start : start + size]
