"""Intervals and paired tests."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Metric = Callable[[Array, Array], float]  # (predictions, labels) of the same examples -> the figure
Ends = tuple[float, float] | tuple[None, None]  # low and high; None if nothing varies
LEVEL = 0.95  # the level of intervals
RESAMPLES = 1000
SMALLEST_P = 1e-9  # below it, p is not computed
ROUNDING = 1e-12  # standard errors up to this are rounding


def wilson(right: int, total: int) -> Ends:
    """Return the interval of a proportion, such as an accuracy (Wilson 1927)."""
    from scipy.stats import binomtest

    found = binomtest(right, total).proportion_ci(LEVEL, method="wilson")
    return float(found.low), float(found.high)


@dataclass(frozen=True)
class Estimate:
    """A figure with the parts of its variance: (variance, degrees of freedom) of each."""

    value: float
    parts: tuple[tuple[float, float], ...]

    def reach(self, level: float) -> float:
        """Return the half-width of the interval at this level."""
        from scipy.stats import t

        return math.sqrt(sum(float(t.ppf((1 + level) / 2, freedom)) ** 2 * part for part, freedom in self.parts))

    def interval(self, low: float = -math.inf, high: float = math.inf) -> Ends:
        """Return the ends of the interval, cut to the range of the figure."""
        if not self.parts:
            return None, None
        reach = self.reach(LEVEL)
        return max(low, self.value - reach), min(high, self.value + reach)

    @property
    def p(self) -> float:
        """Two-sided p of the figure being 0: 1 minus the level whose interval ends at 0."""
        from scipy.optimize import brentq

        if not self.parts:
            return float(self.value == 0)
        if self.reach(1 - SMALLEST_P) <= abs(self.value):
            return SMALLEST_P
        return 1 - float(brentq(lambda level: self.reach(level) - abs(self.value), 0.0, 1 - SMALLEST_P))


def crossed_estimate(figures: Callable[[Array], Sequence[Array]], count: int) -> Estimate:
    """Estimate a mean over clusters, fine-tuned models or seeds, that are all measured on the same examples.

    The variance of the mean has two parts: the clusters', s²/n, and the examples', from the bootstrap over them with
    fixed clusters.  Resampling clusters and examples at once gives their sum, up to terms of order 1/n (Owen 2007, The
    pigeonhole bootstrap, Annals of Applied Statistics 1, 386-411).  A percentile of resampled clusters is too narrow:
    three models give only ten different means (Hesterberg 2015, arXiv:1411.5279).  So each part has Student's quantile
    with its own degrees of freedom.  The two intervals add in squares (Zou and Donner 2008, Statistics in Medicine 27,
    1693-1702).

    Args:
        figures: (indices of examples) -> samples of clusters.  The estimate is the mean of the first, minus the
            second's if there are two.  In samples of one cluster only the examples vary.
        count: number of examples.
    """
    whole = figures(np.arange(count))
    parts = [(float(np.var(each, ddof=1)) / len(each), len(each) - 1) for each in whole if len(each) > 1]
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))  # with replacement
    resampled = [difference_of_means(figures(chosen)) for chosen in drawn]
    parts.append((float(np.var(resampled, ddof=1)), count - 1))
    return Estimate(difference_of_means(whole), tuple(part for part in parts if part[0] > ROUNDING**2))


def difference_of_means(samples: Sequence[Array]) -> float:
    """Return the mean of the first sample, minus the second's if there is one."""
    first, *others = (float(np.mean(each)) for each in samples)
    return first - sum(others)


def mcnemar(right_a: Array, right_b: Array) -> float:
    """Return the exact two-sided p of McNemar's test that two systems are right on equally many examples."""
    from scipy.stats import binomtest

    only_a, only_b = int(np.sum(right_a & ~right_b)), int(np.sum(~right_a & right_b))
    return float(binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0


def equivalence(gained: int, lost: int, total: int, margin: float) -> float:
    """Return p of the test that two accuracies on the same examples differ by `margin` or more.

    A small p says that they are equivalent within the margin: both one-sided tests reject (TOST, Schuirmann 1987,
    Journal of Pharmacokinetics and Biopharmaceutics 15, 657-680).  Each is the score test of paired proportions (Tango
    1998, Statistics in Medicine 17, 891-908), which holds for few changes, and for none.

    Args:
        gained, lost: examples that only the first, or only the second of the systems gets right.
        margin: the smallest difference that matters, such as 0.01; to be chosen before the examples are seen.

    Raises:
        ValueError: the margin is not between 0 and 1.
    """
    from scipy.stats import norm

    if not 0 < margin < 1:
        raise ValueError(f"margin is {margin}; give a difference of accuracies between 0 and 1, such as 0.01")

    def z(ahead: int, behind: int) -> float:
        # Under a true difference of -margin the share of examples behind has this maximum of its likelihood.
        b = -(2 * total - ahead + behind) * margin - ahead - behind
        c = behind * margin * (1 + margin)
        share = (math.sqrt(b * b - 8 * total * c) - b) / (4 * total)
        return (ahead - behind + total * margin) / math.sqrt(total * (2 * share - margin * (1 + margin)))

    return float(norm.sf(min(z(gained, lost), z(lost, gained))))
