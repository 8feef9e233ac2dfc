"""Embed an input of any size into a folder of Parquet files; a process may be killed at any time.

The input is cut into shards.  Each shard becomes one file, written under a temporary name, then renamed.  A file with
its final name is finished; a second start writes the missing ones.  Several processes share the shards, and none waits
for another.
"""

import hashlib
import json
import math
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np

from bertlite.checkpoint.folders import sync
from bertlite.embed.embedder import Embedder
from bertlite.embed.settings import EmbedSettings, compared
from bertlite.support.files import check_is_folder, naming, read_json_object, sha256, write_json
from bertlite.support.progress import Progress
from bertlite.support.rows import ID, TEXT, Table, format_of, import_pyarrow, read_rows

MANIFEST = ".manifest.json"  # only while work is left: polars takes each file for a shard; every shard has it too
OWN = re.compile(r"part-\d+-of-\d+\.parquet|\.manifest\.json")  # files that a job writes
LEFT = re.compile(rf"\.{{0,2}}({OWN.pattern})\.[0-9a-f]{{32}}\.tmp.*")  # left by killed processes
KEY, IN_SHARD = b"bertlite", b"bertlite manifest"  # in a shard's metadata
SHARD_ROWS, SHARD_CHARACTERS = 10_000, 1_000_000  # defaults: minutes on a small processor, at 4 characters a token
ID_TYPES = {"int64": (-(2**63), 2**63 - 1), "uint64": (0, 2**64 - 1)}  # {type of Arrow: range}; others are "string"
MOST_CHARACTERS_PER_TOKEN = 8  # characters beyond this times the limit do not count: they will be truncated

Id = int | str
Row = tuple[Id, str]
Manifest = dict[str, Any]  # JSON


@dataclass(frozen=True)
class Rows:
    """The rows of some files, in order.

    Args:
        paths: at least one.
        format: a name of `bertlite.support.rows.READERS`; by default each file's suffix tells.
        column: the name of the column with the text; a text file has one row for each line.
        id: the name of the column with the ids, all integers or all strings; by default rows are numbered from 0,
            through all files.
        columns: names of all columns, for csv and tsv files without a header.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a format is unknown, or ids are requested from a text file.
    """

    paths: tuple[Path, ...]
    format: str | None = None
    column: str = "text"
    id: str | None = None
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.paths:
            raise ValueError("there are no files to read: name at least one")
        for path in self.paths:
            if format_of(path, self.format) == "text" and self.id is not None:
                raise ValueError(f"{path} is plain text and has no column {self.id!r} for ids: its rows are numbered")

    def __iter__(self) -> Iterator[tuple[Id, str]]:
        """Yield (id, text) of every row.

        Raises:
            ValueError: as for `bertlite.support.rows.read_rows`; or a text is empty, or no type of Arrow holds an id
                and all ids before it.
        """
        columns = [(self.column, TEXT), *([] if self.id is None else [(self.id, ID)])]
        hint = "; name the column of the text with --text, and the column of the id with --id"
        tables = (Table(path, columns, self.columns, hint) for path in self.paths)
        rows = chain.from_iterable(read_rows(table, self.format) for table in tables)

        # All ids go into one column, so each id narrows the types that are left.
        possible = {*ID_TYPES, "string"}
        for number, (place, (text, *ids)) in enumerate(rows):
            if not text.strip():
                raise ValueError(f"{place}: column {self.column!r} is empty; leave the row out")
            for found in ids:
                if not (both := possible & id_types(found)):
                    raise ValueError(
                        f"{place}: column {self.id!r} holds {found!r}; all ids must be texts, or integers of one type:"
                        f" earlier ids fit {' or '.join(sorted(possible))}"
                    )
                possible = both
            yield (ids[0] if ids else number), text


def id_types(found: Id) -> set[str]:
    """Return the types of Arrow that hold an id."""
    if isinstance(found, str):
        return {"string"}
    return {name for name, (low, high) in ID_TYPES.items() if low <= found <= high}


@dataclass(frozen=True)
class Job:
    """Rows to embed, with an embedder, into a folder.

    Args:
        shard_rows, keep_text: see `EmbedSettings`.
        rank, world: the index of this process and the number of processes, which share the shards.
    """

    embedder: Embedder
    rows: Rows
    out: Path
    shard_rows: int | None = None
    keep_text: bool = False
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank is {self.rank}; of {self.world} processes it must be 0 to {self.world - 1}")

    def shards(self) -> Iterator[tuple[int, Iterator[Row]]]:
        """Yield (number, rows) of every shard."""
        most = (SHARD_ROWS, SHARD_CHARACTERS) if self.shard_rows is None else (self.shard_rows, math.inf)
        shard = rows = characters = 0

        def shard_of(row: Row) -> int:
            nonlocal shard, rows, characters
            rows, characters = rows + 1, characters + self.size(row[1])
            if rows > 1 and (rows > most[0] or characters > most[1]):
                shard, rows, characters = shard + 1, 1, self.size(row[1])
            return shard

        yield from groupby(self.rows, key=shard_of)

    def size(self, text: str) -> int:
        """Return the characters of a text, without those that will be truncated: time grows with them."""
        return min(len(text), self.embedder.longest * MOST_CHARACTERS_PER_TOKEN)


