"""The outputs of a run's model for each example, and intervals of its metrics."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bertlite.experiments.data import NO_LABEL, pad_rows
from bertlite.experiments.evaluate import Task
from bertlite.experiments.statistics import Array, Interval, bootstrap, wilson
from bertlite.records import Record

DENSE = "dense"  # the outputs of the dense model that a run pruned, in its predictions


def outputs(run: Record, name: str = "outputs") -> Array:
    """Return the outputs of a run's model, (examples, classes), (examples, 1) or (examples, words, classes)."""
    return as_array([line[name] for line in run.predictions], np.nan)


def dense_outputs(run: Record) -> Array:
    """Return the outputs of the dense model that a run pruned.

    Raises:
        ValueError: the run was made before they were recorded.
    """
    if DENSE not in run.predictions[0]:
        raise ValueError(
            f"{run.folder} does not hold the outputs of its dense model: remove it and run it again to compare with"
            f" {DENSE}"
        )
    return outputs(run, DENSE)


def labels(run: Record) -> Array:
    """Return the labels of the examples that a run was evaluated on, (examples,) or (examples, words)."""
    return as_array([line["label"] for line in run.predictions], NO_LABEL)


def as_array(rows: Sequence[Any], padding: float) -> Array:
    """Return rows of numbers as an array; those of words, of several lengths, filled up."""
    nested = [isinstance(row, list) and (padding == NO_LABEL or not row or isinstance(row[0], list)) for row in rows]
    if not any(nested):
        return np.array(rows, float if math.isnan(padding) else None)  # null, as which nan is written, is nan again
    width = next(np.shape(row)[1:] for row in rows if row)
    return pad_rows([np.array(row, float).reshape(len(row), *width) for row in rows], padding)


def interval_over_examples(found: Array, truth: Array, task: Task, metric: str) -> Interval | None:
    """Return the 95 % interval of one model's metric over the examples, None where nothing varies."""
    if metric == "accuracy" and truth.ndim == 1:
        return wilson(int(np.sum(found.argmax(1) == truth)), len(truth))
    interval = bootstrap(task.metrics[metric], found, truth)
    return interval if interval.high > interval.low else None
