"""The goals of a GPU's figures, and the figures that no other record has: matmuls, CUDA graphs, waits of the host.

python -m scripts.measure.gpu_goals --out OUT/limits-cuda.json    # a step of scripts.measure.gpu_checks
"""

import argparse
import json
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bertlite import BertConfig, BertModel, optimize_for_inference
from bertlite.inference.gpu import fused
from bertlite.parity import reference
from bertlite.pruning import macs
from bertlite.support.environment import environment
from bertlite.support.files import write_json
from bertlite.support.timing import FEWEST, alternate
from scripts.measure import gpu_embed
from scripts.measure.speed.batches import filled, ragged, works
from scripts.measure.speed.bench import MODELS, suffix
from scripts.measure.speed.rounds import summary

SHAPES = ("bert-base", "bert-large")
SHORT = ("1 x 16", "8 x 128", "32 x 49 SST-2")  # batches that a GPU computes faster than Python launches them
FULL, SST2, WIKI = "64 x 128", ragged("SST-2", 512, 128).name, ragged("WikiText-2", 128, 512).name
GRAPHED = (  # goals of the backend "graphs": key, model, batches, the engine that it is over; None: the peak
    ("graphs", "bert-base", SHORT, "transformers reduce-overhead"),
    ("graphs, full", "bert-base", (FULL,), "transformers reduce-overhead"),
    ("graphs, sdpa", "bert-base", SHORT, "transformers sdpa"),
    ("graphs, SST-2", "bert-base", (SST2,), "transformers sdpa"),
    ("graphs, WikiText-2", "bert-base", (WIKI,), "transformers sdpa"),
    ("graphs, peak", "bert-base", (FULL,), None),
    ("graphs, peak of SST-2", "bert-base", (SST2,), None),
    ("graphs, peak of bert-large", "bert-large", (FULL,), None),
)
RAGGED = {n: ragged("SST-2", n, 128).name for n in (32, 64)} | {8: ragged("WikiText-2", 8, 512).name}
TRAINED = (  # goals of training by autocast: key, batch, the engine of bertlite
    *(("steps", name, "TrainingStep") for name in (RAGGED[32], RAGGED[8], "8 x 128")),
    ("steps of 64", RAGGED[64], "TrainingStep"),
    ("steps, full", FULL, "TrainingStep"),
    *(("training", name, "packed") for name in RAGGED.values()),
)
TRAINED_LARGE = (("training", RAGGED[32], "packed"),)
BUSY = 8192  # positions of a batch that keeps a GPU busy
PARITY, SPEED, LIMITS, EMBED = "parity-cuda", "speed-cuda", "limits-cuda", "embed-cuda"
MEMORY = ("checkpointing-cuda-base", "checkpointing-cuda-large")
RECORDS = (PARITY, SPEED, *MEMORY, LIMITS, EMBED)
MASK, PACKED = "a mask", "packed input"  # what a forward is given
GRAPH, LATENCY = "bertlite, CUDA graph", "transformers sdpa"


class Goal(NamedTuple):
    """A bound of a figure, rounded to two decimals; `by_fill`: over the share of positions that hold tokens."""

    figure: str
    bound: float
    at_least: bool = True
    by_fill: bool = False


