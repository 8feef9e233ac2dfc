"""The work of `bertlite prune`: each action reads its arguments, calls the library, and prints."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bertlite import densify
from bertlite.checkpoint.families import read_config
from bertlite.checkpoint.files import Source
from bertlite.experiments import plots
from bertlite.experiments.cell import Cell, Setting, check_scoring
from bertlite.experiments.compare import (
    dense_result,
    describe_scores,
    describe_way,
    markdown_table,
    metric_of,
    note_on_balance,
    provenance,
    show_interval,
    summarise,
    task_of,
)
from bertlite.experiments.data import (
    NO_LABEL,
    DataSource,
    EncodedExamples,
    Examples,
    read_examples,
    read_tokenizer,
)
from bertlite.experiments.evaluate import TASKS, Task, evaluate, predict
from bertlite.experiments.experiment import MASKS, SCORES, Experiment, warn_of_overlap
from bertlite.experiments.files import (
    apply_mask,
    class_names,
    labels,
    model_sha256,
    prediction_lines,
    read_json,
    read_scores,
    units_kept,
    write_scores,
)
from bertlite.experiments.finetune import STATE, Recipe, finetune_, is_main_process, keep_metrics
from bertlite.experiments.ship import describe_finetuning, figures_of, report_of, write_run
from bertlite.experiments.statistics import Array, rank_correlations
from bertlite.experiments.sweep import grid, sweep
from bertlite.progress import Progress
from bertlite.records import METRICS, Record, Run, read_runs, write_json, write_record
from bertlite.shipping.folder import write_model

UNITS = {"heads": ("head",), "neurons": ("neuron",), "both": ("head", "neuron")}  # by --units
ENDS = {"head": "", "neuron": "-neurons"}  # of the names of files
FULL = "Removed heads are back in place, with weights of zero."


def main(args: argparse.Namespace) -> int:
    """Run an action and return the exit status."""
    return ACTIONS[args.action](args)


def finetune(args: argparse.Namespace) -> int:
    """Train a checkpoint on a task, in a run's folder."""
    task = TASKS[args.task]
    if task.apart:
        raise ValueError(f"{task.name} has no head to train; sentence-transformers trains sentence encoders")
    distil = read_distil(args)
    recipe = Recipe(epochs=args.epochs, lr=args.lr, batch_size=args.batch_size, seed=args.seed, distil=distil)
    train = read_training_data(args, task)
    changes = head_changes(train, task, args.num_labels)
    dev = read_examples(data_source(args, args.dev, args.dev_split), words=task.words, classes=train.classes)
    torch.manual_seed(args.seed)  # the head may be drawn
    model = task.load(args.checkpoint, **changes)
    teacher = None if args.teacher is None else read_teacher(args.teacher, task, model.config.num_labels)
    for examples in (train, dev):
        task.check(examples, model.config)
    warn_of_overlap(train, dev)
    tokenizer = read_tokenizer(args.checkpoint, args.max_length)
    train = train.sample(args.train_examples, args.seed)
    data, held_out = task.encode(train, tokenizer), task.encode(dev, tokenizer)
    if not is_main_process(args.device):  # another process writes
        finetune_(model, data, task, recipe, teacher=teacher, device=args.device, state=args.folder / STATE)
        return 0
    config = {
        "recipe": asdict(recipe),
        "task": args.task,
        "max_length": args.max_length,
        "checkpoint": args.checkpoint,
    }
    hashes, before = {"train": train.sha256, "dev": dev.sha256}, {"before": model_sha256(model)}
    if teacher is not None:
        config["teacher"], before["teacher"] = args.teacher, model_sha256(teacher)
    facts = {"data": hashes, "model": before, "device": args.device, "kept": (STATE, METRICS)}
    with Run("finetune", config, folder=args.folder, seed=args.seed, **facts) as run:
        state = run.folder / STATE
        keep_metrics(run.folder / METRICS, state)
        describe = partial(describe_metrics, model, held_out, task, dev.name)
        how = {"log": run.log, "describe": describe, "device": args.device, "progress": True, "state": state}
        finetune_(model, data, task, recipe, teacher=teacher, **how)
        outputs, truth = predict(model, held_out, task), held_out.targets()
        run.results = {**evaluate(outputs, truth, task), "sha256": model_sha256(model)}
        run.save_predictions(prediction_lines(truth, outputs=outputs))
        write_model(
            run.folder / "model",
            model,
            args.checkpoint,
            class_names=class_names(model.config),
            figures=figures_of(outputs, truth, task, dev.name, run.results, {}),
            how=describe_finetuning(recipe, train.name, args.teacher),
            report=report_of(run.facts, run.results),
        )
        state.unlink(missing_ok=True)
    print(*(f"{name} {value:.4f}" for name, value in run.results.items() if name != "sha256"), sep="   ")
    print(f"model: {run.folder / 'model'}")
    write_answer(args, runs=run_facts(read_runs(run.folder)))
    return 0


