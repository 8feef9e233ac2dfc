"""The sections of a record: each times some candidates in turn on the same work.

A section belongs to a model, that is to a shape with random weights, and to a number of threads.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import bertlite
from bertlite.bench import startup
from bertlite.bench.accuracy import Accuracy, accuracies, accuracies_of
from bertlite.bench.ceiling import Ceiling, copy_rate, find_ceilings
from bertlite.bench.engines import ALL, ENGINES, FLOATS, OWN_BACKENDS, forward_of, reason_without_backend
from bertlite.bench.work import Forward, Work, full, ragged, works
from bertlite.parity import reference
from bertlite.records import quartiles
from bertlite.timing import alternate, peak_bytes, spin_after, summary

WHOLE = "whole"
BASELINE = "transformers sdpa float32"
MODELS: dict[str, tuple[str, dict[str, int]]] = {  # shape: folder, and what differs from bert-base
    "bert-base": ("base", {}),
    "MiniLM": (
        "minilm",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    ),
}
BURST = 0.05  # seconds that an engine runs for in each round at least
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
        seconds: time limit for the rounds of one section, if there have been `bertlite.timing.FEWEST` of them.
        after_round: called after each timed round.
        kept: a folder for the checkpoint and the files exported from it, used again if they are there; by default a
            temporary one.
        model: a name of MODELS.
    """

    rounds: int
    device: str = "cpu"
    only: tuple[str, ...] = ("",)
    seconds: float = math.inf
    kept: Path | None = None
    after_round: Callable[[], object] = lambda: None
    missing: dict[str, str] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)
    model: str = "bert-base"
    current: "Bench | None" = None  # the last that `at` returned

    def at(self, model: str, threads: int | None) -> "Bench":
        """Return this benchmark with another model and number of threads, None for the one that torch begins with.

        Its engines are built once, if it is asked for again before another; the previous engines are released.
        """
        threads = self.threads if threads is None else threads
        current = self.current
        if current is None or (current.model, current.threads) != (model, threads):
            self.current = None
            self.stack.callback(torch.set_num_threads, self.threads)
            torch.set_num_threads(threads)
            self.current = replace(self, model=model, kept=self.place)
        assert self.current is not None
        return self.current

    def __post_init__(self) -> None:
        self.threads = torch.get_num_threads()

    @cached_property
    def place(self) -> Path:
        """Folder of the checkpoints."""
        return self.kept or Path(self.stack.enter_context(TemporaryDirectory(prefix="bertlite-base-")))

    @cached_property
    def folder(self) -> Path:
        """Folder of a checkpoint of the model's shape with random weights, as transformers initialises it."""
        name, sizes = MODELS[self.model]
        folder = self.place / name
        return folder if (folder / "config.json").exists() else reference.base_shaped(folder, **sizes)

    @cached_property
    def config(self) -> bertlite.BertConfig:
        return bertlite.BertConfig.from_json_file(self.folder / "config.json")

    @cached_property
    def ceilings(self) -> dict[str, Ceiling]:
        """The fastest matmul of each dtype."""
        return find_ceilings(self.device)

    @cached_property
    def copied(self) -> float:
        """Bytes per second that a large copy reads and writes."""
        return copy_rate(self.device)

    @cached_property
    def runs(self) -> dict[str, Forward]:
        """Every chosen engine that can be built, by its name with its dtype."""
        built = {}
        kind = torch.device(self.device).type
        for engine in ENGINES:
            if engine.name.startswith("bertlite") and kind not in engine.devices:
                continue  # another backend of ours exists
            for dtype in engine.dtypes:
                name = f"{engine.name} {dtype}"
                if name != BASELINE and not any(part in name for part in self.only):
                    continue
                reason = engine.reason_missing(self.device, dtype)
                if reason is None:
                    try:
                        built[name] = engine.build(self.folder, dtype, self.device)
                        continue
                    except Exception as error:
                        if name == BASELINE:
                            raise
                        reason = f"cannot be built: {type(error).__name__}: {error}"
                self.missing[name] = reason
        return built