GOALS = {
    "parity": Goal("tensors that fail their claim of parity", 0, at_least=False),
    "packed": Goal("packed, times transformers sdpa", 0.9, by_fill=True),
    "full": Goal("full batches, times transformers compiled", 1.0),
    "graphs": Goal("graphs, times transformers compiled with reduce-overhead", 2.0),
    "graphs, full": Goal("graphs at 64 x 128, times transformers compiled with reduce-overhead", 1.7),
    "graphs, sdpa": Goal("graphs, times transformers sdpa", 6.0),
    "graphs, SST-2": Goal("graphs of many short texts, times transformers sdpa", 2.7),
    "graphs, WikiText-2": Goal("graphs of paragraphs, times transformers sdpa", 3.9),
    "graphs, peak": Goal("graphs, share of the measured peak", 0.65),
    "graphs, peak of SST-2": Goal("graphs of many short texts, share of the measured peak", 0.6),
    "graphs, peak of bert-large": Goal("graphs of bert-large, share of the measured peak", 0.72),
    "steps": Goal("TrainingStep, times transformers sdpa", 4.0),
    "steps of 64": Goal("TrainingStep of 64 texts, times transformers sdpa", 3.5),
    "steps, full": Goal("TrainingStep at 64 x 128, times transformers sdpa", 1.3),
    "capture": Goal("seconds to record a bucket after the first", 0.1, at_least=False),
    "peak": Goal("share of the measured peak of bfloat16 matmuls", 0.55),
    "training": Goal("packed training, times transformers sdpa", 1.1),
    "embed": Goal("bertlite embed, times sentence-transformers at batch 32", 8.0),
    "embed, best": Goal("bertlite embed, times sentence-transformers at its best batch", 6.0),
    "embed, inside": Goal("graphs inside sentence-transformers, times itself, at batch 32", 2.0),
    "memory": Goal("checkpointing's peak over transformers'", 1.0, at_least=False),
    "time": Goal("checkpointing's time over transformers'", 1.05, at_least=False),
    "offload": Goal("offloading's peak over transformers' checkpointing", 0.99, at_least=False),
    "graph": Goal("16 tokens under CUDA graphs, over transformers' latency", 0.5, at_least=False),
    MASK: Goal("waits of the host in a forward", 1, at_least=False),
    PACKED: Goal("waits of the host in a forward", 0, at_least=False),
}
Records = Mapping[str, dict[str, Any]]  # by file name; {} is one that was not made
Figure = tuple[
    str, str, str, float | None, float
]  # goal, record, what was run, figure, share of positions with tokens


def figures(records: Records) -> Iterator[Figure]:
    """Yield every figure that has a goal; None is one that was not measured."""
    claims = [claim for each in records[PARITY].get("checkpoints", {}).values() for claim in each["claims"]]
    yield "parity", PARITY, "all cases", sum(claim["failed"] for claim in claims) if claims else None, 1
    yield from figures_of_speed(records[SPEED].get("sections", {}), records[LIMITS].get("matmul_flops"))
    for name in MEMORY:
        for kind, backend in (("full", "sdpa"), ("ragged", "packed")):
            rows = records[name].get(kind, {}).get("rows", {})
            ours, theirs, offloaded = (
                rows.get(each, {})
                for each in (
                    f"bertlite {backend}, every layer",
                    "transformers, every layer",
                    f"bertlite {backend}, every layer, offloaded",
                )
            )
            yield "memory", name, f"{kind}, {backend}", over(ours, theirs, "peak_bytes"), 1
            yield "time", name, f"{kind}, {backend}", over(ours, theirs, "median"), 1
            yield "offload", name, f"{kind}, {backend}", over(offloaded, theirs, "peak_bytes"), 1
    seconds = records[LIMITS].get("seconds", {})
    yield "graph", LIMITS, "bert-base, bfloat16", over(seconds.get(GRAPH, {}), seconds.get(LATENCY, {})), 1
    capture = records[LIMITS].get("captures", {}).get("seconds")
    yield "capture", LIMITS, "bert-base, bfloat16", capture and max(capture[1:]), 1
    yield from figures_of_embed(records[EMBED].get("seconds", {}))
    for given in (MASK, PACKED):
        yield given, LIMITS, given, records[LIMITS].get("waits", {}).get(given), 1


