"""The packed layout: which tokens of a batch are real, how they go from rows with padding, (B, S), to (T,), and back.

Padding leaves before the first layer and returns, as zeros, after the last.

Shapes:  B sequences · S positions · T tokens, of all sequences together · P slots: the tokens grouped for attention,
         each group padded to its longest sequence
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from bertlite import torch_private
from bertlite.stack.masks import Mask, check_shape, read_ones, values_readable

# Tuned by scripts/measure/tuning.py, with the record scripts/results/tuning.json.
MAX_FILL = 0.8  # where more of the positions hold tokens, moving them costs what it saves
MIN_POSITIONS = 64  # nor does it pay in a smaller batch
CPU = torch.device("cpu")
CALL_COST = 1024  # what one more call of SDPA costs, in scores of one head: see `group_lengths`


@dataclass(frozen=True)
class Group:
    """Sequences that attend in one call, padded to the longest of them."""

    start: int  # where they begin among the P slots
    sequences: int
    length: int
    real: Tensor | None  # (sequences, 1, 1, length) bool, None if all are

    @property
    def slots(self) -> slice:
        return slice(self.start, self.start + self.sequences * self.length)


@dataclass(frozen=True)
class Groups:
    """All sequences in groups, and the moves to the slots and back; None where nothing moves."""

    groups: tuple[Group, ...]
    order: Tensor | None  # the sequences that have a token, as they go group by group
    rank: Tensor | None  # where in that order each of them is
    token_at: Tensor | None  # (P,), the token in each slot; where there is padding, any
    slot_of: Tensor | None  # (T,), the slot of each token

    def spread(self, x: Tensor) -> Tensor:  # (T, …) -> (P, …)
        return x if self.token_at is None else x.index_select(0, self.token_at)

    def gather(self, x: Tensor) -> Tensor:  # (P, …) -> (T, …)
        return x if self.slot_of is None else x.index_select(0, self.slot_of)


@dataclass(frozen=True)
class Packed:
    """The real tokens of a batch, (T, …); it has the methods of `bertlite.stack.layouts.Padded`.

    Args:
        lengths: of the B sequences, in tokens.
        counts: (B,), the same where the tokens are; a GPU need not be sent them again.
        indices: (T,), of each token in the flattened rows; None if there is no padding, or there are no rows.
        shape: (B, S) of the rows; None if the tokens came packed.
        firsts_only: what is unpacked is the first token of each sequence that has one, as `first` takes it.
    """

    lengths: tuple[int, ...]
    counts: Tensor
    indices: Tensor | None = None
    shape: tuple[int, int] | None = None
    firsts_only: bool = False

    @classmethod
    def of_mask(cls, real: Tensor) -> "Packed":
        """Pack rows whose real tokens have a 1 or True in `real`, (B, S)."""
        counts = real.sum(-1)
        lengths = tuple(counts.tolist())
        tokens, shape = sum(lengths), (real.shape[0], real.shape[1])
        if tokens == real.numel():
            return cls(lengths, counts, None, shape)
        if not real.is_cpu:  # their number is known, and `nonzero` would wait to count them again
            return cls(lengths, counts, real.flatten().byte().argsort(descending=True, stable=True)[:tokens], shape)
        return cls(lengths, counts, real.flatten().nonzero().squeeze(-1), shape)

    @classmethod
    def of_full(cls, batch: int, length: int, device: torch.device) -> "Packed":
        """Pack rows that have no padding."""
        return cls((length,) * batch, torch.full((batch,), length, device=device), None, (batch, length))

    @classmethod
    def of_ends(cls, cu_seqlens: Tensor, ends: Sequence[int], device: torch.device) -> "Packed":
        """Take tokens that come packed; sequence i is ends[i] up to ends[i + 1], which are cu_seqlens's numbers."""
        lengths = tuple(end - start for start, end in pairwise(ends))
        return cls(lengths, cu_seqlens.to(device, non_blocking=True).diff())

    @property
    def device(self) -> torch.device:
        return self.counts.device

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Return (B + 1,) int32: where each sequence begins, and where the last one ends."""
        return torch.cat([self.counts.new_zeros(1), self.counts]).cumsum(0, dtype=torch.int32)

    @cached_property
    def filled_ends(self) -> Tensor:
        """Return `cu_seqlens` of the sequences that have a token."""
        if not self.has_empty_sequence:
            return self.cu_seqlens
        return torch.cat([self.cu_seqlens[:1], self.cu_seqlens[1:][self.filled]])

    @cached_property
    def firsts(self) -> Tensor:
        """Return which of the T tokens are the first of their sequence."""
        if self.indices is None and self.shape is not None:
            return torch.arange(0, self.tokens, max(self.shape[1], 1), device=self.device)
        return self.filled_ends[:-1]

    @cached_property
    def filled(self) -> Tensor:
        """Return which sequences have a token."""
        return self.tensor([i for i, n in enumerate(self.lengths) if n])

    @property
    def has_empty_sequence(self) -> bool:
        """True if some sequence has no token."""
        return not all(self.lengths)  # torch.compile keeps no guard on `0 in lengths`

    @property
    def packed_rows(self) -> tuple[int, int] | None:
        """(B, S) of the rows whose padding was left out; None if there were no rows."""
        return self.shape

    @property
    def gate_shape(self) -> tuple[int, int]:
        """(B, S) that a gate for each position would have; (B, 1) where there are no rows."""
        return self.shape or (len(self.lengths), 1)

    def backend_name(self, asked: str) -> str:
        return "packed" if asked == "auto" else asked

    def read_mask(self, mask: Tensor | None, heads: int, causal: bool) -> Mask:
        """Return a mask that restricts nothing: which tokens are real has been read from it."""
        return Mask()

    def gate(self, gate: Tensor) -> Tensor:
        """Lay out a gate, (B or 1, S or 1, N, 1), as the tokens are: (T or 1, N, 1)."""
        if gate.shape[:2] == (1, 1):
            return gate[0]
        return self.repeat(gate[:, 0]) if self.shape is None else self.pack(gate)

    def pack(self, x: Tensor) -> Tensor:
        """Take the real tokens, (T, …), of rows (B or 1, S or 1, …)."""
        if self.shape is None:
            return x
        x = x.expand(*self.shape, *x.shape[2:]).flatten(0, 1)
        return x if self.indices is None else x.index_select(0, self.indices)

    def pack_ids(self, x: Tensor | None) -> Tensor | None:
        """Pack indices that may be absent, or (S,) for every row."""
        if x is None or self.shape is None:
            return x
        return self.pack(x[None] if x.dim() == 1 else x)

    def unpack(self, x: Tensor, fill: float = 0) -> Tensor:
        """Put tokens, (T, …), back into rows, (B, S or 1, …), with zeros, or `fill`, for padding."""
        if self.firsts_only:
            x = self.unpack_first(x)
            return x if self.shape is None else x[:, None]
        if self.shape is None:
            return x
        if self.indices is not None:
            x = x.new_full((self.shape[0] * self.shape[1], *x.shape[1:]), fill).index_copy(0, self.indices, x)
        return x.unflatten(0, self.shape)

    def first(self, x: Tensor) -> Tensor:
        """Take the first token of every sequence that has one, of (T, …); a gate for all tokens stays one."""
        if x.shape[0] == 1 != self.tokens:
            return x
        if self.indices is None and self.shape is not None:
            return x[:: max(self.shape[1], 1)]  # a view
        return x.index_select(0, self.firsts)

    def unpack_first(self, x: Tensor) -> Tensor:
        """Give first tokens a row for every sequence, (B, …), with zeros for one without a token."""
        if not self.has_empty_sequence:
            return x
        return x.new_zeros(len(self.lengths), *x.shape[1:]).index_copy(0, self.filled, x)

    def of_firsts(self) -> "Packed":
        """Return the layout of what `first` gives."""
        return replace(self, firsts_only=True)

    def pooler_rows(self, x: Tensor) -> Tensor:
        """Return rows, (B, 1, D), that begin with the first token of each sequence."""
        return self.unpack_first(x if self.firsts_only else self.first(x))[:, None]

    def real(self) -> Tensor | None:
        """Return (B, S), False for padding; None if there were no rows."""
        if self.shape is None:
            return None
        return replace(self, firsts_only=False).unpack(torch.ones(self.tokens, dtype=torch.bool, device=self.device))

    def positions(self, given: Tensor | None = None) -> Tensor | None:
        """Return (T,): where each token stands, by default in its row, or in its sequence if there are no rows."""
        if given is not None:
            return self.pack_ids(given)
        at = torch.arange(self.tokens, device=self.device)
        if self.shape is not None:
            return (at if self.indices is None else self.indices) % self.shape[1]
        return at - self.repeat(self.cu_seqlens[:-1])

    def repeat(self, x: Tensor) -> Tensor:
        """Repeat a value for each sequence, (B,), for each of its tokens, (T,)."""
        return x.repeat_interleave(self.counts, 0, output_size=self.tokens)

    @cached_property
    def is_contiguous(self) -> bool:
        """True if no padding stands between two tokens of a sequence."""
        if self.indices is None:
            return True
        near = self.indices.diff() == 1
        near[self.firsts[1:] - 1] = True
        return bool(near.all())

    @cached_property
    def groups(self) -> Groups:
        """Group the sequences for attention by `group_lengths`."""
        order, sizes = group_lengths(self.lengths)
        groups: list[Group] = []
        start = row = 0
        for size in sizes:
            members = [self.lengths[i] for i in order[row : row + size]]  # from the longest to the shortest
            real = None
            if members[-1] < members[0]:
                ends = self.tensor(members)[:, None, None, None]
                real = torch.arange(members[0], device=self.device) < ends
            groups.append(Group(start, size, members[0], real))
            start, row = start + size * members[0], row + size
        if all(group.real is None for group in groups) and order == sorted(order):
            return Groups(tuple(groups), None, None, None, None)  # nothing to move: each group is a view
        widths = self.tensor([group.length for group in groups for _ in range(group.sequences)])
        turn, lengths = self.tensor(order), self.tensor([self.lengths[i] for i in order])
        begin, slots = self.cu_seqlens.long()[turn], widths.cumsum(0) - widths  # of each sequence, here and there
        row_of = torch.arange(len(order), device=self.device).repeat_interleave(widths, output_size=start)
        within = torch.arange(start, device=self.device) - slots[row_of]
        token_at = begin[row_of] + within.minimum(lengths[row_of] - 1)
        moves = torch.zeros_like(self.counts, dtype=torch.long).index_copy(0, turn, slots - begin)
        slot_of = torch.arange(self.tokens, device=self.device) + self.repeat(moves)
        rank = turn.argsort()
        return Groups(tuple(groups), rank.argsort(), rank, token_at, slot_of)

    def tensor(self, numbers: Sequence[int]) -> Tensor:
        """Put numbers where the tokens are; a GPU is sent them without waiting for it."""
        return torch.tensor(numbers, dtype=torch.long).to(self.device, non_blocking=True)


def group_lengths(lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Share sequences out among calls of SDPA.

    One call for all pads every sequence to the longest and computes scores that nobody reads; a call for each reads
    all it computes and pays for B calls.  So, from the longest to the shortest: a new group begins where padding the
    sequence to the group's longest would bring the scores wasted there above what a call costs, CALL_COST.

    Returns:
        The sequences that have a token, in the order of the groups; how many each group has.
    """
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])  # stable
    sizes: list[int] = []
    longest = wasted = 0
    for i in order:
        n = lengths[i]
        wasted += longest * longest - n * n
        if not sizes or wasted > CALL_COST:
            sizes.append(0)
            longest, wasted = n, 0
        sizes[-1] += 1
    return order, sizes