def describe_metrics(model: Any, data: EncodedExamples, task: Task, name: str) -> str:
    """Return the scores of a model on examples, in words."""
    scores = evaluate(predict(model, data, task), data.targets(), task)
    return f"{name}: {', '.join(f'{metric} {score:.4f}' for metric, score in scores.items())}"


def read_distil(args: argparse.Namespace) -> float:
    """Return the weight of a teacher's predictions."""
    share = 0.5 if args.distil is None and args.teacher is not None else args.distil or 0.0
    if (share > 0) != (args.teacher is not None) or share > 1:
        raise ValueError(
            f"--distil is {share:g}; with --teacher give a number above 0 and up to 1; without it, leave it out"
        )
    return share


def read_teacher(checkpoint: str, task: Task, labels: int) -> Any:
    """Load a teacher whose head has as many outputs as the model that it teaches."""
    teacher = task.load(checkpoint)
    if teacher.config.num_labels != labels:
        raise ValueError(f"the teacher {checkpoint} has {teacher.config.num_labels} outputs, the model {labels}")
    return teacher


def read_training_data(args: argparse.Namespace, task: Task) -> Examples:
    """Read the examples to train on; names of labels are classes, the checkpoint's if it has them all."""
    named = task.labels is torch.long
    known = class_names(read_config(Source(args.checkpoint))) if named else ()
    source = data_source(args, args.train, args.train_split)
    return read_examples(source, words=task.words, classes=known, collect=named)


def head_changes(train: Examples, task: Task, num_labels: int | None) -> dict[str, Any]:
    """Return the changes to a checkpoint's config that give its head the classes of the data, with their names.

    Raises:
        ValueError: there is only one class, or their number differs from --num-labels.
    """
    if task.labels is not torch.long:
        return {"num_labels": num_labels or 1}
    if not train.classes:
        found = {x for x in train.every_label() if x != NO_LABEL}
        if len(found) < 2:
            raise ValueError(f"{train.name} has {len(train)} examples with one label; {task.name} needs two or more")
        return {"num_labels": num_labels or max(2, int(max(found)) + 1)}
    if num_labels not in (None, len(train.classes)):
        raise ValueError(
            f"{train.name} has {len(train.classes)} classes, {', '.join(train.classes)}: leave --num-labels"
            f" {num_labels} out"
        )
    if len(train.classes) < 2:
        raise ValueError(f"{train.name} has {len(train)} examples of one class, {train.classes[0]}; name two or more")
    names = dict(enumerate(train.classes))
    return {"num_labels": len(names), "id2label": names, "label2id": {name: i for i, name in names.items()}}


def write_answer(args: argparse.Namespace, **facts: Any) -> None:
    """Write the record of an action, if requested."""
    if args.record:
        write_json(args.record, {"what": f"bertlite prune {args.action}", **facts})


