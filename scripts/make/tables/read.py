"""Records, and the parts that all tables share: rows, spreads, the machine."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertlite.timing import with_spread

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "scripts" / "results"
SPREAD = "Medians, with quartiles in brackets."


class OldRecordError(Exception):
    """A record that lacks what a table shows: an earlier version of its script wrote it, or it is of a part."""


def records(pattern: str) -> list[dict[str, Any]]:
    """Read the records whose file name matches, newest transformers first."""
    paths = sorted(RESULTS.glob(pattern), reverse=True)
    if not paths:
        sys.exit(f"there is no {pattern} in {RESULTS}")
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def parity_records(pattern: str) -> list[dict[str, Any]]:
    """Read records of `bertlite parity`.

    Raises:
        OldRecordError: one is of the quick choice, or of the cases of some names.
    """
    found = records(pattern)
    for record in found:
        if record.get("choice", "all") != "all" or record.get("only"):
            raise OldRecordError(f"a record that matches {pattern} is of some cases, not of `bertlite parity --all`")
    return found


def spread(part: Mapping[str, Any], name: str, form: str = ".2f") -> str:
    """Write a ratio, or another quantity of a record, with its quartiles.

    Raises:
        OldRecordError: it has none.
    """
    found = part.get(name)
    if not isinstance(found, Mapping) or not {"low", "median", "high"} <= found.keys():
        raise OldRecordError(f"{name} has no spread")
    return with_spread(found, form)


def milliseconds(seconds: Mapping[str, float], form: str = ".0f") -> str:
    """Write a time with its quartiles in milliseconds."""
    return with_spread({end: 1e3 * seconds[end] for end in ("low", "median", "high")}, form) + " ms"


def rows(head: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    """Write a Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def measured_on(record: dict[str, Any], name_torch: bool = True) -> str:
    """Name the machine and the versions of a record."""
    where = record["environment"]
    threads = "1 thread" if where["threads"] == 1 else f"{where['threads']} threads"
    gpu = f"{where['gpu']}, driver {where['driver']}, " if "gpu" in where else ""
    torch = f"torch {where['versions']['torch']}, " if name_torch else ""
    limits = "".join(f"{name}={value}, " for name, value in where.get("limits", {}).items())
    return f"{gpu}{where['cpu']}, {limits}{threads}, {torch}Python {where['python']}"
