"""scripts/measure/gpu_goals.py: verdicts on planted figures, and what it measures, as far as a CPU can."""

import json
from collections import Counter
from typing import Any

import pytest
import torch
from conftest import SIZES, make
from simulated import graphed, record

from bertlite import BertConfig
from bertlite.inference.gpu import graphs
from bertlite.parity.command import demo_checkpoint
from bertlite.pruning import macs
from bertlite.tokenizer import BertTokenizer
from scripts.measure import gpu_embed
from scripts.measure import gpu_goals as goals
from scripts.measure.speed.batches import filled, lengths_like, works
from scripts.measure.speed.bench import MODELS, suffix

PEAK = 1e15


def planted(worse: float) -> dict[str, dict[str, Any]]:
    """Return records whose figures are the goals, or worse by a factor."""
    sections: dict[str, Any] = {}
    for model in goals.SHAPES:
        config = BertConfig(**MODELS[model][1])
        for work in works("cuda"):
            least = 2 * len(work.lengths) * macs(config, work.width) / PEAK / 0.55
            bounds = {
                engine: goals.GOALS[key].bound
                for key, shape, names, engine in goals.GRAPHED
                if model == shape and work.name in names
            }
            graphs = 1.0
            if None in bounds:
                counts = Counter(work.lengths).items()
                graphs = 2 * sum(count * macs(config, length) for length, count in counts) / PEAK / bounds[None]
            stock, reduced = (graphs * bounds.get(f"transformers {name}", 1) for name in ("sdpa", "reduce-overhead"))
            times = {"bertlite sdpa": least * worse, "transformers compiled": least, "transformers sdpa": stock}
            times |= {"bertlite packed": stock * filled(work) / 0.9 * worse, "bertlite graphs": graphs * worse}
            times["transformers reduce-overhead"] = reduced
            seconds = {f"{name} bfloat16": {"median": took} for name, took in times.items()}
            sections[f"forward {work.name}{suffix(model, None)}"] = {"seconds": seconds}
        for key, name, engine in goals.TRAINED if model == "bert-base" else goals.TRAINED_LARGE:
            section = sections.setdefault(f"training {name} by autocast{suffix(model, None)}", {"ratios": {}})
            section["ratios"][f"transformers sdpa / bertlite {engine}"] = {"median": goals.GOALS[key].bound / worse}
    rows: dict[str, Any] = {"transformers, every layer": {"peak_bytes": 1000, "median": 1.0}}
    for backend in ("sdpa", "packed"):
        rows[f"bertlite {backend}, every layer"] = {"peak_bytes": 1000 * worse, "median": 1.05 * worse}
        rows[f"bertlite {backend}, every layer, offloaded"] = {"peak_bytes": 990 * worse}
    wrong = int(worse > 1)
    vectors = {gpu_embed.STOCK: (8.0, 6.0), gpu_embed.INSIDE: (4.0 * worse, 0.1), gpu_embed.OURS: (9.0, worse)}
    vectors = {
        f"{name}, {n}": {"median": x} for name, each in vectors.items() for n, x in zip((32, 512), each, strict=True)
    }
    return {
        goals.EMBED: {"seconds": vectors},
        goals.PARITY: {"checkpoints": {"MiniLM": {"claims": [{"failed": 0}, {"failed": wrong}]}}},
        goals.SPEED: {"sections": sections, "missing": {"transformers eager float32": "no memory"}},
        goals.LIMITS: {
            "matmul_flops": PEAK,
            "seconds": {goals.GRAPH: {"median": 0.5 * worse}, goals.LATENCY: {"median": 1.0}},
            "captures": {"seconds": [9.0, 0.02, 0.1 + (worse > 1) / 100], "bytes": 1},
            "waits": {goals.MASK: 1 + wrong, goals.PACKED: wrong},
        },
        **{name: {kind: {"rows": rows} for kind in ("full", "ragged")} for name in goals.MEMORY},
    }


@pytest.mark.parametrize(("worse", "verdict"), [(1.0, "met"), (1.03, "missed")])
def test_every_goal_is_met_at_its_bound_and_missed_beyond(worse, verdict):
    found = goals.judge(planted(worse))
    rows = [row for each in found.values() for row in each]
    assert {row["verdict"] for row in rows} == {verdict}
    assert {row["figure"] for row in rows} == {goal.figure for goal in goals.GOALS.values()}
    assert [len(found[name]) for name in goals.RECORDS] == [1, 37, 6, 6, 4, 3]
    texts = {row["of"]: row["goal"] for row in found[goals.SPEED] if row["figure"] == goals.GOALS["packed"].figure}
    assert texts["512 x 128 SST-2, bert-large"] == "at least 4.93", "0.9 over a fill of 0.183"


