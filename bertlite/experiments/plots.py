"""The figures: each function draws on a new figure and returns it; `save` writes PNG and SVG."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertlite.experiments.compare import describe_way
from bertlite.experiments.statistics import Array
from bertlite.support.extras import import_optional

SummaryRow = dict[str, Any]  # of `compare.summarise`
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


def heat_map(scores: Array, pruned: Mapping[int, Iterable[int]] | None = None, title: str = "") -> Any:
    """Draw layers x heads, each head coloured by its score, pruned ones crossed; white is 0 where some are negative.

    Args:
        scores: (layers, heads); nan is a head that has no score.
        pruned: {layer: heads}.
    """
    layers, heads = scores.shape
    figure, axes = pyplot().subplots(figsize=(0.45 * heads + 1.6, 0.45 * layers + 1.2))
    limit = np.nanmax(np.abs(scores))
    signed = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit} if np.nanmin(scores) < 0 else {"cmap": "viridis"}
    image = axes.imshow(scores, aspect="equal", **signed)
    for layer, gone in (pruned or {}).items():
        axes.plot(list(gone), [layer] * len(list(gone)), "x", color="white", markersize=9, markeredgewidth=3)
        axes.plot(list(gone), [layer] * len(list(gone)), "x", color="crimson", markersize=8, markeredgewidth=1.5)
    axes.set(xlabel="head", ylabel="layer", title=title, xticks=range(heads), yticks=range(layers))
    figure.colorbar(image, ax=axes, label="score", shrink=0.8)
    return figure


def curves(rows: Sequence[SummaryRow], headline: str, dense: float | None = None, title: str = "") -> Any:
    """Draw the headline against the share of heads removed.

    Each repair has a panel, and each way of pruning a line in it, with a band for the interval.  Random is grey.
    """
    panels: dict[str, dict[str, list[SummaryRow]]] = {}
    for row in rows:
        name, repair, epochs = describe_way(row)
        way = f"{name}, epochs {epochs}" if epochs else name
        panels.setdefault(repair, {}).setdefault(way, []).append(row)
    ways = dict.fromkeys(way for lines in panels.values() for way in lines)
    styles = {way: {"color": COLOURS[i % len(COLOURS)], "linestyle": "-"} for i, way in enumerate(ways)}
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
            style = {"color": "0.4", "linestyle": "--"} if random else styles[way]
            (drawn[way],) = panel.plot(x, [row[headline] for row in points], marker="o", markersize=4, **style)
            low, high = (  # a point without an interval has no band
                [row[headline] if row[end] is None else row[end] for row in points] for end in ("low", "high")
            )
            panel.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
        if dense is not None:
            drawn["dense"] = panel.axhline(dense, color="black", linewidth=0.8, linestyle=":")
        panel.set(xlabel="heads removed (%)", title=repair or ("no repair" if len(panels) > 1 else ""))
        panel.grid(alpha=0.3)
    figure.supylabel(headline)
    figure.suptitle(title)
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=across, fontsize=8)
    return figure


def heads_per_layer(kept: Mapping[str, Sequence[float]], built_with: int, title: str = "") -> Any:
    """Draw bars for the number of heads that each layer keeps, from {name: heads kept in each layer}."""
    figure, axes = pyplot().subplots(figsize=(7, 3.5))
    width = 0.8 / len(kept)
    for i, (name, heads) in enumerate(kept.items()):
        positions = np.arange(len(heads)) + (i - (len(kept) - 1) / 2) * width
        axes.bar(positions, heads, width, label=name)
    axes.set(xlabel="layer", ylabel="heads kept", ylim=(0, built_with), title=title)
    axes.set_xticks(range(len(next(iter(kept.values())))))
    axes.legend(fontsize=8)
    return figure


def rank_correlation(names: Sequence[str], correlations: Array, title: str = "", of: str = "head") -> Any:
    """Draw Spearman's correlation of every pair of criteria as a matrix with numbers."""
    size = 0.7 * len(names) + 2
    figure, axes = pyplot().subplots(figsize=(size, size))
    image = axes.imshow(correlations, cmap="RdBu_r", vmin=-1, vmax=1)
    for i, j in np.ndindex(*correlations.shape):
        dark = abs(correlations[i, j]) > 0.6
        axes.text(
            j, i, f"{correlations[i, j]:.2f}", ha="center", va="center", color="white" if dark else "black", fontsize=8
        )
    positions = range(len(names))
    axes.set(xticks=positions, yticks=positions, yticklabels=names, title=title)
    axes.set_xticklabels(names, rotation=45, ha="right")
    figure.colorbar(image, ax=axes, label=f"Spearman's correlation of {of} scores", shrink=0.7)
    return figure
