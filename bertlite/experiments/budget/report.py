"""The report of a pruned model: its figures, for the card and for the terminal."""

import math
from pathlib import Path
from typing import Any

from bertlite.checkpoint.saving import file_size
from bertlite.experiments.budget.distil import CHECKS
from bertlite.experiments.budget.mapping import MAP_NEEDS
from bertlite.experiments.budget.search import Plan
from bertlite.experiments.budget.vocabulary import describe
from bertlite.experiments.compare import show_interval, show_loss
from bertlite.inference.optimize import PLAIN
from bertlite.pruning.importance.allocation import kept_sizes
from bertlite.shipping.card import Figure
from bertlite.support.progress import short_time
from bertlite.support.timing import with_spread

LIKENESS = {  # figures of a report that compare the model with the given one
    "agreement": "share of predictions with the same class",
    "cosine": "cosine with the given model's vectors",
    "rank_correlation": "rank correlation with the given model's",
    "neighbours": "share of the ten nearest texts that are so by the given model too",
}
SAME_TOKENS = "Predictions are compared with the given model's, which had this vocabulary too."
VERDICTS = {
    "right": "met",
    "slow": "missed, the model is too slow",
    "fast": "missed, the model is faster than needed, and may have lost more than needed",
    "constant": "missed, the model predicts the same for all texts",
    None: "not checked, the clock of this machine is too noisy to tell",
}


def facts_of(model: Any, plan: Plan, times: dict[str, Any], verdict: str | None, map_bytes: int) -> dict[str, Any]:
    """Return the sizes and the times of the pruned model, and whether it meets the target: its verdict in words."""
    heads, neurons = map(list, zip(*kept_sizes(model.config), strict=True))
    return {
        "heads_kept": heads,
        "neurons_kept": neurons,
        "parameters": model.num_parameters(),
        "macs": plan.macs,
        "bytes": file_size(model) + map_bytes,
        "expected_loss": plan.loss,
        **times,
        "sizes_by": plan.by,
        "met": None if verdict is None else verdict == "right",
        "verdict": VERDICTS[verdict],
    }


def figures_of(report: dict[str, Any]) -> list[Figure]:
    """Return the figures for the card: measured times, and metrics on held-out texts."""
    held = describe_held_out(report)

    # Speed and size first, which the target was about.
    figures = [
        Figure(f"speed at {timed_work(report)}, times the given model's", report["speedup"]["median"], dense=1.0),
        Figure("multiply-accumulates of the layers, as a share of the unpruned model's", report["macs"]),
        Figure("megabytes of the weights", report["bytes"] / 1e6, dense=report["dense_bytes"] / 1e6),
    ]

    # Parts of the speed that are not due to pruning: another dtype, and first tokens alone in the last layer.
    if report["alone"]:
        text = f"the same without pruning, in {report['settings']['dtype']} alone"
        figures.append(Figure(text, report["alone"]["speedup"]["median"], dense=1.0))
        figures += [Figure(f"{name} of that, {held}", x, dense=1.0) for name, x in alike_of(report["alone"])]
    if report["every_token"]:
        name = f"the same with every token in the last layer, as in transformers, at {timed_work(report)}"
        figures.append(Figure(name, report["every_token"]["speedup"]["median"], dense=1.0))

    # Then the agreement with the given model, and the metric of labels.
    if "cosine" not in report:
        name = f"divergence from the given model's predictions, in nats, {held}"
        figures.append(Figure(name, report["kl"], dense=0.0))
    for found, more in ((report, ""), (report["without_map"], ", without the map")):
        figures += [Figure(f"{name}, {held}{more}", x, dense=1.0) for name, x in alike_of(found)]

    if "score" in report:
        ends = report["score_low"], report["score_high"]
        figures.append(Figure(report["metric"], report["score"], *ends, held, report["dense_score"]))
        ends = report["difference_low"], report["difference_high"]
        name = f"{report['metric']} less the given model's, paired"
        figures.append(Figure(name, report["difference"], *ends, f"{held}, p = {report['p']:.2g}", 0.0))
    return figures


def how_made(report: dict[str, Any]) -> list[str]:
    """Return sentences on how the model was made, for the card."""
    texts = report["texts"]
    trained = describe_distillation(report) if report["distilled"] else "no weight was trained."
    how = [
        f"bertlite prune to {report['target']} removed heads and intermediate neurons, and fitted the rest to the"
        f" given model's outputs on {texts['fitted to']} texts; {trained}"
    ]
    if report["without_map"]:
        how.append(
            f"A linear layer after the pooling, one least-squares fit to {texts['mapped']:,} texts, brings vectors"
            " nearer to the given model's."
        )
    how += [texts["note"]] if texts["note"] else []
    return [*how, *describe(report["vocabulary"]), SAME_TOKENS] if "vocabulary" in report else how


def describe_distillation(report: dict[str, Any]) -> str:
    """Return a sentence on the training: its outputs, its time and its texts."""
    facts = report["distilled"]
    labels = " and for the labels" if facts["labels"] else ""
    outputs = "vectors" if "cosine" in report else "predictions"
    limit = "" if facts["minutes"] is None else f" ({facts['minutes']:g} min with checks)"
    return (
        f"then the layers were trained on {facts['texts']} texts, {facts['epochs']:.1f} times each in {facts['steps']}"
        f" steps of {facts['step_seconds']:.2g} s{limit}, for the given model's {outputs} and hidden states{labels}."
        f" The weights of step {facts['best_step']} were kept, the best of {CHECKS + 1} on the"
        f" {describe_held_out(report)}, which flatters figures on these a little. {describe_gain(facts)}"
    )


