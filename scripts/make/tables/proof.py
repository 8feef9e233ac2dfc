"""Tables of the proof: parity, clients, and the tests that run longer than CI does."""

import sys
from typing import Any

from bertlite.checkpoint.families import FAMILIES
from scripts.make.tables.read import Record, measured_on, record, records, table, without_constant

Claims = list[dict[str, Any]]
FINITE = "a sequence that is all padding gives finite numbers"  # a claim that compares nothing
CLIENTS = ("accelerate", "sentence-transformers", "peft", "datasets", "optimum-onnx", "torchao", "captum", "bertviz")


def parity_records(pattern: str) -> list[Record]:
    """Read records of `bertlite parity --all`; exit if one is of fewer cases."""
    found = records(pattern)
    if any(each["choice"] != "all" or each["only"] for each in found):
        sys.exit(f"a record that matches {pattern} is of some cases, not of `bertlite parity --all`")
    return found


def parity(names: str) -> str:
    """Table of the claims of parity by dtype, a column for each version; it names torch where there are several."""
    files = parity_records(names)
    torches = [each["environment"]["versions"]["torch"].partition("+")[0] for each in files]
    several = len(set(torches)) > 1
    head = ["dtype", "claim"]
    for each, torch in zip(files, torches, strict=True):
        head.append(f"transformers {each['environment']['versions']['transformers']}")
        head[-1] += f", torch {torch}" if several else ""
    found = [claims_of([each]) for each in files]
    body = [[*key, *(worst(each[key]) if key in each else "" for each in found)] for key in claims_of(files)]
    return table(
        head,
        body,
        "Tensors compared, and the largest error of one, a gradient's not divided by the largest gradient,"
        " or the largest ratio of the two rms errors."
        f" {checkpoints_of(files)}. Measured on {measured_on(*files, name_torch=not several)}."
        f" Case by case: `scripts/results/{names}`." + "".join(f" {each['note']}" for each in files if "note" in each),
    )


def checkpoints_of(files: list[Record]) -> str:
    return " and ".join(dict.fromkeys(name for each in files for name in each["checkpoints"]))


def claims_of(files: list[Record]) -> dict[tuple[str, str], Claims]:
    """Return the claims of all checkpoints by dtype and claim; the claim for every dtype comes last."""
    found: dict[tuple[str, str], Claims] = {}
    for each in files:
        for checkpoint in each["checkpoints"].values():
            for claim in checkpoint["claims"]:
                dtype = "each" if claim["claim"] == FINITE else claim["dtype"]
                found.setdefault((dtype, claim["claim"]), []).append(claim)
    return dict(sorted(found.items(), key=lambda item: item[0][0] == "each"))


def families() -> str:
    """Table of the other families: what makes a BERT of each, and how near transformers' own class it is."""
    files = parity_records("families-[0-9]*.json")
    kinds: dict[str, list[str]] = {}
    for kind, family in FAMILIES.items():
        if family.becomes:
            kinds.setdefault(family.becomes, []).append(kind)
    body = []
    for becomes, group in kinds.items():
        sections = [section for each in files for section in each["families"].values()]
        claims = [claim for section in sections if section["model_type"] in group for claim in section["claims"]]
        if not claims:  # recorded before this kind was there
            continue
        exact = [claim for claim in claims if claim["dtype"] == "float64"]
        parts = ([c for c in exact if ("gradient" in c["claim"]) == wanted] for wanted in (False, True))
        errors = (f"{max(claim['max_error'] for claim in part):.0e}" for part in parts)
        ratio = max(claim["max_ratio"] or 0 for claim in claims if claim["dtype"] == "float32")
        names = ", ".join(f"`{kind}`" for kind in group)
        count = sum(claim["tensors"] for claim in claims)
        body.append([names, becomes, f"{count:,}", verdict(claims), *errors, f"{ratio:.2f}"])
    versions = " and ".join(each["environment"]["versions"]["transformers"] for each in files)
    head = ["`model_type`", "changes that make it a BERT, except names", "tensors", "hold", "outputs", "gradients"]
    head, body, same = without_constant([*head, "float32"], body, "hold")
    return table(
        head,
        body,
        f"{same}Compared with transformers' own classes, {versions}: random weights in a small and in a base model's"
        " shape; padding on the left, on the right and none; eager, sdpa, packed and the native kernels. The largest"
        " difference of an output and of a gradient in float64, and the largest ratio of the two rms errors in"
        " float32. Measured on"
        f" {measured_on(*files)}.",
    )


