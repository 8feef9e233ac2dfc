"""The first figures that a reader sees, and the output of `bertlite prune to`."""

from contextlib import redirect_stdout
from io import StringIO
from math import floor
from pathlib import Path

from bertlite.experiments.budget.report import print_report
from bertlite.experiments.budget.texts import HELD_OUT, TEXTS_TO_FIT
from bertlite.experiments.compare import show_loss
from scripts.make.tables.proof import FINITE, claims_of, parity_records, verdict
from scripts.make.tables.pruning import by_encoder, give, models_of
from scripts.make.tables.read import cell, cpus, measured_on, record, records, table
from scripts.make.tables.speed import BASE, forward_sections
from scripts.measure.budgets.encoders import JUDGED, MEAN
from scripts.measure.budgets.methods import OURS
from scripts.measure.native_accuracy import FITTED, SIMILARITY

WAYS = {  # of the landing page, each with its next step
    "speed": ("Use it", "[install](quickstart.md), then [optimise your model](clients.md)"),
    "pruning": ("Prune it", "[prune a model to your own data](own_data.md)"),
    "proof": ("Learn from it", "[read the notebooks](notebooks.md), or see how [the proof](proof.md) is made"),
}


def figures() -> str:
    """Return a line each of speed, int8, pruning and proof."""
    return "\n".join(f"- **{what}**: {figure}" for what, figure in found().items())


def picture() -> str:
    """Return the picture of speed, with its bars in words for those who cannot see it."""
    found = record("speed")
    texts = next(each for each in forward_sections(found).values() if each["padding"] == "longest")
    dtypes, speeds = ("float32", "bfloat16", "int8"), []
    for engine in ("bertlite native", "OpenVINO"):
        medians = (texts["ratios"][f"{BASE} / {engine} {dtype}"]["median"] for dtype in dtypes)
        speeds.append(f"{engine.split()[0]} {', '.join(f'{x:.1f}' for x in medians)}")
    text = f"bert-base on a CPU, times faster than transformers in {', '.join(dtypes)}: {'; '.join(speeds)}"
    note = f"Batches of 32 sentences (SST-2), compared with float32 in transformers; {measured_on(found)}."
    return f'<img src="scripts/results/speed.png" width="400" alt="{text}">\n\n{note}'


def ways() -> str:
    """Table of the ways into the documentation, each with a figure and the next step."""
    in_words = found()
    return table(["", "", "next"], [[f"**{way}**", in_words[of], step] for of, (way, step) in WAYS.items()])


def found() -> dict[str, str]:
    """Return a figure each of speed, int8, pruning and proof, in words."""
    speed, draws = record("speed"), record("pruning/draws")
    texts = next(each for each in forward_sections(speed).values() if each["padding"] == "longest")
    quick, most = (cell(texts["ratios"], f"{BASE} / bertlite native {dtype}") for dtype in ("float32", "int8"))
    (half,) = [row for row in draws["rows"] if (row["way"], row["share"], row["stage"]) == (OURS, 0.5, "pruned")]
    proved = claims_of(parity_records("parity-[0-9]*.json"))
    claims = [claim for (_, what), each in proved.items() if what != FINITE for claim in each]
    mean = give(half, "lost")
    return {
        "speed": f"on a CPU, bert-base runs {quick} times as fast as in transformers in float32, {most} in int8 (texts"
        f" padded to the longest of their batch, {cpus([speed])}, {speed['environment']['threads']} threads)",
        "int8": int8_loss(),
        "pruning": "without half of its multiplications, and without training, a fine-tuned MiniLM"
        f" {mean if mean.startswith('gains') else f'loses {mean}'} points (mean of {half['tasks']} tasks,"
        f" {models_of(draws)}); of sentence encoders {encoders_loss()}",
        "proof": f"{sum(claim['tensors'] for claim in claims):,} tensors compared with transformers;"
        f" {verdict(claims)} {'are' if verdict(claims) == 'all' else 'to be'} within the stated bound",
    }


def encoders_loss() -> str:
    """Return how much sentence encoders lose without half of the multiplications, in words."""
    ends = ("difference", "difference_low", "difference_high")

    def losses(way: str) -> str:
        rows = [(name, row) for (name, *_), row, _ in by_encoder() if (row["way"], row["target"]) == (way, "50%")]
        found = [(name, row["scores"][MEAN]) for name, row in rows]
        return ", ".join(f"{name} {show_loss(*(each[end] for end in ends))}" for name, each in found)

    others = record("pruning/pareto")["texts"] - HELD_OUT - TEXTS_TO_FIT
    return (
        f"{losses('mapped')} with a map fitted to {others:,} more texts; {losses('plain')} without one"
        f" ({len(JUDGED)} tasks of short texts)"
    )


def int8_loss() -> str:
    """Return how much int8 costs fine-tuned models, in words."""
    results = {name: each for name, each in record("native_accuracy")["results"].items() if name != SIMILARITY}
    most = max(0.0, *(-each["native"]["int8"]["difference"] for each in results.values()))
    alike = min(each["native"]["int8"]["same"] for each in results.values() if each["metric"] != "spearman")
    encoders = record("neighbours")["results"].values()
    kept = min(each["kept"][FITTED]["ten nearest neighbours"] for each in encoders)
    return (
        f"fine-tuned MiniLMs of {len(results)} tasks ({', '.join(results)}) lose {most:.2f} points at most, and keep"
        f" {floor(1000 * alike) / 10} % of labels; packed encoders {100 * kept:.1f} % of neighbours"
    )


def session() -> str:
    """Return the lines that count of what `bertlite prune to` printed for its first record, and how long it took."""
    found = records("pruning/prune_to.json")[0]
    report = found.get("targets", [found])[0]
    with redirect_stdout(StringIO()) as printed:
        known = {  # which the oldest records lack
            "every_token": None,
            "alone": None,
            "without_map": {},
            "lost": {"points": 0.0, "limit": 0.0},
        }
        print_report({**known, **report}, Path("fast"))
    shown = ("MACs", "weights", "time", report["metric"], "target")
    lines = [line for line in printed.getvalue().splitlines() if line.startswith(shown)]
    took = f"after {report['wall_seconds']:.0f} s, on {report['environment']['threads']} threads"
    return "\n".join(["```", *lines, took, "```"])
