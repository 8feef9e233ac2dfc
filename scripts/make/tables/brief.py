"""The short tables of README.md: one each for the proof and speed, out of the records of the long ones."""

from scripts.make.tables.proof import claims_of, verdict
from scripts.make.tables.read import SPREAD, measured_on, parity_records, records, rows, spread
from scripts.make.tables.speed import DTYPES, forward_sections, headlines, heads_of, padding_note

ENGINES = ("OpenVINO", "CTranslate2", "bertlite native")


def proof() -> str:
    """Table of the claims of parity by dtype, over all checkpoints and versions of transformers."""
    files = parity_records("parity-[0-9]*.json")
    body = [
        [dtype, what, f"{sum(claim['tensors'] for claim in claims):,}", verdict(claims)]
        for (dtype, what), claims in claims_of(files).items()
    ]
    versions = dict.fromkeys(record["environment"]["versions"]["transformers"] for record in files)
    torches = dict.fromkeys(record["environment"]["versions"]["torch"] for record in files)
    checkpoints = dict.fromkeys(name for record in files for name in record["checkpoints"])
    return (
        f"{rows(['dtype', 'claim', 'tensors', 'hold'], body)}\n\n{' and '.join(checkpoints)}, beside transformers"
        f" {' and '.join(versions)}, torch {' and '.join(torches)}, on {files[0]['environment']['cpu']}."
    )


def speed() -> str:
    """Table of the speed of the optimised models and of their peers, on short batches, full ones and texts."""
    (record,) = records("speed.json")
    every = headlines(forward_sections(record))
    forward = {name: section for name, section in every.items() if "WikiText-2" not in name}
    base = "transformers sdpa float32"
    body = []
    for dtype in DTYPES:
        lines = []
        for engine in (f"{name} {dtype}" for name in ENGINES):
            pairs = [(section["ratios"], f"{base} / {engine}") for section in forward.values()]
            cells = [spread(ratios, pair) if pair in ratios else "" for ratios, pair in pairs]
            if any(cells):
                lines.append([engine, *cells])
        if any(line[0].startswith("bertlite") for line in lines):
            body += lines
    note = f"Times faster than {base}. {padding_note(forward)} {SPREAD}"
    return f"{rows(['', *heads_of(forward)], body)}\n\n{note} bert-base's shape, {measured_on(record)}."
