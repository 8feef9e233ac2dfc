"""The work of `bertlite bench`: time the engines section by section, print and record what was found."""

import argparse
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bertlite.bench.engines import ENGINES
from bertlite.bench.sections import Bench, Section, sections
from bertlite.extras import import_optional
from bertlite.progress import Progress
from bertlite.records import environment, version_of, warn_untraceable, write_json
from bertlite.timing import check_rounds, with_spread

PEERS = ("onnx", "onnxruntime", "openvino", "nncf", "ctranslate2")
SECONDS = 60.0  # time limit of a section
PEERS_ALONE = ("only", "engines", "models", "threads", "seconds")  # arguments that are not used with RUN
RUNS_ALONE = ("shapes", "dtype", "backend")  # and without
FPMATH = "ONEDNN_DEFAULT_FPMATH_MODE"  # lets oneDNN compute float32 in bfloat16


def main(args: argparse.Namespace) -> int:
    """Measure the engines, or the runs that are named, and return the exit status."""
    check_rounds(args.rounds, name="--rounds")
    for name in PEERS_ALONE if args.runs else RUNS_ALONE:
        if getattr(args, name):
            how = "with RUN" if args.runs else "without RUN"
            raise ValueError(f"--{name} is not used {how}: leave it out, or see `bertlite bench --help`")
    check_device(args.device)
    if not args.runs:
        return measure_engines(args)
    if args.folder is None or ".png" in args.out:
        raise ValueError("with RUN the results and their figures are a folder: add --out FOLDER")
    from bertlite.bench import runs  # it needs the extra experiments

    return runs.main(args)


def check_device(device: str) -> None:
    """Refuse a CUDA device that is not there.

    Raises:
        ValueError: torch sees none.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this torch ({torch.__version__}) sees no CUDA device")


def measure_engines(args: argparse.Namespace) -> int:
    """Run sections, print, record and draw them."""
    known = sections(args.device, args.models or ("bert-base",), args.threads or (None,))
    chosen = select("section", args.only, list(known))
    picture = args.out.get(".png")
    if picture and not any(name.startswith("forward") for name in chosen):
        raise ValueError("the plot shows the forward sections, and --only chooses none: leave out --only or the .png")
    record = {"what": "bertlite bench", "environment": environment_of(args.device), "sections": {}}
    seconds = SECONDS if args.seconds is None else args.seconds
    bench = Bench(args.rounds, args.device, chosen_engines(args.engines), seconds, args.folder)
    run_sections({name: known[name] for name in chosen}, bench, record, args.record)
    if picture:
        plot(record, picture)
    for path in args.out.values():
        print(f"written: {path}")
    return 0


def environment_of(device: str) -> dict[str, Any]:
    """Return the environment of a record, with the versions of the peers."""
    found = environment(device)
    found["versions"] |= {name: version_of(name) for name in PEERS}
    return found


def chosen_engines(wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Return the parts of the names of the engines to time.

    Raises:
        ValueError: no engine matches, or the environment lets float32 be computed in lower precision.
    """
    require_float32(os.environ)
    select("engine", wanted, [f"{engine.name} {dtype}" for engine in ENGINES for dtype in engine.dtypes])
    return tuple(wanted or ("",))


def require_float32(variables: Mapping[str, str]) -> None:
    """Raise ValueError if the environment lets float32 be computed in lower precision."""
    mode = variables.get(FPMATH, "")
    if mode.upper() not in ("", "STRICT"):
        raise ValueError(f"{FPMATH} is {mode!r}, which lets float32 be computed in lower precision: unset it")


def select(kind: str, wanted: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Return the names that contain one of the wanted parts, or all if none is given.

    Raises:
        ValueError: no name contains one of them.
    """
    for part in wanted or ():
        if not any(part in name for name in known):
            raise ValueError(f"no {kind} matches {part!r}; have: {', '.join(known)}")
    return [name for name in known if not wanted or any(part in name for part in wanted)]


def section_lines(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that show the times of a section with their ratios, and the error of each engine."""
    yield f"\n{name}: {found['what']}"
    width = max(map(len, found["seconds"]), default=0)
    for candidate, row in found["seconds"].items():
        low, median, high = (1e3 * row[which] for which in ("low", "median", "high"))
        error = found.get("errors", {}).get(candidate)
        rounding = "" if error is None else f"   error {error:.1e}"
        yield f"  {candidate:<{width}} {median:9.2f} ms   ({low:.2f} to {high:.2f}){rounding}"
    for candidate in found.get("wrong", ()):
        yield f"  WRONG  {candidate}: error {found['errors'][candidate]:.1e}, so it is not timed"
    for ratio, value in found["ratios"].items():
        yield f"  {ratio:<{2 * width + 3}} {with_spread(value)}"


def run_sections(
    chosen: Mapping[str, Section],
    bench: Bench,
    record: dict[str, Any],
    path: Path | None,
    lines: Callable[[str, Mapping[str, Any]], Iterator[str]] = section_lines,
) -> None:
    """Run sections, print the lines of each, and write the record after each."""
    if path:
        warn_untraceable(record)
    with bench.stack, Progress(len(chosen) * bench.rounds, "rounds", what="bench") as progress:
        bench.after_round = progress.advance
        for i, (name, section) in enumerate(chosen.items(), start=1):
            record["sections"][name] = section(bench)
            record["missing"] = {**record.get("missing", {}), **bench.missing}
            progress.advance(i * bench.rounds - progress.done)  # with the rounds that the time limit left out
            progress.print("\n".join(lines(name, record["sections"][name])))
            if path:
                write_json(path, record)
    for name, reason in bench.missing.items():
        print(f"missing: {name}: {reason}")


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Draw how many times faster than transformers' sdpa in float32 each engine is, batch by batch.

    Batches of the first model and number of threads of the record are shown, two beside each other.
    """
    import_optional("matplotlib", "--out FILE.png", "plot").use("Agg")
    from matplotlib import pyplot as plt

    found = {name: each for name, each in record["sections"].items() if name.startswith("forward")}
    first = next(iter(found.values()))
    found = {
        name: each
        for name, each in found.items()
        if all(each.get(key) == first.get(key) for key in ("model", "threads"))
    }
    lines = math.ceil(len(found) / 2)
    fig, axes = plt.subplots(lines, 2, figsize=(10, 3.5 * lines), squeeze=False)
    for ax in axes.flat[len(found) :]:
        ax.remove()
    for ax, (name, each) in zip(axes.flat, found.items(), strict=False):
        ratios = {
            pair.partition(" / ")[2]: value
            for pair, value in each["ratios"].items()
            if pair.startswith("transformers")
        }
        engines = sorted(ratios, key=lambda engine: ratios[engine]["median"])
        medians = [ratios[engine]["median"] for engine in engines]
        spread = [
            [abs(ratios[engine][end] - ratios[engine]["median"]) for engine in engines] for end in ("low", "high")
        ]
        colours = ["C0" if engine.startswith("bertlite") else "0.6" for engine in engines]
        bars = ax.barh(engines, medians, xerr=spread, color=colours, error_kw={"elinewidth": 0.8})
        ax.bar_label(bars, fmt="%.2f", padding=4)
        ax.axvline(1, color="black", linewidth=0.8)
        ax.set(title=each.get("work", name.removeprefix("forward ")), xlabel="times transformers sdpa float32")
        ax.margins(x=0.15)  # room for the numbers
        ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)
