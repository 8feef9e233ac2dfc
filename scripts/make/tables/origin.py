"""The origin of records: their commits and dates, versions that differ on a page, and code that has changed since."""

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch

from bertlite.support.environment import commit_of, run_git
from scripts.make.tables.read import Record

ON_CPU = ("native", "clients", "checks.py", "model.py", "optimize.py", "quick.py")
KERNELS = ("bertlite/runtime", *(f"bertlite/inference/{name}" for name in ON_CPU))
MODEL = ("bertlite/stack", "bertlite/models", "bertlite/checkpoint", "bertlite/config.py")
PRUNING = ("bertlite/pruning", "bertlite/experiments")
MEASURES = {  # {records: the code that they measure}; the first pattern that fits counts
    "parity-cuda": (*MODEL, "bertlite/parity", "bertlite/hf"),
    "*-cuda*": (*MODEL, "bertlite/inference"),
    "parity-*": (*MODEL, *KERNELS, "bertlite/parity"),
    "families-*": (*MODEL, *KERNELS, "bertlite/parity"),
    "clients-*": (*MODEL, "bertlite/hf"),
    "pruning/pareto": (*PRUNING, *KERNELS),
    "pruning/*": PRUNING,
    "one_head/*": ("bertlite/causal.py", "bertlite/pruning"),
    "startup": ("bertlite/__init__.py", "bertlite/support", *MODEL),
    "training": MODEL,
    "checkpointing": MODEL,
    "embed": ("bertlite/embed", *KERNELS),
    "fuzz": ("bertlite/checkpoint", "bertlite/tokenizer", "bertlite/config.py"),
    "runtime": ("bertlite/runtime", "bertlite/shipping/pack.py"),
    "soak": ("bertlite/runtime",),
    "*": KERNELS,  # speed, accuracy and faults of the kernels
}
WHY = {  # {records: why their versions are older than a page's other tables'}
    "speed-under*": "These versions are older, because optimum-onnx needs transformers 4.",
    "embed": "transformers is older, because optimum-intel needs one below 5.6.",
}


def commits(records: Mapping[str, Record], page: str = "") -> str:
    """Write the commits and dates of records, and how many commits made a record's runs, if several did.

    Args:
        page: a page that has the dates already; they are read from it if git lacks the commit.
    """
    names: dict[str, list[str]] = {}
    for name, record in records.items():
        if state := commit_of(record):
            count = len(record.get("commits", ()))
            dated = f"{state['commit'][:7]}{date_of(state['commit'], page)}"
            dated += f", the last of {count}" if count > 1 else ""
            names.setdefault(dated, []).append(name.rpartition("/")[2])
    if len(names) < 2:
        return "".join(f"Commit {each}." for each in names)
    parts = (f"{dated} ({', '.join(own)})" for dated, own in names.items())
    return f"Commits: {'; '.join(parts)}."


def date_of(commit: str, page: str) -> str:
    """Write the day of a commit, after a comma; nothing if neither git nor the page knows it."""
    try:
        return f", {run_git('show', '-s', '--format=%cs', commit).strip()}"
    except (OSError, subprocess.CalledProcessError):
        known = re.search(rf"{commit[:7]}, \d{{4}}-\d\d-\d\d", page)
        return known[0][7:] if known else ""


def version_of(record: Record) -> tuple[int, ...]:
    return tuple(int(part) for part in record["environment"]["versions"]["transformers"].split("."))


def newest_version(tables: Iterable[Mapping[str, Record]]) -> tuple[int, ...]:
    """Return the newest version of transformers among the records of a page's tables."""
    return max((version_of(record) for records in tables for record in records.values()), default=())


def older(records: Mapping[str, Record], newest: tuple[int, ...]) -> str:
    """Write why records have an older transformers than the newest on their page; nothing if they have not."""
    reasons: dict[str, None] = {}
    for name, record in records.items():
        if (version := version_of(record)) != newest:
            again = f"Not measured again since transformers {'.'.join(map(str, version))}."
            given = [why for pattern, why in WHY.items() if fnmatch(name, pattern)]
            reasons[given[0] if given else again] = None
    return " ".join(reasons)


def stale(records: Mapping[str, Record]) -> Iterator[str]:
    """Yield a line for each record whose code has changed since its commit, or whose commit git lacks."""
    for name, record in sorted(records.items()):
        paths = next(paths for pattern, paths in MEASURES.items() if fnmatch(name, pattern))
        state = commit_of(record)
        commit = state["commit"] if state else "no commit"
        try:
            changes = run_git("diff", "--shortstat", commit, "HEAD", "--", *paths).strip()
        except (OSError, subprocess.CalledProcessError):
            changes = "git lacks it"
        if changes:
            yield f"stale: {name}, of {commit[:7]}{date_of(commit, '')}: {changes}, in {', '.join(paths)}"
