"""Write maps of attention as one HTML page, which needs no other file and no network.

The page is made of the files in web/.  Its content security policy allows only scripts and styles with their hashes,
so that no token can run code.
"""

import base64
import hashlib
import html
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bertlite.attention_view.maps import (
    TARGETS,
    AttentionMaps,
    Head,
    check_comparable,
    clarity,
    moved_share,
    target_shares,
    word_positions,
)
from bertlite.support.files import to_json

FOLDER = Path(__file__).parent / "web"
SCRIPTS = ("data.js", "sentence.js", "heads.js", "start.js")
STEPS = 4_095  # a page stores each weight as a number of steps from 0 to 1
MOST_WEIGHTS = 10_000_000  # the most weights on one page, which then has about 8 MB


class Page(bytes):
    """An HTML page; a notebook shows it if it is the last value of a cell."""

    def __repr__(self) -> str:
        return f"<an HTML page of {len(self):,} bytes>"

    def _repr_html_(self) -> str:
        """Return a frame with the page, which cannot reach the notebook."""
        style = "width: 100%; height: 760px; border: 0"
        content = html.escape(self.decode())
        return f'<iframe title="Attention" sandbox="allow-scripts" style="{style}" srcdoc="{content}"></iframe>'


def page(maps: AttentionMaps, against: AttentionMaps | None = None) -> Page:
    """Write an HTML page: choose heads in the map of all heads, and a token to see the tokens that it attends to.

    At the end of a notebook's cell, the page is shown; `Path("maps.html").write_bytes(page(maps))` writes a file.

    Args:
        against: maps of another checkpoint for the same tokens; the page then compares the two.

    Raises:
        ValueError: there are more than MOST_WEIGHTS weights, or the two cannot be compared.
    """
    # A browser holds only so many weights.
    models = [maps] if against is None else [maps, against]
    drawn = sum(len(each.weights) for each in models)
    count = drawn * len(maps.tokens) ** 2
    if count > MOST_WEIGHTS:
        raise ValueError(
            f"{drawn} maps of {len(maps.tokens)} tokens are {count:,} weights, and a page holds"
            f" {MOST_WEIGHTS:,}: choose layers or heads, or shorten the text"
        )

    # Heads are compared if both models have them.
    moved: dict[Head, float] = {}  # for heads that both models have
    if against is not None:
        check_comparable(maps, against)
        moved = {head: moved_share(maps, against, head) for head in maps.weights if head in against.weights}
    data = {
        "tokens": maps.tokens,
        "special": maps.special,
        "layers": maps.layers,
        "heads": maps.heads,
        # The script draws with these, and begins with the first map.
        "steps": STEPS,
        "targets": TARGETS,
        "first": choose_first(maps, against, moved),
        "models": [describe_model(each) for each in models],
        "moved": {format_head(head): round(share, 4) for head, share in moved.items()},
    }

    # The security policy names the hashes of exactly this style and script, so that no other code can run.
    style = read("page.css")
    script = '"use strict";\n' + "".join(map(read, SCRIPTS))
    parts = {
        "title": html.escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in title_of(maps))),
        "style": style,
        "style_hash": content_hash(style),
        "script": script,
        "script_hash": content_hash(script),
        "data": to_json(data).replace("<", "\\u003c"),  # otherwise a token could end the script element
    }
    return Page(re.sub(r"{{(\w+)}}", lambda mark: parts[mark[1]], read("page.html")).encode())


def title_of(maps: AttentionMaps) -> str:
    """Return the words of the text, for the title of the page."""
    words = " ".join(token for i, token in enumerate(maps.tokens) if i not in maps.special).replace(" ##", "")
    return words if len(words) <= 80 else f"{words[:79]}…"


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def content_hash(content: str) -> str:
    """Return the hash by which a content security policy names an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def format_head(head: Head) -> str:
    return f"{head[0]}.{head[1]}"


def describe_model(maps: AttentionMaps) -> dict[str, Any]:
    """Return a model's name, its weights, and each head's attention by kind of target."""
    return {
        "name": maps.name,
        "weights": {format_head(head): encode_weights(weights) for head, weights in maps.weights.items()},
        "shares": {format_head(head): [round(x, 3) for x in target_shares(maps, head)] for head in maps.weights},
    }


def encode_weights(weights: Tensor) -> str:
    """Encode a map in base64: the low bytes of all its steps, row by row, then the high ones, compressed by zlib."""
    steps = (weights * STEPS).round().numpy().astype("<u2")
    low, high = (steps & 255).astype("u1"), (steps >> 8).astype("u1")
    return base64.b64encode(zlib.compress(low.tobytes() + high.tobytes())).decode()


def choose_first(maps: AttentionMaps, against: AttentionMaps | None, moved: Mapping[Head, float]) -> dict[str, Any]:
    """Choose the head that the page shows first, with the reason, and the token that it shows of a long text."""
    words = word_positions(maps)
    if against is not None and max(moved.values(), default=0) > 0:
        head = max(moved, key=moved.__getitem__)
        share = f"{100 * moved[head]:.0f}\N{NO-BREAK SPACE}%"
        why = f"this one changed most of all heads that both have: {share} of its attention moved"
        by_word = (maps.weights[head] - against.weights[head]).abs().sum(1)[words]
        return {"head": head, "why": f"Shown first: {why}.", "token": words[int(by_word.argmax())]}
    clear = {head: clarity(maps, head) for head in maps.weights}
    if not clear:
        return {"head": (maps.layers[0], maps.heads[0]), "why": "Every head is pruned.", "token": words[0]}
    head = max(clear, key=lambda head: float(clear[head].mean()))
    why = "Shown first: its words attend most clearly to particular other words."
    return {"head": head, "why": why, "token": words[int(clear[head].argmax())]}
