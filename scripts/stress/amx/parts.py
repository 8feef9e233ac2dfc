"""Measure the errors of float32 on AMX's tiles, of every matmul of a checkpoint, with AMX emulated if it is missing.

    python -m scripts.stress.amx.parts CHECKPOINT... --out scripts/results/float32_parts.json

Each checkpoint runs the first 16 sentences of notebooks/sentences.txt in float32.  Each linear layer then multiplies
its inputs of their first 4 tokens three times: torch, the kernels by six products of bfloat16 on tiles, and the
kernels in float32 with AVX-512.  The record has the root mean squares of the errors against float64 as shares of
torch's: the median and the largest for each kind of layer.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertlite import BertModel, BertTokenizer
from bertlite.inference.native.linear import NativeLinear
from bertlite.parity.compare import rms_distance
from bertlite.runtime.library import INSTRUCTION_SETS, kernels_for, processor_flags
from bertlite.support.environment import environment
from bertlite.support.files import write_json
from scripts.stress.amx.__main__ import emulated

SENTENCES = Path(__file__).resolve().parents[3] / "notebooks/sentences.txt"
TEXTS, TOKENS = 16, 4


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="folders or hub ids")
    parser.add_argument("--out", type=Path, help="path of the record (default: none)")
    args = parser.parse_args(argv)
    if not INSTRUCTION_SETS["amx"].needs <= processor_flags():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "scripts.stress.amx.parts", *(sys.argv[1:] if argv is None else argv)]
            return subprocess.run(command, env={**os.environ, **emulated(Path(folder))}).returncode
    found = dict(map(measure, args.checkpoints))
    for name, kinds in found.items():
        for kind, ways in kinds.items():
            print(name, kind, *(f"{way} {x['median']:.2f} ({x['largest']:.2f})" for way, x in ways.items()), sep="  ")
    if args.out is not None:
        record = {"emulated": "LD_PRELOAD" in os.environ, "texts": TEXTS, "tokens": TOKENS, "shares_of_torch": found}
        write_json(args.out, {"what": "scripts.stress.amx.parts", **record, "environment": environment()})
    return 0


@torch.inference_mode()
def measure(checkpoint: str) -> tuple[str, dict[str, Any]]:
    """Return the shape of a checkpoint and {kind of layer: {way: {median, largest}}}, shares of torch's errors."""
    model = BertModel.from_pretrained(checkpoint).float()
    tokenizer = BertTokenizer.from_pretrained(checkpoint)
    linears = {name: part for name, part in model.encoder.named_modules() if isinstance(part, nn.Linear)}
    inputs: dict[nn.Module, list[Tensor]] = {part: [] for part in linears.values()}
    for part in linears.values():
        part.register_forward_hook(lambda part, args, out: inputs[part].append(args[0][0, :TOKENS]))
    for text in SENTENCES.read_text(encoding="utf-8").splitlines()[:TEXTS]:
        model(**tokenizer(text, return_tensors="pt"))
    shares: dict[str, dict[str, list[float]]] = {}
    for name, part in linears.items():
        x = torch.cat(inputs[part])
        truth = nn.functional.linear(x.double(), part.weight.double(), part.bias.double())
        kind = f"{name.partition('.')[2].partition('.')[2]}, {part.in_features} inputs"
        for way, kernels in {"tiles": kernels_for("amx"), "AVX-512": kernels_for("amx", True)}.items():
            ours = NativeLinear(part, torch.float32, kernels)(x)
            share = rms_distance(ours, truth) / rms_distance(nn.functional.linear(x, part.weight, part.bias), truth)
            shares.setdefault(kind, {}).setdefault(way, []).append(share)
    found = {
        kind: {way: {"median": statistics.median(x), "largest": max(x)} for way, x in ways.items()}
        for kind, ways in shares.items()
    }
    return f"{model.config.num_hidden_layers} layers of {model.config.hidden_size}", found


if __name__ == "__main__":
    raise SystemExit(main())
