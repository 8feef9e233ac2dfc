"""`bertlite embed`: a job from its arguments, run by an engine, with a progress bar."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bertlite.embed import job as local
from bertlite.embed import on_ray
from bertlite.embed.embedder import Embedder
from bertlite.embed.job import Job, Progress
from bertlite.embed.rows import Rows
from bertlite.records import write_json

if TYPE_CHECKING:
    from tqdm import tqdm


def main(args: argparse.Namespace) -> int:
    rank, world, device = read_placement(os.environ, args.device)
    job = Job(
        Embedder(
            args.model,
            pooling=args.pooling,
            normalize=args.normalize,
            dtype=args.dtype,
            device=device,
            max_length=args.max_length,
            max_tokens=args.max_tokens,
        ),
        Rows(tuple(map(Path, args.input)), args.format, args.column, args.id),
        Path(args.out),
        shard_rows=args.shard_rows,
        keep_text=args.keep_text,
        rank=rank,
        world=world,
        engine=args.engine,
    )
    manifest = ENGINES[args.engine](job, args.workers)
    if args.json:
        write_json(args.json, manifest)
    if rank == 0:
        done = manifest["embedded"]
        state = "complete" if manifest["complete"] else "not complete: other processes are still at work"
        print(f"{job.out}: {manifest['input']['rows']} rows, {manifest['dimension']} numbers each, {state}")
        if "tokens" in done:  # Ray's workers do not count them
            print(f"this time: {done['shards']} shards, {done['tokens']} tokens, {done['tokens_per_second']:.0f}/s")
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
    with ProgressBar(shown=job.rank == 0 and sys.stderr.isatty()) as bar:
        return local.run(job, bar.show)


def run_ray(job: Job, workers: int | None) -> dict[str, Any]:
    return on_ray.run(job, 2 if workers is None else workers)


ENGINES: dict[str, Callable[[Job, int | None], dict[str, Any]]] = {"local": run_local, "ray": run_ray}


class ProgressBar:
    """The progress of a job on the terminal, in tokens."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self.bar: tqdm[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def show(self, progress: Progress) -> None:
        from tqdm import tqdm

        if self.bar is None:
            self.bar = tqdm(disable=not self.shown, bar_format="{desc} |{bar}| {postfix}")
        self.bar.total, self.bar.n = progress.total, progress.done
        self.bar.set_description_str(f"{progress.done:,} of {progress.total:,} tokens", refresh=False)
        self.bar.set_postfix_str(f"{progress.rate:,.0f}/s, {tqdm.format_interval(progress.seconds_left or 0)} left")
