"""Records, and the parts that all tables share: rows, spreads, the machine."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertlite.support import timing
from bertlite.support.progress import count_of

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "scripts" / "results"
ROUNDED = "≈: a quartile is more than 10 % away."
SPREAD = "Medians; quartiles in brackets if one is more than 10 % away."

Record = dict[str, Any]
used: dict[str, Record] = {}  # {name: record} of all that were read since this was last cleared


def records(pattern: str) -> list[Record]:
    """Read the records whose file name matches, newest transformers first."""
    paths = sorted(RESULTS.glob(pattern), reverse=True)
    if not paths:
        sys.exit(f"there is no {pattern} in {RESULTS}")
    found = {path.relative_to(RESULTS).with_suffix("").as_posix(): path.read_text(encoding="utf-8") for path in paths}
    used.update(made := {name: json.loads(text) for name, text in found.items()})
    return list(made.values())


def record(name: str) -> Record:
    """Read a record by its name, such as "speed"."""
    return records(f"{name}.json")[0]


def with_spread(found: Mapping[str, float], form: str = ".2f") -> str:
    """Write a median, with its quartiles if one is more than 10 % away."""
    wide = max(found["high"] - found["median"], found["median"] - found["low"]) > 0.1 * found["median"]
    return timing.with_spread(found, form) if wide else f"{found['median']:{form}}"


def cell(found: Mapping[str, Any], name: str, form: str = ".2f") -> str:
    """Write a ratio, or another quantity of a record; nothing if the record lacks it."""
    return with_spread(found[name], form) if name in found else ""


def rounded(found: Mapping[str, Any], name: str) -> str:
    """Write the median of a ratio, after ≈ if a quartile is more than 10 % away; nothing if the record lacks it."""
    median, wide, _ = cell(found, name).partition(" (")
    return f"≈ {median}" if wide else median


def milliseconds(seconds: Mapping[str, float], form: str = ".0f") -> str:
    """Write a time in milliseconds."""
    return with_spread({end: 1e3 * seconds[end] for end in ("low", "median", "high")}, form) + " ms"


def table(head: Sequence[str], body: Sequence[Sequence[Any]], note: str = "") -> str:
    """Write a Markdown table, and a note below it: a dash in an empty cell, and no column of empty cells."""
    used = [i for i in range(len(head)) if any(row[i] != "" for row in body)]
    cells = [[str(row[i]) or "–" for i in used] for row in body]
    lines = [[head[i] for i in used], ["---"] * len(used), *cells]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{rows}\n\n{note}" if note else rows


def without_constant(head: Sequence[str], body: Sequence[Sequence[Any]], column: str) -> tuple[Any, Any, str]:
    """Return a table without a column that says the same in every row, and the sentence; else the table and ""."""
    at, values = head.index(column), {row[head.index(column)] for row in body}
    if len(values) > 1:
        return head, body, ""
    return (
        [*head[:at], *head[at + 1 :]],
        [[*row[:at], *row[at + 1 :]] for row in body],
        f"{values.pop()} {column}. ".capitalize(),
    )


def cpus(records: Sequence[Record]) -> str:
    return " and ".join(dict.fromkeys(each["environment"]["cpu"] for each in records))


def measured_on(record: Record, *others: Record, name_torch: bool = True, name_threads: bool = True) -> str:
    """Name the machine and the versions of a record, and the machines of others that have the same versions."""
    where = record["environment"]
    threads = f"{count_of(where['threads'], 'thread')}, " if name_threads else ""
    gpu = f"{where['gpu']}, driver {where['driver']}, " if "gpu" in where else ""
    torch = f"torch {where['versions']['torch']}, " if name_torch else ""
    limits = "".join(f"{name}={value}, " for name, value in where.get("limits", {}).items())
    return f"{gpu}{cpus([record, *others])}, {limits}{threads}{torch}Python {where['python']}"
