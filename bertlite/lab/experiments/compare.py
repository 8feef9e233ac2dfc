"""What many runs say together: means with intervals, paired tests, tables."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bertlite.lab.experiments.cell import REPAIRS, Setting
from bertlite.lab.experiments.evaluate import TASKS, Task
from bertlite.lab.experiments.statistics import (
    Array,
    Interval,
    bootstrap,
    mcnemar,
    mean_interval,
    paired_bootstrap,
    wilson,
)
from bertlite.records import Record

Way = tuple[tuple[str, Any], ...]  # all of a cell but its seed, and on how many examples it was calibrated


def way_of(run: Record, **changes: Any) -> Way:
    cell = {**run.config["cell"], "calibration": run.config["setting"]["calibration"], **changes}
    del cell["seed"]
    return tuple(sorted(cell.items()))


def grouped(runs: Iterable[Record]) -> dict[Way, list[Record]]:
    """The runs by what they did; those of a group differ in their seeds, or in the model they began with."""
    found: dict[Way, list[Record]] = defaultdict(list)
    for run in runs:
        found[way_of(run)].append(run)
    return dict(found)


def summarise(runs: Sequence[Record], against: str | None = None) -> list[dict[str, Any]]:
    """One row for each way of pruning, in a fixed order.

    Args:
        against: a criterion; every other row is then compared with the runs that differ from its own in that alone.

    Returns:
        Rows with the fields of a `Cell` but its seed, "calibration" (examples), "runs", their "seeds" and "values" of
        the headline, the mean of every metric, "low" and "high" of the headline, and "over": what the interval is
        over, "runs" (Student's t) where there are several and else "examples" (Wilson's for an accuracy, the
        bootstrap's for others).  With `against` also "difference", "difference_low", "difference_high" and "p" (paired
        bootstrap over examples), and "mcnemar" where both sides are one run of a classifier.

    Raises:
        ValueError: there are no runs, they are of several tasks or data, or no run has the criterion.
    """
    task = task_of(runs)
    groups = grouped(runs)
    if against is not None and not any(dict(way)["criterion"] == against for way in groups):
        have = sorted({dict(way)["criterion"] for way in groups})
        raise ValueError(f"no run has the criterion {against!r}; have: {', '.join(have)}")
    rows = []
    for way, group in sorted(groups.items(), key=lambda item: order_of(item[0])):
        interval, over = interval_of(group, task)
        row = {
            **dict(way),
            "runs": len(group),
            "seeds": [run.config["cell"]["seed"] for run in group],
            "values": [run.results[task.headline] for run in group],
            **{name: float(np.mean([run.results[name] for run in group])) for name in (*task.metrics, "kl")},
            "low": interval.low,
            "high": interval.high,
            "over": over,
            "macs": float(np.mean([run.results["macs"] for run in group])),
            "heads_kept": np.mean([run.results["heads_kept"] for run in group], axis=0).tolist(),
        }
        other = groups.get(way_of(group[0], criterion=against)) if against is not None else None
        if other is not None and other is not group:
            row |= comparison(group, other, task)
        rows.append(row)
    return rows


def task_of(runs: Sequence[Record]) -> Task:
    if not runs:
        raise ValueError("there are no finished runs to compare")
    for what, values in (
        ("tasks", {run.config["setting"]["task"] for run in runs}),
        ("evaluation data", {run.facts["data"]["dev"] for run in runs}),
    ):
        if len(values) > 1:
            raise ValueError(f"the runs have {len(values)} {what}; compare those of one")
    return TASKS[runs[0].config["setting"]["task"]]


def order_of(way: Way) -> tuple[Any, ...]:
    cell = {**dict(way), "repair": REPAIRS.index(dict(way)["repair"])}
    names = ("epochs", "repair", "calibration", "steps", "uniform", "at_least", "criterion", "neurons", "fraction")
    return tuple(cell[name] for name in names)


def outputs(run: Record) -> Array:
    return np.array([line["outputs"] for line in run.predictions])


def labels(run: Record) -> Array:
    return np.array([line["label"] for line in run.predictions])


def interval_of(group: Sequence[Record], task: Task) -> tuple[Interval, str]:
    if len(group) > 1:
        return mean_interval([run.results[task.headline] for run in group]), "runs"
    found, wanted = outputs(group[0]), labels(group[0])
    if task.headline == "accuracy":
        return wilson(int(np.sum(found.argmax(1) == wanted)), len(wanted)), "examples"
    return bootstrap(task.metrics[task.headline], found, wanted), "examples"


def comparison(group: Sequence[Record], other: Sequence[Record], task: Task) -> dict[str, Any]:
    a, b = ([outputs(run) for run in runs] for runs in (group, other))
    wanted = labels(group[0])
    found = paired_bootstrap(task.metrics[task.headline], a, b, wanted)
    said = {
        "difference": found.difference,
        "difference_low": found.low,
        "difference_high": found.high,
        "p": found.p,
    }
    if len(a) == len(b) == 1 and task.headline == "accuracy":
        said["mcnemar"] = mcnemar(a[0].argmax(1) == wanted, b[0].argmax(1) == wanted)
    return said


def table(rows: Sequence[dict[str, Any]], headline: str) -> str:
    """Markdown: a line for each way of pruning, a column for each share of heads removed; 100 x the headline."""
    fractions = sorted({row["fraction"] for row in rows})
    lines: dict[tuple[str, ...], dict[float, str]] = defaultdict(dict)
    for row in rows:
        text = f"{100 * row[headline]:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
        lines[way_named(row)][row["fraction"]] = text + (f" ({row['runs']})" if row["runs"] > 1 else "")
    head = ["criterion", "neurons", "repair", "epochs", *(f"{100 * fraction:g} %" for fraction in fractions)]
    body = [[*way, *(cells.get(fraction, "") for fraction in fractions)] for way, cells in lines.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body))


def way_named(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Criterion with its schedule, neurons, repair, epochs: as a table says them; what is usual goes unsaid."""
    name = row["criterion"] + (" uniform" if row["uniform"] else "")
    name += f", {row['at_least']} a layer or more" if row["at_least"] else ""
    name += f", in {row['steps']} steps" if row["steps"] > 1 else ""
    name += f", {row['calibration']} examples" if row["calibration"] != Setting.calibration else ""
    neurons = f"-{100 * row['neurons']:g} %" if row["neurons"] else ""
    return (
        name,
        neurons,
        "" if row["repair"] == "none" else row["repair"],
        f"{row['epochs']:g}" if row["epochs"] else "",
    )


def dense_result(runs: Sequence[Record]) -> dict[str, float]:
    """The metrics of the dense model; where the runs began with several, their mean."""
    by_model = {run.facts["model"]["dense"]: run.results["dense"] for run in runs}
    return {name: float(np.mean([found[name] for found in by_model.values()])) for name in runs[0].results["dense"]}
