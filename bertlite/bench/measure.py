"""Measurements of pruned models: time beside the dense model's, and memory."""

import copy
import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertlite import optimize_for_inference
from bertlite.bench.work import full
from bertlite.importance import macs
from bertlite.inference.optimize import BACKENDS, check_backend
from bertlite.records import quartiles
from bertlite.timing import alternate, ratios

PLAIN = "plain"  # instead of a backend: the model itself


def prepared_models(
    models: Mapping[str, Any], dtype: torch.dtype | None = None, backend: str = "auto"
) -> dict[str, Any]:
    """Return the models to measure: all in one dtype, and optimised with one backend.

    Args:
        dtype: of `optimize_for_inference`; None is the models' own.
        backend: of `optimize_for_inference`, or "plain", which does not optimise.  The choice of "auto" for the
            first model is the backend of all.

    Raises:
        ValueError: there is no such backend, or it does not run these models in this dtype.
        RuntimeError: this torch lacks its operators, or its kernels cannot be compiled.
    """
    check_backend(backend, (PLAIN, *BACKENDS))
    prepared = {}
    for name, model in models.items():
        prepared[name] = prepare(model, dtype, backend)
        backend = backend if backend == PLAIN else prepared[name].backend
    return prepared


def prepare(model: Any, dtype: torch.dtype | None, backend: str) -> Any:
    """Return one model to measure."""
    if backend != PLAIN:
        return optimize_for_inference(model, dtype, backend)
    if dtype == torch.int8:
        raise ValueError("backend 'plain' has no int8, which needs the native kernels: use 'auto', or another dtype")
    return model if dtype in (None, model.dtype) else copy.deepcopy(model).to(dtype)


def latency(
    models: Mapping[str, Any],
    shapes: Iterable[tuple[int, int]],
    rounds: int = 21,
    device: str = "cpu",
    after_round: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Time each model beside the first, the dense one.

    Args:
        shapes: (sequences, tokens) of the inputs.
        after_round: called after each timed round.

    Returns:
        One line for each shape and model: "batch", "length", "model", "seconds" (quartiles), "speedup", the median
        over rounds of the dense model's seconds over this one's, with its quartiles, and "macs", the share of the
        dense encoder's multiply-accumulates.

    Raises:
        ValueError: fewer rounds than `bertlite.timing.FEWEST`.
    """
    dense = next(iter(models))
    lines = []
    for batch, length in shapes:
        inputs = full(batch, length).inputs(models[dense].config.vocab_size, device)
        with torch.inference_mode():
            found = alternate(
                {name: partial(model, **inputs) for name, model in models.items()},
                rounds,
                device,
                after_round=after_round,
            )
        for name, seconds in found.items():
            share = macs(models[name].config, length) / macs(models[dense].config, length)
            lines.append(
                {
                    "batch": batch,
                    "length": length,
                    "model": name,
                    "seconds": quartiles(seconds),
                    "speedup": quartiles(ratios(found, dense, name)),
                    "macs": share,
                }
            )
    return lines


def peak_memory(
    model: Any,
    batch: int,
    length: int,
    device: str = "cpu",
    *,
    dtype: torch.dtype | None = None,
    backend: str = PLAIN,
) -> int:
    """Return the peak memory of loading a model in a new process, optimising it and running it once, in bytes.

    On a GPU it is the memory that torch allocates; on the CPU the growth of the process, which includes the buffers
    of kernels.

    Args:
        dtype, backend: as for `prepared_models`.
    """
    from tempfile import TemporaryDirectory

    spawn = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder, ProcessPoolExecutor(1, spawn) as pool:
        model.save_pretrained(folder)
        how = (device, dtype, backend, torch.get_num_threads())
        return pool.submit(memory_growth, type(model), folder, batch, length, *how).result()


def memory_growth(
    cls: Any,
    folder: str,
    batch: int,
    length: int,
    device: str,
    dtype: torch.dtype | None,
    backend: str,
    threads: int,
) -> int:
    """Return the growth of this process's peak memory by loading, optimising and running a model, in bytes."""
    torch.set_num_threads(threads)
    before = peak_resident()
    model = prepare(cls.from_pretrained(folder, device=device), dtype, backend)
    with torch.inference_mode():
        model(**full(batch, length).inputs(model.config.vocab_size, device))
    return torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else peak_resident() - before


def peak_resident() -> int:
    """Return the peak resident memory of this process in bytes.

    On Linux it is read from /proc, since getrusage there includes the peak of the parent process.
    """
    try:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
