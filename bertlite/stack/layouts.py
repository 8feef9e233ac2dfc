"""Layouts of the tokens of one forward: in rows with padding or, packed, without padding.

A forward chooses its layout once.  The layout knows the places of tokens, the first token of each sequence, and the
way back to the caller's rows.  Both layouts have the same methods, so no code needs to know which it is.  Packing
removes padding before the first layer; unpacking puts it back, as zeros, after the last.

Shapes:  B sequences · S positions · K keys · N heads · T tokens, of all sequences together;  … is (B, S) or (T,)
         P slots: the tokens grouped for attention, each group padded to its longest sequence
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bertlite.stack.inputs import check_shape, to_bool_mask
from bertlite.support import torch_private

# The fastest values that were tried at bert-base's shape on an AMD EPYC with AVX-512.
MAX_FILL = 0.8  # if more of the positions hold tokens, moving them costs as much as it saves
MIN_POSITIONS = 64  # packing does not pay in a smaller batch
CPU = torch.device("cpu")
CALL_COST = 1024  # the cost of one more call of SDPA, in scores of one head: see `group_lengths`


@dataclass(frozen=True)
class Padded:
    """Rows, (B, S, …), as the user gave them: padding is computed like any token, and no token attends to it.

    Args:
        keys: the number of keys for each query; if above S, the first ones are in a cache.
    """

    batch: int
    length: int
    keys: int
    device: torch.device
    mask_name: str = "attention_mask"

    packs: ClassVar[bool] = False

    @property
    def gate_shape(self) -> tuple[int, int]:
        return self.batch, self.length

    def pack_inputs(
        self, ids: Tensor | None, types: Tensor | None, positions: Tensor | None, embeds: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the inputs of the embeddings; if positions are None, they count from 0."""
        if positions is None and self.keys > self.length:
            positions = torch.arange(self.keys - self.length, self.keys, device=self.device)[None]
        return ids, types, positions, embeds

    def gate(self, gate: Tensor) -> Tensor:
        return gate

    def pack(self, x: Tensor) -> Tensor:
        return x

    def unpack(self, x: Tensor, fill: float = 0) -> Tensor:
        return x

    def first(self, x: Tensor) -> Tensor:  # (B, S, …) -> (B, 1, …)
        """Take the first token of each sequence."""
        return x[:, :1]

    def first_token_layout(self) -> "Padded":
        """Return the layout of the tokens that `first` returns."""
        return self

    def pooler_rows(self, x: Tensor, pooler: Any = None, mask: Tensor | None = None) -> Tensor:
        """Return rows, (B, 1 or S, D), that begin with the first token of each sequence, or with the tokens' mean."""
        if getattr(pooler, "skips_padding", False) and mask is not None and mask.dim() == 2:
            first = to_bool_mask(mask, self.mask_name).int().argmax(-1)[:, None, None]
            return x.gather(1, first.expand(-1, 1, x.shape[-1]))
        return self.mean(x, mask) if getattr(pooler, "means", False) else x

    def mean(self, x: Tensor, mask: Tensor | None) -> Tensor:  # (B, S, D) -> (B, 1, D)
        """Return the mean of the tokens of each sequence, which a mask of 2 dimensions tells from padding."""
        if mask is None:
            return x.mean(1, keepdim=True)
        if mask.dim() != 2:
            raise ValueError(f"pooling 'mean' takes a 2-D {self.mask_name}, not {mask.dim()}-D: it names the tokens")
        real = to_bool_mask(mask, self.mask_name)[..., None]
        return (x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)

    def real(self) -> Tensor | None:
        """Return (B, S), False for padding that was left out; None if none was."""
        return None


class Group(NamedTuple):
    """Sequences that attend in one call, padded to the longest of them."""

    slots: int  # how many of the P slots it has, after the slots of earlier groups
    sequences: int
    real: Tensor | None  # (sequences, 1, 1, length) bool, None if all are


@dataclass(frozen=True)
class Groups:
    """All sequences in groups, and the moves to the slots and back; None if nothing moves."""

    groups: tuple[Group, ...]
    rank: Tensor | None = None  # for each sequence that has a token, its place in the order of the groups
    token_at: Tensor | None = None  # (P,), the token in each slot; any token for padding
    slot_of: Tensor | None = None  # (T,), the slot of each token

    def spread(self, x: Tensor) -> Tensor:  # (T, …) -> (P, …)
        return x if self.token_at is None else x.index_select(0, self.token_at)

    def gather(self, x: Tensor) -> Tensor:  # (P, …) -> (T, …)
        return x if self.slot_of is None else x.index_select(0, self.slot_of)


