"""The sections of a record: each times some candidates in turn on the same work."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import bertlite
from bertlite.lab.bench import startup
from bertlite.lab.bench.engines import ENGINES, FLOATS, Forward, states
from bertlite.lab.bench.work import Work, ragged, works
from bertlite.lab.timing import alternate, ceilings, peak_bytes, summary
from bertlite.parity import reference

BASELINE = "transformers sdpa float32"
ERRORS = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.2}  # above these an engine computes something else
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
KINDS = {  # of operators, by parts of their names
    "matmuls": ("linear", "mm"),
    "attention": ("scaled_dot_product",),
    "LayerNorm": ("layer_norm",),
    "rounding": ("aminmax", "quantize"),
    "moving tokens": ("index_select", "cat", "copy_"),
}


@dataclass
class Bench:
    """One run of the benchmark: its settings, and the checkpoint and engines that sections share.

    Args:
        only: parts of the names of the engines to build, "" for all; the baseline is always built.
        seconds: time limit for the rounds of one section, if there have been `bertlite.lab.timing.FEWEST` of them.
        after_round: called after each timed round.
        kept: a folder for the checkpoint and the files exported from it, used again if they are there; by default a
            temporary one.
    """

    rounds: int
    device: str = "cpu"
    only: tuple[str, ...] = ("",)
    seconds: float = math.inf
    kept: Path | None = None
    after_round: Callable[[], object] = lambda: None
    missing: dict[str, str] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    @cached_property
    def folder(self) -> Path:
        """Folder of a checkpoint of bert-base's shape with random weights, as transformers initialises it."""
        place = self.kept or Path(self.stack.enter_context(TemporaryDirectory(prefix="bertlite-base-")))
        folder = place / "base"
        return folder if (folder / "config.json").exists() else reference.base_shaped(folder)

    @cached_property
    def config(self) -> bertlite.BertConfig:
        return bertlite.BertConfig.from_json_file(self.folder / "config.json")

    @cached_property
    def ceilings(self) -> dict[str, float]:
        """Limits of the machine."""
        return ceilings(self.device)

    @cached_property
    def runs(self) -> dict[str, Forward]:
        """Every chosen engine that can be built, by its name with its dtype."""
        built = {}
        for engine in ENGINES:
            for dtype in engine.dtypes:
                name = f"{engine.name} {dtype}"
                if name != BASELINE and not any(part in name for part in self.only):
                    continue
                reason = engine.reason_missing(self.device)
                if reason is None and dtype == "int8" and self.device != "cpu":
                    reason = "int8 runs on the CPU only"
                if reason is not None:
                    self.missing[name] = reason
                    continue
                built[name] = engine.build(self.folder, dtype, self.device)
        return built


def forward(work: Work, bench: Bench) -> dict[str, Any]:
    """Time one batch in every engine that computes the same as the baseline."""
    batch = work.inputs(bench.config.vocab_size, bench.device)
    runs = {name: run for name, run in bench.runs.items() if work.filled < 1 or "packed" not in name}
    errors = relative_errors(runs, batch)
    candidates = {name: partial(run, batch) for name, run in runs.items() if is_right(name, errors[name])}
    warm = 0 if bench.device == "cpu" else 2  # all have run; on a GPU graphs are recorded at the second run
    times = alternate(
        candidates, bench.rounds, bench.device, warm=warm, seconds=bench.seconds, after_round=bench.after_round
    )
    found = summary(f"forward, {work.name}, {work.filled:.0%} filled", times, ratio_pairs(times))
    found |= {"tokens": work.tokens, "filled": work.filled, "of_limit": limit_fractions(found["seconds"], work, bench)}
    if bench.device == "cpu":
        ours = {name: run for name, run in candidates.items() if name.startswith("bertlite optimised")}
        found["profile"] = {name: operator_shares(run) for name, run in ours.items()}
    else:
        found["peak_bytes"] = {name: peak_bytes(run, bench.device) for name, run in candidates.items()}
        layers = bench.config.num_hidden_layers
        found["demands"] = {name: gpu_demands(gpu_events(run), layers) for name, run in candidates.items()}
    return found | {"errors": errors, "wrong": [name for name in runs if name not in candidates]}


