"""Maps of attention to look at: how each head shares its attention out among the tokens, as an HTML page or a PNG.

Shapes:  S tokens, the special ones included.  A map is (S, S): row i is what token i looks at, and sums to 1.
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
    from matplotlib.figure import Figure

PAGE = Path(__file__).with_suffix(".html")
STEPS = 65_535  # a page holds each weight as one of so many steps from 0 to 1, in two bytes
MOST_WEIGHTS = 2_000_000  # on one page, which has then 5 MB
MOST_PIXELS = 40_000_000  # of a PNG
DPI = 100
CELL, GAP, LETTER = 0.14, 0.15, 0.065  # inches: of a weight, between maps, of a letter of 7 points


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The maps of one text, of some layers and heads.

    Args:
        tokens: S, as the vocabulary spells them.
        layers, heads: which were asked for, in the numbering of the unpruned model.
        weights: {(layer, head): (S, S)}, float32; a head that is not there is pruned.
    """

    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    weights: Mapping[tuple[int, int], Tensor]


def main(args: argparse.Namespace) -> int:
    path = Path(args.out)
    check, draw = drawing(path.suffix.lower())
    tokenizer = BertTokenizer.from_pretrained(args.model, revision=args.revision)
    model = BertModel.from_pretrained(args.model, add_pooling_layer=False, revision=args.revision)
    maps = attention_maps(model, tokenizer, args.text, args.pair, layers=args.layers, heads=args.heads, check=check)
    write_bytes(path, draw(maps))
    if args.json:
        write_json(args.json, facts(maps))
    gone = len(maps.layers) * len(maps.heads) - len(maps.weights)
    print(f"{path}: {len(maps.tokens)} tokens; heads drawn: {len(maps.weights)}, pruned: {gone}")
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
    """The weights of attention that a model gives to a text.

    Args:
        model: in eval mode; in training mode attention has dropout.
        pair: a second text, after the first one's [SEP].
        layers, heads: which of them, in the numbering of the unpruned model; by default all.
        check: raises what it has against the maps, such as `check_page`.  It is asked before they are computed: their
            weights are on the meta device then.

    Raises:
        ValueError: there is no such layer or head; the text has more tokens than the model takes; the weights are
            not numbers, as those of a damaged checkpoint.
    """
    config = model.config
    layers = chosen("layer", layers, config.num_hidden_layers)
    heads = chosen("head", heads, config.num_attention_heads)
    encoded = tokenizer(text, pair, return_tensors="pt")
    tokens = tuple(encoded.tokens())
    if len(tokens) > config.max_position_embeddings:
        raise ValueError(
            f"the text has {len(tokens)} tokens, and this model takes {config.max_position_embeddings}: shorten it"
        )
    places = {
        (layer, head): place
        for layer in layers
        for place, head in enumerate(kept_heads(config, layer))
        if head in heads
    }
    if check is not None:
        blank = torch.empty(len(tokens), len(tokens), device="meta")
        check(AttentionMaps(tokens, layers, heads, dict.fromkeys(places, blank)))
    given = model.base_model(**encoded.to(model.device), output_attentions=True).attentions
    weights = {(layer, head): given[layer][0, at].to("cpu", torch.float32) for (layer, head), at in places.items()}
    for (layer, head), each in weights.items():
        if each.isnan().any():
            raise ValueError(f"the attention of layer {layer}, head {head} is nan: is the checkpoint damaged?")
    return AttentionMaps(tokens, layers, heads, weights)


def chosen(what: str, numbers: Iterable[int] | None, count: int) -> tuple[int, ...]:
    """The layers or heads that were asked for, in their order, each once.

    Raises:
        ValueError: one that the model was not built with, or none.
    """
    if numbers is None:
        return tuple(range(count))
    asked = tuple(sorted(set(numbers)))
    for number in asked:
        if not 0 <= number < count:
            raise ValueError(f"there is no {what} {number}: this model was built with {count}, 0 to {count - 1}")
    if not asked:
        raise ValueError(f"no {what} was chosen; leave the choice out to have all {count}")
    return asked


def facts(maps: AttentionMaps) -> dict[str, Any]:
    """All of it, JSON-ready: weights[layer][head] is S lists of S numbers, or None for a pruned head."""

    def rows(layer: int, head: int) -> list[list[float]] | None:
        weights = maps.weights.get((layer, head))
        return None if weights is None else weights.tolist()

    return {
        "what": "bertlite attention",
        "tokens": list(maps.tokens),
        "weights": {str(layer): {str(head): rows(layer, head) for head in maps.heads} for layer in maps.layers},
    }


# Drawing -------------------------------------------------------------------------------------------------------------


