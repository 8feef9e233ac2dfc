"""The code stays small: functions, and what one has to read to follow a forward pass.

Complexity (12) and docstrings in the imperative are ruff's, in pyproject.toml.
"""

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from operator import le, ne
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from conftest import SIZES, make, make_batch

from bertlite import BertModel

ROOT = Path(__file__).resolve().parents[1]
FUNCTION, BODY, LINE = 60, 40, 119  # code lines of a function, and of BertBody.forward; characters of a line of C++
WAYS = {  # of one layer's forward: functions that run, files they are in, and changes from one file to another
    "padded": (45, 6, 17),
    "packed": (63, 6, 23),
    "cu_seqlens": (60, 6, 19),
    "bertlite.hf": (56, 10, 36),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*ends: str) -> dict[str, str]:
    """Return the text of the files of the package and the scripts with these ends, by their paths."""
    paths = [path for room in ("bertlite", "scripts") for end in ends for path in (ROOT / room).rglob(f"*.{end}")]
    assert paths
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


def functions(source: str) -> Iterator[tuple[str, Function]]:
    """Yield every function with its name and the line where it begins, such as "forward, line 58"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{node.name}, line {node.lineno}", node


def lines_of(function: Function, source: str) -> int:
    """Return the lines of a function that hold code, from its `def` on; comments and blank lines are free."""
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    docstring = range(first.lineno, (first.end_lineno or 0) + 1) if documented else range(0)
    lines = enumerate(source.splitlines()[: function.end_lineno], 1)
    return sum(i >= function.lineno and i not in docstring and not re.match(r"\s*(#|$)", line) for i, line in lines)


def test_functions_are_short() -> None:
    lengths = {
        f"{path}: {name}": lines_of(function, text)
        for path, text in sources("py").items()
        for name, function in functions(text)
    }
    assert {name: lines for name, lines in lengths.items() if lines > FUNCTION} == {}


def test_the_forward_of_bert_is_short() -> None:
    source = inspect.getsource(inspect.unwrap(BertModel.forward))
    [(_, function)] = functions(inspect.cleandoc(source))
    assert 10 < lines_of(function, inspect.cleandoc(source)) <= BODY


def forward_of(way: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a small model and a batch for it, to be run in one of the WAYS."""
    batch = {name: x for name, x in make_batch().items() if name != "token_type_ids"}
    if way == "bertlite.hf":
        transformers, hf = pytest.importorskip("transformers"), pytest.importorskip("bertlite.hf")
        sizes = {**SIZES, "num_hidden_layers": 1}
        return hf.BertModel(transformers.BertConfig(**sizes)).eval(), batch
    if way == "cu_seqlens":
        batch = {"input_ids": batch["input_ids"].flatten(), "cu_seqlens": torch.tensor([0, 9, 22], dtype=torch.int32)}
    attention = "auto" if way == "padded" else "packed"
    return make(num_hidden_layers=1, attn_implementation=attention).float(), batch


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_pass_is_a_short_way_through_few_files(way: str) -> None:
    """Not counted in lines: a limit of lines would reward small files, among which a reader jumps."""
    model, batch = forward_of(way)
    ran: list[CodeType] = []

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT / "bertlite")):
            ran.append(frame.f_code)

    with torch.no_grad():
        model(**batch)  # whatever a first call imports is imported
        sys.setprofile(record)
        try:
            model(**batch)
        finally:
            sys.setprofile(None)
    files = [code.co_filename for code in ran]
    assert str(ROOT / "bertlite/stack/modules.py") in files
    found = len(set(ran)), len(set(files)), sum(map(ne, files, files[1:]))
    assert all(map(le, found, WAYS[way])), f"functions, files and changes of file are {found}: {Counter(files)}"


@pytest.mark.parametrize(
    ("fact", "files"),
    [("disentangled", 4), (r"[\"']BertFor", 5), (r"\bV5\b|transformers\.__version__", 1)],
    ids=["a kind of positions", "a head", "the version of transformers"],
)
def test_a_fact_stands_in_few_files(fact: str, files: int) -> None:
    """What is true of a kind of positions, a head or a transformers is asked by its name nowhere else."""
    found = [path for path, text in sources("py").items() if path.startswith("bertlite/") and re.search(fact, text)]
    assert 0 < len(found) <= files, found


def test_lines_of_cpp_are_no_longer_than_those_of_python() -> None:
    """As .clang-format has it."""
    lines = {
        f"{path}:{i}": line
        for path, text in sources("h", "cpp").items()
        for i, line in enumerate(text.splitlines(), 1)
    }
    assert [place for place, line in lines.items() if len(line) > LINE] == []


DTYPED = {"empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}
PLACED = DTYPED | {"arange", "empty_strided", "randint", "randperm"}


def test_every_tensor_that_is_made_names_its_dtype_and_device() -> None:
    """Or it is another under another default.  What modules are made of follows the defaults, as torch's own do."""
    wrong, seen = [], 0
    for path, text in sources("py").items():
        tree = ast.parse(text)
        made = [each for name, each in functions(text) if name.startswith("__init__")]
        made += calls(tree, "nn", {"Parameter"})
        follows = {ast.unparse(each) for part in made for each in calls(part, "torch", PLACED)}
        for call in calls(tree, "torch", PLACED) if path.startswith("bertlite/") else ():
            seen += 1
            given = {keyword.arg for keyword in call.keywords}
            needed = {"device", "dtype"} if call.func.attr in DTYPED else {"device"}  # type: ignore[attr-defined]
            if not needed <= given and ast.unparse(call) not in follows:
                wrong.append(f"{path}:{call.lineno}: {ast.unparse(call)}")
    assert seen > 50
    assert not wrong, "these follow torch's default dtype or device:\n" + "\n".join(wrong)


def calls(tree: ast.AST, module: str, names: set[str]) -> list[ast.Call]:
    """Return the calls of some functions of a module, such as torch.zeros."""
    wanted = {f"{module}.{name}" for name in names}
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in wanted]
