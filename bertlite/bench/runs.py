"""Pruned models beside the dense one that they come from: time, size and quality, from the folders of runs."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bertlite import optimize_for_inference, prune_heads
from bertlite.bench.work import full
from bertlite.checkpoint.saving import dtype_name
from bertlite.experiments.compare import dense_result, describe_way, interval_of, task_of, way_of
from bertlite.experiments.evaluate import TASKS, Task
from bertlite.experiments.experiment import Setting
from bertlite.experiments.files import model_sha256, pruned_heads
from bertlite.importance import macs
from bertlite.inference.optimize import parse_compute_dtype
from bertlite.progress import Progress
from bertlite.records import Record, Run, quartiles, read_runs, write_json
from bertlite.timing import alternate, ratios, with_spread

SHAPES = ((1, 16), (8, 128))


def main(args: argparse.Namespace) -> int:
    """Measure the models of `args.runs` beside the dense one, in a run's folder, and print the table."""
    shapes, asked = args.shapes or SHAPES, args.backend or "auto"
    records = [record for folder in args.runs for record in read_runs(folder, name="prune")]
    task, models = task_of(records), dense_and_pruned(records, args.device)
    dtype = parse_compute_dtype(args.dtype) or models["dense"].dtype
    prepared = prepared_models(models, dtype, asked)
    backend = prepared["dense"].backend
    config = {
        "runs": [str(record.folder) for record in records],
        "shapes": shapes,
        "rounds": args.rounds,
        "dtype": args.dtype,
        "backend": asked,
    }
    hashes = {"dense": records[0].facts["model"]["dense"]}
    with Run("bench", config, folder=args.folder, device=args.device, model=hashes) as run:
        with Progress(len(shapes) * args.rounds, "rounds", what="bench") as progress:
            lines = latency(prepared, shapes, args.rounds, args.device, after_round=progress.advance)
        for line in lines:
            run.log(**line)
        results = {"dense": {task.headline: dense_result(records)[task.headline]}}
        results |= {run_label(record): headline_with_interval(record, task) for record in records}
        for name, model in models.items():
            results[name]["parameters"] = model.num_parameters()
        run.results = {"headline": task.headline, "backend": backend, "dtype": dtype_name(dtype)}
        run.results |= {"models": results, "latency": lines}
    print_latency(run.results)
    print(f"run: {args.folder}")
    if args.record:
        (written,) = read_runs(args.folder)
        write_json(args.record, {"what": "bertlite bench", "runs": [{"folder": str(args.folder), **written.facts}]})
    return 0


def prepared_models(
    models: Mapping[str, Any], dtype: torch.dtype | None = None, backend: str = "auto"
) -> dict[str, Any]:
    """Return the models to measure: all optimised in one dtype and with one backend.

    Args:
        dtype, backend: of `optimize_for_inference`; None is the models' own dtype.  The choice of "auto" for the first
            model is the backend of all.

    Raises:
        ValueError: there is no such backend, or it does not run these models in this dtype.
        RuntimeError: the kernels cannot be compiled.
    """
    prepared = {}
    for name, model in models.items():
        prepared[name] = optimize_for_inference(model, dtype, backend)
        backend = prepared[name].backend
    return prepared


def latency(
    models: Mapping[str, Any],
    shapes: Iterable[tuple[int, int]],
    rounds: int = 21,
    device: str = "cpu",
    after_round: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Time each model beside the first, the dense one.

    Args:
        shapes: (sequences, tokens) of the inputs.
        after_round: called after each timed round.

    Returns:
        One line for each shape and model: "batch", "length", "model", "seconds" (quartiles), "speedup", the median
        over rounds of the dense model's seconds over this one's, with its quartiles, and "macs", the share of the
        dense encoder's multiply-accumulates.

    Raises:
        ValueError: fewer rounds than `bertlite.timing.FEWEST`.
    """
    dense = next(iter(models))
    lines = []
    for batch, length in shapes:
        inputs = full(batch, length).inputs(models[dense].config.vocab_size, device)
        with torch.inference_mode():
            found = alternate(
                {name: partial(model, **inputs) for name, model in models.items()},
                rounds,
                device,
                after_round=after_round,
            )
        for name, seconds in found.items():
            share = macs(models[name].config, length) / macs(models[dense].config, length)
            lines.append(
                {
                    "batch": batch,
                    "length": length,
                    "model": name,
                    "seconds": quartiles(seconds),
                    "speedup": quartiles(ratios(found, dense, name)),
                    "macs": share,
                }
            )
    return lines


def print_latency(results: Mapping[str, Any]) -> None:
    """Print a line for each model and shape, and what was timed."""
    headline = results["headline"]
    print(f"{'model':<44} {'input':>8} {'ms':>8} {'speed-up':>22} {'FLOPs':>6} {headline:>9}")
    for line in results["latency"]:
        print(
            f"{line['model']:<44} {line['batch']:>3}x{line['length']:<4} {1e3 * line['seconds']['median']:8.2f}"
            f" {with_spread(line['speedup']):>22} {100 * line['macs']:4.0f} %"
            f" {results['models'][line['model']][headline]:9.4f}"
        )
    print(f"backend {results['backend']}, {results['dtype']}")


def dense_and_pruned(records: Sequence[Record], device: str) -> dict[str, Any]:
    """Return the dense model that runs began with, as "dense", and their pruned models by label.

    Weights are the dense model's: speed depends on the shapes alone, not on repair or retraining.

    Raises:
        ValueError: the runs began with several models, or with another one than is there now.
    """
    hashes = {record.facts["model"]["dense"] for record in records}
    if len(hashes) > 1:
        raise ValueError(f"the runs began with {len(hashes)} dense models; time is measured beside one")
    setting = records[0].config["setting"]
    dense = TASKS[setting["task"]].load(setting["model"], device=device)
    if model_sha256(dense) not in hashes:
        raise ValueError(f"{setting['model']} is not the model that these runs pruned: it has changed since")
    return {"dense": dense, **{run_label(record): prune_heads(dense, pruned_heads(record)) for record in records}}


def run_label(record: Record) -> str:
    """Return a run's way of pruning in words, which tables and figures show."""
    cell = record.config["cell"]
    way = dict(way_of(record, calibration=Setting.calibration))  # it does not affect speed
    name, repair, epochs = describe_way(way)
    heads = f"-{100 * cell['fraction']:g} % heads"
    label = ", ".join(filter(None, (heads, name, repair, epochs and f"epochs {epochs}")))
    return f"{label}, seed {cell['seed']}" if cell["seed"] else label


def headline_with_interval(record: Record, task: Task) -> dict[str, float]:
    """Return the headline of a run with the ends of its interval."""
    interval, _ = interval_of([record], task)
    ends = {} if interval is None else {"low": interval.low, "high": interval.high}
    return {task.headline: record.results[task.headline], **ends}
