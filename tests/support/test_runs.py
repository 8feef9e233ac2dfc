"""A run can be read whatever happened to the process that wrote it."""

import json
from pathlib import Path

import pytest

from bertlite.support.environment import git_state
from bertlite.support.runs import Run, read_runs


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
    assert (read.folder, read.finished, read.config) == (run.folder, True, {"criterion": "michel"})
    assert read.results == {"accuracy": 0.75, "loss": None}
    assert read.metrics == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]
    assert read.predictions == [{"label": 1, "outputs": [0.5, None]}]
    assert read.load("masks.json") == [{"0": [1, None]}]
    told = read.facts
    assert (told["seed"], told["data"], told["model"]) == (3, {"dev": "ab"}, {"dense": "cd"})
    assert told["environment"]["versions"]["torch"]
    assert told["wall_seconds"] >= 0
    assert (told["command"], told["environment"]["git"]) == ("prune_heads.py --criterion michel", git_state())


def test_a_failed_run_says_why_and_is_not_read(tmp_path):
    with pytest.raises(ZeroDivisionError), Run("prune", {}, folder=tmp_path / "run"):
        _ = 1 / 0
    assert read_runs(tmp_path) == []
    (failed,) = read_runs(tmp_path, unfinished=True)
    assert (failed.facts["status"], failed.facts["error"]) == ("failed", "ZeroDivisionError: division by zero")


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
