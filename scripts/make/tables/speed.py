"""Tables of speed and memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from bertlite.experiments.compare import show_loss
from bertlite.support.progress import count_of
from scripts.make.tables import read
from scripts.make.tables.read import (
    ROUNDED,
    SPREAD,
    Record,
    cell,
    measured_on,
    milliseconds,
    record,
    records,
    rounded,
    table,
    with_spread,
)
from scripts.measure.native_accuracy import FITTED

DTYPES = ("float32", "bfloat16", "int8")
# the batches of the short tables, beside the texts of a data set
HEADLINES = ("1 x 16", "8 x 128", "1 x 1024", "1 x 2048", "1 x 4096")
BASE = "transformers sdpa float32"
WHOLE = "whole"
UNDER = ("transformers", "sentence-transformers", "onnxruntime", "openvino")
EVERY = ("transformers", "torchao", "onnxruntime", "llama-cpp-python", "openvino")
LIMITS = {
    "multiply": "multiply instructions",
    "read": "bandwidth of reading",
    "copy": "bandwidth of a copy, read and written",
}
WIDE = 10  # columns that a page has no room for
HALVES = ("half the heads", "half the neurons", "half of both")

Sections = Mapping[str, dict[str, Any]]


def startup() -> str:
    """Table of the times to import, to load and to start cold."""
    found, body, others = record("startup"), [], []
    for section in found["sections"].values():
        times = {name: milliseconds(seconds) for name, seconds in section["seconds"].items()}
        body.append([section["what"], times.pop("bertlite"), times.pop("transformers")])
        body[-1].append(with_spread(section["ratios"]["transformers / bertlite"]))
        others += [f"{name.replace('its own file', 'a file that it saved')} {time}" for name, time in times.items()]
    version = found["environment"]["versions"]["transformers"]
    note = f"For comparison: {', '.join(others)}. {SPREAD} transformers {version}, {measured_on(found)}."
    return table(["", "bertlite", "transformers", "ratio"], body, note)


def forward_sections(record: Record) -> Sections:
    """Return the sections that time a forward pass of bert-base with torch's threads, by the name of their batch."""
    return grouped(record, "forward").get("bert-base", {})


