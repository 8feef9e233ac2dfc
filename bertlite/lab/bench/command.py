"""The work of `bertlite bench`: run sections, print and record them, and compare them with an older record."""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bertlite.lab.bench.sections import Bench, sections
from bertlite.lab.timing import check_rounds, with_spread
from bertlite.records import environment, version_of, warn_untraceable, write_json, write_record

PEERS = ("onnx", "onnxruntime", "openvino", "nncf")
SLACK = 0.15  # of a ratio: medians of one machine differ by so much from run to run


def main(args: argparse.Namespace) -> int:
    known = sections(args.device)
    chosen = [name for name in known if any(part in name for part in args.only.split(","))]
    if not chosen:
        raise ValueError(f"no section matches {args.only!r}; have: {', '.join(known)}")
    check_rounds(args.rounds, name="--rounds")
    if not args.seconds > 0:
        raise ValueError(f"--seconds is {args.seconds}; a section needs more than 0")
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: this torch ({torch.__version__}) sees no CUDA device")
    where = environment(args.device)
    where["versions"] |= {name: version_of(name) for name in PEERS}
    record = open_record(args.json, where)
    if args.json:
        warn_untraceable(record)
    before = None if args.check is None else json.loads(Path(args.check).read_text(encoding="utf-8"))
    bench = Bench(args.rounds, args.device, tuple(args.engines.split(",")), args.seconds, args.keep)
    with bench.stack:
        for name in chosen:
            found = record["sections"][name] = known[name](bench)
            print_section(name, found)
            if args.json:
                write_json(args.json, record)
        if any("of_limit" in record["sections"][name] for name in chosen):
            record["ceilings"] = bench.ceilings
        record["missing"] = {**record.get("missing", {}), **bench.missing}
    for name, reason in bench.missing.items():
        print(f"missing: {name}: {reason}")
    if args.json:
        write_record(args.json, record)
        print(f"\nrecord: {args.json}")
    if args.plot:
        plot(record, args.plot)
        print(f"plot: {args.plot}")
    return 0 if before is None else report_worse(before, record, chosen)


def open_record(path: str | None, where: dict[str, Any]) -> dict[str, Any]:
    """Return the record to write; sections that are in the file stay, if they were measured in the same environment.

    Raises:
        ValueError: they were measured on another machine, with other versions or from another commit.
    """
    new = {"what": "bertlite bench", "environment": where, "sections": {}}
    if path is None or not Path(path).exists():
        return new
    old: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    there = old.get("environment", {})
    differing = [name for name in {**where, **there} if there.get(name) != where.get(name)]
    if differing:
        raise ValueError(
            f"{path} was measured in another environment, which differs in {', '.join(differing)}: write to another"
            " file, or delete it"
        )
    return old


def print_section(name: str, found: Mapping[str, Any]) -> None:
    """Print the times of a section, and whatever else was measured."""
    print(f"\n{name}: {found['what']}")
    width = max(map(len, found["seconds"]))
    for candidate, row in found["seconds"].items():
        low, median, high = (1e3 * row[which] for which in ("low", "median", "high"))
        reached = found.get("of_limit", {}).get(candidate)
        limit = "" if reached is None else f"   {reached['median']:.0%} of the limit"
        error = found.get("errors", {}).get(candidate)
        rounding = "" if error is None else f"   error {error:.1e}"
        peak = found.get("peak_bytes", {}).get(candidate)
        memory = "" if peak is None else f"   {peak / 2**20:.0f} MiB"
        print(f"  {candidate:<{width}} {median:9.2f} ms   ({low:.2f} to {high:.2f}){limit}{memory}{rounding}")
    for candidate, counts in found.get("demands", {}).items():
        print(f"  {candidate:<{width}} {', '.join(f'{count:g} {kind}' for kind, count in counts.items())}")
    for candidate in found.get("wrong", ()):
        print(f"  WRONG  {candidate}: error {found['errors'][candidate]:.1e}, so it is not timed")
    for ratio, value in found["ratios"].items():
        print(f"  {ratio:<{2 * width + 3}} {with_spread(value)}", flush=True)


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


def plot(record: Mapping[str, Any], path: str) -> None:
    """Draw how many times faster than transformers' sdpa in float32 each engine is, batch by batch."""
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
        engines = sorted(ratios, key=lambda engine: ratios[engine]["median"])
        medians = [ratios[engine]["median"] for engine in engines]
        spread = [
            [abs(ratios[engine][end] - ratios[engine]["median"]) for engine in engines] for end in ("low", "high")
        ]
        colours = ["C0" if engine.startswith("bertlite") else "0.6" for engine in engines]
        bars = ax.barh(engines, medians, xerr=spread, color=colours, error_kw={"elinewidth": 0.8})
        ax.bar_label(bars, fmt="%.2f", padding=4)
        ax.axvline(1, color="black", linewidth=0.8)
        ax.set(title=name.removeprefix("forward "), xlabel="times transformers sdpa float32")
        ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)
