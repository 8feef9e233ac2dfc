"""The times of sublayers by their sizes, measured on this machine and kept for the next search."""

import json
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertlite.bench.work import Work
from bertlite.config import kept_heads, kept_neurons
from bertlite.importance.allocation import BySize
from bertlite.importance.replay import own_forward
from bertlite.pruning import layers_of, with_fields, with_pruned
from bertlite.records import cpu_name, quartiles, sha256_of, write_json
from bertlite.timing import alternate

ROUNDS = 15
REPEATS = 2  # measurements of a table at most, where its spread is wide
WIDE = 0.3  # spread of times that are not used
FORMAT = 2  # of the files


@dataclass(frozen=True)
class TimeTable:
    """Median seconds of sublayers by their sizes: of a layer, and of the last one, which may compute only [CLS].

    `rest` is the time of all that pruning does not remove: embeddings, the task head, and calls.  `spread` is the
    distance of the quartiles of a time over its median.
    """

    inner: BySize
    last: BySize
    rest: float
    spread: float = 0.0

    def costs(self, layers: int) -> list[BySize]:
        """Return the tables of so many layers."""
        return [*[self.inner] * (layers - 1), self.last]

    def total(self, sizes: Iterable[tuple[int, int]]) -> float:
        """Return the expected seconds of a forward of a model with these sizes."""
        sizes = list(sizes)
        each = zip(self.costs(len(sizes)), sizes, strict=True)
        return self.rest + sum(attention[heads] + network[neurons] for (attention, network), (heads, neurons) in each)


def cache_folder() -> Path:
    """Return the folder where time tables are kept: bertlite/times in the user's folder for caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bertlite" / "times"


def table_key(model: Any, work: Work, device: str, neurons: Iterable[int]) -> str:
    """Return a hash of everything that the times depend on."""
    config = model.config
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name()
    sizes = [config.hidden_size, config.num_attention_heads, config.intermediate_size, config.hidden_act]
    how = [config.position_embedding_type, config.attn_implementation, type(model).__name__, str(model.dtype)]
    facts = [FORMAT, name, os.cpu_count(), torch.__version__, torch.get_num_threads(), device, sizes, how]
    kept = [[len(kept_heads(config, i)), len(kept_neurons(config, i))] for i in range(config.num_hidden_layers)]
    return sha256_of(json.dumps([*facts, kept, config.vocab_size, work.lengths, work.width, list(neurons)]))[:16]


def time_table(
    model: Any,
    work: Work,
    neurons: Iterable[int],
    *,
    device: str = "cpu",
    folder: Path | None = None,
    fresh: bool = False,
    advance: Callable[[], object] = lambda: None,
) -> TimeTable:
    """Return the times of sublayers with 0 to all heads and with these numbers of neurons, measured if necessary.

    Times of a wide spread are measured again, at once and by the next search.

    Args:
        model: the dense model; not changed.
        work: the batch to time.
        folder: where tables are kept; by default `cache_folder()`.
        fresh: measure although there is a table.
        advance: called after each timed round; never where the table is known.
    """
    own = {len(kept_neurons(model.config, layer)) for layer in range(model.config.num_hidden_layers)}
    neurons = sorted({*neurons, *own, 0, model.config.intermediate_size})
    path = (folder or cache_folder()) / f"{table_key(model, work, device, neurons)}.json"
    if path.exists() and not fresh and (known := read_table(path)).spread <= WIDE:
        return known
    found = measure_table(model, work, neurons, device, advance)
    for _ in range(1, REPEATS):
        if found.spread > WIDE:
            again = measure_table(model, work, neurons, device, advance)
            found = min(found, again, key=lambda table: table.spread)
    write_json(path, {"format": FORMAT, "work": work.name, "device": device, **vars(found)})
    return found


def read_table(path: Path) -> TimeTable:
    """Read a saved table."""
    found = json.loads(path.read_text(encoding="utf-8"))

    def by_size(pair: list[dict[str, float]]) -> BySize:
        attention, network = ({int(size): seconds for size, seconds in each.items()} for each in pair)
        return attention, network

    return TimeTable(by_size(found["inner"]), by_size(found["last"]), found["rest"], found["spread"])


def measure_table(model: Any, work: Work, neurons: list[int], device: str, advance: Callable[[], object]) -> TimeTable:
    """Time the sublayers of the first and of the last layer, and the whole model."""
    inputs = work.inputs(model.config.vocab_size, device)
    last = model.config.num_hidden_layers - 1
    with torch.inference_mode():
        whole = partial(model, **inputs)
        with called_with(model, 0) as first_call, called_with(model, last) as last_call:
            whole()
        time = partial(time_sublayers, model, neurons=neurons, rounds=ROUNDS, device=device, after_round=advance)
        inner, spread = time(0, first_call[0])
        final, other = (inner, spread) if last == 0 else time(last, last_call[0])
        seconds = statistics.median(alternate({"whole": whole}, ROUNDS, device, after_round=advance)["whole"])
    tables = zip([*[inner] * last, final], range(last + 1), strict=True)
    used = sum(
        attention[len(kept_heads(model.config, i))] + network[len(kept_neurons(model.config, i))]
        for (attention, network), i in tables
    )
    return TimeTable(inner, final, max(seconds - used, 0.0), max(spread, other))


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
) -> tuple[BySize, float]:
    """Return the median seconds of a layer's two sublayers, by how many heads and how many neurons they keep, and
    their spread: the distance of the quartiles over the median, in the median over all.

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
    each = {name: quartiles(seconds) for name, seconds in found.items()}
    heads, networks = (
        nondecreasing({kept: each[f"{unit} {kept}"]["median"] for kept in sizes})
        for unit, sizes in (("heads", range(all_heads + 1)), ("neurons", neurons))
    )
    return (heads, networks), statistics.median((row["high"] - row["low"]) / row["median"] for row in each.values())


def nondecreasing(times: Mapping[int, float]) -> dict[int, float]:
    """Return the nearest times, in least squares, that never fall with growing sizes, as falls are noise."""
    from scipy.optimize import isotonic_regression

    sizes = sorted(times)
    return dict(zip(sizes, isotonic_regression([times[size] for size in sizes]).x.tolist(), strict=True))
