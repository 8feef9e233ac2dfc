"""The command line: help, --out and --json, lists, answers to wrong words, and exit statuses of all commands."""

import argparse
import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from test_plain_sentences import strings  # type: ignore[import-not-found]

import bertlite
from bertlite.cli import COMMANDS, commands, main, parser, parts, prune
from bertlite.cli.parts import FOOT, Parser, subcommands
from bertlite.cli.work import Outcome
from bertlite.support.progress import Progress

ROOT = Path(__file__).resolve().parents[1]


def leaves(top: Parser, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Parser]]:
    """Yield the words and the parser of every command."""
    below = subcommands(top)
    for name, inner in below.items():
        yield from leaves(inner, (*words, name))
    if not below:
        yield " ".join(words), top


LEAVES = dict(leaves(parser()))

HELP = """
import contextlib, io, sys
from bertlite.cli import main
for words in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([*words.split(), "--help"])
print(*sys.modules)
"""


def test_help_imports_nothing_heavy():
    assert len(LEAVES) == len(COMMANDS) - 1 + 5  # prune is one of the commands and has five actions
    command = [sys.executable, "-c", HELP, "", "prune", *LEAVES]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    others = {name.partition(".")[0] for name in child.stdout.split()}
    assert "argparse" in others
    assert not others & {"torch", "transformers", "numpy", "tokenizers", "safetensors", "pyarrow", "tqdm"}


@pytest.mark.parametrize("words", LEAVES)
def test_help_shows_examples_every_default_and_out_and_json(words):
    command = LEAVES[words]
    assert command.examples
    shown = command.format_help()
    assert shown.index("options:") < shown.index("examples:\n  bertlite ") < shown.index("Exit status:")
    for example in command.examples:
        assert example.startswith(f"{words} ")
        assert f"  bertlite {example}\n" in re.sub(r" \\\n +", " ", shown), "one line to a shell"
        parser().parse_args(shlex.split(example))
    options, needs = command._option_string_actions, command.get_default("asked").needs
    assert (options["--json"].nargs, options["--json"].default) == (0, False)
    assert ".json: " in options["--out"].help
    assert ("[--out PATH[,PATH]]" in shown) == (not needs or ".json" in needs)  # else --json will do
    for option in command._actions:
        if not option.option_strings or option.nargs == 0 or option.required or "--out" in option.option_strings:
            continue
        text = command._get_formatter()._expand_help(option) if option.help else ""
        assert "(default: " in text, f"{words} {option.option_strings}: its help says no default"
        if option.default is not None and option.default != ():
            assert f"(default: {option.default}" in text.replace("cpu or cuda ", ""), text


@pytest.mark.parametrize("columns", [80, 100])
def test_help_wraps_at_the_width_of_the_terminal_and_ends_with_the_exit_statuses(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for found in (parser(), prune_parser(), *LEAVES.values()):
        shown = found.format_help()
        assert [line for line in shown.split("\n") if len(line) > columns] == []
        assert shown.startswith("usage: bertlite")
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", shown), "a control character"
        assert " ".join(shown.split()).endswith(" ".join(FOOT.split()))


def prune_parser() -> Parser:
    return subcommands(parser())["prune"]


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"bertlite {bertlite.__version__}\n")


def test_the_choices_of_the_help_are_those_of_the_work():
    pytest.importorskip("accelerate")
    import torch

    from bertlite.experiments.evaluate import TASKS
    from bertlite.inference.optimize import COMPUTE_DTYPES, INFERENCE_BACKENDS

    assert tuple(TASKS) == prune.TASKS
    assert parts.INFERENCE_BACKENDS == INFERENCE_BACKENDS
    assert [getattr(torch, name, name) for name in parts.COMPUTE_DTYPES] == [*COMPUTE_DTYPES]
    assert set(prune.METRICS) == {name for task in TASKS.values() for name in task.metrics}
    from bertlite.experiments.experiment import REPAIRS

    repairs = next(each for each in LEAVES["prune run"]._actions if "--repairs" in each.option_strings)
    assert repairs.help == ", ".join(REPAIRS)


# Commands in texts ---------------------------------------------------------------------------------------------------

MENTION = re.compile(rf"(`?)\bbertlite ({'|'.join(subcommands(parser()))})\b(?!:)([^`\n|#]*)")


