"""Records name the commit they were made from, and the machine."""

import json
import subprocess
from pathlib import Path

import pytest

from bertlite.support import environment
from bertlite.support.environment import RESULTS, commit_of, git_state, run_git
from bertlite.support.files import write_text

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / RESULTS).rglob("*.json"))


def history_missing() -> str | None:
    """Return the reason why commits cannot be looked up here; None if they can."""
    if git_state() is None:
        return "this is no git checkout"
    if run_git("rev-parse", "--is-shallow-repository").strip() == "true":
        return "the checkout is shallow"
    return None


def is_ancestor(commit: str) -> bool:
    """Tell whether a commit is in the history of HEAD."""
    try:
        run_git("merge-base", "--is-ancestor", commit, "HEAD")
    except subprocess.CalledProcessError:
        return False
    return True


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.relative_to(ROOT / RESULTS).as_posix())
def test_a_record_is_made_from_a_commit_of_the_history(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    found = commit_of(record)
    assert found is not None, f"{path.name} names no commit: make it again"
    assert not found["dirty"], f"{path.name} was made from files that are in no commit: commit, and make it again"
    if reason := history_missing():
        pytest.skip(reason)
    for commit in (found["commit"], *record.get("commits", ())):
        assert is_ancestor(commit), f"{path.name} was made from {commit}, which is not in the history: make it again"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Let bertlite lie in a small repository with one commit and one record; return its folder."""
    folder = (tmp_path / "checkout").resolve()
    write_text(folder / "code.py", "a = 1\n")
    write_text(folder / RESULTS / "record.json", "{}")
    monkeypatch.setattr(environment, "ROOT", folder)
    try:
        run_git("init", "-q")
    except OSError:
        pytest.skip("git is not installed")
    run_git("add", ".")
    run_git("-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "-m", "one", "--no-gpg-sign")
    return folder


def test_changed_files_make_a_tree_dirty_and_records_do_not(checkout):
    commit = run_git("rev-parse", "HEAD").strip()
    assert git_state() == {"commit": commit, "dirty": False}
    write_text(checkout / RESULTS / "record.json", '{"new": 1}')
    write_text(checkout / RESULTS / "more" / "other.json", "{}")
    assert git_state() == {"commit": commit, "dirty": False}
    write_text(checkout / "new.py", "")
    assert git_state() == {"commit": commit, "dirty": True}
    (checkout / "new.py").unlink()
    write_text(checkout / "code.py", "a = 2\n")
    assert git_state() == {"commit": commit, "dirty": True}


def test_the_repository_around_an_installed_package_is_not_its_own(checkout, monkeypatch):
    site = checkout / "site-packages"
    site.mkdir()
    monkeypatch.setattr(environment, "ROOT", site)
    assert git_state() is None
    monkeypatch.setattr(environment, "ROOT", checkout / "nowhere")
    assert git_state() is None


def test_the_commit_of_older_records_stands_beside_their_environment():
    state = {"commit": "c", "dirty": False}
    assert commit_of({"environment": {"git": state}}) == commit_of({"environment": {}, "git": state}) == state
    assert commit_of({"environment": {}}) is commit_of({}) is None


def test_env_names_the_libraries_that_use_bertlite_and_records_do_not():
    found = environment.env()["versions"]
    assert {"sentence-transformers", "peft", "onnxruntime"} <= found.keys() - environment.environment()[
        "versions"
    ].keys()
    assert found["torch"]


def test_an_environment_names_what_keeps_libraries_from_instructions(monkeypatch):
    for name in environment.LIMITS:
        monkeypatch.delenv(name, raising=False)
    assert "limits" not in environment.environment()
    monkeypatch.setenv("BERTLITE_NATIVE", "avx2")
    assert environment.environment()["limits"] == {"BERTLITE_NATIVE": "avx2"}
