"""A self-test of compiled kernels: one small layer, beside the same in float64 by torch's operators; and its times."""

import math
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertlite.checkpoint.skeleton import SkeletonMode
from bertlite.config import BertConfig
from bertlite.inference.native.calls import Batch, Kernels
from bertlite.inference.native.weights import NativeWeights
from bertlite.stack.modules import BertLayer, BertOutput, BertSelfOutput

TOKENS = 7  # of one sequence: more than the rows of a tile
ALLOWED = {"float32": 1e-4, "bfloat16": 0.02, "int8": 0.03}  # of the largest number: several times what rounding does
FEWEST, MOST = 3, 30  # rounds of a measurement, after one that warms up
LIMIT = 0.1  # seconds after which no further round begins


@torch.no_grad()
def find_fault(kernels: Kernels) -> str | None:
    """Return what is wrong with the results of kernels, in words; None if nothing is.  It takes milliseconds."""
    config = BertConfig(hidden_size=128, num_attention_heads=2, intermediate_size=192, num_hidden_layers=1)
    layer = layer_of_waves(config)
    x = waves(TOKENS, config.hidden_size) * 8
    truth = by_operators(layer, x)
    for numbers, allowed in ALLOWED.items():
        try:
            error = (run(kernels, layer, config, numbers, x) - truth).abs().max() / truth.abs().max()
        except RuntimeError as raised:
            return f"{numbers}: {raised}"
        if not error <= allowed:
            return f"{numbers} is off by {error:.1e} of the largest number, of {allowed:.0e} that rounding explains"
    return None


def waves(*shape: int) -> Tensor:
    """Return numbers of both signs without a pattern, always the same."""
    count = torch.Size(shape).numel()
    return (torch.arange(1, count + 1, dtype=torch.float64, device="cpu") ** 1.5).sin().view(shape) / 8


def layer_of_waves(config: BertConfig) -> BertLayer:
    with SkeletonMode():  # no random numbers are drawn
        layer = BertLayer(config, 0)
    layer.load_state_dict({name: waves(*x.shape) for name, x in layer.state_dict().items()}, assign=True)
    return layer


@torch.no_grad()
def seconds_of_numbers(kernels: Kernels) -> dict[str, float]:
    """Return the shortest times of one layer in bfloat16 and in float32, with one thread."""
    config = BertConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_hidden_layers=1)
    layer, x = layer_of_waves(config), waves(64, config.hidden_size)
    return shortest_seconds(
        {numbers: runner(kernels, layer, config, numbers, x) for numbers in ("bfloat16", "float32")}
    )


def shortest_seconds(ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the shortest time of each of several ways, which take turns."""
    shortest, began = dict.fromkeys(ways, math.inf), time.perf_counter()
    for i in range(1 + MOST):
        if i > FEWEST and time.perf_counter() - began > LIMIT:
            break
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if i:
                shortest[name] = min(shortest[name], time.perf_counter() - start)
    return shortest


def run(kernels: Kernels, layer: BertLayer, config: BertConfig, numbers: str, x: Tensor) -> Tensor:
    """Return what kernels give for a layer and a sequence of tokens."""
    return runner(kernels, layer, config, numbers, x)()


def runner(kernels: Kernels, layer: BertLayer, config: BertConfig, numbers: str, x: Tensor) -> Callable[[], Tensor]:
    """Pack a layer and return the function that runs it on a sequence of tokens."""
    x, weights = x.float(), NativeWeights.of([layer], config, numbers, kernels)
    starts, out = torch.tensor([0, len(x)], dtype=torch.long, device="cpu"), torch.full_like(x, torch.nan)

    def run() -> Tensor:
        at = starts.data_ptr(), x.data_ptr(), out.data_ptr()
        batch = Batch(tokens=len(x), sequences=1, starts=at[0], hidden=at[1], output=at[2])
        kernels.run(numbers, weights.model, batch, 1)
        return out

    return run


def by_operators(layer: BertLayer, x: Tensor) -> Tensor:
    """Return the same by torch's operators, in the layer's dtype; its modules' methods may have been replaced."""

    def linear(part: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, part.weight, part.bias)

    def finish(part: BertSelfOutput | BertOutput, x: Tensor, residual: Tensor) -> Tensor:
        norm = part.LayerNorm
        return F.layer_norm(linear(part.dense, x) + residual, norm.normalized_shape, norm.weight, norm.bias, norm.eps)

    own = layer.attention.self
    heads = (linear(part, x).unflatten(-1, (-1, own.attention_head_size)) for part in (own.query, own.key, own.value))
    context = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in heads)).transpose(0, 1).flatten(1)
    x = finish(layer.attention.output, context, x)
    return finish(layer.output, F.gelu(linear(layer.intermediate.dense, x)), x)
