"""Tables of pruning: shares of heads removed, and budgets."""

from collections import Counter
from typing import Any

from bertlite.experiments.compare import describe_way, show_interval
from bertlite.experiments.experiment import REPAIRS
from bertlite.pruning.criteria import CRITERIA
from scripts.make.tables.read import Record, measured_on, record, records, table, with_spread

OURS = "prune to"
NAMES = {OURS: "`bertlite prune to`"}  # of the comparison of budgets: what a reader calls them
STAGES = {"pruned": "", "distilled": ", distilled", "timed": ", in equal time"}
SCORES = {"pruned": "score", "distilled": "distilled", "timed": "timed"}  # of a run
BRIEF = [*((share, "pruned") for share in (0.5, 0.3, 0.2)), *((share, "distilled") for share in (0.3, 0.2))]


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
    """Write the metric, the dense model's result and what intervals are over."""
    (over,) = {row["over"] for row in record["rows"]}
    return (
        f"100 × {record['headline']}, dense {100 * record['dense'][record['headline']]:.1f};"
        f" {record['setting']['calibration']} calibration examples where nothing else is said;"
        f" ± is half of a 95 % interval, over {over}."
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


# Budgets -------------------------------------------------------------------------------------------------------------


def budgets_brief() -> str:
    """Table of the points that each way loses at each share, before and after distillation."""
    found = over_most_tasks(record("pruning/budgets"))
    rows = {(row["way"], row["share"], row["stage"]): row for row in found["rows"]}
    columns = [each for each in BRIEF if each in columns_of(found)]
    ways = [way for way in best_first(found) if all((way, *each) in rows for each in columns)]
    body = [[named(way), *(give(rows[way, *each], "lost") for each in columns)] for way in ways]
    head = ["points lost at", *(f"{100 * share:g} % of the MACs{STAGES[stage]}" for share, stage in columns)]
    return table(head, body, note(found, any(stage == "distilled" for _, stage in columns)))


def note(found: Record, distilled: bool) -> str:
    """Write what points are, and over what their means and intervals are."""
    alike = f" All are distilled alike, on {found['distillation']['examples']:,} examples." if distilled else ""
    return (
        f"100 × the metric, dense less pruned; means over {found['rows'][0]['tasks']} tasks, one fine-tuned MiniLM"
        f" each, ± half of a 95 % interval over tasks.{alike}"
    )


def columns_of(found: Record) -> list[tuple[float, str]]:
    """Return the shares and stages that rows have."""
    have = {(row["share"], row["stage"]) for row in found["rows"]}
    return sorted(have, key=lambda each: ([*STAGES].index(each[1]), -each[0]))


def named(way: str) -> str:
    return next((name + way.removeprefix(ours) for ours, name in NAMES.items() if way.startswith(ours)), way)


def best_first(found: Record) -> list[str]:
    """Return the ways, from the least lost without training, at the smallest share that most ways have."""
    rows = [row for row in found["rows"] if row["stage"] == "pruned"]
    ways = Counter(row["share"] for row in rows)
    share = max(ways, key=lambda share: (ways[share], -share))
    lost = {row["way"]: row["lost"] for row in rows if row["share"] == share}
    return sorted(lost, key=lambda way: lost[way])


def give(row: dict[str, Any], name: str, sign: str = "") -> str:
    """Write a figure and half of its interval; nothing if the row has none."""
    if name not in row:
        return ""
    within = row[f"{name}_within"]
    return f"{row[name]:{sign}.1f}" + ("" if within is None else f" ±{within:.1f}")


def budgets(*stages: str, everywhere: bool = True) -> str:
    """Table of the points that each way loses: mean, worst task, difference from ours, at each share.

    Args:
        stages: those shown.
        everywhere: show the ways that were run on all tasks, else the others.
    """
    found = over_most_tasks(record("pruning/budgets"), everywhere)
    body = [
        [
            f"{100 * row['share']:g} %{STAGES[row['stage']]}",
            named(row["way"]),
            *([] if everywhere else [row["tasks"]]),
            give(row, "lost"),
            f"{row['worst'][0]} {row['worst'][1]:.1f}",
            give(row, "more", "+"),
        ]
        for column in columns_of(found)
        for row in sorted(found["rows"], key=lambda row: row["lost"])
        if (row["share"], row["stage"]) == column and row["stage"] in stages
    ]
    head = ["MACs", "way", "points lost", "worst task", f"more than {NAMES[OURS]}"]
    if not everywhere:
        return table([*head[:2], "tasks", *head[2:]], body)
    equal = f" In equal time: {found['minutes']:g} CPU minutes for pruning and distillation."
    return table(head, body, note(found, "distilled" in stages) + (equal if "timed" in stages else ""))


def over_most_tasks(found: Record, most: bool = True) -> Record:
    """Return the record with the rows that are means over all tasks, or with the others."""
    count = max(row["tasks"] for row in found["rows"])
    return {**found, "rows": [row for row in found["rows"] if (row["tasks"] == count) == most]}


def budget_tasks() -> str:
    """Table of every task: the dense model, and ours at each share and stage."""
    found = record("pruning/budgets")
    ours = [run for run in found["runs"] if run["way"] == OURS]
    cells = {(run["task"], run["share"], stage): run.get(name) for run in ours for stage, name in SCORES.items()}
    columns = [each for each in columns_of(found) if any(cells.get((run["task"], *each)) for run in ours)]
    body = [
        [task, run["metric"], *(percent(x) for x in (run["dense"], *(cells.get((task, *each)) for each in columns)))]
        for task, run in sorted({run["task"]: run for run in ours}.items())
    ]
    head = ["task", "metric", "dense", *(f"{100 * share:g} %{STAGES[stage]}" for share, stage in columns)]
    return table(head, body, f"100 × the metric of {NAMES[OURS]}.")


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def measured() -> str:
    """Table of what the command itself reports, for speeds as targets, before and after minutes of training."""
    every = [row for each in records("pruning/prune_to*.json") for row in each.get("targets", [each])]
    found = [row for row in every if "score" in row]
    body = [
        [
            f"`{row['target']}`" + (f", `--distil {row['distilled']['minutes']:g}`" if row["distilled"] else ""),
            with_spread(row["speedup"]),
            f"{100 * row['macs']:.0f} %",
            f"{100 * row['score']:.1f}{show_interval(row['score_low'], row['score_high'])}",
            f"{100 * row['difference']:+.1f}{show_interval(row['difference_low'], row['difference_high'], '+')}",
            f"{row['wall_seconds']:.0f} s",
        ]
        for row in sorted(found, key=lambda row: (bool(row["distilled"]), row["speedup"]["median"]))
    ]
    first = found[0]
    head = ["target", "speed", "MACs", first["metric"], f"more than {100 * first['dense_score']:.1f}, paired", "time"]
    note = (
        f"{first['checkpoint']}, fitted to {first['texts']['fitted to']:,} texts, judged on"
        f" {first['texts']['held out']:,} others; {first['work']}, speed with quartiles, scores with 95 % intervals;"
        f" {measured_on(first)}. The second target of a command begins with the curves of the first."
    )
    return table(head, body, note)


def large() -> str:
    """Table of what a search takes for models that are not MiniLM."""
    found = [each for each in records("pruning/prune_to*.json") if each.get("cpu_seconds") and "score" not in each]
    body = [
        [
            f"{row['checkpoint']}, {row['dense_bytes'] / 1e6:,.0f} MB",
            f"{row['texts']['fitted to']:,}",
            f"{row['cpu_seconds']:,.0f} s",
            f"{row['peak_bytes'] / 1e6:,.0f} MB",
            f"{(row['peak_bytes'] - row['start_bytes']) / row['dense_bytes']:.2f}",
        ]
        for row in sorted(found, key=lambda row: row["dense_bytes"])
    ]
    note = (
        f"Random weights, texts of some 79 tokens, to {found[0]['target']} of the MACs; {measured_on(found[0])}."
        f" Without libraries: less the {found[0]['start_bytes'] / 1e6:.0f} MB that they take before the model is read."
    )
    return table(["model", "texts", "CPU time", "memory at most", "without libraries, times the file"], body, note)


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


def encoders() -> str:
    """Table of a sentence encoder before and after pruning, judged by tasks that it was not fitted to."""
    found = record("pruning/encoders")
    dense, *rows = found["rows"]
    names = [name for name, each in dense.items() if isinstance(each, dict)]
    body = [["100 %", "", "", *(f"{100 * dense[name]['score']:.1f}" for name in names)]]
    body += [
        [
            f"{100 * row['macs']:.0f} %",
            f"`--distil {row['distilled']['minutes']:g}`" if row["distilled"] else "",
            f"{row['cosine']:.3f}",
            *(
                f"{100 * row[name]['difference']:+.1f}"
                + show_interval(row[name]["difference_low"], row[name]["difference_high"], "+")
                for name in names
            ),
        ]
        for row in rows
    ]
    note = (
        f"{found['checkpoint']}, fitted to {found['texts']['fitted to']:,} texts without labels; the cosine with its"
        f" own vectors is on {found['texts']['held out']:,} others. 100 × Spearman's correlation or nDCG@10 of the"
        " given model, and the difference from it, paired, with 95 % intervals over pairs of texts or over intents."
    )
    return table(["MACs", "", "cosine", *names], body, note)
