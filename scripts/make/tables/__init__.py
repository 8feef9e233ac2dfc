"""Put the figures of scripts/results, and the commands and criteria of the library, into README.md and notebooks/docs.

    python -m scripts.make.tables            # rewrite the tables
    python -m scripts.make.tables --check    # exit 1 if a page holds other figures than the records
    python -m scripts.make.tables --stale    # list the records of README.md whose code has changed since

A table stands between <!-- NAME --> and <!-- /NAME -->; NAME is a key of TABLES.  Under it stand the commits and dates
of its records.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from scripts.make.tables import first, library, origin, proof, pruning, read, speed
from scripts.make.tables.read import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "notebooks" / "docs").rglob("*.md")))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES, help="default: README.md and the pages")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something would change")
    parser.add_argument("--stale", action="store_true", help="list README.md's records that are older than their code")
    args = parser.parse_args(argv)
    if args.stale:
        print("\n".join(origin.stale(headlines())) or "no record of README.md is older than the code that it measures")
        return 0
    different = {page: new for page in args.pages if (new := filled(old := page.read_text("utf-8"))) != old}
    for page, text in different.items():
        if args.check:
            print(f"{page} differs from the records; run python -m scripts.make.tables", file=sys.stderr)
        else:
            page.write_text(text, encoding="utf-8")
            print(page)
    return int(args.check and bool(different))


def filled(text: str) -> str:
    """Return the text with every marked table made anew.

    Raises:
        KeyError: a mark names no table, or a record lacks what a table shows, such as the spread of a ratio.
    """
    made, records = {}, {}
    for name in dict.fromkeys(each[0] for each in MARKED.findall(text)):
        made[name], records[name] = make(name)
    newest = origin.newest_version(each for name, each in records.items() if name not in SEVERAL_VERSIONS)
    for name, each in records.items():
        if name not in WITHOUT_ORIGIN:
            why = "" if name in SEVERAL_VERSIONS else origin.older(each, newest)
            note = " ".join(filter(None, (why, origin.commits(each, text))))
            made[name] += ("\n\n" if made[name].endswith(("|", "`", ")")) else " ") * bool(note) + note
    return MARKED.sub(lambda hit: f"<!-- {hit[1]} -->\n\n{made[hit[1]]}\n\n<!-- /{hit[1]} -->", text)


def make(name: str) -> tuple[str, dict[str, read.Record]]:
    """Return a table, and the records that it shows by their names."""
    read.used.clear()
    return TABLES[name](), dict(read.used)


def headlines() -> dict[str, read.Record]:
    """Return the records that README.md shows, by their names."""
    names = [each[0] for each in MARKED.findall(PAGES[0].read_text("utf-8"))]
    return {name: record for each in names for name, record in make(each)[1].items()}


MARKED = re.compile(r"<!-- ([a-z]+) -->\n(.*?)<!-- /\1 -->", re.DOTALL)
# of figures that stand again in other tables, under which their records are named
WITHOUT_ORIGIN = ("firstfigures", "ways")
SEVERAL_VERSIONS = ("parity", "clients", "families", "gpuparity")  # which compare or name them


TABLES: dict[str, Callable[[], str]] = {
    "speedpicture": first.picture,
    "firstfigures": first.figures,
    "ways": first.ways,
    "prunetorun": first.session,
    "pruningbrief": pruning.budgets_brief,
    "budgetsdraws": partial(pruning.budgets, "pruned", "distilled", name="draws"),
    "budgetschosen": partial(pruning.budgets, "pruned", name="choosing"),
    "budgetsmpnet": partial(pruning.fine_tuned, "mpnet", "all-mpnet-base-v2"),
    "budgets": partial(pruning.budgets, "pruned"),
    "budgetsdistilled": partial(pruning.budgets, "distilled", "timed"),
    "budgetsfew": partial(pruning.budgets, "pruned", "distilled", "timed", many=False),
    "budgetsint": pruning.int8,
    "budgettasks": pruning.budget_tasks,
    "modernbert": pruning.modernbert,
    "budgetspeed": pruning.measured,
    "budgetlarge": pruning.large,
    "vocabulary": pruning.vocabulary,
    "pareto": pruning.pareto,
    "paretotasks": pruning.pareto_tasks,
    "passages": pruning.passages,
    "parity": partial(proof.parity, "parity-[0-9]*.json"),
    "clients": proof.clients,
    "families": proof.families,
    "trust": proof.trust,
    "startup": speed.startup,
    "peers": partial(speed.peers, "speed-small", "speed"),
    "everyengine": speed.every_engine,
    "halves": speed.halves,
    "familiesspeed": partial(
        speed.peers, "speed-families", "speed-rotary", "speed-thread", "speed-long", "speed-deberta"
    ),
    "peersavxtwo": partial(speed.peers, "speed-avx2"),
    "underbrief": partial(speed.under, "speed-under", only="bertlite"),
    "under": partial(speed.under, "speed-under"),
    "underavxtwo": partial(speed.under, "speed-under-avx2"),
    "recipes": speed.recipes,
    "roof": speed.roof,
    "idle": speed.idle,
    "attention": speed.attention,
    "training": speed.training,
    "checkpointing": partial(speed.checkpointing, "checkpointing"),
    "embed": speed.embed,
    "runtime": speed.runtime,
    "soak": speed.soak,
    "batches": speed.batches,
    "nativeaccuracy": speed.native_accuracy,
    "neighbours": speed.neighbours,
    "criteria": library.criteria,
    "configfields": library.config_fields,
    "commands": library.commands,
    "oneshot": partial(pruning.pruning, "sst2"),
    "subnetworks": pruning.subnetworks,
    # of the records that scripts/measure/gpu_checks.py writes
    "gpuparity": partial(proof.parity, "parity-cuda.json"),
    "gpuspeed": partial(speed.on_gpu, "speed-cuda"),
    "gpubase": partial(speed.checkpointing, "checkpointing-cuda-base"),
    "gpularge": partial(speed.checkpointing, "checkpointing-cuda-large"),
}
