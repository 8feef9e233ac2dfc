"""Results of many runs together: means with intervals, paired tests, tables."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from bertlite.experiments.data import NO_LABEL
from bertlite.experiments.evaluate import RANGES, SHARE, TASKS, Task, estimate_metric, interval_over_examples
from bertlite.experiments.experiment import REPAIRS, Setting
from bertlite.experiments.files import DENSE, labels, outputs
from bertlite.experiments.finetune import Recipe
from bertlite.experiments.statistics import Array, Ends, mcnemar
from bertlite.support.environment import commit_of
from bertlite.support.runs import Record

Key = TypeVar("Key", bound=Hashable)
Way = tuple[tuple[str, Any], ...]  # a way of pruning: the fields of a cell but its seed, and of the setting
UNBALANCED = 0.6  # share of one label above which accuracy is misleading
TRAINING = ("distil", "lr", "batch_size", "warmup", "weight_decay", "clip")  # fields of a recipe that cells share


def way_of(run: Record, **changes: Any) -> Way:
    """Return a run's way of pruning and retraining, with some fields changed."""
    setting = run.config["setting"]
    way = {**run.config["cell"], "calibration": setting["calibration"], **changes}
    del way["seed"]
    if way["epochs"]:
        way |= {"train_examples": setting["retrain"], **{name: setting["recipe"][name] for name in TRAINING}}
    return tuple(sorted(way.items()))


def group_runs(runs: Iterable[Record], key: Callable[[Record], Key]) -> dict[Key, list[Record]]:
    """Group runs by what `key` returns, in their order."""
    found: dict[Key, list[Record]] = defaultdict(list)
    for run in runs:
        found[key(run)].append(run)
    return dict(found)


def model_of(run: Record) -> str:
    """Return the hashes of the dense model that a run began with: of its weights, and in newer runs of all it does."""
    return " ".join(run.facts["model"].values())


def summarise(runs: Sequence[Record], against: str | None = None, metric: str | None = None) -> list[dict[str, Any]]:
    """Return one row for each way of pruning, in a fixed order.

    Args:
        against: a criterion: compare every other row with the runs that differ only in the criterion.  Or "dense":
            compare every row with the dense models.
        metric: the metric of the interval and the comparison; by default the task's headline.

    Returns:
        Rows with the fields of a `Cell` without its seed, "calibration" (examples), and the fields of training if the
        runs retrained.  Then "runs", their "seeds", "models" (the number of dense models) and "values" of the metric.
        Then the mean of every metric, "low" and "high" of the metric's interval (None if nothing varies), and "over",
        its sample; see `interval_of`.  With `against` also "difference", "difference_low", "difference_high" and "p";
        see `comparison`.

    Raises:
        ValueError: there are no runs; they have several tasks, data sets, lengths or numbers of layers; two differ in
            nothing; no run has the criterion; or the task has no such metric.
    """
    task = task_of(runs)
    metric = task.metric(metric, outputs(runs[0]).shape[-1])
    groups = group_runs(runs, way_of)  # runs of a group differ in seeds or dense models
    if against not in (None, DENSE) and not any(dict(way)["criterion"] == against for way in groups):
        have = [DENSE, *sorted({dict(way)["criterion"] for way in groups})]
        raise ValueError(f"no run has the criterion {against!r}; have: {', '.join(have)}")

    # A row for each way; two runs that differ in nothing would count one result twice.
    rows = []
    for way, group in sorted(groups.items(), key=lambda item: sort_key(item[0])):
        for same in group_runs(group, lambda run: (model_of(run), run.config["cell"]["seed"])).values():
            if len(same) > 1:
                what = "are of one way, model and seed, such as before and after its data were edited"
                raise ValueError(f"{same[0].folder} and {same[1].folder} {what}: remove one")

        (low, high), over = interval_of(group, task, metric)
        averaged = [name for name in (*task.metrics, "kl", "macs") if name in group[0].results]
        row = {
            **dict(way),
            "runs": len(group),
            "seeds": [run.config["cell"]["seed"] for run in group],
            "models": len(by_model(group)),
            "values": [run.results[metric] for run in group],
            # Means over seeds and dense models, and the interval of the metric.
            **{name: float(np.mean([run.results[name] for run in group])) for name in averaged},
            "low": low,
            "high": high,
            "over": over,
            "heads_kept": np.mean([run.results["heads_kept"] for run in group], axis=0).tolist(),
        }

        # The same way with the other criterion is the partner of a paired test.
        other = groups.get(way_of(group[0], criterion=against), group)
        if against == DENSE:
            dense = {model: [outputs(each[0], DENSE)] for model, each in group_runs(group, model_of).items()}
            row |= comparison(by_model(group), dense, labels(group[0]), task, metric)
        elif other is not group:
            row |= comparison(by_model(group), by_model(other), labels(group[0]), task, metric)
        rows.append(row)
    return rows


