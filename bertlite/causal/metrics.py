"""Metrics to compare patched runs by: one number for each example, from a model's output.

Shapes:  B examples · C classes, or choices
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bertlite.pruning.importance.batches import Batch, per_example
from bertlite.pruning.importance.predictions import divergence, predictions
from bertlite.pruning.structure import BertLike

Metric = Callable[[Any, Batch], Tensor]  # (model output, batch) -> (B,)


@dataclass(frozen=True)
class Pair:
    """A clean and a corrupted batch, with the model's outputs for them."""

    model: BertLike
    clean: Batch
    corrupted: Batch
    clean_out: Any
    corrupted_out: Any


def logit_difference(pair: Pair) -> Metric:
    """Return a metric: the logit of the clean label minus the logit of the corrupted label.

    Labels are those of the batches if both have some, or else the model's predictions.

    Raises:
        ValueError: the model does not choose one class for each example, or an example has the same label twice.
    """
    if not chooses_class(pair.model, pair.clean_out):
        raise ValueError(
            f"{type(pair.model).__name__} does not give each example the logits of classes; use metric='kl', or a"
            " function of (output, batch)"
        )
    given = [batch.get("labels") for batch in (pair.clean, pair.corrupted)]
    if any(labels is None for labels in given):
        given = [out.logits.argmax(-1) for out in (pair.clean_out, pair.corrupted_out)]
    right, wrong = (torch.as_tensor(labels) for labels in given)
    same = (right == wrong).nonzero()[:, 0].tolist()
    if same:
        raise ValueError(
            f"example {same[0]} has label {int(right[same[0]])} clean and corrupted, so no difference of logits;"
            " choose other pairs, give labels, or use metric='kl'"
        )

    def difference(out: Any, batch: Batch) -> Tensor:
        picked = (out.logits.gather(-1, label[:, None])[:, 0] for label in (right, wrong))
        return next(picked) - next(picked)

    return difference


def kl(pair: Pair) -> Metric:
    """Return a metric: the KL divergence of the prediction from the clean one, in nats."""
    with torch.no_grad():
        dense = predictions(pair.model, pair.clean_out, pair.clean)
    return lambda out, batch: divergence(dense, predictions(pair.model, out, batch))


def cosine(pair: Pair) -> Metric:
    """Return a metric: the cosine similarity of the mean token vector to the clean one.

    Raises:
        ValueError: the model has a task head.
    """
    if "last_hidden_state" not in pair.clean_out:
        raise ValueError(f"{type(pair.model).__name__} gives no token vectors; use metric='kl'")

    def vectors(out: Any, batch: Batch) -> Tensor:
        return predictions(pair.model, out, batch)[0].values[:, 0]

    wanted = vectors(pair.clean_out, pair.clean).detach()
    return lambda out, batch: F.cosine_similarity(vectors(out, batch), wanted, dim=-1)


METRICS: dict[str, Callable[[Pair], Metric]] = {
    "logit_difference": logit_difference,
    "kl": kl,
    "cosine": cosine,
}
FLAT_AT_CLEAN = ("kl", "cosine")  # at the clean run they are at their optimum, where their gradient is 0


def chooses_class(model: BertLike, out: Any) -> bool:
    """Return whether a model gives each example one distribution over classes."""
    logits = out.get("logits")
    return isinstance(logits, Tensor) and logits.dim() == 2 and getattr(model, "label_kind", None) == "class"


def default_metric(pair: Pair) -> str:
    """Return the name of the metric that fits the model."""
    if "last_hidden_state" in pair.clean_out:
        return "cosine"
    return "logit_difference" if chooses_class(pair.model, pair.clean_out) else "kl"


def check_metric(metric: str | Metric | None) -> None:
    """Raise ValueError for an unknown metric."""
    if not (metric is None or callable(metric) or metric in METRICS):
        raise ValueError(f"there is no metric {metric!r}; have: {', '.join(METRICS)}, or give a function")


def metric_of(metric: str | Metric | None, pair: Pair) -> tuple[str, Metric]:
    """Return the name and the function of a metric for a pair; it raises ValueError for numbers that are not (B,)."""
    if callable(metric):
        name, measure = getattr(metric, "__name__", "given"), metric
    else:
        name = default_metric(pair) if metric is None else metric
        measure = METRICS[name](pair)
    return name, lambda out, batch: per_example("metric", measure(out, batch), batch)
