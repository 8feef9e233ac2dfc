"""Records name the commit they were made from, and the machine."""

import json
from functools import cache
from pathlib import Path

import pytest

from bertlite.support import environment
from bertlite.support.environment import RESULTS, commit_of, git_state, run_git
from bertlite.support.files import write_text

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / RESULTS).rglob("*.json"))


@cache
def history() -> set[str]:
    """Return the commits that HEAD descends from, and HEAD; skip the test if they cannot be looked up here."""
    if git_state() is None or run_git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("this is no git checkout, or a shallow one")
    return {*run_git("rev-list", "HEAD").split()}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.relative_to(ROOT / RESULTS).as_posix())
def test_a_record_is_made_from_a_commit_of_the_history(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    found = commit_of(record)
    assert found is not None, f"{path.name} names no commit: make it again"
    assert not found["dirty"], f"{path.name} was made from files that are in no commit: commit, and make it again"
    others = {found["commit"], *record.get("commits", ())} - history()
    assert not others, f"{path.name} was made from {others}, which are not in the history: make it again"


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


def test_an_environment_names_what_keeps_libraries_from_instructions(monkeypatch):
    for name in environment.LIMITS:
        monkeypatch.delenv(name, raising=False)
    plain = environment.environment()
    assert "limits" not in plain
    assert not {*environment.CLIENTS} & plain["versions"].keys(), "records do not depend on these"
    monkeypatch.setenv("BERTLITE_NATIVE", "avx2")
    assert environment.environment()["limits"] == {"BERTLITE_NATIVE": "avx2"}