def note_on_balance(truth: Array, metric: str) -> str | None:
    """Return a note that accuracy is misleading, if most examples have one label."""
    truth = truth[truth != NO_LABEL]
    share = float(np.unique(truth, return_counts=True)[1].max()) / len(truth)
    if metric != "accuracy" or share <= UNBALANCED:
        return None
    return f"{100 * share:.0f} % of the examples have the same label, so accuracy is misleading: see --metric mcc too"


def note_on_predictions(found: Sequence[Array]) -> str | None:
    """Return a note on models that predict only one class, by their outputs."""
    same = [np.unique(each[~np.isnan(each[..., 0])].argmax(-1)) for each in found if each.shape[-1] > 1]
    count = sum(len(classes) == 1 for classes in same)
    if not count:
        return None
    who = "the model predicts" if len(found) == 1 else f"{count} of {len(found)} models predict"
    return f"{who} the same class for all examples"


def notes_on(truth: Array, found: Sequence[Array], metric: str) -> list[str]:
    """Return notes on figures of a metric that mislead, by the labels and the outputs of models."""
    return [note for note in (note_on_balance(truth, metric), note_on_predictions(found)) if note is not None]


def task_of(runs: Sequence[Record]) -> Task:
    """Return the task of all the runs.

    Raises:
        ValueError: there are no runs, or they have several tasks, evaluation data, lengths or numbers of layers.
    """
    if not runs:
        raise ValueError("there are no finished runs to compare")
    for what, values in (
        ("tasks", {run.config["setting"]["task"] for run in runs}),
        ("evaluation data", {run.facts["data"]["dev"] for run in runs}),
        ("values of max_length", {run.config["setting"]["max_length"] for run in runs}),
        ("numbers of layers", {len(run.results["heads_kept"]) for run in runs}),
    ):
        if len(values) > 1:
            raise ValueError(f"the runs have {len(values)} {what}; compare runs with only one")
    return TASKS[runs[0].config["setting"]["task"]]


def sort_key(way: Way) -> tuple[Any, ...]:
    """Return the sort key of a way of pruning among the rows of a table."""
    cell = dict(way)
    cell["repair"] = [*REPAIRS, cell["repair"]].index(cell["repair"])  # older runs' last
    return tuple(cell[name] for name in ("epochs", "repair", "calibration", "at_least", "criterion", "fraction"))


def by_model(group: Sequence[Record]) -> dict[str, list[Array]]:
    """Return the outputs of runs by the hash of the dense model that they began with."""
    return {model: [outputs(run) for run in runs] for model, runs in group_runs(group, model_of).items()}


def interval_of(group: Sequence[Record], task: Task, metric: str) -> tuple[Ends, str]:
    """Return the 95 % interval of a metric's mean over runs, and its sample.

    - "models and examples": the runs began with several fine-tuned models, each the mean of its seeds.
    - "seeds and examples": there are several runs of one model; the interval does not cover other models.
    - "examples": there is one run.
    """
    found, truth = by_model(group), labels(group[0])
    if len(group) == 1:
        ((only,),) = found.values()
        return interval_over_examples(only, truth, task, metric), "examples"
    over = "models and examples" if len(found) > 1 else "seeds and examples"
    estimate = estimate_metric([[*found.values()]], truth, task.metrics[metric])
    return estimate.interval(*RANGES.get(metric, SHARE)), over


