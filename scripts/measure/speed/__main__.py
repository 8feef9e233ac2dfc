"""Make the records of speed: bertlite and its peers, pruned models, starting, and training.

    python -m scripts.measure.speed --only "forward 8 x 128" --engines "bertlite native",OpenVINO --rounds 7
    python -m scripts.measure.speed --only forward,pruned --models bert-base,MiniLM --out speed.json,speed.png,exported
    python -m scripts.measure.speed --only "forward 32 x,forward 1 x" --models bge-m3,all-mpnet --out speed.json
    python -m scripts.measure.speed --only training --models bert-base,MiniLM --out scripts/results/training.json
    python -m scripts.measure.speed --only under --models MiniLM --threads 1 --out scripts/results/speed-under.json
    python -m scripts.measure.speed --only import,loading,cold --rounds 7 --out scripts/results/startup.json

Candidates run in turn, and every ratio is taken round by round and printed with its quartiles.  Forward passes are on
full batches and on texts of real lengths; an engine is first compared with float64, and named but not timed if its
results are wrong.  Peers that are not installed are listed.  Pruned models lack half of their heads and neurons.  The
record is written after each section.  Other sections in the file stay, if they were measured in the same environment.
"""

import argparse
import itertools
import json
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bertlite.cli.parts import DEVICE, FOLDER, RECORD, count, names, paths
from bertlite.support.environment import environment, version_of
from bertlite.support.files import write_json
from bertlite.support.progress import Progress
from bertlite.support.timing import check_rounds
from scripts.measure.curves import pyplot
from scripts.measure.speed.bench import MODELS, Bench, Section, longest_of, section_lines, suffix
from scripts.measure.speed.engines import ENGINES
from scripts.measure.speed.sections import sections
from scripts.measure.speed.under import WAYS

PICTURE = ".png"
DTYPES = ("float32", "bfloat16", "float16", "int8")
PEERS = (
    *("onnx", "onnxruntime", "openvino", "nncf", "torchao", "llama-cpp-python"),
    *("sentence-transformers", "optimum-intel"),
)
FPMATH = "ONEDNN_DEFAULT_FPMATH_MODE"  # lets oneDNN compute float32 in bfloat16


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    check_rounds(args.rounds, name="--rounds")
    args.record, args.folder = args.out.get(RECORD), args.out.get(FOLDER)
    record = open_record(args.record, new_record(args.device))
    absent = run_sections(args, record)
    if PICTURE in args.out:
        plot(record, args.out[PICTURE])
    return int(bool(absent))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "sections whose name contains one of these (default: all)"
    parser.add_argument("--only", type=names, default=(), metavar="A,B", help=text)
    text = "engines whose name contains one of these; the baseline always runs (default: all)"
    parser.add_argument("--engines", type=names, default=(), metavar="A,B", help=text)
    text = f"of {', '.join(MODELS)}, with random weights (default: bert-base)"
    parser.add_argument("--models", type=names, default=("bert-base",), metavar="A,B", help=text)
    text = "threads of all engines, a section for each number (default: as many as torch has)"
    parser.add_argument("--threads", type=counts, default=(None,), metavar="N,M", help=text)
    text = "time limit of a section in seconds, which then ends with fewer rounds, but at least 7 (default: 60)"
    parser.add_argument("--seconds", type=float, default=60.0, help=text)
    parser.add_argument("--rounds", type=count, default=15, help="runs of each candidate, 7 or more (default: 15)")
    parser.add_argument(
        "--out",
        type=paths((RECORD, PICTURE, FOLDER)),
        default={},
        metavar="PATH[,PATH]",
        help="the record, the picture of its forward passes, a folder for exported models, which is used again",
    )
    text = "leave out sections that the record has or names as missing; exit 3 if a section fails, which it then names"
    parser.add_argument("--resume", action="store_true", help=text)
    DEVICE(parser)
    return parser.parse_args(argv)


def counts(text: str) -> tuple[int, ...]:
    return tuple(map(count, names(text)))


def new_record(device: str) -> dict[str, Any]:
    """Return a record without sections, whose environment names the versions of the peers."""
    found = environment(device)
    found["versions"] |= {name: version_of(name) for name in PEERS}
    return {"what": "speed", "environment": found, "sections": {}}


def open_record(path: Path | None, new: dict[str, Any]) -> dict[str, Any]:
    """Return the record to write; sections that are in the file stay, if they were measured in the same environment.

    Raises:
        ValueError: they were measured on another machine, with other versions or from another commit.
    """
    if path is None or not path.exists():
        return new
    old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    here, there = new["environment"], old.get("environment", {})
    differing = [name for name in {**here, **there} if there.get(name) != here.get(name)]
    if differing:
        raise ValueError(
            f"{path} was measured in another environment, which differs in {', '.join(differing)}: write to another"
            " file, or delete it"
        )
    return old


