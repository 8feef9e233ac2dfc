"""Layouts: how the tokens of one forward lie, in rows with padding or, in bertlite.stack.packed, without.

A forward chooses its layout once.  The layout knows where tokens stand, which are the first of their sequences, how to
attend among them, and the way back to what the caller gave.  Both have the same methods, so nobody asks which it is.

Shapes:  B sequences · S positions · K keys · T tokens · N heads · H head dim;  … is (B, S) or, packed, (T,)
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from bertlite.stack.attention import Backend
from bertlite.stack.kernels import ScoreBias, as_scores, probabilities
from bertlite.stack.masks import Mask, causal_mask, read_mask


class Attention(Protocol):
    """`Attend` that can also compute the first token of each sequence alone."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_bias: ScoreBias | None,
        dropout: float,
        module: nn.Module | None = ...,
        first: bool = ...,
    ) -> tuple[Tensor, Tensor | None]: ...


class Layout(Protocol):
    """The methods that both layouts have."""

    @property
    def gate_shape(self) -> tuple[int, int]:
        """(B, S) that a gate for each position would have; (B, 1) where there are no rows."""

    def pack_ids(self, x: Tensor | None) -> Tensor | None:
        """Take the tokens of indices or embeddings in rows, (B, S, …), or of (S,) for every row."""

    def positions(self, given: Tensor | None) -> Tensor | None:
        """Return where each token stands; None is from 0 on."""

    def gate(self, gate: Tensor) -> Tensor:
        """Lay out a gate, (B or 1, S or 1, N, 1), as the tokens are."""

    def backend_name(self, asked: str) -> str:
        """Return the backend's name, of the one that the model was told."""

    def attention(
        self, backend: Backend, weights: bool, mask: Tensor | None, heads: int, causal: bool, device: torch.device
    ) -> Attention:
        """Bind a backend to this layout and a mask, which is read here unless it has been.

        Args:
            weights: whether attention weights are returned.
            mask: as the user gave it.
            heads: as built, which a mask for each head must have.
            causal: whether queries look at no later key.
            device: where the tokens are.
        """

    def first(self, x: Tensor) -> Tensor:
        """Take the first token of each sequence, of (…, D) or of a gate."""

    def firsts(self) -> "Layout":
        """Return the layout of what `first` gives."""

    def pooler_rows(self, x: Tensor) -> Tensor:
        """Return rows, (B, 1 or S, D), that begin with the first token of each sequence."""

    def unpack(self, x: Tensor, fill: float = 0) -> Tensor:
        """Put tokens, (…, D), back as the caller's were, with `fill` for padding that was left out."""

    @property
    def packed_rows(self) -> tuple[int, int] | None:
        """(B, S) of the rows whose padding was left out; None where none was, or there were no rows."""

    def pack(self, x: Tensor) -> Tensor:
        """Take the tokens of values in rows, (B, S, …)."""

    def real(self) -> Tensor | None:
        """Return (B, S), False for padding that was left out; None where none was, or there were no rows."""


@dataclass(frozen=True)
class Padded:
    """Rows, (B, S, …), as the user gave them: padding is computed like any token, and looked at by none.

    Args:
        keys: how many each query may look at; those beyond the S are in a cache, before the first.
    """

    batch: int
    length: int
    keys: int
    device: torch.device
    mask_name: str = "attention_mask"

    @property
    def gate_shape(self) -> tuple[int, int]:
        return self.batch, self.length

    def pack_ids(self, x: Tensor | None) -> Tensor | None:
        return x

    def positions(self, given: Tensor | None) -> Tensor | None:
        past = self.keys - self.length
        return torch.arange(past, self.keys, device=self.device)[None] if given is None and past > 0 else given

    def gate(self, gate: Tensor) -> Tensor:
        return gate

    def backend_name(self, asked: str) -> str:
        return asked

    def attention(
        self, backend: Backend, weights: bool, mask: Tensor | None, heads: int, causal: bool, device: torch.device
    ) -> "RowAttention":
        lower = causal_mask(self.length, self.keys, device) if causal else None
        read = read_mask(mask, self.batch, self.length, self.keys, heads, lower, self.mask_name)
        return RowAttention(backend, read, weights)

    def first(self, x: Tensor) -> Tensor:  # (B, S, …) -> (B, 1, …)
        return x[:, :1]

    def firsts(self) -> "Padded":
        return self

    def pooler_rows(self, x: Tensor) -> Tensor:
        return x

    def unpack(self, x: Tensor, fill: float = 0) -> Tensor:
        return x

    packed_rows = None

    def pack(self, x: Tensor) -> Tensor:
        return x

    def real(self) -> Tensor | None:
        return None


@dataclass(eq=False)  # not frozen: torch 2.6 cannot compile a call of a value that is
class RowAttention:
    """Attention among rows, by a kernel that sees them head-first and never a query without a key."""

    backend: Backend
    mask: Mask
    weights: bool

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_bias: ScoreBias | None,
        dropout: float,
        module: nn.Module | None = None,
        first: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, S, N, H) and (B, K, N, H) -> context (B, S, N, H), and weights (B, N, S, K) if they were asked for.

        With `first` the query is each sequence's first token alone: S is 1.
        """
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = (self.mask.first() if first else self.mask).to(q.device)  # layers may be spread over devices
        allowed, bias, has_keys = mask.allowed, mask.bias, mask.has_keys
        if score_bias is not None:
            shift = score_bias(q, k, first)
            bias = shift if bias is None else shift + as_scores(bias, shift.dtype)
        context, weights = self.backend.kernel(q, k, v, allowed, bias, dropout)
        if self.weights and weights is None:
            weights = probabilities(q, k, allowed, bias)
        if has_keys is not None:
            context = context.masked_fill(~has_keys, 0)
            weights = weights.masked_fill(~has_keys, 0) if weights is not None else None
        return context.transpose(1, 2), weights if self.weights else None
