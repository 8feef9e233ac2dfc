"""The sections of a record: which candidates stand together, on what work."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import bertlite
from bertlite.bench import startup
from bertlite.bench.engines import ENGINES, Run
from bertlite.bench.measure import alternate, ceilings, summary
from bertlite.bench.work import Work, ragged, works
from bertlite.parity import reference

BASELINE = "transformers sdpa float32"
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass
class Bench:
    """One run of the benchmark: its settings, and what sections share.

    Args:
        only: parts of the names of the engines to build, "" for all; the baseline is always built.
        kept: a folder for the checkpoint and what is exported from it, used again if they are there; by default a
            temporary one.
    """

    rounds: int
    device: str = "cpu"
    only: tuple[str, ...] = ("",)
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
    """One batch through every engine."""
    batch = work.inputs(bench.config.vocab_size, bench.device)
    candidates = {
        name: partial(run, batch) for name, run in bench.runs.items() if work.filled < 1 or "packed" not in name
    }
    times = alternate(candidates, bench.rounds, bench.device)
    found = summary(f"forward, {work.name}, {work.filled:.0%} filled", times, compared(times))
    found |= {"tokens": work.tokens, "filled": work.filled, "floor": floors(found["seconds"], work, bench)}
    return found


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


def training(bench: Bench) -> dict[str, Any]:
    """Forward, backward and a step of AdamW of a classifier, at the lengths of SST-2, dropout on."""
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
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

        def step() -> None:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()

        return step

    times = alternate({name: stepping(model) for name, model in models.items()}, bench.rounds, bench.device)
    over = [("transformers sdpa", name) for name in times if name.startswith("bertlite")]
    return summary(f"training step, {work.name}, {work.filled:.0%} filled, float32", times, over)


def pruned(bench: Bench) -> dict[str, Any]:
    """The optimised model with half of its heads, beside all of them."""
    work = works()[2]
    batch = work.inputs(bench.config.vocab_size, bench.device)
    heads = bench.config.num_attention_heads
    candidates = {}
    for dtype in ("float32", "bfloat16"):
        whole = bertlite.BertModel.from_pretrained(bench.folder, dtype=getattr(torch, dtype), device=bench.device)
        half = bertlite.prune_heads(whole, {i: range(heads // 2) for i in range(bench.config.num_hidden_layers)})
        for name, model in (("all heads", whole), ("half the heads", half)):
            candidates[f"bertlite optimised, {name}, {dtype}"] = partial(
                bertlite.optimize_for_inference(model), **batch
            )
    times = alternate(candidates, bench.rounds, bench.device)
    names = list(times)
    return summary(f"forward, {work.name}, heads pruned", times, list(zip(names[::2], names[1::2], strict=True)))


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "import": lambda bench: startup.imports(bench.rounds),
    "loading": lambda bench: startup.loading(bench.rounds, bench.folder),
    "cold start": lambda bench: startup.cold(bench.rounds),
    **{f"forward {work.name}": partial(forward, work) for work in works()},
    "training": training,
    "pruned": pruned,
}
