"""Checkpoints beside the first of them, such as pruned ones beside the dense one: time and size."""

import argparse
from functools import partial
from typing import Any

import torch

from bertlite import BertModel, optimize_for_inference
from bertlite.bench.sections import section_lines
from bertlite.bench.work import full
from bertlite.checkpoint.saving import dtype_name
from bertlite.importance import macs
from bertlite.inference import InferenceModel
from bertlite.inference.optimize import parse_compute_dtype
from bertlite.progress import Progress
from bertlite.records import write_json
from bertlite.timing import alternate, summary

SHAPES = ((1, 16), (8, 128))


def run_checkpoints(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Time the checkpoints on batches of each shape, print a section for each, and write the record after each.

    Raises:
        ValueError: there is no such dtype or backend, or it does not run these models.
    """
    models = load(args.checkpoints, args.device, parse_compute_dtype(args.dtype), args.backend or "auto")
    first, shapes = next(iter(models.values())), args.shapes or SHAPES
    record |= {"backend": first.backend, "dtype": dtype_name(first.compute_dtype)}
    words = min(model.config.vocab_size for model in models.values())
    with Progress(len(shapes) * args.rounds, "rounds", what="bench") as progress:
        for batch, length in shapes:
            work = full(batch, length)
            runs = {name: partial(model, **work.inputs(words, args.device)) for name, model in models.items()}
            times = alternate(runs, args.rounds, args.device, after_round=progress.advance)
            what = f"forward, {work.name}, backend {first.backend}, {record['dtype']}"
            section = summary(what, times, [(args.checkpoints[0], name) for name in list(models)[1:]])
            section["macs"] = {name: macs(model.config, length) for name, model in models.items()}
            record["sections"][f"forward {work.name}"] = section
            progress.print("\n".join(section_lines(f"forward {work.name}", section)))
            if args.record:
                write_json(args.record, record)


def load(checkpoints: list[str], device: str, dtype: torch.dtype | None, backend: str) -> dict[str, InferenceModel]:
    """Return the models without their heads, all optimised in one dtype and with one backend.

    Args:
        dtype, backend: of `optimize_for_inference`; None is the first model's own dtype.  The choice of "auto" for the
            first model is the backend of all.
    """
    models = {}
    for name in checkpoints:
        model = BertModel.from_pretrained(name, device=device, add_pooling_layer=False)
        dtype = dtype or model.dtype
        models[name] = optimize_for_inference(model, dtype, backend)
        backend = models[name].backend
    return models
