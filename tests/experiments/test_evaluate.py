"""`bertlite evaluate`: the metrics of any checkpoint of a task, alone and against another's, or a refusal."""

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from natively import native

pytest.importorskip("accelerate")

import bertlite
from bertlite import BertTokenizer, prune_heads
from bertlite.cli import main
from bertlite.experiments.data import DataSource
from bertlite.experiments.statistics import wilson
from bertlite.shipping.folder import write_model
from bertlite.shipping.original import spearman

NAMES = ("bad", "fair", "good")
COUNT = 41


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch) -> None:
    monkeypatch.setattr("bertlite.experiments.statistics.RESAMPLES", 300)


def texts(seed: int = 0) -> list[str]:
    draw = Random(seed)
    return ["".join(draw.choice("abcdefgh ") for _ in range(draw.randrange(3, 30))) + "x" for _ in range(COUNT)]


def write(name: str, rows: list[dict[str, Any]]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def record_of(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    assert main(["evaluate", *words, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@native
@pytest.mark.parametrize(
    ("cls", "fields", "labels", "text"),
    [
        ("BertForSequenceClassification", {"id2label": dict(enumerate(NAMES))}, NAMES, "a"),
        ("BertForSequenceClassification", {"num_labels": 1}, (0.5, 3.0, 1.5), "a,b"),
        ("BertModel", {}, (0.5, 3.0, 1.5), "a,b"),
    ],
    ids=["classifier", "cross-encoder", "encoder"],
)
def test_a_packed_folder_has_the_metrics_of_its_checkpoint(cls, fields, labels, text, save, capsys, assert_refused):
    save("model", cls, hidden_size=96, num_attention_heads=3, **fields)
    bertlite.pack("model", "packed", texts=texts())
    rows = zip(texts(), texts(1), range(COUNT), strict=True)
    dev = write("dev.jsonl", [{"a": one, "b": other, "label": labels[i % 3]} for one, other, i in rows])
    found = record_of(capsys, "packed", "--dev", dev, "--text", text, "--against", "model", "--max-length", "20")
    ours, theirs = ({**found[name], "checkpoint": 0} for name in ("model", "against"))
    assert ours == pytest.approx(theirs, rel=1e-4)
    for words, message in (
        (["--dtype", "int8"], "packed is a packed folder, for CPUs: leave out dtype, backend and device"),
        (["--task", "tokens"], f", which has the task {found['task']}: evaluate the checkpoint it was made from"),
    ):
        assert_refused(message, "evaluate", "packed", *words, "--dev", dev, "--text", text)


def upside_down(model: Any) -> Any:
    for x in model.classifier.parameters():
        x.data.neg_()
    return model


def test_a_classifier_is_compared_with_another_whose_classes_stand_in_another_order(save, capsys):
    named = {"id2label": dict(enumerate(NAMES)), "label2id": {name: i for i, name in enumerate(NAMES)}}
    model = save("a", "BertForSequenceClassification", return_dict=False, output_hidden_states=True, **named)
    tokenizer = BertTokenizer.from_pretrained("a")
    with torch.no_grad():
        logits = [model(**tokenizer(text, return_tensors="pt"), return_dict=True).logits for text in texts()]
    answers = [*NAMES, *(NAMES[int(x.argmax())] for x in logits[3:])]  # each class is one of the first three
    rows = [{"text": text, "label": name} for text, name in zip(texts(), answers, strict=True)]
    dev = write("dev.jsonl", rows)
    found = record_of(capsys, "a", "--dev", dev)
    right = round(found["model"]["accuracy"] * COUNT)
    assert COUNT - 3 <= right <= COUNT
    assert (found["task"], found["metric"], found["data"]["examples"]) == ("classification", "accuracy", COUNT)
    assert (found["model"]["low"], found["model"]["high"]) == wilson(right, COUNT)
    turned = {"id2label": dict(enumerate(NAMES[::-1])), "label2id": {name: i for i, name in enumerate(NAMES[::-1])}}
    save("b", "BertForSequenceClassification", lambda other: turn(other, model), **turned)
    same = record_of(capsys, "a", "--dev", dev, "--against", "b", "--metric", "macro-f1")
    assert same["comparison"]["difference"] == 0
    assert {**same["against"], "checkpoint": "a"}["loss"] == pytest.approx(same["model"]["loss"])
    save("c", "BertForSequenceClassification", upside_down, **named)
    worse = record_of(capsys, "c", "--dev", dev, "--against", "a", status=1)["comparison"]
    assert worse["difference_low"] <= worse["difference"] <= worse["difference_high"] < 0
    assert worse["p"] < 0.01
    assert record_of(capsys, "a", "--dev", dev, "--against", "c")["comparison"]["difference"] == -worse["difference"]
    assert record_of(capsys, "c", "--dev", dev, "--against", "a", "--metric", "loss", status=1)["metric"] == "loss"


def turn(model: Any, like: Any) -> Any:
    """Give a model the weights of another, its classes the other way round."""
    model.load_state_dict(like.state_dict())
    for x in model.classifier.parameters():
        x.data = x.data.flip(0)
    return model


def labelled(cls: str, fields: dict[str, Any]) -> DataSource:
    """Write texts with random labels for a class, and return their source."""
    draw, rows = Random(1), list[dict[str, Any]]()
    for text, other in zip(texts(), texts(7), strict=True):
        label = draw.randrange(3) if fields.get("num_labels") == 3 else draw.random()
        rows.append({"text": text, "other": other, "label": label})
        if cls == "BertForTokenClassification":
            names = fields.get("id2label", range(3))
            rows[-1] |= {"text": text.split(), "label": [names[draw.randrange(3)] for _ in text.split()]}
    return DataSource(write("dev.jsonl", rows), ("text", "other") if cls == "BertModel" else ("text",))


@pytest.mark.parametrize(
    ("cls", "fields", "task", "metric"),
    [
        ("BertForSequenceClassification", {"num_labels": 1}, "regression", "spearman"),
        ("BertForSequenceClassification", {"num_labels": 3}, "classification", "accuracy"),
        ("BertForTokenClassification", {"num_labels": 3}, "tokens", "f1"),
        ("BertForTokenClassification", {"id2label": dict(enumerate(("O", "B-X", "I-X")))}, "tokens", "f1"),
        ("BertModel", {}, "similarity", "spearman"),
    ],
)
def test_the_task_is_that_of_the_class_pruned_or_not(cls, fields, task, metric, save, capsys):
    write_model("pruned", prune_heads(save("dense", cls, **fields), {0: [1], 2: range(4)}), "dense")
    dev = labelled(cls, fields)
    words = ["pruned", "--dev", dev.path, "--against", "dense", "--text", ",".join(dev.text)]
    status = main(["evaluate", *words, "--out", "found.json"])
    found = json.loads(Path("found.json").read_text())
    assert (found["task"], found["metric"]) == (task, metric)
    difference = found["model"][metric] - found["against"][metric]
    assert found["comparison"]["difference"] == pytest.approx(difference)
    assert status == int((found["comparison"]["difference_high"] or 0) < 0)
    assert f"pruned: {metric} {found['model'][metric]:.4f} [" in capsys.readouterr().out


def test_masked_words_need_no_labels(save, capsys):
    model = save("dense", "BertForMaskedLM")
    tokenizer = BertTokenizer.from_pretrained("dense")
    write_model("pruned", prune_heads(model, {0: [1], 2: range(4)}), "dense")
    Path("dev.txt").write_text("".join(f"{text}\n" for text in texts()))
    found = record_of(capsys, "dense", "--dev", "dev.txt")
    nats, count = 0.0, 0
    for number, text in enumerate(texts()):
        ids = tokenizer(text)["input_ids"]
        places = list(range(1, len(ids) - 1))
        chosen = Random(number).sample(places, max(1, round(0.15 * len(places))))
        masked = torch.tensor([[tokenizer.mask_token_id if i in chosen else token for i, token in enumerate(ids)]])
        with torch.no_grad():
            logits = model(masked, torch.ones_like(masked)).logits[0].double()
        nats -= sum(float(logits[i].log_softmax(-1)[ids[i]]) for i in chosen)
        count += len(chosen)
    assert (found["task"], found["metric"]) == ("masked", "loss")
    assert found["model"]["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert found["model"]["low"] < found["model"]["loss"] < found["model"]["high"]
    beside = record_of(capsys, "dense", "--dev", "dev.txt", "--against", "dense")
    assert beside["comparison"]["difference"] == 0
    pruned = record_of(capsys, "pruned", "--dev", "dev.txt", "--metric", "accuracy")
    assert pruned["model"]["loss"] != found["model"]["loss"]


def test_what_cannot_be_evaluated_is_refused(save, assert_refused):
    dev = write("dev.jsonl", [{"text": text, "label": len(text) % 3} for text in texts()])
    save("three", "BertForSequenceClassification", num_labels=3)
    save("four", "BertForSequenceClassification", num_labels=4)
    save("bare", "BertModel")
    save("many", "BertForSequenceClassification", num_labels=3, problem_type="multi_label_classification")
    save("answers", "BertForQuestionAnswering")
    names = {"id2label": {0: "x", 1: "y", 2: "z"}, "label2id": {"x": 0, "y": 1, "z": 2}}
    save("named", "BertForSequenceClassification", **names)
    save("other", "BertForSequenceClassification", id2label=dict(enumerate(NAMES)))
    for words, message in (
        (["answers"], "answers is a BertForQuestionAnswering, which has no task; have: BertForSequenceClass"),
        (["bare", "--task", "classification"], "bare has no classifier, which would be random: train it first"),
        (["bare"], "name two text columns, not one, or train a classifier on bare with `bertlite prune f"),
        (["bare", "--classes", "a,b"], "similarity compares two texts; name two text columns, not one, or train"),
        (["many"], "gives a text several labels at once, for which there is no metric here"),
        (["three", "--metric", "spearman"], "classification has no metric 'spearman'"),
        (["three", "--classes", "a,b,c,d"], "4 classes are named, and the head has 3 outputs: name each, in order"),
        (["three", "--metric", "f1"], "f1 counts class 1 of two; for 3 classes use macro-f1"),
        (["three", "--against", "four"], "three and four have heads of 3 and 4 outputs: compare models of one task"),
        (["named", "--against", "other"], "named and other have different classes, x, y, z and bad, fair, good"),
        (["nowhere/at/all"], "nowhere/at/all"),
    ):
        assert_refused(message, "evaluate", *words, "--dev", dev)


def test_rank_correlation_is_scipys_to_the_bit():
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(0)
    for count in (2, 37, 1500):
        x = draw.normal(size=(count, 1)).astype(np.float32)
        y = np.round(x[:, 0] + draw.normal(size=count), count % 3)  # with ties
        if np.ptp(y):
            assert spearman(x, y) == float(stats.spearmanr(x[:, 0], y).statistic)
    assert spearman(np.ones(5), np.arange(5)) == spearman(np.arange(5), np.full(5, np.nan)) == 0


@native
@pytest.mark.parametrize(
    ("cls", "fields", "kept"),
    [
        ("BertForSequenceClassification", {"num_labels": 1}, {"rank correlation of scores"}),
        ("BertForSequenceClassification", {"num_labels": 3}, {"texts with the same label"}),
        ("BertForTokenClassification", {"num_labels": 3}, {"words with the same label"}),
        ("BertModel", {}, {"smallest cosine", "mean cosine", "ten nearest neighbours"}),
        ("BertForMaskedLM", {}, set()),
    ],
)
def test_a_dtype_is_evaluated_with_what_it_keeps(cls, fields, kept, save, capsys):
    save("model", cls, **{"hidden_size": 96, "num_attention_heads": 3, **fields})
    dev = labelled(cls, fields)
    plain = bertlite.evaluate("model", dev)
    exact = bertlite.evaluate("model", dev, dtype="float32", backend="native")
    found = bertlite.evaluate("model", dev, dtype="int8", against="model")
    assert "kept" not in plain
    assert (found["optimised"], {*found["kept"]}) == ({"dtype": "int8", "backend": "native"}, kept)
    assert all(value > 0.9999 for value in exact["kept"].values())
    assert {**found["against"]} == {**plain["model"]}, "the other one runs as it is"
    assert exact["model"].pop("checkpoint") == plain["model"]["checkpoint"]
    for name, value in exact["model"].items():
        assert value == pytest.approx(plain["model"][name], abs=1e-3)
    difference = found["model"][plain["metric"]] - plain["model"][plain["metric"]]
    assert found["comparison"]["difference"] == pytest.approx(difference)
    words = ["--dtype", "int8", "--against", "model", "--text", ",".join(dev.text)]
    again = record_of(capsys, "model", "--dev", dev.path, *words)
    assert {**again, "environment": 0} == {**found, "environment": 0}
