"""The search: the loss and cost of sizes, the choice that meets the budget, and pruning and fitting to it.

A time ratio is the time of a forward over the target: above 1 is too slow.  Each step writes a file to the folder of
the search, so that a killed search continues where it stopped.
"""

import copy
import json
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from bertlite.config import kept_heads, kept_neurons
from bertlite.experiments.budget.target import Target, spare_bytes
from bertlite.experiments.budget.times import time_table
from bertlite.experiments.budget.work import Work
from bertlite.models.structure import layers_of, prune_heads_, prune_neurons_
from bertlite.pruning.importance.allocation import BySize, UnitCosts, choose_sizes, kept_sizes
from bertlite.pruning.importance.batches import real_tokens
from bertlite.pruning.importance.layerwise import (
    Curves,
    Metrics,
    Sizes,
    batches_to_choose,
    draws_of,
    input_sums,
    loss_curves,
    losses_by_size,
    output_metrics,
    prune_layerwise_,
)
from bertlite.pruning.importance.moments import Sums
from bertlite.pruning.importance.selection import Elimination
from bertlite.support.environment import cpu_name
from bertlite.support.files import sha256_of, write_json
from bertlite.support.memory import release_memory
from bertlite.support.progress import Progress, short_time
from bertlite.support.timing import Timings, alternate, quartiles, ratios

Batches = Sequence[Mapping[str, Tensor]]
CLOCK_ROUNDS, CLOCK_SECONDS = 9, 12.0  # rounds of one timing, and its time limit
CLOCK_REPEATS = 4  # the most timings of one model, until its time ratio is clear
ATTEMPTS = 4  # choices of sizes that are timed
REFINEMENTS = 2  # choices after a finished model that is too slow or too fast
SPARE = 0.03  # a model should be faster than needed by at most this share
TOLERANCE = 0.1  # it may be faster by this share; a time ratio with a wider interval tells nothing
NARROW = 0.04  # width of an interval that needs no more rounds
SETTINGS_FILE = "settings.json"
FORMAT = 7  # version of a search's files; raise it with every change that earlier files do not fit


class State:
    """The files of an unfinished search, or files that searches for several targets share.

    Raises:
        ValueError: the folder belongs to a search with other settings, or to a bertlite with other files.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        path = folder / SETTINGS_FILE
        wanted = json.loads(json.dumps({**settings, "format": FORMAT}))
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            other = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
            if other:
                raise ValueError(
                    f"{folder} belongs to a search with another {' and '.join(other)}: name another folder, or delete"
                    " it"
                )
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, wanted)

    def part(self, settings: Mapping[str, Any]) -> "State":
        """Return the state of a part of the work, in a folder of its own."""
        return State(self.folder / sha256_of(json.dumps(settings, sort_keys=True))[:16], settings)

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the value saved under a name, or compute and save it."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            self.save(name, compute())
        return torch.load(path, weights_only=True)

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.pt").exists()

    def save(self, name: str, value: Any) -> None:
        """Save tensors, numbers and lists of them atomically."""
        path = self.folder / f"{name}.pt"
        new = path.with_suffix(f".{os.getpid()}.new")
        torch.save(value, new)
        new.replace(path)


@dataclass(frozen=True)
class TimeRatio:
    """The median time ratio over the rounds of a timing, with its 95 % interval."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "TimeRatio":
        """Return the median and its interval between two of the values, by the sign test."""
        ordered = sorted(values)
        beyond = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
        return cls(ordered[beyond], statistics.median(ordered), ordered[-1 - beyond])

    @property
    def verdict(self) -> str | None:
        """ "slow" or "fast" beyond the target, "right" up to TOLERANCE below it, None if the interval is too wide."""
        if self.low > 1 or self.high < 1 - TOLERANCE or self.high - self.low <= TOLERANCE:
            return "slow" if self.median > 1 else "fast" if self.median < 1 - TOLERANCE else "right"
        return None

    @property
    def is_clear(self) -> bool:
        """True if more rounds would hardly change the verdict."""
        one_side = self.low > 1 or self.high < 1 - TOLERANCE or 1 - TOLERANCE <= self.low <= self.high <= 1
        return one_side or self.high - self.low <= NARROW


@dataclass(frozen=True)
class Plan:
    """The chosen sizes, their MACs and their expected loss."""

    sizes: list[tuple[int, int]]
    macs: float  # share of the dense model's
    loss: float  # expected, nats per example
    by: str  # the cost that the sizes were chosen by


