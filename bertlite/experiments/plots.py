"""The figures: each function draws on a new figure and returns it; `save` writes PNG and SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertlite.experiments.compare import describe_way
from bertlite.support.extras import import_optional

SummaryRow = dict[str, Any]  # from `compare.summarise`
BASELINE = "random"
COLOURS = tuple(f"C{i}" for i in range(10) if i != 7)  # C7 is grey


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
    panels: dict[str, dict[str, list[SummaryRow]]] = {}
    for row in rows:
        name, repair, epochs = describe_way(row)
        way = f"{name}, epochs {epochs}" if epochs else name
        panels.setdefault(repair, {}).setdefault(way, []).append(row)
    ways = dict.fromkeys(way for lines in panels.values() for way in lines)
    styles = {way: {"color": COLOURS[i % len(COLOURS)]} for i, way in enumerate(ways)}
    across, down = min(2, len(panels)), -(-len(panels) // 2)
    size = (4 * across, 3.2 * down + 0.11 * len(ways) + 0.5)
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
            style = {**styles[way], "marker": "o", "markersize": 4, "linestyle": "--" if random else "-"}
            drawn[way] = panel.errorbar(x, y, ends, elinewidth=0.8, capsize=2, **style)
        if dense is not None:
            drawn["dense"] = panel.axhline(dense, color="black", linewidth=0.8, linestyle=":")
        panel.set(xlabel="heads removed (%)", title=repair or ("no repair" if len(panels) > 1 else ""))
        panel.grid(alpha=0.3)
    figure.supylabel(headline)
    figure.suptitle(title)
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=across, fontsize=8)
    return figure
