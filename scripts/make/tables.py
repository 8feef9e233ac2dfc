"""Put the figures of scripts/results into README.md.

    python -m scripts.make.tables            # rewrite the tables
    python -m scripts.make.tables --check    # exit 1 if README.md holds other figures than the records

A table stands between <!-- NAME --> and <!-- /NAME -->; NAME is a function below.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bertlite.lab.experiments.compare import describe_way

ROOT = Path(__file__).resolve().parents[2]

RESULTS = ROOT / "scripts" / "results"
CLIENTS = ("accelerate", "sentence-transformers", "peft", "datasets", "torchao", "captum", "bertviz", "textpruner")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something would change")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    args = parser.parse_args(argv)
    old = args.readme.read_text(encoding="utf-8")
    new = filled(old)
    if args.check and new != old:
        print(f"{args.readme} is not what the records say; run scripts/make/tables.py", file=sys.stderr)
        return 1
    if not args.check:
        args.readme.write_text(new, encoding="utf-8")
    return 0


def filled(text: str) -> str:
    """The text with every marked table made anew.

    Raises:
        KeyError: a mark that names no table.
    """
    return re.sub(
        r"<!-- ([a-z]+) -->\n.*?<!-- /\1 -->",
        lambda mark: f"<!-- {mark[1]} -->\n{TABLES[mark[1]]()}\n<!-- /{mark[1]} -->",
        text,
        flags=re.DOTALL,
    )


def records(pattern: str) -> list[dict[str, Any]]:
    """The records whose file name matches, newest transformers first."""
    paths = sorted(RESULTS.glob(pattern), reverse=True)
    if not paths:
        sys.exit(f"there is no {pattern} in {RESULTS}")
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def rows(head: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def measured_on(record: dict[str, Any]) -> str:
    where = record["environment"]
    threads = "1 thread" if where["threads"] == 1 else f"{where['threads']} threads"
    gpu = f"{where['gpu']}, driver {where['driver']}, " if "gpu" in where else ""
    return f"{gpu}{where['cpu']}, {threads}, torch {where['versions']['torch']}, Python {where['python']}"


def parity(names: str) -> str:
    body, files = [], records(names)
    for record in files:
        version = record["environment"]["versions"]["transformers"]
        for name, found in record["checkpoints"].items():
            for claim in found["claims"]:
                rounds = claim["max_ratio"] is not None and claim["max_error"] > 0  # then the ratio says it
                error = "" if rounds else "0" if claim["max_error"] == 0 else f"{claim['max_error']:.1e}"
                ratio = f"{claim['max_ratio']:.2f}" if rounds else ""
                verdict = "all" if not claim["failed"] else f"{claim['failed']} fail"
                body.append([version, name, claim["dtype"], claim["claim"], claim["tensors"], verdict, error, ratio])
    head = ["transformers", "checkpoint", "dtype", "claim", "tensors", "hold", "largest error", "largest ratio"]
    return f"{rows(head, body)}\n\nMeasured on {measured_on(files[0])}."


def startup() -> str:
    (record,) = records("startup.json")
    body = []
    for section in record["sections"].values():
        times = {name: f"{1e3 * t['median']:.0f} ms" for name, t in section["seconds"].items()}
        ratios = ", ".join(f"{name} = {value:.2f}" for name, value in section["ratios"].items())
        body.append([section["what"], ", ".join(f"{name} {t}" for name, t in times.items()), ratios])
    table = rows(["", "median", "ratio"], body)
    version = record["environment"]["versions"]["transformers"]
    return f"{table}\n\nMeasured against transformers {version} on {measured_on(record)}."


def clients() -> str:
    """Client by client, what came of its checks with our classes on each transformers, and with the newest's own."""
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
    """How many of a client's checks pass; of those that fail the errors."""
    runs = [line[side] for line in record["checks"] if line["client"] == client]
    ran = [run for run in runs if run["result"] != "not run"]
    failed = Counter(run["error"].partition(". ")[0] for run in ran if run["result"] == "fails")
    passed = len(ran) - failed.total()
    if not ran:
        return "not run"
    told = "".join(f"<br>{n} × `` {error[:90]} ``" for error, n in failed.items())  # some hold a backtick
    return f"{'all ' if passed == len(ran) else f'{passed} of '}{len(ran)}{told}"


