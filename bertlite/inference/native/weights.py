"""The weights of all layers, packed for the kernels: one tensor of bytes, and the offset of each weight.

A head is padded with zeros to whole vectors.

Shapes:  D hidden · N heads · H head dim, padded · I neurons · P positions
"""

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import starmap

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from bertlite.config import RELATIVE, BertConfig, kept_heads, pruned_neurons
from bertlite.inference.native.calls import ACTIVATIONS, Blocks, Kernels, Layer, Matrix, Model
from bertlite.stack.disentangled import project_table, table_rows
from bertlite.stack.modules import BertLayer, distance_buckets

ALIGNMENT = 64  # bytes: a cache line
GROUP = 64  # outputs to a multiple of which a weight is padded, GROUP of kernels/tiles.h
BLOCKS = tuple(starmap(Blocks, ((8, 1), (8, 4), (16, 1), (16, 4), (16, 8), (64, 1))))  # of all sets of instructions
LANES = 16  # the longest vector of kernels/vectors.h, in floats
MADV_COLLAPSE = 25  # advice of madvise(2), since Linux 6.1
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # of one number of a weight
MATRICES = ("qkv", "output", "up", "down")
TABLES = {"c2p": "distances", "p2c": "key_distances"}  # by kind of disentangled scores
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
    blocks: Blocks
    hidden_size: int
    head_size: int
    activation: str
    epsilon: float
    layers: tuple[LayerShape, ...]
    positions: str = "absolute"
    max_positions: int = 0
    kinds: tuple[str, ...] = ()  # of disentangled scores
    buckets: int = 0
    reach: int = 0

    @classmethod
    def of(cls, config: BertConfig, numbers: str, blocks: Blocks) -> "Shape":
        """Return the shape of the stack that a config describes."""
        neurons = {layer: len({*gone}) for layer, gone in pruned_neurons(config).items()}
        return cls(
            numbers=numbers,
            blocks=blocks,
            hidden_size=config.hidden_size,
            head_size=config.hidden_size // config.num_attention_heads,
            activation=config.hidden_act,
            epsilon=config.layer_norm_eps,
            layers=tuple(
                LayerShape(len(kept_heads(config, i)), config.intermediate_size - neurons.get(i, 0))
                for i in range(config.num_hidden_layers)
            ),
            positions=config.position_embedding_type,
            max_positions=config.max_position_embeddings,
            kinds=tuple(config.pos_att_type.split("|")),
            buckets=config.position_buckets,
            reach=config.max_relative_positions,
        )

    @property
    def padded_head(self) -> int:
        return round_up(self.head_size, LANES)

    def matrix(self, layer: LayerShape, name: str) -> tuple[int, int]:
        """Return (outputs, inputs) of one matrix of a layer."""
        width, hidden = layer.heads * self.padded_head, self.hidden_size
        sizes = {
            "qkv": (3 * width, hidden),
            "output": (hidden, width),
            "up": (layer.neurons, hidden),
            "down": (hidden, layer.neurons),
            "distances": (2 * self.max_positions - 1, self.padded_head if self.positions in RELATIVE else 0),
            "key_distances": (0, 0),
        }
        if self.positions == "disentangled":
            sizes |= dict.fromkeys(TABLES.values(), (layer.heads * self.table_rows, self.padded_head))
        return sizes[name]

    @property
    def table_rows(self) -> int:
        """Return the rows of a head's table of distances, whole groups of them."""
        return round_up(2 * (self.buckets or self.reach), GROUP)

    @property
    def tables(self) -> list[str]:
        """Return the names of the matrices of distances."""
        if self.positions == "disentangled":
            return [TABLES[kind] for kind in self.kinds]
        return ["distances"] if self.positions in RELATIVE else []

    def dtype_of(self, name: str) -> str:
        """Return the dtype of a matrix: attention is bfloat16 where the other matrices are 8-bit integers."""
        return "bfloat16" if name in TABLES.values() and self.numbers == "int8" else self.numbers

    def pieces(self) -> Iterator[tuple[int, str, str, int]]:
        """Yield (layer, matrix or vector, its part, bytes) of everything, in the order of the tensor."""
        for i, layer in enumerate(self.layers):
            for name in (*MATRICES, *self.tables):
                outputs, inputs = self.matrix(layer, name)
                padded, per_word = round_up(outputs, GROUP), 4 // BYTES[self.dtype_of(name)]
                yield i, name, "words", padded * round_up(inputs, per_word) // per_word * 4
                yield i, name, "bias", padded * 4
                if self.dtype_of(name) == "int8":
                    yield i, name, "scales", padded * 4
                    yield i, name, "sums", padded * 4
            for name in VECTORS:
                yield i, name, "", self.hidden_size * 4
            if self.positions == "bucketed":
                yield i, "distance_bias", "", layer.heads * (2 * self.max_positions - 1) * 4
            if self.positions == "disentangled":
                yield i, "distance_rows", "", (2 * self.reach + 1) * 4

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
    def of(
        cls,
        layers: Sequence[BertLayer],
        config: BertConfig,
        numbers: str,
        kernels: Kernels,
        vectors: Tensor | None = None,
    ) -> "NativeWeights":
        """Pack the weights of a stack, in whose modules `missing_for_native` finds no fault.

        Args:
            vectors: the encoder's table of distances, normalised, if positions are "disentangled".
        """
        left = (
            LayerShape(layer.attention.self.num_attention_heads, layer.intermediate.dense.out_features)
            for layer in layers
        )
        shape = replace(Shape.of(config, numbers, kernels.blocks(numbers)), layers=tuple(left))
        data = aligned(shape.size())
        ask_for_huge_pages(data.data_ptr(), data.numel())
        weights = cls(shape, data)
        for start, count in weights.at.values():
            data[start + count : start + round_up(count, ALIGNMENT)] = 0  # so that equal weights are equal files
        for i, layer in enumerate(layers):
            weights.pack_layer(i, layer, kernels)
            if vectors is not None:
                weights.pack_tables(i, layer, vectors, kernels)
        return weights

    def in_blocks(self, blocks: Blocks) -> "NativeWeights":
        """Return these weights in such blocks: themselves, or a copy."""
        old = self.shape.blocks
        if blocks == old:
            return self
        data = aligned(self.data.numel()).copy_(self.data)
        ask_for_huge_pages(data.data_ptr(), data.numel())
        for (i, name, part), (start, count) in self.at.items():
            if part == "words" and count:
                words = data[start : start + count].view(torch.int32)
                inputs = len(words) // round_up(self.shape.matrix(self.shape.layers[i], name)[0], GROUP)
                before, after = (old.pairs, blocks.pairs) if name in MATRICES else (1, 1)
                rows = transpose_halves(words, 2, before).view(-1, inputs, old.outputs).mT
                words.copy_(transpose_halves(rows.reshape(-1, blocks.outputs, inputs).mT.flatten(), after, 2))
        return NativeWeights(replace(self.shape, blocks=blocks), data)

    def pack_layer(self, i: int, layer: BertLayer, kernels: Kernels) -> None:
        own = layer.attention.self
        heads = [self.pad_heads(x) for part in (own.query, own.key, own.value) for x in (part.weight, bias_of(part))]
        self.pack_matrix(i, "qkv", torch.cat(heads[::2]), torch.cat(heads[1::2]), kernels)
        linears = (layer.attention.output.dense, layer.intermediate.dense, layer.output.dense)
        for name, part in zip(MATRICES[1:], linears, strict=True):
            weight = self.pad_heads(part.weight.T).T if name == "output" else part.weight
            self.pack_matrix(i, name, weight, bias_of(part), kernels)
        norms = (layer.attention.output.LayerNorm, layer.output.LayerNorm)
        vectors = [vector for norm in norms for vector in (norm.weight, norm.bias)]
        for name, vector in zip(VECTORS, vectors, strict=True):
            self.part(i, name).copy_(vector)
        if self.shape.positions in RELATIVE:
            weight = pad(own.distance_embedding.weight.flip(0), (0, self.shape.padded_head - self.shape.head_size))
            self.pack_matrix(i, "distances", weight, weight.new_zeros(len(weight)), kernels)
        elif self.shape.positions == "bucketed":
            distances = torch.arange(self.shape.max_positions - 1, -self.shape.max_positions, -1, device="cpu")
            bias = own.distance_embedding.weight[distance_buckets(distances)].T  # (N, 2 P - 1)
            self.part(i, "distance_bias").copy_(bias.flatten())

    def pack_tables(self, i: int, layer: BertLayer, vectors: Tensor, kernels: Kernels) -> None:
        """Pack what each head makes of the table of distances, the largest distance first."""
        shape = self.shape
        for kind, table in project_table(layer.attention.self, vectors).items():  # (N, head dim, R)
            rows = pad(table.flip(2).mT, (0, shape.padded_head - shape.head_size, 0, shape.table_rows - len(vectors)))
            flat = rows.flatten(0, 1)
            self.pack_matrix(i, TABLES[kind], flat, flat.new_zeros(len(flat)), kernels)
        distances = torch.arange(shape.reach, -shape.reach - 1, -1, device="cpu")
        rows = len(vectors) - 1 - table_rows(distances, shape.buckets, shape.reach)
        self.part(i, "distance_rows").copy_(rows)

    def pad_heads(self, x: Tensor) -> Tensor:
        """Pad each head of (N · head dim, …) with zeros, to (N · H, …)."""
        size, padded = self.shape.head_size, self.shape.padded_head
        return pad(x.unflatten(0, (-1, size)), (0, 0) * (x.dim() - 1) + (0, padded - size)).flatten(0, 1)

    def pack_matrix(self, i: int, name: str, weight: Tensor, bias: Tensor, kernels: Kernels) -> None:
        weight = weight.detach().to(torch.float32).contiguous()
        self.part(i, name, "bias").zero_()[: len(bias)] = bias.detach()
        words, scales, sums = (
            self.address(i, name, part) if (i, name, part) in self.at else 0 for part in ("words", "scales", "sums")
        )
        shape, threads = (weight.shape[0], weight.shape[1]), torch.get_num_threads()
        kernels.pack(self.shape.dtype_of(name), weight.data_ptr(), shape, words, scales, sums, threads)

    def part(self, i: int, name: str, part: str = "") -> Tensor:
        """Return a view of floats of a layer."""
        start, count = self.at[i, name, part]
        return self.data[start : start + count].view(torch.float32)

    def address(self, i: int, name: str, part: str = "") -> int:
        return self.data.data_ptr() + self.at[i, name, part][0]

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights as tensors by name, in their dtypes."""
        return {
            f"layer {i} {name} {part}".rstrip(): self.data[start : start + count].view(
                getattr(torch, self.shape.dtype_of(name)) if part == "words" else torch.float32
            )
            for (i, name, part), (start, count) in self.at.items()
        }

    def describe(self) -> Model:
        """Return the struct with the addresses of all weights."""
        shape = self.shape
        layers = (Layer * len(shape.layers))()
        for i, sizes in enumerate(shape.layers):
            fields: dict[str, object] = {name: self.address(i, name) for name in VECTORS}
            for name in (*MATRICES, *TABLES.values()):
                parts = [part for part in ("words", "bias", "scales", "sums") if (i, name, part) in self.at]
                outputs, inputs = shape.matrix(sizes, name)
                found = {part: self.address(i, name, part) for part in parts}
                fields[name] = Matrix(**found, outputs=outputs, inputs=inputs)
            fields["distance_bias"] = self.address(i, "distance_bias") if shape.positions == "bucketed" else None
            if shape.positions == "relative_key_query":
                fields["key_distances"] = fields["distances"]
            rows = self.address(i, "distance_rows") if shape.positions == "disentangled" else None
            fields |= {"distance_rows": rows, "reach": shape.reach}
            layers[i] = Layer(**fields, head_count=sizes.heads)
        act, scale = ACTIVATIONS[shape.activation], shape.head_size**-0.5
        return Model(layers, len(layers), shape.hidden_size, shape.padded_head, act, shape.epsilon, scale)


def bias_of(part: nn.Linear) -> Tensor:
    return part.weight.new_zeros(part.out_features) if part.bias is None else part.bias


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def transpose_halves(words: Tensor, rows: int, columns: int) -> Tensor:
    """Return words whose halves, as matrices of so many rows and columns, are transposed."""
    return words.view(torch.int16).view(-1, rows, columns).mT.flatten().view(torch.int32)


def aligned(size: int) -> Tensor:
    """Return so many bytes of memory, aligned to a cache line."""
    data = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device="cpu")
    start = -data.data_ptr() % ALIGNMENT
    return data[start : start + size]


def ask_for_huge_pages(start: int, size: int) -> None:
    """Ask Linux for huge pages for so many bytes from an address, now and later: a small batch reads them faster."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if sys.platform == "linux" and first < start + size:
        for advice in (mmap.MADV_HUGEPAGE, MADV_COLLAPSE):
            libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(start + size - first), advice)


@cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