def drawing(suffix: str) -> "tuple[Check, Draw]":
    """What says whether maps fit into a file of this kind, and what makes one.

    Raises:
        ValueError: there is no such kind.
        ModuleNotFoundError: it is drawn by matplotlib, which is not installed.
    """
    if suffix not in DRAWINGS:
        raise ValueError(f"a view of attention is {' or '.join(DRAWINGS)}, not {suffix or 'a file without a suffix'}")
    if suffix == ".png":
        plotting()
    return DRAWINGS[suffix]


def check_page(maps: AttentionMaps) -> None:
    """Whether a page holds these maps.

    Raises:
        ValueError: there are more than MOST_WEIGHTS.
    """
    count = len(maps.weights) * len(maps.tokens) ** 2
    if count > MOST_WEIGHTS:
        raise ValueError(
            f"{len(maps.weights)} maps of {len(maps.tokens)} tokens are {count:,} weights, and a page holds"
            f" {MOST_WEIGHTS:,}: choose layers or heads, or shorten the text"
        )


def page(maps: AttentionMaps) -> bytes:
    """An HTML page that needs nothing beside it: click on a head, point at a token or a weight.

    Raises:
        ValueError: as `check_page`.
    """
    check_page(maps)
    data = {
        "tokens": maps.tokens,
        "layers": maps.layers,
        "heads": maps.heads,
        "steps": STEPS,
        "weights": {f"{layer}.{head}": packed(weights) for (layer, head), weights in maps.weights.items()},
    }
    parts = {
        "title": html.escape(" ".join(maps.tokens)),
        "data": json.dumps(data).replace("<", "\\u003c"),  # or a token could end the script that it lies in
    }
    return re.sub(r"{{(\w+)}}", lambda mark: parts[mark[1]], PAGE.read_text(encoding="utf-8")).encode()


def packed(weights: Tensor) -> str:
    """A map row by row, each weight in STEPS as two bytes, the low one first, in base64."""
    return base64.b64encode((weights * STEPS).round().numpy().astype("<u2").tobytes()).decode()


def picture(maps: AttentionMaps) -> bytes:
    """`figure` as a PNG."""
    drawn = io.BytesIO()
    figure(maps).savefig(drawn, format="png", dpi=DPI)
    return drawn.getvalue()


@dataclass(frozen=True)
class Room:
    """The inches of a figure: of a map's side, of the labels beside the maps, and of the whole."""

    side: float
    left: float
    top: float
    width: float
    height: float


def room(maps: AttentionMaps) -> Room:
    """How large the figure of these maps is.

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
    return Room(side, left, top, width, height)


def figure(maps: AttentionMaps) -> "Figure":
    """A row of maps for each layer and a column for each head; those of pruned heads are blank and say so.

    Raises:
        ValueError: as `room`.
        ModuleNotFoundError: matplotlib is not installed.
    """
    new_figure, mappable, norm = plotting()
    size, rows = len(maps.tokens), len(maps.layers)
    inches = room(maps)
    side, left, top, width, height = inches.side, inches.left, inches.top, inches.width, inches.height
    drawn = new_figure(figsize=(width, height))
    colours = {"cmap": "Blues", "norm": norm(0.5, vmin=0, vmax=1)}  # roots: most weights are small
    for row, layer in enumerate(maps.layers):
        for column, head in enumerate(maps.heads):
            x, y = left + column * (side + GAP), height - top - row * (side + GAP) - side
            axes = drawn.add_axes((x / width, y / height, side / width, side / height))
            weights = maps.weights.get((layer, head))
            if weights is None:
                axes.set_facecolor("0.93")
                axes.text(0.5, 0.5, "pruned", transform=axes.transAxes, ha="center", va="center", size=7, color="0.4")
            else:
                axes.imshow(weights.numpy(), interpolation="nearest", aspect="auto", **colours)
            axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), xticks=[], yticks=[])
            if row == 0:
                axes.set_title(f"head {head}", size=8)
            if row == rows - 1:
                axes.set_xticks(range(size), maps.tokens, rotation=90, size=7, parse_math=False)
            if column == 0:
                axes.set_ylabel(f"layer {layer}", size=8)
                axes.set_yticks(range(size), maps.tokens, size=7, parse_math=False)
    scale = drawn.add_axes((1 - 0.8 / width, 1 - (top + 1.4) / height, 0.12 / width, 1.4 / height))
    drawn.colorbar(mappable(**colours), cax=scale).set_label("weight", size=8)
    scale.tick_params(labelsize=7)
    return drawn


def plotting() -> tuple[Any, Any, Any]:
    """What is drawn with: matplotlib's figure, its colours of numbers, and its powers of them."""
    try:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("a .png needs matplotlib: pip install 'bertlite[plot]', or write .html") from None
    return Figure, ScalarMappable, PowerNorm


Check = Callable[[AttentionMaps], object]
Draw = Callable[[AttentionMaps], bytes]
DRAWINGS: dict[str, tuple[Check, Draw]] = {".html": (check_page, page), ".png": (room, picture)}
