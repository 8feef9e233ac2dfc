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
    """Table of the claims of parity by dtype, a column for each version; it names torch where there are several."""
    files = parity_records(names)
    torches = {record["environment"]["versions"]["torch"].partition("+")[0] for record in files}
    head = ["dtype", "claim"]
    for record in files:
        versions = record["environment"]["versions"]
        torch = f", torch {versions['torch'].partition('+')[0]}" if len(torches) > 1 else ""
        head.append(f"transformers {versions['transformers']}{torch}")
    found = [claims_of([record]) for record in files]
    every = claims_of(files)
    body = [[*key, *(worst(each[key]) if key in each else "" for each in found)] for key in every]
    checkpoints = dict.fromkeys(name for record in files for name in record["checkpoints"])
    return (
        f"{rows(head, body)}\n\nTensors compared, and the largest error of one, or the largest ratio of the two rms"
        f" errors. {' and '.join(checkpoints)}. Measured on"
        f" {measured_on(files[0], name_torch=len(torches) == 1)}. Case by case: `scripts/results/{names}`."
    )


def claims_of(files: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the claims of all checkpoints by dtype and claim; that of every dtype comes last."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in files:
        for checkpoint in record["checkpoints"].values():
            for claim in checkpoint["claims"]:
                dtype = "each" if claim["claim"].endswith("finite numbers") else claim["dtype"]
                found.setdefault((dtype, claim["claim"]), []).append(claim)
    return dict(sorted(found.items(), key=lambda item: item[0][0] == "each"))


def verdict(claims: list[dict[str, Any]]) -> str:
    failed = sum(claim["failed"] for claim in claims)
    return f"{failed} fail" if failed else "all"


def worst(claims: list[dict[str, Any]]) -> str:
    """Write the number of tensors, those that fail, and the largest ratio of errors, or else the largest error."""
    tensors, failed = sum(claim["tensors"] for claim in claims), verdict(claims)
    error = max(claim["max_error"] for claim in claims)
    ratio = max(claim["max_ratio"] or 0 for claim in claims)
    size = f"ratio {ratio:.2f}" if ratio and error else "0" if error == 0 else f"{error:.1e}"
    return f"{tensors:,}: {size}" + ("" if failed == "all" else f", {failed}")


def clients() -> str:
    """Table of the clients: results of their checks with bertlite on each transformers, and with the newest alone."""
    files = records("clients-[0-9]*.json")
    versions = [record["environment"]["versions"]["transformers"] for record in files]
    sides = [(record, "bertlite.hf") for record in files] + [(files[0], "transformers")]
    ran = [line["client"] for record, side in sides for line in record["checks"] if line[side]["result"] != "not run"]
    names = [name for name in dict.fromkeys(line["client"] for line in files[0]["checks"]) if name in ran]
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
