"""Labelled sentences, pairs of them, or words, from files or the hub to batches.

A batch holds a model's keyword arguments: input_ids, attention_mask and token_type_ids (B, S), labels (B,).
"""

import copy
import json
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bertlite.opened.checkpoint import Checkpoint
from bertlite.runtime.processing import Processing
from bertlite.runtime.tasks import check_count
from bertlite.support.extras import import_optional
from bertlite.support.files import sha256_of
from bertlite.support.kinds import check_settings
from bertlite.support.rows import LABEL, LABELS, PLAIN, SUFFIXES, TEXT, WORDS, Table, read_rows
from bertlite.tokenizer import BatchEncoding, BertTokenizer

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
LIKE_A_NUMBER = re.compile(r"[+\-−]?[\d.,'\s]*\d[\d.,'\s]*(e[+\-−]?\d+)?\s*%?", re.IGNORECASE)  # 0,5 or 50 %
UNSEEN = re.compile(r"^[\s\ufeff\u200b-\u200d\u2060]+|[\s\ufeff\u200b-\u200d\u2060]+$")  # around a label
CLASSES = "name the classes with --classes, in their order"
LARGEST = torch.finfo(torch.float32).max  # the largest label
MISSING = ("n/a", "#n/a", "na", "<na>", "null")  # other programs write these for no value
NO_LABEL = -100  # for a word without a label, and for tokens that do not begin a word
OUTSIDE = "O"  # the label of words outside entities
MAX_LENGTH = 128  # tokens of a text, if nothing states another number
GROUP = 16  # shuffled examples are sorted by length within groups of so many batches


