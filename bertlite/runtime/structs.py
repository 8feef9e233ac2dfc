"""The C functions of the kernels, and their structs for ctypes, field by field as in kernels/encoder.h."""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from typing import Any, ClassVar, NamedTuple

NUMBERS = {"float32": 0, "bfloat16": 1, "int8": 2}  # as in kernels/native.cpp
SYNONYMS = (  # transformers' names of each activation, in the order of `enum class Activation` of kernels/functions.h
    ("linear",),
    ("relu",),
    ("gelu", "gelu_python"),
    ("gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh", "gelu_pytorch_tanh"),
    ("silu", "swish"),
    ("quick_gelu",),
    ("tanh",),
    ("sigmoid",),
)
ACTIVATIONS = {name: number for number, names in enumerate(SYNONYMS) for name in names}
MATRICES = ("qkv", "output", "up", "down")  # the matrices of a layer
TABLES = {"c2p": "distances", "p2c": "key_distances"}  # {kind of scores by distance: table}
VECTORS = ("attention_norm_weight", "attention_norm_bias", "output_norm_weight", "output_norm_bias")
INPUT_NORM = ("input_norm_weight", "input_norm_bias")
PARTS = ("words", "bias", "scales", "sums", "factors")  # the parts of a matrix
MESSAGE_SIZE = 512
NO_LIMIT = 2**62  # positions, if there is no table of them
OUT_OF_MEMORY, LEFT_TO_PYTHON = 2, 3  # return values of kernels/native.cpp


def fields_of(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Return fields of one type, which stand one after another."""
    return [(name, kind) for name in names]


class Matrix(Structure):
    _fields_ = (*fields_of(c_void_p, *PARTS[:-1]), *fields_of(c_int64, "outputs", "inputs"), (PARTS[-1], c_void_p))


class Sized(Structure):
    """A struct that begins with its size, which the library compares with its own."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("size", c_int64),)

    def __init__(self, *values: object, **named: object) -> None:
        super().__init__(ctypes.sizeof(self), *values, **named)


class Linear(Sized):
    _fields_ = (("matrix", Matrix), ("activation", c_int64))


class Ids(Sized):
    _fields_ = (
        *fields_of(c_void_p, "ids", "segments", "positions", "mask", "ends"),
        *fields_of(c_int64, "rows", "length", "takes_padding", "skips_padding", "padding", "keeps_order"),
        *fields_of(c_void_p, "words", "segment_table", "position_table", "norm_weight", "norm_bias"),
        *fields_of(c_int64, "word_count", "segment_count", "position_count", "padding_has_position"),
        ("word_scales", c_void_p),
    )


class Layer(Sized):
    _fields_ = (
        *fields_of(Matrix, *MATRICES),
        *fields_of(c_void_p, *VECTORS),
        ("head_count", c_int64),
        *fields_of(Matrix, *TABLES.values()),
        *fields_of(c_void_p, "distance_bias", "distance_rows"),
        *fields_of(c_int64, "reach", "dtype"),
        ("factor", Matrix),
        ("angles", c_void_p),
        ("window", c_int64),
        *fields_of(c_void_p, *INPUT_NORM),
    )


class Model(Sized):
    angles: Any  # the arrays that the layers point into, which must live as long

    _fields_ = (
        ("layers", POINTER(Layer)),
        *fields_of(c_int64, "layer_count", "hidden_size", "head_size", "activation"),
        *fields_of(c_double, "epsilon", "score_scale"),
        *fields_of(c_int64, "norms_first", "angle_count", "angle_size", "rotated"),
    )


class Batch(Sized):
    _fields_ = (
        *fields_of(c_int64, "tokens", "sequences"),
        *fields_of(c_void_p, "starts", "hidden", "output", "states"),
        ("is_bfloat16", c_int64),
        ("bias", c_void_p),
        ("bias_strides", c_int64 * 3),
        ("has_keys", c_void_p),
        ("has_keys_strides", c_int64 * 3),
        ("gates", c_void_p),
        ("gates_each_token", c_int64),
        ("probabilities", c_void_p),
        ("first_only", c_int64),
        ("ids", POINTER(Ids)),
        ("pooler", POINTER(Linear)),
        *fields_of(c_void_p, "pooled", "places"),
    )


class Blocks(NamedTuple):
    """The layout of a packed weight in memory."""

    outputs: int  # outputs in a block
    pairs: int  # outputs whose words are split: first one half of each, then the other; 1: words are whole
    floats: int  # outputs in a block of float32


class Kernels:
    """The functions of one compiled library.

    Args:
        path: the path of the library.
        reproducible: compute float32 and int8 as on every processor, at some cost on processors with instructions for
            bfloat16.
    """

    def __init__(self, path: str, reproducible: bool = False) -> None:
        self.path, self.reproducible = path, reproducible
        library = ctypes.CDLL(path)
        self._run, self._pack, self._linear = library.bertlite_run, library.bertlite_pack, library.bertlite_linear
        message = (ctypes.c_char_p, c_int64)
        self._run.argtypes = [c_int64, POINTER(Model), POINTER(Batch), c_int64, *message]
        self._pack.argtypes = [c_int64, c_void_p, c_int64, c_int64, *(c_void_p,) * 3, c_int64, *message]
        self._linear.argtypes = [c_int64, c_int64, POINTER(Linear), c_void_p, c_int64, c_void_p, c_int64, *message]
        self._run.restype = self._pack.restype = self._linear.restype = c_int64
        library.bertlite_block.restype = library.bertlite_pairs.restype = c_int64
        library.bertlite_block.argtypes = [c_int64]
        pairs, outputs = {"int8": library.bertlite_pairs()}, {x: library.bertlite_block(n) for x, n in NUMBERS.items()}
        self.blocks = {name: Blocks(n, pairs.get(name, 1), outputs["float32"]) for name, n in outputs.items()}

    def run(self, model: Model, batch: Batch, threads: int) -> bool:
        """Run the layers on a batch; other Python threads run meanwhile.  False: the batch is left to Python."""
        return self.call(self._run, self.reproducible, model, batch, threads)

    def linear(self, numbers: str, linear: Linear, x: int, rows: int, out: int, threads: int) -> None:
        """Run a linear layer on rows of floats or bfloat16; x and out are addresses."""
        self.call(self._linear, NUMBERS[numbers], self.reproducible, linear, x, rows, out, threads)

    def pack(
        self, numbers: str, weight: int, shape: tuple[int, int], words: int, scales: int, sums: int, threads: int
    ) -> None:
        """Pack a weight of floats; pointers are addresses."""
        self.call(self._pack, NUMBERS[numbers], weight, *shape, words, scales, sums, threads)

    @staticmethod
    def call(function: Callable[..., int], *arguments: object) -> bool:
        """Call a function; return False if it left its work to Python.

        Raises:
            MemoryError: there is too little memory.
            RuntimeError: the arguments do not fit this library.
        """
        message = ctypes.create_string_buffer(MESSAGE_SIZE)
        failed = function(*arguments, message, MESSAGE_SIZE)
        if failed == OUT_OF_MEMORY:
            raise MemoryError("the native kernels found no memory for this batch: use a smaller one")
        if failed not in (0, LEFT_TO_PYTHON):
            raise RuntimeError(f"native kernels: {message.value.decode(errors='replace')}")
        return not failed
