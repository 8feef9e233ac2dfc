"""The work of `bertlite prune to`."""

import argparse
import json
import math
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertlite.checkpoint import families
from bertlite.checkpoint.files import Source
from bertlite.checkpoint.saving import file_size
from bertlite.config import BertConfig
from bertlite.experiments.budget.distil import CHECKS, Distillation
from bertlite.experiments.budget.quality import Quality, evaluate_pruned
from bertlite.experiments.budget.search import SETTINGS as SETTINGS_FILE
from bertlite.experiments.budget.search import Outcome, Search, State
from bertlite.experiments.budget.target import Target, check_work, read_work, spare_bytes
from bertlite.experiments.budget.texts import (
    TEXTS,
    TOKENS_OF_INPUT,
    batches_of,
    encode,
    read_texts,
    split,
    with_tokens,
)
from bertlite.experiments.budget.vocabulary import describe, with_fewer_tokens
from bertlite.experiments.budget.work import Work
from bertlite.experiments.compare import show_interval
from bertlite.experiments.data import DataSource, Examples, read_length
from bertlite.experiments.evaluate import task_of_head
from bertlite.experiments.files import model_key, units_kept
from bertlite.inference.optimize import PLAIN, optimize_for_inference, parse_compute_dtype
from bertlite.models.base import BertModel
from bertlite.models.heads import MultipleChoiceBody
from bertlite.pruning.importance.least_squares import FEW
from bertlite.shipping.card import Figure
from bertlite.shipping.carried import class_for, load_trained
from bertlite.shipping.folder import REPORT, write_model
from bertlite.shipping.vectors import MEAN, VectorHead, read_head
from bertlite.support.progress import Progress, short_time
from bertlite.support.records import environment, lock_folder, map_large_blocks, peak_memory, sha256_of, write_record
from bertlite.support.rows import format_of
from bertlite.support.timing import with_spread
from bertlite.tokenizer import BertTokenizer

HELD_OUT = 256  # texts to judge by at most
NOT_UNSEEN = (
    "These texts were held out of those fitted to; if the given model was trained on them, they do not show what"
    " unseen texts would: give --dev FILE."
)
LIKENESS = {  # figures of a report that compare the model with the given one
    "agreement": "share of predictions with the same class",
    "cosine": "cosine with the given model's vectors",
    "rank_correlation": "rank correlation with the given model's",
}
SAME_TOKENS = "Predictions are compared with those of the given model with this vocabulary."
SETTINGS = (
    "calibration",
    "max_length",
    "label",
    "labels_for",
    "seed",
    "device",
)  # options that determine gradients and curves
MADE = (
    "bertlite prune to {target} removed heads and intermediate neurons and fitted the rest to what the given model"
    " computes on {count} texts; "
)
UNTRAINED = "no weight was trained."
TRAINED = (
    "then the layers were trained on {texts} texts, {epochs:.1f} times each in {steps} steps of {step_seconds:.2g} s,"
    " {minutes:g} min with checks, to have the given model's {outputs} and hidden states{labels}; kept were those of"
    " step {best_step}, the best of {checks} on the {judged}, which flatters figures on these a little."
)
VERDICTS = {
    "right": "met",
    "slow": "missed, the model is too slow",
    "fast": "missed, the model is faster than needed, and may have lost more than needed",
    "constant": "missed, the model predicts the same for all texts",
    None: "not checked, the clock of this machine is too noisy to tell",
}


