"""Time texts to vectors on a GPU: `bertlite embed`, and sentence-transformers with graphs inside and without.

    python -m scripts.measure.gpu_embed MODEL --out OUT/embed-cuda.json    # a step of scripts.measure.gpu_checks
    python -m scripts.measure.gpu_embed MODEL --texts train.tsv --out FILE    # a text in each line, to its first tab

Without --texts there are as many texts as in SST-2's train.tsv, of its lengths and of the model's own words.  Engines
take turns, in one dtype; each keeps its own size of batch.  An engine that fails is named, and the rest is timed.
"""

import argparse
import itertools
import random
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertlite import Embedder, optimize_for_inference
from bertlite.support.environment import environment, version_of
from bertlite.support.files import write_json
from bertlite.support.timing import FEWEST, alternate, check_rounds
from bertlite.tokenizer import BertTokenizer
from scripts.measure.speed.batches import lengths_like
from scripts.measure.speed.rounds import summary

COUNT, LONGEST = 6919, 128  # texts of SST-2's train.tsv, and tokens of the longest that is made
STOCK, INSIDE, OURS = "sentence-transformers", "graphs inside sentence-transformers", "bertlite embed"
BATCHES = (32, 128, 512)  # texts
TOKENS = (4096, 12288)  # in a batch of `bertlite embed`, by its estimate
SECONDS = 120.0  # after which no round begins if there have been FEWEST


def made_texts(tokenizer: BertTokenizer, count: int) -> list[str]:
    """Return texts of whole words of a tokenizer, with the lengths of SST-2's in tokens."""
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and word.islower())
    draw = random.Random(0)
    return [" ".join(draw.choices(words, k=max(n - 2, 1))) for n in lengths_like("SST-2", count, LONGEST)]


def builders(model: str, device: str, dtype: str) -> dict[str, Callable[[], Callable[[list[str]], Any]]]:
    """Return functions that load each engine and return its `encode`, by name."""
    from sentence_transformers import SentenceTransformer

    graphs = "graphs" if torch.device(device).type == "cuda" else "plain"

    def stock() -> Any:
        settings = {"dtype": getattr(torch, dtype)}
        return SentenceTransformer(model, device=device, local_files_only=True, model_kwargs=settings)

    def inside() -> Any:
        return optimize_for_inference(stock(), backend=graphs)

    def encoding(load: Callable[[], Any], size: int) -> Callable[[list[str]], Any]:
        return partial(load().encode, batch_size=size, show_progress_bar=False)

    def ours(max_tokens: int) -> Callable[[list[str]], Any]:
        return Embedder(model, device=device, dtype=dtype, backend=graphs, max_tokens=max_tokens).encode

    return {
        **{f"{STOCK}, {size}": partial(encoding, stock, size) for size in BATCHES},
        **{f"{INSIDE}, {size}": partial(encoding, inside, size) for size in BATCHES},
        **{f"{OURS}, {size}": partial(ours, size) for size in TOKENS},
    }


def measure(model: str, texts: list[str], device: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Return the record: seconds and ratios, cosines to sentence-transformers', and the reasons of what failed."""
    vectors, runs, missing = {}, {}, {}
    for name, build in builders(model, device, dtype).items():
        try:
            run = build()
            vectors[name] = torch.as_tensor(run(texts)).double().cpu()
            runs[name] = partial(run, texts)
        except Exception as error:  # libraries raise many kinds: the rest is timed
            traceback.print_exc()
            missing[name] = f"{type(error).__name__}: {error}"
    first = f"{STOCK}, {BATCHES[0]}"
    names = [name for name in runs if name != first and first in runs]
    times = alternate(runs, rounds, device, warm=1, seconds=SECONDS)
    cosines = {name: torch.cosine_similarity(vectors[name], vectors[first]).min().item() for name in names}
    found = summary(f"{len(texts)} texts to vectors, {dtype}", times, [(first, name) for name in names])
    return {**found, "texts": len(texts), "cosines": cosines, "missing": missing}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with a sentence-transformers model")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="the texts, one in each line")
    parser.add_argument("--count", type=int, default=COUNT, help="the most texts (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=FEWEST, help="runs of each engine (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write the record")
    args = parser.parse_args(argv)
    check_rounds(args.rounds, name="--rounds")
    if args.texts is None:
        texts = made_texts(BertTokenizer.from_pretrained(args.model), args.count)
    else:
        lines = args.texts.read_text(encoding="utf-8").splitlines()
        texts = [line.partition("\t")[0] for line in itertools.islice(lines, args.count)]
    found = measure(args.model, texts, args.device, args.dtype, args.rounds)
    where = environment(args.device)
    where["versions"]["sentence-transformers"] = version_of("sentence-transformers")
    write_json(args.out, {**found, "environment": where})
    for name, row in found["seconds"].items():
        print(f"{name:<44} {row['median']:8.3f} s")
    print(*(f"missing: {name}: {reason}" for name, reason in found["missing"].items()), sep="\n")
    return int(bool(found["missing"]))


if __name__ == "__main__":
    raise SystemExit(main())
