"""The sections of our own records: those of `bertlite bench` beside the machine's limits, starting, and training."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import bertlite
from bertlite.bench import sections as benched
from bertlite.bench.sections import Bench, Section, at, dtype_of, forward_section, right_engines, time_runs
from bertlite.bench.work import Work, ragged
from bertlite.records import quartiles
from bertlite.timing import Timings, alternate, peak_bytes, summary
from scripts.measure.speed import startup
from scripts.measure.speed.ceiling import Ceiling, copy_rate, find_ceilings

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


def sections(device: str, models: Sequence[str], threads: Sequence[int | None]) -> dict[str, Section]:
    """Return the sections by name, in the order of running; see `bertlite.bench.sections.sections`."""
    running = benched.sections(device, models, threads, forward)
    running["training"] = at(training, "bert-base", None)
    if device != "cpu":
        return running | {"training by autocast": at(partial(training, autocast=True), "bert-base", None)}
    starting: dict[str, Section] = {
        "import": lambda bench: startup.imports(bench.rounds, bench.after_round),
        "loading": lambda bench: startup.loading(bench.rounds, bench.folder, bench.after_round),
        "cold start": lambda bench: startup.cold(bench.rounds, bench.after_round),
        "packing": lambda bench: startup.packing(bench.rounds, bench.folder, bench.after_round, bench.missing),
    }
    return starting | running


def forward(work: Work, bench: Bench) -> dict[str, Any]:
    """Time one batch in every engine that is right and, in the same rounds, the machine's fastest matmuls."""
    candidates, found = right_engines(work, bench)
    ceilings, copied = machine(bench.device, bench.threads)
    dtypes = sorted({dtype_of(name) for name in candidates} & ceilings.keys())
    every = time_runs({**candidates, **{f"matmul {dtype}": ceilings[dtype].run for dtype in dtypes}}, bench)
    limits = limit_times(every, work, bench.config, ceilings, copied)
    times = {name: every[name] for name in candidates}
    section = forward_section(work, bench, times, found)
    section |= {"of_limit": limit_fractions(times, limits)}
    section |= {"ceilings": {**ceiling_facts(limits, work.operations(bench.config), ceilings), "bytes": copied}}
    if bench.device != "cpu":
        section["peak_bytes"] = {name: peak_bytes(run, bench.device) for name, run in candidates.items()}
        layers = bench.config.num_hidden_layers
        section["demands"] = {name: gpu_demands(gpu_events(run), layers) for name, run in candidates.items()}
    return section


@cache
def machine(device: str, threads: int) -> tuple[dict[str, Ceiling], float]:
    """Return the fastest matmul of each dtype, and the bytes per second of a copy.

    Args:
        threads: as many as torch has; with others the matmuls are others.
    """
    return find_ceilings(device), copy_rate(device)


def limit_times(
    times: Timings, work: Work, config: bertlite.BertConfig, ceilings: Mapping[str, Ceiling], copied: float
) -> Timings:
    """Return for each dtype the least seconds that a batch can take, in each round.

    That is the time of its matmuls at the rate of the fastest matmul in the same round, or of reading the weights,
    whichever is longer.
    """
    layer = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    limits = {}
    for dtype, ceiling in ceilings.items():
        share = work.operations(config) / ceiling.operations
        reading = config.num_hidden_layers * layer * BYTES[dtype] / copied
        if f"matmul {dtype}" in times:
            limits[dtype] = [max(share * seconds, reading) for seconds in times[f"matmul {dtype}"]]
    return limits


def limit_fractions(times: Timings, limits: Timings) -> dict[str, dict[str, float]]:
    """Return the fraction of the machine's limit that each engine reaches, median and quartiles over the rounds."""
    return {
        name: quartiles([limit / took for limit, took in zip(limits[dtype_of(name)], taken, strict=True)])
        for name, taken in times.items()
        if dtype_of(name) in limits
    }


def ceiling_facts(limits: Timings, operations: float, ceilings: Mapping[str, Ceiling]) -> dict[str, dict[str, Any]]:
    """Return for each dtype the operations per second at the limit, with the library of the matmul that sets it."""
    return {
        dtype: {"library": ceilings[dtype].library, **quartiles([operations / each for each in seconds])}
        for dtype, seconds in limits.items()
    }


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
