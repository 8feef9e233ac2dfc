"""The memory that a run needs in addition to the memory in use before it."""

import itertools
from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(run: Callable[[], Any], device: str = "cpu") -> int:
    """Return the growth of memory in use during a run, in bytes.

    On the CPU it is counted from the events of torch's allocator, since the size of a process says little.  On a GPU
    it is the peak that torch.cuda reports.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    return max(memory_in_use(run))


def memory_in_use(run: Callable[[], Any]) -> list[int]:
    """Return the bytes in use on the CPU after each allocation and release of a run; the first is 0, its start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return list(itertools.accumulate((e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())), initial=0))
