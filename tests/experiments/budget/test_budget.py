"""`bertlite prune to`: targets, the work, texts, kept times, a search that goes on, and the folder that comes out."""

import json
import random
import re
import shutil
import sys
import warnings
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SPECIAL, assert_same, interrupt, make, set_entries

from bertlite import (
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertTokenizer,
    prune_heads,
    prune_neurons,
    prune_to,
)
from bertlite.cli import main, parser, parts
from bertlite.commands import PruneSettings
from bertlite.config import kept_heads, kept_neurons
from bertlite.experiments import finetune
from bertlite.experiments.budget import command, distil, search, times
from bertlite.experiments.budget import texts as own_texts
from bertlite.experiments.budget.quality import Quality, evaluate_pruned, forward, scores
from bertlite.experiments.budget.report import describe_gain
from bertlite.experiments.budget.search import State
from bertlite.experiments.budget.target import Target, read_work
from bertlite.experiments.budget.texts import HELD_OUT, batches_of, examples_of, split
from bertlite.experiments.budget.work import full
from bertlite.experiments.data import EncodedExamples, Examples
from bertlite.experiments.files import as_checkpoint
from bertlite.experiments.settings import from_options
from bertlite.opened.checkpoint import Checkpoint
from bertlite.pruning import macs
from bertlite.pruning.importance.allocation import UnitCosts
from bertlite.pruning.importance.structures import arguments_of
from bertlite.runtime.library import missing_platform
from bertlite.shipping.vectors import MEAN
from bertlite.support.files import lock_folder
from bertlite.support.progress import Progress

WORDS = [*SPECIAL, "good", "fine", "bad", "poor", "film", "plot", "the", "a", "is"]
L, N, W = 3, 4, 37
DONE = (0, 1)  # the exit status where a random model may be left with one class
HIDDEN = Progress(None, "rounds", shown=False)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a tiny classifier, an encoder, their tokenizer, and texts of which a word tells the label."""
    folder = tmp_path_factory.mktemp("world")
    tokenizer = BertTokenizer(WORDS)
    model = make(BertForSequenceClassification, id2label={0: "no", 1: "yes"}).float()
    for name, each in (("model", model), ("encoder", model.bert)):
        each.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    draw = random.Random(0)
    rows = []
    for _ in range(120):
        label = draw.choice(["no", "yes"])
        words = draw.choices(WORDS[9:], k=draw.randint(1, 9))
        rows.append((" ".join([*words, draw.choice(WORDS[5:7] if label == "yes" else WORDS[7:9])]), label))
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text, _ in rows) + "\n", encoding="utf-8")
    (folder / "texts.tsv").write_text("text\tclass\n" + "".join(f"{a}\t{b}\n" for a, b in rows), encoding="utf-8")
    (folder / "lengths.txt").write_text("".join(f"{i % 30 + 1}\n" for i in range(90)), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def fewer_rounds(few_rounds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((search, "CLOCK_ROUNDS"), (times, "ROUNDS")):
        monkeypatch.setattr(module, name, 3)


def expected_seconds(model: Any) -> float:
    """Return the seconds by a clock without noise: 2 ms and 10 ns for each MAC of 16 tokens, a third in int8."""
    return (2e-3 + 1e-8 * macs(model.config, 16)) / (3 if getattr(model, "compute_dtype", 0) == torch.int8 else 1)


@pytest.fixture
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model take as long as its size says."""

    def clock(models: Any, work: Any, device: str, after: Any = None) -> Any:
        return {name: [expected_seconds(each)] * 9 for name, each in models.items()}

    def table(model: Any, work: Any, neurons: Any, *_: Any) -> Any:
        """Times that are wrong by a factor, and by another for heads: the clock has to put it right."""
        unit = UnitCosts.macs(model.config, [16])
        pair = {n: 1.5e-8 * n * unit.heads[0] for n in range(N + 1)}, {n: 2e-8 * n * unit.neuron for n in neurons}
        return [pair] * L

    monkeypatch.setattr(search, "clock", clock)
    monkeypatch.setattr(search, "time_table", table)


def command_of(world: Path, out: Path, *words: str, texts: str = "texts.txt", model: str = "model") -> list[str]:
    target, *others = words
    given = ["--texts", str(world / texts), "--calibration", "1024", "--out", str(out), *others]
    return ["prune", "to", target, str(world / model), *given]


def prune(*given: Any, **names: str) -> int:
    return main(command_of(*given, **names))


def pruned(world: Path, out: Path, *words: str, ends: tuple[int, ...] = (0,), **names: str) -> Any:
    """Prune, and return the report."""
    assert prune(world, out, *words, **names) in ends
    return report_of(out)


def load(folder: Path) -> Any:
    return BertForSequenceClassification.from_pretrained(folder)


