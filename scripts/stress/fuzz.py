"""Change whole checkpoints at random and load them: each must load or be refused, quickly and in little memory.

    python -m scripts.stress.fuzz                       # half a minute; what CI runs
    python -m scripts.stress.fuzz --examples 20000      # an hour or two
    python -m scripts.stress.fuzz --only zip --seed 7   # one kind of file, other changes
    python -m scripts.stress.fuzz --examples 5000 --out scripts/results/fuzz.json

Prints a line of JSON: for each kind of file how many changes were loaded and how many refused, the slowest of them
in seconds, and by how many KiB memory grew.  An error that is not one of ours ends the run, as a crash would, and
hypothesis prints the change that caused it.
"""

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from bertlite import BertModel, BertTokenizer
from bertlite.checkpoint.families import Origin
from bertlite.cli.parts import names_of
from bertlite.support.environment import environment
from bertlite.support.files import write_json
from scripts.make import hostile
from scripts.make.golden import SIZES

REFUSALS = (ValueError, FileNotFoundError)
PLACES = {  # the file that is changed
    "safetensors": "model.safetensors",
    "zip": "pytorch_model.bin",
    "2018": "pytorch_model.bin",
    "config": "config.json",
    "rotary": "config.json",
    "index": hostile.INDEX,
    "tokenizer": "tokenizer.json",
    "settings": "tokenizer_config.json",
    "vocabulary": "vocab.txt",
}
ANGLES = {"rope_type": "default", "rope_theta": 10000.0}
ROTARY = {  # fields of ModernBERT's config.json, with others inside them
    "model_type": "modernbert",
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "local_attention": 4,
    "global_attn_every_n_layers": 2,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {"full_attention": ANGLES, "sliding_attention": ANGLES},
    "rope_scaling": {"type": "ntk", "factor": 2.0},
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "to", "##ken"]

place = st.floats(0, 1)  # of a file; most of what can be misread is at its beginning, or, of a zip, at its end
near = st.one_of(place, place.map(lambda x: x**8), place.map(lambda x: 1 - x**8))
junk = st.one_of(
    st.binary(min_size=1, max_size=16), st.sampled_from([b"\xff" * 8, b"\0" * 8, b"{", b"9" * 40, b"../", b"-", b'"'])
)
Edit = tuple[float, float | None, bytes | None]  # the start, the end or None, and what is put there
edit = st.tuples(near, near | st.just(1.0) | st.none(), junk | st.sampled_from([b"", None]))
text = st.text("019aZ./\\{é\0\ud800", max_size=9)
value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text | st.integers(-(2**70), 2**70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


def mutated(whole: bytes, changes: list[Edit]) -> bytes:
    """Replace parts by junk, by nothing or, for None, by the part twice; without an end by as many bytes."""
    for a, b, data in changes:
        start = int(a * len(whole))
        start, end = sorted((start, start + len(data or b"") if b is None else int(b * len(whole))))
        whole = whole[:start] + (2 * whole[start:end] if data is None else data) + whole[end:]
    return whole


def base(kind: str, folder: Path) -> bytes:
    """Write a whole checkpoint of one kind; return the bytes of the file to change."""
    if kind == "index":
        hostile.shards()(folder)
    else:
        hostile.config_of(pruned_heads={}, id2label={"0": "a", "1": "b"})(folder)
    if kind == "rotary":
        values = {**SIZES, **ROTARY}
        (folder / "config.json").write_text(json.dumps(values))
        model = BertModel(Origin.of("config.json", values).config())
        save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    if kind in ("tokenizer", "settings", "vocabulary"):
        BertTokenizer(WORDS).save_pretrained(folder)
        if kind == "vocabulary":
            (folder / "tokenizer.json").unlink()
    if kind in ("zip", "2018"):
        (folder / "model.safetensors").unlink()
        torch.save(hostile.state(), folder / PLACES[kind], _use_new_zipfile_serialization=kind == "zip")
    return (folder / PLACES[kind]).read_bytes()


def fuzz(kind: str, examples: int, number: int) -> dict[str, float]:
    """Load a checkpoint with so many changes of a file's bytes, and as many of its values if it is JSON."""
    counts = {"loaded": 0, "refused": 0, "seconds": 0.0}
    folder = Path(tempfile.mkdtemp())
    whole = base(kind, folder)
    table = json.loads(whole) if PLACES[kind].endswith(".json") else {}
    cls: Any = BertTokenizer if kind in ("tokenizer", "settings", "vocabulary") else BertModel

    def load(data: bytes) -> None:
        (folder / PLACES[kind]).write_bytes(data)
        begun = time.perf_counter()
        try:
            cls.from_pretrained(folder)
            counts["loaded"] += 1
        except REFUSALS:
            counts["refused"] += 1
        counts["seconds"] = max(counts["seconds"], round(time.perf_counter() - begun, 3))

    rules = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    @rules
    @seed(number)
    @given(st.lists(edit, max_size=4))
    def bytes_differ(changes: list[Edit]) -> None:
        load(mutated(whole, changes))

    @rules
    @seed(number)
    @given(st.data())
    def values_differ(data: Any) -> None:
        changed = json.loads(json.dumps(table))
        inner = changed
        while data.draw(st.booleans()) and (deeper := [x for x in inner.values() if isinstance(x, dict) and x]):
            inner = data.draw(st.sampled_from(deeper))
        inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(value)
        load(json.dumps(changed).encode("utf-8", "surrogatepass"))

    try:
        load(whole)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        bytes_differ()
        if table:
            values_differ()
    finally:
        shutil.rmtree(folder)
    return {**counts, "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=40, help="of each kind of file (40)")
    kinds_of = names_of("kind of file", list(PLACES))
    parser.add_argument("--only", type=kinds_of, default=list(PLACES), metavar="A,B", help="kinds of file (all)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the same, and where it was run")
    args = parser.parse_args(argv)
    kinds = {kind: fuzz(kind, args.examples, args.seed) for kind in args.only}
    print(json.dumps(kinds))
    if args.out:
        record = {"what": "scripts/stress/fuzz.py", "examples": args.examples, "seed": args.seed, "kinds": kinds}
        write_json(args.out, {**record, "environment": environment()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
