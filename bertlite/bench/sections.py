"""The sections of a record: each times some candidates in turn on the same work.

A section belongs to a model, that is to a shape with random weights, and to a number of threads.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import bertlite
from bertlite.bench.accuracy import Accuracy, accuracies, accuracies_of
from bertlite.bench.engines import ALL, ENGINES, FLOATS, forward_of
from bertlite.bench.measure import PLAIN, prepare
from bertlite.bench.work import Forward, Work, full, works
from bertlite.parity import reference
from bertlite.timing import Timings, alternate, summary

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
        if not self.seconds > 0:
            raise ValueError(f"--seconds is {self.seconds}; a section needs more than 0")
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
    """Time one batch in every engine that is right."""
    candidates, found = right_engines(work, bench)
    return forward_section(work, bench, time_runs(candidates, bench), found)


def right_engines(work: Work, bench: Bench) -> tuple[dict[str, Callable[[], Any]], dict[str, Accuracy]]:
    """Return the runs of a batch in the engines that compute it right, and the accuracy of every engine."""
    batch = work.inputs(bench.config.vocab_size, bench.device)
    runs = {name: run for name, run in bench.runs.items() if work.filled < 1 or "packed" not in name}
    found = accuracies(bench.folder, runs, batch)
    candidates = right_runs(runs, batch, found)
    if BASELINE not in candidates:
        raise RuntimeError(f"{BASELINE} differs from itself in float64: {found[BASELINE]}; nothing can be compared")
    return candidates, found


def right_runs(
    runs: Mapping[str, Forward], batch: Mapping[str, Tensor], found: Mapping[str, Accuracy]
) -> dict[str, Callable[[], Any]]:
    """Return those of these runs that are right by their accuracy, each ready to be called."""
    return {name: partial(run, batch) for name, run in runs.items() if found[name].is_right(dtype_of(name))}


def time_runs(candidates: Mapping[str, Callable[[], Any]], bench: Bench) -> Timings:
    """Time candidates that have run once."""
    return alternate(
        candidates,
        bench.rounds,
        bench.device,
        seconds=bench.seconds,
        burst=BURST if bench.device == "cpu" else 0.0,
        warm=1 if bench.device == "cpu" else 2,  # on a GPU graphs are recorded at the second run
        after_round=bench.after_round,
    )


def forward_section(work: Work, bench: Bench, times: Timings, found: Mapping[str, Accuracy]) -> dict[str, Any]:
    """Return the section of one batch, from the times of its engines and the accuracy of all."""
    what = f"forward, {work.name}, {work.filled:.0%} filled"
    section = section_of(what, bench, times, ratio_pairs(times), found)
    section |= {"work": work.name, "tokens": work.tokens, "filled": work.filled, "padding": work.padding}
    return section | {"cosines": {name: each.cosine for name, each in found.items()}}


def section_of(
    what: str,
    bench: Bench,
    times: Timings,
    over: Sequence[tuple[str, str]],
    found: Mapping[str, Accuracy],
) -> dict[str, Any]:
    """Return a section: its times, the ratios of pairs of them, and the errors, also of what was too wrong to time."""
    return summary(what, times, over) | {
        "model": bench.model,
        "threads": bench.threads,
        "errors": {name: each.error for name, each in found.items()},
        "wrong": [name for name in found if name not in times],
    }


def dtype_of(name: str) -> str:
    """Return the dtype of a candidate, the last word of its name."""
    return name.split()[-1]


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


def pruned(bench: Bench) -> dict[str, Any]:
    """Time models without half of their heads, of their neurons, and of both, beside the whole one.

    On the CPU they are optimised.
    """
    work, config = full(8, 128), bench.config
    batch = work.inputs(config.vocab_size, bench.device)
    runs: dict[str, Forward] = {}
    found: dict[str, Accuracy] = {}
    for what, model in pruned_models(bench).items():
        mine = {}
        for backend, dtype in own_engines(bench):
            name = f"bertlite {backend} {what} {dtype}"
            try:
                mine[name] = forward_of(prepare(model, getattr(torch, dtype), backend))
            except (ValueError, RuntimeError) as error:  # this model cannot be run, or there is no compiler
                bench.missing[name] = str(error)
        found |= accuracies_of(model, mine, batch)
        runs |= mine
    candidates = right_runs(runs, batch, found)
    over = [
        (whole, name)
        for name in candidates
        if (whole := re.sub("half.* ", f"{WHOLE} ", name)) != name and whole in candidates
    ]
    times = time_runs(candidates, bench)
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


def own_engines(bench: Bench) -> list[tuple[str, str]]:
    """Return the backend of this device and the dtypes that are chosen; ValueError if none is."""
    backend, dtypes = ("native", ALL) if bench.device == "cpu" else (PLAIN, FLOATS)
    chosen = [(backend, each) for each in dtypes if any(part in f"bertlite {backend} {each}" for part in bench.only)]
    if not chosen:
        raise ValueError("the pruned section times bertlite's own engines, and --engines chooses none that runs here")
    return chosen


Section = Callable[[Bench], dict[str, Any]]


def sections(
    device: str,
    models: Sequence[str] = ("bert-base",),
    threads: Sequence[int | None] = (None,),
    run_forward: Callable[[Work, Bench], dict[str, Any]] = forward,
) -> dict[str, Section]:
    """Return the sections by name, in the order of running.

    Args:
        models: names of MODELS.
        threads: numbers of threads; None is the number that torch has.
        run_forward: makes the section of one batch.

    Raises:
        ValueError: there is no such model.
    """
    if unknown := [name for name in models if name not in MODELS]:
        raise ValueError(f"there is no model {unknown[0]!r}; have: {', '.join(MODELS)}")
    found: dict[str, Section] = {}
    for model, number in itertools.product(models, threads):
        which = section_suffix(model, number)
        for work in works(device):
            found[f"forward {work.name}{which}"] = at(partial(run_forward, work), model, number)
        found[f"pruned{which}"] = at(pruned, model, number)
    return found


def section_suffix(model: str, threads: int | None) -> str:
    """Return the suffix of a section's name: its model and threads, if not the default ones."""
    number = "" if threads is None else f" {threads} thread{'s' * (threads > 1)}"
    return f"{'' if model == 'bert-base' else f' {model}'}{number}"


def at(section: Section, model: str, threads: int | None) -> Section:
    """Return a section that runs with a model and a number of threads."""
    return lambda bench: section(bench.at(model, threads))