def figures_of_speed(sections: Mapping[str, Any], peak: float | None) -> Iterator[Figure]:
    """Yield the figures of forwards in bfloat16 of large batches, and of a training step."""
    for model in SHAPES:
        config = BertConfig(**MODELS[model][1])
        for work in works("cuda"):
            positions, what = len(work.lengths) * work.width, f"{work.name}, {model}"
            seconds = sections.get(f"forward {work.name}{suffix(model, None)}", {}).get("seconds", {})
            sdpa, packed, graphs, stock, compiled = (
                seconds.get(f"{name} bfloat16", {})
                for name in (
                    *("bertlite sdpa", "bertlite packed", "bertlite graphs"),
                    *("transformers sdpa", "transformers compiled"),
                )
            )
            for key, shape, names, engine in GRAPHED:
                if model == shape and work.name in names and engine is not None:
                    yield key, SPEED, what, over(seconds.get(f"{engine} bfloat16", {}), graphs), 1
                elif model == shape and work.name in names:
                    counted = 2 * sum(count * macs(config, length) for length, count in Counter(work.lengths).items())
                    yield key, SPEED, what, counted / graphs["median"] / peak if graphs and peak else None, 1
            if positions >= BUSY and filled(work) < 1:
                yield "packed", SPEED, what, over(stock, packed), filled(work)
            elif positions >= BUSY:
                yield "full", SPEED, what, over(compiled, sdpa), 1
                flops = 2 * len(work.lengths) * macs(config, work.width)
                yield "peak", SPEED, what, flops / sdpa["median"] / peak if sdpa and peak else None, 1
        for key, each, engine in TRAINED if model == "bert-base" else TRAINED_LARGE:
            section = sections.get(f"training {each} by autocast{suffix(model, None)}", {})
            ratio = section.get("ratios", {}).get(f"transformers sdpa / bertlite {engine}", {})
            yield key, SPEED, f"{each}, {model}", ratio.get("median"), 1


def figures_of_embed(seconds: Mapping[str, Mapping[str, float]]) -> Iterator[Figure]:
    """Yield the figures of texts to vectors; each engine has its own best batch."""

    def best(engine: str) -> Mapping[str, float]:
        found = [row for name, row in seconds.items() if name.startswith(engine)]
        return min(found, key=lambda row: row["median"], default={})

    first = seconds.get(f"{gpu_embed.STOCK}, 32", {})
    ours, inside = best(gpu_embed.OURS), seconds.get(f"{gpu_embed.INSIDE}, 32", {})
    yield "embed", EMBED, "texts like SST-2's", over(first, ours), 1
    yield "embed, best", EMBED, "texts like SST-2's", over(best(gpu_embed.STOCK), ours), 1
    yield "embed, inside", EMBED, "texts like SST-2's", over(first, inside), 1


def over(a: Mapping[str, float], b: Mapping[str, float], field: str = "median") -> float | None:
    return a[field] / b[field] if field in a and field in b else None


