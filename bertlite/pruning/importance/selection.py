"""Joint selection of the inputs of a linear layer to keep, whose weights are then fitted again.

The loss of a choice is added by making weights 0 for all other inputs, at best, instead of the best weights X:

    min tr((Z - X)ᵀ A (Z - X))   over Z with Z = 0 outside the choice,

for a Gram matrix A of the inputs, perhaps with a ridge.  Given P, the inverse of A for the kept inputs, removing the
inputs S adds

    tr(X_Sᵀ P_SS⁻¹ X_S),   after which   X ← X - P_:S P_SS⁻¹ X_S   and   P ← P - P_:S P_SS⁻¹ P_S:

(optimal brain surgeon, Hassibi and Stork 1993, for groups of weights).

Shapes:  W inputs · w inputs of one unit: a head's, or 1 of a neuron · n = W / w units · D outputs
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bertlite.models.structure import unit_rows

AT_ONCE = 64  # each step removes 1 of so many remaining units: 16 of 1,024; smaller steps lose as much
SHRINK = 0.75  # the matrices are made smaller when this share of their units is left


@dataclass(frozen=True)
class Elimination:
    """The order in which units are removed, the least important first, and the losses."""

    order: tuple[int, ...]
    losses: Tensor  # (n + 1,), float64: the loss added by removing none, the first one, the first two …

    def removed(self, kept: int) -> list[int]:
        """Return the units to remove so that `kept` remain, in ascending order."""
        return sorted(self.order[: len(self.order) - kept])

    def loss(self, kept: int) -> float:
        """Return the loss added when `kept` units remain."""
        return float(self.losses[len(self.order) - kept])


def eliminate(gram: Tensor, fit: Tensor, width: int = 1, *, at_once: int = AT_ONCE) -> Elimination:
    """Remove all units: in each step the ones that now cost least, after which the rest is fitted again.

    Args:
        gram: A (W, W), positive definite.
        fit: X (W, D), the best weights of all inputs; multiplied by a square root of a (D, D) metric, for a loss in
            that metric.
        width: w, the consecutive inputs of one unit.
        at_once: each step removes 1 of so many remaining units, rounded up.  The losses are exact nevertheless, since
            a step removes its units jointly.

    Raises:
        ValueError: the Gram matrix is not positive definite.
    """
    P, X = inverse(gram), fit.clone()
    units = torch.arange(len(gram) // width, device=gram.device)  # the remaining units, in P and X
    left = torch.ones_like(units, dtype=torch.bool)
    order: list[int] = []
    losses = [0.0]

    # Rows of removed inputs cost time and give nothing: now and then they are cut out.
    while count := int(left.sum()):
        if count <= SHRINK * len(left):
            rest = left.repeat_interleave(width)
            P, X, units, left = P[rest][:, rest], X[rest], units[left], left[left]

        costs = removal_costs(P, X, width, left)
        step = -(-count // at_once)
        lowest = costs.argsort(stable=True)[:step]
        rows = unit_rows(lowest, width, gram.device)

        # The step's units are removed jointly, by blocks of a Cholesky factor: so their losses are exact.
        factor = torch.linalg.cholesky(P[rows][:, rows])
        half = torch.linalg.solve_triangular(factor, X[rows], upper=False)  # (width·step, D)
        across = torch.linalg.solve_triangular(factor, P[rows], upper=False)
        added = half.unflatten(0, (step, width)).square().sum((1, 2)).cumsum(0)
        losses += (losses[-1] + added).tolist()
        order += units[lowest].tolist()

        # The remaining inputs are fitted again: X and P change as in the formulas above.
        left[lowest] = False
        X.addmm_(across.T, half, alpha=-1)
        P.addmm_(across.T, across, alpha=-1)
    return Elimination(tuple(order), torch.tensor(losses, dtype=torch.float64, device="cpu"))


def removal_costs(P: Tensor, X: Tensor, width: int, left: Tensor) -> Tensor:
    """Return the loss added by removing each unit alone, tr(X_Sᵀ P_SS⁻¹ X_S), (n,); infinite for removed ones."""
    if width == 1:
        return (X.square().sum(1) / P.diagonal()).masked_fill(~left, torch.inf)
    each = left.nonzero()[:, 0]
    units = len(left), width
    blocks = P.unflatten(1, units).unflatten(0, units)[each, :, each]  # (n, w, w), on the diagonal
    weights = X.unflatten(0, units)[each]
    costs = torch.full(left.shape, torch.inf, dtype=X.dtype, device=X.device)
    return costs.masked_scatter_(left, (weights * torch.linalg.solve(blocks, weights)).sum((1, 2)))


def inverse(gram: Tensor) -> Tensor:
    """Return the inverse of a positive definite matrix."""
    if not len(gram):
        return gram.clone()
    factor, fault = torch.linalg.cholesky_ex(gram)
    if fault:
        raise ValueError("the Gram matrix is not positive definite: give more calibration data, or a larger ridge")
    return torch.cholesky_inverse(factor)
