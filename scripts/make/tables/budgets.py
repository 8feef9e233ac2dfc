"""Tables of pruning to a budget."""

from typing import Any

from bertlite.timing import with_spread
from scripts.make.tables.read import measured_on, records, rows

COMPARISON = "pruning/budgets.json"
NAMES = {  # of the comparison: what a reader calls them
    "joint (prune to)": "`bertlite prune to`",
    "joint, with labels (prune to --label)": "`bertlite prune to --label`",
    "joint, chosen at once": "`prune to`, if all is chosen before anything is fitted",
    "joint, plain error": "`prune to`, if errors of all outputs count alike",
    "fisher for each MAC, refit": "Fisher information for each MAC, `repair`",
    "fisher for each MAC": "Fisher information for each MAC",
    "sublayer by sublayer, rescored (as K-prune)": "scored anew and fitted sublayer by sublayer, as K-prune does",
    "Kwon 2022, with mask tuning": "Kwon et al. 2022, with mask tuning",
}


def share_of(share: float) -> str:
    return f"{100 * share:g} % of the MACs"


def brief() -> str:
    """Table of the points that each way loses, over all models, at each share."""
    (record,) = records(COMPARISON)
    found = {(row["method"], row["share"]): row for row in record["rows"]}
    shares = sorted({share for _, share in found}, reverse=True)
    body = []
    for method in best_first(record):
        cells = (found.get((method, share)) for share in shares)
        body.append([NAMES.get(method, method), *(lost(each) if each else "" for each in cells)])
    return f"{rows(['points lost, nothing trained', *map(share_of, shares)], body)}\n\n{note(record)}"


def best_first(record: dict[str, Any]) -> list[str]:
    """Return the methods, from the least lost at the smallest share."""
    smallest = min(row["share"] for row in record["rows"])
    losses = {row["method"]: row["lost"] for row in record["rows"] if row["share"] == smallest}
    return sorted(losses, key=lambda method: losses[method])


def lost(row: dict[str, Any]) -> str:
    """Write a mean, half of its interval and the worst."""
    return f"{row['lost']:.1f} ±{(row['high'] - row['low']) / 2:.1f} (at worst {row['lost_at_worst']:.1f})"


def note(record: dict[str, Any]) -> str:
    """Say what was lost by what."""
    tasks = {run["task"]: run["metric"] for run in record["runs"]}
    models = {(run["task"], run["seed"]) for run in record["runs"]}
    metrics = [f"{name} ({metric})" for name, metric in tasks.items()]
    return (
        f"100 × the metric, dense less pruned; mean over {len(models)} fine-tuned MiniLMs of {len(tasks)} tasks, ±"
        f" half of a 95 % interval: {', '.join(metrics)}. {record['calibration']} texts; taylor, Kwon et al. and"
        " `--label` use their labels, the other ways do not."
    )


def by_task() -> str:
    """Table of the mean of each task before and after, at each share."""
    (record,) = records(COMPARISON)
    tasks = list(dict.fromkeys(run["task"] for run in record["runs"]))
    scores: dict[tuple[str, float, str], list[float]] = {}
    dense: dict[str, list[float]] = {task: [] for task in tasks}
    for run in record["runs"]:
        scores.setdefault((run["method"], run["share"], run["task"]), []).append(run["score"])
        dense[run["task"]].append(run["dense"])
    body = [["dense", "", *(mean(dense[task]) for task in tasks)]]
    shares = sorted({share for _, share, _ in scores}, reverse=True)
    for share in shares:
        for method in best_first(record):
            found = [scores.get((method, share, task)) for task in tasks]
            cells = [mean(each) if each else "" for each in found]
            if any(cells):
                body.append([NAMES.get(method, method), f"{100 * share:g} %", *cells])
    tuning = record["tuning"]
    return (
        f"{rows(['', 'MACs', *tasks], body)}\n\n100 × the metric, means over the models of a task, each fine-tuned on"
        f" {tuning['train_examples']:,} examples for {tuning['epochs']:g} epochs."
    )


def mean(values: list[float]) -> str:
    return f"{100 * sum(values) / len(values):.1f}"


def by_the_clock() -> str:
    """Table of targets by the clock: speed, and the score before and after distillation."""
    (record,), (compared,) = records("pruning/budget_clock.json"), records(COMPARISON)
    ((task, seed),) = {(run["task"], run["seed"]) for run in compared["runs"] if run["model"] == record["model"]}
    body = [
        [
            f"`prune to {row['target']}`",
            with_spread(row["speedup"]),
            f"{100 * row['macs']:.0f} %",
            f"{100 * row['pruned']:.1f}",
            f"{100 * row['distilled']:.1f}",
            f"{row['search_seconds']:.0f} s",
            f"{row['distil_seconds']:.0f} s",
        ]
        for row in record["rows"]
    ]
    head = ["", "speed", "MACs", record["metric"], "distilled", "time of pruning", "of distillation"]
    return (
        f"{rows(head, body)}\n\nThe MiniLM of {task} with seed {seed}, dense {100 * record['dense']:.1f}; speed at"
        f" {record['rows'][0]['work']}, median and quartiles; epochs of distillation: {record['epochs']:g}."
        f" {measured_on(record)}."
    )
