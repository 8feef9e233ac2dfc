"""The sections of a record: each times the engines, or some models, in turn on one batch.

A section belongs to a model, that is to a shape with random weights, and to a number of threads.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

import bertlite
from bertlite.experiments.budget.work import Work
from bertlite.opened.checkpoint import Checkpoint
from bertlite.parity import reference
from bertlite.support.timing import Timings, alternate, with_spread
from scripts.measure.speed.accuracy import Accuracy, Forward, accuracies
from scripts.measure.speed.batches import filled, padding, works
from scripts.measure.speed.engines import ENGINES
from scripts.measure.speed.roof import Roof, shares
from scripts.measure.speed.rounds import summary

BASELINE = "transformers sdpa float32"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # shape: folder, and what differs from bert-base
    "bert-base": ("base", {}),
    "MiniLM": (
        "minilm",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    ),
    "bert-tiny": (
        "tiny",
        {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    ),
    "bert-large": (
        "large",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "bge-m3": (  # with as many words as BERT
        "bge-m3",
        {
            "model_type": "xlm-roberta",
            "vocab_size": 30522,
            "max_position_embeddings": 8194,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    ),
    "deberta-v3": (  # of the base model's shape, with as many words as BERT; transformers has no sdpa for it
        "deberta-v3",
        {
            "model_type": "deberta-v2",
            "vocab_size": 30522,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "type_vocab_size": 0,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
        },
    ),
    "ModernBERT-base": (  # with as many words as BERT, and without the ids of special tokens that it would have
        "modernbert",
        {"model_type": "modernbert", "vocab_size": 30522, "max_position_embeddings": 8192}
        | {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")},
    ),
    "NomicBERT": ("nomic", {"model_type": "nomic_bert", "vocab_size": 30522, "max_position_embeddings": 2048}),
    "all-mpnet": ("all-mpnet", {"model_type": "mpnet", "max_position_embeddings": 514}),
}
BURST = 0.05  # seconds that an engine runs for in each round at least


@dataclass
class Bench:
    """The settings of sections, and the checkpoint and engines that they share; engines take torch's threads.

    Args:
        kept: a folder for the checkpoint and the files exported from it, used again if they are there.
        model: a name of MODELS.
        only: parts of the names of the engines to build, "" for all; the baseline is always built.
        seconds: time limit for the rounds of one section, if there have been `bertlite.support.timing.FEWEST` of them.
        after_round: called after each timed round.
        missing: why each engine that is asked for is not there.
    """

    rounds: int
    kept: Path
    model: str = "bert-base"
    device: str = "cpu"
    only: tuple[str, ...] = ("",)
    seconds: float = math.inf
    after_round: Callable[[], object] = lambda: None
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        """The engine that all others are compared with."""
        return "transformers eager float32" if self.model == "deberta-v3" else BASELINE

    @cached_property
    def folder(self) -> Path:
        """Folder of a checkpoint of the model's shape with random weights, as transformers initialises it."""
        name, sizes = MODELS[self.model]
        folder = self.kept / name
        return folder if (folder / "config.json").exists() else reference.base_shaped(folder, **sizes)

    @cached_property
    def config(self) -> bertlite.BertConfig:
        return Checkpoint.of(self.folder).config

    @cached_property
    def runs(self) -> dict[str, Forward]:
        """Every chosen engine that can be built, by its name with its dtype."""
        built = {}
        for engine, dtype in [(each, dtype) for each in ENGINES for dtype in each.dtypes]:
            name = f"{engine.name} {dtype}"
            if name != self.baseline and not any(part in name for part in self.only):
                continue
            reason = engine.reason_missing(self.device)
            if reason is None:
                try:
                    built[name] = engine.build(self.folder, dtype, self.device)
                    continue
                except Exception as error:
                    if name == self.baseline:
                        raise
                    reason = f"cannot be built: {type(error).__name__}: {error}"
            self.missing[name] = reason
        return built


Section = Callable[[Bench], dict[str, Any]]


def forward_sections(device: str, longest: int) -> dict[str, Section]:
    """Return the section of each batch that is not longer than the longest, by name."""
    return {f"forward {work.name}": partial(forward, work) for work in works(device) if work.width <= longest}


def longest_of(model: str) -> int:
    """Return how many positions a model of MODELS has; two of 514 are not used."""
    return int(MODELS[model][1].get("max_position_embeddings", 512)) // 16 * 16


