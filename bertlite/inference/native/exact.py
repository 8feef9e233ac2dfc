"""Tables of distances in float64, with the same bits on every processor, for any number of threads and settings.

Shapes:  R rows · I inputs · O outputs · D hidden
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[np.float64]
QUIET = np.errstate(all="ignore")  # whatever the caller does about infinite numbers


def exact_table(encoder: Any) -> Array | None:
    """Return an encoder's table of distances, normalised, (R, D); None if it has none."""
    if encoder.rel_embeddings is None:
        return None
    x, norm = array_of(encoder.rel_embeddings.weight), getattr(encoder, "LayerNorm", None)
    return x if norm is None else exact_norm(norm, x)


def array_of(x: Tensor) -> Array:
    """Return a tensor's numbers in float64."""
    return np.asarray(x.detach().double().numpy())


@QUIET
def exact_norm(part: nn.LayerNorm, x: Array) -> Array:
    """Return the outputs of a norm of rows, whose numbers are added one after another."""
    away = x - row_means(x)
    return away / np.sqrt(row_means(away * away) + part.eps) * array_of(part.weight) + array_of(part.bias)


def row_means(x: Array) -> Array:  # (R, D) -> (R, 1)
    return np.cumsum(x, 1)[:, -1:] / x.shape[1]


@QUIET
def exact_linear(x: Array | None, part: nn.Linear) -> Tensor:
    """Return a linear layer's outputs, (R, I) -> (R, O).

    Libraries add up products in an order of their own.  Here each factor is the sum of two numbers with so few bits
    that no sum of their products is rounded: any order gives the same bits (Ozaki et al. 2012).
    """
    assert x is not None  # an encoder whose layers project a table has one
    (high, low), (upper, lower) = halves(x), halves(array_of(part.weight))
    products = high @ upper.T + (high @ lower.T + low @ upper.T)
    return torch.from_numpy(products if part.bias is None else products + array_of(part.bias))


def halves(x: Array) -> tuple[Array, Array]:
    """Split each row, (R, I), into numbers of few bits and the numbers of as few bits that they lack."""
    bits = (53 - max(x.shape[1] - 1, 0).bit_length()) // 2
    step = np.ldexp(1.0, np.frexp(np.abs(x).max(1, keepdims=True, initial=0))[1] - bits)
    high = np.rint(x / step) * step
    return high, np.rint((x - high) / step * 2**bits) * (step / 2**bits)
