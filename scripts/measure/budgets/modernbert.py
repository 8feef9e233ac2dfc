"""Prune a ModernBERT, and a BERT of its size that was trained alike: points lost by `bertlite prune to`.

    python -m scripts.measure.budgets.modernbert CHECKPOINT --data FOLDER --out runs/modernbert,FILE.json

Both models are small.  They begin with random weights, and with the principal components of the word embeddings of
CHECKPOINT, a BERT whose tokens that the tasks' texts use are their vocabulary.  Both learn masked words of these texts
and of WikiText-2, and are then fine-tuned on each task, once for each seed, by one recipe.  Each is pruned without
labels and judged on texts that it was not trained on.  Finished work is not done again.
"""

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from bertlite import BertConfig, BertForMaskedLM, BertModel, BertTokenizer, prune_to
from bertlite.cli.parts import FOLDER, RECORD, count, integers, names_of, number, paths
from bertlite.commands import PruneSettings
from bertlite.experiments.data import read_examples
from bertlite.experiments.finetune import Recipe, learning_rate_factor
from bertlite.pruning import keep_used_tokens
from bertlite.support.environment import environment
from bertlite.support.files import write_json
from bertlite.support.progress import Progress
from scripts.measure.budgets import tasks
from scripts.measure.budgets.__main__ import BATCH, source, tuned, with_interval
from scripts.measure.budgets.clusters import clustered_estimate

MODERN, BERT = "modernbert", "bert"
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
RATES = dict.fromkeys(("attention_dropout", "mlp_dropout", "classifier_dropout"), 0.1)  # BERT's defaults
KINDS: dict[str, dict[str, Any]] = {  # a gated neuron has three vectors of weights, another two
    BERT: {"intermediate_size": 480},
    MODERN: {"intermediate_size": 320, "local_attention": 32, **RATES},
}
TARGETS = ("50%", "20%")
WIDTH, MASKED, LR = 64, 0.2, 5e-4  # of the masked words: tokens of a row, the share that is masked, the rate
KEPT = (
    *("task", "seed", "kind", "target", "metric", "score", "dense_score", "difference", "difference_low"),
    *("difference_high", "kl", "macs", "heads_kept", "neurons_kept"),
)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    files = {name: tasks.write_task(name, args.data, args.out[FOLDER] / "data") for name in args.tasks}
    texts = [text for name in files for pair in examples(name, files) for text in pair]
    vocabulary = keep_used_tokens(
        BertModel.from_pretrained(args.checkpoint), BertTokenizer.from_pretrained(args.checkpoint), texts
    )
    texts += [text for _, sentences in tasks.wiki_sentences(args.data, "train") for text in sentences]
    given = {kind: pretrained(args, kind, *vocabulary, texts) for kind in KINDS}
    rows = [
        {"task": name, "seed": seed, "kind": kind} | report
        for seed, name, kind in product(args.seeds, files, KINDS)
        for report in pruned(args, name, files[name], given[kind], seed)
    ]
    rows = [{name: row[name] for name in KEPT} for row in rows]
    recipe = {"tokens": len(vocabulary[1]), "steps": args.steps, "batch": BATCH, "width": WIDTH, "lr": LR}
    record = {
        "what": "a ModernBERT and a BERT of its size, trained alike and pruned",
        "sizes": {kind: SIZES | own for kind, own in KINDS.items()},
        "pretraining": recipe,
        "tuning": {name: tasks.TASKS[name].epochs for name in files} | {"lr": args.lr},
        "texts": args.texts,
        "summary": summary(rows),
        "rows": rows,
    }
    write_json(args.out[RECORD], {**record, "environment": environment()})
    print(*record["summary"], sep="\n")
    return 0


def examples(name: str, files: dict[str, dict[str, Path]]) -> tuple[tuple[str, ...], ...]:
    """Return the training texts of a task, or pairs of them."""
    return read_examples(source(name, files[name]["train"])).texts


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a BERT with a WordPiece tokenizer")
    parser.add_argument("--data", required=True, type=Path, metavar="FOLDER", help="folder of the data sets")
    parser.add_argument("--tasks", type=names_of("task", tuple(tasks.TASKS)), default=("sst2", "trec", "sick"))
    parser.add_argument("--seeds", type=integers, default=(0, 1), help="fine-tuned models of a task (default: 0,1)")
    parser.add_argument("--steps", type=count, default=100, help="of masked words (default: %(default)s)")
    parser.add_argument("--texts", type=count, default=2048, help="to fit to (default: %(default)s)")
    parser.add_argument("--lr", type=number, default=3e-4, help="of the fine-tuning (default: %(default)s)")
    parser.add_argument("--out", type=paths((RECORD, FOLDER)), required=True, metavar="FOLDER,FILE.json")
    return parser.parse_args(argv)


