"""scripts/measure/clients.py, which runs every check here with both libraries and writes what came of it."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from checks import CHECKS, Check
from checks.common import MissingError

from bertlite.records import version_of

pytestmark = pytest.mark.clients
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure" / "clients.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("clients_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_record_says_what_came_of_each_run(script: ModuleType, tmp_path: Path) -> None:
    assert script.main(["--only", "both_ways", "loads_pruned", "--json", str(tmp_path / "out.json")]) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    lines = {line["name"]: line for line in record["checks"]}
    assert set(lines) == {"both_ways", "loads_pruned"}
    assert lines["both_ways"]["difference"] == 0
    assert {line["bertlite.hf"]["result"] for line in lines.values()} == {"passes"}
    versions = record["environment"]["versions"]
    assert versions["torch"]
    assert {name: versions[name] for name in ("peft", "captum")} == {
        name: version_of(name) for name in ("peft", "captum")
    }  # None of what is not installed


def test_a_failure_of_ours_is_the_exit_status(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(side: Any, folder: Path) -> Any:
        raise ValueError(f"nothing in {folder}")

    def absent(side: Any, folder: Path) -> Any:
        raise MissingError("not installed: x")

    monkeypatch.setitem(CHECKS, "planted", Check("none", "it fails", "planted", fails, ()))
    monkeypatch.setitem(CHECKS, "planted-absent", Check("none", "it is absent", "planted-absent", absent, ()))
    assert script.main(["--only", "planted", "--json", str(tmp_path / "out.json")]) == 1
    first, second = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert first["bertlite.hf"] == {"result": "fails", "error": "ValueError: nothing in FOLDER/run"}
    assert second["transformers"] == {"result": "not run", "error": "MissingError: not installed: x"}


def test_an_unknown_word_lists_the_checks(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"no check matches nonsense; have: .*both_ways"):
        script.main(["--only", "nonsense"])
