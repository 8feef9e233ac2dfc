"""Compare a pruned model with the dense one on texts that it was not fitted to."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertlite.experiments.compare import comparison
from bertlite.experiments.evaluate import TASKS, Task, interval_over_examples
from bertlite.experiments.statistics import Array
from bertlite.pruning.importance.batches import eval_mode, inputs_of
from bertlite.pruning.importance.predictions import Prediction, divergence, predictions


def judge(model: Any, dense: Any, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Compare a model with the dense one.

    Returns:
        "kl", the mean divergence in nats from the dense model's predictions; for a classifier "agreement", the share
        of predictions with the same class; with labels what `scores` returns.
    """
    kl, mine, theirs, truth = run_both(model, partial(forward, dense), batches)
    result: dict[str, Any] = {"kl": kl}
    if mine is not None and mine.shape[1] > 1:
        result["agreement"] = float(np.mean(mine.argmax(1) == theirs.argmax(1)))
    return result if truth is None else result | scores(mine, theirs, truth)


class Quality:
    """How good models are beside the dense one, which runs once on the batches."""

    def __init__(self, dense: Any, batches: Sequence[Mapping[str, Tensor]]) -> None:
        self.dense, self.batches = dense, batches

    @cached_property
    def known(self) -> "list[Forward]":
        return [forward(self.dense, batch) for batch in self.batches]

    def __call__(self, model: Any) -> tuple[float, float]:
        """Return the metric on the labels, 0 without any, and the negative divergence from the dense model."""
        known = iter(self.known)
        kl, mine, _, truth = run_both(model, lambda _: next(known), self.batches)
        if truth is None:
            return 0.0, -kl
        task = task_of(mine)
        return float(task.metrics[task.headline](mine, truth)), -kl


Forward = tuple[list[Prediction], Tensor | None]  # the predictions for a batch, and the logits of a head that has them


@torch.inference_mode()
def forward(model: Any, batch: Mapping[str, Tensor]) -> Forward:
    with eval_mode(model):
        out = model(**inputs_of(batch), return_dict=True)
    return predictions(model, out, batch), out.get("logits")


@torch.inference_mode()
def run_both(
    model: Any, dense: Callable[[Mapping[str, Tensor]], Forward], batches: Iterable[Mapping[str, Tensor]]
) -> tuple[float, Any, Any, Any]:
    """Return the divergence of a model from the dense one; then the logits of both and the labels, or None."""
    divergences: list[Tensor] = []
    outputs: list[list[Tensor]] = []  # of each batch: the model's, the dense model's, labels if it has any
    for batch in batches:
        (q, mine), (p, theirs) = forward(model, batch), dense(batch)
        divergences.append(divergence(p, q).double().cpu())
        if mine is not None and theirs is not None and mine.dim() == 2:
            labels = [batch["labels"].cpu()] if "labels" in batch else []
            outputs.append([*(x.double().cpu() for x in (mine, theirs)), *labels])
    found: list[Any] = [torch.cat(each).numpy() for each in zip(*outputs, strict=True)]
    own, given, truth = (found + [None] * 3)[:3]
    return float(torch.cat(divergences).mean()), own, given, truth


def task_of(outputs: Array) -> Task:
    """Return the task of a head with these outputs."""
    return TASKS["classification" if outputs.shape[1] > 1 else "regression"]


def scores(mine: Array, theirs: Array, truth: Array) -> dict[str, Any]:
    """Return the accuracy of a classifier or Spearman's correlation of a regression, and the dense model's.

    Returns:
        "metric", its name; "score" with its 95 % interval over the examples, "score_low" and "score_high", None where
        nothing varies; "dense_score"; and of the difference what `bertlite.experiments.compare.comparison` returns,
        paired over the examples.
    """
    task = task_of(mine)
    metric = task.headline
    interval = interval_over_examples(mine, truth, task, metric)
    return {
        "metric": metric,
        "score": float(task.metrics[metric](mine, truth)),
        "score_low": interval and interval.low,
        "score_high": interval and interval.high,
        "dense_score": float(task.metrics[metric](theirs, truth)),
        **comparison({"": [mine]}, {"": [theirs]}, truth, task, metric),
    }
