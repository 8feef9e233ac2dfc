"""Tables of speed and memory."""

from collections.abc import Mapping
from typing import Any

from bertlite.bench.sections import WHOLE
from bertlite.timing import with_spread
from scripts.make.tables import read
from scripts.make.tables.read import SPREAD, OldRecordError, measured_on, milliseconds, records, rows, spread

DTYPES = ("float32", "bfloat16", "int8")
HEADLINES = ("1 x 16", "8 x 128")  # and the texts of a data set: the batches of the short tables
SPEED_RECORD = "scripts/results/speed.json"  # has every batch, engine and time
HALVES = ("half the heads", "half the neurons", "half of both")


def startup() -> str:
    """Table of the times to import, to load and to start cold."""
    (record,) = records("startup.json")
    body = []
    for section in record["sections"].values():
        times = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in section["seconds"].items())
        ratios = ", ".join(f"{name} = {spread(section['ratios'], name)}" for name in section["ratios"])
        size = section.get("model_bytes")
        peaks = [
            f"{name} needs {x / size:.2f} of the model's memory" for name, x in section.get("peak_bytes", {}).items()
        ]
        body.append([section["what"], times, ", ".join([ratios, *peaks])])
    table = rows(["", "time", "ratio"], body)
    version = record["environment"]["versions"]["transformers"]
    return f"{table}\n\n{SPREAD} Measured against transformers {version} on {measured_on(record)}."