def run_sections(args: argparse.Namespace, record: dict[str, Any]) -> list[str]:
    """Run sections for each model and number of threads, print the lines of each, and write the record after each.

    Returns:
        the sections that are not in the record, since they failed.

    Raises:
        ValueError: a section, an engine or a model matches nothing; or the environment lets float32 be computed in
            lower precision, or the time limit is none.
    """
    require_float32(os.environ)
    if not args.seconds > 0:
        raise ValueError(f"--seconds is {args.seconds}; a section needs more than 0")
    ways = {**{engine.name: engine.dtypes for engine in ENGINES}, **WAYS}
    select("engine", args.engines, [f"{name} {dtype}" for name, dtypes in ways.items() for dtype in dtypes])
    if unknown := [name for name in args.models if name not in MODELS]:
        raise ValueError(f"there is no model {unknown[0]!r}; have: {', '.join(MODELS)}")
    named = {
        (model, number): {
            f"{name}{suffix(model, number)}": section
            for name, section in sections(args.device, longest_of(model)).items()
        }
        for model, number in itertools.product(args.models, args.threads)
    }
    chosen = select("section", args.only, [name for group in named.values() for name in group])
    with (
        TemporaryDirectory(prefix="bertlite-base-") as temporary,
        Progress(len(chosen) * args.rounds, "rounds", what="bench") as progress,
    ):
        done, missing, kept = 0, record.setdefault("missing", {}), args.folder or Path(temporary)
        for (model, number), group in named.items():
            with torch_threads(number):
                only = tuple(args.engines or ("",))
                bench = Bench(args.rounds, kept, model, args.device, only, args.seconds, progress.advance, missing)
                for name in [name for name in group if name in chosen]:
                    if args.resume and (name in record["sections"] or name in missing):
                        continue
                    record["sections"][name], done = noted(args, record, name, group[name], bench), done + args.rounds
                    progress.advance(done - progress.done)  # with the rounds that the time limit left out
                    progress.print("\n".join(section_lines(name, record["sections"][name])))
                    if args.record:
                        write_json(args.record, record)
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}")
    return [name for name in chosen if name not in record["sections"]]


def noted(args: argparse.Namespace, record: dict[str, Any], name: str, section: Section, bench: Bench) -> Any:
    """Run a section; with --resume the record names it as missing until it is done, and an error ends the process."""
    if not (args.resume and args.record):
        return section(bench)
    record["missing"][name] = "its process ended"
    write_json(args.record, record)
    try:
        found = section(bench)
    except Exception as error:  # of any library, and CUDA's, after which nothing runs in this process
        traceback.print_exc()
        record["missing"][name] = f"{type(error).__name__}: {error}"
        write_json(args.record, record)
        raise SystemExit(3) from None
    del record["missing"][name]
    return found


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Let torch have a number of threads within the block; None is as many as it has."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def require_float32(variables: Mapping[str, str]) -> None:
    """Raise ValueError if the environment lets float32 be computed in lower precision."""
    mode = variables.get(FPMATH, "")
    if mode.upper() not in ("", "STRICT"):
        raise ValueError(f"{FPMATH} is {mode!r}, which lets float32 be computed in lower precision: unset it")


def select(kind: str, wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the names that contain one of the wanted parts, or all if none is given.

    Raises:
        ValueError: no name contains one of them.
    """
    for part in wanted:
        if not any(part in name for name in known):
            raise ValueError(f"no {kind} matches {part!r}; have: {', '.join(known)}")
    return [name for name in known if not wanted or any(part in name for part in wanted)]


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Draw how many times faster than transformers' sdpa in float32 each engine is: a colour for each dtype.

    It is drawn for one batch of the record: texts padded to their longest, or the first batch if there is none.
    """
    plt = pyplot()
    found = [each for name, each in record["sections"].items() if name.startswith("forward")]
    shown = next((each for each in found if each["padding"] == "longest"), found[0])
    pairs = [pair.partition(" / ") for pair in shown["ratios"] if pair.startswith("transformers")]
    ratios = sorted(((name, shown["ratios"][f"{base} / {name}"]) for base, _, name in pairs), key=place_of)
    engines, medians = [name.replace(" native", "") for name, _ in ratios], [found["median"] for _, found in ratios]
    dtypes = list(dict.fromkeys(name.split()[-1] for name in engines))
    with plt.rc_context({"font.size": 12}):  # to be read in a column of 360 pixels
        fig, ax = plt.subplots(figsize=(4.6, 0.5 + 0.42 * (len(engines) + 2)), layout="constrained")
        bars = ax.barh(engines, medians, color=[f"C{dtypes.index(name.split()[-1])}" for name in engines])
        for bar, name in zip(bars, engines, strict=True):
            bar.set_alpha(1 if name.startswith("bertlite") else 0.45)
        ax.bar_label(bars, fmt="%.1f ×", padding=4)
        ax.axvline(1, color="black", linewidth=0.8)
        threads = f"{shown['threads']} threads" if shown["threads"] > 1 else "1 thread"
        fig.suptitle(f"{shown['model']} on {record['environment']['device'].upper()}, {threads}", fontsize=13)
        ax.set_xlabel("times faster than transformers")
        ax.margins(x=0.2)  # room for the numbers
        ax.locator_params(axis="x", integer=True)
        ax.spines[["top", "right"]].set_visible(False)
        fig.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # on a dark page the white ends at a line
        fig.savefig(path, dpi=180)
    plt.close(fig)


def place_of(named: tuple[str, Mapping[str, float]]) -> tuple[int, float]:
    """Order engines by dtype, and within a dtype by speed, from the bottom up."""
    return -DTYPES.index(named[0].split()[-1]), named[1]["median"]


if __name__ == "__main__":
    raise SystemExit(main())
