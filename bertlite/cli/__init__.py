"""The `bertlite` command, with a module for the arguments of each subcommand.

The code that a command runs is imported when it runs, so that --help is instant.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from bertlite.cli import attention, bench, embed, inspect, parity, prune
from bertlite.cli.parts import FOLDER, FOOT, RECORD

COMMANDS = (inspect, attention, parity, prune, embed, bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `bertlite` command and return its exit status."""
    args = parser().parse_args(argv)
    try:
        status = run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output has closed it, such as `head`
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or Python prints an error when it flushes at exit
        return 0
    except (OSError, ValueError, ImportError, RuntimeError, MemoryError) as error:
        print(f"bertlite {args.command}: {str(error) or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    top = argparse.ArgumentParser(
        prog="bertlite",
        description="The BERT you can read, prove, prune and run.",
        epilog=FOOT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    return top


def run(args: argparse.Namespace) -> int:
    """Run a command; with --json, print its record on standard output and everything else on standard error.

    Raises:
        ValueError: --out names nothing of what the command must write.
    """
    if args.needs is None:
        return run_with_file(args)
    args.out = dict(args.out)
    args.record = args.out.get(RECORD) if args.record_in_out else None
    if args.needs and not set(args.needs) & set(args.out) and not (args.json and RECORD in args.needs):
        ways = " or ".join(f"--out {kind if kind == FOLDER else f'FILE{kind}'}" for kind in args.needs)
        raise ValueError(f"nothing says where to write: say {ways}")
    if not args.json:
        return args.run(args)
    with tempfile.TemporaryDirectory() as folder:
        path = args.record = args.record or Path(folder, "record.json")
        with redirect_stdout(sys.stderr):
            status = args.run(args)
        if path.exists():
            print(path.read_text(encoding="utf-8"), end="")
    return status


def run_with_file(args: argparse.Namespace) -> int:
    """Run a command whose --json names a file, or - for standard output."""
    if args.json != "-":
        return args.run(args)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "record.json")
        args.json = str(path)
        with redirect_stdout(sys.stderr):
            status = args.run(args)
        if path.exists():
            print(path.read_text(encoding="utf-8"), end="")
    return status
