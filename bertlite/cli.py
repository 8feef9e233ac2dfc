"""The `bertlite` command.  Each subcommand imports what it needs when it runs, so that --help is instant.

Exit status:  0 all is well · 1 the answer is no (a case differs) · 2 the question could not be asked
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertlite.experiments import arguments as prune

Commands = Any  # what argparse's add_subparsers returns has no public name


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"bertlite {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="bertlite", description="The BERT you can read, prove, prune and run.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    return top


def add_parity(commands: Commands) -> None:
    parity = commands.add_parser(
        "parity",
        help="prove that a checkpoint runs here as in transformers",
        description="Run a checkpoint in bertlite and in transformers and compare all they return: outputs, hidden"
        " states, attentions, losses and gradients.  Exits 1 if anything differs.",
    )
    parity.add_argument(
        "checkpoint",
        nargs="?",
        help="a hub id or a folder, such as google-bert/bert-base-uncased; by default the real MiniLM checkpoint of"
        " the demo dependency and one of bert-base's shape that transformers makes",
    )
    parity.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s); TF32 is off")
    parity.add_argument("--only", default="", metavar="PATTERN", help="cases whose name contains this; see --list")
    parity.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parity.add_argument("--json", metavar="FILE", help="write every comparison, the versions and the machine")
    parity.add_argument("--plot", metavar="FILE.png", help="draw the errors beside what is allowed")
    parity.set_defaults(run=run_parity)


def run_parity(args: argparse.Namespace) -> int:
    from bertlite.parity import command

    return command.main(args)


def add_embed(commands: Commands) -> None:
    embed = commands.add_parser(
        "embed",
        help="turn the texts of a file of any size into vectors",
        description="Write one vector for every row of the input into Parquet files: id, vector and, if asked, text."
        " Started again after a kill it goes on where it was.  Under torchrun each process takes its share.",
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
    embed.add_argument("--json", metavar="FILE", help="write the manifest and what was done this time")
    embed.set_defaults(run=run_embed)


def run_embed(args: argparse.Namespace) -> int:
    from bertlite.embed import command

    return command.main(args)


def add_bench(commands: Commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure speed beside transformers, onnxruntime and OpenVINO",
        description="Time bertlite and its peers in turn: import, loading, forward passes on full and on ragged"
        " batches, a training step, pruned models.  Peers that are not installed are named.  Exits 1 if --check finds"
        " a ratio of ours that is worse than it was.",
    )
    bench.add_argument("--only", default="", metavar="A,B", help="sections whose name contains one of these")
    bench.add_argument(
        "--engines", default="", metavar="A,B", help="engines whose name contains one of these; the baseline always"
    )
    bench.add_argument("--rounds", type=int, default=15, help="how often each candidate runs (default: %(default)s)")
    bench.add_argument(
        "--seconds",
        type=float,
        default=60,
        help="after which a section ends, with fewer rounds but not below 3 (default: %(default)s)",
    )
    bench.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    bench.add_argument("--keep", type=Path, metavar="FOLDER", help="where exported models stay for the next run")
    bench.add_argument("--json", metavar="FILE", help="write a record; other sections in it stay")
    bench.add_argument("--check", metavar="FILE", help="compare the ratios with this record's")
    bench.add_argument("--plot", metavar="FILE.png", help="draw the ratios")
    bench.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    from bertlite.bench import command

    return command.main(args)


COMMANDS = (add_parity, prune.add, add_embed, add_bench)