@dataclass(frozen=True)
class DataSource:
    """The source of examples, and the names of their columns.

    Args:
        path: a file that `bertlite.support.rows` reads, or a hub data set, NAME or NAME:CONFIGURATION.
        text: names of the columns with the text: one, or two for pairs.
        label: name of the column with the label; None for texts without labels.
        columns: names of all columns, for a .csv or .tsv file that has no header.
        classes: names of the labels 0, 1, …; without them labels are numbers, or the classes that a reader knows.
        split: split of a hub data set.
    """

    path: str
    text: tuple[str, ...] = ("text",)
    label: str | None = "label"
    columns: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    split: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if a column is to be read twice, such as the label as a text; TypeError for other kinds."""
        check_settings(self)
        names = [*self.text, *([] if self.label is None else [self.label])]
        if twice := [name for name, times in Counter(names).items() if times > 1]:
            raise ValueError(f"column {twice[0]!r} is named twice, as {' and '.join(names)}: name each once")


Label = float | tuple[float, ...]  # a text's, or one for each of its words


@dataclass(frozen=True)
class Examples:
    """Labelled texts: one string or two with a number as the label, or words with a number for each.

    Args:
        labels: empty for texts without labels.
        classes: the names of the labels 0, 1, … if the source names them.
        locations: the file, row and column of each label, for errors.
    """

    name: str
    texts: tuple[tuple[str, ...], ...]
    labels: tuple[Label, ...]
    classes: tuple[str, ...] = ()
    locations: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def sha256(self) -> str:
        """Hash of the texts and labels in their order, the same from every kind of file."""
        return sha256_of(json.dumps([self.texts, self.labels]))

    @property
    def inputs(self) -> list[Any]:
        """The texts, and pairs of them, as a tokenizer takes them."""
        return [text if len(text) > 1 else text[0] for text in self.texts]

    def every_label(self) -> list[float]:
        """Return the labels of all texts, or of all words, in their order."""
        return [label for _, label in self.located()]

    def located(self) -> Iterator[tuple[str, float]]:
        """Yield each label of a text or a word with its location; without locations, with the name of the examples."""
        for place, label in zip(self.locations or repeat(self.name), self.labels, strict=False):
            yield from ((place, x) for x in (label if isinstance(label, tuple) else (label,)))

    def sample(self, count: int | None, seed: int = 0) -> "Examples":
        """Draw examples without replacement; None returns all, in their order.

        Raises:
            ValueError: `count` is 0 or less, or more than there are.
        """
        if count is None:
            return self
        if not 0 < count <= len(self):
            raise ValueError(f"{count} examples of {self.name} were requested; request 1 to {len(self)}, all it has")
        return self.chosen(random.Random(seed).sample(range(len(self)), count))

    def chosen(self, indices: Sequence[int]) -> "Examples":
        """Return these examples."""
        return replace(
            self,
            texts=tuple(self.texts[i] for i in indices),
            labels=tuple(self.labels[i] for i in indices if self.labels),
            locations=tuple(self.locations[i] for i in indices if self.locations),
        )


def read_examples(
    source: DataSource, *, words: bool = False, classes: Sequence[str] = (), collect: bool = False
) -> Examples:
    """Read the examples of a source.

    A label is the name of a class or a number, without spaces around it; 1, 1.0 and "1" are the same.  Numbers are
    indices of classes, unless a class is named by a number; without classes they are values.

    Args:
        words: a text is a list of words, or words with spaces between them, and so are its labels.
        classes: the names of a model's labels 0, 1, …; `source.classes` takes precedence.
        collect: if these lack a name, the names in the source are the classes, in alphabetical order after "O" (no
            entity); rare labels cause a warning.

    Raises:
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: the kind of file or data set needs a package that is not installed.
        ValueError: as for `support.rows.read_rows`; or there are no examples, or a label is no number and no class.
    """
    if not 1 <= len(source.text) <= (1 if words else 2):
        wanted = "words have one column" if words else "the text has one column or two"
        raise ValueError(f"{wanted}; {len(source.text)} were named: {', '.join(source.text)}")

    # One row after another, so that an error names its place.
    named, rows = read_source(source, words)
    plain = Path(source.path).suffix.lower() in PLAIN
    locations, texts, found = [], [], []
    for place, cells in rows:
        labels = [] if source.label is None else cells.pop() if words else [cells.pop()]
        text = cells[0] if words else cells
        if words and source.label is not None and len(text) != len(labels):
            both = f"{len(text)} words in {source.text[0]} and {len(labels)} labels in {source.label}"
            raise ValueError(f"{place}: {both}; each word has one label")

        # A blank line of a plain text file is no text; in a table it is a mistake.
        empty = next((i for i, part in enumerate(text) if not part.strip()), None if text else 0)
        if empty is not None and plain:
            continue
        if empty is not None:
            raise ValueError(f"{place}: column {source.text[0 if words else empty]!r} is empty; leave the row out")

        locations.append(f"{place}, column {source.label!r}")
        texts.append(tuple(text))
        found.append([label_name(label, named, locations[-1]) for label in labels])

    name = Path(source.path).name
    if not texts:
        raise ValueError(f"{source.path} has no examples: it is empty, or has only a header")
    if source.label is None:
        return Examples(name, tuple(texts), ())

    # Classes are known only when all labels have been seen.
    known = source.classes or (tuple(classes) if len(classes) > 1 else named)  # one output: a regression
    if collect and not source.classes:
        known = collect_classes(source.label, found, locations, classes, named)
    if collect:
        warn_of_rare_labels(name, found)
    values = tuple(label_values(found, locations, known, words))
    return Examples(name, tuple(texts), values if words else tuple(x for (x,) in values), known, tuple(locations))


def read_source(source: DataSource, words: bool) -> tuple[tuple[str, ...], Iterable[tuple[str, list[Any]]]]:
    """Return the names of the classes, if the source has them, and its rows: a location and the cells.

    Raises:
        ValueError: the path has another kind, or a hub data set has no split.
    """
    text, label = (WORDS, LABELS) if words else (TEXT, LABEL)
    columns = [*((name, text) for name in source.text), *([] if source.label is None else [(source.label, label)])]
    if Path(source.path).suffix.lower() in SUFFIXES:
        hint = "" if source.columns else "; name others with --text and --label, or all with --columns if no header"
        return (), read_rows(Table(source.path, columns, source.columns, hint))

    # Any other path is a data set of the hub, which brings the names of its classes.
    if Path(source.path).exists():
        raise ValueError(f"{source.path} is none of {', '.join(SUFFIXES)}")
    if source.split is None:
        raise ValueError(f"{source.path} is no {', '.join(SUFFIXES)} file; for a hub data set name a split")

    datasets = import_optional("datasets", "a hub data set", "experiments")
    name, _, configuration = source.path.partition(":")
    found = datasets.load_dataset(name, configuration or None, split=source.split)
    feature = (getattr(found, "features", None) or {}).get(source.label)
    feature = getattr(feature, "feature", feature)  # for a list, its elements' feature
    return tuple(getattr(feature, "names", None) or ()), Table(source.path, columns).read(found)


# Labels

LabelNames = Sequence[Sequence[str]]  # the labels of each text, as they are written


def number_of(label: str) -> float | None:
    """Return a label as a number, or None."""
    return float(label) if NUMBER.fullmatch(label) else None


def plain_name(label: str) -> str:
    """Return a label without spaces around it, and a whole number without a fraction."""
    name = UNSEEN.sub("", label)
    number = number_of(name)
    return str(int(number)) if number is not None and number.is_integer() else name


def label_name(label: Any, named: Sequence[str], place: str) -> str:
    """Return a label as it is written, or the name for an index of named classes.

    Raises:
        ValueError: it is empty, nan, or infinite in float32.
    """
    name = named[label] if isinstance(label, int) and 0 <= label < len(named) else plain_name(str(label))
    if name.lower().lstrip("+-") in ("nan", "inf", "infinity") or not name or abs(number_of(name) or 0) > LARGEST:
        raise ValueError(f"{place}: the label is {label!r}; give the row one, or leave it out")
    return name


def collect_classes(
    column: str, found: LabelNames, locations: Sequence[str], classes: Sequence[str], named: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names of the classes, the model's if these are all; empty if labels are values.

    Raises:
        ValueError: as for `check_names`.
    """
    used = {label for each in found for label in each} - {str(NO_LABEL)}
    if (used if not named else {*named}) <= {*map(plain_name, classes)}:
        return tuple(classes)
    if None not in map(number_of, used):
        return ()
    if not named:
        check_names(column, found, locations)
    return named or tuple(sorted(used, key=lambda name: (name != OUTSIDE, name)))


