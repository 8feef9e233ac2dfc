"""Run a job on Ray Data, across the machines of a cluster that share a file system.

The rows are written once, with numbers, as Parquet files into the output folder.  Ray reads them, sends them to actors
with an `Embedder` each, writes the vectors, and keeps a record of the written rows.  A worker that dies is restarted
and its batch repeated; after the driver was killed, the same command writes the missing rows.
"""

import os
import shutil
import uuid
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from bertlite.checkpoint.folders import sync
from bertlite.embed.embedder import Embedder
from bertlite.embed.job import MANIFEST, Job, Manifest, job_key, make_table, open_manifest, summarise_input
from bertlite.extras import import_optional
from bertlite.records import write_json
from bertlite.rows import import_pyarrow

if TYPE_CHECKING:
    import pyarrow

ACTOR_ROWS = 512  # rows that an actor gets at a time
SPARE_CPUS = 2  # beside those of the actors: without one, reading and writing never start


def run(job: Job, workers: int) -> Manifest:
    """Embed the rows that are missing and return the manifest.

    Args:
        workers: the number of actors, each with a processor, or with a GPU if the embedder's device is one.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ValueError: as `bertlite.embed.job.run`, and for fewer than one worker.
    """
    ray = import_ray()
    _, pq = import_pyarrow()
    if workers < 1:
        raise ValueError(f"there are {workers} workers; it must be 1 or more")
    found = summarise_input(job)
    manifest = open_manifest(job, found)
    rows, done, vectors = job.out / ".rows", job.out / ".done", job.out / "vectors"
    if not manifest["complete"]:
        write_rows(job, rows)
        if not ray.is_initialized():
            ray.init(num_cpus=None if os.environ.get("RAY_ADDRESS") else workers + SPARE_CPUS, include_dashboard=False)
        context = ray.data.DataContext.get_current()
        before = context.checkpoint_config
        context.checkpoint_config = ray.data.checkpoint.CheckpointConfig(
            id_column="row", checkpoint_path=str(done.resolve())
        )
        try:
            # a block for each file: Ray keeps its record by block
            numbered = ray.data.read_parquet([str(path) for path in sorted(rows.resolve().glob("*.parquet"))])
            gpus = {"num_gpus": 1} if job.embedder.device.startswith("cuda") else {}
            numbered.map_batches(
                EmbedTable,
                fn_constructor_args=(job.embedder, job.keep_text, job_key(manifest)),
                batch_size=ACTOR_ROWS,
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


class EmbedTable:
    """Turns a table of rows into a table of their vectors, in an actor."""

    def __init__(self, embedder: Embedder, keep_text: bool, key: str) -> None:
        self.embedder, self.keep_text, self.key = embedder, keep_text, key

    def __call__(self, rows: "pyarrow.Table") -> "pyarrow.Table":
        texts: list[str] = rows.column("text").to_pylist()
        vectors = self.embedder(texts)
        made = make_table(rows.column("id").to_pylist(), vectors, texts if self.keep_text else None, self.key)
        return made.append_column("row", rows.column("row"))


def write_rows(job: Job, folder: Path) -> None:
    """Write the rows, numbered, into Parquet files of `shard_rows` rows each, unless the files are there."""
    pa, pq = import_pyarrow()
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


def import_ray() -> ModuleType:
    """Return ray.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    import_optional("ray.data.checkpoint", "--engine ray", "ray")
    return import_optional("ray", "--engine ray", "ray")
