"""Compare a pruned model with the dense one on texts that it was not fitted to."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertlite.experiments.compare import comparison
from bertlite.experiments.evaluate import measure_metrics, run_model, task_of_head
from bertlite.experiments.statistics import Array
from bertlite.pruning.importance.batches import Batch, real_tokens
from bertlite.pruning.importance.predictions import CLASS, NORMAL, Prediction, divergence, predictions
from bertlite.shipping.original import NEIGHBOURS, spearman, unit_vectors, what_is_kept
from bertlite.shipping.vectors import MEAN, VectorHead

ENOUGH = 10  # so many equal labels show that a model predicts one class


def evaluate_pruned(
    model: Any, dense: Any, batches: Iterable[Batch], head: VectorHead = MEAN, mapped: VectorHead | None = None
) -> dict[str, Any]:
    """Compare a model with the dense one.

    Args:
        head: for an encoder without a task head: makes a vector from its states.
        mapped: the head of the model, if it has another than the dense one.

    Returns:
        "kl", the mean divergence in nats from the dense model's predictions; "constant", whether it predicts the same
        for all texts or tokens; "lost", from `loss_of`.  With labels, the entries of `scores`.  For a head that
        predicts classes, "agreement", the share of predictions with the same class.  For an encoder, the entries of
        `compare_vectors`.
    """
    own = mapped or head
    result, (mine, theirs, truth) = run_both(model, partial(forward, dense, head=head), batches, own)
    if model.base_model is model:
        result["pooling"] = own.name
    elif truth is not None:
        result |= scores(mine, theirs, truth)
    return {**result, "lost": loss_of(result)}


def compare_vectors(mine: Array, theirs: Array) -> dict[str, float]:
    """Return the mean "cosine" of the vectors of a text, and the "rank_correlation" of the cosines of all pairs.

    From 50 texts on also "neighbours", the share of the ten nearest texts of each that both models agree on.
    """
    a, b, pairs = unit_vectors(mine), unit_vectors(theirs), np.triu_indices(len(mine), 1)
    kept = what_is_kept("encoder", mine, theirs)
    found = {"cosine": kept["mean cosine"], "rank_correlation": spearman((a @ a.T)[pairs], (b @ b.T)[pairs])}
    return {**found, **({"neighbours": kept[NEIGHBOURS]} if NEIGHBOURS in kept else {})}


def loss_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of lost "points", the figure that they are "of", and the "normal" number, which is MiniLM's.

    The figure is the metric on the labels, if there are any.  Without labels it is the share of predictions with the
    same class or, for other heads, the rank correlation with the given model.
    """
    if "score" in found:
        return {"points": 100 * (found["dense_score"] - found["score"]), "of": found["metric"], "normal": 7.0}
    name = "agreement" if "agreement" in found else "rank_correlation"
    return {"points": 100 * (1 - found[name]), "of": name.replace("_", " "), "normal": 15.0}


class Quality:
    """The quality of models compared with the dense one, which runs once on the batches.

    Args:
        head: as for `evaluate_pruned`.
    """

    def __init__(self, dense: Any, batches: Sequence[Batch], head: VectorHead = MEAN) -> None:
        self.dense, self.batches, self.head = dense, batches, head

    @cached_property
    def known(self) -> "list[Forward]":
        return [forward(self.dense, batch, self.head) for batch in self.batches]

    def __call__(self, model: Any) -> tuple[float, float, float]:
        """Return the metric on the labels, 0 without any, the negative divergence, and points as in `loss_of`."""
        known = iter(self.known)
        result, (mine, theirs, truth) = run_both(model, lambda _: next(known), self.batches, self.head)
        if truth is not None:
            task = task_of_head(mine.shape[1])
            score, dense_score = (float(task.metrics[task.headline](x, truth)) for x in (mine, theirs))
            result |= {"score": score, "dense_score": dense_score, "metric": task.headline}
        return result.get("score", 0.0), -result["kl"], loss_of(result)["points"]