def check_names(column: str, found: LabelNames, locations: Sequence[str]) -> None:
    """Check that labels, which are not all numbers, are names of classes.

    Raises:
        ValueError: one is a number or like one, stands for none, or differs from another only in upper and lower case;
            or a rare one is the name of the column, as if files were joined.
    """
    known: dict[str, str] = {}  # {label in lower case: as it was written first}
    counts = Counter(label for each in found for label in {*each} - {str(NO_LABEL)})

    # Labels are all names or all numbers; the fewer ones of either kind are the suspicious ones.
    mostly_numbers = 2 * sum(n for label, n in counts.items() if number_of(label) is not None) > counts.total()
    for place, each in zip(locations, found, strict=True):
        for label in each:
            first, fault = known.setdefault(label.casefold(), label), None
            number = number_of(label) is not None

            if label != str(NO_LABEL) and number != mostly_numbers:
                fault = "is a number, and most are words" if number else "is a word, and most are numbers"
            elif not number and LIKE_A_NUMBER.fullmatch(label):
                fault = "looks like a number: write it with a point, such as 0.5"
            elif label.casefold() in MISSING:
                fault = "stands for none: leave the row out"
            elif first != label:
                fault = f"differs from {first!r} only in upper and lower case: write one of them"
            elif label.casefold() == column.casefold() and is_rare(counts[label], len(found)):
                fault = "is the name of the column, as if files were joined: remove the row"

            if fault:
                raise ValueError(f"{place}: the label {label!r} {fault}; or {CLASSES}")


def is_rare(times: int, examples: int) -> bool:
    """Return whether only one example, or fewer than 1 % of them, has a label."""
    return times < max(2, examples / 100)