def describe_gain(facts: dict[str, Any]) -> str:
    """Return whether more training would gain: if the last two checks were both better, and lost fewer points."""
    (*first, before), (*second, _), (*last, after) = facts["curve"][-3:]
    if not (first[1:] < second[1:] < last[1:] and after < before):
        return "The last two checks were not both better: more training would hardly gain."

    share = (last[0] - first[0]) / facts["steps"]
    if facts["minutes"] is None:
        amount, more = f"{last[0] - first[0]} steps", f"{2 * facts['steps']}steps"
    else:
        amount, more = f"{share * facts['minutes']:.2g} min", f"{2 * facts['minutes']:g}"
    return (
        f"It still gained at the end: the last two checks were both better, by {before - after:.1f} points together."
        f" Going on should gain about as much for each further {amount}: --distil {more}, with the same --keep."
    )


def describe_held_out(report: dict[str, Any]) -> str:
    """Return the number and the source of the texts judged on."""
    texts = report["texts"]
    return f"{texts['held out']} texts {'held out ' if texts['note'] else ''}of {texts['of']}"


def timed_work(report: dict[str, Any]) -> str:
    """Describe the timing: the work, and how the models ran it."""
    settings = report["settings"]
    how = [] if settings["backend"] == PLAIN else [f"backend {settings['backend']}"]
    return ", ".join([report["work"], *how, *([settings["dtype"]] if settings["dtype"] else [])])


def print_report(report: dict[str, Any], folder: Path) -> None:
    """Print the results."""
    pruned, dense = report["seconds"]["median"], report["dense_seconds"]["median"]
    print(f"heads of each layer: {report['heads_kept']}, neurons: {report['neurons_kept']}")
    if report["distilled"]:
        before, most = (report["distilled"][name] or math.nan for name in ("start_bytes", "peak_bytes"))
        print(describe_distillation(report), f"Memory: {most / 1e9:.2g} GB at most, {before / 1e9:.2g} GB before.")

    # The costs: work, bytes and time.
    nothing = " (nothing had to be removed)" if report["macs"] == 1 else ""
    print(f"MACs: {100 * report['macs']:.1f} % of the unpruned model's{nothing}")
    print(f"weights: {report['bytes'] / 1e6:.4g} MB, were {report['dense_bytes'] / 1e6:.4g} MB")
    if "vocabulary" in report:
        print(*describe(report["vocabulary"]), SAME_TOKENS, sep="\n")
    faster = with_spread(report["speedup"])
    print(f"time at {timed_work(report)}: {short_time(pruned)}, was {short_time(dense)}: {faster} x as fast")

    if report["alone"]:
        print(describe_alone(report))
    if report["every_token"]:
        slower = with_spread(report["every_token"]["speedup"])
        print(f"the last layer computes only [CLS], as bertlite does; every token, as in transformers: {slower} x")

    # The quality, on texts that the model was not fitted to.
    alike = [f"{name} {x:.3f}" for name, x in alike_of(report)]
    nats = [] if "cosine" in report else [f"{report['kl']:.4f} nats from the given model"]
    print(f"on {describe_held_out(report)}: {', '.join([*nats, *alike])}")
    if "score" in report:
        interval = show_interval(report["score_low"], report["score_high"])
        change = show_loss(report["difference"], report["difference_low"], report["difference_high"])
        score, before = (f"{100 * report[name]:.1f}" for name in ("score", "dense_score"))
        print(f"{report['metric']} {score}{interval}, was {before}: {change} points, p = {report['p']:.2g}")

    # The verdict on the target, and how to go on.
    for line in filter(None, [*describe_map(report), report["texts"]["note"]]):
        print(line)
    print(f"target {report['target']}: {describe_verdict(report['verdict'], report['lost'])}")
    print(f"model: {folder}")
    if report["verdict"] != VERDICTS["constant"]:  # there is nothing to evaluate or serve then
        against = "" if report["checkpoint"] is None else f" --against {report['checkpoint']}"
        pairs = " --text A,B" if "cosine" in report else ""  # with their similarity
        print(f"next: bertlite evaluate {folder} --dev FILE{pairs}{against}")
        print(f"  or: bertlite export {folder} --out FOLDER")


def alike_of(figures: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the figures that compare a model with the given one, with their names in words."""
    return [(LIKENESS[name], figures[name]) for name in LIKENESS if name in figures]


def describe_alone(report: dict[str, Any]) -> str:
    """Return what the dtype alone gains and costs, and what pruning adds."""
    alone, dtype = report["alone"], report["settings"]["dtype"]
    gain = report["speedup"]["median"] / alone["speedup"]["median"]
    kept = ", ".join(f"{name} {x:.3f}" for name, x in alike_of(alone))
    faster = f"{with_spread(alone['speedup'])} x on {report['environment']['cpu']}"
    return f"{dtype} alone: {faster}, {kept}; pruning: {gain:.2f} x more"


def describe_map(report: dict[str, Any]) -> list[str]:
    """Return what the vectors of an encoder are without the map after its pooling, or that there is none."""
    if without := report["without_map"]:
        found = ", ".join(f"{name} {x:.3f}" for name, x in alike_of(without))
        return [f"without the map after the pooling, fitted to {report['texts']['mapped']:,} texts: {found}"]
    if "cosine" in report and report["settings"]["mapping"]:
        return [f"no map after the pooling: it needs {MAP_NEEDS:,} texts that do not judge"]
    return []


def describe_verdict(verdict: str, lost: dict[str, Any]) -> str:
    """Return the verdict on a target; a loss that is too large comes first."""
    if lost["points"] <= 0:
        return verdict
    much = f"{lost['points']:.1f} points of {lost['of']}"
    if lost["points"] <= lost["limit"]:
        return f"{verdict}, {much} lost"
    return f"too much is lost, {much}, more than {lost['limit']:g}; the target itself is {verdict}"
