"""Make our own records of speed: `bertlite bench` beside the limits of the machine, starting, and training.

    python -m scripts.measure.speed --models bert-base,MiniLM --threads 2,1 --out speed.json,speed.png,exported
    python -m scripts.measure.speed --only import,loading,cold,packing --rounds 7 --out scripts/results/startup.json

To the sections of `bertlite bench` come import, loading, cold start, packing and a training step.  In the rounds of a
forward pass the fastest matmul of the machine runs too, and each engine's share of that limit is printed.  The record
is written after each section.  Other sections in the file stay, if they were measured in the same environment.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertlite.bench.command import (
    SECONDS,
    check_device,
    chosen_engines,
    environment_of,
    plot,
    run_sections,
    section_lines,
    select,
)
from bertlite.bench.sections import Bench
from bertlite.cli.parts import FOLDER, RECORD, add_device, count, counts, names, number, paths
from bertlite.timing import check_rounds
from scripts.measure.speed.sections import sections

PICTURE = ".png"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    check_rounds(args.rounds, name="--rounds")
    check_device(args.device)
    known = sections(args.device, args.models, args.threads)
    chosen = select("section", args.only, list(known))
    bench = Bench(args.rounds, args.device, chosen_engines(args.engines), args.seconds, args.out.get(FOLDER))
    record = open_record(args.out.get(RECORD), environment_of(args.device))
    run_sections({name: known[name] for name in chosen}, bench, record, args.out.get(RECORD), lines)
    if PICTURE in args.out:
        plot(record, args.out[PICTURE])
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names, metavar="A,B", help="sections whose name contains one of these")
    parser.add_argument("--engines", type=names, metavar="A,B", help="engines whose name contains one of these")
    parser.add_argument("--models", type=names, default=("bert-base",), metavar="A,B", help="bert-base, MiniLM")
    parser.add_argument("--threads", type=counts, default=(None,), metavar="N,M", help="a section for each number")
    parser.add_argument("--rounds", type=count, default=15, help="runs of each candidate (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=number, default=SECONDS, help="time limit of a section (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=paths((RECORD, PICTURE, FOLDER)),
        default={},
        metavar="PATH[,PATH]",
        help="the record, the picture of its forward passes, a folder for exported models, which is used again",
    )
    add_device(parser)
    return parser.parse_args(argv)


def open_record(path: Path | None, where: dict[str, Any]) -> dict[str, Any]:
    """Return the record to write; sections that are in the file stay, if they were measured in the same environment.

    Raises:
        ValueError: they were measured on another machine, with other versions or from another commit.
    """
    new = {"what": "scripts/measure/speed", "environment": where, "sections": {}}
    if path is None or not path.exists():
        return new
    old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    there = old.get("environment", {})
    differing = [name for name in {**where, **there} if there.get(name) != where.get(name)]
    if differing:
        raise ValueError(
            f"{path} was measured in another environment, which differs in {', '.join(differing)}: write to another"
            " file, or delete it"
        )
    return old


def lines(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a section, and what `bertlite bench` does not measure."""
    yield from section_lines(name, found)
    for candidate, reached in found.get("of_limit", {}).items():
        yield f"  {candidate}: {reached['median']:.0%} of the limit"
    for dtype, ceiling in found.get("ceilings", {}).items():
        if isinstance(ceiling, Mapping):
            yield f"  the limit in {dtype}: {ceiling['median'] / 1e9:.0f} GFLOP/s, by {ceiling['library']}"
    for candidate, peak in found.get("peak_bytes", {}).items():
        yield f"  {candidate}: {peak / 2**20:.0f} MiB"
    for candidate, kinds in found.get("demands", {}).items():
        yield f"  {candidate}: {', '.join(f'{number:g} {kind}' for kind, number in kinds.items())}"


if __name__ == "__main__":
    raise SystemExit(main())
