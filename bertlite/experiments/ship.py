"""Folders of the models that experiments make, with card and report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertlite.config import BertConfig
from bertlite.experiments.evaluate import Task, interval_over_examples
from bertlite.experiments.files import labels, outputs
from bertlite.experiments.finetune import Recipe
from bertlite.experiments.statistics import Array
from bertlite.records import Record
from bertlite.shipping.card import Figure
from bertlite.shipping.folder import write_model

KEPT = ("command", "config", "seed", "data", "model", "environment", "started")  # of a run, for report.json


def write_run(
    folder: Path,
    model: Any,
    record: Record,
    task: Task,
    source: str,
    *,
    base_model: str | None = None,
    pruned: BertConfig | None = None,
    note: str = "",
) -> Path:
    """Write the pruned model of a run in one step, and return its folder.

    Args:
        source: the checkpoint whose tokenizer and modules it gets.
        base_model, pruned: as for `write_model`.
        note: one more sentence for the card.
    """
    cell, setting = record.config["cell"], record.config["setting"]
    return write_model(
        folder,
        model,
        source,
        class_names=setting["train"]["classes"] if task.name == "classification" else (),
        figures=figures_of_run(record, task),
        how=[*describe_pruning(cell, setting), *([note] if note else [])],
        report=report_of(record.facts, record.results),
        base_model=base_model,
        pruned=pruned,
    )


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
    figures += [Figure(other, results[other], dense=dense.get(other)) for other in task.metrics if other != name]
    if "macs" in results:
        figures.append(Figure("multiply-accumulates of the layers, as a share", results["macs"], dense=1.0))
    return figures


def figures_of_run(record: Record, task: Task) -> list[Figure]:
    """Return the figures of a finished run's pruned model."""
    data = Path(record.config["setting"]["dev"]["path"]).name
    return figures_of(outputs(record), labels(record), task, data, record.results, record.results["dense"])


def describe_pruning(cell: Mapping[str, Any], setting: Mapping[str, Any]) -> list[str]:
    """Return sentences on how a cell pruned its model."""
    what = f"{100 * cell['fraction']:g} % of the heads"
    if cell["neurons"]:
        what += f" and {100 * cell['neurons']:g} % of the intermediate neurons"
    found = [f"{what} were removed by the criterion {cell['criterion']}, on {setting['calibration']} examples."]
    if cell["repair"] != "none":
        found.append(f"The remaining weights were repaired ({cell['repair']}).")
    if cell["epochs"]:
        distil = setting["recipe"]["distil"]
        found.append(
            f"It was retrained for {cell['epochs']:g} epochs"
            + (f", with distillation from the dense model at weight {distil:g}." if distil else ".")
        )
    return found


def describe_finetuning(recipe: Recipe, data: str, teacher: str | None = None) -> list[str]:
    """Return a sentence on how a model was fine-tuned."""
    how = f"It was fine-tuned on {data} for {recipe.epochs:g} epochs at learning rate {recipe.lr:g}"
    return [how + (f", with distillation from {teacher} at weight {recipe.distil:g}." if teacher else ".")]


def report_of(facts: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a run for report.json, without the figures."""
    return {"run": {name: facts[name] for name in KEPT if name in facts}, "results": dict(results)}
