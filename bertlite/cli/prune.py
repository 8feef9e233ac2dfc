"""The arguments of `bertlite prune`."""

import argparse
from collections.abc import Iterable

from bertlite.cli import prune_to
from bertlite.cli.parts import (
    FOLDER,
    Commands,
    Parser,
    add_device,
    command,
    count,
    integer,
    integers,
    names,
    number,
    numbers,
    one_of,
)
from bertlite.importance.criteria import CRITERIA, NORMALISERS, REDUCTIONS, TARGETS

WORK = "bertlite.experiments.command"
TASKS = ("classification", "tokens", "regression", "similarity")
METRICS = ("accuracy", "f1", "macro-f1", "mcc", "spearman", "loss")
SUMMARY = "make a checkpoint faster or smaller (`prune to 2x`), or compare ways to prune"
DESCRIPTION = """\
Make a checkpoint faster or smaller by `to`; the other actions are experiments that compare ways to prune.  Each run
is a folder that records its settings, inputs and results.  `bertlite bench RUN` measures time and memory of pruned
models beside the dense one."""
DATA = "--train train.tsv --dev dev.tsv"


def add(commands: Commands) -> None:
    """Add `prune` and its actions."""
    prune = commands.add_parser("prune", help=SUMMARY, description=DESCRIPTION)
    actions = prune.add_subparsers(dest="action", required=True, metavar="ACTION")
    prune_to.add(actions)
    add_finetune(actions)
    add_score(actions)
    add_run(actions)
    add_compare(actions)


def add_action(
    actions: Commands,
    name: str,
    summary: str,
    record: str,
    out: dict[str, str],
    examples: tuple[str, ...],
    needs: tuple[str, ...] = (FOLDER,),
) -> Parser:
    """Add an action of `prune` and return the parser of its arguments."""
    return command(
        actions,
        name,
        WORK,
        summary=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        examples=tuple(f"prune {name} {example}" for example in examples),
        record=record,
        out=out,
        needs=needs,
    )


def either(options: Iterable[str]) -> str:
    """Return "a, b or c"."""
    *others, last = options
    return f"{', '.join(others)} or {last}" if others else last


def criterion_help() -> str:
    normalisers = [name for name in NORMALISERS if name not in ("none", "cost")]
    return (
        f"{either(CRITERIA)}; options follow after slashes: {either(REDUCTIONS)}; {either(TARGETS)};"
        f" {either(normalisers)}; inverted (default: %(default)s)"
    )


def add_data(
    action: argparse.ArgumentParser, train: bool = True, dev: bool = True, task: str | None = "classification"
) -> None:
    """Add the arguments that name checkpoint and data; without a default, the task is the checkpoint's."""
    action.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder or a hub id, with its tokenizer")
    group = action.add_argument_group(
        "data", ".csv, .tsv, .jsonl or .parquet files, or hub data sets (NAME or NAME:CONFIGURATION)"
    )
    if train:
        group.add_argument("--train", required=True, metavar="DATA", help="examples for calibration and training")
        group.add_argument(
            "--train-split", metavar="NAME", help="split for training, which a hub data set needs (default: none)"
        )
    if dev:
        group.add_argument("--dev", required=True, metavar="DATA", help="examples for evaluation")
        group.add_argument(
            "--dev-split", metavar="NAME", help="split for evaluation, which a hub data set needs (default: none)"
        )
    add_task(group, "what the checkpoint does with the data", task)
    group.add_argument(
        "--text",
        type=names,
        default="sentence",
        metavar="A[,B]",
        help="name of the column with the text, or of both columns of pairs (default: %(default)s)",
    )
    group.add_argument(
        "--label", default="label", metavar="NAME", help="name of the column with the label (default: %(default)s)"
    )
    group.add_argument(
        "--columns",
        type=names,
        default=(),
        metavar="A,B,…",
        help="names of all columns, for .csv and .tsv files without a header (default: those of the header)",
    )
    group.add_argument(
        "--classes",
        type=names,
        default=(),
        metavar="A,B,…",
        help="names of the labels 0, 1, … in the data (default: the model's names of its classes, or numbers)",
    )
    group.add_argument(
        "--max-length", type=count, default=128, metavar="TOKENS", help="truncate longer texts (default: %(default)s)"
    )
    add_device(group)


def add_task(group: argparse._ActionsContainer, what: str, default: str | None = "classification") -> None:
    """Add --task; without a default it is the checkpoint's, which may be masked words too."""
    known = TASKS if default else (*TASKS, "masked")
    group.add_argument(
        "--task",
        type=one_of("task", known),
        choices=known,
        default=default,
        metavar="TASK",
        help=f"{what}: %(choices)s (default: {default or 'that of its class'})",
    )


def add_training(action: argparse.ArgumentParser) -> None:
    """Add the arguments of training, except --epochs."""
    group = action.add_argument_group("training")
    group.add_argument("--lr", type=number, default=5e-5, help="peak learning rate (default: %(default)s)")
    group.add_argument("--batch-size", type=count, default=32, help="examples in a batch (default: %(default)s)")
    group.add_argument("--train-examples", type=count, metavar="N", help="size of a random sample (default: all)")


