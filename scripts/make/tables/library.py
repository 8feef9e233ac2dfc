"""Tables of the library itself: the commands, and the criteria."""

import argparse
import re
from collections.abc import Iterator
from dataclasses import fields
from inspect import formatannotation

from bertlite.cli import parser
from bertlite.cli.parts import FOLDER, Parser, subcommands
from bertlite.config import BertConfig
from bertlite.pruning.criteria import CRITERIA, Criterion
from scripts.make.tables.read import table


def commands() -> str:
    """Table of the commands: how each is called, and its purpose."""
    below = ((each, re.sub(r"--[a-z-]+", r"`\g<0>`", summary)) for each, summary in commands_below(parser()))
    lines = [f"| `{call(each)}` | {summary} |" for each, summary in below]
    return "\n".join(["| command | what it does |", "|---|---|", *lines])


def commands_below(top: Parser, summary: str = "") -> Iterator[tuple[Parser, str]]:
    """Yield every command with its line in the list of commands."""
    below = subcommands(top)
    if not below:
        yield top, summary
    (action,) = [each for each in top._actions if isinstance(each, argparse._SubParsersAction)] if below else [None]
    for each, name in zip(action._choices_actions if action else (), below, strict=True):
        yield from commands_below(below[name], each.help or "")


def call(command: Parser) -> str:
    """Return the words that a command is called with: its name, its positional arguments and its required options."""
    words = [command.prog]
    for action in command._actions:
        if action.option_strings and (not action.required or action.dest == "out"):
            continue
        name = " ".join([*action.option_strings, str(action.metavar or action.dest.upper())])
        forms = {"?": f"[{name}]", "*": f"[{name}…]", "+": f"{name}…"}
        words.append(forms.get(str(action.nargs), name))
    needs = command.get_default("asked").needs
    if needs:
        words.append(f"--out {'FILE' if FOLDER not in needs else FOLDER if len(needs) == 1 else 'PATH'}")
    return " ".join(words)


def config_fields() -> str:
    """Table of the fields of BertConfig, with their types and defaults."""
    made = BertConfig()
    body = [
        [f"`{each.name}`", f"`{formatannotation(each.type, 'typing')}`", f"`{getattr(made, each.name)!r}`"]
        for each in fields(BertConfig)
    ]
    return table(["field", "type", "default"], body).replace(" | None`", " \\| None`").replace("collections.abc.", "")


def criteria() -> str:
    """Table of the criteria of importance, and what each needs."""
    return table(["criterion", "score", "of", "needs", "mean over"], [cells(each) for each in CRITERIA.values()])


def cells(criterion: Criterion) -> list[str]:
    source = f" ({criterion.source})" if criterion.source else ""
    needs = "nothing"
    if criterion.measurement.needs_data:
        needs = 'batches, and labels or `target="kl"`' if criterion.measurement.needs_loss else "batches"
    return [
        f"`{criterion.name}`",
        (criterion.description + source).replace("|", "\\|"),
        " and ".join(f"{unit}s" for unit in criterion.measurement.units),
        needs,
        ", ".join(criterion.reductions()) if criterion.measurement.needs_data else "",
    ]