@dataclass(frozen=True)
class InputSummary:
    """The size and the hash of the whole input.

    Args:
        sizes: the size of the texts in each shard, by `Job.size`.
        counts: rows in each shard.
        id_type: a type of Arrow that holds every id.
        sha256: the hash of all ids and texts.
    """

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    id_type: str
    sha256: str


def embed_missing(job: Job, progress: bool = False) -> Manifest:
    """Embed the missing shards, and return the manifest.

    Raises:
        ValueError: the folder belongs to another job or has a damaged or foreign file, or a row cannot be read.
    """
    # Reading the input may take minutes: a missing package or a wrong folder is an error before that.
    import_pyarrow()
    check_is_folder(job.out)

    # Every process derives the same shards from the input, so that none has to ask another.
    found = summarise_input(job)
    manifest = open_manifest(job, found)
    count = len(found.counts)
    paths = [job.out / f"part-{shard:05d}-of-{count:05d}.parquet" for shard in range(count)]
    if foreign := sorted({path.name for path in job.out.glob("*.parquet")} - {path.name for path in paths}):
        raise ValueError(f"{job.out / foreign[0]} is not a file of this job: choose another --out folder")

    # A shard with this job's key is finished, whoever wrote it and when.
    key = job_key(manifest)
    metadata = {KEY: key.encode(), IN_SHARD: json.dumps(manifest).encode()}
    todo = {
        shard for shard in range(job.rank, count, job.world) if not is_finished(paths[shard], found.counts[shard], key)
    }

    # The rows are read again: of a large input, memory holds one shard at a time.
    began, characters = time.monotonic(), sum(found.sizes[shard] for shard in todo)
    with Progress(characters, "characters", what="embed", shown=progress and job.rank == 0) as bar:
        for shard, rows in job.shards() if todo else ():
            if shard in todo:
                write_shard(job, paths[shard], list(rows), found.id_type, metadata, bar)

    rate = characters / max(time.monotonic() - began, 1e-9)

    # The last process to finish closes the job; if two are last, both write the same.
    if all(is_finished(path, rows, key) for path, rows in zip(paths, found.counts, strict=True)):
        for leftover in filter(lambda path: LEFT.fullmatch(path.name), job.out.iterdir()):
            leftover.unlink(missing_ok=True)
        manifest["shards"] = {path.name: rows for path, rows in zip(paths, found.counts, strict=True)}
        manifest["complete"] = True
        (job.out / MANIFEST).unlink(missing_ok=True)
    return {**manifest, "embedded": {"shards": len(todo), "characters": characters, "characters_per_second": rate}}


def summarise_input(job: Job) -> InputSummary:
    """Read all of the input once; return its size and hash.

    Raises:
        ValueError: it is empty, or a row cannot be read.
    """
    digest, sizes, counts, types = hashlib.sha256(), [], [], {*ID_TYPES, "string"}

    # The lengths keep texts apart that would be the same bytes one after another.
    for _, rows in job.shards():
        shard = list(rows)
        sizes.append(sum(job.size(text) for _, text in shard))
        counts.append(len(shard))
        for name, text in shard:
            types &= id_types(name)
            digest.update(f"{name!r}\0{len(text)}\0{text}".encode())

    if not counts:
        raise ValueError(f"{', '.join(map(str, job.rows.paths))}: there are no rows to embed")
    return InputSummary(tuple(sizes), tuple(counts), min(types), digest.hexdigest())


