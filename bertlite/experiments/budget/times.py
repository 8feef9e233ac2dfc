"""The times of sublayers by their sizes, measured on this machine."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertlite.config import kept_neurons, own_field
from bertlite.experiments.budget.work import Work
from bertlite.models.structure import layers_of, with_fields, with_pruned
from bertlite.pruning.importance.allocation import BySize
from bertlite.pruning.importance.structures import arguments_of
from bertlite.stack.attention import LayerContext
from bertlite.support.progress import Progress
from bertlite.support.timing import alternate, quartiles

ROUNDS = 9
SIZES = 7  # sizes of a sublayer that are timed; times of other sizes lie on straight lines between them
WIDE = 0.3  # times with a larger spread are not used


def time_table(model: Any, work: Work, neurons: Iterable[int], progress: Progress) -> list[BySize] | None:
    """Measure the times of sublayers with 0 to all heads and with these numbers of neurons, twice if they vary widely.

    Args:
        model: the dense model; not changed.
        work: the batch to time.

    Returns:
        Median seconds of each layer's sublayers by their sizes; None if they vary widely both times.
    """
    config = model.config
    kept = {len(kept_neurons(config, layer)) for layer in range(config.num_hidden_layers)}
    sizes = sorted({*neurons, *kept, 0, config.intermediate_size})
    for _ in range(2):
        layers, spread = measure_table(model, work, sizes, progress)
        if spread <= WIDE:
            return layers
    return None


def measure_table(model: Any, work: Work, neurons: list[int], progress: Progress) -> tuple[list[BySize], float]:
    """Time the sublayers of the first layer of each kind: with a window, without, and the last, if only for [CLS].

    The largest spread comes second: the distance of the quartiles of a time over its median.
    """
    last, local = model.config.num_hidden_layers - 1, own_field(model.config, "local_layers") or ()
    kinds = [(layer in local, layer == last) for layer in range(last + 1)]
    firsts = [kinds.index(kind) for kind in kinds]
    with torch.inference_mode():
        run = partial(model, **work.inputs(model.config.vocab_size, model.device))
        calls = {layer: arguments_of(model, layer, run) for layer in dict.fromkeys(firsts)}
        progress.stage("layer times", ROUNDS * len(calls), "rounds")
        found = {layer: time_sublayers(model, layer, call, neurons, progress) for layer, call in calls.items()}
    return [found[layer][0] for layer in firsts], max(spread for _, spread in found.values())


def time_sublayers(
    model: Any, layer: int, call: tuple[Tensor, LayerContext], neurons: Sequence[int], progress: Progress
) -> tuple[BySize, float]:
    """Return the median seconds of a layer's two sublayers, by the numbers of heads and neurons that they keep, and
    their spread.  The spread is the distance of the quartiles over the median; its median over all is returned.

    Args:
        model: pruned or not; the sublayers have other weights, and from 0 to all heads that the model was built with.
        call: the arguments of the layer, from `arguments_of`.
        neurons: the numbers of neurons, ascending.
    """
    states, inputs = call
    block = list(layers_of(model))[layer]
    config = with_fields(model.config, {"pruned_heads": {}, "pruned_neurons": {}})
    all_heads, all_neurons = config.num_attention_heads, config.intermediate_size

    # Sublayers of other sizes are new ones: a time depends on sizes, not on weights.
    def smaller(heads: Iterable[int] = (), neurons: Iterable[int] = ()) -> Any:
        pruned = with_pruned(config, {layer: heads}, {layer: neurons})
        found = type(block)(pruned, layer).to(device=states.device, dtype=states.dtype).eval()
        for parameter in found.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        return found

    runs: dict[str, Callable[[], Any]] = {}
    timed = {"heads": spaced(range(all_heads + 1)), "neurons": spaced(neurons)}
    for kept in timed["heads"]:
        attention = smaller(heads=range(kept, all_heads)).attention
        runs[f"heads {kept}"] = partial(attention, states, inputs=inputs)
    for kept in timed["neurons"]:
        runs[f"neurons {kept}"] = partial(smaller(neurons=range(kept, all_neurons)).feed_forward, states)

    # All take turns, so that a busy moment slows all; a larger one is never counted as faster.
    found = alternate(runs, ROUNDS, model.device, after_round=progress.advance)
    each = {name: quartiles(seconds) for name, seconds in found.items()}
    found_of = {
        unit: nondecreasing({kept: each[f"{unit} {kept}"]["median"] for kept in sizes})
        for unit, sizes in timed.items()
    }
    pair = between(found_of["heads"], range(all_heads + 1)), between(found_of["neurons"], neurons)
    return pair, statistics.median((times["high"] - times["low"]) / times["median"] for times in each.values())


def spaced(sizes: Sequence[int]) -> list[int]:
    """Return SIZES of these sizes in even steps, the first and the last among them, or all if they are fewer."""
    last = len(sizes) - 1
    return list(sizes) if last < SIZES else [sizes[round(last * i / (SIZES - 1))] for i in range(SIZES)]


def between(times: Mapping[int, float], sizes: Sequence[int]) -> dict[int, float]:
    """Return the times of all sizes, on straight lines between the timed ones."""
    return dict(zip(sizes, np.interp(sizes, [*times], [*times.values()]).tolist(), strict=True))


def nondecreasing(times: Mapping[int, float]) -> dict[int, float]:
    """Return the nearest times, in least squares, that never fall with growing sizes, since falls are noise."""
    from scipy.optimize import isotonic_regression

    sizes = sorted(times)
    return dict(zip(sizes, isotonic_regression([times[size] for size in sizes]).x.tolist(), strict=True))
