"""Labelled sentences, pairs of them, or words, from files or the hub to batches.

A batch holds a model's keyword arguments: input_ids, attention_mask and token_type_ids (B, S), labels (B,).
"""

import csv
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertlite.checkpoint.files import Source, locate
from bertlite.extras import import_optional
from bertlite.records import sha256_of

FORMATS: dict[str, dict[str, Any]] = {  # of files without types, with the options of csv.reader
    ".csv": {},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},
}
FILES = (*FORMATS, ".jsonl", ".parquet")
NO_LABEL = -100  # of a word that has none, and of tokens that do not begin a word
OUTSIDE = "O"  # the label of words that are no entity
GROUP = 16  # batches: shuffled examples are sorted by length within groups of so many batches


@dataclass(frozen=True)
class DataSource:
    """The place of examples, and the names of their columns.

    Args:
        path: a .csv, .tsv, .jsonl or .parquet file, or a hub data set, NAME or NAME:CONFIGURATION.
        text: names of the columns with the text: one, or two for pairs.
        label: name of the column with the label.
        columns: names of all columns, for a .csv or .tsv file that has no header.
        classes: names of the labels 0, 1, …; without them labels are numbers, or the classes that a reader knows.
        split: split of a hub data set.
    """

    path: str
    text: tuple[str, ...] = ("sentence",)
    label: str = "label"
    columns: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    split: str | None = None


Label = float | tuple[float, ...]  # of a text, or of each of its words


@dataclass(frozen=True)
class Examples:
    """Labelled texts; each text is one string or two, each label a number; or a text is words, each with a label.

    Args:
        classes: the names of the labels 0, 1, … where the source names them.
    """

    name: str
    texts: tuple[tuple[str, ...], ...]
    labels: tuple[Label, ...]
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def sha256(self) -> str:
        """Hash of the texts and labels in their order, the same from every kind of file."""
        return sha256_of(json.dumps([self.texts, self.labels]))

    def every_label(self) -> list[float]:
        """Return the labels of all texts, or of all words, in their order."""
        return [x for label in self.labels for x in (label if isinstance(label, tuple) else (label,))]

    def sample(self, count: int | None, seed: int = 0) -> "Examples":
        """Draw examples without replacement; None returns all, in their order.

        Raises:
            ValueError: `count` is 0 or less, or more than there are.
        """
        if count is None:
            return self
        if not 0 < count <= len(self):
            raise ValueError(
                f"{count} examples of {self.name} were asked for; it has {len(self)}: ask for 1 to as many"
            )
        chosen = random.Random(seed).sample(range(len(self)), count)
        return replace(self, texts=tuple(self.texts[i] for i in chosen), labels=tuple(self.labels[i] for i in chosen))


def read_examples(
    source: DataSource, *, words: bool = False, classes: Sequence[str] = (), collect: bool = False
) -> Examples:
    """Read the examples of a source.

    Args:
        words: a text is a list of words, or words with spaces between them, and so are its labels.
        classes: the names of the labels 0, 1, … that a model knows, for labels that are names; `source.classes` goes
            before them.
        collect: where neither names the classes and labels are names, these are the classes: those of the source in
            alphabetical order, but for "O", no entity, which is the first.

    Raises:
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: the kind of file or data set needs a package that is not installed.
        ValueError: the file is empty or of another kind, a column is missing, or a label is no number or class.
    """
    if not 1 <= len(source.text) <= (1 if words else 2):
        wanted = "words have one column" if words else "the text has one column or two"
        raise ValueError(f"{wanted}; {len(source.text)} were named: {', '.join(source.text)}")
    named, rows = read_rows(source)
    texts: list[tuple[str, ...]] = []
    found: list[Any] = []
    for number, row in enumerate(rows, start=1):
        check_row(row, source, number)
        texts.append(tuple(as_words(row[source.text[0]])) if words else tuple(str(row[name]) for name in source.text))
        found.append(as_words(row[source.label]) if words else row[source.label])
        if words and len(texts[-1]) != len(found[-1]):
            raise ValueError(
                f"{source.path}, row {number}: {len(texts[-1])} words in {source.text[0]} and {len(found[-1])} labels"
                f" in {source.label}; each word has one label"
            )
    if not texts:
        raise ValueError(f"{source.path} has no examples")
    known = source.classes or named or tuple(classes)
    if classes and named != tuple(classes) and named and set(named) <= set(classes) and not source.classes:
        known = tuple(classes)  # the model's classes, in its own order
        found = [rename(each, named) for each in found]
    if collect and not known:
        known = collect_classes(found)
    labels = (
        tuple(parse_label(x, source, known, i) for x in each) if words else parse_label(each, source, known, i)
        for i, each in enumerate(found, start=1)
    )
    return Examples(Path(source.path).name, tuple(texts), tuple(labels), known)


