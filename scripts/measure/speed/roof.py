"""The most that this processor can do, with which the kernels' speed is compared."""

import ctypes
import math
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bertlite import BertConfig
from bertlite.runtime.library import FLAGS, SOURCES, find_compiler, usable_sets

SOURCE = Path(__file__).with_name("roof.cpp")
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
MEMORY = ("read", "copy")
MOVED = 128 << 20  # bytes, of which no cache holds many


@cache
def program() -> ctypes.CDLL:
    """Return the compiled program, for the instructions that the kernels use here."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "roof.so"
        flags = next(each for each in usable_sets() if each.name != "amx").flags
        subprocess.run([*find_compiler(), *FLAGS, *flags, f"-I{SOURCES}", str(SOURCE), "-o", str(built)], check=True)
        return ctypes.CDLL(str(built))


class Roof:
    """The highest rates of one thread that were seen: operations a second by dtype, and bytes a second of memory.

    A copy counts the bytes that it reads and those that it writes.

    If the kernels multiply bfloat16 and int8 with AMX, which the program does not, these have no rate.
    """

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}

    def measure(self) -> None:
        """Measure the rates once more, a fifth of a second."""
        narrow = () if usable_sets()[0].name == "amx" else ("multiply_bfloat16", "multiply_int8")
        for name in ("multiply_float32", *narrow, *MEMORY):
            function = getattr(program(), name)
            function.restype = ctypes.c_double
            rate = function(ctypes.c_long(MOVED)) if name in MEMORY else function()
            key = name.removeprefix("multiply_")
            self.rates[key] = max(rate, self.rates.get(key, 0.0))


def operations(config: BertConfig, lengths: Sequence[int]) -> int:
    """Return the operations of a forward's matmuls, without padding; a product and a sum are two."""
    windows = [config.local_attention] * len(config.local_layers or ())
    reaches = [math.inf] * (config.num_hidden_layers - len(windows)) + windows
    pairs = sum(keys_within(length, reach) for length in lengths for reach in reaches)
    return 2 * sum(lengths) * weights(config) + 4 * pairs * config.hidden_size


def keys_within(length: int, reach: float) -> int:
    """Return how many pairs of a query and a key of a sequence are no further apart than a reach."""
    reach = int(min(reach, length - 1))
    return length * (2 * reach + 1) - reach * (reach + 1)


def weights(config: BertConfig) -> int:
    """Return how many weights the matmuls of the layers have."""
    width = config.hidden_size
    return config.num_hidden_layers * (4 * width * width + (2 + config.gated) * width * config.intermediate_size)


def shares(section: Mapping[str, Any], config: BertConfig, lengths: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the shares of the roof that bertlite's kernels reach in a section, by engine.

    Returns:
        {engine: {"multiply": of its operations, "read" and "copy": of the bandwidth, for reading each weight once}};
        the largest of the first two is the share of the tighter limit
    """
    found, roof = {}, section["roof"]
    for name, row in section["seconds"].items():
        dtype = name.split()[-1]
        if name.startswith("bertlite native") and dtype in roof:
            rate = operations(config, lengths) / row["median"]
            read = weights(config) * BYTES[dtype] / row["median"]
            found[name] = {"multiply": rate / (section["threads"] * roof[dtype])}
            found[name] |= {each: read / roof[each] for each in MEMORY}
    return found
