"""The arguments of `bertlite prune`."""

import argparse
from collections.abc import Iterable

from bertlite.cli.parts import FOOT, Commands, command, integers
from bertlite.importance.criteria import CRITERIA, NORMALISERS, REDUCTIONS, TARGETS, criteria_for

WORK = "bertlite.lab.experiments.command"
DESCRIPTION = """Run head-pruning experiments.  Each run is a folder that records its settings, inputs and results.

  finetune   train a checkpoint on a task
  score      score each head by one criterion or several
  run        score, prune, repair, retrain and evaluate once
  curve      run every combination of criterion, share of heads, repair and seed; continues after a kill
  compare    make tables with intervals, paired tests and figures from runs
  export     write the pruned checkpoint, the same with every head back in place, or the mask alone
  bench      measure time and memory of pruned models beside the dense one
"""


def add(commands: Commands) -> None:
    """Add `prune` and its actions."""
    prune = commands.add_parser(
        "prune",
        help="run experiments with pruned heads",
        description=DESCRIPTION,
        epilog=FOOT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = prune.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (fill, what, record) in ACTIONS.items():
        fill(command(actions, name, WORK, summary=what, description=f"{what[0].upper()}{what[1:]}.", record=record))


def either(names: Iterable[str]) -> str:
    """Return "a, b or c"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def criterion_help() -> str:
    normalisers = [name for name in NORMALISERS if name not in ("none", "cost")]
    return (
        f"{either(CRITERIA)}; options follow after slashes: {either(REDUCTIONS)}; {either(TARGETS)};"
        f" {either(normalisers)}; inverted"
    )


def neurons_help() -> str:
    return f"of the intermediate neurons to remove too, by {either(criteria_for('neuron'))} (default: 0)"


def words(text: str) -> tuple[str, ...]:
    """Parse "a,b" into ("a", "b")."""
    return tuple(text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    """Parse "0.5,1" into (0.5, 1.0)."""
    return tuple(float(each) for each in text.split(","))


def shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse "1x16,8x128" into ((1, 16), (8, 128))."""
    found = []
    for part in text.split(","):
        batch, _, length = part.partition("x")
        found.append((int(batch), int(length)))
    return tuple(found)


def data(action: argparse.ArgumentParser, dev: bool = True) -> None:
    """Add the arguments that name checkpoint and data."""
    action.add_argument("checkpoint", help="a folder or a hub id, with its tokenizer")
    group = action.add_argument_group(
        "data: .csv, .tsv or .jsonl files, or hub data sets (NAME or NAME:CONFIGURATION)"
    )
    group.add_argument("--train", required=True, metavar="DATA", help="examples for calibration and training")
    if dev:
        group.add_argument("--dev", required=True, metavar="DATA", help="examples for evaluation")
        group.add_argument("--dev-split", metavar="NAME", help="split of a hub data set for evaluation")
    group.add_argument("--task", default="classification", choices=("classification", "regression", "similarity"))
    group.add_argument(
        "--text",
        type=words,
        default=("sentence",),
        metavar="A[,B]",
        help="name of the column with the text, or of both columns of pairs (default: sentence)",
    )
    group.add_argument(
        "--label", default="label", metavar="NAME", help="name of the column with the label (default: label)"
    )
    group.add_argument(
        "--columns", type=words, default=(), metavar="A,B,…", help="names of all columns, for files without a header"
    )
    group.add_argument(
        "--classes", type=words, default=(), metavar="A,B,…", help="names of the labels 0, 1, … in the data"
    )
    group.add_argument("--train-split", metavar="NAME", help="split of a hub data set for training")
    group.add_argument("--max-length", type=int, default=128, help="tokens to truncate texts to (default: 128)")
    group.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")


def training(action: argparse.ArgumentParser, epochs: str) -> None:
    """Add the arguments of training; without `epochs`, all but --epochs."""
    group = action.add_argument_group("training")
    if epochs:
        group.add_argument(
            "--epochs", type=float, default=float(epochs), help=f"passes over the data (default: {epochs})"
        )
    group.add_argument("--lr", type=float, default=5e-5, help="peak learning rate (default: 5e-5)")
    group.add_argument("--batch-size", type=int, default=32, help="examples in a batch (default: 32)")
    group.add_argument("--train-examples", type=int, metavar="N", help="size of a random sample (default: all)")


def calibration(action: argparse.ArgumentParser) -> None:
    """Add --calibration."""
    action.add_argument(
        "--calibration",
        type=int,
        default=512,
        metavar="N",
        help="training examples for criteria and repair (default: 512)",
    )


def fill_finetune(action: argparse.ArgumentParser) -> None:
    """Add the arguments of `finetune`."""
    data(action)
    training(action, "3")
    action.add_argument("--num-labels", type=int, help="outputs of the head (default: the checkpoint's)")
    action.add_argument("--seed", type=int, default=0, help="seed of training (default: 0)")
    action.add_argument("--out", required=True, metavar="FOLDER", help="folder of the run; `model` in it is the model")


def fill_score(action: argparse.ArgumentParser) -> None:
    """Add the arguments of `score`."""
    data(action, dev=False)
    calibration(action)
    action.add_argument("--criteria", nargs="+", default=["michel"], metavar="CRITERION", help=criterion_help())
    action.add_argument("--seed", type=int, default=0, help="seed of the calibration sample and of random scores")
    action.add_argument("--out", required=True, metavar="FOLDER", help="folder for scores, a .json each, and figures")


def common(action: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` and `curve` share."""
    data(action)
    training(action, "")
    calibration(action)
    action.add_argument(
        "--distil",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="weight of the distance to the dense model's predictions in retraining's loss (default: 0)",
    )
    action.add_argument("--root", required=True, metavar="FOLDER", help="folder for the folders of runs")
    action.add_argument(
        "--neurons",
        type=float,
        default=0.0,
        metavar="SHARE",
        help=neurons_help(),
    )
    action.add_argument("--uniform", action="store_true", help="remove equally many heads from every layer")
    action.add_argument(
        "--at-least", type=int, default=0, metavar="N", help="heads that every layer keeps (default: 0)"
    )
    action.add_argument("--steps", type=int, default=1, help="steps of pruning, each with new scores (default: 1)")
    action.add_argument("--save-model", action="store_true", help="save the pruned models")


def fill_run(action: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    common(action)
    action.add_argument("--criterion", default="michel", help=criterion_help())
    action.add_argument("--fraction", type=float, default=0.5, help="share of the heads to remove (default: 0.5)")
    action.add_argument("--repair", default="none", help="none, mean, scale or refit (default: none)")
    action.add_argument("--epochs", type=float, default=0.0, help="epochs of retraining (default: 0)")
    action.add_argument("--seed", type=int, default=0, help="seed of calibration and retraining (default: 0)")
    action.add_argument("--scores", metavar="FILE", help="file that `score` wrote, used in place of scoring")


def fill_curve(action: argparse.ArgumentParser) -> None:
    """Add the arguments of `curve`."""
    common(action)
    action.add_argument(
        "--criteria", nargs="+", default=["michel", "random"], metavar="CRITERION", help=criterion_help()
    )
    action.add_argument("--fractions", type=numbers, default=(0.3, 0.5, 0.6, 0.7, 0.8, 0.9), metavar="A,B,…")
    action.add_argument("--repairs", type=words, default=("none",), metavar="A,B,…", help="none, mean, scale, refit")
    action.add_argument(
        "--epochs", type=numbers, default=(0.0,), metavar="A,B,…", help="epochs of retraining (default: 0)"
    )
    action.add_argument("--seeds", type=integers, default=(0,), metavar="A-B", help="seeds (default: 0)")
    action.add_argument(
        "--random-seeds",
        type=integers,
        default=(0, 1, 2, 3, 4),
        metavar="A-B",
        help="seeds of the random criterion (default: 0-4)",
    )
    action.add_argument("--processes", type=int, default=1, help="number of parallel processes (default: 1)")


def fill_compare(action: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    action.add_argument("roots", nargs="+", metavar="FOLDER", help="folders with runs, at any depth")
    action.add_argument("--against", metavar="CRITERION", help="test every other criterion against this one")
    action.add_argument("--plots", metavar="FOLDER", help="folder for figures, PNG and SVG")


def fill_export(action: argparse.ArgumentParser) -> None:
    """Add the arguments of `export`."""
    action.add_argument("source", help="folder of a run, or a dense checkpoint with --mask")
    action.add_argument("--mask", metavar="FILE", help="masks.json of a run, to prune a dense checkpoint with")
    action.add_argument(
        "--task",
        default="classification",
        choices=("classification", "regression", "similarity"),
        help="task of a dense checkpoint (default: classification)",
    )
    action.add_argument(
        "--form",
        default="physical",
        choices=("physical", "full", "mask"),
        help="physical: smaller matrices; full: pruned heads are back in place and add nothing, which any BERT loader"
        " reads; mask: JSON (default: physical)",
    )
    action.add_argument("--out", required=True, metavar="PATH", help="folder to write; for a mask, a file")


def fill_bench(action: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench`."""
    action.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs that pruned one dense model")
    action.add_argument(
        "--shapes",
        type=shapes,
        default=((1, 16), (8, 128)),
        metavar="BxS,…",
        help="sequences x tokens of the inputs (default: 1x16,8x128)",
    )
    action.add_argument("--rounds", type=int, default=21, help="runs of each model, 7 or more (default: 21)")
    action.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    action.add_argument("--table", action="store_true", help="also time one sublayer by its heads and neurons")
    action.add_argument("--out", required=True, metavar="FOLDER", help="folder of the run")


ACTIONS = {  # name: function that adds its arguments, what it does, what --json writes
    "finetune": (fill_finetune, "train a checkpoint on a task; under torchrun, in several processes", "the run"),
    "score": (fill_score, "score each head by one criterion or several", "the scores"),
    "run": (fill_run, "score, prune, repair, retrain and evaluate once", "the run"),
    "curve": (
        fill_curve,
        "run every combination of criterion, share of heads, repair and seed; a killed one continues",
        "the runs",
    ),
    "compare": (fill_compare, "make tables with intervals, paired tests and figures from runs", "every row"),
    "export": (
        fill_export,
        "write a pruned checkpoint, the same with every head back in place, or the mask alone",
        "the path and the heads and neurons that are kept",
    ),
    "bench": (fill_bench, "measure time and memory of pruned models beside the dense one", "the run"),
}
