"""Compare ways to prune to a share of the MACs without training: the same models, calibration texts and budgets.

    python -m scripts.measure.budgets CHECKPOINT --data FOLDER --out runs/budgets,FILE.json

The folder holds sst2, stsb, wnut17 and wikitext2, of which five tasks are made (`tasks.py`).  CHECKPOINT is fine-tuned
on each, once for each seed, and every model is pruned to every share by every method (`methods.py`).  What is finished
is not done again.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
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
    if args.finished:
        return report(args, finished(args, folder))
    total = len(args.tasks) * len(args.seeds) * len(args.shares) * len(args.methods)
    runs = []
    with Progress(total, "prunings", what="budgets") as progress:
        for name in args.tasks:
            files = tasks.write_task(name, args.data, folder / "data")
            for seed in args.seeds:
                bench = Bench(name, files, tuned(args, name, files, seed, progress), args.max_length, args.calibration)
                for method in args.methods:
                    for share in args.shares:
                        runs.append(bench.run(method, share, seed, folder))
                        progress.advance()
                        print_run(runs[-1], progress)
    return report(args, runs)


def finished(args: argparse.Namespace, folder: Path) -> list[Record]:
    """Return the prunings that are asked for and there, of models that every method has pruned to every share."""
    found: dict[tuple[str, int], list[Record]] = {}
    for run in read_runs(folder, name="budget"):
        if is_chosen(args, run.config):
            found.setdefault((run.config["task"], run.config["seed"]), []).append(run)
    whole = len(args.methods) * len(args.shares)
    return [run for runs in found.values() if len(runs) == whole for run in runs]


def is_chosen(args: argparse.Namespace, config: dict[str, Any]) -> bool:
    """Return whether the arguments ask for a pruning."""
    asked = {"task": args.tasks, "seed": args.seeds, "method": args.methods, "share": args.shares}
    return config["calibration"] == args.calibration and all(config[name] in each for name, each in asked.items())


def report(args: argparse.Namespace, runs: Sequence[Record]) -> int:
    """Print and write what was lost."""
    rows = summary(runs)
    print(table(rows))
    write_record(
        args.out[RECORD],
        {
            "what": "ways to prune to a share of the MACs, without training",
            "calibration": args.calibration,
            "tuning": {"epochs": args.epochs, "lr": args.lr, "train_examples": args.train_examples},
            "length": LENGTH,
            **provenance(runs),
            "rows": rows,
            "runs": [{**run.config, **run.results, "model": run.facts["model"]["dense"]} for run in runs],
        },
    )
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.measure.budgets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of the checkpoint that is fine-tuned")
    parser.add_argument("--data", required=True, type=Path, metavar="FOLDER", help="folder of the four data sets")
    for name, known in (("tasks", tasks.TASKS), ("methods", METHODS)):
        parser.add_argument(
            f"--{name}",
            type=names_of(name.removesuffix("s"), tuple(known)) if name == "tasks" else methods_named,
            default=tuple(known),
            metavar="A,B,…",
            help="(default: all)" if name == "tasks" else "those whose name has one of these in it (default: all)",
        )
    parser.add_argument(
        "--seeds", type=integers, default=(0, 1, 2), help="fine-tuned models of a task (default: 0,1,2)"
    )
    parser.add_argument("--shares", type=numbers, default=(0.5, 0.4, 0.3), help="of the MACs (default: 0.5,0.4,0.3)")
    parser.add_argument("--calibration", type=count, default=512, metavar="N", help="texts (default: %(default)s)")
    parser.add_argument("--epochs", type=number, default=3.0, help="of fine-tuning (default: %(default)s)")
    parser.add_argument("--lr", type=number, default=5e-5, help="of fine-tuning (default: %(default)s)")
    parser.add_argument("--train-examples", type=count, metavar="N", help="a sample to fine-tune on (default: all)")
    parser.add_argument("--max-length", type=count, default=64, metavar="TOKENS", help="(default: %(default)s)")
    parser.add_argument(
        "--finished", action="store_true", help="run nothing; write the record of models that are finished"
    )
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
    return DataSource(str(path), ("a", "b") if tasks.has_pairs(name) else ("a",), "label")


def task_of(name: str) -> Task:
    return TASKS["regression" if tasks.TASKS[name][1] == 1 else "classification"]


def tuned(args: argparse.Namespace, name: str, files: dict[str, Path], seed: int, progress: Progress) -> Path:
    """Return the folder of a fine-tuned model, trained unless it is there."""
    folder = args.out[FOLDER] / name / f"dense-{seed}"
    if not is_finished(folder):
        task = task_of(name)
        recipe = Recipe(epochs=args.epochs, lr=args.lr, seed=seed)
        examples = read_examples(source(name, files["train"])).sample(args.train_examples, seed)
        tokenizer = read_tokenizer(args.checkpoint, args.max_length)
        torch.manual_seed(seed)
        model = task.load(args.checkpoint, num_labels=tasks.TASKS[name][1])
        setting = {"task": name, "train_examples": args.train_examples, **asdict(recipe)}
        with Run("finetune", setting, folder=folder, seed=seed) as run:
            finetune_(model, task.encode(examples, tokenizer), task, recipe, progress=progress.bar is None)
            model.save_pretrained(folder / "model")
            tokenizer.save(str(folder / "model" / "tokenizer.json"))
            run.results = {"sha256": model_sha256(model)}
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


def print_run(run: Record, progress: Progress) -> None:
    result, config = run.results, run.config
    progress.print(
        f"{config['task']:<11} {config['method']:<44} {100 * config['share']:3.0f} %  {100 * result['score']:5.1f}"
        f" (dense {100 * result['dense']:.1f})  kl {result['kl']:.4f}  MACs {100 * result['macs']:.1f} %"
    )
    sys.stdout.flush()


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


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Write the points lost as Markdown: a line for each method, a column for each share."""
    shares = sorted({row["share"] for row in rows}, reverse=True)
    lines = ["| | " + " | ".join(f"{100 * share:g} % of the MACs" for share in shares) + " |"]
    lines.append("|---" * (len(shares) + 1) + "|")
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for share in shares:
            for row in rows:
                if (row["method"], row["share"]) == (method, share):
                    cells.append(f"{row['lost']:.1f} (at worst {row['lost_at_worst']:.1f})")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