@dataclass(frozen=True)
class Job:
    """What the targets of a command share.

    Args:
        settings: all that determines a result, but for the target and the way to allocate.
        shared: those that determine gradients and curves.
        search: makes a Search for a target.
        judged: the batches of texts to judge by.
        distillation: the training after pruning, None without.
        texts: what the report says of the texts.
        given: what it says of the file and the vocabulary that were given.
        head: what makes a vector of an encoder's states.
    """

    args: argparse.Namespace
    model: Any
    tokenizer: BertTokenizer
    work: Work
    settings: dict[str, Any]
    shared: dict[str, Any]
    search: Callable[..., Search]
    judged: list[dict[str, Tensor]]
    distillation: Distillation | None
    texts: dict[str, Any]
    given: dict[str, Any]
    head: VectorHead

    def limit(self, lost: dict[str, Any]) -> dict[str, Any]:
        """Return the most that a model should lose, and whether it loses too much for the exit status.

        Warns if it loses more.
        """
        most = lost["normal"] if self.args.lose_at_most is None else self.args.lose_at_most
        more = not lost["points"] <= most  # nan too
        if more:
            what = "is normal" if self.args.lose_at_most is None else "--lose-at-most allows"
            warnings.warn(
                f"the pruned model loses {lost['points']:.1f} points of {lost['of']}, more than {what}"
                f" ({most:g}): give more texts, a larger budget or --distil",
                stacklevel=2,
            )
        asked = self.args.lose_at_most is not None or self.args.dev is not None
        return {"limit": most, "too_much": more and asked}

    def run(self, target: Target, folder: Path, settings: dict[str, Any], state: State) -> dict[str, Any]:
        """Prune to a target, write the folder and return its report."""
        began, cpu_began = time.perf_counter(), time.process_time()
        search_state = State(state.folder / sha256_of(json.dumps(settings, sort_keys=True))[:16], settings)
        with Progress(None, "steps", what=f"prune to {target.text}") as progress:
            found = self.search(
                target=target, by=settings["allocate"], shared=state, state=search_state, progress=progress
            ).run()
            trained = self.distillation and self.distillation.train_(found.model, search_state, progress)
            shown = progress.over("comparing", self.judged, "batches")
            results = evaluate_pruned(found.model, self.model, shown, self.head)
        results["lost"] |= self.limit(results["lost"])
        report = {
            "what": "bertlite prune to",
            "target": target.text,
            "work": self.work.name,
            "checkpoint": self.args.checkpoint,
            "settings": settings,
            "texts": self.texts,
            **self.given,
            **facts_of(found, results["constant"]),
            **results,
            "distilled": trained,
            "environment": environment(self.args.device),
            "peak_bytes": peak_memory(),
            "wall_seconds": round(time.perf_counter() - began, 1),
            "cpu_seconds": round(time.process_time() - cpu_began, 1),
        }
        write_result(self, folder, found.model, report)
        shutil.rmtree(search_state.folder)
        return report


def main(args: argparse.Namespace) -> int:
    """Prune a checkpoint to each budget; return 1 if a measured time misses its target, or too much is lost."""
    map_large_blocks()
    targets = read_targets(args)
    ways = {folder: way_to_allocate(args, target) for folder, target in targets.items()}
    with lock_folder(args.folder):
        found = prune_all(args, targets, ways)
    if args.keep is not None:
        print(f"for other targets of the same model and texts: --keep {args.keep}")
    if args.record:
        several = {"what": "bertlite prune to", "targets": found, "environment": environment(args.device)}
        write_record(args.record, several if found[1:] else found[0])
    return 0 if all(report["met"] and not report["lost"]["too_much"] for report in found) else 1


def prune_all(args: argparse.Namespace, targets: dict[Path, Target], ways: dict[Path, str]) -> list[dict[str, Any]]:
    """Prune to each target, unless its folder is finished, and return the reports.

    Raises:
        ValueError: a target cannot be met, which is found before any work.
    """
    job = read_job(args)
    settings = {
        folder: {**job.settings, "target": target.text, "allocate": ways[folder]} for folder, target in targets.items()
    }
    reports = {folder: finished_report(folder, settings[folder]) for folder in targets}
    place = args.keep or args.folder.with_name(f".{args.folder.name}.unfinished")
    fresh = not (place / SETTINGS_FILE).exists()
    for folder, target in targets.items():
        if target.is_size:
            spare_bytes(job.model, target, job.given["dense_bytes"])  # raises if there are none
        elif fresh and reports[folder] is None:
            hidden = Progress(None, "steps", shown=False)
            job.search(target=target, by=ways[folder], shared=None, state=None, progress=hidden).check_reachable()
    if fresh and job.distillation and not all(reports.values()):
        with Progress(None, "", what="prune to") as progress:
            progress.stage("trial steps")
            job.distillation.check_time()
    state = State(place, job.shared)
    for folder, target in targets.items():
        if report := reports[folder]:
            print(f"{folder} is done already")
            report["lost"] |= job.limit(report["lost"])  # which may be another now
        reports[folder] = report or job.run(target, folder, settings[folder], state)
    if args.keep is None:
        shutil.rmtree(place)
    return [report for report in reports.values() if report]


