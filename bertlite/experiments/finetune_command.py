"""The work of `bertlite prune finetune`, and the parts that it shares with the other actions."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from bertlite.checkpoint.files import Source, find_checkpoint
from bertlite.config import BertConfig
from bertlite.experiments.cell import warn_of_overlap
from bertlite.experiments.data import (
    NO_LABEL,
    DataSource,
    EncodedExamples,
    Examples,
    read_examples,
    read_tokenizer,
)
from bertlite.experiments.evaluate import TASKS, Task, evaluate, predict
from bertlite.experiments.files import class_names, model_sha256, prediction_lines
from bertlite.experiments.finetune import STATE, Recipe, finetune_, is_main_process, keep_metrics
from bertlite.experiments.ship import describe_finetuning, figures_of, report_of
from bertlite.records import METRICS, Record, Run, read_runs, write_json
from bertlite.shipping.folder import write_model


def finetune(args: argparse.Namespace) -> int:
    """Train a checkpoint on a task, in a run's folder."""
    task = TASKS[args.task]
    if task.apart:
        raise ValueError(f"{task.name} has no head to train; sentence-transformers trains sentence encoders")
    distil = read_distil(args)
    recipe = Recipe(epochs=args.epochs, lr=args.lr, batch_size=args.batch_size, seed=args.seed, distil=distil)
    train = read_training_data(args, task)
    changes = head_changes(train, task, args.num_labels)
    dev = read_examples(data_source(args, args.dev, args.dev_split), words=task.words, classes=train.classes)
    torch.manual_seed(args.seed)  # the head may be drawn
    model = task.load(args.checkpoint, **changes)
    teacher = None if args.teacher is None else read_teacher(args.teacher, task, model.config.num_labels)
    for examples in (train, dev):
        task.check(examples, model.config)
    warn_of_overlap(train, dev)
    tokenizer = read_tokenizer(args.checkpoint, args.max_length)
    train = train.sample(args.train_examples, args.seed)
    data, held_out = task.encode(train, tokenizer), task.encode(dev, tokenizer)
    if not is_main_process(args.device):  # another process writes
        finetune_(model, data, task, recipe, teacher=teacher, device=args.device, state=args.folder / STATE)
        return 0
    config = {
        "recipe": asdict(recipe),
        "task": args.task,
        "max_length": args.max_length,
        "checkpoint": args.checkpoint,
    }
    hashes, before = {"train": train.sha256, "dev": dev.sha256}, {"before": model_sha256(model)}
    if teacher is not None:
        config["teacher"], before["teacher"] = args.teacher, model_sha256(teacher)
    facts = {"data": hashes, "model": before, "device": args.device, "kept": (STATE, METRICS)}
    with Run("finetune", config, folder=args.folder, seed=args.seed, **facts) as run:
        state = run.folder / STATE
        keep_metrics(run.folder / METRICS, state)
        describe = partial(describe_scores, model, held_out, task, dev.name)
        how = {"log": run.log, "describe": describe, "device": args.device, "progress": True, "state": state}
        finetune_(model, data, task, recipe, teacher=teacher, **how)
        outputs, labels = predict(model, held_out, task), held_out.targets()
        run.results = {**evaluate(outputs, labels, task), "sha256": model_sha256(model)}
        run.save_predictions(prediction_lines(labels, outputs=outputs))
        write_model(
            run.folder / "model",
            model,
            args.checkpoint,
            class_names=class_names(model.config),
            figures=figures_of(outputs, labels, task, dev.name, run.results, {}),
            how=describe_finetuning(recipe, train.name, args.teacher),
            report=report_of(run.facts, run.results),
        )
        state.unlink(missing_ok=True)
    print(*(f"{name} {value:.4f}" for name, value in run.results.items() if name != "sha256"), sep="   ")
    print(f"model: {run.folder / 'model'}")
    write_answer(args, runs=run_facts(read_runs(run.folder)))
    return 0


def describe_scores(model: Any, data: EncodedExamples, task: Task, name: str) -> str:
    """Return the scores of a model on examples, in words."""
    scores = evaluate(predict(model, data, task), data.targets(), task)
    return f"{name}: {', '.join(f'{metric} {score:.4f}' for metric, score in scores.items())}"


def read_distil(args: argparse.Namespace) -> float:
    """Return the weight of a teacher's predictions."""
    share = 0.5 if args.distil is None and args.teacher is not None else args.distil or 0.0
    if (share > 0) != (args.teacher is not None) or share > 1:
        raise ValueError(
            f"--distil is {share:g}; with --teacher give a number above 0 and up to 1; without it, leave it out"
        )
    return share


def read_teacher(checkpoint: str, task: Task, labels: int) -> Any:
    """Load a teacher whose head has as many outputs as the model that it teaches."""
    teacher = task.load(checkpoint)
    if teacher.config.num_labels != labels:
        raise ValueError(f"the teacher {checkpoint} has {teacher.config.num_labels} outputs, the model {labels}")
    return teacher


def read_training_data(args: argparse.Namespace, task: Task) -> Examples:
    """Read the examples to train on; names of labels are classes, the checkpoint's if it has them all."""
    named = task.labels is torch.long
    known = class_names(BertConfig.from_json_file(find_checkpoint(Source(args.checkpoint)).config)) if named else ()
    source = data_source(args, args.train, args.train_split)
    return read_examples(source, words=task.words, classes=known, collect=named)


def head_changes(train: Examples, task: Task, num_labels: int | None) -> dict[str, Any]:
    """Return the changes to a checkpoint's config that give its head the classes of the data, with their names.

    Raises:
        ValueError: there is only one class, or their number differs from --num-labels.
    """
    if task.labels is not torch.long:
        return {"num_labels": num_labels or 1}
    if not train.classes:
        found = {x for x in train.every_label() if x != NO_LABEL}
        if len(found) < 2:
            raise ValueError(f"{train.name} has {len(train)} examples with one label; {task.name} needs two or more")
        return {"num_labels": num_labels or max(2, int(max(found)) + 1)}
    if num_labels not in (None, len(train.classes)):
        raise ValueError(
            f"{train.name} has {len(train.classes)} classes, {', '.join(train.classes)}: leave --num-labels"
            f" {num_labels} out"
        )
    if len(train.classes) < 2:
        raise ValueError(f"{train.name} has {len(train)} examples of one class, {train.classes[0]}; name two or more")
    names = dict(enumerate(train.classes))
    return {"num_labels": len(names), "id2label": names, "label2id": {name: i for i, name in names.items()}}


def write_answer(args: argparse.Namespace, **facts: Any) -> None:
    """Write the record of an action, if requested."""
    if args.record:
        write_json(args.record, {"what": f"bertlite prune {args.action}", **facts})


def run_facts(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the facts of runs with their folders; JSON-ready."""
    return [{"folder": str(record.folder), **record.facts} for record in records]


def data_source(args: argparse.Namespace, path: str, split: str | None) -> DataSource:
    """Return the source of examples that the arguments describe."""
    return DataSource(path, args.text, args.label, args.columns, args.classes, split)
