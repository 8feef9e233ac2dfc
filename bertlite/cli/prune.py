"""The tables of `bertlite prune`."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from bertlite.cli import parts, work
from bertlite.cli.parts import CHECKPOINT, DEVICE, FOLDER, AddTo, Command, flag, group, option
from bertlite.experiments.settings import LABELS_FOR, PruneSettings, Recipe, steps_of
from bertlite.pruning.criteria import CRITERIA, NORMALISERS, REDUCTIONS, TARGETS

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
10 %.  If other work makes the clock too noisy, sizes follow from earlier times or from MACs, and the report says so.

No labels are needed: the loss is replaced by the divergence from the given model's predictions.  With --label, the
loss itself is used.  With --distil, the remaining layers are then trained on the given model's predictions (or an
encoder's vectors), on its hidden states, and on the labels if there are any.  The best of six snapshots, judged on
--dev or the held-out texts, is kept.  A killed search or training continues when the same command is given again."""
DATA = "--train train.tsv --dev dev.tsv"


def either(options: Iterable[str]) -> str:
    """Return "a, b or c"."""
    *others, last = options
    return f"{', '.join(others)} or {last}" if others else last


def minutes_or_steps(text: str) -> float | str:
    """Parse minutes; steps, such as 500steps, are left as they are."""
    return parts.number(text) if steps_of(text) is None else text


# Options that several commands have ----------------------------------------------------------------------------------

HEADER = option(
    "--columns A,B,...",
    "names of all columns, for .csv and .tsv files without a header (default: read from the header)",
    parts.names,
    default=(),
)
COLUMNS = (  # how texts are read from a file
    option(
        "--text A[,B]",
        "name of the column with the text, or of the two columns with pairs",
        parts.names,
        default="text",
    ),
    HEADER,
    option(
        "--max-length TOKENS",
        "truncate longer texts (default: 128, or as sentence-transformers would with this checkpoint)",
        parts.count,
    ),
)
METRIC = option(
    "--metric METRIC",
    "metric of the table: %(choices)s; f1 counts class 1 of two or, for words, every class except the first (default:"
    " accuracy, f1 of tokens, or spearman)",
    choices=METRICS,
)
TRAINING = group(
    "training",
    option("--lr", "peak learning rate", parts.number, default=Recipe.lr),
    option("--batch-size N", "examples in a batch", parts.count, default=Recipe.batch_size),
    option("--train-examples N", "size of a random sample (default: all)", parts.count),
)


def data_options(train: bool = True, task: str | None = "classification") -> Sequence[AddTo]:
    """Return the options that name checkpoint and data; without a default, the task is the checkpoint's."""
    uses = {"train": "calibration and training", "dev": "evaluation"}
    own: list[AddTo] = []
    for name in uses if train else ("dev",):
        words = f"examples for {uses[name]}{'' if train else ' (default: none, for --speed)'}"
        own.append(option(f"--{name} DATA", words, parts.readable, required=train))
        own.append(option(f"--{name}-split NAME", "the split to read, which a hub data set needs (default: none)"))

    # Without a default, the class of the checkpoint tells the task, which may be to predict masked words.
    known, usual = (TASKS, "") if task else ((*TASKS, "masked"), " (default: the task of its class)")

    return CHECKPOINT, group(
        "data",
        *own,
        option("--task TASK", f"the task to do with the data: %(choices)s{usual}", choices=known, default=task),
        *COLUMNS,
        option("--label NAME", "name of the column with the label", default="label"),
        option(
            "--classes A,B,...",
            "names of the labels 0, 1, ... in the data (default: the model's names for its classes, or numbers)",
            parts.names,
            default=(),
        ),
        DEVICE,
        description=".csv, .tsv, .jsonl or .parquet files, or hub data sets (NAME or NAME:CONFIGURATION)",
    )


def text_options(*more: AddTo) -> AddTo:
    """Return the options that name texts, and more of their group."""
    return group(
        "texts of the kind that the model will see",
        option(
            "--texts FILE",
            "a .txt file with a text on each line, or a .csv, .tsv, .jsonl or .parquet file",
            parts.readable,
            required=True,
        ),
        option(
            "--dev FILE",
            "texts that the model was not trained on, with the same columns; the report is measured on them (default:"
            " a held-out fifth of --texts)",
            parts.readable,
        ),
        *COLUMNS,
        *more,
    )


# The commands --------------------------------------------------------------------------------------------------------

