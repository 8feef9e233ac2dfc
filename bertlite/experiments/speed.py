"""The speed of a checkpoint on this machine: in the library that it is for, and in each dtype.

All take turns in one process, on the same texts, and each is called as its users call it, from texts to results.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from random import Random
from typing import Any

import torch

from bertlite.inference import optimize_for_inference
from bertlite.inference.checks import parse_device
from bertlite.inference.clients.bodies import OptimizedBody
from bertlite.inference.clients.holders import modules_of
from bertlite.opened.checkpoint import Checkpoint
from bertlite.runtime.tasks import PackedModel, check_count, is_packed
from bertlite.runtime.texts import check_texts
from bertlite.shipping.original import Original, pairs, processing_of, what_is_kept
from bertlite.support.environment import environment, version_of
from bertlite.support.process import door
from bertlite.support.progress import Progress, count_of
from bertlite.support.timing import FEWEST, alternate, quartiles, ratios, time_calls, with_spread

TIMED_DTYPES = {"cpu": ("float32", "bfloat16", "int8"), "cuda": ("float32", "bfloat16", "float16")}
BATCHES = (1, 32)  # texts in a call
FEWEST_TEXTS = 20
ROUNDS = 15  # the most rounds
TIMING, JUDGING = 25.0, 20.0  # seconds for each size of batch, and for judging
IN_ALL = 3.0  # the time of the library and three dtypes, over the library's own
JUDGED = (50, 1000)  # texts to judge by, the fewest that have neighbours and the most


@door
def measure_speed(
    checkpoint: str | PathLike[str],
    texts: Sequence[Any],
    *,
    against: str | PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    backend: str | None = None,
    max_length: int | None = None,
    device: str = "cpu",
    progress: bool = False,
) -> dict[str, Any]:
    """Time a checkpoint in its own library and in each dtype of `optimize_for_inference`, and compare their results.

    The library is sentence-transformers for an encoder or a reranker, and a pipeline of transformers for a classifier
    or a tagger.  It takes about two minutes, longer from 0.1 seconds a text on.

    Args:
        texts: strings or pairs of them, 20 or more, of the kind that the model will see.  A reranker of single texts
            gets each with the next.  Timed texts are drawn at random; other texts are for judging the results.
        checkpoint: a packed folder is compared with the checkpoint that it was made from.
        against: that checkpoint, if the packed folder was made from a folder that is not in the working directory.
        dtype: compare the library only with this one.
        backend: a backend of `optimize_for_inference`; by default "auto".
        max_length: tokens to truncate texts to, at most what the checkpoint reads.
        progress: show bars on standard error.

    Returns:
        The record.  For the library and each dtype it has the milliseconds a text and the texts a second, one by one
        and in batches of 32, with quartiles over rounds.  The speed is a multiple of the library's, a ratio in each
        round.  "kept" is the agreement with the library's results for other texts: cosines and nearest neighbours of
        vectors, the rank correlation of scores, or the share of texts with the same label or labels.
        "left_out" has the dtypes that cannot run here, with the reason.

    Raises:
        ModuleNotFoundError: the library is not installed.
        RuntimeError, TypeError: the dtype, or each, cannot run, as `optimize_for_inference` says; or a text is none.
        ValueError: the same; or there are too few texts, no such device, or the checkpoint has no results for texts;
            or `against` is missing, or given for a checkpoint that is not packed.
    """
    # Arguments that do not fit are refused before a model is loaded.
    source, texts, where = Checkpoint.of(checkpoint), check_texts(texts, pairs=True), parse_device(device)
    if len(texts) < FEWEST_TEXTS:
        raise ValueError(f"there are {len(texts)} texts; {FEWEST_TEXTS} or more are needed, better a thousand")

    # A packed folder is compared with the checkpoint that it was made from, in that checkpoint's own library.
    packed = PackedModel(source, torch.get_num_threads()) if is_packed(source) else None
    if packed is not None:
        check_packed_options(source, dtype, backend, device)
        source = Checkpoint.of(against or checkpoint_of(packed))
    elif against is not None:
        raise ValueError(f"against names the checkpoint of a packed folder, and {checkpoint} is not packed")

    about = processing_of(source)
    kind, longest = about.kind, about.max_length
    longest = longest if max_length is None else min(check_count("max_length", max_length), longest)
    if kind == "tagger" and not all(isinstance(text, str) for text in texts):
        raise ValueError("texts holds pairs, and a tagger reads single texts: give a list of strings")

    # All models get the same texts, truncated at the same length, or their times could not be compared.
    original = Original.load(source, kind, longest, device)
    if packed is None:
        models, left_out = optimised(original, dtype, backend, where)
    else:
        packed.max_seq_length, left_out = longest, {}
        models = {original.library: original, f"packed {packed.dtype}": replace(original, model=packed)}

    # Results are compared on other texts than the timed ones, as many as there is time for.
    timed, others, one = split_texts(original, texts)
    with Progress(None, "", what="evaluate", shown=progress) as bar:
        batches = {size: time_batches(models, timed, size, one, device, bar) for size in BATCHES}
        results = {name: models[name].results(others) for name in bar.over("results kept", [*models], "models")}

    rows = {
        name: {
            "backend": backend_of(model.model),
            **{f"batch {size}": found[name] for size, found in batches.items()},
            "kept": {} if model is original else what_is_kept(kind, results[name], results[original.library]),
        }
        for name, model in models.items()
    }

    lengths = [len(ids) for ids in source.tokenizer.encode_texts(timed, longest)["input_ids"]]
    return {
        "what": "bertlite.measure_speed",
        "checkpoint": fspath(checkpoint),
        "kind": kind,
        "library": {"name": original.library, "version": version_of(original.library)},
        "texts": {"timed": len(timed), "judged": len(others), "tokens": sum(lengths) / len(lengths)},
        "rows": rows,
        "left_out": left_out,
        "environment": environment(device),
    }


def check_packed_options(folder: Any, dtype: Any, backend: str | None, device: str) -> None:
    """Raise ValueError for options that a packed folder does not take."""
    if dtype is not None or backend is not None or parse_device(device).type != "cpu":
        raise ValueError(f"{folder} is a packed folder, for CPUs: leave out dtype, backend and device")


def checkpoint_of(packed: PackedModel) -> str:
    """Return the checkpoint that a packed folder was made from; raise ValueError if it is not known where that is."""
    found: str = (packed.processing.made or {}).get("checkpoint", "a checkpoint that it does not name")
    if "/" not in found and not Path(found).is_dir():  # a folder of this name is elsewhere
        raise ValueError(f"{packed.folder} is a packed folder, made from {found}: give against, or --against FOLDER")
    return found


def optimised(
    original: Original, dtype: torch.dtype | str | None, backend: str | None, device: torch.device
) -> tuple[dict[str, Original], dict[str, str]]:
    """Return the models to compare by name, the library's first, and of each dtype that cannot run the reason.

    Raises:
        RuntimeError, TypeError, ValueError: the named dtype, or none, can run.
    """
    models, left_out, first = {original.library: original}, dict[str, str](), None
    names = TIMED_DTYPES[device.type] if dtype is None else (str(dtype).removeprefix("torch."),)
    for name in names:
        try:
            quick = optimize_for_inference(original.model, dtype=name, backend=backend or "auto")
            models[name] = replace(original, model=quick)
        except (RuntimeError, TypeError, ValueError) as error:
            left_out[name], first = str(error), first or error
    if first is not None and len(left_out) == len(names):
        raise first  # the reason of the plainest dtype
    return models, left_out


def split_texts(original: Original, texts: Sequence[Any]) -> tuple[list[Any], list[Any], float]:
    """Return texts to time and others to judge by, as many as there is time for, and the seconds of one."""
    given = pairs(texts) if original.kind == "cross-encoder" and isinstance(texts[0], str) else texts
    shuffled = Random(0).sample(given, len(given))
    run = partial(run_singly, original, shuffled[:8])
    run()  # warm
    one = time_calls(run, 1) / 8
    count = min(len(shuffled) // 2, max(BATCHES[-1], fitting(TIMING, one, 2 * BATCHES[-1])))
    return shuffled[:count], shuffled[count:][: max(JUDGED[0], fitting(JUDGING, one, JUDGED[1]))], one


def fitting(seconds: float, one: float, most: int) -> int:
    """Return the number of texts that all models can run in `seconds`; the library takes `one` for a text."""
    return min(most, int(seconds / (IN_ALL * one)))


def run_singly(model: Original, texts: Sequence[Any]) -> None:
    for text in texts:
        model.results([text], batch_size=1)


def time_batches(
    models: dict[str, Original], texts: Sequence[Any], size: int, one: float, device: str, bar: Progress
) -> dict[str, dict[str, Any]]:
    """Return for each model the milliseconds a text, the texts a second, and the speed over the first model's."""
    some = texts if size > 1 else texts[: max(8, fitting(TIMING / (FEWEST + 1), one, len(texts)))]

    def call(model: Original) -> Callable[[], Any]:
        return partial(run_singly, model, some) if size == 1 else partial(model.results, some, batch_size=size)

    # All models take turns in each round, so that their ratios are fair on a busy machine.
    bar.stage(name_of_batch(size), ROUNDS, "rounds")
    calls = {name: call(model) for name, model in models.items()}
    times = alternate(calls, ROUNDS, device, warm=1, seconds=TIMING, after_round=bar.advance)

    first, *_ = models
    return {
        name: {
            "milliseconds": quartiles([1000 * seconds / len(some) for seconds in each]),
            "texts_per_second": quartiles([len(some) / seconds for seconds in each]),
            "speedup": quartiles(ratios(times, first, name)),
            "texts": len(some),
            "rounds": len(each),
        }
        for name, each in times.items()
    }


