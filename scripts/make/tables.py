"""Put the figures of scripts/results into README.md.

    python -m scripts.make.tables            # rewrite the tables
    python -m scripts.make.tables --check    # exit 1 if README.md holds other figures than the records

A table stands between <!-- NAME --> and <!-- /NAME -->; NAME is a key of TABLES.  A table stays as it is if its record
is too old, for example if its ratios have no spread; the record is named, and the exit status is 1.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bertlite.lab.experiments.compare import describe_way
from bertlite.lab.timing import with_spread
from bertlite.records import commit_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "scripts" / "results"
SPREAD = "Medians, with quartiles in brackets."
CLIENTS = ("accelerate", "sentence-transformers", "peft", "datasets", "torchao", "captum", "bertviz", "textpruner")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something would change")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    args = parser.parse_args(argv)
    old = args.readme.read_text(encoding="utf-8")
    new, outdated = filled(old)
    for message in outdated:
        print(message, file=sys.stderr)
    if args.check and new != old:
        print(f"{args.readme} differs from the records; run python -m scripts.make.tables", file=sys.stderr)
        return 1
    if not args.check:
        args.readme.write_text(new, encoding="utf-8")
    return int(bool(outdated))


class OldRecordError(Exception):
    """A record that an earlier version of its script wrote, and that lacks what a table shows."""


def filled(text: str) -> tuple[str, list[str]]:
    """Return the text with every marked table made anew, and a message for each whose record is too old.

    Raises:
        KeyError: a mark names no table.
    """
    outdated = []

    def table(mark: re.Match[str]) -> str:
        try:
            return f"<!-- {mark[1]} -->\n{TABLES[mark[1]]()}\n<!-- /{mark[1]} -->"
        except OldRecordError as error:
            outdated.append(f"{mark[1]}: {error}; make the record again")
            return mark[0]

    return re.sub(r"<!-- ([a-z]+) -->\n.*?<!-- /\1 -->", table, text, flags=re.DOTALL), outdated


def records(pattern: str) -> list[dict[str, Any]]:
    """Read the records whose file name matches, newest transformers first."""
    paths = sorted(RESULTS.glob(pattern), reverse=True)
    if not paths:
        sys.exit(f"there is no {pattern} in {RESULTS}")
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def spread(part: Mapping[str, Any], name: str, form: str = ".2f") -> str:
    """Write a ratio, or another quantity of a record, with its quartiles.

    Raises:
        OldRecordError: it has none.
    """
    found = part.get(name)
    if not isinstance(found, Mapping) or not {"low", "median", "high"} <= found.keys():
        raise OldRecordError(f"{name} has no spread")
    return with_spread(found, form)


def milliseconds(seconds: Mapping[str, float]) -> str:
    """Write a time with its quartiles in milliseconds."""
    return with_spread({end: 1e3 * seconds[end] for end in ("low", "median", "high")}, ".0f") + " ms"


def rows(head: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    """Write a Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def measured_on(record: dict[str, Any], name_torch: bool = True) -> str:
    """Name the machine and the versions of a record."""
    where = record["environment"]
    threads = "1 thread" if where["threads"] == 1 else f"{where['threads']} threads"
    gpu = f"{where['gpu']}, driver {where['driver']}, " if "gpu" in where else ""
    torch = f"torch {where['versions']['torch']}, " if name_torch else ""
    return f"{gpu}{where['cpu']}, {threads}, {torch}Python {where['python']}"


def parity(names: str) -> str:
    """Table of the claims of parity by checkpoint and dtype; it names torch where there are records of several."""
    body, files = [], records(names)
    torches = {record["environment"]["versions"]["torch"].partition("+")[0] for record in files}
    for record in files:
        versions = record["environment"]["versions"]
        version = versions["transformers"]
        if len(torches) > 1:
            version += f", torch {versions['torch'].partition('+')[0]}"
        for name, found in record["checkpoints"].items():
            for claim in found["claims"]:
                rounds = claim["max_ratio"] is not None and claim["max_error"] > 0  # then the ratio says it
                error = "" if rounds else "0" if claim["max_error"] == 0 else f"{claim['max_error']:.1e}"
                ratio = f"{claim['max_ratio']:.2f}" if rounds else ""
                verdict = "all" if not claim["failed"] else f"{claim['failed']} fail"
                body.append([version, name, claim["dtype"], claim["claim"], claim["tensors"], verdict, error, ratio])
    head = ["transformers", "checkpoint", "dtype", "claim", "tensors", "hold", "largest error", "largest ratio"]
    return f"{rows(head, body)}\n\nMeasured on {measured_on(files[0], name_torch=len(torches) == 1)}."


