"""Tasks: the model class, its labels and its metrics; prediction and evaluation.

Outputs are (examples, classes) logits, or (examples, 1) numbers: a regression's, or the similarity of two sentences.
For words, outputs are (examples, words, classes) and labels (examples, words), with nan and -100 after the last word.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from bertlite.experiments.data import (
    NO_LABEL,
    DataSource,
    EncodedExamples,
    Examples,
    batch_indices,
    encode_examples,
    pad_rows,
    read_examples,
    read_tokenizer,
)
from bertlite.experiments.statistics import Array, Ends, Estimate, Metric, crossed_estimate, wilson
from bertlite.inference.gpu.ahead import run_ahead
from bertlite.models.base import BertModel
from bertlite.models.heads import BertForSequenceClassification, BertForTokenClassification
from bertlite.opened.checkpoint import Checkpoint
from bertlite.pruning.importance.batches import Batch, eval_mode, inputs_of, real_tokens
from bertlite.runtime.texts import run_batches
from bertlite.shipping.original import spearman
from bertlite.shipping.vectors import MEAN, VectorHead, read_head
from bertlite.tokenizer import BertTokenizer

RANGES = {"mcc": (-1.0, 1.0), "spearman": (-1.0, 1.0), "loss": (0.0, math.inf)}
SHARE = (0.0, 1.0)  # the range of every other metric
BATCH = 64  # examples that are predicted together


class DivergedError(ValueError):
    """A training whose loss, or whose model's outputs, are nan or infinite; nothing is kept."""


