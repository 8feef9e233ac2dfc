"""The arguments of `bertlite parity`."""

from bertlite.cli.parts import Commands, command

DESCRIPTION = """\
Run a checkpoint in bertlite and in transformers and compare all they return: outputs, hidden states, attentions,
losses and gradients.  Exits 1 if anything differs."""


def add(commands: Commands) -> None:
    parity = command(
        commands,
        "parity",
        "bertlite.parity.command",
        summary="prove that a checkpoint runs here as in transformers",
        description=DESCRIPTION,
        record="every comparison, the versions and the machine",
    )
    parity.add_argument(
        "checkpoint",
        nargs="?",
        help="a hub id or a folder, such as google-bert/bert-base-uncased; by default the real MiniLM checkpoint of"
        " the demo dependency and one of bert-base's shape that transformers makes",
    )
    parity.add_argument(
        "--shapes",
        metavar="NAMES",
        help="shapes to check beside it, of random weights: base, large, or base,large; by default base beside the"
        " demo's checkpoint and none beside another",
    )
    parity.add_argument(
        "--device",
        default="cpu",
        help="cpu or cuda (default: %(default)s); on cuda also every kernel of SDPA, TF32, torch.compile, CUDA graphs,"
        " and the CPU beside it",
    )
    parity.add_argument("--only", default="", metavar="PATTERN", help="cases whose name contains this; see --list")
    parity.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parity.add_argument("--plot", metavar="FILE.png", help="draw the errors beside what is allowed")
