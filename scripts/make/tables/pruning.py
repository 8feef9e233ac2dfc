"""Tables of pruning: shares of heads removed, and budgets."""

from typing import Any

from bertlite.criteria import CRITERIA
from bertlite.experiments.compare import describe_way
from bertlite.experiments.experiment import REPAIRS
from bertlite.timing import with_spread
from scripts.make.tables.read import Record, measured_on, record, table

NAMES = {  # of the comparison of budgets: what a reader calls them
    "joint (prune to)": "`bertlite prune to`",
    "joint, with labels (prune to --label)": "`bertlite prune to --label`",
    "joint, chosen at once": "`prune to`, if all is chosen before anything is fitted",
    "fisher for each MAC, refit": "Fisher information for each MAC, `repair`",
    "sublayer by sublayer, rescored (as K-prune)": "scored anew and fitted sublayer by sublayer, as K-prune does",
    "Kwon 2022, with mask tuning": "Kwon et al. 2022, with mask tuning",
}


def pruning(name: str) -> str:
    """Table with a line for each way of pruning and a column for each share of heads removed.

    Epochs and what training differs in, such as distillation, have a column where a row has any.
    """
    found = record(f"pruning/{name}")
    fractions = sorted({row["fraction"] for row in found["rows"]})
    lines: dict[tuple[str, ...], dict[float, str]] = {}
    for row in found["rows"]:
        if row["repair"] in REPAIRS and row["criterion"].split("/")[0] in CRITERIA:  # others are gone
            lines.setdefault(describe_way(row), {})[row["fraction"]] = within(row, found["headline"])
    names = ("criterion", "repair", "epochs")
    used = [i for i, what in enumerate(names) if what in ("criterion", "repair") or any(way[i] for way in lines)]
    body = [
        [*(way[i] for i in used), *(cells.get(fraction, "") for fraction in fractions)] for way, cells in lines.items()
    ]
    return table([*(names[i] for i in used), *(f"{100 * each:g} %" for each in fractions)], body, intervals_of(found))


def within(row: dict[str, Any], headline: str) -> str:
    """Write a mean and half the width of its interval, in percent."""
    figure = f"{100 * row[headline]:.1f}"
    return figure if row["low"] is None else f"{figure} ±{50 * (row['high'] - row['low']):.1f}"


def intervals_of(record: Record) -> str:
    """Write the metric, the dense model's result and the kind of interval."""
    kinds = {row["over"] for row in record["rows"]}
    over = [f"over {kind}" for kind in ("models and examples", "seeds and examples") if kind in kinds]
    over += ["over the examples where there is one run"] if "examples" in kinds else []
    return (
        f"100 × {record['headline']}, dense {100 * record['dense'][record['headline']]:.1f};"
        f" {record['setting']['calibration']} calibration examples where nothing else is said;"
        f" ± is half of a 95 % interval, {', '.join(over)}."
    )


def subnetworks() -> str:
    """Table of the best, random and worst masks, before and after retraining."""
    found = record("pruning/subnetworks")
    names = {"michel": "the highest scores", "random": "drawn at random", "michel/inverted": "the lowest scores"}
    cells = {(row["criterion"], row["epochs"]): within(row, found["headline"]) for row in found["rows"]}
    epochs = sorted({row["epochs"] for row in found["rows"]})
    body = [[what, *(cells[name, count] for count in epochs)] for name, what in names.items()]
    head = ["heads kept", *("not retrained" if not count else f"retrained, {count:g} epoch" for count in epochs)]
    share = 100 * found["rows"][0]["fraction"]
    return table(head, body, f"{share:g} % of the heads removed. {intervals_of(found)}")


def beside_textpruner() -> str:
    """Table of accuracy beside TextPruner."""
    found = record("pruning/textpruner")
    fractions = sorted({row["fraction"] for row in found["rows"]})
    cells = {(row["system"], row["fraction"]): within(row, "accuracy") for row in found["rows"]}
    systems = dict.fromkeys(row["system"] for row in found["rows"])
    return table(
        ["", *(f"{100 * fraction:.0f} %" for fraction in fractions)],
        [[system, *(cells[system, fraction] for fraction in fractions)] for system in systems],
        f"100 × accuracy, dense {100 * found['dense']:.1f}, {found['calibration']} calibration examples, ± half of a"
        f" 95 % interval over {len(found['rows'][0]['values'])} samples of them. TextPruner {found['textpruner']},"
        f" transformers {found['environment']['versions']['transformers']}.",
    )


# Budgets -------------------------------------------------------------------------------------------------------------


