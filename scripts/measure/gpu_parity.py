"""Every case of `bertlite parity`, on a GPU: in a random order, and the first ones again at the end.

    python -m scripts.measure.gpu_parity CHECKPOINT --journal FILE --out RECORD [--device cuda] [--only A,B]

So a case that leaves something behind in the process is noticed by later ones.  Cases of large models keep their
order, in which each model is loaded once.  The journal has a line before each case, without a report, and one after
it.  Given the same journal again, the command continues after the last case that started, which counts as different.
"""

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bertlite.opened.checkpoint import Checkpoint
from bertlite.parity import reference
from bertlite.parity.cases import Case
from bertlite.parity.check import check_all
from bertlite.parity.command import (
    LARGEST_IN_PAIRS,
    ParitySettings,
    claims_table,
    differing,
    record,
    sections,
    verdict,
)
from bertlite.parity.compare import Report, Row
from bertlite.support.files import read_json_lines, write_json

ENDED = Row("nothing: the process ended", 1.0, 0.0)
AGAIN = 20  # so many cases run once more at the end


def shuffled(cases: Sequence[Case], checkpoint: Checkpoint) -> tuple[Case, ...]:
    """Return cases in the order in which they run on a checkpoint."""
    if reference.weights_of_layers(checkpoint.config) > LARGEST_IN_PAIRS:
        return tuple(cases)
    drawn = random.Random(0).sample(cases, len(cases))
    return (*drawn, *drawn[:AGAIN])


def check_noted(
    cases: Sequence[Case], device: str, checkpoint: Checkpoint, journal: Path, section: str
) -> Iterator[Report]:
    """Yield the reports of cases: from the journal if it has them, otherwise from a run, which it notes.

    Raises:
        ValueError: the journal has other cases.
    """
    known = read_journal(journal, section)
    if [each.name for each in known] != [case.name for case in cases[: len(known)]]:
        raise ValueError(f"{journal} has other cases, or another order: delete it, or name another journal")
    yield from known
    for report in check_all(started(cases[len(known) :], journal, section), device, checkpoint):
        note(journal, section, report.name, asdict(report))
        yield report


def read_journal(path: Path, section: str) -> list[Report]:
    """Return the reports of a section's cases, in the order of their runs."""
    found: list[Report] = []
    for line in read_json_lines(path):
        if line["section"] == section and line["report"] is None:
            found.append(Report(line["case"], (ENDED,)))
        elif line["section"] == section:
            found[-1] = Report(**{**line["report"], "rows": tuple(Row(**row) for row in line["report"]["rows"])})
    return found


def started(cases: Iterable[Case], journal: Path, section: str) -> Iterator[Case]:
    """Yield cases, each noted before it runs."""
    for case in cases:
        note(journal, section, case.name, None)
        yield case


def note(journal: Path, section: str, case: str, report: dict[str, Any] | None) -> None:
    """Add a line; nan and infinities are kept."""
    with journal.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"section": section, "case": case, "report": report}) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a folder of a trained BERT with its tokenizer.json")
    parser.add_argument("--journal", type=Path, required=True, metavar="FILE", help="the journal, which may exist")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the record")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--only", metavar="A,B", help="only cases with one of these in their names (default: all)")
    parser.add_argument("--shapes", default="base,large", metavar="A,B", help="random models (default: %(default)s)")
    args = parser.parse_args(argv)
    only, shapes = (tuple(filter(None, (text or "").split(","))) for text in (args.only, args.shapes))
    settings = ParitySettings(shapes=shapes, device=args.device, all=True, only=only)
    start = time.monotonic()
    with sections(Checkpoint.of(args.checkpoint), settings) as work:
        for name, section in work.items():
            plan = shuffled(section.cases, section.checkpoint)
            for report in check_noted(plan, args.device, section.checkpoint, args.journal, name):
                section.reports.append(report)
                if report.failed:
                    print(f"{name}\n{report}", flush=True)
        result = record(work, settings)
    print(claims_table(result))
    write_json(args.out, result)
    print(*verdict(result, time.monotonic() - start), sep="\n")
    return int(bool(differing(result)))


if __name__ == "__main__":
    raise SystemExit(main())
