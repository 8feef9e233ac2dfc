"""Attention functions that are registered with transformers, and its 0/1 masks as scores."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bertlite.stack.kernels import ScoreBias


@dataclass(frozen=True)
class RegisteredAttention:
    """Attention by a function registered with transformers, called as transformers calls it."""

    name: str
    mask: Any  # in the form that the function wants
    weights: bool

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_bias: ScoreBias | None = None,
        dropout: float = 0.0,
        module: nn.Module | None = None,
        first: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if first:
            raise ValueError(f"attention {self.name!r} cannot do first_token_only=True; use eager, sdpa or packed")
        if score_bias is not None:
            raise ValueError(f"attention {self.name!r} cannot add relative positions to the scores; use eager or sdpa")
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if not q.shape[1]:  # a layer without heads; not every function runs on none
            return q.transpose(1, 2), q.new_zeros(*q.shape[:-1], k.shape[2]) if self.weights else None
        function = ALL_ATTENTION_FUNCTIONS[self.name]
        context, weights = function(module, q, k, v, self.mask, dropout=dropout, scaling=q.shape[-1] ** -0.5)
        if self.weights and weights is None:
            raise ValueError(f"attention {self.name!r} cannot give attentions; use eager or sdpa")
        return context, weights if self.weights else None


def additive_scores(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a 0/1 mask, (B, K) or (B, S, K), as scores to add, (B, 1, 1 or S, K)."""
    if mask.dim() not in (2, 3):
        raise ValueError(f"the mask has shape {tuple(mask.shape)}; expected (batch, keys) or (batch, queries, keys)")
    mask = mask[:, None] if mask.dim() == 3 else mask[:, None, None]
    scores = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return scores.masked_fill(mask == 0, torch.finfo(dtype).min)
