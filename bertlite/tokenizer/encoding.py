"""Texts to batches: check the texts, collect the columns of their encodings, and make tensors.

Letters:  B sequences · S positions, padding included
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch

if TYPE_CHECKING:
    from numpy import integer
    from numpy.typing import NDArray
    from tokenizers import Encoding

Text: TypeAlias = str | Sequence[str]  # a sequence is one text split into words
TextOrPair: TypeAlias = Text | tuple[Text, Text]
Ids: TypeAlias = "int | Sequence[Ids] | torch.Tensor | NDArray[integer[Any]]"

SIDES = {"right": "right", "left": "left"}
PADDING: dict[bool | str | None, str | None] = {
    **dict.fromkeys((False, None, "do_not_pad")),
    "longest": "longest",
    "max_length": "max_length",
    True: "longest",
}
TRUNCATION: dict[bool | str | None, str | None] = {
    **dict.fromkeys((False, None, "do_not_truncate")),
    **{name: name for name in ("longest_first", "only_first", "only_second")},
    True: "longest_first",
}
COLUMNS: dict[str, Callable[["Encoding"], Any]] = {  # the value of a column for one sequence
    "input_ids": lambda encoding: encoding.ids,
    "token_type_ids": lambda encoding: encoding.type_ids,
    "attention_mask": lambda encoding: encoding.attention_mask,
    "special_tokens_mask": lambda encoding: encoding.special_tokens_mask,
    "offset_mapping": lambda encoding: encoding.offsets,
    "length": len,
}
SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class BatchEncoding(dict[str, Any]):
    """The result of a tokenizer: a dict, to be passed to a model as **batch, whose items are attributes too.

    `encodings` has one `tokenizers.Encoding` per sequence, which knows words and characters.
    """

    encodings: Sequence["Encoding"]

    def __init__(self, items: Mapping[str, Any] | None = None, encodings: Sequence["Encoding"] = ()) -> None:
        super().__init__(items or {})
        self.encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this encoding has no {name}; it has {', '.join(self) or 'nothing'}") from None

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Self:
        """Move the tensors to a device, in place, and return this encoding."""
        for name, value in self.items():
            if isinstance(value, torch.Tensor):
                self[name] = value.to(device, non_blocking=non_blocking)
        return self

    def tokens(self, sequence: int = 0) -> list[str]:
        """Return the tokens of a sequence."""
        return self.encodings[sequence].tokens

    def word_ids(self, sequence: int = 0) -> list[int | None]:
        """Return for each token the index of its word in the text; None for special tokens."""
        return self.encodings[sequence].word_ids

    def sequence_ids(self, sequence: int = 0) -> list[int | None]:
        """Return for each token 0 if it is from the text and 1 if from the pair; None for special tokens."""
        return self.encodings[sequence].sequence_ids


# Arguments -----------------------------------------------------------------------------------------------------------


def look_up(name: str, value: bool | str | None, table: Mapping[Any, str | None]) -> str | None:
    """Return the entry of a table, such as PADDING, for an argument, or raise ValueError."""
    if value not in table:
        raise ValueError(f"{name}={value!r} is unknown; have: {', '.join(map(repr, table))}")
    return table[value]


def read_texts(text: Any, pair: Any, is_split_into_words: bool) -> tuple[list[TextOrPair], bool]:
    """Return a list of the texts, those with a pair as tuples, and True if they were given as a batch.

    As in transformers, one text with an empty pair is a text without a pair; in a batch an empty pair is a pair.

    Raises:
        ValueError: they are not texts.
    """
    listed = isinstance(text, list | tuple)
    if not listed and (is_split_into_words or not isinstance(text, str)):
        wanted = "a list of words, or several" if is_split_into_words else "a string, or a list of them"
        raise ValueError(f"the text is {text!r:.80}, a {type(text).__name__}; expected {wanted}")
    batched = listed and (not is_split_into_words or (len(text) > 0 and isinstance(text[0], list | tuple)))
    if not batched:
        empty = pair is None or (isinstance(pair, str | list | tuple) and not pair)
        texts = [text] if empty else [(text, pair)]
    elif pair is None:
        texts = [tuple(each) if is_pair(each, is_split_into_words) else each for each in text]
    elif isinstance(pair, list | tuple) and len(pair) == len(text):
        texts = list(zip(text, pair, strict=True))
    else:
        count = len(pair) if isinstance(pair, list | tuple) else f"a {type(pair).__name__}"
        raise ValueError(f"there are {len(text)} texts but text_pair is {count}; give one for each")
    return texts, batched


def is_pair(text: object, is_split_into_words: bool) -> bool:
    if not isinstance(text, list | tuple) or len(text) != 2:
        return False
    return not is_split_into_words or all(isinstance(part, list | tuple) for part in text)


@contextmanager
def explained_errors(texts: Iterable[TextOrPair], settings: str) -> Iterator[None]:
    """Turn the errors of the Rust tokenizer into a ValueError that names the text or the settings."""
    try:
        yield
    except TypeError:
        raise text_error(texts) from None
    except BaseException as error:  # the Rust library raises plain Exception, and its panics are BaseException
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{settings}: {error}") from None


def text_error(texts: Iterable[object]) -> ValueError:
    """Return the error that names the text which the Rust tokenizer cannot encode."""
    for i, text in enumerate(texts):
        for part in text if isinstance(text, tuple) else (text,):
            for word in part if isinstance(part, list | tuple) else (part,):
                if not isinstance(word, str):
                    return ValueError(f"text {i} holds {word!r:.80}, a {type(word).__name__}; expected a string")
                try:
                    word.encode()
                except UnicodeEncodeError as error:
                    found = word[error.start]
                    return ValueError(f"text {i} holds {found!a}, half a character: decode it with errors='replace'")
    return ValueError(
        "the texts are neither all strings nor all pairs; a text that is split into words needs is_split_into_words"
    )


# Results -------------------------------------------------------------------------------------------------------------


def make_batch(
    encodings: Sequence["Encoding"],
    names: Iterable[str],
    return_tensors: str | None,
    *,
    batched: bool,
    overflowing: bool,
) -> BatchEncoding:
    """Return the named COLUMNS as tensors, arrays or lists; those of one text are flat lists unless it is `batched`.

    Args:
        overflowing: add the tokens that truncation cut off as further sequences, and a column
            `overflow_to_sample_mapping` with the index of the text that each sequence comes from.
    """
    groups = [[encoding, *encoding.overflowing] if overflowing else [encoding] for encoding in encodings]
    sequences = [sequence for group in groups for sequence in group]
    columns: dict[str, Any] = {name: [COLUMNS[name](sequence) for sequence in sequences] for name in names}
    if overflowing:
        columns["overflow_to_sample_mapping"] = [i for i, group in enumerate(groups) for _ in group]
    if return_tensors is not None:
        columns = to_tensors(columns, return_tensors)
    elif not (batched or overflowing):
        columns = {name: column if name == "length" else column[0] for name, column in columns.items()}
    return BatchEncoding(columns, sequences)


def to_lists(value: Any) -> Any:
    """Return a tensor, an array or nested lists of them as lists and numbers of Python; other values unchanged."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [to_lists(each) for each in value] if value and not isinstance(value[0], int | str) else list(value)
    return value


