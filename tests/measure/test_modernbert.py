"""scripts/measure/budgets/modernbert.py: two kinds of models of one size, and the points that they lose."""

import pytest

from bertlite import BertConfig, BertModel
from bertlite.pruning import macs
from bertlite.support.files import write_json
from scripts.measure.budgets.modernbert import KINDS, SIZES, TARGETS, summary


def test_both_kinds_have_one_size(tmp_path):
    """The window of 32 leaves no key of 16 tokens out."""
    found = {}
    for kind, own in KINDS.items():
        write_json(tmp_path / kind / "config.json", {"model_type": kind, "vocab_size": 97, **SIZES, **own})
        model = BertModel(BertConfig.from_pretrained(tmp_path / kind))
        found[kind] = macs(model.config, 16), model.encoder.layer[0].attention.self.query.weight.shape
        assert model.config.gated == (kind == "modernbert")
    assert len({*found.values()}) == 1


def test_points_are_compared_in_pairs():
    lost = {"bert": (1.0, 3.0), "modernbert": (1.5, 3.5)}
    rows = [
        {"kind": kind, "task": "sst2", "seed": seed, "target": target, "difference": -points / 100}
        for target in TARGETS
        for kind, own in lost.items()
        for seed, points in enumerate(own)
    ]
    for row in summary(rows):
        assert (row["models"], row["bert"], row["modernbert"]) == (2, pytest.approx(2.0), pytest.approx(2.5))
        assert (row["more"], row["more_within"]) == (pytest.approx(0.5), pytest.approx(0, abs=1e-9))
