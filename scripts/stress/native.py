"""Run the native kernels on random models and batches, under a sanitizer and from Python, and look for faults.

    python -m scripts.stress.native                                  # a minute of each
    python -m scripts.stress.native --minutes 60 --out scripts/results/native.json
    python -m scripts.stress.native --minutes 5 --sanitizer thread   # races alone

A standalone program, scripts/stress/native_harness.cpp, is compiled with each sanitizer and run; it compares with a
plain loop in double precision.  Then whole models with random sizes, heads, masks and gates run in Python, against the
model in float64.  The minutes are shared out evenly.  Prints a line for each, and exits 1 at the first fault.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertlite import BertConfig, BertModel, optimize_for_inference, prune_heads, prune_neurons
from bertlite.cli.parts import names_of
from bertlite.runtime.library import SOURCES, cache_folder, find_compiler, own_folder, usable_sets
from bertlite.support.environment import environment
from bertlite.support.files import write_json

HARNESS = Path(__file__).with_name("native_harness.cpp")
SANITIZERS = {
    "address": ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
FLAGS = ("-std=c++17", "-O1", "-pthread")
KINDS = (*SANITIZERS, "python")
# relative to the largest number of the outputs
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.int8: 0.3}


class FaultError(Exception):
    """The findings, in words."""


def run_sanitized(sanitizer: str, seconds: float, seed: int) -> dict[str, Any]:
    """Run the harness with a sanitizer, for the best set of instructions."""
    best = usable_sets()[0]
    return run_harness([*find_compiler(), "-w", "-g", *best.flags, *SANITIZERS[sanitizer]], seconds, seed)


def run_harness(
    compiler: Sequence[str], seconds: float, seed: int, emulator: Sequence[str] = (), cases: int = -1
) -> dict[str, Any]:
    """Compile the harness if it is not in the user's cache, and run it for so long, or so many cases.

    Returns:
        The number of cases, their errors and the hash of their outputs.
    """
    sources = b"".join(path.read_bytes() for path in (HARNESS, *sorted(SOURCES.iterdir())))
    digest = hashlib.sha256(repr((*compiler, *FLAGS)).encode() + sources).hexdigest()
    program = own_folder(cache_folder()) / f"harness-{digest[:16]}"
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=program.parent) as folder:
            run_program([*compiler, *FLAGS, f"-I{SOURCES}", str(HARNESS), "-o", f"{folder}/harness"])
            os.replace(f"{folder}/harness", program)
    found: dict[str, Any] = json.loads(run_program([*emulator, str(program), str(seconds), str(seed), str(cases)]))
    return found


def run_program(command: Sequence[str]) -> str:
    """Run a command and return its standard output; raise FaultError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FaultError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return done.stdout


def random_model(random: torch.Generator) -> BertModel:
    """Make a model with random sizes, heads and neurons, and weights as training leaves them."""

    def draw(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=random))]

    heads, layers, neurons = draw(1, 2, 3), draw(1, 2, 3), draw(1, 37, 64, 200)
    buckets = draw(0, 4, 64)
    config = BertConfig(
        vocab_size=97,
        hidden_size=heads * draw(16, 20, 32, 48, 64, 80, 128),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=neurons,
        max_position_embeddings=140,
        position_embedding_type=("absolute", "relative_key", "relative_key_query", "disentangled")[draw(0, 1, 2, 3)],
        pos_att_type=("c2p", "p2c", "c2p|p2c")[draw(0, 1, 2)],
        position_buckets=buckets,
        max_relative_positions=draw(34, 80, 140),
        share_att_key=bool(draw(0, 1)),
        initializer_range=0.05,
    )
    torch.manual_seed(draw(*range(1000)))
    model = BertModel(config).double().eval()
    gone = {layer: range(draw(0, 0, 1, heads)) for layer in range(layers)}
    without = {layer: range(draw(0, 0, neurons // 2, neurons)) for layer in range(layers)}
    return prune_neurons(prune_heads(model, gone), without)


def random_inputs(model: BertModel, random: torch.Generator) -> dict[str, Any]:
    """Return a batch with a mask and perhaps gates."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    batch, length = draw(1, 6), draw(1, 140)
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    masks: list[Tensor | None] = [
        None,
        (torch.arange(length) < torch.randint(1, length + 1, (batch, 1), generator=random)).long(),
        (torch.rand(batch, length, generator=random) > 0.3).long(),
        torch.rand(batch, length, length, generator=random) > 0.5,
        torch.rand(batch, 1, length, length, generator=random) > 0.5,
    ]
    inputs: dict[str, Any] = {
        "input_ids": torch.randint(1, 97, (batch, length), generator=random),
        "attention_mask": masks[draw(0, len(masks) - 1)],
    }
    if draw(0, 1):
        inputs["head_mask"] = torch.rand(layers, batch, heads, generator=random)
    inputs[("first_token_only", "output_hidden_states", "output_attentions")[draw(0, 2)]] = True
    return inputs


def run_python(seconds: float, seed: int) -> dict[str, Any]:
    """Run whole models for so long; return how many, and the largest error of each dtype."""
    random, cases, worst = torch.Generator().manual_seed(seed), 0, {str(dtype): 0.0 for dtype in ALLOWED}
    end = time.monotonic() + seconds
    while time.monotonic() < end or not cases:
        model, cases = random_model(random), cases + 1
        inputs = random_inputs(model, random)
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            truth = model(**inputs).last_hidden_state
        mask, real = inputs["attention_mask"], torch.ones(truth.shape[:2], dtype=torch.bool)
        if mask is not None and mask.dim() == 2:
            real = mask[:, : truth.shape[1]].bool()  # one position with first_token_only
        truth = truth[real]  # padding is left out, and zeros
        for dtype, allowed in ALLOWED.items():
            ours = optimize_for_inference(model, dtype=dtype, backend="native")(**inputs).last_hidden_state[real]
            error = float((ours.double() - truth).abs().amax() / truth.abs().amax()) if len(truth) else 0.0
            worst[str(dtype)] = max(worst[str(dtype)], error)
            if not error <= allowed:
                shapes = {name: tuple(x.shape) if isinstance(x, Tensor) else x for name, x in inputs.items()}
                raise FaultError(
                    f"case {cases} of seed {seed} in {dtype}: error {error:.2e}; {shapes}; {model.config}"
                )
    return {"cases": cases, **worst}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3, help="of all together (default: %(default)s)")
    parser.add_argument(
        "--sanitizer",
        type=names_of("kind of run", list(KINDS)),
        default=list(KINDS),
        metavar="A,B",
        help=f"these alone, of {', '.join(KINDS)} (default: all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the same, and where it was run")
    args = parser.parse_args(argv)
    seconds, found = 60 * args.minutes / len(args.sanitizer), {}
    for kind in args.sanitizer:
        try:
            python = kind == "python"
            found[kind] = run_python(seconds, args.seed) if python else run_sanitized(kind, seconds, args.seed)
        except FaultError as fault:
            print(fault, file=sys.stderr)
            return 1
        print(f"{kind}: {json.dumps(found[kind])}", flush=True)
    if args.out:
        record = {"what": "scripts/stress/native.py", "minutes": args.minutes, "seed": args.seed, "runs": found}
        record["instructions"] = usable_sets()[0].name
        write_json(args.out, {**record, "environment": environment()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
