"""Draw maps of attention as a PNG with matplotlib."""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertlite.attention_view.maps import AttentionMaps, check_comparable
from bertlite.extras import import_optional

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
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


@dataclass(frozen=True)
class FigureSize:
    """The size of a figure in inches: the side of a map, the space left of the maps and above, and the whole."""

    side: float
    left: float
    top: float
    width: float
    height: float


def check_picture(maps: AttentionMaps, against: AttentionMaps | None = None) -> None:
    """Raise ValueError if the figure would have more than MOST_PIXELS."""
    figure_size(maps, against)


def figure_size(maps: AttentionMaps, against: AttentionMaps | None = None) -> FigureSize:
    """Return the size of the figure of these maps.

    Raises:
        ValueError: it would have more than MOST_PIXELS.
    """
    size, columns = len(maps.tokens), len(maps.heads)
    rows = len(maps.layers) * (1 if against is None else 2)
    side, label = max(CELL * size, 0.6), LETTER * max(map(len, maps.tokens)) + 0.1
    left, bottom, right, top = label + (0.3 if against is None else 0.45), label + 0.1, 1.0, 0.3
    width, height = columns * (side + GAP) + left + right, max(rows * (side + GAP) + bottom + top, 2.0)
    pixels = width * height * DPI**2
    if pixels > MOST_PIXELS:
        raise ValueError(
            f"{rows * columns} maps of {size} tokens are a PNG of {pixels / 1e6:.0f} million pixels, beyond"
            f" {MOST_PIXELS // 10**6}: choose layers or heads, or shorten the text, or write .html"
        )
    return FigureSize(side, left, top, width, height)


def figure(maps: AttentionMaps, against: AttentionMaps | None = None) -> "Figure":
    """Draw a row of maps for each layer and a column for each head; pruned heads are blank and marked "pruned".

    Args:
        against: maps of another checkpoint for the same tokens, which get a row of their own below each layer's.

    Raises:
        ValueError: the figure would have more than MOST_PIXELS, or the two cannot be compared.
        ModuleNotFoundError: matplotlib is not installed.
    """
    new_figure, mappable, norm = import_matplotlib()
    if against is not None:
        check_comparable(maps, against)
    inches = figure_size(maps, against)
    side, left, top, width, height = inches.side, inches.left, inches.top, inches.width, inches.height
    drawn = new_figure(figsize=(width, height))
    square_roots = norm(0.5, vmin=0, vmax=1)  # since most weights are small
    models = [maps] if against is None else [maps, against]
    rows = [(layer, model) for layer in maps.layers for model in models]
    for row, (layer, model) in enumerate(rows):
        for column, head in enumerate(maps.heads):
            x, y = left + column * (side + GAP), height - top - row * (side + GAP) - side
            axes = drawn.add_axes((x / width, y / height, side / width, side / height))
            draw_map(axes, model, (layer, head), square_roots)
            if row == 0:
                axes.set_title(f"head {head}", size=8)
            if row == len(rows) - 1:
                axes.set_xticks(range(len(maps.tokens)), maps.tokens, rotation=90, size=7, parse_math=False)
            if column == 0:
                axes.set_ylabel(f"layer {layer}" if against is None else f"{model.name}\nlayer {layer}", size=8)
                axes.set_yticks(range(len(maps.tokens)), maps.tokens, size=7, parse_math=False)
    scale = drawn.add_axes((1 - 0.8 / width, 1 - (top + 1.4) / height, 0.12 / width, 1.4 / height))
    drawn.colorbar(mappable(norm=square_roots, cmap=COLOURS), cax=scale).set_label("weight", size=8)
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


def import_matplotlib() -> "tuple[type[Figure], type[ScalarMappable], type[PowerNorm]]":
    """Return matplotlib's classes for figures, colour scales and the square roots of weights.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    import_optional("matplotlib.figure", "a .png, unlike .html,", "plot")
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    return Figure, ScalarMappable, PowerNorm
