"""Prune to speeds by the command, distil for some epochs, and judge on examples that neither has seen.

    python -m scripts.measure.budget_clock CHECKPOINT --train FILE --dev FILE --text a --targets 2x,4x \
        --out runs/clock,FILE.json

CHECKPOINT is fine-tuned on the training examples.  `bertlite prune to` gets their texts without labels, `bertlite
prune finetune --teacher CHECKPOINT` the labels too.  Needs a quiet machine: the speeds are those of a clock.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertlite import BertConfig
from bertlite.cli import main as run_command
from bertlite.cli.parts import FOLDER, RECORD, names, number, paths
from bertlite.cli.prune import add_data
from bertlite.experiments.command import data_source
from bertlite.experiments.data import Examples, read_examples, read_tokenizer
from bertlite.experiments.evaluate import TASKS, evaluate, predict
from bertlite.experiments.files import class_names, model_sha256
from bertlite.records import environment, is_finished, read_runs, write_record

TASK = TASKS["classification"]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    classes = class_names(BertConfig.from_json_file(Path(args.checkpoint) / "config.json"))
    dev = read_examples(data_source(args, args.dev, None), classes=classes)
    rows = []
    for target in args.targets:
        small, tuned = (args.out[FOLDER] / f"{kind}-{target}" for kind in ("pruned", "tuned"))
        if not small.exists():
            command = ["prune", "to", target, args.checkpoint, "--texts", args.train, "--text", *args.text]
            if run_command([*command, "--max-length", str(args.max_length), "--at", args.at, "--out", str(small)]) > 1:
                return 2
        if not is_finished(tuned):
            words = [str(small), "--train", args.train, "--dev", args.dev, "--text", *args.text]
            words += ["--label", args.label, "--max-length", str(args.max_length), "--teacher", args.checkpoint]
            words += ["--epochs", str(args.epochs), "--lr", str(args.lr), "--out", str(tuned)]
            if run_command(["prune", "finetune", *words]):
                return 2
        rows.append(row(target, small, tuned, dev, args.max_length))
        print(rows[-1], flush=True)
    dense = score(args.checkpoint, dev, args.max_length)
    setting = {name: getattr(args, name) for name in ("epochs", "lr", "max_length")}
    setting |= {"model": model_sha256(TASK.load(args.checkpoint)), "dev": dev.sha256, "metric": TASK.headline}
    record = {"what": "scripts/measure/budget_clock.py", **setting}
    write_record(args.out[RECORD], {**record, "dense": dense, "rows": rows, "environment": environment()})
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.measure.budget_clock",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_data(parser)
    parser.add_argument("--targets", type=names, default=("2x", "4x"), metavar="A,B", help="(default: 2x,4x)")
    parser.add_argument("--at", default="8x128", metavar="BxS", help="work of the speeds (default: %(default)s)")
    parser.add_argument("--epochs", type=number, default=2.0, help="of distillation (default: %(default)s)")
    parser.add_argument("--lr", type=number, default=1e-4, help="of distillation (default: %(default)s)")
    parser.add_argument(
        "--out", type=paths((RECORD, FOLDER)), required=True, metavar="FOLDER,FILE.json", help="models, and the record"
    )
    return parser.parse_args(argv)


def score(checkpoint: str | Path, dev: Examples, max_length: int) -> float:
    """Return the task's headline of a checkpoint on these examples."""
    data = TASK.encode(dev, read_tokenizer(str(checkpoint), max_length))
    return float(evaluate(predict(TASK.load(str(checkpoint)), data, TASK), data.targets(), TASK)[TASK.headline])


def row(target: str, small: Path, tuned: Path, dev: Examples, max_length: int) -> dict[str, Any]:
    """Return what became of a target: its speed, and scores before and after distillation."""
    report = json.loads((small / "report.json").read_text(encoding="utf-8"))
    (run,) = read_runs(tuned)
    return {
        "target": target,
        **{name: report[name] for name in ("speedup", "macs", "work", "met", "heads_kept", "neurons_kept")},
        "search_seconds": report["wall_seconds"],
        "pruned": score(small, dev, max_length),
        "distilled": run.results[TASK.headline],
        "distil_seconds": run.facts["wall_seconds"],
    }


if __name__ == "__main__":
    sys.exit(main())
