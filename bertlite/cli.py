"""The `bertlite` command.  Each subcommand imports what it needs when it runs, so that --help is instant.

Exit status:  0 all is well · 1 the answer is no (a case differs) · 2 the question could not be asked
"""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"bertlite {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="bertlite", description="The BERT you can read, prove, prune and run.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parity = commands.add_parser(
        "parity",
        help="prove that a checkpoint runs here as in transformers",
        description="Run a checkpoint in bertlite and in transformers and compare all they return: outputs, hidden"
        " states, attentions, losses and gradients.  Exits 1 if anything differs.",
    )
    parity.add_argument(
        "checkpoint",
        nargs="?",
        help="a hub id or a folder, such as google-bert/bert-base-uncased; by default the real MiniLM checkpoint of"
        " the demo dependency and one of bert-base's shape that transformers makes",
    )
    parity.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s); TF32 is off")
    parity.add_argument("--only", default="", metavar="PATTERN", help="cases whose name contains this; see --list")
    parity.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parity.add_argument("--json", metavar="FILE", help="write every comparison, the versions and the machine")
    parity.add_argument("--plot", metavar="FILE.png", help="draw the errors beside what is allowed")
    parity.set_defaults(run=run_parity)
    return top


def run_parity(args: argparse.Namespace) -> int:
    from bertlite.parity import command

    return command.main(args)