def report_of(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


# What is asked for


@pytest.mark.parametrize(
    ("text", "of_size", "wanted"),
    [
        ("2x", False, ("speed", 2.0)),
        ("1.5X", False, ("speed", 1.5)),
        ("2x+", False, ("speed", 2.0, True)),
        ("40%", False, ("macs", 0.4)),
        ("40%", True, ("size", 0.4)),
        ("15ms", False, ("time", 0.015)),
        ("0.2 s", False, ("time", 0.2)),
        ("30MB", False, ("bytes", 30e6)),
        ("1.5 gb", False, ("bytes", 1.5e9)),
        ("2", False, "the target '2' is not valid: write a speed"),
        ("fast", False, "the target 'fast' is not valid: .*, then the checkpoint"),
        ("0.5x", False, "slower than the dense model"),
        ("0%", False, "not a share of the MACs"),
        ("140%", False, "not a share of the MACs"),
        ("140%", True, "'140%' is not a share of the size"),
        ("0ms", False, "must be a time above 0"),
        ("0MB", False, "'0MB' must be a size above 0"),
        ("40%+", False, "leave out the plus"),
    ],
)
def test_a_target_is_a_speed_a_share_a_time_or_a_size(text, of_size, wanted):
    if isinstance(wanted, tuple):
        assert Target.parse(text, of_size) == Target(text, *wanted)
    else:
        with pytest.raises(ValueError, match=wanted):
            Target.parse(text, of_size)
    assert [Target.parse(each).seconds(0.5) for each in ("2x", "15ms", "30MB")] == [0.25, 0.015, float("inf")]


def test_the_work_is_a_shape_or_the_quantiles_of_lengths(world, tmp_path):
    assert read_work(None, None, 32) == full(8, 128)
    assert read_work((2, 9), None, 32) == full(2, 9)
    found = read_work(None, str(world / "lengths.txt"), 3)
    assert found.lengths == (6, 16, 26)
    assert found.width == 26
    with pytest.raises(ValueError, match="give one of them"):
        read_work((8, 128), "x", 32)
    (tmp_path / "bad.txt").write_text("3\n4.5\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 2: '4.5' is not a length in tokens"):
        read_work(None, str(tmp_path / "bad.txt"), 32)


def test_texts_to_judge_by_are_none_of_those_fitted_to():
    texts = Examples("x", tuple((f"text {i}",) for i in range(100)), tuple(range(100)))
    rest, held_out = split(texts, 256, seed=0)
    assert (len(rest), len(held_out)) == (80, 20)
    assert {*rest.texts}.isdisjoint(held_out.texts)
    assert all(text == (f"text {label}",) for text, label in zip(rest.texts, rest.labels, strict=True))
    assert split(texts, 5, seed=1)[0].texts[:50] != split(texts, 5, seed=2)[0].texts[:50]
    with pytest.raises(ValueError, match="there are 9 texts; a search needs 10 or more"):
        split(texts.chosen(range(9)), 2, seed=0)


# Times


def test_times_of_all_sizes_lie_between_those_of_some(world, monkeypatch):
    """Of a model that was pruned before by what is kept."""
    monkeypatch.setattr(times, "WIDE", 1e9)  # however busy the machine is
    monkeypatch.setattr(times, "SIZES", 3)
    model = prune_neurons(prune_heads(load(world / "model"), {0: [1], 2: range(N)}), {1: range(9)})
    table = times.time_table(model, full(2, 8), [9, 20], HIDDEN)
    (heads, neurons), again, last = table
    assert sorted(heads) == [*range(N + 1)]  # of which 0, 2 and 4 are timed
    assert [heads[1], heads[3]] == pytest.approx([(heads[0] + heads[2]) / 2, (heads[2] + heads[4]) / 2])
    assert sorted(neurons) == sorted(last[1]) == [0, 9, 20, W - 9, W]
    assert all(seconds > 0 for each in (heads, neurons, *last) for seconds in each.values())
    assert again == (heads, neurons) != last


def test_layers_with_a_window_have_times_of_their_own(monkeypatch):
    timed: list[int] = []
    monkeypatch.setattr(times, "time_sublayers", lambda _, i, *__, **___: (timed.append(i) or ({i: 1.0}, {}), 0.0))
    rotary: Any = {"position_embedding_type": "rotary_local", "local_attention": 2, "local_layers": [1, 2, 4]}
    model = make(**rotary, num_hidden_layers=5).float()
    layers = times.time_table(model, full(2, 8), [], HIDDEN)
    assert [[*heads] for heads, _ in layers] == [[0], [1], [1], [0], [4]]
    assert timed == [0, 1, 4]


def test_times_of_a_wide_spread_are_measured_again_and_not_used(world, tmp_path, steady_clock, monkeypatch):
    model = load(world / "model")
    spreads = iter((0.9, 0.5, 0.8, 0.1, 0.2))
    monkeypatch.setattr(times, "measure_table", lambda *args: 2 * (next(spreads),))
    found = [times.time_table(model, full(2, 8), [9], HIDDEN) for _ in range(3)]
    assert found == [None, 0.1, 0.2]  # the better of two measurements, if it is good enough
    monkeypatch.setattr(search, "time_table", lambda *_: None)
    report = pruned(world, tmp_path / "fast", "2x", "--at", "1x16")  # and no warning, as the clock says it is met
    assert report["sizes_by"] == "macs"


def test_the_last_layer_of_a_classifier_is_timed_as_it_runs_for_the_first_token_alone(world):
    model = load(world / "model")
    with torch.inference_mode():
        first, last = (arguments_of(model, layer, lambda: model(**full(2, 8).inputs(14))) for layer in (0, L - 1))
    assert first[0].shape == (2, 8, 48)
    assert last[0].shape == (2, 1, 48)
    assert "forward" not in vars(model.bert.encoder.layer[0])


def test_times_that_fall_where_sizes_rise_are_averaged():
    assert times.nondecreasing({0: 1.0, 1: 3.0, 2: 2.0, 5: 4.0}) == {0: 1.0, 1: 2.5, 2: 2.5, 5: 4.0}
    assert times.nondecreasing({3: 1.0, 0: 2.0, 1: 3.0}) == {0: 2.0, 1: 2.0, 3: 2.0}
    found = times.nondecreasing(dict(enumerate((5.0, 4.0, 6.0, 1.0, 7.0))))
    assert [*found.values()] == [4.0, 4.0, 4.0, 4.0, 7.0]


# The command


def test_a_model_that_predicts_one_class_has_not_met_its_target(world, tmp_path, capsys):
    model = load(shutil.copytree(world / "model", tmp_path / "one"))
    model.classifier.bias.data[1] += 9
    model.save_pretrained(tmp_path / "one")
    report = pruned(world, tmp_path / "out", "90%", "--at", "1x16", model=str(tmp_path / "one"), ends=(1,))
    assert (report["met"], report["constant"], report["agreement"]) == (False, True, 1.0)
    printed = capsys.readouterr().out
    assert "target 90%: missed, the model predicts the same for all texts\n" in printed
    assert "next:" not in printed
    batch = {"input_ids": torch.tensor([[2, 5, 3], [2, 7, 3]]), "labels": torch.tensor([0, 1])}
    dense = load(world / "model")
    assert not evaluate_pruned(model, model, [batch])["constant"], "of two texts it may be right"
    dense.classifier.bias.data -= dense(**batch).logits.mean(0)
    assert evaluate_pruned(model, dense, [batch])["constant"], "which the given model tells apart"


def test_what_is_done_is_judged_by_the_limit_of_today(world, tmp_path):
    words = ("50%", "--at", "1x16")
    assert [prune(world, tmp_path / "x", *words, "--lose-at-most", most) for most in ("100", "0", "100")] == [0, 1, 0]


@pytest.mark.parametrize("edited", ["model", "tokenizer"])
def test_a_search_is_not_gone_on_with_after_an_edit(world, tmp_path, monkeypatch, assert_refused, edited):
    folder = shutil.copytree(world / "model", tmp_path / "model")
    words = command_of(world, tmp_path / "x", "50%", "--at", "1x16", model=str(folder))
    with monkeypatch.context() as patch:
        patch.setattr(search, "choose_sizes", interrupt)
        assert main(words) == 130
    if edited == "model":
        set_entries(folder / "config.json", hidden_act="relu")
    else:
        BertTokenizer(WORDS, do_lower_case=False).save_pretrained(folder)
    assert_refused("belongs to a search with another model", *words)


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_a_share_of_the_macs_is_met_and_the_folder_loads(world, tmp_path, share):
    out = tmp_path / "small"
    report, config = pruned(world, out, f"{100 * share:g}%", "--at", "2x16"), load(out).config
    assert report["macs"] == pytest.approx(macs(config, 16) / macs(make().config, 16))
    assert share - 0.1 < report["macs"] <= share  # what the budget allows is used
    sizes = [[len(kept(config, i)) for i in range(L)] for kept in (kept_heads, kept_neurons)]
    assert [report[name] for name in ("heads_kept", "neurons_kept", "met")] == [*sizes, True]
    assert BertTokenizer.from_pretrained(out)("good film")["input_ids"] == [2, 5, 9, 3]
    card = (out / "README.md").read_text(encoding="utf-8")
    assert f"bertlite prune to {100 * share:g}%" in card
    assert "96 texts" in card  # those fitted to
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_what_was_pruned_before_stays_pruned_and_counts(world, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    pruned(world, first, "60%", "--at", "2x16")
    report = pruned(world, second, "30%", "--at", "2x16", model=str(first))
    assert 0.2 < report["macs"] <= 0.3  # of the unpruned model's
    before, after = load(first).config, load(second).config
    for kept, layer in product((kept_heads, kept_neurons), range(L)):
        assert {*kept(after, layer)} <= {*kept(before, layer)}


def test_labels_may_judge_alone(world, tmp_path):
    """The model is that of the texts without labels, and what is lost is counted by the labels."""
    words = "50%", "--at", "1x16", "--lose-at-most", "100"
    labels = "--text", "text", "--label", "class", "--labels-for", "judging"
    plain = pruned(world, tmp_path / "plain", *words, ends=DONE)
    judged = pruned(world, tmp_path / "judged", *words, *labels, texts="texts.tsv", ends=DONE)
    assert_same(*(load(tmp_path / each).state_dict() for each in ("plain", "judged")), atol=0)
    assert "agreement" in plain["lost"]["of"]
    assert judged["lost"]["of"] == "accuracy"


def test_texts_are_as_many_as_have_enough_tokens_in_batches_of_few_positions(world, monkeypatch):
    monkeypatch.setattr(own_texts, "POSITIONS", 24)
    model, tokenizer = (cls.from_pretrained(world / "model") for cls in (BertForSequenceClassification, BertTokenizer))
    every = examples_of(world / "texts.txt", ("text",), None, (), model.config)
    for wanted in (500, 10**6):
        texts = own_texts.with_tokens(every, wanted, tokenizer, 40)
        assert texts.texts == every.texts[: len(texts)]
        batches = batches_of(texts, tokenizer, model, 40)
        tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
        assert wanted <= tokens < wanted + 12 if wanted == 500 else len(texts) == 120
        sizes = [batch["input_ids"].shape for batch in batches]
        assert sum(rows for rows, _ in sizes) == len(texts)
        assert [length for _, length in sizes] == sorted(length for _, length in sizes)
        assert max(rows * length for rows, length in sizes) <= 24


def test_the_report_is_of_unseen_texts_where_they_are_given(world, tmp_path, capsys):
    """Scores are those that `bertlite evaluate` gives, with intervals and paired; texts to fit to need no labels."""
    header, *rows = (world / "texts.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    dev = tmp_path / "dev.tsv"
    dev.write_text(header + "".join(f"poor {row}" for row in rows[:50]), encoding="utf-8")
    out = tmp_path / "small"
    columns = ("--text", "text", "--label", "class")
    report = pruned(world, out, "50%", "--dev", str(dev), *columns, "--at", "2x16", "--lose-at-most", "100")
    assert report["texts"] == {"fitted to": 120, "held out": 50, "mapped": 0, "of": "dev.tsv", "note": None}
    assert report["peak_bytes"] > report["bytes"]
    assert "held out" not in capsys.readouterr().err
    against = ("evaluate", str(out), "--dev", str(dev), "--against", str(world / "model"), *columns)
    assert main([*against, "--out", str(tmp_path / "judged.json")]) in (0, 1)
    judged = json.loads((tmp_path / "judged.json").read_text(encoding="utf-8"))
    assert report["metric"] == judged["metric"] == "accuracy"
    assert report["score"] == judged["model"]["accuracy"]
    assert (report["score_low"], report["score_high"]) == (judged["model"]["low"], judged["model"]["high"])
    for name, value in judged["comparison"].items():  # ends of intervals are of examples resampled in another order
        assert report[name] == pytest.approx(value, abs=0.08 if name.startswith("difference_") else 1e-9), name
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "50 texts of dev.tsv" in card
    assert "accuracy less the given model's, paired" in card
    dev.write_text("".join([header, *rows, f"{'film ' * 9}film\tno\n"]), encoding="utf-8")  # no text ends with film
    words = ("50%", "--dev", str(dev), *columns, "--at", "2x16")
    with pytest.warns(UserWarning, match=r"120 of the 121 examples of dev\.tsv are also in texts\.tsv"):
        assert prune(world, tmp_path / "seen", *words, texts="texts.tsv") == 0


def test_a_regression_is_judged_by_rank_correlation():
    draw = np.random.default_rng(0)
    truth = draw.normal(size=40)
    theirs = truth[:, None] ** 3
    found = scores(theirs + 0.3 * draw.normal(size=(40, 1)), theirs, truth)
    assert (found["metric"], found["dense_score"]) == ("spearman", pytest.approx(1))
    assert found["score_low"] < found["score"] < found["score_high"]
    assert found["difference_low"] < found["difference"] < found["difference_high"] < 0


def test_an_encoder_without_a_head_is_pruned_to_its_own_vectors(world, tmp_path, capsys):
    out = tmp_path / "small"
    with pytest.warns(UserWarning, match=r"1 of the 24 texts held out of \S*texts\.txt are there again"):
        report = pruned(world, out, "50%", "--at", "2x16", model="encoder")
    assert report["kl"] > 0
    own, dense = (BertModel.from_pretrained(each) for each in (out, world / "encoder"))
    texts = examples_of(world / "texts.txt", ("text",), None, (), dense.config)
    _, held_out = split(texts, HELD_OUT, 0)
    batches = batches_of(held_out, BertTokenizer.from_pretrained(out), own, 40)
    vectors = [torch.cat([forward(model, batch)[1] for batch in batches]) for model in (own, dense)]
    cosine = torch.nn.functional.cosine_similarity(*vectors).mean()
    assert report["cosine"] == pytest.approx(float(cosine), abs=1e-5)
    assert report["lost"]["points"] == pytest.approx(100 - 100 * report["rank_correlation"])
    said, card = capsys.readouterr().out, (out / "README.md").read_text(encoding="utf-8")
    assert f"cosine with the given model's vectors {report['cosine']:.3f}, rank correlation with" in said
    assert f"evaluate {out} --dev FILE --text A,B --against" in said
    assert "nats" not in said
    assert "rank correlation with the given model's" in card
    assert report["every_token"] is None


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("text", ["3x", "3.1ms", "2x"])
def test_a_speed_or_a_time_is_met_by_the_clock(world, tmp_path, steady_clock, monkeypatch, text, noise):
    """Choosing by times of sublayers or, if these are noisy, by MACs, the clock has the last word."""
    out, steady = tmp_path / "fast", vars(search)["time_table"]
    monkeypatch.setattr(search, "time_table", lambda *given: None if noise else steady(*given))
    report = pruned(world, out, text, "--at", "1x16")
    dense, own = (expected_seconds(load(each)) for each in (world / "model", out))
    wanted = Target.parse(text).seconds(dense)
    assert 0.85 * wanted < own <= wanted
    assert report["seconds"]["median"] == pytest.approx(own)
    assert (report["met"], report["sizes_by"]) == (True, "macs" if noise else "latency")


@pytest.mark.parametrize("factor", [0.9, 1.2])
def test_a_finished_model_that_misses_on_either_side_is_made_anew(world, tmp_path, steady_clock, monkeypatch, factor):
    """The clock that plans is too kind or too strict, and later tells nothing; the one at the end is neither."""
    steady, wild, fitted = search.clock, noisy(search.clock, 0.8), search.Search.pruned
    finished: list[float] = []

    def biased(models: Any, work: Any, device: str, after: Any = None) -> Any:
        if hasattr(models["pruned"], "factor"):
            finished.append(expected_seconds(models["pruned"]))
        elif finished:
            return wild(models, work, device)
        found = steady(models, work, device)
        return {**found, "pruned": [x * getattr(models["pruned"], "factor", factor) for x in found["pruned"]]}

    def finish(self: Any, *args: Any) -> Any:
        model = fitted(self, *args)
        model.factor = 1.0
        return model

    monkeypatch.setattr(search, "clock", biased)
    monkeypatch.setattr(search.Search, "pruned", finish)
    report = pruned(world, tmp_path / "again", "2x", "--at", "1x16")
    assert 2 <= report["speedup"]["median"] <= 2 / 0.9
    assert report["sizes_by"] == "latency"
    finished.clear()
    monkeypatch.setattr(search, "REFINEMENTS", 0)
    report = pruned(world, tmp_path / "once", "2x", "--at", "1x16", ends=(1,))
    assert report["met"] is False
    assert report["verdict"].startswith("missed, the model is " + ("too slow" if factor < 1 else "faster than needed"))


def noisy(clock: Any, spread: float, misread: int = -1) -> Any:
    """Return a clock on a machine with other work: rounds vary, some take long, one reading is wrong as a whole."""
    draw, readings = np.random.default_rng(0), [0]

    def read(models: Any, work: Any, device: str, after: Any = None) -> Any:
        readings[0] += 1
        found = clock(models, work, device)
        for name, seconds in found.items():
            noise = np.exp(spread * draw.normal(size=len(seconds))) * (1 + 3 * (draw.random(len(seconds)) < 0.1))
            wrong = 1.8 if readings[0] == misread and name == "pruned" else 1.0
            found[name] = (wrong * noise * seconds).tolist()
        return found

    return read


@pytest.mark.parametrize("misread", [2, 3])
def test_a_noisy_clock_does_not_ruin_the_model(world, tmp_path, steady_clock, monkeypatch, misread):
    monkeypatch.setattr(search, "clock", noisy(search.clock, 0.03, misread))
    assert pruned(world, tmp_path / "fast", "2x", "--at", "1x16")["met"] is True
    dense, own = (expected_seconds(load(each)) for each in (world / "model", tmp_path / "fast"))
    assert 1.9 < dense / own < 2.3


def test_where_the_clock_tells_nothing_macs_choose_and_the_target_is_not_called_met(
    world, tmp_path, steady_clock, monkeypatch, capsys
):
    """Not even how fast the smallest model is, which just meets 4x."""
    monkeypatch.setattr(search, "clock", noisy(search.clock, 0.8))
    with pytest.warns(UserWarning, match="too noisy to find 4x: sizes were chosen by MACs, 2[345]% of the unpruned"):
        report = pruned(world, tmp_path / "fast", "4x", "--at", "1x16", ends=(1,))
    said = capsys.readouterr().out
    assert 0.2 < report["macs"] <= 0.25
    assert (report["met"], report["sizes_by"]) == (None, "macs without the clock")
    assert "not checked, the clock of this machine is too noisy to tell" in said
    every = report["every_token"]["speedup"]["median"]
    assert f"every token, as in transformers: {every:.2f} (" in said
    low, high = (f"{report['speedup'][end]:.2f}" for end in ("low", "high"))
    assert f"({low}–{high}) x as fast" in said


def becomes_noisy(monkeypatch: pytest.MonkeyPatch, clear: int) -> None:
    """Let so many readings of the clock be clear, and the others tell nothing."""
    readings, steady, wild = iter(range(99)), search.clock, noisy(search.clock, 0.8)
    monkeypatch.setattr(search, "clock", lambda *given: (steady if next(readings) < clear else wild)(*given))


@pytest.mark.parametrize("clear", [2, 3])
def test_where_the_clock_becomes_noisy_what_it_told_before_decides(world, tmp_path, steady_clock, monkeypatch, clear):
    """The smallest model is timed twice, then a choice.  A third of the MACs would take too long."""
    becomes_noisy(monkeypatch, clear)
    report = pruned(world, tmp_path / "fast", "3x", "--at", "1x16", ends=(1,))
    dense, own = (expected_seconds(load(each)) for each in (world / "model", tmp_path / "fast"))
    assert own == pytest.approx(dense / 3, rel=0.1)
    assert report["sizes_by"] == "latency"


def test_a_model_without_any_unit_is_not_chosen_where_there_is_room(world, tmp_path, steady_clock, monkeypatch):
    """Its time is 0.93 of the target's, and the first choice is not timed clearly."""
    becomes_noisy(monkeypatch, 2)
    target = 0.93 * expected_seconds(load(world / "model")) / 2e-3
    report = pruned(world, tmp_path / "fast", f"{target:.4f}x", "--at", "1x16", ends=(1,))
    assert any([*report["heads_kept"], *report["neurons_kept"]])


def test_the_interval_of_a_time_ratio_tells_or_does_not():
    assert search.TimeRatio.of([1.2, 0.9, 1.0, 1.1, 0.95, 1.05, 1.15, 0.8, 1.3]) == search.TimeRatio(0.9, 1.05, 1.2)
    for low, median, high, verdict, clear in (
        (1.01, 2.0, 9.0, "slow", True),
        (0.1, 0.5, 0.89, "fast", True),
        (0.91, 0.95, 0.99, "right", True),
        (0.96, 0.99, 1.04, "right", False),
        (0.96, 1.01, 1.04, "slow", False),
        (0.85, 0.95, 1.04, None, False),
    ):
        ratio = search.TimeRatio(low, median, high)
        assert (ratio.verdict, ratio.is_clear) == (verdict, clear)


def test_the_gain_of_a_dtype_counts_towards_a_speed(world, tmp_path, steady_clock, capsys):
    """The target is over the given model in its own dtype; the report has both factors and what the dtype costs."""
    if reason := missing_platform():
        pytest.skip(reason)
    whole, smallest = expected_seconds(make()), 2e-3
    wanted = 3 * (1 + whole / smallest) / 2
    texts = [f"{'good ' * (i % 5)}{'film ' * (i % 7)}{'a ' * (i % 3)}bad" for i in range(300)]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    words = ["--at", "1x16", "--dtype", "int8", "--texts", str(tmp_path / "texts.txt")]
    for model, name in (("encoder", "neighbours"), ("model", "agreement")):
        prune(world, out := tmp_path / model, f"{wanted:.2f}x", *words, model=model)
        report = report_of(out)
        assert report["alone"]["speedup"]["median"] == pytest.approx(3)
        assert wanted <= report["speedup"]["median"] < 1.1 * wanted + 0.01
        assert 0 < report["alone"][name] <= 1
        assert report[name] <= 1
        settings, card = report["settings"], (out / "README.md").read_text(encoding="utf-8")
        assert (settings["allocate"], settings["backend"], settings["dtype"]) == ("macs", "native", "int8")
        assert f"pruning: {report['speedup']['median'] / 3:.2f} x more" in capsys.readouterr().out
        assert "speed at 1 x 16, backend native, int8" in card
        assert "in int8 alone" in card
    assert prune(world, tmp_path / "none", "2.9x", *words) == 2
    assert "the target 2.9x needs no pruning: the given model in this dtype is 3 x as" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    out = tmp_path / "all"
    assert prune(world, out, "2.9x+", *words, model="encoder") == 0, "who asks goes on"
    assert (report_of(out)["macs"], report_of(out)["met"]) == (1, True)
    assert "MACs: 100.0 % of the unpruned model's (nothing had to be removed)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("2x --dtype int8 --backend plain", "backend 'plain' has no int8"),
        ("40% --distil 0", "--distil is 0; give minutes above 0"),
        ("40% --distil 0.0001", "--distil 0.0001 is too short: running the given model, timing and 6 checks take"),
        ("40% --labels-for judging", "needs --label NAME, the column with the labels"),
        ("2x --at 1x41", "the work has 41 tokens; the model has positions for 40: give --at 8x40"),
        ("1ms", "the target 1ms cannot be met by pruning: without any head or neuron a forward takes 2 ms"),
    ],
)
def test_what_cannot_be_done_is_refused(world, tmp_path, steady_clock, monkeypatch, assert_refused, words, message):
    monkeypatch.setattr(search, "output_metrics", lambda *args, **options: pytest.fail("the search began"))
    target, *others = words.split()
    assert_refused(message, *command_of(world, tmp_path / "x", target, "--at", "1x16", *others))
    assert [each.name for each in tmp_path.iterdir()] == []


def test_models_and_targets_that_do_not_fit_are_refused_at_once(world, tmp_path, assert_refused):
    folder, words = shutil.copytree(world / "model", tmp_path / "choice"), (tmp_path / "x", "40%", "--at", "1x16")
    set_entries(folder / "config.json", architectures=["BertForMultipleChoice"])
    assert_refused("BertForMultipleChoice reads groups of texts", *command_of(world, *words, model=str(folder)))
    labelled = command_of(world, *words, "--text", "text", "--label", "class", texts="texts.tsv", model="encoder")
    assert_refused("BertModel does not classify texts: leave out --label", *labelled)
    prune, to, *others = command_of(world, *words)
    assert_refused("a target is given twice: 40 %, 40%", prune, to, "40 %", *others)


def test_a_folder_that_is_locked_or_there_already_is_not_written_to(world, tmp_path, assert_refused):
    words = command_of(world, out := tmp_path / "small", "40%", "--at", "2x16")
    with lock_folder(out):
        assert_refused(f"is writing to {out}: wait for it", *words)
    assert not out.exists()
    out.mkdir()
    (out / "mine").touch()
    assert_refused("is there already: name another folder", *words)
    assert [*tmp_path.rglob("*")] == [out, out / "mine"]


def test_the_given_model_is_once_as_fast_as_itself_whatever_the_clock_says(world, tmp_path, steady_clock, monkeypatch):
    monkeypatch.setattr(search, "clock", noisy(search.clock, 0.8))
    assert pruned(world, tmp_path / "same", "1x", "--at", "1x16")["heads_kept"] == [N] * L


def test_what_a_model_may_lose_is_a_limit_and_few_texts_are_told_before_the_work(world, tmp_path, monkeypatch, capsys):
    words, few = ("20%", "--at", "2x16"), tmp_path / "few.txt"
    with pytest.warns(UserWarning, match=r"loses 3\d\.\d points of agr.*, more than a MiniLM normally does \(15\)"):
        assert prune(world, tmp_path / "told", *words) == 0
    with pytest.warns(UserWarning, match=r"more than --lose-at-most allows \(10\)"):
        assert prune(world, tmp_path / "asked", *words, "--lose-at-most", "10") == 1
    with pytest.warns(UserWarning, match="more than a MiniLM normally does"):
        assert prune(world, tmp_path / "judged", *words, "--dev", str(world / "texts.txt")) == 1
    assert prune(world, tmp_path / "allowed", *words, "--lose-at-most", "50") == 0
    said = capsys.readouterr().out
    lost = r"target 20%: too much is lost, \d\d\.\d points of agreement, more than 1[05]; the target itself is met\n"
    assert len(re.findall(lost, said)) == 3
    assert re.search(r"target 20%: met, 3\d\.\d points of agreement lost\n", said), "where so much is allowed"
    asked = report_of(tmp_path / "asked")
    assert asked["lost"]["points"] == pytest.approx(100 * (1 - asked["agreement"]))
    assert (asked["lost"]["limit"], asked["lost"]["too_much"]) == (10, True)
    few.write_text("".join(f"good {word}\n" for word in WORDS[5:]) * 2, encoding="utf-8")
    monkeypatch.setattr(search, "output_metrics", interrupt)
    with pytest.warns(UserWarning, match=r"15 texts to fit to have 60 tokens, .* give 74 tokens or more, such as 19"):
        assert prune(world, tmp_path / "few", "50%", "--at", "2x16", texts=str(few)) == 130


def test_texts_to_judge_by_that_are_much_longer_than_those_to_fit_to_are_told_before_the_work(
    world, tmp_path, monkeypatch
):
    monkeypatch.setattr(search, "output_metrics", interrupt)
    dev, words = tmp_path / "dev.txt", ("50%", "--at", "2x16", "--dev", str(tmp_path / "dev.txt"))
    dev.write_text("".join(f"{'the film is good ' * 5}{word}\n" for word in WORDS[5:] * 2), encoding="utf-8")
    with pytest.warns(UserWarning, match=r"judge by have 23 tokens in the mean, those to fit to 8\..* to --texts"):
        assert prune(world, tmp_path / "x", *words) == 130
    dev.write_text("the film is good and fine\n" * 12, encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prune(world, tmp_path / "y", *words) == 130


@pytest.mark.parametrize("finished", ["metrics", "curves-0", "layer-0-0"])
def test_a_killed_search_goes_on_and_ends_as_one_that_was_not(world, tmp_path, monkeypatch, finished):
    """Before the curves the sums over the forwards of the gradients are gone then: the layers run once more."""
    words, usual, unfinished = ("40%", "--at", "2x16"), State.save, tmp_path / ".again.unfinished"
    assert prune(world, tmp_path / "whole", *words) == 0

    with monkeypatch.context() as patch:
        patch.setattr(State, "save", lambda *given: usual(*given) or (given[1] == finished and interrupt()))
        assert prune(world, tmp_path / "again", *words) == 130
    assert not (tmp_path / "again").exists()
    assert [*unfinished.rglob(f"{finished}.pt")] != []
    for name in ("output_metrics", *(("loss_curves", "choose_sizes") if "layer" in finished else ())):
        monkeypatch.setattr(search, name, lambda *args, **options: pytest.fail("it was computed again"))
    assert prune(world, tmp_path / "again", *words) == 0
    one, other = (load(tmp_path / name) for name in ("whole", "again"))
    assert one.config == other.config
    assert_same(one.state_dict(), other.state_dict(), atol=0 if "layer" in finished else 1e-6)
    assert not unfinished.exists()


@pytest.fixture
def thirty_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a training have 30 steps, however fast this machine is."""
    monkeypatch.setattr(distil.Distillation, "plan", lambda *_: {"steps": 30, "step_seconds": 0.01})
    monkeypatch.setattr(distil.Distillation, "check_time", lambda *_: None)
    monkeypatch.setattr(distil, "RECIPE", replace(distil.RECIPE, batch_size=8))


@pytest.fixture
def longer_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the best state be that furthest from the first: a random model teaches nothing."""

    def quality(dense: Any, batches: Any, head: Any) -> Any:
        return lambda model: (float((model.classifier.weight - dense.classifier.weight).detach().norm()), 0.0)

    monkeypatch.setattr(command, "Quality", quality)


def test_a_longer_training_needs_no_other_search(world, tmp_path, thirty_steps, monkeypatch):
    words = ("30%", "--at", "2x16", "--keep", str(tmp_path / "kept"))
    plain = pruned(world, tmp_path / "plain", *words, ends=DONE)
    for name in ("output_metrics", "loss_curves", "choose_sizes", "prune_layerwise_"):
        monkeypatch.setattr(search, name, lambda *_, **__: pytest.fail("it was computed again"))
    assert prune(world, tmp_path / "short", *words, "--distil", "1") in DONE
    long = pruned(world, tmp_path / "long", *words, "--distil", "60 steps", ends=DONE)
    assert long["heads_kept"] == plain["heads_kept"]
    assert long["distilled"]["minutes"] is None


@pytest.mark.parametrize(
    ("scores", "minutes", "words"),
    [
        ((40.0, 20.0, 14.0), 5, "by 26.0 points together. Going on .* for each further 2 min: --distil 10,"),
        ((40.0, 20.0, 14.0), None, "for each further 40 steps: --distil 200steps,"),
        ((14.0, 13.0, 13.5), 5, "were not both better"),
    ],
)
def test_the_curve_of_a_training_tells_whether_more_would_gain(scores, minutes, words):
    curve = [(0, 0.0, -1.0, 50.0), *((60 + 20 * i, 0.0, -x, x) for i, x in enumerate(scores))]
    found = describe_gain({"curve": curve, "minutes": minutes, "steps": 100})
    assert re.search(words, found), found


@pytest.mark.parametrize("labels", [True, False])
def test_distillation_is_told_and_leaves_nothing_worse(world, tmp_path, thirty_steps, capsys, labels):
    words = ("30%", "--at", "2x16", "--text", "text", *(["--label", "class"] if labels else []))
    before = pruned(world, tmp_path / "pruned", *words, texts="texts.tsv", ends=DONE)
    after = pruned(world, tmp_path / "trained", *words, "--distil", "2", texts="texts.tsv", ends=DONE)
    assert before["distilled"] is None
    facts = {name: after["distilled"][name] for name in ("minutes", "steps", "texts", "labels", "epochs")}
    assert facts == {"minutes": 2, "steps": 30, "texts": 96, "labels": labels, "epochs": 2.5}
    step, said = after["distilled"]["best_step"], capsys.readouterr().out
    assert step in (0, 6, 12, 18, 24, 30)
    if labels:
        assert after["score"] >= before["score"]
        assert f"accuracy {100 * after['score']:.1f} [" in said
    else:
        assert after["kl"] <= before["kl"]
    card = (tmp_path / "trained" / "README.md").read_text(encoding="utf-8")
    for page in (said, card):
        assert "then the layers were trained on 96 texts, 2.5 times each in 30 steps of 0.01 s (2 min" in page
        assert f"step {step} were kept, the best of 6 on the 24 texts held out of texts.tsv" in page
        assert "If the given model was trained on them, results on unseen texts may be worse: give --dev" in page
        assert ("and for the labels" in page) == labels
    assert "no weight was trained" not in card
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    "cls", [BertForMaskedLM, BertForTokenClassification, BertForQuestionAnswering, BertForPreTraining, BertModel]
)
def test_heads_of_tokens_and_encoders_are_distilled(cls, world, tmp_path, thirty_steps, capsys):
    folder = shutil.copytree(world / "model", tmp_path / "model")
    make(cls, vocab_size=len(WORDS)).float().save_pretrained(folder)
    report = pruned(world, tmp_path / "small", "30%", "--at", "2x16", "--distil", "2", model=str(folder))
    assert report["distilled"]["steps"] == 30
    like, outputs = ("cosine", "vectors") if cls is BertModel else ("agreement", "predictions")
    assert 0 <= report[like] <= 1
    assert f"for the given model's {outputs} and hidden states" in capsys.readouterr().out


def test_an_encoder_without_a_head_is_distilled_to_its_own_vectors(thirty_steps):
    dense, draw = make(BertModel).float(), random.Random(0)
    ids = [(2, *draw.choices(range(5, 14), k=draw.randint(2, 9)), 3) for _ in range(120)]
    train, held = (
        EncodedExamples(tuple((each, (0,) * len(each)) for each in some), (0.0,) * len(some))
        for some in (ids[:96], ids[96:])
    )
    batch = held.batch(range(24), torch.float32)
    del batch["labels"]
    model = prune_heads(prune_neurons(dense, {0: range(20), 2: range(9)}), {0: [0, 1], 2: [3]})
    before, asked = evaluate_pruned(model, dense, [batch]), Quality(dense, [batch])
    distil.Distillation(dense, train, False, 1, asked).finetune_(model, replace(distil.RECIPE, lr=1e-3, epochs=2.5))
    after = evaluate_pruned(model, dense, [batch])
    assert after["kl"] < before["kl"] / 2
    assert 1 - after["cosine"] < (1 - before["cosine"]) / 2


def test_a_head_for_flags_is_not_distilled():
    model = make(BertForSequenceClassification, problem_type="multi_label_classification")
    with pytest.raises(ValueError, match="BertForSequenceClassification predicts flags; --distil takes heads for"):
        distil.Distillation(model, EncodedExamples((), ()), False, 1, lambda model: 0)


def test_a_killed_distillation_goes_on_and_ends_as_one_that_was_not(
    world, tmp_path, thirty_steps, longer_is_better, monkeypatch
):
    words = ("30%", "--at", "2x16", "--distil", "5")
    assert prune(world, tmp_path / "whole", *words) in DONE
    assert prune(world, tmp_path / "pruned", *words[:3]) in DONE
    save = finetune.save_state

    with monkeypatch.context() as patch:
        patch.setattr(finetune, "save_state", lambda *given: save(*given) or (given[2] == 18 and interrupt()))
        assert prune(world, tmp_path / "again", *words) == 130
    monkeypatch.setattr(distil.Distillation, "plan", lambda *_: pytest.fail("the steps were counted again"))
    monkeypatch.setattr(search, "choose_sizes", lambda *_: pytest.fail("sizes were chosen again"))
    bar, opened = Progress.open_bar, list[Any]()
    monkeypatch.setattr(Progress, "open_bar", lambda self, *a: opened.append(a) or bar(self, *a))
    assert prune(world, tmp_path / "again", *words) in DONE
    assert all(total is None or done < total for _, total, _, done in opened), "no stage opens with 100 %"
    one, other = (load(tmp_path / name) for name in ("whole", "again"))
    assert_same(one.state_dict(), other.state_dict(), atol=0)
    reports = [report_of(tmp_path / name) for name in ("whole", "again")]
    assert reports[0]["distilled"]["best_step"] == reports[1]["distilled"]["best_step"] > 0
    pruned = load(tmp_path / "pruned").state_dict()
    same = {name for name, value in one.state_dict().items() if torch.equal(value, pruned[name])}
    assert same == {name for name in pruned if "embeddings" in name}  # all else is trained


def test_the_steps_of_distillation_are_those_that_the_minutes_are_enough_for(world, monkeypatch):
    now, recorded = [0.0], False

    def train(model: Any, data: Any, task: Any, recipe: Any, *, log: Any, **_: Any) -> None:
        steps = round(recipe.epochs * 10)  # 10 batches
        for step in range(steps):
            now[0] += 5 if recorded and step < steps // 2 else 1
            if (step + 1) % max(1, steps // 20) == 0:
                log(step=step + 1)

    def score(model: Any) -> float:
        now[0] += 2
        return 0.0

    def teacher(model: Any, batch: Any) -> list[Any]:
        now[0] += 3
        return [{distil.STATES: torch.zeros(25)}] * len(batch["input_ids"])

    monkeypatch.setattr(distil, "finetune_", train)
    monkeypatch.setattr(distil, "outputs_of_texts", teacher)
    model = load(world / "model")
    data = EncodedExamples(tuple(((2, 5 + i % 10, 5 + i // 10, 3), (0,) * 4) for i in range(100)), (0.0,) * 100)
    monkeypatch.setattr(distil, "RECIPE", replace(distil.RECIPE, batch_size=10))

    def asked(amount: Any, device: str = "cpu") -> Any:
        return distil.Distillation(model, data, False, amount, score, device=device, clock=lambda: now[0])

    others = 12 + 2 + 6 * 2  # 12 steps that are timed, a check that is, and all six
    assert asked(1).plan(model, distil.RECIPE) == {"steps": (60 - others) // (3 + 1), "step_seconds": 1}
    assert asked(2).plan(model, distil.RECIPE)["steps"] == 10 + (120 - others - 40), "the teacher runs once on a text"
    assert asked(0.4).plan(model, distil.RECIPE)["steps"] == 1, "never none after a search"
    assert asked("77steps").plan(model, distil.RECIPE)["steps"] == 77
    monkeypatch.setattr(distil, "MEMORY", 5 * 10 * 100)  # bytes: half of the texts
    assert asked(2).plan(model, distil.RECIPE)["steps"] == 10 + int((120 - others - 40) / (1 + 3 / 2))
    asked(0.36).check_time()
    with pytest.raises(ValueError, match=r"too short: .* take 20 s, and a step 1 s; give 0\.35 minutes or more"):
        asked(0.34).check_time()

    # A GPU records steps first, which takes longer.
    recorded = True
    monkeypatch.setattr(distil.Distillation, "half", False)
    assert asked(20, "cuda").plan(model, distil.RECIPE)["step_seconds"] == 1


def test_a_gpu_is_timed_under_graphs():
    given: Any = {}, {"dtype": "int8"}, {"device": "cuda:1"}, {"device": "cuda", "backend": "plain"}
    assert [command.timing_backend(PruneSettings(**each)) for each in given] == ["plain", "auto", "graphs", "plain"]


def test_the_given_model_runs_once_and_gives_what_it_gave_in_any_batch(monkeypatch):
    model = make(BertForSequenceClassification, num_labels=3)
    rows = tuple((tuple(range(5, 8 + i)), (0,) * (3 + i)) for i in range(4))
    data = EncodedExamples(rows, (0, 1, 2, 0))
    batch = data.batch([2, 0], torch.long)
    batch.pop("labels")
    wanted, calls = model(**batch, output_hidden_states=True), list[int]()
    model.register_forward_hook(lambda *_: calls.append(1))
    recorded = distil.RecordedTeacher(model, data, [[0, 1], [2, 3]])
    bytes_of = {each: x.nbytes for each, x in recorded.known[rows[0]].items()}
    monkeypatch.setattr(distil, "MEMORY", 1)
    some = distil.RecordedTeacher(model, data, [[2, 1], [0, 3]])  # memory is full after two texts
    for teacher, more in ((recorded, 0), (some, 1)):
        calls.clear()
        found = teacher.known_outputs(batch)
        assert len(calls) == more
        torch.testing.assert_close(found["logits"], wanted.logits.detach())
        real = batch["attention_mask"].bool()
        for own, other in zip(found[distil.STATES].float().unbind(2), wanted.hidden_states, strict=True):
            torch.testing.assert_close(own[real], other[real].detach().float(), rtol=2**-8, atol=0)  # bfloat16
    layers, width = len(wanted.hidden_states), wanted.hidden_states[0].shape[-1]
    assert bytes_of == {"logits": 3 * 8, distil.STATES: 2 * 3 * layers * width}
    assert (recorded.batches, some.batches, len(some.known)) == (2, 1, 2)


def test_states_are_compared_with_predictions_that_are_made_once(world):
    model = load(world / "model")
    dense = load(world / "model")
    dense.classifier.bias.data += 0.5 * torch.arange(dense.config.num_labels)
    batches = [{"input_ids": torch.tensor([[2, 5 + i, 3]]), "labels": torch.tensor([i])} for i in range(2)]
    calls: list[int] = []
    dense.register_forward_hook(lambda *_: calls.append(1))
    quality = Quality(dense, batches)
    found = [quality(model), quality(model)]
    assert len(calls) == 2
    whole = evaluate_pruned(model, dense, batches)
    assert found == [(whole["score"], -whole["kl"], whole["lost"]["points"])] * 2
    assert whole["kl"] > 0


def test_several_targets_share_one_search_and_are_as_each_alone(world, tmp_path, steady_clock, monkeypatch, capsys):
    calls: list[str] = []
    for name in ("output_metrics", "loss_curves", "time_table"):
        usual = getattr(search, name)
        monkeypatch.setattr(search, name, lambda *a, n=name, f=usual, **b: calls.append(n) or f(*a, **b))
    words = [str(world / "model"), "--texts", str(world / "texts.txt"), "--at", "1x16"]
    several = ["prune", "to", "2x", "40%", "2.5 ms", *words, "--out", str(tmp_path / "all"), "--json"]
    capsys.readouterr()
    assert main(several) in DONE
    said = capsys.readouterr()
    reports = json.loads(said.out)["targets"]
    assert [report["target"] for report in reports] == ["2x", "40%", "2.5 ms"]
    assert calls == ["output_metrics", "loss_curves", "time_table"]
    lines = said.err.splitlines()
    assert lines[0] == f"prune to 2x 40% 2.5 ms: loading {world / 'model'}"
    assert "prune to 2x: gradients" in lines
    stages = [line.partition(",")[0] for line in lines[1:] if line.startswith("prune to") and " left" not in line]
    assert max(map(len, stages)) <= 80 - 52, "at 80 columns the bar, the rate and the time left stay"
    useful = sum(not report["constant"] for report in reports)
    assert sum(line.startswith("next: bertlite evaluate ") for line in lines) == useful > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all"]
    kept = ["--keep", str(tmp_path / "kept")]
    for target in ("2x", "40%", "2.5 ms"):  # the first without --keep, the others in two commands that share it
        out = tmp_path / f"one-{target.replace(' ', '')}"
        assert main(["prune", "to", target, *words, "--out", str(out), *(kept if target != "2x" else [])]) in DONE
        one, other = (load(x) for x in (out, tmp_path / "all" / out.name[4:]))
        assert one.config == other.config
        assert_same(one.state_dict(), other.state_dict(), atol=0)
    assert len(calls) == 3 + 3 + 3
    assert len([path for path in (tmp_path / "kept").glob("*") if path.is_dir()]) == 2, "each target's pruned layers"
    assert f"or minutes, with the same model and texts: --keep {tmp_path / 'kept'}" in capsys.readouterr().out
    assert main(["prune", "to", "30%", *words, "--seed", "1", "--out", str(tmp_path / "other"), *kept]) == 2
    assert "belongs to a search with another seed and texts: name another folder" in capsys.readouterr().err
    assert main(several) in DONE  # what is done is not done again
    assert f"{tmp_path / 'all' / '2x'} is done already" in capsys.readouterr().err
    assert len(calls) == 9


@pytest.mark.parametrize("loaded", [False, True])
def test_from_python_a_folder_or_a_loaded_model_gives_what_the_command_gives(world, tmp_path, capsys, loaded):
    assert prune(world, tmp_path / "command", "50%", "--at", "2x16", "--lose-at-most", "100") == 0
    capsys.readouterr()
    given, texts = world / "model", world / "texts.txt"
    options: dict[str, Any] = {"settings": PruneSettings(calibration=1024, at=(2, 16), lose_at_most=100)}
    if loaded:
        given, texts = load(given).train(), texts.read_text().split("\n")[:-2]
        before = {name: value.clone() for name, value in given.state_dict().items()}
        with pytest.raises(ValueError, match="a loaded model has no tokenizer of its own: give tokenizer too"):
            prune_to(given, "50%", texts, tmp_path / "python", **options)
        options["tokenizer"] = BertTokenizer.from_pretrained(world / "model")
    record = prune_to(given, "50%", texts, tmp_path / "python", **options)
    assert capsys.readouterr() == ("", "")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "python" / name).read_bytes() == (tmp_path / "command" / name).read_bytes(), name
    report = report_of(tmp_path / "python")
    assert report == {**report, **record}, "the record is the report"
    assert report["settings"] == report_of(tmp_path / "command")["settings"]
    assert report["checkpoint"] == (None if loaded else str(world / "model"))
    again = prune_to(given, ["50%"], texts, tmp_path / "python", **options)
    assert again["wall_seconds"] == report["wall_seconds"], "what is finished is not done again"
    if loaded:
        assert given.training
        assert options["tokenizer"].model_max_length == BertTokenizer.from_pretrained(world / "model").model_max_length
        assert_same(given.state_dict(), before, atol=0)


def test_a_loaded_encoder_makes_vectors_without_files_of_a_tokenizer_and_a_given_one_is_used_everywhere(world):
    tokenizer = BertTokenizer.from_pretrained(world / "encoder")
    with as_checkpoint(BertModel.from_pretrained(world / "encoder"), tokenizer) as (source, named):
        given = command.GivenModel(source, Examples("x", (), ()), None, PruneSettings())
    assert (given.head, named) == (MEAN, None)
    with as_checkpoint(world / "encoder", None) as (source, named):
        assert (source.tokenizer.get_vocab(), named) == (tokenizer.get_vocab(), str(world / "encoder"))
    given = Checkpoint(world / "encoder")
    with as_checkpoint(given, tokenizer) as (source, named):
        assert (source.tokenizer, named) == (tokenizer, str(world / "encoder"))
    assert given.tokenizer is not tokenizer


OTHERS: dict[str, Any] = {"text": ("a",), "columns": ("a",), "labels_for": "judging", "at": (2, 3)}
OTHERS |= dict.fromkeys(("label", "device", "lengths", "backend", "dtype"), "another")


def test_resuming_compares_every_setting_that_is_not_marked():
    """A field that is added counts, without any list of names."""

    @dataclass(frozen=True)
    class More(PruneSettings):
        new: int = 0

    base = More(label="b")
    for each in fields(More):
        value = getattr(base, each.name)
        changed = replace(base, **{each.name: OTHERS.get(each.name, not value if isinstance(value, bool) else 7)})
        assert (changed.determining() == base.determining()) == (each.name == "lose_at_most"), each.name
    curves = {"text", "columns", "label", "labels_for", "max_length", "calibration", "vocabulary", "seed", "device"}
    assert {*base.determining(curves=True)} == {*curves, "new"}


def test_every_option_that_shapes_a_result_is_a_setting():
    """The others name texts, whose contents count, and what is written."""
    command = parts.subcommands(parts.subcommands(parser())["prune"])["to"]
    names = {option.dest for option in command._actions if option.option_strings}
    others = {"help", "texts", "dev", "out", "json", "quiet", "keep"}
    assert names - others == {each.name for each in fields(PruneSettings)}
    args = parser().parse_args(["prune", "to", "2x", "m", "--texts", "t", "--out", "o"])
    assert from_options(PruneSettings, vars(args)) == PruneSettings()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels_for": "judgin"}, "labels_for is 'judgin'; give one of all, judging"),
        ({"batch_size": 0}, "batch_size is 0; give 1 or more"),
        ({"text": "review"}, "text is 'review'; give a list"),
        ({"batch_size": 1.5}, "batch_size is 1.5; give an integer"),
        ({"distil": "10"}, "distil is '10'; give minutes, or steps such as 500steps"),
    ],
)
def test_a_setting_of_no_meaning_is_refused(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        PruneSettings(**given)


def test_the_first_line_comes_before_anything_slow_is_imported(monkeypatch, capsys):
    class Imported:
        def __getattr__(self, name: str) -> Any:
            if name != "prune_to":
                raise AttributeError(name)
            assert capsys.readouterr().err == "prune to 2x: loading my-model\n"
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "bertlite.experiments.budget.command", Imported())
    assert main(["prune", "to", "2x", "my-model", "--texts", "x.txt", "--out", "small"]) == 130


def test_an_unfinished_search_is_not_continued_by_another_version(tmp_path, monkeypatch):
    State(tmp_path / "a", {"model": "2x", "seed": 0})
    State(tmp_path / "a", {"model": "2x", "seed": 0})
    monkeypatch.setattr(search, "FORMAT", search.FORMAT + 1)
    with pytest.raises(ValueError, match="a belongs to a search with another format: name another folder, or delete"):
        State(tmp_path / "a", {"model": "2x", "seed": 0})