def packing_of(x: Tensor, mask: Tensor | None, name: str) -> Packed:
    """Return which tokens of x, (B, S, …), are real by a user's mask; None is all.

    Raises:
        ValueError: the mask is not (B, S), of 0 and 1; it names the backend.
    """
    if any(is_mapped(tensor) for tensor in (x, mask)):
        raise ValueError(f"backend {name!r} cannot run in torch.func.vmap, which cannot count tokens; use 'auto'")
    if mask is None:
        return Packed.of_full(x.shape[0], x.shape[1], x.device)
    if mask.dim() != 2:
        raise ValueError(f"backend {name!r} takes a 2-D attention_mask, not {mask.dim()}-D; use 'sdpa' or 'auto'")
    return Packed.of_mask(read_rows(x, mask).to(x.device))


def read_rows(x: Tensor, mask: Tensor) -> Tensor:
    """Return which positions of x, (B, S, …), hold tokens, by a mask of 0 and 1."""
    check_shape(mask, (x.shape[0], 1, x.shape[1], x.shape[1]), "attention_mask")
    return read_ones(mask, "attention_mask")


def is_mapped(tensor: Tensor | None) -> bool:
    """Return whether torch.func.vmap runs over a tensor; torch.func.grad may have wrapped it again."""
    while tensor is not None and torch_private.is_wrapped(tensor):
        if torch_private.is_batched(tensor):
            return True
        tensor = torch_private.unwrapped(tensor)
    return False


def packing_that_pays(x: Tensor, mask: Tensor) -> Packed | None:
    """Return which tokens of x, (B, S, …), are real, where leaving padding out pays; None where it does not.

    It pays where the mask is 2-D, on the CPU, where reading it makes nobody wait, and has at least MIN_POSITIONS
    positions, of which at most MAX_FILL hold tokens; and every sequence must begin with a token.
    """
    if not (values_readable(mask) and mask.device == x.device == CPU and mask.dim() == 2):
        return None
    if mask.numel() < MIN_POSITIONS:
        return None
    real = read_rows(x, mask)
    pays = int(real.sum()) <= MAX_FILL * real.numel() and bool(real[:, 0].all())
    return Packed.of_mask(real) if pays else None


def packing_from_first(x: Tensor, mask: Tensor | None) -> Packed | None:
    """Return which tokens of x, (B, S, …), are real, if a 2-D mask says so and each sequence begins with one."""
    if mask is None or mask.dim() != 2:
        return None
    real = read_rows(x, mask)
    packing = Packed.of_mask(real)
    return packing if packing.indices is None or bool(real[:, 0].all()) else None
