"""Streams of commands: what names in files and the encoding of a terminal cannot do."""

import io
import sys

import pytest

from bertlite.checkpoint.faults import raise_faults
from bertlite.support.rows import Kind, Table, read_rows
from bertlite.support.screen import Screen, printable, screens


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2K\rbertlite: loads it\x1b]0;title\x07", "a\\u001b[2K\\u000dbertlite: loads it\\u001b]0;title\\u0007"),
        ("\x9b2J \x7f \u202eabc\u2028 \udce9", "\\u009b2J \\u007f \\u202eabc\\u2028 \\udce9"),
        ("a\tb\nça va, 你好, العربية\n", "a\tb\nça va, 你好, العربية\n"),
        ("\r 50%|█▏ | name\r", "\r 50%|█▏ | name\\u000d"),  # a bar, whose name is no bar's
        ("\r    \rwarning\n", "\r    \rwarning\n"),
        ("\x1b[A\x1b[A", "\x1b[A\x1b[A"),
        ("\x1b[Aover the line above", "\\u001b[Aover the line above"),
    ],
)
def test_a_name_moves_no_cursor_and_a_bar_does(text, shown):
    stream = io.StringIO()
    assert Screen(stream).write(text) == len(text)
    assert stream.getvalue() == shown
    assert Screen(stream).isatty() is False


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "\\xe9 1-2 ... \\u4f60"), ("latin-1", "é 1-2 ... \\u4f60")])
def test_every_text_can_be_printed_in_every_encoding(encoding, shown):
    stream = io.TextIOWrapper(raw := io.BytesIO(), encoding=encoding)
    print("é 1–2 … 你", file=Screen(stream), end="", flush=True)
    assert raw.getvalue().decode(encoding) == shown


def test_nothing_is_printed_where_a_stream_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with screens():
        print("into nothing")
        sys.stdout.flush()
    assert sys.stdout is None


def test_a_name_cannot_end_its_line_in_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"^title:\n  w\\u000abertlite: loads it is unknown$"):
        raise_faults("title:", ["w\nbertlite: loads it is unknown"])
    (path := tmp_path / "a.csv").write_text('"no\nall is well\x1b[2K",b\n1,2\n')
    with pytest.raises(ValueError, match=r"columns are no\\u000aall is well\\u001b\[2K, b$"):
        list(read_rows(Table(path, [("text", Kind("a text", (str,)))])))
    assert printable("\n", but="\n") == "\n"
