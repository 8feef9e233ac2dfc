"""Kernels that compute attention of rows, and what a forward may need of any kernel.

Shapes:  B sequences · S queries · K keys · N heads · H head dim.  q, k, v come head-first, (B, N, S, H); the scale of
the scores is 1 / sqrt(H).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# (B, N, S, H), (B, N, K, H) -> (B, N, S, K), added to the scaled scores; the queries are the keys' last, or first
ScoreBias = Callable[[Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Needs:
    """The requirements that one forward has of a backend."""

    weights: bool = False
    dropout: bool = False  # attention dropout is live
    relative: bool = False  # relative positions are added to the scores
    device: str = "cpu"  # its type
    dtype: torch.dtype = torch.float32  # of queries and keys
    head_dim: int = 64


def as_scores(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias in the scores' dtype; what is too large for it stays finite: a row of -inf would be nan."""
    if bias.dtype == dtype:
        return bias
    limit = torch.finfo(dtype).max / 2
    return bias.to(dtype).clamp(-limit, limit)


def probabilities(q: Tensor, k: Tensor, allowed: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the attention weights, (B, N, S, K)."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + as_scores(bias, scores.dtype)
    if allowed is not None:
        lowest = torch.finfo(scores.dtype).min  # not -inf: it breeds nan in half precision
        scores = scores.masked_fill(~allowed, lowest)
    return scores.softmax(-1)


def eager(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor | None]:
    """Compute attention as it is written in the paper, weights and all."""
    weights = probabilities(q, k, allowed, bias)
    if dropout:
        weights = F.dropout(weights, dropout)
    return torch.matmul(weights, v), weights


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor | None]:
    """Compute attention by torch's fused kernels, which give no weights."""
    mask = allowed
    if bias is not None:
        mask = as_scores(bias, q.dtype)
        if allowed is not None:
            mask = mask.masked_fill(~allowed, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout), None
