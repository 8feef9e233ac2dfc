"""scripts/measure/speed: pruned models, training, and what comes before a batch."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bertlite.bench.command import new_record
from bertlite.bench.sections import BASELINE, Bench
from bertlite.bench.work import full
from scripts.measure.speed import sections
from scripts.measure.speed.__main__ import main


def test_pruned_models_stand_beside_the_whole(kept, few_rounds, monkeypatch):
    monkeypatch.setattr(sections, "full", lambda *_: full(2, 19))
    monkeypatch.setattr(sections, "ALL", ("float32",))
    found = sections.pruned(Bench(3, kept))
    assert set(found["ratios"]) == {
        f"bertlite native whole float32 / bertlite native half {of} float32"
        for of in ("the heads", "the neurons", "of both")
    }
    assert found["wrong"] == []
    assert all(0 < error < 1e-5 for error in found["errors"].values())


def test_training_by_autocast_computes_in_bfloat16(kept, few_rounds):
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if "addmm" in str(func):
                seen.add(out.dtype)
            return out

    with Watch():
        found = sections.training(Bench(3, kept, seconds=0.01), autocast=True)
    assert seen == {torch.bfloat16}
    assert "bfloat16 by autocast" in found["what"]
    assert set(found["ratios"]) == {f"transformers sdpa / bertlite {name}" for name in ("sdpa", "packed")}
    assert "training by autocast" in sections.sections("cuda")


def test_the_script_adds_to_a_record_and_draws(kept, few_rounds, tmp_path):
    pytest.importorskip("matplotlib")
    record, picture = (tmp_path / name for name in ("speed.json", "speed.png"))
    words = ["--engines", "bertlite native float32", "--rounds", "3", "--out", f"{record},{kept},{picture}"]
    assert main(["--only", "forward 1 x 16", *words]) == 0
    assert picture.stat().st_size > 1000
    assert main(["--only", "forward 1 x 128", *words]) == 0
    found = json.loads(record.read_text())["sections"]
    assert list(found) == ["forward 1 x 16", "forward 1 x 128"]
    assert set(found["forward 1 x 16"]["seconds"]) == {BASELINE, "bertlite native float32"}


@pytest.mark.slow
def test_starting_is_recorded(few_rounds, tmp_path, capsys):
    path = tmp_path / "startup.json"
    assert main(["--only", "import", "--rounds", "3", "--out", str(path)]) == 0
    section = json.loads(path.read_text())["sections"]["import"]
    assert set(section["seconds"]) == {"python", "torch", "bertlite", "bertlite --help", "transformers"}
    assert section["ratios"]["bertlite / torch"]["median"] > 0
    assert "bertlite / torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "names"),
    [({"cpu": "another"}, "cpu"), ({"git": {"commit": "0" * 40}}, "git"), ({"versions": {}}, "versions")],
)
def test_a_record_of_another_environment_is_not_added_to(change, names, tmp_path):
    path = tmp_path / "speed.json"
    path.write_text(json.dumps({"environment": new_record("cpu")["environment"] | change, "sections": {}}))
    with pytest.raises(ValueError, match=f"was measured in another environment, which differs in {names}: write"):
        main(["--only", "import", "--out", str(path)])
    with pytest.raises(ValueError, match="no section matches 'nonsense'; have: import, loading, cold start"):
        main(["--only", "nonsense"])
