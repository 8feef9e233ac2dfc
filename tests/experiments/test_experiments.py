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
from conftest import SIZES, SPECIAL, assert_same, interrupt, make

pytest.importorskip("accelerate")

from scipy.optimize import minimize_scalar
from scipy.stats import norm

import bertlite
import bertlite.commands
import bertlite.inference
import bertlite.pruning
from bertlite.cli import main, parser
from bertlite.experiments import compare, files, statistics
from bertlite.experiments import finetune as training
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
from bertlite.experiments.evaluate import TASKS, class_names, interval_over_examples, metrics_of, predict
from bertlite.experiments.experiment import Cell, Experiment, Setting, grid, prune_run, rescored
from bertlite.experiments.files import metric_figures, model_sha256
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
    for name, each in (("model", model), ("encoder", model.bert)):
        each.save_pretrained(folder / name)
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


def finetune(world, out, *words):
    """Run `bertlite prune finetune`; a later option takes the place of one here."""
    return main(["prune", "finetune", *data_arguments(world), "--out", str(out), *words])


def pairs_of(world):
    columns = {"columns": ("a", "b", "score"), "text": ("a", "b"), "label": "score"}
    return [DataSource(str(world / f"{name}-pairs.csv"), **columns) for name in ("train", "dev")]


def heads_gone(folder):
    """Return the heads that a cell removed, as (layer, head)."""
    gone = json.loads((folder / "masks.json").read_text())["pruned_heads"]
    return {(int(layer), head) for layer, heads in gone.items() for head in heads}


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
        (["good", "0,5"], {"collect": True}, "the label '0,5' looks like a number: write it with a point"),
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
        found, texts = read_examples(source, **options), tuple((f"text {i}",) for i in range(len(wanted)))
        assert found.labels == wanted
        assert found.sha256 == Examples("y", texts, tuple(map(float, wanted))).sha256
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
        ("x.tsv", "text\tlabel\na\tpos\nsentence\tlabel\n", {}, "row 2.* the label 'label' is the name of the"),
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
        ("x.ods", "PK", {}, r"x\.ods is none of \.txt, \.text, \.csv, \.tsv, \.jsonl"),
    ],
)
def test_bad_data_is_refused_by_name(tmp_path, name, text, options, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        read_examples(DataSource(str(tmp_path / name), **options), collect=True)


def test_names_of_labels_are_collected_once_and_then_known(tmp_path):
    source = DataSource(write_labels(tmp_path / "x.csv", ["poor", "good", "fair"]))
    train, order = read_examples(source, collect=True), ("good", "fair", "poor")
    assert (train.classes, train.labels) == (("fair", "good", "poor"), (2, 1, 0))
    for collect in (False, True):
        assert read_examples(source, classes=order, collect=collect).labels == (2, 0, 1), "in the order of the model"
    assert read_examples(source, classes=order[:2], collect=True) == train
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
    with pytest.raises(ValueError, match=r"row 1 \(line 1\): 3 words in text and 2 labels in label; each word has"):
        read_examples(source, words=True)
    with pytest.raises(ValueError, match="words have one column; 2 were named"):
        read_examples(DataSource("x.jsonl", text=("a", "b")), words=True)


def test_missing_data_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*x\.tsv"):
        read_examples(DataSource(str(tmp_path / "x.tsv")))
    with pytest.raises(ValueError, match="for a hub data set name a split"):
        read_examples(DataSource("someone/something"))
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
    draw, task = np.random.default_rng(0), TASKS["classification"]
    labels = draw.integers(2, size=400)
    a = np.eye(2)[np.where(draw.random(400) < 0.15, 1 - labels, labels)]
    b = a.copy()
    b[:12] = 1 - np.eye(2)[labels[:12]]  # wrong on twelve more
    for name in ("mcc", "accuracy"):
        found = compare.comparison({"": [a]}, {"": [b]}, labels, task, name)
        assert found["difference"] == pytest.approx(task.metrics[name](a, labels) - task.metrics[name](b, labels))
        assert 0 < found["difference_low"] < found["difference"] < found["difference_high"]
        assert found["p"] < 0.01
        same = compare.comparison({"": [a]}, {"": [a]}, labels, task, name)
        assert same == {"difference": 0, "p": 1, "difference_low": None, "difference_high": None}
    right_a, right_b = a.argmax(1) == labels, b.argmax(1) == labels
    assert found["p"] == statistics.mcnemar(right_a, right_b), "of two runs alone"
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
    unchanged = norm.sf((total * margin / (1 - margin)) ** 0.5)
    assert statistics.equivalence(0, 0, total, margin) == pytest.approx(unchanged)
    with pytest.raises(ValueError, match="margin is 1; give a difference of accuracies between 0 and 1"):
        statistics.equivalence(gained, lost, total, 1)


def test_a_crossed_estimate_adds_the_variances_of_models_and_of_examples():
    draw = np.random.default_rng(1)
    skill, ease = draw.normal(1.2, 0.5, (4, 1)), draw.normal(0, 1, (1, 500))  # accuracies vary by model and example
    right = draw.normal(size=(4, 500)) < skill + ease
    of_models, of_examples = right.mean(1), right.mean(0)
    found = statistics.crossed_estimate(lambda chosen: [right[:, chosen].mean(1)], 500)
    variances = of_models.var(ddof=1) / 4, of_examples.var(ddof=1) / 500
    assert found.value == pytest.approx(right.mean())
    assert sum(part for part, _ in found.parts) == pytest.approx(sum(variances), rel=0.06)  # the bootstrap's own noise
    assert [freedom for _, freedom in found.parts] == [3, 499]
    reach = found.value - found.interval()[0]
    squares = (student**2 * variance for student, variance in zip((3.182, 1.965), variances, strict=True))
    assert reach == pytest.approx(sum(squares) ** 0.5, rel=0.03)
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
    theirs = pytest.importorskip("sklearn.metrics")
    draw, task = np.random.default_rng(0), TASKS["classification"]
    labels = draw.choice(classes, 60, p=[0.6, *[0.4 / (classes - 1)] * (classes - 1)])
    outputs = draw.normal(size=(60, classes)) + np.eye(classes)[labels]
    found, predicted = metrics_of(outputs, labels, task), outputs.argmax(1)
    wanted = {
        "mcc": theirs.matthews_corrcoef(labels, predicted),
        "macro-f1": theirs.f1_score(labels, predicted, average="macro"),
        **({"f1": theirs.f1_score(labels, predicted)} if classes == 2 else {}),
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-12)
    if classes == 5:  # what scikit-learn calls macro is never called f1
        assert "f1" not in found
        with pytest.raises(ValueError, match="f1 counts class 1 of two; for 5 classes use macro-f1"):
            task.metric("f1", 5)
    constant = np.zeros_like(outputs)
    assert (task.metrics["mcc"](constant, labels), task.metrics["f1"](constant[:, :2], labels % 2)) == (0, 0)
    words, truth = outputs.reshape(6, 10, classes), labels.reshape(6, 10).copy()
    truth[:, 7:], words[:, 7:] = -100, np.nan
    counted, of_words = truth != -100, TASKS["tokens"].metrics
    kept, best = truth[counted], words[counted].argmax(1)
    f1 = theirs.f1_score(kept, best, labels=list(range(1, classes)), average="micro")
    assert of_words["f1"](words, truth) == pytest.approx(f1, abs=1e-12)
    assert of_words["accuracy"](words, truth) == pytest.approx(np.mean(kept == best))


def test_similarity_is_that_of_the_checkpoints_own_library(world, tmp_path):
    """With its prompt, which is not pooled, its length, its modules and its similarity; a ColBERT is refused."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

    pairs = [("good film", "bad plot the"), ("a", "is the film"), ("the end is bad", "good")]
    train, dev = pairs_of(world)
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
    for each in zip(*found.values(), strict=True):  # no two have the same outputs, or the same key
        assert len({*map(str, each)}) == len(tails)
    first, *_ = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([first]))
    with pytest.raises(ValueError, match=r"no vector of a whole text, since it has no Pooling \(is it a ColBERT"):
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


@pytest.mark.parametrize(
    ("action", "options", "zero"),
    [
        ("finetune", ["--classes", "0,1,2", "--train"], "0"),
        ("run", ["--calibration", "5", "--train"], "0"),
        ("to", ["--label", "label", "--at", "1x8", "--texts"], "LABEL_0"),
    ],
)
def test_what_the_examples_to_learn_from_lack_is_not_judged(world, tmp_path, assert_refused, action, options, zero):
    """Before any training or search: labels of --dev that --train has not, and one label alone in either."""
    header, *rows = (world / "train.tsv").read_text().splitlines()
    lines = {"all": rows, "none": [row for row in rows if row.endswith("\t0")], "new": ["a b\t0", "b c\t2"]}
    for name, chosen in lines.items():
        (tmp_path / f"{name}.tsv").write_text("\n".join([header, *chosen]))
    make(bertlite.BertForSequenceClassification, num_labels=3).float().save_pretrained(tmp_path / "model")
    bertlite.BertTokenizer(WORDS).save_pretrained(tmp_path / "model")
    given = ["prune", action, *["50%"] * (action == "to"), tmp_path / "model", "--out", tmp_path / "out", *options]
    for train, dev, message in (
        ("all", "new", "row 2 (line 3), column 'label': no example of all.tsv has the"),
        ("all", "none", f"examples of none.tsv have the label '{zero}', from which"),
        ("none", "all", f"examples of none.tsv have the label '{zero}'"),
    ):
        assert_refused(message, *given, tmp_path / f"{train}.tsv", "--dev", tmp_path / f"{dev}.tsv")
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


def test_a_gpu_that_is_named_is_the_current_one_while_finetuning(experiment, monkeypatch):
    current = [0]
    for name, value in (("is_initialized", lambda: True), ("current_device", lambda: current[-1])):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda to: current.append(to))
    finetune_(experiment.dense, experiment.sample(None, 0), experiment.task, Recipe(), device="cuda:1")
    assert current == [0, "cuda:1", 0]


@pytest.mark.parametrize("of", [None, lambda model, _: model, RecordedTeacher], ids=["none", "model", "its outputs"])
def test_steps_that_a_gpu_records_are_those_of_the_loop(of, experiment, monkeypatch):
    """Plainly run on the CPU, and recorded with padded inputs: the same weights, with a schedule and clipping."""
    data, students, out = experiment.sample(None, 0), [], torch.zeros(())
    recipe = Recipe(epochs=2, lr=3e-3, batch_size=8, distil=0.5 if of else 0.0, hidden=1.0)
    teacher = of and of(experiment.dense, data)

    def capture(run):
        return lambda: (students[-1].zero_grad(), out.copy_(run())), out, 0

    for captures in (None, capture):
        for records in (False, True):
            monkeypatch.setattr(training, "records_steps", lambda accelerator, records=records: records)
            monkeypatch.setattr(training, "TrainingStep", partial(bertlite.inference.TrainingStep, capture=captures))
            students.append(bertlite.prune_heads(experiment.dense, {0: [0, 1], 2: [3]}).double())
            for part in students[-1].modules() if captures else ():
                if isinstance(part, torch.nn.Dropout):
                    part.p = 0.0
            finetune_(students[-1], data, experiment.task, recipe, teacher=teacher)
    found = [dict(student.named_parameters()) for student in students]
    assert_same(found[1], found[0], atol=0)
    assert_same(found[3], found[2], atol=1e-4)


def test_the_loss_of_training_is_of_labels_of_the_teachers_logits_and_of_its_hidden_states(experiment):
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


def test_a_killed_finetune_is_gone_on_with_bit_for_bit(world, tmp_path, monkeypatch, assert_refused):
    """With dropout, AdamW's moments, the schedule and empty tensors, killed before its first state and later."""
    given = tmp_path / "given"
    shutil.copytree(world / "model", given)
    bertlite.prune_heads(dense_of(world), {0: range(4), 1: range(4)}).save_pretrained(given)
    command = ["prune", "finetune", given, *data_arguments(world)[1:], "--epochs", "3", "--batch-size", "8", "--out"]
    log = Run.log

    def kill(at, name):
        with monkeypatch.context() as patch:
            patch.setattr(Run, "log", lambda run, **line: interrupt() if line["step"] == at else log(run, **line))
            assert main([*map(str, command), str(tmp_path / name)]) == 130

    kill(1, "early")
    assert not list((tmp_path / "early" / "training").glob("*"))
    kill(7, "late")
    assert [path.name for path in (tmp_path / "late" / "training").iterdir()] == ["6"]
    assert read_runs(tmp_path) == []
    other = "training is the state of a training with other data, settings"
    assert_refused(other, *command, tmp_path / "late", "--seed", "1")
    for name in ("early", "late", "whole"):
        assert main([*map(str, command), str(tmp_path / name)]) == 0
    *killed, whole = read_runs(tmp_path)
    for run in killed:  # results have the hash of the weights
        assert (run.results, run.metrics, run.predictions) == (whole.results, whole.metrics, whole.predictions)
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


def test_an_edited_file_begins_the_training_and_the_cell_anew(world, setting, tmp_path, monkeypatch, assert_refused):
    """A config that leaves the weights as they are, and a tokenizer that leaves the texts as they are."""
    folder = shutil.copytree(world / "model", tmp_path / "model")
    command = ["prune", "finetune", str(folder), *data_arguments(world)[1:], "--epochs", "1", "--batch-size", "8"]
    command += ["--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(Run, "log", lambda run, **line: interrupt() if line["step"] == 4 else 0)
        assert main(command) == 130
    names = [Experiment(replace(setting, model=str(folder))).folder(Cell(), "")]
    config = {**json.loads((folder / "config.json").read_text()), "hidden_act": "relu"}
    (folder / "config.json").write_text(json.dumps(config))
    before = (tmp_path / "run" / "run.json").read_text()
    assert_refused("training is the state of a training with other data, settings or weights", *command)
    assert (tmp_path / "run" / "run.json").read_text() == before, "it has the settings to give again"
    names.append(Experiment(replace(setting, model=str(folder))).folder(Cell(), ""))
    bertlite.BertTokenizer(WORDS, do_lower_case=False).save_pretrained(folder)
    names.append(Experiment(replace(setting, model=str(folder))).folder(Cell(), ""))
    (folder / "config.json").write_text(json.dumps({**config, "_name_or_path": "moved"}))
    names.append(Experiment(replace(setting, model=str(folder))).folder(Cell(), ""))
    assert len({*names}) == 3
    assert names[2] == names[3]


@pytest.mark.parametrize(
    "words",
    [
        "evaluate bare --dev dev.tsv",
        "prune run bare --train train.tsv --dev dev.tsv --calibration 11 --out x",
        "prune to 50% bare --texts train.tsv --at 1x8 --out x",
        "prune vocabulary bare --texts train.tsv --out x",
        "convert bare --out x",
        "export bare --out x",
    ],
)
def test_a_checkpoint_without_its_configs_head_is_refused(world, tmp_path, monkeypatch, assert_refused, words):
    """Its head would be random; a bare encoder needs no pooler."""
    if words.startswith("export"):
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
    for name in ("train.tsv", "dev.tsv", "encoder"):
        (tmp_path / name).symlink_to(world / name)
    shutil.copytree(world / "encoder", tmp_path / "bare")
    shutil.copy(world / "model" / "config.json", tmp_path / "bare")
    monkeypatch.chdir(tmp_path)
    assert_refused("bare has no classifier, which would be random: train it first, with", *words.split())
    assert not Path("x").exists()


# Cells --------------------------------------------------------------------------------------------------------------


def test_a_cell_leaves_a_folder_that_tells_it(experiment, tmp_path):
    folder = experiment.run(Cell("michel", 0.5, repair="none"), tmp_path)
    (run,) = read_runs(folder)
    assert (run.config["cell"]["criterion"], sum(run.results["heads_kept"])) == ("michel", 6)
    outputs, labels = files.outputs(run), files.labels(run)
    assert run.results["accuracy"] == np.mean(outputs.argmax(1) == labels)
    batches = experiment.calibration(0)
    assert run.load("scores.json")["scores"] == bertlite.head_importance(experiment.dense, batches).tolist()
    gone = {layer: [head for each, head in heads_gone(folder) if each == layer] for layer in range(3)}
    pruned = bertlite.prune_heads(experiment.dense, gone)
    np.testing.assert_allclose(predict(pruned, experiment.dev_data, experiment.task), outputs, atol=2e-6)
    assert run.results["kl"] == pytest.approx(experiment.task.divergence(experiment.dense_outputs, outputs), abs=1e-4)
    dense = metrics_of(experiment.dense_outputs, labels, experiment.task)
    assert run.results["dense"]["accuracy"] == dense["accuracy"]


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
    assert heads_gone(folder) == {*gone[:4]}


def test_a_head_that_hides_another_is_seen_when_heads_are_scored_again():
    """Heads 0 and 1 do the same: each alone can go, and then the other one is needed."""

    def score(model):
        kept = bertlite.kept_heads(model.config, 0)
        worth = (0.0, 0.1, 1.0, 2.0) if {0, 1} <= {*kept} else (9.0, 9.0, 1.0, 2.0)
        return torch.tensor([[worth[head] if head in kept else math.nan for head in range(4)]])

    model = make(bertlite.BertForSequenceClassification, num_hidden_layers=1)
    assert bertlite.pruning.rank_heads(score(model), count=2) == {0: [0, 1]}
    assert rescored(model, score, 0).tolist() == [[0, 3, 1, 2]]
    assert rescored(bertlite.prune_heads(model, {0: [3]}), score, 1).nan_to_num(nan=-1).tolist() == [[0, 3, 1, -1]]


def test_repair_and_retraining_act(experiment, tmp_path):
    options = {"repair": "none"}, {"repair": "refit"}, {"repair": "none", "epochs": 1}
    folders = [experiment.run(Cell("michel", 0.5, **each), tmp_path) for each in options]
    plain, repaired, retrained = (read_runs(folder)[0] for folder in folders)
    assert repaired.load("masks.json") == plain.load("masks.json") == retrained.load("masks.json")
    assert repaired.results["kl"] < plain.results["kl"]
    assert retrained.results["loss"] < plain.results["loss"]
    assert [line["step"] for line in retrained.metrics if "step" in line] == [1, 2, 3, 4, 5]


def test_similarity_is_pruned_without_labels(world, tmp_path):
    experiment = Experiment(Setting(str(world / "encoder"), "similarity", *pairs_of(world), calibration=11))
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


def test_scores_are_computed_once_for_all_cells(experiment, monkeypatch):
    first = experiment.scores(Cell("michel"))
    monkeypatch.setattr("bertlite.experiments.experiment.head_importance", None)  # would fail
    assert experiment.scores(Cell("michel", fraction=0.9)) is first
    for cell in (Cell("fisher"), Cell("michel/inverted"), Cell("michel", seed=1)):
        with pytest.raises(TypeError, match="not callable"):
            experiment.scores(cell)


def test_a_run_keeps_its_model_with_a_card_and_a_report(setting, tmp_path):
    experiment = Experiment(replace(setting, train=replace(setting.train, classes=("bad", "good"))))
    cell = Cell("michel", 0.5, repair="refit", epochs=1.0)
    (run,) = read_runs(experiment.run(cell, tmp_path, save_model=True))
    model = run.folder / "model"
    kept = bertlite.BertForSequenceClassification.from_pretrained(model)
    outputs = [line["outputs"] for line in run.predictions]
    np.testing.assert_allclose(predict(kept, experiment.dev_data, experiment.task), outputs, atol=2e-6)
    assert class_names(kept.config) == ("bad", "good")
    assert (model / "tokenizer.json").exists()

    # The card has the figures of the run with intervals, and the report all of it.
    card, report = (model / "README.md").read_text(), json.loads((model / "report.json").read_text())
    (low, high), right = statistics.wilson(round(run.results["accuracy"] * 23), 23), run.results["accuracy"]
    line = f"{low:.4g} to {high:.4g}, over 23 examples of dev.tsv | {run.results['dense']['accuracy']:.4g} |"
    assert f"| accuracy | {right:.4g} | {line}" in card
    assert "50 % of the heads were removed by the criterion michel, on 11 examples" in card
    assert "repaired (refit)" in card
    named = {figure["name"]: figure for figure in report["figures"]}
    assert [named["accuracy"][name] for name in ("low", "value", "high")] == pytest.approx([low, right, high])
    assert named["multiply-accumulates of the layers, as a share"]["value"] == run.results["macs"] < 1
    assert report["heads_kept"] == run.results["heads_kept"]
    assert report["run"]["config"] == run.config
    assert report["run"]["environment"]["versions"]["torch"]
    assert report["results"]["accuracy"] == right

    assert experiment.run(cell, tmp_path, save_model=True) == run.folder
    shutil.rmtree(model)
    with pytest.raises(FileExistsError, match="is finished and did not keep its model: name another folder"):
        experiment.run(cell, tmp_path, save_model=True)


def test_the_headline_has_its_interval_whatever_it_is():
    draw, task = np.random.default_rng(0), TASKS["regression"]
    outputs, labels = draw.normal(size=(30, 1)), draw.normal(size=30)
    results = metrics_of(outputs, labels, task)
    first, *others = metric_figures(outputs, labels, task, "dev.tsv", results)
    low, high = interval_over_examples(outputs, labels, task, "spearman")
    assert (first.name, first.low, first.high, first.dense) == ("spearman", low, high, None)
    assert [other.low for other in others] == [None] * len(others)


# Sweeps -------------------------------------------------------------------------------------------------------------


def test_the_grid_gives_random_more_seeds():
    cells = grid(["michel/inverted", "random"], [0.25, 0.5], repairs=["none", "refit"], random_seeds=range(5))
    assert len(cells) == len(set(cells)) == 2 * 2 * (1 + 5)


def test_a_sweep_killed_goes_on_without_repeating_what_was_finished(experiment, tmp_path, monkeypatch):
    cells = grid(["michel", "random"], [0.25, 0.5], random_seeds=range(2))
    usual = Experiment.pruned
    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "pruned", lambda *given: interrupt() if given[1] == cells[3] else usual(*given))
        with pytest.raises(KeyboardInterrupt):
            prune_run(experiment, cells, tmp_path)
    finished = {run.folder: (run.folder / "run.json").stat().st_mtime_ns for run in read_runs(tmp_path)}
    assert len(finished) == 3
    folders = [Path(run["folder"]) for run in prune_run(experiment, cells, tmp_path)["runs"]]
    assert len(read_runs(tmp_path)) == len(read_runs(tmp_path, unfinished=True)) == len({*folders}) == 6
    assert {folder: (folder / "run.json").stat().st_mtime_ns for folder in finished} == finished


def test_two_commands_do_not_write_to_one_folder(experiment, world, tmp_path, assert_refused):
    with lock_folder(tmp_path), pytest.raises(BlockingIOError, match=rf"process {os.getpid()} \(.*\) is writing to"):
        prune_run(experiment, [Cell("random", 0.5)], tmp_path)
    assert not list(tmp_path.parent.glob(".*.lock"))
    with lock_folder(out := tmp_path / "run"):
        words = ["prune", "finetune", *data_arguments(world), "--out", out]
        assert_refused("wait for it, or name another folder", *words)
    assert not out.exists()


@pytest.mark.parametrize("note", [None, "the model predicts the same class for all examples"])
def test_only_a_model_that_learnt_is_to_be_pruned_next(note, world, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bertlite.experiments.compare.note_on_predictions", lambda _: note)
    assert finetune(world, tmp_path / "run", "--epochs", "1", "--train-examples", "16") == 0
    printed = capsys.readouterr().out
    assert (f"note: {note}: train it longer, or with another --lr" in printed) == bool(note)
    assert ("next: bertlite prune to 2x" in printed) == (note is None)


def test_what_diverges_fails_at_once_and_is_left_out(world, tmp_path, capsys):
    out = tmp_path / "run"
    assert finetune(world, out, "--lr", "1e30") == 2
    message = r"the loss is (nan|inf) at step \d+ of \d+: .* smaller learning rate than 1e\+30"
    assert re.search(message, capsys.readouterr().err)
    assert not (out / "model").exists()
    (failed,) = read_runs(out, unfinished=True)
    assert failed.facts["status"] == "failed"
    cells = ["--criteria", "magnitude", "--fractions", "0.5", "--epochs", "0,1", "--calibration", "8", "--lr", "1e30"]
    with pytest.warns(UserWarning, match="failed and is left out: the loss is"):
        assert main(["prune", "run", *data_arguments(world), *cells, "--out", str(tmp_path / "runs")]) == 1
    assert len(read_runs(tmp_path / "runs")) == 1


@pytest.mark.parametrize(
    ("action", "words", "message"),
    [
        ("finetune", "--train label.tsv", "row 2 (line 3), column 'label': 1000000000 is no index"),
        ("finetune", "--train one.csv", "this and all 1 examples of one.csv have the label 'good', from which"),
        ("finetune", "--max-length 1", "--max-length 1 leaves no room for a word, with 3 special tokens"),
        ("finetune", "--task similarity", "similarity has no head to train; sentence-transformers trains"),
        ("finetune", "--epochs 0", "40 examples, 0 epochs and 1 processes make no step"),
        ("run", "--calibration 11 --metric spearman", "classification has no metric 'spearman'; have: accuracy, f1"),
        ("run", "--calibration 41", "--calibration is 41; train.tsv has 40: take fewer"),
        ("run", "--calibration 11 --fractions 0.9 --at-least 1", "leave only 9 to remove"),
    ],
)
def test_what_cannot_be_done_is_refused_by_the_command(
    world, tmp_path, monkeypatch, assert_refused, action, words, message
):
    monkeypatch.chdir(tmp_path)
    Path("label.tsv").write_text("text\tlabel\nfine plot\t0\ngood film\t1000000000\n")
    write_labels(Path("one.csv"), ["good"])
    assert_refused(message, "prune", action, *data_arguments(world), *words.split(), "--out", "no")
    assert not Path("no").exists()


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


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda run: run.results["heads_kept"].append(3), "numbers of layers"),
        (lambda run: run.facts["data"].update(dev="0" * 64), "evaluation data"),
        (lambda run: run.config["setting"].update(max_length=8), "values of max_length"),
    ],
)
def test_runs_of_different_kinds_are_not_pooled(runs, change, what):
    other = read_runs(runs)[0]
    change(other)
    with pytest.raises(ValueError, match=f"the runs have 2 {what}; compare runs with only one"):
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
            sides = np.sign(labels - 0.5)[:, None] * (-1, 1)  # the logits of a label
            pruned = dense - worse + draw.normal(0, 0.3, 400)
            logits = [(x[:, None] * sides).tolist() for x in (dense, pruned)]
            lines = zip(labels.tolist(), *logits, strict=True)
            run.__dict__["predictions"] = [{"label": y, "dense": a, "outputs": b} for y, a, b in lines]
            metrics = TASKS["classification"].metrics.items()
            ours, theirs = ({n: f(files.outputs(run, *of), labels) for n, f in metrics} for of in ((), ("dense",)))
            run.facts["results"] |= {**ours, "dense": theirs}
            made.append(run)
    return made


