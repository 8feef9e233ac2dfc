"""Load, infer, prune, save and reload, over and over, and check that memory stays flat.

    python -m scripts.stress.soak --minutes 60 --out scripts/results/soak.json  # random weights, no download

Every round loads a checkpoint, runs it in every backend and optimised, prunes heads and neurons, saves, loads what was
saved and compares outputs bit for bit.  Prints memory and open files as it goes, and writes them with a verdict and
the machine's description.  Exits 1 if memory grew by more than --allowed MiB between the first fifth and the end, or
files stay open.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bertlite import BertConfig, BertModel, optimize_for_inference, prune_heads, prune_neurons
from bertlite.records import environment, write_record

SIZES: dict[str, Any] = {
    "vocab_size": 5003,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "intermediate_size": 520,
    "max_position_embeddings": 128,
}
SHAPES = ((1, 11), (5, 64), (3, 120))  # few: oneDNN keeps up to 1024 kernels, of every shape that it has met
BACKENDS = ("eager", "sdpa", "packed", "auto")


def resident() -> dict[str, int]:
    """Return the bytes of this process in memory: all, and its own, for pages of mapped files may go at any time."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(fields[field].split()[0]) * 1024 for name, field in (("rss", "VmRSS"), ("own", "RssAnon"))}


def a_round(number: int, folder: Path) -> None:
    """Run one round, with other texts, heads and neurons each time."""
    generator = torch.Generator().manual_seed(number)
    model = BertModel.from_pretrained(folder / "whole")
    batch, length = SHAPES[number % len(SHAPES)]
    ids = torch.randint(0, SIZES["vocab_size"], (batch, length), generator=generator)
    lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(length) < lengths).long()}
    layer, head = number % SIZES["num_hidden_layers"], number % SIZES["num_attention_heads"]
    with torch.inference_mode():
        for name in BACKENDS:
            model.set_attn_implementation(name)
            model(**inputs)
    optimize_for_inference(model)(**inputs)
    model = prune_neurons(prune_heads(model, {layer: [head]}), {layer: range(head * 10)})
    with torch.inference_mode():
        wanted = model(**inputs).last_hidden_state
        model.save_pretrained(folder / "pruned")
        again = BertModel.from_pretrained(folder / "pruned", attn_implementation=model.config.attn_implementation)
        assert again(**inputs).last_hidden_state.equal(wanted), f"round {number}: what was saved computes otherwise"


def soak(minutes: float, every: float) -> list[dict[str, float]]:
    """Run rounds for so long; return a row of measurements every so many seconds."""
    rows: list[dict[str, float]] = []
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        BertModel(BertConfig(**SIZES)).save_pretrained(folder / "whole")
        begun, number = time.monotonic(), 0
        while time.monotonic() - begun < minutes * 60 or len(rows) < 2:
            a_round(number, folder)
            number += 1
            seconds = time.monotonic() - begun
            if seconds >= every * len(rows):
                gc.collect()
                files = len(os.listdir("/proc/self/fd"))
                row = {"seconds": round(seconds, 1), "rounds": number, **resident(), "files": files}
                rows.append(row)
                print(row, flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=30, help="seconds between two looks at memory (30)")
    parser.add_argument("--allowed", type=float, default=16, help="MiB that memory may grow by (16)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write what was seen")
    args = parser.parse_args(argv)
    rows = soak(args.minutes, args.every)
    grown = (rows[-1]["own"] - max(row["own"] for row in rows[: max(1, len(rows) // 5)])) / 2**20
    leaked = rows[-1]["files"] - rows[0]["files"]
    verdict = {"flat": grown <= args.allowed and leaked <= 0, "grown_mib": round(grown, 2)}
    verdict |= {"allowed_mib": args.allowed, "files_left_open": leaked}
    print(verdict)
    if args.out:
        record = {"minutes": args.minutes, "verdict": verdict, "sizes": SIZES, "rows": rows}
        write_record(args.out, {**record, "environment": environment()})
    return int(not verdict["flat"])


if __name__ == "__main__":
    sys.exit(main())
