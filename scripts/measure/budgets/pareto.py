"""Which encoder to take: quality against measured speed, of a sentence encoder pruned, mapped, distilled and in int8.

    python -m scripts.measure.budgets.pareto CHECKPOINT --data FOLDER --out runs/pareto,FILE.json,FILE.png

The models: the given one, and pruned ones of `bertlite prune to`, without a map, with it, and distilled. Models
without whole layers are distilled and mapped alike.  None reads a label.  They are fitted to texts of AG News, Subj
and CLINC150, and judged by others: Spearman's correlation on STS-B and on pairs of SICK, and nDCG@10 of a search in
Banking77 (see `scripts/measure/encoders.py`).  Speeds are of the native kernels, relative to the given model in
float32, in turn, with the map. They are for 32 texts with STS-B's lengths.  A folder that is there is not made again.
"""

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import nn

from bertlite import BertModel, BertTokenizer, PruneSettings, optimize_for_inference, prune_to
from bertlite.cli.parts import FOLDER, RECORD, count, names, paths
from bertlite.embed import Embedder
from bertlite.experiments.budget.command import HELD_OUT
from bertlite.experiments.budget.distil import LR, RecordedTeacher
from bertlite.experiments.budget.mapping import fit_map
from bertlite.experiments.budget.target import quantiles
from bertlite.experiments.budget.texts import batches_of, encode, split
from bertlite.experiments.budget.work import Work
from bertlite.experiments.data import EncodedExamples, Examples, batch_indices
from bertlite.experiments.evaluate import TASKS
from bertlite.experiments.finetune import Recipe, finetune_
from bertlite.experiments.plots import COLOURS, MARKERS, pyplot
from bertlite.shipping.carried import load_trained
from bertlite.shipping.folder import write_model
from bertlite.shipping.original import NEIGHBOURS, spearman, what_is_kept
from bertlite.shipping.vectors import read_head, with_map
from bertlite.support.environment import environment, write_record
from bertlite.support.timing import alternate, quartiles, ratios
from scripts.measure.budgets import tasks
from scripts.measure.budgets.methods import OfLayers, Subject, with_fewer_layers
from scripts.measure.encoders import EACH, FOUND, SOURCES

