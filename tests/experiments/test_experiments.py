"""bertlite/experiments: data, tasks, statistics, cells and measurements, on a tiny model."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import SIZES, SPECIAL, assert_same, make

pytest.importorskip("accelerate")

from scipy.optimize import minimize_scalar
from scipy.stats import norm

import bertlite
import bertlite.commands
import bertlite.inference
import bertlite.pruning
from bertlite.cli import main
from bertlite.experiments import compare, files, finetune, statistics
from bertlite.experiments.budget.distil import RecordedTeacher
from bertlite.experiments.budget.quality import forward
from bertlite.experiments.data import (
    DataSource,
    Examples,
    batch_indices,
    encode_examples,
    read_examples,
    read_tokenizer,
)
from bertlite.experiments.evaluate import TASKS, metrics_of, predict
from bertlite.experiments.experiment import Cell, Experiment, Setting, grid, prune_run, rescored
from bertlite.experiments.files import class_names, model_sha256
from bertlite.experiments.finetune import Recipe, finetune_, training_loss
from bertlite.opened.checkpoint import Checkpoint
from bertlite.pruning import distillation_loss
from bertlite.support.environment import commit_of
from bertlite.support.files import lock_folder
from bertlite.support.runs import Run, read_runs

ROOT = Path(__file__).resolve().parents[2]
WORDS = [*SPECIAL, "good", "fine", "bad", "poor", "film", "plot", "the", "a", "is"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a tiny classifier, its tokenizer, and sentences of which the words tell the label."""
    folder = tmp_path_factory.mktemp("world")
    model = make(bertlite.BertForSequenceClassification).float()
    for name in ("model", "encoder"):
        (model if name == "model" else model.bert).save_pretrained(folder / name)
        bertlite.BertTokenizer(WORDS).save_pretrained(folder / name)
    draw = np.random.default_rng(0)
    for name, count in (("train", 40), ("dev", 23)):
        labels = draw.integers(2, size=count)
        lines = [" ".join([*draw.choice(WORDS[9:], draw.integers(1, 6)), WORDS[5 + 2 * (1 - y)]]) for y in labels]
        rows = [f"{text}\t{y}\n" for text, y in zip(lines, labels, strict=True)]
        (folder / f"{name}.tsv").write_text("text\tlabel\n" + "".join(rows))
        scored = [f'"{text}","{lines[i - 1]}",{i % 5}\n' for i, text in enumerate(lines)]
        (folder / f"{name}-pairs.csv").write_text("".join(scored))
    return folder


@pytest.fixture
def setting(world):
    data = {name: DataSource(str(world / f"{name}.tsv")) for name in ("train", "dev")}
    return Setting(str(world / "model"), "classification", **data, calibration=11, recipe=Recipe(batch_size=8))


@pytest.fixture
def experiment(setting):
    return Experiment(setting)


def data_arguments(world):
    return [str(world / "model"), "--train", str(world / "train.tsv"), "--dev", str(world / "dev.tsv")]


# Data ---------------------------------------------------------------------------------------------------------------


