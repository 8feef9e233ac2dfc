"""The `bertlite` command: commands.py and prune.py have the tables of its subcommands, work.py does their work.

The code that a command runs is imported when it runs, so that --help is instant.
"""

import argparse
import io
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path

from bertlite import __version__
from bertlite.checkpoint.faults import check_utf8
from bertlite.checkpoint.folders import check_file_output
from bertlite.cli import prune
from bertlite.cli.commands import ATTENTION, CONVERT, EMBED, ENV, EVALUATE, EXPORT, INSPECT, PACK, PARITY
from bertlite.cli.parts import FOLDER, PATHS, RECORD, Addable, Parser, add_completion, check_writable
from bertlite.support.extras import install_hint
from bertlite.support.screen import screens

# In the order of --help; `prune` is a module of several.
COMMANDS: Sequence[Addable] = (INSPECT, ATTENTION, PARITY, prune, EVALUATE, EMBED, CONVERT, PACK, EXPORT, ENV)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `bertlite` command and return its exit status."""
    usual = warnings.formatwarning
    warnings.formatwarning = format_warning
    try:
        with screens():
            return answer(argv)
    except BrokenPipeError:  # the reader of the output, such as `head`, has stopped
        return 128 + 13  # as a shell reports a program that SIGPIPE ended
    finally:
        warnings.formatwarning = usual


def answer(argv: Sequence[str] | None) -> int:
    """Run the command; print an error in one line on standard error."""
    name = "bertlite"
    try:
        try:
            args = parser().parse_args(sys.argv[1:] if argv is None else argv)
            name = " ".join(filter(None, ("bertlite", args.command, getattr(args, "action", None))))
            with redirect_stderr(io.StringIO()) if args.quiet else nullcontext():
                return run_command(args)
        finally:
            flush_output()
    except BrokenPipeError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, MemoryError) as error:
        # An error of input, files or machine is one line; any other is a fault of ours and keeps its traceback.
        if isinstance(error, ModuleNotFoundError) and error.name:  # Python's own error, without a hint
            error = ModuleNotFoundError(f"{error}: {install_hint('cli')}")
        print(f"{name}: {str(error) or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def flush_output() -> None:
    """Raise OSError if the output cannot be written, and drop the rest of it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or else Python's flush at exit fails too
        raise


def format_warning(message: Warning | str, *_: object, **__: object) -> str:
    """Return the line that shows a warning, without its location in the code; on a terminal it replaces the bar."""
    erase = "\r\x1b[K" if sys.stderr.isatty() else ""
    return f"{erase}warning: {message}\n"


def parser() -> Parser:
    """Make the parser of all commands."""
    purpose = "The BERT you can read, prove, prune and run.  `bertlite COMMAND --help` has examples."
    top = Parser(prog="bertlite", description=purpose)
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    below = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for each in COMMANDS:
        each.add(below)
    add_completion(top)
    return top


def run_command(args: argparse.Namespace) -> int:
    """Run a command; with --json, print its record on standard output and everything else on standard error.

    Raises:
        ValueError: --out lacks a path that the command must write.
    """
    # Each kind of output has a name of its own for the work; None if it was not asked for.
    args.folder, args.html, args.record = (args.out.get(kind) for kind in (FOLDER, ".html", RECORD))

    # Nothing may be lost: neither a file that is read, nor hours of work because a path cannot be written.
    read = [getattr(args, action.dest) for action in args.parser._actions if action.metavar in PATHS]
    inputs = [path for each in read for path in (each if isinstance(each, list) else [each])]
    if "" in inputs:
        raise ValueError("the path of an input is empty: name one; perhaps a variable of the shell is not set")
    for kind, path in args.out.items():
        check_writable(kind, path)
        if kind != FOLDER:  # the command itself checks its folder
            check_file_output(path, *inputs)
    if args.folder:
        check_utf8(args.folder)
    needs = args.asked.needs
    if needs and not {*needs} & {*args.out} and not (args.json and RECORD in needs):
        ways = " or ".join(f"--out {kind if kind == FOLDER else f'FILE{kind}'}" for kind in needs)
        raise ValueError(f"an output is missing: add {ways}")

    # Progress and other output must not mix with a record that a program reads from standard output.
    if not args.json:
        return args.asked.run(args)
    with tempfile.TemporaryDirectory() as folder:
        path = args.record = args.record or Path(folder, "record.json")
        with redirect_stdout(sys.stderr):
            status = args.asked.run(args)
        if path.exists():
            print(path.read_text(encoding="utf-8"), end="")
    return status
