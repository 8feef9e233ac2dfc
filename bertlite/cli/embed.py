"""The arguments of `bertlite embed`."""

import argparse

from bertlite.cli.parts import Commands, command

DESCRIPTION = """\
Write one vector for every row of the input into Parquet files: id, vector and, if asked, text.  Started again after
a kill it goes on where it was.  Under torchrun each process takes its share."""


def add(commands: Commands) -> None:
    embed = command(
        commands,
        "embed",
        "bertlite.embed.command",
        what="turn the texts of a file of any size into vectors",
        description=DESCRIPTION,
        record="the manifest and what was done this time",
    )
    embed.add_argument("input", nargs="+", help="text (one row a line), csv, tsv, jsonl or Parquet files")
    embed.add_argument("--model", required=True, help="a hub id or a folder")
    embed.add_argument("--out", required=True, metavar="FOLDER", help="where the files and manifest.json go")
    embed.add_argument("--format", help="text, csv, tsv, jsonl or parquet (default: by the files' names)")
    embed.add_argument("--column", default="text", help="which column holds the texts (default: %(default)s)")
    embed.add_argument("--id", metavar="COLUMN", help="which column holds the ids (default: rows are numbered)")
    embed.add_argument("--keep-text", action="store_true", help="write the texts too")
    embed.add_argument("--pooling", help="cls, mean or max (default: what the checkpoint says, else mean)")
    embed.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="give vectors length 1, or not (default: what the checkpoint says, else not)",
    )
    embed.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's)")
    embed.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    embed.add_argument("--max-length", type=int, metavar="TOKENS", help="truncate longer texts")
    embed.add_argument("--max-tokens", type=int, default=4096, help="of a batch (default: %(default)s)")
    embed.add_argument("--shard-rows", type=int, default=10_000, help="rows of a file (default: %(default)s)")
    embed.add_argument("--engine", default="local", choices=("local", "ray"), help="(default: %(default)s)")
    embed.add_argument("--workers", type=int, help="of --engine ray (default: 2)")
