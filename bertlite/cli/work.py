"""The work of commands: a function of the library is called with the options, and its record is put in words.

The modules that a command needs are imported when it runs.
"""

import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from inspect import signature
from typing import Any, TypeAlias

from bertlite.embed.settings import EmbedSettings
from bertlite.experiments.settings import PruneSettings, Recipe, from_options

Outcome: TypeAlias = tuple[Any, Iterable[str], int]  # the record, or None; lines to print after it; the exit status
Work: TypeAlias = Callable[[Namespace], Outcome]


def run_function(module: str, name: str) -> Work:
    """Return the work of a command whose options have the names of a function's arguments.

    The module's `summary_lines(record, out)` yields the lines to print.
    """

    def run(args: Namespace) -> Outcome:
        home, options = import_module(module), {**vars(args), "progress": True}
        function = getattr(home, name)
        record = function(**{key: options[key] for key in signature(function).parameters if key in options})
        return record, home.summary_lines(record, args.out), 0

    return run


def run_inspect(args: Namespace) -> Outcome:
    """Inspect a checkpoint; the status is 1 if bertlite would not load it."""
    from bertlite.opened.inspection import SAME, format_report, inspect
    from bertlite.support.screen import printable

    record = inspect(args.checkpoint)
    return record, map(printable, format_report(record)), int(record["bertlite"]["outcome"] != SAME)


def run_parity(args: Namespace) -> Outcome:
    """Run the cases, or list them; the lines are a table of the claims and the verdict."""
    from bertlite.parity.command import ParitySettings, claims_table, differing, known_cases, matching, parity, verdict

    if args.list:
        return None, [case.name for case in matching(known_cases(args.device), args.only)], 0
    start = time.monotonic()
    settings = from_options(ParitySettings, vars(args))
    record = parity(args.checkpoint, settings, progress=True, verbose=args.verbose)

    def lines() -> Iterator[str]:
        yield f"\n{claims_table(record)}\n"
        yield from (f"written: {path}" for path in args.out.values())
        yield from verdict(record, time.monotonic() - start)

    return record, lines(), int(bool(differing(record)))


def run_evaluate(args: Namespace) -> Outcome:
    """Evaluate a checkpoint, or measure its speed; the status is 1 if another is better."""
    from bertlite.experiments.command import data_source
    from bertlite.experiments.data import DataSource, read_examples
    from bertlite.experiments.evaluate_command import describe_evaluation, evaluate, is_worse
    from bertlite.experiments.speed import describe_speed, measure_speed

    if args.speed != (args.texts is not None) or args.speed == (args.dev is not None):
        raise ValueError("give labelled examples with --dev DATA, or texts to time with --texts FILE --speed")
    shared = {"dtype": args.dtype, "backend": args.backend, "max_length": args.max_length, "device": args.device}
    if args.speed:
        texts = read_examples(DataSource(args.texts, args.text, None, args.columns)).inputs
        record = measure_speed(args.checkpoint, texts, against=args.against, **shared, progress=True)
        return record, describe_speed(record), 0
    asked = {"task": args.task, "against": args.against, "metric": args.metric}
    record = evaluate(args.checkpoint, data_source(vars(args), "dev"), **asked, **shared)
    return record, describe_evaluation(record), int(is_worse(record))


def run_embed(args: Namespace) -> Outcome:
    """Embed files, as one of torchrun's processes or alone; the first prints how much was written."""
    from bertlite.embed.command import embed, read_placement, summary_lines

    rank, world, device = read_placement(os.environ, args.device)
    settings = from_options(EmbedSettings, {**vars(args), "device": device})
    read = {name: getattr(args, name) for name in ("format", "column", "id", "columns")}
    record = embed(args.checkpoint, args.input, args.folder, settings, **read, rank=rank, world=world, progress=True)
    return record, summary_lines(record, args.out) if rank == 0 else (), 0


def run_prune_to(args: Namespace) -> Outcome:
    """Prune to each target; the status is 1 if a measured time misses its target, or too much is lost."""
    from bertlite.experiments.budget.command import prune_to
    from bertlite.support.memory import map_large_blocks

    map_large_blocks()
    inputs, settings = (args.checkpoint, args.target, args.texts, args.folder), from_options(PruneSettings, vars(args))
    record = prune_to(*inputs, dev=args.dev, settings=settings, keep=args.keep, progress=True)
    again = f"for other targets or minutes, with the same model and texts: --keep {args.keep}"
    reports = record.get("targets", [record])
    good = all(report["met"] and not report["lost"]["too_much"] for report in reports)
    return record, [] if args.keep is None else [again], int(not good)


def run_finetune(args: Namespace) -> Outcome:
    """Train a checkpoint on a task; the lines are its metrics, and the next step."""
    from bertlite.experiments.command import data_source, finetune, training_lines

    train, dev = (data_source(vars(args), name) for name in ("train", "dev"))
    options = {name: getattr(args, name) for name in ("task", "max_length", "train_examples", "device")}
    recipe = from_options(Recipe, vars(args))
    record = finetune(args.checkpoint, train, dev, args.folder, recipe=recipe, progress=True, **options)
    if not record["runs"]:
        return None, (), 0  # another process writes
    return record, training_lines(record, args.folder), 0


def run_prune_run(args: Namespace) -> Outcome:
    """Run every combination of criterion, share, repair, epochs and seed; the status is 1 if some diverged."""
    from bertlite.experiments.command import data_source, describe_rows, prune_compare
    from bertlite.experiments.experiment import Experiment, Setting, grid, prune_run

    repeated = {name: getattr(args, name) for name in ("repairs", "epochs", "seeds", "random_seeds", "at_least")}
    cells = grid(args.criteria, args.fractions, **repeated)
    train, dev = (data_source(vars(args), name) for name in ("train", "dev"))
    sizes = {"max_length": args.max_length, "calibration": args.calibration, "retrain": args.train_examples}
    recipe = Recipe(lr=args.lr, batch_size=args.batch_size)
    experiment = Experiment(Setting(args.checkpoint, args.task, train, dev, **sizes, recipe=recipe), args.device)
    metric = experiment.task.metric(args.metric, experiment.dense.config.num_labels)
    record = prune_run(experiment, cells, args.folder, save_model=args.save_model, progress=True)
    folders = [facts["folder"] for facts in record["runs"]]

    def lines() -> Iterator[str]:
        yield from describe_rows(prune_compare(folders, metric=metric))
        yield f"run: {folders[0]}" if len(folders) == 1 else f"runs: {args.folder}"

    return record, lines(), int(len(folders) < len(cells))


def run_prune_compare(args: Namespace) -> Outcome:
    """Compare finished runs; the lines are a table and tests."""
    from bertlite.experiments.command import describe_rows, describe_tests, prune_compare

    record = prune_compare(args.roots, against=args.against, metric=args.metric)
    written = [f"rows: {args.record}"] if ".json" in args.out else []
    return record, [*describe_rows(record), *describe_tests(record, args.against), *written], 0
