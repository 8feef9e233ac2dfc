"""The work of `bertlite prune to`."""

import argparse
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from bertlite.bench.work import Work
from bertlite.budget.judge import judge
from bertlite.budget.search import Outcome, Search, State
from bertlite.budget.target import Target, check_work, read_work
from bertlite.budget.texts import batches_of, read_texts, split
from bertlite.checkpoint import families
from bertlite.checkpoint.files import Source
from bertlite.config import BertConfig
from bertlite.experiments.compare import show_interval
from bertlite.experiments.data import DataSource, Examples
from bertlite.experiments.experiment import warn_of_overlap
from bertlite.experiments.files import model_sha256, units_kept
from bertlite.inference.optimize import PLAIN, optimize_for_inference, parse_compute_dtype
from bertlite.inspection import class_of
from bertlite.progress import Progress, short_time
from bertlite.records import environment, write_record
from bertlite.rows import format_of
from bertlite.shipping.card import Figure
from bertlite.shipping.folder import write_model
from bertlite.timing import with_spread
from bertlite.tokenizer import BertTokenizer

HELD_OUT = 256  # texts to judge by at most
NOT_UNSEEN = (
    "These texts were held out of those fitted to; if the given model was trained on them, they do not show what"
    " unseen texts would: give --dev FILE."
)
SETTINGS = ("calibration", "max_length", "label", "seed", "device", "dtype")  # options that determine the result
MADE = (
    "bertlite prune to {target} removed heads and intermediate neurons and fitted the rest to what the given model"
    " computes on {count} texts; no weight was trained."
)
VERDICTS = {
    "right": "met",
    "slow": "missed, the model is too slow",
    "fast": "missed, the model is faster than needed, and may have lost more than needed",
    None: "not checked, the clock of this machine is too noisy to tell",
}


def main(args: argparse.Namespace) -> int:
    """Prune a checkpoint to a budget; return 1 if the measured time misses the target."""
    began = time.perf_counter()
    target = Target.parse(args.target)
    by = way_to_allocate(args, target)
    config = read_config(args.checkpoint)
    work = read_work_of(args, config)
    texts, dev = read_both(args, config)
    if args.folder.exists() and any(args.folder.iterdir()):
        raise FileExistsError(f"{args.folder} is there already: name another folder")
    model = class_of(config).from_pretrained(args.checkpoint, device=args.device)
    dtype = parse_compute_dtype(args.dtype)
    timed = optimize_for_inference(model, dtype, args.backend)  # raises if it cannot be timed
    tokenizer = BertTokenizer.from_pretrained(args.checkpoint)
    longest = min(args.max_length, config.max_position_embeddings)
    fit, held_out = split(texts, args.calibration, HELD_OUT, args.seed, dev)
    settings = {
        **{name: getattr(args, name) for name in SETTINGS},
        "target": target.text,
        "lengths": list(work.lengths),
        "allocate": by,
        "backend": timed.backend,
        "texts": texts.sha256,
        "model": model_sha256(model),
    }
    search = Search(
        model,
        batches_of(fit, tokenizer, model, longest),
        target,
        work,
        by,
        State(args.folder.with_name(f".{args.folder.name}.unfinished"), settings),
        Progress(None, "steps", what="prune to"),
        timed,
        partial(optimize_for_inference, dtype=dtype, backend=timed.backend),
        gradients="loss" if texts.labels else "kl",
        seed=args.seed,
        device=args.device,
    )
    with search.progress:
        found = search.run()
    note = None if dev else NOT_UNSEEN
    report = {
        "what": "bertlite prune to",
        "target": target.text,
        "work": work.name,
        "checkpoint": args.checkpoint,
        "settings": settings,
        "texts": {"fitted to": len(fit), "held out": len(held_out), "of": held_out.name, "note": note},
        **facts_of(found),
        **judge(found.model, model, batches_of(held_out, tokenizer, model, longest)),
        "environment": environment(args.device),
        "wall_seconds": round(time.perf_counter() - began, 1),
    }
    write_result(args, found.model, report)
    shutil.rmtree(search.state.folder)
    return 0 if report["met"] else 1


def write_result(args: argparse.Namespace, model: Any, report: dict[str, Any]) -> None:
    """Write the model with its card and report, and print the report."""
    texts = report["texts"]
    how = [MADE.format(target=report["target"], count=texts["fitted to"]), *([texts["note"]] if texts["note"] else [])]
    write_model(args.folder, model, args.checkpoint, figures=figures_of(report), how=how, report=report)
    if args.record:
        write_record(args.record, report)
    print_report(report, args.folder)


def read_work_of(args: argparse.Namespace, config: BertConfig) -> Work:
    """Return the batch that the target is for.

    Raises:
        ValueError: several shapes are given, or sequences are longer than the model's positions.
    """
    if args.at is not None and len(args.at) > 1:
        raise ValueError(f"--at names {len(args.at)} shapes; a target is stated for one")
    shape = args.at[0] if args.at else None if args.lengths else (8, 128)
    work = read_work(shape, args.lengths, args.batch_size)
    check_work(work, config)
    return work