def texts_of(path: Path) -> Iterator[str]:
    """Yield the texts of a page, the cells of a notebook, or the strings of a module, with 1 in place of values."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        yield from ("".join(cell["source"]) for cell in json.loads(content)["cells"])
    elif path.suffix == ".md":
        yield content
    else:
        yield from strings(content, "1")


def commands_in(path: Path) -> Iterator[str]:
    """Yield the commands that a file shows: whole ones in backticks or with options; a mere name is not one."""
    for text in texts_of(path):
        for quoted, name, words in MENTION.findall(re.sub(r" *\\\n *", " ", text)):
            whole = re.sub(r"(--out) FILE\b", r"\1 a.html", f"{name}{words}").strip()
            if whole not in ("prune", *LEAVES) and (quoted or " --" in whole):
                yield re.sub(r"…|\[|\]", "", whole)


def test_every_command_that_a_text_shows_can_be_parsed(capsys):
    """Those of cards and of errors are strings of the package; the examples of --help have a test of their own."""
    folders = ("bertlite/**/*.py", "notebooks/**/*.md", "notebooks/*.ipynb", ".github/**/*.md", "README.md")
    shown = {(path.name, each) for glob in folders for path in ROOT.glob(glob) for each in commands_in(path)}
    assert {"card.py", "command.py", "README.md", "commands.md", "budget.md"} <= {name for name, _ in shown}
    wrong = []
    for name, words in sorted(shown):
        try:
            parser().parse_args(shlex.split(words))
        except SystemExit as end:
            if end.code:
                wrong.append(f"{name}: {capsys.readouterr().err}")
    assert wrong == []


# Types of arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parse", "text", "wanted"),
    [
        (parts.names, "a,b c, d", ("a", "b c", "d")),
        (parts.integers, "0,2,11", (0, 2, 11)),
        (parts.numbers, "0.5,1,1e-3", (0.5, 1.0, 0.001)),
        (parts.shape, "8x128", (8, 128)),
        (parts.names_of("fruit", ["fig", "plum"]), "plum,fig", ("plum", "fig")),
        (parts.paths((".json", "FOLDER")), "a.JSON,b/c", {".json": Path("a.JSON"), "FOLDER": Path("b/c")}),
        (parts.paths((".json", "FOLDER")), "runs/v1.2", {"FOLDER": Path("runs/v1.2")}),
    ],
)
def test_a_list_has_commas(parse, text, wanted):
    assert parse(text) == wanted


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parts.names, "a,,b", "'a,,b' has an empty item; write a list as A,B,C"),
        (parts.integers, "0,x", "'x' is not an integer of 0 or more"),
        (parts.integers, "0,3-5", "'3-5' is not an integer of 0 or more"),
        (parts.integers, "-1", "'-1' is not an integer of 0 or more"),
        (parts.numbers, "0.5,half", "'half' is not a number"),
        *(
            (parts.number, text, f"'{text}' is not a finite number of 0 or more")
            for text in ("nan", "inf", "-1", "1e999")
        ),
        (parts.shape, "8", "'8' is not a shape; write sequences x tokens, such as 8x128"),
        (parts.shape, "0x4", "'0x4' is not a shape"),
        (parts.count, "0", "'0' is too small; it must be 1 or more"),
        (parts.names_of("fruit", ["fig", "plum"]), "fig,leek", "there is no fruit 'leek'; have: fig, plum"),
        (parts.paths((".html", ".json")), "a.txt", "'a.txt' has none of the suffixes .html, .json"),
        (parts.paths((".html",)), "a.html,b.html", "names two paths of the kind .html; give one of each"),
    ],
)
def test_an_item_that_is_wrong_is_named(parse, text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(message)):
        parse(text)


# Wrong words ---------------------------------------------------------------------------------------------------------


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line that a command line which cannot be run is answered with."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("prun", "'env'); did you mean prune? (see `bertlite --help`)"),
        (
            "zebra",
            "invalid choice: 'zebra' (choose from 'inspect', 'attention', 'parity', 'prune', 'evaluate', 'embed'",
        ),
        ("prune runs x", "bertlite prune: argument ACTION: invalid choice: 'runs' (choose from "),
        ("prune runs x", "'compare'); did you mean run? ("),
        ("prune 2x m", "'compare'); did you mean `bertlite prune to 2x`? ("),
        ("prune 40% m", "did you mean `bertlite prune to 40%`? ("),
        ("pack m --out p --int8", "unrecognized arguments: --int8; did you mean --dtype int8? ("),
        ("embed a b --out c --cuda", "unrecognized arguments: --cuda; did you mean --device cuda? ("),
        ("embed a b --out c --device mps", "argument --device: invalid choice: 'mps' (choose from 'cpu', 'cuda') ("),
        (
            "embed a b --out v.npy",
            "argument --out: 'v.npy' is named as a file, and a folder is written: name it without",
        ),
        ("inspect x --jsn", "bertlite inspect: unrecognized arguments: --jsn; did you mean --json? ("),
        (
            "embed a b --out c --dvice=cpu",
            "bertlite embed: unrecognized arguments: --dvice=cpu; did you mean --device? (",
        ),
        ("inspect", "bertlite inspect: the following arguments are required: CHECKPOINT ("),
        ("inspect a b", "bertlite inspect: unrecognized arguments: b ("),
        ("attention a b text", "unrecognized arguments: text; write a text with spaces in quotes, and a second "),
        ("evaluate a --dev d --metric acc", "argument --metric: invalid choice: 'acc' (choose from "),
        ("parity a --shapes base,tiny", "argument --shapes: there is no shape 'tiny'; have: base, large ("),
        ("prune run a --train t --calibration 0", "argument --calibration: '0' is too small; it must be 1 or more ("),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest(words, message, capsys):
    assert message in answer(capsys, *words.split())


def test_a_folder_with_a_point_in_its_name_is_a_folder(tmp_path):
    (tmp_path / "old.bin").mkdir()
    for name in ("fast-2.0x", "minilm.v1", "old.bin"):
        assert parts.paths({parts.FOLDER: ""})(str(tmp_path / name)) == {parts.FOLDER: tmp_path / name}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_read_as_a_file(tmp_path, monkeypatch):
    os.mkfifo(pipe := tmp_path / "pipe")
    threading.Thread(target=pipe.write_text, args=("Time flies.\nA cat sat.\n",)).start()
    args = parser().parse_args(["embed", "m", str(pipe), str(tmp_path / "a.txt"), "--out", "v"])
    assert (Path(args.input[0]).read_text(), Path(args.input[0]).suffix) == ("Time flies.\nA cat sat.\n", ".txt")
    assert args.input[1] == str(tmp_path / "a.txt")
    code = "from bertlite.cli.parts import readable; print(open(readable('-')).read(), end='')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, input="a\nb", capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("a\nb", "")


# Running -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def do_instead(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that lets `bertlite parity` do other work, with this outcome."""

    def replace_work(do: Callable[[], object], outcome: Outcome = (None, (), 0)) -> None:
        def work(args: argparse.Namespace) -> Outcome:
            do()
            return outcome

        others = [each for each in COMMANDS if each is not commands.PARITY]
        monkeypatch.setattr("bertlite.cli.COMMANDS", [*others, replace(commands.PARITY, work=work)])

    return replace_work