def grouped(record: Record, prefix: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the sections whose name begins so, {model: {batch: section}}; with the model other threads than usual."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, section in record["sections"].items():
        if name.startswith(prefix):
            usual = section["threads"] == record["environment"]["threads"]
            model = section["model"] + ("" if usual else f", {count_of(section['threads'], 'thread')}")
            found.setdefault(model, {})[section.get("work", name)] = section
    return found


def engines_of(forward: Sections) -> list[str]:
    """Return the engines of any section, the baseline first."""
    return list(dict.fromkeys(engine for section in forward.values() for engine in section["seconds"]))


def headlines(forward: Sections) -> Sections:
    """Return the sections of a short table: full batches, then texts, those padded to a fixed length last."""
    order = ("none", "longest", "fixed")
    chosen = [pair for pair in forward.items() if pair[0] in HEADLINES or pair[1]["padding"] != "none"]
    return dict(sorted(chosen, key=lambda pair: order.index(pair[1]["padding"])))


def heads_of(forward: Sections) -> list[str]:
    """Return the batches, each with the share of its positions that hold tokens, and whether its length is fixed."""
    return [
        name
        + ("" if section["filled"] == 1 else f" ({section['filled']:.0%})")
        + (", fixed" if section["padding"] == "fixed" else "")
        for name, section in forward.items()
    ]


def padding_note(forward: Sections) -> str:
    """Say how texts are padded, and what their percentage means."""
    kinds = {section["padding"] for section in forward.values()}
    padded = {"longest": "to the longest of the batch", "fixed": "if fixed, to the named length"}
    how = "; ".join(text for kind, text in padded.items() if kind in kinds)
    return f"(%): the share of positions with tokens; the rest is padding {how}." if how else ""


def note(what: str, forward: Sections, *found: Record, spread: str = SPREAD) -> str:
    """Say below a table what its figures are, and where they were measured."""
    return " ".join(filter(None, (what, padding_note(forward), spread, f"{measured_on(*found)}.")))


def every_engine() -> str:
    """Table of the speed of every engine that was timed, a column for each model and batch."""
    found = record("speed-peers")
    sections = {
        f"{model}, {batch}": section
        for model, forward in grouped(found, "forward").items()
        for batch, section in headlines(forward).items()
    }
    engines = sorted(engines_of(sections), key=lambda engine: DTYPES.index(engine.split()[-1]))
    versions = found["environment"]["versions"]
    peers = ", ".join(f"{each} {versions[each]}" for each in EVERY)
    return f"{over_base(found, sections, [each for each in engines if each != BASE])} {peers}."


def on_gpu(name: str) -> str:
    """Table of the speed of every engine on a GPU, and what training takes there."""
    found = record(name)
    forward = forward_sections(found)
    steps = [each for name, each in found["sections"].items() if name.startswith("training")]
    if not steps:
        return over_base(found, forward, engines_of(forward))
    pairs = list(dict.fromkeys(pair for step in steps for pair in step["ratios"]))
    body = [
        [step["what"].removeprefix("training step, "), *(cell(step["ratios"], pair) for pair in pairs)]
        for step in steps
    ]
    head = ["training step", *(pair.split(" / ")[1] for pair in pairs)]
    training = table(head, body, f"Times faster than {pairs[0].split(' / ')[0]}. {SPREAD}")
    return f"{over_base(found, forward, engines_of(forward))}\n\n{training}"


def over_base(found: Record, forward: Sections, engines: Sequence[str]) -> str:
    """Table of times faster than transformers' sdpa in float32, engines by batches; many batches are its lines."""
    body = [
        [engine, *(rounded(section["ratios"], f"{BASE} / {engine}") for section in forward.values())]
        for engine in engines
    ]
    shapes = " and ".join(dict.fromkeys(f"{section['model']}'s" for section in forward.values()))
    what = f"Times faster than {BASE}, {shapes} shape; 1 x 16: one text of 16 tokens."
    grid = [["", *heads_of(forward)], *(line for line in body if any(line[1:]))]
    if len(forward) > WIDE:
        grid = [list(line) for line in zip(*grid, strict=True)]
    return table(grid[0], grid[1:], note(what, forward, found, spread=ROUNDED))


def under(name: str, only: str = "") -> str:
    """Table of the speed of what other libraries have, by what runs beneath, or only by one."""
    found = record(name)
    (uses,) = grouped(found, "under").values()
    ways = [way for dtype in DTYPES for way in engines_of(uses) if way.endswith(dtype)]
    ways = ways[:1] + [way for way in ways[1:] if way.startswith(only)]
    body = [[way, *(rounded(use["ratios"], f"torch float32 / {way}") for use in uses.values())] for way in ways[1:]]
    versions = found["environment"]["versions"]
    peers = ", ".join(f"{each} {versions[each]}" for each in UNDER)
    what = f"Times faster than torch in float32, tokenizing too: MiniLM, real lengths, batches of 32. {peers}."
    heads = (f"{name}, {use['library']}" for name, use in uses.items())
    return table(["", *heads], body, f"{what} {ROUNDED} {measured_on(with_threads(found, uses))}.")


def with_threads(found: Record, sections: Sections) -> Record:
    """Return a record with the threads that its sections had, which all had the same, not torch's when it started."""
    (threads,) = {section["threads"] for section in sections.values()}
    return found | {"environment": found["environment"] | {"threads": threads}}


def peers(*names: str) -> str:
    """Table of the speed of the native kernels over transformers' sdpa in float32 and over OpenVINO in their dtype.

    A model and batch that two records have is shown of the first.  Texts of a fixed length are left to the record.
    """
    found, body, shown, known = [record(name) for name in names], [], {}, set()
    others: set[str] = set()  # what is said of other baselines
    every = [(model, forward) for each in found for model, forward in grouped(each, "forward").items()]
    for model, forward in every:
        for batch, section in headlines(forward).items():
            base = section.get("baseline", BASE)
            cells = [
                rounded(section["ratios"], f"{over} / bertlite native {dtype}")
                for over, dtype in [(base, each) for each in DTYPES] + [(f"OpenVINO {each}", each) for each in DTYPES]
            ]
            others |= {f" For {model} than {base}, which has no sdpa."} if base != BASE else set()
            if any(cells) and section["padding"] != "fixed" and (model, batch) not in known:
                known.add((model, batch))
                body.append([model, *heads_of({batch: section}), *cells])
                shown[batch] = section
    head = ["model", "batch", *DTYPES, *(f"{each} over OpenVINO" for each in DTYPES)]
    what = f"Times faster than {BASE}, and than OpenVINO in that dtype.{''.join(sorted(others))}"
    return table(head, body, note(what, shown, *found, spread=ROUNDED))


def recipes() -> str:
    """Table of the speed of a reranker and of a DeBERTa, on texts of real lengths."""
    under, deberta = record("speed-under"), record("speed-deberta")
    rerank = under["sections"]["under rerank MiniLM 1 thread"]["ratios"]
    guard = deberta["sections"]["forward 32 x 49 SST-2 deberta-v3 2 threads"]["ratios"]
    slow = "transformers eager float32"
    body = [
        ["reranker, MiniLM, 1 thread", *(cell(rerank, f"torch float32 / bertlite {dtype}") for dtype in DTYPES)],
        ["classifier, deberta-v3, 2 threads", *(cell(guard, f"{slow} / bertlite native {dtype}") for dtype in DTYPES)],
    ]
    versions = under["environment"]["versions"]
    what = (
        "Times faster than sentence-transformers and transformers in float32, batches of 32. The reranker's:"
        f" transformers {versions['transformers']}, sentence-transformers {versions['sentence-transformers']}."
    )
    return table(["", *DTYPES], body, f"{what} {SPREAD} {measured_on(under, deberta, name_threads=False)}.")


def roof() -> str:
    """Table of the share of the processor's own limits the kernels reach on one thread, also with AVX2 alone."""
    names = ["roof", *(["roof-avx2"] if (read.RESULTS / "roof-avx2.json").exists() else [])]
    body: dict[tuple[str, str, str], list[str]] = {}
    for i, name in enumerate(names):
        sections = [each for forward in grouped(record(name), "forward").values() for each in forward.values()]
        for section in (each for each in sections if each["threads"] == 1):
            few = section["tokens"] < 64  # so few that reading the weights may be the limit
            for limit in LIMITS if few else ("multiply",):
                found = [section["shares"].get(f"bertlite native {dtype}", {}).get(limit) for dtype in DTYPES]
                line = body.setdefault((section["model"], section["work"], LIMITS[limit]), [""] * 3 * len(names))
                line[3 * i : 3 * i + 3] = [f"{share:.0%}" if share else "" for share in found]
    lines = [[*key, *cells] for key, cells in body.items() if any(cells)]
    heads = [dtype + end for end in ("", ", AVX2")[: len(names)] for dtype in DTYPES]
    note = (
        "The row of a batch with the larger share is its limit. Limits are measured between the rounds of the same"
        f" run; one thread, {'; with AVX2 alone on '.join(measured_on(record(x), name_threads=False) for x in names)}."
    )
    return table(["model", "batch", "share of", *heads], lines, note)


def idle() -> str:
    """Table of the share of their time that threads wait for each other."""
    found = records("phases*.json")
    body = []
    for each in sorted(found, key=lambda each: each["hidden_size"]):
        shares = [
            [phases.get("waiting", 0.0) / sum(phases.values()) for phases in threads.values()]
            for threads in each["phases"].values()
        ]
        body.append([each["hidden_size"], each["work"], *(f"{sum(x) / len(x):.1%}" for x in shares)])
    return table(["width", "batch", *found[0]["phases"]], body, f"Means over threads; {measured_on(found[0])}.")


def attention() -> str:
    """Table of the rate of attention compared with the rate of the matmuls."""
    found = sorted(records("attention*.json"), key=lambda each: (each["environment"]["cpu"], each["hidden_size"]))
    body = [
        [
            each["environment"]["cpu"],
            each["hidden_size"],
            each["work"],
            *(f"{rate:.2f}" for rate in each["attention_rates"].values()),
        ]
        for each in found
    ]
    return table(["processor", "width", "batch", *found[0]["attention_rates"]], body, f"{measured_on(*found)}.")


def halves() -> str:
    """Table of the speed-up of optimised models without half of their heads and neurons."""
    found, body = record("speed"), []
    for model, sections in grouped(found, "pruned").items():
        (section,) = sections.values()
        for dtype in DTYPES:
            dense = f"bertlite native {WHOLE} {dtype}"
            if dense in section["seconds"]:
                cells = [cell(section["ratios"], f"{dense} / bertlite native {half} {dtype}") for half in HALVES]
                body.append([model, dtype, milliseconds(section["seconds"][dense], ".1f"), *cells])
    head = ["model", "dtype", WHOLE, *HALVES]
    return table(head, body, note(f"8 x 128, times faster than the {WHOLE} model.", {}, found))


def training() -> str:
    """Table of the time of a training step, and of how much faster it is in bertlite."""
    found, body, shown = record("training"), [], {}
    found = with_threads(found, found["sections"])
    for model, trained in grouped(found, "training").items():
        for batch, section in trained.items():
            cells = [cell(section["ratios"], f"transformers sdpa / bertlite {name}") for name in ("sdpa", "packed")]
            step = milliseconds(section["seconds"]["transformers sdpa"])
            body.append([model, *heads_of({batch: section}), step, *cells])
            shown[batch] = section
    head = ["model", "batch", "transformers sdpa", "bertlite sdpa", "bertlite packed"]
    what = "A step of a classifier in float32: dropout, AdamW (fused); times faster than transformers."
    return table(head, body, note(what, shown, found))


def checkpointing(name: str) -> str:
    """Table of step time and peak memory, as shares of transformers' without checkpointing."""
    found = record(name)
    args, base = found["args"], "transformers, plain"
    positions = args["batch"] * args["length"]
    kinds = {f"{found[kind]['tokens'] / positions:.0%} filled": found[kind] for kind in ("full", "ragged")}
    body = []
    for candidate in found["full"]["rows"]:
        cells = []
        for kind in kinds.values():
            cells.append("1" if candidate == base else with_spread(kind["ratios"][f"{candidate} / {base}"]))
            cells.append(f"{kind['rows'][candidate]['peak_bytes'] / kind['rows'][base]['peak_bytes']:.2f}")
        body.append([candidate, *cells])
    shape = f"{args['batch']} × {args['length']} tokens, {args['layers']} layers of {args['hidden']}"
    version = found["environment"]["versions"]["transformers"]
    note = f"{SPREAD} {shape}, transformers {version}; measured on {measured_on(found)}."
    return table(["", *(f"{kind}: {axis}" for kind in kinds for axis in ("time", "peak"))], body, note)


def embed() -> str:
    """Table of texts to vectors, compared with sentence-transformers, with torch and with OpenVINO."""
    found = record("embed")
    data, ratios, times, errors = found["data"], found["ratios"], found["seconds"], found["errors"]
    tokenizing, base = "bertlite, texts to tokens alone", "sentence-transformers torch float32"
    body, shares = [], []
    for name, seconds in times.items():
        if name == tokenizing:
            continue
        rates = {"low": seconds["high"], "median": seconds["median"], "high": seconds["low"]}  # quick is more
        rate = with_spread({end: data["tokens"] / taken for end, taken in rates.items()}, ",.0f")
        over = "1" if name == base else cell(ratios, f"{base} / {name}")
        over_openvino = cell(ratios, f"sentence-transformers OpenVINO {name.split()[-1]} / {name}")
        body.append([name, rate, over, over_openvino, f"{errors[name]:.0e}" if name in errors else ""])
        shares += [share] if (share := cell(ratios, f"{tokenizing} / {name}", ".1%")) else []
    head = ["", "tokens per second", f"over {base}", "over its OpenVINO", "error"]
    keep = [i for i in range(len(head)) if any(line[i] for line in body)]
    versions = found["environment"]["versions"]
    peers = ("sentence-transformers", "optimum-intel", "openvino", "transformers")
    named = ", ".join(f"{name} {versions[name]}" for name in peers if versions[name])
    return table(
        [head[i] for i in keep],
        [[line[i] for i in keep] for line in body],
        f"{SPREAD} {data['texts']:,} paragraphs of {data['tokens']:,} tokens, {data['longest']} at most."
        f" Tokenizing takes {shares[0]} of the time of bertlite's first row."
        f" Measured on {measured_on(found)}, {named}.",
    )


def runtime() -> str:
    """Table of packed folders without torch, compared with onnxruntime and OpenVINO GenAI."""
    found = record("runtime")
    body, versions = list[list[str]](), dict[str, str]()
    for name, engine in found["engines"].items():
        peak = with_spread({end: each / 1e6 for end, each in engine["peak"].items()}, ".0f") + " MB"
        folder = f"{engine['folder'] / 1e6:.1f} MB" if "folder" in engine else ""
        times = [milliseconds(engine["first"], ".1f"), peak, folder, milliseconds(engine["texts"])]
        body.append([name, f"{with_spread(engine['start'])} s", *times, f"{engine['cosine']:.4f}"])
        versions |= engine["versions"]
    head = ["one thread", "start, CPU", "first text", "peak", "folder", "64 texts", "least cosine"]
    named = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return table(
        head,
        body,
        f"{SPREAD} The start is beyond importing numpy and tokenizers, and includes the checksums. The"
        f" {found['data']['texts']} texts are SST-2's, in batches of {found['data']['batch']}. Cosines are those with"
        f" the runtime's float32. Measured on {found['environment']['cpu']}, {named}."
        f" An environment of Python with the wheel alone has {found['image']['bytes'] / 1e6:.0f} MB.",
    )


def soak() -> str:
    """Table of the memory of one process that loads a folder many times and encodes many texts."""
    found = record("soak")
    body = []
    for phase, what in (("loads", "loads"), ("texts", f"texts, from {found['threads']} threads")):
        samples = [found["samples"][phase][i] for i in (len(found["samples"][phase]) // 2, -1)]
        after = " MB, ".join(f"{done:,}: {level / 1e6:.0f}" for done, level in samples)
        body.append([what, f"{after} MB", f"{found['rise'][phase]:.1%}"])
    versions = found["environment"]["versions"]
    return table(
        ["", "memory after", "rise in the second half"],
        body,
        f"MiniLM in {found['model']['dtype']}; the texts are the first {found['data']['words']} words of SST-2's."
        f" The rise is that of a line through the samples. Measured on {found['environment']['cpu']},"
        f" numpy {versions['numpy']}, tokenizers {versions['tokenizers']}.",
    )


def batches() -> str:
    """Table of the vectors that differ between a text alone and among others."""
    found = record("batches")
    body = [
        [name, f"{row['differ']} of {found['texts']}", f"{row['most']:.0e}" if row["differ"] else "0"]
        for name, row in found["rows"].items()
    ]
    versions = found["environment"]["versions"]
    return table(
        ["", "vectors that differ", "largest difference"],
        body,
        f"MiniLM, random words with the lengths of SST-2; each text alone, and among all. {measured_on(found)},"
        f" sentence-transformers {versions['sentence-transformers']}, transformers {versions['transformers']}.",
    )


def neighbours() -> str:
    """Table of the nearest neighbours and the cosines that each dtype keeps, and what fitting int8 gains."""
    found, mixed = record("neighbours"), record("neighbours-mixed")["results"]
    encoders = found["results"]
    body = [
        [way, *(cell for each in encoders.values() for cell in kept_cells(each["kept"][way]))]
        for way in ("bfloat16", "int8", FITTED)
    ]
    gain = "{difference:.2f} points ({low:.2f} to {high:.2f})"
    gains = (
        f"{name}: {gain.format(**each['fitted over']['int8'])} more than int8, in"
        f" {each['time of fitted over plain']['median']:.3f} of its time, and"
        f' {gain.format(**mixed[name]["fitted over"]["mixed"])} more than "mixed"; packed in'
        f" {each['CPU seconds of pack']:.0f} CPU seconds"
        for name, each in encoders.items()
    )
    texts = next(iter(encoders.values()))["texts"]
    return table(
        ["", *(f"{name}, {what}" for name in encoders for what in ("ten nearest", "smallest cosine"))],
        body,
        "The share of each text's ten nearest texts that stay, and the smallest cosine of vectors, compared with"
        f" float32; {texts['agnews']:,} titles and descriptions of AG News, {texts['sst2']:,} sentences of SST-2 and"
        f" {texts['xquad']:,} paragraphs and questions of XQuAD. int8 has the nearest integers, {FITTED!r} those of"
        f' `bertlite pack`. {"; ".join(gains)}. "mixed", which had a quarter of its'
        f" layers in bfloat16, is made no more. 95 % intervals over texts; {measured_on(found)}.",
    )


def kept_cells(kept: dict[str, Any]) -> tuple[str, str]:
    """Return the neighbours and the smallest cosine that one way keeps on all sets."""
    smallest = min(each["smallest cosine"] for each in kept.values() if isinstance(each, dict))
    return f"{kept['ten nearest neighbours']:.1%}", f"{smallest:.4f}"


def native_accuracy() -> str:
    """Table of each task's metric as it is, and of what changes in each dtype."""
    found = record("native_accuracy")
    dtypes = [*DTYPES[1:], FITTED]
    body = []
    for name, each in found["results"].items():
        cells = [f"{name}, {each['examples']:,} examples", each["metric"], f"{each['plain']:.2f}"]
        for dtype in dtypes:
            row = each["native"][dtype]
            difference, low, high = (row[end] / 100 for end in ("difference", "low", "high"))
            lost = show_loss(difference, low, high, digits=2)
            cells += [lost.removeprefix("loses "), f"{row['same']:.2%}"]
        body.append(cells)
    most = max(abs(each["native"]["float32"]["difference"]) for each in found["results"].values())
    head = ["", "metric", "as it is", *(cell for dtype in dtypes for cell in (f"{dtype}, points lost", "alike"))]
    return table(
        head,
        body,
        'Points, with 95 % intervals over the same examples, of the loss or, after "gains", of the gain;'
        f" native float32 differs by {most:.2f}"
        " at most. Alike: examples, or words, with the same label; of numbers the rank correlation. MiniLM, fine-tuned"
        f" on each task but similarity; {measured_on(found)}.",
    )
