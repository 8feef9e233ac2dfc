"""Prune the vocabulary of fine-tuned models to their training texts, and judge on others.

    python -m scripts.measure.vocabulary RUNS --tasks sst2,trec --tokens 0,20000 --out FILE.json

RUNS is the folder of `scripts.measure.budgets`, with a model fine-tuned on each task and the task's examples.  Each
vocabulary keeps the tokens of the training texts, and the most frequent others up to each of --tokens.  It is compared
with all tokens and embeddings that are factorised by a singular value decomposition, of the rank that takes as many
numbers.
"""

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bertlite import BertTokenizer
from bertlite.cli.parts import RECORD, names, numbers, paths
from bertlite.experiments.budget.texts import examples_of
from bertlite.experiments.budget.vocabulary import with_fewer_tokens
from bertlite.experiments.data import encode_examples
from bertlite.experiments.evaluate import TASKS, metrics_of, predict
from bertlite.experiments.files import model_sha256
from bertlite.opened.checkpoint import Checkpoint
from bertlite.support.environment import environment
from bertlite.support.files import write_json

TASK = TASKS["classification"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.measure.vocabulary",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", type=Path, metavar="RUNS", help="folder of scripts.measure.budgets")
    parser.add_argument("--tasks", type=names, required=True, metavar="A,B,…", help="tasks of single sentences")
    parser.add_argument("--tokens", type=numbers, default=(0.0,), metavar="A,B,…", help="tokens to keep (default: 0)")
    parser.add_argument("--max-length", type=int, default=64, metavar="TOKENS", help="(default: %(default)s)")
    parser.add_argument("--out", type=paths((RECORD,)), required=True, metavar="FILE.json", help="the record")
    args = parser.parse_args(argv)
    rows = [row for name in args.tasks for row in rows_of(args, name)]
    record = {"what": "fewer tokens", "max_length": args.max_length, "metric": TASK.headline, "rows": rows}
    write_json(args.out[RECORD], {**record, "environment": environment()})
    return 0


def rows_of(args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Return a row for each number of tokens."""
    checkpoint = args.runs / name / "dense-0" / "model"
    model, tokenizer = Checkpoint.of(checkpoint).load(TASK.model_class), BertTokenizer.from_pretrained(checkpoint)
    paths = [args.runs / "data" / name / f"{part}.jsonl" for part in ("train", "dev")]
    train, dev = (examples_of(path, ("a",), "label", (), model.config) for path in paths)
    data = encode_examples(dev, tokenizer, args.max_length)
    outputs, labels = predict(model, data, TASK), data.targets()
    rows = []
    for tokens in args.tokens:
        small, own, facts = with_fewer_tokens(model, tokenizer, train, dev, int(tokens), args.max_length)
        D, V = small.config.hidden_size, model.config.vocab_size
        rank = len(own) * D // (V + D)
        row = {"task": name, "model": model_sha256(model), "dev": dev.sha256, **facts, "rank": rank}
        row["dense"] = metrics_of(outputs, labels, TASK)[TASK.headline]
        for way, each, its in (("pruned", small, own), ("factorised", factorised(model, rank), tokenizer)):
            found = metrics_of(predict(each, encode_examples(dev, its, args.max_length), TASK), labels, TASK, outputs)
            row[way] = {"kl": found["kl"], TASK.headline: found[TASK.headline]}
        print(row, flush=True)
        rows.append(row)
    return rows


def factorised(model: Any, rank: int) -> Any:
    """Return a copy of a model with word embeddings of a lower rank."""
    found = copy.deepcopy(model)
    weight = found.get_input_embeddings().weight
    U, S, V = torch.linalg.svd(weight.detach(), full_matrices=False)
    weight.data = (U[:, :rank] * S[:rank]) @ V[:rank]
    return found


if __name__ == "__main__":
    sys.exit(main())