@dataclass
class Search:
    """One search.

    Args:
        model: the dense model, or one pruned before; not changed.
        fit: batches to measure and fit on; `evaluate_pruned` has other batches.
        by: the cost that sizes are chosen by: "macs", "latency" or, for a target of size, "bytes".
        shared: gradients, curves and times, which do not depend on the target.
        state: choices and fitted layers.
        gradients: gradients of the divergence, "kl", or with labels of the loss, "loss".
        timed: the model to time.
        prepare: converts a pruned model to one to time, which is the one that will run.
        converts: it has another dtype, whose gain counts towards a speed or a time.
        dense_bytes: bytes of the given file; a target of size may be a share of them.
        map: a layer of the size that the pruned model gets after its pooling; None if it gets none.
    """

    model: Any
    fit: Batches
    target: Target
    work: Work
    by: str
    shared: State
    state: State
    progress: Progress
    timed: Any
    prepare: Callable[[Any], Any]
    converts: bool = False
    gradients: str = "kl"
    seed: int = 0
    dense_bytes: int = 0
    map: nn.Linear | None = None

    def metrics(self, inputs: Sequence[Sums]) -> list[Metrics]:
        """Return the second moments of the gradients at the outputs of sublayers, and fill the sums of inputs."""

        def shown(batches: list[Any]) -> Iterator[Any]:
            advance = self.work_of("gradients", len(batches))
            for batch in batches:
                yield batch
                advance()

        draws = draws_of(self.gradients, sum(len(real_tokens(batch)) for batch in self.fit))
        options: Any = {"target": self.gradients, "draws": draws, "seed": self.seed, "inputs": inputs, "shown": shown}
        return self.shared.once("metrics", lambda: output_metrics(self.model, self.choosing, **options))

    @cached_property
    def choosing(self) -> Batches:
        """The batches of `fit` that sizes are chosen by."""
        return batches_to_choose(self.fit, self.model.config.intermediate_size)

    def work_of(self, part: str, total: int, done: int = 0) -> Callable[[], None]:
        """Begin a part of `percent`, and show the time left for all; return a function that counts one of `total`."""
        release_memory()
        parts, share = [*self.percent], self.percent[part] / total
        before = sum(self.percent[each] for each in parts[: parts.index(part)])
        self.progress.stage(part, 100, "%", done=before + share * done)
        return partial(self.progress.advance, share)

    @cached_property
    def percent(self) -> dict[str, float]:
        """The parts of a search with their shares of its time, without the clock.

        They follow from the multiply-accumulates of a layer; the factors of cubes are fitted to measured times.
        """
        D, W = self.model.config.hidden_size, self.model.config.intermediate_size
        some, tokens = (sum(int(real_tokens(x).sum()) for x in each) for each in (self.choosing, self.fit))
        texts = sum(len(real_tokens(batch)) for batch in self.fit)
        kept = {"macs": self.target.value, "speed": 1 / self.target.value}.get(self.target.kind, 0.5)
        layer, left = 4 * D * D + 2 * D * W, kept * W
        parts = {
            "gradients": some * (draws_of(self.gradients, texts) * 2 * layer + 0.55 * W * W),
            "loss curves": 7 * W**3,
            "fitting": tokens * ((1.1 + 1.2 * kept) * layer + 3 * D * D + left**2) + 210 * D**3 + 63 * left**3,
        }
        return {name: 100 * each / sum(parts.values()) for name, each in parts.items()}

    def curves(self) -> Curves:
        """Return the loss of removing the units of each sublayer."""
        layers = self.model.config.num_hidden_layers
        if not all(self.shared.has(f"curves-{layer}") for layer in range(layers)):
            inputs = () if self.shared.has("metrics") else input_sums(self.model)
            metrics = self.metrics(inputs)
            advance = self.work_of("loss curves", layers)

            def keep(layer: int, pair: tuple[Elimination, Elimination]) -> None:
                self.shared.save(f"curves-{layer}", [[list(each.order), each.losses] for each in pair])
                advance()

            loss_curves(self.model, self.choosing, metrics, inputs=inputs, done=keep)
        found = (self.shared.once(f"curves-{layer}", dict) for layer in range(layers))
        return [(Elimination(tuple(a), of_a), Elimination(tuple(b), of_b)) for (a, of_a), (b, of_b) in found]

    def table(self, losses: Sequence[BySize]) -> list[BySize] | None:
        """Return the times of sublayers with the sizes that have a loss; None if sizes are chosen by MACs."""
        if self.by != "latency":
            return None
        device = self.model.device
        gpu = [torch.cuda.get_device_name(device)] if device.type == "cuda" else []
        place = [self.work.lengths, cpu_name(), *gpu, torch.get_num_threads(), torch.__version__]  # else time again
        name = f"times-{sha256_of(json.dumps(place))[:16]}"
        if not self.shared.has(name):
            sizes = {n for _, neurons in losses for n in neurons}
            found = time_table(self.model, self.work, sizes, self.progress)
            if found is None:
                return None
            self.shared.save(name, {"layers": found})
        return self.shared.once(name, dict)["layers"]

    def plan(self, losses: list[BySize], table: list[BySize] | None, finished: Sequence[tuple[Sizes, float]]) -> Plan:
        """Choose sizes whose time meets the target, as far as it could be measured; else by MACs alone.

        Args:
            finished: sizes and time ratios of finished models that were too slow or too fast.

        Raises:
            ValueError: even the smallest model does not meet the target.
        """
        config = self.model.config
        unit = UnitCosts.macs(config, self.work.lengths)
        built = unit.total([(config.num_attention_heads, config.intermediate_size)] * config.num_hidden_layers)
        by_macs = unit.by_size(losses)

        def planned(by: str, sizes: Sizes) -> Plan:
            expected = sum(a[h] + f[n] for (a, f), (h, n) in zip(losses, sizes, strict=True))
            return Plan([*sizes], unit.total(sizes) / built, expected, by)

        # Shares of work and of bytes are counted, so one choice is exact.
        if self.target.is_met_by_all:
            return planned(self.by, kept_sizes(self.model.config))
        if self.target.kind == "macs":
            return planned("macs", choose_sizes(losses, by_macs, self.target.value * built))
        if self.target.is_size:
            spare = spare_bytes(self.model, self.target, self.dense_bytes, map_bytes(self.map))
            return planned("bytes", choose_sizes(losses, UnitCosts.bytes(self.model).by_size(losses), spare))

        # Times are measured.  On a noisy clock they are worse than counted work, which then decides.
        self.check_reachable()
        by, costs = ("latency", table) if table else ("macs", by_macs)
        if self.smallest[1].verdict is None:
            by, costs = "macs without the clock", by_macs
        return planned(by, self.sizes_by_clock(losses, costs, finished))

    def sizes_by_clock(
        self, losses: list[BySize], costs: list[BySize], finished: Sequence[tuple[Sizes, float]]
    ) -> Sizes:
        """Return the sizes of lowest loss that are fast enough, by false position between clear time ratios.

        A model with the chosen sizes and the dense one are timed in turn.  If it is too slow, or needlessly fast, the
        budget is changed by as much, and sizes are chosen again.  If its time is not clear, or if a finished model has
        missed, the sizes follow from the clear ratios alone, and are not timed.
        """
        # The smallest sizes and the model's own are the ends.  If the smallest time is not clear, it counts as 0.
        times, smallest = self.smallest
        is_clear = smallest.verdict is not None
        low: tuple[Sizes, float] = [(min(a), min(f)) for a, f in costs], smallest.median if is_clear else 0.0
        whole = self.unpruned[1] if self.converts else TimeRatio.of(self.time_ratios(times["dense"], times["dense"]))
        high: tuple[Sizes, float] = kept_sizes(self.model.config), whole.median

        # A finished model that missed is a nearer end.
        for each in finished:
            low, high = (low, each) if each[1] > 1 else (each, high)
        if high[1] <= 1:
            return high[0]

        def between() -> Sizes:
            (small, fast), (large, slow) = low, high
            share = min(max((1 - SPARE / 2 - fast) / (slow - fast), 0.02), 0.98)
            least, most = (
                sum(a[h] + f[n] for (a, f), (h, n) in zip(costs, sizes, strict=True)) for sizes in (small, large)
            )
            return choose_sizes(losses, costs, least + share * (most - least))

        # A timed model becomes one of the ends, until the time is just met.
        for _ in range(ATTEMPTS if is_clear and not finished else 0):
            sizes = between()
            ratio = self.time(shape_of(self.model, sizes))[1]
            self.progress.advance()
            if ratio.verdict is None:
                break
            low, high = (low, (sizes, ratio.median)) if ratio.median > 1 else ((sizes, ratio.median), high)
            if low[1] >= 1 - SPARE:
                break
        nearest = TOLERANCE if any(map(any, low[0])) else SPARE  # without any unit it is no choice, but an end
        return low[0] if low[1] >= 1 - nearest else between()

    @cached_property
    def smallest(self) -> tuple[Timings, TimeRatio]:
        """The times and the time ratio of a model without any head or neuron."""
        return self.time(shape_of(self.model, [(0, 0)] * self.model.config.num_hidden_layers))

    @cached_property
    def unpruned(self) -> tuple[Timings, TimeRatio]:
        """The times and the time ratio of the given model in the dtype that it is converted to."""
        return self.time(self.model)

    def check_reachable(self) -> None:
        """Raise ValueError if even a model without any head or neuron is too slow, or the given one is fast enough.

        A target with a plus may be met by the given one.
        """
        # Another dtype alone may do it.
        if self.converts and not self.target.at_least and self.unpruned[1].verdict in ("right", "fast"):
            alone, text = speed_of(self.unpruned[0])["speedup"]["median"], self.target.text
            raise ValueError(
                f"the target {text} needs no pruning: the given model in this dtype is {alone:.3g} x as fast as in its"
                f" own; run it so by optimize_for_inference(…, dtype=…), write a target such as {2 * alone:.3g}x"
                f" or {text}+ to go on all the same"
            )

        # And the smallest model may not.
        times, ratio = self.smallest
        if ratio.verdict == "slow":
            small, dense = (statistics.median(times[name]) for name in ("pruned", "dense"))
            raise ValueError(
                f"the target {self.target.text} cannot be met by pruning: without any head or neuron a forward takes"
                f" {short_time(small)}, {dense / small:.3g} x as fast"
            )

    def time(self, pruned: Any) -> tuple[Timings, TimeRatio]:
        """Time a pruned model and the dense one, again until the ratio is clear or CLOCK_REPEATS are used up."""
        models = {"dense": self.timed, "pruned": self.prepare(pruned)}
        times: Timings = {name: [] for name in models}
        for _ in range(CLOCK_REPEATS):
            for name, seconds in clock(models, self.work, self.model.device, self.map).items():
                times[name] += seconds
            ratio = TimeRatio.of(self.time_ratios(times["pruned"], times["dense"]))
            if not self.target.is_timed or ratio.is_clear:
                break
        return times, ratio

    def time_ratios(self, pruned: Sequence[float], dense: Sequence[float]) -> list[float]:
        """Return the time ratio of each round, of a forward over the target; 0 for MACs."""
        return [seconds / self.target.seconds(whole) for seconds, whole in zip(pruned, dense, strict=True)]

    def pruned(self, sizes: Sizes, curves: Curves, attempt: int) -> Any:
        """Return the model pruned to these sizes and fitted, layer by layer."""
        model, layers, start = sharing_copy(self.model), self.model.config.num_hidden_layers, 0

        # Layers that a killed process had finished are read back.
        while self.state.has(f"layer-{attempt}-{start}"):
            own_layer_(model, start)
            put_layer_(model, start, self.state.once(f"layer-{attempt}-{start}", dict))
            start += 1
        if start == layers:
            return model

        advance = self.work_of("fitting", layers, start)

        def keep(layer: int) -> None:
            self.state.save(f"layer-{attempt}-{layer}", layer_of(model, layer))
            advance()
            if layer + 1 < layers:
                own_layer_(model, layer + 1)

        own_layer_(model, start)
        return prune_layerwise_(model, self.model, self.fit, curves, sizes, start=start, done=keep)

    def find(self) -> tuple[Any, Plan, dict[str, Any], str | None]:
        """Search until the finished model is measured to meet the target, or REFINEMENTS are used up.

        Returns:
            The model, its plan, quartiles of the measured times, and the verdict on its time.
        """
        curves = self.curves()
        losses = losses_by_size(self.model.config, curves)
        table = self.table(losses)

        # The finished model is timed too: if a misread clock chose its sizes, they are planned again.
        finished: list[tuple[Sizes, float]] = []
        for attempt in range(REFINEMENTS + 1):
            choices: Any = (ATTEMPTS, "choices at most") if self.target.is_timed else ()
            self.progress.stage("sizes", *choices)
            plan = Plan(**self.state.once(f"plan-{attempt}", lambda: vars(self.plan(losses, table, finished))))
            model = self.pruned(plan.sizes, curves, attempt)
            self.progress.stage("clock")

            times, ratio = self.time(model)
            verdict = ratio.verdict if self.target.is_timed and not self.target.is_met_by_all else "right"
            if verdict == "fast" and (self.target.at_least or plan.sizes == kept_sizes(self.model.config)):
                verdict = "right"  # or nothing had to be removed

            if verdict in ("right", None) or attempt == REFINEMENTS:
                break
            finished.append((plan.sizes, ratio.median))

        if plan.by != self.by and verdict != "right":
            warnings.warn(
                f"the clock of this machine is too noisy to find {self.target.text}: sizes were chosen by MACs,"
                f" {plan.macs:.0%} of the unpruned model's. Try again when the machine has no other work",
                stacklevel=2,
            )
        return model, plan, {**speed_of(times), "every_token": self.time_every_token(model)}, verdict

    def time_every_token(self, model: Any) -> dict[str, Any] | None:
        """Return times with a last layer that computes every token, as in transformers; None if the timed one does."""
        if getattr(model, "needs_tokens", True):
            return None
        pair = {"dense": self.timed.base_model, "pruned": self.prepare(model).base_model}
        return speed_of(clock(pair, self.work, self.model.device, self.map))


