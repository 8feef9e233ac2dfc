"""Compare ways to prune to a share of the MACs, without training and after equal distillation.

    python -m scripts.measure.budgets CHECKPOINT --data FOLDER --out runs/budgets,FILE.json,FILE.png

The folder holds the data sets of which the tasks are made (`tasks.py`).  CHECKPOINT is fine-tuned on each task, once
for each seed, and every model is pruned to every share in every way (`methods.py`), by texts that its seed draws.
Then come other stages: equal distillation; pruning and distillation within equal CPU time, as by `prune to --distil`;
8 bits; and the speed, for which a machine must be quiet.  A task is done before the next begins.  Finished work is not
done again.  The record holds all finished runs of the named tasks, ways, shares and stages. Its earlier runs of the
same fine-tuned models stay. `--record-only` writes it and runs nothing.

The main comparison has three draws of texts, each with a fine-tuned model of its own, on tasks that were named before:

    python -m scripts.measure.budgets CHECKPOINT --data FOLDER --main --out runs/budgets,FILE.json
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, cached_property, partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertlite import optimize_for_inference
from bertlite.cli.parts import FOLDER, RECORD, count, integers, names_of, number, numbers, paths
from bertlite.experiments.budget.distil import Distillation, RecordedTeacher, TooShortError
from bertlite.experiments.budget.quality import Quality
from bertlite.experiments.budget.search import State
from bertlite.experiments.budget.work import full
from bertlite.experiments.compare import provenance
from bertlite.experiments.data import DataSource, EncodedExamples, batch_indices, read_examples, read_tokenizer
from bertlite.experiments.evaluate import TASKS, Task, metrics_of, predict
from bertlite.experiments.files import model_sha256
from bertlite.experiments.finetune import Recipe, finetune_
from bertlite.experiments.statistics import Estimate
from bertlite.opened.checkpoint import Checkpoint
from bertlite.pruning import macs
from bertlite.pruning.importance.allocation import kept_sizes
from bertlite.support.environment import version_of
from bertlite.support.files import write_json
from bertlite.support.progress import Progress
from bertlite.support.runs import Record, Run, read_runs, run_is_finished
from bertlite.support.timing import alternate, quartiles, ratios
from scripts.measure.budgets import tasks
from scripts.measure.budgets.clusters import clustered_estimate
from scripts.measure.budgets.methods import FEWER, MAIN, OURS, WAYS, OfLayers, Subject, Way, library
from scripts.measure.budgets.picture import draw

PICTURE = ".png"
LENGTH = 128  # tokens of the sequence whose MACs are counted
BATCH = 32
SCORES = {"pruned": "score", "distilled": "distilled", "timed": "timed", "int8": "int8"}  # the stage's, in a run
SPEEDS = {"int8": "int8_speedup"}  # of a stage; of others "speedup"
STAGES = (*SCORES, "speed")
CHOOSING = 256  # the last training examples, by which the best state of a timed training is chosen
WORK, ROUNDS = (8, 128), 7  # of the speed


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    folder: Path = args.out[FOLDER]
    total = len(args.tasks) * len(args.seeds) * len(args.shares) * len(args.ways)
    with Progress(0 if args.record_only else total, "models", what="budgets") as progress:
        for name, seed in product([] if args.record_only else args.tasks, args.seeds):
            files = tasks.write_task(name, args.data, folder / "data")
            bench = Bench(name, files, tuned(args, name, files, seed), args, seed)
            for way, share in product(args.ways, args.shares):
                place = bench.prune(way, share, seed, folder)
                for stage in args.stages:
                    bench.go_on(stage, place)
                progress.advance()
                progress.print("{task} {way} {share:.0%} {score:.4f} (dense {dense:.4f})".format_map(results(place)))
    every = {path: results(path) for path in sorted(folder.glob("*/pruned/*")) if run_is_finished(path)}
    wanted = {*product(args.tasks, args.ways, args.shares)}
    places = [path for path, run in every.items() if (run["task"], run["way"], run["share"]) in wanted]
    found = [every[path] for path in places]
    runs = [run for path in places for run in (*read_runs(path), *later_runs(path))]
    found, before = with_earlier(found, args.out[RECORD])
    rows = summary(found, args.stages)
    for row in rows:
        print("{share:4.0%} {way}, {stage}: {lost:.1f} lost, {tasks} tasks (at worst {worst[1]:.1f})".format_map(row))
    places = [place for place in sorted(folder.glob("*/dense-*")) if run_is_finished(place)]
    dense = {place.parent.name: read_runs(place)[0].config for place in places}
    tuning = {name: {x: config[x] for x in ("examples", "epochs", "lr")} for name, config in dense.items()}
    made = provenance(runs)
    record = {
        "what": "ways to prune to a share of the MACs, without training and after distillation",
        "tuning": before.get("tuning", {}) | tuning,
        "distillation": {"examples": args.distil, "batch": BATCH, "lr": args.lr},
        "minutes": args.minutes,
        "length": LENGTH,
        "torch_pruning": version_of("torch-pruning"),
        **made,
        "commits": [*dict.fromkeys([*commits_of(before), *commits_of(made)])],
        "rows": rows,
        "runs": found,
    }
    write_json(args.out[RECORD], record)
    if PICTURE in args.out:
        draw(rows, args.out[PICTURE])
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.measure.budgets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of the checkpoint that is fine-tuned")
    parser.add_argument("--data", required=True, type=Path, metavar="FOLDER", help="folder of the data sets")
    parser.add_argument("--tasks", type=names_of("task", tuple(tasks.TASKS)), default=tuple(tasks.TASKS))
    parser.add_argument("--ways", type=ways_named, default=tuple(WAYS), help="names, split at ;")
    parser.add_argument("--seeds", type=integers, default=(0,), help="fine-tuned models of a task (default: 0)")
    parser.add_argument(
        "--main", action="store_true", help=f"by default {', '.join(tasks.MAIN)}; seeds 0 to 2; {', '.join(MAIN)}"
    )
    parser.add_argument("--shares", type=numbers, default=(0.5, 0.3, 0.2), help="of the MACs (default: 0.5,0.3,0.2)")
    parser.add_argument(
        "--stages", type=names_of("stage", STAGES), default=("pruned", "distilled"), help="(default: pruned,distilled)"
    )
    parser.add_argument("--distil", type=count, default=2048, metavar="N", help="examples (default: %(default)s)")
    parser.add_argument("--minutes", type=number, default=3.0, help="of a timed one, in all (default: %(default)s)")
    parser.add_argument("--lr", type=number, default=1e-4, help="of both trainings (default: %(default)s)")
    parser.add_argument("--max-length", type=count, default=64, metavar="TOKENS", help="(default: %(default)s)")
    parser.add_argument("--record-only", action="store_true", help="write the record of what is finished")
    parser.add_argument(
        "--out",
        type=paths((RECORD, FOLDER, PICTURE)),
        required=True,
        metavar="FOLDER,FILE.json[,FILE.png]",
        help="runs, the record and its picture",
    )
    args = parser.parse_args(argv)
    if args.main:  # other options still count, such as one of the tasks on one machine
        parser.set_defaults(tasks=tasks.MAIN, seeds=(0, 1, 2), ways=MAIN)
        args = parser.parse_args(argv)
    if not {FOLDER, RECORD} <= {*args.out}:
        parser.error("--out needs a folder for the runs and a file for the record: FOLDER,FILE.json")
    if any("Torch-Pruning" in way for way in args.ways) and not args.record_only:
        library()
    return args


def ways_named(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(";"))
    if unknown := [name for name in names if name not in WAYS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; have: {'; '.join(WAYS)}")
    return names


def results(place: Path) -> dict[str, Any]:
    """Return the settings and results of a pruned model, and the results of later stages that are finished."""
    (run,) = read_runs(place)
    found = {**run.config, **run.results, "model": run.facts["model"]["dense"]}
    return found | dict(item for run in later_runs(place) for item in run.results.items())


def with_earlier(runs: list[dict[str, Any]], path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return runs, with the runs of a record's file that are not among them, and this record, {} if there is none.

    Raises:
        ValueError: a task's runs there are of another fine-tuned model.
    """
    if not path.exists():
        return runs, {}
    before = json.loads(path.read_text(encoding="utf-8"))
    key, model = itemgetter("task", "way", "share", "seed"), {(run["task"], run["seed"]): run["model"] for run in runs}
    have = {key(run) for run in runs}
    for run in before["runs"]:
        if model.setdefault((run["task"], run["seed"]), run["model"]) != run["model"]:
            raise ValueError(
                f"{path} has another model fine-tuned on {run['task']}: write to another file, or delete it"
            )
    return [*(run for run in before["runs"] if key(run) not in have), *runs], before