def add_metric(action: argparse._ActionsContainer) -> None:
    """Add --metric."""
    action.add_argument(
        "--metric",
        type=one_of("metric", METRICS),
        choices=METRICS,
        metavar="METRIC",
        help="what the table shows: %(choices)s (default: GLUE's own for its data sets, such as mcc for CoLA; else"
        " accuracy, f1 of tokens, or spearman); f1 is that of class 1 of two, and of words that are not of the first"
        " class",
    )


def add_calibration(action: argparse.ArgumentParser) -> None:
    """Add --calibration."""
    action.add_argument(
        "--calibration",
        type=count,
        default=512,
        metavar="N",
        help="training examples for criteria and repair (default: %(default)s)",
    )


def add_finetune(actions: Commands) -> None:
    """Add `finetune`."""
    action = add_action(
        actions,
        "finetune",
        "train a checkpoint on a task; a killed one continues; under torchrun, in several processes",
        record="the run",
        out={FOLDER: "the run; `model` in it is the model"},
        examples=(
            f"google-bert/bert-base-uncased {DATA} --num-labels 2 --out runs/dense",
            f"pruned {DATA} --teacher runs/dense/model --epochs 1 --out runs/distilled",
        ),
    )
    add_data(action)
    add_training(action)
    action.add_argument("--epochs", type=number, default=3.0, help="passes over the data (default: %(default)s)")
    action.add_argument(
        "--num-labels", type=count, help="outputs of the head (default: the classes of the data; 1 for regression)"
    )
    action.add_argument("--seed", type=integer, default=0, help="seed of training (default: %(default)s)")
    action.add_argument(
        "--teacher",
        metavar="CHECKPOINT",
        help="model with the same classes whose predictions are also learnt (default: none)",
    )
    action.add_argument(
        "--distil",
        type=number,
        metavar="SHARE",
        help="weight of the distance to the teacher's predictions in the loss (default: 0.5 with --teacher)",
    )


def add_score(actions: Commands) -> None:
    """Add `score`."""
    action = add_action(
        actions,
        "score",
        "score each head by one criterion or several",
        record="the scores",
        out={FOLDER: "figures, each as PNG and SVG"},
        examples=("runs/dense/model --train train.tsv --criteria michel,magnitude --out scores.json,figures",),
        needs=(),
    )
    add_data(action, dev=False)
    add_calibration(action)
    action.add_argument("--criteria", type=names, default="michel", metavar="A,B,…", help=criterion_help())
    action.add_argument(
        "--seed",
        type=integer,
        default=0,
        help="seed of the calibration sample and of random scores (default: %(default)s)",
    )


def add_run(actions: Commands) -> None:
    """Add `run`."""
    action = add_action(
        actions,
        "run",
        "score, prune, repair, retrain and evaluate, by every combination of criterion, share of heads, repair and"
        " seed; a killed one continues",
        record="the runs",
        out={FOLDER: "the folders of the runs are made in this one"},
        examples=(
            f"runs/dense/model {DATA} --criteria michel --fractions 0.5 --save-model --out runs/half",
            f"runs/dense/model {DATA} --criteria michel,random --fractions 0.3,0.5,0.7 --seeds 0,1,2 --out runs/curve",
        ),
    )
    add_data(action)
    add_training(action)
    add_calibration(action)
    action.add_argument("--criteria", type=names, default="michel,random", metavar="A,B,…", help=criterion_help())
    for name, default, kind, what in (
        ("fractions", "0.3,0.5,0.6,0.7,0.8,0.9", numbers, "shares of the heads to remove"),
        ("repairs", "refit", names, "of none, mean, scale, refit"),
        ("epochs", "0", numbers, "epochs of retraining"),
        ("seeds", "0", integers, "seeds of calibration and retraining"),
        ("random-seeds", "0,1,2,3,4", integers, "seeds of the random criterion"),
    ):
        helps = f"{what} (default: %(default)s)"
        action.add_argument(f"--{name}", type=kind, default=default, metavar="A,B,…", help=helps)
    action.add_argument(
        "--at-least", type=integer, default=1, metavar="N", help="heads that every layer keeps (default: %(default)s)"
    )
    action.add_argument(
        "--distil",
        type=number,
        default=0.0,
        metavar="SHARE",
        help="weight of the distance to the dense model's predictions in retraining's loss (default: %(default)s)",
    )
    action.add_argument("--save-model", action="store_true", help="save the pruned models")
    add_metric(action)


def add_compare(actions: Commands) -> None:
    """Add `compare`."""
    action = add_action(
        actions,
        "compare",
        "make tables with intervals, paired tests and figures from runs",
        record="every row",
        out={FOLDER: "figures, each as PNG and SVG"},
        examples=(
            "runs/half --against dense --out rows.json,figures",
            "runs/curve --against random --metric mcc",
        ),
        needs=(),
    )
    action.add_argument("roots", nargs="+", metavar="FOLDER", help="folders with runs, at any depth")
    action.add_argument(
        "--against",
        metavar="CRITERION",
        help="test every other criterion against this one, or each against the dense models with `dense` (default: no"
        " tests)",
    )
    add_metric(action)
