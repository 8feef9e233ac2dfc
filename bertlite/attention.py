"""Attention: what a query may look at, the kernels that compute it, and the table that picks among them.

Shapes:  B sequences · S queries · K keys · N heads · H head dim.  Modules hand over q, k, v token-first, (B, S, N, H);
kernels see them head-first, (B, N, S, H).

One rule for a query with nothing to attend to: its weights are all zero, and so is its context, in every backend and
dtype.  Its layer then gives it the output bias alone, as a layer does that has no heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

ScoreBias = Callable[
    [Tensor, Tensor], Tensor
]  # (B, N, S, H), (B, N, K, H) -> (B, N, S, K), added to the scaled scores


class Attend(Protocol):
    """What a layer receives: attention with the mask, the backend and the layout already settled."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, score_bias: ScoreBias | None = None, dropout: float = 0.0
    ) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True)
class Mask:
    """What each query may look at; every field broadcasts to (B, N, S, K), and None restricts nothing."""

    allowed: Tensor | None = None  # bool; never a row of False, see `answered`
    bias: Tensor | None = None  # float, added to the scores
    answered: Tensor | None = None  # bool, (…, S, 1): False for a query with nothing to attend to


def read_mask(attention_mask: Tensor | None, batch: int, queries: int, keys: int, heads: int) -> Mask:
    """Understand a user's attention mask.

    Args:
        attention_mask: (B, K), or (B, S, K), of 0 and 1 in any dtype; or 4-D, broadcasting to (B, heads, S, K), either
            bool or floats to add to the scores, where -inf and the dtype's lowest number forbid.

    Raises:
        ValueError: any other rank, shape, dtype or value.
    """
    if attention_mask is None:
        return Mask()
    mask, shape = attention_mask, tuple(attention_mask.shape)
    fits = {2: ((batch, keys),), 3: ((batch, queries, keys), (batch, 1, keys))}.get(mask.dim())
    if fits is not None:
        if shape not in fits:
            raise ValueError(f"attention_mask has shape {shape}; expected {' or '.join(map(str, fits))}")
        if mask.is_complex():
            raise ValueError(f"attention_mask is {mask.dtype}; use bool, integers or floats of 0 and 1")
        allowed = mask if mask.dtype == torch.bool else mask != 0
        if allowed is not mask and concrete(mask) and not bool((mask == allowed).all()):
            wrong = mask[mask != allowed][0].item()
            raise ValueError(
                f"attention_mask holds {wrong}: a {mask.dim()}-D mask holds 1 (attend) and 0 (do not);"
                " pass additive scores as a 4-D float mask"
            )
        return masked(allowed[:, None, None, :] if mask.dim() == 2 else allowed[:, None], bias=None)
    if mask.dim() != 4:
        raise ValueError(f"attention_mask has {mask.dim()} dimensions, shape {shape}; expected 2, 3 or 4")
    if any(have not in (1, want) for have, want in zip(shape, (batch, heads, queries, keys), strict=True)):
        raise ValueError(f"attention_mask has shape {shape}, which does not fit {(batch, heads, queries, keys)}")
    if mask.dtype == torch.bool:
        return masked(mask, bias=None)
    if not mask.is_floating_point():
        raise ValueError(f"a 4-D attention_mask is bool or additive floats, not {mask.dtype}; use mask.bool()")
    if concrete(mask) and bool((mask == 1).any()) and bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            "a 4-D float attention_mask is added to the scores, but this one holds 0 and 1; use mask.bool()"
        )
    allowed = mask > torch.finfo(mask.dtype).min  # False for nan too: a nan score forbids
    return masked(allowed, bias=mask.masked_fill(~allowed, 0))


def masked(allowed: Tensor, bias: Tensor | None) -> Mask:
    """Set apart the queries that may look at nothing, and drop what restricts nothing."""
    if concrete(allowed) and bool(allowed.all()):
        return Mask(bias=bias)
    answered = allowed.any(-1, keepdim=True)
    if concrete(allowed) and bool(answered.all()):
        return Mask(allowed, bias)
    return Mask(allowed | ~answered, bias, answered)  # such a query looks at everything, for now: no kernel sees -inf


def concrete(tensor: Tensor) -> bool:
    """Whether values may steer Python: not while a graph is traced or captured, or without values at all."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() or tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


# Kernels: head-first q, k, v; scale is 1 / sqrt(H).


def probabilities(q: Tensor, k: Tensor, allowed: Tensor | None, bias: Tensor | None) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if allowed is not None:
        scores = scores.masked_fill(
            ~allowed, torch.finfo(scores.dtype).min
        )  # not -inf: it breeds nan in half precision
    return scores.softmax(-1)  # (B, N, S, K)


def eager(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor | None]:
    weights = probabilities(q, k, allowed, bias)
    if dropout:
        weights = F.dropout(weights, dropout)
    return torch.matmul(weights, v), weights


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor | None]:
    mask = allowed
    if bias is not None:
        mask = bias.to(q.dtype)
        if allowed is not None:
            mask = mask.masked_fill(~allowed, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout), None


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float], tuple[Tensor, Tensor | None]]


class Padded:
    """The layout (B, S, …) that the user gave: padding is computed like any token, and looked at by none."""

    def __init__(self, kernel: Kernel, mask: Mask, weights: bool) -> None:
        self.kernel, self.mask, self.weights = kernel, mask, weights

    def pack(self, x: Tensor) -> Tensor:
        return x

    def unpack(self, x: Tensor) -> Tensor:
        return x

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, score_bias: ScoreBias | None = None, dropout: float = 0.0
    ) -> tuple[Tensor, Tensor | None]:
        """(B, S, N, H) and (B, K, N, H) -> context (B, S, N, H), and weights (B, N, S, K) if they were asked for."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        allowed, bias, answered = self.mask.allowed, self.mask.bias, self.mask.answered
        if score_bias is not None:
            shift = score_bias(q, k)
            bias = shift if bias is None else shift + bias.to(shift.dtype)
        context, weights = self.kernel(q, k, v, allowed, bias, dropout)
        if self.weights and weights is None:
            weights = probabilities(q, k, allowed, bias)
        if answered is not None:
            context = context.masked_fill(~answered, 0)
            weights = weights.masked_fill(~answered, 0) if weights is not None else None
        return context.transpose(1, 2), weights if self.weights else None


@dataclass(frozen=True)
class Backend:
    """One way to compute attention, and what it can do."""

    name: str
    layout: type[Padded]
    kernel: Kernel
    gives_dropped_weights: bool = False  # the weights after dropout, which is what the context was made from


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("eager", Padded, eager, gives_dropped_weights=True),
        Backend("sdpa", Padded, sdpa),
    )
}


def select(name: str, weights: bool, dropout: bool) -> Backend:
    """The backend for one forward; only "auto" chooses.

    Args:
        weights: whether attention weights are asked for.
        dropout: whether attention dropout is live.

    Raises:
        ValueError: the name is unknown, or its backend cannot give what is asked.
    """
    if name == "auto":
        return BACKENDS["eager" if weights else "sdpa"]
    if name not in BACKENDS:
        raise ValueError(f"attn_implementation {name!r} is unknown; have: auto, {', '.join(BACKENDS)}")
    backend = BACKENDS[name]
    if weights and dropout and not backend.gives_dropped_weights:
        raise ValueError(
            f"backend {name!r} cannot give attentions while attention dropout is on; use 'eager' or 'auto'"
        )
    return backend