def to_tensors(columns: Mapping[str, list[Any]], kind: str) -> dict[str, "torch.Tensor | NDArray[Any]"]:
    """Return the columns as (B, …) tensors ("pt") or arrays ("np"); whole numbers as int64.

    Raises:
        ValueError: the kind is unknown, or rows have different lengths.
    """
    if kind not in ("pt", "np"):
        raise ValueError(f"return_tensors={kind!r} is unknown; have: 'pt', 'np', or None for lists")
    import numpy as np

    made: dict[str, torch.Tensor | NDArray[Any]] = {}
    for name, column in columns.items():
        try:
            empty = not any(row != [] for row in column)  # would be of a float type
            if kind == "pt":
                made[name] = torch.tensor(column, dtype=torch.int64 if empty else None)
            else:
                made[name] = np.array(column, dtype=np.int64 if empty else None)
        except (ValueError, TypeError):
            lengths = sorted({len(row) for row in column})
            raise ValueError(
                f"{name} has rows of {lengths[0]} to {lengths[-1]} and cannot be a tensor: pass padding=True"
            ) from None
    return made


def clean_up_spaces(text: str) -> str:
    """Remove the spaces before punctuation marks and in contractions, as transformers 4 does."""
    for spaced in SPACED:
        text = text.replace(spaced, spaced.strip())
    return text
