"""The work of `bertlite prune`: each action reads its arguments, calls the library, and prints."""

import argparse
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch

from bertlite.checkpoint.families import read_config
from bertlite.checkpoint.files import Source
from bertlite.config import LARGEST
from bertlite.experiments import plots
from bertlite.experiments.compare import (
    dense_result,
    describe_way,
    markdown_table,
    note_on_balance,
    note_on_predictions,
    provenance,
    show_interval,
    summarise,
    task_of,
)
from bertlite.experiments.data import (
    DataSource,
    EncodedExamples,
    Examples,
    read_examples,
)
from bertlite.experiments.evaluate import TASKS, Task, metrics_of, predict
from bertlite.experiments.experiment import Experiment, Setting, grid, sweep
from bertlite.experiments.files import (
    class_names,
    labels,
    model_sha256,
    outputs,
)
from bertlite.experiments.finetune import STATE, DivergedError, Recipe, finetune_, is_main_process, keep_metrics
from bertlite.experiments.ship import MODEL, finish_run
from bertlite.support.records import METRICS, Record, Run, lock_folder, read_runs, write_json, write_record


def main(args: argparse.Namespace) -> int:
    """Run an action and return the exit status."""
    return ACTIONS[args.action](args)


def finetune(args: argparse.Namespace) -> int:
    """Train a checkpoint on a task, in a run's folder."""
    task = TASKS[args.task]
    if task.apart:
        raise ValueError(f"{task.name} has no head to train; sentence-transformers trains sentence encoders")
    recipe = Recipe(epochs=args.epochs, lr=args.lr, batch_size=args.batch_size, seed=args.seed)
    train = read_training_data(args, task)
    changes = head_changes(train, task, args.num_labels)
    dev = read_examples(data_source(args, args.dev, args.dev_split), words=task.words, classes=train.classes)
    torch.manual_seed(args.seed)  # the head may be drawn
    model = task.model_class.from_pretrained(args.checkpoint, **changes)
    for examples in (train, dev):
        task.check(examples, model.config)
    task.check_both(train, dev)
    tokenizer = task.read_tokenizer(args.checkpoint, args.max_length)
    train = train.sample(args.train_examples, args.seed)
    data, held_out = task.encode(train, tokenizer), task.encode(dev, tokenizer)
    if not is_main_process(args.device):  # another process writes
        finetune_(model, data, task, recipe, device=args.device, state=args.folder / STATE)
        return 0
    config = {
        "recipe": asdict(recipe),
        "task": args.task,
        "max_length": tokenizer.model_max_length,
        "checkpoint": args.checkpoint,
    }
    hashes, before = {"train": train.sha256, "dev": dev.sha256}, {"before": model_sha256(model)}
    facts = {"data": hashes, "model": before, "device": args.device, "kept": (STATE, METRICS)}
    with lock_folder(args.folder), Run("finetune", config, folder=args.folder, seed=args.seed, **facts) as run:
        state = run.folder / STATE
        keep_metrics(run.folder / METRICS, state)
        describe = partial(describe_metrics, model, held_out, task, dev.name)
        options = {"log": run.log, "describe": describe, "device": args.device, "progress": True, "state": state}
        finetune_(model, data, task, recipe, **options)
        run.results["sha256"] = model_sha256(model)
        how = [f"It was fine-tuned on {train.name} for {recipe.epochs:g} epochs at learning rate {recipe.lr:g}."]
        made = {"source": args.checkpoint, "how": how, "class_names": class_names(model.config)}
        finish_run(run, model, held_out, task, data_name=dev.name, **made)
        shutil.rmtree(state, ignore_errors=True)
    print(*(f"{name} {value:.4f}" for name, value in run.results.items() if name != "sha256"), sep="   ")
    if note := note_on_predictions([outputs(Record(run.folder, run.facts))]):
        print(f"note: {note}")
    print(f"model: {run.folder / MODEL}")
    print(f"next: bertlite prune to 2x {run.folder / MODEL} --texts FILE --out FOLDER")
    write_runs(args, read_runs(run.folder))
    return 0


def describe_metrics(model: Any, data: EncodedExamples, task: Task, name: str) -> str:
    """Return the scores of a model on examples, in words."""
    scores = metrics_of(predict(model, data, task), data.targets(), task)
    return f"{name}: {', '.join(f'{metric} {score:.4f}' for metric, score in scores.items())}"


def read_training_data(args: argparse.Namespace, task: Task) -> Examples:
    """Read the examples to train on; names of labels are classes, the checkpoint's if it has them all."""
    named = task.labels is torch.long
    known = class_names(read_config(Source(args.checkpoint))) if named else ()
    source = data_source(args, args.train, args.train_split)
    return read_examples(source, words=task.words, classes=known, collect=named)


