"""The work of `bertlite evaluate`: a checkpoint's metrics on labelled examples, alone or against another one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bertlite.checkpoint.saving import dtype_name
from bertlite.config import check_known
from bertlite.experiments.compare import comparison, notes_on, show_interval
from bertlite.experiments.data import NO_LABEL, DataSource, EncodedExamples, Examples, read_examples, rows_of
from bertlite.experiments.evaluate import BATCH, TASKS, Task, labelled, measure_metrics, predict, vectors_of
from bertlite.experiments.speed import check_packed_options
from bertlite.experiments.statistics import Array
from bertlite.inference import optimize_for_inference
from bertlite.inference.checks import parse_device
from bertlite.models.heads import BertForMaskedLM
from bertlite.opened.checkpoint import Checkpoint
from bertlite.runtime.tasks import ABOUT, PackedModel, is_packed, read_runtime_json
from bertlite.shipping.original import same_labels, what_is_kept
from bertlite.support.environment import environment
from bertlite.support.process import door
from bertlite.tokenizer import BertTokenizer

MASKED_SHARE = 0.15  # share of tokens, as in BERT's training (Devlin et al. 2018, arXiv:1810.04805, section 3.1)
MASKED_BATCH = 8  # texts: a logit for every word of the vocabulary, at every token


@dataclass(frozen=True)
class Predictions:
    """The predictions of a checkpoint for examples, and the labels, both in its own order of classes."""

    checkpoint: Checkpoint
    examples: Examples
    outputs: Array
    labels: Array

    def with_classes(self, other: "Predictions") -> "Predictions":
        """Return these predictions with the classes in another's order, to compare them.

        Raises:
            ValueError: their classes differ, or their labels, because one truncates texts earlier.
        """
        pair, outputs, labels = f"{other.checkpoint} and {self.checkpoint}", self.outputs, self.labels
        own, wanted = self.examples.classes, other.examples.classes
        if own and wanted:
            if {*own} != {*wanted}:
                names = f"{', '.join(wanted)} and {', '.join(own)}"
                raise ValueError(f"{pair} have different classes, {names}: compare models of one task")
            order = [own.index(name) for name in wanted]
            outputs = outputs[..., order]
            places = np.argsort(order)[np.where(labels == NO_LABEL, 0, labels).astype(int)]
            labels = np.where(labels == NO_LABEL, NO_LABEL, places)

        # Only outputs and labels that pair up are compared.
        sizes = [each.shape[-1] for each in (other.outputs, outputs)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"{pair} have heads of {sizes[0]} and {sizes[1]} outputs: compare models of one task")
        if not np.array_equal(labels, other.labels):
            raise ValueError(f"{pair} do not read the same words: give them one tokenizer, or raise --max-length")
        return replace(self, examples=other.examples, outputs=outputs, labels=labels)


@door
def evaluate(
    checkpoint: str | PathLike[str],
    data: DataSource | str | PathLike[str],
    *,
    task: str | None = None,
    against: str | PathLike[str] | None = None,
    metric: str | None = None,
    dtype: torch.dtype | str | None = None,
    backend: str | None = None,
    max_length: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Return the metrics of a checkpoint on labelled examples, alone or compared with another checkpoint.

    Args:
        checkpoint: a folder or a hub id, with its tokenizer; or a packed folder, which truncates to its own length.
        data: a file with the columns "text" and "label", or a `bertlite.experiments.data.DataSource`, which can
            name other columns, classes, or a hub data set.  Masked words need no labels.
        task: "classification", "tokens", "regression", "similarity" or "masked"; by default its class tells.
        against: another checkpoint for the task, evaluated as it is.
        metric: the metric of the interval and the comparison; by default the task's headline.
        dtype, backend: evaluate the checkpoint after `optimize_for_inference` with these.  If one is given, the record
            also has the agreement with the checkpoint's own results.
        max_length: the number of tokens to truncate texts to; by default 128, or as sentence-transformers would.

    Returns:
        The record: the task, the metrics with the 95 % interval of one over the examples, and notes on misleading
        figures.  Then "against" and "comparison", the difference with its interval and p; and "kept", shares of labels
        or neighbours, cosines or correlations.

    Raises:
        FileNotFoundError: there is no such checkpoint or file.
        ValueError: examples do not fit the task or the model, or the two checkpoints have different classes.
    """
    # A wrong option or task is an error before a model is loaded.
    model, other_model = Checkpoint.of(checkpoint), None if against is None else Checkpoint.of(against)
    kind = task_of_checkpoint(model, task)
    kind.metric(metric)
    parse_device(device)
    source = data if isinstance(data, DataSource) else DataSource(fspath(data))
    if kind.apart and len(source.text) != 2:
        train = f"or train a classifier on {model} with `bertlite prune finetune`"
        raise ValueError(f"{kind.name} compares two texts; name two text columns, not one, {train}")

    # The default metric depends on the number of classes, which the outputs tell.
    ours, optimised = predict_examples(model, kind, source, max_length, device, dtype, backend)
    dev = ours.examples
    metric = kind.metric(metric, ours.outputs.shape[-1])
    record: dict[str, Any] = {
        "what": "bertlite evaluate",
        "task": kind.name,
        "metric": metric,
        "data": {"name": dev.name, "examples": len(dev), "sha256": dev.sha256},
        "model": {"checkpoint": str(model), **measure_metrics(ours.outputs, ours.labels, kind, metric)},
        **optimised,
    }

    # The other model gets the same examples, and its classes are put in this one's order, so that predictions pair up.
    if other_model is not None:
        other_kind = task_of_checkpoint(other_model, kind.name)
        other = predict_examples(other_model, other_kind, source, max_length, device)[0].with_classes(ours)
        measured = measure_metrics(other.outputs, other.labels, kind, metric)
        record["against"] = {"checkpoint": str(against), **measured}
        record["comparison"] = comparison({"": [ours.outputs]}, {"": [other.outputs]}, ours.labels, kind, metric)

    if kind.labels is torch.long and kind is not MASKED:
        record["notes"] = notes_on(ours.labels, [ours.outputs], metric)
    return {**record, "environment": environment(device)}


