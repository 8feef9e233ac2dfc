"""Measure gradient checkpointing, its peak memory and step time, and compare it with transformers' own.

    python -m scripts.measure.checkpointing --out scripts/results/checkpointing.json
    python -m scripts.measure.checkpointing --device cuda --dtype bfloat16 --batch-size 32

One step is a forward, a loss over every token and a backward, on a random model with layers of bert-base's shape in
training mode, dropout on.  Candidates alternate, so that a noisy machine is noisy for all of them.  Peak memory is the
memory that a step allocates beyond weights and gradients; the vocabulary is small, so that the gradient of its table
does not hide the layers.  "ragged" is the same batch with the lengths given by --lengths, right-padded.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import bertlite
from bertlite.cli.parts import numbers
from bertlite.parity import reference
from bertlite.support.environment import environment
from bertlite.support.files import write_json
from bertlite.support.timing import FEWEST, alternate, check_rounds, with_spread
from scripts.measure.speed.memory import peak_bytes
from scripts.measure.speed.rounds import summary

Step = Callable[[], None]
OPTIONS: dict[str, dict[str, Any] | None] = {  # options of gradient_checkpointing_enable; None does not checkpoint
    "plain": None,
    "every layer": {},
    "every 2nd layer": {"every_n_layers": 2},
    "every 3rd layer": {"every_n_layers": 3},
    "every layer, offloaded": {"offload": True},
}
VOCABULARY = 1000
BASE = "transformers, plain"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--batch-size", dest="batch", type=int, default=4, help="sequences")
    parser.add_argument("--length", type=int, default=128, help="tokens of the longest")
    parser.add_argument(
        "--lengths", type=numbers, default="1,0.3,0.25,0.15", metavar="A,B,…", help="of the ragged batch, as shares"
    )
    parser.add_argument("--layers", type=int, default=6, help="layers of the model")
    parser.add_argument("--hidden", type=int, default=768, help="size of the states")
    parser.add_argument("--rounds", type=int, default=FEWEST, help="runs of each candidate")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--out", metavar="FILE", help="where to write the record")
    args = parser.parse_args(argv)
    check_rounds(args.rounds, name="--rounds")
    reference.version()  # raises where transformers is not installed, and names the way to get it
    record: dict[str, Any] = {
        "what": "scripts/measure/checkpointing.py",
        "environment": environment(args.device),
        "args": vars(args),
    }
    for kind in ("full", "ragged"):
        inputs = inputs_of(args, kind)
        found = measure(candidates(args, inputs), args.rounds, args.device)
        record[kind] = {"tokens": int(inputs["attention_mask"].sum()), **found}
        show(kind, record[kind])
    if args.out:
        write_json(args.out, record)
    return 0


def inputs_of(args: argparse.Namespace, kind: str) -> dict[str, Tensor]:
    shares = args.lengths if kind == "ragged" else [1.0]
    lengths = torch.tensor([max(1, round(shares[i % len(shares)] * args.length)) for i in range(args.batch)])
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (args.batch, args.length), generator=draw)
    mask = (torch.arange(args.length) < lengths[:, None]).long()
    return {"input_ids": ids.to(args.device), "attention_mask": mask.to(args.device)}


def candidates(args: argparse.Namespace, inputs: Mapping[str, Tensor]) -> dict[str, Step]:
    """Return the steps to compare; one model of each library serves all its settings."""
    import transformers

    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": args.layers, "hidden_size": args.hidden}
    sizes |= {"num_attention_heads": args.hidden // 64, "intermediate_size": 4 * args.hidden}
    theirs = transformers.BertModel(transformers.BertConfig(**sizes))
    ours = bertlite.BertModel(bertlite.BertConfig(**sizes))
    for model in (theirs, ours):
        model.to(args.device, getattr(torch, args.dtype)).train()
    settings: dict[str, tuple[Any, str, Mapping[str, Any] | None]] = {
        **{f"transformers, {name}": (theirs, "sdpa", OPTIONS[name]) for name in ("plain", "every layer")},
        **{f"bertlite {each}, {name}": (ours, each, OPTIONS[name]) for each in ("sdpa", "packed") for name in OPTIONS},
    }
    return {name: partial(step, inputs, *setting) for name, setting in settings.items()}


def step(inputs: Mapping[str, Tensor], model: Any, backend: str, options: Mapping[str, Any] | None) -> None:
    model.set_attn_implementation(backend)
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # transformers 5's name
    getattr(model, f"{kind}_checkpointing_disable")()
    if options is not None:
        getattr(model, f"{kind}_checkpointing_enable")(**options)
    model.zero_grad(set_to_none=False)  # gradients stay where they are, and out of the peak
    out = model(**inputs).last_hidden_state
    (out.float().square() * inputs["attention_mask"][..., None]).sum().backward()


def measure(steps: Mapping[str, Step], rounds: int, device: str) -> dict[str, Any]:
    """Measure each candidate, after one step that does not count.

    Returns:
        "rounds"; "rows", {candidate: median and quartiles of the seconds, and "peak_bytes"}; "ratios" of the seconds
        to transformers' without checkpointing, with quartiles.
    """
    peaks = {}
    for name, run in steps.items():
        run()  # does not count
        peaks[name] = peak_bytes(run, device)
    times = alternate(steps, rounds, device, warm=0)
    found = summary("one step", times, [(name, BASE) for name in steps if name != BASE])
    rows = {name: {**row, "peak_bytes": peaks[name]} for name, row in found["seconds"].items()}
    return {"rounds": found["rounds"], "rows": rows, "ratios": found["ratios"]}


def show(kind: str, part: Mapping[str, Any]) -> None:
    """Print seconds and peaks, and their ratios to transformers' without checkpointing."""
    print(f"\n{kind}: {part['tokens']} tokens; time and peak over those of {BASE}")
    for name, row in part["rows"].items():
        share = with_spread(part["ratios"][f"{name} / {BASE}"]) if name != BASE else "1"
        peak = row["peak_bytes"] / part["rows"][BASE]["peak_bytes"]
        print(
            f"  {name:<40} {with_spread(row, '.3f')} s  {row['peak_bytes'] / 1e6:8.1f} MB   {share:<18}  {peak:5.2f}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
