"""How sure a figure is: intervals, paired tests, agreement of rankings.  Intervals are 95 % unless said otherwise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Metric = Callable[[Array, Array], float]  # (predictions, labels) of the same examples -> the figure
RESAMPLES = 1000


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Two systems on the same examples: a - b."""

    difference: float
    low: float
    high: float
    p: float  # two-sided, of no difference


def wilson(right: int, total: int, level: float = 0.95) -> Interval:
    """The interval of a proportion, such as an accuracy (Wilson 1927)."""
    from scipy.stats import binomtest

    found = binomtest(right, total).proportion_ci(level, method="wilson")
    return Interval(float(found.low), float(found.high))


def bootstrap(metric: Metric, predictions: Array, labels: Array, level: float = 0.95, seed: int = 0) -> Interval:
    """The percentile interval of a metric over resampled examples."""
    values = np.array([metric(predictions[i], labels[i]) for i in resampled(len(labels), seed)])
    return percentiles(values, level)


def paired_bootstrap(
    metric: Metric, a: Sequence[Array], b: Sequence[Array], labels: Array, level: float = 0.95, seed: int = 0
) -> Comparison:
    """What the runs a are better by than the runs b, on average, on examples resampled for all of them alike.

    p counts the resamples on the other side of 0, twice (Efron and Tibshirani 1993, section 16.2).
    """

    def difference(chosen: Any) -> float:
        ours, theirs = ([metric(x[chosen], labels[chosen]) for x in runs] for runs in (a, b))
        return float(np.mean(ours) - np.mean(theirs))

    values = np.array([difference(chosen) for chosen in resampled(len(labels), seed)])
    beyond = min(np.sum(values <= 0), np.sum(values >= 0))
    interval = percentiles(values, level)
    p = min(1.0, 2 * float(beyond + 1) / (len(values) + 1))
    return Comparison(difference(slice(None)), interval.low, interval.high, p)


def mcnemar(right_a: Array, right_b: Array) -> float:
    """The exact two-sided p of McNemar's test: whether two systems are right on equally many examples."""
    from scipy.stats import binomtest

    only_a, only_b = int(np.sum(right_a & ~right_b)), int(np.sum(~right_a & right_b))
    return float(binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Student's interval of the mean of repeated runs.

    Raises:
        ValueError: fewer than two values.
    """
    from scipy.stats import t

    if len(values) < 2:
        raise ValueError(f"an interval over seeds needs two values or more; {len(values)} given")
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / len(values) ** 0.5
    reach = float(t.ppf((1 + level) / 2, len(values) - 1)) * error
    return Interval(mean - reach, mean + reach)


def rank_correlations(scores: dict[str, Array]) -> tuple[list[str], Array]:
    """Spearman's correlation of every pair of score tables, over the heads that both know."""
    from scipy.stats import spearmanr

    names = list(scores)
    found = np.ones((len(names), len(names)))
    for i, a in enumerate(names):
        for j, b in enumerate(names[:i]):
            x, y = scores[a].ravel(), scores[b].ravel()
            known = ~(np.isnan(x) | np.isnan(y))
            found[i, j] = found[j, i] = spearmanr(x[known], y[known]).statistic
    return names, found


def resampled(count: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))


def percentiles(values: Array, level: float) -> Interval:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))
