"""Least squares from sums over tokens: fitting a linear layer without keeping the tokens.

Products are computed in float32, or a wider dtype of the tokens, and added up in float64.  The first tokens' mean is
subtracted before, so that large means take no digits.

Shapes:  T tokens · W inputs of the layer · D outputs
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bertlite.support.memory import release_memory

RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, math.inf)  # for cross-validation to choose from
FIRST = RIDGES.index(1e-2)  # the usual ones are this and the next
FOLDS = 4  # parts of the sentences; each is held out once
OUTPUTS = 128  # outputs of a matrix, evenly spaced, that its ridge is chosen by
TOKENS = 2048  # tokens that are multiplied at once
ROWS = 128  # rows of a Gram matrix that are computed and kept at once
NO_TOKENS = "the batches hold only padding"
Tokens = tuple[Tensor, Tensor, Tensor]  # inputs (T, W), wanted outputs (T, D), and the number of each token's sentence


@dataclass(frozen=True)
class Moments:
    """Sums over tokens of inputs C (T, W) and wanted outputs Y (T, D), in float64."""

    count: float
    c: Tensor  # (W,)
    y: Tensor  # (D,)
    upper: Tensor  # CᵀC, packed
    cy: Tensor  # (W, D)

    @property
    def cc(self) -> Tensor:
        """Return CᵀC (W, W)."""
        return unpack(self.upper, len(self.c))

    def through(self, weight: Tensor, bias: Tensor) -> "Moments":
        """Return the moments with weight·Y + bias as wanted outputs."""
        return replace(self, y=weight @ self.y + self.count * bias, cy=(self.cy @ weight.T).addr_(self.c, bias))

    @property
    def centred(self) -> tuple[Tensor, Tensor]:
        """Return CᵀC (W, W) and CᵀY (W, D) about the means."""
        c = self.c / self.count
        return self.cc.addr_(c, self.c, alpha=-1), torch.addr(self.cy, c, self.y, alpha=-1)

    def bias(self, weight: Tensor) -> Tensor:
        """Return the best bias (…, D) for weights (…, D, W)."""
        return (self.y - weight @ self.c) / self.count

    def errors(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the sum of squared differences between Y and the outputs of linear layers for C, less Y's squares.

        Args:
            weight, bias: (…, D, W) and (…, D); the sums are (…).
        """
        given = weight @ self.c
        squares = ((weight @ self.cc) * weight).sum(-1) + 2 * bias * given + self.count * bias.square()
        return (squares - 2 * ((weight * self.cy.T).sum(-1) + bias * self.y)).sum(-1)


class Sums:
    """Moments that are being summed.

    Args:
        dtype: the dtype of the Gram matrix.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self.waiting: list[tuple[Tensor, Tensor]] = []  # tokens that are not multiplied yet

    def add(self, c: Tensor, y: Tensor) -> None:
        """Add inputs (T, W) and wanted outputs (T, D)."""
        self.waiting.append((c, y))
        if sum(len(c) for c, _ in self.waiting) >= TOKENS:
            self.multiply()

    def add_inputs(self, c: Tensor) -> None:
        """Add inputs (T, W) without wanted outputs, at once."""
        if len(c):
            self.waiting.append((c, c[:, :0]))
            self.multiply()

    def multiply(self) -> None:
        """Add the products of the waiting tokens."""
        dtype = torch.promote_types(self.waiting[0][0].dtype, torch.float32)
        c, y = (torch.cat(each).to(dtype) for each in zip(*self.waiting, strict=True))
        self.waiting.clear()

        # The first tokens give the means to subtract, and the sizes of all sums.
        if not hasattr(self, "count"):
            self.mean_c, self.mean_y, self.count = c.mean(0), y.mean(0), 0
            zero, W, D = torch.zeros((), dtype=torch.float64, device=c.device), c.shape[1], y.shape[1]
            self.c, self.y, self.cy = (zero.new_zeros(shape) for shape in ((W,), (D,), (W, D)))
            self.upper = packed_zeros(W, zero.to(self.dtype))

        c -= self.mean_c
        y -= self.mean_y
        self.count += len(c)
        self.c += c.sum(0)
        self.y += y.sum(0)
        self.cy += c.T @ y
        add_gram_(self.upper, c)

    @property
    def moments(self) -> Moments:
        if self.waiting:
            self.multiply()
        n, c, y = self.count, self.mean_c.double(), self.mean_y.double()
        both = self.c + n / 2 * c
        for rows, block in blocks(self.upper, len(c)):  # (C + c)ᵀ(C + c)
            block.addr_(c[rows], both[rows.start :]).addr_(both[rows], c[rows.start :])
        cy = self.cy.addr_(self.c, y).addr_(c, self.y + n * y)
        return Moments(n, self.c + n * c, self.y + n * y, self.upper, cy)

    @property
    def gram(self) -> Tensor:
        """Return CᵀC about the means (W, W), in float64; raise ValueError if there are no tokens."""
        if not hasattr(self, "count"):
            raise ValueError(NO_TOKENS)
        return unpack(self.upper.double(), len(self.c)).addr_(self.c / self.count, self.c, alpha=-1)


# A symmetric matrix (W, W), packed: for each ROWS rows the block on the diagonal and everything to its right


def blocks(upper: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows of a packed matrix, and their part of it from the first of these columns on."""
    at = 0
    for first in range(0, width, ROWS):
        shape = min(ROWS, width - first), width - first
        yield slice(first, first + shape[0]), upper[at : at + shape[0] * shape[1]].view(shape)
        at += shape[0] * shape[1]


