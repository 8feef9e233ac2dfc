"""Run `bertlite attention`."""

import argparse
import warnings
from pathlib import Path

from bertlite.attention_view.maps import AttentionMaps, attention_maps, check_comparable, make_record
from bertlite.attention_view.pages import page
from bertlite.checkpoint.files import Source, find_checkpoint
from bertlite.models.base import BertModel
from bertlite.support.records import write_bytes, write_json
from bertlite.tokenizer import BertTokenizer


def main(args: argparse.Namespace) -> int:
    """Compute the maps of one or two checkpoints and write the outputs of --out and --json."""
    first, second = short_names(args.checkpoint, args.against)
    tokenizer = BertTokenizer.from_pretrained(args.checkpoint)
    maps = load_maps(args, args.checkpoint, first, tokenizer)
    against = None
    if args.against:
        try:
            tokenizer = BertTokenizer.from_pretrained(args.against)
        except FileNotFoundError:
            find_checkpoint(Source(args.against))  # raises if there is no model either
            warnings.warn(f"{args.against} has no tokenizer: the text is read with {args.checkpoint}'s", stacklevel=1)
        against = load_maps(args, args.against, second, tokenizer)
        check_comparable(maps, against)
    if html := args.out.get(".html"):
        write_bytes(html, page(maps, against))
    if args.record:
        write_json(args.record, make_record(maps, against))
    summary = (
        describe_maps(maps)
        if against is None
        else f"{first}: {describe_maps(maps)}; {second}: {describe_maps(against)}"
    )
    written = ", ".join(map(str, args.out.values())) or "the record"
    print(f"{written}: {len(maps.tokens)} tokens; {summary}")
    return 0


def load_maps(args: argparse.Namespace, checkpoint: str, name: str, tokenizer: BertTokenizer) -> AttentionMaps:
    """Compute the maps of one checkpoint for the text of the command line."""
    model = BertModel.from_pretrained(checkpoint, add_pooling_layer=False)
    return attention_maps(model, tokenizer, args.text, args.pair, layers=args.layers, heads=args.heads, name=name)


def describe_maps(maps: AttentionMaps) -> str:
    """Describe how many heads are drawn and how many are pruned."""
    gone = len(maps.layers) * len(maps.heads) - len(maps.weights)
    return f"heads drawn: {len(maps.weights)}, pruned: {gone}"


def short_names(checkpoint: str, against: str | None) -> tuple[str, str]:
    """Return a short name of each checkpoint: a folder's, with enough parents to distinguish the two."""
    one, other = (
        Path(path).resolve().parts[1:] if path and Path(path).is_dir() else (path or "",)
        for path in (checkpoint, against)
    )
    depth = 1
    while one[-depth:] == other[-depth:] and depth < max(len(one), len(other)):
        depth += 1
    return "/".join(one[-depth:]), "/".join(other[-depth:])
