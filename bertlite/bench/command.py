"""The work of `bertlite bench`: run sections, print and record them, and compare them with an older record."""

import argparse
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bertlite.bench.engines import ENGINES
from bertlite.bench.sections import MODELS, Bench, Section, sections
from bertlite.extras import import_optional
from bertlite.progress import Progress
from bertlite.records import environment, version_of, warn_untraceable, write_json, write_record
from bertlite.timing import SETTLE, check_rounds, with_spread

PEERS = ("onnx", "onnxruntime", "openvino", "nncf", "ctranslate2")
SLACK = 0.15  # of a ratio: the difference of medians between runs on one machine


SECONDS = 60.0  # time limit of a section
PEERS_ALONE = (
    "only",
    "engines",
    "models",
    "threads",
    "resume",
    "seconds",
    "check",
)  # arguments that are not used with RUN
RUNS_ALONE = ("shapes", "dtype", "backend", "table")  # and without
FPMATH = "ONEDNN_DEFAULT_FPMATH_MODE"  # lets oneDNN compute float32 in bfloat16


def main(args: argparse.Namespace) -> int:
    """Measure the peers, or the runs that are named, and return the exit status."""
    check_rounds(args.rounds, name="--rounds")
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: this torch ({torch.__version__}) sees no CUDA device")
    for name in PEERS_ALONE if args.runs else RUNS_ALONE:
        if getattr(args, name):
            how = "with RUN" if args.runs else "without RUN"
            raise ValueError(f"--{name} is not used {how}: leave it out, or see `bertlite bench --help`")
    if not args.runs:
        return measure_peers(args)
    if args.folder is None or ".png" in args.out:
        raise ValueError("with RUN the results and their figures are a folder: add --out FOLDER")
    from bertlite.bench import runs  # it needs the extra experiments

    return runs.main(args)


def measure_peers(args: argparse.Namespace) -> int:
    """Run sections, print and record them, and compare them with an older record."""
    require_float32(os.environ)
    models, threads = args.models or ("bert-base",), args.threads or (None,)
    if unknown := [name for name in models if name not in MODELS]:
        raise ValueError(f"there is no model {unknown[0]!r}; have: {', '.join(MODELS)}")
    known = sections(args.device, models, threads)
    chosen = select("section", args.only, list(known))
    select("engine", args.engines, [f"{engine.name} {dtype}" for engine in ENGINES for dtype in engine.dtypes])
    seconds = SECONDS if args.seconds is None else args.seconds
    if not seconds > 0:
        raise ValueError(f"--seconds is {seconds}; a section needs more than 0")
    where = environment(args.device)
    where["versions"] |= {name: version_of(name) for name in PEERS}
    record = open_record(args.record, where)
    if args.record:
        warn_untraceable(record)
    if args.resume and not args.record:
        raise ValueError("--resume keeps sections of a record: add --out FILE.json")
    settings = {"rounds": args.rounds, "seconds": seconds, "engines": list(args.engines or ())}
    there = [name for name in chosen if record["sections"].get(name, {}).get("settings") == settings]
    if args.resume:
        for name in there:
            print(f"kept: {name}, which {args.record} holds")
        chosen = [name for name in chosen if name not in there]
    before = None if args.check is None else json.loads(Path(args.check).read_text(encoding="utf-8"))
    with Progress(len(chosen) * args.rounds, "rounds", what="bench") as progress:
        engines = args.engines or ("",)
        bench = Bench(args.rounds, args.device, engines, seconds, args.folder, after_round=progress.advance)
        run_sections({name: known[name] for name in chosen}, bench, record, args.record, progress, settings)
    for name, reason in bench.missing.items():
        print(f"missing: {name}: {reason}")
    if args.record:
        write_record(args.record, record)
    if picture := args.out.get(".png"):
        plot(record, picture)
    for path in args.out.values():
        print(f"written: {path}")
    return 0 if before is None else report_worse(before, record, chosen)


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


def run_sections(
    chosen: Mapping[str, Section],
    bench: Bench,
    record: dict[str, Any],
    path: Path | None,
    progress: Progress,
    settings: Mapping[str, Any],
) -> None:
    """Run sections, print each, and write the record after each, so that a run that is killed can be resumed."""
    with bench.stack:
        for i, (name, section) in enumerate(chosen.items(), start=1):
            found = section(bench) | {"settings": dict(settings)}
            record["sections"][name] = found
            record["missing"] = {**record.get("missing", {}), **bench.missing}
            progress.advance(i * bench.rounds - progress.done)  # with the rounds that the time limit left out
            progress.print("\n".join(section_lines(name, found)))
            if path:
                write_json(path, record)


