"""A self-test of compiled kernels: two small layers, each compared with numpy in float64; and the times of one."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .packed import aligned, pack_matrix
from .shapes import BLOCKS, LayerShape, Shape
from .structs import INPUT_NORM, VECTORS, Batch, Kernels

TOKENS, EPSILON = 7, 1e-12  # tokens of one sequence: more than the rows of a tile
# {(numbers, whether inputs are multiplied by factors): error over the largest number}, several times rounding
ALLOWED = {("float32", False): 1e-4, ("bfloat16", False): 0.02, ("int8", False): 0.03, ("int8", True): 0.03}
FEWEST, MOST = 3, 30  # rounds of a measurement, after one that warms up
LIMIT = 0.1  # seconds after which no further round begins
Floats = NDArray[np.float64]


class SmallLayer(NamedTuple):
    """The weight and bias of each matrix of a layer, and a vector that is all weights and biases of its norms.

    The numbers and blocks of its shape are `runner`'s to choose.
    """

    shape: Shape
    matrices: dict[str, tuple[Floats, Floats]]
    norm: Floats


def find_fault(kernels: Kernels) -> str | None:
    """Return the fault of kernels' results, in words, or None.  It takes milliseconds."""
    plain = Shape("float32", BLOCKS[0], 128, 64, "gelu", EPSILON, (LayerShape(2, 192),))
    rotary = replace(
        plain, head_size=32, layers=(LayerShape(2, 192, rotary_base=100.0, window=3),), positions="rotary_local",
        max_positions=TOKENS, norms_first=True, first_norm=True, gated=True,
    )  # fmt: skip
    layers = {" of rotary positions": layer_of_waves(rotary), "": layer_of_waves(plain)}
    x = waves(TOKENS, plain.hidden_size) * 8

    # Each dtype has a code path of its own, and so has the scaling of inputs.
    for kind, layer in layers.items():
        truth = by_numpy(layer, x)
        for (numbers, scaled), allowed in ALLOWED.items():
            name = f"{'scaled ' * scaled}{numbers}{kind}"
            try:
                found = runner(kernels, layer, numbers, x, scaled)()
            except RuntimeError as raised:
                return f"{name}: {raised}"
            error = np.abs(found - truth).max() / np.abs(truth).max()
            if not error <= allowed:
                return f"{name} is off by {error:.1e} of the largest number; rounding explains {allowed:.0e}"
    return None


def seconds_of_numbers(kernels: Kernels) -> dict[str, float]:
    """Return the shortest times of one layer in bfloat16 and in float32, with one thread.

    The thread's own time counts, so that a busy machine does not decide the answer, which is kept.
    """
    layer = layer_of_waves(Shape("float32", BLOCKS[0], 384, 64, "gelu", EPSILON, (LayerShape(6, 1536),)))
    x = waves(64, layer.shape.hidden_size)
    ways = {numbers: runner(kernels, layer, numbers, x) for numbers in ("bfloat16", "float32")}
    return shortest_seconds(ways, time.thread_time)


def shortest_seconds(
    ways: Mapping[str, Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the shortest time of each of several ways to run; they take turns."""
    shortest, began = dict.fromkeys(ways, math.inf), time.perf_counter()
    for i in range(1 + MOST):
        if i > FEWEST and time.perf_counter() - began > LIMIT:
            break
        for name, way in ways.items():
            start = clock()
            way()
            if i:
                shortest[name] = min(shortest[name], clock() - start)
    return shortest


def waves(*shape: int) -> Floats:
    """Return numbers of both signs without a pattern, always the same."""
    return np.sin(np.arange(1, math.prod(shape) + 1) ** 1.5).reshape(shape) / 8


def layer_of_waves(shape: Shape) -> SmallLayer:
    sizes = {name: shape.matrix(shape.layers[0], name) for name in shape.matrices}
    matrices = {name: (waves(*size), waves(size[0])) for name, size in sizes.items()}
    return SmallLayer(shape, matrices, waves(shape.hidden_size))


def runner(
    kernels: Kernels, layer: SmallLayer, numbers: str, x: Floats, scaled: bool = False
) -> Callable[[], NDArray[np.float32]]:
    """Pack a layer and return the function that runs it on a sequence of tokens.

    Args:
        scaled: let the kernels multiply inputs by factors before they rotate them.
    """
    shape = replace(layer.shape, numbers=numbers, blocks=kernels.blocks[numbers], scaled=scaled)
    data = aligned(shape.size())
    for name, (weight, bias) in layer.matrices.items():
        factors = np.exp(4 * waves(weight.shape[1])) if scaled else None  # from .6 to 1.6
        pack_matrix(kernels, shape, data, (0, name), weight, bias, 1, factors)

    for name in (*VECTORS, *INPUT_NORM) if shape.first_norm else VECTORS:
        start, count = shape.offsets[0, name, ""]
        data[start : start + count].view(np.float32)[:] = layer.norm

    # The output begins as nan, so that a number that the kernels leave out is noticed.
    starts, hidden = np.array([0, len(x)], dtype=np.int64), x.astype(np.float32)
    out, model = np.full_like(hidden, np.nan), shape.describe(data.ctypes.data)

    def run() -> NDArray[np.float32]:
        at = starts.ctypes.data, hidden.ctypes.data, out.ctypes.data
        batch = Batch(tokens=len(hidden), sequences=1, starts=at[0], hidden=at[1], output=at[2])
        kernels.run(model, batch, 1)
        assert data.size  # keeps it alive: the model points into it
        return out

    return run


def by_numpy(layer: SmallLayer, x: Floats) -> Floats:
    """Return the layer's output in float64."""

    def linear(name: str, x: Floats) -> Floats:
        weight, bias = layer.matrices[name]
        return x @ weight.T + bias

    def normalise(x: Floats) -> Floats:
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * layer.norm + layer.norm

    def rotate(x: Floats) -> Floats:  # (heads, tokens, head dim)
        first, second = np.split(x, 2, -1)
        angles = np.arange(x.shape[1])[:, None] / base ** (np.arange(first.shape[-1]) / first.shape[-1])
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    # Attention and its projection.
    shape, (heads, _, base, window) = layer.shape, astuple(layer.shape.layers[0])
    given = normalise(x) if shape.norms_first else x
    q, k, v = linear("qkv", given).reshape(len(x), 3, heads, -1).transpose(1, 2, 0, 3)  # (heads, tokens, head dim)
    if base is not None:
        q, k = rotate(q), rotate(k)
    scores = np.exp(q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1]))
    if window is not None:
        scores = np.tril(np.triu(scores, -window), window)
    context = (scores / scores.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(len(x), -1)
    x = linear("output", context) + x

    # The feed-forward network between two LayerNorms.
    given = normalise(x)
    up = linear("up", given)
    neurons = up * (1 + np.vectorize(math.erf)(up / math.sqrt(2))) / 2
    if shape.gated:
        neurons = neurons * linear("factor", given)
    return normalise(linear("down", neurons) + (x if shape.norms_first else given))
