"""`bertlite bench`: which sections, how the answer is told, and whether it is worse than it was."""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bertlite.lab.bench.sections import Bench, sections
from bertlite.records import environment, version_of, write_json

PEERS = ("onnx", "onnxruntime", "openvino", "nncf")
SLACK = 0.15  # of a ratio: medians of one machine differ by so much from run to run


def main(args: argparse.Namespace) -> int:
    known = sections(args.device)
    chosen = [name for name in known if any(part in name for part in args.only.split(","))]
    if not chosen:
        raise ValueError(f"no section matches {args.only!r}; have: {', '.join(known)}")
    if args.rounds < 2:
        raise ValueError(f"--rounds is {args.rounds}; a spread needs 2 or more")
    if not args.seconds > 0:
        raise ValueError(f"--seconds is {args.seconds}; a section needs more than 0")
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: this torch ({torch.__version__}) sees no CUDA device")
    where = environment(args.device)
    where["versions"] |= {name: version_of(name) for name in PEERS}
    record = begun(args.json, where)
    before = None if args.check is None else json.loads(Path(args.check).read_text(encoding="utf-8"))
    bench = Bench(args.rounds, args.device, tuple(args.engines.split(",")), args.seconds, args.keep)
    with bench.stack:
        for name in chosen:
            found = record["sections"][name] = known[name](bench)
            tell(name, found)
            if args.json:
                write_json(args.json, record)
        if "floor" in found or any("floor" in record["sections"][name] for name in chosen):
            record["ceilings"] = bench.ceilings
        record["missing"] = {**record.get("missing", {}), **bench.missing}
    for name, reason in bench.missing.items():
        print(f"missing: {name}: {reason}")
    if args.json:
        write_json(args.json, record)
        print(f"\nrecord: {args.json}")
    if args.plot:
        plot(record, args.plot)
        print(f"plot: {args.plot}")
    return 0 if before is None else judge(before, record, chosen)


def begun(path: str | None, where: dict[str, Any]) -> dict[str, Any]:
    """The record to write: sections that are in the file already stay, if they were measured in the same place.

    Raises:
        ValueError: they were measured elsewhere.
    """
    new = {"what": "bertlite bench", "environment": where, "sections": {}}
    if path is None or not Path(path).exists():
        return new
    old: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    if old.get("environment") != where:
        raise ValueError(f"{path} was measured on another machine or with other versions: write to another file")
    return old


def tell(name: str, found: Mapping[str, Any]) -> None:
    print(f"\n{name}: {found['what']}")
    width = max(map(len, found["seconds"]))
    for candidate, row in found["seconds"].items():
        low, median, high = (1e3 * row[which] for which in ("low", "median", "high"))
        reached = found.get("floor", {}).get(candidate)
        limit = "" if reached is None else f"   {reached:.0%} of the limit"
        error = found.get("errors", {}).get(candidate)
        off = "" if error is None else f"   error {error:.1e}"
        peak = found.get("peak_bytes", {}).get(candidate)
        memory = "" if peak is None else f"   {peak / 2**20:.0f} MiB"
        print(f"  {candidate:<{width}} {median:9.2f} ms   ({low:.2f} to {high:.2f}){limit}{memory}{off}")
    for candidate, counts in found.get("asked", {}).items():
        print(f"  {candidate:<{width}} {', '.join(f'{count:g} {what}' for what, count in counts.items())}")
    for candidate in found.get("wrong", ()):
        print(f"  WRONG  {candidate}: error {found['errors'][candidate]:.1e}, so it is not timed")
    for ratio, value in found["ratios"].items():
        print(f"  {ratio:<{2 * width + 3}} {value:.2f}", flush=True)


def judge(before: Mapping[str, Any], now: Mapping[str, Any], chosen: list[str]) -> int:
    """0 if no ratio of ours is worse than in the record before by more than SLACK, else 1.

    Raises:
        ValueError: the two have no ratio in common.
    """
    pairs = list(common(before, now, chosen))
    if not pairs:
        raise ValueError("the record to check against has no ratio of these sections")
    worse = [(name, old, new) for name, old, new in pairs if new < old * (1 - SLACK)]
    for name, old, new in worse:
        print(f"WORSE  {name}: {new:.2f}, was {old:.2f}")
    print(f"{len(pairs)} ratios compared, {len(worse)} worse by more than {SLACK:.0%}")
    return int(bool(worse))


def common(before: Mapping[str, Any], now: Mapping[str, Any], chosen: list[str]) -> Iterator[tuple[str, float, float]]:
    """Every ratio that both records have and that says how good we are, turned so that more is better."""
    for section in chosen:
        then = before["sections"].get(section, {}).get("ratios", {})
        for name, new in now["sections"][section]["ratios"].items():
            over, _, under = name.partition(" / ")
            if name in then and under.startswith("bertlite"):
                yield f"{section}: {name}", then[name], new
            elif name in then and over.startswith("bertlite"):
                yield f"{section}: {name}, inverted", 1 / then[name], 1 / new


def plot(record: Mapping[str, Any], path: str) -> None:
    """How many times faster than transformers' sdpa in float32 each engine is, work by work."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError("--plot draws with matplotlib: pip install 'bertlite[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = {name: each for name, each in record["sections"].items() if name.startswith("forward")}
    if not found:
        raise ValueError("--plot draws the forward sections, and none was run; leave out --only")
    fig, axes = plt.subplots(1, len(found), figsize=(4.5 * len(found), 6), squeeze=False)
    for ax, (name, each) in zip(axes[0], found.items(), strict=True):
        ratios = {
            pair.partition(" / ")[2]: value
            for pair, value in each["ratios"].items()
            if pair.startswith("transformers")
        }
        engines = sorted(ratios, key=lambda engine: ratios[engine])
        colours = ["C0" if engine.startswith("bertlite") else "0.6" for engine in engines]
        bars = ax.barh(engines, [ratios[engine] for engine in engines], color=colours)
        ax.bar_label(bars, fmt="%.2f", padding=2)
        ax.axvline(1, color="black", linewidth=0.8)
        ax.set(title=name.removeprefix("forward "), xlabel="times transformers sdpa float32")
        ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)