def comparison(
    ours: dict[str, list[Array]], theirs: dict[str, list[Array]], truth: Array, task: Task, metric: str
) -> dict[str, Any]:
    """Return the difference of some runs from others on the same examples, with a paired test.

    Both sides are {dense model: outputs of its runs}.  If they share several models, these are compared in pairs: the
    interval and p are over models and examples.  For one model they are over the seeds of both sides and the examples.
    For two single runs' accuracies, p comes from McNemar's exact test.

    Returns:
        "difference", "p", and "difference_low" and "difference_high", None if nothing varies.

    Raises:
        ValueError: the two sides share no model.
    """
    shared = [model for model in ours if model in theirs]
    if not shared:
        raise ValueError("the compared runs began with different models: run both sides on the same ones")
    a, b = sides = [[side[model] for model in shared] for side in (ours, theirs)]

    # For the accuracies of two single runs there is an exact test.
    least, most = RANGES.get(metric, SHARE)
    estimate = estimate_metric(sides, truth, task.metrics[metric])
    (low, high), p = estimate.interval(least - most, most - least), estimate.p
    if metric == "accuracy" and truth.ndim == 1 and len(shared) == len(a[0]) == len(b[0]) == 1:
        p = mcnemar(a[0][0].argmax(1) == truth, b[0][0].argmax(1) == truth)
    return {"difference": estimate.value, "p": p, "difference_low": low, "difference_high": high}


def markdown_table(rows: Sequence[dict[str, Any]], headline: str) -> str:
    """Write 100 x the headline as Markdown: a line for each way of pruning, a column for each share removed."""
    fractions = sorted({row["fraction"] for row in rows})
    lines: dict[tuple[str, ...], dict[float, str]] = defaultdict(dict)
    for row in rows:
        text = f"{100 * row[headline]:.1f}{show_interval(row['low'], row['high'])}"
        lines[describe_way(row)][row["fraction"]] = text + (f" ({row['runs']})" if row["runs"] > 1 else "")
    head = ["criterion", "repair", "epochs", *(f"{100 * fraction:g} %" for fraction in fractions)]
    body = [[*way, *(cells.get(fraction, "") for fraction in fractions)] for way, cells in lines.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body))


def show_interval(low: float | None, high: float | None, form: str = ".1f", scale: float = 100) -> str:
    """Return " [LOW, HIGH]", by default in percent; empty if there is none."""
    return "" if low is None or high is None else f" [{scale * low:{form}}, {scale * high:{form}}]"


def show_loss(difference: float, low: float | None, high: float | None, digits: int = 1) -> str:
    """Return a difference from the given model in points: "loses 1.8 [0.1, 3.6]" or "gains …", never below zero."""
    gains = round(100 * difference, digits) > 0
    ends = (low, high) if gains or low is None or high is None else (-high, -low)
    points = f"{abs(100 * difference):.{digits}f}{show_interval(*ends, f'z.{digits}f')}"
    return f"{'gains' if gains else 'loses'} {points}"


def describe_way(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return criterion, repair and epochs for a table; defaults are left out."""
    name = row["criterion"]
    name += f", {row['at_least']} a layer or more" if row["at_least"] else ""
    name += f", {row['calibration']} examples" if row["calibration"] != Setting.calibration else ""
    return name, "" if row["repair"] == "none" else row["repair"], describe_training(row)


def describe_training(row: dict[str, Any]) -> str:
    """Return the epochs of retraining, and changes of the default recipe: "3, distil 0.5, 1000 examples"."""
    if not row["epochs"]:
        return ""
    other = [f"{name} {row[name]:g}" for name in TRAINING if name in row and row[name] != getattr(Recipe, name)]
    other += [f"{row['train_examples']} examples"] if row.get("train_examples") else []
    return ", ".join([f"{row['epochs']:g}", *other])


def dense_result(runs: Sequence[Record]) -> dict[str, float]:
    """Return the metrics of the dense model, or their mean if the runs began with several."""
    dense = {model_of(run): run.results["dense"] for run in runs}
    return {name: float(np.mean([found[name] for found in dense.values()])) for name in runs[0].results["dense"]}


def provenance(runs: Sequence[Record]) -> dict[str, Any]:
    """Return the "environment" of the first run, with the commit of all of them, for a record made from these runs.

    The tree counts as dirty if it was for any of the runs.  If the runs were made from several commits, "commits"
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