def relative_errors(runs: Mapping[str, Forward], batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each engine's last hidden states, by root mean square; the baseline is right.

    Padding does not count.
    """
    real = batch["attention_mask"].cpu().bool()
    truth = states(runs[BASELINE](batch))[real]
    return {name: float((states(run(batch))[real] - truth).norm() / truth.norm()) for name, run in runs.items()}


def is_right(name: str, error: float) -> bool:
    """Tell whether an engine with this error computes the same as the baseline, up to rounding."""
    return error <= ERRORS[name.split()[-1]]  # and never where it is nan


def ratio_pairs(times: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs whose ratio says how much faster the second is: the baseline over all, OpenVINO over bertlite."""
    pairs = [(BASELINE, name) for name in times if name != BASELINE and BASELINE in times]
    for name in times:
        peer = f"OpenVINO {name.split()[-1]}"
        if name.startswith("bertlite optimised") and peer in times:
            pairs.append((peer, name))
    return pairs


def limit_fractions(
    seconds: Mapping[str, Mapping[str, float]], work: Work, bench: Bench
) -> dict[str, dict[str, float]]:
    """Return the fraction of the machine's limit that each engine reaches, median and quartiles.

    The limit is that of the matmuls or of reading the weights, whichever takes longer; for int8 it is not measured.
    """
    config = bench.config
    layer = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    fractions = {}
    for name, taken in seconds.items():
        dtype = name.split()[-1]
        if dtype in bench.ceilings:
            computing = work.operations(config) / bench.ceilings[dtype]
            reading = config.num_hidden_layers * layer * BYTES[dtype] / bench.ceilings["bytes"]
            least = max(computing, reading)
            ends = {"low": "high", "median": "median", "high": "low"}  # the longer the time, the lower the fraction
            fractions[name] = {end: least / taken[other] for end, other in ends.items()}
    return fractions


def operator_shares(run: Callable[[], Any]) -> dict[str, float]:
    """Return the share of CPU time that each kind of operator takes, by torch's profiler, from most to least."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            run()
    spent: Counter[str] = Counter()
    for event in profile.key_averages():
        kinds = (kind for kind, parts in KINDS.items() if any(part in event.key for part in parts))
        spent[next(kinds, "other")] += event.self_cpu_time_total
    return {kind: time / spent.total() for kind, time in spent.most_common()}


def gpu_events(run: Callable[[], Any]) -> Iterator[tuple[str, bool]]:
    """Return the events that torch's profiler sees in one run: name, and whether it is on the GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    for event in profile.events() or ():
        yield event.name, event.device_type.name == "CUDA"


def gpu_demands(events: Iterable[tuple[str, bool]], layers: int) -> dict[str, float]:
    """Count the kernels of each layer, and the copies, launches and waits of a run on a GPU."""
    there, here = Counter[str](), Counter[str]()
    for name, on_gpu in events:
        (there if on_gpu else here)[name] += 1
    moves = sum(count for name, count in there.items() if name.startswith(("Memcpy", "Memset")))
    launches = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
    return {
        "kernels per layer": (there.total() - moves) / layers,
        "copies": sum(count for name, count in there.items() if name.startswith("Memcpy")),
        "launches": sum(count for name, count in here.items() if name.startswith(launches)),
        "waits": here["cudaStreamSynchronize"] + here["cudaEventSynchronize"],
    }


def training(bench: Bench, autocast: bool = False) -> dict[str, Any]:
    """Time a classifier's forward, backward and step of AdamW, at the lengths of SST-2, dropout on.

    AdamW is fused, as transformers' Trainer has it by default; with `autocast` matmuls are in bfloat16.
    """
    import transformers

    work = ragged("SST-2", 32, 128)
    batch: dict[str, Tensor] = {
        **work.inputs(bench.config.vocab_size, bench.device),
        "labels": torch.arange(32, device=bench.device) % 2,
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

    steps = {name: stepping(model) for name, model in models.items()}
    times = alternate(steps, bench.rounds, bench.device, warm=1, seconds=bench.seconds, after_round=bench.after_round)
    over = [("transformers sdpa", name) for name in times if name.startswith("bertlite")]
    dtype = "bfloat16 by autocast" if autocast else "float32"
    found = summary(f"training step, {work.name}, {work.filled:.0%} filled, {dtype}", times, over)
    if bench.device != "cpu":
        found["peak_bytes"] = {name: peak_bytes(step, bench.device) for name, step in steps.items()}
    return found


def pruned(bench: Bench) -> dict[str, Any]:
    """Time the optimised model without half of its heads, of its neurons, and of both, beside the whole one."""
    work, config = works()[2], bench.config
    batch = work.inputs(config.vocab_size, bench.device)
    layers = range(config.num_hidden_layers)
    heads = {i: range(config.num_attention_heads // 2) for i in layers}
    neurons = {i: range(config.intermediate_size // 2) for i in layers}
    candidates, over = {}, []
    for dtype in FLOATS:
        whole = bertlite.BertModel.from_pretrained(bench.folder, dtype=getattr(torch, dtype), device=bench.device)
        fewer = bertlite.prune_heads(whole, heads)
        models = {
            "whole": whole,
            "half the heads": fewer,
            "half the neurons": bertlite.prune_neurons(whole, neurons),
            "half of both": bertlite.prune_neurons(fewer, neurons),
        }
        for what, model in models.items():
            candidates[f"{what} {dtype}"] = partial(bertlite.optimize_for_inference(model), **batch)
            if model is not whole:
                over.append((f"whole {dtype}", f"{what} {dtype}"))
    times = alternate(candidates, bench.rounds, bench.device, seconds=bench.seconds, after_round=bench.after_round)
    return summary(f"bertlite optimised, {work.name}, pruned", times, over)


Section = Callable[[Bench], dict[str, Any]]


def sections(device: str) -> dict[str, Section]:
    """Return the sections by name, in the order of running."""
    starting: dict[str, Section] = {
        "import": lambda bench: startup.imports(bench.rounds, bench.after_round),
        "loading": lambda bench: startup.loading(bench.rounds, bench.folder, bench.after_round),
        "cold start": lambda bench: startup.cold(bench.rounds, bench.after_round),
    }
    running: dict[str, Section] = {
        **{f"forward {work.name}": partial(forward, work) for work in works(device)},
        "training": training,
        "pruned": pruned,
    }
    if device == "cpu":
        return starting | running
    return running | {"training by autocast": partial(training, autocast=True)}
