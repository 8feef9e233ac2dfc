"""What a reader sees first: a figure each of speed, pruning and proof, and what `bertlite prune to` prints."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from bertlite.experiments.budget.report import print_report
from scripts.make.tables.proof import claims_of, parity_records, verdict
from scripts.make.tables.pruning import give
from scripts.make.tables.read import cell, record, records, table
from scripts.make.tables.speed import BASE, forward_sections
from scripts.measure.budgets.methods import OURS

WAYS = {  # of the landing page, each with its next step
    "speed": ("Use it", "[install and load a checkpoint](quickstart.md)"),
    "pruning": ("Prune it", "[prune a model to your own data](own_data.md), in two minutes"),
    "proof": ("Learn from it", "[read the notebooks](notebooks.md), or how [the proof](proof.md) is made"),
}


def figures() -> str:
    """Return a line each of speed, pruning and proof."""
    return "\n".join(f"- **{what}**: {figure}" for what, figure in found().items())


def ways() -> str:
    """Table of the ways into the documentation, each with a figure and the next step."""
    in_words = found()
    return table(["", "", "next"], [[f"**{way}**", in_words[of], step] for of, (way, step) in WAYS.items()])


def found() -> dict[str, str]:
    """Return a figure each of speed, pruning and proof, in words."""
    speed, budgets = record("speed"), record("pruning/budgets")
    texts = next(each for each in forward_sections(speed).values() if each["padding"] == "longest")
    quick, most = (cell(texts["ratios"], f"{BASE} / bertlite native {dtype}") for dtype in ("float32", "int8"))
    (half,) = [row for row in budgets["rows"] if (row["way"], row["share"], row["stage"]) == (OURS, 0.5, "pruned")]
    claims = [claim for each in claims_of(parity_records("parity-[0-9]*.json")).values() for claim in each]
    return {
        "speed": f"{quick} times as fast as transformers in float32, {most} in int8: bert-base, texts padded to the"
        f" longest of their batch, {speed['environment']['threads']} threads of a CPU",
        "pruning": "removing half of a MiniLM's multiplications, without training, costs"
        f" {give(half, 'lost')} points (mean of {half['tasks']} tasks)",
        "proof": f"{sum(claim['tensors'] for claim in claims):,} tensors compared with transformers;"
        f" {verdict(claims)} {'are' if verdict(claims) == 'all' else 'to be'} within the stated bound",
    }


def session() -> str:
    """Return the lines that count of what `bertlite prune to` printed for its first record, and how long it took."""
    found = records("pruning/prune_to.json")[0]
    report = found.get("targets", [found])[0]
    with redirect_stdout(StringIO()) as printed:
        known = {"every_token": None, "lost": {"points": 0.0, "limit": 0.0}}  # which the oldest records lack
        print_report({**known, **report}, Path("fast"))
    shown = ("MACs", "weights", "time", report["metric"], "target")
    lines = [line for line in printed.getvalue().splitlines() if line.startswith(shown)]
    took = f"after {report['wall_seconds']:.0f} s, on {report['environment']['threads']} threads"
    return "\n".join(["```", *lines, took, "```"])
