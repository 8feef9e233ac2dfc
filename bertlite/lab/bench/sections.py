"""The sections of a record: which candidates stand together, on what work."""

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
from bertlite.lab.bench.engines import ENGINES, FLOATS, Run, states
from bertlite.lab.bench.work import Work, ragged, works
from bertlite.lab.timing import alternate, ceilings, peak_bytes, summary
from bertlite.parity import reference

BASELINE = "transformers sdpa float32"
ERRORS = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.2}  # above these an engine computes something else
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
KINDS = {  # of operators, by parts of their names
    "products": ("linear", "mm"),
    "attention": ("scaled_dot_product",),
    "LayerNorm": ("layer_norm",),
    "rounding": ("aminmax", "quantize"),
    "moving tokens": ("index_select", "cat", "copy_"),
}


@dataclass
class Bench:
    """One run of the benchmark: its settings, and what sections share.

    Args:
        only: parts of the names of the engines to build, "" for all; the baseline is always built.
        seconds: how long the rounds of one section may take, if there have been three of them.
        kept: a folder for the checkpoint and what is exported from it, used again if they are there; by default a
            temporary one.
    """

    rounds: int
    device: str = "cpu"
    only: tuple[str, ...] = ("",)
    seconds: float = math.inf
    kept: Path | None = None
    missing: dict[str, str] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    @cached_property
    def folder(self) -> Path:
        """A checkpoint of bert-base's shape as transformers initialises it."""
        place = self.kept or Path(self.stack.enter_context(TemporaryDirectory(prefix="bertlite-base-")))
        folder = place / "base"
        return folder if (folder / "config.json").exists() else reference.base_shaped(folder)

    @cached_property
    def config(self) -> Any:
        return bertlite.BertConfig.from_json_file(self.folder / "config.json")

    @cached_property
    def ceilings(self) -> dict[str, float]:
        return ceilings(self.device)

    @cached_property
    def runs(self) -> dict[str, Run]:
        """Every engine that is wanted and can be built, by name and dtype."""
        built = {}
        for engine in ENGINES:
            for dtype in engine.dtypes:
                name = f"{engine.name} {dtype}"
                if name != BASELINE and not any(part in name for part in self.only):
                    continue
                lacks = engine.missing(self.device)
                if lacks is None and dtype == "int8" and self.device != "cpu":
                    lacks = "int8 runs on the CPU only"
                if lacks is not None:
                    self.missing[name] = lacks
                    continue
                built[name] = engine.build(self.folder, dtype, self.device)
        return built


def forward(work: Work, bench: Bench) -> dict[str, Any]:
    """One batch through every engine that computes what the baseline does."""
    batch = work.inputs(bench.config.vocab_size, bench.device)
    runs = {name: run for name, run in bench.runs.items() if work.filled < 1 or "packed" not in name}
    errors = errors_of(runs, batch)
    candidates = {name: partial(run, batch) for name, run in runs.items() if right(name, errors[name])}
    warm = 0 if bench.device == "cpu" else 2  # all have run; on a GPU graphs are recorded at the second run
    times = alternate(candidates, bench.rounds, bench.device, warm=warm, seconds=bench.seconds)
    found = summary(f"forward, {work.name}, {work.filled:.0%} filled", times, compared(times))
    found |= {"tokens": work.tokens, "filled": work.filled, "floor": floors(found["seconds"], work, bench)}
    if bench.device == "cpu":
        ours = {name: run for name, run in candidates.items() if name.startswith("bertlite optimised")}
        found["profile"] = {name: profiled(run) for name, run in ours.items()}
    else:
        found["peak_bytes"] = {name: peak_bytes(run, bench.device) for name, run in candidates.items()}
        layers = bench.config.num_hidden_layers
        found["asked"] = {name: asked(events_of(run), layers) for name, run in candidates.items()}
    return found | {"errors": errors, "wrong": [name for name in runs if name not in candidates]}


