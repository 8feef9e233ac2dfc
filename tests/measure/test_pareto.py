"""scripts/measure/budgets/{encoders,pareto,modernbert}.py: scores of vectors, paired intervals, maps, sizes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make

from bertlite import BertConfig, BertModel
from bertlite.experiments.budget.distil import RecordedTeacher
from bertlite.experiments.data import EncodedExamples
from bertlite.pruning import macs
from bertlite.support.files import write_json
from scripts.measure.budgets.encoders import MEAN, PASSAGES, Judge, Judged, difference, gain
from scripts.measure.budgets.modernbert import KINDS, SIZES, TARGETS, summary
from scripts.measure.budgets.pareto import DTYPES, LastStates, draw

CLASSES = 5


def rows_of(kind: str) -> Any:
    def rows(data: Path, part: str) -> list[tuple[str, str, str]]:
        texts = [f"{kind} {part} {i}" for i in range(60)]
        if kind == "pairs":
            return [(text, f"{text} again", str(i)) for i, text in enumerate(texts)]
        return [(text, "", str(i % CLASSES)) for i, text in enumerate(texts)]

    return rows


@pytest.fixture
def judge() -> Judge:
    kinds = {
        kind: Judged(rows_of(kind), kind, 40, 0 if kind == "pairs" else 60) for kind in ("pairs", "search", "probe")
    }
    return Judge(Path(), kinds)


def perfect(judge: Judge) -> np.ndarray[Any, Any]:
    """Return vectors that rank and separate everything: a class is a direction, a rating the cosine of a pair."""
    vectors = np.zeros((len(judge.texts), CLASSES))
    for text, i in judge.places.items():
        number = int(text.removesuffix(" again").split()[-1])
        if text.startswith("pairs"):
            angle = np.arccos(number / 60) if text.endswith("again") else 0
            vectors[i, :2] = np.cos(angle), np.sin(angle)
        else:
            vectors[i, number % CLASSES] = 1
    return vectors


def test_perfect_vectors_have_every_point_and_others_fewer_in_pairs(judge):
    vectors = np.random.default_rng(0).normal(size=(len(judge.texts), CLASSES))
    best, drawn, longer = map(judge, (perfect(judge), vectors, 3 * vectors))
    assert {name: scores[0] for name, scores in best.items()} == pytest.approx(dict.fromkeys(best, 1))
    assert all(-1 < scores[0] < 0.7 for scores in drawn.values())
    found = difference(drawn[MEAN], best[MEAN])
    assert found["difference_low"] < found["difference"] < found["difference_high"] < 0
    assert np.ptp(drawn[MEAN]) > 0.05
    assert [*difference(longer[MEAN], drawn[MEAN]).values()] == pytest.approx([0, 0, 0], abs=1e-12)


def test_a_search_with_few_relevant_texts_can_be_perfect():
    documents = np.eye(12)
    known = np.array([*"aab", *"c" * 9])
    queries, labels = documents[[0, 2, 3]] + documents[[1, 2, 3]], np.array([*"abd"])
    found = gain(queries, labels, documents, known)
    assert found[:2] == pytest.approx([1, 1])
    assert gain(documents[[2]], np.array(["a"]), documents, known) == pytest.approx(
        [(1 / np.log2([3, 4])).sum() / (1 / np.log2([2, 3])).sum()]
    )


def test_a_map_is_fitted_to_the_states_that_are_recorded():
    model = make(BertModel)
    rows = tuple((tuple(range(5, 9 + i)), (0,) * (4 + i)) for i in range(6))
    data = EncodedExamples(rows, (0.0,) * len(rows))
    batch = data.batch([4, 1], torch.float32)
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    found = LastStates(RecordedTeacher(model, data))(**inputs, return_dict=True).last_hidden_state
    wanted = model(**inputs, return_dict=True).last_hidden_state
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[real], wanted[real].float(), rtol=2**-8, atol=0)  # kept in bfloat16


def test_a_picture_has_a_line_only_through_the_models_that_there_are(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    kept: list[Any] = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    made = [("big", "given", "100%", 9, 80), ("small", "given", "100%", 60, 76), ("small", "mapped", "50%", 120, 75)]
    made += [("small", "mapped", "30%", 180, 73), ("small", "distilled", "30%", 180, 74)]
    rows = [
        {"model": model, "way": way, "target": target, "dtype": dtype}
        | {"texts a second": {"median": speed}, "scores": {MEAN: {"score": score / 100}}}
        for model, way, target, speed, score in made
        for dtype in DTYPES
    ]
    draw(rows, tmp_path / "picture.png")
    (figure,) = kept
    monkeypatch.undo()
    pyplot.close(figure)
    lines = [[*map(float, line.get_xdata())] for line in figure.axes[0].lines if line.get_linestyle() != "None"]
    assert [line for line in lines if len(line) > 1] == [[60, 120, 180]]
    width, height = figure.get_size_inches()
    assert width <= 1.5 * height


def test_passages_are_searched_for_by_questions_to_other_articles_than_models_are_fitted_to(tmp_path):
    def paragraph(article: int, number: int) -> dict[str, Any]:
        name = f"{article}.{number}"
        return {"context": f"First of  {name}. Second of {name}.", "qas": [{"question": f"What of {name}?"}] * 2}

    articles = [{"paragraphs": [paragraph(article, number) for number in range(3)]} for article in range(4)]
    (tmp_path / "xquad").mkdir()
    (tmp_path / "xquad" / "xquad.en.json").write_text(json.dumps({"data": articles}), encoding="utf-8")
    task = replace(PASSAGES["XQuAD"], count=12, others=12)
    fitted = task.to_fit(tmp_path)
    assert sorted(fitted)[0] == "First of 0.0."
    assert {text.rstrip(".").split()[-1][0] for text in fitted} == {"0", "2"}
    assert {question[8] for question, *_ in task.judging(tmp_path)} == {"1", "3"}
    judge = Judge(tmp_path, {"XQuAD": task})
    names = [text.rstrip(".?").split()[-1] for text in judge.texts]
    places = [sorted({*names}).index(name) for name in names]
    assert judge(np.eye(12)[places])["XQuAD"][0] == 1, "each question finds its paragraph"
    assert judge(np.eye(12)[[(place + 1) % 12 for place in places[:6]] + places[6:]])["XQuAD"][0] < 1


# Two kinds of models of one size


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
