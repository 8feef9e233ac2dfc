"""Make our own records of speed: `bertlite bench` beside the limits of the machine, starting, and training.

    python -m scripts.measure.speed --models bert-base,MiniLM --threads 2,1 --out speed.json,speed.png,exported
    python -m scripts.measure.speed --only import,loading,cold,packing --rounds 7 --out scripts/results/startup.json
    python -m scripts.measure.speed --only forward --check scripts/results/speed.json     # is any ratio worse?

To the sections of `bertlite bench` come import, loading, cold start, packing and a training step.  In the rounds of a
forward pass the fastest matmul of the machine runs too, and each engine's share of that limit is printed.  The record
is written after each section.  Other sections in the file stay, if they were measured in the same environment; with
--resume, those measured with the same options are not measured again.  Exits 1 if --check finds a ratio of bertlite
that is worse than in the older record.
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
from bertlite.bench.sections import Bench, Section
from bertlite.cli.parts import FOLDER, RECORD, add_device, count, counts, names, number, paths
from bertlite.timing import check_rounds
from scripts.measure.speed.sections import sections

PICTURE = ".png"
SLACK = 0.15  # of a ratio: the difference of medians between runs on one machine


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    check_rounds(args.rounds, name="--rounds")
    check_device(args.device)
    known = sections(args.device, args.models, args.threads)
    chosen = select("section", args.only, list(known))
    bench = Bench(args.rounds, args.device, chosen_engines(args.engines), args.seconds, args.out.get(FOLDER))
    path = args.out.get(RECORD)
    record = open_record(path, environment_of(args.device))
    before = None if args.check is None else json.loads(args.check.read_text(encoding="utf-8"))
    settings = {"rounds": args.rounds, "seconds": args.seconds, "engines": list(args.engines or ())}
    there = [name for name in chosen if record["sections"].get(name, {}).get("settings") == settings]
    for name in there if args.resume else ():
        print(f"kept: {name}, which {path} holds")
    todo = {name: with_settings(known[name], settings) for name in chosen if not (args.resume and name in there)}
    run_sections(todo, bench, record, path, lines)
    if PICTURE in args.out:
        plot(record, args.out[PICTURE])
    return 0 if before is None else report_worse(before, record, chosen)


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
    parser.add_argument("--resume", action="store_true", help="keep the sections that the record holds")
    parser.add_argument("--check", type=Path, metavar="FILE", help="an older record to compare the ratios with")
    parser.add_argument(
        "--out",
        type=paths((RECORD, PICTURE, FOLDER)),
        default={},
        metavar="PATH[,PATH]",
        help="the record, the picture of its forward passes, a folder for exported models, which is used again",
    )
    add_device(parser)
    args = parser.parse_args(argv)
    if args.resume and RECORD not in args.out:
        parser.error("--resume keeps sections of a record: add --out FILE.json")
    return args


def with_settings(section: Section, settings: Mapping[str, Any]) -> Section:
    """Return a section that also holds the settings that it was measured with."""
    return lambda bench: {**section(bench), "settings": dict(settings)}


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


def report_worse(before: Mapping[str, Any], now: Mapping[str, Any], chosen: list[str]) -> int:
    """Print the ratios of bertlite that are worse than in an older record by more than SLACK.

    Returns:
        The exit status: 1 if there is such a ratio, else 0.

    Raises:
        ValueError: the two records have no ratio in common, or the older one has ratios without spread.
    """
    pairs = list(common_ratios(before, now, chosen))
    if not pairs:
        raise ValueError("the record to check against has no ratio of these sections")
    worse = [(name, old, new) for name, old, new in pairs if new < old * (1 - SLACK)]
    for name, old, new in worse:
        print(f"WORSE  {name}: {new:.2f}, was {old:.2f}")
    print(f"{len(pairs)} ratios compared, {len(worse)} worse by more than {SLACK:.0%}")
    return int(bool(worse))


def common_ratios(
    before: Mapping[str, Any], now: Mapping[str, Any], chosen: list[str]
) -> Iterator[tuple[str, float, float]]:
    """Yield the medians of every ratio with bertlite that both records have, inverted if less is better.

    Raises:
        ValueError: the older record has ratios without spread.
    """
    for section in chosen:
        then = before["sections"].get(section, {}).get("ratios", {})
        for name, ratio in now["sections"][section]["ratios"].items():
            over, _, under = name.partition(" / ")
            if name not in then or not (under.startswith("bertlite") or over.startswith("bertlite")):
                continue
            if not isinstance(then[name], Mapping):
                raise ValueError("the record to check against is too old: its ratios have no spread; make it again")
            old, new = then[name]["median"], ratio["median"]
            if under.startswith("bertlite"):
                yield f"{section}: {name}", old, new
            else:
                yield f"{section}: {name}, inverted", 1 / old, 1 / new


if __name__ == "__main__":
    raise SystemExit(main())
