"""Draw maps of attention, the weights that each head gives to the tokens of a text, as an HTML page or a PNG.

Shapes:  S tokens, special ones included.  A map is (S, S): row i holds the weights of token i, and sums to 1.
"""

import argparse
import base64
import html
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bertlite.config import kept_heads
from bertlite.model import BertModel, BertPreTrainedModel
from bertlite.records import write_bytes, write_json
from bertlite.tokenizer import BertTokenizer

if TYPE_CHECKING:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

PAGE = Path(__file__).with_suffix(".html")
STEPS = 65_535  # a page stores each weight in two bytes, as a number of steps from 0 to 1
MOST_WEIGHTS = 2_000_000  # on one page of then 5 MB
MOST_PIXELS = 40_000_000  # in a PNG
DPI = 100
COLOURS = "Blues"
CELL, GAP, LETTER = 0.14, 0.15, 0.065  # inches: width of a weight, space between maps, width of a letter of 7 points


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The maps of one text for some layers and heads.

    Args:
        tokens: S, as the vocabulary spells them.
        layers, heads: those asked for, numbered as in the unpruned model.
        weights: {(layer, head): (S, S)}, float32; without pruned heads.
    """

    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    weights: Mapping[tuple[int, int], Tensor]


def main(args: argparse.Namespace) -> int:
    drawings = {path: get_drawing(kind) for kind, path in args.out.items() if path != args.record}
    tokenizer = BertTokenizer.from_pretrained(args.checkpoint, revision=args.revision)
    model = BertModel.from_pretrained(args.checkpoint, add_pooling_layer=False, revision=args.revision)

    def check(maps: AttentionMaps) -> None:
        for check_size, _ in drawings.values():
            check_size(maps)

    maps = attention_maps(model, tokenizer, args.text, args.pair, layers=args.layers, heads=args.heads, check=check)
    for path, (_, draw) in drawings.items():
        write_bytes(path, draw(maps))
    if args.record:
        write_json(args.record, make_record(maps))
    gone = len(maps.layers) * len(maps.heads) - len(maps.weights)
    written = ", ".join(map(str, args.out.values())) or "the record"
    print(f"{written}: {len(maps.tokens)} tokens; heads drawn: {len(maps.weights)}, pruned: {gone}")
    return 0


@torch.no_grad()
def attention_maps(
    model: BertPreTrainedModel,
    tokenizer: BertTokenizer,
    text: str,
    pair: str | None = None,
    *,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    check: "Check | None" = None,
) -> AttentionMaps:
    """Compute the attention weights of a model for a text.

    Args:
        model: in eval mode; in training mode attention has dropout.
        pair: a second text, after the first one's [SEP].
        layers, heads: numbered as in the unpruned model; by default all.
        check: called with the maps before they are computed, their weights on the meta device; raises if they are too
            large to draw, such as `check_page`.

    Raises:
        ValueError: there is no such layer or head; the text has more tokens than the model takes; the weights are
            nan, as in a damaged checkpoint.
    """
    config = model.config
    layers = select_numbers("layer", layers, config.num_hidden_layers)
    heads = select_numbers("head", heads, config.num_attention_heads)
    encoded = tokenizer(text, pair, return_tensors="pt")
    tokens = tuple(encoded.tokens())
    if len(tokens) > config.max_position_embeddings:
        raise ValueError(
            f"the text has {len(tokens)} tokens, and this model takes {config.max_position_embeddings}: shorten it"
        )
    indices = {  # of the heads that are kept, in the model's outputs
        (layer, head): i for layer in layers for i, head in enumerate(kept_heads(config, layer)) if head in heads
    }
    if check is not None:
        blank = torch.empty(len(tokens), len(tokens), device="meta")
        check(AttentionMaps(tokens, layers, heads, dict.fromkeys(indices, blank)))
    attentions = model.base_model(**encoded.to(model.device), output_attentions=True).attentions
    assert attentions is not None  # they were asked for
    weights = {(layer, head): attentions[layer][0, i].to("cpu", torch.float32) for (layer, head), i in indices.items()}
    for (layer, head), each in weights.items():
        if each.isnan().any():
            raise ValueError(f"the attention of layer {layer}, head {head} is nan: is the checkpoint damaged?")
    return AttentionMaps(tokens, layers, heads, weights)


def select_numbers(unit: str, numbers: Iterable[int] | None, count: int) -> tuple[int, ...]:
    """Return the layers or heads that were asked for, sorted, each once; by default all.

    Raises:
        ValueError: the model was not built with one of them, or none was asked for.
    """
    if numbers is None:
        return tuple(range(count))
    asked = tuple(sorted(set(numbers)))
    for number in asked:
        if not 0 <= number < count:
            raise ValueError(f"there is no {unit} {number}: this model was built with {count}, 0 to {count - 1}")
    if not asked:
        raise ValueError(f"no {unit} was chosen; leave the choice out to have all {count}")
    return asked


def make_record(maps: AttentionMaps) -> dict[str, Any]:
    """Return the maps JSON-ready: weights[layer][head] is S lists of S numbers, or None for a pruned head."""

    def rows(layer: int, head: int) -> list[list[float]] | None:
        weights = maps.weights.get((layer, head))
        return None if weights is None else weights.tolist()

    return {
        "what": "bertlite attention",
        "tokens": list(maps.tokens),
        "weights": {str(layer): {str(head): rows(layer, head) for head in maps.heads} for layer in maps.layers},
    }


# Drawing -------------------------------------------------------------------------------------------------------------


def get_drawing(suffix: str) -> "tuple[Check, Draw]":
    """Return the check and the drawing function of a file type, by its suffix.

    Raises:
        ValueError: DRAWINGS has no such suffix.
        ModuleNotFoundError: it needs matplotlib, which is not installed.
    """
    if suffix not in DRAWINGS:
        raise ValueError(f"a view of attention is {' or '.join(DRAWINGS)}, not {suffix or 'a file without a suffix'}")
    if suffix == ".png":
        import_matplotlib()
    return DRAWINGS[suffix]


def check_page(maps: AttentionMaps) -> None:
    """Raise ValueError if the maps have more than MOST_WEIGHTS weights, too many for a page."""
    count = len(maps.weights) * len(maps.tokens) ** 2
    if count > MOST_WEIGHTS:
        raise ValueError(
            f"{len(maps.weights)} maps of {len(maps.tokens)} tokens are {count:,} weights, and a page holds"
            f" {MOST_WEIGHTS:,}: choose layers or heads, or shorten the text"
        )


def page(maps: AttentionMaps) -> bytes:
    """Draw an HTML page that needs no other file: click on a head, point at a token or a weight.

    Raises:
        ValueError: there are more than MOST_WEIGHTS weights.
    """
    check_page(maps)
    data = {
        "tokens": maps.tokens,
        "layers": maps.layers,
        "heads": maps.heads,
        "steps": STEPS,
        "weights": {f"{layer}.{head}": encode_weights(weights) for (layer, head), weights in maps.weights.items()},
    }
    parts = {
        "title": html.escape(" ".join(maps.tokens)),
        "data": json.dumps(data).replace("<", "\\u003c"),  # or a token could end the script element
    }
    return re.sub(r"{{(\w+)}}", lambda mark: parts[mark[1]], PAGE.read_text(encoding="utf-8")).encode()


def encode_weights(weights: Tensor) -> str:
    """Encode a map in base64, row by row, each weight in STEPS as two bytes, the low one first."""
    return base64.b64encode((weights * STEPS).round().numpy().astype("<u2").tobytes()).decode()


def picture(maps: AttentionMaps) -> bytes:
    """Draw `figure` as a PNG."""
    drawn = io.BytesIO()
    figure(maps).savefig(drawn, format="png", dpi=DPI)
    return drawn.getvalue()


@dataclass(frozen=True)
class FigureSize:
    """The size of a figure in inches: the side of a map, the space left of the maps and above, and the whole."""

    side: float
    left: float
    top: float
    width: float
    height: float


def figure_size(maps: AttentionMaps) -> FigureSize:
    """Return the size of the figure of these maps.

    Raises:
        ValueError: it would have more than MOST_PIXELS.
    """
    size, rows, columns = len(maps.tokens), len(maps.layers), len(maps.heads)
    side, label = max(CELL * size, 0.6), LETTER * max(map(len, maps.tokens)) + 0.1
    left, bottom, right, top = label + 0.3, label + 0.1, 1.0, 0.3
    width, height = columns * (side + GAP) + left + right, max(rows * (side + GAP) + bottom + top, 2.0)
    pixels = width * height * DPI**2
    if pixels > MOST_PIXELS:
        raise ValueError(
            f"{rows * columns} maps of {size} tokens are a PNG of {pixels / 1e6:.0f} million pixels, beyond"
            f" {MOST_PIXELS // 10**6}: choose layers or heads, or shorten the text, or write .html"
        )
    return FigureSize(side, left, top, width, height)


def figure(maps: AttentionMaps) -> "Figure":
    """Draw a row of maps for each layer and a column for each head; pruned heads are blank and marked "pruned".

    Raises:
        ValueError: the figure would have more than MOST_PIXELS.
        ModuleNotFoundError: matplotlib is not installed.
    """
    new_figure, mappable, norm = import_matplotlib()
    size, rows = len(maps.tokens), len(maps.layers)
    inches = figure_size(maps)
    side, left, top, width, height = inches.side, inches.left, inches.top, inches.width, inches.height
    drawn = new_figure(figsize=(width, height))
    square_roots = norm(0.5, vmin=0, vmax=1)  # since most weights are small
    for row, layer in enumerate(maps.layers):
        for column, head in enumerate(maps.heads):
            x, y = left + column * (side + GAP), height - top - row * (side + GAP) - side
            axes = drawn.add_axes((x / width, y / height, side / width, side / height))
            weights = maps.weights.get((layer, head))
            if weights is None:
                axes.set_facecolor("0.93")
                axes.text(0.5, 0.5, "pruned", transform=axes.transAxes, ha="center", va="center", size=7, color="0.4")
            else:
                axes.imshow(weights.numpy(), interpolation="nearest", aspect="auto", cmap=COLOURS, norm=square_roots)
            axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), xticks=[], yticks=[])
            if row == 0:
                axes.set_title(f"head {head}", size=8)
            if row == rows - 1:
                axes.set_xticks(range(size), maps.tokens, rotation=90, size=7, parse_math=False)
            if column == 0:
                axes.set_ylabel(f"layer {layer}", size=8)
                axes.set_yticks(range(size), maps.tokens, size=7, parse_math=False)
    scale = drawn.add_axes((1 - 0.8 / width, 1 - (top + 1.4) / height, 0.12 / width, 1.4 / height))
    drawn.colorbar(mappable(norm=square_roots, cmap=COLOURS), cax=scale).set_label("weight", size=8)
    scale.tick_params(labelsize=7)
    return drawn


def import_matplotlib() -> "tuple[type[Figure], type[ScalarMappable], type[PowerNorm]]":
    """Return matplotlib's classes for figures, colour scales and the square roots of weights.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("a .png needs matplotlib: pip install 'bertlite[plot]', or write .html") from None
    return Figure, ScalarMappable, PowerNorm


Check = Callable[[AttentionMaps], object]
Draw = Callable[[AttentionMaps], bytes]
DRAWINGS: dict[str, tuple[Check, Draw]] = {".html": (check_page, page), ".png": (figure_size, picture)}
