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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .shapes import ALIGNMENT, FLOATS, GROUP, Shape, round_up
from .structs import Blocks, Kernels

FILE = "native.safetensors"
FORMATS = (5, 6, 7, 8, 9)  # the formats that can be read: 5 has no checksum, and before 7 all embeddings are floats
ROTATES, MIXES = 8, 9  # from these formats on 8-bit integers are of rotated rows, and layers differ in dtype
WORDS, ROW_SCALES = "word_embeddings.weight", "word_embeddings.scales"  # ends of names; scales of 8-bit integers
LAYERS = "layers"  # the tensor with the weights of all layers, which comes first
DTYPES = {  # bfloat16 as its bits
    "F64": np.float64,
    "F32": np.float32,
    "BF16": np.uint16,
    "F16": np.float16,
    "I64": np.int64,
    "I8": np.int8,
    "U8": np.uint8,
}
CHUNK = 1 << 16  # bytes that are read at once for the checksum alone
WAY_OUT = "optimise the model again and save it"
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
        if missing and os.fstat(self.file).st_mtime_ns != self.written:
            raise OSError(f"{FILE} was written over after it was loaded: load the folder again")
        for i in missing:
            row = self.table[i]
            row[:] = np.frombuffer(os.pread(self.file, row.nbytes, self.start + i * row.nbytes), row.dtype)
        self.is_read[missing] = True


class PackedFile(NamedTuple):
    """A file's description of its model, the weights of all layers, and all other tensors."""

    about: dict[str, Any]
    layers: Bytes
    tensors: dict[str, NDArray[Any]]
    dtypes: dict[str, str]  # the dtype of each tensor, as safetensors names it
    words: RowsInFile | None  # the rows of the word embeddings, if they are read later


