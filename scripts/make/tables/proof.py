"""Tables of the proof: parity, clients, and the tests that run longer than CI does."""

from collections import Counter
from typing import Any

from bertlite.records import commit_of
from scripts.make.tables.read import measured_on, parity_records, records, rows

CLIENTS = (
    *("accelerate", "sentence-transformers", "peft", "datasets", "optimum-onnx"),
    *("torchao", "captum", "bertviz", "textpruner"),
)


def parity(names: str) -> str:
    """Table of the claims of parity by checkpoint and dtype; it names torch where there are records of several."""
    body, files = [], parity_records(names)
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


def trust() -> str:
    """Table of the stress tests and their results."""
    (soak,), (fuzz,), (coverage,), (native,) = (
        records(f"{name}.json") for name in ("soak", "fuzz", "coverage", "native")
    )
    runs = native["runs"]
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
            f"native kernels ({native['instructions']}) on random shapes for {native['minutes']:g} minutes",
            f"no fault in {runs['address']['cases']:,} cases under the sanitizers of addresses and undefined behaviour"
            f" and {runs['thread']['cases']:,} under that of threads, nor in {runs['python']['cases']:,} whole models"
            " beside float64",
        ],
        [
            f"lines of `bertlite/` that the tests ran at {(commit_of(coverage) or {})['commit'][:7]}",
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
