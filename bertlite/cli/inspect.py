"""The arguments of `bertlite inspect`."""

from bertlite.cli.parts import Commands, command

DESCRIPTION = """\
List the contents of a checkpoint, layer by layer, and tell if bertlite, transformers 4 and transformers 5 load it
correctly.  No model is run, and the weights are not read.  Exits 1 if bertlite would not load it."""
EXAMPLES = (
    "inspect google-bert/bert-base-uncased",
    "inspect my-model --json",
)


def add(commands: Commands) -> None:
    """Add `inspect` and its arguments."""
    inspect = command(
        commands,
        "inspect",
        "bertlite.inspection",
        summary="list the contents of a checkpoint and the libraries that load it",
        description=DESCRIPTION,
        examples=EXAMPLES,
        record="the report",
    )
    inspect.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a hub id, a folder, or a weights file with its config.json beside it",
    )
    inspect.add_argument("--revision", help="a branch, tag or commit of the hub (default: main)")
