"""Texts for a search: read from a file, with labels if it has them, and made into batches."""

import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from os import PathLike, fspath
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bertlite.config import BertConfig
from bertlite.experiments.data import DataSource, Examples, batch_indices, encode_examples, read_examples
from bertlite.experiments.evaluate import task_of_head
from bertlite.experiments.settings import PruneSettings
from bertlite.opened.checkpoint import class_of
from bertlite.pruning.importance.batches import inputs_of
from bertlite.runtime.texts import check_texts
from bertlite.support.rows import format_of
from bertlite.tokenizer import BertTokenizer

HELD_OUT = 256  # the most texts to judge by
TEXTS_TO_FIT, TOKENS_OF_INPUT = 1024, 16  # by default: texts, or fewer with these tokens for each matrix input
POSITIONS = 512  # the most in a batch, unless one text has more: in a base layer gradients keep 37 kB for each

Texts: TypeAlias = str | PathLike[str] | Sequence[str | tuple[str, str]]  # a file, or texts and pairs themselves


def examples_of(
    texts: Texts, text: tuple[str, ...], label: str | None, columns: tuple[str, ...], config: BertConfig
) -> Examples:
    """Return the texts of a file, or pairs of them: lines of plain text, or one column or two; or texts in memory.

    Args:
        text, label, columns: as for `DataSource`; labels must fit the model's head.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: as for `read_examples`; the model takes no labels of texts, or not these; or labels are requested
            for texts in memory.
    """
    if not isinstance(texts, str | PathLike):
        if label is not None:
            raise ValueError("texts in memory have no labels: give a file, or leave label out")
        checked = check_texts(texts, pairs=True)
        return Examples("those given", tuple((each,) if isinstance(each, str) else each for each in checked), ())
    head: Any = class_of(config)
    if label is not None and not (getattr(head, "own_labels", False) and not head.needs_tokens):
        raise ValueError(f"{head.__name__} does not classify texts: leave out --label, it needs no labels")
    source = DataSource(fspath(texts), text, label, columns)
    found = read_examples(source, classes=[str(config.id2label[i]) for i in sorted(config.id2label)])
    if label is not None:
        task_of_head(config.num_labels).check(found, config)
    return found


def read_both(
    texts: Texts, dev: Texts | None, settings: PruneSettings, config: BertConfig
) -> tuple[Examples, Examples | None]:
    """Read the texts to fit to and the texts to judge by; plain texts have no labels, even if others have."""

    def read(given: Texts, label: str | None) -> Examples:
        return examples_of(given, settings.text, label, settings.columns, config)

    if dev is None:
        return read(texts, settings.label), None
    plain = not isinstance(texts, str | PathLike) or format_of(fspath(texts)) == "text"
    found = read(texts, None if plain or settings.labels_for == "judging" else settings.label)
    judging = read(dev, settings.label)
    task_of_head(config.num_labels).check_both(found, judging)
    return found, judging


def split(texts: Examples, held_out: int, seed: int, dev: Examples | None = None) -> tuple[Examples, Examples]:
    """Shuffle texts and take out those to judge by, unless they are `dev`: `held_out`, but at most a fifth of all.

    Raises:
        ValueError: there are fewer than ten texts, too few to hold out any.
    """
    if len(texts) < 10:
        raise ValueError(f"there are {len(texts)} texts; a search needs 10 or more, better a thousand")
    order = random.Random(seed).sample(range(len(texts)), len(texts))
    judged = min(held_out, len(texts) // 5) if dev is None else 0
    return texts.chosen(order[judged:]), dev or texts.chosen(order[:judged])


def draw_texts(
    every: Examples, dev: Examples | None, model: Any, tokenizer: BertTokenizer, longest: int, settings: PruneSettings
) -> tuple[Examples, Examples, Examples]:
    """Return texts to fit to, all texts but those to judge by, and those to judge by."""
    rest, held_out = split(every, HELD_OUT, settings.seed, dev)
    if dev is None and (copies := sum(map({*rest.texts}.__contains__, held_out.texts))):
        warnings.warn(
            f"{copies} of the {len(held_out)} texts held out of {every.name} are there again, so the model may be"
            " fitted to them: remove repeated texts, or give --dev FILE",
            stacklevel=2,
        )
    if settings.labels_for == "judging":
        rest = replace(rest, labels=())
    fit = rest.chosen(range(min(settings.calibration or TEXTS_TO_FIT, len(rest))))
    if settings.calibration is None:
        fit = with_tokens(fit, TOKENS_OF_INPUT * model.config.intermediate_size, tokenizer, longest)
    return fit, rest, held_out


def with_tokens(texts: Examples, tokens: int, tokenizer: BertTokenizer, max_length: int) -> Examples:
    """Return the first texts that together have this many tokens, or all."""
    data = encode_examples(texts, tokenizer, max_length)
    too_few = sum(count < tokens for count in accumulate(map(data.length, range(len(texts)))))
    return texts.chosen(range(min(too_few + 1, len(texts))))


def batches_of(texts: Examples, tokenizer: BertTokenizer, model: Any, max_length: int) -> list[dict[str, Tensor]]:
    """Return batches of texts of similar length, padded, in a fixed order, on the model's device."""
    data = encode_examples(texts, tokenizer, max_length)
    dtype = torch.float32 if model.config.num_labels == 1 else torch.long
    found = [data.batch(indices, dtype, model.device) for indices in batch_indices(data, 0, positions=POSITIONS)]
    return found if texts.labels else [inputs_of(batch) for batch in found]
