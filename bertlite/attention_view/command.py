"""Draw maps of attention: `attention`, and `bertlite attention`, its command."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from os.path import exists, isdir
from pathlib import Path
from typing import Any

from bertlite.attention_view.maps import AttentionMaps, attention_maps, check_comparable, make_record
from bertlite.attention_view.pages import page
from bertlite.checkpoint.folders import check_file_output
from bertlite.models.base import BertModel
from bertlite.opened.checkpoint import Checkpoint
from bertlite.support.files import write_bytes
from bertlite.support.process import door


@door
def attention(
    checkpoint: str | PathLike[str],
    text: str,
    pair: str | None = None,
    *,
    against: str | PathLike[str] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    html: str | PathLike[str] | None = None,
) -> dict[str, Any]:
    """Compute the attention weights that each head of a checkpoint gives to the tokens of a text, and draw them.

    Args:
        pair: a second text, after the first one's [SEP].
        against: a checkpoint to compare with, which has the same layers, heads and tokenizer, or no tokenizer.
        layers, heads: numbered as in the unpruned model; by default all.
        html: the page to write; by default none.

    Returns:
        The record: the tokens, and under "weights" {layer: {head: rows}}, None for a pruned head; with `against` its
        weights too.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: there is no such layer or head, or the text is too long, or the checkpoints cannot be compared, or
            the page would replace another file.
    """
    both = [Checkpoint.of(each) for each in (checkpoint, against) if each is not None]
    if html is not None:
        check_file_output(Path(html).expanduser(), *both)
    if isdir(str(text)) and not exists(fspath(checkpoint)):
        raise ValueError(f"{text} is a folder: a checkpoint is named before its text")

    # The maps of each checkpoint; one without a tokenizer is read with the tokenizer of the one before.
    found: list[AttentionMaps] = []
    for each, name in zip(both, short_names(*map(str, both)), strict=True):
        try:
            tokenizer = each.tokenizer
        except FileNotFoundError:
            if each.files and not found:  # it raises if there is no model either
                raise
            warnings.warn(f"{each} has no tokenizer: the text is read with {checkpoint}'s", stacklevel=1)
        model = BertModel.from_pretrained(each, add_pooling_layer=False)
        found.append(attention_maps(model, tokenizer, text, pair, layers=layers, heads=heads, name=name))

    # The page comes last, so that an error leaves no file behind.
    if against is not None:
        check_comparable(*found)
    if html is not None:
        write_bytes(fspath(html), page(*found))
    return make_record(*found)


def summary_lines(record: Mapping[str, Any], out: Mapping[str, Path]) -> Iterator[str]:
    """Yield the number of tokens and of heads that are drawn, and the files, in words."""
    summary = count_heads(record["weights"])
    if other := record.get("against"):
        summary = f"{record['model']}: {summary}; {other['model']}: {count_heads(other['weights'])}"
    written = ", ".join(map(str, out.values())) or "the record"
    yield f"{written}: {len(record['tokens'])} tokens; {summary}"


def count_heads(weights: Mapping[str, Mapping[str, object]]) -> str:
    """Return in words how many heads are drawn and how many are pruned."""
    rows = [each for heads in weights.values() for each in heads.values()]
    return f"heads drawn: {len(rows) - rows.count(None)}, pruned: {rows.count(None)}"


def short_names(*paths: str) -> list[str]:
    """Return a short name of each checkpoint: a folder's, with enough parents to distinguish them."""
    parts = [Path(each).resolve().parts[1:] if Path(each).is_dir() else (each,) for each in paths]
    depth = 1
    while len({each[-depth:] for each in parts}) < len(parts) and depth < max(map(len, parts)):
        depth += 1
    return ["/".join(each[-depth:]) for each in parts]
