"""The packed weights of a folder: read, checked, and laid in the blocks of this machine's kernels.

They are in a safetensors file (https://github.com/huggingface/safetensors#format).  In its metadata "native" describes
the model, and "crc32" is the checksum of all tensors and of the header without "crc32".
"""

import json
import mmap
import os
import sys
import weakref
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedReader
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .contents import (
    FORMATS,
    LAYERS,
    RUNTIME,
    WAY_OUT,
    WORDS,
    Tensors,
    add_later_fields_,
    expected_tensors,
    part_for_torch,
    with_rounded_words,
)
from .fields import COUNT, SHORT, TEXT, Maybe, check_fields, every, one_of, parse_json
from .shapes import ALIGNMENT, GROUP, LANES, ROTATED, Shape, round_up, shape_from
from .structs import Blocks, Kernels

FILE = "native.safetensors"
CHUNK = 1 << 18  # bytes that are read at once for the checksum alone
NUMPY_DTYPES = {"F32": np.float32, "BF16": np.uint16, "I8": np.int8, "U8": np.uint8}  # bfloat16 as its bits
DTYPE = one_of(*NUMPY_DTYPES, "F64", "F16", "I64")  # no description asks for the last three, and the error says so
HEADER = {"__metadata__": Maybe(every(TEXT, named=True))}
ENTRIES = every({"dtype": DTYPE, "shape": every(COUNT), "data_offsets": every(COUNT)}, named=True)
Bytes = NDArray[np.uint8]


class RowsInFile:
    """The rows of a table in a file, each read when it is first needed.

    Mapping the file would take more memory: Linux maps up to 2 MB around a byte that is read.

    Args:
        file: a descriptor of the file, which is closed with this object.
        start: the first byte of the table in the file.
        table: memory for all rows.
    """

    def __init__(self, file: int, start: int, table: NDArray[Any]) -> None:
        self.file, self.start, self.table = file, start, table
        self.is_read, self.written = np.zeros(len(table), dtype=bool), os.fstat(file).st_mtime_ns
        weakref.finalize(self, os.close, file)

    def read(self, indices: NDArray[np.int64]) -> None:
        """Read these rows, if the table has them; several threads may.

        Raises:
            OSError: the file was written over.
        """
        known = indices[(indices >= 0) & (indices < len(self.table))]
        missing = sorted({*known[~self.is_read[known]].tolist()})

        # A file that was written again may hold another model's rows at these places.
        if missing and os.fstat(self.file).st_mtime_ns != self.written:
            raise OSError(f"{FILE} was written over after it was loaded: load the folder again")
        for i in missing:
            row = self.table[i]
            row[:] = np.frombuffer(os.pread(self.file, row.nbytes, self.start + i * row.nbytes), row.dtype)
        self.is_read[missing] = True


class PackedFile(NamedTuple):
    """A file's description of its model, the weights of all layers, and all other tensors."""

    about: dict[str, Any]
    shape: Shape | None  # the shape of the stack of layers
    layers: Bytes
    tensors: dict[str, NDArray[Any]]
    dtypes: dict[str, str]  # the dtype of each tensor, as safetensors names it
    words: RowsInFile | None  # the rows of the word embeddings, if they are read later

    @property
    def dtype(self) -> str:
        """The dtype of the matrices; "mixed" if layers differ."""
        return "mixed" if self.about["shape"]["kept"] else str(self.about["numbers"])


