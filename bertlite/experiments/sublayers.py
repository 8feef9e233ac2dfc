"""The time of a layer's attention and feed-forward network, by how many heads and neurons they keep."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bertlite.importance.allocation import BySize
from bertlite.importance.replay import own_forward
from bertlite.pruning import layers_of, with_fields, with_pruned
from bertlite.timing import alternate


@contextmanager
def called_with(model: Any, layer: int) -> Iterator[list[tuple[Any, ...]]]:
    """Record the arguments of the calls of a layer, without a hook, with which the last layer would do more work."""
    block, calls = list(layers_of(model))[layer], []
    forward = block.forward

    def record(*args: Any) -> Any:
        calls.append(args)
        return forward(*args)

    with own_forward(block, record):
        yield calls


def time_sublayers(
    model: Any,
    layer: int,
    call: tuple[Any, ...],
    *,
    neurons: Iterable[int],
    rounds: int,
    device: str = "cpu",
    after_round: Callable[[], object] = lambda: None,
) -> BySize:
    """Return the median seconds of a layer's two sublayers, by how many heads and how many neurons they keep.

    Args:
        model: pruned or not; the sublayers have other weights, and 0 to all heads that the model was built with.
        call: the arguments of the layer, from `called_with`.
        neurons: the numbers of neurons to measure.
        after_round: called after each timed round.
    """
    neurons = list(neurons)
    states, inputs = call
    block = list(layers_of(model))[layer]
    config = with_fields(model.config, {"pruned_heads": {}, "pruned_neurons": {}})
    all_heads, all_neurons = config.num_attention_heads, config.intermediate_size

    def smaller(heads: Iterable[int] = (), neurons: Iterable[int] = ()) -> Any:
        pruned = with_pruned(config, {layer: heads}, {layer: neurons})
        found = type(block)(pruned, layer).to(device=states.device, dtype=states.dtype).eval()
        for parameter in found.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        return found

    runs: dict[str, Callable[[], Any]] = {}
    for kept in range(all_heads + 1):
        attention = smaller(heads=range(kept, all_heads)).attention
        runs[f"heads {kept}"] = partial(attention, states, inputs)
    for kept in neurons:
        runs[f"neurons {kept}"] = partial(smaller(neurons=range(kept, all_neurons)).feed_forward, states)
    found = alternate(runs, rounds, device, after_round=after_round)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    return (
        nondecreasing({kept: medians[f"heads {kept}"] for kept in range(all_heads + 1)}),
        nondecreasing({kept: medians[f"neurons {kept}"] for kept in neurons}),
    )


def nondecreasing(times: Mapping[int, float]) -> dict[int, float]:
    """Return the nearest times, in least squares, that never fall with growing sizes, as falls are noise."""
    pools: list[tuple[float, list[int]]] = []  # a mean and its sizes
    for size in sorted(times):
        mean, sizes = times[size], [size]
        while pools and pools[-1][0] > mean:
            before, others = pools.pop()
            mean = (before * len(others) + mean * len(sizes)) / (len(others) + len(sizes))
            sizes = [*others, *sizes]
        pools.append((mean, sizes))
    return {size: mean for mean, sizes in pools for size in sizes}