def speed(name: str) -> str:
    """How many times faster than transformers' sdpa in float32, the fraction of the machine's limit reached, and the
    largest error of any of the works."""
    (record,) = records(name)
    sections = record["sections"]
    forward = {name.removeprefix("forward "): s for name, s in sections.items() if name.startswith("forward")}
    engines = list(dict.fromkeys(engine for section in forward.values() for engine in section["seconds"]))
    base = engines[0]
    body = []
    for engine in engines:
        cells = []
        for section in forward.values():
            ratio = 1.0 if engine == base else section["ratios"].get(f"{base} / {engine}")
            reached = section["floor"].get(engine)
            cells.append("" if ratio is None else f"{ratio:.2f}" + ("" if reached is None else f" ({reached:.0%})"))
        error = max(section["errors"].get(engine, 0.0) for section in forward.values())
        body.append([engine, *cells, "" if engine == base else f"{error:.0e}"])
    filled = {name: section["filled"] for name, section in forward.items()}
    heads = [name if share == 1 else f"{name} ({share:.0%})" for name, share in filled.items()]
    lines = [rows(["", *heads, "error"], body), ""]
    for name in ("training", "training by autocast", "pruned"):
        if name in sections:
            ratios = ", ".join(f"{pair} = {value:.2f}" for pair, value in sections[name]["ratios"].items())
            lines.append(f"{sections[name]['what']}: {ratios}.\n")
    for name, section in forward.items():
        for engine in section["wrong"]:
            lines.append(f"Not timed, since it computes something else: {engine} on {name}.\n")
    for engine, reason in record["missing"].items():
        lines.append(f"Missing: {engine}, {reason}.\n")
    peers = ", ".join(
        f"{name} {version}"
        for name, version in record["environment"]["versions"].items()
        if version and name in ("transformers", "onnxruntime", "openvino", "nncf")
    )
    return "\n".join([*lines, f"Measured on {measured_on(record)}, {peers}."])


def profile() -> str:
    """Where the time of the optimised models goes."""
    (record,) = records("speed.json")
    forward = {name: s for name, s in record["sections"].items() if name.startswith("forward")}
    kinds = list(dict.fromkeys(kind for s in forward.values() for found in s["profile"].values() for kind in found))
    body = [
        [
            name.removeprefix("forward "),
            engine.removeprefix("bertlite "),
            *(f"{found.get(kind, 0):.0%}" for kind in kinds),
        ]
        for name, section in forward.items()
        for engine, found in section["profile"].items()
    ]
    return rows(["work", "engine", *kinds], body)


def asked() -> str:
    """What each engine asks of a GPU at each work, and the memory that it takes."""
    (record,) = records("speed-cuda.json")
    forward = {name: s for name, s in record["sections"].items() if name.startswith("forward")}
    kinds = next(iter(next(iter(forward.values()))["asked"].values()))
    body = [
        [
            name.removeprefix("forward "),
            engine,
            *(f"{counts[kind]:g}" for kind in kinds),
            f"{section['peak_bytes'][engine] / 2**20:,.0f}",
        ]
        for name, section in forward.items()
        for engine, counts in section["asked"].items()
    ]
    return rows(["work", "engine", *kinds, "MiB"], body)


def checkpointing(name: str) -> str:
    """Step time and peak memory of each candidate, as shares of transformers' without checkpointing."""
    (record,) = records(name)
    args, version = record["args"], record["environment"]["versions"]["transformers"]
    places = args["batch"] * args["length"]
    kinds = {f"{record[kind]['tokens'] / places:.0%} filled": record[kind]["rows"] for kind in ("full", "ragged")}
    body = []
    for candidate in record["full"]["rows"]:
        cells = []
        for found in kinds.values():
            row, base = found[candidate], found["transformers, plain"]
            cells += [f"{row[key] / base[key]:.2f}" for key in ("median", "peak_bytes")]
        body.append([candidate, *cells])
    head = ["", *(f"{kind}: {axis}" for kind in kinds for axis in ("time", "peak"))]
    shape = f"{args['batch']} × {args['length']} tokens, {args['layers']} layers of {args['hidden']}"
    return f"{rows(head, body)}\n\n{shape}, transformers {version}; measured on {measured_on(record)}."


def pruning(name: str) -> str:
    """A line for each way of pruning, a column for each share of heads removed."""
    (record,) = records(f"pruning/{name}.json")
    fractions = sorted({row["fraction"] for row in record["rows"]})
    lines: dict[tuple[str, ...], dict[float, str]] = {}
    for row in record["rows"]:
        criterion, _, repair, _ = describe_way(row)
        lines.setdefault((criterion, repair), {})[row["fraction"]] = within(row, record["headline"])
    body = [[*way, *(found.get(fraction, "") for fraction in fractions)] for way, found in lines.items()]
    table = rows(["criterion", "repair", *(f"{100 * fraction:g} %" for fraction in fractions)], body)
    return f"{table}\n\n{said_of(record)}"


