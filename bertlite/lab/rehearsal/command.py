"""Rehearse the forward paths: run them on a pretended GPU, print a table and one verdict, write a record."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path as File
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from bertlite.lab.rehearsal.device import Notes, is_on, line_of_error, pretended_device
from bertlite.lab.rehearsal.paths import NOT_REHEARSED, Path, paths
from bertlite.progress import Progress
from bertlite.records import environment, write_record

OK, MIX_UP, WAITS, FAILED, SKIPPED = "ok", "mix-up", "too many waits", "failed", "not rehearsed"
NO_PROOF = "A rehearsal on tensors that no GPU holds: it is no proof that a GPU computes them."


@dataclass(frozen=True)
class Result:
    """What the rehearsal of one path found."""

    path: str
    verdict: str
    waits: int = 0
    allowed: int = 0
    lines: tuple[str, ...] = ()  # of the waits and the mix-ups, or where it failed
    reason: str = ""

    @property
    def is_fault(self) -> bool:
        return self.verdict not in (OK, SKIPPED)


def rehearse(path: Path) -> Result:
    """Run one path on the pretended GPU."""
    reason = path.reason_missing()
    if reason:
        return Result(path.name, SKIPPED, allowed=path.waits, reason=reason)
    with pretended_device() as device, warnings.catch_warnings(action="ignore"):
        try:
            out = path.run(device)
        except Exception as error:
            return Result(path.name, FAILED, reason=f"{type(error).__name__}: {error}", lines=(line_of_error(error),))
        return judged(path, device.notes, left_on_cpu(out))


def judged(path: Path, notes: Notes, on_cpu: int) -> Result:
    """Compare what was noted with what is allowed."""
    reason = f"{on_cpu} of its outputs are on the CPU" if on_cpu else ""
    verdict = OK
    if notes.mix_ups or on_cpu:
        verdict = MIX_UP
    elif len(notes.waits) > path.waits:
        verdict = WAITS
    lines = tuple(map(str, (*notes.mix_ups, *notes.waits)))
    return Result(path.name, verdict, len(notes.waits), path.waits, lines, reason)


def left_on_cpu(out: Any) -> int:
    """Count the tensors of an output that are not on the GPU."""
    return sum(is_on(x, "cpu") for x in tree_flatten(out)[0])


def main(only: str = "", out: str | File | None = None) -> int:
    """Rehearse every path whose name has one of these parts in it, "A,B", and return the exit status.

    Raises:
        ValueError: no path has such a name.
    """
    chosen = [path for path in paths() if any(part in path.name for part in only.split(","))]
    if not chosen:
        raise ValueError(f"no path matches {only!r}; paths have names such as {paths()[0].name!r}")
    print(f"{NO_PROOF}\ntorch {torch.__version__}; {len(chosen)} paths\n")
    print(f"{'verdict':<14}  {'waits':>5} {'allowed':>7}  path")
    results = []
    with Progress(len(chosen), "paths", what="rehearsal") as progress:
        for path in chosen:
            results.append(rehearse(path))
            print(row(results[-1]), end="", flush=True)
            progress.advance()
    print(*(f"not rehearsed: {what}: {why}" for what, why in not_rehearsed(results)), sep="\n")
    if out is not None:
        write_record(out, record(results))
        print(f"\nrecord: {out}")
    print(f"\n{verdict_of(results)}")
    return int(any(result.is_fault for result in results))


def row(result: Result) -> str:
    """Return the row of a path, with its lines below it; empty if it was not rehearsed."""
    if result.verdict == SKIPPED:
        return ""
    lines = [f"{result.verdict:<14}  {result.waits:>5} {result.allowed:>7}  {result.path}"]
    lines += [f"{'':<32}{line}" for line in dict.fromkeys((result.reason, *result.lines)) if line]
    return "\n".join(lines) + "\n"


def not_rehearsed(results: Iterable[Result]) -> list[tuple[str, str]]:
    """Return what was left out, with the reason."""
    skipped = [(result.path, result.reason) for result in results if result.verdict == SKIPPED]
    return [*skipped, *NOT_REHEARSED.items()]


def verdict_of(results: Sequence[Result]) -> str:
    """Return the verdict on all paths in a sentence."""
    count = {verdict: sum(result.verdict == verdict for result in results) for verdict in (OK, SKIPPED)}
    faults = sum(result.is_fault for result in results)
    counted = f"{count[OK]} paths pass, {faults} do not, {count[SKIPPED]} were not rehearsed"
    return f"rehearsal: {'FAILED' if faults else 'passed' if count[OK] else 'nothing was rehearsed'}; {counted}"


def record(results: Sequence[Result]) -> dict[str, Any]:
    """Return the record of a rehearsal, which says that it is one."""
    return {
        "what": "a rehearsal: python -m scripts.measure.gpu_checks --rehearse",
        "rehearsal": NO_PROOF,
        "environment": {**environment("cpu"), "device": "rehearsal of cuda on the CPU"},
        "verdict": verdict_of(results),
        "paths": [asdict(result) for result in results],
        "not_rehearsed": dict(not_rehearsed(results)),
    }
