"""Labelled spans of a text from the scores of its tokens, by the rules of transformers' pipeline ("first").

The rules: transformers 5.24, pipelines/token_classification.py.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer


class Word(NamedTuple):
    """A word of a text: its first character and the end, its label without B- or I-, and its score."""

    start: int
    end: int
    begins: bool  # whether its label begins a span
    label: str
    score: float


def spans_of(
    text: str, encoding: Encoding, scores: NDArray[np.float64], labels: Sequence[str], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Return the spans of a text with a label other than "O".

    Args:
        scores: (tokens, labels), probabilities.
    """
    groups: list[list[Word]] = []
    for word in words_of(text, encoding, scores, labels, tokenizer):
        if groups and word.label == groups[-1][-1].label and not word.begins:
            groups[-1].append(word)
        else:
            groups.append([word])
    return [
        {
            "entity_group": words[0].label,
            "score": float(np.mean([word.score for word in words])),
            "word": text[words[0].start : words[-1].end],
            "start": words[0].start,
            "end": words[-1].end,
        }
        for words in groups
        if words[0].label != "O"
    ]


def words_of(
    text: str, encoding: Encoding, scores: NDArray[np.float64], labels: Sequence[str], tokenizer: Tokenizer
) -> Iterator[Word]:
    """Yield the words of a text, each with the label of its first token."""
    prefix = getattr(tokenizer.model, "continuing_subword_prefix", None)
    unknown = getattr(tokenizer.model, "unk_token", None)
    word: Word | None = None
    tokens = zip(encoding.tokens, encoding.offsets, encoding.special_tokens_mask, scores, strict=True)
    for token, (start, end), is_special, probabilities in tokens:
        if is_special:
            continue
        if prefix:
            continues = len(token) != end - start and token != unknown
        else:
            continues = start > 0 and " " not in text[start - 1 : start + 1] and token != unknown
        if word is not None and continues:
            word = word._replace(end=end)
            continue
        if word is not None:
            yield word
        best = int(probabilities.argmax())
        name = labels[best]
        begins, label = name.startswith("B-"), name[2:] if name.startswith(("B-", "I-")) else name
        word = Word(start, end, begins, label, float(probabilities[best]))
    if word is not None:
        yield word
