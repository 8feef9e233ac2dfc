"""Attention of packed tokens by torch's `varlen_attn`, which needs CUDA and half precision.

Shapes:  T tokens · N heads · H head dim.  q, k, v are (T, N, H); with `first` the queries are the first token of each
sequence that has one.
"""

import torch
from torch import Tensor

from bertlite.stack.layer_inputs import Needs
from bertlite.stack.packed_kernels import ScoreBias
from bertlite.stack.packing import Packed


def varlen(
    q: Tensor, k: Tensor, v: Tensor, packing: Packed, score_bias: ScoreBias | None, dropout: float, first: bool
) -> Tensor:
    """Compute attention of packed sequences where they are."""
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = packing.filled_ends, max(packing.lengths)
    q_ends = torch.arange(len(ends), dtype=torch.int32, device=ends.device) if first else ends
    context = varlen_attn(q, k, v, q_ends, ends, 1 if first else longest, longest)
    assert isinstance(context, Tensor)  # not a pair: no log-sum-exp was asked for
    return context


def missing_for_varlen(needs: Needs) -> str | None:
    """Say what keeps `torch.nn.attention.varlen.varlen_attn` from computing this attention; None if nothing does."""
    if needs.device != "cuda":
        return f"varlen_attn runs on CUDA, not on {needs.device}"
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen; 2.10 does"
    if needs.dtype not in (torch.float16, torch.bfloat16):
        return f"varlen_attn takes float16 and bfloat16, not {str(needs.dtype).removeprefix('torch.')}"
    if needs.head_dim % 8 or needs.head_dim > 256:
        return f"varlen_attn takes head dims that are multiples of 8 up to 256, not {needs.head_dim}"
    if needs.dropout:
        return "varlen_attn has no dropout; attention_probs_dropout_prob=0 turns it off"
    if needs.relative:
        return "varlen_attn cannot add relative positions to the scores"
    return None
