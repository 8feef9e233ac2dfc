"""The sections of our own records: forward passes, pruned models, starting, and training."""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import bertlite
import bertlite.inference
from bertlite.experiments.budget.work import Work, full
from bertlite.support.timing import alternate
from scripts.measure.speed import startup
from scripts.measure.speed.accuracy import Accuracy, Forward, accuracies
from scripts.measure.speed.batches import filled, padding, ragged
from scripts.measure.speed.bench import Bench, Section, forward_sections, section_of, time_right_runs
from scripts.measure.speed.engines import ALL, FLOATS, forward_of
from scripts.measure.speed.memory import peak_bytes
from scripts.measure.speed.under import USES, under

WHOLE = "whole"


def sections(device: str, longest: int) -> dict[str, Section]:
    """Return the sections by name, in the order of running; no batch is longer than the longest."""
    running = {**forward_sections(device, longest), "pruned": pruned}
    trained = (ragged("SST-2", 32, 128), ragged("WikiText-2", 8, 512), full(8, 128))
    for work in trained if device == "cpu" else (*trained, ragged("SST-2", 64, 128), full(64, 128)):
        running[f"training {work.name}"] = partial(training, work)
        if device != "cpu":
            running[f"training {work.name} by autocast"] = partial(training, work, autocast=True)
    if device != "cpu":
        return running
    running |= {f"under {name}": partial(under, name) for name in USES}
    return {"import": startup.imports, "loading": startup.loading, "cold start": startup.cold} | running


def pruned(bench: Bench) -> dict[str, Any]:
    """Time the whole model, and models without half of their heads, of their neurons, and of both.

    On the CPU they are optimised.
    """
    work, backend = full(8, 128), "native" if bench.device == "cpu" else "plain"
    batch = work.inputs(bench.config.vocab_size, bench.device, bench.config.pad_token_id or 0)
    runs: dict[str, Forward] = {}
    found: dict[str, Accuracy] = {}
    for what, model in pruned_models(bench).items():
        mine = {}
        for dtype in ALL if bench.device == "cpu" else FLOATS:
            name = f"bertlite {backend} {what} {dtype}"
            try:
                mine[name] = forward_of(
                    bertlite.optimize_for_inference(model, dtype=getattr(torch, dtype), backend=backend)
                )
            except (ValueError, RuntimeError) as error:  # this model cannot be run, or there is no compiler
                bench.missing[name] = str(error)
        found |= accuracies(copy.deepcopy(model).double(), mine, batch)
        runs |= mine
    times = time_right_runs(runs, batch, found, bench)
    wholes = {name: re.sub("half.* ", f"{WHOLE} ", name) for name in times}
    over = [(whole, name) for name, whole in wholes.items() if whole != name and whole in times]
    return section_of(f"bertlite, {work.name}, pruned", bench, times, over, found)


def pruned_models(bench: Bench) -> dict[str, bertlite.BertModel]:
    """Return the model, and copies without half of its heads, of its neurons, and of both."""
    layers = range(bench.config.num_hidden_layers)
    heads = {i: range(bench.config.num_attention_heads // 2) for i in layers}
    neurons = {i: range(bench.config.intermediate_size // 2) for i in layers}
    whole = bertlite.BertModel.from_pretrained(bench.folder, dtype=torch.float32, device=bench.device)
    fewer = bertlite.prune_heads(whole, heads)
    return {
        WHOLE: whole,
        "half the heads": fewer,
        "half the neurons": bertlite.prune_neurons(whole, neurons),
        "half of both": bertlite.prune_neurons(fewer, neurons),
    }


def training(work: Work, bench: Bench, autocast: bool = False) -> dict[str, Any]:
    """Time a classifier's forward, backward and step of AdamW on a batch, dropout on.

    AdamW is fused, as transformers' Trainer has it by default; with `autocast` matmuls are in bfloat16.  On a GPU
    TrainingStep runs too.
    """
    import transformers

    batch: dict[str, Tensor] = {
        **work.inputs(bench.config.vocab_size, bench.device),
        "labels": torch.arange(len(work.lengths), device=bench.device) % 2,
    }
    models = {
        "transformers sdpa": transformers.BertForSequenceClassification.from_pretrained(
            bench.folder, attn_implementation="sdpa"
        ),
        **{
            f"bertlite {name}": bertlite.BertForSequenceClassification(
                bertlite.BertConfig.from_json_file(bench.folder / "config.json", attn_implementation=name)
            )
            for name in ("sdpa", "packed")
        },
    }

    def stepping(model: Any) -> Callable[[], None]:
        model.to(bench.device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast(torch.device(bench.device).type, torch.bfloat16, enabled=autocast):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()

        return step

    steps: dict[str, Callable[[], Any]] = {name: stepping(model) for name, model in models.items()}
    if torch.device(bench.device).type == "cuda":
        model = bertlite.BertForSequenceClassification(
            bertlite.BertConfig.from_json_file(bench.folder / "config.json", attn_implementation="auto")
        ).to(bench.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        recorded = bertlite.inference.TrainingStep(
            model.train(), optimizer, autocast=torch.bfloat16 if autocast else None
        )
        steps["bertlite TrainingStep"] = lambda: recorded(batch)
        recorded(batch)  # plainly
    times = alternate(steps, bench.rounds, bench.device, warm=1, seconds=bench.seconds, after_round=bench.after_round)
    over = [("transformers sdpa", name) for name in times if name.startswith("bertlite")]
    dtype = "bfloat16 by autocast" if autocast else "float32"
    found = section_of(f"training step, {work.name}, {filled(work):.0%} filled, {dtype}", bench, times, over, {})
    found |= {"work": work.name, "filled": filled(work), "padding": padding(work)}
    if bench.device != "cpu":
        found["peak_bytes"] = {name: peak_bytes(step, bench.device) for name, step in steps.items()}
    return found
