"""scripts/measure/tuning.py: constants are found where they are, and change only beyond the spread."""

import json

import pytest

from bertlite.stack import packing
from scripts.measure import tuning


def around(median, spread=0.05):
    return {"low": median - spread, "median": median, "high": median + spread}


def test_every_constant_is_in_the_code():
    for name in tuning.CONSTANTS:
        assert tuning.value_of(name)
    with pytest.raises(LookupError, match="has NONE: was it renamed"):
        tuning.value_of("NONE")


def test_a_constant_is_set_wherever_it_was_imported():
    before, seen = packing.MAX_FILL, []
    places = tuning.holders("MAX_FILL")
    assert places  # where it is defined, and wherever it was imported
    tuning.run_with(lambda: seen.extend(vars(module)["MAX_FILL"] for module, *_ in places), MAX_FILL=0.25)()
    assert seen == [0.25] * len(places)
    assert {vars(module)["MAX_FILL"] for module, *_ in places} == {before}


@pytest.mark.parametrize(
    ("medians", "best", "choose"),
    [
        ({0.5: 1.8, 0.7: 1.4, 0.8: 1.2, 0.9: 0.8}, 0.8, 0.8),
        ({0.5: 1.8, 0.7: 1.4, 0.8: 1.2, 0.9: 1.02}, 0.9, 0.8),  # better by less than the spread
        ({0.5: 1.8, 0.7: 1.4, 0.8: 1.2, 0.9: 1.1}, 0.9, 0.9),
        ({0.5: 1.8, 0.7: 1.4, 0.8: 0.9, 0.9: 0.8}, 0.7, 0.7),
        ({0.5: 1.8, 0.7: 1.4, 0.8: 0.98, 0.9: 0.8}, 0.7, 0.8),
        ({0.5: 0.9, 0.7: 0.8, 0.8: 0.8, 0.9: 0.8}, None, 0.8),
    ],
)
def test_a_threshold_changes_only_beyond_the_spread(medians, best, choose):
    points = {value: around(median) for value, median in medians.items()}
    found = tuning.best_threshold(points, 0.8, pays_below=True, ratio="r")
    assert (found["best"], found["choose"]) == (best, choose)
    mirrored = {-value: ratio for value, ratio in points.items()}
    found = tuning.best_threshold(mirrored, -0.8, pays_below=False, ratio="r")
    assert (found["best"], found["choose"]) == (best and -best, -choose)


def test_a_candidate_is_chosen_only_beyond_the_spread(monkeypatch):
    for seconds, best, choose in (
        ({"1": [2.0] * 7, "2": [1.0] * 7}, 2, 2),
        ({"1": [1.0] * 7, "2": [2.0] * 7}, 1, 1),
        ({"1": [1.0, 3.0] * 4, "2": [1.5, 1.8] * 4}, 2, 1),
    ):
        monkeypatch.setattr(tuning, "alternate", lambda runs, rounds, seconds=seconds: seconds)
        found = tuning.best_candidate({1: None, 2: None}, 1, 7)
        assert (found["best"], found["choose"]) == (best, choose)


def test_a_batch_is_filled_as_said():
    for share in tuning.FILLS:
        batch = tuning.filled_batch(16, 128, share)
        assert float(batch["attention_mask"].float().mean()) == pytest.approx(share, abs=0.01)


def test_the_script_measures_prints_and_records(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tuning, "ROWS", (16, 0))
    monkeypatch.setattr(tuning, "CALLS", (0,))
    monkeypatch.setattr(tuning, "FILLS", (0.5, 0.9))
    monkeypatch.setattr(tuning, "POSITIONS", (16, 64))
    path = tmp_path / "tuning.json"
    small = ["--hidden", "64", "--layers", "1", "--rounds", "7", "--scale", "0.05"]
    assert tuning.main([*small, "--out", str(path)]) == 0
    record = json.loads(path.read_text())
    assert list(record["constants"]) == list(tuning.CONSTANTS)
    assert record["environment"]["versions"]["torch"]
    for name in ("CALL_COST", "MAX_FILL", "MIN_POSITIONS"):
        found = record["constants"][name]
        assert found["in_code"] == tuning.value_of(name)
        assert all(0 < each["low"] <= each["median"] <= each["high"] for each in found["ratios"].values())
    assert set(record["constants"]["ROWS_PER_BLOCK"]) == {"torch.float32", "torch.bfloat16", "torch.int8"}
    said = capsys.readouterr().out
    assert "MAX_FILL: 0.8 in the code, best " in said
    assert "choose" in said
    with pytest.raises(ValueError, match="--rounds is 6"):
        tuning.main(["--rounds", "6"])
