"""Texts to batches: check the texts, and make tensors of their encodings.

Letters:  B sequences · S positions, padding included
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch

from bertlite.support.habits import habit_hint

if TYPE_CHECKING:
    from numpy import integer
    from numpy.typing import NDArray
    from tokenizers import Encoding, Tokenizer

Text: TypeAlias = str | Sequence[str]  # a sequence is one text split into words
TextOrPair: TypeAlias = Text | tuple[Text, Text]
Ids: TypeAlias = "int | Sequence[Ids] | torch.Tensor | NDArray[integer[Any]]"
Choices: TypeAlias = Mapping[Any, str | None]  # {value of an argument: its meaning}

DIRECTIONS: Choices = {name: name for name in ("right", "left")}
LENGTHS: Choices = {name: name for name in ("longest", "max_length")}
STRATEGIES: Choices = {name: name for name in ("longest_first", "only_first", "only_second")}
PADDING: Choices = {**dict.fromkeys((False, None, "do_not_pad")), True: "longest", **LENGTHS}
TRUNCATION: Choices = {**dict.fromkeys((False, None, "do_not_truncate")), True: "longest_first", **STRATEGIES}
# they lose the space before them, in this order
CLEANED = (".", "?", "!", ",", "' ", "n't", "'m", "'s", "'ve", "'re")
COLUMNS = {"input_ids": "ids", "token_type_ids": "type_ids", "attention_mask": "attention_mask"}  # in an Encoding


class BatchEncoding(dict[str, Any]):
    """The result of a tokenizer: a dict to pass to a model as **batch; its items are attributes too.

    `encodings` has one `tokenizers.Encoding` for each sequence, with its `tokens`, `word_ids`, `sequence_ids`,
    `offsets`, `special_tokens_mask`, and `overflowing`, the part that truncation cut off.
    """

    encodings: Sequence["Encoding"]

    def __init__(self, items: Mapping[str, Any] | None = None, encodings: Sequence["Encoding"] = ()) -> None:
        super().__init__(items or {})
        self.encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            own = ", ".join(self) or "nothing"
            raise AttributeError(f"this encoding has no {name}; it has {own}{habit_hint(name)}") from None

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Self:
        """Move the tensors to a device, in place, and return this encoding."""
        for name, value in self.items():
            if isinstance(value, torch.Tensor):
                self[name] = value.to(device, non_blocking=non_blocking)
        return self


def look_up(name: str, value: bool | str | None, choices: Choices) -> str | None:
    """Return the meaning of an argument's value, or raise ValueError."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; have: {', '.join(map(repr, choices))}")
    return choices[value]


def read_texts(text: Any, pair: Any, words: bool) -> tuple[list[TextOrPair], bool]:
    """Return a list of the texts, with pairs as tuples, and True if they were given as a batch.

    As in transformers, one text with an empty pair is a text without a pair; in a batch an empty pair is a pair.
    Raise ValueError for anything that is not a text or, with `words`, not a list of words.
    """
    listed = isinstance(text, list | tuple)
    if not listed and (words or not isinstance(text, str)):
        wanted = "a list of words, or several" if words else "a string, or a list of them"
        raise ValueError(f"the text is {text!r:.80}, a {type(text).__name__}; expected {wanted}")
    if not listed or (words and not (text and isinstance(text[0], list | tuple))):
        empty = pair is None or (isinstance(pair, str | list | tuple) and not pair)
        return [text if empty else (text, pair)], False
    if pair is None:
        return [tuple(each) if is_pair(each, words) else each for each in text], True
    if not isinstance(pair, list | tuple) or len(pair) != len(text):
        count = len(pair) if isinstance(pair, list | tuple) else f"a {type(pair).__name__}"
        raise ValueError(f"there are {len(text)} texts but text_pair is {count}; give one for each")
    return list(zip(text, pair, strict=True)), True


def is_pair(text: object, words: bool) -> bool:
    if not isinstance(text, list | tuple) or len(text) != 2:
        return False
    return not words or all(isinstance(part, list | tuple) for part in text)


@contextmanager
def explained_errors(what: str, texts: Iterable[object] = ()) -> Iterator[None]:
    """Turn the errors of the Rust tokenizer into a ValueError that names the text, or `what`."""
    try:
        yield
    except TypeError:
        raise text_error(texts) from None
    except BaseException as error:  # the Rust library raises plain Exception, and its panics are BaseException
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {error}") from None


@contextmanager
def lower_casing(backend: "Tokenizer") -> Iterator[None]:
    """Make a Rust tokenizer lower-case texts before anything else; special tokens in them stay."""
    from tokenizers.normalizers import Lowercase, Normalizer, Sequence

    before: Normalizer | None = backend.normalizer
    backend.normalizer = Sequence([Lowercase(), *([] if before is None else [before])])
    try:
        yield
    finally:
        backend.normalizer = before


def text_error(texts: Iterable[object]) -> ValueError:
    """Return the error that names the text that the Rust tokenizer cannot encode."""
    for i, text in enumerate(texts):
        parts = text if isinstance(text, tuple) else (text,)
        for word in (word for part in parts for word in (part if isinstance(part, list | tuple) else (part,))):
            if not isinstance(word, str):
                return ValueError(f"text {i} holds {word!r:.80}, a {type(word).__name__}; expected a string")
            if half := [letter for letter in word if "\ud800" <= letter <= "\udfff"]:
                return ValueError(f"text {i} holds {half[0]!a}, half a character: decode it with errors='replace'")
    return ValueError("the texts are neither all strings nor all pairs; lists of words need is_split_into_words")


def to_lists(value: Any) -> Any:
    """Return a tensor, an array or nested lists of them as lists and numbers of Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [to_lists(each) for each in value] if isinstance(value, list | tuple) else value


def to_tensor(name: str, column: list[list[int]], kind: str) -> "torch.Tensor | NDArray[Any]":
    """Return a column as a (B, S) tensor ("pt") or array ("np") of int64; raise ValueError for unequal rows."""
    if kind not in ("pt", "np"):
        raise ValueError(f"return_tensors={kind!r} is unknown; have: 'pt', 'np', or None for lists")
    lengths = sorted({len(row) for row in column})
    if len(lengths) > 1:
        raise ValueError(f"{name} has rows of {lengths[0]} to {lengths[-1]} and cannot be a tensor: pass padding=True")
    found = torch.tensor(column, dtype=torch.int64, device="cpu")
    return found if kind == "pt" else found.numpy()
