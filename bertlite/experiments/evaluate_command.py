"""The work of `bertlite evaluate`: a checkpoint's metrics on labelled examples, alone or against another's."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bertlite.checkpoint.families import read_config
from bertlite.checkpoint.files import Source
from bertlite.experiments.command import data_source
from bertlite.experiments.compare import comparison, note_on_balance, note_on_predictions
from bertlite.experiments.data import NO_LABEL, EncodedExamples, Examples, read_examples, rows_of
from bertlite.experiments.evaluate import TASKS, Task, measure_metrics, predict
from bertlite.experiments.files import class_names
from bertlite.experiments.statistics import Array
from bertlite.shipping.carried import class_for
from bertlite.support.records import environment, write_json
from bertlite.tokenizer import BertTokenizer

TASK_OF = {"BertForTokenClassification": "tokens", "BertModel": "similarity", "BertForMaskedLM": "masked"}
MASKED_SHARE = 0.15  # of a text's tokens, as in BERT's training (Devlin et al. 2018, arXiv:1810.04805, section 3.1)
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
            ValueError: their classes differ, or their labels, since one truncates texts earlier.
        """
        pair, outputs, labels = f"{other.checkpoint} and {self.checkpoint}", self.outputs, self.labels
        if self.classes and other.classes:
            if {*self.classes} != {*other.classes}:
                names = (", ".join(each.classes) for each in (other, self))
                raise ValueError(f"{pair} have different classes, {' and '.join(names)}: compare models of one task")
            order = [self.classes.index(name) for name in other.classes]
            outputs = outputs[..., order]
            labels = np.where(labels == NO_LABEL, NO_LABEL, np.argsort(order)[labels.astype(int)])
        sizes = [each.shape[-1] for each in (other.outputs, outputs)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"{pair} have heads of {sizes[0]} and {sizes[1]} outputs: compare models of one task")
        if not np.array_equal(labels, other.labels):
            raise ValueError(f"{pair} do not read the same words: give them one tokenizer, or raise --max-length")
        return replace(self, classes=other.classes, outputs=outputs, labels=labels)


def main(args: argparse.Namespace) -> int:
    """Print and write the metrics of a checkpoint, and their difference from another's; return 1 if they are worse."""
    task = task_of_checkpoint(args.checkpoint, args.task)
    task.metric(args.metric)  # before any work
    dev, ours = predict_examples(args, args.checkpoint, task)
    metric = task.metric(args.metric, ours.outputs.shape[-1])
    record: dict[str, Any] = {
        "what": "bertlite evaluate",
        "task": task.name,
        "metric": metric,
        "data": {"name": dev.name, "examples": len(dev), "sha256": dev.sha256},
        "model": {"checkpoint": ours.checkpoint, **measure_metrics(ours.outputs, ours.labels, task, metric)},
    }
    print(f"{task.name}, {len(dev)} examples of {dev.name}; 95 % intervals over the examples")
    print(*describe(record["model"], metric), sep="\n")
    worse = False
    if args.against is not None:
        other = predict_examples(args, args.against, task_of_checkpoint(args.against, task.name))[1].with_classes(ours)
        record["against"] = {
            "checkpoint": other.checkpoint,
            **measure_metrics(other.outputs, other.labels, task, metric),
        }
        found = comparison({"": [ours.outputs]}, {"": [other.outputs]}, ours.labels, task, metric)
        record["comparison"] = found
        low, high = found["difference_low"], found["difference_high"]
        worse = low is not None and (low > 0 if metric == "loss" else high < 0)
        print(*describe(record["against"], metric), sep="\n")
        print(f"difference: {found['difference']:+.4f}{span(low, high, '+')}, p {found['p']:.2g}")
    if task.labels is torch.long and task is not MASKED:
        for note in (note_on_balance(ours.labels, metric), note_on_predictions([ours.outputs])):
            if note is not None:
                print(f"note: {note}")
    if args.record:
        write_json(args.record, {**record, "environment": environment(args.device)})
    return int(worse)


