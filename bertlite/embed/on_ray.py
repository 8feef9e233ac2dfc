"""The same job on Ray Data, across the machines of a cluster that share a file system.

The rows are written once as Parquet into the output folder, which gives each a number; Ray reads them, hands them to
actors that hold an `Embedder` each, writes what they return, and remembers which rows it has written.  A worker that
dies is started anew and its batch done again; after a kill of the driver the same command does what is missing.
"""

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

from bertlite.checkpoint.folders import sync
from bertlite.embed.embedder import Embedder
from bertlite.embed.job import MANIFEST, Job, claim, key_of, survey, table_of
from bertlite.embed.rows import pyarrow
from bertlite.records import write_json

BATCH = 512  # rows that an actor gets at a time
SPARE = 2  # processors beside the actors': without one, reading and writing wait for ever


def run(job: Job, workers: int) -> dict[str, Any]:
    """Embed what is not yet embedded; returns the manifest.

    Args:
        workers: actors, each with a processor, or with a GPU if the embedder's device is one.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ValueError: as `bertlite.embed.job.run`, and for fewer than one worker.
    """
    ray = library()
    pq = pyarrow()[1]
    if workers < 1:
        raise ValueError(f"there are {workers} workers; it must be 1 or more")
    found = survey(job)
    manifest = claim(job, found)
    rows, done, vectors = job.out / ".rows", job.out / ".done", job.out / "vectors"
    if not manifest["complete"]:
        stage(job, rows)
        if not ray.is_initialized():
            ray.init(num_cpus=None if os.environ.get("RAY_ADDRESS") else workers + SPARE, include_dashboard=False)
        context = ray.data.DataContext.get_current()
        before = context.checkpoint_config
        context.checkpoint_config = ray.data.checkpoint.CheckpointConfig(
            id_column="row", checkpoint_path=str(done.resolve())
        )
        try:
            # one block each, which is the unit that Ray remembers
            staged = ray.data.read_parquet([str(path) for path in sorted(rows.resolve().glob("*.parquet"))])
            gpus = {"num_gpus": 1} if job.embedder.device.startswith("cuda") else {}
            staged.map_batches(
                Tables,
                fn_constructor_args=(job.embedder, job.keep_text, key_of(manifest)),
                batch_size=BATCH,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(size=workers),
                **gpus,
            ).write_parquet(str(vectors.resolve()))
        finally:
            context.checkpoint_config = before
    counts = {path.name: pq.read_metadata(path).num_rows for path in sorted(vectors.glob("*.parquet"))}
    if sum(counts.values()) != sum(found.counts):
        raise ValueError(f"{vectors} holds {sum(counts.values())} rows of {sum(found.counts)}: remove {job.out}")
    manifest |= {"shards": {f"vectors/{name}": count for name, count in counts.items()}, "complete": True}
    write_json(job.out / MANIFEST, manifest)
    for leftover in (rows, done):
        shutil.rmtree(leftover, ignore_errors=True)
    return {**manifest, "embedded": {}}


class Tables:
    """What an actor runs: the rows of a batch to those of the output."""

    def __init__(self, embedder: Embedder, keep_text: bool, key: str) -> None:
        self.embedder, self.keep_text, self.key = embedder, keep_text, key

    def __call__(self, batch: Any) -> Any:
        texts = batch.column("text").to_pylist()
        vectors = self.embedder(texts)
        made = table_of(batch.column("id").to_pylist(), vectors, texts if self.keep_text else None, self.key)
        return made.append_column("row", batch.column("row"))


def stage(job: Job, folder: Path) -> None:
    """Write the rows, numbered, into Parquet files of `shard_rows`; those that are there are left alone."""
    pa, pq = pyarrow()
    folder.mkdir(exist_ok=True)
    for shard, group in job.shards():
        path = folder / f"{shard:08d}.parquet"
        if path.exists():
            continue
        names, texts = zip(*group, strict=True)
        first = shard * job.shard_rows
        numbers = pa.array(range(first, first + len(names)), pa.int64())
        temporary = folder.parent / f".part-{uuid.uuid4().hex}.tmp"
        pq.write_table(pa.table({"row": numbers, "id": list(names), "text": list(texts)}), temporary)
        sync(temporary)
        os.replace(temporary, path)


def library() -> Any:
    try:
        import ray
        import ray.data.checkpoint
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"--engine ray needs Ray ({error}): pip install 'bertlite[ray]'") from None
    return ray
