"""Masks as the parts of bertlite.hf hand them on.

Parts are called as transformers calls them, with an `attention_mask` that is added to the scores.  A model that runs
its own parts has read the mask and chosen the kernel once, for all layers: in the mask's place it hands on a
`SettledMask`, which holds both.  A part that is not ours, and a `forward` that somebody has put in the place of ours,
is given the tensor that transformers 4 would give it.

Shapes:  B sequences · S queries · K keys · N heads
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from bertlite.hf.attention import RegisteredAttention
from bertlite.stack.attention import BACKENDS
from bertlite.stack.kernels import as_scores
from bertlite.stack.layouts import RowAttention
from bertlite.stack.masks import Mask, causal_mask, masked
from bertlite.stack.modules import First

OURS = ("auto", "packed", "varlen")  # names that transformers does not know


@dataclass(frozen=True, eq=False)
class SettledMask:
    """A mask that has been read, and the attention that obeys it.

    Args:
        attend: the attention of a layer.
        rows: B and K.
        dtype: of the scores.
        device: of the mask's tensor.
        first: how the last layer computes the first token of each sequence alone, if it is to.
        source: what that layer attends to.
        weights: where layers that return none put their attention weights, if they are wanted.
    """

    attend: Any
    rows: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    first: First | None = None
    source: Tensor | None = None
    weights: list[Sequence[Tensor | None]] | None = None

    @property
    def has_tensor(self) -> bool:
        """True if another's part can be given a tensor."""
        whole = self.first is None and self.source is None
        return whole and isinstance(self.attend, RegisteredAttention | RowAttention)

    def tensor(self) -> Any:
        """Return the mask for a part that is not ours: scores to add, (B, 1, 1 or S, K), or what its function wants.

        The tensor remembers where it comes from: given to a part of ours, it means this mask.

        Raises:
            ValueError: padding is left out, or the first token of each sequence is computed alone.
        """
        if self.first is not None or self.source is not None:
            raise ValueError("first_token_only=True runs bertlite's own layers alone, and one has been replaced")
        if isinstance(self.attend, RegisteredAttention):
            return self.attend.mask
        if not isinstance(self.attend, RowAttention):
            raise ValueError("packed attention runs bertlite's own layers alone, and one was replaced; use 'sdpa'")
        scores = added_scores(self.attend.mask, self.rows, self.dtype, self.device)
        if not torch.compiler.is_compiling():
            scores.settled = self  # type: ignore[attr-defined]
        return scores


def added_scores(mask: Mask, rows: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a mask as scores to add, (B, 1, 1 or S, K)."""
    scores = torch.zeros(rows[0], 1, 1, rows[1], dtype=dtype, device=device)
    if mask.bias is not None:
        scores = scores + as_scores(mask.bias, dtype)
    if mask.allowed is not None:
        allowed = mask.allowed if mask.has_keys is None else mask.allowed & mask.has_keys
        scores = torch.where(allowed, scores, torch.finfo(dtype).min)
    return scores


def own(function: Any) -> Any:
    """Mark a `forward` that takes a `SettledMask`."""
    function.takes_settled_mask = True
    return function


def is_own(module: nn.Module) -> bool:
    """Return whether a module runs a `forward` of ours: not one of its own class, nor one that replaced ours."""
    return getattr(module.forward, "takes_settled_mask", False)


def mask_for(module: nn.Module, mask: Any) -> Any:
    """Return a mask in the form that a module takes."""
    if not isinstance(mask, SettledMask):
        return mask
    rows: Any = mask.rows[0]
    if isinstance(rows, Proxy):  # torch.fx traces with stand-ins: a part that it runs whole takes a tensor
        tracer: Any = rows.tracer
        return mask.tensor() if tracer.is_leaf_module(module, "") else mask
    if is_own(module):
        return mask
    wrapped = getattr(type(module).forward, "takes_settled_mask", False)  # a function around ours, which hands it on
    return mask if wrapped and not mask.has_tensor else mask.tensor()


def settled(mask: Any) -> SettledMask | None:
    """Return the settled mask that this one is, or was made from; None for the tensor of a caller."""
    return mask if isinstance(mask, SettledMask) else vars(mask).get("settled") if isinstance(mask, Tensor) else None


def settle(
    mask: Any, config: Any, x: Tensor, keys: int, output_attentions: bool | None = False, causal: bool = False
) -> SettledMask:
    """Return a mask as settled; the tensor of a caller means what it means in transformers.

    Args:
        mask: None, scores to add or, bool, what may be attended to; each broadcasts to (B, N, S, K).
        config: it names the attention.  "eager", or none, gives attention weights; "sdpa" only if they are wanted.
        x: the hidden states, (B, S, …).
        causal: of a decoder's self-attention, which transformers makes causal under "sdpa" if there is no mask.
    """
    known = settled(mask)
    if known is not None:
        return known
    name = config._attn_implementation
    rows = (x.shape[0], keys)
    if name is not None and name not in ("eager", "sdpa", *OURS):
        return SettledMask(RegisteredAttention(name, mask, bool(output_attentions)), rows, x.dtype, x.device)
    eager = name in (None, "eager") or bool(output_attentions)
    if mask is None:
        lower = causal_mask(x.shape[1], keys, x.device) if causal and not eager else None
        read = Mask(lower)
    else:
        read = masked(mask) if mask.dtype == torch.bool else Mask(bias=mask)
    return SettledMask(RowAttention(BACKENDS["eager" if eager else "sdpa"], read, eager), rows, x.dtype, x.device)
