"""The arguments of `bertlite embed`."""

import argparse

from bertlite.cli.parts import FOLDER, Commands, add_device, command, count, one_of

DESCRIPTION = """\
Write one vector for every row of the input into Parquet files: id, vector and, with --keep-text, text.  Started again
after a kill, it writes the missing files.  Under torchrun the processes divide the work."""
EXAMPLES = (
    "embed sentence-transformers/all-MiniLM-L6-v2 corpus.jsonl --out vectors",
    "embed my-model a.txt b.txt --pooling mean --normalize --max-length 128 --out vectors-128",
)
ENGINES = ("local", "ray")


def add(commands: Commands) -> None:
    """Add `embed` and its arguments."""
    embed = command(
        commands,
        "embed",
        "bertlite.embed.command",
        summary="turn the texts of files of any size into vectors",
        description=DESCRIPTION,
        examples=EXAMPLES,
        record="the manifest and the work done by this command",
        out={FOLDER: "the Parquet files and manifest.json"},
        needs=(FOLDER,),
    )
    embed.add_argument("checkpoint", metavar="CHECKPOINT", help="a hub id or a folder, with its tokenizer")
    embed.add_argument(
        "input", nargs="+", metavar="INPUT", help="text (one row a line), csv, tsv, jsonl or Parquet files"
    )
    embed.add_argument("--format", help="text, csv, tsv, jsonl or parquet (default: by the files' suffixes)")
    embed.add_argument(
        "--text",
        dest="column",
        default="text",
        metavar="NAME",
        help="name of the column with the text (default: %(default)s)",
    )
    embed.add_argument("--id", metavar="NAME", help="name of the column with the id (default: rows are numbered)")
    embed.add_argument("--keep-text", action="store_true", help="write the texts too")
    embed.add_argument("--pooling", help="cls, mean, max or lasttoken (default: that of the checkpoint, else mean)")
    embed.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="give vectors length 1 (default: as the checkpoint states, else not)",
    )
    embed.add_argument("--prompt", metavar="TEXT", help="put this before each text (default: the checkpoint's prompt)")
    embed.add_argument(
        "--prompt-name",
        metavar="NAME",
        help="put the checkpoint's prompt of this name before each text (default: the one that the checkpoint names)",
    )
    embed.add_argument("--dtype", help="float32, bfloat16, float16 or, on the CPU, int8 (default: the checkpoint's)")
    embed.add_argument(
        "--backend",
        default="auto",
        help="of optimize_for_inference; auto packs the weights where that is possible (default: %(default)s)",
    )
    add_device(embed)
    embed.add_argument(
        "--max-length", type=count, metavar="TOKENS", help="truncate longer texts (default: the checkpoint's limit)"
    )
    embed.add_argument("--max-tokens", type=count, default=4096, help="tokens in a batch (default: %(default)s)")
    embed.add_argument("--shard-rows", type=count, default=10_000, help="rows in a file (default: %(default)s)")
    embed.add_argument(
        "--engine",
        type=one_of("engine", ENGINES),
        choices=ENGINES,
        default="local",
        help="local, run here; or ray, run on Ray (default: %(default)s)",
    )
    embed.add_argument("--workers", type=count, help="actors of --engine ray (default: 2)")