@dataclass(frozen=True)
class Task:
    """A kind of experiment: its model class, dtype of labels and metrics.

    Args:
        model_class: the class with its head.
        labels: the dtype of the labels in a batch.
        metrics: {name: (outputs, labels) -> figure}; the first is the headline.
        apart: the two texts of an example are embedded separately.
        words: an example is a list of words, and each has a label.
        head: makes vectors of texts that are embedded apart.
        scores: (logits, labels) -> outputs, for words, if there are too many logits to keep.
    """

    name: str
    model_class: Any
    labels: torch.dtype
    metrics: Mapping[str, Metric]
    apart: bool = False
    words: bool = False
    head: VectorHead = MEAN
    scores: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    @property
    def headline(self) -> str:
        """Name of the metric that tables show."""
        return next(iter(self.metrics))

    def metric(self, name: str | None = None, outputs: int = 2) -> str:
        """Return the name of a metric of this task, by default the headline.

        Args:
            outputs: the number of outputs of the head.

        Raises:
            ValueError: the task has no such metric, or not for so many classes.
        """
        if name is not None and name not in self.metrics:
            raise ValueError(f"{self.name} has no metric {name!r}; have: {', '.join(self.metrics)}")
        if name is not None and self.metrics[name] is f1 and outputs != 2:
            raise ValueError(f"f1 counts class 1 of two; for {outputs} classes use macro-f1")
        return self.headline if name is None else name

    def divergence(self, dense: Array, outputs: Array) -> float:
        """Return the mean KL divergence of the predictions from the dense model's, in nats.

        Numbers are predicted as normal distributions of variance 1 around them.
        """
        if self.labels is not torch.long:
            return float(np.mean((dense - outputs) ** 2) / 2)
        if self.words:
            counted = ~np.isnan(dense[..., 0])
            dense, outputs = dense[counted], outputs[counted]
        p, q = (F.log_softmax(torch.from_numpy(x).double(), -1) for x in (dense, outputs))
        return float(F.kl_div(q, p, reduction="batchmean", log_target=True))

    def of_checkpoint(self, checkpoint: Checkpoint) -> "Task":
        """Return the task with the vectors of a checkpoint; `read_head` lists the errors."""
        return replace(self, head=read_head(checkpoint)) if self.apart else self

    def read_tokenizer(self, checkpoint: Checkpoint, max_length: int | None) -> BertTokenizer:
        """Return a checkpoint's tokenizer; without another head it follows sentence-transformers' files."""
        own = self.scores is None and self.model_class is checkpoint.model_class
        return read_tokenizer(checkpoint, max_length, sentences=own)

    def read(self, source: DataSource, config: Any) -> Examples:
        """Read examples, with labels in the order of a head's classes; `check` lists further errors."""
        classes = class_names(config) if self.labels is torch.long else ()
        found = read_examples(source, words=self.words, classes=classes)
        self.check(found, config)
        return found

    def encode(self, examples: Examples, tokenizer: BertTokenizer) -> EncodedExamples:
        """Tokenize examples for the task."""
        return encode_examples(examples, tokenizer, apart=self.apart, words=self.words)

    def check(self, examples: Examples, config: Any) -> None:
        """Check that examples fit the task and the model's head.

        Raises:
            ValueError: a label is not a class of the head, or more or fewer classes are named than it has; all labels
                are the same; the head has another shape than the task, or gives a text several labels; or the task
                compares two texts and there is one.
        """
        named, outputs = len(examples.classes), config.num_labels
        if self.apart and len(examples.texts[0]) != 2:
            raise ValueError(f"{self.name} compares two texts; name two text columns, not one")
        if self.labels is torch.long:
            if config.problem_type == "multi_label_classification":
                raise ValueError("the head gives a text several labels at once, for which there is no metric here")
            if outputs < 2:
                raise ValueError(f"the head has 1 output, which is a regression; {self.name} needs 2 or more")
            if named and named != outputs:
                raise ValueError(f"{named} classes are named, and the head has {outputs} outputs: name each, in order")

            # Every label is one of the head's classes.
            known = {*range(outputs), *([NO_LABEL] if self.words else [])}
            for place, label in examples.located():
                if label not in known:
                    raise ValueError(f"{place}: the label is {label:g}; the head has 0 to {outputs - 1}")
        elif self.name == "regression" and outputs != 1:
            raise ValueError(f"the head has {outputs} outputs; regression has 1")
        self.check_labels(examples)

    def check_labels(self, examples: Examples) -> None:
        """Raise ValueError if all examples have one label, or none."""
        found = {x for x in examples.every_label() if x != NO_LABEL or not self.words}
        if len(found) < 2:
            only = f"the label {self.name_of(found.pop(), examples)!r}" if found else "no label"
            raise ValueError(
                f"{examples.locations[0] if examples.locations else examples.name}: this and all {len(examples)}"
                f" examples of {examples.name} have {only}, from which nothing can be learnt or measured: add others"
            )

    def name_of(self, label: float, examples: Examples) -> str:
        """Return the name of a label of examples, or the number for a value and a class without a name."""
        return examples.classes[int(label)] if examples.classes and self.labels is torch.long else f"{label:g}"

    def check_both(self, train: Examples, dev: Examples) -> None:
        """Check examples to learn from, and examples to evaluate on; warn about texts that are in both.

        Raises:
            ValueError: the examples to learn from lack a class of the examples to evaluate on.
        """
        known = {*train.every_label(), NO_LABEL}
        for place, label in dev.located() if train.labels and self.labels is torch.long else ():
            if label not in known:
                lacks = f"no example of {train.name} has the label {self.name_of(label, dev)!r}"
                raise ValueError(f"{place}: {lacks}: add some there, or leave the row out")
        seen = {*train.texts}
        if shared := sum(texts in seen for texts in dev.texts):
            both = f"{shared} of the {len(dev)} examples of {dev.name} are also in {train.name}"
            warnings.warn(f"{both}, so they are not held out", stacklevel=3)


def class_names(config: Any) -> tuple[str, ...]:
    """Return the names of a head's classes; empty if they are only numbered, LABEL_0, LABEL_1 …"""
    names = {int(i): str(name) for i, name in (getattr(config, "id2label", None) or {}).items()}
    found = tuple(names[i] for i in sorted(names))
    return () if found == tuple(f"LABEL_{i}" for i in range(len(found))) else found


