"""Measure packed folders without torch, onnxruntime and OpenVINO GenAI: start, first text, memory, 64 texts.

    python -m scripts.measure.runtime MODEL TEXTS --wheel PYTHON --genai PYTHON --out scripts/results/runtime.json

MODEL is a sentence-transformers folder, TEXTS a TSV whose first column is a text (SST-2's dev.tsv).  --wheel is a
Python with the bertlite-runtime wheel alone, --genai one with openvino-genai, openvino-tokenizers, transformers and,
for int8, nncf, which chooses scales for 300 texts that are not timed.

Each measurement is a new process with one thread, and engines take turns.  Engines that are not installed are listed.

start   CPU seconds until a folder is loaded, beyond importing numpy and tokenizers; checksums included
first   seconds of the first text
peak    the largest resident memory until then, in bytes
texts   seconds of 64 texts in batches of 32
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertlite.shipping.export import export
from bertlite.shipping.pack import pack
from bertlite.support.environment import environment
from bertlite.support.files import sha256_of, write_json
from bertlite.support.timing import check_rounds, quartiles

TEXTS, BATCH, REPEATS = 64, 32, 5
CALIBRATION = 364  # OpenVINO's scales are for the texts from TEXTS to this one
BEGIN = """
import json, math, sys, time
import numpy as np, tokenizers
folder, dtype, path, batch, repeats = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
texts = json.load(open(path))

def memory(name):
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

began = time.process_time()
"""
ENGINES = {  # each defines `encode`, of a list of texts; vectors have length 1
    "bertlite runtime": """
from bertlite_runtime import load
encode = load(folder, threads=1).encode
""",
    "onnxruntime": """
import onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(f"{folder}/{dtype}.onnx", options)
tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
tokenizer.enable_padding()
tokenizer.enable_truncation(256)

def encode(texts):
    rows = tokenizer.encode_batch(texts)
    mask = np.array([row.attention_mask for row in rows])
    ids, kinds = np.array([row.ids for row in rows]), np.array([row.type_ids for row in rows])
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds}
    (states,) = session.run(["last_hidden_state"], given)
    x = (states * mask[..., None].astype(np.float32)).sum(1)
    return x / np.linalg.norm(x, axis=1, keepdims=True)
""",
    "OpenVINO GenAI": """
import openvino_genai
kind = openvino_genai.TextEmbeddingPipeline
config = kind.Config()
config.pooling_type, config.normalize, config.max_length = kind.PoolingType.MEAN, True, 256
has_bfloat16 = "avx512_bf16" in open("/proc/cpuinfo").read()  # which OpenVINO then takes between 8-bit matmuls
hint = "bf16" if dtype == "bfloat16" or (dtype == "int8" and has_bfloat16) else "f32"
encode = kind(folder, "CPU", config, INFERENCE_PRECISION_HINT=hint, INFERENCE_NUM_THREADS=1).embed_documents
""",
}
MEASURE = """
start, clock = time.process_time() - began, time.perf_counter()
encode(["Time flies like an arrow."])
first, peak, seconds = time.perf_counter() - clock, memory("VmHWM"), math.inf
for _ in range(repeats):
    clock = time.perf_counter()
    vectors = [encode(texts[i:i + batch]) for i in range(0, len(texts), batch)]
    seconds = min(seconds, time.perf_counter() - clock)
