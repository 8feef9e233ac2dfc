"""Least squares from sums over tokens: fitting a linear layer without keeping the tokens.

Shapes:  T tokens · W inputs of the layer · D outputs
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, math.inf)  # that cross-validation chooses from
FIRST = RIDGES.index(1e-3)
FOLDS = 4  # of the sentences; each is held out once


@dataclass(frozen=True)
class Moments:
    """Sums over tokens of inputs C (T, W) and wanted outputs Y (T, D), in float64, which can be added."""

    count: float
    c: Tensor  # (W,)
    y: Tensor  # (D,)
    cc: Tensor  # (W, W)
    cy: Tensor  # (W, D)
    yy: Tensor  # (D,)

    @classmethod
    def of(cls, c: Tensor, y: Tensor) -> "Moments":
        c, y = c.double(), y.double()
        return cls(len(c), c.sum(0), y.sum(0), c.T @ c, c.T @ y, y.square().sum(0))

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(*(a + b for a, b in zip(self.sums, other.sums, strict=True)))  # type: ignore[arg-type]

    def __sub__(self, other: "Moments") -> "Moments":
        return Moments(*(a - b for a, b in zip(self.sums, other.sums, strict=True)))  # type: ignore[arg-type]

    @property
    def sums(self) -> tuple[float | Tensor, ...]:
        return self.count, self.c, self.y, self.cc, self.cy, self.yy

    def of_inputs(self, rows: Tensor) -> "Moments":
        """Return the moments of these inputs only."""
        return Moments(self.count, self.c[rows], self.y, self.cc[rows][:, rows], self.cy[rows], self.yy)

    @property
    def centred(self) -> tuple[Tensor, Tensor]:
        """Return CᵀC (W, W) and CᵀY (W, D) about the means."""
        c = self.c / self.count
        return self.cc - torch.outer(c, self.c), self.cy - torch.outer(c, self.y)

    def bias(self, weight: Tensor) -> Tensor:
        """Return the best bias (D,) for a weight (D, W)."""
        return (self.y - weight @ self.c) / self.count

    def error(self, weight: Tensor, bias: Tensor) -> float:
        """Return the sum of squared differences between Y and a linear layer's outputs for C."""
        given = self.c @ weight.T  # (D,)
        squares = ((weight @ self.cc) * weight).sum(1) + 2 * bias * given + self.count * bias.square()
        return float((self.yy - 2 * ((weight * self.cy.T).sum(1) + bias * self.y) + squares).sum())


def gather(parts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> list[Moments]:
    """Sum (inputs, wanted outputs, number of its sentence) of all tokens by fold; there are no empty folds.

    Raises:
        ValueError: there are no tokens.
    """
    folds: dict[int, Moments] = {}
    for c, y, sentence in parts:
        for fold in range(FOLDS):
            own = sentence % FOLDS == fold
            if own.any():
                found = Moments.of(c[own], y[own])
                folds[fold] = folds[fold] + found if fold in folds else found
    if not folds:
        raise ValueError("the batches hold only padding")
    return [folds[fold] for fold in sorted(folds)]


def total(folds: Sequence[Moments]) -> Moments:
    """Return the moments of all tokens."""
    whole = folds[0]
    for each in folds[1:]:
        whole = whole + each
    return whole


def fit_matrix(moments: Moments, weight: Tensor, ridge: float) -> Tensor:
    """Return the weight of least squares."""
    if not weight.numel() or ridge == math.inf:
        return weight
    gram, wanted = moments.centred
    return weight + ridge_solve(gram, wanted - gram @ weight.T, ridge).T


def choose_ridge(folds: Sequence[Moments], weight: Tensor) -> float:
    """Return the ridge of RIDGES whose fit does best on held-out sentences.

    The search goes up or down from 1e-3 while the error falls: it has one minimum.

    Raises:
        ValueError: there is only one sentence, so none can be held out.
    """
    if len(folds) < 2:
        raise ValueError("one sentence is too little to choose a ridge by: give a few hundred, or pass ridge=")
    whole = total(folds)
    rests = [whole - fold for fold in folds]

    def held_out(index: int) -> float:
        error = 0.0
        for fold, rest in zip(folds, rests, strict=True):
            found = fit_matrix(rest, weight, RIDGES[index])
            error += fold.error(found, rest.bias(found))
        return error

    errors = {index: held_out(index) for index in (FIRST, FIRST + 1)}
    step = 1 if errors[FIRST + 1] <= errors[FIRST] else -1
    best = FIRST + 1 if step == 1 else FIRST
    while 0 <= best + step < len(RIDGES):
        errors[best + step] = held_out(best + step)
        if errors[best + step] > errors[best]:
            break
        best += step
    return RIDGES[best]


def ridge_solve(gram: Tensor, wanted: Tensor, ridge: float) -> Tensor:
    """Return the smallest x that minimises |gram·x - wanted|; a ridge draws it towards 0."""
    if not ridge:
        return torch.linalg.pinv(gram, hermitian=True) @ wanted
    factor, fault = torch.linalg.cholesky_ex(with_ridge(gram, ridge))
    if fault:  # not positive definite, by rounding
        return torch.linalg.solve(with_ridge(gram, ridge), wanted)
    return torch.cholesky_solve(wanted, factor)


def with_ridge(gram: Tensor, ridge: float) -> Tensor:
    """Return a Gram matrix with a share of its mean power added to the diagonal."""
    return gram + torch.eye(len(gram), dtype=gram.dtype, device=gram.device) * (ridge * power(gram))


def power(gram: Tensor) -> Tensor:
    """Return the mean power of the inputs."""
    return gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