def commits_of(record: Mapping[str, Any]) -> list[str]:
    """Return the commits that a record's runs were made from, none of an empty record."""
    git = record.get("environment", {}).get("git")
    return record.get("commits") or ([git["commit"]] if git else [])


def beside(place: Path, stage: str) -> Path:
    """Return the folder of a later stage of a pruned model."""
    return place.parents[1] / stage / place.name


def later_runs(place: Path) -> list[Record]:
    """Return the finished runs of a pruned model's later stages."""
    folders = [beside(place, stage) for stage in STAGES[1:]]
    return [run for folder in folders if run_is_finished(folder) for run in read_runs(folder)]


def source(name: str, path: Path) -> DataSource:
    return DataSource(str(path), ("a", "b") if tasks.TASKS[name].pairs else ("a",), "label")


def task_of(name: str) -> Task:
    return TASKS["regression" if tasks.TASKS[name].outputs == 1 else "classification"]


def tuned(args: argparse.Namespace, name: str, files: dict[str, Path], seed: int) -> Path:
    """Return the folder of a fine-tuned model, trained unless it is there."""
    folder = args.out[FOLDER] / name / f"dense-{seed}"
    if not run_is_finished(folder):
        task, found = task_of(name), read_examples(source(name, files["train"]))
        recipe = Recipe(epochs=tasks.TASKS[name].epochs, lr=args.lr, batch_size=BATCH, seed=seed)
        examples = found.sample(min(tasks.TASKS[name].examples, len(found)), seed)
        tokenizer = read_tokenizer(Checkpoint.of(args.checkpoint), args.max_length)
        torch.manual_seed(seed)
        model = task.model_class.from_pretrained(args.checkpoint, num_labels=tasks.TASKS[name].outputs)
        with Run("finetune", {"task": name, "examples": len(examples), **asdict(recipe)}, folder=folder) as run:
            finetune_(model, task.encode(examples, tokenizer), task, recipe)
            model.save_pretrained(folder / "model")
            tokenizer.save_pretrained(folder / "model")
            run.results = {"sha256": model_sha256(model)}
    return folder / "model"


