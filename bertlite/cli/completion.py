"""Completion of the command line in a shell."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from bertlite.cli.parts import PATHS, Parser
from bertlite.cli.spelling import subcommands
from bertlite.extras import import_optional

SHELLS = ("bash", "zsh", "tcsh")


def add_option(top: Parser) -> None:
    """Add --print-completion to the parser of all commands."""
    top.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        metavar="SHELL",
        help=f"print a script that completes commands, options and paths in {', '.join(SHELLS)}; needs the package"
        " shtab (default: none is printed)",
    )


class PrintCompletion(argparse.Action):
    """Print the script for a shell and exit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        shtab = import_optional("shtab", option_string or "", "cli")
        assert isinstance(parser, Parser)
        complete_paths_(parser, shtab.FILE)
        print(shtab.complete(parser, shell=str(values)))
        parser.exit(0)


def complete_paths_(parser: Parser, how: Mapping[str, Any]) -> None:
    """Let shtab complete the arguments that are paths, of all commands below this parser."""
    for action in parser._actions:
        if action.metavar in (*PATHS, "PATH[,PATH]"):
            action.complete = how  # type: ignore[attr-defined]  # where shtab looks for it
    for below in subcommands(parser).values():
        complete_paths_(below, how)
