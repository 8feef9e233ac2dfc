"""Tasks: the model class, its labels and its metrics; prediction and evaluation.

Outputs are (examples, classes) logits, or (examples, 1) numbers: a regression's, or the cosine of two sentences.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import bertlite
from bertlite.lab.experiments.data import EncodedExamples, Examples, batch_indices, encode_examples
from bertlite.lab.experiments.statistics import Array, Metric


@dataclass(frozen=True)
class Task:
    """A kind of experiment: its model class, dtype of labels and metrics.

    Args:
        model: name of the class in `bertlite`.
        labels: dtype of the labels in a batch.
        metrics: {name: (outputs, labels) -> figure}; the first is the headline.
        divergence: (dense outputs, outputs) -> nats, the mean KL divergence between their predictions.
        apart: the two texts of an example are embedded separately.
    """

    name: str
    model: str
    labels: torch.dtype
    metrics: Mapping[str, Metric]
    divergence: Callable[[Array, Array], float]
    apart: bool = False

    @property
    def headline(self) -> str:
        """Name of the metric that tables show."""
        return next(iter(self.metrics))

    def load(self, checkpoint: str, **options: Any) -> Any:
        """Load a model of this task."""
        return getattr(bertlite, self.model).from_pretrained(checkpoint, **options)

    def encode(self, examples: Examples, tokenizer: Any) -> EncodedExamples:
        """Tokenize examples as the task needs them."""
        return encode_examples(examples, tokenizer, apart=self.apart)

    def check(self, examples: Examples, config: Any) -> None:
        """Refuse examples that do not fit the task or the model's head.

        Raises:
            ValueError: a label is no class of the head, the head has another shape than the task, or the task
                compares two texts and there is one.
        """
        if self.apart and len(examples.texts[0]) != 2:
            raise ValueError(f"{self.name} compares two texts; name two text columns, not one")
        if self.name == "classification":
            if config.num_labels < 2:
                raise ValueError("the head has 1 output, which is a regression; classification needs 2 or more")
            wrong = [x for x in examples.labels if x not in range(config.num_labels)]
            if wrong:
                raise ValueError(
                    f"{examples.name} has the label {wrong[0]:g}, and {len(wrong)} of {len(examples)} that do not fit;"
                    f" the head has classes 0 to {config.num_labels - 1}"
                )
        elif self.name == "regression" and config.num_labels != 1:
            raise ValueError(f"the head has {config.num_labels} outputs; regression has 1")


def accuracy(outputs: Array, labels: Array) -> float:
    """Return the share of examples whose largest logit is that of the label."""
    return float(np.mean(outputs.argmax(1) == labels))


def f1(outputs: Array, labels: Array) -> float:
    """Return the F1 of class 1 where there are two classes, else the mean over the classes."""
    from sklearn.metrics import f1_score

    average = "binary" if outputs.shape[1] == 2 else "macro"
    return float(f1_score(labels, outputs.argmax(1), average=average, zero_division=0.0))


def mcc(outputs: Array, labels: Array) -> float:
    """Return Matthews' correlation coefficient."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, outputs.argmax(1)))


def cross_entropy(outputs: Array, labels: Array) -> float:
    """Return the mean cross-entropy in nats."""
    return float(F.cross_entropy(torch.from_numpy(outputs), torch.from_numpy(labels).long()))


def spearman(outputs: Array, labels: Array) -> float:
    """Return Spearman's rank correlation; 0 where either side is constant."""
    from scipy.stats import spearmanr

    x = outputs[:, 0]
    return float(spearmanr(x, labels).statistic) if np.ptp(x) > 0 and np.ptp(labels) > 0 else 0.0


def squared_error(outputs: Array, labels: Array) -> float:
    """Return the mean squared error."""
    return float(np.mean((outputs[:, 0] - labels) ** 2))


def class_divergence(dense: Array, outputs: Array) -> float:
    """Return the mean KL divergence of the predicted classes from the dense model's, in nats."""
    p, q = (F.log_softmax(torch.from_numpy(x).double(), -1) for x in (dense, outputs))
    return float(F.kl_div(q, p, reduction="batchmean", log_target=True))


def normal_divergence(dense: Array, outputs: Array) -> float:
    """Return the mean KL divergence between normal distributions of variance 1 around the predicted numbers."""
    return float(np.mean((dense - outputs) ** 2) / 2)


TASKS = {
    task.name: task
    for task in (
        Task(
            "classification",
            "BertForSequenceClassification",
            torch.long,
            {"accuracy": accuracy, "f1": f1, "mcc": mcc, "loss": cross_entropy},
            class_divergence,
        ),
        Task(
            "regression",
            "BertForSequenceClassification",
            torch.float32,
            {"spearman": spearman, "loss": squared_error},
            normal_divergence,
        ),
        Task("similarity", "BertModel", torch.float32, {"spearman": spearman}, normal_divergence, apart=True),
    )
}


def outputs_of(model: Any, batch: Mapping[str, torch.Tensor], task: Task) -> torch.Tensor:
    """Return a batch's logits, (B, classes) or (B, 1); for texts apart, the cosine of their mean token vectors."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    out = model(**inputs)
    if not task.apart:
        return out.logits
    mask = batch["attention_mask"][..., None]
    means = (out.last_hidden_state * mask).sum(1) / mask.sum(1)
    return F.cosine_similarity(means[0::2], means[1::2])[:, None]


def predict(model: Any, data: EncodedExamples, task: Task, batch_size: int = 64) -> Array:
    """Return the outputs of every example in their order; the model keeps its mode."""
    device = next(model.parameters()).device
    found: list[tuple[int, Array]] = []
    with torch.inference_mode(), eval_mode(model):
        for indices in batch_indices(data, batch_size):
            batch = {name: value.to(device) for name, value in data.batch(indices, task.labels).items()}
            found += zip(indices, outputs_of(model, batch, task).float().cpu().numpy(), strict=True)
    return np.stack([row for _, row in sorted(found, key=lambda pair: pair[0])])


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode within the block, and back afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def evaluate(outputs: Array, labels: Array, task: Task, dense: Array | None = None) -> dict[str, float]:
    """Return every metric of the task, and given the dense model's outputs "kl", the divergence from it in nats."""
    found = {name: metric(outputs, labels) for name, metric in task.metrics.items()}
    return found if dense is None else {**found, "kl": task.divergence(dense, outputs)}
