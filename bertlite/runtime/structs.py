"""The C functions of the kernels, and their structs for ctypes, field by field as in kernels/encoder.h."""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from typing import Any, ClassVar, NamedTuple

NUMBERS = {"float32": 0, "bfloat16": 1, "int8": 2}  # as in kernels/native.cpp
ACTIVATIONS = {  # {transformers' name: number in `enum class Activation` of kernels/functions.h}
    "linear": 0,
    "relu": 1,
    "gelu": 2,
    "gelu_python": 2,
    "gelu_accurate": 3,
    "gelu_fast": 3,
    "gelu_new": 3,
    "gelu_python_tanh": 3,
    "gelu_pytorch_tanh": 3,
    "silu": 4,
    "swish": 4,
    "quick_gelu": 5,
    "tanh": 6,
    "sigmoid": 7,
}
MESSAGE_SIZE = 512
NO_LIMIT = 2**62  # positions, if there is no table of them
OUT_OF_MEMORY, LEFT_TO_PYTHON = 2, 3  # return values of kernels/native.cpp


class Matrix(Structure):
    _fields_ = (
        ("words", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("factors", c_void_p),
    )


class Sized(Structure):
    """A struct that begins with its size, which the library compares with its own."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("size", c_int64),)

    def __init__(self, *values: object, **named: object) -> None:
        super().__init__(ctypes.sizeof(self), *values, **named)


class Linear(Sized):
    _fields_ = (("matrix", Matrix), ("activation", c_int64))


class Ids(Sized):
    _fields_ = (
        *((name, c_void_p) for name in ("ids", "segments", "positions", "mask", "ends")),
        *((name, c_int64) for name in ("rows", "length", "takes_padding", "skips_padding", "padding", "keeps_order")),
        *((name, c_void_p) for name in ("words", "segment_table", "position_table", "norm_weight", "norm_bias")),
        *((name, c_int64) for name in ("word_count", "segment_count", "position_count", "padding_has_position")),
        ("word_scales", c_void_p),
    )


class Layer(Sized):
    _fields_ = (
        ("qkv", Matrix),
        ("output", Matrix),
        ("up", Matrix),
        ("down", Matrix),
        ("attention_norm_weight", c_void_p),
        ("attention_norm_bias", c_void_p),
        ("output_norm_weight", c_void_p),
        ("output_norm_bias", c_void_p),
        ("head_count", c_int64),
        ("distances", Matrix),
        ("key_distances", Matrix),
        ("distance_bias", c_void_p),
        ("distance_rows", c_void_p),
        ("reach", c_int64),
        ("dtype", c_int64),
        ("factor", Matrix),
        ("angles", c_void_p),
        ("window", c_int64),
        ("input_norm_weight", c_void_p),
        ("input_norm_bias", c_void_p),
    )


class Model(Sized):
    angles: Any  # the arrays that the layers point into, which must live as long

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("layer_count", c_int64),
        ("hidden_size", c_int64),
        ("head_size", c_int64),
        ("activation", c_int64),
        ("epsilon", c_double),
        ("score_scale", c_double),
        ("norms_first", c_int64),
        ("angle_count", c_int64),
        ("angle_size", c_int64),
        ("rotated", c_int64),
    )


class Batch(Sized):
    _fields_ = (
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("starts", c_void_p),
        ("hidden", c_void_p),
        ("output", c_void_p),
        ("states", c_void_p),
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
        ("pooled", c_void_p),
        ("places", c_void_p),
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
