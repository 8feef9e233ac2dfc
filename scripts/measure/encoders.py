"""Prune a sentence encoder by `bertlite prune to`, and judge it by tasks and texts that it was not fitted to.

    python -m scripts.measure.encoders CHECKPOINT --data FOLDER --out runs/encoders,FILE.json

It is fitted to texts of AG News, Subj and CLINC150, of which no label is read.  It is judged by Spearman's correlation
of cosines with people's ratings of the pairs of STS-B (test) and SICK (test), and by nDCG@10 of a search in Banking77.
Queries are the test questions, and documents the training questions; documents with the query's intent are relevant.
Losses are paired; intervals are over pairs of texts, and over intents.  `scripts/measure/budgets/tasks.py` describes
the folder of data sets.  Finished work is not done again.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertlite import PruneSettings, prune_to
from bertlite.cli.parts import FOLDER, RECORD, number, paths
from bertlite.embed import Embedder
from bertlite.experiments.compare import comparison
from bertlite.experiments.evaluate import TASKS
from bertlite.experiments.statistics import Array
from bertlite.support.environment import environment, write_record
from scripts.measure.budgets import tasks
from scripts.measure.budgets.clusters import clustered_estimate

SOURCES, EACH = (tasks.agnews, tasks.TASKS["subj"].rows, tasks.clinc150), 1600  # of the texts to fit to
TARGETS = ("50%", "30%", "20%")
PAIRS = {"STS-B": (tasks.stsb, "test"), "SICK": (tasks.sick(3), "dev")}
SEARCH, FOUND = "Banking77", 10
FACTS = ("macs", "bytes", "cosine", "rank_correlation", "distilled")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of the sentence encoder")
    parser.add_argument("--data", required=True, type=Path, metavar="FOLDER", help="folder of the data sets")
    text = "of --distil, for each size (default: %(default)g)"
    parser.add_argument("--minutes", type=number, default=3.0, metavar="MINUTES", help=text)
    parser.add_argument("--out", type=paths((RECORD, FOLDER)), required=True, metavar="FOLDER,FILE.json")
    args = parser.parse_args(argv)
    folder = args.out[FOLDER]
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for source in SOURCES for row in random.Random(0).sample([*source(args.data, "train")], EACH)]
    texts = {" ".join(first.split()): None for first, *_ in rows}
    (folder / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    for stage, minutes in (("pruned", None), ("distilled", args.minutes)):
        settings, inputs = PruneSettings(max_length=64, distil=minutes, mapping=False), (TARGETS, folder / "texts.txt")
        prune_to(args.checkpoint, *inputs, folder / stage, settings=settings, keep=folder / "curves", progress=True)
    dense = judged(args.checkpoint, args.data)
    found = [{"target": None, **{name: {"score": score(each)} for name, each in dense.items()}}]
    for place in (folder / stage / target for target in TARGETS for stage in ("pruned", "distilled")):
        report = json.loads((place / "report.json").read_text(encoding="utf-8"))
        own = judged(str(place), args.data)
        scores = {name: {"score": score(own[name]), **lost(own[name], dense[name])} for name in own}
        found.append({"target": report["target"], **{name: report[name] for name in FACTS}, **scores})
        print(found[-1], flush=True)
    record = {"what": "a sentence encoder, pruned", "checkpoint": Path(args.checkpoint).name, "texts": report["texts"]}
    write_record(args.out[RECORD], {**record, "rows": found, "environment": environment()})
    return 0


def judged(checkpoint: str, data: Path) -> dict[str, tuple[Array, Array]]:
    """Return what a task says of an encoder: cosines and labels of pairs, and nDCG and intents of queries."""
    encode = Embedder(checkpoint, normalize=True).encode
    found = {}
    for name, (read, part) in PAIRS.items():
        first, second, labels = zip(*read(data, part), strict=True)
        cosines = (encode(list(first)) * encode(list(second))).sum(1)
        found[name] = cosines[:, None], np.array(labels, dtype=float)
    (queries, intents), (documents, others) = (
        [[row[i] for row in tasks.banking77(data, part)] for i in (0, 2)] for part in ("dev", "train")
    )
    order = np.argsort(-encode(queries) @ encode(documents).T, axis=1)[:, :FOUND]
    discounts = 1 / np.log2(np.arange(FOUND) + 2)
    relevant = np.array(others)[order] == np.array(intents)[:, None]
    return {**found, SEARCH: (relevant @ discounts / discounts.sum(), np.array(intents))}  # of each more than FOUND


def score(found: tuple[Array, Array]) -> float:
    """Return Spearman's correlation, or the mean nDCG of queries."""
    return float(TASKS["similarity"].metrics["spearman"](*found) if found[0].ndim > 1 else found[0].mean())


def lost(own: tuple[Array, Array], dense: tuple[Array, Array]) -> dict[str, Any]:
    """Return the difference from the dense model with its 95 % interval, over pairs or over intents."""
    (mine, truth), (theirs, _) = own, dense
    if mine.ndim > 1:
        found = comparison({"": [mine]}, {"": [theirs]}, truth, TASKS["similarity"], "spearman")
        return {name: found[name] for name in ("difference", "difference_low", "difference_high")}
    estimate = clustered_estimate([mine[truth == intent] - theirs[truth == intent] for intent in set(truth.tolist())])
    interval = estimate.interval()
    assert interval is not None
    return {"difference": estimate.value, "difference_low": interval.low, "difference_high": interval.high}


if __name__ == "__main__":
    raise SystemExit(main())
