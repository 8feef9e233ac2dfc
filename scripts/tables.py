"""Put the figures of scripts/results into README.md.

    python scripts/tables.py            # rewrite the tables
    python scripts/tables.py --check    # exit 1 if README.md holds other figures than the records

A table stands between <!-- NAME --> and <!-- /NAME -->; NAME is a function below.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
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
        print(f"{args.readme} is not what the records say; run scripts/tables.py", file=sys.stderr)
        return 1
    if not args.check:
        args.readme.write_text(new, encoding="utf-8")
    return 0


def filled(text: str) -> str:
    """The text with every marked table made anew.

    Raises:
        KeyError: a mark that names no table.
    """

    def table(mark: re.Match[str]) -> str:
        return "\n".join(filter(None, [f"<!-- {mark[1]} -->", TABLES[mark[1]](), f"<!-- /{mark[1]} -->"]))

    return re.sub(r"<!-- ([a-z]+) -->\n.*?<!-- /\1 -->", table, text, flags=re.DOTALL)


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
    return f"{where['cpu']}, {threads}, torch {where['versions']['torch']}, Python {where['python']}"


def parity() -> str:
    body, files = [], records("parity-[0-9]*.json")
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


def speed() -> str:
    """How many times faster than transformers' sdpa in float32, the fraction of the machine's limit reached, and the
    largest error of any of the works; nothing while there is no record."""
    if not (RESULTS / "speed.json").exists():
        return ""
    (record,) = records("speed.json")
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
    for name in ("training", "pruned"):
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


def embed() -> str:
    """Texts to vectors beside sentence-transformers; nothing while there is no record."""
    if not (RESULTS / "embed.json").exists():
        return ""
    (record,) = records("embed.json")
    data, seconds = record["data"], {name: row["median"] for name, row in record["seconds"].items()}
    theirs, ours, cutting = (
        seconds[name] for name in ("sentence-transformers", "bertlite", "bertlite, texts to tokens alone")
    )
    body = [
        [f"{name}, float32", f"{data['tokens'] / taken:,.0f}", f"{theirs / taken:.2f}"]
        for name, taken in (("sentence-transformers", theirs), ("bertlite", ours))
    ]
    versions = record["environment"]["versions"]
    return "\n".join(
        [
            rows(["", "tokens per second", "ratio"], body),
            "",
            f"{data['texts']:,} paragraphs of {data['tokens']:,} tokens, {data['longest']} at most; the largest"
            f" difference of a vector's numbers is {record['largest_difference']:.0e}. Of our time"
            f" {cutting / ours:.1%} goes into making tokens of the texts. Measured on {measured_on(record)},"
            f" sentence-transformers {versions['sentence-transformers']}, transformers {versions['transformers']}.",
        ]
    )


TABLES: dict[str, Callable[[], str]] = {
    "parity": parity,
    "startup": startup,
    "clients": clients,
    "speed": speed,
    "embed": embed,
}

if __name__ == "__main__":
    raise SystemExit(main())