def is_worse(record: dict[str, Any]) -> bool:
    """Return whether a checkpoint is significantly worse than the one that it was compared with."""
    found = record.get("comparison", {})
    low, high = found.get("difference_low"), found.get("difference_high")
    return low is not None and bool(low > 0 if record["metric"] == "loss" else high < 0)


def task_of_checkpoint(checkpoint: Checkpoint, named: str | None) -> Task:
    """Return the task of a checkpoint: its class's, unless one is given.

    Raises:
        ValueError: there is no task for it.
    """
    if is_packed(checkpoint):
        return packed_task(checkpoint, named)
    config, cls, known = checkpoint.config, checkpoint.model_class, {**TASKS, MASKED.name: MASKED}
    if named is None and cls is TASKS["regression"].model_class:
        number = config.problem_type == "regression" or (config.problem_type is None and config.num_labels == 1)
        named = "regression" if number else "classification"
    named = named or next((name for name, task in known.items() if task.model_class is cls), None)
    if named is None:
        classes = ", ".join(dict.fromkeys(task.model_class.__name__ for task in known.values()))
        raise ValueError(f"{checkpoint} is a {cls.__name__}, which has no task; have: {classes}; or name the --task")
    check_known("task", named, known)
    return known[named].of_checkpoint(checkpoint)


def predict_examples(
    checkpoint: Checkpoint,
    task: Task,
    source: DataSource,
    max_length: int | None,
    device: str,
    dtype: torch.dtype | str | None = None,
    backend: str | None = None,
) -> tuple[Predictions, dict[str, Any]]:
    """Return the predictions of a checkpoint.

    With a dtype or a backend, also return how it ran, and the agreement with its own results.
    """
    if is_packed(checkpoint):
        check_packed_options(checkpoint, dtype, backend, device)
        return predict_packed(checkpoint, task, source, max_length), {}

    # Labels follow the model's order of classes; masked words are their own labels.
    model = checkpoint.load(task.model_class).to(device)
    tokenizer = task.read_tokenizer(checkpoint, max_length)
    if task is MASKED:
        dev = read_examples(replace(source, label=None))
        data, size = mask_tokens(dev, tokenizer), MASKED_BATCH
    else:
        dev, size = task.read(source, model.config), BATCH
        data = task.encode(dev, tokenizer)

    if dtype is None and backend is None:
        return Predictions(checkpoint, dev, predict(model, data, task, size), data.targets()), {}

    # An optimised model is also compared with its plain self, since a metric may hide the changes.
    quick = optimize_for_inference(model, dtype=dtype, backend=backend or "auto")
    found = Predictions(checkpoint, dev, predict(quick, data, task, size), data.targets())
    ran = {"dtype": dtype_name(quick.compute_dtype), "backend": quick.backend}
    return found, {"optimised": ran, "kept": kept_results(quick, found, model, data, task)}


