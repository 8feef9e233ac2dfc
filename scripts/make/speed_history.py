"""Draw the speed of each commit whose record git holds.

    python -m scripts.make.speed_history                                  # speed-history.png
    python -m scripts.make.speed_history --record speed-avx2 --out x.png  # another record

Each point is a version of the record in scripts/results, measured at the commit that it names: times faster than
transformers' sdpa in float32 in the same run, so that a faster machine moves both.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bertlite.support.environment import RESULTS, ROOT, commit_of
from scripts.measure.curves import pyplot

BASE = "transformers sdpa float32"
WORKS = ("forward 1 x 16", "forward 8 x 128", "forward 32 x 128")  # bert-base's shape; the oldest records have them


class Point(NamedTuple):
    """The ratios of one version of a record, {(work, engine): times faster}, with its commit and its day."""

    commit: str
    day: str
    ratios: dict[tuple[str, str], float]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", default="speed", help="a name under scripts/results (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("speed-history.png"), help="the picture")
    args = parser.parse_args(argv)
    points = [point for point in history(f"{RESULTS}/{args.record}.json") if point.ratios]
    if not points:
        parser.exit(1, f"git holds no {args.record}.json with the ratios of {', '.join(WORKS)}\n")
    draw(points, args.out)
    print(args.out)
    return 0


def history(path: str) -> Iterator[Point]:
    """Yield the versions of a record, the oldest first; one that measures the same commit again replaces it."""
    found: dict[str, Point] = {}
    for line in run_git("log", "--reverse", "--format=%H %cs", "--", path).splitlines():
        commit, day = line.split()
        record = json.loads(run_git("show", f"{commit}:{path}"))
        measured = (commit_of(record) or {}).get("commit") or commit
        first = found[measured].day if measured in found else day
        found[measured] = Point(measured[:7], first, ratios_of(record))
    yield from found.values()


def ratios_of(record: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Return {(work, engine of bertlite): times faster than BASE}, of bert-base's shape."""
    found = {}
    for work in WORKS:
        named = [name for name in record.get("sections", {}) if name in (work, f"{work} 2 threads")]
        for name in named:
            for pair, ratio in record["sections"][name].get("ratios", {}).items():
                base, _, engine = pair.partition(" / ")
                if base == BASE and engine.startswith("bertlite native"):
                    found[work, engine] = ratio["median"]
    return found


def draw(points: Sequence[Point], out: Path) -> None:
    """Draw a panel for each work, a line for each engine, from commit to commit."""
    plt = pyplot()
    works = [work for work in WORKS if any(key[0] == work for point in points for key in point.ratios)]
    figure, panels = plt.subplots(1, len(works), figsize=(3.3 * len(works), 3.6), squeeze=False, layout="constrained")
    for panel, work in zip(panels[0], works, strict=True):
        for engine in sorted({key[1] for point in points for key in point.ratios if key[0] == work}):
            line = [
                (i, point.ratios[work, engine]) for i, point in enumerate(points) if (work, engine) in point.ratios
            ]
            panel.plot(
                *zip(*line, strict=True), marker="o", markersize=4, label=engine.removeprefix("bertlite native ")
            )
        panel.set_xticks(range(len(points)), [f"{p.commit}\n{p.day[5:]}" for p in points], fontsize=6, rotation=90)
        panel.set(title=work.removeprefix("forward "), ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("times faster than transformers sdpa float32")
    panels[0][0].legend(fontsize=8)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def run_git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    raise SystemExit(main())
