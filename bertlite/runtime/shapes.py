"""The sizes of a stack of layers, and the place of each packed weight in one array of bytes.

A head is padded with zeros to whole vectors.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .fields import ABOVE_1, COUNT, FLAG, POSITIVE, SIZE, every, one_of, or_null
from .structs import ACTIVATIONS, INPUT_NORM, MATRICES, NUMBERS, PARTS, TABLES, VECTORS, Blocks, Layer, Matrix, Model

ALIGNMENT = 64  # bytes: a cache line
GROUP = 64  # a weight is padded to a multiple of so many outputs: GROUP of kernels/tiles.h
# The layouts of all sets of instructions.
BLOCKS = [Blocks(*x) for x in ((8, 1, 8), (8, 4, 8), (16, 1, 16), (16, 1, 64), (16, 4, 16), (16, 8, 16), (64, 1, 64))]
LANES = 16  # the longest vector of kernels/vectors.h, in floats
RELATIVE = ("relative_key", "relative_key_query")  # positions with a vector for each distance
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # bytes of one number of a weight
FLOATS = ("bfloat16", "float32")  # dtypes of the layers that a mixed stack keeps in floats
ROTATED = 64  # inputs that a rotation mixes: ROTATED of kernels/rows.h
ROTARY = ("rotary", "rotary_local")  # positions whose angles rotate queries and keys
HALF_PI, REST_OF_HALF_PI = 1.57079632673412561417, 6.07710050650619224932e-11  # the first has only 33 bits
MOST_ANGLES = 2**23  # numbers of a table: 32 MB, and ten times as much while it is made


@dataclass(frozen=True)
class LayerShape:
    """The heads and neurons that a layer keeps, and how it takes positions."""

    heads: int
    neurons: int
    rotary_base: float | None = None  # the base of rotary positions; None: there are none
    window: int | None = None  # how many positions away a token attends to others; None: anywhere


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
    kinds: tuple[str, ...] = ()  # the kinds of disentangled scores
    buckets: int = 0
    reach: int = 0
    norms_first: bool = False  # whether only matmuls, and the output, take what a LayerNorm makes
    first_norm: bool = False  # whether the first layer then has one before it, too
    rotary_divisor: float = 1.0  # divides all angles
    gated: bool = False  # whether neurons are multiplied by the outputs of a second matrix
    rotated: bool = True  # whether 8-bit integers are of rotated rows, as packing makes them; before format 8 not
    kept: tuple[int, ...] = ()  # the layers of a mixed stack that are in floats, and not in 8-bit integers
    floats: str = FLOATS[0]  # the dtype of these layers
    scaled: bool = False  # whether inputs of 8-bit integers are multiplied by factors before they are rotated

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
            "factor": (layer.neurons, hidden if self.gated else 0),
            "distances": (2 * self.max_positions - 1, self.padded_head if self.positions in RELATIVE else 0),
            "key_distances": (0, 0),
        }
        if self.positions == "disentangled":
            sizes |= dict.fromkeys(TABLES.values(), (layer.heads * self.table_rows, self.padded_head))
        return sizes[name]

    @property
    def table_rows(self) -> int:
        """Return the number of rows of a head's table of distances, rounded up to whole groups."""
        return round_up(2 * (self.buckets or self.reach), GROUP)

    @property
    def matrices(self) -> list[str]:
        """Return the names of the matrices of a layer, tables of distances included."""
        names = [*MATRICES, "factor"] if self.gated else [*MATRICES]
        if self.positions == "disentangled":
            return [*names, *(TABLES[kind] for kind in self.kinds)]
        return [*names, "distances"] if self.positions in RELATIVE else names

    def dtype_of(self, layer: int, name: str) -> str:
        """Return the dtype of a matrix: tables of distances are bfloat16 if other matrices are 8-bit integers."""
        numbers = self.floats if layer in self.kept else self.numbers
        return "bfloat16" if name in TABLES.values() and numbers == "int8" else numbers

    def layout_of(self, layer: int, name: str, blocks: Blocks) -> tuple[int, int]:
        """Return how many outputs of a matrix are in a block, and of how many the words are split."""
        dtype = self.dtype_of(layer, name)
        return blocks.floats if dtype == "float32" else blocks.outputs, blocks.pairs if dtype == "int8" else 1

    def pieces(self) -> Iterator[tuple[int, str, str, int]]:
        """Yield (layer, matrix or vector, its part, bytes) of everything, in the order of the tensor."""
        for i, layer in enumerate(self.layers):
            # Kernels read whole groups of outputs and whole words of inputs, so both are padded.
            for name in self.matrices:
                outputs, inputs = self.matrix(layer, name)
                padded, per_word = round_up(outputs, GROUP), 4 // BYTES[self.dtype_of(i, name)]
                yield i, name, "words", padded * round_up(inputs, per_word) // per_word * 4
                yield i, name, "bias", padded * 4

                # Integers need a scale for each output, and a sum of its weights for the offsets of inputs.
                if self.dtype_of(i, name) == "int8":
                    yield i, name, "scales", padded * 4
                    yield i, name, "sums", padded * 4
                    if self.scaled and name != "factor":  # it has the inputs of "up"
                        yield i, name, "factors", round_up(inputs, LANES) * 4

            # Vectors, and numbers by distance, are floats whatever the matrices are.
            for name in (*VECTORS, *INPUT_NORM) if self.first_norm and not i else VECTORS:
                yield i, name, "", self.hidden_size * 4
            if self.positions == "bucketed":
                yield i, "distance_bias", "", layer.heads * (2 * self.max_positions - 1) * 4
            if self.positions == "disentangled":
                yield i, "distance_rows", "", (2 * self.reach + 1) * 4

    def size(self) -> int:
        """Return the number of bytes that everything takes."""
        *_, (start, count) = [(0, 0), *self.offsets.values()]
        return start + round_up(count, ALIGNMENT)

    @cached_property
    def offsets(self) -> dict[tuple[int, str, str], tuple[int, int]]:
        """Return {(layer, matrix or vector, its part): (first byte, bytes)} of everything."""
        found, start = {}, 0
        for i, name, part, count in self.pieces():
            found[i, name, part] = start, count
            start += round_up(count, ALIGNMENT)
        return found

    def describe(self, address: int) -> Model:
        """Return the struct with the addresses of all weights, which begin at an address."""
        at = {piece: address + start for piece, (start, _) in self.offsets.items()}
        layers, bases = (Layer * len(self.layers))(), {layer.rotary_base for layer in self.layers}
        angles = {base: table_of_angles(base, self) for base in bases if base}

        # A part that this shape lacks has no address, and the kernels take its absence as a choice.
        for i, sizes in enumerate(self.layers):
            names = (*VECTORS, *INPUT_NORM, "distance_bias", "distance_rows")
            fields: dict[str, object] = {name: at.get((i, name, "")) for name in names}
            for name in (*MATRICES, "factor", *TABLES.values()):
                outputs, inputs = self.matrix(sizes, name)
                parts = {part: at.get((i, name, part)) for part in PARTS}
                fields[name] = Matrix(**parts, outputs=outputs, inputs=inputs)

            # Distances from keys use the table of distances from queries.
            if self.positions == "relative_key_query":
                fields["key_distances"] = fields["distances"]

            # Layers with the same base point into one table of angles, which the model keeps alive.
            dtype = NUMBERS[self.dtype_of(i, "qkv")]
            window = -1 if sizes.window is None else sizes.window
            layers[i] = Layer(**fields, head_count=sizes.heads, reach=self.reach, dtype=dtype, window=window)
            if sizes.rotary_base is not None:
                layers[i].angles = angles[sizes.rotary_base].ctypes.data
        act, scale = ACTIVATIONS[self.activation], self.head_size**-0.5
        model = Model(layers, len(layers), self.hidden_size, self.padded_head, act, self.epsilon, scale)
        model.norms_first, model.rotated, model.angles = self.norms_first, self.rotated, angles
        model.angle_count, model.angle_size = self.max_positions, self.head_size
        return model


