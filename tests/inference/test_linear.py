"""bertlite/inference/linear.py: a packed linear layer computes what nn.Linear does, or its rounding."""

import pickle

import pytest
import torch
from optimised import onednn, skip_without

from bertlite.inference.linear import (
    ONEDNN_ACTIVATIONS,
    ROWS_PER_BLOCK,
    FixedLinear,
    Int8Linear,
    PackedLinear,
    quantise,
)


@onednn
def test_a_rounded_matmul_is_the_matmul_of_the_rounded():
    skip_without(torch.int8)
    x, weight, bias = torch.randn(5, 48), torch.randn(37, 48), torch.randn(37)
    whole, scale = quantise(x)
    assert whole.dtype == torch.int8
    assert (whole.float() * scale - x).abs().max() <= 0.5001 * scale
    assert whole.abs().max() == 127
    scales = weight.abs().amax(1, keepdim=True) / 127
    exact = (whole.double() * scale) @ ((weight / scales).round().double() * scales.double()).T + bias
    linear, residual = Int8Linear(weight, bias), torch.randn(5, 37)
    torch.testing.assert_close(linear(x).double(), exact, rtol=0, atol=1e-4)
    torch.testing.assert_close(linear.forward_add(x, residual).double(), exact + residual, rtol=0, atol=1e-4)
    assert quantise(torch.zeros(2, 3))[0].abs().max() == 0
    assert quantise(torch.zeros(0, 3))[0].shape == (0, 3)


@onednn
@pytest.mark.parametrize("act", ONEDNN_ACTIVATIONS)
def test_a_fused_activation_is_the_activation(act):
    x, weight, bias = torch.randn(5, 48), torch.randn(37, 48), torch.randn(37)
    wanted = FixedLinear(weight, bias, act)(x)
    linear = PackedLinear(weight, bias, act)
    assert linear.act is None
    torch.testing.assert_close(linear(x), wanted, rtol=1e-5, atol=1e-5)


@onednn
def test_a_weight_on_huge_pages_is_the_weight():
    weight, x = torch.randn(1030, 2050), torch.randn(3, 2050)  # some MB, and no whole number of pages
    torch.testing.assert_close(PackedLinear(weight, None)(x), x @ weight.T, rtol=1e-4, atol=1e-3)


@onednn
@pytest.mark.parametrize("kind", [FixedLinear, PackedLinear, Int8Linear])
def test_a_pickled_layer_is_the_layer(kind):
    if kind is Int8Linear:
        skip_without(torch.int8)
    linear, x = kind(torch.randn(37, 48), torch.randn(37), "gelu"), torch.randn(5, 48)
    again = pickle.loads(pickle.dumps(linear))
    assert torch.equal(again(x), linear(x))
    assert again.rows_per_block == linear.rows_per_block


@onednn
@pytest.mark.parametrize("dtype", ROWS_PER_BLOCK, ids=str)
def test_the_size_of_a_block_follows_the_dtype_of_the_weight(dtype):
    skip_without(dtype)
    kind = Int8Linear if dtype == torch.int8 else PackedLinear
    weight = torch.randn(37, 48, dtype=torch.float32 if dtype == torch.int8 else dtype)
    assert kind(weight, None).rows_per_block == ROWS_PER_BLOCK[dtype]
    assert FixedLinear(weight, None).rows_per_block == 0