PRUNE_TO = Command(
    name="to",
    work=work.run_prune_to,
    summary="prune a checkpoint to a speed, a time, a size or a share of its MACs",
    record="the report",
    out={FOLDER: "the pruned checkpoint with its tokenizer, a card and report.json"},
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
    settings=PruneSettings(),
    options=[
        option(
            "target TARGET",
            "2x, 40%%, 15ms or 30MB; 2x+ may be exceeded; several targets share one search and get folders in FOLDER,"
            " such as FOLDER/2x",
            nargs="+",
        ),
        CHECKPOINT,
        text_options(
            option("--label NAME", "name of the column with the label (default: none)"),
            option(
                "--labels-for",
                "use labels only for judging, or for all: also for the fit and for --distil",
                choices=LABELS_FOR,
            ),
            option(
                "--calibration N",
                "texts to fit to (default: 1024, or fewer that hold 16 tokens for each input of the widest matrix)",
                parts.count,
            ),
        ),
        group(
            "work that the target is for",
            option(
                "--at BxS", "one batch of B sequences of S tokens each (default: 8x128 without --lengths)", parts.shape
            ),
            option(
                "--lengths FILE",
                "a file with a length in tokens on each line; the batch has --batch-size of their quantiles (default:"
                " none)",
                parts.readable,
            ),
            option("--batch-size N", "number of sequences of --lengths", parts.count),
            parts.backend_option(
                "how models are timed: plain PyTorch, or a backend of optimize_for_inference: %(choices)s (default:"
                " plain; graphs on a GPU; auto for int8)"
            ),
            parts.dtype_option(
                "dtype that the pruned model will run in: %(choices)s; its gain counts towards a speed (default: the"
                " checkpoint's)"
            ),
            DEVICE,
        ),
        option(
            "--distil MINUTES",
            "after pruning, train the remaining layers for MINUTES, or steps (500steps), the given model as teacher"
            " (default: nothing is trained)",
            minutes_or_steps,
        ),
        option(
            "--no-mapping",
            "fit no linear layer after the pooling of an encoder, which brings its vectors nearer to the given"
            " model's",
            dest="mapping",
            action="store_false",
        ),
        option(
            "--lose-at-most POINTS",
            "exit with 1 if the model loses more points of the metric (without labels: of predictions with the same"
            " class, or of the rank correlation) (default: with --dev a MiniLM's limit, 7 with labels, 15 without)",
            parts.number,
        ),
        option(
            "--keep FOLDER",
            "keep gradients, curves, times and pruned layers in FOLDER, for other targets or a longer --distil"
            " (default: deleted at the end)",
            Path,
        ),
        flag("--size", "TARGET is a share of the file's bytes, not of the MACs"),
        flag("--vocabulary", "keep only the tokens that the texts use, as `prune vocabulary` does"),
        option("--seed", "seed for drawing texts", parts.integer),
    ],
)

VOCABULARY = Command(
    name="vocabulary",
    work=work.run_function("bertlite.experiments.budget.vocabulary", "prune_vocabulary"),
    summary="keep only the tokens that texts use, and their embeddings",
    record="the report",
    out={FOLDER: "the checkpoint with its tokenizer, a card and report.json"},
    examples=("my-model --texts texts.txt --out few",),
    description="""\
Keep only the tokens that texts use, and their embeddings.  Embeddings are half of a small model.

The texts are tokenized as before, and the outputs for them are the same.  Special tokens, single characters and bytes
are kept too, so that other texts can be tokenized: a removed token becomes several.  The report says how many texts of
--dev that concerns, and how far predictions move there.  Give all texts that you have: they are not truncated.""",
    options=[
        CHECKPOINT,
        text_options(
            option(
                "--tokens N",
                "keep at least N tokens, by adding the most frequent ones (default: only those that the texts need)",
                parts.count,
            )
        ),
        DEVICE,
    ],
)

FINETUNE = Command(
    name="finetune",
    work=work.run_finetune,
    summary="train a checkpoint on a task; continues if it was killed; torchrun starts several processes",
    record="the run",
    out={FOLDER: "the run; `model` in it is the model"},
    examples=(f"google-bert/bert-base-uncased {DATA} --out runs/dense",),
    options=[
        *data_options(),
        TRAINING,
        option("--epochs", "passes over the data", parts.number, default=float(Recipe.epochs)),
        option("--seed", "seed of training", parts.integer, default=Recipe.seed),
    ],
)

CRITERION = "; ".join(either(name for name in each if name != "none") for each in (REDUCTIONS, TARGETS, NORMALISERS))
RUN = Command(
    name="run",
    work=work.run_prune_run,
    summary="score, prune, repair, retrain and evaluate, by every combination of criterion, share of heads, repair"
    " and seed; continues if it was killed",
    record="the runs",
    out={FOLDER: "a folder for each run is made in this one"},
    examples=(
        f"runs/dense/model {DATA} --criteria michel --fractions 0.5 --save-model --out runs/half",
        f"runs/dense/model {DATA} --criteria michel,random --fractions 0.3,0.5,0.7 --seeds 0,1,2 --out runs/curve",
    ),
    options=[
        *data_options(),
        TRAINING,
        option("--calibration N", "number of training examples for criteria and repair", parts.count, default=512),
        option(
            "--criteria A,B,...",
            f"{either(CRITERIA)}; options follow after slashes: {CRITERION}; inverted; rescored",
            parts.names,
            default="michel,random",
        ),
        option(
            "--fractions A,B,...", "shares of the heads to remove", parts.numbers, default="0.3,0.5,0.6,0.7,0.8,0.9"
        ),
        option("--repairs A,B,...", "none, mean, refit", parts.names, default="refit"),
        option("--epochs A,B,...", "epochs of retraining", parts.numbers, default="0"),
        option("--seeds A,B,...", "seeds of calibration and retraining", parts.integers, default="0"),
        option("--random-seeds A,B,...", "seeds of the random criterion", parts.integers, default="0,1,2,3,4"),
        option("--at-least N", "heads that every layer keeps", parts.integer, default=1),
        flag("--save-model", "save the pruned models"),
        METRIC,
    ],
)

COMPARE = Command(
    name="compare",
    work=work.run_prune_compare,
    summary="make tables with intervals and paired tests from runs",
    record="every row",
    examples=("runs/half --against dense --out rows.json", "runs/curve --against random --metric mcc"),
    options=[
        option("roots FOLDER", "folders with runs, at any depth", nargs="+"),
        option(
            "--against CRITERION",
            "test every other criterion against this one, or with `dense` each criterion against the dense models"
            " (default: no tests)",
        ),
        METRIC,
    ],
)


def add(commands: parts.Commands) -> None:
    """Add `prune` and its actions."""
    parser = commands.add_parser("prune", help=SUMMARY, description=DESCRIPTION)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for each in (PRUNE_TO, VOCABULARY, FINETUNE, RUN, COMPARE):
        each.add(actions)
