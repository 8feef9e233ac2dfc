"""The timed batches: random words with the lengths of real text.

`lengths.json` counts texts by their number of tokens in the vocabulary of bert-base-uncased, [CLS] and [SEP] included:
the sentences of SST-2, and the paragraphs of WikiText-2 (its lines that are no headings).  It holds none of the texts.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from bertlite.experiments.budget.work import Work, full

LENGTHS = Path(__file__).with_name("lengths.json")


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


def ragged(dataset: str, batch: int, limit: int, fixed: bool = False) -> Work:
    """Return a batch with the lengths of a data set, cut to a limit; padded to its longest text, or to the limit."""
    lengths = lengths_like(dataset, batch, limit)
    width = limit if fixed else max(lengths)
    return Work(f"{batch} x {width} {dataset}", lengths, width)


def filled(work: Work) -> float:
    """Return the share of the positions that hold tokens."""
    return sum(work.lengths) / (len(work.lengths) * work.width)


def padding(work: Work) -> str:
    """Return the length that sequences are padded to: "none", the "longest" of the batch, or a "fixed" length."""
    if filled(work) == 1:
        return "none"
    return "longest" if work.width == max(work.lengths) else "fixed"


def works(device: str = "cpu") -> Sequence[Work]:
    """Return the batches for a device: the CPU also gets long ones, a GPU some that keep it busy.

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
    long = (full(1, 512), full(8, 512), *(full(1, n) for n in (1024, 2048, 4096)))  # if models have so many positions
    large = (
        full(64, 128),
        full(16, 512),
        ragged("SST-2", 512, 128),
        ragged("WikiText-2", 128, 512),
        ragged("SST-2", 512, 128, fixed=True),  # 65,536 positions
        ragged("WikiText-2", 128, 512, fixed=True),
    )
    return (*small, *(long if device == "cpu" else large))