def speed_of(times: Timings) -> dict[str, Any]:
    """Return quartiles of the seconds of both models, and of their ratio."""
    speedup = quartiles(ratios(times, "dense", "pruned"))
    return {"seconds": quartiles(times["pruned"]), "dense_seconds": quartiles(times["dense"]), "speedup": speedup}


def map_bytes(layer: nn.Module | None) -> int:
    """Return the bytes of the file that a map becomes, 0 of none."""
    return 0 if layer is None else len(save({f"linear.{name}": x for name, x in layer.state_dict().items()}))


def clock(
    models: Mapping[str, Any], work: Work, device: str | torch.device, after: nn.Linear | None = None
) -> dict[str, list[float]]:
    """Time models in turn on the work.

    Args:
        after: a layer that the pruned model runs for each sequence besides.
    """
    with torch.inference_mode():
        inputs = work.inputs(next(iter(models.values())).config.vocab_size, device)
        runs: dict[str, Callable[[], Any]] = {name: partial(model, **inputs) for name, model in models.items()}
        if after is not None:
            run, layer = runs["pruned"], after.to(device)
            pooled = layer.weight.new_zeros(len(work.lengths), layer.in_features)
            runs["pruned"] = lambda: (run(), layer(pooled))
        return alternate(runs, CLOCK_ROUNDS, device, seconds=CLOCK_SECONDS)


