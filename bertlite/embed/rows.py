"""Read the rows of an input one by one, an id and a text each, with no more than one row in memory."""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from bertlite.extras import import_optional

Id = int | str
Fields = dict[str, Any]  # {column: value} of one row

SUFFIXES = {
    ".txt": "text",
    ".text": "text",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}


def read_text(path: Path, columns: Sequence[str]) -> Iterator[Fields]:
    with path.open(encoding="utf-8", newline="\n") as file:  # other line ends may be part of a text
        for line in file:
            yield {columns[0]: line.rstrip("\r\n")}


def read_csv(path: Path, columns: Sequence[str], delimiter: str = ",") -> Iterator[Fields]:
    csv.field_size_limit(sys.maxsize)  # the default limit is below long texts
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from csv.DictReader(file, delimiter=delimiter, strict=True)


def read_tsv(path: Path, columns: Sequence[str]) -> Iterator[Fields]:
    return read_csv(path, columns, delimiter="\t")


def read_jsonl(path: Path, columns: Sequence[str]) -> Iterator[Fields]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                fields = json.loads(line)
                if not isinstance(fields, dict):
                    raise ValueError(f"line {number} is a JSON {type(fields).__name__}, not an object")
                yield fields


def read_parquet(path: Path, columns: Sequence[str]) -> Iterator[Fields]:
    _, pq = import_pyarrow()
    with pq.ParquetFile(path) as file:
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise ValueError(f"there is no column {missing[0]!r}; have: {', '.join(file.schema_arrow.names)}")
        for batch in file.iter_batches(batch_size=1024, columns=list(columns)):
            yield from batch.to_pylist()


READERS: dict[str, Callable[[Path, Sequence[str]], Iterator[Fields]]] = {
    "text": read_text,
    "csv": read_csv,
    "tsv": read_tsv,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
}


@dataclass(frozen=True)
class Rows:
    """The rows of some files, in order.

    Args:
        paths: at least one.
        format: a name of READERS; by default that of each file's suffix.
        column: the name of the column with the text; a text file has one row for each line.
        id: the name of the column with the id, an integer or a string; by default rows are numbered from 0, through
            all files.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a format is unknown, or a text file is asked for ids.
    """

    paths: tuple[Path, ...]
    format: str | None = None
    column: str = "text"
    id: str | None = None

    def __post_init__(self) -> None:
        for path in self.paths:
            if not path.is_file():
                raise FileNotFoundError(f"there is no file {path}")
            if self.format_of(path) not in READERS:
                found = self.format or path.suffix
                raise ValueError(f"{path}: format {found!r} is unknown; choose format {', '.join(READERS)}")
            if self.id is not None and self.format_of(path) == "text":
                raise ValueError(f"{path} is plain text and has no column {self.id!r} for ids: its rows are numbered")

    def format_of(self, path: Path) -> str | None:
        return self.format or SUFFIXES.get(path.suffix)

    def __iter__(self) -> Iterator[tuple[Id, str]]:
        """Yield (id, text) of every row.

        Raises:
            ValueError: a damaged file, or a row without a text or an id; it names the file and the row.
        """
        wanted = [self.column] if self.id is None else [self.column, self.id]
        number = 0
        for path in self.paths:
            rows = READERS[self.format_of(path) or ""](path, wanted)
            for i in range(sys.maxsize):
                try:
                    fields = next(rows, None)
                except (ValueError, csv.Error) as error:  # also those of pyarrow and json
                    raise ValueError(f"{path}, after row {i}: {error}") from None
                if fields is None:
                    break
                text, name = fields.get(self.column), number if self.id is None else fields.get(self.id)
                if not isinstance(text, str):
                    have = ", ".join(str(key) for key in fields)
                    raise ValueError(f"{path}, row {i}: {self.column!r} is {text!r}, not a text; its columns: {have}")
                if not isinstance(name, int | str) or isinstance(name, bool):
                    raise ValueError(f"{path}, row {i}: {self.id!r} is {name!r}; an id is an integer or a string")
                yield name, text
                number += 1


def import_pyarrow() -> tuple[ModuleType, ModuleType]:
    """Return pyarrow and pyarrow.parquet.

    Raises:
        ModuleNotFoundError: they are not installed.
    """
    parquet = import_optional("pyarrow.parquet", "a Parquet file", "embed")
    return import_optional("pyarrow", "a Parquet file", "embed"), parquet
