"""The words of a command line: misspelt ones are answered with the nearest, and a shell can complete them."""

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec

from bertlite.cli.parts import PATHS, Parser


def check_spelling(top: Parser, argv: Sequence[str]) -> None:
    """Check that commands and options exist; other errors are left to the parser.

    Raises:
        SystemExit: one does not exist; the message on standard error names the nearest.
    """
    parser, words = leaf(top, argv)
    if commands := subcommands(parser):
        if words and not words[0].startswith("-"):
            given = f"{parser.prog} {words[0]}".removeprefix("bertlite ")
            parser.error(f"there is no command {given!r}; {nearest(words[0], list(commands))}")
        return
    if "--" in words:
        words = words[: words.index("--")]
    known = options_of(parser)
    for word in words:
        name = word.partition("=")[0]
        if re.fullmatch(r"--[a-zA-Z][\w-]*", name) and name not in known:
            parser.error(f"there is no option {name}; {nearest(name, known)}")


def leaf(top: Parser, argv: Sequence[str]) -> tuple[Parser, list[str]]:
    """Return the parser of the command that these words name, and the words after it."""
    parser, words = top, list(argv)
    while words and words[0] in (commands := subcommands(parser)):
        parser = commands[words.pop(0)]
    return parser, words


def nearest(word: str, known: Sequence[str]) -> str:
    """Return a question with the nearest of the known words, or all of them if none is near."""
    found = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {found[0]!r}?" if found else f"have: {', '.join(known)}"


def subcommands(parser: Parser) -> dict[str, Parser]:
    """Return the commands of a parser by name; empty if it is a command itself."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def options_of(parser: Parser) -> list[str]:
    """Return the long options of a parser."""
    return [name for action in parser._actions for name in action.option_strings if name.startswith("--")]


# Completion ----------------------------------------------------------------------------------------------------------


def add_completion(top: Parser) -> None:
    """Add --print-completion to the parser of all commands, where shtab is installed."""
    if find_spec("shtab") is None:
        return
    import shtab

    shtab.add_argument_to(top, "--print-completion", help="print a script that completes commands in a shell")
    todo = [top]
    while todo:
        parser = todo.pop()
        todo += subcommands(parser).values()
        for action in parser._actions:
            if action.metavar in (*PATHS, "PATH[,PATH]"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
