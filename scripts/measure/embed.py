"""Time texts to vectors, `Embedder.encode` beside sentence-transformers' `encode`, each with its own settings.

    python -m scripts.measure.embed MODEL TEXT --out scripts/results/embed.json

Every line of TEXT that is neither empty nor a heading is a text, as in WikiText-2; --texts of them are taken, spread
evenly over the file.  Candidates alternate, so that a noisy machine is noisy for all of them.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertlite.embed import Embedder
from bertlite.lab.timing import FEWEST, alternate, check_rounds, summary, with_spread
from bertlite.records import environment, sha256_of, version_of, write_record

ROOT = Path(__file__).resolve().parents[2]

OURS, HALF, THEIRS = "bertlite", "bertlite, bfloat16", "sentence-transformers"
TOKENIZING = "bertlite, texts to tokens alone"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    check_rounds(args.rounds, name="--rounds")
    texts = paragraphs(args.text, args.texts)
    if not texts:
        print(f"{args.text} holds no paragraph", file=sys.stderr)
        return 2
    ours, half, theirs = Embedder(args.model), Embedder(args.model, dtype="bfloat16"), peer(args.model)
    wanted = theirs(texts)
    errors = {name: float(np.abs(each.encode(texts) - wanted).max()) for name, each in ((OURS, ours), (HALF, half))}
    candidates: dict[str, Callable[[], Any]] = {
        THEIRS: lambda: theirs(texts),
        OURS: lambda: ours.encode(texts),
        HALF: lambda: half.encode(texts),
        TOKENIZING: lambda: ours.tokenize(texts),
    }
    times = alternate(candidates, args.rounds, warm=1, seconds=args.seconds)
    lengths = [len(row) for row in ours.tokenize(texts)]
    where = environment()
    where["versions"][THEIRS] = version_of(THEIRS)
    over = [(THEIRS, OURS), (THEIRS, HALF), (TOKENIZING, OURS)]
    record = {
        **summary("texts to vectors, in float32 unless named", times, over),
        "environment": where,
        "model": {"sha256": ours.fingerprint()},
        "data": {"sha256": sha256_of(args.text), "texts": len(texts), "tokens": sum(lengths), "longest": max(lengths)},
        "largest_difference": errors,
    }
    print(report(record))
    if args.out:
        write_record(args.out, record)
        print(f"record: {args.out}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with a sentence-transformers model in float32")
    parser.add_argument("text", type=Path, help="a text file, a paragraph in each line")
    parser.add_argument("--texts", type=int, default=600, help="number of texts (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each candidate (default: %(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=150,
        help=f"time limit, after which no round begins if there have been {FEWEST} (default: %(default)s)",
    )
    parser.add_argument("--out", metavar="FILE", help="where to write the record")
    return parser.parse_args(argv)


def paragraphs(path: Path, count: int) -> list[str]:
    """Return `count` of the file's paragraphs, spread evenly over it; all if there are fewer."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    found = [line for line in lines if line and not line.startswith("= ")]
    count = min(count, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def peer(model: str) -> Callable[[list[str]], Any]:
    """Return the `encode` of sentence-transformers with the same model."""
    try:
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError:
        sys.exit("this compares with sentence-transformers: pip install sentence-transformers")
    return SentenceTransformer(model, device="cpu", local_files_only=True).encode


def report(record: dict[str, Any]) -> str:
    """Write tokens per second and ratios in lines."""
    tokens = record["data"]["tokens"]
    lines = [
        f"{name:<32} {tokens / row['median']:11,.0f} tokens/s {row['median']:8.3f} s"
        f" ({row['low']:.3f} to {row['high']:.3f})"
        for name, row in record["seconds"].items()
    ]
    lines += [
        f"{name}: {with_spread(record['ratios'][f'{THEIRS} / {name}'])} times as fast; largest difference {error:.0e}"
        for name, error in record["largest_difference"].items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