def write_labels(path, labels):
    """Write a file with a text and a label in each row; return its path."""
    rows = [{"text": f"text {i}", "label": label} for i, label in enumerate(labels)]
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        between = '","' if path.suffix == ".csv" else "\t"
        lines = [between.join(map(str, row)) for row in [("text", "label"), *(row.values() for row in rows)]]
        path.write_text("".join(f'"{line}"\n' if path.suffix == ".csv" else f"{line}\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("labels", "options", "wanted"),
    [
        ([1, 0, 2], {}, (1, 0, 2)),  # numbers are what they are
        (["1", "-0.5", " 2e1 "], {}, (1, -0.5, 20)),
        ([1, 2, 1], {"classes": ("1", "2")}, (0, 1, 0)),  # but of classes that are named by numbers the names
        (["1", "2.0", " 1"], {"classes": ("1", "2")}, (0, 1, 0)),
        ([1.0, 2.0, 1.0], {"classes": ("1", "2"), "collect": True}, (0, 1, 0)),
        ([1, 0, 1], {"classes": ("neg", "pos")}, (1, 0, 1)),  # and of other classes the indices
        (["pos", " neg", "pos "], {"classes": ("neg", "pos")}, (1, 0, 1)),
        (["pos", " neg", "pos "], {"collect": True}, (1, 0, 1)),
        ([3.5, 1.0, 2.25], {"classes": ("score",)}, (3.5, 1, 2.25)),  # a head with one output
        (["good", ""], {"collect": True}, "the label is ''; give the row one, or leave it out"),
        (["good", " "], {"collect": True}, "the label is ' '"),
        (["good", "NaN"], {"classes": ("bad", "good")}, "the label is 'NaN'"),
        ([1.0, math.inf], {}, "the label is .*inf"),
        ([1, 5], {"classes": ("neg", "pos")}, "'5' is not one of the classes neg, pos"),
        ([0, -1], {"classes": ("neg", "pos")}, "'-1' is not one of the classes neg, pos"),
        ([0.0, 0.5], {"classes": ("neg", "pos")}, "'0.5' is not one of the classes neg, pos"),
        (["1", "5"], {"classes": ("1", "2")}, "'5' is not one of the classes 1, 2"),
        (["pos", "1"], {"classes": ("neg", "pos")}, "'1' is not one of the classes neg, pos"),
        (["pos", "Neg"], {"classes": ("neg", "pos")}, "'Neg' is not one of the classes neg, pos"),
        (["1", "good"], {}, "the label 'good' is not a number; name the classes with --classes, in their order"),
        (["1", "1_000"], {}, "the label '1_000' is not a number"),
        (["a", "b"], {"classes": ("a", " a")}, "two classes share a name: a,  a"),
        (["pos\u200b", " \ufeffneg", "pos"], {"collect": True}, (1, 0, 1)),
        (["1", "0,5"], {}, "the label '0,5' is not a number; write it with a point, such as 0.5"),
        (
            ["good", "0,5"],
            {"collect": True},
            "the label '0,5' looks like a number: write it with a point, such as 0.5; or name the classes",
        ),
        (["good", "1.000,5"], {"collect": True}, "the label '1.000,5' looks like a number"),
        (["good", "50 %"], {"collect": True}, "the label '50 %' looks like a number"),
        (["good", "3"], {"collect": True}, "the label '3' is a number, and most are words; or name the classes with"),
        (["good", "Good"], {"collect": True}, "the label 'Good' differs from 'good' only in upper and"),
        (["1", "none", "2"], {"collect": True}, "the label 'none' is a word, and most are numbers; or name"),
        (["good", "N/A", "bad"], {"collect": True}, "the label 'N/A' stands for none: leave the row out; or name"),
        (["18-24", "65+", "18-24"], {"collect": True}, (0, 1, 0)),
        (["good", "1e39"], {"collect": True}, "the label is '1e39'; give the row one"),
        ([0.5, 1e300], {}, r"the label is '?1e\+300'?; give the row one"),
    ],
)
def test_one_rule_for_labels(tmp_path, suffix, labels, options, wanted):
    source = DataSource(write_labels(tmp_path / f"x{suffix}", labels))
    if isinstance(wanted, tuple):
        found = read_examples(source, **options)
        assert found.labels == wanted
        assert (
            found.sha256
            == Examples("y", tuple((f"text {i}",) for i in range(len(wanted))), tuple(map(float, wanted))).sha256
        )
        assert all(type(label) is float for label in found.labels)
    else:
        place = "" if wanted.startswith("two") else rf"x\{suffix}, row 2.*, column 'label': "
        with pytest.raises(ValueError, match=place + wanted):
            read_examples(source, **options)


def test_labels_that_are_collected_and_rare_are_warned_of_once(tmp_path):
    labels = [*["good", "bad"] * 150, "god", "fair", "fair"]
    source = DataSource(write_labels(tmp_path / "x.csv", labels))
    with pytest.warns(UserWarning, match=r"few of the 303 examples of x\.csv .* misspelt\? fair \(2\), god \(1\)$"):
        assert read_examples(source, collect=True).classes == ("bad", "fair", "god", "good")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_examples(DataSource(write_labels(tmp_path / "x.csv", labels[:300])), collect=True)
        read_examples(DataSource(write_labels(tmp_path / "x.csv", labels)), classes=("bad", "fair", "god", "good"))


@pytest.mark.parametrize(
    ("name", "text", "options", "said"),
    [
        ("empty.tsv", "text\tlabel\n", {}, "empty.tsv has no examples: it is empty, or has only a header"),
        ("x.csv", "text,label\na,pos\nb,neg\ntext,label\nc,pos\n", {}, r"row 3 \(line 4\): the row repeats the names"),
        ("x.csv", "text,label\na,pos\n\ufefflabel,Text\nneg,b\n", {}, "row 2 .* as if files were joined: remove it"),
        (
            "x.tsv",
            "text\tlabel\na\tpos\nb\tneg\nsentence\tlabel\n",
            {},
            "row 3.* the label 'label' is the name of the",
        ),
        ("x.csv", "text\na\ntext\nb\n", {"label": None}, "row 2 .*: the row repeats the names of the columns, text,"),
        ("x.csv", "text\na\n \n", {"label": None}, "row 2 .*: column 'text' is empty; leave the row out"),
        ("x.csv", "text,label\na,b\n", {"text": ("text", "text")}, "column 'text' is named twice, as text and text"),
        ("x.csv", "text,label\na,b\n", {"text": ("label",)}, "column 'label' is named twice"),
        ("x.txt", "\n \n", {"label": None}, "x.txt has no examples"),
        ("empty.csv", "", {}, "empty.csv has no examples"),
        ("x.txt", "fine", {}, "row 1: plain text has a text on each line, and no columns text and label: give csv"),
        ("x.csv", "fine,1\nbad,0\n", {}, "no text and no label; its columns are fine, 1; name others with --text"),
        ("x.csv", "a,b,c,label\n1,2,3,0\n", {"text": ("a", "b", "c")}, "one column or two; 3 were named: a, b, c"),
        ("x.jsonl", "", {"columns": ("a", "b")}, "names its columns itself; --columns is for .csv and .tsv"),
        ("x.jsonl", '{"text": "a", "label": null}', {}, r"row 1 \(line 1\): column 'label' holds no value"),
        ("x.jsonl", '{"text": "a", "label": true}', {}, r"row 1 \(line 1\): .* holds True, of type bool"),
        ("x.jsonl", '{"text": "a", "label": ["a"]}', {}, "it must be a number or a text"),
    ],
)
def test_bad_data_is_refused_by_name(tmp_path, name, text, options, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        read_examples(DataSource(str(tmp_path / name), **options), collect=True)


def test_names_of_labels_are_collected_once_and_then_known(tmp_path):
    source = DataSource(write_labels(tmp_path / "x.csv", ["poor", "good", "fair"]))
    train = read_examples(source, collect=True)
    assert (train.classes, train.labels) == (("fair", "good", "poor"), (2, 1, 0))
    assert read_examples(source, classes=("good", "fair", "poor")).labels == (2, 0, 1), "in the order of the model"
    assert read_examples(source, classes=("good", "fair", "poor"), collect=True).labels == (2, 0, 1)
    assert read_examples(source, classes=("good", "fair"), collect=True) == train
    numbers = DataSource(write_labels(tmp_path / "x.tsv", [1, 0]))
    assert read_examples(numbers, classes=("neg", "pos"), collect=True).classes == ()


def test_words_have_labels_each(world, tmp_path):
    lines = [{"text": ["good", "films", "end"], "label": ["B", "O", "O"]}, {"text": "a b", "label": "O B"}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = DataSource(str(tmp_path / "x.jsonl"))
    found = read_examples(source, words=True, collect=True)
    assert (found.classes, found.labels) == (("O", "B"), ((1, 0, 0), (0, 1)))
    tokenizer = read_tokenizer(Checkpoint(world / "model"), 9)
    data = encode_examples(found, tokenizer, words=True)
    assert data.labels == ((-100, 1, 0, 0, -100), (-100, 0, 1, -100))
    assert data.batch([0, 1], torch.long)["labels"].tolist() == [[-100, 1, 0, 0, -100], [-100, 0, 1, -100, -100]]
    assert data.targets().tolist() == [[1, 0, 0], [0, 1, -100]]
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a b c", "label": "O O"}) + "\n")
    with pytest.raises(
        ValueError, match=r"row 1 \(line 1\): 3 words in text and 2 labels in label; each word has one label"
    ):
        read_examples(source, words=True)
    with pytest.raises(ValueError, match="words have one column; 2 were named"):
        read_examples(DataSource("x.jsonl", text=("a", "b")), words=True)


def test_missing_data_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*x\.tsv"):
        read_examples(DataSource(str(tmp_path / "x.tsv")))
    with pytest.raises(ValueError, match="for a hub data set name a split"):
        read_examples(DataSource("someone/something"))
    (tmp_path / "x.ods").write_text("PK")
    with pytest.raises(ValueError, match=r"x\.ods is none of \.txt, \.text, \.csv, \.tsv, \.jsonl"):
        read_examples(DataSource(str(tmp_path / "x.ods")))
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json or vocab\.txt"):
        read_tokenizer(Checkpoint(tmp_path), 9)
    with pytest.raises(ValueError, match="50 examples of x were requested; request 1 to 2"):
        Examples("x", (("a",), ("b",)), (0, 1)).sample(50)


def test_a_data_set_of_the_hub_is_read_by_its_split(monkeypatch):
    """By `datasets`, which a stand-in plays: nothing is fetched."""
    asked = []

    class Rows(list):
        features = {"label": SimpleNamespace(names=["bad", "good"])}  # noqa: RUF012

    def load_dataset(name, configuration, split):
        asked.append((name, configuration, split))
        return Rows([{"text": "good film", "label": 1}, {"text": "a plot", "label": 0}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    examples = read_examples(DataSource("someone/something:small", split="train"))
    assert asked == [("someone/something", "small", "train")]
    assert (examples.texts, examples.classes) == ((("good film",), ("a plot",)), ("bad", "good"))
    assert examples.labels == (1, 0)
    models = read_examples(DataSource("someone/something", split="train"), classes=("good", "fair", "bad"))
    assert (models.classes, models.labels) == (("good", "fair", "bad"), (0, 2)), "the model's, in its own order"
    read_examples(DataSource("someone/something", split="test"))
    assert asked[2] == ("someone/something", None, "test")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"set needs datasets, which .*\[experiments\]'"):
        read_examples(DataSource("someone/something", split="train"))


def test_a_sample_is_drawn_by_its_seed():
    examples = Examples("x", tuple((str(i),) for i in range(30)), tuple(range(30)))
    one = examples.sample(7, seed=3)
    assert len(one) == 7
    assert one == examples.sample(7, seed=3) != examples.sample(7, seed=4)
    assert all(text == (str(int(label)),) for text, label in zip(one.texts, one.labels, strict=True))


def test_batches_hold_every_example_once_and_pad_little(world):
    tokenizer = read_tokenizer(Checkpoint(world / "model"), 9)
    data = encode_examples(read_examples(DataSource(str(world / "train.tsv"))), tokenizer)
    for seed in (None, 0):
        batches = batch_indices(data, 8, seed)
        assert sorted(i for batch in batches for i in batch) == list(range(40))
    assert batch_indices(data, 8, 0) == batch_indices(data, 8, 0) != batch_indices(data, 8, 1)
    batch = data.batch(batch_indices(data, 8)[0], torch.long)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (8, int(batch["attention_mask"].sum(1).max()))
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 0).all()


def test_no_segments_are_made_where_the_tokenizer_makes_none(world, tmp_path):
    folder = shutil.copytree(world / "model", tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"model_input_names": ["input_ids", "attention_mask"], "truncation_side": "left"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    pairs = Examples("x", (("good film", "bad"), ("a", "the plot is")), (1.0, 2.0))
    tokenizer = read_tokenizer(Checkpoint(folder), 6)
    batch = encode_examples(pairs, tokenizer).batch([0, 1], torch.float32)
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].tolist() == tokenizer([*pairs.texts], truncation=True, padding=True)["input_ids"]
    assert batch["input_ids"][1].tolist() == [2, WORDS.index("a"), 3, *map(WORDS.index, ("plot", "is")), 3]


def test_pairs_make_one_row_with_two_segments_or_two_rows(world):
    tokenizer = read_tokenizer(Checkpoint(world / "model"), 9)
    pairs = Examples("x", (("good film", "bad"), ("a", "the plot is")), (1.0, 2.0))
    together, apart = encode_examples(pairs, tokenizer), encode_examples(pairs, tokenizer, apart=True)
    assert together.batch([0], torch.float32)["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1]]
    words = [["a"], ["the", "plot", "is"], ["good", "film"], ["bad"]]
    ids = [[2, *map(WORDS.index, text), 3, *[0] * (3 - len(text))] for text in words]
    assert apart.batch([1, 0], torch.float32)["input_ids"].tolist() == ids
    assert apart.batch([1, 0], torch.float32)["labels"].tolist() == [2.0, 1.0]


# Statistics ---------------------------------------------------------------------------------------------------------


def test_wilson_is_the_published_interval_and_the_bootstrap_agrees():
    low, high = statistics.wilson(81, 263)  # Newcombe 1998, table I, method 3
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    labels = (np.arange(872) % 8 > 0).astype(float)
    outputs = np.stack([np.zeros(872), np.ones(872)], 1)
    figure = TASKS["classification"].metrics["accuracy"]
    boot = statistics.crossed_estimate(lambda i: [np.array([figure(outputs[i], labels[i])])], 872).interval()
    assert boot == pytest.approx(statistics.wilson(int(labels.sum()), 872), abs=0.006)


def test_paired_tests_see_what_unpaired_intervals_hide():
    draw = np.random.default_rng(0)
    labels = draw.integers(2, size=400)
    a = np.eye(2)[np.where(draw.random(400) < 0.15, 1 - labels, labels)]
    b = a.copy()
    b[:12] = 1 - np.eye(2)[labels[:12]]  # wrong on twelve more
    for name in ("accuracy", "mcc"):
        task, metric = TASKS["classification"], TASKS["classification"].metrics[name]
        found = compare.comparison({"": [a]}, {"": [b]}, labels, task, name)
        assert found["difference"] == pytest.approx(metric(a, labels) - metric(b, labels))
        assert 0 < found["difference_low"] < found["difference"] < found["difference_high"]
        assert found["p"] < 0.01
        same = compare.comparison({"": [a]}, {"": [a]}, labels, task, name)
        assert same == {"difference": 0, "p": 1, "difference_low": None, "difference_high": None}
    right_a, right_b = a.argmax(1) == labels, b.argmax(1) == labels
    exact = compare.comparison({"": [a]}, {"": [b]}, labels, TASKS["classification"], "accuracy")["p"]
    assert exact == statistics.mcnemar(right_a, right_b), "of two runs alone"
    assert statistics.mcnemar(right_a, right_b) == pytest.approx(2 * 0.5 ** int((right_a & ~right_b).sum()))
    assert statistics.mcnemar(right_a, right_a) == 1


def score_of_paired_proportions(gained, lost, total, margin):
    """Return Tango's z under a true difference of -margin, by a search for the likelihood's maximum."""

    def surprise(share):  # of examples that only the second gets right: share + margin, only the first: share
        terms = (gained, share), (lost, share + margin), (total - gained - lost, 1 - 2 * share - margin)
        return -sum(count * math.log(max(p, 1e-300)) for count, p in terms)

    share = minimize_scalar(surprise, bounds=(0, (1 - margin) / 2), method="bounded", options={"xatol": 1e-13}).x
    return (gained - lost + total * margin) / math.sqrt(total * (2 * share + margin * (1 - margin)))


@pytest.mark.parametrize(
    ("gained", "lost", "total", "margin"),
    [(7, 5, 872, 0.01), (0, 4, 872, 0.01), (3, 12, 400, 0.05), (20, 20, 400, 0.03), (5, 90, 400, 0.1)],
)
def test_equivalence_is_the_score_test_of_paired_proportions(gained, lost, total, margin):
    ends = ((gained, lost), (lost, gained))
    worst = min(score_of_paired_proportions(*each, total, margin) for each in ends)
    found = statistics.equivalence(gained, lost, total, margin)
    assert found == pytest.approx(norm.sf(worst), rel=1e-4)
    assert found == statistics.equivalence(lost, gained, total, margin)
    assert statistics.equivalence(0, 0, total, margin) == pytest.approx(
        norm.sf((total * margin / (1 - margin)) ** 0.5)
    )


def test_what_costs_the_margin_is_seldom_called_equivalent_and_what_costs_nothing_often():
    draw, total, margin = np.random.default_rng(0), 872, 0.05

    def passing(difference):
        shares = 0.03 + max(0, difference), 0.03 + max(0, -difference)
        counts = draw.multinomial(total, [*shares, 1 - sum(shares)], size=2000)
        return np.mean([statistics.equivalence(int(a), int(b), total, margin) <= 0.05 for a, b, _ in counts])

    # of 2,000 draws 5 % pass, give or take 1 %
    assert 0.03 < passing(-margin) < 0.065
    assert 0.03 < passing(margin) < 0.065
    assert passing(0.0) > 0.95
    with pytest.raises(ValueError, match="margin is 1; give a difference of accuracies between 0 and 1"):
        statistics.equivalence(1, 2, total, 1)


def simulated(draw, models, examples, spread):
    """Accuracies that vary by model and by example; return (models, examples) bool and the true mean."""
    skill, ease = draw.normal(1.2, spread, (models, 1)), draw.normal(0, 1, (1, examples))
    return draw.normal(size=(models, examples)) < skill + ease


def test_a_crossed_estimate_adds_the_variances_of_models_and_of_examples():
    draw = np.random.default_rng(1)
    right = simulated(draw, 4, 500, 0.5)
    of_models, of_examples = right.mean(1), right.mean(0)
    found = statistics.crossed_estimate(lambda chosen: [right[:, chosen].mean(1)], 500)
    variances = of_models.var(ddof=1) / 4, of_examples.var(ddof=1) / 500
    assert found.value == pytest.approx(right.mean())
    assert sum(part for part, _ in found.parts) == pytest.approx(sum(variances), rel=0.06)  # the bootstrap's own noise
    assert [freedom for _, freedom in found.parts] == [3, 499]
    reach = found.value - found.interval()[0]
    assert reach == pytest.approx(
        sum((x * y**0.5) ** 2 for x, y in zip((3.182, 1.965), variances, strict=True)) ** 0.5, rel=0.03
    )
    shifted = statistics.Estimate(reach, found.parts)  # whose interval ends at 0
    assert shifted.p == pytest.approx(0.05)
    fewer = statistics.crossed_estimate(lambda chosen: [right[:2, chosen].mean(1), right[2:, chosen].mean(1)], 500)
    assert fewer.value == pytest.approx(of_models[:2].mean() - of_models[2:].mean())


def test_where_nothing_varies_there_is_no_interval():
    found = statistics.crossed_estimate(lambda chosen: [np.full(3, 0.5)], 40)
    assert found.interval() == (None, None)
    assert found.p == 0
    assert statistics.crossed_estimate(lambda chosen: [np.zeros(3)], 40).p == 1


# Tasks --------------------------------------------------------------------------------------------------------------


def test_metrics_are_what_they_say():
    task, labels = TASKS["classification"], np.array([1, 1, 0, 0, 1])
    outputs = np.log(np.array([[0.2, 0.8], [0.6, 0.4], [0.9, 0.1], [0.3, 0.7], [0.1, 0.9]]))
    found = metrics_of(outputs, labels, task, dense=outputs)
    assert found["loss"] == pytest.approx(-np.mean(np.log([0.8, 0.4, 0.9, 0.3, 0.9])))
    assert found["kl"] == pytest.approx(0, abs=1e-12)
    one, two = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    assert task.divergence(one, two) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    rising = np.arange(5.0)[:, None]
    assert TASKS["regression"].metrics["spearman"](rising, np.exp(rising[:, 0])) == pytest.approx(1)
    assert TASKS["regression"].metrics["loss"](rising, np.array([1.0, 1, 2, 3, 6])) == pytest.approx((1 + 4) / 5)
    assert TASKS["similarity"].metrics["spearman"](0 * rising, rising[:, 0]) == 0


@pytest.mark.parametrize("classes", [2, 5])
def test_metrics_are_scikit_learns(classes):
    pytest.importorskip("sklearn")
    from sklearn.metrics import f1_score, matthews_corrcoef

    draw = np.random.default_rng(0)
    labels = draw.choice(classes, 60, p=[0.6, *[0.4 / (classes - 1)] * (classes - 1)])
    outputs = draw.normal(size=(60, classes)) + np.eye(classes)[labels]
    predicted, metrics = outputs.argmax(1), TASKS["classification"].metrics
    assert metrics["mcc"](outputs, labels) == pytest.approx(matthews_corrcoef(labels, predicted), abs=1e-12)
    assert metrics["macro-f1"](outputs, labels) == pytest.approx(
        f1_score(labels, predicted, average="macro"), abs=1e-12
    )
    found = metrics_of(outputs, labels, TASKS["classification"])
    if classes == 2:
        assert found["f1"] == pytest.approx(f1_score(labels, predicted), abs=1e-12)
    else:  # what scikit-learn calls macro is never called f1
        assert "f1" not in found
        with pytest.raises(ValueError, match="f1 counts class 1 of two; for 5 classes use macro-f1"):
            TASKS["classification"].metric("f1", 5)
    constant = np.zeros_like(outputs)
    assert (metrics["mcc"](constant, labels), metrics["f1"](constant[:, :2], labels % 2)) == (0, 0)
    words, truth = outputs.reshape(6, 10, classes), labels.reshape(6, 10).copy()
    truth[:, 7:], words[:, 7:] = -100, np.nan
    counted = truth != -100
    named = list(range(1, classes))
    wanted = f1_score(truth[counted], words[counted].argmax(1), labels=named, average="micro")
    assert TASKS["tokens"].metrics["f1"](words, truth) == pytest.approx(wanted, abs=1e-12)
    assert TASKS["tokens"].metrics["accuracy"](words, truth) == pytest.approx(
        np.mean(truth[counted] == words[counted].argmax(1))
    )


def test_outputs_come_in_the_order_of_the_examples(experiment):
    outputs = predict(experiment.dense, experiment.dev_data, experiment.task, batch_size=4)
    for i in (0, 7, 22):
        batch = experiment.dev_data.batch([i], torch.long)
        del batch["labels"]
        with torch.no_grad():
            alone = experiment.dense(**batch).logits[0].numpy()
        np.testing.assert_allclose(outputs[i], alone, atol=1e-5)


def test_similarity_is_that_of_the_checkpoints_own_library(world, tmp_path):
    """With its prompt, which is not pooled, its length, its modules and its similarity; a ColBERT is refused."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

    pairs = [("good film", "bad plot the"), ("a", "is the film"), ("the end is bad", "good")]
    columns = {"columns": ("a", "b", "score"), "text": ("a", "b"), "label": "score"}
    train, dev = (DataSource(str(world / f"{name}-pairs.csv"), **columns) for name in ("train", "dev"))
    torch.manual_seed(0)
    tails = {
        pooling: [Pooling(48, pooling, include_prompt=pooling != "mean")]
        for pooling in ("mean", "cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")
    }
    tails["cls+max, Dense"] = [Pooling(48, ("cls", "max")), Dense(96, 12), Normalize()]
    found = {}
    for name, tail in tails.items():
        encoder = SentenceTransformer(
            modules=[Transformer(str(world / "encoder")), *tail],
            device="cpu",
            prompts={"q": "is film ", "": ""},
            default_prompt_name="q",
            similarity_fn_name="dot" if name == "max" else None,
        )
        encoder.max_seq_length = 7
        folder = tmp_path / name
        encoder.save_pretrained(str(folder))
        experiment = Experiment(Setting(str(folder), "similarity", train, dev, calibration=11))
        assert (experiment.task.head.name, experiment.setting.max_length) == (name, 7)
        data = experiment.task.encode(Examples("x", tuple(pairs), (1.0, 2.0, 3.0)), experiment.tokenizer)
        outputs = predict(experiment.dense, data, experiment.task)
        vectors = [encoder.encode(list(side), convert_to_tensor=True) for side in zip(*pairs, strict=True)]
        wanted = encoder.similarity_pairwise(*vectors)
        _, whole = forward(experiment.dense, data.batch([0, 1, 2], torch.float32), experiment.task.head)
        np.testing.assert_allclose(whole[::2], vectors[0], atol=1e-5)
        np.testing.assert_allclose(outputs[:, 0], wanted, rtol=1e-5, atol=1e-5)
        found[name] = outputs.tolist(), experiment.folder(Cell("random"), "")
    assert (
        len({str(outputs) for outputs, _ in found.values()}) == len({key for _, key in found.values()}) == len(tails)
    )
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([modules[0], *modules[2:]]))
    with pytest.raises(
        ValueError, match=r"makes no vector of a whole text, since it has no Pooling \(is it a ColBERT"
    ):
        TASKS["similarity"].of_checkpoint(Checkpoint(folder))
    (folder / "modules.json").write_text(
        json.dumps([*modules[:2], {"type": "sentence_transformers.CNN", "path": "2"}])
    )
    with pytest.raises(
        ValueError, match=r"has sentence_transformers.CNN; vectors are made by an encoder, its Pooling, then Dense"
    ):
        TASKS["similarity"].of_checkpoint(Checkpoint(folder))


@pytest.mark.parametrize(
    ("task", "labels", "said"),
    [
        ("classification", (0.0, 2.0, 3.0), "x, row 2: the label is 2; the head has 0 to 1"),
        ("classification", (0.5, 0.0, 1.0), "x, row 1: the label is 0.5"),
        ("classification", (0.0, -100.0, 1.0), "x, row 2: the label is -100"),
        ("tokens", ((1.0,), (-100.0, 1.0), (0.0, 2.0)), "x, row 3: the label is 2"),
        ("regression", (0.5, 0.0, 1.0), "the head has 2 outputs; regression has 1"),
        ("similarity", (0.5, 0.0, 1.0), "similarity compares two texts; name two text columns, not one"),
        ("one output", (0.0, 0.0, 0.0), "the head has 1 output, which is a regression; classification needs 2"),
        ("classification", (1.0, 1.0, 1.0), "x, row 1: this and all 3 examples of x have the label '1', from which"),
        ("tokens", ((-100.0,), (-100.0,), (-100.0,)), "x, row 1: this and all 3 examples of x have no label"),
        ("tokens", ((0.0,), (-100.0, 0.0), (0.0,)), "x, row 1: this and all 3 examples of x have the label '0'"),
    ],
)
def test_labels_that_do_not_fit_the_head_are_refused(task, labels, said):
    config = bertlite.BertConfig(**SIZES, num_labels=1 if task == "one output" else 2)
    task = "classification" if task == "one output" else task
    with pytest.raises(ValueError, match=said):
        TASKS[task].check(Examples("x", (("a",),) * 3, labels, (), ("x, row 1", "x, row 2", "x, row 3")), config)


@pytest.mark.parametrize("command", ["finetune", "run", "to"])
def test_what_the_examples_to_learn_from_lack_is_not_judged(world, tmp_path, capsys, command):
    """Before any training or search: labels of --dev that --train has not, and one label alone in either."""
    rows = [line.split("\t") for line in (world / "train.tsv").read_text().splitlines()[1:]]
    parts = {"dev": rows, "none": [row for row in rows if row[1] == "0"]}
    for name, chosen in parts.items():
        (tmp_path / f"{name}.tsv").write_text("\n".join(["text\tlabel", *map("\t".join, chosen)]))
    (tmp_path / "new.tsv").write_text("text\tlabel\na b\t0\nb c\t2\n")
    wide = make(bertlite.BertForSequenceClassification, num_labels=3).float()
    wide.save_pretrained(tmp_path / "model")
    bertlite.BertTokenizer(WORDS).save_pretrained(tmp_path / "model")
    action = ["to", "50%"] if command == "to" else [command]
    train = ["--texts" if command == "to" else "--train", str(tmp_path / "dev.tsv")]
    zero = "LABEL_0" if command == "to" else "0"
    own = {
        "to": ["--label", "label", "--at", "1x8"],
        "run": ["--calibration", "5"],
        "finetune": ["--classes", "0,1,2"],
    }
    given = ["prune", *action, str(tmp_path / "model"), *own[command], "--out", str(tmp_path / "out")]
    for words, said in (
        (
            [*train, "--dev", str(tmp_path / "new.tsv")],
            "row 2 (line 3), column 'label': no example of dev.tsv has the",
        ),
        ([*train, "--dev", str(tmp_path / "none.tsv")], f"examples of none.tsv have the label '{zero}', from which"),
        ([train[0], str(tmp_path / "none.tsv"), "--dev", train[1]], f"examples of none.tsv have the label '{zero}'"),
    ):
        assert main([*given, *words]) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


# Fine-tuning --------------------------------------------------------------------------------------------------------


def test_finetuning_learns_and_leaves_the_mode(experiment):
    data, log = experiment.sample(None, 0), []
    recipe = Recipe(epochs=12, lr=3e-3, batch_size=8)
    finetune_(experiment.dense, data, experiment.task, recipe, log=lambda **line: log.append(line))
    outputs = predict(experiment.dense, data, experiment.task)
    assert metrics_of(outputs, np.array(data.labels), experiment.task)["accuracy"] > 0.9
    assert not experiment.dense.training
    assert all(p.grad is None for p in experiment.dense.parameters())
    assert log[-1]["step"] == 60
    assert max(line["lr"] for line in log) <= 3e-3


@pytest.mark.parametrize("distil", ["no", "a model", "outputs that are known"])
def test_steps_that_a_gpu_records_are_those_of_the_loop(distil, setting, monkeypatch):
    """Plainly run on the CPU, and recorded with padded inputs: the same weights, with a schedule and clipping."""
    experiment, found = Experiment(setting), []
    data = experiment.sample(None, 0)
    recipe = Recipe(epochs=3, lr=3e-3, batch_size=8, distil=0.0 if distil == "no" else 0.5, hidden=1.0)
    teacher = {"no": None, "a model": experiment.dense}.get(distil)
    teacher = RecordedTeacher(experiment.dense, data) if distil == "outputs that are known" else teacher

    def capture(run):
        out = torch.zeros(())

        def replay():
            students[-1].zero_grad()
            out.copy_(run())

        return replay, out, 0

    students = []
    for captures in (None, capture):
        for records in (False, True):
            monkeypatch.setattr(finetune, "records_steps", lambda accelerator, records=records: records)
            monkeypatch.setattr(finetune, "TrainingStep", partial(bertlite.inference.TrainingStep, capture=captures))
            students.append(bertlite.prune_heads(experiment.dense, {0: [0, 1], 2: [3]}).double())
            for part in students[-1].modules() if captures else ():
                if isinstance(part, torch.nn.Dropout):
                    part.p = 0.0
            finetune_(students[-1], data, experiment.task, recipe, teacher=teacher)
            found.append(dict(students[-1].named_parameters()))
    assert_same(found[1], found[0], atol=0)
    assert_same(found[3], found[2], atol=1e-4)


def test_the_loss_of_training_is_of_labels_of_the_teachers_logits_and_of_its_hidden_states(setting):
    experiment = Experiment(setting)
    student, teacher = bertlite.prune_heads(experiment.dense, {0: [0, 1], 2: [3]}).eval(), experiment.dense
    batch = experiment.dev_data.batch(range(5), torch.long)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    mine, theirs = (model(**inputs, output_hidden_states=True, return_dict=True) for model in (student, teacher))
    near = distillation_loss(mine, theirs, batch["attention_mask"], hidden_weight=3.0)
    assert near > distillation_loss(mine, theirs, batch["attention_mask"])
    labels = torch.nn.functional.cross_entropy(mine.logits, batch["labels"])
    for share in (0.25, 1.0):
        recipe = Recipe(distil=share, hidden=3.0)
        wanted = (1 - share) * labels + share * near
        assert_same(training_loss(student, batch, recipe, teacher), wanted)
    assert_same(training_loss(student, inputs, Recipe(distil=1.0, hidden=3.0), teacher), near)  # needs no labels
    with pytest.raises(ValueError, match=r"distil is 1\.0; that needs a teacher"):
        finetune_(student, experiment.dev_data, experiment.task, Recipe(distil=1.0))


def test_a_killed_finetune_is_gone_on_with_bit_for_bit(world, tmp_path, monkeypatch, capsys):
    """With dropout, AdamW's moments, the schedule and empty tensors, killed before its first state and later."""
    given = tmp_path / "given"
    shutil.copytree(world / "model", given)
    bertlite.prune_heads(dense_of(world), {0: range(4), 1: range(4)}).save_pretrained(given)
    command = [
        "prune",
        "finetune",
        str(given),
        *data_arguments(world)[1:],
        "--epochs",
        "3",
        "--batch-size",
        "8",
        "--out",
    ]
    log = Run.log

    def kill(dies_at, name):
        def dies(run, **line):
            if line["step"] == dies_at:
                raise KeyboardInterrupt
            log(run, **line)

        with monkeypatch.context() as patch:
            patch.setattr(Run, "log", dies)
            assert main([*command, str(tmp_path / name)]) == 130

    kill(1, "early")
    assert not list((tmp_path / "early" / "training").glob("*"))
    kill(7, "late")
    assert [path.name for path in (tmp_path / "late" / "training").iterdir()] == ["6"]
    assert read_runs(tmp_path) == []
    assert main([*command, str(tmp_path / "late"), "--seed", "1"]) == 2
    assert "training is the state of a training with other data, settings" in capsys.readouterr().err
    for name in ("early", "late", "whole"):
        assert main([*command, str(tmp_path / name)]) == 0
    *killed, whole = read_runs(tmp_path)
    for run in killed:
        assert run.results == whole.results, "and so the hash of the weights"
        assert run.metrics == whole.metrics
        assert run.predictions == whole.predictions
        assert not (run.folder / "training").exists()


@pytest.mark.slow
def test_two_processes_under_torchrun_train_one_model(world, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "bertlite", "prune", "finetune", *data_arguments(world), "--epochs", "1"]
    done = subprocess.run(
        [*command, "--batch-size", "5", "--out", str(tmp_path / "run")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (run,) = read_runs(tmp_path)
    assert run.metrics[-1]["step"] == 4  # eight batches, two at a time
    assert (run.folder / "model" / "config.json").exists()


def test_an_edited_file_begins_the_training_and_the_cell_anew(world, setting, tmp_path, monkeypatch, capsys):
    """A config that leaves the weights as they are, and a tokenizer that leaves the texts as they are."""
    folder = shutil.copytree(world / "model", tmp_path / "model")
    command = ["prune", "finetune", str(folder), *data_arguments(world)[1:], "--epochs", "1", "--batch-size", "8"]
    with monkeypatch.context() as patch:
        patch.setattr(
            Run, "log", lambda run, **line: (_ for _ in ()).throw(KeyboardInterrupt) if line["step"] == 4 else 0
        )
        assert main([*command, "--out", str(tmp_path / "run")]) == 130
    names = [Experiment(replace(setting, model=str(folder))).folder(Cell(), "")]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    assert main([*command, "--out", str(tmp_path / "run")]) == 2
    assert "training is the state of a training with other data, settings or weights" in capsys.readouterr().err
    names.append(Experiment(replace(setting, model=str(folder))).folder(Cell(), ""))
    bertlite.BertTokenizer(WORDS, do_lower_case=False).save_pretrained(folder)
    names.append(Experiment(replace(setting, model=str(folder))).folder(Cell(), ""))
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "relu", "_name_or_path": "moved"}))
    names.append(Experiment(replace(setting, model=str(folder))).folder(Cell(), ""))
    assert len({*names}) == 3
    assert names[2] == names[3]


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "bare", "--dev", "dev.tsv"],
        ["prune", "run", "bare", "--train", "train.tsv", "--dev", "dev.tsv", "--calibration", "11", "--out", "x"],
        ["prune", "to", "50%", "bare", "--texts", "train.tsv", "--at", "1x8", "--out", "x"],
        ["prune", "vocabulary", "bare", "--texts", "train.tsv", "--out", "x"],
        ["convert", "bare", "--out", "x"],
        ["export", "bare", "--out", "x"],
    ],
)
def test_a_checkpoint_without_the_head_that_its_config_names_is_refused(world, tmp_path, monkeypatch, capsys, words):
    """Its head would be random; a bare encoder needs no pooler."""
    if words[0] == "export":
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
    for name in ("train.tsv", "dev.tsv", "encoder"):
        (tmp_path / name).symlink_to(world / name)
    shutil.copytree(world / "encoder", tmp_path / "bare")
    shutil.copy(world / "model" / "config.json", tmp_path / "bare")
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert "bare has no classifier, which would be random: train it first, with" in capsys.readouterr().err
    assert not Path("x").exists()


