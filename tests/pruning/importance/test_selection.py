"""Joint selection on Gram matrices: losses are those of least squares, choices those of exhaustive search."""

from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from conftest import F64
from torch import Tensor

from bertlite.pruning.importance.selection import eliminate

T, D = 61, 5


def problem(inputs: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return correlated inputs C (T, W), wanted outputs Y (T, D), and of them A and the fit X."""
    draw = torch.Generator().manual_seed(seed)
    c = torch.randn(T, inputs, generator=draw, dtype=F64) @ torch.randn(inputs, inputs, generator=draw, dtype=F64)
    y = torch.randn(T, D, generator=draw, dtype=F64) + c @ torch.randn(inputs, D, generator=draw, dtype=F64)
    return c, y, c.T @ c, torch.linalg.solve(c.T @ c, c.T @ y)


def rows_of(units: Sequence[int], width: int) -> list[int]:
    return [unit * width + i for unit in units for i in range(width)]


def squared_error(c: Tensor, y: Tensor, kept: list[int]) -> float:
    """Return the error of least squares on some columns, by QR."""
    if not kept:
        return float(y.square().sum())
    return float((y - c[:, kept] @ torch.linalg.lstsq(c[:, kept], y, driver="gelsd").solution).square().sum())


def added_loss(c: Tensor, y: Tensor, gone: Sequence[int], width: int = 1) -> float:
    """Return the loss that removing these units adds to that of keeping all, by least squares on what is left."""
    units = c.shape[1] // width
    left = rows_of([unit for unit in range(units) if unit not in gone], width)
    return squared_error(c, y, left) - squared_error(c, y, [*range(units * width)])


def exhaustive(c: Tensor, y: Tensor, remove: int, width: int = 1) -> float:
    """Return the lowest loss of removing so many units."""
    return min(added_loss(c, y, gone, width) for gone in combinations(range(c.shape[1] // width), remove))


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("at_once", [1, 3, 256])
def test_every_loss_is_that_of_least_squares_on_what_is_left(width: int, at_once: int) -> None:
    units = 7
    c, y, gram, fit = problem(units * width)
    found = eliminate(gram, fit, width, at_once=at_once)
    assert sorted(found.order) == [*range(units)]
    assert found.losses[0] == 0
    for kept in range(units + 1):
        gone = found.removed(kept)
        assert len(gone) == units - kept
        assert found.loss(kept) == pytest.approx(added_loss(c, y, gone, width), rel=1e-9, abs=1e-8)


def test_the_ridge_holds_to_old_weights() -> None:
    """With a ridge in A and in the fit, the loss is that of the penalised problem with zeros for what is removed."""
    c, y, _, _ = problem(6)
    old, ridge = torch.randn(6, D, dtype=F64), 0.7
    design = torch.cat([c, ridge**0.5 * torch.eye(6, dtype=F64)])
    target = torch.cat([y, ridge**0.5 * old])
    gram = c.T @ c + ridge * torch.eye(6, dtype=F64)
    found = eliminate(gram, torch.linalg.solve(gram, c.T @ y + ridge * old))
    whole = squared_error(design, target, [*range(6)])
    for kept in range(7):
        left = [unit for unit in range(6) if unit not in found.removed(kept)]
        assert found.loss(kept) == pytest.approx(squared_error(design, target, left) - whole, rel=1e-9, abs=1e-8)


def test_elimination_comes_near_exhaustive_search_and_the_first_unit_is_its() -> None:
    ratios = []
    for seed in range(7):
        c, y, gram, fit = problem(8, seed)
        greedy, pairs = eliminate(gram, fit), eliminate(gram, fit, 2)
        ratios += [greedy.loss(8 - remove) / exhaustive(c, y, remove) for remove in (2, 4, 6)]
        assert greedy.loss(7) == pytest.approx(exhaustive(c, y, 1), rel=1e-8)
        assert pairs.loss(3) == pytest.approx(exhaustive(c, y, 1, 2), rel=1e-8)
    assert min(ratios) > 1 - 1e-9
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) / len(ratios) > 0.3
    assert sorted(ratios)[len(ratios) // 2] < 1.2


def test_a_copy_of_another_input_costs_nothing() -> None:
    c, y, _, _ = problem(5)
    c = torch.cat([c, c[:, 2:3]], 1)
    gram = c.T @ c + 1e-9 * torch.eye(6, dtype=F64)
    found = eliminate(gram, torch.linalg.solve(gram, c.T @ y))
    assert found.order[0] in (2, 5)
    assert float(found.losses[1]) < 1e-6 < 1e-3 * float(found.losses[2])


def test_a_gram_matrix_that_has_no_inverse_is_refused() -> None:
    eye = torch.eye(4, dtype=F64)
    with pytest.raises(ValueError, match="not positive definite: give more calibration data, or a larger ridge"):
        eliminate(torch.zeros(4, 4, dtype=F64), eye)