def rename(label: Any, names: Sequence[str]) -> Any:
    """Return the name of a label's number, or those of the labels of words; a number without one stays."""
    if isinstance(label, list):
        return [rename(each, names) for each in label]
    return names[label] if isinstance(label, int) and 0 <= label < len(names) else label


def as_words(value: Any) -> list[Any]:
    """Return a list as it is, and a string in parts."""
    return value.split() if isinstance(value, str) else list(value)


def check_row(row: dict[Any, Any], source: DataSource, number: int) -> None:
    """Refuse a row that lacks a column, or has more cells than there are columns.

    Raises:
        ValueError: the row does.
    """
    if row.get(None):
        raise ValueError(
            f"{source.path}, row {number}: {len(row) - 1 + len(row[None])} cells for {len(row) - 1} columns; a text"
            " that contains the separator needs quotation marks"
        )
    missing = [name for name in (*source.text, source.label) if row.get(name) is None]
    if missing:
        have = ", ".join(str(name) for name in row if name is not None)
        way_out = "" if source.columns else "; name others with --text and --label, or all with --columns if no header"
        raise ValueError(
            f"{source.path}, row {number}: no {' and no '.join(missing)}; its columns are {have}{way_out}"
        )


def read_rows(source: DataSource) -> tuple[tuple[str, ...], Iterator[dict[Any, Any]]]:
    """Return the names of the classes, where the source knows them, and its rows.

    Raises:
        ValueError: columns are named for a source that names its own, or the path is of another kind.
    """
    kind = Path(source.path).suffix
    if source.columns and kind not in FORMATS:
        raise ValueError(f"{source.path} names its columns itself; --columns is for {' and '.join(FORMATS)}")
    return ((), read_file(source)) if kind in FILES else read_hub(source)


