"""The work of `bertlite evaluate`: a checkpoint's metrics on labelled examples, alone or against another's."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import bertlite
from bertlite.checkpoint.files import Source, find_checkpoint
from bertlite.checkpoint.reading import read_tensors
from bertlite.config import BertConfig
from bertlite.experiments.compare import comparison, metric_for, note_on_balance
from bertlite.experiments.data import NO_LABEL, Examples, read_examples, read_tokenizer
from bertlite.experiments.evaluate import TASKS, Task, evaluate, predict
from bertlite.experiments.files import class_names
from bertlite.experiments.finetune_command import data_source
from bertlite.experiments.masked import MASKED, mask_tokens
from bertlite.experiments.predictions import interval_over_examples
from bertlite.experiments.statistics import Array
from bertlite.inspection import bertlite_faults, class_of
from bertlite.records import environment, write_json

TASK_OF = {"BertForTokenClassification": "tokens", "BertModel": "similarity", "BertForMaskedLM": "masked"}
MASKED_BATCH = 8  # texts: a logit for every word of the vocabulary, at every token


@dataclass(frozen=True)
class Predictions:
    """The predictions of a checkpoint, and the labels, both in its own order of classes."""

    checkpoint: str
    classes: tuple[str, ...]
    outputs: Array
    labels: Array

    def with_classes(self, other: "Predictions") -> "Predictions":
        """Return these predictions with the classes in another's order, to compare them.

        Raises:
            ValueError: the two have different classes or labels, as one reads fewer words.
        """
        pair = f"{other.checkpoint} and {self.checkpoint}"
        found = self
        if self.classes and other.classes and self.classes != other.classes:
            if {*self.classes} != {*other.classes}:
                names = (", ".join(each.classes) for each in (other, self))
                raise ValueError(f"{pair} have different classes, {' and '.join(names)}: compare models of one task")
            order = [self.classes.index(name) for name in other.classes]
            labels = self.labels.astype(int)
            labels = np.where(labels == NO_LABEL, NO_LABEL, np.argsort(order)[labels])
            found = replace(self, classes=other.classes, outputs=self.outputs[..., order], labels=labels)
        if found.outputs.shape[-1] != other.outputs.shape[-1]:
            sizes = (each.outputs.shape[-1] for each in (other, self))
            raise ValueError(
                f"{pair} have heads of {' and '.join(map(str, sizes))} outputs: compare models of one task"
            )
        if not np.array_equal(found.labels, other.labels):
            raise ValueError(f"{pair} do not read the same words: give them one tokenizer, or raise --max-length")
        return found


def main(args: argparse.Namespace) -> int:
    """Print and write the metrics of a checkpoint, and their difference from another's; return 1 if they are worse."""
    task = task_of(args.checkpoint, args.task)
    metric = metric_for(args.dev, task, args.metric)
    dev, ours = predict_examples(args, args.checkpoint, task)
    record: dict[str, Any] = {
        "what": "bertlite evaluate",
        "task": task.name,
        "metric": metric,
        "data": {"name": dev.name, "examples": len(dev), "sha256": dev.sha256},
        "model": measure(ours, task, metric),
    }
    print(f"{task.name}, {len(dev)} examples of {dev.name}; 95 % intervals over the examples")
    print(*describe(record["model"], metric), sep="\n")
    worse = False
    if args.against is not None:
        other = predict_examples(args, args.against, task_of(args.against, task.name))[1].with_classes(ours)
        record["against"] = measure(other, task, metric)
        found = comparison({"": [ours.outputs]}, {"": [other.outputs]}, ours.labels, task, metric)
        record["comparison"] = found
        low, high = found["difference_low"], found["difference_high"]
        worse = low is not None and (low > 0 if metric == "loss" else high < 0)
        print(*describe(record["against"], metric), sep="\n")
        exact = f", by McNemar's exact test {found['mcnemar']:.2g}" if "mcnemar" in found else ""
        print(f"difference: {found['difference']:+.4f}{span(low, high, '+')}, p {found['p']:.2g}{exact}")
    note = None if task.labels is not torch.long else note_on_balance(ours.labels, metric)
    if note is not None:
        print(f"note: {note}")
    if args.record:
        write_json(args.record, {**record, "environment": environment(args.device)})
    return int(worse)


def task_of(checkpoint: str, asked: str | None) -> Task:
    """Return the task of a checkpoint: that of its class, unless one is given.

    Raises:
        ValueError: there is no task for it, or its weights have no head for the task.
    """
    files = find_checkpoint(Source(checkpoint))
    config = BertConfig.from_json_file(files.config)
    name = class_of(config).__name__
    if asked is None and name == "BertForSequenceClassification":
        number = config.problem_type == "regression" or (config.problem_type is None and config.num_labels == 1)
        asked = "regression" if number else "classification"
    asked = asked or TASK_OF.get(name)
    if asked is None:
        known = ", ".join(["BertForSequenceClassification", *TASK_OF])
        raise ValueError(f"{checkpoint} is a {name}; those evaluated are {known}, or name the --task")
    if asked == "classification" and config.problem_type == "multi_label_classification":
        raise ValueError(f"{checkpoint} gives a text several labels at once, for which there is no metric here")
    task = {**TASKS, MASKED.name: MASKED}[asked].of_checkpoint(checkpoint)
    absent = set() if task.apart else bertlite_faults(getattr(bertlite, task.model), config, read_tensors(files))[0]
    if absent:
        raise ValueError(
            f"{checkpoint} has no {' and no '.join(sorted(absent))}: train it by `bertlite prune finetune`"
        )
    return task


def predict_examples(args: argparse.Namespace, checkpoint: str, task: Task) -> tuple[Examples, Predictions]:
    """Return the examples, with labels in a checkpoint's order of classes, and its predictions."""
    model, source = task.load(checkpoint).to(args.device), data_source(args, args.dev, args.dev_split)
    tokenizer = read_tokenizer(checkpoint, args.max_length)
    if task is MASKED:
        dev = read_examples(replace(source, label=None))
        data = mask_tokens(dev, tokenizer)
        return dev, Predictions(checkpoint, (), predict(model, data, task, MASKED_BATCH), data.targets())
    classes = class_names(model.config) if task.labels is torch.long else ()
    dev = read_examples(source, words=task.words, classes=classes)
    task.check(dev, model.config)
    data = task.encode(dev, tokenizer)
    return dev, Predictions(checkpoint, dev.classes, predict(model, data, task), data.targets())


def measure(found: Predictions, task: Task, metric: str) -> dict[str, Any]:
    """Return every metric of a checkpoint, and the interval of one; JSON-ready."""
    interval = interval_over_examples(found.outputs, found.labels, task, metric)
    ends = {"low": None, "high": None} if interval is None else {"low": interval.low, "high": interval.high}
    return {"checkpoint": found.checkpoint, **evaluate(found.outputs, found.labels, task), **ends}


def describe(row: dict[str, Any], metric: str) -> Iterator[str]:
    """Yield the lines of a checkpoint's metrics."""
    yield f"{row['checkpoint']}: {metric} {row[metric]:.4f}{span(row['low'], row['high'])}"
    others = [name for name in row if name not in ("checkpoint", metric, "low", "high")]
    if others:
        yield "  " + "   ".join(f"{name} {row[name]:.4f}" for name in others)


def span(low: float | None, high: float | None, sign: str = "") -> str:
    """Return " [LOW, HIGH]"; empty where nothing varies."""
    return "" if low is None or high is None else f" [{low:{sign}.4f}, {high:{sign}.4f}]"