def test_several_models_are_compared_over_models_and_examples(runs):
    made = of_models(runs, 3, ("michel", "random"))
    better, worse = compare.summarise(made, against="dense")
    for row in (better, worse):
        assert (row["models"], row["runs"], row["over"]) == (3, 3, "models and examples")
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


def test_a_row_may_be_of_another_metric(runs):
    made = of_models(runs, 2)
    (row,) = compare.summarise(made, against="dense", metric="mcc")
    dense = np.mean([run.results["dense"]["mcc"] for run in made])
    assert row["values"] == [run.results["mcc"] for run in made]
    assert row["difference"] == pytest.approx(row["mcc"] - dense)
    assert -1 <= row["low"] < row["mcc"] < row["high"] <= 1
    for run in made:  # predictions that never change have no interval
        run.results["mcc"] = 0.0
        for line in run.predictions:
            line["outputs"] = [1.0, 0.0]
    (row,) = compare.summarise(made, metric="mcc")
    assert (row["mcc"], row["low"], row["high"]) == (0, None, None)
    assert "| 0.0 (2) |" in compare.markdown_table([row], "mcc")


def test_labels_that_are_mostly_one_and_predictions_of_one_class_are_noted(runs):
    (made,) = of_models(runs, 1)
    assert compare.note_on_balance(files.labels(made), "accuracy") is None
    for line in made.predictions[:150]:
        line["label"] = 1
    assert "of the examples have the same label" in compare.note_on_balance(files.labels(made), "accuracy")
    assert compare.note_on_balance(files.labels(made), "mcc") is None
    one, two, words = np.eye(3)[[1, 1, 1]], np.eye(3)[[0, 1, 1]], np.full((2, 2, 2), np.nan)
    words[0, 0], words[1] = (1, 0), [(3, 2), (5, 1)]
    assert compare.note_on_predictions([one]) == "the model predicts the same class for all examples"
    assert compare.note_on_predictions([one, two, words]).startswith("2 of 3 models predict the same class")
    assert compare.note_on_predictions([two]) is compare.note_on_predictions([np.ones((3, 1))]) is None


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
    with pytest.raises(ValueError, match="are of one way, model and seed, such as before and after its data were"):
        compare.summarise(made)


