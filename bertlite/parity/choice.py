"""The quick choice: few cases that together cover every value of every facet.

A facet is a field of a case, such as its backend, or a pair of them, such as its backend and its dtype.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import TypeAlias

from bertlite.parity.cases import GRADIENTS, Case

Facet: TypeAlias = tuple[str, ...]  # its name and its values, such as ("backend × dtype", "sdpa", "float64")

PAIRS = (
    ("backend", "dtype"),
    ("backend", "batch"),
    ("backend", "feature"),
    ("backend", "mode"),
    ("dtype", "mode"),
)
COPIES = ("pruned", "pruned_layer", "head_mask")  # which copy the models


def facets_of(case: Case, pairs: bool = True) -> frozenset[Facet]:
    """Return the facets of a case.

    Args:
        pairs: False, for a large checkpoint, keeps only pairs of backend and dtype, and no longest batch.
    """
    value = asdict(case)
    found: set[Facet] = {*value.items()}
    found |= {(f"{a} × {b}", value[a], value[b]) for a, b in PAIRS if pairs or b == "dtype"}
    if not pairs:
        return frozenset(found - {("batch", "long")})
    if case.feature in GRADIENTS:
        found |= {("gradients of", case.model), ("gradients in", case.dtype)}
    return frozenset(found)


def choose(cases: Sequence[Case], supported: Callable[[Case], bool], pairs: bool = True) -> tuple[Case, ...]:
    """Return few of the cases, in order, that cover every facet of them.

    This is a greedy cover: the case with most new facets for its time comes next; superfluous ones are removed at the
    end.

    Args:
        supported: whether the reference can compute a case.  An unsupported case is chosen only for a facet that no
            other case has, so that the report says what is not checked.
        pairs: see `facets_of`.
    """
    facets = {case: facets_of(case, pairs) for case in cases}
    chosen: list[Case] = []
    loaded: set[tuple[str, str, str]] = set()
    covered: Counter[Facet] = Counter()
    for group in ([c for c in cases if supported(c)], [c for c in cases if not supported(c)]):
        missing = set().union(*(facets[case] for case in group)) - covered.keys()
        while missing:
            gains = {case: len(facets[case] & missing) / seconds_of(case, loaded) for case in group}
            best = max(gains, key=gains.__getitem__)
            chosen.append(best)
            loaded.add(models_needed(best))
            covered.update(facets[best])
            missing -= facets[best]
    for case in sorted(chosen, key=lambda case: -seconds_of(case, loaded)):
        if all(covered[facet] > 1 for facet in facets[case]):
            chosen.remove(case)
            covered.subtract(facets[case])
    return tuple(case for case in cases if case in chosen)


def seconds_of(case: Case, loaded: Collection[tuple[str, str, str]]) -> float:
    """Estimate the time of a case on one core, for MiniLM, with these models in memory."""
    forwards = 1.0 if case.feature in GRADIENTS else 0.5 if case.feature in COPIES else 0.2
    tokens = 15.0 if case.batch == "long" else 1.0
    loading = 0.0 if models_needed(case) in loaded else 1.0
    compiling = 20.0 if case.mode == "compiled" else 0.0
    return forwards * tokens + loading + compiling


def models_needed(case: Case) -> tuple[str, str, str]:
    """Return the key of the models that a case loads."""
    return (case.model, str(case.overrides), case.dtype)