def head_changes(train: Examples, task: Task, num_labels: int | None) -> dict[str, Any]:
    """Return the fields of the config to set so that the head has the classes of the data, by name.

    Raises:
        ValueError: there is only one label, or the number of classes differs from --num-labels.
    """
    task.check_labels(train)
    if task.labels is not torch.long:
        return {"num_labels": num_labels or 1}
    if not train.classes:
        largest = max(train.every_label())
        count = num_labels or max(2, int(largest) + 1)
        if count > LARGEST["num_labels"]:
            place = train.locations[next(i for i, x in enumerate(train.labels) if largest in np.ravel(x))]
            raise ValueError(f"{place}: {int(largest)} is no index of a class; name the classes with --classes")
        return {"num_labels": count}
    if num_labels not in (None, len(train.classes)):
        raise ValueError(
            f"{train.name} has {len(train.classes)} classes, {', '.join(train.classes)}: leave --num-labels"
            f" {num_labels} out"
        )
    names = dict(enumerate(train.classes))
    return {"num_labels": len(names), "id2label": names, "label2id": {name: i for i, name in names.items()}}


def write_runs(args: argparse.Namespace, records: Sequence[Record]) -> None:
    """Write the record of an action, the facts of its runs with their folders, if requested."""
    if args.record:
        facts = [{"folder": str(record.folder), **record.facts} for record in records]
        write_json(args.record, {"what": f"bertlite prune {args.action}", "runs": facts})


def data_source(args: argparse.Namespace, path: str, split: str | None) -> DataSource:
    """Return the source of examples that the arguments describe."""
    return DataSource(path, args.text, args.label, args.columns, args.classes, split)


def run(args: argparse.Namespace) -> int:
    """Run every combination of criterion, share, repair, epochs and seed."""
    cells = grid(
        args.criteria,
        args.fractions,
        repairs=args.repairs,
        epochs=args.epochs,
        seeds=args.seeds,
        random_seeds=args.random_seeds,
        at_least=args.at_least,
    )
    setting = Setting(
        args.checkpoint,
        args.task,
        data_source(args, args.train, args.train_split),
        data_source(args, args.dev, args.dev_split),
        max_length=args.max_length,
        calibration=args.calibration,
        retrain=args.train_examples,
        recipe=Recipe(lr=args.lr, batch_size=args.batch_size),
    )
    experiment = Experiment(setting, args.device)
    metric = experiment.task.metric(args.metric, experiment.dense.config.num_labels)
    folders = sweep(experiment, cells, args.folder, save_model=args.save_model, progress=True)
    if not folders:
        raise DivergedError(f"all {len(cells)} runs diverged: give a smaller --lr")
    records = [record for folder in folders for record in read_runs(folder)]
    print_rows(records, summarise(records, metric=metric), metric)
    print(f"run: {folders[0]}" if len(folders) == 1 else f"runs: {args.folder}")
    write_runs(args, records)
    return int(len(folders) < len(cells))


def print_rows(records: Sequence[Record], rows: Sequence[dict[str, Any]], metric: str) -> None:
    """Print a table of a metric, with what its intervals are over, and the metric of the dense model."""
    over = " or ".join(dict.fromkeys(row["over"] for row in rows))
    print(f"100 x {metric} by the share of heads removed, with 95 % intervals over {over} (runs, where several)\n")
    print(markdown_table(rows, metric))
    dense = dense_result(records)
    if metric in dense:
        print(f"\ndense: {100 * dense[metric]:.1f}")
    for note in (note_on_balance(labels(records[0]), metric), note_on_predictions([*map(outputs, records)])):
        if note is not None:
            print(f"note: {note}")


def compare(args: argparse.Namespace) -> int:
    """Compare finished runs: print a table and tests, write rows, draw curves."""
    records = [record for root in args.roots for record in read_runs(root, name="prune")]
    rows = summarise(records, args.against, args.metric)
    task = task_of(records)
    metric = task.metric(args.metric)
    dense = dense_result(records)
    print_rows(records, rows, metric)
    for row in rows:
        if "p" in row:
            name = ", ".join(filter(None, describe_way(row)))
            interval = show_interval(row["difference_low"], row["difference_high"], "+")
            print(
                f"{100 * row['fraction']:g} % {name}: {100 * row['difference']:+.1f}{interval} over {args.against},"
                f" p = {row['p']:.3f}"
            )
    if args.record:
        commands = sorted({record.facts["command"] for record in records})
        models = sorted({record.facts["model"]["dense"] for record in records})
        write_record(
            args.record,
            {
                "what": "bertlite prune",
                "task": task.name,
                "headline": metric,
                "commands": commands,
                **provenance(records),
                "data": records[0].facts["data"],
                "models": models,
                "setting": records[0].config["setting"],
                "dense": dense,
                "rows": rows,
            },
        )
    if ".json" in args.out:
        print(f"rows: {args.record}")
    if args.folder:
        curves = plots.save(plots.curves(rows, metric, dense.get(metric)), args.folder / "curves")
        print(f"figures: {', '.join(map(str, curves))}")
    return 0


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    action.__name__: action for action in (finetune, run, compare)
}
