"""Read the tensors of weights files, mapped from the file where its format allows.

Nothing in a file is ever run: pickles pass through torch's weights-only unpickler.
"""

import errno
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.checkpoint.faults import check_utf8, damaged_file, raise_faults
from bertlite.checkpoint.files import CheckpointFiles

State = dict[str, Tensor]
ALIGNMENT = 64  # bytes; torch's own allocator puts every tensor on the CPU at a multiple of it
SAFETENSORS_DTYPES = {  # {safetensors' name: dtype}
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_tensors(files: CheckpointFiles) -> State:
    """Read the tensors of a checkpoint under their own names, mapped from the files where the format allows.

    Raises:
        ValueError: a file is damaged, or holds other tensors than its index says.
    """
    if not files.shards:
        return read_weights(files.weights)
    state, faults = State(), []
    for path, named in files.shards.items():
        tensors = read_weights(path)
        faults += [f"{path.name} lacks {name}" for name in sorted(named - tensors.keys())]
        faults += [f"{path.name} also holds {name}" for name in sorted(tensors.keys() - named)]
        state.update(tensors)
    raise_faults(f"{files.weights} is not the index of the files it names:", faults)
    return state


def read_weights(path: Path) -> State:
    reader = READERS.get(path.suffix)
    if reader is None:
        raise ValueError(f"{path} is not a weights file: their names end in {', '.join(READERS)}")
    check_utf8(path)
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        raise ValueError(f"{path} is empty: fetch it again")
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a git-lfs pointer, not the weights: run git lfs pull")
    return reader(path, start)


def read_safetensors(path: Path, start: bytes) -> State:
    """Map a safetensors file; safetensors' own `get_tensor` leaks some bytes at every call."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt"):  # raises for a wrong header
            whole: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
    except SafetensorError as error:
        raise damaged_file(path, error) from None

    # The header was checked by safetensors; it says where in the mapped file each tensor lies.
    first = 8 + int.from_bytes(start[:8], "little")
    header = json.loads(torch.empty((), dtype=torch.uint8, device="cpu").set_(whole)[8:first].numpy().tobytes())
    header.pop("__metadata__", None)

    unknown = {name: entry["dtype"] for name, entry in header.items() if entry["dtype"] not in SAFETENSORS_DTYPES}
    known = ", ".join(SAFETENSORS_DTYPES)
    raise_faults(f"{path} cannot be read:", [f"{name} is {code}; known are {known}" for name, code in unknown.items()])
    return {name: mapped_tensor(whole, first, **entry) for name, entry in header.items()}


def mapped_tensor(whole: Any, first: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    """Return a tensor mapped from a safetensors file; a copy if its dtype needs another alignment.

    It has a storage of its own: multiprocessing needs one to send it.
    """
    start, end = (first + offset for offset in data_offsets)
    part, kind = whole[start:end], SAFETENSORS_DTYPES[dtype]
    return torch.empty((), dtype=kind, device="cpu").set_(part.clone() if start % kind.itemsize else part).view(shape)


def read_pickle(path: Path, start: bytes) -> State:
    zipped = start.startswith(b"PK")  # since torch 1.6; older files cannot be mapped
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except UnpicklingError as error:
        lines = (line for line in str(error).splitlines() if line and not line.startswith("Check the documentation"))
        *_, last = "", *lines  # the lines before advise to trust the file
        reason = last.rpartition("WeightsUnpickler error: ")[2]
        raise ValueError(f"{path} is damaged or holds more than tensors; nothing in it was run: {reason}") from None

    except Exception as error:  # torch and zipfile raise a dozen kinds
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a seek outside the file
            raise
        raise damaged_file(path, error) from None

    # A checkpoint is plain tensors by name, and nothing else.
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} holds a {type(state).__name__}, not tensors by name")
    for name, value in state.items():
        if not isinstance(name, str) or not is_plain_tensor(value):
            kind = type(value).__name__
            raise ValueError(f"{path}: {name!r} is a {kind}, not a plain tensor; save only a state_dict")
    return dict(state)


READERS: dict[str, Callable[[Path, bytes], State]] = {
    ".safetensors": read_safetensors,
    **dict.fromkeys((".bin", ".pt", ".pth"), read_pickle),
}


def is_plain_tensor(value: object) -> bool:
    strided = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized
    return strided and type(value) in (Tensor, nn.Parameter)