class Bench:
    """A fine-tuned model with its training data and the examples to judge by."""

    def __init__(
        self, name: str, files: dict[str, Path], checkpoint: Path, args: argparse.Namespace, seed: int
    ) -> None:
        self.name, self.task, self.metric = name, task_of(name), task_of(name).headline
        self.examples, self.lr, self.minutes = args.distil, args.lr, args.minutes
        tokenizer = read_tokenizer(Checkpoint.of(checkpoint), args.max_length)
        train, dev = (read_examples(source(name, files[part])) for part in ("train", "dev"))
        self.train = self.task.encode(train.sample(len(train), seed), tokenizer)  # shuffled
        self.dev, self.labels = self.task.encode(dev, tokenizer), np.array(dev.labels)
        self.model = Checkpoint.of(checkpoint).load(self.task.model_class)
        self.dense = predict(self.model, self.dev, self.task)
        self.hashes: dict[str, Any] = {"model": {"dense": model_sha256(self.model)}, "data": {"dev": dev.sha256}}
        self.subject = cache(self.make_subject)

    @cached_property
    def teacher(self) -> RecordedTeacher:
        return RecordedTeacher(self.model, first(self.train, self.examples))

    def make_subject(self, texts: int) -> Subject:
        data = first(self.train, texts)
        return Subject(self.model, [data.batch(i, self.task.labels) for i in batch_indices(data, BATCH)], LENGTH)

    def texts(self, way: Way) -> int:
        """Return how many texts a way has of those that there are."""
        if way.tokens is None:
            return min(way.texts, len(self.train))
        tokens = np.cumsum([self.train.length(i) for i in range(len(self.train))])
        return min(len(tokens), int((tokens <= way.tokens).sum()) + 1)

    def prune(self, way: str, share: float, seed: int, root: Path) -> Path:
        """Prune, judge, save and record, unless that is done; return the folder."""
        texts = self.texts(WAYS[way])
        place = f"{re.sub('[^a-z0-9]+', '-', way.lower()).strip('-')}-{100 * share:g}-{seed}"
        folder = root / self.name / "pruned" / place
        config = {"task": self.name, "way": way, "share": share, "seed": seed, "texts": texts}
        if not run_is_finished(folder):
            with Run("budget", config, folder=folder, seed=seed, **self.hashes) as run:
                pruned = WAYS[way].prune(self.subject(texts), share)
                heads, neurons = map(list, zip(*kept_sizes(pruned.config), strict=True))
                found = self.judge(pruned)
                pruned.save_pretrained(folder / "model")
                run.results = {
                    "score": found[self.metric],
                    "dense": metrics_of(self.dense, self.labels, self.task)[self.metric],
                    "metric": self.metric,
                    "kl": found["kl"],
                    "macs": macs(pruned.config, LENGTH) / macs(self.model.config, LENGTH),
                    "heads_kept": heads,
                    "neurons_kept": neurons,
                }
        return folder

    def go_on(self, stage: str, place: Path) -> None:
        """Do a later stage of a pruned model and record it, unless that is done."""
        folder = beside(place, stage)
        if not run_is_finished(folder):
            (pruned,) = read_runs(place)
            with Run(stage, pruned.config, folder=folder, seed=pruned.config["seed"], **self.hashes) as run:
                run.results = getattr(self, stage)(pruned, folder)

    def distilled(self, pruned: Record, folder: Path) -> dict[str, Any]:
        model, data = self.load(pruned), first(self.train, self.examples)
        recipe = Recipe(epochs=1, lr=self.lr, batch_size=BATCH, seed=pruned.config["seed"], distil=1, hidden=1)
        finetune_(model, data, self.task, recipe, teacher=self.teacher_of(self.teacher, model))
        return {"distilled": self.judge(model)[self.metric]}

    def timed(self, pruned: Record, folder: Path) -> dict[str, Any]:
        """Prune anew, and distil for the rest of the CPU time; the best state is chosen on other examples."""
        way, began = pruned.config["way"], time.process_time()
        model = WAYS[way].prune(self.make_subject(self.texts(WAYS[way])), pruned.config["share"])
        used = time.process_time() - began
        data = first(self.train, -CHOOSING)
        held = EncodedExamples(self.train.rows[-CHOOSING:], self.train.labels[-CHOOSING:])
        score = Quality(self.model, [held.batch(i, self.task.labels) for i in batch_indices(held, BATCH)])
        left = self.minutes - used / 60
        found = {"minutes": self.minutes, "prune_seconds": used, "epochs": 0.0}
        try:
            teacher = self.teacher_of(self.model, model)
            training = Distillation(teacher, data, True, left, score, clock=time.process_time)
            with Progress(None, "steps", what="timed", shown=False) as progress:
                found |= {"epochs": training.train_(model, State(folder / "state", {}), progress)["epochs"]}
        except TooShortError as error:
            found |= {"note": str(error)}  # no time is left for a step: the pruned model it is
        return {"timed": self.judge(model)[self.metric], "of": found}

    def teacher_of(self, teacher: Any, pruned: Any) -> Any:
        """Return a teacher of a pruned model, which may have fewer layers."""
        layers, count = (each.config.num_hidden_layers for each in (self.model, pruned))
        return teacher if count == layers else OfLayers(self.model, teacher, count)

    def int8(self, pruned: Record, folder: Path) -> dict[str, Any]:
        return {"int8": self.judge(optimize_for_inference(self.load(pruned), dtype=torch.int8))[self.metric]}

    def speed(self, pruned: Record, folder: Path) -> dict[str, Any]:
        """Time the pruned model, as it is and in 8 bits, and the dense one as it is."""
        inputs, model = full(*WORK).inputs(self.model.config.vocab_size, "cpu"), self.load(pruned).eval()
        models = {"dense": self.model.eval(), "pruned": model, "int8": optimize_for_inference(model, dtype=torch.int8)}
        with torch.inference_mode():
            times = alternate({name: partial(model, **inputs) for name, model in models.items()}, ROUNDS)
        speedup, int8 = (quartiles(ratios(times, "dense", name)) for name in ("pruned", "int8"))
        return {"speedup": speedup, "int8_speedup": int8}

    def load(self, pruned: Record) -> Any:
        return Checkpoint.of(pruned.folder / "model").load(self.task.model_class)

    def judge(self, model: Any) -> dict[str, float]:
        return metrics_of(predict(model, self.dev, self.task), self.labels, self.task, self.dense)


