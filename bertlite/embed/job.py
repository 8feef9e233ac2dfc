"""An input of any size to a folder of Parquet files, so that a process may be killed at any time.

The input is cut into shards of so many rows, and a shard is one file: written under another name, then renamed.  What
is there under its own name is finished; whoever starts again does the rest.  Of several processes each takes its own
shards, and none waits for another.
"""

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from bertlite.checkpoint.folders import sync
from bertlite.embed.embedder import Embedder
from bertlite.embed.rows import Id, Rows, pyarrow
from bertlite.records import sha256, write_json

MANIFEST = "manifest.json"
OWN = ("shard_rows", "keep_text", "engine")  # what of a job its files depend on
LONGEST = 8  # characters of a text for each token of `max_length`: what is beyond will be truncated

Row = tuple[Id, str]
Show = Callable[["Progress"], None]


@dataclass(frozen=True)
class Job:
    """What is to be embedded, how, and where to.

    Args:
        shard_rows: rows of a file; a kill loses the work on one of them at most, in each process.
        keep_text: whether the texts are written too.
        rank, world: this process among how many; shards are dealt out in turn.
        engine: "local", or "ray", which names its files in its own way.
    """

    embedder: Embedder
    rows: Rows
    out: Path
    shard_rows: int = 10_000
    keep_text: bool = False
    rank: int = 0
    world: int = 1
    engine: str = "local"

    def __post_init__(self) -> None:
        if self.shard_rows < 1:
            raise ValueError(f"shard_rows is {self.shard_rows}; it must be 1 or more")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank is {self.rank}; of {self.world} processes it must be 0 to {self.world - 1}")

    def shards(self) -> Iterator[tuple[int, Iterator[Row]]]:
        """(number, rows) of every shard."""
        numbered = enumerate(self.rows)
        for shard, group in groupby(numbered, key=lambda item: item[0] // self.shard_rows):
            yield shard, (row for _, row in group)


@dataclass(frozen=True)
class Survey:
    """What a first reading finds: how much there is, and that all of it can be read.

    Args:
        sizes: characters of every shard, as far as they will count.
        counts: rows of every shard.
        sha256: of all ids and texts.
    """

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    sha256: str


@dataclass
class Progress:
    """How far a process is, in tokens: texts differ too much in length to be counted.

    Until a shard is cut into tokens, their number is estimated from its characters and the shards before it.
    """

    left: int  # characters in shards that are not cut yet
    rows: int  # rows in those
    clock: Callable[[], float]
    seen: int = 0  # characters in shards that are cut
    inner: int = 0  # tokens in those, without [CLS] and [SEP]
    known: int = 0  # tokens in those
    done: int = 0  # tokens embedded
    started: float | None = None

    def cut(self, characters: int, lengths: Sequence[int]) -> None:
        """One more shard has been cut into tokens; lengths are its rows'."""
        self.started = self.clock() if self.started is None else self.started
        self.left, self.rows, self.seen = self.left - characters, self.rows - len(lengths), self.seen + characters
        self.known, self.inner = self.known + sum(lengths), self.inner + sum(lengths) - 2 * len(lengths)

    @property
    def total(self) -> int:
        """How many tokens there will have been."""
        return self.known + (2 * self.rows + round(self.left * self.inner / self.seen) if self.seen else 0)

    @property
    def rate(self) -> float:
        """Tokens per second, since the first; 0 before."""
        passed = 0.0 if self.started is None else self.clock() - self.started
        return self.done / passed if passed > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        return (self.total - self.done) / self.rate if self.rate else None


def run(job: Job, show: Show = lambda _: None) -> dict[str, Any]:
    """Embed what is not yet embedded; returns the manifest.

    Args:
        show: called after every batch.

    Raises:
        ValueError: the folder holds something else, or the same made with other settings; or a row cannot be read.
    """
    pyarrow()
    found = survey(job)
    manifest = claim(job, found)
    count = len(found.counts)
    paths = [job.out / f"part-{shard:05d}-of-{count:05d}.parquet" for shard in range(count)]
    key = key_of(manifest)
    todo = {
        shard for shard in range(job.rank, count, job.world) if not finished(paths[shard], found.counts[shard], key)
    }
    left, waiting = (sum(each[shard] for shard in todo) for each in (found.sizes, found.counts))
    progress = Progress(left, waiting, time.monotonic)
    for shard, rows in job.shards() if todo else ():
        if shard in todo:
            write(job, paths[shard], list(rows), key, progress, found.sizes[shard], show)
    if all(finished(path, rows, key) for path, rows in zip(paths, found.counts, strict=True)):
        for leftover in job.out.glob(".part-*.tmp"):  # of processes that were killed
            leftover.unlink(missing_ok=True)
        manifest["shards"] = {path.name: rows for path, rows in zip(paths, found.counts, strict=True)}
        manifest["complete"] = True
        write_json(job.out / MANIFEST, manifest)
    return {**manifest, "embedded": {"shards": len(todo), "tokens": progress.done, "tokens_per_second": progress.rate}}


def survey(job: Job) -> Survey:
    """Read all of the input once.

    Raises:
        ValueError: it is empty, or a row cannot be read.
    """
    digest, sizes, counts = hashlib.sha256(), [], []
    longest = job.embedder.max_length * LONGEST
    for _, rows in job.shards():
        size = count = 0
        for name, text in rows:
            digest.update(f"{name!r}\0{len(text)}\0".encode())
            digest.update(text.encode("utf-8", "surrogatepass"))
            size += min(len(text), longest)
            count += 1
        sizes.append(size)
        counts.append(count)
    if not counts:
        raise ValueError(f"{', '.join(map(str, job.rows.paths))}: there is not one row to embed")
    return Survey(tuple(sizes), tuple(counts), digest.hexdigest())


def claim(job: Job, found: Survey) -> dict[str, Any]:
    """Put the manifest into the folder, or agree with the one that is there.

    Raises:
        ValueError: it is another job's.
    """
    embedder, path = job.embedder, job.out / MANIFEST
    wanted: dict[str, Any] = {
        "what": "bertlite embed",
        "model": {"name": str(embedder.source.name), "sha256": embedder.fingerprint()},
        "settings": {**embedder.settings, **{name: getattr(job, name) for name in OWN}},
        "input": {"rows": sum(found.counts), "sha256": found.sha256},
        "dimension": embedder.dimension,
        "complete": False,
    }
    job.out.mkdir(parents=True, exist_ok=True)
    temporary = job.out / f".{MANIFEST}.{uuid.uuid4().hex}.tmp"
    write_json(temporary, wanted)
    try:
        os.link(temporary, path)  # fails if another process was first, which a rename does not
    except FileExistsError:
        there = read_manifest(path)
        differing = list(differences(comparable(there), comparable(wanted)))
        if differing:
            raise ValueError(
                f"{job.out} holds another job's vectors, which must not be mixed with these:\n  "
                + "\n  ".join(differing)
                + "\nname another --out folder, or use the same settings"
            ) from None
        return there
    finally:
        temporary.unlink()
    return wanted


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): remove its folder and embed again") from None
    if not isinstance(values, dict) or values.get("what") != "bertlite embed":
        raise ValueError(f"{path} is not of bertlite embed: name another --out folder")
    return values


