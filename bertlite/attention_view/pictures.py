"""Draw maps of attention as a PNG with matplotlib."""

import io
from typing import TYPE_CHECKING, Any

from bertlite.attention_view.maps import AttentionMaps, check_comparable
from bertlite.extras import import_optional

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

MOST_PIXELS = 40_000_000
DPI = 100
COLOURS = "Blues"
CELL, GAP, LETTER = 0.14, 0.15, 0.065  # inches: width of a weight, space between maps, width of a letter of 7 points


def picture(maps: AttentionMaps, against: AttentionMaps | None = None) -> bytes:
    """Draw `figure` as a PNG."""
    drawn = io.BytesIO()
    figure(maps, against).savefig(drawn, format="png", dpi=DPI)
    return drawn.getvalue()


def figure_layout(maps: AttentionMaps, against: AttentionMaps | None = None) -> tuple[float, float, dict[str, float]]:
    """Return the width and height of the figure in inches, and where its maps lie, as matplotlib's subplots take it.

    Raises:
        ValueError: it would have more than MOST_PIXELS.
    """
    size, columns = len(maps.tokens), len(maps.heads)
    rows = len(maps.layers) * (1 if against is None else 2)
    side, label = max(CELL * size, 0.6), LETTER * max(map(len, maps.tokens)) + 0.1
    left, bottom, right, top = label + (0.3 if against is None else 0.45), label + 0.1, 1.0, 0.3
    pitch = side + GAP
    width, height = columns * pitch + left + right, max(rows * pitch + bottom + top, 2.0)
    pixels = width * height * DPI**2
    if pixels > MOST_PIXELS:
        raise ValueError(
            f"{rows * columns} maps of {size} tokens are a PNG of {pixels / 1e6:.0f} million pixels, beyond"
            f" {MOST_PIXELS // 10**6}: choose layers or heads, or shorten the text, or write .html"
        )
    grid = {"left": left / width, "right": (left + columns * pitch - GAP) / width, "wspace": GAP / side}
    grid |= {"top": 1 - top / height, "bottom": 1 - (top + rows * pitch - GAP) / height, "hspace": GAP / side}
    return width, height, grid


def figure(maps: AttentionMaps, against: AttentionMaps | None = None) -> "Figure":
    """Draw a row of maps for each layer and a column for each head; pruned heads are blank and marked "pruned".

    Args:
        against: maps of another checkpoint for the same tokens, which get a row of their own below each layer's.

    Raises:
        ValueError: the figure would have more than MOST_PIXELS, or the two cannot be compared.
        ModuleNotFoundError: matplotlib is not installed.
    """
    import_matplotlib()
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    if against is not None:
        check_comparable(maps, against)
    width, height, grid = figure_layout(maps, against)
    models = [maps] if against is None else [maps, against]
    rows = [(layer, model) for layer in maps.layers for model in models]
    drawn = Figure(figsize=(width, height))
    axes = drawn.subplots(len(rows), len(maps.heads), squeeze=False, gridspec_kw=grid)
    square_roots = PowerNorm(0.5, vmin=0, vmax=1)  # since most weights are small
    tokens: dict[str, Any] = {"ticks": range(len(maps.tokens)), "labels": maps.tokens, "size": 7, "parse_math": False}
    for (layer, model), line in zip(rows, axes, strict=True):
        for head, place in zip(maps.heads, line, strict=True):
            draw_map(place, model, (layer, head), square_roots)
        line[0].set_ylabel(f"layer {layer}" if against is None else f"{model.name}\nlayer {layer}", size=8)
        line[0].set_yticks(**tokens)
    for head, top, bottom in zip(maps.heads, axes[0], axes[-1], strict=True):
        top.set_title(f"head {head}", size=8)
        bottom.set_xticks(**tokens, rotation=90)
    scale = drawn.add_axes((1 - 0.8 / width, grid["top"] - 1.4 / height, 0.12 / width, 1.4 / height))
    drawn.colorbar(ScalarMappable(norm=square_roots, cmap=COLOURS), cax=scale).set_label("weight", size=8)
    scale.tick_params(labelsize=7)
    return drawn


def draw_map(axes: "Axes", maps: AttentionMaps, head: tuple[int, int], norm: "PowerNorm") -> None:
    """Draw the map of one head, or the word "pruned"."""
    weights, size = maps.weights.get(head), len(maps.tokens)
    if weights is None:
        axes.set_facecolor("0.93")
        axes.text(0.5, 0.5, "pruned", transform=axes.transAxes, ha="center", va="center", size=7, color="0.4")
    else:
        axes.imshow(weights.numpy(), interpolation="nearest", aspect="auto", cmap=COLOURS, norm=norm)
    axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), xticks=[], yticks=[])


def import_matplotlib() -> None:
    """Raise ModuleNotFoundError if matplotlib is not installed."""
    import_optional("matplotlib.figure", "a .png, unlike .html,", "plot")