def judge(records: Records) -> dict[str, list[dict[str, Any]]]:
    """Return, for each record, every figure with its goal and a verdict: met, missed or not measured."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in records}
    for key, name, what, figure, share in figures(records):
        goal = GOALS[key]
        bound = round(goal.bound / (share if goal.by_fill else 1), 2)
        figure = figure if figure is None else round(figure, 2)
        met = figure is not None and (figure >= bound if goal.at_least else figure <= bound)
        verdict = "not measured" if figure is None else "met" if met else "missed"
        words = f"{'at least' if goal.at_least else 'at most'} {bound:g}"
        found[name].append({"figure": goal.figure, "of": what, "is": figure, "goal": words, "verdict": verdict})
    return found


def write_verdicts(out: Path, steps: Mapping[str, str], device: str = "cuda") -> None:
    """Add verdicts to the records in a folder; write all of them, and the missing ones, to checks-cuda.json.

    Args:
        steps: {step of scripts.measure.gpu_checks: passed, failed or not run}.
    """
    paths = {name: out / f"{name}.json" for name in RECORDS}
    records = {n: json.loads(path.read_text("utf-8")) if path.exists() else {} for n, path in paths.items()}
    verdicts = judge(records)
    for name, record in records.items():
        if record:
            write_json(paths[name], {**record, "goals": verdicts[name]})
    rows = [{"record": name, **row} for name, each in verdicts.items() for row in each]
    not_run = [f"step {step}" for step, result in steps.items() if result == "not run"]
    not_run += [f"{name}: {why}" for each in records.values() for name, why in each.get("missing", {}).items()]
    not_run += [f"{row['figure']}: {row['of']}" for row in rows if row["verdict"] == "not measured"]
    found = {"what": "scripts/measure/gpu_checks.py", "steps": steps, "goals": rows, "not_run": not_run}
    write_json(out / "checks-cuda.json", {**found, "environment": environment(device)})
    for row in rows:
        print(f"{row['verdict']:<12} {row['figure']}, {row['of']}: {row['is']}; {row['goal']}")


# What only this script measures


def limits(device: str, sizes: Mapping[str, Any], width: int, rounds: int = FEWEST) -> dict[str, Any]:
    """Measure the peak of bfloat16 matmuls of `width`, the latency of 16 tokens and, on a GPU, a graph's and waits."""
    config = BertConfig(**sizes)
    ours = BertModel(config).to(device, torch.bfloat16).eval()
    theirs = reference.stock().BertModel(reference.stock().BertConfig(**sizes)).to(device, torch.bfloat16).eval()
    ids = torch.ones(1, 16, dtype=torch.long, device=device)
    matrix = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    ends = torch.tensor([0, 16], dtype=torch.int32)
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    runs: dict[str, Callable[[], Any]] = {"matmul": lambda: matrix @ matrix, LATENCY: lambda: theirs(ids)}
    parts: dict[str, Callable[[], Any]] = {
        "waits": lambda: {
            MASK: count_waits(lambda: ours(ids, attention_mask=mask)),
            PACKED: count_waits(lambda: ours(ids[0], cu_seqlens=ends)),
        },
        "captures": lambda: captures(ours),
        "graph": lambda: runs.__setitem__(GRAPH, graph_of(lambda: ours(ids))),
    }
    with torch.no_grad():
        own = run_parts(parts) if torch.device(device).type == "cuda" else {}
        found = summary("matmul and latency", alternate(runs, rounds, device, warm=2), [])
    flops = 2 * width**3 / found["seconds"]["matmul"]["median"]
    return {**found, "matmul_flops": flops, **own, "environment": environment(device)}


def run_parts(parts: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return the result of each part by name, and why others are "missing": those that raised."""
    found: dict[str, Any] = {}
    for name, part in parts.items():
        try:
            found[name] = part()
        except Exception as error:  # of any kind: the other parts are measured
            traceback.print_exc()
            found.setdefault("missing", {})[name] = f"{type(error).__name__}: {error}"
    return found


def captures(model: BertModel) -> dict[str, Any]:
    """Measure the seconds of the first batch of several buckets, and the bytes of their graphs.

    Twice: for the first time Triton compiles kernels, unless it kept them.
    """
    found: dict[str, Any] = {}
    for name in ("compiling", "seconds"):
        fused.FASTEST.clear()
        quick, found[name] = optimize_for_inference(model, backend="graphs", verify=False), []
        body: Any = quick.base_model
        with warnings.catch_warnings(action="ignore"):
            for length in (16, 24, 40, 64, 100, 128):
                ids = torch.ones(8, length, dtype=torch.long, device=model.device)
                torch.cuda.synchronize()
                start = time.perf_counter()
                quick(ids)
                torch.cuda.synchronize()
                found[name].append(time.perf_counter() - start)
        found["bytes"] = sum(pool.bytes for pool in body.graphs.pools)
    return {**found, "up matmul": {f"{key[3]} tokens": way for key, way in fused.FASTEST.items()}}


def graph_of(run: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that replays what a run launches on the GPU."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def count_waits(run: Callable[[], Any]) -> int:
    """Count how often a run waits for the GPU, after a first run that sets things up.

    Only the warnings of operations count: torch also warns, once in a process, that this way of counting is new.
    """
    run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(each.message) for each in caught)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=8192, help="of the matrices that are multiplied")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write the record")
    args = parser.parse_args(argv)
    found = limits(args.device, MODELS["bert-base"][1], args.width)
    write_json(args.out, found)
    return int("missing" in found)


if __name__ == "__main__":
    raise SystemExit(main())