@pytest.mark.parametrize("named", [False, True])
def test_json_is_alone_on_standard_output(named, do_instead, capsys, tmp_path):
    do_instead(lambda: print("words"), ({"a": 1}, (), 1))
    out = tmp_path / "record.json"
    assert main(["parity", "--json", *(["--out", str(out)] if named else [])]) == 1
    printed = capsys.readouterr()
    assert (json.loads(printed.out), printed.err) == ({"a": 1}, "words\n")
    assert out.exists() == named


@pytest.mark.parametrize(("words", "shown"), [(["a{b}"], "loading a{b}\n"), ([], "loading torch\n")])
def test_a_terminal_is_told_what_is_loaded(words, shown, do_instead, monkeypatch, capsys):
    do_instead(lambda: None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["parity", *words]) == 0
    assert capsys.readouterr().err == shown


def test_a_command_that_must_write_says_so(capsys):
    assert "bertlite embed: the following arguments are required: --out" in answer(capsys, "embed", "model", "a.txt")
    assert main(["embed", "model", "input.txt", "--out", "record.json"]) == 2
    assert "add --out FOLDER" in capsys.readouterr().err
    assert main(["embed", "model", "input.txt", "--out", os.fsdecode(b"caf\xe9")]) == 2
    assert "caf\\udce9 is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [("inspect", ""), ("evaluate", "model", "--dev", "x.csv", "--against", ""), ("embed", "m", "", "--out", "o")],
)
def test_an_empty_path_is_named(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*words]) == 2
    assert "the path of an input is empty" in capsys.readouterr().err