def labelled(outputs: Array, labels: Array) -> tuple[Array, Array]:
    """Return the logits and labels that count: for words, without padding and unlabelled ones."""
    counted = labels != NO_LABEL
    return (outputs[counted], labels[counted]) if labels.ndim > 1 else (outputs, labels)


def confusion(outputs: Array, labels: Array) -> Array:
    """Return the number of examples of class i that were predicted as class j, (classes, classes)."""
    logits, truth = labelled(outputs, labels)
    classes = logits.shape[-1]
    cells = np.bincount(truth.astype(int) * classes + logits.argmax(-1), minlength=classes * classes)
    return cells.reshape(classes, classes)


def accuracy(outputs: Array, labels: Array) -> float:
    """Return the share of examples, or words, whose largest logit is the label's."""
    logits, truth = labelled(outputs, labels)
    return float(np.mean(logits.argmax(-1) == truth)) if len(truth) else 0.0


def pooled_f1(cells: Array, classes: Sequence[int]) -> float:
    """Return the F1 of some classes together, from a confusion matrix; 0 if none is a label or a prediction."""
    either = cells[classes].sum() + cells[:, classes].sum()
    return float(2 * np.diag(cells)[classes].sum() / either) if either else 0.0


def macro_f1(outputs: Array, labels: Array) -> float:
    """Return the mean F1 of the classes that are a label or a prediction, as scikit-learn's macro average."""
    cells = confusion(outputs, labels)
    found = [pooled_f1(cells, [i]) for i in range(len(cells)) if cells[i].any() or cells[:, i].any()]
    return float(np.mean(found)) if found else 0.0


def f1(outputs: Array, labels: Array) -> float:
    """Return the F1 of class 1 of two."""
    return pooled_f1(confusion(outputs, labels), [1])


def word_f1(outputs: Array, labels: Array) -> float:
    """Return the F1 of all words whose class or prediction is not the first, which means no entity."""
    return pooled_f1(confusion(outputs, labels), range(1, outputs.shape[-1]))


def mcc(outputs: Array, labels: Array) -> float:
    """Return Matthews' correlation coefficient, or Gorodkin's (2004) for several classes; 0 if a side is constant."""
    cells = confusion(outputs, labels).astype(float)
    predicted, true, total = cells.sum(0), cells.sum(1), cells.sum()
    spread = np.sqrt((total**2 - predicted @ predicted) * (total**2 - true @ true))
    return float((np.trace(cells) * total - predicted @ true) / spread) if spread else 0.0


def cross_entropy(outputs: Array, labels: Array) -> float:
    """Return the mean cross-entropy in nats."""
    logits, truth = labelled(outputs, labels)
    return float(F.cross_entropy(torch.from_numpy(logits), torch.from_numpy(truth).long()))


def squared_error(outputs: Array, labels: Array) -> float:
    """Return the mean squared error."""
    return float(np.mean((outputs[:, 0] - labels) ** 2))


# The headline of a task comes first.
OF_TEXTS = {"accuracy": accuracy, "f1": f1, "macro-f1": macro_f1, "mcc": mcc, "loss": cross_entropy}
OF_WORDS = {"f1": word_f1, "accuracy": accuracy, "macro-f1": macro_f1, "mcc": mcc, "loss": cross_entropy}
OF_NUMBERS = {"spearman": spearman, "loss": squared_error}
TASKS = {
    task.name: task
    for task in (
        Task("classification", BertForSequenceClassification, torch.long, OF_TEXTS),
        Task("tokens", BertForTokenClassification, torch.long, OF_WORDS, words=True),
        Task("regression", BertForSequenceClassification, torch.float32, OF_NUMBERS),
        Task("similarity", BertModel, torch.float32, {"spearman": spearman}, apart=True),
    )
}


def task_of_head(outputs: int) -> Task:
    """Return the task of a head for whole texts, by its number of outputs."""
    return TASKS["classification" if outputs > 1 else "regression"]


def run_model(model: Any, batch: Batch, **options: Any) -> Any:
    """Return a model's output for a batch without its labels, in eval mode; the model is restored."""
    with eval_mode(model), torch.no_grad():
        return model(**inputs_of(batch), **options, return_dict=True)


