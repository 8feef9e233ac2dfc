"""Models of other families are timed beside transformers' own classes, on padding as they have it."""

from pathlib import Path

import pytest
from conftest import SIZES

from bertlite.bench import sections
from bertlite.bench.sections import BASELINE, Bench, forward
from bertlite.bench.work import Work

pytest.importorskip("transformers")


@pytest.mark.parametrize("model", ["bge-m3", "all-mpnet"])
def test_an_engine_computes_what_the_class_of_the_family_does(
    model: str, tmp_path: Path, few_rounds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, sizes = sections.MODELS[model]
    small = {**SIZES, "model_type": sizes["model_type"], "num_attention_heads": 3, "initializer_range": 0.2}
    monkeypatch.setitem(sections.MODELS, model, (name, small))
    bench = Bench(3, tmp_path, model, only=("bertlite native float32",))
    found = forward(Work("2 x 11", (11, 7), 11), bench)
    assert found["wrong"] == []
    assert set(found["seconds"]) == {BASELINE, "bertlite native float32"}
    assert bench.config.positions_skip_padding
    batch = Work("2 x 11", (11, 7), 11).inputs(97, pad=bench.config.pad_token_id or 0)
    assert ((batch["input_ids"] == 1) == (batch["attention_mask"] == 0)).all()