def open_record(path: Path | None, where: dict[str, Any]) -> dict[str, Any]:
    """Return the record to write; sections that are in the file stay, if they were measured in the same environment.

    Raises:
        ValueError: they were measured on another machine, with other versions or from another commit.
    """
    new = {"what": "bertlite bench", "environment": where, "sections": {}}
    if path is None or not path.exists():
        return new
    old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    there = old.get("environment", {})
    differing = [name for name in {**where, **there} if there.get(name) != where.get(name)]
    if differing:
        raise ValueError(
            f"{path} was measured in another environment, which differs in {', '.join(differing)}: write to another"
            " file, or delete it"
        )
    return old


def section_lines(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that show the times of a section, and whatever else was measured."""
    yield f"\n{name}: {found['what']}"
    width = max(map(len, found["seconds"]), default=0)
    for candidate, row in found["seconds"].items():
        low, median, high = (1e3 * row[which] for which in ("low", "median", "high"))
        reached = found.get("of_limit", {}).get(candidate)
        limit = "" if reached is None else f"   {reached['median']:.0%} of the limit"
        error = found.get("errors", {}).get(candidate)
        rounding = "" if error is None else f"   error {error:.1e}"
        peak = found.get("peak_bytes", {}).get(candidate)
        memory = "" if peak is None else f"   {peak / 2**20:.0f} MiB"
        yield f"  {candidate:<{width}} {median:9.2f} ms   ({low:.2f} to {high:.2f}){limit}{memory}{rounding}"
    for candidate, counts in found.get("demands", {}).items():
        yield f"  {candidate:<{width}} {', '.join(f'{count:g} {kind}' for kind, count in counts.items())}"
    for dtype, ceiling in found.get("ceilings", {}).items():
        if isinstance(ceiling, Mapping):
            yield f"  the limit in {dtype}: {ceiling['median'] / 1e9:.0f} GFLOP/s, by {ceiling['library']}"
    for candidate, spin in found.get("spins", {}).items():
        if spin > SETTLE:
            yield f"  {candidate:<{width}} its threads spin for {1e3 * spin:.0f} ms after a run; the next one waits"
    for candidate in found.get("wrong", ()):
        yield f"  WRONG  {candidate}: error {found['errors'][candidate]:.1e}, so it is not timed"
    for ratio, value in found["ratios"].items():
        yield f"  {ratio:<{2 * width + 3}} {with_spread(value)}"


def report_worse(before: Mapping[str, Any], now: Mapping[str, Any], chosen: list[str]) -> int:
    """Print the ratios of bertlite that are worse than in an older record by more than SLACK.

    Returns:
        The exit status: 1 if there is such a ratio, else 0.

    Raises:
        ValueError: the two records have no ratio in common, or the older one has ratios without spread.
    """
    pairs = list(common_ratios(before, now, chosen))
    if not pairs:
        raise ValueError("the record to check against has no ratio of these sections")
    worse = [(name, old, new) for name, old, new in pairs if new < old * (1 - SLACK)]
    for name, old, new in worse:
        print(f"WORSE  {name}: {new:.2f}, was {old:.2f}")
    print(f"{len(pairs)} ratios compared, {len(worse)} worse by more than {SLACK:.0%}")
    return int(bool(worse))


def common_ratios(
    before: Mapping[str, Any], now: Mapping[str, Any], chosen: list[str]
) -> Iterator[tuple[str, float, float]]:
    """Yield the medians of every ratio with bertlite that both records have, inverted if less is better.

    Raises:
        ValueError: the older record has ratios without spread.
    """
    for section in chosen:
        then = before["sections"].get(section, {}).get("ratios", {})
        for name, ratio in now["sections"][section]["ratios"].items():
            over, _, under = name.partition(" / ")
            if name not in then or not (under.startswith("bertlite") or over.startswith("bertlite")):
                continue
            if not isinstance(then[name], Mapping):
                raise ValueError("the record to check against is too old: its ratios have no spread; make it again")
            old, new = then[name]["median"], ratio["median"]
            if under.startswith("bertlite"):
                yield f"{section}: {name}", old, new
            else:
                yield f"{section}: {name}, inverted", 1 / old, 1 / new


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Draw how many times faster than transformers' sdpa in float32 each engine is, batch by batch.

    Batches of the first model and number of threads of the record are shown, two beside each other.
    """
    import_optional("matplotlib", "--out FILE.png", "plot").use("Agg")
    from matplotlib import pyplot as plt

    found = {name: each for name, each in record["sections"].items() if name.startswith("forward")}
    if not found:
        raise ValueError("the plot shows the forward sections, and none was run; leave out --only")
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
