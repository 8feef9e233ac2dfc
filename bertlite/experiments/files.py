"""The files in a run's folder: predictions of its model and of the dense one, and the model itself with its card."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from bertlite.config import pruned_heads
from bertlite.experiments.data import NO_LABEL, EncodedExamples, pad_rows
from bertlite.experiments.evaluate import DivergedError, Task, interval_over_examples, metrics_of, predict
from bertlite.experiments.statistics import Array
from bertlite.models.base import BertPreTrainedModel
from bertlite.opened.checkpoint import Checkpoint
from bertlite.shipping.card import Figure
from bertlite.shipping.folder import write_model
from bertlite.shipping.vectors import VectorHead
from bertlite.support.files import sha256_of
from bertlite.support.runs import Record, Run
from bertlite.tokenizer import BertTokenizer

MODEL = "model"  # the folder of a run's model
NO_EFFECT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")  # entries of a config.json
DENSE = "dense"  # the outputs of the dense model that a run pruned, in its predictions
IN_REPORT = ("command", "config", "seed", "data", "model", "environment", "started")  # facts of a run


@contextmanager
def as_checkpoint(
    given: str | PathLike[str] | BertPreTrainedModel, tokenizer: BertTokenizer | None
) -> Iterator[tuple[Checkpoint, str | None]]:
    """Yield a checkpoint, with another tokenizer if one is given, and its name in reports.

    A loaded model has no name, and is saved to a temporary folder.

    Raises:
        ValueError: a loaded model comes without its tokenizer.
    """
    if isinstance(given, str | PathLike):
        source = Checkpoint.of(given)
        if tokenizer is not None:
            source = copy.copy(source)  # the caller's own keeps its tokenizer
            source.tokenizer = tokenizer
        yield source, fspath(given)
        return

    # Only a loaded model needs a folder.
    if tokenizer is None:
        raise ValueError("a loaded model has no tokenizer of its own: give tokenizer too")
    with TemporaryDirectory(prefix="bertlite-prune-") as folder:
        given.save_pretrained(folder)
        source = Checkpoint(folder)
        source.tokenizer = tokenizer
        yield source, None


def model_sha256(model: Any) -> str:
    """Return a hash of a model's weights with their names."""
    parts: list[str | memoryview] = []
    for name, value in sorted(model.state_dict().items()):
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data  # on a CPU no copy
        parts += [f"{name} {value.dtype} {tuple(value.shape)}", content]
    return sha256_of(*parts)


def model_key(model: Any, tokenizer: BertTokenizer | None = None, head: VectorHead | None = None) -> str:
    """Return a hash of everything that determines results for texts: weights, config, tokenizer, and vectors."""
    config = getattr(model, "config", None)  # a recorded teacher has none
    known = {} if config is None else {**config.to_dict(), **dict.fromkeys(NO_EFFECT)}
    texts = [] if tokenizer is None else [tokenizer.backend_tokenizer.to_str(), tokenizer.text_settings]
    vectors = [] if head is None else [repr(head), [model_sha256(each) for each in head.modules]]
    return sha256_of(model_sha256(model), json.dumps([known, texts, vectors], sort_keys=True, default=str))


def prediction_lines(labels: Array, **outputs: Array) -> Iterator[dict[str, Any]]:
    """Yield a line for each example: its label and each of its named outputs, to 6 digits, or of each word."""
    for i, label in enumerate(labels):
        counted = label != NO_LABEL if labels.ndim > 1 else ...
        rows = {name: np.round(value[i][counted].astype(float), 6).tolist() for name, value in outputs.items()}
        yield {"label": label[counted].tolist(), **rows}


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
    classes: Sequence[str] = (),
) -> None:
    """Evaluate the model of a run, and write predictions, metrics and the model into its folder.

    Args:
        dense: outputs of the dense model, which are evaluated too.
        source: the checkpoint that the model was made from; None writes no model.
        how: sentences on how it was made, for the card.
        classes: names of the labels 0, 1, … in the data.

    Raises:
        DivergedError: an output is nan or infinite.
    """
    found, truth = predict(model, data, task), data.targets()
    if not np.isfinite(found[truth != NO_LABEL]).all():
        raise DivergedError("the outputs of the model are nan")
    run.results |= metrics_of(found, truth, task, dense)
    of_dense = {} if dense is None else {DENSE: dense}
    run.results |= {name: metrics_of(each, truth, task) for name, each in of_dense.items()}
    run.save_predictions(prediction_lines(truth, outputs=found, **of_dense))
    if source is not None:
        figures = metric_figures(found, truth, task, data_name, run.results)
        report = {"run": {name: run.facts[name] for name in IN_REPORT}, "results": run.results}
        write_model(run.folder / MODEL, model, source, class_names=classes, figures=figures, how=how, report=report)


def metric_figures(found: Array, truth: Array, task: Task, data: str, results: Mapping[str, Any]) -> list[Figure]:
    """Return the figures of a model: the headline with its interval over the examples, then the other metrics.

    Args:
        data: name of the evaluation data.
        results: {metric: value}; if known, also "dense", the dense model's, and "macs", as a share of it.
    """
    name, dense = task.headline, results.get(DENSE, {})
    low, high = interval_over_examples(found, truth, task, name)
    figures = [Figure(name, results[name], low, high, f"{len(truth)} examples of {data}", dense.get(name))]
    figures += [Figure(x, results[x], dense=dense.get(x)) for x in task.metrics if x in results and x != name]
    if "macs" in results:
        figures.append(Figure("multiply-accumulates of the layers, as a share", results["macs"], dense=1.0))
    return figures


def record_of(action: str, runs: Sequence[Record]) -> dict[str, Any]:
    """Return the record of `bertlite prune finetune` or `run`: the facts of its runs with their folders."""
    return {"what": f"bertlite prune {action}", "runs": [{"folder": str(run.folder), **run.facts} for run in runs]}


def outputs(run: Record, name: str = "outputs") -> Array:
    """Return the outputs of a run's model, (examples, classes), (examples, 1) or (examples, words, classes)."""
    return as_array([line[name] for line in run.predictions], np.nan)


def labels(run: Record) -> Array:
    """Return the labels of the examples that a run was evaluated on, (examples,) or (examples, words)."""
    return as_array([line["label"] for line in run.predictions], NO_LABEL)


def as_array(rows: Sequence[Any], padding: float) -> Array:
    """Return rows of numbers as an array; rows of several lengths, for words, are filled up."""
    if not any(isinstance(row, list) and (padding == NO_LABEL or not row or isinstance(row[0], list)) for row in rows):
        return np.array(rows)
    width = next(np.shape(row)[1:] for row in rows if row)
    return pad_rows([np.array(row, float).reshape(len(row), *width) for row in rows], padding)


def mask_of(config: Any, model: str) -> dict[str, Any]:
    """Return the heads that a model has lost, with the hash of the dense model; JSON-ready."""
    gone = sorted(pruned_heads(config).items())
    return {"model": model, "pruned_heads": {str(layer): sorted(heads) for layer, heads in gone if heads}}