# Cells --------------------------------------------------------------------------------------------------------------


def test_a_cell_leaves_a_folder_that_tells_it(experiment, tmp_path):
    folder = experiment.run(Cell("michel", 0.5, repair="none"), tmp_path)
    (run,) = read_runs(folder)
    assert run.config["cell"]["criterion"] == "michel"
    assert sum(run.results["heads_kept"]) == 6
    outputs = np.array([line["outputs"] for line in run.predictions])
    labels = np.array([line["label"] for line in run.predictions])
    assert run.results["accuracy"] == np.mean(outputs.argmax(1) == labels)
    batches = experiment.calibration(0)
    assert run.load("scores.json")["scores"] == bertlite.head_importance(experiment.dense, batches).tolist()
    gone = {int(layer): heads for layer, heads in run.load("masks.json")["pruned_heads"].items()}
    pruned = bertlite.prune_heads(experiment.dense, gone)
    np.testing.assert_allclose(predict(pruned, experiment.dev_data, experiment.task), outputs, atol=2e-6)
    assert run.results["kl"] == pytest.approx(experiment.task.divergence(experiment.dense_outputs, outputs), abs=1e-4)
    assert (
        run.results["dense"]["accuracy"] == metrics_of(experiment.dense_outputs, labels, experiment.task)["accuracy"]
    )


