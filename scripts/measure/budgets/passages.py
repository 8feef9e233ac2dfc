"""How a search for passages fares with pruned sentence encoders: nDCG@10 of XQuAD's paragraphs for its questions.

    python -m scripts.measure.budgets.passages CHECKPOINT … --data FOLDER --out runs/passages,FILE.json

Each encoder is pruned by `bertlite prune to`, without labels, for each set of texts of `fitted`; if there are enough
texts for a map, with and without it.  No text is of an article whose questions judge.  Intervals are paired over the
questions.  Nothing is made again: after a kill give the same command again.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bertlite import Embedder, prune_to
from bertlite.cli.parts import FOLDER, RECORD, names, paths
from bertlite.commands import PruneSettings
from bertlite.experiments.statistics import Array
from bertlite.support.environment import environment
from bertlite.support.files import write_json
from scripts.measure.budgets import tasks
from scripts.measure.budgets.encoders import PASSAGES, XQUAD, Judge, difference, texts_to_fit

SETTINGS = PruneSettings(max_length=256, at=(8, 128))
SENTENCES, PARAGRAPHS, OTHERS = "sentences", "sentences and paragraphs", "sentences, and those of other tasks"
ALL = "all of these"
GIVEN = "given"


def fitted(data: Path) -> dict[str, list[str]]:
    """Return sets of texts to fit to.

    The first two have too few for a map.
    """
    sentences = PASSAGES[XQUAD].to_fit(data, 10**6)
    paragraphs = [text for text, *_ in tasks.xquad(data, "paragraphs")]
    others = [*sentences, *texts_to_fit(data)]
    every = {SENTENCES: sentences, PARAGRAPHS: [*sentences, *paragraphs], OTHERS: others, ALL: [*others, *paragraphs]}
    return {name: [*dict.fromkeys(texts)] for name, texts in every.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="folders of sentence encoders")
    parser.add_argument("--data", required=True, type=Path, metavar="FOLDER", help="folder of the data sets")
    parser.add_argument("--targets", type=names, default="50%,30%,20%", help="shares of the MACs")
    parser.add_argument("--out", type=paths((RECORD, FOLDER)), required=True, metavar="FOLDER,FILE.json")
    args = parser.parse_args(argv)
    judge, texts, rows = Judge(args.data, PASSAGES), fitted(args.data), list[dict[str, Any]]()
    for place in args.checkpoints:
        whole = scores(judge, place)
        rows.append({"model": place.name, "fitted": GIVEN, "target": "100%", "score": float(whole[0])})
        for name, mapping in (*product([SENTENCES, PARAGRAPHS, OTHERS], [False]), *product([OTHERS, ALL], [True])):
            root = args.out[FOLDER] / place.name / name
            settings = replace(SETTINGS, mapping=mapping)
            for target in args.targets:
                folder = root / f"{target}{'-map' * mapping}"
                report = prune_to(
                    place, target, texts[name], folder, settings=settings, keep=root / "kept", progress=True
                )
                found = scores(judge, folder)
                row = {"model": place.name, "fitted": name, "target": target, "score": float(found[0])}
                sizes = {each: report["texts"][each] for each in ("fitted to", "mapped")}
                rows.append(row | difference(found, whole) | {"texts": sizes})
                print(*rows[-1].values(), flush=True)
    counts = {"questions": len(judge.rows[XQUAD][0]), "paragraphs": len(judge.rows[XQUAD][1])}
    record = {"what": "a search for passages by pruned encoders", **counts, "rows": rows}
    write_json(args.out[RECORD], {**record, "environment": environment()})
    return 0


def scores(judge: Judge, place: Path) -> Array:
    """Return the nDCG@10 of a model, and of resamples of the questions."""
    vectors = np.asarray(Embedder(place, backend="native").encode(judge.texts))
    return judge(vectors)[XQUAD]


if __name__ == "__main__":
    raise SystemExit(main())