def read_packed(path: Path, *, words_later: bool = False) -> PackedFile:
    """Read a file and compare it with its checksum.

    Args:
        words_later: leave the word embeddings empty, to be filled by `words`.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it has another format, is from a machine with another byte order, or is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} is not an optimised model of this bertlite: it has no {FILE}; {WAY_OUT}"
        )
    with path.open("rb") as file:
        header = read_header(path, file)
        first, metadata = file.tell(), header.get("__metadata__", {})
        about, left = read_about(path, metadata), path.stat().st_size - first
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors, words, parts = {}, None, []
        for name, entry in entries.items():
            later = words_later and hasattr(os, "pread") and name.endswith(WORDS)  # no pread on Windows
            tensors[name] = allocate(path, entry, left, untouched if later else aligned)
            start = first + entry["data_offsets"][0]
            parts.append(read_bytes(file, start, tensors[name], keep=not later))
            if later:
                words = RowsInFile(os.dup(file.fileno()), start, tensors[name])
        found = checksum(header, chain(*parts, iter(lambda: file.read(CHUNK), b"")))
        if about["format"] > FORMATS[0] and f"{found:08x}" != metadata.get("crc32"):
            raise ValueError(f"{path} is damaged: its bytes are not as written; {WAY_OUT}")
    layers = tensors.pop(LAYERS, aligned(0)).view(np.uint8).ravel()
    dtypes = {name: entry["dtype"] for name, entry in entries.items()}
    return PackedFile(about, layers, tensors, dtypes, words)


def read_header(path: Path, file: BufferedReader) -> dict[str, Any]:
    """Return the header of a safetensors file; raise ValueError if it has none."""
    size = int.from_bytes(file.read(8), "little")
    try:
        if not 2 <= size <= path.stat().st_size:
            raise ValueError(f"its header would have {size} bytes")
        header = json.loads(file.read(size))
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}; {WAY_OUT}") from None
    return header


def read_about(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """Return a file's description of its model; raise ValueError for a format that cannot be read."""
    try:
        about = json.loads(metadata.get("native", "{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON, or cut short ({error}): {WAY_OUT}") from None
    if not isinstance(about, dict):
        raise ValueError(f"{path} holds a JSON {type(about).__name__}, not an object: {WAY_OUT}")
    found = (about.get("format"), about.get("byteorder"))
    if found[0] not in FORMATS or found[1] != sys.byteorder:
        raise ValueError(
            f"{path} has format {found[0]!r} from a {found[1]}-endian machine; this bertlite reads formats"
            f" {', '.join(map(str, FORMATS))}, {sys.byteorder}-endian: {WAY_OUT}"
        )
    if found[0] < MIXES:
        if isinstance(about.get("shape"), dict):
            about["shape"] |= {"rotated": found[0] >= ROTATES, "kept": [], "floats": FLOATS[0]}
        if isinstance(about.get("blocks"), list):
            about["blocks"] = [*about["blocks"][:2], *about["blocks"][:1]]
    return about


def checksum(header: dict[str, Any], parts: Iterable[Any]) -> int:
    """Return the checksum of a file's header without "crc32", and of the bytes of its tensors in their order."""
    metadata = {name: value for name, value in header["__metadata__"].items() if name != "crc32"}
    found = zlib.crc32(json.dumps({**header, "__metadata__": metadata}).encode())
    for part in parts:
        found = zlib.crc32(part, found)
    return found


def allocate(path: Path, entry: dict[str, Any], left: int, memory: Callable[[int], Bytes]) -> NDArray[Any]:
    """Return memory for a tensor of a file; raise ValueError if its entry in the header describes none.

    Args:
        left: the number of bytes after the header.
    """
    try:
        (start, end), shape, dtype = entry["data_offsets"], entry["shape"], np.dtype(DTYPES[entry["dtype"]])
        if not 0 <= start <= end <= left:
            raise ValueError(f"{left} bytes follow the header")
        return memory(end - start).view(dtype).reshape(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {entry!r} is no tensor ({error!r}); {WAY_OUT}") from None


def read_bytes(file: BufferedReader, start: int, x: NDArray[Any], *, keep: bool) -> Iterator[Any]:
    """Read the bytes of a tensor into its memory if they are to be kept, and yield them."""
    file.seek(start)
    if keep:
        file.readinto(x.data)
        yield x
    for end in range(0, 0 if keep else x.nbytes, CHUNK):
        yield file.read(min(CHUNK, x.nbytes - end))


def pack_matrix(
    kernels: Kernels,
    shape: Shape,
    data: Bytes,
    place: tuple[int, str],
    weight: NDArray[Any],
    bias: NDArray[Any],
    threads: int,
) -> None:
    """Pack a weight, (outputs, inputs), and its bias, (outputs,), into the bytes of a stack.

    Args:
        place: the index of its layer, and its name in the layer.
    """
    floats, at = np.ascontiguousarray(weight, np.float32), shape.offsets
    start, count = at[*place, "bias"]
    padded = data[start : start + count].view(np.float32)
    padded[:] = 0
    padded[: len(bias)] = bias
    words, scales, sums = (
        data.ctypes.data + at[*place, part][0] if (*place, part) in at else 0 for part in ("words", "scales", "sums")
    )
    size = (weight.shape[0], weight.shape[1])
    kernels.pack(shape.dtype_of(*place), floats.ctypes.data, size, words, scales, sums, threads)


def lay_in_blocks_(shape: Shape, data: Bytes, blocks: Blocks) -> Shape:
    """Lay packed weights in other blocks, in place; return their new shape."""
    old = shape.blocks
    for (i, name, part), (start, count) in shape.offsets.items():
        if part == "words" and count and blocks != old:
            words = data[start : start + count].view(np.int32)
            inputs = len(words) // round_up(shape.matrix(shape.layers[i], name)[0], GROUP)
            (per_block, pairs), (new_block, new_pairs) = (shape.layout_of(i, name, each) for each in (old, blocks))
            rows = transpose_halves(words, 2, pairs).reshape(-1, inputs, per_block).swapaxes(1, 2)
            laid = rows.reshape(-1, new_block, inputs).swapaxes(1, 2).ravel()
            words[:] = transpose_halves(laid, new_pairs, 2)
    return replace(shape, blocks=blocks)


def transpose_halves(words: NDArray[np.int32], rows: int, columns: int) -> NDArray[np.int32]:
    """Return words whose halves are transposed, as matrices with this many rows and columns."""
    return words.view(np.int16).reshape(-1, rows, columns).swapaxes(1, 2).ravel().view(np.int32)


def aligned(size: int) -> Bytes:
    """Return `size` bytes of memory, aligned to a cache line."""
    data = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -data.ctypes.data % ALIGNMENT
    return data[start : start + size]


def untouched(size: int) -> Bytes:
    """Return `size` bytes of memory whose pages are taken when they are first written."""
    return np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8, size)