def packed_task(folder: Checkpoint, named: str | None) -> Task:
    """Return the task of a packed folder: of its kind.

    Raises:
        ValueError: there is no task for it, or another one is named.
    """
    about = read_runtime_json(Path(folder).expanduser() / ABOUT)
    found = {"encoder": "similarity", "classifier": "classification", "cross-encoder": "regression"}.get(about.kind)
    if found == "regression" and len(about.labels) > 1:
        found = "classification"
    if found is None or named not in (None, found):
        why = f"has the task {found}" if found else "gives spans, for which there is no metric here"
        raise ValueError(f"{folder} is a packed {about.kind}, which {why}: evaluate the checkpoint it was made from")
    return TASKS[found]


def predict_packed(folder: Checkpoint, task: Task, source: DataSource, max_length: int | None) -> Predictions:
    """Return the predictions of a packed folder."""
    packed = PackedModel(folder, torch.get_num_threads())
    if max_length is not None:
        packed.max_seq_length = max_length

    # The folder has no config.json; the checks of the examples need no more of one than this.
    several = packed.processing.activation == "sigmoid" and len(packed.labels) > 1
    names = dict(enumerate(packed.labels))
    problem = "multi_label_classification" if several else None
    config = SimpleNamespace(id2label=names, num_labels=len(names), problem_type=problem)
    dev = task.read(source, config)

    if task.apart:
        sides = (packed.encode(texts) for texts in zip(*dev.texts, strict=True))
        outputs = np.concatenate([packed.similarity(*each) for each in zip(*sides, strict=True)])
    else:
        packed.processing = replace(packed.processing, activation="identity")  # logits
        outputs = packed.predict(dev.inputs).reshape(len(dev), -1)
    return Predictions(folder, dev, outputs, np.array(dev.labels))


def kept_results(quick: Any, found: Predictions, model: Any, data: EncodedExamples, task: Task) -> dict[str, float]:
    """Return the agreement of an optimised model's vectors or predictions with a model's; none for masked words."""
    if task is MASKED:
        return {}
    if task.apart:
        vectors = (predict(each, data, task, outputs=vectors_of) for each in (quick, model))
        return what_is_kept("encoder", *(x.reshape(-1, x.shape[-1]) for x in vectors))
    both = found.outputs, predict(model, data, task)
    ours, wanted = (labelled(each, found.labels)[0] for each in both)
    if task.words:
        return {"words with the same label": same_labels(ours, wanted)}
    return what_is_kept("classifier" if task.labels is torch.long else "cross-encoder", ours, wanted)


def describe_evaluation(record: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a record for people."""
    data, metric, found = record["data"], record["metric"], record.get("comparison")
    yield f"{record['task']}, {data['examples']} examples of {data['name']}; 95 % intervals over the examples"
    yield from metric_lines(record["model"], metric)
    if "kept" in record:
        kept = "".join(f"   {name} {value:.4f}" for name, value in record["kept"].items())
        yield f"  in {record['optimised']['dtype']} ({record['optimised']['backend']}), of its own results:{kept}"
    if found is not None:
        yield from metric_lines(record["against"], metric)
        ends = show_interval(found["difference_low"], found["difference_high"], "+.4f", scale=1)
        yield f"difference: {found['difference']:+.4f}{ends}, p {found['p']:.2g}"
    yield from (f"note: {note}" for note in record.get("notes", ()))


def metric_lines(row: dict[str, Any], metric: str) -> Iterator[str]:
    """Yield the lines of a checkpoint's metrics."""
    interval = show_interval(row["low"], row["high"], ".4f", scale=1)
    yield f"{row['checkpoint']}: {metric} {row[metric]:.4f}{interval}"
    others = [name for name in row if name not in ("checkpoint", metric, "low", "high")]
    if others:
        yield "  " + "   ".join(f"{name} {row[name]:.4f}" for name in others)


# Masked words: tokens are taken out of texts, and a masked language model predicts them; no labels are needed.


def mask_tokens(examples: Examples, tokenizer: BertTokenizer) -> EncodedExamples:
    """Replace some tokens of each text by the mask token, the same every time.

    The replaced tokens are the labels; other tokens have -100.

    Raises:
        ValueError: the tokenizer has no [MASK].
    """
    mask = tokenizer.mask_token_id
    if mask is None:
        raise ValueError("the tokenizer has no [MASK], so no token can be taken out of a text")
    rows, labels = [], []
    encoded = tokenizer.encode_texts(examples.inputs, tokenizer.model_max_length)
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


def mean_of(column: int, outputs: Array, labels: Array) -> float:
    """Return the mean of a column of `score_words` over all masked tokens."""
    found = outputs[labels != NO_LABEL]
    return float(np.mean(found[:, column])) if len(found) else 0.0


OF_MASKED = {"loss": partial(mean_of, 0), "accuracy": partial(mean_of, 1)}
MASKED = Task("masked", BertForMaskedLM, torch.long, OF_MASKED, words=True, scores=score_words)
