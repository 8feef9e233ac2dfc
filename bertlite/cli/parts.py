"""The parts that all commands share: help, --out and --json, lists, and a lazy import of the code that they run."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

Commands: TypeAlias = Any  # the type that argparse's add_subparsers returns has no public name

FOLDER = "FOLDER"  # a kind of output: a path whose suffix is that of no kind of file
RECORD = ".json"
FOOT = """exit status:
  0    success
  1    the result is negative: something differs, is worse than before, or cannot be loaded
  2    the command could not run; the reason is on standard error
  130  interrupted
"""


def command(
    commands: Commands,
    name: str,
    module: str,
    *,
    summary: str,
    description: str,
    record: str,
    examples: Sequence[str] = (),
    out: Mapping[str, str] | None = None,
    needs: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """Add a command and return the parser of its arguments.

    The command's function finds in `args.out` the paths to write, {kind: path}, and in `args.record` the path for its
    record, or None.  A kind is a suffix, or FOLDER.

    Args:
        module: the name of the module whose `main(args)` runs the command and returns the exit status.
        summary: its line in the list of commands.
        examples: command lines, without "bertlite".
        record: the content of the record that --json prints, and that --out FILE.json writes.
        out: {kind: content} of what else --out writes.  Where it has ".json", such a file is not the record.
        needs: the kinds of which --out must name one.
    """
    kinds = {**(out or {})}
    kinds.setdefault(RECORD, record)

    def run(args: argparse.Namespace) -> int:
        return import_module(module).main(args)

    shown = "\n".join(f"  bertlite {example}" for example in examples)
    added: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"examples:\n{shown}\n\n{FOOT}" if examples else FOOT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if not examples:  # a command whose --out and --json are still its own
        added.add_argument("--json", metavar="FILE", help=f"write {record}; - for standard output")
        added.set_defaults(run=run, needs=None)
        return added
    added.add_argument(
        "--out",
        type=paths(kinds),
        default={},
        metavar="PATH[,PATH]",
        help=f"write {'; '.join(f'{kind}: {content}' for kind, content in kinds.items())}"
        + ("" if needs else " (default: nothing is written)"),
    )
    added.add_argument(
        "--json", action="store_true", help="print the record on standard output, and all else on standard error"
    )
    added.set_defaults(run=run, needs=tuple(needs), record_in_out=RECORD not in (out or {}))
    return added


def paths(kinds: Mapping[str, str]) -> Callable[[str], dict[str, Path]]:
    """Return a parser of "a.json,b.png" into {".json": Path("a.json"), ".png": Path("b.png")}."""

    def parse(text: str) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for part in items(text):
            suffix = Path(part).suffix.lower()
            kind = suffix if suffix in kinds else FOLDER
            if kind not in kinds:
                raise argparse.ArgumentTypeError(f"{part!r} has none of the suffixes {', '.join(kinds)}")
            if kind in found:
                raise argparse.ArgumentTypeError(f"{text!r} names two paths of the kind {kind}; it takes one of each")
            found[kind] = Path(part)
        return found

    return parse


def items(text: str) -> list[str]:
    """Return the items of a comma-separated list.

    Raises:
        argparse.ArgumentTypeError: one of them is empty.
    """
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty item; write a list as A,B,C")
    return found


def integers(text: str) -> tuple[int, ...]:
    """Parse "0,2,7" into (0, 2, 7)."""
    found = []
    for part in items(text):
        if not part.removeprefix("-").isdecimal():
            way = ranged(part) or "write integers as 0,1,2"
            raise argparse.ArgumentTypeError(f"{part!r} is not an integer: {way}")
        found.append(int(part))
    return tuple(found)


def ranged(part: str) -> str:
    """Return what to write in place of a range, "0,1,2" for "0-2"; empty for what is no range."""
    low, _, high = part.partition("-")
    if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high)):
        return ""
    numbers = [str(number) for number in range(int(low), int(high) + 1)]
    return f"write every number, {','.join(numbers if len(numbers) <= 8 else [*numbers[:3], '…', numbers[-1]])}"