from importlib.metadata import distributions  # here, where it adds nothing to the peak
known = ("numpy", "tokenizers", "bertlite-runtime", "onnxruntime", "openvino", "openvino-genai", "nncf")
versions = {each.name: each.version for each in distributions() if each.name in known}
vectors = np.concatenate(vectors).astype(float).round(6).tolist()
times = {"start": start, "first": first, "peak": peak, "texts": seconds}
print(json.dumps({**times, "vectors": vectors, "versions": versions}))
"""
CONVERT = """
import sys, openvino
from openvino_tokenizers import convert_tokenizer
from transformers import AutoTokenizer
graphs, out = sys.argv[1:3]
graph = openvino.convert_model(f"{graphs}/onnx/model.onnx")
states = openvino.Model([graph.output("last_hidden_state")], graph.get_parameters(), "states")
openvino.save_model(states, f"{out}/openvino_model.xml", compress_to_fp16=False)
openvino.save_model(convert_tokenizer(AutoTokenizer.from_pretrained(graphs)), f"{out}/openvino_tokenizer.xml")
"""
QUANTISE = """
import json, shutil, sys, nncf, openvino
from transformers import AutoTokenizer
graphs, given, out, path = sys.argv[1:5]
graph, tokenizer = openvino.Core().read_model(f"{given}/openvino_model.xml"), AutoTokenizer.from_pretrained(graphs)
wanted = [port.get_any_name() for port in graph.inputs]
rows = [tokenizer(text, truncation=True, max_length=256, return_tensors="np") for text in json.load(open(path))]
samples = nncf.Dataset([{name: row[name] for name in wanted} for row in rows])
kind = nncf.ModelType.TRANSFORMER
openvino.save_model(nncf.quantize(graph, samples, model_type=kind, subset_size=len(rows)), f"{out}/openvino_model.xml")
for end in ("xml", "bin"):
    shutil.copy(f"{given}/openvino_tokenizer.{end}", out)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with a sentence-transformers model in float32")
    parser.add_argument("texts", type=Path, help="a TSV file, a text in the first column")
    parser.add_argument("--wheel", type=Path, required=True, help="a Python with bertlite-runtime alone")
    parser.add_argument("--genai", type=Path, help="a Python with openvino-genai (default: leave it out)")
    parser.add_argument("--rounds", type=int, default=9, help="processes of each engine (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="where to write the record")
    args = parser.parse_args(argv)
    check_rounds(args.rounds, name="--rounds")
    lines = args.texts.read_text(encoding="utf-8").splitlines()
    texts, others = ([line.partition("\t")[0] for line in part] for part in (lines[:TEXTS], lines[TEXTS:CALIBRATION]))
    with tempfile.TemporaryDirectory(prefix="bertlite-runtime-") as name:
        home = Path(name)
        (home / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
        (home / "calibration.json").write_text(json.dumps(others), encoding="utf-8")
        engines, missing = prepare(args, home)
        found: dict[str, list[dict[str, Any]]] = {each: [] for each in engines}
        for _ in range(args.rounds):
            for each, (python, folder) in engines.items():
                engine, _, dtype = each.rpartition(" ")
                code = BEGIN + ENGINES[engine] + MEASURE
                found[each].append(child(python, code, folder, dtype, home / "texts.json", BATCH, REPEATS))
        sizes = {each: size_of(folder) for each, (_, folder) in engines.items() if each.startswith("bertlite")}
    record = {
        "what": "packed folders without torch, with one thread",
        "environment": environment(),
        "model": {"sha256": sha256_of(Path(args.model) / "model.safetensors")},
        "data": {"sha256": sha256_of(args.texts), "texts": len(texts), "batch": BATCH},
        "rounds": args.rounds,
        "engines": {each: summarised(rows, sizes.get(each)) for each, rows in with_cosines(found).items()},
        "missing": missing,
        "image": {"what": "an environment of Python with the wheel alone", "bytes": size_of(args.wheel.parents[1])},
    }
    print(json.dumps(record["engines"], indent=1))
    if args.out:
        write_json(args.out, record)
    return 0


def prepare(args: argparse.Namespace, home: Path) -> tuple[dict[str, tuple[Path, Path]], dict[str, str]]:
    """Write the folder of each engine; return {engine and dtype: (Python, folder)}, and why others are missing."""
    engines, missing = {}, {}
    for dtype in ("int8", "bfloat16", "float32"):
        pack(args.model, home / dtype, dtype=dtype)
        engines[f"bertlite runtime {dtype}"] = args.wheel, home / dtype
    graphs, ov, here = home / "graphs", home / "openvino", Path(sys.executable)
    export(args.model, graphs)
    shutil.copy(graphs / "onnx" / "model.onnx", graphs / "float32.onnx")
    try:
        from onnxruntime.quantization import quantize_dynamic

        quantize_dynamic(graphs / "float32.onnx", graphs / "int8.onnx")
        engines |= {f"onnxruntime {dtype}": (here, graphs) for dtype in ("int8", "float32")}
    except ImportError as error:
        missing["onnxruntime"] = str(error)
    if args.genai is None:
        return engines, missing | {"OpenVINO GenAI": "--genai names no Python"}
    ov.mkdir()
    subprocess.run([args.genai, "-c", CONVERT, graphs, ov], check=True, capture_output=True)
    engines |= {f"OpenVINO GenAI {dtype}": (args.genai, ov) for dtype in ("bfloat16", "float32")}
    quantised = home / "openvino8"
    quantised.mkdir()
    command = [args.genai, "-c", QUANTISE, graphs, ov, quantised, home / "calibration.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return engines, missing | {"OpenVINO GenAI int8": done.stderr.strip().splitlines()[-1]}
    return {**engines, "OpenVINO GenAI int8": (args.genai, quantised)}, missing


def child(python: Path, code: str, *arguments: object) -> dict[str, Any]:
    """Run code in a new process; return the JSON that it prints."""
    command = [str(python), "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{python} failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def with_cosines(found: Mapping[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows with the smallest cosine of each engine's vectors with the runtime's in float32."""
    wanted = found["bertlite runtime float32"][0]["vectors"]
    for rows in found.values():
        pairs = zip(rows[0].pop("vectors"), wanted, strict=True)
        rows[0]["cosine"] = min(sum(a * b for a, b in zip(x, y, strict=True)) for x, y in pairs)
    return dict(found)


def summarised(rows: list[dict[str, Any]], size: int | None) -> dict[str, Any]:
    """Return the median and quartiles of each measured value, and the values that are the same each time."""
    measured = {name: quartiles([row[name] for row in rows]) for name in ("start", "first", "peak", "texts")}
    folder = {} if size is None else {"folder": size}
    return {**measured, **folder, "cosine": rows[0]["cosine"], "versions": rows[0]["versions"]}


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder, links not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() or path.is_symlink())


if __name__ == "__main__":
    raise SystemExit(main())