def forward(work: Work, bench: Bench) -> dict[str, Any]:
    """Time one batch in every engine that agrees with the baseline, and the machine's fastest matmuls."""
    batch = work.inputs(bench.config.vocab_size, bench.device)
    runs = {name: run for name, run in bench.runs.items() if work.filled < 1 or "packed" not in name}
    found = accuracies(bench.folder, runs, batch)
    candidates = {name: partial(run, batch) for name, run in runs.items() if found[name].is_right(dtype_of(name))}
    if BASELINE not in candidates:
        raise RuntimeError(f"{BASELINE} differs from itself in float64: {found[BASELINE]}; nothing can be compared")
    spins = {name: spin_after(run) for name, run in candidates.items()}
    times = time_beside_ceilings(candidates, bench)
    limits = limit_times(times, work, bench)
    times = {name: times[name] for name in candidates}
    section = summary(f"forward, {work.name}, {work.filled:.0%} filled", times, ratio_pairs(times))
    section |= {"model": bench.model, "threads": bench.threads, "work": work.name}
    section |= {"tokens": work.tokens, "filled": work.filled, "padding": work.padding}
    section |= {"of_limit": limit_fractions(times, limits), "ceilings": ceiling_facts(limits, work, bench)}
    section |= {"errors": {name: each.error for name, each in found.items()}, "spins": spins}
    section |= {"cosines": {name: each.cosine for name, each in found.items()}}
    if bench.device == "cpu":
        ours = {name: run for name, run in candidates.items() if name.startswith("bertlite onednn")}
        section["profile"] = {name: operator_shares(run) for name, run in ours.items()}
    else:
        section["peak_bytes"] = {name: peak_bytes(run, bench.device) for name, run in candidates.items()}
        layers = bench.config.num_hidden_layers
        section["demands"] = {name: gpu_demands(gpu_events(run), layers) for name, run in candidates.items()}
    return section | {"wrong": [name for name in runs if name not in candidates]}


def dtype_of(name: str) -> str:
    """Return the dtype of a candidate, the last word of its name."""
    return name.split()[-1]


def time_beside_ceilings(candidates: Mapping[str, Callable[[], Any]], bench: Bench) -> dict[str, list[float]]:
    """Time candidates, and in the same rounds the fastest matmul of each of their dtypes, as "matmul DTYPE"."""
    dtypes = {dtype_of(name) for name in candidates}
    matmuls = {f"matmul {dtype}": bench.ceilings[dtype].run for dtype in sorted(dtypes & bench.ceilings.keys())}
    return alternate(
        {**candidates, **matmuls},
        bench.rounds,
        bench.device,
        seconds=bench.seconds,
        burst=BURST if bench.device == "cpu" else 0.0,
        warm=1 if bench.device == "cpu" else 2,  # all have run; on a GPU graphs are recorded at the second run
        after_round=bench.after_round,
    )


