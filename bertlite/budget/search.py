"""The search: the loss and cost of sizes, the choice that meets the budget, and pruning and fitting to it.

Each step writes a file to the folder of the search, so that a killed search continues where it stopped.
"""

import copy
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertlite.bench.work import Work
from bertlite.budget.target import Target, UnitMacs
from bertlite.budget.times import TimeTable, time_table
from bertlite.config import kept_heads, kept_neurons
from bertlite.importance.allocation import BySize, choose_sizes
from bertlite.importance.batches import inputs_of
from bertlite.importance.layerwise import (
    Metrics,
    Sizes,
    loss_curves,
    losses_by_size,
    output_metrics,
    prune_layerwise_,
)
from bertlite.importance.predictions import predictions
from bertlite.importance.selection import Elimination
from bertlite.progress import Progress, short_time
from bertlite.pruning import layers_of, prune_heads_, prune_neurons_
from bertlite.records import quartiles, write_json
from bertlite.timing import alternate, ratios

Batches = Sequence[Mapping[str, Tensor]]
CLOCK_ROUNDS, CLOCK_SECONDS = 15, 12.0  # of one timing: rounds, and a time limit
ATTEMPTS = 6  # choices of sizes that are timed
REFINEMENTS = 2  # searches for a smaller model after a finished one that is too slow
SPARE = 0.03  # by how much a model may be faster than needed
SETTINGS = "settings.json"


