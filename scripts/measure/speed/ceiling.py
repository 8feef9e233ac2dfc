"""The fastest large matmul of this machine, by dtype: a limit for the rate of engines.

Every installed library multiplies the same square matrices, with a weight that is packed once if the library supports
it; the fastest counts.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from bertlite.bench.engines import openvino_settings
from bertlite.timing import alternate

SIZE = {"cpu": 2048, "cuda": 8192}  # of the square matrices
ROUNDS = 15  # of which the fastest counts
COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes, beyond any cache


@dataclass(frozen=True)
class Ceiling:
    """A matmul that is as fast as this machine's can be.

    Args:
        library: the library that runs it.
        operations: floating-point, or integer, operations of one run.
        rate: operations per second, of its fastest run.
    """

    library: str
    run: Callable[[], Any]
    operations: float
    rate: float


def find_ceilings(device: str) -> dict[str, Ceiling]:
    """Return the fastest matmul of each dtype that some library computes on this device."""
    operations, found = 2.0 * SIZE[torch.device(device).type] ** 3, {}
    for dtype in ("float32", "bfloat16", "int8"):
        runs = matmuls(dtype, device)
        times = alternate(runs, ROUNDS, device)  # in turn, so that a noisy machine is noisy for all libraries
        ceilings = [Ceiling(name, run, operations, operations / min(times[name])) for name, run in runs.items()]
        if ceilings:
            found[dtype] = max(ceilings, key=lambda ceiling: ceiling.rate)
    return found


def copy_rate(device: str) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.ones(COPIED[torch.device(device).type] // 4, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    return 2 * source.nbytes / min(alternate({"copy": copy}, ROUNDS, device)["copy"])


def matmuls(dtype: str, device: str) -> dict[str, Callable[[], Any]]:
    """Return the matmuls of a dtype, by the library that runs each."""
    kind = torch.device(device).type
    size, runs = SIZE[kind], dict[str, Callable[[], Any]]()
    if dtype != "int8":
        x, weight = torch.randn(2, size, size, device=device).to(getattr(torch, dtype))
        runs["torch"] = torch.inference_mode()(partial(F.linear, x, weight))
    for library, make in (("oneDNN, packed", onednn), ("OpenVINO", openvino)) if kind == "cpu" else ():
        with suppress(ModuleNotFoundError, AttributeError, RuntimeError):  # it is not here, or not in this dtype
            run = torch.inference_mode()(make(dtype, size))
            run()
            runs[library] = run
    return runs


def onednn(dtype: str, size: int) -> Callable[[], Any]:
    """Return the matmul that torch.compile uses, by a packed weight; in int8 of unsigned inputs by a signed weight.

    Raises:
        AttributeError, RuntimeError: this torch or this processor lacks it.
    """
    if dtype != "int8":
        x, weight = torch.randn(2, size, size).to(getattr(torch, dtype))
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return partial(torch.ops.mkldnn._linear_pointwise.default, x, packed, None, "none", [], "")
    x = torch.randint(0, 255, (size, size), dtype=torch.uint8)
    packed = torch.ops.onednn.qlinear_prepack(torch.randint(-127, 127, (size, size), dtype=torch.int8), None)
    scales, zeros = torch.full((size,), 0.01), torch.zeros(size, dtype=torch.int64)
    return partial(
        torch.ops.onednn.qlinear_pointwise.default,
        x, 0.01, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip


def openvino(dtype: str, size: int) -> Callable[[], Any]:
    """Return OpenVINO's matmul by a constant.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    import numpy as np
    import openvino as ov
    from openvino import opset13 as ops

    weight: Any = np.random.default_rng(0).standard_normal((size, size), np.float32)
    given = ops.parameter([size, size], np.uint8 if dtype == "int8" else np.float32)
    x = given
    if dtype == "int8":  # as in 8-bit models: integers times a scale
        centred = ops.subtract(ops.convert(given, np.float32), ops.constant(np.float32(128)))
        x = ops.multiply(centred, ops.constant(np.float32(0.01)))
        rounded = ops.constant((30 * weight).clip(-127, 127).astype(np.int8))
        scales = ops.constant(np.full((size, 1), 0.01, np.float32))
        weight = ops.multiply(ops.convert(rounded, np.float32), scales)
    else:
        weight = ops.constant(weight)
    model = ov.Model([ops.matmul(x, weight, False, True)], [given])
    request = ov.Core().compile_model(model, "CPU", openvino_settings(dtype)).create_infer_request()
    values = np.full((size, size), 3, np.uint8 if dtype == "int8" else np.float32)
    return lambda: request.infer([values], share_inputs=True)
