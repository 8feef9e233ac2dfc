"""Batches to time: random words with the lengths of texts.

Shapes:  B sequences · S positions
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Work:
    """One batch to run."""

    name: str
    lengths: tuple[int, ...]
    width: int  # S, to which all sequences are padded

    def inputs(self, vocabulary: int, device: str | torch.device = "cpu", pad: int = 0) -> dict[str, Tensor]:
        """Return random words with an attention mask; full batches have one too, as tokenizers make it.

        Args:
            pad: the id of padding; the words' ids are above it.
        """
        generator = torch.Generator().manual_seed(0)
        shape = (len(self.lengths), self.width)
        lengths = torch.tensor(self.lengths, dtype=torch.long, device="cpu")
        mask = torch.arange(self.width, device="cpu") < lengths[:, None]
        ids = torch.randint(pad + 1, vocabulary, shape, generator=generator, device="cpu").masked_fill(~mask, pad)
        return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}


def full(batch: int, width: int) -> Work:
    """Return a batch without padding."""
    return Work(f"{batch} x {width}", (width,) * batch, width)
