"""The arguments of `bertlite prune`."""

import argparse

from bertlite.cli.parts import FOOT, Commands, command, integers

WORK = "bertlite.lab.experiments.command"
DESCRIPTION = """Head-pruning experiments: each run is a folder that says what was done, from what, with what result.

  finetune   train a checkpoint on a task
  score      how much each head matters, by one criterion or several
  run        score, prune, repair, retrain and evaluate, once
  curve      the same for every criterion, share of heads, repair and seed; killed, it goes on where it was
  compare    tables with intervals, paired tests and figures from runs
  export     the pruned checkpoint, one with every head back in place, or the mask alone
  bench      time and memory of pruned models beside the dense one
"""
CRITERION = (
    "michel, signed, fisher, taylor, leave_one_out, magnitude, confidence, entropy, context_norm or random; options"
    " follow after slashes: example, token or batch; loss or kl; layer_l2, layer_sum or minmax; inverted"
)


def add(commands: Commands) -> None:
    """Add `prune` and its actions."""
    prune = commands.add_parser(
        "prune",
        help="experiments with pruned heads",
        description=DESCRIPTION,
        epilog=FOOT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = prune.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (fill, what, record) in ACTIONS.items():
        fill(command(actions, name, WORK, summary=what, description=f"{what[0].upper()}{what[1:]}.", record=record))


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in text.split(","))


def shapes(text: str) -> tuple[tuple[int, int], ...]:
    found = []
    for part in text.split(","):
        batch, _, length = part.partition("x")
        found.append((int(batch), int(length)))
    return tuple(found)


def data(action: argparse.ArgumentParser, dev: bool = True) -> None:
    action.add_argument("checkpoint", help="a folder or a hub id, with its tokenizer")
    group = action.add_argument_group(
        "data: .csv, .tsv or .jsonl files, or hub data sets (NAME or NAME:CONFIGURATION)"
    )
    group.add_argument("--train", required=True, metavar="DATA", help="for calibration and training")
    if dev:
        group.add_argument("--dev", required=True, metavar="DATA", help="what is evaluated")
        group.add_argument("--dev-split", metavar="NAME", help="of a hub data set")
    group.add_argument("--task", default="classification", choices=("classification", "regression", "similarity"))
    group.add_argument(
        "--text",
        type=words,
        default=("sentence",),
        metavar="A[,B]",
        help="the column of the text, or of both (default: sentence)",
    )
    group.add_argument("--label", default="label", metavar="NAME", help="the column of the label (default: label)")
    group.add_argument(
        "--columns", type=words, default=(), metavar="A,B,…", help="the columns of files without a header"
    )
    group.add_argument(
        "--classes", type=words, default=(), metavar="A,B,…", help="names of labels 0, 1, … in the data"
    )
    group.add_argument("--train-split", metavar="NAME", help="of a hub data set")
    group.add_argument("--max-length", type=int, default=128, help="tokens after which a text is cut (default: 128)")
    group.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")


def training(action: argparse.ArgumentParser, epochs: str) -> None:
    group = action.add_argument_group("training")
    if epochs:
        group.add_argument("--epochs", type=float, default=float(epochs), help=f"default: {epochs}")
    group.add_argument("--lr", type=float, default=5e-5, help="at its height (default: 5e-5)")
    group.add_argument("--batch-size", type=int, default=32, help="default: 32")
    group.add_argument("--train-examples", type=int, metavar="N", help="a sample of so many (default: all)")


def calibration(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--calibration",
        type=int,
        default=512,
        metavar="N",
        help="training examples that criteria and repair look at (default: 512)",
    )


def fill_finetune(action: argparse.ArgumentParser) -> None:
    data(action)
    training(action, "3")
    action.add_argument("--num-labels", type=int, help="outputs of the head (default: the checkpoint's)")
    action.add_argument("--seed", type=int, default=0)
    action.add_argument("--out", required=True, metavar="FOLDER", help="the run's folder; the model is in its `model`")


def fill_score(action: argparse.ArgumentParser) -> None:
    data(action, dev=False)
    calibration(action)
    action.add_argument("--criteria", nargs="+", default=["michel"], metavar="CRITERION", help=CRITERION)
    action.add_argument("--seed", type=int, default=0, help="of the calibration sample and of random scores")
    action.add_argument("--out", required=True, metavar="FOLDER", help="one .json for each criterion, and the figures")


