"""The timed batches: random words with the lengths of real text.

`lengths.json` counts texts by their number of tokens in the vocabulary of bert-base-uncased, [CLS] and [SEP] included:
the sentences of SST-2, and the paragraphs of WikiText-2 (its lines that are no headings).  It holds none of the texts.

Shapes:  B sequences · S positions
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Forward = Callable[[Mapping[str, Tensor]], Any]  # batch -> outputs

LENGTHS = Path(__file__).with_name("lengths.json")


@dataclass(frozen=True)
class Work:
    """One batch to run."""

    name: str
    lengths: tuple[int, ...]
    width: int  # S, to which all sequences are padded

    @property
    def tokens(self) -> int:
        """Number of tokens that are not padding."""
        return sum(self.lengths)

    @property
    def filled(self) -> float:
        """Share of the positions that hold tokens."""
        return self.tokens / (len(self.lengths) * self.width)

    @property
    def padding(self) -> str:
        """Return what the sequences are padded to: "none", the "longest" of the batch, or a "fixed" length."""
        if self.filled == 1:
            return "none"
        return "longest" if self.width == max(self.lengths) else "fixed"

    def inputs(self, vocabulary: int, device: str = "cpu", pad: int = 0) -> dict[str, Tensor]:
        """Return random words with an attention mask, which full batches have too, as tokenizers make it.

        Args:
            pad: the id of padding, above which the words' are.
        """
        generator = torch.Generator().manual_seed(0)
        shape = (len(self.lengths), self.width)
        mask = torch.arange(self.width) < torch.tensor(self.lengths)[:, None]
        ids = torch.randint(pad + 1, vocabulary, shape, generator=generator).masked_fill(~mask, pad)
        return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}


def lengths_like(dataset: str, batch: int, width: int) -> tuple[int, ...]:
    """Return `batch` lengths that represent a data set: its quantiles, shuffled.

    Raises:
        ValueError: there is no such data set.
    """
    stored = json.loads(LENGTHS.read_text(encoding="utf-8"))
    if dataset not in stored:
        raise ValueError(f"there are no lengths of {dataset!r}; have: {', '.join(stored)}")
    counts = {int(length): count for length, count in stored[dataset]["counts"].items()}
    texts = [length for length in sorted(counts) for _ in range(counts[length])]
    lengths = [min(width, texts[int((i + 0.5) * len(texts) / batch)]) for i in range(batch)]
    random.Random(0).shuffle(lengths)
    return tuple(lengths)


def full(batch: int, width: int) -> Work:
    """Return a batch without padding."""
    return Work(f"{batch} x {width}", (width,) * batch, width)


def ragged(dataset: str, batch: int, limit: int, fixed: bool = False) -> Work:
    """Return a batch with the lengths of a data set, cut to a limit; padded to its longest text, or to the limit."""
    lengths = lengths_like(dataset, batch, limit)
    width = limit if fixed else max(lengths)
    return Work(f"{batch} x {width} {dataset}", lengths, width)


def works(device: str = "cpu") -> Sequence[Work]:
    """Return the batches for a device; a GPU also gets some that are large enough to keep it busy.

    Texts are padded to the longest of their batch, as tokenizers do with `padding=True`, and once more to a fixed
    length, as engines need that are compiled for one shape.
    """
    small = (
        full(1, 16),
        full(8, 128),
        ragged("SST-2", 32, 128),
        ragged("WikiText-2", 8, 512),
        full(1, 128),
        full(32, 128),
        ragged("SST-2", 32, 128, fixed=True),
        ragged("WikiText-2", 8, 512, fixed=True),
    )
    large = (
        full(64, 128),
        full(16, 512),
        ragged("SST-2", 512, 128),
        ragged("WikiText-2", 128, 512),
        ragged("SST-2", 512, 128, fixed=True),  # 65,536 positions
        ragged("WikiText-2", 128, 512, fixed=True),
    )
    return small if device == "cpu" else (*small, *large)