def task_of_checkpoint(checkpoint: str, named: str | None) -> Task:
    """Return the task of a checkpoint: that of its class, unless one is given.

    Raises:
        ValueError: there is no task for it.
    """
    config = read_config(Source(checkpoint))
    name = class_for(Source(checkpoint)).__name__
    if named is None and name == "BertForSequenceClassification":
        number = config.problem_type == "regression" or (config.problem_type is None and config.num_labels == 1)
        named = "regression" if number else "classification"
    named = named or TASK_OF.get(name)
    if named is None:
        known = ", ".join(["BertForSequenceClassification", *TASK_OF])
        raise ValueError(f"{checkpoint} is a {name}; those evaluated are {known}, or name the --task")
    return {**TASKS, MASKED.name: MASKED}[named].of_checkpoint(checkpoint)


def predict_examples(args: argparse.Namespace, checkpoint: str, task: Task) -> tuple[Examples, Predictions]:
    """Return the examples, with labels in a checkpoint's order of classes, and its predictions."""
    model, source = task.load(checkpoint).to(args.device), data_source(args, args.dev, args.dev_split)
    tokenizer = task.read_tokenizer(checkpoint, args.max_length)
    if task is MASKED:
        dev = read_examples(replace(source, label=None))
        data = mask_tokens(dev, tokenizer)
        return dev, Predictions(checkpoint, (), predict(model, data, task, MASKED_BATCH), data.targets())
    classes = class_names(model.config) if task.labels is torch.long else ()
    dev = read_examples(source, words=task.words, classes=classes)
    task.check(dev, model.config)
    data = task.encode(dev, tokenizer)
    return dev, Predictions(checkpoint, dev.classes, predict(model, data, task), data.targets())


def describe(row: dict[str, Any], metric: str) -> Iterator[str]:
    """Yield the lines of a checkpoint's metrics."""
    yield f"{row['checkpoint']}: {metric} {row[metric]:.4f}{span(row['low'], row['high'])}"
    others = [name for name in row if name not in ("checkpoint", metric, "low", "high")]
    if others:
        yield "  " + "   ".join(f"{name} {row[name]:.4f}" for name in others)


def span(low: float | None, high: float | None, sign: str = "") -> str:
    """Return " [LOW, HIGH]"; empty where nothing varies."""
    return "" if low is None or high is None else f" [{low:{sign}.4f}, {high:{sign}.4f}]"


# Masked words: tokens are taken out of texts, and a masked language model is named for them; no labels are needed.


def mask_tokens(examples: Examples, tokenizer: BertTokenizer) -> EncodedExamples:
    """Put the mask token in the place of some tokens of each text, the same every time.

    The tokens that it replaces are the labels, and -100 of others.

    Raises:
        ValueError: the tokenizer has no [MASK].
    """
    mask = tokenizer.mask_token_id
    if mask is None:
        raise ValueError("the tokenizer has no [MASK], so no token can be taken out of a text")
    rows, labels = [], []
    texts: Any = [text if len(text) > 1 else text[0] for text in examples.texts]
    encoded = tokenizer.encode_texts(texts, tokenizer.model_max_length)
    for number, (text, (ids, types)) in enumerate(zip(encoded.encodings, rows_of(encoded), strict=True)):
        positions = [i for i, special in enumerate(text.special_tokens_mask) if not special]
        chosen = {*Random(number).sample(positions, min(len(positions), max(1, round(MASKED_SHARE * len(positions)))))}
        rows.append((tuple(mask if i in chosen else token for i, token in enumerate(ids)), types))
        labels.append(tuple(token if i in chosen else NO_LABEL for i, token in enumerate(ids)))
    return EncodedExamples(tuple(rows), tuple(labels))


def score_words(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each label in nats, and whether the largest logit is its own: (B, S, 2)."""
    losses = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none", ignore_index=NO_LABEL)
    return torch.stack([losses, (logits.argmax(-1) == labels).float()], -1)


def mean_of(column: int) -> Any:
    """Return the metric that is the mean of a column of `score_words` over all masked tokens."""

    def metric(outputs: Array, labels: Array) -> float:
        found = outputs[labels != NO_LABEL]
        return float(np.mean(found[:, column])) if len(found) else 0.0

    return metric


def no_divergence(dense: Array, outputs: Array) -> float:
    raise ValueError("masked words are evaluated alone, not beside a dense model's distributions")


MASKED = Task(
    "masked",
    "BertForMaskedLM",
    torch.long,
    {"loss": mean_of(0), "accuracy": mean_of(1)},
    no_divergence,
    words=True,
    scores=score_words,
)