def read_job(args: argparse.Namespace) -> Job:
    """Read the model and the texts."""
    config = read_config(args.checkpoint)
    work = read_work_of(args, config)
    texts, dev = read_both(args, config)
    model, tokenizer, given = read_model(args, config, texts, dev)
    dtype = parse_compute_dtype(args.dtype)
    timed = as_timed(model, dtype, args.backend)  # raises if it cannot be timed
    backend = getattr(timed, "backend", PLAIN)
    length = read_length(args.max_length, tokenizer)
    longest = min(length, config.max_position_embeddings)
    fit, held_out = split(texts, args.calibration or TEXTS, HELD_OUT, args.seed, dev)
    if args.labels_for == "judging":
        texts, fit = (replace(each, labels=()) for each in (texts, fit))
    if args.calibration is None:
        fit = with_tokens(fit, TOKENS_OF_INPUT * config.intermediate_size, tokenizer, longest)
    batches = batches_of(fit, tokenizer, model, longest)
    warn_of_few_texts(sum(int(batch["attention_mask"].sum()) for batch in batches), len(fit), model.config)
    head = read_head(args.checkpoint) if isinstance(model, BertModel) else MEAN
    shared = {name: getattr(args, name) for name in SETTINGS}
    shared |= {"max_length": length, "texts": fit.sha256, "model": model_key(model, tokenizer, head)}
    search = partial(
        Search,
        model,
        batches,
        work=work,
        timed=timed,
        prepare=partial(as_timed, dtype=dtype, backend=backend),
        gradients="loss" if texts.labels else "kl",
        seed=args.seed,
        device=args.device,
        dense_bytes=given["dense_bytes"],
    )
    judged = batches_of(held_out, tokenizer, model, longest)
    all_texts, _ = split(texts, len(texts), HELD_OUT, args.seed, dev)
    settings = {
        **shared,
        "judged": held_out.sha256,
        "lengths": list(work.lengths),
        "backend": backend,
        "dtype": args.dtype,
        "distil": args.distil,
        "trained on": None if args.distil is None else all_texts.sha256,
    }
    facts = {
        "fitted to": len(fit),
        "held out": len(held_out),
        "of": held_out.name,
        "note": None if dev else NOT_UNSEEN,
    }
    distillation = None
    if args.distil is not None:
        data, labelled = encode(all_texts, tokenizer, longest), bool(texts.labels)
        distillation = Distillation(model, data, labelled, args.distil, Quality(model, judged), args.seed, args.device)
    return Job(args, model, tokenizer, work, settings, shared, search, judged, distillation, facts, given, head)


def as_timed(model: Any, dtype: torch.dtype | None, backend: str) -> Any:
    """Return a model as the clock runs it: plain in its own dtype itself, else by `optimize_for_inference`."""
    if backend == PLAIN and dtype in (None, model.dtype):
        return model.eval()
    return optimize_for_inference(model, dtype=dtype, backend=backend)


def warn_of_few_texts(tokens: int, texts: int, config: BertConfig) -> None:
    """Warn before the work if the texts have too few tokens for the widest matrix that is fitted."""
    wanted = FEW * config.intermediate_size
    if tokens < wanted:
        warnings.warn(
            f"the {texts} texts to fit to have {tokens:,} tokens, and matrices up to"
            f" {config.intermediate_size:,} inputs: so few are fitted at the cost of other texts; give"
            f" {wanted:,} tokens or more, such as {math.ceil(wanted * texts / tokens):,} texts",
            stacklevel=2,
        )