def shape_of(model: Any, sizes: Sizes) -> Any:
    """Return a copy of a model with these sizes, to time it; it may keep any units."""
    found = sharing_copy(model)
    heads = {i: kept_heads(model.config, i)[count:] for i, (count, _) in enumerate(sizes)}
    neurons = {i: kept_neurons(model.config, i)[count:] for i, (_, count) in enumerate(sizes)}
    return prune_neurons_(prune_heads_(found, heads), neurons)


def sharing_copy(model: Any) -> Any:
    """Return a copy of a model that shares the memory of its embeddings and layers."""
    parts = model.base_model.embeddings, *layers_of(model)
    shared = {id(x): nn.Parameter(x.detach(), x.requires_grad) for part in parts for x in part.parameters()}
    return copy.deepcopy(model, shared)


def own_layer_(model: Any, layer: int) -> None:
    """Give a layer memory of its own for its parameters."""
    for parameter in list(layers_of(model))[layer].parameters():
        parameter.data = parameter.detach().clone()


def layer_of(model: Any, layer: int) -> dict[str, Any]:
    """Return the units and weights of a pruned and fitted layer."""
    block, config = list(layers_of(model))[layer], model.config
    return {
        "heads": list(kept_heads(config, layer)),
        "neurons": list(kept_neurons(config, layer)),
        "weights": {name: weight.detach() for name, weight in block.state_dict().items()},
    }


def put_layer_(model: Any, layer: int, found: Mapping[str, Any]) -> None:
    """Give a layer of the dense model the units and weights that `layer_of` returned."""
    config = model.config
    prune_heads_(model, {layer: sorted({*kept_heads(config, layer)} - {*found["heads"]})})
    prune_neurons_(model, {layer: sorted({*kept_neurons(config, layer)} - {*found["neurons"]})})
    list(layers_of(model))[layer].load_state_dict(found["weights"])