def test_inverted_removes_what_matters_most(experiment, tmp_path):
    kept = {}
    for criterion in ("michel", "michel/inverted"):
        folder = experiment.run(Cell(criterion, 1 / 3, at_least=0), tmp_path)
        gone = json.loads((folder / "masks.json").read_text())["pruned_heads"]
        kept[criterion] = {(layer, head) for layer, heads in gone.items() for head in heads}
    scores = experiment.scores(Cell("michel"))
    ranked = [divmod(i, 4) for i in scores.flatten().argsort().tolist()]
    assert kept["michel"] == {(str(layer), head) for layer, head in ranked[:4]}
    assert kept["michel/inverted"] == {(str(layer), head) for layer, head in ranked[-4:]}


@pytest.mark.parametrize("at_least", [0, 1])
@pytest.mark.parametrize("criterion", ["michel", "fisher/kl", "michel/inverted"])
def test_rescored_heads_go_by_the_scores_of_the_model_that_is_left(criterion, at_least, experiment, tmp_path):
    order = experiment.scores(Cell(f"{criterion}/rescored", at_least=at_least))
    name, *rest = criterion.split("/")
    batches, sign, model = experiment.calibration(0), -1 if "inverted" in rest else 1, experiment.dense
    gone = []  # in rounds of two of the twelve heads
    for _ in range((12 - 3 * at_least) // 2):
        options = {"target": "kl", "teacher": experiment.dense} if "kl" in rest else {}
        scores = sign * bertlite.head_importance(model, batches, criterion=name, **options)
        choice = bertlite.pruning.rank_heads(scores, count=2, at_least=at_least)
        heads = [(layer, head) for layer, heads in choice.items() for head in heads]
        gone += sorted(heads, key=lambda head: scores[head])
        model = bertlite.prune_heads(model, choice)
    assert [float(order[head]) for head in gone] == [*range(len(gone))]
    assert sorted(order.flatten().tolist())[: 12 - 3 * at_least] == [*range(12 - 3 * at_least)]
    assert (order == 12).sum() == 3 * at_least, "the last heads of the layers, which stay"

    # A cell removes the first of this order, and another share needs no other scores.
    folder = experiment.run(Cell(f"{criterion}/rescored", 1 / 3, at_least=at_least, repair="none"), tmp_path)
    masked = {
        (int(k), x) for k, v in json.loads((folder / "masks.json").read_text())["pruned_heads"].items() for x in v
    }
    assert masked == {*gone[:4]}


def test_a_head_that_hides_another_is_seen_when_heads_are_scored_again():
    """Heads 0 and 1 do the same: each alone can go, and then the other one is needed."""

    def score(model):
        kept = bertlite.kept_heads(model.config, 0)
        twins = {0, 1} <= {*kept}
        worth = {0: 0.0 if twins else 9.0, 1: 0.1 if twins else 9.0, 2: 1.0, 3: 2.0}
        return torch.tensor([[worth[head] if head in kept else math.nan for head in range(4)]])

    model = make(bertlite.BertForSequenceClassification, num_hidden_layers=1)
    once, again = score(model), rescored(model, score, 0)
    assert bertlite.pruning.rank_heads(once, count=2) == {0: [0, 1]}
    assert bertlite.pruning.rank_heads(again, count=2) == {0: [0, 2]}
    assert again.tolist() == [[0, 3, 1, 2]]
    assert rescored(bertlite.prune_heads(model, {0: [3]}), score, 1).nan_to_num(nan=-1).tolist() == [[0, 3, 1, -1]]


def test_repair_and_retraining_act(experiment, tmp_path):
    plain, repaired, retrained = (
        read_runs(experiment.run(cell, tmp_path))[0]
        for cell in (
            Cell("michel", 0.5, repair="none"),
            Cell("michel", 0.5, repair="refit"),
            Cell("michel", 0.5, repair="none", epochs=1),
        )
    )
    assert repaired.load("masks.json") == plain.load("masks.json") == retrained.load("masks.json")
    assert repaired.results["kl"] < plain.results["kl"]
    assert retrained.results["loss"] < plain.results["loss"]
    assert [line["step"] for line in retrained.metrics if "step" in line] == [1, 2, 3, 4, 5]


def test_similarity_is_pruned_without_labels(world, tmp_path):
    columns = {"columns": ("a", "b", "score"), "text": ("a", "b"), "label": "score"}
    train, dev = (DataSource(str(world / f"{name}-pairs.csv"), **columns) for name in ("train", "dev"))
    experiment = Experiment(Setting(str(world / "encoder"), "similarity", train, dev, calibration=11))
    (run,) = read_runs(experiment.run(Cell("fisher/kl", 0.5, repair="refit"), tmp_path))
    assert -1 <= run.results["spearman"] <= 1
    assert run.results["kl"] > 0
    with pytest.raises(ValueError, match="similarity has no loss for one text: use fisher/kl"):
        experiment.run(Cell("fisher", 0.5), tmp_path)
    with pytest.raises(ValueError, match="similarity has no retraining"):
        experiment.run(Cell("random", 0.5, epochs=1), tmp_path)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (Cell, {"criterion": "mitchell"}, "criterion 'mitchell' is unknown; have: michel, "),
        (Cell, {"criterion": "michel/twice"}, "criterion 'michel/twice': there is no option 'twice'; have: example, "),
        (Cell, {"fraction": 1.5}, "fraction is 1.5; it must be a share, 0 to 1"),
        (Cell, {"repair": "glue"}, "repair 'glue' is unknown; have: none, mean, refit"),
        (Cell, {"epochs": -1.0}, "epochs is -1.0; it must be a finite number of 0 or more"),
        (Cell, {"epochs": math.nan}, "epochs is nan"),
        (Recipe, {"lr": 0.0}, "lr is 0.0; give a finite number above 0"),
        (Recipe, {"lr": math.nan}, "lr is nan"),
        (Recipe, {"epochs": math.inf}, "epochs is inf; give a finite number from 0"),
        (Recipe, {"distil": 1.5}, "distil is 1.5; give a finite number from 0 to 1"),
    ],
)
def test_a_cell_or_a_recipe_that_means_nothing_is_refused(kind, given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        kind(**given)


def test_a_target_that_cannot_be_met_is_refused_before_any_work(experiment, tmp_path):
    with pytest.raises(ValueError, match=r"at_least|keep"):
        experiment.run(Cell("michel", 0.9, at_least=1), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"task": "translation"},
            "task 'translation' is unknown; have: classification, tokens, regression, similarity",
        ),
        ({"calibration": 41}, "--calibration is 41; train.tsv has 40: take fewer"),
        ({"retrain": 0}, "--train-examples is 0; train.tsv has 40: take fewer"),
        ({"task": "regression"}, "the head has 2 outputs; regression has 1"),
        ({"task": "similarity"}, "similarity compares two texts; name two text columns"),
    ],
)
def test_a_setting_that_cannot_be_run_is_refused_when_read(setting, changes, said):
    with pytest.raises(ValueError, match=said):
        Experiment(replace(setting, **changes)).check(Cell("random"))