def read_model(
    args: argparse.Namespace, config: BertConfig, texts: Examples, dev: Examples | None
) -> tuple[Any, BertTokenizer, dict[str, Any]]:
    """Return the model and its tokenizer, with --vocabulary those with fewer tokens, and facts for the report.

    Raises:
        ValueError: the model chooses between texts, which files of texts do not group.
    """
    cls, start = class_for(Source(args.checkpoint)), peak_memory()
    if issubclass(cls, MultipleChoiceBody):
        raise ValueError(f"{cls.__name__} reads groups of texts, --texts has one a row: use bertlite.prune_to_macs")
    model = load_trained(cls, args.checkpoint, device=args.device)
    tokenizer = BertTokenizer.from_pretrained(args.checkpoint)
    given = {"dense_bytes": file_size(model), "start_bytes": start}
    if not args.vocabulary:
        return model, tokenizer, given
    small, small_tokenizer, facts = with_fewer_tokens(model, tokenizer, texts, dev, 0, args.max_length)
    return small, small_tokenizer, {**given, "vocabulary": facts}


def read_targets(args: argparse.Namespace) -> dict[Path, Target]:
    """Return the folder of each target: --out for one, for several a folder in it for each, such as FOLDER/2x.

    Raises:
        ValueError: a target is not valid, or two have one folder.
    """
    found = [Target.parse(text, args.size) for text in args.target]
    folders = [args.folder / target.text.replace(" ", "") for target in found] if found[1:] else [args.folder]
    if len(set(folders)) < len(folders):
        raise ValueError(f"a target is given twice: {', '.join(args.target)}")
    return dict(zip(folders, found, strict=True))


