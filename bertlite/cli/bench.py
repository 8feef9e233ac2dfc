"""The arguments of `bertlite bench`."""

from pathlib import Path

from bertlite.cli.parts import Commands, command

DESCRIPTION = """\
Time bertlite and its peers in turn: import, loading, forward passes on full and on ragged batches, a training step and
pruned models.  Every ratio is printed with its quartiles over the rounds.  Peers that are not installed are listed.
Exits 1 if --check finds a ratio of bertlite that is worse than in the older record."""


def add(commands: Commands) -> None:
    """Add `bench` and its arguments."""
    bench = command(
        commands,
        "bench",
        "bertlite.lab.bench.command",
        summary="measure speed beside transformers, onnxruntime and OpenVINO",
        description=DESCRIPTION,
        record="a record; other sections in the file stay, if they were measured from the same commit",
    )
    bench.add_argument("--only", default="", metavar="A,B", help="sections whose name contains one of these")
    bench.add_argument(
        "--engines",
        default="",
        metavar="A,B",
        help="engines whose name contains one of these; the baseline always runs",
    )
    bench.add_argument(
        "--rounds", type=int, default=15, help="runs of each candidate, 7 or more (default: %(default)s)"
    )
    bench.add_argument(
        "--seconds",
        type=float,
        default=60,
        help="time limit of a section, which then ends with fewer rounds, but at least 7 (default: %(default)s)",
    )
    bench.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    bench.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="folder that keeps exported models for the next run"
    )
    bench.add_argument("--check", metavar="FILE", help="older record to compare the ratios with")
    bench.add_argument("--plot", metavar="FILE.png", help="draw the ratios of the forward passes")