class OpenedFile:
    """A file whose description obeys its rules, and whose tensors are still to be read."""

    def __init__(self, path: Path, file: BufferedReader, header: dict[str, Any], about: dict[str, Any]) -> None:
        self.path, self.file, self.header, self.about = path, file, header, about
        self.entries = entries_of(header)

    def read(self, wanted: Tensors, shape: Shape | None = None, *, words_later: bool = False) -> PackedFile:
        """Read all tensors and compare them with the checksum.

        Args:
            wanted: the tensors that must be there besides the layers, and no others.
            shape: the shape of the stack of layers, if there is one.
            words_later: leave the word embeddings empty, to be filled by `words`.

        Raises:
            ValueError: the file has other tensors, or other bytes than were written.
        """
        # The header is held against the description first, so that a forged size costs nothing.
        stack: Tensors = {} if shape is None else {LAYERS: ("U8", (shape.size(),))}
        wanted = {**stack, **with_rounded_words(wanted, self.about, self.entries)}
        first = self.file.tell()
        self.check_entries(wanted, self.path.stat().st_size - first)

        # Only now is memory taken: no more than the file has.
        tensors, words, parts = {}, None, []
        for name, entry in self.entries.items():
            later = words_later and hasattr(os, "pread") and name.endswith(WORDS)  # no pread on Windows
            (dtype, size), (start, end) = wanted[name], entry["data_offsets"]
            memory = (untouched if later else aligned)(end - start)
            tensors[name] = memory.view(NUMPY_DTYPES[dtype]).reshape(size)
            parts.append(read_bytes(self.file, first + start, tensors[name], keep=not later))
            if later:
                words = RowsInFile(os.dup(self.file.fileno()), first + start, tensors[name])

        # The checksum reads every byte, also of the rows that stay in the file.
        found = checksum(self.header, chain(*parts))
        if self.about["format"] > FORMATS[0] and f"{found:08x}" != self.header["__metadata__"].get("crc32"):
            raise ValueError(f"{self.path} is damaged: its bytes are not as written; {WAY_OUT}")

        # The kernels follow the rows of distances without a check, so they are checked here.
        layers = tensors.pop(LAYERS, aligned(0))
        if shape is not None:
            check_rows(self.path, shape, layers)
        dtypes = {name: dtype for name, (dtype, _) in wanted.items()}
        return PackedFile(self.about, shape, layers, tensors, dtypes, words)

    def check_entries(self, wanted: Tensors, left: int) -> None:
        """Raise ValueError unless just the wanted tensors lie in the bytes that are left, one after another."""
        end, faults = 0, [f"{name} is missing" for name in wanted if name not in self.header]

        # Every tensor begins where the one before ends, so none overlaps another and no byte is unaccounted for.
        for name, entry in self.entries.items():
            if name not in wanted:
                faults.append(f"{SHORT.repr(name)} is unknown")
                continue
            dtype, size = wanted[name]
            start, end = end, end + prod(size) * np.dtype(NUMPY_DTYPES[dtype]).itemsize

            found = entry["dtype"], tuple(entry["shape"])
            if found != (dtype, size):
                faults.append(f"{name} is {found[0]} {SHORT.repr(found[1])}, not {dtype} {size}")
            elif entry["data_offsets"] != [start, end]:
                faults.append(f"{name} is at bytes {SHORT.repr(entry['data_offsets'])}, not {[start, end]}")

        if not faults and end != left:
            faults = [f"{left} bytes follow its header, not {end}"]
        if faults:
            raise ValueError(f"{self.path} cannot be used: {faults[0]}; {WAY_OUT}")


@contextmanager
def open_packed(path: Path, rules: Any = RUNTIME) -> Iterator[OpenedFile]:
    """Open a file whose tensors can then be read.

    Args:
        rules: for its description.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it has another format, is from a machine with another byte order, is damaged, or its description
            breaks a rule.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} is not an optimised model of this bertlite: it has no {FILE}; {WAY_OUT}"
        )
    with path.open("rb") as file:
        header = read_header(path, file)
        about = parse_json(path, header.get("__metadata__", {}).get("native", "{}"), WAY_OUT)
        check_fields(path, about, {"format": one_of(*FORMATS), "byteorder": one_of(sys.byteorder)}, WAY_OUT)
        add_later_fields_(about)
        check_fields(path, about, rules, WAY_OUT)
        yield OpenedFile(path, file, header, about)


def read_packed(path: Path, *, words_later: bool = False) -> PackedFile:
    """Read a file for the runtime, which knows from its description which tensors must be there.

    Args:
        words_later: leave the word embeddings empty, to be filled by `words`.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it cannot be read; see `open_packed` and `OpenedFile.read`.
    """
    with open_packed(path) as opened:
        if (part := part_for_torch(opened.about)) is not None:
            raise ValueError(f"{path} has {part}: use bertlite itself, with torch")
        shape = shape_from(opened.about["shape"], Blocks(*map(int, opened.about["blocks"])))
        return opened.read(expected_tensors(opened.about), shape, words_later=words_later)


def read_header(path: Path, file: BufferedReader) -> dict[str, Any]:
    """Return the header of a safetensors file; raise ValueError if it has none."""
    size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= path.stat().st_size:
        raise ValueError(f"{path} is damaged: its header would have {size} bytes; {WAY_OUT}")
    header = parse_json(path, file.read(size), WAY_OUT)
    check_fields(path, header, HEADER, WAY_OUT)
    check_fields(path, entries_of(header), ENTRIES, WAY_OUT)
    return header


def entries_of(header: dict[str, Any]) -> dict[str, Any]:
    """Return the dtype, shape and bytes of each tensor, as a header states them."""
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def checksum(header: dict[str, Any], parts: Iterable[Any]) -> int:
    """Return the checksum of a file's header without "crc32", and of the bytes of its tensors in their order."""
    metadata = {name: value for name, value in header["__metadata__"].items() if name != "crc32"}
    found = zlib.crc32(json.dumps({**header, "__metadata__": metadata}).encode())
    for part in parts:
        found = zlib.crc32(part, found)
    return found


def read_bytes(file: BufferedReader, start: int, x: NDArray[Any], *, keep: bool) -> Iterator[Any]:
    """Read the bytes of a tensor into its memory if they are to be kept, and yield them."""
    file.seek(start)
    if keep:
        file.readinto(x.data)
        yield x
    for end in range(0, 0 if keep else x.nbytes, CHUNK):
        yield file.read(min(CHUNK, x.nbytes - end))


