"""Tables of pruning: shares of heads removed, and budgets."""

from itertools import product
from statistics import mean, median
from typing import Any

from bertlite.experiments.compare import describe_way, show_interval, show_loss
from scripts.make.tables.read import Record, measured_on, record, records, table, with_spread
from scripts.measure.budgets.encoders import JUDGED, MEAN
from scripts.measure.budgets.methods import MAIN, OURS, PEER
from scripts.measure.budgets.modernbert import BERT, MODERN
from scripts.measure.budgets.pareto import DTYPES, Key
from scripts.measure.budgets.pareto import WAYS as PARETO
from scripts.measure.budgets.picture import MANY

NAME = f"`bertlite {OURS}`"
REWRITTEN = f"{PEER} and K-prune are rewritten here; no result of their papers was reproduced."
STAGES = {"pruned": "", "distilled": ", distilled", "timed": ", in equal time"}
SCORES = {"pruned": "score", "distilled": "distilled"}  # of a run


def pruning(name: str) -> str:
    """Table with a line for each way of pruning and a column for each share of heads removed.

    Epochs and what training differs in, such as distillation, have a column where a row has any.
    """
    found = record(f"pruning/{name}")
    fractions = sorted({row["fraction"] for row in found["rows"]})
    lines: dict[tuple[str, ...], dict[float, str]] = {}
    for row in found["rows"]:
        lines.setdefault(describe_way(row), {})[row["fraction"]] = within(row, found["headline"])
    names = ("criterion", "repair", "epochs")
    used = [i for i, what in enumerate(names) if what in ("criterion", "repair") or any(way[i] for way in lines)]
    body = [
        [*(way[i] for i in used), *(cells.get(fraction, "") for fraction in fractions)] for way, cells in lines.items()
    ]
    return table([*(names[i] for i in used), *(f"{100 * each:g} %" for each in fractions)], body, intervals_of(found))


def within(row: dict[str, Any], headline: str) -> str:
    """Write a mean in percent, and half the width of its interval, or both ends if one is cut off at 0 or 100."""
    figure = f"{100 * row[headline]:.1f}"
    if row["low"] is None:
        return figure
    whole = row["low"] > 0 and row["high"] < 1
    return figure + (f" ±{50 * (row['high'] - row['low']):.1f}" if whole else show_interval(row["low"], row["high"]))


