"""Time texts to vectors: `Embedder.encode`, sentence-transformers with torch and OpenVINO, and other engines.

    python -m scripts.measure.embed MODEL TEXT --out scripts/results/embed.json
    python -m scripts.measure.embed MODEL TEXT --only float32,bfloat16

Every line of TEXT that is neither empty nor a heading is a text, as in WikiText-2; --texts of them are taken, spread
evenly over the file.  Each engine has its own settings for batches, and the same number of threads. Its vectors are
compared with float64 before it is timed.  Candidates alternate, so that a noisy machine is noisy for all of them.
Engines that are not installed are listed.  OpenVINO's int8 is calibrated on texts of the same file.  onnxruntime,
which computes tokens alone, runs in the place of the model inside sentence-transformers.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertlite import Embedder
from bertlite.cli.parts import names
from bertlite.runtime.library import NativeKernelsError
from bertlite.support.environment import environment, version_of
from bertlite.support.files import sha256_of, write_json
from bertlite.support.timing import alternate, check_rounds, with_spread
from scripts.measure.speed.accuracy import accuracy
from scripts.measure.speed.engines import ALL, ENGINES, FLOATS, Engine, openvino_settings
from scripts.measure.speed.rounds import summary

TORCH, OPENVINO = "sentence-transformers torch", "sentence-transformers OpenVINO"
TOKENIZING = "bertlite, texts to tokens alone"
VERSIONS = ("sentence-transformers", "optimum-intel", "openvino", "nncf")
CALIBRATION = 64  # texts
OTHERS = ("onnxruntime",)  # of scripts/measure/speed/engines.py
SECONDS = 150  # after which no round begins if there have been FEWEST

Encode = Callable[[list[str]], Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with a sentence-transformers model in float32")
    parser.add_argument("text", type=Path, help="a text file, a paragraph in each line")
    parser.add_argument("--only", type=names, default=("",), metavar="A,B", help="engines with these in the name")
    parser.add_argument("--texts", type=int, default=600, help="number of texts (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each candidate (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="where to write the record")
    args = parser.parse_args(argv)
    check_rounds(args.rounds, name="--rounds")
    texts = paragraphs(args.text, args.texts)
    if not texts:
        print(f"{args.text} holds no paragraph", file=sys.stderr)
        return 2
    engines, missing = build(args.model, args.only, texts)
    right = torch.as_tensor(with_torch(args.model, "float64")(texts)).double()
    found = {name: accuracy(torch.as_tensor(each(texts)).double(), right, None) for name, each in engines.items()}
    wrong = [name for name, each in found.items() if not each.is_right(name.split()[-1])]
    candidates = {name: partial(each, texts) for name, each in engines.items() if name not in wrong}
    if not any(name.startswith("bertlite") for name in candidates):
        reasons = "; ".join([*(f"{name}: {reason}" for name, reason in missing.items()), *wrong])
        print(f"no engine of bertlite can be timed: {reasons or 'none matches --only'}", file=sys.stderr)
        return 2
    embedder = Embedder(args.model)
    candidates[TOKENIZING] = partial(embedder.encoder.tokenizer, texts, truncation=True)
    times = alternate(candidates, args.rounds, warm=1, seconds=SECONDS)
    lengths = [len(row) for row in embedder.encoder.tokenizer(texts, truncation=True)["input_ids"]]
    where = environment()
    where["versions"] |= {name: version_of(name) for name in VERSIONS}
    record = {
        **summary("texts to vectors", times, ratio_pairs(list(times))),
        "environment": where,
        "model": {"sha256": embedder.loaded.sha256},
        "data": {"sha256": sha256_of(args.text), "texts": len(texts), "tokens": sum(lengths), "longest": max(lengths)},
        "errors": {name: each.error for name, each in found.items()},
        "cosines": {name: each.cosine for name, each in found.items()},
        "wrong": wrong,
        "missing": missing,
    }
    print(report(record))
    if args.out:
        write_json(args.out, record)
    return 0


def paragraphs(path: Path, count: int) -> list[str]:
    """Return `count` of the file's paragraphs, spread evenly over it; all if there are fewer."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    found = [line for line in lines if line and not line.startswith("= ")]
    count = min(count, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def build(model: str, only: Sequence[str], texts: list[str]) -> tuple[dict[str, Encode], dict[str, str]]:
    """Return the engines by name and dtype, the peers first, and the reason why each other engine is missing."""
    others = [(engine, dtype) for engine in ENGINES if engine.name in OTHERS for dtype in engine.dtypes]
    builders: dict[str, Callable[[], Encode]] = {
        **{f"{TORCH} {dtype}": partial(with_torch, model, dtype) for dtype in FLOATS},
        **{f"{OPENVINO} {dtype}": partial(with_openvino, model, dtype, texts) for dtype in ALL},
        **{f"{engine.name} {dtype}": partial(with_engine, model, engine, dtype) for engine, dtype in others},
        **{f"bertlite native {dtype}": partial(ours, model, dtype) for dtype in ALL},
    }
    reasons = {f"{engine.name} {dtype}": engine.reason_missing("cpu") for engine, dtype in others}
    chosen = [name for name in builders if any(part in name for part in only)]
    engines, missing = {}, {name: reason for name in chosen if (reason := reasons.get(name))}
    for name in chosen:
        if name not in missing:
            try:
                engines[name] = builders[name]()
            except ImportError as error:
                missing[name] = f"not installed: {error}"
            except NativeKernelsError as error:
                missing[name] = str(error)
    return engines, missing


def ours(model: str, dtype: str) -> Encode:
    """Return `encode` of bertlite with the native kernels, loaded; NativeKernelsError if there are none here."""
    embedder = Embedder(model, backend="native", dtype=dtype)
    assert embedder.encoder
    return embedder.encode


def load(model: str, dtype: str) -> Any:
    from sentence_transformers import SentenceTransformer

    settings = {"dtype": getattr(torch, dtype)}
    return SentenceTransformer(model, device="cpu", local_files_only=True, model_kwargs=settings)


def with_torch(model: str, dtype: str) -> Encode:
    """Return `encode` of sentence-transformers with torch."""
    encode: Encode = load(model, dtype).encode
    return encode


def with_openvino(model: str, dtype: str, texts: Sequence[str]) -> Encode:
    """Return `encode` of sentence-transformers with OpenVINO, through optimum-intel.

    int8 is its static quantisation, as `export_static_quantized_openvino_model` makes it, here calibrated on texts.
    """
    import optimum.intel  # noqa: F401  # sentence-transformers would raise another error if it is missing
    from sentence_transformers import SentenceTransformer

    settings = {"ov_config": dict(openvino_settings(dtype)), "export": True}
    loaded = SentenceTransformer(model, device="cpu", backend="openvino", local_files_only=True, model_kwargs=settings)
    if dtype == "int8":
        quantise(loaded, texts)
    encode: Encode = loaded.encode
    return encode


def with_engine(model: str, engine: Engine, dtype: str) -> Encode:
    """Return `encode` of sentence-transformers with an engine in the place of its model."""
    loaded = load(model, "float32")
    with tempfile.TemporaryDirectory() as exported:  # read when it is built
        folder = Path(shutil.copytree(model, exported, dirs_exist_ok=True))
        run = engine.build(folder, dtype, "cpu")

    def forward(features: dict[str, Any], **_: Any) -> dict[str, Any]:
        states = run({name: features[name] for name in ("input_ids", "attention_mask")})[0]
        return {**features, "token_embeddings": torch.as_tensor(states)}

    loaded[0].forward = forward
    encode: Encode = loaded.encode
    return encode


def quantise(loaded: Any, texts: Sequence[str]) -> None:
    """Replace the model inside by one of 8 bits, with nncf's scales for these texts."""
    import nncf

    inside = loaded.transformers_model
    samples = [dict(loaded.tokenizer(text, truncation=True, return_tensors="np")) for text in texts[:CALIBRATION]]
    wanted = {port.get_any_name() for port in inside.model.inputs}
    data = nncf.Dataset([{name: x for name, x in sample.items() if name in wanted} for sample in samples])
    inside.model = nncf.quantize(inside.model, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(samples))
    inside.clear_requests()
    inside.compile()


def ratio_pairs(timed: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of peer and engine, whose ratio says how much faster the engine is; and tokenizing's share."""
    base = f"{TORCH} float32"
    own = [name for name in timed if name.startswith("bertlite") and name != TOKENIZING]
    pairs = [(base, name) for name in timed if base in timed and name not in (base, TOKENIZING)]
    pairs += [(peer, name) for name in own if (peer := f"{OPENVINO} {name.split()[-1]}") in timed]
    return [*pairs, *((TOKENIZING, name) for name in own)]


def report(record: Mapping[str, Any]) -> str:
    """Write tokens per second, errors and ratios in lines."""
    tokens, width = record["data"]["tokens"], max(map(len, record["seconds"]))
    lines = []
    for name, row in record["seconds"].items():
        error = f"  error {record['errors'][name]:.0e}" if name in record["errors"] else ""
        spread = f"{row['median']:8.3f} s ({row['low']:.3f} to {row['high']:.3f})"
        lines.append(f"{name:<{width}} {tokens / row['median']:11,.0f} tokens/s {spread}{error}")
    lines += [f"{pair}: {with_spread(ratio)}" for pair, ratio in record["ratios"].items() if TOKENIZING not in pair]
    lines += [f"WRONG  {name}: error {record['errors'][name]:.1e}, so it is not timed" for name in record["wrong"]]
    return "\n".join([*lines, *(f"missing: {name}: {reason}" for name, reason in record["missing"].items())])


if __name__ == "__main__":
    raise SystemExit(main())
