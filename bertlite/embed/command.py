"""`bertlite embed`: a job from its arguments, run by an engine, with a progress bar."""

import argparse
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bertlite.embed import job as local
from bertlite.embed import on_ray
from bertlite.embed.embedder import Embedder
from bertlite.embed.job import Job, TokenCount
from bertlite.embed.rows import Rows
from bertlite.progress import Progress, count_of
from bertlite.records import write_json


def main(args: argparse.Namespace) -> int:
    rank, world, device = read_placement(os.environ, args.device)
    job = Job(
        Embedder(
            args.checkpoint,
            pooling=args.pooling,
            normalize=args.normalize,
            prompt=args.prompt,
            prompt_name=args.prompt_name,
            dtype=args.dtype,
            device=device,
            backend=args.backend,
            max_length=args.max_length,
            max_tokens=args.max_tokens,
        ),
        Rows(tuple(map(Path, args.input)), args.format, args.column, args.id),
        args.folder,
        shard_rows=args.shard_rows,
        keep_text=args.keep_text,
        rank=rank,
        world=world,
        engine=args.engine,
    )
    manifest = ENGINES[args.engine](job, args.workers)
    if args.record:
        write_json(args.record, manifest)
    if rank == 0:
        done = manifest["embedded"]
        state = "complete" if manifest["complete"] else "not complete: other processes are still at work"
        print(
            f"{job.out}: {count_of(manifest['input']['rows'], 'row')}, {manifest['dimension']} numbers each, {state}"
        )
        if "tokens" in done:  # Ray's workers do not count them
            shards, tokens = count_of(done["shards"], "shard"), count_of(done["tokens"], "token")
            print(f"this time: {shards}, {tokens}, {done['tokens_per_second']:.0f}/s")
    return 0


def read_placement(environment: Mapping[str, str], device: str) -> tuple[int, int, str]:
    """Return this process's rank, the number of processes, and its device, from torchrun's variables."""
    rank, world = (int(environment.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if device == "cuda" and "LOCAL_RANK" in environment:
        device = f"cuda:{environment['LOCAL_RANK']}"
    return rank, world, device


def run_local(job: Job, workers: int | None) -> dict[str, Any]:
    if workers is not None:
        raise ValueError(f"--workers {workers} is for --engine ray; start several processes with torchrun instead")
    with ExitStack() as stack:
        bar: Progress | None = None

        def show(tokens: TokenCount) -> None:
            nonlocal bar
            if bar is None:  # not before the first shard, when the number of tokens can be estimated
                shown = Progress(tokens.total, "tokens", what="embed", done=tokens.done, shown=job.rank == 0)
                bar = stack.enter_context(shown)
            bar.total = tokens.total
            bar.advance(tokens.done - bar.done)

        return local.run(job, show)


def run_ray(job: Job, workers: int | None) -> dict[str, Any]:
    return on_ray.run(job, 2 if workers is None else workers)


ENGINES: dict[str, Callable[[Job, int | None], dict[str, Any]]] = {"local": run_local, "ray": run_ray}