def open_manifest(job: Job, found: InputSummary) -> Manifest:
    """Write the manifest into the folder, or return the existing one.

    Raises:
        ValueError: the existing one belongs to another job.
    """
    embedder, path = job.embedder, job.out / MANIFEST
    loaded = embedder.loaded
    wanted: Manifest = {
        "what": "bertlite embed",
        "model": {"name": str(embedder.model), "sha256": loaded.sha256, "files": loaded.files},
        "settings": {**embedder.settings, "shard_rows": job.shard_rows, "keep_text": job.keep_text},
        "input": {"rows": sum(found.counts), "sha256": found.sha256},
        "dimension": embedder.dimension,
        "complete": False,
    }

    # The first process writes the manifest; any other one, and any later start, reads it.
    job.out.mkdir(parents=True, exist_ok=True)
    there = manifest_of_shards(job.out)
    if there is None:
        temporary = job.out / f".{MANIFEST}.{uuid.uuid4().hex}.tmp"

        try:
            with naming(path):
                write_json(temporary, wanted)
            os.link(temporary, path)  # unlike a rename, it fails if another process was first
            return wanted
        except (FileExistsError, FileNotFoundError):  # the second if that process has finished and cleaned up
            there = (read_manifest(path) if path.exists() else manifest_of_shards(job.out)) or wanted
        finally:
            temporary.unlink(missing_ok=True)

    # Vectors of two models must not end in one folder.
    usual = compared(EmbedSettings, EmbedSettings())  # for settings that an older job did not have
    known = {**there, "settings": {**usual, **there["settings"]}}
    if differing := list(differing_values(identity(known), identity(wanted))):
        raise ValueError(
            f"{job.out} holds another job's vectors, which must not be mixed with these:\n  "
            + "\n  ".join(differing)
            + "\nchoose another --out folder, or the same settings"
        )
    return there


def manifest_of_shards(folder: Path) -> Manifest | None:
    """Return the manifest in the first shard of a folder; None if no shard holds one."""
    pa, pq = import_pyarrow()
    for path in sorted(folder.glob("part-*.parquet")):
        with suppress(pa.ArrowInvalid, OSError):  # `is_finished` names a damaged shard
            if found := (pq.read_metadata(path).metadata or {}).get(IN_SHARD):
                return json.loads(found)
    return None


def read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        ValueError: the file is damaged, or was not written by bertlite embed.
    """
    with suppress(ValueError):
        values = read_json_object(path)
        if values.get("what") == "bertlite embed":
            return values
    raise ValueError(f"{path} is damaged, or not of bertlite embed: choose another --out folder")


def identity(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that determine a job's files, which exclude the model's name."""
    chosen = {key: manifest.get(key) for key in ("settings", "input", "dimension")}
    return {**chosen, "model": {key: value for key, value in manifest["model"].items() if key != "name"}}


def job_key(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a job's identity, which is written into each of its files."""
    return sha256(json.dumps(identity(manifest), sort_keys=True))


def differing_values(there: object, wanted: object, path: str = "") -> Iterator[str]:
    """Yield a line for every value in which two nested mappings differ."""
    if isinstance(there, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*there, *wanted}):
            yield from differing_values(there.get(key), wanted.get(key), f"{path}.{key}".lstrip("."))
    elif there != wanted:
        yield f"{path} is {wanted!r}, there it is {there!r}"


def is_finished(path: Path, rows: int, key: str) -> bool:
    """Return whether a shard's file is finished.

    Raises:
        ValueError: the file is damaged, or belongs to another job.
    """
    pa, pq = import_pyarrow()
    if not path.exists():
        return False
    try:
        stated = pq.read_metadata(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it and start again") from None
    if stated.num_rows != rows or (stated.metadata or {}).get(KEY) != key.encode():
        raise ValueError(f"{path} belongs to another job: remove it, or choose another --out folder")
    return True


def write_shard(
    job: Job, path: Path, rows: Sequence[Row], id_type: str, metadata: Mapping[bytes, bytes], progress: Progress
) -> None:
    """Embed the rows of one shard and write its file, in one step.

    Raises:
        ValueError: a vector is not finite.
    """
    pa, pq = import_pyarrow()
    names, texts = zip(*rows, strict=True)

    def advance(batch: Sequence[int]) -> None:
        progress.advance(sum(job.size(texts[row]) for row in batch))

    vectors = job.embedder.encode(texts, advance)
    if not (finite := np.isfinite(vectors).all(1)).all():
        raise ValueError(f"the vector of row {names[finite.argmin()]!r} is not finite: {texts[finite.argmin()]!r:.80}")

    # The columns are id, vector (fixed_size_list<float>[D]) and, if it is kept, text.
    flat = pa.array(vectors.reshape(-1))
    columns = {"id": pa.array(names, id_type), "vector": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])}
    if job.keep_text:
        columns["text"] = pa.array(texts)
    table = pa.table(columns).replace_schema_metadata(dict(metadata))

    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with naming(path):
            pq.write_table(table, temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except FileNotFoundError:
        # otherwise another process has finished the job and removed .part-*
        if not is_finished(path, len(rows), metadata[KEY].decode()):
            raise
    finally:
        temporary.unlink(missing_ok=True)