def backend_of(thing: Any) -> str | None:
    """Return the backend of the optimised encoders in an object, None without any; a packed folder's is "runtime"."""
    if isinstance(thing, PackedModel):
        return "runtime"
    parts = (part for _, module in modules_of(thing) for part in module.modules())
    return next((part.model.backend for part in parts if isinstance(part, OptimizedBody)), None)


def describe_speed(record: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a record for people: a table of times for each size of batch, and one of the agreement."""
    library, texts, machine = record["library"], record["texts"], record["environment"]
    yield f"{record['checkpoint']}: {record['kind']}, against {library['name']} {library['version']}"
    yield f"{machine['gpu'] if 'gpu' in machine else machine['cpu']}, {count_of(machine['threads'], 'thread')}"
    yield f"{texts['timed']} texts of {texts['tokens']:.0f} tokens on average; medians, in brackets quartiles"

    # A table for each size of batch.
    width = max(map(len, (*record["rows"], *map(name_of_batch, BATCHES))))
    for size in BATCHES:
        yield ""
        yield f"{name_of_batch(size):{width}}  ms a text  texts a second  times as fast"
        for name, row in record["rows"].items():
            found = row[f"batch {size}"]
            times, rate = found["milliseconds"]["median"], found["texts_per_second"]["median"]
            faster = "" if row["backend"] is None else with_spread(found["speedup"])
            yield f"{name:{width}}  {times:9.2f}  {rate:14.1f}  {faster}".rstrip()

    # And one of the agreement, on texts that were not timed.
    yield from (f"{name} is left out: {reason}" for name, reason in record["left_out"].items())
    kept = {name: row["kept"] for name, row in record["rows"].items() if row["kept"]}
    yield f"\nagreement with its results for {texts['judged']} other texts"
    yield " " * width + "".join(f"  {what}" for what in next(iter(kept.values())))
    for name, row in kept.items():
        yield f"{name:{width}}" + "".join(f"  {value:{len(what)}.4f}" for what, value in row.items())


def name_of_batch(size: int) -> str:
    return "one text at a time" if size == 1 else f"batches of {size}"