def startup() -> str:
    """Table of the times to import, to load and to start cold."""
    (record,) = records("startup.json")
    body = []
    for section in record["sections"].values():
        times = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in section["seconds"].items())
        ratios = ", ".join(f"{name} = {spread(section['ratios'], name)}" for name in section["ratios"])
        body.append([section["what"], times, ratios])
    table = rows(["", "time", "ratio"], body)
    version = record["environment"]["versions"]["transformers"]
    return f"{table}\n\n{SPREAD} Measured against transformers {version} on {measured_on(record)}."


def clients() -> str:
    """Table of the clients: results of their checks with bertlite on each transformers, and with the newest alone."""
    files = records("clients-[0-9]*.json")
    versions = [record["environment"]["versions"]["transformers"] for record in files]
    sides = [(record, "bertlite.hf") for record in files] + [(files[0], "transformers")]
    names = dict.fromkeys(line["client"] for line in files[0]["checks"])
    body = [[name, *(outcome(record, name, side) for record, side in sides)] for name in names]
    head = ["client", *(f"bertlite.hf on {version}" for version in versions), f"transformers {versions[0]} alone"]
    versions_of = files[0]["environment"]["versions"]
    others = ", ".join(f"{name} {versions_of[name]}" for name in versions_of if name in CLIENTS and versions_of[name])
    return f"{rows(head, body)}\n\nWith {others}; {measured_on(files[0])}."


def outcome(record: dict[str, Any], client: str, side: str) -> str:
    """Write the number of a client's checks that pass, and the errors of those that fail."""
    runs = [line[side] for line in record["checks"] if line["client"] == client]
    ran = [run for run in runs if run["result"] != "not run"]
    failed = Counter(run["error"].partition(". ")[0] for run in ran if run["result"] == "fails")
    passed = len(ran) - failed.total()
    if not ran:
        return "not run"
    told = "".join(f"<br>{n} × `` {error[:90]} ``" for error, n in failed.items())  # some hold a backtick
    return f"{'all ' if passed == len(ran) else f'{passed} of '}{len(ran)}{told}"


