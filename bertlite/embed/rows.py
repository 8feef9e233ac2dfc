"""The rows of an input, an id and a text each, read one by one."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from bertlite.rows import ID, TEXT, Table, format_of, read_rows

Id = int | str


@dataclass(frozen=True)
class Rows:
    """The rows of some files, in order.

    Args:
        paths: at least one.
        format: a name of `bertlite.rows.READERS`; by default that of each file's suffix.
        column: the name of the column with the text; a text file has one row for each line.
        id: the name of the column with the id, an integer or a string; by default rows are numbered from 0, through
            all files.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a format is unknown, or ids are requested from a text file.
    """

    paths: tuple[Path, ...]
    format: str | None = None
    column: str = "text"
    id: str | None = None

    def __post_init__(self) -> None:
        for path in self.paths:
            if format_of(path, self.format) == "text" and self.id is not None:
                raise ValueError(f"{path} is plain text and has no column {self.id!r} for ids: its rows are numbered")

    def __iter__(self) -> Iterator[tuple[Id, str]]:
        """Yield (id, text) of every row.

        Raises:
            ValueError: as `bertlite.rows.read_rows`.
        """
        columns = [(self.column, TEXT), *([] if self.id is None else [(self.id, ID)])]
        tables = (Table(path, columns, hint="; name another with --column") for path in self.paths)
        rows = chain.from_iterable(read_rows(table, self.format) for table in tables)
        for number, (_, (text, *ids)) in enumerate(rows):
            yield (ids[0] if ids else number), text
