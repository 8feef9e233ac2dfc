"""Make our own records of speed: `bertlite bench`, pruned models, starting, and training.

    python -m scripts.measure.speed --only forward,pruned --models bert-base,MiniLM --out speed.json,speed.png,exported
    python -m scripts.measure.speed --only "forward 32 x,forward 1 x" --models bge-m3,all-mpnet --out speed.json
    python -m scripts.measure.speed --only training --out speed.json
    python -m scripts.measure.speed --only import,loading,cold --rounds 7 --out scripts/results/startup.json

To the sections of `bertlite bench` come models without half of their heads and neurons, training steps, import,
loading and cold start.  The record is written after each section.  Other sections in the file stay, if they were
measured in the same environment.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertlite.bench.command import new_record, run_sections
from bertlite.cli.commands import add_peers
from bertlite.cli.parts import FOLDER, RECORD, add_device, count, paths
from bertlite.timing import check_rounds
from scripts.measure.speed.sections import sections

PICTURE = ".png"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    check_rounds(args.rounds, name="--rounds")
    args.record, args.folder = args.out.get(RECORD), args.out.get(FOLDER)
    record = open_record(args.record, new_record(args.device))
    run_sections(args, sections(args.device), record)
    if PICTURE in args.out:
        plot(record, args.out[PICTURE])
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_peers(parser)
    parser.add_argument("--rounds", type=count, default=15, help="runs of each candidate (default: %(default)s)")
    parser.add_argument(
        "--out",
        type=paths((RECORD, PICTURE, FOLDER)),
        default={},
        metavar="PATH[,PATH]",
        help="the record, the picture of its forward passes, a folder for exported models, which is used again",
    )
    add_device(parser)
    return parser.parse_args(argv)


def open_record(path: Path | None, new: dict[str, Any]) -> dict[str, Any]:
    """Return the record to write; sections that are in the file stay, if they were measured in the same environment.

    Raises:
        ValueError: they were measured on another machine, with other versions or from another commit.
    """
    if path is None or not path.exists():
        return new
    old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    here, there = new["environment"], old.get("environment", {})
    differing = [name for name in {**here, **there} if there.get(name) != here.get(name)]
    if differing:
        raise ValueError(
            f"{path} was measured in another environment, which differs in {', '.join(differing)}: write to another"
            " file, or delete it"
        )
    return old


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Draw how many times faster than transformers' sdpa in float32 each engine is, batch by batch.

    Batches of the first model and number of threads of the record are shown, two beside each other.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = [each for name, each in record["sections"].items() if name.startswith("forward")]
    found = [each for each in found if all(each[key] == found[0][key] for key in ("model", "threads"))]
    lines = math.ceil(len(found) / 2)
    fig, axes = plt.subplots(lines, 2, figsize=(10, 3.5 * lines), squeeze=False)
    for ax in axes.flat[len(found) :]:
        ax.remove()
    for ax, each in zip(axes.flat, found, strict=False):
        pairs = [pair.partition(" / ") for pair in each["ratios"] if pair.startswith("transformers")]
        ratios = sorted(((name, each["ratios"][f"{base} / {name}"]) for base, _, name in pairs), key=median_of)
        engines, medians = [name for name, _ in ratios], [found["median"] for _, found in ratios]
        spread = [[abs(found[end] - found["median"]) for _, found in ratios] for end in ("low", "high")]
        colours = ["C0" if engine.startswith("bertlite") else "0.6" for engine in engines]
        bars = ax.barh(engines, medians, xerr=spread, color=colours, error_kw={"elinewidth": 0.8})
        ax.bar_label(bars, fmt="%.2f", padding=4)
        ax.axvline(1, color="black", linewidth=0.8)
        ax.set(title=each["work"], xlabel="times transformers sdpa float32")
        ax.margins(x=0.15)  # room for the numbers
        ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)


def median_of(named: tuple[str, Mapping[str, float]]) -> float:
    return named[1]["median"]


if __name__ == "__main__":
    raise SystemExit(main())
