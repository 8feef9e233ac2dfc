"""What a model says about a batch, as distributions: to draw labels from, and to compare.

Shapes:  B examples · P places where something is said of each · C numbers that say it
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bertlite.heads.models import SequenceClassificationBody
from bertlite.importance.batches import Batch, real_tokens


@dataclass(frozen=True)
class Kind:
    """A family of distributions over (…, C) numbers."""

    draw: Callable[[Tensor, Tensor], Tensor]  # (…, C), uniform noise (…, C) -> labels
    surprise: Callable[[Tensor, Tensor], Tensor]  # (…, C), labels -> (…,), -log p in nats, but for a constant
    divergence: Callable[[Tensor, Tensor], Tensor]  # KL from the first's to the second's, (…, C), (…, C) -> (…,)


def draw_class(logits: Tensor, noise: Tensor) -> Tensor:
    below = logits.double().softmax(-1).cumsum(-1) < noise[..., :1]
    return below.sum(-1).clamp(max=logits.shape[-1] - 1)


def class_surprise(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def class_divergence(p: Tensor, q: Tensor) -> Tensor:
    return F.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def flag_divergence(p: Tensor, q: Tensor) -> Tensor:
    return class_divergence(torch.stack([p, 0 * p], -1), torch.stack([q, 0 * q], -1)).sum(-1)


CLASS = Kind(draw_class, class_surprise, class_divergence)
FLAGS = Kind(
    lambda logits, noise: (noise < logits.sigmoid()).to(logits.dtype),
    lambda logits, labels: F.binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(-1),
    flag_divergence,
)
NUMBERS = Kind(  # normal distributions of variance 1
    lambda mean, noise: mean + torch.special.ndtri(noise.clamp(1e-12, 1 - 1e-12)).to(mean.dtype),
    lambda mean, labels: (mean - labels).square().sum(-1) / 2,
    lambda p, q: (p - q).square().sum(-1) / 2,
)


@dataclass(frozen=True)
class Prediction:
    kind: Kind
    values: Tensor  # (B, P, C)
    counted: Tensor | None = None  # (B, P) bool; None counts all

    def draw(self, generator: torch.Generator) -> Tensor:
        """Labels for every place: the same however examples are batched and padded, if they come in the same order."""
        B, P, C = self.values.shape
        counted = torch.ones(B, P, dtype=torch.bool) if self.counted is None else self.counted.cpu()
        width = 1 if self.kind is CLASS else C
        noise = torch.full((B, P, width), 0.5, dtype=torch.float64)
        noise[counted] = torch.rand(int(counted.sum()), width, generator=generator, dtype=torch.float64)
        return self.kind.draw(self.values.detach(), noise.to(self.values.device))

    def total(self, each: Tensor) -> Tensor:  # (B, P) -> (B,)
        return (each if self.counted is None else each.masked_fill(~self.counted, 0)).sum(-1)

    def surprise(self, labels: Tensor) -> Tensor:  # (B,), summed over places
        return self.total(self.kind.surprise(self.values, labels))

    def divergence(self, other: "Prediction") -> Tensor:  # (B,), KL from this to the other, summed over places
        return self.total(self.kind.divergence(self.values, other.values))


def predictions(model: Any, out: Any, batch: Batch) -> list[Prediction]:
    """All that a model says about a batch; of padding it says nothing."""
    found = {name: value for name, value in out.items() if isinstance(value, Tensor)}
    if "start_logits" in found:
        padding = ~real_tokens(batch)
        ends = (
            found[name].masked_fill(padding, torch.finfo(found[name].dtype).min)
            for name in ("start_logits", "end_logits")
        )
        return [Prediction(CLASS, logits[:, None]) for logits in ends]
    if "prediction_logits" in found:
        words = Prediction(CLASS, found["prediction_logits"], real_tokens(batch))
        return [words, Prediction(CLASS, found["seq_relationship_logits"][:, None])]
    if "logits" in found:
        logits = found["logits"]
        if logits.dim() == 3:
            return [Prediction(CLASS, logits, real_tokens(batch))]
        return [Prediction(kind_of(model), logits[:, None])]
    real = real_tokens(batch)[..., None]
    states = found["last_hidden_state"]
    return [Prediction(NUMBERS, (states * real).sum(1, keepdim=True) / real.sum(1, keepdim=True))]


def kind_of(model: Any) -> Kind:
    """What the logits of a sequence are."""
    config = model.config
    if not isinstance(model, SequenceClassificationBody):
        return CLASS
    if config.problem_type == "multi_label_classification":
        return FLAGS
    regression = config.num_labels == 1 if config.problem_type is None else config.problem_type == "regression"
    return NUMBERS if regression else CLASS
