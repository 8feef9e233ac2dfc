"""The rows of an input, one after the other: an id and a text each.  Nothing is held but the row at hand."""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Id = int | str
Record = dict[str, Any]

SUFFIXES = {
    ".txt": "text",
    ".text": "text",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}


def read_text(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    with path.open(encoding="utf-8", newline="\n") as file:  # other ends of lines are a text's own business
        for line in file:
            yield {columns[0]: line.rstrip("\r\n")}


def read_csv(path: Path, columns: Sequence[str], delimiter: str = ",") -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)  # the default refuses a long text
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from csv.DictReader(file, delimiter=delimiter, strict=True)


def read_tsv(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    return read_csv(path, columns, delimiter="\t")


def read_jsonl(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError(f"line {number} is a JSON {type(record).__name__}, not an object")
                yield record


def read_parquet(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    pq = pyarrow()[1]
    with pq.ParquetFile(path) as file:
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise ValueError(f"there is no column {missing[0]!r}; have: {', '.join(file.schema_arrow.names)}")
        for batch in file.iter_batches(batch_size=1024, columns=list(columns)):
            yield from batch.to_pylist()


READERS: dict[str, Callable[[Path, Sequence[str]], Iterator[Record]]] = {
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
        format: a name of READERS; by default what each file's name says.
        column: which column holds the text; a text file has one row for each line.
        id: which column holds the id, an integer or a string; by default rows are numbered from 0, through all files.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the format is none, or not to be seen from the name.
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
                said = self.format or path.suffix
                raise ValueError(f"{path}: format {said!r} is unknown; choose format {', '.join(READERS)}")
            if self.id is not None and self.format_of(path) == "text":
                raise ValueError(f"{path} is plain text and has no column {self.id!r} for ids: its rows are numbered")

    def format_of(self, path: Path) -> str | None:
        return self.format or SUFFIXES.get(path.suffix)

    def __iter__(self) -> Iterator[tuple[Id, str]]:
        """(id, text) of every row.

        Raises:
            ValueError: a damaged file, or a row without a text or an id; it names the file and the row.
        """
        wanted = [self.column] if self.id is None else [self.column, self.id]
        number = 0
        for path in self.paths:
            records = READERS[self.format_of(path) or ""](path, wanted)
            for i in range(sys.maxsize):
                try:
                    record = next(records, None)
                except (ValueError, csv.Error) as error:  # among them what pyarrow and json raise
                    raise ValueError(f"{path}, after row {i}: {error}") from None
                if record is None:
                    break
                text, name = record.get(self.column), number if self.id is None else record.get(self.id)
                if not isinstance(text, str):
                    have = ", ".join(str(key) for key in record)
                    raise ValueError(f"{path}, row {i}: {self.column!r} is {text!r}, not a text; its columns: {have}")
                if not isinstance(name, int | str) or isinstance(name, bool):
                    raise ValueError(f"{path}, row {i}: {self.id!r} is {name!r}; an id is an integer or a string")
                yield name, text
                number += 1


def pyarrow() -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet.

    Raises:
        ModuleNotFoundError: they are not installed.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet as pq
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Parquet files need pyarrow: pip install 'bertlite[embed]'") from None
    return pa, pq