def test_records_get_their_verdicts_and_what_was_not_run_is_named(tmp_path, capsys):
    whole = planted(1.0)
    del whole[goals.SPEED]["sections"]["forward 64 x 128 bert-large"]
    for name in (goals.PARITY, goals.SPEED):
        (tmp_path / f"{name}.json").write_text(json.dumps(whole[name]))
    goals.write_verdicts(tmp_path, {"tests": "failed", "parity": "passed", "limits": "not run"}, device="cpu")
    written = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert {*written} == {"checks-cuda.json", "parity-cuda.json", "speed-cuda.json"}
    found, speed = written["checks-cuda.json"], written["speed-cuda.json"]
    assert speed == {**whole[goals.SPEED], "goals": speed["goals"]}
    judged = [{"record": goals.SPEED, **row} for row in speed["goals"]]
    assert judged == [row for row in found["goals"] if row["record"] == goals.SPEED]
    assert found["steps"]["tests"] == "failed"
    assert {"step limits", "transformers eager float32: no memory"} <= {*found["not_run"]}
    for name, missing in (("full", ": 64 x 128, bert-large"), (goals.MASK, ": a mask")):
        assert goals.GOALS[name].figure + missing in found["not_run"]
    assert f"not measured {goals.GOALS['memory'].figure}, full, sdpa: None; at most 1" in capsys.readouterr().out


def test_texts_to_vectors_are_measured_and_an_engine_that_fails_is_named(few_rounds, tmp_path, monkeypatch):
    pytest.importorskip("sentence_transformers")
    folder = demo_checkpoint() or pytest.skip("the MiniLM checkpoint is not installed")
    texts = gpu_embed.made_texts(BertTokenizer.from_pretrained(folder), 60)
    lengths = [len(ids) for ids in BertTokenizer.from_pretrained(folder)(texts)["input_ids"]]
    assert sorted(lengths) == sorted(lengths_like("SST-2", 60, 128))

    def fail(*args: Any, **settings: Any) -> None:
        raise RuntimeError("no graphs")

    monkeypatch.setattr(gpu_embed, "BATCHES", (32,))
    monkeypatch.setattr(gpu_embed, "TOKENS", (512,))
    monkeypatch.setattr(gpu_embed, "optimize_for_inference", fail)
    words = ["--device", "cpu", "--dtype", "float32", "--rounds", "3", "--count", "9"]
    assert gpu_embed.main([str(folder), *words, "--out", str(tmp_path / "x.json")]) == 1
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["seconds"].keys() == {f"{gpu_embed.STOCK}, 32", f"{gpu_embed.OURS}, 512"}
    assert found["cosines"][f"{gpu_embed.OURS}, 512"] > 1 - 1e-6
    assert found["missing"] == {f"{gpu_embed.INSIDE}, 32": "RuntimeError: no graphs"}
    rows = goals.judge({**{name: {} for name in goals.RECORDS}, goals.EMBED: found})[goals.EMBED]
    assert [row["verdict"] for row in rows if row["verdict"] != "missed"] == ["not measured"]


def test_a_cpu_measures_what_it_can(few_rounds):
    pytest.importorskip("transformers")
    found = goals.limits("cpu", {**SIZES, "hidden_size": 64}, width=32, rounds=3)
    assert found["matmul_flops"] == pytest.approx(2 * 32**3 / found["seconds"]["matmul"]["median"])
    assert found["seconds"][goals.LATENCY]["median"] > 0
    assert "waits" not in found
    assert "missing" not in found
    rows = goals.judge({**{name: {} for name in goals.RECORDS}, goals.LIMITS: found})[goals.LIMITS]
    assert [row["verdict"] for row in rows] == ["not measured"] * 4


def test_the_first_batches_of_buckets_are_timed(monkeypatch):
    model = make(max_position_embeddings=128)
    monkeypatch.setattr(graphs, "record_forward", record)
    monkeypatch.setattr(goals, "optimize_for_inference", lambda model, **options: graphed(model))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with torch.no_grad():
        found = goals.captures(model)
    assert [len(found[name]) for name in ("compiling", "seconds")] == [6, 6]
    assert found["bytes"] > 0


def test_a_part_that_fails_is_named_and_the_others_are_measured():
    def fail() -> None:
        raise torch.OutOfMemoryError("none")

    found = goals.run_parts({"waits": lambda: 1, "captures": fail, "graph": lambda: None})
    assert found == {"waits": 1, "graph": None, "missing": {"captures": "OutOfMemoryError: none"}}
