"""scripts/measure/tuning.py: constants are found where they are."""

import json

import pytest

from bertlite.stack import packing
from scripts.measure import tuning


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


def test_a_batch_is_filled_as_said():
    for share in tuning.FILLS:
        batch = tuning.filled_batch(16, 128, share)
        assert float(batch["attention_mask"].float().mean()) == pytest.approx(share, abs=0.01)


def test_the_script_measures_prints_and_records(few_rounds, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tuning, "CALLS", (0,))
    monkeypatch.setattr(tuning, "FILLS", (0.5, 0.9))
    monkeypatch.setattr(tuning, "POSITIONS", (16, 64))
    path = tmp_path / "tuning.json"
    small = ["--hidden", "64", "--layers", "1", "--rounds", "3", "--scale", "0.05"]
    assert tuning.main([*small, "--out", str(path)]) == 0
    record = json.loads(path.read_text())
    assert list(record["constants"]) == list(tuning.CONSTANTS)
    assert record["environment"]["versions"]["torch"]
    for name in ("CALL_COST", "MAX_FILL", "MIN_POSITIONS"):
        found = record["constants"][name]
        assert found["in_code"] == tuning.value_of(name)
        assert all(0 < each["low"] <= each["median"] <= each["high"] for each in found["ratios"].values())
    said = capsys.readouterr().out
    assert "MAX_FILL: 0.8 in the code" in said
    assert "times as fast without padding, by share of tokens" in said
    with pytest.raises(ValueError, match="--rounds is 2"):
        tuning.main(["--rounds", "2"])
