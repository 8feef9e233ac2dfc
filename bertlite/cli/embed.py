"""The arguments of `bertlite embed`."""

import argparse

from bertlite.cli.parts import Commands, command

DESCRIPTION = """\
Write one vector for every row of the input into Parquet files: id, vector and, with --keep-text, text.  Started again
after a kill, it does the files that are missing.  Under torchrun the processes divide the work."""


def add(commands: Commands) -> None:
    embed = command(
        commands,
        "embed",
        "bertlite.embed.command",
        summary="turn the texts of files of any size into vectors",
        description=DESCRIPTION,
        record="the manifest and the work done by this command",
    )
    embed.add_argument("input", nargs="+", help="text (one row a line), csv, tsv, jsonl or Parquet files")
    embed.add_argument("--model", required=True, help="a hub id or a folder")
    embed.add_argument(
        "--out", required=True, metavar="FOLDER", help="the folder for the Parquet files and manifest.json"
    )
    embed.add_argument("--format", help="text, csv, tsv, jsonl or parquet (default: by the files' suffixes)")
    embed.add_argument("--column", default="text", help="the column with the texts (default: %(default)s)")
    embed.add_argument("--id", metavar="COLUMN", help="the column with the ids (default: rows are numbered)")
    embed.add_argument("--keep-text", action="store_true", help="write the texts too")
    embed.add_argument("--pooling", help="cls, mean or max (default: that of the checkpoint, else mean)")
    embed.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="give vectors length 1 (default: as the checkpoint states, else not)",
    )
    embed.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's)")
    embed.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    embed.add_argument("--max-length", type=int, metavar="TOKENS", help="truncate longer texts")
    embed.add_argument("--max-tokens", type=int, default=4096, help="tokens in a batch (default: %(default)s)")
    embed.add_argument("--shard-rows", type=int, default=10_000, help="rows in a file (default: %(default)s)")
    embed.add_argument(
        "--engine", default="local", choices=("local", "ray"), help="run here or on Ray (default: %(default)s)"
    )
    embed.add_argument("--workers", type=int, help="actors of --engine ray (default: 2)")
