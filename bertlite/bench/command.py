"""The work of `bertlite bench`: time engines or checkpoints section by section, print and record the times."""

import argparse
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bertlite.bench.checkpoints import run_checkpoints
from bertlite.bench.engines import ENGINES
from bertlite.bench.sections import MODELS, Bench, Section, forward_sections, section_lines
from bertlite.progress import Progress
from bertlite.records import environment, version_of, warn_untraceable, write_json
from bertlite.timing import check_rounds

PEERS = ("onnx", "onnxruntime", "openvino", "nncf", "ctranslate2")
SECONDS = 60.0  # time limit of a section
ENGINES_ALONE = ("only", "engines", "models", "threads", "seconds")  # arguments that are not used with CHECKPOINT
CHECKPOINTS_ALONE = ("shapes", "dtype", "backend")  # and without
FPMATH = "ONEDNN_DEFAULT_FPMATH_MODE"  # lets oneDNN compute float32 in bfloat16


def main(args: argparse.Namespace) -> int:
    """Time the engines, or the checkpoints that are named, and return the exit status."""
    for name in ENGINES_ALONE if args.checkpoints else CHECKPOINTS_ALONE:
        if getattr(args, name):
            how = "with CHECKPOINT" if args.checkpoints else "without CHECKPOINT"
            raise ValueError(f"--{name} is not used {how}: leave it out, or see `bertlite bench --help`")
    check_rounds(args.rounds, name="--rounds")
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: this torch ({torch.__version__}) sees no CUDA device")
    if args.checkpoints and args.folder is not None:
        raise ValueError(f"--out {args.folder}: with CHECKPOINT nothing is exported; name a file, such as speed.json")
    record = new_record(args.device)
    if args.record:
        warn_untraceable(record)
    if args.checkpoints:
        run_checkpoints(args, record)
    else:
        run_sections(args, forward_sections(args.device), record)
    for path in args.out.values():
        print(f"written: {path}")
    return 0


def new_record(device: str) -> dict[str, Any]:
    """Return a record without sections, whose environment names the versions of the peers."""
    found = environment(device)
    found["versions"] |= {name: version_of(name) for name in PEERS}
    return {"what": "bertlite bench", "environment": found, "sections": {}}


def run_sections(args: argparse.Namespace, known: Mapping[str, Section], record: dict[str, Any]) -> None:
    """Run sections for each model and number of threads, print the lines of each, and write the record after each.

    Raises:
        ValueError: a section, an engine or a model matches nothing; or the environment lets float32 be computed in
            lower precision, or the time limit is none.
    """
    require_float32(os.environ)
    seconds = SECONDS if args.seconds is None else args.seconds
    if not seconds > 0:
        raise ValueError(f"--seconds is {seconds}; a section needs more than 0")
    select("engine", args.engines, [f"{engine.name} {dtype}" for engine in ENGINES for dtype in engine.dtypes])
    models, threads = args.models or ("bert-base",), args.threads or (None,)
    if unknown := [name for name in models if name not in MODELS]:
        raise ValueError(f"there is no model {unknown[0]!r}; have: {', '.join(MODELS)}")
    named = {
        (model, number): {f"{name}{suffix(model, number)}": section for name, section in known.items()}
        for model, number in itertools.product(models, threads)
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
                bench = Bench(args.rounds, kept, model, args.device, only, seconds, progress.advance, missing)
                for name in [name for name in group if name in chosen]:
                    record["sections"][name], done = group[name](bench), done + args.rounds
                    progress.advance(done - progress.done)  # with the rounds that the time limit left out
                    progress.print("\n".join(section_lines(name, record["sections"][name])))
                    if args.record:
                        write_json(args.record, record)
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}")


def suffix(model: str, threads: int | None) -> str:
    """Return the suffix of a section's name: its model and threads, if not the default ones."""
    number = "" if threads is None else f" {threads} thread{'s' * (threads > 1)}"
    return f"{'' if model == 'bert-base' else f' {model}'}{number}"


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


def select(kind: str, wanted: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Return the names that contain one of the wanted parts, or all if none is given.

    Raises:
        ValueError: no name contains one of them.
    """
    for part in wanted or ():
        if not any(part in name for name in known):
            raise ValueError(f"no {kind} matches {part!r}; have: {', '.join(known)}")
    return [name for name in known if not wanted or any(part in name for part in wanted)]
