"""Tables of pruning experiments."""

from typing import Any

from bertlite.experiments.compare import describe_way
from scripts.make.tables.read import records, rows


def pruning(name: str) -> str:
    """Table with a line for each way of pruning and a column for each share of heads removed.

    Neurons, epochs and what training differs in, such as distillation, have columns where a row has any.
    """
    (record,) = records(f"pruning/{name}.json")
    fractions = sorted({row["fraction"] for row in record["rows"]})
    lines: dict[tuple[str, ...], dict[float, str]] = {}
    for row in record["rows"]:
        lines.setdefault(describe_way(row), {})[row["fraction"]] = within(row, record["headline"])
    names = ("criterion", "neurons", "repair", "epochs")
    used = [i for i, what in enumerate(names) if what in ("criterion", "repair") or any(way[i] for way in lines)]
    body = [
        [*(way[i] for i in used), *(found.get(fraction, "") for fraction in fractions)] for way, found in lines.items()
    ]
    table = rows([*(names[i] for i in used), *(f"{100 * fraction:g} %" for fraction in fractions)], body)
    return f"{table}\n\n{intervals_of(record)}"


def within(row: dict[str, Any], headline: str) -> str:
    """Write a mean and half the width of its interval, in percent."""
    figure = f"{100 * row[headline]:.1f}"
    return figure if row["low"] is None else f"{figure} ±{50 * (row['high'] - row['low']):.1f}"


def intervals_of(record: dict[str, Any]) -> str:
    """Write the metric, the dense model's result and the kind of interval."""
    found = {row["over"]: row for row in record["rows"]}
    over = [f"over {kind}" for kind in ("models and examples", "seeds and examples") if kind in found]
    if "runs" in found:  # of older records: Student's t over the seeds alone
        counts = sorted({row["runs"] for row in record["rows"] if row["over"] == "runs"})
        over.append(f"over {' or '.join(map(str, counts))} seeds")
    over += ["over the examples where there is one run"] if "examples" in found else []
    return (
        f"100 × {record['headline']}, dense {100 * record['dense'][record['headline']]:.1f};"
        f" {record['setting']['calibration']} calibration examples where nothing else is said;"
        f" ± is half of a 95 % interval, {', '.join(over)}."
    )


def subnetworks() -> str:
    """Table of the best, random and worst masks, before and after retraining."""
    (record,) = records("pruning/subnetworks.json")
    names = {"michel": "the highest scores", "random": "drawn at random", "michel/inverted": "the lowest scores"}
    found = {(row["criterion"], row["epochs"]): within(row, record["headline"]) for row in record["rows"]}
    epochs = sorted({row["epochs"] for row in record["rows"]})
    body = [[what, *(found[name, count] for count in epochs)] for name, what in names.items()]
    head = ["heads kept", *("not retrained" if not count else f"retrained, {count:g} epoch" for count in epochs)]
    share = 100 * record["rows"][0]["fraction"]
    return f"{rows(head, body)}\n\n{share:g} % of the heads removed. {intervals_of(record)}"


def beside_textpruner() -> str:
    """Table of accuracy beside TextPruner."""
    (record,) = records("pruning/textpruner.json")
    fractions = sorted({row["fraction"] for row in record["rows"]})
    found = {(row["system"], row["fraction"]): within(row, "accuracy") for row in record["rows"]}
    systems = dict.fromkeys(row["system"] for row in record["rows"])
    body = [[system, *(found[system, fraction] for fraction in fractions)] for system in systems]
    table = rows(["", *(f"{100 * fraction:.0f} %" for fraction in fractions)], body)
    version = record["environment"]["versions"]["transformers"]
    seeds = len(record["rows"][0]["values"])
    return (
        f"{table}\n\n100 × accuracy, dense {100 * record['dense']:.1f}, {record['calibration']} calibration"
        f" examples, ± half of a 95 % interval over {seeds} samples of them. TextPruner {record['textpruner']},"
        f" transformers {version}."
    )