def comparable(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What decides whether two jobs make the same files: not the model's name, if its files are the same."""
    chosen = {key: manifest.get(key) for key in ("settings", "input", "dimension")}
    return {**chosen, "model": {"sha256": manifest["model"]["sha256"]}}


def key_of(manifest: Mapping[str, Any]) -> str:
    return sha256(json.dumps(comparable(manifest), sort_keys=True))


def differences(there: Any, wanted: Any, path: str = "") -> Iterator[str]:
    if isinstance(there, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*there, *wanted}):
            yield from differences(there.get(key), wanted.get(key), f"{path}.{key}".lstrip("."))
    elif there != wanted:
        yield f"{path} is {wanted!r}, there {there!r}"


def finished(path: Path, rows: int, key: str) -> bool:
    """Whether a shard is there.

    Raises:
        ValueError: something else is there under its name.
    """
    pa, pq = pyarrow()
    if not path.exists():
        return False
    try:
        stated = pq.read_metadata(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it and start again") from None
    if stated.num_rows != rows or (stated.metadata or {}).get(b"bertlite") != key.encode():
        raise ValueError(f"{path} is not of this job: remove it, or name another --out folder")
    return True


def write(job: Job, path: Path, rows: Sequence[Row], key: str, progress: Progress, size: int, show: Show) -> None:
    """Embed the rows of one shard and let its file appear."""
    _, pq = pyarrow()
    names, texts = zip(*rows, strict=True)
    ids = job.embedder.tokenized(texts)
    progress.cut(size, [len(row) for row in ids])

    def advance(tokens: int) -> None:
        progress.done += tokens
        show(progress)

    vectors = job.embedder.vectors(ids, advance)
    table = table_of(names, vectors, texts if job.keep_text else None, key)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        pq.write_table(table, temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except FileNotFoundError:
        if not finished(path, len(rows), key):  # else another process did the same job, was first and cleared up
            raise
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def table_of(names: Sequence[Id], vectors: Any, texts: Sequence[str] | None, key: str) -> Any:
    """The Arrow table of one shard: id, vector (fixed_size_list<float>[D]) and perhaps text."""
    pa, _ = pyarrow()
    flat = pa.array(vectors.reshape(-1))
    columns = {"id": pa.array(list(names)), "vector": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])}
    if texts is not None:
        columns["text"] = pa.array(list(texts))
    return pa.table(columns).replace_schema_metadata({"bertlite": key})
