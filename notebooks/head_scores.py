"""Pictures of one number for each head, for notebooks 07 and 08."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from numpy.typing import NDArray
from scipy.stats import spearmanr

Array = NDArray[Any]


def heat_map(scores: Array, pruned: Mapping[int, Iterable[int]] | None = None, title: str = "") -> Any:
    """Draw layers x heads, each head coloured by its score, pruned ones crossed; white is 0 where some are negative.

    Args:
        scores: (layers, heads); nan is a head that has no score.
        pruned: {layer: heads}.
    """
    layers, heads = scores.shape
    figure, axes = plt.subplots(figsize=(0.45 * heads + 1.6, 0.45 * layers + 1.2))
    limit = np.nanmax(np.abs(scores))
    signed = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit} if np.nanmin(scores) < 0 else {"cmap": "viridis"}
    image = axes.imshow(scores, aspect="equal", **signed)
    for layer, gone in (pruned or {}).items():
        axes.plot(list(gone), [layer] * len(list(gone)), "x", color="white", markersize=9, markeredgewidth=3)
        axes.plot(list(gone), [layer] * len(list(gone)), "x", color="crimson", markersize=8, markeredgewidth=1.5)
    axes.set(xlabel="head", ylabel="layer", title=title, xticks=range(heads), yticks=range(layers))
    figure.colorbar(image, ax=axes, label="score", shrink=0.8)
    return figure


def heads_per_layer(kept: Mapping[str, Sequence[float]], built_with: int, title: str = "") -> Any:
    """Draw bars for the number of heads that each layer keeps, from {name: heads kept in each layer}."""
    figure, axes = plt.subplots(figsize=(7, 3.5))
    width = 0.8 / len(kept)
    for i, (name, heads) in enumerate(kept.items()):
        positions = np.arange(len(heads)) + (i - (len(kept) - 1) / 2) * width
        axes.bar(positions, heads, width, label=name)
    axes.set(xlabel="layer", ylabel="heads kept", ylim=(0, built_with), title=title)
    axes.set_xticks(range(len(next(iter(kept.values())))))
    if len(kept) > 1:
        axes.legend(fontsize=8)
    return figure


def rank_correlation(names: Sequence[str], correlations: Array, title: str = "", of: str = "head") -> Any:
    """Draw Spearman's correlation of every pair of criteria as a matrix with numbers."""
    side = 0.55 * len(names) + 0.5
    figure, axes = plt.subplots(figsize=(side + 2.4, side + 1.6), layout="constrained")
    figure.suptitle(title)  # over the colour bar too
    image = axes.imshow(correlations, cmap="RdBu_r", vmin=-1, vmax=1)
    for i, j in np.ndindex(*correlations.shape):
        dark = abs(correlations[i, j]) > 0.6
        axes.text(
            j, i, f"{correlations[i, j]:.2f}", ha="center", va="center", color="white" if dark else "black", fontsize=8
        )
    positions = range(len(names))
    axes.set(xticks=positions, yticks=positions, yticklabels=names)
    axes.set_xticklabels(names, rotation=45, ha="right")
    figure.colorbar(image, ax=axes, label=f"Spearman's ρ of {of} scores")
    return figure


def rank_correlations(scores: Mapping[str, Array]) -> tuple[list[str], Array]:
    """Return Spearman's correlation of every pair of score tables, over the units that both have scores for."""
    tables = [each.ravel() for each in scores.values()]
    found = [[float(spearmanr(x, y, nan_policy="omit").statistic) for y in tables] for x in tables]
    return list(scores), np.array(found)
