"""The arguments of `bertlite prune`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bertlite.cli.parts import (
    FOLDER,
    Commands,
    Parser,
    add_backend,
    add_checkpoint,
    add_device,
    add_dtype,
    command,
    count,
    integer,
    integers,
    names,
    number,
    numbers,
    readable,
    set_defaults,
    shape,
)
from bertlite.experiments.settings import LABELS_FOR, PruneSettings, Recipe, steps_of
from bertlite.pruning.criteria import CRITERIA, NORMALISERS, REDUCTIONS, TARGETS

WORK = "bertlite.experiments.command"
TASKS = ("classification", "tokens", "regression", "similarity")
METRICS = ("accuracy", "f1", "macro-f1", "mcc", "spearman", "loss")
SUMMARY = "make a checkpoint faster or smaller (`prune to 2x`), or compare ways to prune"
DESCRIPTION = """\
Make a checkpoint faster or smaller with `to`, or smaller with `vocabulary`; the other actions are experiments that
compare ways to prune.  Each run is a folder that records its settings, inputs and results."""
TO = """\
Prune a checkpoint to a budget of time, work or size, without training or with minutes of it.

TARGET is a speed (2x the given model's), a share of the unpruned model's MACs (40%), the time of a forward (15ms), or
the size of the weights file (30MB).  With --size, 40% is a share of the given file's bytes.  Speed, MACs and time are
stated for one batch, --at or --lengths.  Heads and neurons are removed together; a layer may lose its whole attention
or feed-forward network.  The remaining weights are fitted by least squares, layer by layer, to the outputs of the
given model.  A speed or a time is measured at the end: the target is met if it is reached and exceeded by at most
10 %.  If other work makes the clock too noisy, sizes are chosen by MACs, and the report says so.

No labels are needed: the loss is replaced by the divergence from the given model's predictions.  With --label, the
loss itself is used.  With --distil, the remaining layers are then trained on the given model's predictions (or an
encoder's vectors), on its hidden states, and on the labels if there are any.  The best of six snapshots, judged on
--dev or the held-out texts, is kept.  A killed search or training continues when the same command is given again."""
DATA = "--train train.tsv --dev dev.tsv"


def add(commands: Commands) -> None:
    """Add `prune` and its actions."""
    prune = commands.add_parser("prune", help=SUMMARY, description=DESCRIPTION)
    actions = prune.add_subparsers(dest="action", required=True, metavar="ACTION")
    for add_one in (add_to, add_vocabulary, add_finetune, add_run, add_compare):
        add_one(actions)


def either(options: Iterable[str]) -> str:
    """Return "a, b or c"."""
    *others, last = options
    return f"{', '.join(others)} or {last}" if others else last


# Arguments that several actions have ---------------------------------------------------------------------------------


def add_data(action: Any, train: bool = True, task: str | None = "classification") -> None:
    """Add the arguments that name checkpoint and data; without a default, the task is the checkpoint's."""
    add_checkpoint(action)
    group = action.add_argument_group(
        "data", ".csv, .tsv, .jsonl or .parquet files, or hub data sets (NAME or NAME:CONFIGURATION)"
    )
    uses = {"train": "calibration and training", "dev": "evaluation"}
    for name in ("train", "dev") if train else ("dev",):
        text = f"examples for {uses[name]}" + ("" if train else " (default: none, for --speed)")
        group.add_argument(f"--{name}", type=readable, required=train, metavar="DATA", help=text)
        text = "the split to read, which a hub data set needs (default: none)"
        group.add_argument(f"--{name}-split", metavar="NAME", help=text)
    known, usual = (TASKS, "") if task else ((*TASKS, "masked"), " (default: the task of its class)")
    text = f"the task to do with the data: %(choices)s{usual}"
    group.add_argument("--task", choices=known, default=task, metavar="TASK", help=text)
    add_columns(group)
    group.add_argument("--label", default="label", metavar="NAME", help="name of the column with the label")
    text = "names of the labels 0, 1, ... in the data (default: the model's names for its classes, or numbers)"
    group.add_argument("--classes", type=names, default=(), metavar="A,B,...", help=text)
    add_device(group)


def add_columns(group: Any) -> None:
    """Add the arguments that say how texts are read from a file."""
    text = "name of the column with the text, or of the two columns with pairs"
    group.add_argument("--text", type=names, default="text", metavar="A[,B]", help=text)
    add_header(group)
    text = "truncate longer texts (default: 128, or as sentence-transformers would with this checkpoint)"
    group.add_argument("--max-length", type=count, metavar="TOKENS", help=text)


def add_header(group: Any) -> None:
    """Add --columns."""
    text = "names of all columns, for .csv and .tsv files without a header (default: read from the header)"
    group.add_argument("--columns", type=names, default=(), metavar="A,B,...", help=text)


def add_texts(action: Parser) -> Any:
    """Add the arguments that name texts; return their group."""
    group = action.add_argument_group("texts of the kind that the model will see")
    text = "a .txt file with a text on each line, or a .csv, .tsv, .jsonl or .parquet file"
    group.add_argument("--texts", type=readable, required=True, metavar="FILE", help=text)
    text = "texts that the model was not trained on, with the same columns; the report is measured on them"
    text = f"{text} (default: a held-out fifth of --texts)"
    group.add_argument("--dev", type=readable, metavar="FILE", help=text)
    add_columns(group)
    return group


def add_training(action: Parser) -> None:
    """Add the arguments of training, except --epochs."""
    group = action.add_argument_group("training")
    group.add_argument("--lr", type=number, default=Recipe.lr, help="peak learning rate")
    group.add_argument("--batch-size", type=count, default=Recipe.batch_size, metavar="N", help="examples in a batch")
    text = "size of a random sample (default: all)"
    group.add_argument("--train-examples", type=count, metavar="N", help=text)


def add_metric(action: Parser) -> None:
    """Add --metric."""
    text = "metric of the table: %(choices)s; f1 counts class 1 of two or, for words, every class except the first"
    usual = " (default: accuracy, f1 of tokens, or spearman)"
    action.add_argument("--metric", choices=METRICS, metavar="METRIC", help=text + usual)


# The actions ---------------------------------------------------------------------------------------------------------


def add_to(actions: Commands) -> None:
    """Add `to`."""
    action = command(
        actions,
        "to",
        "bertlite.experiments.budget.command",
        summary="prune a checkpoint to a speed, a time, a size or a share of its MACs",
        record="the report",
        out={FOLDER: "the pruned checkpoint with its tokenizer, a card and report.json"},
        needs=(FOLDER,),
        examples=(
            "2x runs/dense/model --texts texts.txt --out fast",
            "30% runs/dense/model --texts train.tsv --dev dev.tsv --label label --out small",
            "15ms my-model --at 1x32 --texts texts.txt --out quick",
            "30MB my-model --vocabulary --texts texts.txt --out light",
            "2x my-model --backend auto --texts texts.txt --out served",
            "60% 40% 20% my-model --texts texts.txt --out sizes",
            "30% runs/dense/model --texts train.tsv --label label --distil 10 --out trained",
        ),
        starts="prune to {target}: loading {checkpoint}",
        description=TO,
    )
    text = (
        "2x, 40%%, 15ms or 30MB; 2x+ may be exceeded; several targets share one search and get folders in FOLDER, such"
        " as FOLDER/2x"
    )
    action.add_argument("target", nargs="+", metavar="TARGET", help=text)
    add_checkpoint(action)
    group = add_texts(action)
    group.add_argument("--label", metavar="NAME", help="name of the column with the label (default: none)")
    text = "use labels only for judging, or for all: also for the fit and for --distil"
    group.add_argument("--labels-for", choices=LABELS_FOR, help=text)
    text = "texts to fit to (default: 1024, or fewer that hold 16 tokens for each input of the widest matrix)"
    group.add_argument("--calibration", type=count, metavar="N", help=text)
    add_work(action)
    text = "after pruning, train the remaining layers for MINUTES, or steps (500steps), the given model as teacher"
    text = f"{text} (default: nothing is trained)"
    action.add_argument("--distil", type=minutes_or_steps, metavar="MINUTES", help=text)
    text = "fit no linear layer after the pooling of an encoder, which brings its vectors nearer to the given model's"
    action.add_argument("--no-mapping", dest="mapping", action="store_false", help=text)
    text = (
        "exit with 1 if the model loses more points of the metric (without labels: of predictions with the same class,"
        " or of the rank correlation) (default: a MiniLM's limit, 7 with --dev, 15 without labels)"
    )
    action.add_argument("--lose-at-most", type=number, metavar="POINTS", help=text)
    text = "keep gradients, curves, times and pruned layers in FOLDER, for other targets or a longer --distil"
    action.add_argument("--keep", type=Path, metavar="FOLDER", help=f"{text} (default: deleted at the end)")
    action.add_argument("--size", action="store_true", help="TARGET is a share of the file's bytes, not of the MACs")
    text = "keep only the tokens that the texts use, as `prune vocabulary` does"
    action.add_argument("--vocabulary", action="store_true", help=text)
    action.add_argument("--seed", type=integer, help="seed for drawing texts")
    set_defaults(action, vars(PruneSettings()))


def minutes_or_steps(text: str) -> float | str:
    """Parse minutes; steps, such as 500steps, are left as they are."""
    return number(text) if steps_of(text) is None else text


def add_work(action: Parser) -> None:
    """Add the batch that a target is for, and how models run it."""
    work = action.add_argument_group("work that the target is for")
    text = "one batch of B sequences of S tokens each (default: 8x128 without --lengths)"
    work.add_argument("--at", type=shape, metavar="BxS", help=text)
    text = "a file with a length in tokens on each line; the batch has --batch-size of their quantiles (default: none)"
    work.add_argument("--lengths", type=readable, metavar="FILE", help=text)
    work.add_argument("--batch-size", type=count, metavar="N", help="number of sequences of --lengths")
    text = "how models are timed: plain PyTorch, or a backend of optimize_for_inference: %(choices)s"
    add_backend(work, f"{text} (default: plain; graphs on a GPU; auto for int8)")
    text = "dtype that the pruned model will run in: %(choices)s; its gain counts towards a speed"
    add_dtype(work, f"{text} (default: the checkpoint's)")
    add_device(work)


def add_vocabulary(actions: Commands) -> None:
    """Add `vocabulary`."""
    action = command(
        actions,
        "vocabulary",
        "bertlite.experiments.budget.vocabulary",
        function="prune_vocabulary",
        summary="keep only the tokens that texts use, and their embeddings",
        record="the report",
        out={FOLDER: "the checkpoint with its tokenizer, a card and report.json"},
        needs=(FOLDER,),
        examples=("my-model --texts texts.txt --out few",),
        description="""\
Keep only the tokens that texts use, and their embeddings.  Embeddings are half of a small model.

The texts are tokenized as before, and the outputs for them are the same.  Special tokens, single characters and bytes
are kept too, so that other texts can be tokenized: a removed token becomes several.  The report says how many texts of
--dev that concerns, and how far predictions move there.  Give all texts that you have: they are not truncated.""",
    )
    add_checkpoint(action)
    group = add_texts(action)
    text = "keep at least N tokens, by adding the most frequent ones (default: only those that the texts need)"
    group.add_argument("--tokens", type=count, metavar="N", help=text)
    add_device(action)


def add_finetune(actions: Commands) -> None:
    """Add `finetune`."""
    action = command(
        actions,
        "finetune",
        WORK,
        main="main_finetune",
        summary="train a checkpoint on a task; continues if it was killed; torchrun starts several processes",
        record="the run",
        out={FOLDER: "the run; `model` in it is the model"},
        needs=(FOLDER,),
        examples=(f"google-bert/bert-base-uncased {DATA} --out runs/dense",),
    )
    add_data(action)
    add_training(action)
    action.add_argument("--epochs", type=number, default=float(Recipe.epochs), help="passes over the data")
    action.add_argument("--seed", type=integer, default=Recipe.seed, help="seed of training")


def add_run(actions: Commands) -> None:
    """Add `run`."""
    action = command(
        actions,
        "run",
        WORK,
        main="main_run",
        summary="score, prune, repair, retrain and evaluate, by every combination of criterion, share of heads, repair"
        " and seed; continues if it was killed",
        record="the runs",
        out={FOLDER: "a folder for each run is made in this one"},
        needs=(FOLDER,),
        examples=(
            f"runs/dense/model {DATA} --criteria michel --fractions 0.5 --save-model --out runs/half",
            f"runs/dense/model {DATA} --criteria michel,random --fractions 0.3,0.5,0.7 --seeds 0,1,2 --out runs/curve",
        ),
    )
    add_data(action)
    add_training(action)
    text = "number of training examples for criteria and repair"
    action.add_argument("--calibration", type=count, default=512, metavar="N", help=text)
    options = "; ".join(either(name for name in each if name != "none") for each in (REDUCTIONS, TARGETS, NORMALISERS))
    criteria = f"{either(CRITERIA)}; options follow after slashes: {options}; inverted"
    for name, kind, default, text in (
        ("--criteria", names, "michel,random", criteria),
        ("--fractions", numbers, "0.3,0.5,0.6,0.7,0.8,0.9", "shares of the heads to remove"),
        ("--repairs", names, "refit", "none, mean, refit"),
        ("--epochs", numbers, "0", "epochs of retraining"),
        ("--seeds", integers, "0", "seeds of calibration and retraining"),
        ("--random-seeds", integers, "0,1,2,3,4", "seeds of the random criterion"),
    ):
        action.add_argument(name, type=kind, default=default, metavar="A,B,...", help=text)
    action.add_argument("--at-least", type=integer, default=1, metavar="N", help="heads that every layer keeps")
    action.add_argument("--save-model", action="store_true", help="save the pruned models")
    add_metric(action)


def add_compare(actions: Commands) -> None:
    """Add `compare`."""
    action = command(
        actions,
        "compare",
        WORK,
        main="main_compare",
        summary="make tables with intervals and paired tests from runs",
        record="every row",
        examples=("runs/half --against dense --out rows.json", "runs/curve --against random --metric mcc"),
    )
    action.add_argument("roots", nargs="+", metavar="FOLDER", help="folders with runs, at any depth")
    text = "test every other criterion against this one, or with `dense` each criterion against the dense models"
    action.add_argument("--against", metavar="CRITERION", help=f"{text} (default: no tests)")
    add_metric(action)
