"""Read rows of csv, tsv, jsonl, Parquet and plain text files strictly, with few of them in memory.

Row 1 is the first row of data in every format: headers and blank lines (of csv, tsv and jsonl) do not count.
An error names the file, the row, the line where it begins in a text file, and the column.

The standard library reads csv and jsonl, because pyarrow's errors name no row.  pyarrow also accepts bytes that are
not UTF-8 and columns of the same name, and fails on rows that are longer than a block.
"""

import csv
import json
import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

from bertlite.support.extras import import_optional
from bertlite.support.screen import printable

Fields = Mapping[str, Any]  # {column: value} of one row
PLAIN = (".txt", ".text")
SUFFIXES = (*PLAIN, ".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
OTHERS = {"txt": "text", "ndjson": "jsonl"}  # the format of a suffix that does not name it
LONGEST = 2**27  # characters of a csv cell: a longer one means a quotation mark that is not closed
LIMIT = Lock()  # held while csv's own limit is LONGEST
QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')  # a quoted csv cell with quotation marks inside
MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
PACKED = {b"\x1f\x8b": "gzip", b"PK\3\4": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstd"}
SAMPLE = 4096  # bytes at the beginning of a file, by which its encoding is guessed
CONTROL = re.compile("[\0-\b\x0e-\x1f]")  # characters that no text has
HALF = re.compile("[\ud800-\udfff]")  # half a character: a byte that is not UTF-8, or an escape of JSON


@dataclass(frozen=True)
class Kind:
    """The type of a cell: a value of some types; with `many` a list of them, or a text, which is split at spaces."""

    name: str
    types: tuple[type, ...]
    many: bool = False

    def read(self, column: str, value: Any) -> Any:
        """Return the value of a column, or the list of values.

        Raises:
            ValueError: one is missing, of another type, or half a character.
        """
        if self.many and isinstance(value, str):
            value = value.split()
        if self.many and not isinstance(value, list):
            raise ValueError(f"column {column!r} holds {reprlib.repr(value)}, which is not a list")
        for part in value if self.many else [value]:
            if isinstance(part, bool) or not isinstance(part, self.types):
                found = "no value" if part is None else f"{reprlib.repr(part)}, of type {type(part).__name__}"
                raise ValueError(f"column {column!r} holds {found}; it must be {self.name}")
            if isinstance(part, str) and not part.isascii() and (half := HALF.search(part)):
                raise ValueError(f"column {column!r} holds half a character, {half[0]!r}")
        return value


TEXT, WORDS = (Kind("a text", (str,), many) for many in (False, True))
LABEL, LABELS = (Kind("a number or a text", (int, float, str), many) for many in (False, True))
ID = Kind("an integer or a text", (int, str))


@dataclass
class Table:
    """A table, and the position of the reader in it.

    Args:
        columns: {name: kind} of the columns to read; plain text has one, of any name.
        header: names of all columns, for a csv or tsv file without them.
        hint: how to name other columns, for errors.
        row: the current row; 0 is the header.
        line: the line where the row begins in a text file.
    """

    path: Path | str
    columns: Sequence[tuple[str, Kind]]
    header: Sequence[str] = ()
    hint: str = ""
    row: int = 0
    line: int = 0

    def __str__(self) -> str:
        row = f", row {self.row}" if self.row else ""
        return f"{self.path}{row}" + (f" (line {self.line})" if self.line else "")

    def check_names(self, names: Sequence[str]) -> None:
        """Raise ValueError if two columns have one name, or a column to read is missing."""
        if len({*names}) < len(names) and (twice := [name for name in names if name and names.count(name) > 1]):
            raise ValueError(f"several columns are named {twice[0]!r}: {', '.join(names)}; rename all but one")
        missing = [name for name, _ in self.columns if name not in names]
        if missing:
            raise ValueError(f"no {' and no '.join(missing)}; its columns are {', '.join(names)}{self.hint}")

    def read(self, rows: Iterable[Fields]) -> Iterator[tuple[str, list[Any]]]:
        """Yield each row's location, in words, and its cells.

        Raises:
            ValueError: a row cannot be read, or lacks a column, or a cell is missing or of another kind.
        """
        self.row = 1
        try:
            for fields in rows:
                self.check_names([*fields])
                yield str(self), [kind.read(name, fields[name]) for name, kind in self.columns]
                self.row += 1
        except (ValueError, OSError, csv.Error, RecursionError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # pyarrow's for a damaged file has none
                raise
            raise ValueError(printable(f"{self}: {error}")) from None


def read_rows(table: Table, format: str | None = None) -> Iterator[tuple[str, list[Any]]]:
    """Yield the location, in words, and the cells of each row of a file.

    Args:
        format: a name of READERS; by default the suffix tells.

    Raises:
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: it is a Parquet file, and pyarrow is not installed.
        ValueError: the file is of another format or damaged, or as `Table.read`.
    """
    found = format_of(table.path, format)
    if table.header and found not in ("csv", "tsv"):
        raise ValueError(f"{table.path} names its columns itself; --columns is for .csv and .tsv")
    return table.read(READERS[found](table))


def format_of(path: str | Path, format: str | None = None) -> str:
    """Return the format of a file; by default its suffix tells.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        ValueError: there is no such format, or the path is a pipe's.
    """
    if not Path(path).is_file():
        if Path(path).is_dir():
            raise IsADirectoryError(f"{path} is a folder, not a file of texts; a checkpoint is named before its texts")
        if Path(path).exists():
            raise ValueError(f"{path} is a pipe or a device, and inputs are read twice: write it to a file first")
        raise FileNotFoundError(f"there is no file {path}")
    suffix = Path(path).suffix.lower().removeprefix(".")
    found = format or OTHERS.get(suffix, suffix)
    if found not in READERS:
        raise ValueError(f"{path}: format {found!r} is unknown; choose format {', '.join(READERS)}")
    return found


def read_lines(table: Table, newline: str = "\n") -> Iterator[str]:
    """Yield the lines of a text file, without the byte-order mark that spreadsheets begin it with.

    Raises:
        ValueError: a byte is not UTF-8, or is 0.
    """
    with open(table.path, encoding="utf-8-sig", errors="surrogateescape", newline=newline) as file:
        for number, line in enumerate(file, 1):
            table.line = number
            if not line.isascii() and (half := HALF.search(line)):
                byte = len(line[: half.start()].encode()) + 1
                raise encoding_error(table, f"byte {byte} of the line, 0x{ord(half[0]) - 0xDC00:02x}, is not UTF-8")
            if "\0" in line:
                raise encoding_error(table, "the line has a byte 0, which no text in UTF-8 has")
            yield line


def encoding_error(table: Table, what: str) -> ValueError:
    """Return the error for a file that is not in UTF-8, which says what to do with it."""
    with open(table.path, "rb") as file:
        sample = file.read(SAMPLE)
    if packed := [name for begin, name in PACKED.items() if sample.startswith(begin)]:
        return ValueError(f"{what}; the file is packed by {packed[0]}: give the file that it holds, unpacked")
    encoding = encoding_of(sample)
    if CONTROL.search(sample.decode(encoding, errors="replace")):
        return ValueError(f"{what}; the file has other bytes than text: choose its format, or another file")
    command = f"iconv -f {encoding} -t UTF-8 {table.path} > converted"
    return ValueError(f"{what}; convert the file from its encoding, such as: {command}")


def encoding_of(sample: bytes) -> str:
    """Return the likeliest encoding of bytes that are not UTF-8: by their mark, else by the places of their zeros."""
    if marked := [name for begin, name in MARKS.items() if sample.startswith(begin)]:
        return marked[0]
    zeros = [sample[i::4].count(0) for i in range(4)]
    half = len(sample) / 8
    if min(zeros[2:]) > half or min(zeros[:2]) > half:  # a character of UTF-32 has two bytes that are nearly always 0
        return "UTF-32LE" if zeros[3] > half else "UTF-32BE"
    if not any(zeros):
        return "LATIN1"
    return "UTF-16LE" if zeros[1] + zeros[3] > zeros[0] + zeros[2] else "UTF-16BE"


def read_text(table: Table) -> Iterator[Fields]:
    names = [name for name, _ in table.columns]
    if len(names) > 1:
        columns = " and ".join(names)
        raise ValueError(f"plain text has a text on each line, and no columns {columns}: give csv, tsv or jsonl")
    for line in read_lines(table):
        text = line.rstrip("\r\n")
        if "\r" in text:
            raise ValueError(
                f"character {text.index(chr(13)) + 1} of the line is a carriage return; lines must end with \\n or"
                f" \\r\\n. Convert the file, such as: tr '\\r' '\\n' < {table.path} > converted"
            )
        yield {names[0]: text}


def read_csv(table: Table, delimiter: str = ",", quotes: bool = True) -> Iterator[Fields]:
    options: Any = {"delimiter": delimiter, "quoting": csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE}
    rows = csv.reader(read_lines(table, newline=""), strict=True, **options)
    table.row, start, warned = 0, 1, quotes

    try:
        names = table.header or next(filter(None, long_cells(rows)), [])
        if names:  # else the file is empty
            table.check_names(names)

        # From here on an error names the line where the row begins.
        table.row, start, known = 1, rows.line_num + 1, {*map(bare, names)}
        for cells in long_cells(rows):
            table.line, start = start, rows.line_num + 1
            if cells and known.issuperset(map(bare, cells)):
                raise ValueError(
                    f"the row repeats the names of the columns, {', '.join(names)}, as if files were joined: remove"
                    " it; if it is data, rename the columns"
                )

            if cells and len(cells) != len(names):
                way = "needs quotation marks" if quotes else "cannot be in a tsv; make it a csv"
                raise ValueError(
                    f"the number of cells is {len(cells)}, of columns {len(names)} ({', '.join(names)}); a text that"
                    f" contains the separator or a line end {way}"
                )

            if not warned and any(map(QUOTED.fullmatch, cells)):
                warned = True
                message = "quotation marks in a tsv are read as part of the text; if they are not, make it a csv"
                warnings.warn(f"{table}: {message}", stacklevel=2)

            if cells:
                yield dict(zip(names, cells, strict=True))
    except csv.Error as error:
        table.line = start
        raise ValueError(f"{error}; close the quotation mark that begins a cell, and double those within") from None


def long_cells(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """Return the rows of a csv reader, whose limit on cells is the whole process's and so is raised for each row."""

    def read() -> list[str] | None:
        with LIMIT:
            usual = csv.field_size_limit(LONGEST)  # by default 131,072
            try:
                return next(rows, None)
            finally:
                csv.field_size_limit(usual)

    return iter(read, None)


def bare(name: str) -> str:
    """Return the name of a column in lower case, without spaces and byte-order marks around it."""
    return name.strip("\ufeff \t").casefold()


def read_jsonl(table: Table) -> Iterator[Fields]:
    def unique(pairs: list[tuple[str, Any]]) -> Fields:
        if len(dict(pairs)) < len(pairs):
            table.check_names([name for name, _ in pairs])
        return dict(pairs)

    for line in filter(str.strip, read_lines(table)):
        try:
            fields = json.loads(line, object_pairs_hook=unique)
        except json.JSONDecodeError as error:
            raise ValueError(f"the line is not JSON: {error.msg} at character {error.pos + 1}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"the line is a JSON {type(fields).__name__}, not an object")
        yield fields


def read_parquet(table: Table) -> Iterator[Fields]:
    table.row = 0
    with import_pyarrow()[1].ParquetFile(table.path) as file:
        table.check_names(file.schema_arrow.names)
        table.row = 1
        for batch in file.iter_batches(batch_size=1024, columns=[name for name, _ in table.columns]):
            for cells in zip(*batch.columns, strict=True):
                yield {name: cell.as_py() for name, cell in zip(batch.schema.names, cells, strict=True)}


READERS: dict[str, Callable[[Table], Iterator[Fields]]] = {
    "text": read_text,
    "csv": read_csv,
    "tsv": partial(read_csv, delimiter="\t", quotes=False),
    "jsonl": read_jsonl,
    "parquet": read_parquet,
}


def import_pyarrow() -> tuple[ModuleType, ModuleType]:
    """Return pyarrow and pyarrow.parquet.

    Raises:
        ModuleNotFoundError: they are not installed.
    """
    parquet = import_optional("pyarrow.parquet", "a Parquet file", "embed")
    return import_optional("pyarrow", "a Parquet file", "embed"), parquet
