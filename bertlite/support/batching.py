"""Batches of sequences of similar length, each within a number of tokens."""

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from bertlite.runtime.texts import batches

T = TypeVar("T")


class Batches(tuple[tuple[int, ...], ...]):
    """Batches of sequences: batch i holds the indices of its sequences."""

    @overload
    def restore(self, results: Iterable[Tensor]) -> Tensor: ...
    @overload
    def restore(self, results: Iterable[Sequence[T]]) -> list[T]: ...
    def restore(self, results: Iterable[Tensor] | Iterable[Sequence[T]]) -> Tensor | list[T]:
        """Return the results of the batches in the original order of the sequences.

        Args:
            results: one for each batch, in their order: a tensor (sequences in the batch, …), or a list with one
                value for each.

        Returns:
            One tensor (sequences, …) if the results are tensors, else one list.

        Raises:
            ValueError: there is not one result for each sequence.
        """
        given: list[Any] = list(results)  # tensors, or lists
        sizes, wanted = [len(each) for each in given], [len(batch) for batch in self]
        if len(sizes) != len(wanted):
            raise ValueError(f"{len(sizes)} results for {len(wanted)} batches")
        for i, (size, due) in enumerate(zip(sizes, wanted, strict=True)):
            if size != due:
                raise ValueError(f"batch {i} has {due} sequences, and {size} results")
        order = [i for batch in self for i in batch]
        if all(isinstance(each, Tensor) for each in given):
            back = torch.tensor(order, dtype=torch.long, device=given[0].device).argsort()
            return torch.cat(given)[back]
        flat = [value for each in given for value in each]
        return [value for _, value in sorted(zip(order, flat, strict=True), key=lambda pair: pair[0])]


def token_budget_batches(lengths: Iterable[int], max_tokens: int, *, packed: bool = False) -> Batches:
    """Group sequences into batches of at most `max_tokens` tokens.

    Sequences are sorted by length, the longest first, so that memory runs out in the first batch or never.
    Sequences of equal length keep their order, so that batches are deterministic.  `Batches.restore` puts results
    back into the original order::

        batches = token_budget_batches(lengths, 4096)
        vectors = batches.restore(embed([texts[i] for i in batch]) for batch in batches)

    Args:
        lengths: the length of each sequence, in tokens.
        max_tokens: the most tokens in a batch with its padding: sequences times the length of the longest.
        packed: do not count padding, since packed batches do not compute it.

    Raises:
        ValueError: there are no lengths, one is below 1, or one is above `max_tokens`.
        TypeError: a length or `max_tokens` is not an integer.
    """
    budget, sizes = index(max_tokens), [index(n) for n in lengths]
    if budget < 1:
        raise ValueError(f"max_tokens is {budget}; it must be 1 or more")
    if not sizes:
        raise ValueError("there are no lengths; give at least one")
    for i, n in enumerate(sizes):
        if n < 1:
            raise ValueError(f"sequence {i} has length {n}; it must be 1 or more")
        if n > budget:
            raise ValueError(f"sequence {i} has {n} tokens, above max_tokens {budget}: truncate it, or allow more")
    return Batches(map(tuple, batches(sizes, budget, padded=not packed)))
