"""Measurements of pruned models: time beside the dense model's, memory, and the time of each sublayer by its size."""

import copy
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertlite import optimize_for_inference
from bertlite.importance import macs
from bertlite.importance.allocation import BySize
from bertlite.importance.replay import own_forward
from bertlite.inference.optimize import BACKENDS
from bertlite.pruning import layers_of, with_fields, with_pruned
from bertlite.records import quartiles
from bertlite.timing import alternate, ratios

PLAIN = "plain"  # instead of a backend: the model itself


def random_inputs(config: Any, batch: int, length: int, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """Return sequences of random words without padding."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (batch, length), generator=draw).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


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
    if backend not in (PLAIN, *BACKENDS):
        raise ValueError(f"backend {backend!r} is unknown; have: {PLAIN}, {', '.join(BACKENDS)}")
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
        raise ValueError("backend 'plain' has no int8, which needs packed weights: use 'auto', or another dtype")
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
        inputs = random_inputs(models[dense].config, batch, length, device)
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


def latency_table(
    model: Any,
    batch: int,
    length: int,
    *,
    neurons: Iterable[int] = (),
    rounds: int = 21,
    device: str = "cpu",
) -> dict[str, Mapping[int, float]]:
    """Time one attention sublayer by its number of heads, and one feed-forward sublayer by its number of neurons.

    Args:
        neurons: the numbers of neurons to measure; the number of heads goes from 0 to all.

    Returns:
        {"heads": {kept: median seconds}, "neurons": {kept: median seconds}}.
    """
    inputs = random_inputs(model.config, batch, length, device)
    with torch.inference_mode():
        with called_with(model, 0) as calls:
            model.base_model(**inputs)  # its last layer computes every token
        (heads, networks), _ = time_sublayers(model, 0, calls[0], neurons=neurons, rounds=rounds, device=device)
    return {"heads": heads, "neurons": networks}


@contextmanager
def called_with(model: Any, layer: int) -> Iterator[list[tuple[Any, ...]]]:
    """Record the arguments of the calls of a layer, without a hook, with which the last layer would do more work."""
    block, calls = list(layers_of(model))[layer], []
    forward = block.forward

    def record(*args: Any) -> Any:
        calls.append(args)
        return forward(*args)

    with own_forward(block, record):
        yield calls


def time_sublayers(
    model: Any,
    layer: int,
    call: tuple[Any, ...],
    *,
    neurons: Iterable[int],
    rounds: int,
    device: str = "cpu",
    after_round: Callable[[], object] = lambda: None,
) -> tuple[BySize, float]:
    """Return the median seconds of a layer's two sublayers, by how many heads and how many neurons they keep, and
    their spread: the distance of the quartiles over the median, in the median over all.

    Args:
        model: pruned or not; the sublayers have other weights, and 0 to all heads that the model was built with.
        call: the arguments of the layer, from `called_with`.
        neurons: the numbers of neurons to measure.
        after_round: called after each timed round.
    """
    neurons = list(neurons)
    states, inputs = call
    block = list(layers_of(model))[layer]
    config = with_fields(model.config, {"pruned_heads": {}, "pruned_neurons": {}})
    all_heads, all_neurons = config.num_attention_heads, config.intermediate_size

    def smaller(heads: Iterable[int] = (), neurons: Iterable[int] = ()) -> Any:
        pruned = with_pruned(config, {layer: heads}, {layer: neurons})
        found = type(block)(pruned, layer).to(device=states.device, dtype=states.dtype).eval()
        for parameter in found.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        return found

    runs: dict[str, Callable[[], Any]] = {}
    for kept in range(all_heads + 1):
        attention = smaller(heads=range(kept, all_heads)).attention
        runs[f"heads {kept}"] = partial(attention, states, inputs)
    for kept in neurons:
        runs[f"neurons {kept}"] = partial(smaller(neurons=range(kept, all_neurons)).feed_forward, states)
    found = alternate(runs, rounds, device, after_round=after_round)
    each = {name: quartiles(seconds) for name, seconds in found.items()}
    by_size = (
        nondecreasing({kept: each[f"heads {kept}"]["median"] for kept in range(all_heads + 1)}),
        nondecreasing({kept: each[f"neurons {kept}"]["median"] for kept in neurons}),
    )
    return by_size, statistics.median((row["high"] - row["low"]) / row["median"] for row in each.values())


def nondecreasing(times: Mapping[int, float]) -> dict[int, float]:
    """Return the nearest times, in least squares, that never fall with growing sizes, as falls are noise."""
    pools: list[tuple[float, list[int]]] = []  # a mean and its sizes
    for size in sorted(times):
        mean, sizes = times[size], [size]
        while pools and pools[-1][0] > mean:
            before, others = pools.pop()
            mean = (before * len(others) + mean * len(sizes)) / (len(others) + len(sizes))
            sizes = [*others, *sizes]
        pools.append((mean, sizes))
    return {size: mean for mean, sizes in pools for size in sizes}


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
        model(**random_inputs(model.config, batch, length, device))
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
