"""Time candidates in turn, so that noise of the machine affects all of them.

On a shared machine a ratio, taken round by round, is a result; a single time is not.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Timings = dict[str, list[float]]  # candidate: seconds of each round
FEWEST = 7  # rounds for a median and quartiles
SETTLE = 0.01  # seconds that a process sleeps at a time while threads of the last candidate spin
SPINNING = 0.1  # share of a processor that they use; Python's own threads use less
LONGEST_SPIN = 1.0  # seconds after which a candidate begins although threads still spin
MOST_CALLS = 100  # the most calls of a candidate in one round


def alternate(
    candidates: Mapping[str, Callable[[], Any]],
    rounds: int,
    device: str | torch.device = "cpu",
    *,
    warm: int = 2,
    seconds: float = math.inf,
    burst: float = 0.0,
    after_round: Callable[[], object] = lambda: None,
) -> Timings:
    """Time each candidate in each round; begin when no thread of the previous one is still spinning.

    Args:
        warm: rounds before the timed ones, which do not count.
        seconds: time limit, after which no further round begins, if there have been FEWEST.
        burst: the shortest time of a candidate in a round, in seconds.  A shorter one is called several times, after a
            call that does not count, and their mean is its time.  The warm rounds set the number of calls.
        after_round: called after each timed round.

    Raises:
        ValueError: `rounds` is below FEWEST.
    """
    check_rounds(rounds)
    if burst and not warm:
        raise ValueError("a burst needs a warm round, which sets the number of its calls: give warm=1")

    # Warm rounds come first: caches fill, and short candidates get the number of their calls.
    times: Timings = {name: [] for name in candidates}
    calls = dict.fromkeys(candidates, 1)
    began = time.perf_counter()
    for i in range(warm + rounds):
        if i - warm >= FEWEST and time.perf_counter() - began > seconds:
            break

        # All candidates in each round, so that what slows the machine slows all of them.
        for name, run in candidates.items():
            wait_until_idle()
            took = time_calls(run, calls[name], device)
            if i >= warm:
                times[name].append(took)
            elif took < burst:
                calls[name] = min(MOST_CALLS, math.ceil(burst / max(took, burst / MOST_CALLS)))

        if i >= warm:
            after_round()
    return times


def time_calls(run: Callable[[], Any], calls: int, device: str | torch.device = "cpu") -> float:
    """Return the seconds of one call: the mean over several, after one that does not count, or of a single one."""
    if calls > 1:
        run()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    wait_for(device)
    return (time.perf_counter() - start) / calls


def wait_until_idle(longest: float = LONGEST_SPIN) -> None:
    """Wait until no thread of this process spins.

    The threads of a library may wait for its next call in a loop, which would slow down another library.  OpenMP's
    wait for milliseconds, in some builds for 200.
    """
    began = time.perf_counter()
    while True:
        before = time.process_time()
        time.sleep(SETTLE)
        if time.process_time() - before < SPINNING * SETTLE or time.perf_counter() - began >= longest:
            return


def check_rounds(rounds: int, name: str = "rounds") -> None:
    """Raise ValueError if there are fewer rounds than FEWEST."""
    if rounds < FEWEST:
        raise ValueError(f"{name} is {rounds}; a median with its spread needs {FEWEST} or more")


def ratios(times: Timings, a: str, b: str) -> list[float]:
    """Return the seconds of candidate a, divided by candidate b's, in each round."""
    return [x / y for x, y in zip(times[a], times[b], strict=True)]


def with_spread(found: Mapping[str, float], form: str = ".2f") -> str:
    """Write a median with its quartiles: 1.19 (1.17–1.22)."""
    return f"{found['median']:{form}} ({found['low']:{form}}–{found['high']:{form}})"


def wait_for(device: str | torch.device) -> None:
    """Wait until a GPU has finished all launched work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median of two or more values, and the quartiles "low" and "high"."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"low": low, "median": median, "high": high}
