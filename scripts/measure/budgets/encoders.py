"""Seven tasks that judge a sentence encoder by its vectors alone, and paired intervals over their texts.

Pairs: Spearman's correlation of cosines with people's ratings.  Searches: nDCG@10 of texts with the query's label.
Probes: accuracy of a linear classifier of vectors, by least squares.

Shapes:  N examples that judge · R resamples
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bertlite.experiments.statistics import RESAMPLES, Array
from bertlite.shipping.original import spearman
from scripts.measure.budgets import tasks
from scripts.measure.budgets.tasks import Row

FOUND = 10  # texts of a search that count
RIDGE = 1.0  # penalty of a probe, for vectors of length 1
EACH = 800  # texts of a task that models are fitted to
TAILS = (2.5, 97.5)  # percentiles of a 95 % interval
MEAN = "mean"


@dataclass(frozen=True)
class Judged:
    """A task.

    Args:
        rows: its reader, rows(folder of all data, part).
        count: the number of rows that judge.
        others: the number of rows that are searched or that a probe learns from.
        part: the part that judges.
        searched: the part that is searched or that a probe learns from.
        fitted: models are fitted to other texts of its training part, without their labels.
    """

    rows: Callable[[Path, str], Iterable[Row]]
    kind: str
    count: int
    others: int = 0
    part: str = "dev"
    fitted: bool = True
    searched: str = "train"

    def judging(self, data: Path) -> list[Row]:
        rows, searched = list(self.rows(data, self.part)), {row[2] for row in self.learnt(data)}
        return random.Random(0).sample([row for row in rows if row[2] in searched or not self.others], self.count)

    def learnt(self, data: Path) -> list[Row]:
        return self.shuffled(data, self.searched)[: self.others]

    def to_fit(self, data: Path, count: int = EACH) -> list[str]:
        first = self.others if self.searched == "train" else 0
        return [row[0] for row in self.shuffled(data, "train")[first : first + count]] if self.fitted else []

    def shuffled(self, data: Path, part: str) -> list[Row]:
        rows = list(self.rows(data, part))
        return random.Random(0).sample(rows, len(rows))


JUDGED = {
    "STS-B": Judged(tasks.stsb, "pairs", 600, part="test"),
    "SICK": Judged(tasks.sick(3), "pairs", 600, fitted=False),
    "Banking77": Judged(tasks.banking77, "search", 250, 1000),
    "CLINC150": Judged(tasks.clinc150, "search", 250, 1000),
    "TREC": Judged(tasks.TASKS["trec"].rows, "probe", 300, 500, fitted=False),
    "AG News": Judged(tasks.agnews, "probe", 250, 250),
    "SST-2": Judged(tasks.sst2, "probe", 300, 500),
}

XQUAD = "XQuAD"
PASSAGES = {XQUAD: Judged(tasks.xquad, "search", 578, 240, searched="passages")}


def texts_to_fit(data: Path) -> list[str]:
    """Return texts of the tasks' training parts that judge nothing."""
    texts = (" ".join(text.split()) for each in JUDGED.values() for text in each.to_fit(data))
    return [*dict.fromkeys(texts)]


class Judge:
    """Judges vectors of `texts`, in their order."""

    def __init__(self, data: Path, judged: Mapping[str, Judged] = JUDGED) -> None:
        self.kinds = {name: each.kind for name, each in judged.items()}
        self.rows = {name: (each.judging(data), each.learnt(data)) for name, each in judged.items()}

    @cached_property
    def texts(self) -> list[str]:
        rows = (row for parts in self.rows.values() for part in parts for row in part)
        return [*dict.fromkeys(text for first, second, _ in rows for text in (first, second) if text)]

    @cached_property
    def places(self) -> dict[str, int]:
        return {text: i for i, text in enumerate(self.texts)}

    def __call__(self, vectors: Array) -> dict[str, Array]:
        """Return the scores of each task, and their mean: (1 + R,), the first of all examples, then of resamples.

        Resamples are the same for all vectors, so the differences of scores are paired.
        """
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        scores = {name: resampled(*self.examples(name, vectors)) for name in self.rows}
        return {**scores, MEAN: np.mean([*scores.values()], axis=0)}

    def searched(self, name: str, vectors: Array) -> Array:
        """Return the vectors of the training texts of a task."""
        return vectors[[self.places[row[0]] for row in self.rows[name][1]]]

    def examples(self, name: str, vectors: Array) -> tuple[Array, Array | None]:
        """Return a number for each example, (N,), and ratings to correlate it with, (N,), or None for its mean."""
        (rows, learnt), kind = self.rows[name], self.kinds[name]
        firsts = vectors[[self.places[row[0]] for row in rows]]
        labels = np.array([row[2] for row in rows])
        if kind == "pairs":
            return (firsts * vectors[[self.places[row[1]] for row in rows]]).sum(1), labels.astype(float)
        others, known = self.searched(name, vectors), np.array([row[2] for row in learnt])
        score = gain if kind == "search" else is_right
        return score(firsts, labels, others, known), None


def gain(queries: Array, labels: Array, documents: Array, known: Array) -> Array:
    """Return the nDCG@10 of each query; documents with its label are relevant."""
    relevant = known == labels[:, None]
    order = np.argsort(-queries @ documents.T, axis=1, kind="stable")[:, :FOUND]
    discounts = 1 / np.log2(np.arange(FOUND) + 2)
    best = discounts.cumsum()[np.minimum(relevant.sum(1), FOUND) - 1]
    found: Array = np.take_along_axis(relevant, order, 1) @ discounts / best
    return found


def is_right(vectors: Array, labels: Array, others: Array, known: Array) -> Array:
    """Return 1 for each text that a linear classifier, fitted to the other texts, labels correctly; else 0."""
    names, targets = np.unique(known, return_inverse=True)
    wanted, mean = np.eye(len(names))[targets], others.mean(0, dtype=np.float64)
    x = others - mean
    weight = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ (wanted - wanted.mean(0)))
    chosen = names[((vectors - mean) @ weight + wanted.mean(0)).argmax(1)]
    return (chosen == labels).astype(float)


def resampled(values: Array, ratings: Array | None) -> Array:
    """Return the score of all examples, and of R resamples: (N,) -> (1 + R,)."""
    count = len(values)
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    chosen: Sequence[Any] = [np.arange(count), *drawn]
    if ratings is None:
        return np.array([values[each].mean() for each in chosen])
    return np.array([spearman(values[each], ratings[each]) for each in chosen])


def difference(mine: Array, theirs: Array) -> dict[str, float]:
    """Return by how much scores exceed others, with the 95 % interval of the bootstrap, paired."""
    found = mine - theirs
    low, high = np.percentile(found[1:], TAILS)
    return {"difference": float(found[0]), "difference_low": float(low), "difference_high": float(high)}
