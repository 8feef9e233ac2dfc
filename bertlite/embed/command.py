"""Embed files of any size: `embed`, and `bertlite embed`, its command."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

from bertlite.checkpoint.folders import check_output
from bertlite.embed.embedder import Embedder
from bertlite.embed.job import OWN, Job, Manifest, Rows, embed_missing
from bertlite.embed.settings import EmbedSettings, VectorSettings
from bertlite.support.process import door
from bertlite.support.progress import count_of

USUAL = EmbedSettings()


@door
def embed(
    model: str | PathLike[str],
    files: str | PathLike[str] | Sequence[str | PathLike[str]],
    folder: str | PathLike[str],
    settings: EmbedSettings = USUAL,
    *,
    format: str | None = None,
    column: str = "text",
    id: str | None = None,
    columns: Sequence[str] = (),
    rank: int = 0,
    world: int = 1,
    progress: bool = False,
) -> Manifest:
    """Write one vector for every row of files into Parquet files; called again after a kill, write the missing ones.

    Args:
        model: a hub id or a folder, of whatever sentence-transformers loads.
        files: text (one row a line), csv, tsv, jsonl or Parquet.
        folder: to write; it may hold files of the same job.
        format: the format of the files: text, csv, tsv, jsonl or parquet; by default by their suffixes.
        column: the name of the column with the text.
        id: the name of the column with the id; by default rows are numbered.
        columns: names of all columns, for csv and tsv files without a header.
        rank, world: the index of this process and the number of processes, which share the work.
        progress: show a bar.

    Returns:
        The record: the model, the settings, the hash of the input, the dimension of the vectors, whether the folder is
        complete, and under "embedded" what this call did.

    Raises:
        FileNotFoundError: there is no such model or file.
        NotADirectoryError: the folder is a file.
        ValueError: the folder is the model's, belongs to another job or has a damaged file; a row cannot be read; a
            setting or the rank cannot be.
    """
    named = {each.name: getattr(settings, each.name) for each in fields(VectorSettings)}
    paths = [files] if isinstance(files, str | PathLike) else files
    check_output(folder, OWN, model, *paths, own=True)
    job = Job(
        Embedder(model, **named),
        Rows(tuple(map(Path, paths)), format, column, id, tuple(columns)),
        Path(folder).expanduser(),
        settings.shard_rows,
        settings.keep_text,
        rank,
        world,
    )
    return embed_missing(job, progress)


def summary_lines(record: Mapping[str, Any], out: Mapping[str, Path]) -> Iterator[str]:
    """Yield how much was written, in all and by this call."""
    done = record["embedded"]
    state = "complete" if record["complete"] else "not complete: other processes are still at work"
    rows = count_of(record["input"]["rows"], "row")
    yield f"{out['FOLDER']}: {rows}, {record['dimension']} numbers each, {state}"
    shards, characters = count_of(done["shards"], "shard"), count_of(done["characters"], "character")
    yield f"this time: {shards}, {characters}, {done['characters_per_second']:,.0f}/s"


def read_placement(environment: Mapping[str, str], device: str) -> tuple[int, int, str]:
    """Return this process's rank, the number of processes, and its device, from torchrun's variables."""
    rank, world = (int(environment.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if device == "cuda" and "LOCAL_RANK" in environment:
        device = f"cuda:{environment['LOCAL_RANK']}"
    return rank, world, device