def intervals_of(record: Record) -> str:
    """Write the metric, the dense model's result and what intervals are over."""
    (over,) = {row["over"] for row in record["rows"]}
    return (
        f"100 × {record['headline']}, dense {100 * record['dense'][record['headline']]:.1f};"
        f" {record['setting']['calibration']} calibration examples unless the row says otherwise;"
        f" ± is half of a 95 % interval, over {over}; [ ] has both ends of an interval that is cut off at 100."
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
    """Table of the points that each way of the main comparison loses, by the share of the MACs and the stage."""
    found = record("pruning/draws")
    rows = {(row["share"], row["stage"], row["way"]): row for row in found["rows"]}
    body: list[list[Any]] = []
    for share, stage in sorted({each[:2] for each in rows}, key=by_stage):
        own = {way: rows[share, stage, way] for each, of, way in rows if (each, of) == (share, stage)}
        cells = [give(own[way], "lost") for way in MAIN]
        body.append([f"{100 * share:g} %{STAGES[stage]}", *cells])
    counts = sorted({row["tasks"] for row in rows.values()})
    text = (
        f"Points lost: means over {' or '.join(map(str, counts))} tasks, {models_of(found)}, ± half of a 95 %"
        f" interval over tasks. {PEER} reads labels, and is rewritten here; no result of the paper was reproduced."
    )
    return table(["MACs", NAME, PEER], body, text)


def models_of(found: Record) -> str:
    """Write how many fine-tuned models a task has."""
    seeds = len({run["seed"] for run in found["runs"]})
    return f"each with {seeds} fine-tuned MiniLMs and draws of texts" if seeds > 1 else "one fine-tuned MiniLM each"


def note(found: Record) -> str:
    """Write what points are, over what their means and intervals are, and how the stages that there are train."""
    what = (
        "100 × the metric, dense minus pruned. Means over tasks,"
        f" {models_of(found)}, ± half of a 95 % interval over tasks. {REWRITTEN}"
    )
    if {row["stage"] for row in found["rows"]} == {"pruned"}:
        return what
    return (
        f"{what} Speeds are medians over some tasks, at 8 x 128. Distilled: all in the same way, on"
        f" {found['distillation']['examples']:,} examples without labels. In equal time: {found['minutes']:g} CPU"
        " minutes for pruning and distillation, which reads labels."
    )


def by_stage(each: tuple[float, str]) -> tuple[int, float]:
    """Order shares and stages."""
    return [*STAGES].index(each[1]), -each[0]


def named(row: dict[str, Any]) -> str:
    """Write what a way is called, and that it reads labels."""
    way = {"whole": "the whole model"}.get(row["way"], row["way"]).replace(OURS, NAME)
    return way + (", reads labels" if row["labels"] else "")


def give(row: dict[str, Any], name: str, sign: str = "") -> str:
    """Write a figure and half of its interval; nothing if the row has none."""
    if name not in row:
        return ""
    within = row[f"{name}_within"] if row["tasks"] > 2 else None  # of two it says nothing
    number = f"{row[name]:{sign}.1f}".replace("-0.0", "0.0")
    gain = "gains " if name == "lost" and number[0] == "-" else ""
    return gain + (number.removeprefix("-") if gain else number) + ("" if within is None else f" ±{within:.1f}")


def budgets(*stages: str, many: bool = True, name: str = "budgets") -> str:
    """Table of the points that each way loses: mean, range of one more task, worst task, difference from ours, speed.

    Args:
        stages: those shown.
        many: show the ways that ran on MANY tasks or more, or on all, else the other ways.
        name: the record's.
    """
    found = record(f"pruning/{name}")
    enough = min(MANY, max(row["tasks"] for row in found["rows"]))
    pruned = (row for row in found["rows"] if row["share"] < 1)
    rows = [row for row in pruned if row["stage"] in stages and (row["tasks"] >= enough) == many]
    body = [
        [
            f"{100 * row['share']:g} %{STAGES[row['stage']]}",
            named(row),
            row["tasks"],
            give(row, "lost"),
            "" if row["tasks"] < 3 else f"±{row['one_within']:.1f}",
            f"{row['worst'][0]} {row['worst'][1]:.1f}",
            give(row, "more", "+"),
            f"{row['speedup']:.2f}" if "speedup" in row and row["stage"] == "pruned" else "",
        ]
        for row in sorted(rows, key=lambda row: (by_stage((row["share"], row["stage"])), row["lost"]))
    ]
    head = ["MACs", "way", "tasks", "points lost", "one more task", "worst task", f"more lost than {NAME}", "speed"]
    return table(head, body, note(found) if many else REWRITTEN)


def int8() -> str:
    """Table of the points lost and the speed, in float32 and in 8 bits, over the tasks that have both."""
    runs = [run for run in record("pruning/budgets")["runs"] if "int8" in run]
    tasks = {run["task"] for run in runs}
    body = []
    for way, share in sorted({(run["way"], run["share"]) for run in runs}, key=lambda each: (-each[1], each[0])):
        own = [run for run in runs if (run["way"], run["share"]) == (way, share)]
        if way in ("whole", OURS) and {run["task"] for run in own} == tasks:
            lost = [lose(mean(run[name] - run["dense"] for run in own)) for name in ("score", "int8")]
            speeds = [
                median(run[name]["median"] for run in own if name in run) for name in ("speedup", "int8_speedup")
            ]
            each = [cell for loss, speed in zip(lost, speeds, strict=True) for cell in (loss, f"{speed:.2f}")]
            body.append([f"{100 * share:g} %", named({"way": way, "labels": False}), *each])
    head = ["MACs", "way", "points lost, float32", "speed", "points lost, int8", "speed, int8"]
    text = "Means over {}; speeds are compared with the plain dense model in float32, at 8 x 128, {}."
    return table(head, body, text.format(", ".join(sorted(tasks)), measured_on(record("pruning/budgets"))))


def budget_tasks() -> str:
    """Table of every task: the dense model, and ours at each share and stage."""
    found = record("pruning/budgets")
    ours = [run for run in found["runs"] if run["way"] == OURS]
    cells = {(run["task"], run["share"], stage): run.get(name) for run in ours for stage, name in SCORES.items()}
    shown = {(run["share"], stage) for run, (stage, name) in product(ours, SCORES.items()) if name in run}
    columns = sorted(shown, key=by_stage)
    body = [
        [task, run["metric"], *(percent(x) for x in (run["dense"], *(cells.get((task, *each)) for each in columns)))]
        for task, run in sorted({run["task"]: run for run in ours}.items())
    ]
    head = ["task", "metric", "dense", *(f"{100 * share:g} %{STAGES[stage]}" for share, stage in columns)]
    return table(head, body, f"100 × the metric of {NAME}.")


def fine_tuned(name: str, model: str) -> str:
    """Table of the points that the ways of the main comparison lose on each task of a model.

    Args:
        name: the record's.
        model: the name of the model before it was fine-tuned.
    """
    found = record(f"pruning/{name}")
    runs = {(run["task"], run["share"], run["way"]): run for run in found["runs"]}
    body = []
    for task, share in sorted({each[:2] for each in runs}, key=lambda each: (each[0], -each[1])):
        own = [runs[task, share, way] for way in MAIN]
        lost = [lose(run["score"] - run["dense"]) for run in own]
        body.append([task, own[0]["metric"], percent(own[0]["dense"]), f"{100 * share:g} %", *lost])
    mine, theirs = (f"{run['texts']:,}" for run in own)
    note = (
        f"Points lost by one fine-tuned {model} for each task, not trained after. {NAME} has {mine} texts; {PEER} has"
        f" {theirs}, reads labels, and is rewritten here. {measured_on(found)}."
    )
    return table(["task", "metric", "dense", "MACs", NAME, PEER], body, note)


def lose(difference: float, low: float | None = None, high: float | None = None) -> str:
    """Write the points lost, for a column of that name; a gain says so."""
    return show_loss(difference, low, high).removeprefix("loses ")


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def modernbert() -> str:
    """Table of the points that a ModernBERT and a BERT of its size lose, and of the difference."""
    found = record("pruning/modernbert")
    count, body = found["summary"][0]["models"], []
    for each in found["summary"]:
        lost = [{"tasks": count, "lost": each[kind], "lost_within": each[f"{kind}_within"]} for kind in (BERT, MODERN)]
        more = give({**each, "tasks": count}, "more", "+")
        body.append([each["target"].replace("%", " %"), *(give(row, "lost") for row in lost), more])

    # The models before they are pruned.
    dense: dict[str, dict[str, list[float]]] = {}
    for row in (row for row in found["rows"] if row["target"] == found["rows"][0]["target"]):
        dense.setdefault(row["task"], {}).setdefault(row["kind"], []).append(row["dense_score"])
    given = "; ".join(f"{task} {' and '.join(percent(mean(x)) for x in own.values())}" for task, own in dense.items())
    sizes = found["sizes"]["bert"]
    note = (
        f"100 × the accuracy: means over {count} fine-tuned models of each, ± half of a 95 % interval over them."
        f" Before pruning, BERT's and ModernBERT's: {given}. {sizes['num_hidden_layers']} layers of"
        f" {sizes['hidden_size']}, {found['pretraining']['steps']} steps of masked words, then fine-tuned;"
        f" {found['texts']:,} texts without labels, {measured_on(found)}."
    )
    return table(["MACs", "points lost, BERT", "points lost, ModernBERT", "more than BERT"], body, note)


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
            lose(row["difference"], row["difference_low"], row["difference_high"]),
            f"{row['wall_seconds']:.0f} s",
        ]
        for row in sorted(found, key=lambda row: (bool(row["distilled"]), row["speedup"]["median"]))
    ]
    first = found[0]
    head = ["target", "speed", "MACs", first["metric"], f"points lost of {100 * first['dense_score']:.1f}", "time"]
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
    """Table of vocabularies pruned to training texts, and of the loss on other texts."""
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
    note = "MiniLM fine-tuned on each task; it keeps the tokens of its training texts, or more; judged on others."
    return table(names, body, note)


