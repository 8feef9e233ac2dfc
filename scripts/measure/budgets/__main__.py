"""Compare ways to prune to a share of the MACs without training: the same models, calibration texts and budgets.

    python -m scripts.measure.budgets CHECKPOINT --data FOLDER --out runs/budgets,FILE.json

The folder holds sst2, stsb, wnut17 and wikitext2, of which five tasks are made (`tasks.py`).  CHECKPOINT is fine-tuned
on each, once for each seed, and every model is pruned to every share by every method (`methods.py`).  What is finished
is not done again.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import ttest_1samp

from bertlite.cli.parts import FOLDER, RECORD, count, integers, names_of, number, numbers, paths
from bertlite.experiments.compare import provenance
from bertlite.experiments.data import DataSource, batch_indices, read_examples, read_tokenizer
from bertlite.experiments.evaluate import TASKS, Task, evaluate, predict
from bertlite.experiments.files import model_sha256, units_kept
from bertlite.experiments.finetune import Recipe, finetune_
from bertlite.importance import macs
from bertlite.progress import Progress
from bertlite.records import Record, Run, is_finished, read_runs, write_record
from scripts.measure.budgets import tasks
from scripts.measure.budgets.methods import METHODS, Subject

LENGTH = 128  # tokens of the sequence whose MACs are counted


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    folder: Path = args.out[FOLDER]
    total = len(args.tasks) * len(args.seeds) * len(args.shares) * len(args.methods)
    runs = []
    with Progress(total, "prunings", what="budgets") as progress:
        for name in args.tasks:
            files = tasks.write_task(name, args.data, folder / "data")
            for seed in args.seeds:
                bench = Bench(name, files, tuned(args, name, files, seed), args.max_length, args.calibration)
                for method, share in product(args.methods, args.shares):
                    runs.append(bench.run(method, share, seed, folder))
                    progress.advance()
                    found = {**runs[-1].config, **runs[-1].results}
                    progress.print("{task} {method} {share:.0%} {score:.4f} (dense {dense:.4f})".format_map(found))
    rows = summary(runs)
    for row in rows:
        print(f"{row['share']:4.0%} {row['method']}: {row['lost']:.1f} lost (at worst {row['lost_at_worst']:.1f})")
    record = {
        "what": "ways to prune to a share of the MACs, without training",
        "calibration": args.calibration,
        "tuning": {"epochs": args.epochs, "lr": args.lr, "train_examples": args.train_examples},
        "length": LENGTH,
        **provenance(runs),
        "rows": rows,
        "runs": [{**run.config, **run.results, "model": run.facts["model"]["dense"]} for run in runs],
    }
    write_record(args.out[RECORD], record)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.measure.budgets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of the checkpoint that is fine-tuned")
    parser.add_argument("--data", required=True, type=Path, metavar="FOLDER", help="folder of the four data sets")
    parser.add_argument("--tasks", type=names_of("task", tuple(tasks.TASKS)), default=tuple(tasks.TASKS))
    parser.add_argument("--methods", type=methods_named, default=tuple(METHODS), help="parts of names, split at ;")
    parser.add_argument(
        "--seeds", type=integers, default=(0, 1, 2), help="fine-tuned models of a task (default: 0,1,2)"
    )
    parser.add_argument("--shares", type=numbers, default=(0.5, 0.4, 0.3), help="of the MACs (default: 0.5,0.4,0.3)")
    parser.add_argument("--calibration", type=count, default=512, metavar="N", help="texts (default: %(default)s)")
    parser.add_argument("--epochs", type=number, default=3.0, help="of fine-tuning (default: %(default)s)")
    parser.add_argument("--lr", type=number, default=1e-4, help="of fine-tuning (default: %(default)s)")
    parser.add_argument("--max-length", type=count, default=64, metavar="TOKENS", help="(default: %(default)s)")
    parser.add_argument(
        "--out", type=paths((RECORD, FOLDER)), required=True, metavar="FOLDER,FILE.json", help="runs, and the record"
    )
    args = parser.parse_args(argv)
    if len(args.out) < 2:
        parser.error("--out needs a folder for the runs and a file for the record: FOLDER,FILE.json")
    return args


def methods_named(text: str) -> tuple[str, ...]:
    """Return the methods whose names have one of these parts, split at ";" since names have commas."""
    found = tuple(name for name in METHODS if any(part.strip() in name for part in text.split(";")))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is in no name of {'; '.join(METHODS)}")
    return found


def source(name: str, path: Path) -> DataSource:
    return DataSource(str(path), ("a", "b") if tasks.TASKS[name].pairs else ("a",), "label")


def task_of(name: str) -> Task:
    return TASKS["regression" if tasks.TASKS[name].outputs == 1 else "classification"]


def tuned(args: argparse.Namespace, name: str, files: dict[str, Path], seed: int) -> Path:
    """Return the folder of a fine-tuned model, trained unless it is there."""
    folder = args.out[FOLDER] / name / f"dense-{seed}"
    if not is_finished(folder):
        task, found = task_of(name), read_examples(source(name, files["train"]))
        recipe = Recipe(epochs=args.epochs, lr=args.lr, seed=seed)
        examples = found.sample(min(tasks.TASKS[name].examples, len(found)), seed)
        tokenizer = read_tokenizer(args.checkpoint, args.max_length)
        torch.manual_seed(seed)
        model = task.load(args.checkpoint, num_labels=tasks.TASKS[name].outputs)
        with Run("finetune", {"task": name, "examples": len(examples), **asdict(recipe)}, folder=folder) as run:
            finetune_(model, task.encode(examples, tokenizer), task, recipe)
            model.save_pretrained(folder / "model")
            tokenizer.save(str(folder / "model" / "tokenizer.json"))
            dev = read_examples(source(name, files["dev"]))
            outputs = predict(model, task.encode(dev, tokenizer), task)
            found_now = evaluate(outputs, np.array(dev.labels), task)
            run.results = {"sha256": model_sha256(model), "examples": len(examples), **found_now}
    return folder / "model"


class Bench:
    """A fine-tuned model with calibration texts from its training data and the examples to judge by."""

    def __init__(self, name: str, files: dict[str, Path], checkpoint: Path, max_length: int, calibration: int) -> None:
        self.name, self.task = name, task_of(name)
        tokenizer = read_tokenizer(str(checkpoint), max_length)
        train, dev = (read_examples(source(name, files[part])) for part in ("train", "dev"))
        self.model = self.task.load(str(checkpoint))
        self.calibration = calibration
        data = self.task.encode(train.sample(calibration, 0), tokenizer)
        batches = [data.batch(rows, self.task.labels) for rows in batch_indices(data, 32)]
        self.subject = Subject(self.model, batches, LENGTH)
        self.dev, self.labels = self.task.encode(dev, tokenizer), np.array(dev.labels)
        self.dense = predict(self.model, self.dev, self.task)
        self.hashes: dict[str, Any] = {"model": {"dense": model_sha256(self.model)}, "data": {"dev": dev.sha256}}

    def run(self, method: str, share: float, seed: int, root: Path) -> Record:
        """Prune, judge and record, unless that is done."""
        place = f"{[*METHODS].index(method):02d}-{100 * share:g}-{seed}-{self.calibration}"
        folder = root / self.name / "pruned" / place
        config = {"task": self.name, "method": method, "share": share, "seed": seed, "calibration": self.calibration}
        if not is_finished(folder):
            with Run("budget", config, folder=folder, seed=seed, **self.hashes) as run:
                pruned = METHODS[method](self.subject, share)
                heads, neurons = units_kept(pruned.config)
                outputs = predict(pruned, self.dev, self.task)
                found = evaluate(outputs, self.labels, self.task, self.dense)
                run.results = {
                    "score": found[self.task.headline],
                    "dense": evaluate(self.dense, self.labels, self.task)[self.task.headline],
                    "metric": self.task.headline,
                    "kl": found["kl"],
                    "macs": macs(pruned.config, LENGTH) / macs(self.model.config, LENGTH),
                    "heads_kept": heads,
                    "neurons_kept": neurons,
                }
        return read_runs(folder)[0]


def summary(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row for each method and share: points lost, over all models, by task and at worst."""
    rows = []
    for method, share in dict.fromkeys((run.config["method"], run.config["share"]) for run in runs):
        own = [run for run in runs if (run.config["method"], run.config["share"]) == (method, share)]
        lost: dict[str, list[float]] = {name: [] for name in dict.fromkeys(run.config["task"] for run in own)}
        for run in own:
            lost[run.config["task"]].append(100 * (run.results["dense"] - run.results["score"]))
        every = [x for each in lost.values() for x in each]
        row: dict[str, Any] = {
            "method": method,
            "share": share,
            "models": len(every),
            "lost": float(np.mean(every)),
            "lost_at_worst": max(every),
            "lost_by_task": {name: float(np.mean(each)) for name, each in lost.items()},
            "kl": float(np.mean([run.results["kl"] for run in own])),
        }
        if len(every) > 1:
            interval = ttest_1samp(every, 0).confidence_interval()  # Student's
            row |= {"low": float(interval.low), "high": float(interval.high)}
        rows.append(row)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