def finished_report(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the report in a folder that the same command wrote, None if there is nothing in it.

    Raises:
        FileExistsError: there is something else.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    path = folder / REPORT
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if found.get("settings") != settings:
        raise FileExistsError(f"{folder} is there already: name another folder")
    return found


def write_result(job: Job, folder: Path, model: Any, report: dict[str, Any]) -> None:
    """Write the model with its card and report, and print the report."""
    texts = report["texts"]
    made = MADE.format(target=report["target"], count=texts["fitted to"])
    how = [made + (describe_distillation(report) if report["distilled"] else UNTRAINED)]
    how += [texts["note"]] if texts["note"] else []
    if "vocabulary" in report:
        how += [*describe(report["vocabulary"]), SAME_TOKENS]
    write_model(
        folder,
        model,
        job.args.checkpoint,
        tokenizer=job.tokenizer,
        figures=figures_of(report),
        how=how,
        report=report,
    )
    print_report(report, folder)


def describe_distillation(report: dict[str, Any]) -> str:
    """Return what was trained, for how long and with which texts."""
    facts = report["distilled"]
    labels = " and for the labels" if facts["labels"] else ""
    outputs = "vectors" if "cosine" in report else "predictions"
    more = {"labels": labels, "outputs": outputs, "checks": CHECKS + 1, "judged": describe_held_out(report)}
    return TRAINED.format(**{**facts, **more})


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


def facts_of(found: Outcome, is_constant: bool) -> dict[str, Any]:
    """Return the sizes and the times of the pruned model, and whether it meets the target: not if it is constant."""
    heads, neurons = units_kept(found.model.config)
    verdict = "constant" if is_constant else found.verdict
    return {
        "heads_kept": heads,
        "neurons_kept": neurons,
        "parameters": found.model.num_parameters(),
        "macs": found.plan.macs,
        "bytes": file_size(found.model),
        "expected_loss": found.plan.loss,
        **found.times,
        "sizes_by": found.plan.by,
        "met": None if verdict is None else verdict == "right",
        "verdict": VERDICTS[verdict],
    }


def read_both(args: argparse.Namespace, config: BertConfig) -> tuple[Examples, Examples | None]:
    """Read the texts to fit to, and those of --dev; plain texts have no labels, which those of --dev may have.

    Raises:
        ValueError: labels are for judging, and none are named.
    """
    if args.labels_for == "judging" and args.label is None:
        raise ValueError("--labels-for judging needs --label NAME, the column with the labels")
    if args.dev is None:
        return read_texts(DataSource(args.texts, args.text, args.label, args.columns), config), None
    label = None if format_of(args.texts) == "text" or args.labels_for == "judging" else args.label
    texts = read_texts(DataSource(args.texts, args.text, label, args.columns), config)
    dev = read_texts(DataSource(args.dev, args.text, args.label, args.columns), config)
    task_of_head(config.num_labels).check_both(texts, dev)
    return texts, dev


def way_to_allocate(args: argparse.Namespace, target: Target) -> str:
    """Return the cost by which sizes are chosen, "latency", "macs" or "bytes".

    Raises:
        ValueError: --allocate latency does not fit the target or the backend.
    """
    timed, plain = target.is_timed, args.backend == PLAIN
    if args.allocate == "latency" and not timed:
        raise ValueError(f"the target {target.text} is neither a speed nor a time, which --allocate latency needs")
    if target.is_size:
        return "bytes"
    if args.allocate == "auto":
        return "latency" if timed and plain else "macs"
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
        Figure("megabytes of the weights", report["bytes"] / 1e6, dense=report["dense_bytes"] / 1e6),
    ]
    if report["every_token"]:
        name = f"the same with every token in the last layer, as transformers computes it, at {timed_work(report)}"
        figures.append(Figure(name, report["every_token"]["speedup"]["median"], dense=1.0))
    named = {name: text for name, text in LIKENESS.items() if name in report}
    if "cosine" not in named:
        name = f"divergence from the given model's predictions, in nats, {held}"
        figures.append(Figure(name, report["kl"], dense=0.0))
    figures += [Figure(f"{text}, {held}", report[name], dense=1.0) for name, text in named.items()]
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
    pruned, dense = report["seconds"]["median"], report["dense_seconds"]["median"]
    print(f"heads of each layer: {report['heads_kept']}, neurons: {report['neurons_kept']}")
    if report["distilled"]:
        print(describe_distillation(report))
    print(f"MACs: {100 * report['macs']:.1f} % of the unpruned model's")
    print(f"weights: {report['bytes'] / 1e6:.4g} MB, were {report['dense_bytes'] / 1e6:.4g} MB")
    if "vocabulary" in report:
        print(*describe(report["vocabulary"]), SAME_TOKENS, sep="\n")
    print(
        f"time at {timed_work(report)}: {short_time(pruned)}, was {short_time(dense)}:"
        f" {with_spread(report['speedup'])} x as fast"
    )
    if report["every_token"]:
        slower = with_spread(report["every_token"]["speedup"])
        print(f"the last layer computes [CLS] alone, as bertlite does; every token, as transformers does: {slower} x")
    alike = [f"{text} {report[name]:.3f}" for name, text in LIKENESS.items() if name in report]
    nats = [] if "cosine" in report else [f"{report['kl']:.4f} nats from the given model"]
    print(f"on {describe_held_out(report)}: {', '.join([*nats, *alike])}", end="")
    if "score" in report:
        interval = show_interval(report["score_low"], report["score_high"])
        change = show_interval(report["difference_low"], report["difference_high"], "+")
        print(
            f"\n{report['metric']} {100 * report['score']:.1f}{interval}, was {100 * report['dense_score']:.1f}:"
            f" {100 * report['difference']:+.1f}{change}, p = {report['p']:.2g}",
            end="",
        )
    print("".join(f"\n{line}" for line in [report["texts"]["note"]] if line))
    lost = report["lost"]
    much = "" if lost["points"] <= lost["limit"] else f", but {lost['points']:.1f} points of {lost['of']} are lost"
    print(f"target {report['target']}: {report['verdict']}{much}")
    print(f"model: {folder}")
    print(f"next: bertlite evaluate {folder} --dev FILE --against {report['checkpoint']}")
    print(f"  or: bertlite export {folder} --out FOLDER")
