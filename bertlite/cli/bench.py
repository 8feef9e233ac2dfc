"""The arguments of `bertlite bench`."""

from pathlib import Path

from bertlite.cli.parts import Commands, command

DESCRIPTION = """\
Time bertlite and its peers in turn: import, loading, forward passes on full and on ragged batches, a training step,
pruned models.  Peers that are not installed are named.  Exits 1 if --check finds a ratio of ours that is worse than
it was."""


def add(commands: Commands) -> None:
    bench = command(
        commands,
        "bench",
        "bertlite.lab.bench.command",
        summary="measure speed beside transformers, onnxruntime and OpenVINO",
        description=DESCRIPTION,
        record="a record; other sections that are in the file stay",
    )
    bench.add_argument("--only", default="", metavar="A,B", help="sections whose name contains one of these")
    bench.add_argument(
        "--engines", default="", metavar="A,B", help="engines whose name contains one of these; the baseline always"
    )
    bench.add_argument("--rounds", type=int, default=15, help="how often each candidate runs (default: %(default)s)")
    bench.add_argument(
        "--seconds",
        type=float,
        default=60,
        help="after which a section ends, with fewer rounds but not below 3 (default: %(default)s)",
    )
    bench.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    bench.add_argument("--keep", type=Path, metavar="FOLDER", help="where exported models stay for the next run")
    bench.add_argument("--check", metavar="FILE", help="compare the ratios with this record's")
    bench.add_argument("--plot", metavar="FILE.png", help="draw the ratios")
