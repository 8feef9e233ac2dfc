"""The picture of a comparison: points lost against the share of the MACs, and against the measured speed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.measure.curves import COLOURS, MARKERS, pyplot

LINES = {"pruned": "-", "distilled": "--", "timed": ":", "int8": "-."}
WHEN = {
    "pruned": "",
    "distilled": ", distilled the same way",
    "timed": ", distilled in equal time",
    "int8": ", in 8 bits",
}
MANY = 10  # tasks of a comparison that tells something of others
LOWEST = -25.0  # points; lines below end at the edge


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw rows of a record: a line for each way and stage, with bars for the intervals, side by side.

    Drawn are those over MANY tasks or more, with the most shares.
    """
    rows = [row for row in rows if row["tasks"] >= min(MANY, max(row["tasks"] for row in rows))]
    shares = Counter((row["way"], row["stage"]) for row in rows)
    lines = [each for each in shares if shares[each] == max(shares.values())]
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(7.5, 5.4), sharey=True, layout="constrained")
    ways = dict.fromkeys(way for way, _ in lines)
    styles = {way: {"color": COLOURS[i], "marker": MARKERS[i]} for i, way in enumerate(ways)}
    axes = {"share": ("multiply-accumulates (%)", 100), "speedup": ("speed, times the dense model's", 1)}
    for panel, (name, (label, factor)) in zip(panels, axes.items(), strict=True):
        for place, (way, stage) in enumerate(lines):
            points = [row for row in rows if (row["way"], row["stage"]) == (way, stage) and name in row]
            points.sort(key=lambda row: row[name])
            aside = 0.4 * (place - (len(lines) - 1) / 2) if name == "share" else 0  # or bars would hide each other
            x, y = [factor * row[name] + aside for row in points], [-row["lost"] for row in points]
            style = {**styles[way], "linestyle": LINES[stage], "markersize": 5}
            within = [row["lost_within"] or 0.0 for row in points]
            panel.errorbar(x, y, within, elinewidth=0.8, capsize=2, label=way + WHEN[stage], **style)
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set(xlabel=label, ylim=(LOWEST, 3))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("points above the dense model")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    plt.close(figure)
