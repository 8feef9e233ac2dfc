"""Experiments with pruned heads as functions, and the commands `bertlite prune finetune`, `run` and `compare`."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from bertlite.checkpoint.folders import EVERYTHING, check_output
from bertlite.config import LARGEST
from bertlite.experiments import compare
from bertlite.experiments.data import DataSource, EncodedExamples, Examples, read_examples
from bertlite.experiments.evaluate import Task, class_names, metrics_of, predict
from bertlite.experiments.experiment import task_named
from bertlite.experiments.files import MODEL, finish_run, labels, model_sha256, outputs, record_of
from bertlite.experiments.finetune import STATE, check_state, finetune_, fingerprint, keep_metrics, plan_batches
from bertlite.experiments.settings import Recipe
from bertlite.inference.checks import parse_device
from bertlite.opened.checkpoint import Checkpoint
from bertlite.support.files import lock_folder
from bertlite.support.kinds import checked
from bertlite.support.process import door
from bertlite.support.runs import METRICS, Record, Run, read_runs

RECIPE = Recipe()
Data: TypeAlias = DataSource | str | PathLike[str]


def data_source(options: Mapping[str, Any], name: str) -> DataSource:
    """Return the source of a command's examples: name is "train" or "dev"."""
    read = {each: options[each] for each in ("text", "label", "columns", "classes")}
    return DataSource(options[name], split=options[f"{name}_split"], **read)


# Fine-tuning ---------------------------------------------------------------------------------------------------------


@door
def finetune(
    checkpoint: str | PathLike[str],
    train: Data,
    dev: Data,
    folder: str | PathLike[str],
    *,
    task: str = "classification",
    max_length: int | None = None,
    train_examples: int | None = None,
    recipe: Recipe = RECIPE,
    device: str = "cpu",
    progress: bool = False,
) -> dict[str, Any]:
    """Train a checkpoint on a task, in the folder of a run; `model` in it is the model.

    A killed training continues where it stopped when it is called again with the same model, data and recipe.

    Args:
        checkpoint: a folder or a hub id, with its tokenizer.
        train: the examples to learn from: a file, or a `bertlite.experiments.data.DataSource` that names its columns.
        dev: other examples, to evaluate on.
        task: "classification", "tokens" or "regression".
        max_length: the number of tokens to truncate texts to; by default 128, or as sentence-transformers would.
        train_examples: size of a random sample; None is all.
        progress: show the progress, and print the loss and the metrics after each epoch.

    Returns:
        The record: as "runs" the facts of the run with its folder and results; under torchrun in the first process.

    Raises:
        BlockingIOError: another process is writing to the folder.
        DivergedError: the loss or an output is nan or infinite.
        FileExistsError: the folder holds a finished run, or something else.
        FileNotFoundError: there is no such checkpoint or file.
        ValueError: the task has no head to train, examples do not fit it, or the unfinished run has other settings.
    """
    from accelerate import PartialState

    # The folder is checked first: it may be emptied, and must not hold anything that is read.
    source, kind, folder = Checkpoint.of(checkpoint), task_named(task), Path(folder).expanduser()
    parse_device(device)
    check_output(folder, EVERYTHING, source, *(getattr(each, "path", each) for each in (train, dev)), own=True)

    model, examples, held_out = read_training(source, train, dev, kind, recipe.seed)
    source.hold()
    tokenizer = kind.read_tokenizer(source, max_length)
    examples = examples.sample(train_examples, recipe.seed)
    data, judged = (kind.encode(each, tokenizer) for each in (examples, held_out))

    # Under torchrun all processes train, and only the first one writes.  Without a step there is no folder either.
    processes = PartialState(cpu=device == "cpu")
    plan_batches(data, recipe, processes.num_processes)
    if not processes.is_main_process:
        finetune_(model, data, kind, recipe, device=device, state=folder / STATE)
        return record_of("finetune", [])

    length = tokenizer.model_max_length
    config = {"recipe": asdict(recipe), "task": task, "max_length": length, "checkpoint": str(source)}
    hashes, before = {"train": examples.sha256, "dev": held_out.sha256}, {"before": model_sha256(model)}
    facts: dict[str, Any] = {"data": hashes, "model": before, "device": device, "kept": (STATE, METRICS)}
    how = [f"It was fine-tuned on {examples.name} for {recipe.epochs:g} epochs at learning rate {recipe.lr:g}."]
    state = folder / STATE
    with lock_folder(folder):
        # A run with other settings is refused before its record is replaced.
        check_state(state, fingerprint(model, data, recipe, processes.num_processes, None))
        with Run("finetune", config, folder=folder, seed=recipe.seed, **facts) as run:
            # A killed training may have logged steps after its last saved state, and they will be logged again.
            keep_metrics(run.folder / METRICS, state)
            describe = partial(describe_metrics, model, judged, kind, held_out.name) if progress else None
            shown: dict[str, Any] = {"log": run.log, "describe": describe, "progress": progress}
            finetune_(model, data, kind, recipe, device=device, state=state, **shown)

            # The state is removed last: until the model is written, it is all that a killed process leaves.
            run.results["sha256"] = model_sha256(model)
            finish_run(run, model, judged, kind, data_name=held_out.name, source=source, how=how)
            shutil.rmtree(state, ignore_errors=True)
    return record_of("finetune", read_runs(folder))