def within(row: dict[str, Any], headline: str) -> str:
    """A mean and half the width of its interval, in percent."""
    return f"{100 * row[headline]:.1f} ±{50 * (row['high'] - row['low']):.1f}"


def said_of(record: dict[str, Any]) -> str:
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
    """Good, random and inverted masks, before and after retraining."""
    (record,) = records("pruning/subnetworks.json")
    names = {"michel": "the highest scores", "random": "drawn at random", "michel/inverted": "the lowest scores"}
    found = {(row["criterion"], row["epochs"]): within(row, record["headline"]) for row in record["rows"]}
    epochs = sorted({row["epochs"] for row in record["rows"]})
    body = [[what, *(found[name, count] for count in epochs)] for name, what in names.items()]
    head = ["heads kept", *("not retrained" if not count else f"retrained, {count:g} epoch" for count in epochs)]
    share = 100 * record["rows"][0]["fraction"]
    return f"{rows(head, body)}\n\n{share:g} % of the heads removed. {said_of(record)}"


def beside_textpruner() -> str:
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
    """Measured speed beside multiply-accumulates and accuracy."""
    (record,) = records("pruning/speed.json")
    results = record["results"]
    shapes = list(dict.fromkeys((line["batch"], line["length"]) for line in results["latency"]))
    lines = {(line["model"], line["batch"], line["length"]): line for line in results["latency"]}
    body = []
    for name, model in results["models"].items():
        each = [lines[name, *shape] for shape in shapes]
        speeds = [f"{x['speedup']['median']:.2f} ({x['speedup']['low']:.2f}–{x['speedup']['high']:.2f})" for x in each]
        share = 100 * each[-1]["macs"]
        body.append([name, f"{share:.0f} %", *speeds, f"{100 * model[results['headline']]:.1f}"])
    head = ["model", "MACs", *(f"{batch} × {length} tokens" for batch, length in shapes), results["headline"]]
    return f"{rows(head, body)}\n\nTimes faster than dense, median and quartiles. Measured on {measured_on(record)}."


def embed() -> str:
    """Texts to vectors beside sentence-transformers."""
    (record,) = records("embed.json")
    data, errors = record["data"], record["largest_difference"]
    seconds = {name: row["median"] for name, row in record["seconds"].items()}
    cutting, base = seconds.pop("bertlite, texts to tokens alone"), seconds["sentence-transformers"]
    body = [
        [
            name,
            f"{data['tokens'] / taken:,.0f}",
            f"{base / taken:.2f}",
            f"{errors[name]:.0e}" if name in errors else "",
        ]
        for name, taken in seconds.items()
    ]
    versions = record["environment"]["versions"]
    return "\n".join(
        [
            rows(["", "tokens per second", "ratio", "largest difference"], body),
            "",
            f"{data['texts']:,} paragraphs of {data['tokens']:,} tokens, {data['longest']} at most. Of our time in"
            f" float32 {cutting / seconds['bertlite']:.1%} goes into making tokens of texts. {measured_on(record)},"
            f" sentence-transformers {versions['sentence-transformers']}, transformers {versions['transformers']}.",
        ]
    )


def trust() -> str:
    """What was tried to break it, and what came of it."""
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
        noticed = record["killed"] + record["looped or crashed"]
        body.append(
            [
                f"changes of `{record['module']}.py`, one at a time",
                f"the tests notice {noticed} of {record['run']}{survived}",
            ]
        )
    return rows(["", "result"], body)


def without(tests: Sequence[str]) -> str:
    """Which of the tests in the repository these are not."""
    every = [path for path in (ROOT / "tests").iterdir() if path.match("test_*.py") or any(path.glob("test_*.py"))]
    absent = sorted(path.name for path in every if f"tests/{path.name}" not in tests and "tests" not in tests)
    return f", without {', '.join(absent)}" if absent else ""


TABLES: dict[str, Callable[[], str]] = {
    "parity": partial(parity, "parity-[0-9]*.json"),
    "startup": startup,
    "clients": clients,
    "speed": partial(speed, "speed.json"),
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
    "gpuasked": asked,
    "gpubase": partial(checkpointing, "checkpointing-cuda-base.json"),
    "gpularge": partial(checkpointing, "checkpointing-cuda-large.json"),
}

if __name__ == "__main__":
    raise SystemExit(main())
