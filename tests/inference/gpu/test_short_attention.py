"""bertlite/inference/gpu/short_attention.py: the kernel in Triton's interpreter, against attention in float64."""

from itertools import pairwise

import pytest
import torch
from interpreted import FLOATS, HERE, here_or_interpreted, run_interpreted, with_triton
from torch import Tensor

from bertlite.inference.gpu import triton_kernels
from bertlite.inference.gpu.short_attention import attend_short, missing_for_short
from bertlite.stack.attention import Requirements, eager
from bertlite.stack.layouts import Slots


def slots(lengths: tuple[int, ...], room: int, longest: int) -> Slots:
    rows = torch.arange(max(lengths), device=HERE) < torch.tensor(lengths, device=HERE)[:, None]
    return Slots.of_rows(rows, room, longest, rest=False)


def wanted(q: Tensor, k: Tensor, v: Tensor, layout: Slots, bias: Tensor | None) -> Tensor:
    """Compute each sequence by itself, by eager attention."""
    found = []
    for start, end in pairwise(layout.nonempty_ends.tolist()):
        own, keys, values = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        shift = None if bias is None else bias[..., : end - start, : end - start].to(q.dtype)
        found.append(eager(own, keys, values, None, shift, 0.0)[0][0].transpose(0, 1))
    return torch.cat(found)


@here_or_interpreted
def test_the_kernel_in_a_process_that_interprets_it():
    """Graphs on a CPU are tested without the kernel."""
    run_interpreted(__file__)


@with_triton
@pytest.mark.parametrize(
    ("lengths", "longest", "heads", "width"),
    [((7, 0, 16, 1, 0), 16, 3, 24), ((33, 5), 64, 2, 64), ((100, 128), 128, 1, 32), ((3,), 8, 5, 12)],
)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_kernel_is_as_near_to_float64_as_eager_attention(lengths, longest, heads, width, biased, dtype):
    """With steep scores, projections that lie in one product, empty sequences, and slots of no sequence."""
    torch.manual_seed(0)
    used, layout = sum(lengths), slots(lengths, sum(lengths) + 5, longest)
    q, k, v = (3 * torch.randn(used + 5, 3, heads, width)).to(HERE, dtype).unbind(1)
    bias = torch.randn(1, heads, longest, longest).to(HERE, dtype) if biased else None
    score_bias = None if bias is None else lambda q, k: bias[..., : q.shape[-2], : k.shape[-2]]
    with torch.no_grad():
        found = attend_short(q, k, v, layout, score_bias, 0.0, False)[:used]
    true = wanted(q.double(), k.double(), v.double(), layout, bias)
    plain = wanted(q, k, v, layout, bias)
    assert (found - true).abs().max() <= 2 * (plain - true).abs().max() + torch.finfo(dtype).eps


@with_triton
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "not torch.float64"),
        ({"head_dim": 192}, "up to 128 tokens and head dims, not 16 and 192"),
        ({"dropout": True}, "no dropout"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(change, reason):
    assert missing_for_short(Requirements(device="cuda", head_dim=64), 128) is None
    assert "not 256 and 64" in str(missing_for_short(Requirements(device="cuda"), 256))
    assert reason in str(missing_for_short(Requirements(**{"device": "cuda", **change}), 16))
    q = torch.randn(8, 2, 16, device=HERE, requires_grad=True)
    with pytest.raises(ValueError, match="cannot run here: it has no gradients"):
        attend_short(q, q, q, slots((3, 5), 8, 8), None, 0.0, False)


def test_without_triton_it_is_refused(monkeypatch):
    monkeypatch.setattr(triton_kernels, "triton", None)
    assert "Triton is not installed" in str(missing_for_short(Requirements(device="cuda"), 16))
    q = torch.randn(8, 2, 16)
    with pytest.raises(ValueError, match="short attention cannot run here: Triton is not installed"):
        attend_short(q, q, q, slots((3, 5), 8, 8), None, 0.0, False)