def first(data: EncodedExamples, many: int) -> EncodedExamples:
    return EncodedExamples(data.rows[:many], data.labels[:many])


# Rows


def summary(runs: Sequence[dict[str, Any]], stages: Sequence[str] = tuple(STAGES)) -> list[dict[str, Any]]:
    """Return a row for each share, stage and way: points lost, the mean of its tasks', and more than by OURS.

    The difference is over the tasks that both have, from OURS with another number of texts where it lacks the stage.
    """
    lost: dict[tuple[float, str], dict[str, dict[str, list[float]]]] = {}
    for run, (stage, score) in product(runs, SCORES.items()):
        if score in run and stage in stages:
            by_task = lost.setdefault((run["share"], stage), {}).setdefault(run["way"], {})
            by_task.setdefault(run["task"], []).append(100 * (run["dense"] - run[score]))
    rows = []
    for (share, stage), ways in sorted(lost.items(), key=lambda item: (-item[0][0], STAGES.index(item[0][1]))):
        means = {way: {task: float(np.mean(x)) for task, x in by_task.items()} for way, by_task in ways.items()}
        ours = next((way for way in WAYS if way in ways and way in (OURS, FEWER)), OURS)
        for way in (way for way in WAYS if way in ways):
            worst = max(means[way], key=lambda task: means[way][task])
            row = {
                "share": share,
                "stage": stage,
                "way": way,
                "labels": WAYS[way].labels or stage == "timed",
                "tasks": len(means[way]),
                "worst": [worst, means[way][worst]],
            }
            row |= with_interval("lost", clustered_estimate([*ways[way].values()]))
            row["one_within"] = within_of_one([*means[way].values()])
            if way != ours and (shared := sorted({*means[way]} & {*means.get(ours, {})})):
                more = [[means[way][task] - means[ours][task]] for task in shared]
                row |= with_interval("more", clustered_estimate(more))
            same = (run for run in runs if (run["share"], run["way"]) == (share, way))
            speed = SPEEDS.get(stage, "speedup")
            if speeds := [run[speed]["median"] for run in same if speed in run]:
                row["speedup"] = statistics.median(speeds)
            rows.append(row)
    return rows


def within_of_one(lost: Sequence[float]) -> float | None:
    """Return half the width of the 95 % interval of what one more task loses, None of a single task."""
    from scipy.stats import t

    count = len(lost)
    return float(t.ppf(0.975, count - 1) * np.std(lost, ddof=1) * (1 + 1 / count) ** 0.5) if count > 1 else None


def with_interval(name: str, found: Estimate) -> dict[str, float | None]:
    """Return a figure and half the width of its interval."""
    return {name: found.value, f"{name}_within": found.reach(0.95) if found.parts else None}


if __name__ == "__main__":
    raise SystemExit(main())
