"""Texts for a search: read from a file, with labels if it has them, and made into batches."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertlite.heads.models import BertForSequenceClassification
from bertlite.lab.experiments.data import FILES, DataSource, read_file
from bertlite.records import sha256_of
from bertlite.tokenizer import BertTokenizer

BATCH = 32
Text = str | tuple[str, str]


@dataclass(frozen=True)
class Texts:
    """Texts, or pairs of them, and their labels if the file has any."""

    texts: tuple[Text, ...]
    labels: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def sha256(self) -> str:
        return sha256_of(repr((self.texts, self.labels)))

    def chosen(self, indices: Sequence[int]) -> "Texts":
        """Return these texts."""
        labels = None if self.labels is None else tuple(self.labels[i] for i in indices)
        return Texts(tuple(self.texts[i] for i in indices), labels)

    def split(self, fit: int, held_out: int, seed: int) -> tuple["Texts", "Texts"]:
        """Draw texts to fit to, and others to judge by: as many as asked for, but no more than a fifth of all.

        Raises:
            ValueError: there are fewer than ten texts, too few to hold any back.
        """
        if len(self) < 10:
            raise ValueError(f"there are {len(self)} texts; a search needs 10 or more, and does well with a thousand")
        order = random.Random(seed).sample(range(len(self)), len(self))
        judged = min(held_out, len(self) // 5)
        return self.chosen(order[judged : judged + fit]), self.chosen(order[:judged])


def read_texts(source: DataSource, labelled: bool) -> Texts:
    """Read the texts of a file: a line each in .txt, else of one column or, for pairs, two.

    Args:
        source: the file and the names of its columns.
        labelled: read the column with the label too.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is of another kind, has no texts, or lacks a column.
    """
    path = Path(source.path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.suffix == ".txt":
        if len(source.text) > 1 or labelled:
            raise ValueError(f"{path} has a text on each line, and no columns: leave out --label, and name no pair")
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        found = Texts(tuple(line for line in lines if line.strip()))
    else:
        found = read_columns(source, labelled)
    if not len(found):
        raise ValueError(f"{path} has no texts")
    return found


def read_columns(source: DataSource, labelled: bool) -> Texts:
    """Read texts, and labels if asked for, from the columns of a file."""
    if Path(source.path).suffix not in FILES:
        raise ValueError(f"{source.path} is none of .txt, {', '.join(FILES)}")
    if not 1 <= len(source.text) <= 2:
        raise ValueError(f"a text has one column or two; {len(source.text)} were named: {', '.join(source.text)}")
    wanted = (*source.text, *((source.label,) if labelled else ()))
    texts: list[Text] = []
    labels: list[str] = []
    for number, row in enumerate(read_file(source), 1):
        missing = [name for name in wanted if row.get(name) is None]
        if missing:
            have = ", ".join(str(name) for name in row if name is not None)
            raise ValueError(f"{source.path}, row {number}: no {' and no '.join(missing)}; its columns are {have}")
        first, *second = (str(row[name]) for name in source.text)
        texts.append((first, second[0]) if second else first)
        if labelled:
            labels.append(str(row[source.label]))
    return Texts(tuple(texts), tuple(labels) if labelled else None)


def labels_for(texts: Texts, model: Any) -> Tensor | None:
    """Return the labels as a model's head takes them: class indices, or numbers for a head with one output.

    Raises:
        ValueError: the model does not classify texts, or a label is no class of it, by name or number, nor a number
            for a regression.
    """
    if texts.labels is None:
        return None
    if not isinstance(model, BertForSequenceClassification):
        raise ValueError(f"{type(model).__name__} does not classify texts: leave out --label, it needs no labels")
    config = model.config
    names = {name: index for index, name in config.id2label.items()}
    found: list[float] = []
    for label in texts.labels:
        if config.num_labels == 1:
            found.append(parse_number(label))
        elif label in names:
            found.append(names[label])
        else:
            value = parse_number(label)
            if value not in range(config.num_labels):
                raise ValueError(f"the label {label!r} is no class of the model; have: {', '.join(names)}")
            found.append(value)
    return torch.tensor(found, dtype=torch.float32 if config.num_labels == 1 else torch.long)


def parse_number(label: str) -> float:
    """Return a label as a number."""
    try:
        return float(label)
    except ValueError:
        raise ValueError(f"the label {label!r} is no number, and no class of the model") from None


def batches_of(
    texts: Texts, tokenizer: BertTokenizer, labels: Tensor | None, max_length: int, device: str = "cpu"
) -> list[dict[str, Tensor]]:
    """Return batches of texts of like length, padded, in a fixed order."""
    encoded: list[Any] = [encode(tokenizer, text, max_length) for text in texts.texts]
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]["input_ids"]))
    batches = []
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        length = max(len(encoded[i]["input_ids"]) for i in rows)
        padded = {
            name: torch.tensor([[*encoded[i][name], *[0] * (length - len(encoded[i][name]))] for i in rows])
            for name in ("input_ids", "token_type_ids", "attention_mask")
        }
        if labels is not None:
            padded["labels"] = labels[rows]
        batches.append({name: value.to(device) for name, value in padded.items()})
    return batches


def encode(tokenizer: BertTokenizer, text: Text, max_length: int) -> Any:
    """Return the ids of a text or a pair, with their segments and a mask."""
    first, second = (text, None) if isinstance(text, str) else text
    return tokenizer(first, second, truncation=True, max_length=max_length)
