"""Choose how far a repair goes by predictions for sentences that it was not fitted to.

The input of a LayerNorm can come closer to the dense model's while predictions move away: when few units are left,
least squares shrinks their outputs, so that every sentence looks like the mean sentence.

Shapes:  D outputs of a projection · W inputs · K examples · … is (rows, S) or, packed, (T,)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertlite.importance.batches import Batch
from bertlite.importance.moments import FOLDS
from bertlite.importance.predictions import Prediction, predictions
from bertlite.importance.structures import EVERY_TOKEN, own_forward, run, started_at
from bertlite.pruning import BertLike

SHARES = (0.25, 0.5, 0.75, 1.0)  # of the way from the old projection to its fit; 0 is always a candidate
DEVIATIONS = 2.0  # standard errors that a mean change must exceed
Linear = tuple[Tensor, Tensor]  # weight (D, W) and bias (D,)


class RunLike(Protocol):
    """The state of one batch after the layers below."""

    first: int  # the number of its first sentence among all
    sentence: Tensor  # (T,), the number of each token's sentence
    below: Any  # what the layer below returned; None before the first


@dataclass(frozen=True)
class HeldOut:
    """Batches with the dense model's predictions, to which a pruned model's are compared.

    Args:
        folds: the numbers of the folds that sentences are in.
    """

    model: BertLike
    batches: Sequence[Batch]
    dense: Sequence[list[Prediction]]
    runs: Sequence[RunLike]
    folds: Tensor

    @classmethod
    def of(cls, model: BertLike, dense: BertLike, batches: Sequence[Batch], runs: Sequence[RunLike]) -> "HeldOut":
        folds = torch.cat([each.sentence % FOLDS for each in runs]).unique()
        if len(folds) < 2:
            raise ValueError(
                "one sentence is too little to judge a repair by: give more, a few hundred, or pass ridge="
            )
        known = [predictions(dense, run(dense, batch, **options_of(dense)), batch) for batch in batches]
        return cls(model, batches, known, runs, folds)

    def choose_share(self, layer: int, part: nn.Linear, others: Sequence[Linear]) -> float:
        """Return the share of the way to its fit that a projection goes, 0 or one of SHARES.

        Sentences of each fold are predicted with the fit to the other folds.  A share above 0 must shrink the mean
        distance to the dense model's predictions by more than DEVIATIONS standard errors, and must not increase the
        number of most likely labels that differ from the dense model's.

        Args:
            layer: of the projection; layers below have run, layers above are as they were.
            others: for each fold, the fit to the sentences of the other folds.
        """
        old = part.weight.double(), part.bias.double()
        before = self.distances(layer, part, [old] * len(others))
        best, least = 0.0, 0.0
        for share in SHARES:
            fits = [between(old, fit, share) for fit in others]
            change, differing = self.distances(layer, part, fits) - before
            bound = float(change.mean() + DEVIATIONS * change.std() / len(change) ** 0.5)
            if bound < least and not differing.sum() > 0:
                best, least = share, bound
        return best

    def distances(self, layer: int, part: nn.Linear, fits: Sequence[Linear]) -> Tensor:
        """Return distances to the dense model's predictions, and how many labels differ: (2, K).

        Each sentence is predicted with the fit of its fold.
        """
        found = []
        for batch, dense, known in zip(self.batches, self.dense, self.runs, strict=True):
            with started_at(self.model, layer, known.below), own_forward(part, self.by_fold(known, fits)):
                own = predictions(self.model, run(self.model, batch, **options_of(self.model)), batch)
            pairs = [*zip(dense, own, strict=True)]
            parts = [[p.distance(q) for p, q in pairs], [p.disagreement(q) for p, q in pairs]]
            found.append(torch.stack([torch.stack(each).sum(0).double() for each in parts]))
        return torch.cat(found, 1)

    def by_fold(self, known: RunLike, fits: Sequence[Linear]) -> Callable[[Tensor], Tensor]:
        """Return the forward of a projection with a weight and bias for each fold's sentences."""

        def forward(x: Tensor) -> Tensor:
            number = known.first + torch.arange(len(x), device=x.device) if x.dim() == 3 else known.sentence
            out = x.new_empty(*x.shape[:-1], len(fits[0][1]))
            for fold, (weight, bias) in zip(self.folds.tolist(), fits, strict=True):
                own = number % FOLDS == fold
                out[own] = F.linear(x[own], weight.to(x.dtype), bias.to(x.dtype))
            return out

        return forward


def between(old: Linear, new: Linear, share: float) -> Linear:
    """Return weight and bias a share of the way from the old to the new ones."""
    weight, bias = (a + share * (b - a) for a, b in zip(old, new, strict=True))
    return weight, bias


def options_of(model: BertLike) -> dict[str, Any]:
    return {**EVERY_TOKEN, **({"use_cache": False} if model.config.is_decoder else {})}