def pretrained(args: argparse.Namespace, kind: str, old: Any, tokenizer: BertTokenizer, texts: list[str]) -> Path:
    """Return the folder of a model that learnt masked words, trained unless it is there.

    Args:
        old: a BERT with the vocabulary, whose word embeddings are projected to the model's width.
    """
    folder: Path = args.out[FOLDER] / kind / "pretrained"
    if (folder / "model.safetensors").exists():
        return folder
    words = old.get_input_embeddings().weight.detach()
    write_json(folder / "config.json", {"model_type": kind, "vocab_size": len(words), **SIZES, **KINDS[kind]})
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig.from_pretrained(folder)).eval()  # no dropout: it sees each text once or twice
    U, S, _ = torch.linalg.svd(words - words.mean(0), full_matrices=False)
    model.get_input_embeddings().weight.data = (U * S)[:, : SIZES["hidden_size"]].contiguous()

    # One stream of texts, each with its [SEP], cut into rows.
    order = torch.randperm(len(texts)).tolist()
    ids = torch.tensor([i for row in tokenizer.encode_texts([texts[i] for i in order])["input_ids"] for i in row[1:]])
    rows = ids[: len(ids) // (WIDTH - 1) * (WIDTH - 1)].view(-1, WIDTH - 1)
    rows = F.pad(rows, (1, 0), value=tokenizer.cls_token_id)
    special = torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id])

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=Recipe.weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(args.steps, Recipe.warmup))
    with Progress(args.steps, "steps", what=f"masked words, {kind}") as progress:
        for step in range(args.steps):
            batch = rows[torch.randint(len(rows), (BATCH,))]
            masked = (torch.rand(batch.shape) < MASKED) & ~torch.isin(batch, special)
            states = model.base_model(input_ids=batch.masked_fill(masked, tokenizer.mask_token_id)).last_hidden_state
            loss = F.cross_entropy(model.cls(states[masked]), batch[masked])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), Recipe.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.advance()
            if (step + 1) % 100 == 0:
                progress.print(f"{kind}, step {step + 1}: loss {loss.item():.2f}")
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def pruned(
    args: argparse.Namespace, name: str, files: dict[str, Path], given: Path, seed: int
) -> list[dict[str, Any]]:
    """Fine-tune a model on a task, prune it to each target, and return the reports."""
    root = given.parent
    options = {**vars(args), "checkpoint": given, "out": {FOLDER: root}, "max_length": WIDTH}
    dense = tuned(argparse.Namespace(**options), name, files, seed)
    settings = PruneSettings(
        text=source(name, files["dev"]).text,
        label="label",
        labels_for="judging",
        max_length=WIDTH,
        calibration=args.texts,
        seed=seed,
        at=(8, 128),
    )
    folder = root / name / f"pruned-{seed}"
    found = prune_to(dense, TARGETS, files["train"], folder, dev=files["dev"], settings=settings)["targets"]
    for report in found:
        print(name, seed, root.name, report["target"], report["dense_score"], report["score"], flush=True)
    return list(found)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each target: the points that each kind loses, and how many more the ModernBERT does."""
    found = []
    for target in TARGETS:
        own = [row for row in rows if row["target"] == target]
        lost = {(row["kind"], row["task"], row["seed"]): -100 * row["difference"] for row in own}
        pairs = [key[1:] for key in lost if key[0] == BERT]
        row = {"target": target, "models": len(pairs)}
        for kind in KINDS:
            row |= with_interval(kind, clustered_estimate([[lost[kind, *pair]] for pair in pairs]))
        more = [[lost[MODERN, *pair] - lost[BERT, *pair]] for pair in pairs]
        found.append(row | with_interval("more", clustered_estimate(more)))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
