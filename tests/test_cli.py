"""The command line: --help, --json and exit statuses of all commands."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bertlite.cli import COMMANDS, main, parser
from bertlite.cli.parts import FOOT

ROOT = Path(__file__).resolve().parents[1]


def leaves(top: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the words and the parser of every command."""
    below = [action for action in top._actions if isinstance(action, argparse._SubParsersAction)]
    for name, inner in ((name, inner) for action in below for name, inner in action.choices.items()):
        yield from leaves(inner, (*words, name))
    if not below:
        yield " ".join(words), top


LEAVES = dict(leaves(parser()))

HELP = """
import contextlib, io, json, sys
from bertlite.cli import main
said = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main([*words.split(), "--help"])
        except SystemExit as end:
            assert end.code == 0
    said[words] = out.getvalue()
print(json.dumps([said, sorted(sys.modules)]))
"""


def test_every_help_ends_with_the_exit_statuses_and_imports_nothing_heavy() -> None:
    words = ["", *LEAVES, "prune"]
    assert len(words) == len(COMMANDS) + 1 + 7  # prune is one of the commands and has seven actions
    child = subprocess.run(
        [sys.executable, "-c", HELP, json.dumps(words)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    printed, modules = json.loads(child.stdout)
    assert list(printed) == words
    for text in printed.values():
        assert text.startswith("usage: bertlite")
        assert text.endswith(FOOT)
    others = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert not others & {"torch", "transformers", "numpy", "tokenizers", "safetensors", "pyarrow", "tqdm"}
    assert "bertlite.public" not in modules


@pytest.mark.parametrize("words", LEAVES)
def test_every_command_has_json(words: str) -> None:
    (option,) = [each for each in LEAVES[words]._actions if "--json" in each.option_strings]
    assert option.help.startswith(("write ", "print "))
    assert not option.default


def replace_work(monkeypatch: pytest.MonkeyPatch, work: Callable[[argparse.Namespace], int]) -> None:
    """Let `bertlite parity` run another function."""
    monkeypatch.setattr("bertlite.parity.command.main", work)


def test_json_to_standard_output_is_alone_there(monkeypatch, capsys) -> None:
    def work(args: argparse.Namespace) -> int:
        print("words")
        Path(args.json).write_text('{"a": 1}\n')
        return 1

    replace_work(monkeypatch, work)
    assert main(["parity", "--json", "-"]) == 1
    printed = capsys.readouterr()
    assert (json.loads(printed.out), printed.err) == ({"a": 1}, "words\n")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("no case"), 2, "bertlite parity: no case\n"),
        (FileNotFoundError("there is no file x"), 2, "bertlite parity: there is no file x\n"),
        (ModuleNotFoundError("pip install it"), 2, "bertlite parity: pip install it\n"),
        (RuntimeError("out of memory"), 2, "bertlite parity: out of memory\n"),
        (MemoryError(), 2, "bertlite parity: MemoryError\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_is_printed_in_one_line(monkeypatch, capsys, error, status, message) -> None:
    def work(args: argparse.Namespace) -> int:
        raise error

    replace_work(monkeypatch, work)
    assert main(["parity"]) == status
    assert capsys.readouterr().err == message


def test_a_reader_may_stop_reading() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "bertlite", "parity", "--list"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait() == 0


def test_an_unknown_command_is_refused(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["prove"])
    assert end.value.code == 2
    assert "invalid choice: 'prove'" in capsys.readouterr().err
