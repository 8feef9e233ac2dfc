"""What the commands have in common: --json, exit statuses, and that their work is imported when they run."""

import argparse
from importlib import import_module
from typing import Any

Commands = Any  # what argparse's add_subparsers returns has no public name

FOOT = """exit status:
  0    all is well
  1    the answer is no: something differs, is worse than it was, or cannot be loaded
  2    the question could not be asked; what is wrong is said on standard error
  130  interrupted
"""


def command(
    commands: Commands, name: str, module: str, *, what: str, description: str, record: str
) -> argparse.ArgumentParser:
    """Add a command and return the parser of its arguments.

    Args:
        module: where its work is: `main(args)` there is called with the arguments, and returns the exit status.
        what: the line about it in the list of commands.
        record: what --json writes.
    """

    def run(args: argparse.Namespace) -> int:
        return import_module(module).main(args)

    added: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=description, epilog=FOOT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    added.add_argument("--json", metavar="FILE", help=f"write {record}; - is standard output")
    added.set_defaults(run=run)
    return added


def integers(text: str) -> tuple[int, ...]:
    """ "0-2,7" is 0, 1, 2 and 7."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return tuple(found)
