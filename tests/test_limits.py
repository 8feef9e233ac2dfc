"""The code stays small: functions, modules, and what one has to read to follow a forward pass.

Complexity (12) and docstrings in the imperative are ruff's, in pyproject.toml.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from conftest import make, make_batch
from torch import Tensor

from bertlite import BertModel

ROOT = Path(__file__).resolve().parents[1]
FUNCTION, MODULE, BODY, WAY = 60, 450, 40, 1900  # lines: of a function, a module, BertBody.forward, all files it runs
EXCEPTIONS: dict[str, str] = {}  # {"path" or "path:function": why it is better longer}

FILES = sorted(
    path
    for room in ("bertlite", "scripts")
    for path in (ROOT / room).rglob("*")
    if path.is_file() and (path.suffix == ".py" or path.read_bytes().startswith(b"#!"))
)
SOURCES = [path for path in FILES if path.suffix == ".py"]

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(source: str) -> Iterator[tuple[str, Function]]:
    """Yield every function with its name, such as BertBody.forward."""

    def inside(node: ast.AST, above: str) -> Iterator[tuple[str, Function]]:
        for part in ast.iter_child_nodes(node):
            name = above
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{above}.{part.name}".lstrip(".")
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, part
            yield from inside(part, name)

    return inside(ast.parse(source), "")


def lines_of(function: Function) -> int:
    """Return the lines of a function from its `def` to its end, without its docstring."""
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def test_lines_are_counted_without_the_docstring() -> None:
    source = (
        '@cache\ndef f(\n    a,\n):\n    """One.\n\n    Two.\n    """\n    return a\n\n\n'
        "class A:\n    def g(self): ...\n"
    )
    assert {name: lines_of(function) for name, function in functions(source)} == {"f": 4, "A.g": 1}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_are_short(path: Path) -> None:
    lengths = {name: lines_of(function) for name, function in functions(path.read_text(encoding="utf-8"))}
    long = {name: n for name, n in lengths.items() if n > FUNCTION and f"{name_of(path)}:{name}" not in EXCEPTIONS}
    assert not long, f"{name_of(path)} has functions of more than {FUNCTION} lines: {long}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_modules_are_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MODULE or name_of(path) in EXCEPTIONS, f"{name_of(path)} has {lines} lines; the limit is {MODULE}"


def test_exceptions_are_needed() -> None:
    needed = {name_of(path) for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > MODULE}
    for path in SOURCES:
        found = functions(path.read_text(encoding="utf-8"))
        needed |= {f"{name_of(path)}:{name}" for name, function in found if lines_of(function) > FUNCTION}
    assert EXCEPTIONS.keys() <= needed, "an exception from the limits is no longer needed"


def test_the_forward_of_bert_is_short() -> None:
    source = inspect.getsource(inspect.unwrap(BertModel.forward))
    [(name, function)] = functions(inspect.cleandoc(source))
    assert name == "forward"
    assert lines_of(function) <= BODY


def files_run(model: BertModel, batch: dict[str, Tensor]) -> set[Path]:
    """Return the files of bertlite in which a forward pass runs a function."""
    found: set[str] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    with torch.no_grad():
        model(**batch)  # whatever a first call imports is imported
        sys.setprofile(record)
        try:
            model(**batch)
        finally:
            sys.setprofile(None)
    return {Path(name) for name in found if Path(name).is_relative_to(ROOT / "bertlite")}


def test_few_lines_lead_through_a_forward_pass() -> None:
    batch = make_batch()
    del batch["token_type_ids"]
    files = files_run(make().float(), batch)
    assert ROOT / "bertlite" / "stack" / "modules.py" in files
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(files)}
    total = sum(lengths.values())
    assert total <= WAY, f"one forward pass runs through {total:,} lines: {lengths}"


def test_lines_of_cpp_are_no_longer_than_those_of_python():
    """As .clang-format has it."""
    sources = [
        path for room in ("bertlite", "scripts") for end in ("h", "cpp") for path in (ROOT / room).rglob(f"*.{end}")
    ]
    assert sources
    long = [
        f"{name_of(path)}:{i}"
        for path in sources
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 119
    ]
    assert long == []
