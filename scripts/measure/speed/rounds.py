"""The part of a record on candidates that were timed in turn."""

from collections.abc import Sequence
from typing import Any

from bertlite.support.timing import Timings, quartiles, ratios


def summary(what: str, times: Timings, over: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return median and quartiles of the seconds of each candidate, and of the ratios of these pairs.

    A ratio is taken in each round, of two times measured shortly after each other.

    Args:
        what: description of the measurement.
        over: pairs of candidates, (a, b) for a's seconds over b's.
    """
    return {
        "what": what,
        "rounds": len(next(iter(times.values()))),
        "seconds": {name: quartiles(seconds) for name, seconds in times.items()},
        "ratios": {f"{a} / {b}": quartiles(ratios(times, a, b)) for a, b in over},
    }
