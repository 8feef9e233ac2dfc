"""The parts that all commands share: --json, exit statuses, and a lazy import of the code that they run."""

import argparse
from importlib import import_module
from typing import Any, TypeAlias

Commands: TypeAlias = Any  # the type that argparse's add_subparsers returns has no public name

FOOT = """exit status:
  0    success
  1    the result is negative: something differs, is worse than before, or cannot be loaded
  2    the command could not run; the reason is on standard error
  130  interrupted
"""


def command(
    commands: Commands, name: str, module: str, *, summary: str, description: str, record: str
) -> argparse.ArgumentParser:
    """Add a command and return the parser of its arguments.

    Args:
        module: the name of the module whose `main(args)` runs the command and returns the exit status.
        summary: its line in the list of commands.
        record: the content of the file that --json writes.
    """

    def run(args: argparse.Namespace) -> int:
        return import_module(module).main(args)

    added: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, epilog=FOOT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    added.add_argument("--json", metavar="FILE", help=f"write {record}; - for standard output")
    added.set_defaults(run=run)
    return added


def integers(text: str) -> tuple[int, ...]:
    """Return the integers of a list of ranges: "0-2,7" is 0, 1, 2 and 7."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return tuple(found)
