"""The arguments of `bertlite prune to`."""

import argparse

from bertlite.cli.parts import FOLDER, Commands, add_device, command, count, integer, names, one_of, shapes

WAYS = ("auto", "latency", "macs")
DESCRIPTION = """Prune a checkpoint to a budget of time or work, without training.

TARGET is a speed (2x the given model's), a share of the MACs of the unpruned model (40%), or the time of a forward
(15ms).  It is stated for one batch, --at or --lengths.  Heads and neurons are removed together; a layer may lose its
whole attention or feed-forward network.  What is left is chosen and fitted by least squares, layer by layer, to the
outputs of the given model.  A speed or a time is measured at the end: the target is met if it is reached and exceeded
by at most 10 %.  Where other work makes the clock too noisy, sizes are chosen by MACs.

No labels are needed: the divergence from the given model's predictions takes the place of the loss.  With --label, the
loss itself is used.  A killed search continues where it stopped when the same command is given again."""


def add(actions: Commands) -> None:
    """Add `to`."""
    action = command(
        actions,
        "to",
        "bertlite.budget.command",
        summary="prune a checkpoint to a speed, a time or a share of its MACs",
        description=DESCRIPTION,
        examples=(
            "prune to 2x runs/dense/model --texts texts.txt --out fast",
            "prune to 30% runs/dense/model --texts train.tsv --dev dev.tsv --label label --out small",
            "prune to 15ms my-model --at 1x32 --texts texts.txt --out quick",
            "prune to 2x my-model --backend auto --texts texts.txt --out served",
        ),
        record="the report",
        out={FOLDER: "the pruned checkpoint with its tokenizer, a card and report.json"},
        needs=(FOLDER,),
    )
    action.add_argument("target", metavar="TARGET", help="2x, 40%% or 15ms")
    action.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder or a hub id, with its tokenizer")
    add_texts(action)
    work = action.add_argument_group("work that the target is for")
    work.add_argument(
        "--at",
        type=shapes,
        metavar="BxS",
        help="a batch of B sequences of S tokens (default: 8x128 without --lengths)",
    )
    work.add_argument(
        "--lengths",
        metavar="FILE",
        help="a length in tokens on each line; the batch has --batch-size of their quantiles (default: none)",
    )
    work.add_argument("--batch-size", type=count, default=32, help="sequences of --lengths (default: %(default)s)")
    work.add_argument(
        "--backend",
        default="plain",
        help="what runs the timed models: a backend of optimize_for_inference, or plain, none (default: %(default)s)",
    )
    work.add_argument(
        "--dtype",
        help="of these models: float32, bfloat16, float16 or, with a backend, int8 (default: the checkpoint's)",
    )
    add_device(work)
    action.add_argument(
        "--allocate",
        type=one_of("way to allocate", WAYS),
        choices=WAYS,
        default="auto",
        help="the cost of a size: latency, its measured time on this machine, or macs; auto is latency for a speed or"
        " a time of plain models, else macs (default: %(default)s)",
    )
    action.add_argument(
        "--fresh-times", action="store_true", help="measure the times of layers again, although they are kept"
    )
    action.add_argument("--seed", type=integer, default=0, help="seed of the texts drawn (default: %(default)s)")


def add_texts(action: argparse.ArgumentParser) -> None:
    """Add the arguments that name texts."""
    group = action.add_argument_group("texts of the kind that the model will see")
    group.add_argument(
        "--texts", required=True, metavar="FILE", help=".txt with a text on each line, .csv, .tsv, .jsonl or .parquet"
    )
    group.add_argument(
        "--dev",
        metavar="FILE",
        help="texts that the model was not trained on, with the same columns; the report is measured on them (default:"
        " a fifth of the texts, at most 256, which is held out)",
    )
    group.add_argument(
        "--text",
        type=names,
        default="sentence",
        metavar="A[,B]",
        help="name of the column with the text, or of both columns of pairs (default: %(default)s)",
    )
    group.add_argument("--label", metavar="NAME", help="name of the column with the label (default: none)")
    group.add_argument(
        "--columns",
        type=names,
        default=(),
        metavar="A,B,…",
        help="names of all columns, for files without a header (default: those of the header)",
    )
    group.add_argument(
        "--calibration", type=count, default=1024, metavar="N", help="texts to fit to (default: %(default)s)"
    )
    group.add_argument(
        "--max-length", type=count, default=128, metavar="TOKENS", help="truncate longer texts (default: %(default)s)"
    )
