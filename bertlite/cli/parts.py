"""The parts that all commands share: help, --out and --json, lists, and lazy imports."""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

Commands: TypeAlias = Any  # the type that argparse's add_subparsers returns has no public name

FOLDER = "FOLDER"  # a kind of output: a path with any other suffix
RECORD = ".json"
PATHS = ("CHECKPOINT", "DATA", "FILE", "FOLDER", "INPUT", "RUN", "SOURCE")  # metavars of arguments that may be paths
FOOT = """\
Exit status: 0 for success; 1 for a negative result: something differs, is worse, or cannot be loaded; 2
if the command could not run, with the reason on standard error; 130 if interrupted; 141 if its output was closed."""


class HelpFormatter(argparse.HelpFormatter):
    """Wrap each paragraph at the terminal's width, except indented lines, such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = [
            block if "\n  " in block else super(HelpFormatter, self)._fill_text(block, width, indent)
            for block in text.split("\n\n")
        ]
        return "\n\n".join(blocks)


class Parser(argparse.ArgumentParser):
    """A parser with errors of one line and without abbreviations of options."""

    def __init__(self, *, examples: Sequence[str] = (), **options: Any) -> None:
        shown = "".join(f"  {options['prog']} {example}\n" for example in examples)
        super().__init__(
            **options,
            epilog=f"examples:\n{shown}\n{FOOT}" if examples else FOOT,
            allow_abbrev=False,
            formatter_class=HelpFormatter,
        )
        self.examples = tuple(f"{self.prog.removeprefix('bertlite ')} {example}" for example in examples)

    def error(self, message: str) -> NoReturn:
        """Print a message that names --help, and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


def command(
    commands: Commands,
    name: str,
    module: str,
    *,
    summary: str,
    description: str = "",
    examples: Sequence[str],
    record: str,
    out: Mapping[str, str] | None = None,
    needs: Sequence[str] = (),
    starts: str = "",
) -> Parser:
    """Add a command and return the parser of its arguments.

    `args.out` holds the paths to write, {kind: path}; `args.folder` the folder among them and `args.record` the path
    for the record, or None.  A kind is a suffix, or FOLDER.

    Args:
        module: the name of the module whose `main(args)` runs the command and returns the exit status.
        summary: its line in the list of commands.
        description: the text of --help; by default the summary.
        examples: the words after the command's name.
        record: the content of the record that --json prints, and that --out FILE.json writes.
        out: {kind: content} of other outputs of --out.  If it has ".json", that file is not the record.
        needs: the kinds one of which --out must name.
        starts: a line for standard error before anything is imported, such as torch, which takes seconds.
    """
    kinds = {**(out or {})}
    kinds.setdefault(RECORD, record)

    def run(args: argparse.Namespace) -> int:
        if starts:
            shown = {name: " ".join(x) if isinstance(x, list) else x for name, x in vars(args).items()}
            print(starts.format(**shown), file=sys.stderr, flush=True)
        return import_module(module).main(args)

    description = description or f"{summary[0].upper()}{summary[1:]}."
    added: Parser = commands.add_parser(name, help=summary, description=description, examples=examples)
    added.add_argument(
        "--out",
        type=paths(kinds),
        default={},
        required=bool(needs) and RECORD not in needs,  # --json may print a record instead
        metavar="PATH[,PATH]",
        help=f"write {'; '.join(f'{kind}: {content}' for kind, content in kinds.items())}"
        + ("" if needs else " (default: nothing is written)"),
    )
    added.add_argument(
        "--json", action="store_true", help="print the record on standard output, and all else on standard error"
    )
    added.set_defaults(run=run, needs=tuple(needs), record_in_out=RECORD not in (out or {}))
    return added


def option(
    group: Any, name: str, kind: Callable[[str], Any], default: Any, text: str, *, otherwise: str = "", **more: Any
) -> None:
    """Add an option, whose help ends with its default.

    Args:
        kind: parses the value.
        otherwise: what holds without the option, where the default does not say it.
        more: for argparse.
    """
    shown = otherwise or "%(default)s"
    group.add_argument(name, type=kind, default=default, help=f"{text} (default: {shown})", **more)


def choice(group: Any, name: str, known: Sequence[str], default: str | None, text: str, **more: Any) -> None:
    """Add an option whose value is one of these names."""
    option(group, name, str, default, text, choices=known, **more)


def add_checkpoint(action: Any, text: str = "a hub id or a folder, with its tokenizer", **more: Any) -> None:
    """Add CHECKPOINT."""
    action.add_argument("checkpoint", metavar="CHECKPOINT", help=text, **more)


def add_device(action: Any) -> None:
    """Add --device."""
    option(action, "--device", str, "cpu", "cpu or cuda")


def check_writable(path: Path) -> None:
    """Raise OSError if nothing can be written at a path, before the work that ends there."""
    folder = next(each for each in path.absolute().parents if each.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"nothing can be written at {path}: {error.strerror}; name another place with --out") from None


# Types of arguments --------------------------------------------------------------------------------------------------


def paths(kinds: Iterable[str]) -> Callable[[str], dict[str, Path]]:
    """Return a parser of "a.json,b.png" into {".json": Path("a.json"), ".png": Path("b.png")}."""

    def parse(text: str) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for part in names(text):
            suffix = Path(part).suffix.lower()
            kind = suffix if suffix in kinds else FOLDER
            if kind not in kinds:
                raise argparse.ArgumentTypeError(f"{part!r} has none of the suffixes {', '.join(kinds)}")
            if kind in found:
                raise argparse.ArgumentTypeError(f"{text!r} names two paths of the kind {kind}; it takes one of each")
            found[kind] = Path(part).expanduser()
        return found

    return parse


def names(text: str) -> tuple[str, ...]:
    """Parse "a,b" into ("a", "b")."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty item; write a list as A,B,C")
    return found


def names_of(what: str, known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of a list of names, each of which must be one of these."""

    def parse(text: str) -> tuple[str, ...]:
        found = names(text)
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {what} {name!r}; have: {', '.join(known)}")
        return found

    return parse


def integers(text: str) -> tuple[int, ...]:
    """Parse "0,2,7" into (0, 2, 7)."""
    return tuple(map(integer, names(text)))


def numbers(text: str) -> tuple[float, ...]:
    """Parse "0.5,1" into (0.5, 1.0)."""
    return tuple(map(number, names(text)))


def shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse "1x16,8x128" into ((1, 16), (8, 128))."""
    found = []
    for part in names(text):
        sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part, re.ASCII)
        if sizes is None:
            raise argparse.ArgumentTypeError(f"{part!r} is not a shape; write sequences x tokens, such as 8x128")
        found.append((int(sizes[1]), int(sizes[2])))
    return tuple(found)


def integer(text: str) -> int:
    """Parse an integer, 0 or more."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0")
    return int(text)


def count(text: str) -> int:
    """Parse an integer, 1 or more."""
    found = integer(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is too small; it must be 1 or more")
    return found


def number(text: str) -> float:
    """Parse a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
