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
from torch import Tensor, nn
from torch.nn import functional as F

ScoreBias = Callable[
    [Tensor, Tensor], Tensor
]  # (B, N, S, H), (B, N, K, H) -> (B, N, S, K), added to the scaled scores


class Attend(Protocol):
    """What a layer receives: attention with the mask, the backend and the layout already settled.

    `asker` is the module that attends; functions registered with transformers want to see it, our own do not.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_bias: ScoreBias | None = None,
        dropout: float = 0.0,
        asker: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True)
class Mask:
    """What each query may look at; every field broadcasts to (B, N, S, K), and None restricts nothing."""

    allowed: Tensor | None = None  # bool; never a row of False, see `answered`
    bias: Tensor | None = None  # float, added to the scores
    answered: Tensor | None = None  # bool, (…, S, 1): False for a query with nothing to attend to

    def to(self, device: torch.device) -> "Mask":
        parts = (self.allowed, self.bias, self.answered)
        if all(part is None or part.device == device for part in parts):
            return self
        return Mask(*(None if part is None else part.to(device) for part in parts))


def read_mask(
    mask: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    heads: int,
    triangle: Tensor | None = None,
    name: str = "attention_mask",
) -> Mask:
    """Understand a user's attention mask.

    Args:
        mask: (B, K), or (B, S, K), of 0 and 1 in any dtype; or 4-D, broadcasting to (B, heads, S, K), either bool or
            floats to add to the scores, where -inf and the dtype's lowest number forbid.
        triangle: (S, K), what a decoder's queries may look at; joined to a 2-D mask or none.  A mask for every query
            says itself what it may look at.

    Raises:
        ValueError: any other rank, shape, dtype or value.
    """
    if mask is None:
        return Mask(triangle)
    if isinstance(mask, Tensor):  # torch.fx traces with stand-ins
        check_shape(mask, (batch, heads, queries, keys), name)
    if mask.dim() == 4:
        return read_scores(mask, name)
    allowed = read_ones(mask, name)
    if mask.dim() == 3:
        return masked(allowed[:, None])
    return masked(allowed[:, None, None] if triangle is None else allowed[:, None, None] & triangle)


def check_shape(mask: Tensor, full: tuple[int, int, int, int], name: str) -> None:
    """Refuse a mask that fits neither (B, K) nor (B, S, K) nor, an axis of 1 serving for any, (B, heads, S, K)."""
    batch, _, queries, keys = full
    shape = tuple(mask.shape)
    if mask.dim() == 4:
        if any(have not in (1, want) for have, want in zip(shape, full, strict=True)):
            raise ValueError(f"{name} has shape {shape}, which does not fit {full}")
        return
    fits = {2: ((batch, keys),), 3: ((batch, queries, keys), (batch, 1, keys))}.get(mask.dim())
    if fits is None:
        raise ValueError(f"{name} has {mask.dim()} dimensions, shape {shape}; expected 2, 3 or 4")
    if shape not in fits:
        raise ValueError(f"{name} has shape {shape}; expected {' or '.join(map(str, fits))}")


def read_ones(mask: Tensor, name: str) -> Tensor:
    """A mask of 1 (attend) and 0 (do not), in any dtype, as bool."""
    if mask.dtype == torch.bool:
        return mask
    if mask.is_complex():
        raise ValueError(f"{name} is {mask.dtype}; use bool, integers or floats of 0 and 1")
    allowed = mask != 0
    if concrete(mask) and not bool((mask == allowed).all()):
        raise ValueError(
            f"{name} holds {mask[mask != allowed][0].item()}: a {mask.dim()}-D mask holds 1 (attend) and 0 (do not);"
            " pass additive scores as a 4-D float mask"
        )
    return allowed


def read_scores(mask: Tensor, name: str) -> Mask:
    """A 4-D mask, bool or added to the scores."""
    if mask.dtype == torch.bool:
        return masked(mask)
    if not mask.is_floating_point():
        raise ValueError(f"a 4-D {name} is bool or additive floats, not {mask.dtype}; use mask.bool()")
    if concrete(mask) and bool((mask == 1).any()) and bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"a 4-D float {name} is added to the scores, but this one holds 0 and 1; use mask.bool()")
    if concrete(mask) and bool((mask.isnan() | mask.isposinf()).any()):
        raise ValueError(f"{name} holds nan or +inf; scores are finite, or -inf to forbid")
    allowed = mask > torch.finfo(mask.dtype).min
    return masked(allowed, bias=mask.masked_fill(~allowed, 0))


def masked(allowed: Tensor, bias: Tensor | None = None) -> Mask:
    """Set apart the queries that may look at nothing, and drop what restricts nothing."""
    if concrete(allowed) and bool(allowed.all()):
        return Mask(bias=bias)
    answered = allowed.any(-1, keepdim=True)
    if concrete(allowed) and bool(answered.all()):
        return Mask(allowed, bias)
    return Mask(allowed | ~answered, bias, answered)  # such a query looks at everything, for now: no kernel sees -inf


def triangle(queries: int, keys: int, device: torch.device) -> Tensor | None:
    """(S, K), True where a query, one of the last S of K positions, is not before the key; None for a lone query."""
    if queries == 1:
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def concrete(tensor: Tensor) -> bool:
    """Whether values may steer Python: not while a graph is traced or captured, or without values at all."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() or not isinstance(tensor, Tensor):
        return False  # torch.fx traces with stand-ins
    if tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


# Kernels: head-first q, k, v; scale is 1 / sqrt(H).


def as_scores(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias in the scores' dtype; what is too large for it stays finite, since a row of -inf would be nan."""
    if bias.dtype == dtype:
        return bias
    limit = torch.finfo(dtype).max / 2
    return bias.to(dtype).clamp(-limit, limit)


def probabilities(q: Tensor, k: Tensor, allowed: Tensor | None, bias: Tensor | None) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + as_scores(bias, scores.dtype)
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
        mask = as_scores(bias, q.dtype)
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
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_bias: ScoreBias | None = None,
        dropout: float = 0.0,
        asker: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, S, N, H) and (B, K, N, H) -> context (B, S, N, H), and weights (B, N, S, K) if they were asked for."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = self.mask.to(q.device)  # layers may be spread over devices
        allowed, bias, answered = mask.allowed, mask.bias, mask.answered
        if score_bias is not None:
            shift = score_bias(q, k)
            bias = shift if bias is None else shift + as_scores(bias, shift.dtype)
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