def read_file(source: DataSource) -> Iterator[dict[Any, Any]]:
    """Yield the rows of a file."""
    path = Path(source.path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.suffix == ".parquet":
        yield from read_parquet(source)
        return
    with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets begin a file with a byte-order mark
        if path.suffix == ".jsonl":
            yield from read_json_lines(path, file)
        else:
            yield from csv.DictReader(file, fieldnames=source.columns or None, **FORMATS[path.suffix])


def read_json_lines(path: Path, lines: Iterable[str]) -> Iterator[dict[Any, Any]]:
    """Yield the objects of lines that are not empty."""
    for number, line in enumerate(filter(str.strip, lines), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, row {number} is no JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number} is a JSON {type(row).__name__}; expected an object")
        yield row


def read_parquet(source: DataSource) -> Iterator[dict[Any, Any]]:
    """Yield the rows of a .parquet file, with the columns that are wanted."""
    parquet = import_optional("pyarrow.parquet", "a .parquet file", "experiments")
    file, wanted = parquet.ParquetFile(source.path), [*source.text, source.label]
    names = file.schema_arrow.names
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(
            f"{source.path}: no {' and no '.join(missing)}; its columns are {', '.join(names)}; name others with"
            " --text and --label"
        )
    for batch in file.iter_batches(columns=wanted):
        yield from batch.to_pylist()


def read_hub(source: DataSource) -> tuple[tuple[str, ...], Iterator[dict[Any, Any]]]:
    """Return the names of the classes of a hub data set, where it has them, and its rows."""
    if Path(source.path).exists():
        raise ValueError(f"{source.path} is none of {', '.join(FILES)}")
    if source.split is None:
        raise ValueError(f"{source.path} is no {', '.join(FILES)} file; for a hub data set name a split")
    datasets = import_optional("datasets", "a hub data set", "experiments")
    name, _, configuration = source.path.partition(":")
    found = datasets.load_dataset(name, configuration or None, split=source.split)
    feature = (getattr(found, "features", None) or {}).get(source.label)
    feature = getattr(feature, "feature", feature)  # of a list, that of its elements
    return tuple(getattr(feature, "names", None) or ()), iter(found)


def is_number(value: Any) -> bool:
    """Return whether a label is a number, or a text that is one."""
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def collect_classes(labels: Iterable[Any]) -> tuple[str, ...]:
    """Return the names among labels, of texts or of words, in order; empty if every label is a number."""
    names = {str(x) for label in labels for x in (label if isinstance(label, list) else [label])}
    return () if all(map(is_number, names)) else tuple(sorted(names, key=lambda name: (name != OUTSIDE, name)))


def parse_label(value: Any, source: DataSource, classes: Sequence[str], row: int) -> float:
    """Return a label as a number: that of its class, or the number that it is.

    Raises:
        ValueError: it is no number, or none of the classes.
    """
    where = f"{source.path}, row {row}"
    if str(value) in classes and (source.classes or isinstance(value, str)):
        return float(classes.index(str(value)))
    if is_number(value) and not source.classes:
        return float(value)
    if classes:
        raise ValueError(f"{where}: {value!r} is none of the classes {', '.join(classes)}")
    raise ValueError(f"{where}: the label {value!r} is no number; name the classes with --classes, in their order")


def read_tokenizer(checkpoint: str, max_length: int) -> Any:
    """Load the `tokenizers.Tokenizer` of a folder or a hub id; it truncates to `max_length` tokens.

    Raises:
        FileNotFoundError: there is no tokenizer.json.
    """
    from tokenizers import Tokenizer

    path = locate(Source(checkpoint)).get("tokenizer.json")
    if path is None:
        raise FileNotFoundError(f"{checkpoint} has no tokenizer.json, so its texts cannot be read")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    return tokenizer


@dataclass(frozen=True)
class EncodedExamples:
    """Examples as token ids; the two texts of a pair are two rows where `apart`, else one row with two segments.

    Of words, labels are those of tokens: that of the word for its first token, -100 for others.
    """

    rows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # ids and token types of each row
    labels: tuple[Label, ...]
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
        labels: list[Any] = [self.labels[i] for i in indices]
        if isinstance(labels[0], tuple):
            labels = [[*label, *[NO_LABEL] * (length - len(label))] for label in labels]
        return {
            "input_ids": padded(0),
            "attention_mask": (torch.arange(length) < lengths[:, None]).long(),
            "token_type_ids": padded(1),
            "labels": torch.tensor(labels, dtype=dtype),
        }

    def targets(self) -> NDArray[Any]:
        """Return the labels as outputs are: of each example, or of each of its words that the model reads."""
        if not isinstance(self.labels[0], tuple):
            return np.array(self.labels)
        rows = (label if isinstance(label, tuple) else (label,) for label in self.labels)
        return pad_rows([np.array([x for x in row if x != NO_LABEL]) for row in rows], NO_LABEL)


def pad_rows(rows: Sequence[NDArray[Any]], value: float) -> NDArray[Any]:
    """Return rows of several lengths, (words, …), as one array (rows, longest, …), filled up with a value."""
    found = np.full((len(rows), max(map(len, rows)), *rows[0].shape[1:]), value)
    for i, row in enumerate(rows):
        found[i, : len(row)] = row
    return found


def encode_examples(
    examples: Examples, tokenizer: Any, *, apart: bool = False, words: bool = False
) -> EncodedExamples:
    """Tokenize examples; pairs become one row with two segments, or with `apart` two rows."""
    if words:
        found = tokenizer.encode_batch([list(text) for text in examples.texts], is_pretokenized=True)
        labels = tuple(map(label_tokens, found, examples.labels))
        return EncodedExamples(tuple((tuple(each.ids), tuple(each.type_ids)) for each in found), labels)
    texts: Any = list(chain(*examples.texts)) if apart else [t if len(t) > 1 else t[0] for t in examples.texts]
    rows = tuple((tuple(each.ids), tuple(each.type_ids)) for each in tokenizer.encode_batch(texts))
    return EncodedExamples(rows, examples.labels, apart)


def label_tokens(encoding: Any, labels: Any) -> tuple[float, ...]:
    """Return a label for each token: that of the word for its first token, -100 for others."""
    before = [None, *encoding.word_ids[:-1]]
    return tuple(
        NO_LABEL if word is None or word == last else labels[word]
        for last, word in zip(before, encoding.word_ids, strict=True)
    )


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
