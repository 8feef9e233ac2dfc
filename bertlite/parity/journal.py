"""The journal of `bertlite parity`: the start and the end of each case, so that a case that ends the process is known.

A line before a case has no report, a line after it has one.  Given the same journal again, the command continues after
the last case that started.  A case that started and has no report counts as different.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bertlite.parity.cases import Case
from bertlite.parity.check import check_all
from bertlite.parity.compare import Report, Row
from bertlite.support.files import read_json_lines

ENDED = Row("nothing: the process ended", 1.0, 0.0)


def check_noted(
    cases: Sequence[Case], device: str, checkpoint: str | Path, journal: Path | None, section: str
) -> Iterator[Report]:
    """Yield the reports of cases: from the journal if it has them, otherwise from a run, which it notes.

    Raises:
        ValueError: the journal has other cases.
    """
    known = [] if journal is None else read_journal(journal, section)
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


def started(cases: Iterable[Case], journal: Path | None, section: str) -> Iterator[Case]:
    """Yield cases, each noted before it runs."""
    for case in cases:
        note(journal, section, case.name, None)
        yield case


def note(journal: Path | None, section: str, case: str, report: dict[str, Any] | None) -> None:
    """Add a line; nan and infinities are kept."""
    if journal is not None:
        with journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"section": section, "case": case, "report": report}) + "\n")
