"""bertlite/inference/native/exact.py: exact sums of products, whatever their order."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from bertlite.inference.native.exact import array_of, exact_linear, exact_norm


@pytest.mark.parametrize("inputs", [1, 2, 37, 1025])
def test_no_order_of_sums_changes_a_bit_and_all_are_right(inputs: int) -> None:
    sizes = torch.logspace(-9, 9, 5, dtype=torch.float64)[:, None]
    x = array_of((torch.randn(5, inputs, dtype=torch.float64) * sizes).float())
    part = nn.Linear(inputs, 7)
    weight, bias = array_of(part.weight), array_of(part.bias)
    found = exact_linear(x, part).numpy()
    for order in (np.random.default_rng(i).permutation(inputs) for i in range(9)):
        part.weight.data = torch.from_numpy(weight[:, order].copy()).float()
        assert np.array_equal(exact_linear(x[:, order].copy(), part).numpy(), found)
    for row, column in ((0, 0), (2, 6), (4, 3)):
        exact = sum((Fraction(a) * Fraction(b) for a, b in zip(x[row], weight[column], strict=True)), Fraction())
        size = np.abs(x[row]).max() * np.abs(weight[column]).max() * inputs
        assert abs(found[row, column] - float(exact + Fraction(bias[column]))) < 2e-12 * size + 1e-15


def test_a_norm_is_torchs_and_a_callers_setting_of_numpy_does_not_count() -> None:
    norm = nn.LayerNorm(37, eps=1e-5)
    with torch.no_grad():
        norm.weight.normal_(), norm.bias.normal_()
    x = torch.randn(5, 37, dtype=torch.float64)
    with np.errstate(all="raise"):
        found = exact_norm(norm, array_of(x))
        assert not np.isfinite(exact_norm(norm, array_of(x * torch.inf))).any()
    torch.testing.assert_close(torch.from_numpy(found), norm.double()(x).detach(), rtol=1e-12, atol=1e-12)
