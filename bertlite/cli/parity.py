"""The arguments of `bertlite parity`."""

from bertlite.cli.parts import Commands, command, names

DESCRIPTION = """\
Run a checkpoint in bertlite and in transformers and compare everything they return: outputs, hidden states,
attentions, losses and gradients.  Unless --all is given, code chooses few cases that together have every backend,
dtype, kind of mask, head and feature; they take about a minute.  Exits 1 if anything differs."""
EXAMPLES = (
    "parity google-bert/bert-base-uncased",
    "parity my-model --all --out record.json,errors.png",
    "parity my-model --only float64,eager -v",
)


def add(commands: Commands) -> None:
    """Add `parity` and its arguments."""
    parity = command(
        commands,
        "parity",
        "bertlite.parity.command",
        summary="prove that a checkpoint runs here as in transformers",
        description=DESCRIPTION,
        examples=EXAMPLES,
        record="every comparison, the git commit, the versions and the machine",
        out={".png": "the errors beside the allowed errors"},
    )
    parity.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        nargs="?",
        help="a hub id or a folder, such as google-bert/bert-base-uncased; by default the real MiniLM checkpoint of"
        " the demo dependency and one of bert-base's shape that transformers makes",
    )
    parity.add_argument(
        "--shapes",
        metavar="NAMES",
        help="also check models of these shapes with random weights: base, large, or base,large (default: base"
        " beside the demo's checkpoint and none beside another)",
    )
    parity.add_argument(
        "--device",
        default="cpu",
        help="cpu or cuda (default: %(default)s); cuda adds every kernel of SDPA, TF32, torch.compile, CUDA graphs,"
        " and a comparison with the CPU",
    )
    parity.add_argument(
        "--all", action="store_true", help="run every case; it takes minutes (default: the quick choice)"
    )
    parity.add_argument(
        "--only",
        type=names,
        default=(),
        metavar="A,B",
        help="only cases with one of these in their names; see --list (default: whatever their names)",
    )
    parity.add_argument(
        "-v", "--verbose", action="store_true", help="print every case as it comes (default: those that differ)"
    )
    parity.add_argument("--list", action="store_true", help="print the names of all cases and stop")
