"""Labelled sentences, or pairs of them: from files or the hub, to batches.

A batch is what a model takes as keywords: input_ids, attention_mask and token_type_ids (B, S), labels (B,).
"""

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertlite.records import sha256_of

Batch = dict[str, Tensor]
FORMATS: dict[str, dict[str, Any]] = {
    ".csv": {},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},
    ".jsonl": {},
}
GROUP = 16  # shuffled batches are cut from so many batches' worth of examples, sorted by length


@dataclass(frozen=True)
class Source:
    """Where examples are and what their columns are called.

    Args:
        path: a .csv, .tsv or .jsonl file, or a hub data set, NAME or NAME:CONFIGURATION.
        text: the columns of the text: one, or two for pairs.
        columns: names for the columns of a file that has no header.
        classes: names that stand for the labels 0, 1, …; without them labels are numbers.
        split: of a hub data set.
    """

    path: str
    text: tuple[str, ...] = ("sentence",)
    label: str = "label"
    columns: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    split: str | None = None


@dataclass(frozen=True)
class Examples:
    """Texts, each one string or two, with a number each."""

    name: str
    texts: tuple[tuple[str, ...], ...]
    labels: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def sha256(self) -> str:
        """Of the texts and labels in their order, whatever file they came from."""
        return sha256_of(json.dumps([self.texts, self.labels]))

    def sample(self, count: int | None, seed: int = 0) -> "Examples":
        """So many of them, drawn without replacement; None is all, in their order.

        Raises:
            ValueError: there are fewer, or none is asked for.
        """
        if count is None:
            return self
        if not 0 < count <= len(self):
            raise ValueError(f"{count} examples of {self.name} were asked for; it has {len(self)}")
        chosen = random.Random(seed).sample(range(len(self)), count)
        return replace(self, texts=tuple(self.texts[i] for i in chosen), labels=tuple(self.labels[i] for i in chosen))


def read(source: Source) -> Examples:
    """The examples of a source.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty, of another kind, lacks a column, or has a label that is no number or class.
    """
    if not 1 <= len(source.text) <= 2:
        raise ValueError(f"the text has one column or two; {len(source.text)} were named: {', '.join(source.text)}")
    rows = read_file(source) if Path(source.path).suffix in FORMATS else read_hub(source)
    texts, labels = [], []
    for number, row in enumerate(rows, start=1):
        missing = [name for name in (*source.text, source.label) if row.get(name) is None]
        if missing:
            have = ", ".join(str(name) for name in row if name is not None)
            raise ValueError(f"{source.path}, row {number}: no {' and no '.join(missing)}; its columns are {have}")
        texts.append(tuple(str(row[name]) for name in source.text))
        labels.append(label_of(row[source.label], source, number))
    if not texts:
        raise ValueError(f"{source.path} has no examples")
    return Examples(Path(source.path).name, tuple(texts), tuple(labels))


def read_file(source: Source) -> Iterator[dict[str, Any]]:
    path = Path(source.path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".jsonl":
            yield from (json.loads(line) for line in file if line.strip())
        else:
            yield from csv.DictReader(file, fieldnames=source.columns or None, **FORMATS[path.suffix])


def read_hub(source: Source) -> Iterator[dict[str, Any]]:
    if Path(source.path).exists():
        raise ValueError(f"{source.path} is none of {', '.join(FORMATS)}")
    if source.split is None:
        raise ValueError(f"{source.path} is no {', '.join(FORMATS)} file; for a hub data set name a split")
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("hub data sets need `datasets`: pip install 'bertlite[experiments]'") from error
    name, _, configuration = source.path.partition(":")
    yield from datasets.load_dataset(name, configuration or None, split=source.split)


def label_of(value: Any, source: Source, row: int) -> float:
    if source.classes:
        if value not in source.classes:
            raise ValueError(f"{source.path}, row {row}: {value!r} is none of the classes {', '.join(source.classes)}")
        return float(source.classes.index(value))
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{source.path}, row {row}: the label {value!r} is no number; name the classes") from None


def read_tokenizer(checkpoint: str, max_length: int) -> Any:
    """The `tokenizers.Tokenizer` of a folder or a hub id, cutting at `max_length` tokens.

    Raises:
        FileNotFoundError: there is no tokenizer.json.
    """
    from tokenizers import Tokenizer

    folder = Path(checkpoint)
    if folder.is_dir():
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json, so its texts cannot be read")
        tokenizer = Tokenizer.from_file(str(path))
    else:
        tokenizer = Tokenizer.from_pretrained(checkpoint)
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    return tokenizer


@dataclass(frozen=True)
class Encoded:
    """Examples as token ids.  A text of a pair is a row of its own where `apart`, else both make one row."""

    rows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # ids and token types of each row
    labels: tuple[float, ...]
    apart: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def width(self) -> int:
        """Rows per example."""
        return len(self.rows) // len(self.labels)

    def length(self, index: int) -> int:
        return max(len(ids) for ids, _ in self.rows[index * self.width : (index + 1) * self.width])

    def batch(self, indices: Sequence[int], dtype: torch.dtype) -> Batch:
        """These examples, padded to the longest; the two rows of a pair stand one after the other."""
        rows = [self.rows[i * self.width + k] for i in indices for k in range(self.width)]
        length = max(len(ids) for ids, _ in rows)

        def padded(part: int) -> Tensor:
            return torch.tensor([[*row[part], *[0] * (length - len(row[part]))] for row in rows])

        lengths = torch.tensor([len(ids) for ids, _ in rows])
        return {
            "input_ids": padded(0),
            "attention_mask": (torch.arange(length) < lengths[:, None]).long(),
            "token_type_ids": padded(1),
            "labels": torch.tensor([self.labels[i] for i in indices], dtype=dtype),
        }


def encode(examples: Examples, tokenizer: Any, *, apart: bool = False) -> Encoded:
    """Examples as token ids; pairs as one row with two segments, or with `apart` as two rows."""
    texts: Any = list(chain(*examples.texts)) if apart else [t if len(t) > 1 else t[0] for t in examples.texts]
    rows = tuple((tuple(each.ids), tuple(each.type_ids)) for each in tokenizer.encode_batch(texts))
    return Encoded(rows, examples.labels, apart)


def order(data: Encoded, size: int, seed: int | None = None) -> list[list[int]]:
    """Which examples make each batch: sorted by length, or with a seed shuffled among those of like length."""
    if seed is None:
        indices = sorted(range(len(data)), key=data.length)
        return [indices[at : at + size] for at in range(0, len(indices), size)]
    draw = random.Random(seed)
    indices = draw.sample(range(len(data)), len(data))
    groups = (sorted(indices[at : at + GROUP * size], key=data.length) for at in range(0, len(indices), GROUP * size))
    found = [group[at : at + size] for group in groups for at in range(0, len(group), size)]
    draw.shuffle(found)
    return found
