"""A mean over clusters of values, such as tasks with several models each."""

from collections.abc import Sequence

import numpy as np

from bertlite.experiments.statistics import Estimate


def clustered_estimate(clusters: Sequence[Sequence[float]]) -> Estimate:
    """Estimate the mean of the clusters' means, such as tasks' with several models each: Student's t over clusters."""
    means = np.array([np.mean(values) for values in clusters])
    if len(means) < 2:
        return Estimate(float(means[0]), ())
    return Estimate(float(means.mean()), ((float(means.var(ddof=1)) / len(means), len(means) - 1),))