Forward = tuple[list[Prediction], Tensor | None]  # predictions for a batch; the logits or vectors of whole texts


@torch.inference_mode()
def forward(model: Any, batch: Batch, head: VectorHead = MEAN) -> Forward:
    out = run_model(model, batch)
    whole = out.get("logits")
    if model.base_model is model:
        whole = head(out["last_hidden_state"], real_tokens(batch))
        return [Prediction(NORMAL, whole[:, None])], whole
    return predictions(model, out, batch), whole


@torch.inference_mode()
def run_both(
    model: Any, dense: Callable[[Batch], Forward], batches: Iterable[Batch], head: VectorHead = MEAN
) -> tuple[dict[str, Any], tuple[Any, Any, Any]]:
    """Run a model and the dense one; return the model's figures, then both outputs and the true labels, or None.

    The figures are "kl", "constant", and those that compare vectors or predictions; none for numbers with labels.  A
    model is constant if it always predicts the same, and the dense one does not or there are enough labels to tell.
    """
    divergences: list[Tensor] = []
    outputs: list[list[Tensor]] = []  # for each batch: the model's, the dense model's, and labels if it has any
    differ, labels_in_all, classes = 0.0, 0, (set[int](), set[int]())  # classes: the model's, the dense model's

    # One pass over the texts, batch by batch; only outputs of whole texts are kept.
    for batch in batches:
        (q, mine), (p, theirs) = forward(model, batch, head), dense(batch)
        divergences.append(divergence(p, q).double().cpu())
        for one, other in zip(p, q, strict=True):
            differ += float(one.disagreement(other).sum())
            labels_in_all += one.count
        if [each.family for each in q] == [CLASS]:
            for known, (each,) in zip(classes, (q, p), strict=True):
                known |= {*each.values.argmax(-1)[... if each.counted is None else each.counted].flatten().tolist()}

        if mine is not None and theirs is not None and mine.dim() == 2:
            labels = [batch["labels"].cpu()] if "labels" in batch else []
            outputs.append([*(x.double().cpu() for x in (mine, theirs)), *labels])

    # A model that answers the same for every text may still agree with many labels.
    found: list[Any] = [torch.cat(each).numpy() for each in zip(*outputs, strict=True)]
    mine, given, truth = (found + [None] * 3)[:3]
    if classes[0]:
        is_constant = len(classes[0]) == 1 and (len(classes[1]) > 1 or labels_in_all >= ENOUGH)
    else:
        is_constant = mine is not None and not np.ptp(mine, axis=0).any()

    # The figures depend on the outputs: vectors, classes or numbers.
    result: dict[str, Any] = {"kl": float(torch.cat(divergences).mean()), "constant": is_constant}
    if model.base_model is model:
        result |= compare_vectors(mine, given)
    elif labels_in_all:
        result["agreement"] = 1 - differ / labels_in_all
    elif truth is None:
        result["rank_correlation"] = spearman(mine, given)
    return result, (mine, given, truth)


def scores(mine: Array, theirs: Array, truth: Array) -> dict[str, Any]:
    """Return the accuracy of a classifier or Spearman's correlation of a regression, and the dense model's.

    Returns:
        "metric", its name; "score" with its 95 % interval over the examples, "score_low" and "score_high", None if
        nothing varies; "dense_score".  And the entries of `bertlite.experiments.compare.comparison` for the
        difference, paired over the examples.
    """
    task = task_of_head(mine.shape[1])
    metric = task.headline
    own = measure_metrics(mine, truth, task, metric)
    return {
        "metric": metric,
        "score": own[metric],
        "score_low": own["low"],
        "score_high": own["high"],
        "dense_score": float(task.metrics[metric](theirs, truth)),
        **comparison({"": [mine]}, {"": [theirs]}, truth, task, metric),
    }