def verdict(claims: Claims) -> str:
    failed = sum(claim["failed"] for claim in claims)
    return f"{failed} fail" if failed else "all"


def worst(claims: Claims) -> str:
    """Write the number of tensors, those that fail, and the largest ratio of errors, or else the largest error."""
    tensors, failed = sum(claim["tensors"] for claim in claims), verdict(claims)
    error = max(claim["max_error"] for claim in claims)
    ratio = max(claim["max_ratio"] or 0 for claim in claims)
    size = f"ratio {ratio:.2f}" if ratio and error else "0" if error == 0 else f"{error:.1e}"
    return f"{tensors:,}: {size}" + ("" if failed == "all" else f", {failed}")


def clients() -> str:
    """Table of the clients: results of their checks with bertlite on each transformers, and with the newest alone."""
    files = records("clients-[0-9]*.json")
    versions = [each["environment"]["versions"]["transformers"] for each in files]
    sides = [(each, "bertlite.hf") for each in files] + [(files[0], "transformers")]
    ran = [line["client"] for each, side in sides for line in each["checks"] if line[side]["result"] != "not run"]
    names = [name for name in dict.fromkeys(line["client"] for line in files[0]["checks"]) if name in ran]
    body = [[name, *(outcome(each, name, side) for each, side in sides)] for name in names]
    head = ["client", *(f"bertlite.hf on {version}" for version in versions), f"transformers {versions[0]} alone"]
    versions_of = files[0]["environment"]["versions"]
    others = ", ".join(f"{name} {versions_of[name]}" for name in versions_of if name in CLIENTS and versions_of[name])
    return table(head, body, f"With {others}; {measured_on(*files)}.")


def outcome(record: Record, client: str, side: str) -> str:
    """Write the number of a client's checks that pass."""
    runs = [line[side]["result"] for line in record["checks"] if line["client"] == client]
    ran = [result for result in runs if result != "not run"]
    passed = len(ran) - ran.count("fails")
    return f"{'all' if passed == len(ran) else f'{passed} of'} {len(ran)}" if ran else "not run"


def trust() -> str:
    """Table of the stress tests and their results."""
    fuzz, native, folders = record("fuzz"), record("native"), record("folders")
    kinds, runs = fuzz["kinds"].values(), native["runs"]
    tried, loaded = sum(kind["loaded"] + kind["refused"] for kind in kinds), sum(kind["loaded"] for kind in kinds)
    body = {
        "whole checkpoints changed at random": f"{tried:,} files: {loaded:,} load, the others are refused by our own"
        f" errors; the slowest took {max(kind['seconds'] for kind in kinds):.1f} s",
        "packed folders changed at random, with new checksums, under the sanitizers": f"{folders['tries']:,} folders"
        f" in both loaders: {folders['results']['runtime run']:,} and {folders['results']['inference run']:,} run, the"
        f" others are refused by a file's name; faults: {folders['faults']}",
        f"native kernels ({native['instructions']}) on random shapes for {native['minutes']:g} minutes": "no fault in"
        f" {runs['address']['cases']:,} cases under the sanitizers of addresses and undefined behaviour and"
        f" {runs['thread']['cases']:,} under the thread sanitizer, nor in {runs['python']['cases']:,} whole models"
        " against float64",
    }
    return table(["", "result"], list(body.items()))
