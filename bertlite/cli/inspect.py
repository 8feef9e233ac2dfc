"""The arguments of `bertlite inspect`."""

from bertlite.cli.parts import Commands, command

DESCRIPTION = """\
Say what a checkpoint holds, layer by layer, and whether bertlite, transformers 4 and transformers 5 load it and
compute what it says.  Nothing is run, and the weights are not read.  Exits 1 if bertlite would not load it."""


def add(commands: Commands) -> None:
    inspect = command(
        commands,
        "inspect",
        "bertlite.inspection",
        what="say what a checkpoint holds, and who loads it",
        description=DESCRIPTION,
        record="what was found",
    )
    inspect.add_argument("checkpoint", help="a hub id, a folder, or a weights file with its config.json beside it")
    inspect.add_argument("--revision", help="a branch, tag or commit of the hub")
