"""Where the tokens of a batch stand: in rows with padding, (B, S), or packed, (T,), one sequence after another.

Shapes:  B sequences · S positions · T tokens, of all sequences together · P places: the tokens grouped for attention,
         each group padded to its longest sequence
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

FILL = 0.8  # where more of the places hold tokens, moving them costs what it saves
PLACES = 64  # nor does it pay in a smaller batch
CALL = 1024  # what one more call of SDPA costs, in scores of one head: see `grouped`


@dataclass(frozen=True)
class Group:
    """Sequences that attend in one call, padded to the longest of them."""

    start: int  # where they begin among the P places
    sequences: int
    length: int
    real: Tensor | None  # (sequences, 1, 1, length) bool, None if all are

    @property
    def places(self) -> slice:
        return slice(self.start, self.start + self.sequences * self.length)


@dataclass(frozen=True)
class Groups:
    """All sequences in groups, and the way there and back; None is the order that the tokens have already."""

    groups: tuple[Group, ...]
    order: Tensor | None  # the sequences that have a token, as they go group by group
    rank: Tensor | None  # where in that order each of them is
    there: Tensor | None  # (P,), the token that stands at each place; where there is padding, any
    back: Tensor | None  # (T,), the place of each token

    def spread(self, x: Tensor) -> Tensor:  # (T, …) -> (P, …)
        return x if self.there is None else x.index_select(0, self.there)

    def gather(self, x: Tensor) -> Tensor:  # (P, …) -> (T, …)
        return x if self.back is None else x.index_select(0, self.back)


@dataclass(frozen=True)
class Packing:
    """Which tokens of a batch are real.

    Args:
        lengths: of the B sequences, in tokens.
        counts: (B,), the same where the tokens are; a GPU need not be sent them again.
        places: (T,), where in the flattened rows each token stands; None if there is no padding, or there are no rows.
        shape: (B, S) of the rows; None if the tokens came packed.
    """

    lengths: tuple[int, ...]
    counts: Tensor
    places: Tensor | None = None
    shape: tuple[int, int] | None = None

    @classmethod
    def of_mask(cls, real: Tensor) -> "Packing":
        """Of rows whose real tokens have a 1 or True in `real`, (B, S)."""
        counts = real.sum(-1)
        lengths = tuple(counts.tolist())
        shape = (real.shape[0], real.shape[1])
        full = sum(lengths) == real.numel()
        return cls(lengths, counts, None if full else real.flatten().nonzero().squeeze(-1), shape)

    @classmethod
    def of_ends(cls, cu_seqlens: Tensor) -> "Packing":
        """Of tokens that come packed; sequence i is cu_seqlens[i] up to cu_seqlens[i + 1]."""
        counts = cu_seqlens.diff()
        return cls(tuple(counts.tolist()), counts)

    @property
    def device(self) -> torch.device:
        return self.counts.device

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """(B + 1,) int32, where each sequence begins, and where the last one ends."""
        return torch.cat([self.counts.new_zeros(1), self.counts]).cumsum(0, dtype=torch.int32)

    @cached_property
    def filled_ends(self) -> Tensor:
        """`cu_seqlens` of the sequences that have a token."""
        return torch.cat([self.cu_seqlens[:1], self.cu_seqlens[1:][self.filled]]) if self.hollow else self.cu_seqlens

    @cached_property
    def firsts(self) -> Tensor:
        """Where the first token of each sequence that has one stands, among the T."""
        return self.filled_ends[:-1]

    @cached_property
    def filled(self) -> Tensor:
        """The sequences that have a token."""
        return self.tensor([i for i, n in enumerate(self.lengths) if n])

    @property
    def hollow(self) -> bool:
        """Whether some sequence has no token."""
        return 0 in self.lengths

    def pack(self, x: Tensor) -> Tensor:
        """Rows, (B or 1, S or 1, …), to tokens, (T, …)."""
        if self.shape is None:
            return x
        x = x.expand(*self.shape, *x.shape[2:]).flatten(0, 1)
        return x if self.places is None else x.index_select(0, self.places)

    def pack_ids(self, x: Tensor | None) -> Tensor | None:
        """`pack`, of indices that may be absent, or (S,) for every row."""
        if x is None or self.shape is None:
            return x
        return self.pack(x[None] if x.dim() == 1 else x)

    def unpack(self, x: Tensor, fill: float = 0) -> Tensor:
        """Tokens, (T, …), to rows, (B, S, …), with zeros, or `fill`, for padding."""
        if self.shape is None:
            return x
        if self.places is not None:
            x = x.new_full((self.shape[0] * self.shape[1], *x.shape[1:]), fill).index_copy(0, self.places, x)
        return x.unflatten(0, self.shape)

    def first(self, x: Tensor) -> Tensor:
        """Tokens, (T, …), to the first of every sequence that has one."""
        return x.index_select(0, self.firsts)

    def unpack_first(self, x: Tensor) -> Tensor:
        """What `first` gives to (B, …), with zeros for a sequence without a token."""
        return x.new_zeros(len(self.lengths), *x.shape[1:]).index_copy(0, self.filled, x) if self.hollow else x

    def positions(self) -> Tensor:
        """(T,), where each token stands in its row, or in its sequence if there are no rows."""
        at = torch.arange(self.tokens, device=self.device)
        if self.shape is not None:
            return (at if self.places is None else self.places) % self.shape[1]
        return at - self.repeat(self.cu_seqlens[:-1])

    def repeat(self, x: Tensor) -> Tensor:
        """One value for a sequence, (B,), to one for each of its tokens, (T,)."""
        return x.repeat_interleave(self.counts, 0, output_size=self.tokens)

    @cached_property
    def unbroken(self) -> bool:
        """Whether no padding stands between two tokens of a sequence."""
        if self.places is None:
            return True
        near = self.places.diff() == 1
        near[self.firsts[1:] - 1] = True
        return bool(near.all())

    @cached_property
    def groups(self) -> Groups:
        """The sequences grouped for attention by `grouped`."""
        order, sizes = grouped(self.lengths)
        groups: list[Group] = []
        start = row = 0
        for size in sizes:
            members = [self.lengths[i] for i in order[row : row + size]]  # from the longest to the shortest
            real = None
            if members[-1] < members[0]:
                ends = torch.tensor(members, device=self.device)[:, None, None, None]
                real = torch.arange(members[0], device=self.device) < ends
            groups.append(Group(start, size, members[0], real))
            start, row = start + size * members[0], row + size
        if all(group.real is None for group in groups) and order == sorted(order):
            return Groups(tuple(groups), None, None, None, None)  # nothing to move: each group is a view
        widths = self.tensor([group.length for group in groups for _ in range(group.sequences)])
        turn, lengths = self.tensor(order), self.tensor([self.lengths[i] for i in order])
        begin, places = self.cu_seqlens.long()[turn], widths.cumsum(0) - widths  # of each sequence, here and there
        row_of = torch.arange(len(order), device=self.device).repeat_interleave(widths, output_size=start)
        within = torch.arange(start, device=self.device) - places[row_of]
        there = begin[row_of] + within.minimum(lengths[row_of] - 1)
        back = torch.zeros(self.tokens, dtype=torch.long, device=self.device)
        real = within < lengths[row_of]
        back[there[real]] = real.nonzero().squeeze(-1)
        rank = turn.argsort()
        return Groups(tuple(groups), rank.argsort(), rank, there, back)

    def tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)


def grouped(lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Share sequences out among calls of SDPA.

    One call for all pads every sequence to the longest and computes scores that nobody reads; a call for each reads
    all it computes and pays for B calls.  So, from the longest to the shortest: a new group begins where padding the
    sequence to the group's longest would bring the scores wasted there above what a call costs, CALL.

    Returns:
        The sequences that have a token, in the order of the groups; how many each group has.
    """
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])  # stable
    sizes: list[int] = []
    longest = wasted = 0
    for i in order:
        n = lengths[i]
        wasted += longest * longest - n * n
        if not sizes or wasted > CALL:
            sizes.append(0)
            longest, wasted = n, 0
        sizes[-1] += 1
    return order, sizes
