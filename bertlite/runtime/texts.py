"""Turn texts into token ids, as the library of the folder would, with only tokenizers."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from tokenizers.normalizers import Lowercase, Sequence

from .processing import Processing

T = TypeVar("T")
R = TypeVar("R")
Pair = tuple[str, str]
CHUNK = 4096  # texts that are tokenized at once
SLICE = 1 << 16  # bytes that are searched at once, so that a cache holds them
GOLDEN = 0.6180339887498949  # the parts after the point of its multiples are spread evenly, however many there are


class TokenBatch:
    """Encoded texts, one after another: ids and segments, (T,), and each text's number of tokens."""

    def __init__(self, encodings: Several[Encoding], segments: bool) -> None:
        def column(name: str) -> NDArray[np.int64]:
            return np.array([i for each in encodings for i in getattr(each, name)], dtype=np.int64)

        self.encodings, self.lengths = encodings, [len(each) for each in encodings]
        self.ids, self.segments = column("ids"), column("type_ids") if segments else None


class Texts:
    """The tokenizer of a folder, with its settings."""

    def __init__(self, path: Path, settings: Processing) -> None:
        self.path = path
        try:
            self.tokenizer = Tokenizer.from_buffer(path.read_bytes())  # the name need not be UTF-8
        except Exception as error:  # tokenizers raises no narrower class
            raise ValueError(f"{path} is damaged: {error}; pack the model again") from None
        if settings.lower_case:  # as sentence-transformers does: special tokens stay
            before = self.tokenizer.normalizer
            self.tokenizer.normalizer = Sequence([Lowercase(), *([] if before is None else [before])])
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(settings.max_length, direction=settings.truncation_side or "right")

    def check_ids(self, words: int) -> None:
        """Raise ValueError if a token has an id beyond a vocabulary of so many words.

        Reading the vocabulary takes half as long as loading the tokenizer, so a quick look at the file comes first.
        """
        if self.tokenizer.get_vocab_size() <= words and not has_number_from(self.path.read_bytes(), words):
            return
        ids = self.tokenizer.get_vocab()
        last = max(ids, key=lambda token: ids[token])
        if ids[last] >= words:
            raise ValueError(
                f"{self.path} has token {last!r:.60} with id {ids[last]}, but the model has {words} words, from 0:"
                " pack the tokenizer of this model"
            )

    def encode(self, texts: Several[str | Pair], prompt: str = "") -> list[Encoding]:
        """Return the encodings of texts, or of pairs of texts, that `check_texts` returned."""
        given = [prompt + text if isinstance(text, str) else (prompt + text[0], text[1]) for text in texts]
        return self.tokenizer.encode_batch(given)

    def prompt_length(self, prompt: str) -> int:
        """Return the number of tokens that a prompt takes before a text, special ones before it included."""
        ids, added = self.tokenizer.encode(prompt).ids, self.tokenizer.get_added_tokens_decoder()
        return len(ids) - (len(ids) > 0 and ids[-1] in added and added[ids[-1]].special)


def has_number_from(text: bytes, least: int) -> bool:
    """Return whether digits in a text, other than fractions, are a number that is not below `least`."""
    count = len(str(least))
    for start in range(0, len(text), SLICE):
        # Slices overlap by as many digits as the number has, so that none is cut in two.
        before = text[start - 1 : start] or b" "
        x = np.frombuffer(before + text[start : start + SLICE + count] + b" ", np.uint8)

        # The ends of runs of digits.  A run that begins before the slice is no number, nor is one behind a point.
        first, end = np.flatnonzero(np.diff(x - ord("0") < 10, prepend=False)).reshape(-1, 2).T
        is_number = (first > 0) & (x[first - 1] != ord("."))
        first, length = first[is_number], (end - first)[is_number]

        # Numbers of as many digits are ordered as their digits are.
        digits = x[first[length == count][:, None] + np.arange(count)].view(f"S{count}")
        if (length > count).any() or (digits >= str(least).encode()).any():
            return True
    return False


def check_texts(texts: Any, *, pairs: bool = False) -> list[Any]:
    """Return texts, or also pairs of texts, as a list of strings and tuples.

    Raises:
        TypeError: they are no list, or one is no text; the message names it.
        ValueError: one holds half of a surrogate pair.
    """
    listed = isinstance(texts, Iterable) and not isinstance(texts, str | bytes | Mapping | Set)
    listed = listed and getattr(texts, "ndim", 1) == 1  # 2 for an array of columns
    if not listed or (pairs and isinstance(texts, tuple) and is_text_pair(texts)):
        raise TypeError(f"texts is {texts!r:.80}; give a list of texts{', or of pairs of texts' if pairs else ''}")
    checked = [tuple(text) if pairs and is_text_pair(text) else text for text in texts]
    for i, text in enumerate(checked):
        for part in text if pairs and is_text_pair(text) else [text]:
            check_text(f"text {i}", part, " or a pair of strings" if pairs else "")
    return checked


def is_text_pair(x: Any) -> bool:
    return isinstance(x, tuple | list) and len(x) == 2 and all(isinstance(part, str) for part in x)


def check_text(name: str, text: Any, alternative: str = "") -> None:
    """Raise TypeError unless this is a string, ValueError if it holds half of a surrogate pair."""
    if not isinstance(text, str):
        raise TypeError(f"{name} is {text!r:.80}; give a string{alternative}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is {text!r:.80}: character {error.start} is half of a surrogate pair; decode the text with"
            " errors='replace'"
        ) from None


def batches(lengths: Several[int], tokens: int, padded: bool = False, most: float = math.inf) -> Iterator[list[int]]:
    """Yield the indices of texts in batches of at most `tokens` tokens, the longest text first.

    So memory runs out in the first batch or never.  Texts of equal length keep their order.  One with more tokens is a
    batch of its own.

    Args:
        padded: each text of a batch takes as many tokens as its longest.
        most: the number of texts that a batch may have.
    """
    batch: list[int] = []
    used = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):  # stable
        needed = lengths[batch[0]] if batch and padded else lengths[i]
        if batch and (used + needed > tokens or len(batch) >= most):
            yield batch
            batch, used, needed = [], 0, lengths[i]
        batch.append(i)
        used += needed
    if batch:
        yield batch


def run_batches(
    items: Several[T], groups: Iterable[list[int]], run: Callable[[Iterable[list[T]]], Iterable[R]]
) -> Iterator[tuple[list[int], R]]:
    """Yield the indices of the items of each batch, and its result: the loop of all that runs texts.

    The first batch stays the first.  Later ones alternate among all lengths, so that the rate so far predicts the time
    that is left.

    Args:
        items: texts, or their encodings.
        groups: the indices of each batch, such as `batches` yields.
        run: yields the results of batches, in order.  It may take a few of them ahead.
    """
    groups = list(groups)
    spread = [groups[i] for i in sorted(range(len(groups)), key=lambda i: i * GOLDEN % 1)]
    yield from zip(spread, run([items[i] for i in rows] for rows in spread), strict=True)