def forward(work: Work, bench: Bench) -> dict[str, Any]:
    """Time one batch in every engine that is right; between the rounds the roof of the native kernels is measured."""
    batch = work.inputs(bench.config.vocab_size, bench.device, bench.config.pad_token_id or 0)
    runs = {name: run for name, run in bench.runs.items() if filled(work) < 1 or "packed" not in name}
    truth = reference.load(bench.folder, "BertModel", {}, torch.float64, "eager", bench.device)
    failed: dict[str, str] = {}
    found = accuracies(truth, runs, batch, failed)
    bench.missing.update({f"{name}, {work.name}": f"cannot run: {reason}" for name, reason in failed.items()})
    runs = {name: run for name, run in runs.items() if name in found}
    roof = Roof()
    native = any(name.startswith("bertlite native") for name in runs)
    times = time_right_runs(runs, batch, found, bench, roof.measure if native else lambda: None)
    base = bench.baseline
    if base not in times:
        raise RuntimeError(f"{base} differs from itself in float64: {found[base]}; nothing can be compared")
    what = f"forward, {work.name}, {filled(work):.0%} filled"
    section = section_of(what, bench, times, ratio_pairs(times, base), found)
    section |= {"work": work.name, "tokens": sum(work.lengths), "filled": filled(work), "padding": padding(work)}
    section |= {"baseline": base, "roof": roof.rates}
    section["shares"] = shares(section, bench.config, work.lengths)
    return section | {"cosines": {name: each.cosine for name, each in found.items()}}


def time_right_runs(
    runs: Mapping[str, Forward],
    batch: Mapping[str, Any],
    found: Mapping[str, Accuracy],
    bench: Bench,
    between: Callable[[], object] = lambda: None,
) -> Timings:
    """Time the runs that are right by their accuracy; all have run once.  `between` is called between rounds."""
    on_cpu = bench.device == "cpu"
    return alternate(
        {name: partial(run, batch) for name, run in runs.items() if found[name].is_right(name.split()[-1])},
        bench.rounds,
        bench.device,
        seconds=bench.seconds,
        burst=BURST if on_cpu else 0.0,
        warm=1 if on_cpu else 2,
        after_round=lambda: (between(), bench.after_round()),
    )


def section_of(
    what: str, bench: Bench, times: Timings, over: Sequence[tuple[str, str]], found: Mapping[str, Accuracy]
) -> dict[str, Any]:
    """Return a section: its times, the ratios of pairs of them, and the errors, also of engines too wrong to time."""
    return summary(what, times, over) | {
        "model": bench.model,
        "threads": torch.get_num_threads(),
        "errors": {name: each.error for name, each in found.items()},
        "wrong": [name for name in found if name not in times],
    }


def ratio_pairs(times: Mapping[str, Any], base: str = BASELINE) -> list[tuple[str, str]]:
    """Return pairs whose ratio says how much faster the second is: the baseline over all, and OpenVINO over all of its
    dtype.
    """
    pairs = [(base, name) for name in times if name != base and base in times]
    for name in times:
        peer = f"OpenVINO {name.split()[-1]}"
        if name != peer and peer in times:
            pairs.append((peer, name))
    return pairs


def section_lines(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that show the times of a section with their ratios, and the error of each engine."""
    yield f"\n{name}: {found['what']}"
    width = max(map(len, found["seconds"]), default=0)
    for candidate, row in found["seconds"].items():
        low, median, high = (1e3 * row[which] for which in ("low", "median", "high"))
        error = found.get("errors", {}).get(candidate)
        rounding = "" if error is None else f"   error {error:.1e}"
        for what, share in found.get("shares", {}).get(candidate, {}).items():
            rounding += f"   {share:.0%} of {what}"
        yield f"  {candidate:<{width}} {median:9.2f} ms   ({low:.2f} to {high:.2f}){rounding}"
    for candidate in found.get("wrong", ()):
        yield f"  WRONG  {candidate}: error {found['errors'][candidate]:.1e}, so it is not timed"
    for ratio, value in found["ratios"].items():
        yield f"  {ratio:<{2 * width + 3}} {with_spread(value)}"


def suffix(model: str, threads: int | None) -> str:
    """Return the suffix of a section's name: its model and threads, if not the default ones."""
    number = "" if threads is None else f" {threads} thread{'s' * (threads > 1)}"
    return f"{'' if model == 'bert-base' else f' {model}'}{number}"
