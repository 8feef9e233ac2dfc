"""Vectors of texts from the states of their tokens, and the functions of vectors and of scores.

Numbers are added token by token, in the same order on every processor and in every batch.

Shapes:  T tokens of one text · D numbers · B, C vectors · L labels
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]  # float32 or float64


def pool(tokens: Array, modes: Sequence[str], skip: int = 0) -> Array:
    """Return one vector of a text, (T, D) -> (D,), or of several poolings (k·D,).

    Args:
        modes: names of POOLINGS.
        skip: leave out so many tokens at the beginning, such as a prompt's.

    Raises:
        ValueError: there are no others.
    """
    if len(tokens) <= skip:
        raise ValueError(f"a text has no tokens{' after its prompt' * (skip > 0)}, so it has no vector: leave it out")
    return np.concatenate([POOLINGS[mode](tokens, skip) for mode in modes])


def weighted_mean(tokens: Array, skip: int) -> Array:
    """Return the mean in which token i of the text, from 0, counts i + 1 times."""
    weights = np.arange(skip + 1, len(tokens) + 1, dtype=np.float32)
    total: Array = (tokens[skip:] * weights[:, None]).sum(0)
    return total / weights.sum()


POOLINGS: dict[str, Callable[[Array, int], Array]] = {  # {sentence-transformers' name: function}
    "cls": lambda tokens, skip: tokens[skip],
    "lasttoken": lambda tokens, skip: tokens[-1],
    "max": lambda tokens, skip: tokens[skip:].max(0),
    "mean": lambda tokens, skip: tokens[skip:].sum(0) / np.float32(len(tokens) - skip),
    "mean_sqrt_len_tokens": lambda tokens, skip: tokens[skip:].sum(0) / np.sqrt(tokens.dtype.type(len(tokens) - skip)),
    "weightedmean": weighted_mean,
}


def normalize(x: Array) -> Array:
    """Return a vector of length 1; squares are added in float64, one after another."""
    length = math.sqrt(float(np.cumsum(x.astype(np.float64) ** 2)[-1]))
    return x / np.float32(max(length, 1e-12))


def scaled_to_1(x: Array) -> Array:
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


# {sentence-transformers' name: function}, (B, D), (C, D) -> (B, C)
SIMILARITIES: dict[str, Callable[[Array, Array], Array]] = {
    "cosine": lambda one, other: scaled_to_1(one) @ scaled_to_1(other).T,
    "dot": lambda one, other: one @ other.T,
    "euclidean": lambda one, other: -np.linalg.norm(one[:, None] - other, axis=-1),
    "manhattan": lambda one, other: -np.abs(one[:, None] - other).sum(-1),
}


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


SCORE_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {  # {name: function}, (B, L), in float64
    "identity": lambda x: x,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softmax": softmax,
}
