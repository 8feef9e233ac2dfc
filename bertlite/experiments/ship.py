"""The files that a run writes about its model: results, predictions, and the model itself with its card."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertlite.experiments.data import NO_LABEL, EncodedExamples
from bertlite.experiments.evaluate import Task, interval_over_examples, metrics_of, predict
from bertlite.experiments.files import DENSE, prediction_lines
from bertlite.experiments.finetune import DivergedError
from bertlite.experiments.statistics import Array
from bertlite.opened.checkpoint import Checkpoint
from bertlite.shipping.card import Figure
from bertlite.shipping.folder import write_model
from bertlite.support.runs import Run

MODEL = "model"  # the folder of a run's model
IN_REPORT = ("command", "config", "seed", "data", "model", "environment", "started")  # facts of a run


def finish_run(
    run: Run,
    model: Any,
    data: EncodedExamples,
    task: Task,
    *,
    data_name: str,
    dense: Array | None = None,
    source: Checkpoint | None = None,
    how: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> None:
    """Evaluate the model of a run, and write predictions, metrics and the model into its folder.

    Args:
        dense: outputs of the dense model, which are evaluated too.
        source: the checkpoint that the model was made from; None writes no model.
        how: sentences on how it was made, for the card.

    Raises:
        DivergedError: an output is nan or infinite.
    """
    outputs, labels = predict(model, data, task), data.targets()
    if not np.isfinite(outputs[labels != NO_LABEL]).all():
        raise DivergedError("the outputs of the model are nan")
    run.results |= metrics_of(outputs, labels, task, dense)
    of_dense = {} if dense is None else {DENSE: dense}
    run.results |= {name: metrics_of(each, labels, task) for name, each in of_dense.items()}
    run.save_predictions(prediction_lines(labels, outputs=outputs, **of_dense))
    if source is not None:
        found = metric_figures(outputs, labels, task, data_name, run.results)
        report = {"run": {name: run.facts[name] for name in IN_REPORT}, "results": run.results}
        write_model(run.folder / MODEL, model, source, class_names=class_names, figures=found, how=how, report=report)


def metric_figures(outputs: Array, labels: Array, task: Task, data: str, results: Mapping[str, Any]) -> list[Figure]:
    """Return the figures of a model: the headline with its interval over the examples, then the other metrics.

    Args:
        data: name of the evaluation data.
        results: {metric: value}; if known, also "dense", the dense model's, and "macs", as a share of it.
    """
    name, dense = task.headline, results.get(DENSE, {})
    low, high = interval_over_examples(outputs, labels, task, name)
    figures = [Figure(name, results[name], low, high, f"{len(labels)} examples of {data}", dense.get(name))]
    figures += [Figure(x, results[x], dense=dense.get(x)) for x in task.metrics if x in results and x != name]
    if "macs" in results:
        figures.append(Figure("multiply-accumulates of the layers, as a share", results["macs"], dense=1.0))
    return figures
