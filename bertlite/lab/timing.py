"""Timing candidates in turn, so that a noisy machine is noisy for all of them.

A ratio of medians is the result; a time on a shared machine is not.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

Timings = dict[str, list[float]]
FEWEST = 3  # rounds that a median is taken of
SETTLE = 0.01  # seconds between two candidates: the threads of the last one still spin


def alternate(
    candidates: Mapping[str, Callable[[], Any]],
    rounds: int,
    device: str = "cpu",
    *,
    warm: int = 2,
    seconds: float = math.inf,
) -> Timings:
    """Seconds of each candidate in each round.

    Args:
        warm: rounds before those, which do not count.
        seconds: after which no other round begins, if there have been FEWEST.
    """
    times: Timings = {name: [] for name in candidates}
    began = time.perf_counter()
    for i in range(warm + rounds):
        if i - warm >= FEWEST and time.perf_counter() - began > seconds:
            break
        for name, run in candidates.items():
            time.sleep(SETTLE)
            start = time.perf_counter()
            run()
            wait_for(device)
            if i >= warm:
                times[name].append(time.perf_counter() - start)
    return times


def summary(what: str, times: Timings, over: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Medians and quartiles of seconds, and the ratios of the medians of these pairs."""
    quartiles = {name: statistics.quantiles(seconds, n=4) for name, seconds in times.items()}
    return {
        "what": what,
        "rounds": len(next(iter(times.values()))),
        "seconds": {name: {"median": q[1], "low": q[0], "high": q[2]} for name, q in quartiles.items()},
        "ratios": {f"{a} / {b}": quartiles[a][1] / quartiles[b][1] for a, b in over},
    }


def ceilings(device: str) -> dict[str, float]:
    """What this machine can do now: operations per second of a large product by dtype, bytes per second of a copy."""
    found = {}
    on_cpu = torch.device(device).type == "cpu"
    size = 2048 if on_cpu else 8192
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = torch.randn(2, size, size, device=device).to(dtype)
            seconds = quickest(partial(F.linear, x, weight), device)
            found[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
        source = torch.ones(2**26 if on_cpu else 2**28, device=device)  # 256 MB and 1 GB, beyond any cache
        found["bytes"] = 2 * source.nbytes / quickest(partial(torch.empty_like(source).copy_, source), device)
    return found


def quickest(run: Callable[[], Any], device: str) -> float:
    """Seconds of the best of some runs."""
    return min(alternate({"it": run}, 8, device)["it"])


def peak_bytes(run: Callable[[], Any], device: str = "cpu") -> int:
    """How far the memory in use rises above where it stood.

    On the CPU from the events of torch's allocator, since a process's size tells little there; on a GPU torch.cuda's
    own peak.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    used = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        used += event.nbytes()
        peak = max(peak, used)
    return peak


def wait_for(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
