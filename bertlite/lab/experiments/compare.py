"""Results of many runs together: means with intervals, paired tests, tables."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bertlite.lab.experiments.cell import REPAIRS, Setting
from bertlite.lab.experiments.choose import LATER
from bertlite.lab.experiments.evaluate import TASKS, Task
from bertlite.lab.experiments.finetune import Recipe
from bertlite.lab.experiments.statistics import (
    Array,
    Interval,
    bootstrap,
    mcnemar,
    mean_interval,
    paired_bootstrap,
    wilson,
)
from bertlite.records import Record, commit_of

Way = tuple[tuple[str, Any], ...]  # a way of pruning: the fields of a cell but its seed, and of the setting
TRAINING = ("distil", "lr", "batch_size", "warmup", "weight_decay", "clip")  # fields of a recipe that cells share


def way_of(run: Record, **changes: Any) -> Way:
    """Return the way in which a run pruned and, if it retrained, trained, with some fields changed."""
    setting = run.config["setting"]
    way = {**run.config["cell"], "calibration": setting["calibration"], **changes}
    del way["seed"]
    if way["epochs"]:
        way |= {"train_examples": setting["retrain"], **{name: setting["recipe"][name] for name in TRAINING}}
    return tuple(sorted(way.items()))


def group_by_way(runs: Iterable[Record]) -> dict[Way, list[Record]]:
    """Group runs by their way of pruning; those of a group differ in the seed or in the dense model."""
    found: dict[Way, list[Record]] = defaultdict(list)
    for run in runs:
        found[way_of(run)].append(run)
    return dict(found)


def summarise(runs: Sequence[Record], against: str | None = None) -> list[dict[str, Any]]:
    """Return one row for each way of pruning, in a fixed order.

    Args:
        against: a criterion; every other row is then compared with the runs that differ in the criterion alone.

    Returns:
        Rows with the fields of a `Cell` but its seed, "calibration" (examples), the fields of training where the runs
        retrained, "runs", their "seeds" and "values" of the headline, the mean of every metric, "low" and "high" of
        the headline's interval, and "over", the sample of the interval: "runs" (Student's t) where there are several
        and else "examples" (Wilson's for an accuracy, the bootstrap's for others).  With `against` also "difference",
        "difference_low", "difference_high" and "p" (paired bootstrap over examples), and "mcnemar" where both sides
        are one run of a classifier.

    Raises:
        ValueError: there are no runs, they have several tasks or data sets, or no run has the criterion.
    """
    task = task_of(runs)
    groups = group_by_way(runs)
    if against is not None and not any(dict(way)["criterion"] == against for way in groups):
        have = sorted({dict(way)["criterion"] for way in groups})
        raise ValueError(f"no run has the criterion {against!r}; have: {', '.join(have)}")
    rows = []
    for way, group in sorted(groups.items(), key=lambda item: sort_key(item[0])):
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
    """Return the task of all the runs.

    Raises:
        ValueError: there are no runs, or they have several tasks or evaluation data.
    """
    if not runs:
        raise ValueError("there are no finished runs to compare")
    for what, values in (
        ("tasks", {run.config["setting"]["task"] for run in runs}),
        ("evaluation data", {run.facts["data"]["dev"] for run in runs}),
    ):
        if len(values) > 1:
            raise ValueError(f"the runs have {len(values)} {what}; compare those of one")
    return TASKS[runs[0].config["setting"]["task"]]


def sort_key(way: Way) -> tuple[Any, ...]:
    """Return the place of a way of pruning among the rows of a table."""
    cell = {**LATER, **dict(way), "repair": REPAIRS.index(dict(way)["repair"])}
    names = (
        *("epochs", "repair", "calibration", "steps", "uniform", "at_least", "criterion", "neurons", "fraction"),
        *("allocate", "neuron_criterion", "rearrange", "gate_steps"),
    )
    return tuple(cell[name] for name in names)


def outputs(run: Record) -> Array:
    """Return the outputs of a run's model, (examples, classes) or (examples, 1)."""
    return np.array([line["outputs"] for line in run.predictions])


def labels(run: Record) -> Array:
    """Return the labels of the examples that a run was evaluated on, (examples,)."""
    return np.array([line["label"] for line in run.predictions])