def test_scores_are_computed_once_for_all_cells(experiment, monkeypatch):
    first = experiment.scores(Cell("michel"))
    monkeypatch.setattr("bertlite.experiments.experiment.head_importance", None)  # would fail
    assert experiment.scores(Cell("michel", fraction=0.9)) is first
    for cell in (Cell("fisher"), Cell("michel/inverted"), Cell("michel", seed=1)):
        with pytest.raises(TypeError, match="not callable"):
            experiment.scores(cell)


def test_a_run_keeps_its_model(experiment, tmp_path):
    cell = Cell("michel", 0.5, repair="refit", epochs=1.0)
    folder = experiment.run(cell, tmp_path, save_model=True)
    kept = bertlite.BertForSequenceClassification.from_pretrained(folder / "model")
    outputs = [line["outputs"] for run in read_runs(folder) for line in run.predictions]
    np.testing.assert_allclose(predict(kept, experiment.dev_data, experiment.task), outputs, atol=2e-6)
    assert (folder / "model" / "tokenizer.json").exists()
    assert experiment.run(cell, tmp_path, save_model=True) == folder
    shutil.rmtree(folder / "model")
    with pytest.raises(FileExistsError, match="is finished and did not keep its model: name another folder"):
        experiment.run(cell, tmp_path, save_model=True)


