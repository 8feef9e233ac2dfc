"""`bertlite evaluate --speed`: a checkpoint's own library beside each dtype, on texts of one file."""

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from natively import native

pytest.importorskip("transformers")

import bertlite
from bertlite import BertForSequenceClassification, BertTokenizer, optimize_for_inference, prune_heads
from bertlite.cli import main
from bertlite.commands import measure_speed
from bertlite.experiments import speed
from bertlite.opened.checkpoint import Checkpoint
from bertlite.shipping.folder import write_model
from bertlite.shipping.original import Original, what_is_kept

pytestmark = native


def texts(count: int = 90) -> list[str]:
    draw = Random(3)
    return ["".join(draw.choice("abcdefgh ") for _ in range(draw.randrange(3, 30))) + f" {i}x" for i in range(count)]


@pytest.fixture
def given(save: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that saves a model and a pruned one; timing them takes no time."""
    monkeypatch.setattr(speed, "TIMING", 0.1)
    monkeypatch.setattr(speed, "JUDGING", 0.1)
    monkeypatch.setattr(speed, "ROUNDS", 7)

    def both(cls: str, **fields: Any) -> None:
        if cls == "BertModel" or fields["num_labels"] == 1:
            pytest.importorskip("sentence_transformers")
        dense = save("dense", cls, hidden_size=96, num_attention_heads=3, **fields)
        write_model("model", prune_heads(dense, {0: [1]}), "dense")

    return both


def test_a_packed_folder_is_timed_against_the_checkpoint_that_it_was_made_from(given):
    given("BertForTokenClassification", num_labels=3)
    bertlite.pack("model", "packed", dtype="int8", texts=texts(20))
    rows = measure_speed("packed", texts())["rows"]
    assert [(name, x["backend"]) for name, x in rows.items()] == [("transformers", None), ("packed int8", "runtime")]
    assert rows["packed int8"]["kept"]["texts with the same labels"] > 0.5
    with pytest.raises(ValueError, match="packed is a packed folder, for CPUs: leave out dtype, backend and device"):
        measure_speed("packed", texts(), dtype="float32")
    with pytest.raises(ValueError, match="against names the checkpoint of a packed folder, and model is not packed"):
        measure_speed("model", texts(), against="model")


def test_a_packed_folder_says_nothing_of_its_makers_machine(given, monkeypatch):
    """Not where its checkpoint was; elsewhere the checkpoint is named again."""
    given("BertForTokenClassification", num_labels=3)
    here, made = Path.cwd(), Path("made").absolute()
    bertlite.pack(here / "model", made, texts=texts(20))
    assert [path.name for path in made.iterdir() if str(here).encode() in path.read_bytes()] == []
    monkeypatch.chdir(made)
    with pytest.raises(ValueError, match="made is a packed folder, made from model: give against, or --against"):
        measure_speed(made, texts())
    (found, _) = measure_speed(made, texts(), against=here / "model")["rows"]
    assert found == "transformers"


def test_a_path_is_no_list_of_texts_and_a_device_is_torchs():
    with pytest.raises(TypeError, match="texts is 'a file of texts'; give a list"):
        measure_speed("model", "a file of texts")
    with pytest.raises(ValueError, match="device is 'gpu'; give cpu, cuda or cuda:1"):
        measure_speed("model", texts(), device="gpu")


@pytest.mark.parametrize(
    ("cls", "fields", "kind", "library", "kept"),
    [
        ("BertModel", {}, "encoder", "sentence-transformers", "ten nearest neighbours"),
        ("BertForSequenceClassification", {"num_labels": 1}, "cross-encoder", "sentence-transformers", "rank"),
        ("BertForSequenceClassification", {"num_labels": 3}, "classifier", "transformers", "texts with the same"),
        ("BertForTokenClassification", {"num_labels": 3}, "tagger", "transformers", "texts with the same"),
    ],
)
def test_each_kind_is_timed_in_its_library_and_in_each_dtype(cls, fields, kind, library, kept, given):
    given(cls, **fields)
    found = measure_speed("model", texts())
    assert (found["kind"], found["library"]["name"]) == (kind, library)
    assert found["texts"]["timed"] >= 32
    assert found["texts"]["judged"] >= 50
    assert [*found["rows"]] == [library, "float32", "bfloat16", "int8"]
    for name, row in found["rows"].items():
        assert row["backend"] == (None if name == library else "native")
        for batch in ("batch 1", "batch 32"):
            times, rate = row[batch]["milliseconds"], row[batch]["texts_per_second"]
            assert 0 < times["low"] <= times["median"] <= times["high"]
            assert rate["high"] == pytest.approx(1000 / times["low"], rel=0.2)
            assert row[batch]["speedup"]["median"] == 1 or name != library
    measures = found["rows"]["float32"]["kept"]
    assert any(name.startswith(kept) for name in measures)
    assert min(measures.values()) > 0.99
    assert min(found["rows"]["int8"]["kept"].values()) <= min(measures.values())
    assert found["environment"]["threads"] >= 1


def test_a_classifier_of_pairs_gets_pairs(given):
    given("BertForSequenceClassification", num_labels=3)
    pairs = [*zip(texts(), texts()[::-1], strict=True)]
    original = Original.load(Checkpoint("model"), "classifier", 64)
    found = original.results(pairs, batch_size=7)
    model = BertForSequenceClassification.from_pretrained("model").eval()
    tokenizer = BertTokenizer.from_pretrained("model")
    for row, (one, other) in zip(found, pairs[:9], strict=False):
        with torch.no_grad():
            wanted = model(**tokenizer(one, other, return_tensors="pt")).logits[0].softmax(-1)
        np.testing.assert_allclose(row, wanted, atol=1e-5)
    kept = measure_speed("model", pairs, dtype="float32")["rows"]["float32"]["kept"]
    assert kept == {"texts with the same label": 1}


def test_spans_of_a_tagger_are_compared():
    rows = [[{"entity_group": label, "start": at, "end": at + 2}] for at, label in ((0, "A"), (3, "B"))]
    assert what_is_kept("tagger", rows, rows) == {"texts with the same labels": 1, "spans in both, as F1": 1}
    found = what_is_kept("tagger", rows, [rows[0], [*rows[1], *rows[0]]])
    assert found == {"texts with the same labels": 0.5, "spans in both, as F1": 0.8}
    assert what_is_kept("tagger", [[]], [[]]) == {"texts with the same labels": 1}


def test_vectors_in_half_precision_are_compared_in_float64():
    vectors = np.random.default_rng(0).normal(size=(60, 384)).astype(np.float16)
    kept = what_is_kept("encoder", vectors, vectors.astype(np.float32) * 3)
    assert kept == {name: pytest.approx(1, abs=1e-12) for name in kept}


def test_texts_that_are_judged_are_not_those_that_are_timed():
    calls: list[Any] = []
    original: Any = SimpleNamespace(kind="cross-encoder", results=lambda some, **_: calls.append(some))
    timed, others, one = speed.split_texts(original, texts())
    assert not {*timed} & {*others}
    assert {*timed, *others} == {*zip(texts(), (*texts()[1:], texts()[0]), strict=True)}, "each with the next"
    assert (len(timed), len(others), len(calls)) == (45, 45, 16)
    assert one > 0


def test_a_dtype_that_cannot_run_is_left_out_with_the_reason(given, monkeypatch):
    refused = ["int8"]

    def without(model: Any, *, dtype: str, **options: Any) -> Any:
        if dtype in refused:
            raise RuntimeError(f"there is no compiler for {dtype}")
        return optimize_for_inference(model, dtype=dtype, **options)

    given("BertModel")
    monkeypatch.setattr(speed, "optimize_for_inference", without)
    found = measure_speed("model", texts())
    assert [*found["rows"]] == ["sentence-transformers", "float32", "bfloat16"]
    assert found["left_out"] == {"int8": "there is no compiler for int8"}
    assert "int8 is left out: there is no compiler for int8" in [*speed.describe_speed(found)]
    with pytest.raises(RuntimeError, match="there is no compiler for int8"):
        measure_speed("model", texts(), dtype="int8")
    refused += ["float32", "bfloat16"]
    with pytest.raises(RuntimeError, match="there is no compiler for float32"):
        measure_speed("model", texts())


def test_the_command_prints_a_table_or_the_record(given, capsys, assert_refused):
    given("BertModel")
    Path("texts.txt").write_text("\n".join(texts()))
    words = ["evaluate", "model", "--texts", "texts.txt", "--speed", "--dtype", "int8"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 119
    assert [line.split()[0] for line in lines if line][3:6] == ["one", "sentence-transformers", "int8"]
    assert main([*words, "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)["rows"]] == ["sentence-transformers", "int8"]
    for wrong in (words[:4], [*words, "--dev", "texts.txt"], ["evaluate", "model"]):
        assert_refused("give labelled examples with --dev DATA, or texts to time with", *wrong)
    Path("few.txt").write_text("\n".join(texts(19)))
    assert_refused("there are 19 texts; 20 or more are needed", "evaluate", "model", "--texts", "few.txt", "--speed")