def run_facts(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the facts of runs with their folders; JSON-ready."""
    return [{"folder": str(record.folder), **record.facts} for record in records]


def data_source(args: argparse.Namespace, path: str, split: str | None) -> DataSource:
    """Return the source of examples that the arguments describe."""
    return DataSource(path, args.text, args.label, args.columns, args.classes, split)


def read_setting(args: argparse.Namespace) -> Setting:
    """Return the setting of `run` and `curve` that the arguments describe."""
    recipe = Recipe(lr=args.lr, batch_size=args.batch_size, distil=args.distil)
    return Setting(
        args.checkpoint,
        args.task,
        data_source(args, args.train, args.train_split),
        data_source(args, args.dev, args.dev_split),
        max_length=args.max_length,
        calibration=args.calibration,
        retrain=args.train_examples,
        recipe=recipe,
    )


def score(args: argparse.Namespace) -> int:
    """Score the heads or neurons of a checkpoint by each criterion, write the scores and draw them."""
    units = UNITS[args.units]
    for criterion, unit in product(args.criteria, units):
        check_scoring(criterion, unit)
    cells = [Cell(criterion, seed=args.seed) for criterion in args.criteria]
    data = data_source(args, args.train, args.train_split)
    setting = Setting(args.checkpoint, args.task, data, data, args.max_length, args.calibration)
    experiment = Experiment(setting, args.device)
    for cell in cells:
        experiment.check(cell)
    found: dict[str, dict[str, Array]] = {unit: {} for unit in units}
    with Progress(len(cells) * len(units), "criteria", what="score") as progress:
        for cell, unit in product(cells, units):
            given = experiment.score(experiment.dense, cell, neurons=unit == "neuron")
            scores = found[unit][cell.criterion] = given.numpy()
            path = args.folder / f"{cell.criterion.replace('/', '-')}{ENDS[unit]}"
            write_scores(f"{path}.json", given, cell.criterion, experiment.hashes["model"]["dense"])
            draw = plots.heat_map if unit == "head" else plots.sorted_scores
            plots.save(draw(scores, title=cell.criterion), path)
            progress.print(describe_scores(cell.criterion, scores, unit))
            progress.advance()
    for unit, each in found.items():
        if len(each) > 1:
            names, matrix = rank_correlations(each)
            figure = plots.rank_correlation(names, matrix, of=unit)
            plots.save(figure, args.folder / f"rank-correlation{ENDS[unit]}")
    print(f"\nscores and figures: {args.folder}")
    facts = {
        {"head": "scores", "neuron": "neuron_scores"}[unit]: {name: scores.tolist() for name, scores in each.items()}
        for unit, each in found.items()
    }
    write_answer(args, model=experiment.hashes["model"], **facts)
    return 0


def run(args: argparse.Namespace) -> int:
    """Run one cell."""
    cell = Cell(
        args.criterion,
        args.fraction,
        repair=args.repair,
        epochs=args.epochs,
        seed=args.seed,
        **choice_facts(args),
    )
    experiment = Experiment(read_setting(args), args.device, progress=True)
    folder = experiment.run(
        cell, args.folder, scores=args.scores, neuron_scores=args.neuron_scores, save_model=args.save_model
    )
    records = read_runs(folder)
    print_table(records, args.metric)
    print(f"run: {folder}")
    write_answer(args, runs=run_facts(records))
    return 0


def choice_facts(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a cell that `run` and `curve` share."""
    equal = args.allocate == "equal"
    return {
        "neurons": args.neurons,
        "uniform": equal,
        "at_least": args.at_least,
        "steps": args.steps,
        "allocate": "scores" if equal else args.allocate,
        "neuron_criterion": args.neuron_criterion or "",
        "gate_steps": args.gate_steps,
    }


def curve(args: argparse.Namespace) -> int:
    """Run a grid of cells."""
    cells = grid(
        args.criteria,
        args.fractions,
        repairs=args.repairs,
        epochs=args.epochs,
        seeds=args.seeds,
        random_seeds=args.random_seeds,
        **choice_facts(args),
    )
    folders = sweep(
        read_setting(args),
        cells,
        args.folder,
        processes=args.processes,
        device=args.device,
        save_model=args.save_model,
        progress=True,
    )
    records = [record for folder in folders for record in read_runs(folder)]
    print_table(records, args.metric)
    write_answer(args, runs=run_facts(records))
    return 0


def print_table(records: Sequence[Record], metric: str | None) -> None:
    """Print a metric of runs by their way of pruning."""
    task_of(records)
    print_rows(records, summarise(records, metric=metric), metric_of(records, metric))


def print_rows(records: Sequence[Record], rows: Sequence[dict[str, Any]], metric: str) -> None:
    """Print a table of a metric, the dense model's, and the samples of the intervals."""
    over = " or ".join(dict.fromkeys(row["over"] for row in rows))
    print(f"100 x {metric} by the share of heads removed, with 95 % intervals over {over} (runs, where several)\n")
    print(markdown_table(rows, metric))
    dense = dense_result(records)
    if metric in dense:
        print(f"\ndense: {100 * dense[metric]:.1f}")
    note = note_on_balance(labels(records[0]), metric)
    if note is not None:
        print(f"note: {note}")


def compare(args: argparse.Namespace) -> int:
    """Compare finished runs: print a table and tests, write rows, draw figures."""
    records = [record for root in args.roots for record in read_runs(root, name="prune")]
    rows = summarise(records, args.against, args.metric)
    task, metric = task_of(records), metric_of(records, args.metric)
    dense = dense_result(records)
    print_rows(records, rows, metric)
    for row in rows:
        if "p" in row:
            name = ", ".join(filter(None, describe_way(row)))
            interval = show_interval(row["difference_low"], row["difference_high"], "+")
            print(
                f"{100 * row['fraction']:g} % {name}: {100 * row['difference']:+.1f}{interval} over {args.against},"
                f" p = {row['p']:.3f}"
                + (f", by McNemar's exact test {row['mcnemar']:.3f}" if "mcnemar" in row else "")
            )
    if args.record:
        commands = sorted({record.facts["command"] for record in records})
        models = sorted({record.facts["model"]["dense"] for record in records})
        write_record(
            args.record,
            {
                "what": "bertlite prune",
                "task": task.name,
                "headline": metric,
                "commands": commands,
                **provenance(records),
                "data": records[0].facts["data"],
                "models": models,
                "setting": records[0].config["setting"],
                "dense": dense,
                "rows": rows,
            },
        )
    if ".json" in args.out:
        print(f"rows: {args.record}")
    if args.folder:
        draw_figures(records, rows, args.folder, metric)
        print(f"figures: {args.folder}")
    return 0


def draw_figures(records: Sequence[Record], rows: Sequence[dict[str, Any]], folder: Path, metric: str) -> None:
    """Draw curves, heads per layer, a heat map for each criterion, and the correlation of the criteria."""
    plots.save(plots.curves(rows, metric, dense_result(records).get(metric)), folder / "curves")
    first: dict[str, Record] = {}
    for record in sorted(records, key=lambda record: -record.config["cell"]["fraction"]):
        if record.config["cell"]["steps"] == 1:
            first.setdefault(record.config["cell"]["criterion"], record)
    if not first:
        return
    dense_model = next(iter(first.values())).facts["model"]["dense"]
    scores = {
        name: read_scores(record.folder / SCORES, dense_model).numpy()
        for name, record in first.items()
        if record.facts["model"]["dense"] == dense_model
    }
    for name, values in scores.items():
        pruned = {int(layer): heads for layer, heads in first[name].load(MASKS)["pruned_heads"].items()}
        share = f"{100 * first[name].config['cell']['fraction']:g} % removed"
        path = folder / f"heads-{name.replace('/', '-')}"
        plots.save(plots.heat_map(values, pruned, f"{name}, {share}"), path)
    kept = {name: first[name].results["heads_kept"] for name in scores}
    heads = next(iter(scores.values())).shape[1]
    plots.save(plots.heads_per_layer(kept, heads), folder / "heads-per-layer")
    if len(scores) > 1:
        names, matrix = rank_correlations(scores)
        plots.save(plots.rank_correlation(names, matrix), folder / "rank-correlation")


def export(args: argparse.Namespace) -> int:
    """Write the pruned checkpoint, a full-size one that computes the same, or only the mask."""
    out, other = args.folder, args.out.get(".json")
    if args.form == "mask":
        out, other = other, out
    if out is None or other is not None:
        raise ValueError(f"--form {args.form}: say --out {'FILE.json' if args.form == 'mask' else 'FOLDER'} alone")
    if out.exists():
        raise FileExistsError(f"{out} is there already: name another path")
    if args.form == "mask":
        mask = Path(args.source) / MASKS if args.mask is None else Path(args.mask)
        units = read_json(mask)
        write_json(out, units)
        print(f"mask: {out}")
        write_answer(args, mask=str(out), units=units)
        return 0
    model = write_export(args)
    heads, neurons = units_kept(model.config)
    print(f"heads of each layer: {heads}, neurons: {neurons}\nmodel: {out}")
    write_answer(args, model=str(out), heads_kept=heads, neurons_kept=neurons)
    return 0


def write_export(args: argparse.Namespace) -> Any:
    """Write the checkpoint of `export`, and return its model.

    Raises:
        ValueError: the run changed weights and did not save them.
    """
    full = args.form == "full"
    if args.mask is not None:
        pruned = apply_mask(args.mask, TASKS[args.task].load(args.source))
        model = densify(pruned) if full else pruned
        how = ["Heads and neurons were removed by a mask.", *([FULL] if full else [])]
        write_model(args.folder, model, args.source, how=how, base_model=args.base_model, pruned=pruned.config)
        return model
    (record,) = read_runs(Path(args.source))
    pruned = pruned_model(record)
    model = densify(pruned) if full else pruned
    options = {"base_model": args.base_model, "pruned": pruned.config, "note": FULL if full else ""}
    write_run(args.folder, model, record, TASKS[record.config["setting"]["task"]], source_of(record), **options)
    return model


def pruned_model(record: Record) -> Any:
    """Return the pruned model of a run.

    Raises:
        ValueError: the run changed weights and did not save them.
    """
    cell, task = record.config["cell"], TASKS[record.config["setting"]["task"]]
    if (record.folder / "model").is_dir():
        return task.load(str(record.folder / "model"))
    if cell["repair"] != "none" or cell["epochs"]:
        raise ValueError(
            f"{record.folder} repaired or retrained its model and did not save it: run it with --save-model"
        )
    return apply_mask(record.folder / MASKS, task.load(record.config["setting"]["model"]))


def source_of(record: Record) -> str:
    """Return the checkpoint with the tokenizer and modules of a run's model: its own if it was saved."""
    kept = record.folder / "model"
    return str(kept) if (kept / "tokenizer.json").is_file() else str(record.config["setting"]["model"])


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    action.__name__: action for action in (finetune, score, run, curve, compare, export)
}
