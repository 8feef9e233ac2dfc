"""The time of a layer's attention and feed-forward network, by how many heads and neurons they keep."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bertlite.importance.allocation import BySize
from bertlite.importance.replay import own_forward
from bertlite.lab.timing import alternate
from bertlite.pruning import layers_of, with_fields, with_pruned


@contextmanager
def called_with(model: Any, layer: int) -> Iterator[list[tuple[Any, ...]]]:
    """Record the arguments of the calls of a layer, without a hook: the last layer does more work under one."""
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
    states, attend = call[:2]
    gate, source = (call[i] if len(call) > i else None for i in (2, 5))
    block = list(layers_of(model))[layer]
    config = with_fields(model.config, {"pruned_heads": {}, "pruned_neurons": {}})
    heads = range(config.num_attention_heads + 1)
    runs: dict[tuple[str, int], Callable[[], Any]] = {}

    def smaller(gone: dict[str, range]) -> Any:
        pruned = with_pruned(config, {layer: gone.get("heads", ())}, {layer: gone.get("neurons", ())})
        found = type(block)(pruned, layer).to(device=states.device, dtype=states.dtype).eval()
        for parameter in found.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        return found

    for kept in heads:
        attention = smaller({"heads": range(kept, config.num_attention_heads)}).attention
        runs["heads", kept] = partial(attention, states, attend, gate, source)
    for kept in neurons:
        runs["neurons", kept] = partial(
            smaller({"neurons": range(kept, config.intermediate_size)}).feed_forward, states
        )
    names = {f"{unit} {kept}": run for (unit, kept), run in runs.items()}
    found = alternate(names, rounds, device, after_round=after_round)
    medians = {key: statistics.median(found[f"{key[0]} {key[1]}"]) for key in runs}
    return (
        rising({kept: medians["heads", kept] for kept in heads}),
        rising({kept: medians["neurons", kept] for kept in neurons}),
    )


def rising(times: Mapping[int, float]) -> dict[int, float]:
    """Return the nearest times, in squares, that never fall as sizes rise: what falls is noise of the clock."""
    pools: list[tuple[float, list[int]]] = []  # a mean and its sizes
    for size in sorted(times):
        mean, sizes = times[size], [size]
        while pools and pools[-1][0] > mean:
            before, others = pools.pop()
            mean = (before * len(others) + mean * len(sizes)) / (len(others) + len(sizes))
            sizes = [*others, *sizes]
        pools.append((mean, sizes))
    return {size: mean for mean, sizes in pools for size in sizes}
