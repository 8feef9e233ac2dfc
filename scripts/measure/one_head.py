"""Remove the heads of a classifier one at a time, and all heads of a layer but one, as Michel et al. 2019 did.

    python -m scripts.measure.one_head CHECKPOINT --train train.tsv --dev dev.tsv --columns text,label \\
        --max-length 64 --examples 872 --out scripts/results/one_head/sst2.json

Paul Michel, Omer Levy, Graham Neubig: Are Sixteen Heads Really Better than One?  NeurIPS 2019, arXiv:1905.10650.
Section 3.2 removes each head alone; section 3.3 all heads of a layer but one, chosen here on training examples.
CHECKPOINT is a folder or a hub id of a sequence classifier with its tokenizer.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from bertlite import kept_heads, optimize_for_inference, prune_heads
from bertlite.cli.parts import RECORD, count, integer, paths
from bertlite.cli.prune import data_options
from bertlite.experiments.command import data_source
from bertlite.experiments.data import EncodedExamples, read_examples, read_tokenizer
from bertlite.experiments.evaluate import TASKS, predict
from bertlite.experiments.files import model_sha256
from bertlite.opened.checkpoint import Checkpoint
from bertlite.support.environment import environment
from bertlite.support.files import write_json
from bertlite.support.progress import Progress

TASK = TASKS["classification"]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    model = Checkpoint.of(args.checkpoint).load(TASK.model_class)
    tokenizer = read_tokenizer(Checkpoint.of(args.checkpoint), args.max_length)
    sources = [read_examples(data_source(vars(args), name)) for name in ("train", "dev")]
    for examples in sources:
        TASK.check(examples, model.config)
    dev = TASK.encode(sources[1].sample(args.examples, args.seed), tokenizer)
    chosen_on = TASK.encode(sources[0].sample(args.examples // 2, args.seed + 1), tokenizer)
    layers = {
        layer: kept for layer in range(model.config.num_hidden_layers) if (kept := kept_heads(model.config, layer))
    }
    heads = [(layer, head) for layer, kept in layers.items() for head in kept]
    dense = outcome(model, dev, {})

    def change(gone: Mapping[int, Sequence[int]]) -> dict[str, float]:
        return changes(dense, outcome(model, dev, gone))

    def others(layer: int, head: int) -> dict[int, list[int]]:
        return {layer: [other for other in layers[layer] if other != head]}

    def score(layer: int, head: int) -> float:
        return alone[layer, head]

    rows: list[dict[str, Any]] = []
    alone: dict[tuple[int, int], float] = {}
    with Progress(len(heads), "heads", what="one head") as progress:
        for layer, head in heads:
            rows.append({"layer": layer, "head": head, "zero": change({layer: [head]})})
            alone[layer, head] = float(outcome(model, chosen_on, others(layer, head))[1].mean())
            progress.advance()
    best = {layer: max(kept, key=partial(score, layer)) for layer, kept in layers.items()}  # of equals the first
    single = [{"layer": layer, "head": head, **change(others(layer, head))} for layer, head in best.items()]
    rests = {layer: others(layer, head)[layer] for layer, head in best.items()}
    record = {
        "what": "one_head",
        "environment": environment(),
        "data": {"train": sources[0].sha256, "dev": sources[1].sha256},
        "model": model_sha256(model),
        "examples": {"dev": len(dev), "choice": len(chosen_on)},
        "seed": args.seed,
        "cpu_seconds": round(time.process_time()),
        "dense": {"loss": float(dense[0].mean()), "accuracy": float(dense[1].mean())},
        "heads": rows,
        "one_head_a_layer": single,
        "one_head_in_every_layer": change(rests),
    }
    write_json(args.out[RECORD], record)
    print(f"{len(heads)} heads: {args.out[RECORD]}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for add in data_options():
        add(parser)
    parser.add_argument(
        "--examples", type=count, default=256, metavar="N", help="drawn of each (default: %(default)s)"
    )
    parser.add_argument("--seed", type=integer, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--out", type=paths((RECORD,)), required=True, metavar="FILE.json", help="the record")
    return parser.parse_args(argv)


def outcome(
    model: Any, data: EncodedExamples, heads: Mapping[int, Sequence[int]]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the loss of every example without these heads, and whether the prediction is right."""
    pruned = optimize_for_inference(prune_heads(model, heads), verify=False)
    outputs = torch.from_numpy(predict(pruned, data, TASK)).double()
    labels = torch.tensor(data.labels).long()
    losses = torch.nn.functional.cross_entropy(outputs, labels, reduction="none")
    return losses.numpy(), (outputs.argmax(-1) == labels).numpy()


def changes(dense: tuple[Any, Any], after: tuple[Any, Any]) -> dict[str, float]:
    """Return the increase of the mean loss, its standard error over examples, and predictions gained and lost."""
    increase = after[0] - dense[0]
    return {
        "loss": float(increase.mean()),
        "standard_error": float(increase.std(ddof=1) / len(increase) ** 0.5),
        "accuracy": float(after[1].mean()),
        "gained": int((after[1] & ~dense[1]).sum()),
        "lost": int((dense[1] & ~after[1]).sum()),
    }


if __name__ == "__main__":
    raise SystemExit(main())
