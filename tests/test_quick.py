"""`scripts/test`: what it asks of pytest, and the choice of `--quick`."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
QUICK = (ROOT / "tests" / "quick.txt").read_text(encoding="utf-8").splitlines()
CHOSEN = [line for line in QUICK if not line.startswith("--deselect=")]


def test_every_line_of_the_quick_choice_names_tests():
    for line in QUICK:
        path, _, test = line.removeprefix("--deselect=").partition("::")
        assert (ROOT / path).is_file(), line
        name = test.partition("[")[0]
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), line


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("-m slow", "-m not slow -m slow"),  # pytest takes the last
        ("--quick --all", "@tests/quick.txt"),
        ("--all --with 4.57.6", "4.57.6"),
    ],
)
def test_slow_tests_are_run_if_asked(given, asked, tmp_path):
    """By scripts/test, beside an interpreter that prints what it is asked."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test", tmp_path / "scripts")
    for name in ("scripts/bootstrap", ".venv/bin/python", ".venv-4.57.6/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / name).chmod(0o755)
    command = [tmp_path / "scripts" / "test", *given.split()]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for common in ("-m pytest", "-n auto --dist worksteal"):
        assert common in said
        said = said.replace(common, "")
    assert said.split() == asked.split()


def test_the_quick_choice_touches_every_room():
    """Every folder of tests, and every room of the package that has tests by its name."""
    rooms = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert {line.split("/")[1] for line in CHOSEN if line.count("/") == 2} == rooms
    packages = {path.parent.name for path in (ROOT / "bertlite").glob("*/__init__.py")}
    assert packages - rooms == {"attention_view", "cli"}
    assert {"tests/test_attention_view.py", "tests/test_cli.py"} <= set(CHOSEN)
