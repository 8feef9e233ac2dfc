"""Completion of the command line in a shell."""

import argparse
from collections.abc import Sequence

SHELLS = ("bash", "zsh", "tcsh")


def add_option(top: argparse.ArgumentParser) -> None:
    """Add --print-completion to the parser of all commands."""
    top.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        metavar="SHELL",
        help=f"print a script that completes commands and options in {', '.join(SHELLS)}; needs the package shtab"
        " (default: none is printed)",
    )


class PrintCompletion(argparse.Action):
    """Print the script for a shell and exit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            import shtab
        except ModuleNotFoundError:
            parser.error("the completion is written by shtab, which is not installed: pip install shtab")
        print(shtab.complete(parser, shell=str(values)))
        parser.exit(0)
