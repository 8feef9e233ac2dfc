"""Words that no command knows: the answer names the spelling of today, or the nearest that there is."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from bertlite.cli.parts import Parser


@dataclass(frozen=True)
class Old:
    """A spelling of earlier versions.

    Args:
        commands: where it was, such as "prune run"; empty for all commands.
        old, new: as the documentation shows them.
        option: the name of an option that is gone, by which the spelling is known;
        pattern: or an expression for words of the command line, joined by NUL.
    """

    commands: tuple[str, ...]
    old: str
    new: str
    option: str = ""
    pattern: str = ""

    def is_in(self, name: str, words: Sequence[str]) -> bool:
        """Tell whether the words of a command have this spelling."""
        if self.commands and name not in self.commands:
            return False
        if self.option:
            return any(word.partition("=")[0] == self.option for word in words)
        return bool(self.pattern) and re.search(f"(^|\0){self.pattern}(\0|$)", "\0".join(words)) is not None


OLD = (
    Old((), "--json FILE", "--out FILE.json", pattern=r"--json(=[^\0]*|\0[^\0]+\.json)"),
    Old((), "--json -", "--json", pattern=r"--json\0-"),
    Old(("attention",), "TEXT --model CHECKPOINT", "CHECKPOINT TEXT", option="--model"),
    Old(("embed",), "INPUT --model CHECKPOINT", "CHECKPOINT INPUT", option="--model"),
    Old(("parity", "bench"), "--plot FILE.png", "--out FILE.png", option="--plot"),
    Old(("bench",), "--keep FOLDER", "--out FOLDER", option="--keep"),
    Old(("prune run", "prune curve"), "--root FOLDER", "--out FOLDER", option="--root"),
    Old(("prune run", "prune curve"), "--uniform", "--allocate equal", option="--uniform"),
    Old(("prune compare",), "--plots FOLDER", "--out FOLDER", option="--plots"),
    Old(("prune score", "prune curve"), "--criteria A B", "--criteria A,B"),  # see `answer_extra`
    Old(("prune curve",), "--seeds 0-2", "--seeds 0,1,2", pattern=r"--seeds[\0=]\d+-\d+"),
    Old(("prune curve",), "--random-seeds 0-2", "--random-seeds 0,1,2", pattern=r"--random-seeds[\0=]\d+-\d+"),
    Old(("attention",), "--layers 0-2", "--layers 0,1,2", pattern=r"--layers[\0=][\d,]*\d-\d[\d,-]*"),
    Old(("attention",), "--heads 0-2", "--heads 0,1,2", pattern=r"--heads[\0=][\d,]*\d-\d[\d,-]*"),
    Old(("prune",), "prune bench RUN", "bench RUN", pattern="bench"),
)


def check_spelling(top: Parser, argv: Sequence[str]) -> None:
    """Refuse a command or an option that does not exist, with the spelling of today or the nearest.

    Whatever else is wrong is left to the parser.

    Raises:
        SystemExit: one does not exist; the message is on standard error.
    """
    parser, words = leaf(top, argv)
    if commands := subcommands(parser):
        if words and not words[0].startswith("-"):
            given = f"{parser.prog} {words[0]}".removeprefix("bertlite ")
            answer = answer_old(parser, words)
            parser.error(answer or f"there is no command {given!r}; {nearest(words[0], list(commands))}")
        return
    if "--" in words:
        words = words[: words.index("--")]
    if answer := answer_old(parser, words):
        parser.error(answer)
    known = options_of(parser)
    for word in words:
        name = word.partition("=")[0]
        if re.fullmatch(r"--[a-zA-Z][\w-]*", name) and name not in known:
            parser.error(f"there is no option {name}; {nearest(name, known)}")


def answer_old(parser: Parser, words: Sequence[str]) -> str:
    """Return what to say instead of an old spelling; empty where there is none."""
    name = parser.prog.removeprefix("bertlite ")
    found = next((each for each in OLD if each.is_in(name, words)), None)
    return "" if found is None else f"say `{found.new}`, which was `{found.old}` before"


def answer_extra(parser: Parser, words: Sequence[str], extra: str) -> str:
    """Return what to say of a word that the parser has no use for, such as the second of a list with spaces."""
    lists = {name for action in parser._actions if "," in str(action.metavar) for name in action.option_strings}
    before = list(words[: words.index(extra)]) if extra in words else []
    while before and not before[-1].startswith("-"):
        before.pop()
    if before and before[-1] in lists:
        start = len(before)
        items = ",".join(words[start : words.index(extra) + 1])
        return f"{extra!r} is one word too many; a list has commas: {before[-1]} {items}"
    return f"{extra!r} is one word too many"


def leaf(top: Parser, argv: Sequence[str]) -> tuple[Parser, list[str]]:
    """Return the parser of the command that these words name, and the words after it."""
    parser, words = top, list(argv)
    while words and words[0] in (commands := subcommands(parser)):
        parser = commands[words.pop(0)]
    return parser, words


def nearest(word: str, known: Sequence[str]) -> str:
    """Return a question with the nearest of the known words, or all of them where none is near."""
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