def outputs_of(out: Any, batch: Batch, task: Task) -> torch.Tensor:
    """Return a batch's logits, (B, classes) or (B, 1); for texts apart, the similarity of their vectors."""
    if not task.apart:
        return out.logits if task.scores is None else task.scores(out.logits, batch["labels"])
    vectors = vectors_of(out, batch, task)
    return task.head.compare(vectors[:, 0], vectors[:, 1])[:, None]


def vectors_of(out: Any, batch: Batch, task: Task) -> torch.Tensor:
    """Return the vectors of the two texts of each example, (B, 2, D)."""
    return task.head(out.last_hidden_state, real_tokens(batch)).unflatten(0, (-1, 2))


def predict(
    model: Any,
    data: EncodedExamples,
    task: Task,
    batch_size: int = BATCH,
    outputs: Callable[[Any, Batch, Task], torch.Tensor] = outputs_of,
) -> Array:
    """Return the outputs of every example, in their order, in eval mode; the model is restored.

    Args:
        outputs: (the model's output, batch, task) -> (B, …), the part to keep.
    """
    device = next(model.parameters()).device

    def run(indices: list[int], batch: Batch) -> torch.Tensor:
        with torch.inference_mode():
            return outputs(run_model(model, batch), batch, task).float()

    found: dict[int, Array] = {}
    every = partial(run_ahead, lambda indices: data.batch(indices, task.labels), run, device=device)
    for indices, rows in run_batches(range(len(data)), batch_indices(data, batch_size)[::-1], every):
        for i, row in zip(indices, rows, strict=True):
            counted = np.array(data.labels[i]) != NO_LABEL
            found[i] = row[: len(counted)][counted] if task.words else row
    ordered = [found[i] for i in range(len(data))]
    return pad_rows(ordered, np.nan) if task.words else np.stack(ordered)


def metrics_of(outputs: Array, labels: Array, task: Task, dense: Array | None = None) -> dict[str, float]:
    """Return every metric of the task, and "kl", the divergence in nats from the dense model if its outputs are given.

    The F1 of class 1 is left out if there are more than two classes.
    """
    known = {name: metric for name, metric in task.metrics.items() if metric is not f1 or outputs.shape[-1] == 2}
    found = {name: metric(outputs, labels) for name, metric in known.items()}
    return found if dense is None else {**found, "kl": task.divergence(dense, outputs)}


def measure_metrics(outputs: Array, labels: Array, task: Task, metric: str) -> dict[str, Any]:
    """Return every metric of the task, and "low" and "high", the ends of one interval over the examples, or None."""
    low, high = interval_over_examples(outputs, labels, task, metric)
    return {**metrics_of(outputs, labels, task), "low": low, "high": high}


def interval_over_examples(found: Array, truth: Array, task: Task, metric: str) -> Ends:
    """Return the 95 % interval of one model's metric over the examples."""
    if metric == "accuracy" and truth.ndim == 1:
        return wilson(int(np.sum(found.argmax(1) == truth)), len(truth))
    return estimate_metric([[[found]]], truth, task.metrics[metric]).interval(*RANGES.get(metric, SHARE))


def estimate_metric(sides: Sequence[Sequence[Sequence[Array]]], truth: Array, metric: Metric) -> Estimate:
    """Estimate a metric's mean over runs and examples, or the difference of two sides' means.

    Several models, each the mean of its runs, are the clusters, and are compared in pairs; for one model, its runs
    are (`statistics.crossed_estimate`).

    Args:
        sides: one or two: for each model, the same in both, the outputs of its runs.
    """

    def figures(chosen: Array) -> list[Array]:
        values = [[[metric(x[chosen], truth[chosen]) for x in runs] for runs in side] for side in sides]
        if len(sides[0]) == 1:
            return [np.array(side[0]) for side in values]
        first, *others = (np.array([np.mean(runs) for runs in side]) for side in values)
        return [first - sum(others)]

    return crossed_estimate(figures, len(truth))