def warn_of_rare_labels(name: str, found: LabelNames) -> None:
    """Warn about labels that only one example, or fewer than 1 % of them, has."""
    counts = Counter(label for each in found for label in {*each})
    rare = [f"{label} ({times})" for label, times in sorted(counts.items()) if is_rare(times, len(found))]
    if rare:
        shown = ", ".join([*rare[:20], *([f"and {len(rare) - 20} more"] if len(rare) > 20 else [])])
        few = f"few of the {len(found)} examples of {name} have these labels"
        warnings.warn(f"{few}; are they misspelt? {shown}", stacklevel=3)


def label_values(
    found: LabelNames, locations: Sequence[str], classes: Sequence[str], words: bool
) -> Iterator[tuple[float, ...]]:
    """Yield the labels of each text as numbers: the index of the class, or the value.

    Raises:
        ValueError: one is neither a class nor a number; or two classes share a name.
    """
    names = [plain_name(name) for name in classes]
    if len({*names}) < len(names):
        raise ValueError(f"two classes share a name: {', '.join(classes)}")

    # A label may be the name of a class or its index; if a class is named by a number, it is the name.
    numbers = {label: number_of(label) for each in found for label in each}
    if (names and None in numbers.values()) or any(number_of(name) is not None for name in names):
        numbers = {label: float(names.index(label)) if label in names else None for label in numbers}
    elif names:
        numbers = {label: x if x in range(len(names)) else None for label, x in numbers.items()}
    if words:
        numbers[str(NO_LABEL)] = float(NO_LABEL)

    # The first label that is neither is told with its place.
    for place, each in zip(locations, found, strict=True):
        wrong = [label for label in each if numbers[label] is None]
        if wrong and names:
            raise ValueError(f"{place}: {wrong[0]!r} is not one of the classes {', '.join(classes)}")
        if wrong:
            way = "write it with a point, such as 0.5" if LIKE_A_NUMBER.fullmatch(wrong[0]) else CLASSES
            raise ValueError(f"{place}: the label {wrong[0]!r} is not a number; {way}")
        yield tuple(x for label in each if (x := numbers[label]) is not None)


def read_tokenizer(checkpoint: Checkpoint, max_length: int | None = None, *, sentences: bool = False) -> BertTokenizer:
    """Return the tokenizer of a checkpoint, with the length to truncate to as its `model_max_length`.

    Args:
        max_length: as for `read_length`.
        sentences: follow sentence-transformers' files, which are for the model without another head.

    Raises:
        FileNotFoundError: there is no tokenizer.
        ValueError: `max_length` leaves no room for a word.
    """
    tokenizer = copy.copy(checkpoint.tokenizer)
    tokenizer.sentences = tokenizer.sentences if sentences else Processing()
    tokenizer.model_max_length = read_length(max_length, tokenizer)
    special = tokenizer.backend_tokenizer.num_special_tokens_to_add(True)  # for a pair
    if tokenizer.model_max_length <= special:
        length = tokenizer.model_max_length
        raise ValueError(f"--max-length {length} leaves no room for a word, with {special} special tokens; give more")
    return tokenizer


Row = tuple[tuple[int, ...], tuple[int, ...]]  # ids and token types; these are empty if the tokenizer makes none


def read_length(max_length: int | None, tokenizer: BertTokenizer) -> int:
    """Return the length in tokens to truncate to: the given one, sentence-transformers' files', or MAX_LENGTH."""
    if max_length is not None:
        return check_count("max_length", max_length)
    return tokenizer.sentences.max_length or MAX_LENGTH


