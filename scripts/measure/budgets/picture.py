"""The picture of a comparison: points lost against the share of the MACs, and against the measured speed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.measure.curves import COLOURS, MARKERS, pyplot

LINES = {"pruned": "-", "distilled": "--", "timed": ":", "int8": "-."}
WHEN = {
    "pruned": "",
    "distilled": ", distilled alike",
    "timed": ", distilled in equal time",
    "int8": ", in 8 bits",
}
MANY = 10  # tasks of a comparison that tells something of others
LOWEST = 25.0  # points lost; an arrow at the edge has the number of a point below


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the points lost by each way and stage, a line each, with bars for the intervals, side by side.

    Drawn are rows over MANY tasks or more, with the most shares.
    """
    rows = [row for row in rows if row["tasks"] >= min(MANY, max(row["tasks"] for row in rows))]
    shares = Counter((row["way"], row["stage"]) for row in rows)
    lines = [each for each in shares if shares[each] == max(shares.values())]
    plt = pyplot()
    figure, panels = plt.subplots(2, 1, figsize=(5, 8), layout="constrained")
    ways = dict.fromkeys(way for way, _ in lines)
    styles = {way: {"color": COLOURS[i], "marker": MARKERS[i]} for i, way in enumerate(ways)}
    axes = {"share": ("multiply-accumulates (%)", 100), "speedup": ("speed, times the dense model's", 1)}
    for panel, (name, (label, factor)) in zip(panels, axes.items(), strict=True):
        for place, (way, stage) in enumerate(lines):
            points = [row for row in rows if (row["way"], row["stage"]) == (way, stage) and name in row]
            points.sort(key=lambda row: row[name])
            aside = 0.4 * (place - (len(lines) - 1) / 2) if name == "share" else 0  # or bars would hide each other
            x, y = [factor * row[name] + aside for row in points], [row["lost"] for row in points]
            style = {**styles[way], "linestyle": LINES[stage], "markersize": 5}
            within = [row["lost_within"] or 0.0 for row in points]
            panel.errorbar(x, y, within, elinewidth=0.8, capsize=2, label=way + WHEN[stage], **style)
            for at, lost in zip(x, y, strict=True):
                if lost > LOWEST:
                    side = "left" if place % 2 else "right"  # of two at one place
                    words = {"color": styles[way]["color"], "ha": side, "va": "bottom"}
                    panel.text(at, LOWEST - 0.3, f" ↓ {lost:.0f} ", **words)
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set(xlabel=label, ylim=(LOWEST, -3), ylabel="points lost")
        panel.margins(x=0.12)  # room for the numbers at the edge
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    plt.close(figure)
