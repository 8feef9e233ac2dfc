"""Draw the curves of a record of `bertlite prune compare`: a metric against the share of heads removed.

python -m scripts.measure.curves ROWS.json PATH    # writes PATH.png and PATH.svg
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertlite.experiments.compare import describe_training
from bertlite.support.extras import import_optional

SummaryRow = dict[str, Any]  # from `compare.summarise`
BASELINE = "random"
COLOURS = tuple(f"C{i}" for i in range(10) if i != 7)  # C7 is grey
MARKERS = "os^DvPX*<>"  # which tell lines apart in print without colours


def pyplot() -> Any:
    """Import matplotlib.pyplot for drawing without a screen.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    matplotlib = import_optional("matplotlib", "a figure", "plot")
    if matplotlib.get_backend().lower() not in ("agg", "module://matplotlib_inline.backend_inline"):
        matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(figure: Any, path: str | Path) -> list[Path]:
    """Write the figure as PATH.png and PATH.svg, close it, and return the two paths."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = [path.with_name(path.name + end) for end in (".png", ".svg")]
    for each in paths:
        figure.savefig(each, dpi=140, bbox_inches="tight", metadata={"Date": None} if each.suffix == ".svg" else None)
    pyplot().close(figure)
    return paths


def curves(rows: Sequence[SummaryRow], headline: str, dense: float | None = None, title: str = "") -> Any:
    """Draw the headline against the share of heads removed.

    Each repair has a panel, and each way of pruning a line in it, with bars for the interval.  Random is dashed.
    """
    names, usual = name_ways(rows)
    panels: dict[str, dict[str, list[SummaryRow]]] = {}
    for row, way in zip(rows, names, strict=True):
        panels.setdefault(row["repair"], {}).setdefault(way, []).append(row)
    ways = dict.fromkeys(sorted(names))
    styles = {
        way: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]} for i, way in enumerate(ways)
    }
    across = 2 if len(panels) > 2 else 1  # of two the second stands below, to be read in a column of text
    down = -(-len(panels) // across)
    size = (max(5, 4 * across), 3.2 * down + 0.11 * len(ways) + 0.5)
    figure, axes = pyplot().subplots(down, across, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for unused in axes.flat[len(panels) :]:
        unused.remove()
    drawn = {}
    for panel, (repair, lines) in zip(axes.flat, panels.items(), strict=False):
        for way, points in lines.items():
            points = sorted(points, key=lambda row: row["fraction"])
            x = [100 * row["fraction"] for row in points]
            random = points[0]["criterion"] == BASELINE
            y = [row[headline] for row in points]
            ends = [  # a point without an interval has no bar
                [0.0 if row[end] is None else sign * (row[end] - row[headline]) for row in points]
                for end, sign in (("low", -1), ("high", 1))
            ]
            x = [each + 0.4 * ([*ways].index(way) - (len(ways) - 1) / 2) for each in x]  # side by side
            style = {**styles[way], "markersize": 5, "linestyle": "--" if random else "-"}
            drawn[way] = panel.errorbar(x, y, ends, elinewidth=0.8, capsize=2, **style)
        if dense is not None:
            line = panel.axhline(dense, color="black", linewidth=0.8, linestyle=":")
        panel.set(xlabel="heads removed (%)", xticks=sorted({100 * row["fraction"] for row in rows}))
        panel.set_title(("no repair" if repair == "none" else repair) if len(panels) > 1 else "")
        panel.grid(alpha=0.3)
    for panel in axes[:, 0]:
        panel.set_ylabel(headline)
    figure.suptitle(title)
    entries = {way: drawn[way] for way in ways} | ({} if dense is None else {"dense": line})
    columns = 2 if max(map(len, entries)) <= 24 * across else 1
    legend = figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, fontsize=8)
    legend.set_title(f"unless named: {usual}", {"size": 8})
    return figure


def name_ways(rows: Sequence[SummaryRow]) -> tuple[list[str], str]:
    """Return a short name of each row's way of pruning: its criterion, and where it differs from the usual setting.

    Returns:
        The names, and the usual setting in words.
    """
    settings = []
    for row in rows:
        training = describe_training(row)
        trained = f"epochs {training}" if training else "not retrained"
        settings.append((f"≥ {row['at_least']} a layer", f"{row['calibration']} examples", trained))
    usual = [Counter(values).most_common(1)[0][0] for values in zip(*settings, strict=True)]
    names = [
        ", ".join([row["criterion"], *(part for part, most in zip(setting, usual, strict=True) if part != most)])
        for row, setting in zip(rows, settings, strict=True)
    ]
    return names, ", ".join(usual)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, metavar="ROWS.json")
    parser.add_argument("path", type=Path, metavar="PATH")
    args = parser.parse_args(argv)
    record = json.loads(args.record.read_text(encoding="utf-8"))
    headline = record["headline"]
    print(*save(curves(record["rows"], headline, record["dense"].get(headline)), args.path), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
