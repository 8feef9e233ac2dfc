"""Labelled sentences, or pairs of them, from files or the hub to batches.

A batch holds a model's keyword arguments: input_ids, attention_mask and token_type_ids (B, S), labels (B,).
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

FORMATS: dict[str, dict[str, Any]] = {
    ".csv": {},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},
    ".jsonl": {},
}
GROUP = 16  # batches: shuffled examples are sorted by length within groups of so many batches


@dataclass(frozen=True)
class DataSource:
    """The place of examples, and the names of their columns.

    Args:
        path: a .csv, .tsv or .jsonl file, or a hub data set, NAME or NAME:CONFIGURATION.
        text: names of the columns with the text: one, or two for pairs.
        label: name of the column with the label.
        columns: names of all columns, for a file that has no header.
        classes: names of the labels 0, 1, …; without them labels are numbers.
        split: split of a hub data set.
    """

    path: str
    text: tuple[str, ...] = ("sentence",)
    label: str = "label"
    columns: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    split: str | None = None


@dataclass(frozen=True)
class Examples:
    """Labelled texts; each text is one string or two, each label a number."""

    name: str
    texts: tuple[tuple[str, ...], ...]
    labels: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def sha256(self) -> str:
        """Hash of the texts and labels in their order, the same from every kind of file."""
        return sha256_of(json.dumps([self.texts, self.labels]))

    def sample(self, count: int | None, seed: int = 0) -> "Examples":
        """Draw examples without replacement; None returns all, in their order.

        Raises:
            ValueError: `count` is 0 or less, or more than there are.
        """
        if count is None:
            return self
        if not 0 < count <= len(self):
            raise ValueError(f"{count} examples of {self.name} were asked for; it has {len(self)}")
        chosen = random.Random(seed).sample(range(len(self)), count)
        return replace(self, texts=tuple(self.texts[i] for i in chosen), labels=tuple(self.labels[i] for i in chosen))


def read_examples(source: DataSource) -> Examples:
    """Read the examples of a source.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty or of another kind, a column is missing, or a label is no number or class.
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
        labels.append(parse_label(row[source.label], source, number))
    if not texts:
        raise ValueError(f"{source.path} has no examples")
    return Examples(Path(source.path).name, tuple(texts), tuple(labels))


def read_file(source: DataSource) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file."""
    path = Path(source.path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets begin a file with a byte-order mark
        if path.suffix == ".jsonl":
            yield from (json.loads(line) for line in file if line.strip())
        else:
            yield from csv.DictReader(file, fieldnames=source.columns or None, **FORMATS[path.suffix])


def read_hub(source: DataSource) -> Iterator[dict[str, Any]]:
    """Yield the rows of a hub data set."""
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


def parse_label(value: Any, source: DataSource, row: int) -> float:
    """Return a label as a number.

    Raises:
        ValueError: it is no number, or none of the classes.
    """
    if source.classes:
        if value not in source.classes:
            raise ValueError(f"{source.path}, row {row}: {value!r} is none of the classes {', '.join(source.classes)}")
        return float(source.classes.index(value))
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{source.path}, row {row}: the label {value!r} is no number; name the classes") from None


def read_tokenizer(checkpoint: str, max_length: int) -> Any:
    """Load the `tokenizers.Tokenizer` of a folder or a hub id; it truncates to `max_length` tokens.

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
class EncodedExamples:
    """Examples as token ids; the two texts of a pair are two rows where `apart`, else one row with two segments."""

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
        """Return the number of tokens of an example's longest row."""
        return max(len(ids) for ids, _ in self.rows[index * self.width : (index + 1) * self.width])

    def batch(self, indices: Sequence[int], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return these examples padded to the longest; the two rows of a pair follow each other."""
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


def encode_examples(examples: Examples, tokenizer: Any, *, apart: bool = False) -> EncodedExamples:
    """Tokenize examples; pairs become one row with two segments, or with `apart` two rows."""
    texts: Any = list(chain(*examples.texts)) if apart else [t if len(t) > 1 else t[0] for t in examples.texts]
    rows = tuple((tuple(each.ids), tuple(each.type_ids)) for each in tokenizer.encode_batch(texts))
    return EncodedExamples(rows, examples.labels, apart)


def batch_indices(data: EncodedExamples, size: int, seed: int | None = None) -> list[list[int]]:
    """Return the indices of each batch: sorted by length, or with a seed shuffled among those of similar length."""
    if seed is None:
        indices = sorted(range(len(data)), key=data.length)
        return [indices[at : at + size] for at in range(0, len(indices), size)]
    draw = random.Random(seed)
    indices = draw.sample(range(len(data)), len(data))
    groups = (sorted(indices[at : at + GROUP * size], key=data.length) for at in range(0, len(indices), GROUP * size))
    found = [group[at : at + size] for group in groups for at in range(0, len(group), size)]
    draw.shuffle(found)
    return found