def test_examples_that_are_in_both_files_are_counted(setting, world, tmp_path):
    header, *lines = (world / "train.tsv").read_text().splitlines(keepends=True)
    texts = {line.partition("\t")[0] for line in lines}
    unseen = "film film film film film film film\t1\n"
    (tmp_path / "dev.tsv").write_text("".join([header, *lines[:7], unseen]))
    assert unseen.partition("\t")[0] not in texts
    with pytest.warns(UserWarning, match=r"7 of the 8 examples of dev\.tsv are also in train\.tsv"):
        Experiment(replace(setting, dev=DataSource(str(tmp_path / "dev.tsv"))))


# Sweeps -------------------------------------------------------------------------------------------------------------


def test_the_grid_gives_random_more_seeds():
    cells = grid(["michel/inverted", "random"], [0.25, 0.5], repairs=["none", "refit"], random_seeds=range(5))
    assert len(cells) == len(set(cells)) == 2 * 2 * (1 + 5)


def test_a_sweep_killed_goes_on_without_repeating_what_was_finished(experiment, tmp_path, monkeypatch):
    cells = grid(["michel", "random"], [0.25, 0.5], random_seeds=range(2))

    def dies(self, cell):
        if cell == cells[3]:
            raise KeyboardInterrupt
        return usual(self, cell)

    usual = Experiment.pruned
    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "pruned", lambda self, cell, log: dies(self, cell))
        with pytest.raises(KeyboardInterrupt):
            prune_run(experiment, cells, tmp_path)
    finished = {run.folder: (run.folder / "run.json").stat().st_mtime_ns for run in read_runs(tmp_path)}
    assert len(finished) == 3
    folders = [Path(run["folder"]) for run in prune_run(experiment, cells, tmp_path)["runs"]]
    assert len(read_runs(tmp_path)) == len(read_runs(tmp_path, unfinished=True)) == len({*folders}) == 6
    assert {folder: (folder / "run.json").stat().st_mtime_ns for folder in finished} == finished


def test_two_commands_do_not_write_to_one_folder(experiment, world, tmp_path, capsys):
    with lock_folder(tmp_path), pytest.raises(BlockingIOError, match=rf"process {os.getpid()} \(.*\) is writing to"):
        prune_run(experiment, [Cell("random", 0.5)], tmp_path)
    assert not list(tmp_path.parent.glob(".*.lock"))
    with lock_folder(tmp_path / "run"):
        assert main(["prune", "finetune", *data_arguments(world), "--out", str(tmp_path / "run")]) == 2
    assert "wait for it, or name another folder" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("note", [None, "the model predicts the same class for all examples"])
