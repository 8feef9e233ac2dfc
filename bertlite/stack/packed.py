"""The packed layout: tokens, (T, …), without padding, which leaves before the first layer and returns after the last.

Shapes:  B sequences · S positions · T tokens · N heads · H head dim · D hidden
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bertlite import torch_private
from bertlite.stack.attention import Backend
from bertlite.stack.kernels import ScoreBias
from bertlite.stack.masks import check_shape, read_ones, values_readable
from bertlite.stack.packing import MAX_FILL, MIN_POSITIONS, Packing

CPU = torch.device("cpu")


def packing_of(x: Tensor, mask: Tensor | None, name: str) -> Packing:
    """Return which tokens of x, (B, S, …), are real by a user's mask; None is all.

    Raises:
        ValueError: the mask is not (B, S), of 0 and 1; it names the backend.
    """
    if any(is_mapped(tensor) for tensor in (x, mask)):
        raise ValueError(f"backend {name!r} cannot run in torch.func.vmap, which cannot count tokens; use 'auto'")
    if mask is None:
        return Packing.of_full(x.shape[0], x.shape[1], x.device)
    if mask.dim() != 2:
        raise ValueError(f"backend {name!r} takes a 2-D attention_mask, not {mask.dim()}-D; use 'sdpa' or 'auto'")
    check_shape(mask, (x.shape[0], 1, x.shape[1], x.shape[1]), "attention_mask")
    return Packing.of_mask(read_ones(mask, "attention_mask").to(x.device))


def is_mapped(tensor: Tensor | None) -> bool:
    """Return whether torch.func.vmap runs over a tensor; torch.func.grad may have wrapped it again."""
    while tensor is not None and torch_private.is_wrapped(tensor):
        if torch_private.is_batched(tensor):
            return True
        tensor = torch_private.unwrapped(tensor)
    return False


def packing_that_pays(x: Tensor, mask: Tensor) -> Packing | None:
    """Return which tokens of x, (B, S, …), are real, where leaving padding out pays; None where it does not.

    It pays where the mask is 2-D, on the CPU, where reading it makes nobody wait, and has at least MIN_POSITIONS
    positions, of which at most MAX_FILL hold tokens; and every sequence must begin with a token.
    """
    if not (values_readable(mask) and mask.device == x.device == CPU and mask.dim() == 2):
        return None
    if mask.numel() < MIN_POSITIONS:
        return None
    check_shape(mask, (x.shape[0], 1, x.shape[1], x.shape[1]), "attention_mask")
    real = read_ones(mask, "attention_mask")
    pays = int(real.sum()) <= MAX_FILL * real.numel() and bool(real[:, 0].all())
    return Packing.of_mask(real) if pays else None


def packing_from_first(x: Tensor, mask: Tensor | None) -> Packing | None:
    """Return which tokens of x, (B, S, …), are real, if a 2-D mask says so and each sequence begins with one."""
    if mask is None or mask.dim() != 2:
        return None
    check_shape(mask, (x.shape[0], 1, x.shape[1], x.shape[1]), "attention_mask")
    real = read_ones(mask, "attention_mask")
    packing = Packing.of_mask(real)
    return packing if packing.indices is None or bool(real[:, 0].all()) else None


@dataclass(frozen=True)
class Packed:
    """Tokens, (T, …), without padding; see `bertlite.stack.layouts.Layout`."""

    packing: Packing

    @property
    def gate_shape(self) -> tuple[int, int]:
        return self.packing.shape or (len(self.packing.lengths), 1)

    def pack_ids(self, x: Tensor | None) -> Tensor | None:
        return self.packing.pack_ids(x)

    def positions(self, given: Tensor | None) -> Tensor | None:
        return self.packing.positions() if given is None else self.packing.pack_ids(given)

    def gate(self, gate: Tensor) -> Tensor:  # -> (T or 1, N, 1)
        if gate.shape[:2] == (1, 1):
            return gate[0]
        if self.packing.shape is None:
            return self.packing.repeat(gate[:, 0])
        return self.packing.pack(gate)

    def backend_name(self, asked: str) -> str:
        return "packed" if asked == "auto" else asked

    def attention(self, backend: Backend, *_: Any) -> "PackedAttention":
        return PackedAttention(backend, self.packing)

    def first(self, x: Tensor) -> Tensor:  # (T, …) -> (sequences that have a token, …); a gate for all stays one
        return x if x.shape[0] == 1 != self.packing.tokens else self.packing.first(x)

    def firsts(self) -> "PackedFirsts":
        return PackedFirsts(self.packing)

    def pooler_rows(self, x: Tensor) -> Tensor:  # (T, D) -> (B, 1, D)
        return self.packing.unpack_first(self.packing.first(x))[:, None]

    def unpack(self, x: Tensor, fill: float = 0) -> Tensor:  # (T, …) -> (B, S, …)
        return self.packing.unpack(x, fill)

    @property
    def packed_rows(self) -> tuple[int, int] | None:
        return self.packing.shape

    def pack(self, x: Tensor) -> Tensor:
        return self.packing.pack(x)

    def real(self) -> Tensor | None:
        if self.packing.shape is None:
            return None
        return self.packing.unpack(torch.ones(self.packing.tokens, dtype=torch.bool, device=self.packing.device))


@dataclass(frozen=True)
class PackedFirsts(Packed):
    """The first token of each sequence that has one, after the last layer of a packed forward."""

    def pooler_rows(self, x: Tensor) -> Tensor:
        return self.packing.unpack_first(x)[:, None]

    def unpack(self, x: Tensor, fill: float = 0) -> Tensor:  # -> (B, 1, D), or (B, D) where there are no rows
        firsts = self.packing.unpack_first(x)
        return firsts if self.packing.shape is None else firsts[:, None]


@dataclass(frozen=True)
class PackedAttention:
    """Attention among packed tokens: a sequence attends to itself."""

    backend: Backend
    packing: Packing

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_bias: ScoreBias | None,
        dropout: float,
        module: nn.Module | None = None,
        first: bool = False,
    ) -> tuple[Tensor, None]:
        """(T, N, H) -> context (T, N, H); with `first` the queries are each sequence's first token, if it has one."""
        if not q.shape[0]:
            return torch.cat([q, k, v]), None  # of no tokens, with the gradients of all three
        if score_bias is not None and not self.packing.is_contiguous:
            raise ValueError(
                "padding between the tokens of a sequence shifts relative positions, and packed it is gone;"
                " use attn_implementation='sdpa' or 'eager'"
            )
        return self.backend.kernel(q, k, v, self.packing, score_bias, dropout, first), None
