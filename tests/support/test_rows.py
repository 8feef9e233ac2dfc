"""Rows of files: `embed`, experiments and budgets read the same, and refuse the same by file, row and column."""

import bz2
import gzip
import json
import lzma
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertlite import BertConfig
from bertlite.embed.job import Rows
from bertlite.experiments.budget.texts import examples_of
from bertlite.experiments.data import DataSource, read_examples

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def examples(path: Path) -> list[str]:
    label = None if path.suffix.lower() == ".txt" else "n"
    return [text for (text,) in read_examples(DataSource(str(path), ("text",), label)).texts]


READERS: dict[str, Callable[[Path], list[str]]] = {
    "embed": lambda path: [text for _, text in Rows((path,))],
    "experiments": examples,
    "budgets": lambda path: [a for (a,) in examples_of(path, ("text",), None, (), BertConfig()).texts],
}
HUGE = "x" * 200_000  # csv's own limit is 131,072
PLAIN = ["plain", 'with "quotes", and commas', "größer\u2028 😀", "  spaces  ", HUGE]
TEXTS = [*PLAIN, "two\nlines", "", "nan"]
CELLS = {
    "csv": "text,n\r\n\r\n" + "".join('"{}",1\r\n'.format(text.replace('"', '""')) for text in TEXTS),
    "tsv": "n\ttext\n" + "".join(f"1\t{text}\n" for text in PLAIN),
    "jsonl": "\n" + "\n".join(json.dumps({"n": 1, "text": text}) for text in TEXTS),
    "txt": "".join(f"{text}\r\n" for text in PLAIN),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("mark", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("format", [*CELLS, "parquet"])
def test_every_format_gives_the_same_texts(tmp_path: Path, format: str, mark: str, reader: str) -> None:
    path = tmp_path / f"x.{format.upper() if mark == 'utf-8' else format}"
    if format == "parquet":
        pq.write_table(pa.table({"text": pa.array(TEXTS).dictionary_encode(), "n": [1] * len(TEXTS)}), path)
    else:
        path.write_bytes(CELLS[format].encode(mark))
    if format in ("csv", "jsonl", "parquet"):
        with pytest.raises(ValueError, match=r"row 7.*: column 'text' is empty; leave the row out"):
            READERS[reader](path)
    else:
        assert READERS[reader](path) == PLAIN


LATIN = "is not UTF-8; convert the file from its encoding"
KIND = "column 'text' holds {}, of type {}; it must be a text"
FAULTS: list[tuple[str, Any, str]] = [  # suffix, contents, and the error behind the name of the file
    ("csv", 'text,n\na,1\n\n"b,0\nc,1\n', ", row 2 (line 4): unexpected end of data; close the quotation mark"),
    ("csv", 'text,n\na,1\n"b"c,0\n', ", row 2 (line 3): ',' expected after '\"'; close the quotation mark"),
    ("csv", 'text,n\n"a\nb",1\nb, c,0\n', ", row 2 (line 4): the number of cells is 3, of columns 2 (text, n)"),
    ("csv", "text,n,text\na,1,b\n", " (line 1): several columns are named 'text': text, n, text; rename"),
    ("csv", b"text,n\na,1\nb\xe9,0\n", f", row 2 (line 3): byte 2 of the line, 0xe9, {LATIN}"),
    ("csv", b"t\xe9xt,n\na,1\n", f" (line 1): byte 2 of the line, 0xe9, {LATIN}"),
    ("csv", "txt,n\na,1\n", " (line 1): no text; its columns are txt, n"),
    ("tsv", "text\tn\na\t1\nb\tc\t0\n", ", row 2 (line 3): the number of cells is 3, of columns 2 (text, n)"),
    ("tsv", 'text\tn\n"a\nb"\t1\n', ", row 1 (line 2): the number of cells is 1, of columns 2"),
    ("jsonl", '{"text": "a", "n": 1}\n\n{"text": \n', ", row 2 (line 3): the line is not JSON: Expecting value"),
    ("jsonl", '["a"]\n', ", row 1 (line 1): the line is a JSON list, not an object"),
    ("jsonl", "[" * 99_999, ", row 1 (line 1): maximum recursion depth"),
    ("jsonl", '{"txt": "a", "n": 1}\n', ", row 1 (line 1): no text; its columns are txt, n"),
    ("jsonl", '{"text": "a", "n": 1, "text": "b"}\n', ", row 1 (line 1): several columns are named 'text'"),
    ("jsonl", b'{"text": "\xc3\xa4\xe9", "n": 1}\n', f", row 1 (line 1): byte 13 of the line, 0xe9, {LATIN}"),
    ("jsonl", '{"text": "\\ud83d", "n": 1}\n', ", row 1 (line 1): column 'text' holds half a character, '\\ud83d'"),
    ("jsonl", '{"text": null, "n": 1}\n', ", row 1 (line 1): column 'text' holds no value"),
    ("jsonl", '{"text": 5, "n": 1}\n', f", row 1 (line 1): {KIND.format(5, 'int')}"),
    ("jsonl", '{"text": true, "n": 1}\n', f", row 1 (line 1): {KIND.format(True, 'bool')}"),
    ("parquet", {"text": ["a", None], "n": [1, 1]}, ", row 2: column 'text' holds no value"),
    ("parquet", {"text": [b"a"], "n": [1]}, f", row 1: {KIND.format(b'a', 'bytes')}"),
    ("parquet", {"text": [["a"]], "n": [1]}, f", row 1: {KIND.format(['a'], 'list')}"),
    ("parquet", {"text": [1.5], "n": [1]}, f", row 1: {KIND.format(1.5, 'float')}"),
    ("parquet", {"txt": ["a"], "n": [1]}, ": no text; its columns are txt, n"),
    ("parquet", [("text", ["a"]), ("text", ["b"]), ("n", [1])], ": several columns are named 'text'"),
    ("parquet", b"PAR1", ": Parquet"),
    (
        "txt",
        "a\r\nb\rc\r",
        ", row 2 (line 2): character 2 of the line is a carriage return; lines must end with \\n or",
    ),
    ("txt", "a\n \nb\n", ", row 2 (line 2): column 'text' is empty; leave the row out"),
    ("jsonl", '{"text": "a", "n": true}\n', ", row 1 (line 1): column 'n' holds True, of type bool; it must be a num"),
    ("txt", b"a\nb\n\xe9\n", f", row 3 (line 3): byte 1 of the line, 0xe9, {LATIN}"),
]


@pytest.mark.parametrize(("suffix", "contents", "message"), FAULTS)
def test_what_is_not_a_text_is_refused_by_name(tmp_path: Path, suffix: str, contents: Any, message: str) -> None:
    """By all readers alike; each fault by one of them."""
    reader = [*READERS][[*FAULTS].index((suffix, contents, message)) % len(READERS)]
    path = tmp_path / f"x.{suffix}"
    if isinstance(contents, dict | list):
        names, columns = zip(*dict(contents).items() if isinstance(contents, dict) else contents, strict=True)
        pq.write_table(pa.table([pa.array(each) for each in columns], names=names), path)
    else:
        path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    with pytest.raises(ValueError) as error:  # noqa: PT011
        READERS[reader](path)
    assert str(error.value).startswith(f"{path}{message}")


@pytest.mark.parametrize("format", ["csv", "tsv", "jsonl", "txt"])
@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32", "UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"])
def test_other_unicode_is_refused_with_its_name(tmp_path: Path, encoding: str, format: str) -> None:
    """With a mark at its beginning or without one; and a file that was taken for LATIN1, which has zeros."""
    path = tmp_path / f"x.{format}"
    path.write_bytes(CELLS[format].encode(encoding))
    with pytest.raises(
        ValueError, match=rf"\(line [12]\): .*, such as: iconv -f {encoding} -t UTF-8 .*x\.{format} > conv"
    ):
        READERS["embed"](path)
    path.write_text(CELLS[format].encode(encoding).decode("latin1"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"the line has a byte 0|is not JSON"):
        READERS["embed"](path)


@pytest.mark.parametrize("format", ["csv", "tsv", "jsonl", "txt"])
def test_a_file_that_is_no_text_is_not_taken_for_another_encoding(tmp_path: Path, format: str) -> None:
    path, contents = tmp_path / f"x.{format}", CELLS[format].encode() * 9
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as file:
        file.writestr("x", contents)
    packed = {
        "gzip": gzip.compress(contents),
        "bzip2": bz2.compress(contents),
        "xz": lzma.compress(contents),
        "zip": path.with_suffix(".zip").read_bytes(),
    }
    for name, written in packed.items():
        path.write_bytes(written)
        with pytest.raises(ValueError, match=f"the file is packed by {name}: give the file that it holds, unpacked"):
            READERS["embed"](path)
    path.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    with pytest.raises(ValueError, match="the file has other bytes than text: choose its format, or another file"):
        READERS["embed"](path)


def test_rows_come_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("text\na\nb,c\n")
    rows = iter(Rows((path,)))
    assert next(rows) == (0, "a")
    with pytest.raises(ValueError, match=r"row 2 \(line 3\)"):
        next(rows)


def test_a_damaged_page_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a"]}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + bytes(20) + whole[24:])
    with pytest.raises(ValueError, match=r"x\.parquet, row 1: "):
        list(Rows((path,)))


def test_quotation_marks_of_a_tsv_that_look_like_those_of_a_csv_are_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text('text\n"so" he said\n"a ""quoted"" word"\n"another ""quoted"" word"\n')
    with pytest.warns(
        UserWarning, match=r"x\.tsv, row 2 \(line 3\): quotation marks in a tsv are read as part"
    ) as found:
        assert READERS["embed"](path)[1] == '"a ""quoted"" word"'
    assert len(found) == 1


def test_ids_are_all_integers_or_all_texts_and_else_rows_are_numbered_through_all_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.csv"
    first.write_text('{"text": "a", "n": "7"}\n{"text": "b", "n": "x"}\n')
    second.write_text("n,text\n7,c\n")
    assert list(Rows((first, second), id="n")) == [("7", "a"), ("x", "b"), ("7", "c")]
    assert list(Rows((first, second))) == [(0, "a"), (1, "b"), (2, "c")]
    assert list(Rows((second,), column="n", id="n")) == [("7", "7")]
    assert list(Rows((second,), column="b", id="a", columns=("a", "b"))) == [("n", "text"), ("7", "c")]
    with pytest.raises(
        ValueError, match="name the column of the text with --text, and the column of the id with --id"
    ):
        list(Rows((second,), id="m"))
    for before, last, fit in (
        ([1, -1], 2**63, "int64"),
        ([1, 2**63], -1, "uint64"),
        ([], 2**64, "int64 or string or uint64"),
        ([5], "5", "int64 or uint64"),
        (["5"], 5, "string"),
    ):
        first.write_text("".join(json.dumps({"text": "a", "n": n}) + "\n" for n in before))
        (tmp_path / "c.jsonl").write_text(json.dumps({"text": "a", "n": last}))
        error = rf"c\.jsonl, row 1 \(line 1\): column 'n' holds {last!r}; .* earlier ids fit {fit}"
        with pytest.raises(ValueError, match=error):
            list(Rows((first, tmp_path / "c.jsonl"), id="n"))
    first.write_text('{"text": "a", "n": 1.5}')
    with pytest.raises(ValueError, match=r"row 1 \(line 1\): column 'n' holds 1.5, of type float; it must be an"):
        list(Rows((first,), id="n"))
    (tmp_path / "c.txt").write_text("a")
    with pytest.raises(ValueError, match="is plain text and has no column 'n' for ids"):
        Rows((tmp_path / "c.txt",), id="n")
    assert list(Rows((tmp_path / "c.txt",), format="csv", column="a")) == []
    with pytest.raises(ValueError, match=r"format 'doc' is unknown; choose format text, csv"):
        Rows(((tmp_path / "c.txt").rename(tmp_path / "c.doc"),))
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Rows((tmp_path / "nothing.txt",))
    with pytest.raises(IsADirectoryError, match="is a folder, not a file of texts; a checkpoint is named before"):
        Rows((tmp_path,))
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ValueError, match="is a pipe or a device, and inputs are read twice: write it to a file"):
            Rows((tmp_path / "pipe",))
