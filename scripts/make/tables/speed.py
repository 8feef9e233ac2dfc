"""Tables of speed and memory."""

from collections.abc import Mapping
from typing import Any

from bertlite.lab.timing import with_spread
from scripts.make.tables.read import SPREAD, OldRecordError, measured_on, milliseconds, records, rows, spread


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