def facts_of(found: Outcome) -> dict[str, Any]:
    """Return the sizes and the times of the pruned model, and whether it meets the target."""
    heads, neurons = units_kept(found.model.config)
    return {
        "heads_kept": heads,
        "neurons_kept": neurons,
        "parameters": found.model.num_parameters(),
        "macs": found.plan.macs,
        "expected_loss": found.plan.loss,
        **found.times,
        "met": None if found.verdict is None else found.verdict == "right",
        "verdict": VERDICTS[found.verdict],
    }


def read_both(args: argparse.Namespace, config: BertConfig) -> tuple[Examples, Examples | None]:
    """Read the texts to fit to, and those of --dev; plain texts have no labels, which those of --dev may have."""
    if args.dev is None:
        return read_texts(DataSource(args.texts, args.text, args.label, args.columns), config), None
    label = None if format_of(args.texts) == "text" else args.label
    texts = read_texts(DataSource(args.texts, args.text, label, args.columns), config)
    dev = read_texts(DataSource(args.dev, args.text, args.label, args.columns), config)
    warn_of_overlap(texts, dev)
    return texts, dev


def way_to_allocate(args: argparse.Namespace, target: Target) -> str:
    """Return the cost by which sizes are chosen, "latency" or "macs".

    Raises:
        ValueError: --allocate latency does not fit the target or the backend.
    """
    timed, plain = target.kind != "macs", args.backend == PLAIN
    if args.allocate == "auto":
        return "latency" if timed and plain else "macs"
    if args.allocate == "latency" and not timed:
        raise ValueError(
            f"the target {target.text} is a share of the MACs: --allocate latency needs a speed or a time"
        )
    if args.allocate == "latency" and not plain:
        raise ValueError(
            "--allocate latency needs the times of single layers, which only --backend plain runs: use macs"
        )
    return str(args.allocate)


def read_config(checkpoint: str) -> BertConfig:
    """Read the config of a checkpoint.

    Raises:
        ValueError: it is a decoder, whose layers are not fitted here.
    """
    config = families.read_config(Source(checkpoint))
    if config.is_decoder:
        raise ValueError(f"{checkpoint} is a decoder; `prune to` takes encoders")
    return config


def figures_of(report: dict[str, Any]) -> list[Figure]:
    """Return the figures for the card: measured times, and metrics on held-out texts."""
    held = describe_held_out(report)
    figures = [
        Figure(f"speed at {timed_work(report)}, times the given model's", report["speedup"]["median"], dense=1.0),
        Figure("multiply-accumulates of the layers, as a share of the unpruned model's", report["macs"]),
        Figure(f"divergence from the given model's predictions, in nats, {held}", report["kl"], dense=0.0),
    ]
    if "agreement" in report:
        figures.append(Figure(f"share of predictions with the same class, {held}", report["agreement"], dense=1.0))
    if "score" in report:
        ends = report["score_low"], report["score_high"]
        figures.append(Figure(report["metric"], report["score"], *ends, held, report["dense_score"]))
        ends = report["difference_low"], report["difference_high"]
        name = f"{report['metric']} less the given model's, paired"
        figures.append(Figure(name, report["difference"], *ends, f"{held}, p = {report['p']:.2g}", 0.0))
    return figures


def describe_held_out(report: dict[str, Any]) -> str:
    """Return the number and the source of the texts judged on."""
    texts = report["texts"]
    return f"{texts['held out']} texts {'held out ' if texts['note'] else ''}of {texts['of']}"


def timed_work(report: dict[str, Any]) -> str:
    """Describe what was timed: the work, and how the models ran it."""
    settings = report["settings"]
    how = [] if settings["backend"] == PLAIN else [f"backend {settings['backend']}"]
    return ", ".join([report["work"], *how, *([settings["dtype"]] if settings["dtype"] else [])])


def print_report(report: dict[str, Any], folder: Path) -> None:
    """Print the results."""
    speed, own, dense = with_spread(report["speedup"]), report["seconds"]["median"], report["dense_seconds"]["median"]
    print(f"heads of each layer: {report['heads_kept']}, neurons: {report['neurons_kept']}")
    print(f"MACs: {100 * report['macs']:.1f} % of the unpruned model's")
    print(f"time at {timed_work(report)}: {short_time(own)}, was {short_time(dense)}: {speed} x as fast")
    print(f"on {describe_held_out(report)}: {report['kl']:.4f} nats from the given model", end="")
    if "agreement" in report:
        print(f", the same class for {100 * report['agreement']:.1f} %", end="")
    if "score" in report:
        interval = show_interval(report["score_low"], report["score_high"])
        change = show_interval(report["difference_low"], report["difference_high"], "+")
        print(
            f"\n{report['metric']} {100 * report['score']:.1f}{interval}, was {100 * report['dense_score']:.1f}:"
            f" {100 * report['difference']:+.1f}{change}, p = {report['p']:.2g}",
            end="",
        )
    print("".join(f"\n{line}" for line in [report["texts"]["note"]] if line))
    print(f"target {report['target']}: {report['verdict']}")
    print(f"model: {folder}")