def sharing(action: argparse.ArgumentParser) -> None:
    """What `run` and `curve` have in common."""
    data(action)
    training(action, "")
    calibration(action)
    action.add_argument(
        "--distil",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of retraining's loss that the dense model's predictions set (default: 0)",
    )
    action.add_argument("--root", required=True, metavar="FOLDER", help="where the runs' folders are made")
    action.add_argument(
        "--neurons",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the intermediate neurons to remove too (default: 0)",
    )
    action.add_argument("--uniform", action="store_true", help="as many heads of every layer")
    action.add_argument(
        "--at-least", type=int, default=0, metavar="N", help="heads that every layer keeps (default: 0)"
    )
    action.add_argument("--steps", type=int, default=1, help="score anew before each of so many steps (default: 1)")
    action.add_argument("--save-model", action="store_true", help="keep the pruned models")


def fill_run(action: argparse.ArgumentParser) -> None:
    sharing(action)
    action.add_argument("--criterion", default="michel", help=CRITERION)
    action.add_argument("--fraction", type=float, default=0.5, help="of the heads to remove (default: 0.5)")
    action.add_argument("--repair", default="none", help="none, mean, scale or refit (default: none)")
    action.add_argument("--epochs", type=float, default=0.0, help="of retraining (default: 0)")
    action.add_argument("--seed", type=int, default=0)
    action.add_argument("--scores", metavar="FILE", help="what `score` wrote, in place of scoring")


def fill_curve(action: argparse.ArgumentParser) -> None:
    sharing(action)
    action.add_argument("--criteria", nargs="+", default=["michel", "random"], metavar="CRITERION", help=CRITERION)
    action.add_argument("--fractions", type=numbers, default=(0.3, 0.5, 0.6, 0.7, 0.8, 0.9), metavar="A,B,…")
    action.add_argument("--repairs", type=words, default=("none",), metavar="A,B,…", help="none, mean, scale, refit")
    action.add_argument("--epochs", type=numbers, default=(0.0,), metavar="A,B,…", help="of retraining (default: 0)")
    action.add_argument("--seeds", type=integers, default=(0,), metavar="A-B", help="default: 0")
    action.add_argument(
        "--random-seeds",
        type=integers,
        default=(0, 1, 2, 3, 4),
        metavar="A-B",
        help="of the random criterion (default: 0-4)",
    )
    action.add_argument("--processes", type=int, default=1, help="cells at a time (default: 1)")


def fill_compare(action: argparse.ArgumentParser) -> None:
    action.add_argument("roots", nargs="+", metavar="FOLDER", help="folders with runs, at any depth")
    action.add_argument("--against", metavar="CRITERION", help="test every other criterion against this one")
    action.add_argument("--plots", metavar="FOLDER", help="draw the figures, PNG and SVG")


def fill_export(action: argparse.ArgumentParser) -> None:
    action.add_argument("source", help="the folder of a run, or a dense checkpoint with --mask")
    action.add_argument("--mask", metavar="FILE", help="masks.json of a run, for a checkpoint")
    action.add_argument(
        "--task",
        default="classification",
        choices=("classification", "regression", "similarity"),
        help="of a checkpoint",
    )
    action.add_argument(
        "--form",
        default="physical",
        choices=("physical", "full", "mask"),
        help="physical: smaller matrices; full: every head back in place as one that adds nothing, which any BERT"
        " loader reads; mask: JSON (default: physical)",
    )
    action.add_argument("--out", required=True, metavar="PATH", help="a folder; for a mask, a file")


def fill_bench(action: argparse.ArgumentParser) -> None:
    action.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs of one dense model")
    action.add_argument(
        "--shapes",
        type=shapes,
        default=((1, 16), (8, 128)),
        metavar="BxS,…",
        help="sequences x tokens (default: 1x16,8x128)",
    )
    action.add_argument("--rounds", type=int, default=21, help="default: 21")
    action.add_argument("--device", default="cpu")
    action.add_argument("--table", action="store_true", help="also time one sublayer by its heads and neurons")
    action.add_argument("--out", required=True, metavar="FOLDER", help="the run's folder")


ACTIONS = {  # how its arguments are added, what it does, what --json writes
    "finetune": (fill_finetune, "train a checkpoint on a task; under torchrun, over several processes", "the run"),
    "score": (fill_score, "how much each head matters", "the scores"),
    "run": (fill_run, "score, prune, repair, retrain and evaluate, once", "the run"),
    "curve": (
        fill_curve,
        "every criterion, share of heads, repair and seed; killed, it goes on where it was",
        "the runs",
    ),
    "compare": (fill_compare, "tables with intervals, paired tests and figures from runs", "every row"),
    "export": (
        fill_export,
        "a pruned checkpoint, one with every head back in place, or the mask alone",
        "what was written, and what it has left",
    ),
    "bench": (fill_bench, "time and memory of pruned models beside the dense one", "the run"),
}