def budgets_brief() -> str:
    """Table of the points that each way loses, over all models, at each share."""
    found = record("pruning/budgets")
    cells = {(row["method"], row["share"]): lost(row) for row in found["rows"]}
    shares = sorted({share for _, share in cells}, reverse=True)
    body = [
        [NAMES.get(method, method), *(cells.get((method, share), "") for share in shares)]
        for method in best_first(found)
    ]
    tasks = {run["task"]: run["metric"] for run in found["runs"]}
    models = {(run["task"], run["seed"]) for run in found["runs"]}
    metrics = ", ".join(f"{name} ({metric})" for name, metric in tasks.items())
    return table(
        ["points lost, nothing trained", *(f"{100 * share:g} % of the MACs" for share in shares)],
        body,
        f"100 × the metric, dense less pruned; mean over {len(models)} fine-tuned MiniLMs of {len(tasks)} tasks, ±"
        f" half of a 95 % interval: {metrics}. {found['calibration']} texts; taylor, Kwon et al. and `--label` use"
        " their labels, the other ways do not.",
    )


def best_first(record: Record) -> list[str]:
    """Return the methods, from the least lost at the smallest share."""
    smallest = min(row["share"] for row in record["rows"])
    losses = {row["method"]: row["lost"] for row in record["rows"] if row["share"] == smallest}
    return sorted(losses, key=lambda method: losses[method])


def lost(row: dict[str, Any]) -> str:
    """Write a mean, half of its interval and the worst."""
    return f"{row['lost']:.1f} ±{(row['high'] - row['low']) / 2:.1f} (at worst {row['lost_at_worst']:.1f})"


def budgets() -> str:
    """Table of the mean of each task before and after, at each share."""
    found = record("pruning/budgets")
    tasks = list(dict.fromkeys(run["task"] for run in found["runs"]))
    scores: dict[tuple[str, float, str], list[float]] = {}
    dense: dict[str, list[float]] = {task: [] for task in tasks}
    for run in found["runs"]:
        scores.setdefault((run["method"], run["share"], run["task"]), []).append(run["score"])
        dense[run["task"]].append(run["dense"])
    body = [["dense", "", *(mean(dense[task]) for task in tasks)]]
    for share in sorted({share for _, share, _ in scores}, reverse=True):
        for method in best_first(found):
            cells = [mean(scores.get((method, share, task), [])) for task in tasks]
            if any(cells):
                body.append([NAMES.get(method, method), f"{100 * share:g} %", *cells])
    tuning = found["tuning"]
    note = f"fine-tuned on {tuning['train_examples']:,} examples for {tuning['epochs']:g} epochs."
    return table(["", "MACs", *tasks], body, f"100 × the metric, means over the models of a task, each {note}")


def mean(values: list[float]) -> str:
    return f"{100 * sum(values) / len(values):.1f}" if values else ""


def budget_clock() -> str:
    """Table of targets by the clock: speed, and the score before and after distillation."""
    found, compared = record("pruning/budget_clock"), record("pruning/budgets")
    ((task, seed),) = {(run["task"], run["seed"]) for run in compared["runs"] if run["model"] == found["model"]}
    body = [
        [
            f"`prune to {row['target']}`",
            with_spread(row["speedup"]),
            f"{100 * row['macs']:.0f} %",
            *(f"{100 * row[name]:.1f}" for name in ("pruned", "distilled")),
            *(f"{row[name]:.0f} s" for name in ("search_seconds", "distil_seconds")),
        ]
        for row in found["rows"]
    ]
    return table(
        ["", "speed", "MACs", found["metric"], "distilled", "time of pruning", "of distillation"],
        body,
        f"The MiniLM of {task} with seed {seed}, dense {100 * found['dense']:.1f}; speed at"
        f" {found['rows'][0]['work']}, median and quartiles; epochs of distillation: {found['epochs']:g}."
        f" {measured_on(found)}.",
    )


def vocabulary() -> str:
    """Table of vocabularies pruned to training texts, and what is lost on others."""
    found = record("pruning/vocabulary")
    metric = found["metric"]
    body = [
        [
            row["task"],
            f"{row['tokens']:,} of {row['dense_tokens']:,}",
            f"{row['bytes'] / 1e6:.0f} of {row['dense_bytes'] / 1e6:.0f} MB",
            f"{100 * row['changed']:.0f} %",
            *(f"{100 * value:.1f}" for value in (row["dense"], row["pruned"][metric], row["factorised"][metric])),
        ]
        for row in found["rows"]
    ]
    names = ["", "tokens", "file", "other texts that change", f"{metric}, all tokens", "these", "factorised instead"]
    note = "MiniLM fine-tuned on each task; the tokens are those of its training texts, or more; judged on others."
    return table(names, body, note)