def ratio_pairs(times: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs whose ratio says how much faster the second is: the baseline over all, and OpenVINO over all of its
    dtype.
    """
    pairs = [(BASELINE, name) for name in times if name != BASELINE and BASELINE in times]
    for name in times:
        peer = f"OpenVINO {dtype_of(name)}"
        if name != peer and peer in times:
            pairs.append((peer, name))
    return pairs


def limit_times(times: Mapping[str, list[float]], work: Work, bench: Bench) -> dict[str, list[float]]:
    """Return for each dtype the least seconds that a batch can take, in each round.

    That is the time of its matmuls at the rate of the fastest matmul in the same round, or of reading the weights,
    whichever is longer.
    """
    config = bench.config
    layer = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    limits = {}
    for dtype, ceiling in bench.ceilings.items():
        share = work.operations(config) / ceiling.operations
        reading = config.num_hidden_layers * layer * BYTES[dtype] / bench.copied
        if f"matmul {dtype}" in times:
            limits[dtype] = [max(share * seconds, reading) for seconds in times[f"matmul {dtype}"]]
    return limits


def limit_fractions(
    times: Mapping[str, list[float]], limits: Mapping[str, list[float]]
) -> dict[str, dict[str, float]]:
    """Return the fraction of the machine's limit that each engine reaches, median and quartiles over the rounds."""
    return {
        name: quartiles([limit / took for limit, took in zip(limits[dtype_of(name)], taken, strict=True)])
        for name, taken in times.items()
        if dtype_of(name) in limits
    }


def ceiling_facts(limits: Mapping[str, list[float]], work: Work, bench: Bench) -> dict[str, Any]:
    """Return for each dtype the operations per second at the limit, with the library of the matmul that sets it."""
    operations = work.operations(bench.config)
    return {
        dtype: {"library": bench.ceilings[dtype].library, **quartiles([operations / each for each in seconds])}
        for dtype, seconds in limits.items()
    } | {"bytes": bench.copied}


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
    """Time optimised models without half of their heads, of their neurons, and of both, beside the whole one."""
    work, config = full(8, 128), bench.config
    batch = work.inputs(config.vocab_size, bench.device)
    runs: dict[str, Forward] = {}
    found: dict[str, Accuracy] = {}
    for what, model in pruned_models(bench).items():
        mine = {}
        for backend, dtype in own_engines(bench):
            name = f"bertlite {backend} {what} {dtype}"
            try:
                mine[name] = forward_of(bertlite.optimize_for_inference(model, getattr(torch, dtype), backend))
            except (ValueError, RuntimeError) as error:  # this model cannot be run, or there is no compiler
                bench.missing[name] = str(error)
        found |= accuracies_of(model, mine, batch)
        runs |= mine
    candidates = {name: partial(run, batch) for name, run in runs.items() if found[name].is_right(dtype_of(name))}
    over = [
        (whole, name)
        for name in candidates
        if (whole := re.sub("half.* ", f"{WHOLE} ", name)) != name and whole in candidates
    ]
    times = alternate(
        candidates,
        bench.rounds,
        bench.device,
        seconds=bench.seconds,
        burst=BURST if bench.device == "cpu" else 0.0,
        after_round=bench.after_round,
    )
    section = summary(f"bertlite optimised, {work.name}, pruned", times, over)
    section |= {"model": bench.model, "threads": bench.threads}
    section |= {"errors": {name: each.error for name, each in found.items()}}
    return section | {"wrong": [name for name in runs if name not in candidates]}


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


def own_engines(bench: Bench) -> list[tuple[str, str]]:
    """Return the backends and dtypes of `optimize_for_inference` that are chosen and run here."""
    chosen = []
    for backend in OWN_BACKENDS[torch.device(bench.device).type]:
        for dtype in ALL if bench.device == "cpu" else FLOATS:
            name = f"bertlite {backend} {dtype}"
            if not any(part in name for part in bench.only):
                continue
            if reason := reason_without_backend(backend, dtype):
                bench.missing[name] = reason
            else:
                chosen.append((backend, dtype))
    if not chosen:
        raise ValueError("the pruned section times bertlite's own engines, and --engines chooses none that runs here")
    return chosen


Section = Callable[[Bench], dict[str, Any]]


def sections(
    device: str, models: Sequence[str] = ("bert-base",), threads: Sequence[int | None] = (None,)
) -> dict[str, Section]:
    """Return the sections by name, in the order of running.

    Args:
        models: names of MODELS.
        threads: numbers of threads; None is the number that torch has.
    """
    starting: dict[str, Section] = {
        "import": lambda bench: startup.imports(bench.rounds, bench.after_round),
        "loading": lambda bench: startup.loading(bench.rounds, bench.folder, bench.after_round),
        "cold start": lambda bench: startup.cold(bench.rounds, bench.after_round),
        "packing": lambda bench: startup.packing(bench.rounds, bench.folder, bench.after_round, bench.missing),
    }
    running: dict[str, Section] = {}
    for model, number in itertools.product(models, threads):
        which = section_suffix(model, number)
        for work in works(device):
            running[f"forward {work.name}{which}"] = at(partial(forward, work), model, number)
        running[f"pruned{which}"] = at(pruned, model, number)
    running["training"] = at(training, "bert-base", None)
    if device == "cpu":
        return starting | running
    return running | {"training by autocast": at(partial(training, autocast=True), "bert-base", None)}


def section_suffix(model: str, threads: int | None) -> str:
    """Return the suffix of a section's name: its model and threads, if not the default ones."""
    number = "" if threads is None else f" {threads} thread{'s' * (threads > 1)}"
    return f"{'' if model == 'bert-base' else f' {model}'}{number}"


def at(section: Section, model: str, threads: int | None) -> Section:
    """Return a section that runs with a model and a number of threads."""
    return lambda bench: section(bench.at(model, threads))