def test_only_a_model_that_learnt_is_to_be_pruned_next(note, world, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bertlite.experiments.compare.note_on_predictions", lambda _: note)
    words = [*data_arguments(world), "--epochs", "1", "--train-examples", "16", "--out", str(tmp_path / "run")]
    assert main(["prune", "finetune", *words]) == 0
    printed = capsys.readouterr().out
    assert (f"note: {note}: train it longer, or with another --lr" in printed) == bool(note)
    assert ("next: bertlite prune to 2x" in printed) == (note is None)


def test_what_diverges_fails_at_once_and_is_left_out(world, tmp_path, capsys):
    out = str(tmp_path / "run")
    assert main(["prune", "finetune", *data_arguments(world), "--lr", "1e30", "--out", out]) == 2
    assert re.search(
        r"the loss is (nan|inf) at step \d+ of \d+: .* smaller learning rate than 1e\+30", capsys.readouterr().err
    )
    assert not (tmp_path / "run" / "model").exists()
    (failed,) = read_runs(out, unfinished=True)
    assert failed.facts["status"] == "failed"
    cells = ["--criteria", "magnitude", "--fractions", "0.5", "--epochs", "0,1", "--calibration", "8", "--lr", "1e30"]
    with pytest.warns(UserWarning, match="failed and is left out: the loss is"):
        assert main(["prune", "run", *data_arguments(world), *cells, "--out", str(tmp_path / "runs")]) == 1
    assert len(read_runs(tmp_path / "runs")) == 1


def test_labels_lengths_and_cells_out_of_range_are_refused_by_row(world, tmp_path, capsys):
    rows = {"label": "good film\t1000000000\n", "empty": " \t1\n"}
    for name, said in (
        ("label", "row 2 (line 3), column 'label': 1000000000 is no index"),
        ("empty", "row 2 (line 3): column"),
    ):
        (tmp_path / f"{name}.tsv").write_text("text\tlabel\nfine plot\t0\n" + rows[name])
        command = ["prune", "finetune", *data_arguments(world), "--train", str(tmp_path / f"{name}.tsv")]
        assert main([*command, "--out", str(tmp_path / "no")]) == 2
        assert said in capsys.readouterr().err
    assert main(["prune", "finetune", *data_arguments(world), "--max-length", "1", "--out", str(tmp_path / "no")]) == 2
    assert "--max-length 1 leaves no room for a word, with 3 special tokens" in capsys.readouterr().err


# Comparisons, figures and the command -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    command = ["prune", "run", *data_arguments(world), "--out", str(root), "--calibration", "11"]
    command += ["--repairs", "none", "--at-least", "0"]
    assert main([*command, "--criteria", "michel,random", "--fractions", "0.25,0.5", "--random-seeds", "0,1,2"]) == 0
    return root


def test_rows_say_what_their_interval_is_over(runs):
    rows = compare.summarise(read_runs(runs), against="random")
    assert [(row["criterion"], row["fraction"], row["runs"], row["over"]) for row in rows] == [
        ("michel", 0.25, 1, "examples"),
        ("michel", 0.5, 1, "examples"),
        ("random", 0.25, 3, "seeds and examples"),
        ("random", 0.5, 3, "seeds and examples"),
    ]
    for row in rows:
        assert row["low"] <= row["accuracy"] <= row["high"]
        assert ("p" in row) == (row["criterion"] == "michel")
    group = [run.results["accuracy"] for run in read_runs(runs) if run.config["cell"]["criterion"] == "random"]
    assert rows[2]["accuracy"] + rows[3]["accuracy"] == pytest.approx(2 * np.mean(group))
    with pytest.raises(ValueError, match="no run has the criterion 'fisher'; have: dense, michel, random"):
        compare.summarise(read_runs(runs), against="fisher")
    with pytest.raises(ValueError, match="no finished runs"):
        compare.summarise([])
    other = read_runs(runs)[0]
    other.results["heads_kept"].append(3)
    with pytest.raises(ValueError, match="the runs have 2 numbers of layers; compare runs with only one"):
        compare.summarise([*read_runs(runs), other])
    other.facts["data"]["dev"] = "0" * 64
    with pytest.raises(ValueError, match="the runs have 2 evaluation data; compare runs with only one"):
        compare.summarise([*read_runs(runs), other])


def of_models(runs, models, criteria=("michel",)):
    """Runs of several dense models, each with predictions of its own: made up, on 400 examples."""
    draw, made = np.random.default_rng(3), []
    first = next(run for run in read_runs(runs) if run.config["cell"]["criterion"] == "michel")
    labels, ease = draw.integers(2, size=400), draw.normal(0, 1, 400)
    for model in range(models):
        dense = draw.normal(1.5, 0.2) + ease
        for worse, criterion in enumerate(criteria, start=1):
            run = replace(first, facts=json.loads(json.dumps(first.facts)))
            run.facts["model"]["dense"] = f"{model}" * 64
            run.config["cell"] |= {"criterion": criterion, "fraction": 0.5}
            lines = []
            for label, d in zip(labels.tolist(), dense, strict=True):
                outputs = [(d if right else d - worse + draw.normal(0, 0.3)) for right in (True, False)]
                logits = [[-x, x] if label else [x, -x] for x in outputs]
                lines.append({"label": label, "dense": logits[0], "outputs": logits[1]})
            run.__dict__["predictions"] = lines
            metrics = TASKS["classification"].metrics
            found = {name: metric(files.outputs(run), labels) for name, metric in metrics.items()}
            run.facts["results"] |= {
                **found,
                "dense": {n: m(files.outputs(run, "dense"), labels) for n, m in metrics.items()},
            }
            made.append(run)
    return made


def test_several_models_are_compared_over_models_and_examples(runs):
    made = of_models(runs, 3, ("michel", "random"))
    better, worse = compare.summarise(made, against="dense")
    assert [(row["models"], row["runs"], row["over"]) for row in (better, worse)] == [
        (3, 3, "models and examples")
    ] * 2
    alone = [compare.summarise([run])[0] for run in made if run.config["cell"]["criterion"] == "michel"]
    assert better["accuracy"] == pytest.approx(np.mean([row["accuracy"] for row in alone]))
    assert better["high"] - better["low"] > max(row["high"] - row["low"] for row in alone), "models differ too"
    for row, runs_of in ((better, made[::2]), (worse, made[1::2])):
        dense = np.mean([run.results["dense"]["accuracy"] for run in runs_of])
        assert row["difference"] == pytest.approx(row["accuracy"] - dense)
        assert row["difference_low"] < row["difference"] < row["difference_high"] < 0
        assert row["p"] < 0.05
        assert row["difference_high"] - row["difference_low"] < row["high"] - row["low"], "pairs of models agree"
    found, other = compare.summarise(made, against="random")
    assert found["difference"] == pytest.approx(better["accuracy"] - worse["accuracy"])
    assert "p" not in other
    with pytest.raises(ValueError, match="began with different models: run both sides on the same ones"):
        compare.summarise([made[0], made[3]], against="random")


def test_a_metric_that_the_task_has_not_is_refused_before_any_work(world, tmp_path, capsys):
    command = ["prune", "run", *data_arguments(world), "--calibration", "11", "--metric", "spearman"]
    assert main([*command, "--out", str(tmp_path / "x")]) == 2
    assert "classification has no metric 'spearman'; have: accuracy, f1, macro-f1, mcc" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_row_may_be_of_another_metric(runs):
    made = of_models(runs, 2)
    (row,) = compare.summarise(made, against="dense", metric="mcc")
    dense = np.mean([run.results["dense"]["mcc"] for run in made])
    assert row["values"] == [run.results["mcc"] for run in made]
    assert row["difference"] == pytest.approx(row["mcc"] - dense)
    assert -1 <= row["low"] < row["mcc"] < row["high"] <= 1


def test_where_most_examples_have_one_label_accuracy_is_doubted(runs):
    (made,) = of_models(runs, 1)
    assert compare.note_on_balance(files.labels(made), "accuracy") is None
    for line in made.predictions[:150]:
        line["label"] = 1
    assert "of the examples have the same label" in compare.note_on_balance(files.labels(made), "accuracy")
    assert compare.note_on_balance(files.labels(made), "mcc") is None


def test_models_that_predict_one_class_are_noted():
    one, two, words = np.eye(3)[[1, 1, 1]], np.eye(3)[[0, 1, 1]], np.full((2, 2, 2), np.nan)
    words[0, 0], words[1] = (1, 0), [(3, 2), (5, 1)]
    assert compare.note_on_predictions([one]) == "the model predicts the same class for all examples"
    assert compare.note_on_predictions([one, two, words]).startswith("2 of 3 models predict the same class")
    assert compare.note_on_predictions([two]) is compare.note_on_predictions([np.ones((3, 1))]) is None


def test_predictions_that_never_change_have_no_interval(runs):
    made = of_models(runs, 2)
    for run in made:
        for line in run.predictions:
            line["outputs"] = [1.0, 0.0]
        run.results["mcc"] = 0.0
    (row,) = compare.summarise(made, metric="mcc")
    assert (row["mcc"], row["low"], row["high"]) == (0, None, None)
    assert "| 0.0 (2) |" in compare.markdown_table([row], "mcc")


def test_runs_that_read_other_lengths_are_not_pooled(runs):
    made = of_models(runs, 2)
    made[0].config["setting"]["max_length"] += 1
    with pytest.raises(ValueError, match="the runs have 2 values of max_length"):
        compare.summarise(made)


def test_ways_that_differ_have_lines_of_their_own():
    base = {**vars(Cell()), "calibration": 512}
    changes = ({}, {"at_least": 2}, {"repair": "mean"}, {"epochs": 1}, {"calibration": 513})
    assert len({compare.describe_way({**base, **change}) for change in changes}) == len(changes)


@pytest.mark.parametrize(
    ("changed", "shown"), [({"distil": 0.5}, "2, distil 0.5"), ({"lr": 1e-4}, "2, lr 0.0001"), ({}, "2, 9 examples")]
)
def test_runs_that_trained_otherwise_are_not_taken_for_seeds(runs, changed, shown):
    pair = [run for run in read_runs(runs) if run.config["cell"]["criterion"] == "random"][:2]
    for run in pair:
        run.config["cell"] |= {"fraction": 0.5, "epochs": 2}
    setting = pair[1].config["setting"]
    setting["recipe"] = {**setting["recipe"], **changed}
    setting["retrain"] = None if changed else 9
    rows = compare.summarise(pair)
    assert [row["runs"] for row in rows] == [1, 1]
    assert sorted(compare.describe_way(row)[2] for row in rows) == ["2", shown]
    for run in pair:
        run.config["cell"]["epochs"] = 0
    assert [row["runs"] for row in compare.summarise(pair)] == [2], "without training its settings say nothing"
    setting["calibration"] += 1
    assert [row["runs"] for row in compare.summarise(pair)] == [1, 1]


def test_compare_writes_rows(runs, tmp_path, capsys):
    assert main(["prune", "compare", str(runs), "--against", "random", "--out", str(tmp_path / "rows.json")]) == 0
    said = capsys.readouterr().out
    assert "| criterion | repair | epochs | 25 % | 50 % |" in said
    assert "over random, p = " in said
    record = json.loads((tmp_path / "rows.json").read_text())
    assert len(record["rows"]) == 4
    assert all(row["accuracy"] == pytest.approx(np.mean(row["values"])) for row in record["rows"])
    assert record["dense"]["accuracy"] > 0
    assert record["environment"] == read_runs(runs)[0].facts["environment"]


def test_runs_of_one_models_weights_under_two_configs_are_not_seeds_of_one_model(runs):
    made = of_models(runs, 2)
    for run, key in zip(made, ("a", "b"), strict=True):
        run.facts["model"] |= {"dense": "0" * 64, "key": key}
    (row,) = compare.summarise(made)
    assert (row["models"], row["over"]) == (2, "models and examples")
    for run in made:
        del run.facts["model"]["key"]  # as older runs are
    with pytest.raises(
        ValueError, match="are of one way, model and seed, such as before and after its data were edit"
    ):
        compare.summarise(made)


def test_rows_name_the_commits_of_their_runs(runs):
    def made_from(*states):
        found = [replace(run, facts=json.loads(json.dumps(run.facts))) for run in read_runs(runs)[: len(states)]]
        for hour, (run, state) in enumerate(zip(found, states, strict=True)):
            run.facts["started"] = f"2026-01-01T0{hour}:00:00+00:00"
            run.facts["environment"]["git"] = state
        return found

    one, two, changed = ({"commit": c, "dirty": dirty} for c, dirty in (("1", False), ("2", False), ("2", True)))
    found = compare.provenance(made_from(one, one))
    assert found == {"environment": found["environment"]}
    assert commit_of(found) == one
    found = compare.provenance(made_from(one, two))
    assert commit_of(found) == two
    assert found["commits"] == ["1", "2"]
    assert commit_of(compare.provenance(made_from(changed, two)))["dirty"]
    assert commit_of(compare.provenance(made_from(one, None))) is None
    older = made_from(one)  # which has it beside the environment
    older[0].facts["git"] = older[0].facts["environment"].pop("git")
    assert commit_of(compare.provenance(older)) == one


def test_what_cannot_be_finetuned_is_refused_before_any_work(world, tmp_path, capsys):
    one = write_labels(tmp_path / "1.csv", ["good"])
    for words, message in (
        (["--task", "similarity"], "similarity has no head to train; sentence-transformers trains"),
        (["--train", one], "this and all 1 examples of 1.csv have the label 'good', from which nothing can be"),
        (["--epochs", "0"], "40 examples, 0 epochs and 1 processes make no step"),
    ):
        assert not (tmp_path / "no").exists()
        assert main(["prune", "finetune", *data_arguments(world), *words, "--out", str(tmp_path / "no")]) == 2, words
        assert message in capsys.readouterr().err


def test_a_head_that_names_its_classes_keeps_their_order(world, tmp_path):
    for name, count in (("train", 12), ("dev", 5)):
        rows = [f"{'good' if i % 3 else 'bad'} film {i},{'good' if i % 3 else 'bad'}" for i in range(count)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
    data = ["--train", str(tmp_path / "train.csv"), "--dev", str(tmp_path / "dev.csv"), "--epochs", "1"]
    command = ["prune", "finetune", str(world / "model"), *data]
    assert main([*command, "--classes", "good,bad", "--out", str(tmp_path / "one")]) == 0
    one = tmp_path / "one" / "model"
    assert main([*command[:2], str(one), *data, "--out", str(tmp_path / "two")]) == 0
    for folder in (one, tmp_path / "two" / "model"):
        assert class_names(bertlite.BertConfig.from_json_file(folder / "config.json")) == ("good", "bad")
    (first, second) = read_runs(tmp_path)
    assert [line["label"] for line in first.predictions] == [line["label"] for line in second.predictions]


def test_finetune_makes_a_checkpoint_that_the_rest_takes(world, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["prune", "finetune", *data_arguments(world), "--epochs", "2.5", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    lines = re.findall(r"^epoch ([\d.]+): loss \d\.\d{4}, dev\.tsv: accuracy \d\.\d{4}, ", printed, re.MULTILINE)
    assert lines[:2] == ["1", "2"]
    assert float(lines[2]) == pytest.approx(2.5, abs=0.3)
    (run,) = read_runs(out)
    model = bertlite.BertForSequenceClassification.from_pretrained(out / "model")
    assert run.results["sha256"] == model_sha256(model)
    assert run.facts["model"]["before"] == model_sha256(dense_of(world))


def dense_of(world):
    return bertlite.BertForSequenceClassification.from_pretrained(world / "model")


def test_from_python_all_is_as_by_the_commands(world, tmp_path, capsys):
    """The same records and weights; and nothing is printed."""

    def command(*words):
        assert main(["prune", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    data = [*data_arguments(world)[1:]]
    one, other = tmp_path / "command", tmp_path / "python"
    ways = ["--criteria", "michel", "--fractions", "0.5", "--calibration", "11"]
    wanted = [
        command("finetune", str(world / "model"), *data, "--epochs", "1", "--out", str(one / "dense")),
        command("run", str(one / "dense/model"), *data, *ways, "--out", str(one / "runs")),
        command("compare", str(one / "runs"), "--against", "dense"),
    ]
    files = [world / f"{name}.tsv" for name in ("train", "dev")]
    sources = [DataSource(str(path)) for path in files]
    found = [bertlite.commands.finetune(world / "model", *files, other / "dense", recipe=Recipe(epochs=1))]
    setting = Setting(str(other / "dense/model"), "classification", *sources, calibration=11)
    found.append(bertlite.commands.prune_run(Experiment(setting), grid(["michel"], [0.5]), other / "runs"))
    found.append(bertlite.commands.prune_compare([other / "runs"], against="dense"))
    assert capsys.readouterr().out == ""
    for name in ("data", "model", "results"):
        assert [run[name] for each in found[:2] for run in each["runs"]] == [
            run[name] for each in wanted[:2] for run in each["runs"]
        ]
    assert found[2]["rows"] == wanted[2]["rows"]
    assert [{*each} for each in found] == [{*each} for each in wanted]
    first, second = (folder / "dense/model/model.safetensors" for folder in (one, other))
    assert first.read_bytes() == second.read_bytes()
    with pytest.raises(ValueError, match="task 'sorting' is unknown; have: classification"):
        bertlite.commands.finetune(world / "model", *files, other / "no", task="sorting")


def test_the_plan_of_the_figures_is_made_of_commands(tmp_path):
    """`scripts/make/pruning_figures` with a python that only prints what it is given."""
    from bertlite.cli import parser

    script = tmp_path / "scripts" / "make" / "pruning_figures"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "make" / "pruning_figures", script)
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$*"\n')
    stub.chmod(0o755)
    picture = tmp_path / "runs" / "a-curves.png"  # which `curves` would have drawn
    picture.parent.mkdir(parents=True)
    picture.touch()
    done = subprocess.run(
        ["bash", script, tmp_path, tmp_path, "selection", "sst2", "subnetworks"],
        env={**os.environ, "PYTHON": str(stub)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    commands = [
        line.removeprefix("-m bertlite ").split() for line in done.stdout.splitlines() if "-m bertlite" in line
    ]
    plan = [parser().parse_args(words) for words in commands]
    assert len(plan) > 30