# Angles


def table_of_angles(base: float, shape: Shape) -> NDArray[np.float32]:
    """Return half cosines and half sines of the angles of each position, (positions, head size), all in float32."""
    exponents = np.arange(0, shape.head_size, 2, dtype=np.float32) / np.float32(shape.head_size)
    powers = np.array([base**x for x in exponents.tolist()], dtype=np.float32)
    steps = 1 / powers / np.float32(shape.rotary_divisor)
    angles = np.arange(shape.max_positions, dtype=np.float32)[:, None] * steps
    return np.concatenate(cosines_and_sines(angles.astype(np.float64)), 1, dtype=np.float32, casting="same_kind")


def cosines_and_sines(angles: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return cosines and sines. The functions of numpy and C depend on the processor."""
    quarters = np.rint(angles * (2 / math.pi))
    rest = (angles - quarters * HALF_PI) - quarters * REST_OF_HALF_PI
    squares, turned = rest * rest, quarters.astype(np.int64)

    # Taylor's series, for angles of at most an eighth of a turn.
    cosines, sines = np.zeros_like(rest), np.zeros_like(rest)
    for i in range(16, -1, -2):
        cosines = cosines * squares + (-1) ** (i // 2) / math.factorial(i)
        sines = sines * squares + (-1) ** (i // 2) / math.factorial(i + 1)
    turns = [cosines, -sines * rest, -cosines, sines * rest]  # cosines after so many quarters
    return np.choose(turned & 3, turns), np.choose(turned + 3 & 3, turns)


# The description of a shape in a file


def shape_faults(_: str, shape: dict[str, Any]) -> Iterator[str]:
    """Yield the faults of a shape whose fields obey their own rules."""
    kept, layers, size = shape["kept"], shape["layers"], shape["head_size"]
    if kept and not (shape["numbers"] == "int8" and kept == sorted({*kept}) and kept[-1] < len(layers)):
        yield "shape.kept does not name layers of int8 in their order"

    # Disentangled scores have kinds, and fewer buckets than distances.
    known = (["c2p"], ["p2c"], ["c2p", "p2c"])
    fits = shape["kinds"] in known and shape["reach"] > 0 and shape["buckets"] <= 2 * shape["reach"]
    if shape["positions"] == "disentangled" and not fits:
        yield "shape.kinds, shape.buckets and shape.reach describe no distances"

    # Just the layers of rotary positions rotate, by tables of angles that memory can hold.
    bases = {each["rotary_base"] for each in layers}
    fits = bases <= {None}
    if shape["positions"] in ROTARY:
        fits = size % 2 == 0 and size * shape["max_positions"] <= MOST_ANGLES
        fits = fits and None not in bases and len(bases) <= 2  # one for windows, and one for all else
    if not fits:
        yield "shape.layers, shape.head_size and shape.max_positions describe no rotary positions"
    if size > shape["hidden_size"]:
        yield "shape.head_size is beyond shape.hidden_size"


LAYER = {"heads": COUNT, "neurons": COUNT, "rotary_base": or_null(ABOVE_1), "window": or_null(COUNT)}
FIELDS = {
    "numbers": one_of(*NUMBERS),
    "hidden_size": SIZE,
    "head_size": SIZE,
    "activation": one_of(*ACTIVATIONS),
    "epsilon": POSITIVE,
    "layers": every(LAYER),
    "positions": one_of("absolute", *RELATIVE, "bucketed", "disentangled", *ROTARY),
    "max_positions": SIZE,
    "kinds": every(one_of("", *TABLES)),
    "buckets": COUNT,
    "reach": COUNT,
    "norms_first": FLAG,
    "first_norm": FLAG,
    "rotary_divisor": POSITIVE,
    "gated": FLAG,
    "rotated": FLAG,
    "kept": every(COUNT),
    "floats": one_of(*FLOATS),
    "scaled": FLAG,
}
SHAPE = [FIELDS, shape_faults]


def shape_from(values: dict[str, Any], blocks: Blocks) -> Shape:
    """Return the shape that a file describes."""
    layers = tuple(LayerShape(**{name: each[name] for name in LAYER}) for each in values["layers"])
    several = {"layers": layers, "kinds": tuple(values["kinds"]), "kept": tuple(values["kept"])}
    return Shape(**{**{name: values[name] for name in FIELDS}, **several, "blocks": blocks})


# Rounding


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def round_up_by_eighths(n: int, step: int) -> int:
    """Round up to a multiple of an eighth of the largest power of two below, and of `step`."""
    return round_up(n, max(step, power_of_2(n) // 16))


def power_of_2(n: int) -> int:
    """Return the least power of two that is not below n."""
    return 1 << (max(n, 1) - 1).bit_length()
