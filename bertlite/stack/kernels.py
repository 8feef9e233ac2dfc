"""Attention of rows: by a kernel that sees them head-first, and never a query without a key.

Shapes:  B sequences · S queries · K keys · N heads · H head dim.  q, k, v come head-first, (B, N, S, H); the scale of
the scores is 1 / sqrt(H).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bertlite.stack.layer_inputs import LayerInputs


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
    if q.shape[1] == 0:  # no heads, by which the kernel of torch 2.9 to 2.11 divides: the process would end
        return q + k.sum() + v.sum(), None
    mask = allowed if bias is None else as_scores(bias, q.dtype)
    if mask is not None and bias is not None and allowed is not None:
        mask = mask.masked_fill(~allowed, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout), None


def attend_rows(
    module: Any, q: Tensor, k: Tensor, v: Tensor, inputs: LayerInputs
) -> tuple[Tensor, Tensor | None]:  # (B, S, N, H), (B, K, N, H) twice -> (B, S, N, H), (B, N, S, K)
    """Compute the context of rows, and their attention weights if they are wanted.

    Where only first tokens are computed, they are the queries: S is 1.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = inputs.mask.first() if inputs.first_only else inputs.mask  # moved to q: layers may be on several devices
    allowed, bias, has_keys = (None if x is None else x.to(q.device) for x in (mask.allowed, mask.bias, mask.has_keys))
    shift = module.score_bias(q, k, inputs.first_only)
    if shift is not None:
        bias = shift if bias is None else shift + as_scores(bias, shift.dtype)
    context, weights = inputs.backend.kernel(q, k, v, allowed, bias, module.dropout.p if module.training else 0.0)
    if inputs.returns_weights and weights is None:
        weights = probabilities(q, k, allowed, bias)
    if has_keys is not None:
        context = context.masked_fill(~has_keys, 0)
        weights = weights.masked_fill(~has_keys, 0) if weights is not None else None
    return context.transpose(1, 2), weights if inputs.returns_weights else None
