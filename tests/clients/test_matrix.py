"""scripts/measure/clients.py, which runs every check here with both libraries and writes what came of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from bertlite.records import version_of
from scripts.measure import clients
from tests.clients.checks.common import CHECKS, Check, MissingError

pytestmark = pytest.mark.clients


def test_the_record_says_what_came_of_each_run(tmp_path: Path) -> None:
    assert clients.main(["--only", "encoder_decoder-1,loads_pruned", "--out", str(tmp_path / "out.json")]) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    lines = {line["name"]: line for line in record["checks"]}
    assert set(lines) == {"encoder_decoder-1", "loads_pruned"}
    assert lines["encoder_decoder-1"]["difference"] == 0
    assert {line["bertlite.hf"]["result"] for line in lines.values()} == {"passes"}
    versions = record["environment"]["versions"]
    assert versions["torch"]
    assert {name: versions[name] for name in ("peft", "opacus")} == {
        name: version_of(name) for name in ("peft", "opacus")
    }  # None of what is not installed


def test_a_failure_of_ours_is_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(side: Any, folder: Path) -> Any:
        raise ValueError(f"nothing in {folder}")

    def absent(side: Any, folder: Path) -> Any:
        raise MissingError("not installed: x")

    monkeypatch.setitem(CHECKS, "planted", Check("none", "it fails", "planted", fails, ()))
    monkeypatch.setitem(CHECKS, "planted-absent", Check("none", "it is absent", "planted-absent", absent, ()))
    assert clients.main(["--only", "planted", "--out", str(tmp_path / "out.json")]) == 1
    first, second = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert first["bertlite.hf"] == {"result": "fails", "error": "ValueError: nothing in FOLDER/run"}
    assert second["transformers"] == {"result": "not run", "error": "MissingError: not installed: x"}


def test_an_unknown_word_lists_the_checks() -> None:
    with pytest.raises(SystemExit, match=r"no check matches nonsense; have: .*loads_pruned"):
        clients.main(["--only", "nonsense"])