PICTURE = ".png"
LENGTH, BATCH, ROUNDS = 32, 32, 41  # tokens to truncate texts to; texts of a step, and of what is timed
PAIRS, QUERIES, DOCUMENTS = 1000, 500, 2000  # of SICK and of Banking77 that judge
DTYPES = ("float32", "int8")
WAYS = {
    "plain": "`prune to`, no map",
    "mapped": "`prune to`",
    "distilled": "`prune to`, distilled",
    "layers": "whole layers left out, distilled alike",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of the sentence encoder")
    parser.add_argument("--data", required=True, type=Path, metavar="FOLDER", help="folder of the data sets")
    parser.add_argument("--targets", type=names, default="50%,30%,20%", help="shares of the MACs")
    parser.add_argument("--steps", type=count, default=300, help="of distillation, each of 32 texts")
    kinds = (RECORD, PICTURE, FOLDER)
    parser.add_argument("--out", type=paths(kinds), required=True, metavar="FOLDER,FILE.json,FILE.png")
    args = parser.parse_args(argv)
    folder: Path = args.out[FOLDER]
    places = {("given", "100%"): Path(args.checkpoint), **make_models(args, folder)}
    judge, speeds = Judge(args.data), time_models(places, args.data)
    rows = list[dict[str, Any]]()
    for (way, target), place in places.items():
        for dtype in DTYPES:
            rows.append({"way": way, "target": target, "dtype": dtype, "speedup": speeds[way, target, dtype]})
            rows[-1] |= judge(place, dtype, folder)
            print(rows[-1], flush=True)
    record: dict[str, Any] = {"what": "a sentence encoder, pruned, mapped, distilled, in int8"}
    record["checkpoint"], record["steps"] = Path(args.checkpoint).name, args.steps
    record |= {"texts": len(read_texts(args.data)), "rows": rows, "environment": environment()}
    write_record(args.out[RECORD], record)
    if PICTURE in args.out:
        draw(rows, args.out[PICTURE])
    return 0


def read_texts(data: Path) -> Examples:
    """Return the texts to fit, distil and map by."""
    rows = [row for source in SOURCES for row in random.Random(0).sample([*source(data, "train")], EACH)]
    return Examples("texts", tuple((text,) for text in {" ".join(first.split()): None for first, *_ in rows}), ())


def make_models(args: argparse.Namespace, folder: Path) -> dict[tuple[str, str], Path]:
    """Write the folder of each way and target, and return their paths."""
    texts, places, head = read_texts(args.data), dict[tuple[str, str], Path](), read_head(args.checkpoint)
    rest, _ = split(texts, len(texts), HELD_OUT, 0)
    given, tokenizer = load_trained(BertModel, args.checkpoint), BertTokenizer.from_pretrained(args.checkpoint)
    data = encode(rest, tokenizer, LENGTH)
    given_texts, settings = [text for (text,) in texts.texts], PruneSettings(max_length=LENGTH)
    teacher: RecordedTeacher | None = None
    for target in args.targets:
        place = {way: folder / way / target for way in WAYS}
        places |= {(way, target): path for way, path in place.items()}
        options: dict[str, Any] = {"settings": settings, "keep": folder / "curves", "progress": True}
        report = prune_to(args.checkpoint, target, given_texts, place["mapped"], **options)
        pruned = load_trained(BertModel, place["mapped"])
        write_model(place["plain"], pruned, args.checkpoint)
        unseen = rest.chosen(range(report["texts"]["fitted to"], len(rest)))
        for way in ("distilled", "layers"):
            if place[way].exists():
                continue
            teacher = teacher or RecordedTeacher(given, data)
            share = float(target.rstrip("%")) / 100
            model = pruned if way == "distilled" else with_fewer_layers(Subject(given, [], LENGTH), share)
            distil_(model, given, teacher, data, args.steps)
            batches = batches_of(unseen, tokenizer, given, LENGTH)
            mapped = with_map(head, fit_map(model, given, batches, head))
            write_model(place[way], model, args.checkpoint, mapped=mapped)
    return places


def distil_(model: Any, given: Any, recorded: RecordedTeacher, data: EncodedExamples, steps: int) -> None:
    """Train a model towards the vectors and hidden states of the given one."""
    layers = model.config.num_hidden_layers
    fewer = layers < given.config.num_hidden_layers
    teacher = OfLayers(given, recorded, layers) if fewer else recorded
    model.embeddings.requires_grad_(False)
    epochs, lr = steps / len(batch_indices(data, BATCH)), LR / model.config.hidden_size
    recipe = Recipe(epochs=epochs, lr=lr, batch_size=BATCH, distil=1, hidden=1)
    finetune_(model, data, TASKS["classification"], recipe, teacher=teacher, progress=True)


class Judge:
    """Judges an encoder by tasks that it was not fitted to."""

    def __init__(self, data: Path) -> None:
        draw = random.Random(0)
        self.pairs = {"STS-B": tasks.stsb(data, "test"), "SICK": draw.sample(tasks.sick(3)(data, "dev"), PAIRS)}
        self.queries, self.documents = (
            draw.sample(tasks.banking77(data, part), number)
            for part, number in (("dev", QUERIES), ("train", DOCUMENTS))
        )

    def __call__(self, place: Path, dtype: str, folder: Path) -> dict[str, Any]:
        """Return the scores, their mean, and of int8 the share of the ten nearest documents that float32 has too."""
        encode = Embedder(place, normalize=True, dtype=dtype, backend="native").encode
        scores = {}
        for name, rows in self.pairs.items():
            first, second, labels = zip(*rows, strict=True)
            cosines = (encode(list(first)) * encode(list(second))).sum(1)
            scores[name] = spearman(cosines, np.array(labels, dtype=float))
        queries, documents = (encode([row[0] for row in rows]) for rows in (self.queries, self.documents))
        order = np.argsort(-queries @ documents.T, axis=1)[:, :FOUND]
        discounts = 1 / np.log2(np.arange(FOUND) + 2)
        relevant = np.array([row[2] for row in self.documents])[order] == np.array([[row[2]] for row in self.queries])
        scores["Banking77"] = float((relevant @ discounts / discounts.sum()).mean())
        found: dict[str, Any] = {"scores": scores, "mean": mean(scores.values())}
        if dtype == "float32":
            self.exact = documents
        else:
            found["neighbours"] = what_is_kept("encoder", documents, self.exact)[NEIGHBOURS]
        return found


def time_models(places: Mapping[tuple[str, str], Path], data: Path) -> dict[tuple[str, str, str], dict[str, float]]:
    """Return quartiles of the speed of each model in each dtype, over the given one in float32.

    Ways whose models have the same sizes are timed once, with the layer of a map, which all but one of them have.
    """
    tokenizer = BertTokenizer.from_pretrained(places["given", "100%"])
    lengths = [len(ids) for ids in tokenizer.encode_texts([row[0] for row in tasks.stsb(data, "test")])["input_ids"]]
    chosen = quantiles(lengths, BATCH)
    work, runs = Work("STS-B", chosen, max(chosen)), dict[tuple[str, str, str], Any]()
    for (way, target), place in places.items():
        if way in ("plain", "distilled"):
            continue
        model = load_trained(BertModel, place)
        inputs, pooled = work.inputs(model.config.vocab_size), torch.zeros(BATCH, model.config.hidden_size)
        after = nn.Linear(pooled.shape[1], pooled.shape[1]) if way != "given" else nn.Identity()
        for dtype in DTYPES:
            quick = optimize_for_inference(model, dtype=dtype, backend="native")
            runs[way, target, dtype] = partial(run, partial(quick, **inputs), partial(after, pooled))
    with torch.inference_mode():
        times = alternate({str(name): run for name, run in runs.items()}, ROUNDS)
    dense = str(("given", "100%", "float32"))
    speeds = {name: quartiles(ratios(times, dense, str(name))) for name in runs}
    timed_as = {"plain": "mapped", "distilled": "mapped"}
    return {
        (way, target, dtype): speeds[timed_as.get(way, way), target, dtype]
        for way, target in places
        for dtype in DTYPES
    }


def run(*steps: Callable[[], Any]) -> None:
    for step in steps:
        step()


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the mean score against the speed: a line for each way, solid in float32 and dashed in int8."""
    plt = pyplot()
    figure, panel = plt.subplots(figsize=(6.5, 4.8), layout="constrained")
    dense = [row for row in rows if row["way"] == "given"]
    for colour, marker, (way, name) in zip(COLOURS, MARKERS, WAYS.items(), strict=False):
        for dtype, style in zip(DTYPES, ("-", "--"), strict=True):
            points = [row for row in (*dense, *rows) if row["dtype"] == dtype and row["way"] in (way, "given")]
            x, y = zip(*sorted({(row["speedup"]["median"], 100 * row["mean"]) for row in points}), strict=True)
            label = f"{name.replace('`', '')}{'' if dtype == 'float32' else ', int8'}"
            panel.plot(x, y, style, marker=marker, markersize=5, color=colour, label=label)
    panel.set(xscale="log", xlabel="speed, times the given model's in float32", ylabel="mean score")
    panel.set_xticks(ticks := (1, 2, 5, 10, 20), map(str, ticks))
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
