"""Gradient checkpointing on both its axes, peak memory and step time, beside transformers' own.

    python -m scripts.measure.checkpointing --json scripts/results/checkpointing.json
    python -m scripts.measure.checkpointing --device cuda --dtype bfloat16 --batch 32

One step is a forward, a loss over every token and a backward, on a random model with layers of bert-base's shape in
training mode, dropout on.  Candidates alternate, so that a noisy machine is noisy for all of them.  Peak memory is
what the step allocates beyond weights and gradients (bertlite.lab.timing.peak_bytes); the vocabulary is small, so
that the gradient of its table does not hide the layers.  "ragged" is the same batch with the lengths given by
--lengths, right-padded.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bertlite
from bertlite.lab.timing import peak_bytes
from bertlite.parity import reference
from bertlite.records import environment, write_json

ROOT = Path(__file__).resolve().parents[2]

Step = Callable[[], None]
OURS: dict[str, dict[str, Any] | None] = {  # how each candidate checkpoints
    "plain": None,
    "every layer": {},
    "every 2nd layer": {"every_n_layers": 2},
    "every 3rd layer": {"every_n_layers": 3},
    "every layer, offloaded": {"offload": True},
}
VOCABULARY = 1000
THEIRS = {"plain": False, "every layer": True}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    reference.version()  # says how to get transformers where there is none
    record: dict[str, Any] = {
        "what": "benchmark_checkpointing.py",
        "environment": environment(args.device),
        "args": vars(args),
    }
    for kind in ("full", "ragged"):
        inputs = inputs_of(args, kind)
        rows = measure(candidates(args, inputs), args.rounds, args.device)
        record[kind] = {"tokens": int(inputs["attention_mask"].sum()), "rows": rows}
        show(kind, record[kind])
    if args.json:
        write_json(args.json, record)
        print(f"\nrecord: {args.json}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="sequences (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of the longest (default: %(default)s)")
    parser.add_argument(
        "--lengths", type=float, nargs="+", default=[1.0, 0.3, 0.25, 0.15], help="of the ragged batch, as shares of it"
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5, help="how often each candidate runs (default: %(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--json", help="where to write the record")
    return parser.parse_args(argv)


def inputs_of(args: argparse.Namespace, kind: str) -> dict[str, Tensor]:
    shares = args.lengths if kind == "ragged" else [1.0]
    lengths = torch.tensor([max(1, round(shares[i % len(shares)] * args.length)) for i in range(args.batch)])
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (args.batch, args.length), generator=draw)
    mask = (torch.arange(args.length) < lengths[:, None]).long()
    return {"input_ids": ids.to(args.device), "attention_mask": mask.to(args.device)}


def candidates(args: argparse.Namespace, inputs: Mapping[str, Tensor]) -> dict[str, Step]:
    """What is compared; one model of each library serves all its settings."""
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": args.layers,
        "hidden_size": args.hidden,
        "num_attention_heads": args.hidden // 64,
        "intermediate_size": 4 * args.hidden,
    }
    dtype = getattr(torch, args.dtype)
    theirs = transformers.BertModel(transformers.BertConfig(**sizes, attn_implementation="sdpa"))
    ours = bertlite.BertModel(bertlite.BertConfig(**sizes))
    for model in (theirs, ours):
        model.to(args.device, dtype).train()

    def their_step(on: bool) -> Step:
        def run() -> None:
            name = "activation" if hasattr(theirs, "activation_checkpointing_enable") else "gradient"
            getattr(theirs, f"{name}_checkpointing_{'enable' if on else 'disable'}")()
            step(theirs, inputs)

        return run

    def our_step(backend: str, options: Mapping[str, Any] | None) -> Step:
        def run() -> None:
            ours.set_attn_implementation(backend)
            ours.gradient_checkpointing_disable()
            if options is not None:
                ours.gradient_checkpointing_enable(**options)
            step(ours, inputs)

        return run

    return {
        **{f"transformers, {name}": their_step(on) for name, on in THEIRS.items()},
        **{
            f"bertlite {backend}, {name}": our_step(backend, options)
            for backend in ("sdpa", "packed")
            for name, options in OURS.items()
        },
    }


def step(model: Any, inputs: Mapping[str, Tensor]) -> None:
    model.zero_grad(set_to_none=False)  # gradients stay where they are, and out of the peak
    out = model(**inputs).last_hidden_state
    (out.float().square() * inputs["attention_mask"][..., None]).sum().backward()


def measure(steps: Mapping[str, Step], rounds: int, device: str) -> dict[str, dict[str, float]]:
    """{candidate: median and quartiles of the seconds, and the peak in bytes}, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    peaks = {}
    for name, run in steps.items():
        run()  # which does not count
        peaks[name] = peak_bytes(run, device)
    for _ in range(rounds):
        for name, run in steps.items():
            start = time.perf_counter()
            run()
            if device != "cpu":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    table = {}
    for name, times in seconds.items():
        low, median, high = statistics.quantiles(times, n=4)
        table[name] = {"median": median, "low": low, "high": high, "best": min(times), "peak_bytes": peaks[name]}
    return table


def show(kind: str, part: Mapping[str, Any]) -> None:
    rows = part["rows"]
    print(f"\n{kind}: {part['tokens']} tokens;  time and peak as shares of transformers' with the same or no setting")
    for name, row in rows.items():
        base = rows["transformers, plain" if name.endswith("plain") else "transformers, every layer"]
        time_share, peak_share = (row[key] / base[key] for key in ("median", "peak_bytes"))
        seconds = f"{row['median']:7.3f} s ({row['low']:.3f} to {row['high']:.3f})"
        peak = f"{row['peak_bytes'] / 1e6:8.1f} MB"
        print(f"  {name:<40} {seconds}  {peak}   {time_share:5.2f}  {peak_share:5.2f}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