@dataclass(frozen=True)
class EncodedExamples:
    """Examples as token ids; a pair is one row with two segments, or two rows in all pairs.

    Labels of words become labels of tokens: the word's for its first token, -100 for later ones.
    """

    rows: tuple[Row, ...]
    labels: tuple[Label, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def width(self) -> int:
        """Rows per example."""
        return len(self.rows) // len(self.labels)

    def length(self, index: int) -> int:
        """Return the number of tokens of an example's longest row."""
        return max(len(ids) for ids, _ in self.rows[index * self.width : (index + 1) * self.width])

    def batch(self, indices: Sequence[int], dtype: torch.dtype, device: Any = "cpu") -> dict[str, Tensor]:
        """Return these examples padded to the longest; the two rows of a pair follow each other.

        Args:
            dtype: the dtype of the labels.
            device: the device to put the batch on.
        """
        rows = [self.rows[i * self.width + k] for i in indices for k in range(self.width)]
        labels: Any = [self.labels[i] for i in indices]
        if isinstance(labels[0], tuple):
            labels = pad(labels, NO_LABEL)
        batch = {
            "input_ids": pad([ids for ids, _ in rows]),
            "attention_mask": pad([[1] * len(ids) for ids, _ in rows]),
            **({"token_type_ids": pad([types for _, types in rows])} if rows[0][1] else {}),
            "labels": torch.as_tensor(labels, dtype=dtype, device="cpu"),
        }
        return {name: x.to(device) for name, x in batch.items()}

    def targets(self) -> NDArray[Any]:
        """Return the labels in the shape of outputs: for each example, or each word that the model reads."""
        if not isinstance(self.labels[0], tuple):
            return np.array(self.labels)
        rows = (label if isinstance(label, tuple) else (label,) for label in self.labels)
        return pad_rows([np.array([x for x in row if x != NO_LABEL]) for row in rows], NO_LABEL)


def pad(rows: Iterable[Sequence[float]], value: int = 0) -> Tensor:
    """Return rows of integers as one tensor, filled up with a value on the right."""
    tensors = [torch.tensor(row, dtype=torch.long, device="cpu") for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value)


def pad_rows(rows: Sequence[NDArray[Any]], value: float) -> NDArray[Any]:
    """Return rows of several lengths, (words, …), as one array (rows, longest, …), filled up with a value."""
    return pad_sequence([*map(torch.from_numpy, rows)], batch_first=True, padding_value=value).numpy()


def encode_examples(
    examples: Examples, tokenizer: BertTokenizer, limit: int | None = None, *, apart: bool = False, words: bool = False
) -> EncodedExamples:
    """Tokenize examples; pairs become one row with two segments, or with `apart` two rows.  No labels become 0.

    Args:
        limit: the number of tokens to truncate to; by default the tokenizer's `model_max_length`.
    """
    most = limit or tokenizer.model_max_length
    if words:
        found = tokenizer.encode_texts([list(text) for text in examples.texts], most, is_split_into_words=True)
        return EncodedExamples(rows_of(found), tuple(map(label_tokens, found.encodings, examples.labels)))
    texts: Any = list(chain(*examples.texts)) if apart else examples.inputs
    labels = examples.labels or (0.0,) * len(examples)
    return EncodedExamples(rows_of(tokenizer.encode_texts(texts, most)), labels)


def rows_of(batch: BatchEncoding) -> tuple[Row, ...]:
    """Return the rows of encoded texts."""
    ids = batch["input_ids"]
    types = batch.get("token_type_ids", [()] * len(ids))
    return tuple((tuple(row), tuple(each)) for row, each in zip(ids, types, strict=True))


def label_tokens(encoding: Any, labels: Any) -> tuple[float, ...]:
    """Return a label for each token: the word's for its first token, -100 for later ones."""
    words = pairwise([None, *encoding.word_ids])
    return tuple(NO_LABEL if word is None or word == last else labels[word] for last, word in words)


def batch_indices(
    data: EncodedExamples, size: int, seed: int | None = None, *, positions: int | None = None
) -> list[list[int]]:
    """Return the indices of each batch: sorted by length, or with a seed shuffled among examples of similar length.

    Args:
        size: examples in a batch.  With `positions` a batch has so many tokens instead, with padding, or one example.
    """
    if seed is None:
        batches: list[list[int]] = []
        for i in sorted(range(len(data)), key=data.length):
            used, most = (1, size) if positions is None else (data.length(i), positions)
            if not batches or (len(batches[-1]) + 1) * used > most:
                batches.append([])
            batches[-1].append(i)
        return batches
    draw = random.Random(seed)
    indices = draw.sample(range(len(data)), len(data))
    groups = (sorted(indices[at : at + GROUP * size], key=data.length) for at in range(0, len(indices), GROUP * size))
    found = [group[at : at + size] for group in groups for at in range(0, len(group), size)]
    draw.shuffle(found)
    return found