def by_encoder() -> list[tuple[list[str], Record, Record]]:
    """Return the first cells of a line, and its rows in float32 and int8, of each encoder that was judged.

    An encoder such as all-MiniLM-L6-v2 is called by the second word of its name.
    """
    rows = {tuple(row[name] for name in Key._fields): row for row in record("pruning/pareto")["rows"]}
    found = []
    for model, way, target in dict.fromkeys(each[:3] for each in rows):
        exact, small = (rows[model, way, target, dtype] for dtype in DTYPES)
        cells = [model.split("-")[1], target.replace("%", " %"), PARETO.get(way, "the given model")]
        found.append((cells, exact, small))
    return found


def pareto() -> str:
    """Table of sentence encoders, pruned in several ways, in float32 and in int8: quality and measured speed."""
    found, lines = record("pruning/pareto"), by_encoder()
    given = [*dict.fromkeys(exact["model"] for _, exact, _ in lines)]
    body = []
    for names, *both in lines:
        speeds = [f"{row['texts a second']['median']:,.0f}" if "speed" in found else "" for row in both]
        scores = [row["scores"][MEAN] for row in both]
        means = [percent(scores[0]["score"]), *(lost_of(each) for each in scores)]
        small = [than(both[1]["more than"].get(given[-1]))] if given[1:] else []
        body.append([*names, *speeds, *means, than(both[0]["more than"].get("layers")), *small])
    head = ["encoder", "MACs", "", "texts a second", "int8", "mean", "points lost", "points lost, int8"]
    others = " and ".join(name for name, each in JUDGED.items() if not each.fitted)
    speed = f" Speed: 32 short texts at once, {measured_on(found['speed'])}." if "speed" in found else ""
    note = (
        f"100 × the mean of {len(JUDGED)} tasks, and the points lost of the given model's in float32, with a paired"
        " 95 % interval over the texts that judge; below 0 is a gain. Models are fitted, mapped and distilled by"
        f" {found['texts']:,} texts without labels, of the kinds that the tasks have, except {others}. Distilled:"
        f" {found['steps']} steps of 32 texts. Every pruned model has a map, except where it says no.{speed}"
    )
    head += ["above layers alike", *(f"int8, above {name.split('-')[1]}" for name in given[1:][-1:])]
    return table(head, body, note)