def packed_zeros(width: int, like: Tensor) -> Tensor:
    """Return zeros, packed, with the dtype and on the device of a tensor."""
    return like.new_zeros(sum(min(ROWS, width - first) * (width - first) for first in range(0, width, ROWS)))


def add_gram_(upper: Tensor, c: Tensor) -> None:
    """Add CᵀC to packed sums."""
    for rows, block in blocks(upper, c.shape[1]):
        block += c[:, rows].T @ c[:, rows.start :]


def unpack(upper: Tensor, width: int) -> Tensor:
    """Return a packed matrix whole."""
    found = upper.new_empty(width, width)
    for rows, block in blocks(upper, width):
        found[rows, rows.start :] = block
        found[rows.start :, rows] = block.T
    return found


def gather(parts: Iterable[Tokens], folds: int = FOLDS) -> list[Moments]:
    """Sum all tokens by fold; there are no empty folds.

    Raises:
        ValueError: there are no tokens.
    """
    found: dict[int, Sums] = {}
    for c, y, sentence in parts:
        order, sizes = (sentence % folds).argsort(stable=True), (sentence % folds).bincount(minlength=folds).tolist()
        for fold, pair in enumerate(zip(*(x.index_select(0, order).split(sizes) for x in (c, y)), strict=True)):
            if sizes[fold]:
                found.setdefault(fold, Sums()).add(*pair)
    if not found:
        raise ValueError(NO_TOKENS)
    release_memory()  # the tokens left gaps that large matrices do not fit into
    return [found[fold].moments for fold in sorted(found)]


def total(folds: Iterable[Moments]) -> Moments:
    """Return the moments of all tokens."""
    fields = zip(*(vars(fold).values() for fold in folds), strict=True)
    return Moments(*(sum(each) for each in fields))


def without_each(folds: Sequence[Moments]) -> Iterator[Moments]:
    """Yield for each fold the moments of all tokens outside it."""
    for fold in folds:
        yield total(other for other in folds if other is not fold)


def fit_matrix(moments: Moments, weight: Tensor, *ridges: float) -> Tensor:
    """Return the least-squares weight (D, W) for one ridge, or those for several (n, D, W)."""
    if not weight.numel() or ridges == (math.inf,):
        return weight
    gram, wanted = moments.centred
    wanted, diagonal = wanted.addmm_(gram, weight.T, alpha=-1), gram.diagonal().clone()
    found = []
    for ridge in ridges:
        gram.diagonal().copy_(diagonal)
        found.append(weight if ridge == math.inf else weight + ridge_solve(gram, wanted, ridge).T)
    return torch.stack(found) if found[1:] else found[0]


def choose_ridge(folds: Sequence[Moments], weight: Tensor) -> float:
    """Return the ridge of RIDGES whose fit does best on held-out sentences.

    The search goes up or down from 1e-2 while the error falls: it has one minimum.

    Raises:
        ValueError: there is only one sentence, so none can be held out.
    """
    if len(folds) < 2:
        raise ValueError("one sentence is too little to choose a ridge: give a few hundred, or pass ridge=")

    # Some outputs are enough to choose by, and all would take as long as the fits themselves.
    some = slice(None, None, -(-len(weight) // OUTPUTS))
    weight, folds = weight[some], [replace(fold, y=fold.y[some], cy=fold.cy[:, some]) for fold in folds]

    def held_out(*indices: int) -> Iterator[tuple[int, float]]:
        error = torch.zeros(len(indices), dtype=weight.dtype, device=weight.device)
        ridges = [RIDGES[i] for i in indices]
        for fold, rest in zip(folds, without_each(folds), strict=True):
            found = fit_matrix(rest, weight, *ridges)
            error += fold.errors(found, rest.bias(found))
        return zip(indices, error.tolist(), strict=True)

    # Downhill from the usual ridge, in the direction that is better.
    errors = dict(held_out(FIRST, FIRST + 1))
    step = 1 if errors[FIRST + 1] <= errors[FIRST] else -1
    best = FIRST + 1 if step == 1 else FIRST
    while 0 <= best + step < len(RIDGES):
        errors |= held_out(best + step)
        if errors[best + step] > errors[best]:
            break
        best += step
    return RIDGES[best]


def ridge_solve(gram: Tensor, wanted: Tensor, ridge: float) -> Tensor:
    """Return the smallest x that minimises |gram·x - wanted|; a ridge, added to `gram` in place, pulls it to 0."""
    if not ridge:
        return torch.linalg.pinv(gram, hermitian=True) @ wanted
    factor, fault = torch.linalg.cholesky_ex(add_ridge_(gram, ridge))
    if fault:  # not positive definite, by rounding
        return torch.linalg.solve(gram, wanted)
    return torch.cholesky_solve(wanted, factor)


def add_ridge_(gram: Tensor, ridge: float) -> Tensor:
    """Add a share of its mean power to the diagonal of a Gram matrix."""
    diagonal = gram.diagonal()
    diagonal.add_(ridge * diagonal.mean().clamp(min=torch.finfo(gram.dtype).tiny))
    return gram
