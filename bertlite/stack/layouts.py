"""Layouts: how the tokens of one forward lie, in rows with padding or, packed, without.

A forward chooses its layout once.  The layout knows where tokens stand, which are the first of their sequences, and
the way back to what the caller gave.  Both have the same methods, so nobody asks which it is.

Shapes:  B sequences · S positions · K keys · N heads;  … is (B, S) or, packed, (T,)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bertlite.stack.masks import Mask, causal_mask, read_mask
from bertlite.stack.packing import Packed


@dataclass(frozen=True)
class Padded:
    """Rows, (B, S, …), as the user gave them: padding is computed like any token, and attended to by none.

    Args:
        keys: how many each query may attend to; those beyond the S are in a cache, before the first.
    """

    batch: int
    length: int
    keys: int
    device: torch.device
    mask_name: str = "attention_mask"

    @property
    def gate_shape(self) -> tuple[int, int]:
        return self.batch, self.length

    def backend_name(self, asked: str) -> str:
        return asked

    def read_mask(self, mask: Tensor | None, heads: int, causal: bool) -> Mask:
        """Read a user's mask; a causal one forbids later keys."""
        lower = causal_mask(self.length, self.keys, self.device) if causal else None
        return read_mask(mask, self.batch, self.length, self.keys, heads, lower, self.mask_name)

    def positions(self, given: Tensor | None) -> Tensor | None:
        """Return where each token stands; None is from 0 on."""
        past = self.keys - self.length
        return torch.arange(past, self.keys, device=self.device)[None] if given is None and past > 0 else given

    def gate(self, gate: Tensor) -> Tensor:
        return gate

    def pack(self, x: Tensor) -> Tensor:
        return x

    def unpack(self, x: Tensor, fill: float = 0) -> Tensor:
        return x

    def first(self, x: Tensor) -> Tensor:  # (B, S, …) -> (B, 1, …)
        """Take the first token of each sequence."""
        return x[:, :1]

    def of_firsts(self) -> "Padded":
        """Return the layout of what `first` gives."""
        return self

    def pooler_rows(self, x: Tensor) -> Tensor:
        """Return rows, (B, 1 or S, D), that begin with the first token of each sequence."""
        return x

    def real(self) -> Tensor | None:
        """Return (B, S), False for padding that was left out; None where none was."""
        return None


Layout = Padded | Packed