def check_rows(path: Path, shape: Shape, layers: NDArray[np.uint8]) -> None:
    """Raise ValueError unless the rows of distances, by which the kernels read, are rows of the table, in order."""
    last = 2 * (shape.buckets or shape.reach) - 1
    for (i, name, _), (start, size) in shape.offsets.items():
        if name != "distance_rows":
            continue
        rows = layers[start : start + size].view(np.float32)
        whole, ordered = rows == np.floor(rows), rows[1:] >= rows[:-1]
        if not (whole.all() and ordered.all() and rows[0] >= 0 and rows[-1] <= last):
            fault = f"distance_rows of layer {i} are not integers from 0 to {last} in order"
            raise ValueError(f"{path} cannot be used: {fault}; {WAY_OUT}")


def pack_matrix(
    kernels: Kernels,
    shape: Shape,
    data: Bytes,
    place: tuple[int, str],
    weight: NDArray[Any],
    bias: NDArray[Any],
    threads: int,
    factors: NDArray[Any] | None = None,
) -> None:
    """Pack a weight, (outputs, inputs), and its bias, (outputs,), into the bytes of a stack.

    Args:
        place: the index of its layer, and its name in the layer.
        factors: numbers by which inputs are multiplied before they are rotated, (inputs,), and the weight is divided;
            by default 1.
    """
    at, divided = shape.offsets, weight if factors is None else weight / factors
    floats = np.ascontiguousarray(divided, np.float32)

    # The kernels read biases in whole groups of outputs; zeros follow the last one.
    start, count = at[*place, "bias"]
    padded = data[start : start + count].view(np.float32)
    padded[:] = 0
    padded[: len(bias)] = bias

    # The weight is divided by the factors, and the kernels multiply its inputs by them: the product stays.
    if (*place, "factors") in at:
        start, count = at[*place, "factors"]
        of_inputs = np.ones(weight.shape[1]) if factors is None else factors
        data[start : start + count].view(np.float32)[:] = in_rotation(of_inputs)

    # A dtype without scales has no place for them; address 0 tells the kernels so.
    words, scales, sums = (
        data.ctypes.data + at[*place, part][0] if (*place, part) in at else 0 for part in ("words", "scales", "sums")
    )
    size = (weight.shape[0], weight.shape[1])
    kernels.pack(shape.dtype_of(*place), floats.ctypes.data, size, words, scales, sums, threads)


def in_rotation(factors: NDArray[Any]) -> NDArray[Any]:
    """Return factors of inputs, (inputs,), as the kernels rotate with them: by 1 and -1, not by 1/8 and -1/8."""
    whole = len(factors) // ROTATED * ROTATED
    return np.concatenate([factors[:whole] / 8, factors[whole:], np.ones(-len(factors) % LANES)])


def lay_in_blocks_(shape: Shape, data: Bytes, blocks: Blocks) -> Shape:
    """Lay packed weights in other blocks, in place; return their new shape."""
    old = shape.blocks
    if blocks == old:
        return shape

    # Machines differ in the order of words alone: rows are restored from the old blocks and laid in the new ones.
    for (i, name, part), (start, count) in shape.offsets.items():
        if part == "words" and count:
            words = data[start : start + count].view(np.int32)
            inputs = len(words) // round_up(shape.matrix(shape.layers[i], name)[0], GROUP)
            (per_block, pairs), (new_block, new_pairs) = (shape.layout_of(i, name, each) for each in (old, blocks))
            rows = transpose_halves(words, 2, pairs).reshape(-1, inputs, per_block).swapaxes(1, 2)
            words[:] = in_blocks(rows.reshape(-1, inputs), new_block, new_pairs)
    return replace(shape, blocks=blocks)


def in_blocks(words: NDArray[np.int32], per_block: int, pairs: int) -> NDArray[np.int32]:
    """Return words, (outputs, words of inputs), as they lie in blocks of so many outputs."""
    laid = words.reshape(-1, per_block, words.shape[1]).swapaxes(1, 2).ravel()
    return transpose_halves(laid, pairs, 2)


def transpose_halves(words: NDArray[np.int32], rows: int, columns: int) -> NDArray[np.int32]:
    """Return words whose halves are transposed, as matrices with this many rows and columns."""
    return words.view(np.int16).reshape(-1, rows, columns).swapaxes(1, 2).ravel().view(np.int32)


def aligned(size: int) -> Bytes:
    """Return `size` bytes of memory, aligned to a cache line.

    For 4 MB or more numpy asks Linux for huge pages, which makes small batches faster.
    """
    data = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -data.ctypes.data % ALIGNMENT
    return data[start : start + size]


def untouched(size: int) -> Bytes:
    """Return `size` bytes of memory whose pages are taken when they are first written."""
    return np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8, size)
