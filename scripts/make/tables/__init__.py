"""Put the figures of scripts/results, and the commands and criteria of the library, into README.md and notebooks/docs.

    python -m scripts.make.tables            # rewrite the tables
    python -m scripts.make.tables --check    # exit 1 if a page holds other figures than the records

A table stands between <!-- NAME --> and <!-- /NAME -->; NAME is a key of TABLES.  A table stays as it is if its record
is too old, for example if its ratios have no spread; the record is named, and the exit status is 1.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from scripts.make.tables import brief, budgets, commands, criteria, native, proof, pruning, speed
from scripts.make.tables.read import ROOT, OldRecordError

PAGES = (ROOT / "README.md", *sorted((ROOT / "notebooks" / "docs").glob("*.md")))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pages", nargs="*", type=Path, default=PAGES, help="default: README.md and notebooks/docs/*.md"
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something would change")
    args = parser.parse_args(argv)
    bad = 0
    for page in args.pages:
        old = page.read_text(encoding="utf-8")
        new, outdated = filled(old)
        bad += len(outdated)
        for message in outdated:
            print(f"{page}: {message}", file=sys.stderr)
        if new == old:
            continue
        if args.check:
            print(f"{page} differs from the records; run python -m scripts.make.tables", file=sys.stderr)
            bad += 1
        else:
            page.write_text(new, encoding="utf-8")
            print(page)
    return int(bad > 0)


def filled(text: str) -> tuple[str, list[str]]:
    """Return the text with every marked table made anew, and a message for each whose record is too old.

    Raises:
        KeyError: a mark names no table.
    """
    outdated = []

    def table(mark: re.Match[str]) -> str:
        try:
            return f"<!-- {mark[1]} -->\n\n{TABLES[mark[1]]()}\n\n<!-- /{mark[1]} -->"
        except OldRecordError as error:
            outdated.append(f"{mark[1]}: {error}; make the record again")
            return mark[0]

    return re.sub(r"<!-- ([a-z]+) -->\n.*?<!-- /\1 -->", table, text, flags=re.DOTALL), outdated


TABLES: dict[str, Callable[[], str]] = {
    "proofbrief": brief.proof,
    "speedbrief": brief.speed,
    "pruningbrief": budgets.brief,
    "budgets": budgets.by_task,
    "budgetclock": budgets.by_the_clock,
    "parity": partial(proof.parity, "parity-[0-9]*.json"),
    "clients": proof.clients,
    "trust": proof.trust,
    "startup": speed.startup,
    "speed": partial(speed.speed, "speed.json"),
    "peers": speed.peers,
    "avxtwo": speed.limited,
    "limits": partial(speed.limits, "speed.json"),
    "checkpointing": partial(speed.checkpointing, "checkpointing.json"),
    "embed": speed.embed,
    "batches": speed.batches,
    "nativesteps": native.steps,
    "nativeaccuracy": native.accuracy,
    "criteria": criteria.table,
    "commands": commands.table,
    "examples": commands.examples,
    "oneshot": partial(pruning.pruning, "sst2"),
    "similarity": partial(pruning.pruning, "stsb"),
    "subnetworks": pruning.subnetworks,
    "textpruner": pruning.beside_textpruner,
    # of the records that scripts/measure/gpu_checks.py writes
    "gpuparity": partial(proof.parity, "parity-cuda.json"),
    "gpuspeed": partial(speed.speed, "speed-cuda.json"),
    "gpudemands": speed.demands,
    "gpulimits": partial(speed.limits, "speed-cuda.json"),
    "gpubase": partial(speed.checkpointing, "checkpointing-cuda-base.json"),
    "gpularge": partial(speed.checkpointing, "checkpointing-cuda-large.json"),
}
