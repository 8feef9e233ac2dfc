"""Load a packed folder again and again, then encode texts from several threads; record the memory of the process.

    python -m scripts.stress.soak MODEL TEXTS --out scripts/results/soak.json
    python -m scripts.stress.soak MODEL TEXTS --loads 20 --count 20000  # a minute

MODEL is a sentence-transformers folder, TEXTS a TSV whose first column is a text.  The first WORDS words of each are
taken, and repeated until there are enough.  A process without torch does the work, with one PackedModel for all
threads.  Resident memory is sampled PARTS times in each phase.  Memory is level if a line through the samples of the
second half of a phase rises by at most 1 % of the memory; the exit status is 1 otherwise.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertlite.shipping.pack import pack
from bertlite.support.environment import ROOT, environment
from bertlite.support.files import sha256_of, write_json

PARTS, LEVEL = 100, 0.01
CODE = """
import json, sys, threading, time
from bertlite.runtime import load
folder, path, loads, count, threads, parts = *sys.argv[1:3], *map(int, sys.argv[3:])
with open(path) as file:
    given = json.load(file)
size = 64  # texts of a call
calls, lock, end = iter(range(0, count, size)), threading.Lock(), threading.Event()
done, failures = [0], []

def memory():
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

def work():
    try:
        while True:
            with lock:
                start = next(calls, None)
            if start is None:
                end.wait()  # a thread that ends gives memory back
                return
            texts = [given[i % len(given)] for i in range(start, min(start + size, count))]
            model.encode(texts)
            with lock:
                done[0] += len(texts)
    except BaseException as error:
        failures.append(repr(error))

levels = {"loads": [], "texts": []}
for i in range(1, loads + 1):
    load(folder).encode(given[:1])
    if i * parts // loads > (i - 1) * parts // loads:
        levels["loads"].append([i, memory()])
model, began = load(folder), time.monotonic()
workers = [threading.Thread(target=work) for _ in range(threads)]
[each.start() for each in workers]
for part in range(1, parts + 1):
    while done[0] < count * part // parts and not failures:
        time.sleep(0.01)
    levels["texts"].append([done[0], memory()])
end.set()
[each.join() for each in workers]
assert not failures, failures
print(json.dumps({"seconds": time.monotonic() - began, "samples": levels}))
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with a sentence-transformers model")
    parser.add_argument("texts", type=Path, help="a TSV file, a text in the first column")
    parser.add_argument("--dtype", default="int8", help="(default: %(default)s)")
    parser.add_argument("--loads", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--count", type=int, default=1_000_000, help="of texts (default: %(default)s)")
    parser.add_argument("--words", type=int, default=8, help="of a text (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=8, help="that call one model (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="where to write the record")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="bertlite-soak-") as name:
        folder, texts = Path(name, "packed"), Path(name, "texts.json")
        pack(args.model, folder, dtype=args.dtype)
        lines = [line.partition("\t")[0] for line in args.texts.read_text(encoding="utf-8").splitlines()]
        texts.write_text(json.dumps([" ".join(line.split()[: args.words]) for line in lines]), encoding="utf-8")
        found = run(folder, texts, args.loads, args.count, args.threads)
    rises = {phase: rise(samples) for phase, samples in found["samples"].items()}
    record = {
        "what": "resident memory of one process without torch",
        "environment": environment(),
        "model": {"sha256": sha256_of(Path(args.model) / "model.safetensors"), "dtype": args.dtype},
        "data": {"sha256": sha256_of(args.texts), "texts": len(lines), "words": args.words},
        "loads": args.loads,
        "texts": args.count,
        "threads": args.threads,
        **found,
        "rise": rises,
        "level": all(each <= LEVEL for each in rises.values()),
    }
    for phase, samples in found["samples"].items():
        levels = ", ".join(f"{samples[len(samples) * i // 4 - 1][1] / 1e6:.1f}" for i in (1, 2, 3, 4))
        print(f"{phase}: {levels} MB after each quarter, rises by {rises[phase]:.2%} in the second half")
    if args.out:
        write_json(args.out, record)
    return 0 if record["level"] else 1


def run(folder: Path, texts: Path, loads: int, count: int, threads: int) -> dict[str, Any]:
    """Run both phases in a new process; return its seconds and samples, (done, bytes) of each phase."""
    command = [sys.executable, "-c", CODE, *map(str, (folder, texts, loads, count, threads, PARTS))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True, env=dict(os.environ))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rise(samples: Sequence[Sequence[int]]) -> float:
    """Return how far a line through the second half of (done, bytes) rises, as a share of its bytes there."""
    x, y = np.array(samples[len(samples) // 2 :], dtype=float).T
    return float(np.polyfit(x, y, 1)[0] * (x[-1] - x[0]) / y.mean())


if __name__ == "__main__":
    raise SystemExit(main())
