"""The arguments of `bertlite bench`."""

from bertlite.cli.parts import FOLDER, Commands, Parser, add_device, command, count, counts, names, number, shapes

DESCRIPTION = """\
Without RUN, time bertlite and its peers in turn: forward passes on full batches and on texts of real lengths, and
pruned models.  Every engine is first compared with float64; an engine with wrong results is named and not timed.
Every ratio is taken round by round and printed with its quartiles.  Peers that are not installed are listed.

With RUN, measure time and memory of pruned models and of the dense one that they come from, all optimised
by optimize_for_inference; --backend plain leaves them unoptimised."""
EXAMPLES = (
    'bench --only forward --engines "bertlite onednn",OpenVINO --out speed.json,speed.png',
    "bench --only pruned --rounds 7",
    "bench runs/half --shapes 1x16,8x128 --out runs/speed",
    "bench runs/half --backend plain --out runs/speed-plain",
)


def add(commands: Commands) -> None:
    """Add `bench` and its arguments."""
    bench = command(
        commands,
        "bench",
        "bertlite.bench.command",
        summary="measure speed beside other libraries, or pruned models beside the dense one",
        description=DESCRIPTION,
        examples=EXAMPLES,
        record="the times, ratios and errors of every section",
        out={
            ".png": "the ratios of the forward passes",
            FOLDER: "exported models, which the next run uses again; with RUN the results",
        },
    )
    bench.add_argument("runs", nargs="*", metavar="RUN", help="folders of runs that pruned one dense model")
    bench.add_argument("--rounds", type=count, default=15, help="runs of each candidate, 7 or more (default: 15)")
    add_device(bench)
    add_peers(bench)
    add_runs(bench)


def add_peers(bench: Parser) -> None:
    """Add the arguments that are used without RUN."""
    peers = bench.add_argument_group("without RUN")
    peers.add_argument(
        "--only", type=names, metavar="A,B", help="sections whose name contains one of these (default: all)"
    )
    peers.add_argument(
        "--engines",
        type=names,
        metavar="A,B",
        help="engines whose name contains one of these; the baseline always runs (default: all)",
    )
    peers.add_argument(
        "--models",
        type=names,
        metavar="A,B",
        help="shapes with random weights: bert-base, MiniLM (default: bert-base)",
    )
    peers.add_argument(
        "--threads",
        type=counts,
        metavar="N,M",
        help="threads of all engines, a section for each number (default: as many as torch has)",
    )
    peers.add_argument(
        "--seconds",
        type=number,
        metavar="LIMIT",
        help="time limit of a section, which then ends with fewer rounds, but at least 7 (default: 60)",
    )


def add_runs(bench: Parser) -> None:
    """Add the arguments that are used with RUN."""
    pruned = bench.add_argument_group("with RUN")
    pruned.add_argument(
        "--shapes",
        type=shapes,
        metavar="BxS,…",
        help="sequences x tokens of the inputs (default: 1x16,8x128)",
    )
    pruned.add_argument("--dtype", help="float32, bfloat16, float16 or, on the CPU, int8 (default: the checkpoint's)")
    pruned.add_argument(
        "--backend",
        help="of optimize_for_inference, or plain, the models without it (default: auto, the same for all)",
    )