def read_training(
    checkpoint: Checkpoint, train: Data, dev: Data, task: Task, seed: int
) -> tuple[Any, Examples, Examples]:
    """Return a model with a head for the task, and the examples to learn from and to evaluate on.

    Names of labels are classes, the checkpoint's if it has them all.

    Args:
        seed: the seed for the weights of a new head.

    Raises:
        ValueError: the task has no head to train, or examples do not fit it.
    """
    if task.apart:
        raise ValueError(f"{task.name} has no head to train; sentence-transformers trains sentence encoders")
    named = task.labels is torch.long
    known = class_names(checkpoint.config) if named else ()
    sources = [each if isinstance(each, DataSource) else DataSource(fspath(each)) for each in (train, dev)]
    examples = read_examples(sources[0], words=task.words, classes=known, collect=named)
    changes = head_changes(examples, task)
    held_out = read_examples(sources[1], words=task.words, classes=examples.classes)
    torch.manual_seed(seed)
    model = task.model_class.from_pretrained(checkpoint, **changes)
    for each in (examples, held_out):
        task.check(each, model.config)
    task.check_both(examples, held_out)
    return model, examples, held_out


def describe_metrics(model: Any, data: EncodedExamples, task: Task, name: str) -> str:
    """Return the scores of a model on examples, in words."""
    scores = metrics_of(predict(model, data, task), data.targets(), task)
    return f"{name}: {', '.join(f'{metric} {score:.4f}' for metric, score in scores.items())}"


def head_changes(train: Examples, task: Task) -> dict[str, Any]:
    """Return the fields of the config to set so that the head has the classes of the data, by name.

    Raises:
        ValueError: there is only one label, or a number that is no index of a class.
    """
    task.check_labels(train)
    if task.labels is not torch.long:
        return {"num_labels": 1}
    if not train.classes:
        largest = max(train.every_label())
        count = max(2, int(largest) + 1)
        if count > LARGEST["num_labels"]:
            place = train.locations[next(i for i, x in enumerate(train.labels) if largest in np.ravel(x))]
            raise ValueError(f"{place}: {int(largest)} is no index of a class; name the classes with --classes")
        return {"num_labels": count}
    names = dict(enumerate(train.classes))
    return {"num_labels": len(names), "id2label": names, "label2id": {name: i for i, name in names.items()}}


# Runs of many ways to prune, and their comparison --------------------------------------------------------------------


@checked
def prune_compare(
    folders: Sequence[str | PathLike[str]], *, against: str | None = None, metric: str | None = None
) -> dict[str, Any]:
    """Compare the finished runs of `prune_run` under some folders.

    Args:
        against: a criterion to test every other against, or "dense" for the dense models; by default no tests.
        metric: the metric of intervals and tests; by default the task's headline.

    Returns:
        The record: the "rows" of `bertlite.experiments.compare.summarise`, the "dense" model's metrics, "notes" on
        misleading figures, and the environment of the runs.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there are no runs, or they have several tasks, data sets or lengths.
    """
    runs = [run for each in folders for run in read_runs(fspath(each), name="prune")]
    rows = compare.summarise(runs, against, metric)
    task = compare.task_of(runs)
    headline = task.metric(metric)

    return {
        "what": "bertlite prune",
        "task": task.name,
        "headline": headline,
        "commands": sorted({run.facts["command"] for run in runs}),
        **compare.provenance(runs),
        # The data and the models, and a row for each way of pruning.
        "data": runs[0].facts["data"],
        "models": sorted({run.facts["model"]["dense"] for run in runs}),
        "setting": runs[0].config["setting"],
        "dense": compare.dense_result(runs),
        "rows": rows,
        "notes": compare.notes_on(labels(runs[0]), [*map(outputs, runs)], headline),
    }


def training_lines(record: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield the metrics of a training, its folder, and the next step."""
    [facts] = record["runs"]
    yield "   ".join(f"{name} {value:.4f}" for name, value in facts["results"].items() if name != "sha256")
    if note := compare.note_on_predictions([outputs(Record(folder, facts))]):
        yield f"note: {note}: train it longer, or with another --lr"
    yield f"model: {folder / MODEL}"
    if not note:
        yield f"next: bertlite prune to 2x {folder / MODEL} --texts FILE --out FOLDER"


def describe_rows(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of a metric, the sample of its intervals, the metric of the dense model, and notes."""
    rows, metric, dense = (record[name] for name in ("rows", "headline", "dense"))
    over = " or ".join(dict.fromkeys(row["over"] for row in rows))
    yield f"100 x {metric} by the share of heads removed, with 95 % intervals over {over} (runs, where several)\n"
    yield compare.markdown_table(rows, metric)
    if metric in dense:
        yield f"\ndense: {100 * dense[metric]:.1f}"
    yield from (f"note: {note}" for note in record["notes"])


def describe_tests(record: Mapping[str, Any], against: str | None) -> Iterator[str]:
    """Yield the difference of each row from another criterion, with its interval and p."""
    for row in (each for each in record["rows"] if "p" in each):
        name = ", ".join(filter(None, compare.describe_way(row)))
        interval = compare.show_interval(row["difference_low"], row["difference_high"], "+.1f")
        difference = f"{100 * row['difference']:+.1f}{interval} over {against}"
        yield f"{100 * row['fraction']:g} % {name}: {difference}, p = {row['p']:.3f}"
