"""Attention: what a query may look at, the kernels that compute it, and the table that picks among them.

Shapes:  B sequences · S queries · K keys · N heads · H head dim · T tokens.  Modules hand over q, k, v token-first,
(B, S, N, H) or, packed, (T, N, H); kernels see them head-first, (B, N, S, H).

One rule for a query with nothing to attend to: its weights are all zero, and so is its context, in every backend and
dtype.  Its layer then gives it the output bias alone, as a layer does that has no heads.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertlite.stack.masks import Mask
from bertlite.stack.packing import Packing

ScoreBias = Callable[
    [Tensor, Tensor, bool], Tensor
]  # (B, N, S, H), (B, N, K, H) -> (B, N, S, K), added to the scaled scores; the queries are the keys' last, or first


class Attend(Protocol):
    """What a layer receives: attention with the mask, the backend and the layout already settled.

    `asker` is the module that attends; functions registered with transformers want to see it, our own do not.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_bias: ScoreBias | None,
        dropout: float,
        asker: nn.Module | None = ...,
    ) -> tuple[Tensor, Tensor | None]: ...


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

    def unpack(self, x: Tensor) -> Tensor:
        return x

    def first(self, x: Tensor) -> Tensor:  # (B, S, …) -> (B, 1, …)
        """Of every sequence the first token; of gates, (1 or B, 1 or S, N, 1), its own."""
        return x[:, :1]

    def gate(self, gate: Tensor) -> Tensor:
        return gate

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_bias: ScoreBias | None,
        dropout: float,
        asker: nn.Module | None = None,
        first: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, S, N, H) and (B, K, N, H) -> context (B, S, N, H), and weights (B, N, S, K) if they were asked for.

        With `first` the query is each sequence's first token alone: S is 1.
        """
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = (self.mask.first() if first else self.mask).to(q.device)  # layers may be spread over devices
        allowed, bias, answered = mask.allowed, mask.bias, mask.answered
        if score_bias is not None:
            shift = score_bias(q, k, first)
            bias = shift if bias is None else shift + as_scores(bias, shift.dtype)
        context, weights = self.kernel(q, k, v, allowed, bias, dropout)
        if self.weights and weights is None:
            weights = probabilities(q, k, allowed, bias)
        if answered is not None:
            context = context.masked_fill(~answered, 0)
            weights = weights.masked_fill(~answered, 0) if weights is not None else None
        return context.transpose(1, 2), weights if self.weights else None


class Packed:
    """The layout (T, …) without padding: it leaves before the first layer and returns, as zeros, after the last.

    A sequence attends to itself.  On CUDA in half precision `varlen_attn` reads the sequences where they are;
    elsewhere they are padded again for SDPA alone, in the groups of `bertlite.stack.packing.grouped`.
    """

    def __init__(self, kernel: Kernel, packing: Packing) -> None:
        self.kernel, self.packing = kernel, packing

    def unpack(self, x: Tensor) -> Tensor:  # (T, …) -> (B, S, …)
        return self.packing.unpack(x)

    def first(self, x: Tensor) -> Tensor:  # (T, …) -> (sequences that have a token, …)
        """Of every sequence that has one the first token; of gates, (1 or T, N, 1), its own."""
        return x if x.shape[0] == 1 != self.packing.tokens else self.packing.first(x)

    def gate(self, gate: Tensor) -> Tensor:
        """(B or 1, S or 1, N, 1) -> (T or 1, N, 1)."""
        if gate.shape[:2] == (1, 1):
            return gate[0]
        if self.packing.shape is None:
            return self.packing.repeat(gate[:, 0])
        return self.packing.pack(gate)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_bias: ScoreBias | None,
        dropout: float,
        asker: nn.Module | None = None,
        first: bool = False,
    ) -> tuple[Tensor, None]:
        """(T, N, H) -> context (T, N, H); with `first` the queries are each sequence's first token, if it has one."""
        if not q.shape[0]:
            return torch.cat([q, k, v]), None  # of no tokens, with the gradients of all three
        if score_bias is not None and not self.packing.unbroken:
            raise ValueError(
                "padding between the tokens of a sequence shifts relative positions, and packed it is gone;"
                " use attn_implementation='sdpa' or 'eager'"
            )
        if q.is_cuda:
            lacks = varlen_lacks(q.dtype, q.shape[-1], dropout, score_bias)
            if lacks is None:
                return varlen(q, k, v, self.packing, first), None
            warnings.warn(f"packed attention runs as groups of padded sequences: {lacks}", stacklevel=2)
        return self.in_groups(q, k, v, score_bias, dropout, first), None

    def in_groups(
        self, q: Tensor, k: Tensor, v: Tensor, score_bias: ScoreBias | None, dropout: float, first: bool
    ) -> Tensor:
        groups = self.packing.groups
        k, v = groups.spread(k), groups.spread(v)
        q = groups.spread(q) if not first else q if groups.order is None else q.index_select(0, groups.order)
        contexts, row = [], 0
        for group in groups.groups:
            places = slice(row, row + group.sequences) if first else group.places
            row += group.sequences
            heads = [
                x.unflatten(0, (group.sequences, -1)).transpose(1, 2)
                for x in (q[places], k[group.places], v[group.places])
            ]
            bias = None if score_bias is None else score_bias(heads[0], heads[1], True)
            context, _ = self.kernel(heads[0], heads[1], heads[2], group.real, bias, dropout)  # (sequences, N, S, H)
            contexts.append(context.transpose(1, 2).flatten(0, 1))
        context = torch.cat(contexts) if len(contexts) > 1 else contexts[0]
        if not first:
            return groups.gather(context)
        return context if groups.rank is None else context.index_select(0, groups.rank)


def varlen_lacks(dtype: torch.dtype, head_dim: int, dropout: float, score_bias: ScoreBias | None) -> str | None:
    """What keeps `torch.nn.attention.varlen.varlen_attn` from computing this attention; None if nothing does."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen; 2.10 does"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"varlen_attn takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim % 8 or head_dim > 256:
        return f"varlen_attn takes head dims that are multiples of 8 up to 256, not {head_dim}"
    if dropout:
        return "varlen_attn has no dropout; attention_probs_dropout_prob=0 turns it off"
    if score_bias is not None:
        return "varlen_attn cannot add relative positions to the scores"
    return None


def varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, first: bool) -> Tensor:
    """Attention of packed sequences where they are, on CUDA in half precision."""
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = packing.filled_ends, max(packing.lengths)
    if first:
        ones = torch.arange(len(ends), dtype=torch.int32, device=ends.device)
        context = varlen_attn(q, k, v, ones, ends, 1, longest)
    else:
        context = varlen_attn(q, k, v, ends, ends, longest, longest)
    assert isinstance(context, Tensor)  # not a pair: no log-sum-exp was asked for
    return context


Layout = Padded | Packed


@dataclass(frozen=True)
class Backend:
    """One way to compute attention, and what it can do."""

    name: str
    layout: type[Padded] | type[Packed]
    kernel: Kernel
    gives_weights: bool = True
    gives_dropped_weights: bool = False  # the weights after dropout, which is what the context was made from


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("eager", Padded, eager, gives_dropped_weights=True),
        Backend("sdpa", Padded, sdpa),
        Backend("packed", Packed, sdpa, gives_weights=False),
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
    if weights and not backend.gives_weights:
        raise ValueError(f"backend {name!r} cannot give attentions; use 'eager' or 'auto'")
    if weights and dropout and not backend.gives_dropped_weights:
        raise ValueError(
            f"backend {name!r} cannot give attentions while attention dropout is on; use 'eager' or 'auto'"
        )
    return backend