def test_rows_name_the_commits_of_their_runs(runs):
    def made_from(*states):
        found = [replace(run, facts=json.loads(json.dumps(run.facts))) for run in read_runs(runs)[: len(states)]]
        for hour, (run, state) in enumerate(zip(found, states, strict=True)):
            run.facts["started"] = f"2026-01-01T0{hour}:00:00+00:00"
            run.facts["environment"]["git"] = state
        return found

    one, two, changed = ({"commit": c, "dirty": dirty} for c, dirty in (("1", False), ("2", False), ("2", True)))
    for states, commit, more in (
        ((one, one), one, {}),
        ((one, two), two, {"commits": ["1", "2"]}),
        ((changed, two), {"commit": "2", "dirty": True}, {}),
        ((one, None), None, {}),
    ):
        found = compare.provenance(made_from(*states))
        assert (commit_of(found), found) == (commit, {"environment": found["environment"], **more})
    older = made_from(one)  # which has it beside the environment
    older[0].facts["git"] = older[0].facts["environment"].pop("git")
    assert commit_of(compare.provenance(older)) == one


def test_a_head_that_names_its_classes_keeps_their_order(world, tmp_path):
    for name, count in (("train", 12), ("dev", 5)):
        write_labels(tmp_path / f"{name}.csv", ["good" if i % 3 else "bad" for i in range(count)])
    data = ["--train", str(tmp_path / "train.csv"), "--dev", str(tmp_path / "dev.csv"), "--epochs", "1"]
    one, two = (tmp_path / name for name in ("one", "two"))
    assert finetune(world, one, *data, "--classes", "good,bad") == 0
    assert main(["prune", "finetune", str(one / "model"), *data, "--out", str(two)]) == 0
    for folder in (one, two):
        assert class_names(bertlite.BertConfig.from_json_file(folder / "model/config.json")) == ("good", "bad")
    (first, second) = read_runs(tmp_path)
    assert [line["label"] for line in first.predictions] == [line["label"] for line in second.predictions]


