"""`bertlite embed`: a job from its arguments."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from bertlite.embed.embedder import Embedder
from bertlite.embed.job import Job, Rows, run
from bertlite.support.progress import count_of
from bertlite.support.records import write_json


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
        Rows(tuple(map(Path, args.input)), args.format, args.column, args.id, args.columns),
        args.folder,
        shard_rows=args.shard_rows,
        keep_text=args.keep_text,
        rank=rank,
        world=world,
    )
    manifest = run(job)
    if args.record:
        write_json(args.record, manifest)
    if rank == 0:
        done = manifest["embedded"]
        state = "complete" if manifest["complete"] else "not complete: other processes are still at work"
        print(
            f"{job.out}: {count_of(manifest['input']['rows'], 'row')}, {manifest['dimension']} numbers each, {state}"
        )
        shards, characters = count_of(done["shards"], "shard"), count_of(done["characters"], "character")
        print(f"this time: {shards}, {characters}, {done['characters_per_second']:.0f}/s")
    return 0


def read_placement(environment: Mapping[str, str], device: str) -> tuple[int, int, str]:
    """Return this process's rank, the number of processes, and its device, from torchrun's variables."""
    rank, world = (int(environment.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if device == "cuda" and "LOCAL_RANK" in environment:
        device = f"cuda:{environment['LOCAL_RANK']}"
    return rank, world, device