@dataclass(frozen=True)
class Packed:
    """The real tokens of a batch, (T, …); it has the methods of `Padded`.

    Args:
        lengths: the lengths of the B sequences, in tokens.
        counts: (B,), the same on the device of the tokens, so that they need not be sent again.
        shape: the shape to unpack to: rows, (B, S), or (T,) if the input was packed.
        indices: (T,), the index of each token in the flattened rows; None without padding or without rows.
    """

    lengths: tuple[int, ...]
    counts: Tensor
    shape: tuple[int, ...]
    indices: Tensor | None = None
    packs: ClassVar[bool] = True

    @classmethod
    def of_mask(cls, real: Tensor) -> "Packed":
        """Pack rows whose real tokens have a 1 or True in `real`, (B, S)."""
        counts, shape = real.sum(-1), tuple(real.shape)
        lengths = tuple(counts.tolist())
        if sum(lengths) == real.numel():
            return cls(lengths, counts, shape)
        if real.is_cpu:
            return cls(lengths, counts, shape, real.flatten().nonzero().squeeze(-1))
        order = real.flatten().byte().argsort(descending=True, stable=True)  # `nonzero` would wait to count them again
        return cls(lengths, counts, shape, order[: sum(lengths)])

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def keys(self) -> int:
        """The length of the longest sequence."""
        return max(self.lengths, default=0)

    @property
    def in_rows(self) -> bool:
        """True if the tokens are unpacked to rows, False if the input was packed."""
        return len(self.shape) == 2

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Return (B + 1,) int32: the start of each sequence, and the end of the last one."""
        return torch.cat([self.counts.new_zeros(1), self.counts]).cumsum(0, dtype=torch.int32)

    @cached_property
    def nonempty(self) -> Tensor | None:
        """Return which sequences have a token; None if all have."""
        if all(self.lengths):  # torch.compile keeps no guard on `0 in lengths`
            return None
        return self.tensor([i for i, n in enumerate(self.lengths) if n])

    @cached_property
    def nonempty_ends(self) -> Tensor:
        """Return `cu_seqlens` of the sequences that have a token."""
        if self.nonempty is None:
            return self.cu_seqlens
        return torch.cat([self.cu_seqlens[:1], self.cu_seqlens[1:][self.nonempty]])

    @property
    def gate_shape(self) -> tuple[int, int]:
        """The (B, S) of a gate for each position; (B, 1) if there are no rows."""
        return len(self.lengths), self.shape[1] if self.in_rows else 1

    def gate(self, gate: Tensor) -> Tensor:
        """Lay out a gate, (B or 1, S or 1, N, 1), like the tokens: (T or 1, N, 1)."""
        if gate.shape[:2] == (1, 1):
            return gate[0]
        return self.pack(gate) if self.in_rows else self.repeat(gate[:, 0])

    def pack(self, x: Tensor, fill: float = 0) -> Tensor:
        """Take the real tokens, (T, …), from rows (B or 1, S or 1, …) or (S,); `fill` is for `Slots`."""
        if not self.in_rows:
            return x
        x = x.expand(*self.shape, *x.shape[2:]).flatten(0, 1)
        return x if self.indices is None else x.index_select(0, self.indices)

    def unpack(self, x: Tensor, fill: float = 0) -> Tensor:
        """Put tokens, (T, …), back into rows, (B, S, …), with zeros, or `fill`, for padding."""
        if self.indices is not None:
            x = x.new_full((math.prod(self.shape), *x.shape[1:]), fill).index_copy(0, self.indices, x)
        return x.unflatten(0, self.shape) if self.in_rows else x

    def first(self, x: Tensor) -> Tensor:
        """Take the first token of every sequence that has one from (T, …); a gate for all tokens stays as it is."""
        if x.shape[0] == 1 and self.tokens != 1:  # a gate for all tokens
            return x
        if self.indices is None and self.in_rows:
            return x[:: max(self.shape[1], 1)]  # a view
        return x.index_select(0, self.nonempty_ends[:-1])

    def first_token_layout(self) -> "Packed":
        """Return the layout of the tokens that `first` returns: rows with one position, or one token each."""
        lengths, counts = tuple(min(n, 1) for n in self.lengths), self.counts.clamp(max=1)
        return Packed(lengths, counts, (len(lengths), 1)[: len(self.shape)], self.nonempty)

    def pooler_rows(self, x: Tensor, pooler: Any = None, mask: Tensor | None = None) -> Tensor:
        """Return rows, (B, 1, D): the first token of each sequence, or the mean of its tokens."""
        rows = self.mean(x) if getattr(pooler, "means", False) else self.first_token_layout().unpack(self.first(x))
        return rows if self.in_rows else rows[:, None]

    def mean(self, x: Tensor) -> Tensor:  # (T, D) -> (B, 1, D) or, without rows, (B, D)
        """Return the mean of the tokens of each sequence."""
        counts = self.counts.clamp(min=1)[:, None]
        if self.in_rows:
            return (self.unpack(x).sum(1) / counts)[:, None]
        rows = self.repeat(torch.arange(len(counts), device=x.device))
        return x.new_zeros(len(counts), x.shape[-1]).index_add(0, rows, x) / counts

    def real(self) -> Tensor | None:
        """Return (B, S), False for padding; None if there were no rows."""
        return (
            self.unpack(torch.ones(self.tokens, dtype=torch.bool, device=self.counts.device)) if self.in_rows else None
        )

    def pack_inputs(
        self, ids: Tensor | None, types: Tensor | None, positions: Tensor | None, embeds: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the inputs of the embeddings; by default a token's position is counted in its row or sequence."""
        given = [None if x is None else self.pack(x) for x in (ids, types, positions, embeds)]
        given[2] = self.positions() if positions is None else given[2]
        return tuple(given)

    def positions(self) -> Tensor:
        """Return (T,): the position of each token in its row, or in its sequence if there are no rows."""
        at = torch.arange(self.tokens, device=self.counts.device)
        if self.in_rows:
            return (at if self.indices is None else self.indices) % self.shape[1]
        return at - self.repeat(self.cu_seqlens[:-1])

    def repeat(self, x: Tensor) -> Tensor:
        """Repeat a value for each sequence, (B,), for each of its tokens, (T,)."""
        return x.repeat_interleave(self.counts, 0, output_size=self.tokens)

    @cached_property
    def is_contiguous(self) -> bool:
        """True if no padding lies between two tokens of a sequence."""
        if self.indices is None:
            return True
        near = self.indices.diff() == 1
        near[self.nonempty_ends[1:-1] - 1] = True
        return bool(near.all())

    @cached_property
    def groups(self) -> Groups:
        """Group the sequences for attention by `group_lengths`."""
        groups: list[Group] = []
        order: list[int] = []  # the sequences, group by group
        row_lengths: list[int] = []

        # A group is padded to its longest sequence; only one of several lengths needs a mask.
        for sequences in group_lengths(self.lengths):
            rows, longest, shortest = len(sequences), self.lengths[sequences[0]], self.lengths[sequences[-1]]
            real = None
            if shortest < longest:
                lengths = self.counts[self.tensor(sequences)]
                real = torch.arange(longest, device=self.counts.device) < lengths[:, None, None, None]
            groups.append(Group(rows * longest, rows, real))
            order += sequences
            row_lengths += [longest] * rows

        slots = sum(row_lengths)
        if slots == self.tokens and order == sorted(order):
            return Groups(tuple(groups))  # nothing to move: each group is a view

        # For each slot the token that it holds; behind a sequence its last token is repeated, which the mask hides.
        turn, widths = self.tensor(order), self.tensor(row_lengths)
        begin, slots_begin = self.cu_seqlens.long()[turn], widths.cumsum(0) - widths
        row_of = torch.arange(len(order), device=self.counts.device).repeat_interleave(widths, output_size=slots)
        within = torch.arange(slots, device=self.counts.device) - slots_begin[row_of]
        token_at = begin[row_of] + within.minimum(self.counts[turn][row_of] - 1)

        # For each token its slot: all tokens of a sequence move by the same number of places.
        moves = torch.zeros_like(self.counts, dtype=torch.long).index_copy(0, turn, slots_begin - begin)
        slot_of = torch.arange(self.tokens, device=self.counts.device) + self.repeat(moves)
        return Groups(tuple(groups), turn.argsort(), token_at, slot_of)

    def tensor(self, numbers: Sequence[int]) -> Tensor:
        """Return numbers as a tensor on the device of the tokens, without waiting for a GPU."""
        return torch.tensor(numbers, dtype=torch.long, device="cpu").to(self.counts.device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class Slots(Packed):
    """The layout of a CUDA graph: T slots, of which the tokens of rows, (B, S), take the first ones.

    No shape and no number of the host depends on the tokens.

    Args:
        lengths: one number, the most tokens of a sequence.
        ends: as `cu_seqlens`; sequences may be empty, and there may be more than rows.
        slot_of: (B · S,), the slot of each position; T for padding.
        room: T.
    """

    ends: Tensor
    slot_of: Tensor
    room: int

    @classmethod
    def of_rows(cls, real: Tensor, room: int, longest: int, rest: bool) -> "Slots":
        """Lay out the tokens that are True in `real`, (B, S), of which `longest` and fewer than `room` are.

        Args:
            rest: make the slots left over a sequence of their own, which a backward needs: attention writes no
                gradient for tokens that belong to no sequence.
        """
        counts = real.sum(1)
        ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        if rest:
            ends = torch.nn.functional.pad(ends, (0, 1), value=room)
        slot_of = torch.where(real, real.flatten().cumsum(0).view_as(real) - 1, room).flatten()
        return cls((longest,), counts, tuple(real.shape), ends=ends.int(), slot_of=slot_of, room=room)

    @property
    def tokens(self) -> int:
        return self.room

    @property
    def nonempty_ends(self) -> Tensor:
        return self.ends

    def pack(self, x: Tensor, fill: float = 0) -> Tensor:
        """Put tokens into slots, (T, …), from rows (B or 1, S or 1, …) or (S,); other slots hold `fill`."""
        x = x.expand(*self.shape, *x.shape[2:]).flatten(0, 1)
        return x.new_full((self.room + 1, *x.shape[1:]), fill).index_copy(0, self.slot_of, x)[:-1]

    def unpack(self, x: Tensor, fill: float = 0) -> Tensor:
        """Put tokens back into rows, (B, S, …), with `fill` for padding."""
        behind = x.new_full((1, *x.shape[1:]), fill)
        return torch.cat([x, behind]).index_select(0, self.slot_of).unflatten(0, self.shape)

    def first(self, x: Tensor) -> Tensor:
        """Take the first token of every sequence, the rest's too; a gate for all tokens stays as it is."""
        return x if x.shape[0] == 1 else x.index_select(0, self.nonempty_ends[:-1])

    def first_token_layout(self) -> "Slots":
        """Return the layout of the tokens that `first` returns: one slot for each sequence, rows with one position."""
        every = torch.arange(self.nonempty_ends.shape[0], dtype=torch.int32, device=self.counts.device)
        rows, counts, room = self.shape[0], self.counts.clamp(max=1), every.shape[0] - 1
        return Slots((1,), counts, (rows, 1), ends=every, slot_of=every[:rows].long(), room=room)

    def positions(self) -> Tensor:
        return self.pack(torch.arange(self.shape[1], device=self.counts.device)[None])


Layout = Padded | Packed


def group_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Return groups of the sequences that have a token, each to attend in one call of SDPA.

    One call for all pads every sequence to the longest and computes unused scores; a call for each sequence wastes no
    scores and costs B calls.  So sequences are added from the longest to the shortest, and a new group begins when the
    padding of the next sequence would waste more scores in its group than a call costs, CALL_COST.
    """
    groups: list[list[int]] = []
    longest = wasted = 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):  # stable
        if not (n := lengths[i]):
            break
        wasted += longest * longest - n * n
        if not groups or wasted > CALL_COST:
            groups.append([])
            longest, wasted = n, 0
        groups[-1].append(i)
    return groups


def packing_of(x: Tensor, mask: Tensor | None, name: str) -> Packed:
    """Return the packing of x, (B, S, …), by a user's mask; None means that all tokens are real.

    Raises:
        ValueError: the mask is not (B, S) of 0 and 1; the message names the backend.
    """
    if is_mapped(x) or is_mapped(mask):
        raise ValueError(f"backend {name!r} cannot run in torch.func.vmap, which cannot count tokens; use 'auto'")
    if mask is None:
        batch, length = x.shape[:2]
        return Packed((length,) * batch, x.new_full((batch,), length, dtype=torch.long), (batch, length))
    if mask.dim() != 2:
        raise ValueError(f"backend {name!r} takes a 2-D attention_mask, not {mask.dim()}-D; use 'sdpa' or 'auto'")
    return Packed.of_mask(token_positions(x, mask).to(x.device))


def token_positions(x: Tensor, mask: Tensor) -> Tensor:
    """Return True for positions of x, (B, S, …), that hold tokens by a mask of 0 and 1."""
    check_shape(mask, (x.shape[0], 1, x.shape[1], x.shape[1]), "attention_mask")
    return to_bool_mask(mask, "attention_mask").expand(x.shape[0], -1)


def is_mapped(tensor: Tensor | None) -> bool:
    """Return whether torch.func.vmap runs over a tensor; torch.func.grad may have wrapped it again."""
    while tensor is not None and torch_private.is_wrapped(tensor):
        if torch_private.is_batched(tensor):
            return True
        tensor = torch_private.unwrapped(tensor)
    return False
