"""Figures and sentences for the card and the report of a model that an experiment made."""

from collections.abc import Mapping
from typing import Any

from bertlite.experiments.evaluate import Task, interval_over_examples
from bertlite.experiments.finetune import Recipe
from bertlite.experiments.statistics import Array
from bertlite.shipping.card import Figure

KEPT = ("command", "config", "seed", "data", "model", "environment", "started")  # of a run, for report.json


def figures_of(
    found: Array, truth: Array, task: Task, data: str, results: Mapping[str, Any], dense: Mapping[str, float]
) -> list[Figure]:
    """Return the figures of a model: the headline with its interval over the examples, then the other metrics.

    Args:
        found: outputs, (examples, classes) or (examples, 1); of words as `predictions.outputs` gives them.
        data: name of the evaluation data.
        results: {metric: value}, and "macs" as a share of the dense model's where it is known.
        dense: {metric: value} of the dense model; empty where there is none.
    """
    name = task.headline
    interval = interval_over_examples(found, truth, task, name)
    low, high = (None, None) if interval is None else (interval.low, interval.high)
    figures = [Figure(name, results[name], low, high, f"{len(truth)} examples of {data}", dense.get(name))]
    figures += [Figure(x, results[x], dense=dense.get(x)) for x in task.metrics if x in results and x != name]
    if "macs" in results:
        figures.append(Figure("multiply-accumulates of the layers, as a share", results["macs"], dense=1.0))
    return figures


def describe_pruning(cell: Mapping[str, Any], setting: Mapping[str, Any]) -> list[str]:
    """Return sentences on how a cell pruned its model."""
    examples = f"on {setting['calibration']} examples"
    found = [
        f"{100 * cell['fraction']:g} % of the heads were removed by the criterion {cell['criterion']}, {examples}."
    ]
    if cell["repair"] != "none":
        found.append(f"The remaining weights were repaired ({cell['repair']}).")
    if cell["epochs"]:
        found.append(f"It was retrained for {cell['epochs']:g} epochs.")
    return found


def describe_finetuning(recipe: Recipe, data: str) -> list[str]:
    """Return a sentence on how a model was fine-tuned."""
    return [f"It was fine-tuned on {data} for {recipe.epochs:g} epochs at learning rate {recipe.lr:g}."]


def report_of(facts: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a run for report.json, without the figures."""
    return {"run": {name: facts[name] for name in KEPT if name in facts}, "results": dict(results)}
