"""A run is a folder that can be read whatever happened to the process that wrote it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bertlite.records import Run, read_runs, sha256_of, write_text

ROOT = Path(__file__).resolve().parents[1]


def facts(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def test_a_run_says_what_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["prune_heads.py", "--criterion", "michel"])
    with Run(
        "prune", {"criterion": "michel"}, root=tmp_path, seed=3, data={"dev": "ab"}, model={"dense": "cd"}
    ) as run:
        assert facts(run.folder)["status"] == "running"
        run.log(step=1, loss=0.5)
        run.log(step=2, loss=0.25)
        run.save("masks.json", {"0": [1]})
        run.save_predictions([{"label": 1, "outputs": [0.5]}])
        run.results["accuracy"] = 0.75
    (read,) = read_runs(tmp_path)
    assert read.folder == run.folder
    assert read.finished
    assert read.config == {"criterion": "michel"}
    assert read.results == {"accuracy": 0.75}
    assert read.metrics == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    assert read.predictions == [{"label": 1, "outputs": [0.5]}]
    assert read.load("masks.json") == {"0": [1]}
    told = read.facts
    assert (told["seed"], told["data"], told["model"]) == (3, {"dev": "ab"}, {"dense": "cd"})
    assert told["environment"]["versions"]["torch"]
    assert told["wall_seconds"] >= 0
    assert told["command"] == "prune_heads.py --criterion michel"
    assert set(told["git"] or {"commit", "dirty"}) == {"commit", "dirty"}


def test_a_failed_run_says_why_and_is_not_read(tmp_path):
    with pytest.raises(ZeroDivisionError), Run("prune", {}, root=tmp_path):
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
    code = f"""
import sys
from bertlite.records import Run
with Run("prune", {{}}, folder={str(tmp_path / "run")!r}) as run:
    run.log(step=1)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{{"step": ')
    print("ready", flush=True)
    sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
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