@pytest.mark.parametrize("leaf", [name for name, each in LEAVES.items() if each.get_default("asked").needs])
def test_a_file_where_a_folder_is_to_be_written_is_named_before_the_work(leaf, tmp_path, capsys):
    command = LEAVES[leaf]
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder.json").mkdir()
    folder = "FOLDER" in command.get_default("asked").needs
    for name, message in (*[("file", "file: name a folder")] * folder, ("folder.json", "folder: name a file")):
        example = shlex.split(command.examples[0])
        example[example.index("--out") + 1] = str(tmp_path / name)
        assert main(example) == 2
        assert capsys.readouterr().err == f"bertlite {leaf}: {tmp_path / name} is a {message} to write\n"
    assert (tmp_path / "file").read_text() == "kept"


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
def test_an_error_is_printed_in_one_line(do_instead, capsys, error, status, message):
    do_instead(Mock(side_effect=error))
    assert main(["parity"]) == status
    assert capsys.readouterr().err == message


def test_a_warning_is_one_line_without_the_place_in_the_code(do_instead, capsys):
    do_instead(lambda: print(warnings.formatwarning("held out", UserWarning, "code.py", 3), end=""))
    assert main(["parity"]) == 0
    assert capsys.readouterr().out == "warning: held out\n"


def test_names_from_files_and_the_encoding_of_a_terminal_break_no_command(do_instead):
    def work() -> None:
        print("é 1–2 \x1b[2K")
        raise ValueError("no column \x1b[2K…")

    do_instead(work)
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii", line_buffering=True) for _ in "oe"]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        assert main(["parity"]) == 2
        assert [leaf for leaf in LEAVES if exit_of(*leaf.split(), "--help")] == []
    out, err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    assert out.startswith("\\xe9 1-2 \\u001b[2K\n")
    assert "\\u" not in out.partition("\n")[2], "help that an ASCII terminal cannot show"
    assert err == "bertlite parity: no column \\u001b[2K...\n"


def test_quiet_leaves_errors_alone_on_standard_error(do_instead, capsys):
    def work() -> None:
        Progress(None, "", what="parity").stage("stage")
        warnings.warn("a warning", stacklevel=1)
        logging.getLogger("bertlite").warning("a message")
        print("a result")
        raise ValueError("an error")

    do_instead(work)
    for leaf in LEAVES.values():
        assert any("--quiet" in option.option_strings for option in leaf._actions)
    assert main(["parity"]) == 2
    assert len(capsys.readouterr().err.splitlines()) > 1
    assert main(["parity", "--quiet"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("a result\n", "bertlite parity: an error\n")


@pytest.mark.parametrize("words", ["", "prune"])
def test_without_a_command_the_commands_are_listed(words, capsys):
    assert exit_of(*words.split()) == 0
    printed = capsys.readouterr()
    known = subcommands(prune_parser() if words else parser())
    assert [name for name in known if not re.search(rf"^    {name}\b", printed.out, re.MULTILINE)] == []
    assert printed.err == ""


def exit_of(*words: str) -> object:
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code


@pytest.mark.parametrize("words", ["parity --list", "--help"])
def test_a_reader_may_stop_reading(words, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output, redirect_stdout(output):
        assert main(words.split()) == 141
    assert capsys.readouterr().err == ""


def test_env_names_what_a_report_of_a_bug_needs(monkeypatch, capsys):
    assert main(["env", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["versions"]["torch"] in err
    assert {"python", "system", "cpu", "kernels"} <= set(found)
    assert {"sentence-transformers", "peft", "onnxruntime"} <= set(found["versions"])  # which use bertlite
    assert str(ROOT) not in out  # no path of the machine
    monkeypatch.setenv("BERTLITE_NATIVE", "avx9")
    assert main(["env"]) == 0
    assert "avx9" in capsys.readouterr().out
