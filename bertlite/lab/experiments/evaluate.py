"""What a task asks of a model, and how well the model does it.

Outputs are (examples, classes) logits, or (examples, 1) numbers: a regression's, or the cosine of two sentences.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import bertlite
from bertlite.lab.experiments.data import Encoded, Examples, encode, order
from bertlite.lab.experiments.statistics import Array, Metric


@dataclass(frozen=True)
class Task:
    """A kind of experiment: which model, what its labels are, and which figures tell how good it is.

    Args:
        model: name of the class in `bertlite`.
        metrics: {name: (outputs, labels) -> figure}; the first is the headline.
        divergence: (dense outputs, outputs) -> nats, the mean KL divergence between their predictions.
        apart: the two texts of an example are embedded on their own.
    """

    name: str
    model: str
    labels: torch.dtype
    metrics: Mapping[str, Metric]
    divergence: Callable[[Array, Array], float]
    apart: bool = False

    @property
    def headline(self) -> str:
        return next(iter(self.metrics))

    def load(self, checkpoint: str, **options: Any) -> Any:
        return getattr(bertlite, self.model).from_pretrained(checkpoint, **options)

    def encode(self, examples: Examples, tokenizer: Any) -> Encoded:
        return encode(examples, tokenizer, apart=self.apart)

    def check(self, examples: Examples, config: Any) -> None:
        """Refuse examples that the task or the model's head cannot take.

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
    return float(np.mean(outputs.argmax(1) == labels))


def f1(outputs: Array, labels: Array) -> float:
    """Of class 1 where there are two classes, else the mean over the classes."""
    from sklearn.metrics import f1_score

    average = "binary" if outputs.shape[1] == 2 else "macro"
    return float(f1_score(labels, outputs.argmax(1), average=average, zero_division=0.0))


def mcc(outputs: Array, labels: Array) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, outputs.argmax(1)))


def cross_entropy(outputs: Array, labels: Array) -> float:
    return float(F.cross_entropy(torch.from_numpy(outputs), torch.from_numpy(labels).long()))


def spearman(outputs: Array, labels: Array) -> float:
    """0 where either side is constant, which ranks nothing."""
    from scipy.stats import spearmanr

    x = outputs[:, 0]
    return float(spearmanr(x, labels).statistic) if np.ptp(x) > 0 and np.ptp(labels) > 0 else 0.0


def squared_error(outputs: Array, labels: Array) -> float:
    return float(np.mean((outputs[:, 0] - labels) ** 2))


def class_divergence(dense: Array, outputs: Array) -> float:
    p, q = (F.log_softmax(torch.from_numpy(x).double(), -1) for x in (dense, outputs))
    return float(F.kl_div(q, p, reduction="batchmean", log_target=True))


def normal_divergence(dense: Array, outputs: Array) -> float:
    """Between normal distributions of variance 1 about the two numbers."""
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
    """(B, classes) or (B, 1); of two texts apart the cosine of the means of their token vectors."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    out = model(**inputs)
    if not task.apart:
        return out.logits
    mask = batch["attention_mask"][..., None]
    means = (out.last_hidden_state * mask).sum(1) / mask.sum(1)
    return F.cosine_similarity(means[0::2], means[1::2])[:, None]


def predict(model: Any, data: Encoded, task: Task, batch_size: int = 64) -> Array:
    """The outputs of every example, in their order; the model is left in the mode it was in."""
    device = next(model.parameters()).device
    found: list[tuple[int, Array]] = []
    with torch.inference_mode(), evaluating(model):
        for indices in order(data, batch_size):
            batch = {name: value.to(device) for name, value in data.batch(indices, task.labels).items()}
            found += zip(indices, outputs_of(model, batch, task).float().cpu().numpy(), strict=True)
    return np.stack([row for _, row in sorted(found, key=lambda pair: pair[0])])


class evaluating(nullcontext[None]):  # noqa: N801  # reads as a verb, like contextlib's own
    """Eval mode within, the mode it was in after."""

    def __init__(self, model: Any) -> None:
        self.model, self.training = model, model.training

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *_: object) -> None:
        self.model.train(self.training)


def evaluate(outputs: Array, labels: Array, task: Task, dense: Array | None = None) -> dict[str, float]:
    """Every metric of the task, and with the dense model's outputs "kl", how far from it, in nats."""
    found = {name: metric(outputs, labels) for name, metric in task.metrics.items()}
    return found if dense is None else {**found, "kl": task.divergence(dense, outputs)}