class State:
    """The files of an unfinished search.

    Raises:
        ValueError: the folder belongs to a search with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        path = folder / SETTINGS
        wanted = json.loads(json.dumps(settings))
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            other = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
            if other:
                raise ValueError(
                    f"{folder} holds an unfinished search with another {' and '.join(other)}: name another --out, or"
                    " delete it"
                )
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, wanted)

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
class Plan:
    """The chosen sizes, and the speed of a model with them."""

    sizes: list[tuple[int, int]]
    macs: float  # share of the dense model's
    loss: float  # expected, nats per example
    dense_seconds: float
    seconds: float


@dataclass
class Search:
    """One search.

    Args:
        model: the dense model, or one pruned before; not changed.
        fit: batches to measure and fit on; `judge` are others.
        by: "macs" or "latency", the cost by which sizes are chosen.
        gradients: of the divergence, "kl", or with labels of the loss, "loss".
        timed: the model as it is timed.
        prepare: converts a pruned model to the one that is timed.
    """

    model: Any
    fit: Batches
    target: Target
    work: Work
    by: str
    state: State
    progress: Progress
    timed: Any
    prepare: Callable[[Any], Any]
    gradients: str = "kl"
    seed: int = 0
    device: str = "cpu"
    tables: Path | None = None
    time_correction: float = 1.0  # target over planned time: above 1 after a finished model missed it

    def metrics(self) -> list[Metrics]:
        """Return the second moments of the gradients at the outputs of sublayers."""
        self.progress.stage("gradients at the outputs of all layers")
        found = self.state.once(
            "metrics", lambda: output_metrics(self.model, self.fit, target=self.gradients, seed=self.seed)
        )
        return [(a, b) for a, b in found]

    def curves(self, metrics: Sequence[Metrics]) -> list[tuple[Elimination, Elimination]]:
        """Return the loss of removing the units of each sublayer."""
        layers = self.model.config.num_hidden_layers
        known = sum(self.state.has(f"curves-{layer}") for layer in range(layers))
        self.progress.stage("losses by heads and neurons", layers, "layers", done=known if known == layers else 0)
        for layer, pair in enumerate(loss_curves(self.model, self.fit, metrics)) if known < layers else ():
            self.state.save(f"curves-{layer}", [[list(each.order), each.losses] for each in pair])
            self.progress.advance()
        found = []
        for layer in range(layers):
            pair = self.state.once(f"curves-{layer}", dict)
            found.append(tuple(Elimination(tuple(order), losses) for order, losses in pair))
        return [(a, b) for a, b in found]

    def table(self, losses: Sequence[BySize]) -> TimeTable | None:
        """Return the times of sublayers with the sizes that have a loss, if sizes are chosen by times."""
        found = None
        if self.by == "latency":
            self.progress.stage("times of layers of each size")
            sizes = {n for _, neurons in losses for n in neurons}
            found = time_table(self.model, self.work, sizes, device=self.device, folder=self.tables)
        return found

    def plan(self, losses: list[BySize], table: TimeTable | None) -> Plan:
        """Choose sizes whose measured time meets the target.

        A model with the chosen sizes is timed beside the dense one; if it is too slow, or needlessly fast, the budget
        is changed by as much, and sizes are chosen again.

        Raises:
            ValueError: even the smallest model does not meet the target.
        """
        config = self.model.config
        unit = UnitMacs.of(config, self.work)
        layers = range(config.num_hidden_layers)
        built = unit.total([(config.num_attention_heads, config.intermediate_size)] * config.num_hidden_layers)
        own = [(len(kept_heads(config, i)), len(kept_neurons(config, i))) for i in layers]
        costs: list[BySize]
        if table is None:
            costs = [({n: n * unit.head for n in a}, {n: n * unit.neuron for n in f}) for a, f in losses]
        else:
            costs = table.costs(config.num_hidden_layers)
        if self.target.kind == "macs":
            return self.sized(choose_sizes(losses, costs, self.target.value * built), losses, built, unit)
        least = sum(min(cost.values()) for pair in costs for cost in pair)
        most = sum(a[heads] + f[neurons] for (a, f), (heads, neurons) in zip(costs, own, strict=True))
        return self.plan_by_clock(
            partial(self.sized, losses=losses, built=built, unit=unit), losses, costs, least, most
        )

    def plan_by_clock(
        self,
        sized: Callable[[list[tuple[int, int]]], Plan],
        losses: list[BySize],
        costs: list[BySize],
        least: float,
        most: float,
    ) -> Plan:
        """Return the plan of lowest loss that is measured to be fast enough, by false position on its budget.

        Args:
            least, most: what the smallest model and the given one cost.
        """
        best = sized([(min(heads), min(neurons)) for heads, neurons in costs])
        wanted = self.allowed(best.dense_seconds)
        if best.seconds > wanted:
            if self.time_correction > 1:
                return best
            raise ValueError(
                f"the target {self.target.text} cannot be met by pruning: without any head or neuron a forward takes"
                f" {short_time(best.seconds)}, {best.dense_seconds / best.seconds:.3g} x as fast"
            )
        low, low_pace = least, best.seconds / wanted  # a budget that is met, and its time over the wanted one
        high, high_pace = most, best.dense_seconds / wanted
        if high_pace <= 1:
            return sized(choose_sizes(losses, costs, most))
        for attempt in range(ATTEMPTS):
            share = (1 - SPARE / 2 - low_pace) / (high_pace - low_pace) if attempt % 3 < 2 else 0.5
            budget = low + min(max(share, 0.02), 0.98) * (high - low)
            found = sized(choose_sizes(losses, costs, budget))
            pace = found.seconds / self.allowed(found.dense_seconds)
            if pace > 1:
                high, high_pace = budget, pace
                continue
            low, low_pace = budget, pace
            best = found if found.loss <= best.loss else best
            if pace >= 1 - SPARE:
                break
        return best

    def allowed(self, dense_seconds: float) -> float:
        """Return the seconds that a forward may take in a plan."""
        return self.target.seconds(dense_seconds) / self.time_correction

    def sized(self, sizes: list[tuple[int, int]], losses: list[BySize], built: int, unit: UnitMacs) -> Plan:
        """Return a plan with these sizes, timed."""
        expected = sum(a[h] + f[n] for (a, f), (h, n) in zip(losses, sizes, strict=True))
        times = clock(self.beside_dense(shape_of(self.model, sizes)), self.work, self.device)
        dense = statistics.median(times["dense"])
        ratio = statistics.median(ratios(times, "pruned", "dense"))
        self.progress.advance()
        return Plan(sizes, unit.total(sizes) / built, expected, dense, ratio * dense)

    def beside_dense(self, pruned: Any) -> dict[str, Any]:
        """Return the dense and a pruned model as they are timed."""
        return {"dense": self.timed, "pruned": self.prepare(pruned)}

    def pruned(self, sizes: Sizes, metrics: Sequence[Metrics], attempt: int) -> Any:
        """Return the model pruned to these sizes and fitted, layer by layer."""
        model = copy.deepcopy(self.model)
        start = 0
        while self.state.has(f"layer-{attempt}-{start}"):
            put_layer_(model, start, self.state.once(f"layer-{attempt}-{start}", dict))
            start += 1
        self.progress.stage("pruning and fitting", model.config.num_hidden_layers, "layers", done=start)
        if start == model.config.num_hidden_layers:
            return model
        for layer in prune_layerwise_(model, self.model, self.fit, sizes, metrics=metrics, start=start):
            self.state.save(f"layer-{attempt}-{layer}", layer_of(model, layer))
            self.progress.advance()
        return model

    def run(self) -> "Outcome":
        """Search until the finished model is measured to meet the target, or REFINEMENTS are used up."""
        metrics = self.metrics()
        losses = losses_by_size(self.model.config, self.curves(metrics))
        table = self.table(losses)
        for attempt in range(REFINEMENTS + 1):
            self.progress.stage("choosing sizes by the clock", unit="choices")
            kept = self.state.once(f"plan-{attempt}", lambda: vars(self.plan(losses, table)))
            plan = Plan(**{**kept, "sizes": [(heads, neurons) for heads, neurons in kept["sizes"]]})
            model = self.pruned(plan.sizes, metrics, attempt)
            self.progress.stage("timing the finished model")
            times = clocked(self.beside_dense(model), self.work, self.device)
            pace = self.pace(times)
            if pace <= 1 or attempt == REFINEMENTS:
                break
            self.time_correction *= pace * (1 + SPARE / 2)
        return Outcome(model, plan, times, pace <= 1)

    def pace(self, times: Mapping[str, Any]) -> float:
        """Return the time of a forward over the target: above 1 is too slow.  The plan meets MACs by itself."""
        if self.target.kind == "speed":
            return self.target.value / float(times["speedup"]["median"])
        return float(times["seconds"]["median"]) / self.target.seconds(1.0)


@dataclass(frozen=True)
class Outcome:
    """A finished search: the model, its plan, its measured times (`clocked`), and whether the target is met."""

    model: Any
    plan: Plan
    times: dict[str, Any]
    met: bool


def clock(models: Mapping[str, Any], work: Work, device: str) -> dict[str, list[float]]:
    """Time models in turn on the work."""
    with torch.inference_mode():
        inputs = work.inputs(next(iter(models.values())).config.vocab_size, device)
        runs = {name: partial(model, **inputs) for name, model in models.items()}
        return alternate(runs, CLOCK_ROUNDS, device, seconds=CLOCK_SECONDS)


def shape_of(model: Any, sizes: Sizes) -> Any:
    """Return a copy of a model with these sizes, to time it: which units it keeps does not matter."""
    found = copy.deepcopy(model)
    heads = {i: kept_heads(model.config, i)[count:] for i, (count, _) in enumerate(sizes)}
    neurons = {i: kept_neurons(model.config, i)[count:] for i, (_, count) in enumerate(sizes)}
    return prune_neurons_(prune_heads_(found, heads), neurons)


def layer_of(model: Any, layer: int) -> dict[str, Any]:
    """Return the units and weights of a pruned and fitted layer."""
    block, config = list(layers_of(model))[layer], model.config
    return {
        "heads": list(kept_heads(config, layer)),
        "neurons": list(kept_neurons(config, layer)),
        "attention": [block.attention.output.dense.weight.detach(), block.attention.output.dense.bias.detach()],
        "network": [block.output.dense.weight.detach(), block.output.dense.bias.detach()],
    }


@torch.no_grad()
def put_layer_(model: Any, layer: int, found: Mapping[str, Any]) -> None:
    """Give a layer of the dense model the units and weights that `layer_of` returned."""
    config = model.config
    prune_heads_(model, {layer: sorted({*kept_heads(config, layer)} - {*found["heads"]})})
    prune_neurons_(model, {layer: sorted({*kept_neurons(config, layer)} - {*found["neurons"]})})
    block = list(layers_of(model))[layer]
    for part, (weight, bias) in (
        (block.attention.output.dense, found["attention"]),
        (block.output.dense, found["network"]),
    ):
        part.weight.copy_(weight)
        part.bias.copy_(bias)


@torch.inference_mode()
def judge(model: Any, dense: Any, batches: Batches) -> dict[str, float]:
    """Compare a model with the dense one on texts that it was not fitted to.

    Returns:
        "kl", the mean divergence in nats from the dense model's predictions; for a classifier "agreement", the share
        of predictions with the same class; with labels "score" and "dense_score": the accuracy of a classifier, the
        correlation of a regression.
    """
    divergences: list[Tensor] = []
    same: list[Tensor] = []
    answers: dict[str, list[Tensor]] = {"labels": [], "pruned": [], "dense": []}
    for batch in batches:
        inputs = inputs_of(batch)
        outs = [each(**inputs, return_dict=True) for each in (dense, model)]
        p, q = (predictions(each, out, batch) for each, out in zip((dense, model), outs, strict=True))
        divergences.append(torch.stack([a.divergence(b) for a, b in zip(p, q, strict=True)]).sum(0).double().cpu())
        logits = [out.get("logits") for out in outs]
        if logits[0] is None or logits[0].dim() != 2:
            continue
        found = [x[:, 0] if x.shape[1] == 1 else x.argmax(1) for x in logits]
        if logits[0].shape[1] > 1:
            same.append((found[0] == found[1]).double().cpu())
        if "labels" in batch:
            for name, value in zip(answers, (batch["labels"], found[1], found[0]), strict=True):
                answers[name].append(value.double().cpu())
    result = {"kl": float(torch.cat(divergences).mean())}
    if same:
        result["agreement"] = float(torch.cat(same).mean())
    if answers["labels"]:
        truth, mine, theirs = (torch.cat(each) for each in answers.values())
        score = accuracy if same else correlation
        result |= {"score": score(mine, truth), "dense_score": score(theirs, truth)}
    return result


def accuracy(answers: Tensor, truth: Tensor) -> float:
    return float((answers == truth).double().mean())


def correlation(answers: Tensor, truth: Tensor) -> float:
    """Return Pearson's correlation; 0 if one side is constant."""
    a, b = answers - answers.mean(), truth - truth.mean()
    power = math.sqrt(float(a.square().sum() * b.square().sum()))
    return float((a * b).sum()) / power if power else 0.0


def clocked(models: Mapping[str, Any], work: Work, device: str) -> dict[str, Any]:
    """Return the seconds of the dense and the pruned model, and how many times as fast the pruned one is."""
    times = clock(models, work, device)
    return {
        "seconds": quartiles(times["pruned"]),
        "dense_seconds": quartiles(times["dense"]),
        "speedup": quartiles(ratios(times, "dense", "pruned")),
    }
