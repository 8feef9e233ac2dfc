"""Records name the commit they were made from; a run can be read whatever happened to the process that wrote it."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from bertlite.checkpoint.folders import replacing
from bertlite.support import records
from bertlite.support.records import (
    RESULTS,
    Run,
    commit_of,
    git_state,
    read_runs,
    run_git,
    sha256,
    sha256_of,
    write_record,
    write_text,
)

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / RESULTS).rglob("*.json"))


def facts(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def test_a_run_says_what_it_was_in_json_whatever_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["prune_heads.py", "--criterion", "michel"])
    hashes, nan = {"data": {"dev": "ab"}, "model": {"dense": "cd"}}, float("nan")
    with Run("prune", {"criterion": "michel"}, folder=tmp_path / "run", seed=3, **hashes) as run:
        assert facts(run.folder)["status"] == "running"
        run.log(step=1, loss=0.5)
        run.log(step=2, loss=nan)
        run.save("masks.json", ({"0": [1, nan]},))
        run.save_predictions([{"label": 1, "outputs": [0.5, -float("inf")]}])
        run.results |= {"accuracy": 0.75, "loss": nan}
    for path in run.folder.iterdir():
        for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(text, parse_constant=pytest.fail)
    (read,) = read_runs(tmp_path)
    assert read.folder == run.folder
    assert read.finished
    assert read.config == {"criterion": "michel"}
    assert read.results == {"accuracy": 0.75, "loss": None}
    assert read.metrics == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]
    assert read.predictions == [{"label": 1, "outputs": [0.5, None]}]
    assert read.load("masks.json") == [{"0": [1, None]}]
    told = read.facts
    assert (told["seed"], told["data"], told["model"]) == (3, {"dev": "ab"}, {"dense": "cd"})
    assert told["environment"]["versions"]["torch"]
    assert told["wall_seconds"] >= 0
    assert told["command"] == "prune_heads.py --criterion michel"
    assert told["environment"]["git"] == git_state()


def test_a_failed_run_says_why_and_is_not_read(tmp_path):
    with pytest.raises(ZeroDivisionError), Run("prune", {}, folder=tmp_path / "run"):
        _ = 1 / 0
    assert read_runs(tmp_path) == []
    (failed,) = read_runs(tmp_path, unfinished=True)
    assert failed.facts["status"] == "failed"
    assert failed.facts["error"] == "ZeroDivisionError: division by zero"


def test_runs_are_found_by_name_at_any_depth(tmp_path):
    for name in ("prune", "bench"):
        with Run(name, {}, folder=tmp_path / name / "deep"):
            pass
    assert [run.facts["name"] for run in read_runs(tmp_path)] == ["bench", "prune"]
    assert [run.facts["name"] for run in read_runs(tmp_path, name="prune")] == ["prune"]
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        read_runs(tmp_path / "nowhere")


def test_a_run_killed_at_any_time_can_be_read_up_to_there(tmp_path):
    run = Run("prune", {}, folder=tmp_path / "run").__enter__()  # and no end
    run.log(step=1)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": ')
    assert read_runs(tmp_path) == []
    (killed,) = read_runs(tmp_path, unfinished=True)
    assert killed.facts["status"] == "running"
    assert killed.metrics == [{"step": 1}]
    with Run("prune", {}, folder=tmp_path / "run") as again:
        again.log(step=7)
    (read,) = read_runs(tmp_path)
    assert read.metrics == [{"step": 7}]


def test_a_finished_run_and_a_folder_of_other_things_are_not_replaced(tmp_path):
    with Run("prune", {}, folder=tmp_path / "done"):
        pass
    with pytest.raises(FileExistsError, match="holds a finished run"), Run("prune", {}, folder=tmp_path / "done"):
        pass
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").touch()
    with pytest.raises(FileExistsError, match="is not a run"), Run("prune", {}, folder=tmp_path / "thesis"):
        pass
    assert (tmp_path / "thesis" / "chapter.txt").exists()


def test_a_hash_knows_where_its_parts_end(tmp_path):
    write_text(tmp_path / "file", "ab")
    assert sha256_of("ab", "c") != sha256_of("a", "bc")
    assert sha256_of("ab") == sha256_of(b"ab") == sha256_of(tmp_path / "file")
    write_text(tmp_path / "file", "abc")
    wanted = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
    assert sha256("abc") == sha256(b"abc") == sha256(tmp_path / "file") == wanted


# Where records come from --------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(records, "ROOT", folder)
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
    monkeypatch.setattr(records, "ROOT", site)
    assert git_state() is None
    monkeypatch.setattr(records, "ROOT", checkout / "nowhere")
    assert git_state() is None


def test_a_record_that_cannot_be_traced_is_written_with_a_warning(tmp_path, capsys, monkeypatch):
    records.print_warning.cache_clear()
    path = tmp_path / "record.json"
    clean, dirty = ({"environment": {"git": {"commit": "c", "dirty": dirty}}} for dirty in (False, True))
    write_record(path, clean)
    assert capsys.readouterr().err == ""
    write_record(path, dirty)
    write_record(path, dirty)
    assert capsys.readouterr().err.count("this record cannot be traced: files differ from the commit") == 1
    assert json.loads(path.read_text()) == dirty
    write_record(path, {"environment": {"git": None}})
    assert "this record names no commit" in capsys.readouterr().err
    records.print_warning.cache_clear()
    monkeypatch.setattr(records, "ROOT", tmp_path)  # installed: there is no commit, and the version is in the record
    write_record(path, {"environment": {"git": None}})
    assert capsys.readouterr().err == ""
    with pytest.raises(KeyError, match="environment"):
        write_record(path, {"what": "no environment"})


def test_the_commit_of_older_records_stands_beside_their_environment():
    state = {"commit": "c", "dirty": False}
    assert commit_of({"environment": {"git": state}}) == commit_of({"environment": {}, "git": state}) == state
    assert commit_of({"environment": {}}) is commit_of({}) is None


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write, root included")
def test_an_error_names_the_file_and_not_the_temporary_one() -> None:
    with pytest.raises(OSError, match=r": '/proc/record\.json'$"):
        records.write_json("/proc/record.json", {})
    with pytest.raises(OSError, match=r"/proc/model\b"), replacing(Path("/proc/model"), re.compile("x")):
        pass
    path = Path("/there/shard.parquet")
    with pytest.raises(PermissionError, match=r"Permission denied: '/there/shard\.parquet'$"), records.naming(path):
        raise PermissionError(13, "Failed to open local file '/there/.shard.parquet.12ab.tmp'")
    with pytest.raises(OSError, match=r"No space left on device: '/there/shard\.parquet'$"), records.naming(path):
        raise OSError(28, "No space left on device")
    with pytest.raises(PermissionError, match="another"), records.naming(path):
        raise PermissionError(13, "Permission denied", "another")


def test_an_environment_names_what_keeps_libraries_from_instructions(monkeypatch):
    for name in records.LIMITS:
        monkeypatch.delenv(name, raising=False)
    assert "limits" not in records.environment()
    monkeypatch.setenv("BERTLITE_NATIVE", "avx2")
    assert records.environment()["limits"] == {"BERTLITE_NATIVE": "avx2"}