def than(found: dict[str, float] | None) -> str:
    """Write a difference in points with its interval; nothing for a model and itself."""
    if found is None or found["difference_low"] == found["difference_high"]:
        return ""
    ends = show_interval(found["difference_low"], found["difference_high"], "+.1f")
    return f"{100 * found['difference']:+.1f}{ends}"


def lost_of(found: dict[str, float]) -> str:
    """Write the points that a model loses, with their interval; nothing for the given model in float32 itself."""
    ends = found["difference_low"], found["difference_high"]
    return "" if ends[0] == ends[1] else lose(found["difference"], *ends)


def pareto_tasks() -> str:
    """Table of sentence encoders task by task, in float32, and of the neighbours that int8 keeps."""
    body = [
        [*names, *(percent(exact["scores"][name]["score"]) for name in JUDGED), f"{small['neighbours']:.3f}"]
        for names, exact, small in by_encoder()
    ]
    kinds = {kind: ", ".join(name for name, each in JUDGED.items() if each.kind == kind) for kind in KINDS}
    note = " ".join(f"{kinds[kind]}: {what}." for kind, what in KINDS.items())
    return table(["encoder", "MACs", "", *JUDGED, "neighbours kept by int8"], body, f"100 × {note}")


def passages() -> str:
    """Table of the points that encoders lose in a search for passages, by the texts that they were fitted to."""
    found = record("pruning/passages")
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in (row for row in found["rows"] if "texts" in row):
        own = lines.setdefault((row["model"], row["fitted"], *row["texts"].values()), {})
        own[row["target"]] = lose(row["difference"], row["difference_low"], row["difference_high"])
    targets = [*dict.fromkeys(target for own in lines.values() for target in own)]
    body = [
        [*names[:2], *(f"{each:,}" if each else "" for each in names[2:]), *(own[target] for target in targets)]
        for names, own in lines.items()
    ]
    given = ", ".join(f"{row['model']} {percent(row['score'])}" for row in found["rows"] if "texts" not in row)
    note = (
        f"Points of nDCG@10 lost, with a paired 95 % interval over {found['questions']} questions; the given model:"
        f" {given}. {found['paragraphs']} paragraphs are searched."
    )
    head = ["encoder", "fitted to", "texts", "texts of the map", *(each.replace("%", " %") for each in targets)]
    return table(head, body, note)


KINDS = {
    "pairs": "Spearman's correlation of cosines with people's ratings of pairs",
    "search": "nDCG@10 of a search for questions with the query's intent",
    "probe": "accuracy of a linear classifier of the vectors",
}
