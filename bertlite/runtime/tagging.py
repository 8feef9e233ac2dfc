"""Labelled spans of a text from the scores of its tokens, by the rules of transformers' pipeline ("first").

The rules: transformers 5.24, pipelines/token_classification.py.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer


class Word(NamedTuple):
    """A word of a text: its first character and the end, its label and its score."""

    start: int
    end: int
    label: str
    score: float

    @property
    def tag(self) -> str:
        """The label without B- or I-; neighbours with one tag are one span, unless the second has B-."""
        return self.label[2:] if self.label.startswith(("B-", "I-")) else self.label


def spans_of(text: str, words: Iterable[Word]) -> list[dict[str, Any]]:
    """Return the spans of a text's words other than "O", each named by the part of its label after a first hyphen."""
    groups: list[list[Word]] = []

    # A word joins the span before it if both have one label, unless a "B-" says that a new one begins.
    for word in words:
        if groups and word.tag == groups[-1][-1].tag and not word.label.startswith("B-"):
            groups[-1].append(word)
        else:
            groups.append([word])

    return [
        {
            "entity_group": name,
            "score": float(np.mean([word.score for word in words])),
            "word": text[words[0].start : words[-1].end],
            "start": words[0].start,
            "end": words[-1].end,
        }
        for words in groups
        if (name := words[0].label.split("-", 1)[-1]) != "O"
    ]


def words_of(
    text: str,
    encoding: Encoding,
    scores: NDArray[np.float64],
    labels: Sequence[str],
    tokenizer: Tokenizer,
    unknown: str | None,
) -> list[Word]:
    """Return the words of a text, each with the label of its first token.

    Args:
        scores: (tokens, labels), probabilities.
        unknown: the unknown token; None for the one that the tokenizer's model names.
    """
    # If pieces are marked, a token longer than its text continues a word; else one without a space before it.
    prefix = getattr(tokenizer.model, "continuing_subword_prefix", None)
    unknown = unknown or getattr(tokenizer.model, "unk_token", None)
    unknown_id = None if unknown is None else tokenizer.token_to_id(unknown)  # Unigram's token is the text itself

    words: list[Word] = []
    tokens = zip(encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask, scores, strict=True)
    for number, token, (start, end), is_special, probabilities in tokens:
        if is_special:
            continue

        # An unknown token is always a word of its own, as in transformers.
        no_space = start > 0 and " " not in text[start - 1 : start + 1]
        continues = len(token) != end - start if prefix else no_space
        if words and continues and number != unknown_id:
            words[-1] = words[-1]._replace(end=end)
        else:  # only the first token of a word decides its label
            best = int(probabilities.argmax())
            words.append(Word(start, end, labels[best], float(probabilities[best])))
    return words
