"""Run everything that needs a CUDA device, with the Python, torch and transformers of that machine.

    python -m scripts.measure.gpu_checks all-MiniLM-L6-v2 --out OUT
    python -m scripts.measure.gpu_checks all-MiniLM-L6-v2 --out OUT --steps speed,parity --minutes 9
    python -m scripts.measure.gpu_checks all-MiniLM-L6-v2 --out OUT --commit SHA    # where the files are an archive's

Installs nothing.  Writes into OUT the output of each step and the records that belong into scripts/results:
parity-cuda.json, speed-cuda.json, embed-cuda.json, limits-cuda.json and checkpointing-cuda-{base,large}.json. Each has
the goals of scripts/measure/gpu_goals.py and whether they are met. checks-cuda.json has all goals and names the steps
that were not run. When a step fails the next one still runs.  A case of parity that ends its process is noted as one
that differs, a section of speed as missing; then the step goes on behind it.  checks-cuda.json is written after each
step.  Exits 1 if any failed.  Without a GPU, `tests/test_device.py`
runs every path on a second device that the CPU computes.

Three runs for a machine that ends a command after 10 minutes, by estimate for an H200; all into one OUT, whose records
the later ones read:

    --minutes 9 --steps tests,limits,embed      # 4, 1 and 2 minutes: Triton compiles some 300 kernels
    --minutes 9 --steps speed,checkpointing     # 6 minutes, most of them torch.compile's, and 1
    --minutes 9 --steps parity,speed-large      # 4 minutes, and as long as there is time

A machine that takes 64 MiB gets the model in 16 bits, 45 MB:

    python -c "from sentence_transformers import SentenceTransformer as ST; \
        ST('all-MiniLM-L6-v2', model_kwargs={'dtype': 'float16'}).save('minilm')"
"""

import argparse
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from bertlite.support.environment import git_state
from scripts.measure import gpu_goals

ROOT = Path(__file__).resolve().parents[2]
JOURNAL = "parity.jsonl"
RECORD = f"{gpu_goals.SPEED}.json"
NOTES = {"parity": JOURNAL, "speed": RECORD, "speed-large": RECORD}  # {step: the file that notes how far it came}
STEPS = ("tests", "limits", "embed", "speed", "parity", "checkpointing", "speed-large")  # the most telling ones first
MARKED = re.compile(r"mark\.gpu|\bwith_triton\b")  # in files with tests for a GPU
WORKERS = 4  # processes of pytest, most of whose time goes to Triton's compiler


def commands(out: Path, checkpoint: str) -> dict[str, list[list[str]]]:
    """Return {step: its commands}, each to be run from the checkout's root."""
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARKED.search(path.read_text("utf-8"))]
    test = ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
    test += ["-n", str(WORKERS)] if find_spec("xdist") else []
    cuda = ["--device", "cuda", "--out"]
    memory = ["-m", "scripts.measure.checkpointing", "--dtype", "bfloat16", "--batch-size", "32", "--length", "512"]
    steps = {
        # a process for each file, since an error of CUDA fails all that follows it
        "tests": [[*test, str(path)] for path in marked],
        "parity": [
            [
                *["-m", "scripts.measure.gpu_parity", checkpoint, "--journal", f"{out}/{JOURNAL}"],
                *[*cuda, f"{out}/parity-cuda.json"],
            ],
        ],
        "embed": [["-m", "scripts.measure.gpu_embed", checkpoint, *cuda, f"{out}/embed-cuda.json"]],
        "limits": [["-m", "scripts.measure.gpu_goals", *cuda, f"{out}/limits-cuda.json"]],
        "checkpointing": [
            [*memory, "--layers", "12", *cuda, f"{out}/checkpointing-cuda-base.json"],
            [*memory, "--layers", "24", "--hidden", "1024", *cuda, f"{out}/checkpointing-cuda-large.json"],
        ],
    }
    for step, model in zip(("speed", "speed-large"), gpu_goals.SHAPES, strict=True):
        speed = ["-m", "scripts.measure.speed", "--models", model, "--engines", "bfloat16", "--resume"]
        steps[step] = [[*speed, "--only", "forward,by autocast", *cuda, f"{out}/{RECORD},{out}/models"]]
    return {step: [[sys.executable, *words] for words in runs] for step, runs in steps.items()}


def run_to_end(step: str, words: Sequence[str], out: Path, until: float = math.inf) -> bool:
    """Run a command; return whether it succeeded.

    If an error or a signal ends its process and a file of NOTES says where, it is run again and goes on behind that.
    """
    notes = out / NOTES.get(step, "none")
    while True:
        noted = notes.stat().st_size if notes.exists() else 0
        status = run(step, words, out, until)
        if status in (0, 1) or not notes.exists() or notes.stat().st_size == noted:
            return status == 0


def run(step: str, words: Sequence[str], out: Path, until: float = math.inf) -> int:
    """Run a command, with its output on the terminal and in STEP.txt; return its exit status.

    Args:
        until: the time.monotonic() at which the command ends, with all processes that it started.
    """
    print(f"\n== {step}: {' '.join(words)}", flush=True)
    start = time.perf_counter()
    settings = {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with (out / f"{step}.txt").open("a", 1, encoding="utf-8") as log:  # line by line: this process may be ended too
        child = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        stop = partial(os.killpg, child.pid, signal.SIGKILL)
        timer = threading.Timer(min(max(until - time.monotonic(), 0), threading.TIMEOUT_MAX), stop)
        timer.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                print(line, end="", flush=True)
                log.write(line)
        except KeyboardInterrupt:
            stop()
            raise
        finally:
            timer.cancel()
    print(f"== {step}: exit {child.wait()} after {time.perf_counter() - start:.0f} s", flush=True)
    return child.returncode


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a folder of a trained BERT with its tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a folder for the records")
    parser.add_argument("--steps", default=",".join(STEPS), metavar="A,B", help="which (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="end the running step then")
    parser.add_argument("--resume", action="store_true", help="go on behind what OUT has of parity and speed")
    parser.add_argument("--commit", metavar="SHA", help="the commit of these files, if git does not know it")
    args = parser.parse_args(argv)
    if args.commit:
        os.environ["BERTLITE_COMMIT"] = args.commit
    if git_state() is None:
        parser.error("git does not know the commit of these files: name it by --commit")
    unknown = [name for name in args.steps.split(",") if name not in STEPS]
    if unknown:
        parser.error(f"--steps: there is no {unknown[0]!r}; have: {', '.join(STEPS)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, start = parse(argv), time.monotonic()
    steps = commands(args.out.resolve(), str(Path(args.checkpoint).resolve()))
    if not torch.cuda.is_available():
        sys.exit(f"this torch ({torch.__version__}) sees no CUDA device")
    args.out.mkdir(parents=True, exist_ok=True)
    results, until = dict.fromkeys(STEPS, "not run"), start + 60 * args.minutes
    wanted = args.steps.split(",")
    for step in {*wanted} & {*NOTES} - {"speed-large"} if not args.resume else ():  # which adds to speed's record
        (args.out / NOTES[step]).unlink(missing_ok=True)
    for step in wanted:
        if time.monotonic() >= until:
            break
        succeeded = [run_to_end(step, words, args.out, until) for words in steps[step]]
        results[step] = "passed" if all(succeeded) else "failed"
        gpu_goals.write_verdicts(args.out, results)
    return int("failed" in results.values())


if __name__ == "__main__":
    raise SystemExit(main())