def interval_of(group: Sequence[Record], task: Task) -> tuple[Interval, str]:
    """Return the interval of the headline, and its sample: "runs" or "examples"."""
    if len(group) > 1:
        return mean_interval([run.results[task.headline] for run in group]), "runs"
    found, truth = outputs(group[0]), labels(group[0])
    if task.headline == "accuracy":
        return wilson(int(np.sum(found.argmax(1) == truth)), len(truth)), "examples"
    return bootstrap(task.metrics[task.headline], found, truth), "examples"


def comparison(group: Sequence[Record], other: Sequence[Record], task: Task) -> dict[str, Any]:
    """Return how much better the runs of a group are than others on the same examples, with tests."""
    a, b = ([outputs(run) for run in runs] for runs in (group, other))
    truth = labels(group[0])
    found = paired_bootstrap(task.metrics[task.headline], a, b, truth)
    result = {
        "difference": found.difference,
        "difference_low": found.low,
        "difference_high": found.high,
        "p": found.p,
    }
    if len(a) == len(b) == 1 and task.headline == "accuracy":
        result["mcnemar"] = mcnemar(a[0].argmax(1) == truth, b[0].argmax(1) == truth)
    return result


def markdown_table(rows: Sequence[dict[str, Any]], headline: str) -> str:
    """Write 100 x the headline as Markdown: a line for each way of pruning, a column for each share removed."""
    fractions = sorted({row["fraction"] for row in rows})
    lines: dict[tuple[str, ...], dict[float, str]] = defaultdict(dict)
    for row in rows:
        text = f"{100 * row[headline]:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
        lines[describe_way(row)][row["fraction"]] = text + (f" ({row['runs']})" if row["runs"] > 1 else "")
    head = ["criterion", "neurons", "repair", "epochs", *(f"{100 * fraction:g} %" for fraction in fractions)]
    body = [[*way, *(cells.get(fraction, "") for fraction in fractions)] for way, cells in lines.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body))


def describe_way(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return criterion with its schedule, neurons, repair and epochs as a table shows them; defaults are left out."""
    name = row["criterion"] + (" uniform" if row["uniform"] else "")
    name += f" and {row['neuron_criterion']}" if row.get("neuron_criterion") else ""
    name += f" of {row['gate_steps']} steps" if row.get("gate_steps") else ""
    name += f", by {row['allocate']}" if row.get("allocate") else ""
    name += ", rearranged" if row.get("rearrange") else ""
    name += f", {row['at_least']} a layer or more" if row["at_least"] else ""
    name += f", in {row['steps']} steps" if row["steps"] > 1 else ""
    name += f", {row['calibration']} examples" if row["calibration"] != Setting.calibration else ""
    neurons = f"-{100 * row['neurons']:g} %" if row["neurons"] else ""
    return (
        name,
        neurons,
        "" if row["repair"] == "none" else row["repair"],
        describe_training(row),
    )


def describe_training(row: dict[str, Any]) -> str:
    """Return the epochs of retraining, and what differs from the default recipe: "3, distil 0.5, 1000 examples"."""
    if not row["epochs"]:
        return ""
    other = [
        f"{name} {row[name]:g}" for name in TRAINING if row.get(name, getattr(Recipe, name)) != getattr(Recipe, name)
    ]
    other += [f"{row['train_examples']} examples"] if row.get("train_examples") else []
    return ", ".join([f"{row['epochs']:g}", *other])


def dense_result(runs: Sequence[Record]) -> dict[str, float]:
    """Return the metrics of the dense model; where the runs began with several, their mean."""
    by_model = {run.facts["model"]["dense"]: run.results["dense"] for run in runs}
    return {name: float(np.mean([found[name] for found in by_model.values()])) for name in runs[0].results["dense"]}


def provenance(runs: Sequence[Record]) -> dict[str, Any]:
    """Return the "environment" of the first run, with the commit of all of them, for a record made from these runs.

    The tree counts as dirty if it was for any of the runs.  Where the runs were made from several commits, "commits"
    lists them, and the environment names the last.
    """
    states = [commit_of(run.facts) for run in sorted(runs, key=lambda run: run.facts["started"])]
    known = [state for state in states if state is not None]
    commits = list(dict.fromkeys(state["commit"] for state in known))
    state = None
    if len(known) == len(states):
        state = {"commit": commits[-1], "dirty": any(each["dirty"] for each in known)}
    found: dict[str, Any] = {"environment": {**runs[0].facts["environment"], "git": state}}
    return found | ({"commits": commits} if len(commits) > 1 else {})