def forward_sections(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections that time a forward pass of bert-base with torch's threads, by the name of their batch."""
    groups = grouped(record, "forward")
    return groups.get(("bert-base", record["environment"]["threads"]), {})


def grouped(record: Mapping[str, Any], prefix: str) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """Return the sections whose name begins so, {(model, threads): {batch: section}}.

    A section of an older record is one of bert-base with the record's threads.
    """
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for name, section in record["sections"].items():
        if name.startswith(prefix):
            which = section.get("model", "bert-base"), section.get("threads", record["environment"]["threads"])
            found.setdefault(which, {})[section.get("work", name.removeprefix(f"{prefix} "))] = section
    return found


def engines_of(forward: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the engines of any section, the baseline first."""
    return list(dict.fromkeys(engine for section in forward.values() for engine in section["seconds"]))


def headlines(forward: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the sections of a short table: full batches, then texts, those padded to a fixed length last."""
    order = ("none", "longest", "fixed")
    chosen = [(name, each) for name, each in forward.items() if name in HEADLINES or padding(each) != "none"]
    return dict(sorted(chosen, key=lambda pair: order.index(padding(pair[1]))))


def padding(section: Mapping[str, Any]) -> str:
    """Return what a section's texts are padded to; in older records all are of a fixed length."""
    return section.get("padding", "none" if section["filled"] == 1 else "fixed")


def head_of(name: str, section: Mapping[str, Any]) -> str:
    """Return a batch with the share of its positions that hold tokens, and whether its length is fixed."""
    share, kind = section["filled"], padding(section)
    return name + ("" if share == 1 else f" ({share:.0%})") + (", fixed" if kind == "fixed" else "")


def heads_of(forward: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [head_of(name, section) for name, section in forward.items()]


def padding_note(forward: Mapping[str, Mapping[str, Any]]) -> str:
    """Say what the columns of texts are, and what their percentage means."""
    kinds = {padding(section) for section in forward.values()}
    notes = {
        "longest": " Texts are padded to the longest of their batch.",
        "fixed": " Fixed: padded to the length that is named, as accelerators and compiled graphs often need.",
    }
    share = "The percentage is the share of positions that hold tokens; the rest is padding."
    return share + "".join(note for kind, note in notes.items() if kind in kinds) if kinds - {"none"} else ""


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
    for section in (sections[name] for name in ("training", "training by autocast") if name in sections):
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
        if version and name in ("transformers", "onnxruntime", "openvino", "nncf", "ctranslate2")
    )
    return "\n".join([*lines, f"{padding_note(forward)} {SPREAD} Measured on {measured_on(record)}, {peers}."])


def limited() -> str:
    """Table of the speed of engines that are limited to AVX2; empty if there is no record."""
    if not list(read.RESULTS.glob("speed-avx2.json")):
        return ""
    note = "On the same processor, limited to AVX2. OpenVINO's kernels that are not oneDNN's may go beyond it."
    return f"{note}\n\n{speed('speed-avx2.json')}"


def peers() -> str:
    """Table of the speed of the native kernels over OpenVINO in the same dtype, for every model; below it that of
    pruned models, if the record has any.
    """
    (record,) = records("speed.json")
    body, shown = [], {}
    for (model, threads), forward in grouped(record, "forward").items():
        for name, section in headlines(forward).items():
            pairs = [f"OpenVINO {dtype} / bertlite native {dtype}" for dtype in DTYPES]
            cells = [spread(section["ratios"], pair) if pair in section["ratios"] else "" for pair in pairs]
            if any(cells):
                body.append([model, threads, head_of(name, section), *cells])
                shown[name] = section
    if not body:
        raise OldRecordError("it has no section with OpenVINO")
    table = rows(["model", "threads", "batch", *DTYPES], body)
    note = f"bertlite native, times faster than OpenVINO in the same dtype. {padding_note(shown)} {SPREAD}"
    return f"{table}\n\n{note} `{SPEED_RECORD}` has more batches.{halves(record)}"


def halves(record: Mapping[str, Any]) -> str:
    """Table of the speed-up of optimised models without half of their heads and neurons; empty if none was timed."""
    body = []
    for (model, threads), sections in grouped(record, "pruned").items():
        (section,) = sections.values()
        engines = dict.fromkeys(tuple(name.split(f" {WHOLE} ")) for name in section["seconds"] if f" {WHOLE} " in name)
        for backend, dtype in engines:
            dense = f"{backend} {WHOLE} {dtype}"
            pairs = [f"{dense} / {backend} {half} {dtype}" for half in HALVES]
            cells = [spread(section["ratios"], pair) if pair in section["ratios"] else "" for pair in pairs]
            body.append([model, threads, f"{backend} {dtype}", milliseconds(section["seconds"][dense], ".1f"), *cells])
    table = rows(["model", "threads", "engine", WHOLE, *HALVES], body)
    return f"\n\nThe same models pruned, 8 x 128, times faster than the {WHOLE} one:\n\n{table}" if body else ""


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
    """Table of texts to vectors beside sentence-transformers, with torch and with OpenVINO."""
    (record,) = records("embed.json")
    data, ratios, times, errors = record["data"], record["ratios"], record["seconds"], record["errors"]
    tokenizing = "bertlite, texts to tokens alone"
    base = next(name for name in ("sentence-transformers torch float32", "sentence-transformers") if name in times)
    body, shares = [], []
    for name, seconds in times.items():
        if name == tokenizing:
            continue
        rates = {"low": seconds["high"], "median": seconds["median"], "high": seconds["low"]}  # quick is more
        rate = with_spread({end: data["tokens"] / taken for end, taken in rates.items()}, ",.0f")
        over = [f"{base} / {name}", f"sentence-transformers OpenVINO {name.split()[-1]} / {name}"]
        cells = [spread(ratios, pair) if pair in ratios else "" for pair in over]
        body.append(
            [name, rate, "1" if name == base else cells[0], cells[1], f"{errors[name]:.0e}" if name in errors else ""]
        )
        if f"{tokenizing} / {name}" in ratios:
            shares.append(spread(ratios, f"{tokenizing} / {name}", ".1%"))
    head = ["", "tokens per second", f"over {base}", "over its OpenVINO", "error"]
    keep = [i for i in range(len(head)) if any(line[i] for line in body)]
    versions = record["environment"]["versions"]
    peers = ("sentence-transformers", "optimum-intel", "openvino", "transformers")
    named = [f"{name} {versions[name]}" for name in peers if versions.get(name)]
    return "\n".join(
        [
            rows([head[i] for i in keep], [[line[i] for i in keep] for line in body]),
            "",
            f"{SPREAD} {data['texts']:,} paragraphs of {data['tokens']:,} tokens, {data['longest']} at most."
            f" Tokenizing takes {shares[0]} of the time of bertlite's first row."
            f" Measured on {measured_on(record)}, {', '.join(named)}.",
        ]
    )


def batches() -> str:
    """Table of the vectors that differ between a text alone and among others."""
    (record,) = records("batches.json")
    body = [
        [name, f"{row['differ']} of {record['texts']}", f"{row['most']:.0e}" if row["differ"] else "0"]
        for name, row in record["rows"].items()
    ]
    versions = record["environment"]["versions"]
    return (
        f"{rows(['', 'vectors that differ', 'largest difference'], body)}\n\nMiniLM, random words with the lengths of"
        f" SST-2; each text alone, and among all. {measured_on(record)}, sentence-transformers"
        f" {versions['sentence-transformers']}, transformers {versions['transformers']}."
    )