def errors_of(runs: Mapping[str, Run], batch: Mapping[str, Tensor]) -> dict[str, float]:
    """How far the last hidden states of real tokens are from the baseline's, root mean square, relative to those."""
    real = batch["attention_mask"].cpu().bool()
    truth = states(runs[BASELINE](batch))[real]
    return {name: float((states(run(batch))[real] - truth).norm() / truth.norm()) for name, run in runs.items()}


def right(name: str, error: float) -> bool:
    return error <= ERRORS[name.split()[-1]]  # and never where it is nan


def compared(times: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs whose ratio says how much faster the second is: the baseline over all, OpenVINO over ours."""
    pairs = [(BASELINE, name) for name in times if name != BASELINE and BASELINE in times]
    for name in times:
        peer = f"OpenVINO {name.split()[-1]}"
        if name.startswith("bertlite optimised") and peer in times:
            pairs.append((peer, name))
    return pairs


def floors(seconds: Mapping[str, Mapping[str, float]], work: Work, bench: Bench) -> dict[str, float]:
    """What fraction of the machine's own limit each engine reached: of matrix products or of reading the weights,
    whichever takes longer.  Its 8-bit limit is not measured."""
    config = bench.config
    layer = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    fractions = {}
    for name, taken in seconds.items():
        dtype = name.split()[-1]
        if dtype in bench.ceilings:
            products = work.operations(config) / bench.ceilings[dtype]
            reading = config.num_hidden_layers * layer * BYTES[dtype] / (bench.ceilings["bytes"])
            fractions[name] = max(products, reading) / taken["median"]
    return fractions


def profiled(run: Callable[[], Any]) -> dict[str, float]:
    """The share of the time on the CPU that each kind of operator takes, by torch's profiler, from most to least."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            run()
    spent: Counter[str] = Counter()
    for event in profile.key_averages():
        kinds = (kind for kind, parts in KINDS.items() if any(part in event.key for part in parts))
        spent[next(kinds, "other")] += event.self_cpu_time_total
    return {kind: time / spent.total() for kind, time in spent.most_common()}


def events_of(run: Callable[[], Any]) -> Iterator[tuple[str, bool]]:
    """What torch's profiler saw of one run: names, and whether it was on the GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    for event in profile.events() or ():
        yield event.name, event.device_type.name == "CUDA"


def asked(events: Iterable[tuple[str, bool]], layers: int) -> dict[str, float]:
    """What a run asks of the GPU: kernels for each layer, copies, launches from the host, and waits of the host."""
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
    """Forward, backward and a step of AdamW of a classifier, at the lengths of SST-2, dropout on.

    AdamW is fused, as transformers' Trainer has it by default; with `autocast` products are in bfloat16.
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
    times = alternate(steps, bench.rounds, bench.device, warm=1, seconds=bench.seconds)
    over = [("transformers sdpa", name) for name in times if name.startswith("bertlite")]
    dtype = "bfloat16 by autocast" if autocast else "float32"
    found = summary(f"training step, {work.name}, {work.filled:.0%} filled, {dtype}", times, over)
    if bench.device != "cpu":
        found["peak_bytes"] = {name: peak_bytes(step, bench.device) for name, step in steps.items()}
    return found


def pruned(bench: Bench) -> dict[str, Any]:
    """The optimised model without half of its heads, of its neurons, and of both, beside all of them."""
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
    times = alternate(candidates, bench.rounds, bench.device, seconds=bench.seconds)
    return summary(f"bertlite optimised, {work.name}, pruned", times, over)


Section = Callable[[Bench], dict[str, Any]]


def sections(device: str) -> dict[str, Section]:
    """By name, in the order of running."""
    starting: dict[str, Section] = {
        "import": lambda bench: startup.imports(bench.rounds),
        "loading": lambda bench: startup.loading(bench.rounds, bench.folder),
        "cold start": lambda bench: startup.cold(bench.rounds),
    }
    running: dict[str, Section] = {
        **{f"forward {work.name}": partial(forward, work) for work in works(device)},
        "training": training,
        "pruned": pruned,
    }
    if device == "cpu":
        return starting | running
    return running | {"training by autocast": partial(training, autocast=True)}