def test_finetune_makes_a_checkpoint_that_the_rest_takes(world, tmp_path, capsys):
    assert finetune(world, tmp_path / "run", "--epochs", "2.5") == 0
    printed = capsys.readouterr().out
    line = r"^epoch ([\d.]+): loss \d\.\d{4}, dev\.tsv: accuracy \d\.\d{4}, "
    one, two, last = re.findall(line, printed, re.MULTILINE)
    assert (one, two, float(last)) == ("1", "2", pytest.approx(2.5, abs=0.3))
    (run,) = read_runs(tmp_path)
    model = bertlite.BertForSequenceClassification.from_pretrained(run.folder / "model")
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
    ours, theirs = ([run for each in records[:2] for run in each["runs"]] for records in (found, wanted))
    for name in ("data", "model", "results"):
        assert [run[name] for run in ours] == [run[name] for run in theirs]
    assert found[2]["rows"] == wanted[2]["rows"]
    assert [{*each} for each in found] == [{*each} for each in wanted]
    first, second = (folder / "dense/model/model.safetensors" for folder in (one, other))
    assert first.read_bytes() == second.read_bytes()
    with pytest.raises(ValueError, match="task 'sorting' is unknown; have: classification, tokens, regression, simi"):
        bertlite.commands.finetune(world / "model", *files, other / "no", task="sorting")
    with pytest.raises(ValueError, match=r"--train-examples is 0; train\.tsv has 40: take fewer"):
        bertlite.commands.prune_run(Experiment(replace(setting, retrain=0)), [Cell("michel")], other / "no")
    assert not (other / "no").exists()


def test_the_plan_of_the_figures_is_made_of_commands(tmp_path):
    """`scripts/make/pruning_figures` with a python that only prints what it is given."""
    for folder in ("scripts/make", "runs"):
        (tmp_path / folder).mkdir(parents=True)
    script = shutil.copy(ROOT / "scripts/make/pruning_figures", tmp_path / "scripts/make")
    (tmp_path / "runs/a-curves.png").touch()  # which `curves` would have drawn
    done = subprocess.run(
        ["bash", script, tmp_path, tmp_path, "selection", "sst2", "subnetworks"],
        env={**os.environ, "PYTHON": "echo"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    commands = re.findall("^-m bertlite (.*)", done.stdout, re.MULTILINE)
    assert len([parser().parse_args(words.split()) for words in commands]) > 30