def forward_sections(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections that time a forward pass, by the name of their batch."""
    prefix = "forward "
    return {name.removeprefix(prefix): s for name, s in record["sections"].items() if name.startswith(prefix)}


def engines_of(forward: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the engines of any section, the baseline first."""
    return list(dict.fromkeys(engine for section in forward.values() for engine in section["seconds"]))


def heads_of(forward: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the heads of the columns: the batches, with the share of their positions that hold tokens."""
    shares = {name: section["filled"] for name, section in forward.items()}
    return [name if share == 1 else f"{name} ({share:.0%})" for name, share in shares.items()]


def speed(name: str) -> str:
    """Table of the speed of each engine over transformers' sdpa in float32, and of its largest error."""
    (record,) = records(name)
    sections, forward = record["sections"], forward_sections(record)
    base, *others = engines_of(forward)
    body = [[base, *("1" for _ in forward), ""]]
    for engine in others:
        pair = f"{base} / {engine}"
        cells = [spread(s["ratios"], pair) if pair in s["ratios"] else "" for s in forward.values()]
        error = max(section["errors"].get(engine, 0.0) for section in forward.values())
        body.append([engine, *cells, f"{error:.0e}"])
    lines = [rows(["", *heads_of(forward), "error"], body), ""]
    for section in (sections[name] for name in ("training", "training by autocast", "pruned") if name in sections):
        ratios = ", ".join(f"{pair} = {spread(section['ratios'], pair)}" for pair in section["ratios"])
        lines.append(f"{section['what']}: {ratios}.\n")
    for batch, section in forward.items():
        for engine in section["wrong"]:
            lines.append(f"Not timed, since it computes something else: {engine} on {batch}.\n")
    for engine, reason in record["missing"].items():
        lines.append(f"Missing: {engine}, {reason}.\n")
    peers = ", ".join(
        f"{name} {version}"
        for name, version in record["environment"]["versions"].items()
        if version and name in ("transformers", "onnxruntime", "openvino", "nncf")
    )
    return "\n".join([*lines, f"{SPREAD} Measured on {measured_on(record)}, {peers}."])


def limits(name: str) -> str:
    """Table of the fraction of the machine's limit that each engine reaches."""
    (record,) = records(name)
    forward = forward_sections(record)
    if not all("of_limit" in section for section in forward.values()):
        raise OldRecordError("the fractions of the limit have no spread")
    body = []
    for engine in engines_of(forward):
        reached = [section["of_limit"] for section in forward.values()]
        if any(engine in section for section in reached):
            body.append([engine, *(spread(each, engine, ".0%") if engine in each else "" for each in reached)])
    return rows(["", *heads_of(forward)], body)


def profile() -> str:
    """Table of the time of the optimised models by kind of operator."""
    (record,) = records("speed.json")
    forward = forward_sections(record)
    kinds = list(dict.fromkeys(kind for s in forward.values() for found in s["profile"].values() for kind in found))
    body = [
        [name, engine.removeprefix("bertlite "), *(f"{found.get(kind, 0):.0%}" for kind in kinds)]
        for name, section in forward.items()
        for engine, found in section["profile"].items()
    ]
    return rows(["work", "engine", *kinds], body)


def demands() -> str:
    """Table of the kernels, copies, launches and waits of each engine on a GPU, and of its memory."""
    (record,) = records("speed-cuda.json")
    forward = forward_sections(record)
    if not all("demands" in section for section in forward.values()):
        raise OldRecordError("a section has no demands")
    kinds = next(iter(next(iter(forward.values()))["demands"].values()))
    body = [
        [name, engine, *(f"{counts[kind]:g}" for kind in kinds), f"{section['peak_bytes'][engine] / 2**20:,.0f}"]
        for name, section in forward.items()
        for engine, counts in section["demands"].items()
    ]
    return rows(["work", "engine", *kinds, "MiB"], body)


def checkpointing(name: str) -> str:
    """Table of step time and peak memory, as shares of transformers' without checkpointing."""
    (record,) = records(name)
    args, version = record["args"], record["environment"]["versions"]["transformers"]
    positions = args["batch"] * args["length"]
    kinds = {f"{record[kind]['tokens'] / positions:.0%} filled": record[kind] for kind in ("full", "ragged")}
    base = "transformers, plain"
    body = []
    for candidate in record["full"]["rows"]:
        cells = []
        for found in kinds.values():
            time = "1" if candidate == base else spread(found.get("ratios", {}), f"{candidate} / {base}")
            cells += [time, f"{found['rows'][candidate]['peak_bytes'] / found['rows'][base]['peak_bytes']:.2f}"]
        body.append([candidate, *cells])
    head = ["", *(f"{kind}: {axis}" for kind in kinds for axis in ("time", "peak"))]
    shape = f"{args['batch']} × {args['length']} tokens, {args['layers']} layers of {args['hidden']}"
    return f"{rows(head, body)}\n\n{SPREAD} {shape}, transformers {version}; measured on {measured_on(record)}."


def pruning(name: str) -> str:
    """Table with a line for each way of pruning and a column for each share of heads removed."""
    (record,) = records(f"pruning/{name}.json")
    fractions = sorted({row["fraction"] for row in record["rows"]})
    lines: dict[tuple[str, ...], dict[float, str]] = {}
    for row in record["rows"]:
        criterion, _, repair, _ = describe_way(row)
        lines.setdefault((criterion, repair), {})[row["fraction"]] = within(row, record["headline"])
    body = [[*way, *(found.get(fraction, "") for fraction in fractions)] for way, found in lines.items()]
    table = rows(["criterion", "repair", *(f"{100 * fraction:g} %" for fraction in fractions)], body)
    return f"{table}\n\n{intervals_of(record)}"


def within(row: dict[str, Any], headline: str) -> str:
    """Write a mean and half the width of its interval, in percent."""
    return f"{100 * row[headline]:.1f} ±{50 * (row['high'] - row['low']):.1f}"


def intervals_of(record: dict[str, Any]) -> str:
    """Write the metric, the dense model's result and the kind of interval."""
    counts = sorted({row["runs"] for row in record["rows"]})
    seeds = " or ".join(str(count) for count in counts if count > 1)
    over = [f"over {seeds} seeds"] if seeds else []
    over += ["over the examples where there is one run"] if 1 in counts else []
    return (
        f"100 × {record['headline']}, dense {100 * record['dense'][record['headline']]:.1f};"
        f" {record['setting']['calibration']} calibration examples where nothing else is said;"
        f" ± is half of a 95 % interval, {', '.join(over)}."
    )


def subnetworks() -> str:
    """Table of the best, random and worst masks, before and after retraining."""
    (record,) = records("pruning/subnetworks.json")
    names = {"michel": "the highest scores", "random": "drawn at random", "michel/inverted": "the lowest scores"}
    found = {(row["criterion"], row["epochs"]): within(row, record["headline"]) for row in record["rows"]}
    epochs = sorted({row["epochs"] for row in record["rows"]})
    body = [[what, *(found[name, count] for count in epochs)] for name, what in names.items()]
    head = ["heads kept", *("not retrained" if not count else f"retrained, {count:g} epoch" for count in epochs)]
    share = 100 * record["rows"][0]["fraction"]
    return f"{rows(head, body)}\n\n{share:g} % of the heads removed. {intervals_of(record)}"


def beside_textpruner() -> str:
    """Table of accuracy beside TextPruner."""
    (record,) = records("pruning/textpruner.json")
    fractions = sorted({row["fraction"] for row in record["rows"]})
    found = {(row["system"], row["fraction"]): within(row, "accuracy") for row in record["rows"]}
    systems = dict.fromkeys(row["system"] for row in record["rows"])
    body = [[system, *(found[system, fraction] for fraction in fractions)] for system in systems]
    table = rows(["", *(f"{100 * fraction:.0f} %" for fraction in fractions)], body)
    version = record["environment"]["versions"]["transformers"]
    seeds = len(record["rows"][0]["values"])
    return (
        f"{table}\n\n100 × accuracy, dense {100 * record['dense']:.1f}, {record['calibration']} calibration"
        f" examples, ± half of a 95 % interval over {seeds} samples of them. TextPruner {record['textpruner']},"
        f" transformers {version}."
    )


def pruned_speed() -> str:
    """Table of measured speed, multiply-accumulates and accuracy of pruned models."""
    (record,) = records("pruning/speed.json")
    results = record["results"]
    shapes = list(dict.fromkeys((line["batch"], line["length"]) for line in results["latency"]))
    lines = {(line["model"], line["batch"], line["length"]): line for line in results["latency"]}
    body = []
    for name, model in results["models"].items():
        each = [lines[name, *shape] for shape in shapes]
        speeds = [with_spread(line["speedup"]) for line in each]
        share = 100 * each[-1]["macs"]
        body.append([name, f"{share:.0f} %", *speeds, f"{100 * model[results['headline']]:.1f}"])
    head = ["model", "MACs", *(f"{batch} × {length} tokens" for batch, length in shapes), results["headline"]]
    return f"{rows(head, body)}\n\nTimes faster than dense, median and quartiles. Measured on {measured_on(record)}."


def embed() -> str:
    """Table of texts to vectors beside sentence-transformers."""
    (record,) = records("embed.json")
    data, errors, ratios = record["data"], record["largest_difference"], record["ratios"]
    base, ours, tokenizing = "sentence-transformers", "bertlite", "bertlite, texts to tokens alone"
    body = []
    for name, seconds in record["seconds"].items():
        if name == tokenizing:
            continue
        rates = {"low": seconds["high"], "median": seconds["median"], "high": seconds["low"]}  # quick is more
        rate = with_spread({end: data["tokens"] / taken for end, taken in rates.items()}, ",.0f")
        ratio = "1" if name == base else spread(ratios, f"{base} / {name}")
        body.append([name, rate, ratio, f"{errors[name]:.0e}" if name in errors else ""])
    versions = record["environment"]["versions"]
    return "\n".join(
        [
            rows(["", "tokens per second", "ratio", "largest difference"], body),
            "",
            f"{SPREAD} {data['texts']:,} paragraphs of {data['tokens']:,} tokens, {data['longest']} at most."
            f" Tokenizing takes {spread(ratios, f'{tokenizing} / {ours}', '.1%')} of bertlite's time in float32."
            f" Measured on {measured_on(record)}, sentence-transformers {versions[base]}, transformers"
            f" {versions['transformers']}.",
        ]
    )


def trust() -> str:
    """Table of the stress tests and their results."""
    (soak,), (fuzz,), (coverage,) = (records(f"{name}.json") for name in ("soak", "fuzz", "coverage"))
    kinds = fuzz["kinds"].values()
    tried, loaded = sum(kind["loaded"] + kind["refused"] for kind in kinds), sum(kind["loaded"] for kind in kinds)
    last, verdict = soak["rows"][-1], soak["verdict"]
    body = [
        [
            f"load, infer, prune, save and reload for {soak['minutes']:g} minutes",
            f"{last['rounds']:,} rounds; memory {verdict['grown_mib']:+.0f} MiB after the first fifth,"
            f" {verdict['files_left_open']:+d} open files",
        ],
        [
            "whole checkpoints changed at random",
            f"{tried:,} files: {loaded:,} load, the others are refused by our own errors; the slowest took"
            f" {max(kind['seconds'] for kind in kinds):.1f} s",
        ],
        [
            f"lines of `bertlite/` that the tests run{without(coverage['tests'])}",
            f"{coverage['percent']:.1f} % of {coverage['lines']:,}",
        ],
    ]
    for record in sorted(records("mutation-*.json"), key=lambda each: each["module"]):
        survived = (
            f"; `scripts/stress/mutants.toml` explains the other {record['survived']}" if record["survived"] else ""
        )
        noticed, at = record["killed"] + record["looped or crashed"], (commit_of(record) or {})["commit"][:7]
        body.append(
            [
                f"changes of `{record['module']}.py` as it was at {at}, one at a time",
                f"the tests notice {noticed} of {record['run']}{survived}",
            ]
        )
    return rows(["", "result"], body)


def without(tests: Sequence[str]) -> str:
    """Name the tests of the repository that are not among these."""
    every = [path for path in (ROOT / "tests").iterdir() if path.match("test_*.py") or any(path.glob("test_*.py"))]
    absent = sorted(path.name for path in every if f"tests/{path.name}" not in tests and "tests" not in tests)
    return f", without {', '.join(absent)}" if absent else ""


TABLES: dict[str, Callable[[], str]] = {
    "parity": partial(parity, "parity-[0-9]*.json"),
    "startup": startup,
    "clients": clients,
    "speed": partial(speed, "speed.json"),
    "limits": partial(limits, "speed.json"),
    "profile": profile,
    "checkpointing": partial(checkpointing, "checkpointing.json"),
    "oneshot": partial(pruning, "sst2"),
    "similarity": partial(pruning, "stsb"),
    "subnetworks": subnetworks,
    "textpruner": beside_textpruner,
    "prunedspeed": pruned_speed,
    "embed": embed,
    "trust": trust,
    # of the records that scripts/measure/gpu_checks.py writes
    "gpuparity": partial(parity, "parity-cuda.json"),
    "gpuspeed": partial(speed, "speed-cuda.json"),
    "gpudemands": demands,
    "gpulimits": partial(limits, "speed-cuda.json"),
    "gpubase": partial(checkpointing, "checkpointing-cuda-base.json"),
    "gpularge": partial(checkpointing, "checkpointing-cuda-large.json"),
}

if __name__ == "__main__":
    raise SystemExit(main())
