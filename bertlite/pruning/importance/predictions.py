"""The predictions of a model on a batch, as distributions to draw labels from and to compare.

Shapes:  B examples · P predictions of each, with one label each · C parameters of a prediction
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bertlite.models.structure import BertLike
from bertlite.pruning.importance.batches import Batch, head_of, real_tokens
from bertlite.pruning.importance.distillation import mean_vectors


@dataclass(frozen=True)
class Distributions:
    """A family of distributions, with (…, C) parameters."""

    draw: Callable[[Tensor, Tensor], Tensor]  # (…, C), uniform noise (…, C) -> labels
    nll: Callable[[Tensor, Tensor], Tensor]  # (…, C), labels -> (…,), -log p in nats, up to a constant
    divergence: Callable[[Tensor, Tensor], Tensor]  # (…, C), (…, C) -> (…,), KL from the first to the second
    disagreement: Callable[[Tensor, Tensor], Tensor]  # (…, C), (…, C) -> (…,), how many most likely labels differ


def draw_class(logits: Tensor, noise: Tensor) -> Tensor:
    below = logits.double().softmax(-1).cumsum(-1) < noise[..., :1]
    return below.sum(-1).clamp(max=logits.shape[-1] - 1)


def categorical_divergence(p: Tensor, q: Tensor) -> Tensor:
    return F.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def half_squared_distance(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).square().sum(-1) / 2


CLASS = Distributions(
    draw_class,
    lambda logits, labels: -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0],
    categorical_divergence,
    lambda p, q: (p.argmax(-1) != q.argmax(-1)).to(p.dtype),
)
FLAGS = Distributions(
    lambda logits, noise: (noise < logits.sigmoid()).to(logits.dtype),
    lambda logits, labels: F.binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(-1),
    lambda p, q: categorical_divergence(*(torch.stack([x, 0 * x], -1) for x in (p, q))).sum(-1),
    lambda p, q: ((p > 0) != (q > 0)).to(p.dtype).sum(-1),
)
NORMAL = Distributions(  # with variance 1
    lambda mean, noise: mean + torch.special.ndtri(noise.clamp(1e-12, 1 - 1e-12)).to(mean.dtype),
    half_squared_distance,
    half_squared_distance,
    lambda p, q: torch.zeros_like(p[..., 0]),  # numbers have no labels that differ
)
FAMILIES = {"class": CLASS, "flags": FLAGS, "number": NORMAL}  # {label_kind of a head: distributions}


@dataclass(frozen=True)
class Prediction:
    """A model's predictions on a batch."""

    family: Distributions
    values: Tensor  # (B, P, C)
    counted: Tensor | None = None  # (B, P) bool; None counts all

    def draw(self, generator: torch.Generator) -> Tensor:
        """Draw a label for every prediction.

        The labels do not depend on how examples are batched and padded, only on their order.
        """
        B, P, C = self.values.shape
        counted = torch.ones(B, P, dtype=torch.bool, device="cpu") if self.counted is None else self.counted.cpu()
        width = 1 if self.family is CLASS else C
        noise = torch.full((B, P, width), 0.5, dtype=torch.float64, device="cpu")
        noise[counted] = torch.rand(int(counted.sum()), width, generator=generator, dtype=torch.float64, device="cpu")
        return self.family.draw(self.values.detach(), noise.to(self.values.device))

    @property
    def count(self) -> int:
        """The number of labels that it predicts; 0 for numbers."""
        if self.family is NORMAL:
            return 0
        predicted = self.values[..., 0].numel() if self.counted is None else int(self.counted.sum())
        return predicted * (self.values.shape[-1] if self.family is FLAGS else 1)

    def total(self, each: Tensor) -> Tensor:  # (B, P) -> (B,)
        return (each if self.counted is None else each.masked_fill(~self.counted, 0)).sum(-1)

    def nll(self, labels: Tensor) -> Tensor:  # (B,), summed over predictions
        return self.total(self.family.nll(self.values, labels))

    def divergence(self, other: "Prediction") -> Tensor:  # (B,), KL from this to the other, summed over predictions
        return self.total(self.family.divergence(self.values, other.values))

    def disagreement(self, other: "Prediction") -> Tensor:  # (B,)
        return self.total(self.family.disagreement(self.values, other.values))


def sum_terms(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum(0)


def divergence(dense: Sequence[Prediction], other: Sequence[Prediction]) -> Tensor:
    """Return the KL divergence of predictions from the dense model's, (B,), in nats."""
    return sum_terms(p.divergence(q) for p, q in pair_up(dense, other))


def pair_up(dense: Sequence[Prediction], other: Sequence[Prediction]) -> Iterable[tuple[Prediction, Prediction]]:
    """Pair the predictions of two models; raise ValueError if they are models of different tasks."""
    shapes = [[tuple(p.values.shape) for p in each] for each in (dense, other)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the models predict {shapes[0]} and {shapes[1]} values: they are models of different tasks")
    return zip(dense, other, strict=True)


def predictions(model: BertLike, out: Any, batch: Batch) -> list[Prediction]:
    """Return all predictions of a model; predictions for padding do not count."""
    found = {name: value for name, value in out.items() if isinstance(value, Tensor)}

    # Two predictions of a token each: the start and the end, which padding cannot be.
    if "start_logits" in found:
        padding = ~real_tokens(batch)
        ends = (found[name] for name in ("start_logits", "end_logits"))
        return [Prediction(CLASS, x.masked_fill(padding, torch.finfo(x.dtype).min)[:, None]) for x in ends]

    # Pretraining predicts words, and whether the second sentence follows.
    if "prediction_logits" in found:
        words = Prediction(CLASS, found["prediction_logits"], real_tokens(batch))
        return [words, Prediction(CLASS, found["seq_relationship_logits"][:, None])]

    # Other heads give a prediction for each token, or one for each example.
    if "logits" in found:
        logits, family = found["logits"], FAMILIES[head_of(model).label_kind]
        if logits.dim() == 3:
            return [Prediction(family, logits, real_tokens(batch))]
        return [Prediction(family, logits[:, None])]

    # Without a head the prediction is the mean token vector.
    return [Prediction(NORMAL, mean_vectors(found["last_hidden_state"], real_tokens(batch))[:, None])]
