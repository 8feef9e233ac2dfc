"""The comparison of ways to prune: each meets its share, peers are those of their papers, tasks are as they say."""

import copy
import json
import shutil
import sys
from itertools import combinations, count, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import F64, SPECIAL, make, make_batches, seen_by
from torch import Tensor

from bertlite import BertForSequenceClassification, BertTokenizer, head_importance, prune_heads, prune_neurons
from bertlite.pruning import macs, neuron_importance, prune_layerwise, rank_heads, rank_neurons, with_pruned
from bertlite.pruning.importance import layerwise
from bertlite.pruning.importance.least_squares import start_runs
from bertlite.pruning.importance.moments import gather, total
from bertlite.pruning.importance.structures import STRUCTURES, run
from bertlite.support.files import read_json_object, write_json
from scripts.measure.budgets import __main__ as budgets
from scripts.measure.budgets import kprune, kwon, tasks
from scripts.measure.budgets.methods import OURS, WAYS, Subject

L, N, W, H = 3, 4, 37, 12
LAYERS = "whole layers left out"


@pytest.fixture
def model() -> Any:
    return make(BertForSequenceClassification, num_labels=3)


def data(count: int = 40) -> list[dict[str, Tensor]]:
    batches, labels = make_batches(count), (torch.arange(count) % 3).split(10)
    return [{**batch, "labels": each} for batch, each in zip(batches, labels, strict=True)]


@pytest.mark.parametrize("name", [name for name in WAYS if name != "whole"])
def test_every_way_meets_the_share_and_leaves_the_model_alone(name, model):
    if "Torch-Pruning" in name:
        pytest.importorskip("torch_pruning", reason="torch-pruning is not installed")
    before = copy.deepcopy(model.state_dict())
    found = WAYS[name].prune(Subject(model, data(), 16), 0.4)
    assert 0.3 < macs(found.config, 16) / macs(model.config, 16) <= 0.4
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())


def test_a_way_whose_library_is_missing_is_refused_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps torch-pruning, or name other ways"):
        budgets.main(["nowhere", "--data", "nowhere", "--out", f"{tmp_path / 'runs'},{tmp_path / 'found.json'}"])


@pytest.mark.parametrize("share", [1.0, 0.83, 0.31, 0.02])
def test_within_a_share_of_the_macs_no_choice_keeps_more(share):
    config = make(num_hidden_layers=2, intermediate_size=5).config
    scores = [torch.rand(2, count, generator=torch.Generator().manual_seed(count), dtype=F64) for count in (4, 5)]
    ranked = [scores[0].flatten().sort().values, scores[1].flatten().sort().values]  # the lowest are best to remove
    best = min(
        float(ranked[0][:few].sum() + ranked[1][:others].sum())
        for few, others in product(range(9), range(11))
        if macs(with_pruned(config, rank_heads(scores[0], count=few), rank_neurons(scores[1], count=others)), 11)
        <= share * macs(config, 11)
    )
    found = kwon.within_budget(config, share, 11, scores[0], scores[1])
    assert macs(with_pruned(config, *found), 11) <= share * macs(config, 11)
    gone = sum(
        float(each[i, units].sum()) for each, choice in zip(scores, found, strict=True) for i, units in choice.items()
    )
    assert gone == pytest.approx(best, abs=1e-12)


def test_the_commands_own_method_is_what_is_compared(model, monkeypatch):
    """Sizes are chosen by some of the batches."""
    monkeypatch.setattr(layerwise, "DRAWS", 60)
    monkeypatch.setattr(layerwise, "TOKENS_TO_CHOOSE", 1)
    found = WAYS[OURS].prune(Subject(model, data(), 16), 0.4).state_dict()
    wanted = prune_layerwise(model, data(), 0.4, 16).state_dict()
    assert all(torch.equal(x, wanted[key]) for key, x in found.items())


def test_kwons_gradients_are_those_of_fisher_scores(model):
    found = kwon.both_gradients(model, data())
    for name, measure in (("heads", head_importance), ("neurons", neuron_importance)):
        torch.testing.assert_close(found[name].square().mean(0), measure(model, data(), criterion="fisher"))


def test_kwons_rearrangement_never_costs_more_and_removes_as_many():
    """Beside every choice of as many units: of one, the best is found."""
    for seed, amount in product(range(6), (1, 2, 4)):
        grads = torch.rand(9, 2, 6, dtype=F64, generator=torch.Generator().manual_seed(seed)) - 0.5

        def cost(gone: Any, grads: Tensor = grads) -> float:
            return float(grads[:, 1, list(gone)].sum(1).square().mean())  # (1-m)ᵀ F (1-m)

        better = kwon.rearrange({1: [*range(amount)]}, grads)[1]
        best = min(map(cost, combinations(range(6), amount)))
        assert len(better) == amount
        assert best - 1e-12 <= cost(better) <= cost(range(amount)) + 1e-12
        assert amount > 1 or cost(better) < best + 1e-12
    alike = torch.tensor([[[1.0, 1.0, 1.2, 3.0]], [[-1.0, -1.0, 1.2, 3.0]]], dtype=F64)  # 0 and 1 cost much together
    assert len({0, 1} & set(kwon.rearrange({0: [0, 1]}, alike)[0])) == 1


def test_kwons_factors_solve_the_normal_equations_with_damp_1_about_1(model, monkeypatch):
    """The neurons of layer 0, by the tokens themselves rather than by moments."""
    from scipy.sparse import linalg

    solved: list[Any] = []  # LSMR ends before the solution, and the last bit of a sum moves that end by 1e-5
    lsmr = linalg.lsmr
    monkeypatch.setattr(
        linalg, "lsmr", lambda a, b, damp: solved.append((a, b, damp, lsmr(a, b, damp))) or solved[-1][3]
    )
    pruned = prune_neurons(model, {0: range(20)})
    tuned = copy.deepcopy(pruned)
    assert kwon.tune_(tuned, model, data()) >= 1
    part, whole, new = (each.bert.encoder.layer[0].output for each in (pruned, model, tuned))
    inputs, residual, _ = seen_by(part, pruned, data())
    wanted, _ = seen_by(whole.LayerNorm, model, data())
    own = part.dense.requires_grad_(False)
    parts = torch.stack([torch.outer(inputs[:, i], own.weight[:, i]).flatten() for i in range(W - 20)], 1)
    gram = parts.T @ parts
    a, b, damp, (solution, *_) = solved[0]
    assert damp == 1
    best = parts.T @ (wanted - residual - own.bias).flatten() - gram.sum(1)
    np.testing.assert_allclose(a, gram, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(b, best, rtol=1e-10, atol=1e-12)
    assert np.abs(solution).max() > 1e-3
    torch.testing.assert_close(new.dense.weight, own.weight * (1 + torch.from_numpy(solution)), rtol=1e-12, atol=0)


def test_kwons_tuning_stops_at_the_first_factor_beyond_10(model, monkeypatch):
    monkeypatch.setattr(kwon, "LARGEST", 0.5)
    tuned = prune_heads(model, {0: [1]})
    before = copy.deepcopy(tuned.state_dict())
    assert kwon.tune_(tuned, model, data()) == 0
    assert all(torch.equal(x, before[key]) for key, x in tuned.state_dict().items())


# K-prune


def test_kprunes_knowledge_is_that_of_its_formulas(model):
    """Of the sublayers above the first two: by gates and activations of the whole model, batch by batch."""
    pruned = prune_neurons(prune_heads(model, {0: [1]}), {0: [3, 4]})
    with torch.no_grad():
        wanted = [run(model, batch).logits for batch in data()]
        states = start_runs(pruned, model, data())
        for structure, state in product(STRUCTURES, states):
            blocks = [each.bert.encoder.layer[0] for each in (pruned, model)]
            state.run_dense(structure, blocks[1])
            state.step(structure, *blocks)
        found = dict(kprune.knowledge(pruned, data(), states, [each.pruned.x for each in states], wanted, 2))
    assert [*found] == [2, 3, 4, 5]
    part = pruned.bert.encoder.layer[1].attention.output.dense
    inputs, _ = seen_by(part, pruned, data())
    slopes, gate = torch.zeros(L * 16), torch.ones(L * 16, requires_grad=True)  # 4 heads of 12 inputs
    for batch, target in zip(data(), wanted, strict=True):
        with part.register_forward_pre_hook(lambda _, args: args[0] * gate):
            logits = pruned(**batch, output_hidden_states=True).logits
        p, q = (target / 2).softmax(-1), (logits / 2).log_softmax(-1)
        loss = 4 * (p * (p.log() - q)).sum(-1).mean()
        slopes += torch.autograd.grad(loss, gate)[0].square() / 2
    each = slopes / 40 + 2.5e-4 * inputs.square().mean(0) * part.weight.square().mean(0)
    torch.testing.assert_close(found[2], each.detach().unflatten(0, (4, 12)).mean(1))


def test_kprune_removes_the_lowest_scores_of_all_sublayers_until_the_rest_is_within_the_budget():
    scores = [torch.tensor([5.0, 1.0]), torch.tensor([3.0, 0.5, 9.0])]
    for budget, kept in ((23, [True, True]), (22, [True, True]), (21, [True, False]), (1, [False, False])):
        assert kprune.chosen(scores, [10, 1], budget).tolist() == kept, "at 22 a neuron is enough"


def test_kprune_fits_the_matrix_and_leaves_the_bias():
    draw = torch.Generator().manual_seed(0)
    inputs, part = torch.randn(50, 6, generator=draw, dtype=F64), torch.nn.Linear(4, 3).double().requires_grad_(False)
    stays = torch.tensor([True, False, True, True, False, True])
    wanted = torch.randn(50, 3, generator=draw, dtype=F64)
    bias = part.bias.clone()
    kprune.tune_(part, total(gather([(inputs, wanted, torch.arange(50))])), stays)
    best = torch.linalg.lstsq(inputs[:, stays], wanted - bias).solution.T
    torch.testing.assert_close(part.weight, best)
    assert torch.equal(part.bias, bias)


# The comparison


def test_points_lost_are_means_of_tasks_and_ways_are_compared_within_tasks():
    scores = [
        *(("a", 0, OURS, 0.9, 0.89), ("a", 1, OURS, 0.9, 0.87), ("b", 0, OURS, 0.8, 0.8)),
        *(("a", 0, "K-prune", 0.9, 0.88), ("b", 0, "K-prune", 0.8, 0.77), ("c", 0, "K-prune", 0.8, 0.7)),
    ]
    names = "task", "seed", "way", "dense", "score"
    runs: list[Any] = [{"share": 0.3, "distilled": 0.9, **dict(zip(names, each, strict=True))} for each in scores]
    rows = {(row["stage"], row["way"]): row for row in budgets.summary(runs)}
    ours, other = (rows["pruned", way] for way in (OURS, "K-prune"))
    assert ours["lost"] == pytest.approx(1.0)  # of a 2, of b 0: not 1.33, the mean of the three models
    assert ours["lost_within"] == pytest.approx(12.706, abs=1e-3)  # Student's with two tasks: t is 12.706
    assert ours["one_within"] == pytest.approx(12.706 * 3**0.5, abs=1e-3)  # of one more, by its own variance besides
    assert (other["tasks"], other["worst"]) == (3, ["c", pytest.approx(10)])
    assert other["more"] == pytest.approx((0 + 3) / 2)  # without c, which ours lacks
    assert other["more_within"] == pytest.approx(12.706 * 1.5, abs=2e-3)
    assert "more" not in ours
    fewer = budgets.summary([run | {"way": run["way"].replace(OURS, f"{OURS}, 256 texts")} for run in runs])
    assert [row.get("more") for row in fewer] == [row.get("more") for row in budgets.summary(runs)]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task "tiny", and the folder of a model for it."""

    def rows(data: Path, part: str) -> list[tuple[str, str, str]]:
        many, words = range(60 if part == "train" else 20), ("good", "bad", "film ", "the ")
        return [(words[2 + i % 2] * (i % 5 + (part == "dev")) + words[i % 2], "", str(i % 2)) for i in many]

    monkeypatch.setitem(tasks.TASKS, "tiny", tasks.Dataset(rows))
    make(BertForSequenceClassification).float().save_pretrained(tmp_path / "model")
    BertTokenizer([*SPECIAL, "good", "bad", "film", "the"]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_seed_draws_the_texts_to_prune_by_and_the_same_texts_judge(tiny, tmp_path):
    out = f"{tmp_path / 'runs'},{tmp_path / 'record.json'}"
    args = budgets.parse([str(tiny), "--data", str(tmp_path), "--out", out])
    files = tasks.write_task("tiny", tmp_path, tmp_path / "data")
    first, again, other = (budgets.Bench("tiny", files, tiny, args, seed) for seed in (0, 0, 1))
    assert first.train.rows == again.train.rows != other.train.rows
    assert sorted(map(str, first.train.rows)) == sorted(map(str, other.train.rows))
    assert first.dev.rows == other.dev.rows


def test_a_part_of_the_main_comparison_is_chosen():
    given = ["model", "--data", "data", "--main", "--out", "runs,record.json"]
    args = budgets.parse(given)
    assert {*args.tasks} < {*tasks.TASKS}
    part = budgets.parse([*given, "--tasks", args.tasks[0], "--seeds", "2"])
    assert (part.tasks, part.seeds, part.ways) == (args.tasks[:1], (2,), args.ways)


def test_all_stages_of_a_task_are_recorded_and_drawn(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(budgets, "CHOOSING", 10)
    monkeypatch.setattr(budgets, "WORK", (1, 16))
    ticks = count()
    clock = SimpleNamespace(process_time=lambda: next(ticks) / 20)  # a busy machine takes any time
    monkeypatch.setattr(budgets, "time", clock)
    out = f"{tmp_path / 'runs'},{tmp_path / 'record.json'},{tmp_path / 'picture.png'}"
    given = [str(tiny), "--data", str(tmp_path), "--tasks", "tiny", "--ways", f"{OURS};{LAYERS}"]
    given += ["--shares", "0.5", "--minutes", "0.05", "--max-length", "16"]
    given += ["--stages", "pruned,distilled,timed,int8,speed"]
    assert budgets.main([*given, "--out", out]) == 0
    record = read_json_object(tmp_path / "record.json")
    assert [row["stage"] for row in record["rows"] if row["way"] == OURS] == [*budgets.SCORES]
    found, other = (next(run for run in record["runs"] if run["way"] == way) for way in (OURS, LAYERS))
    assert {*budgets.SCORES.values()} <= {*other}
    assert len(other["heads_kept"]) == 2  # of three layers
    assert found["of"]["minutes"] == 0.05
    assert 0 < found["of"]["prune_seconds"] < 3
    assert found["of"]["epochs"] > 0
    assert found["speedup"]["median"] > 0
    assert {*budgets.SCORES.values()} <= {*found}
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    shutil.rmtree(tmp_path / "runs" / "tiny" / "timed")
    given += ["--minutes", "1e-6"]  # none is left to train
    assert budgets.main([*given, "--out", out]) == 0
    record = read_json_object(tmp_path / "record.json")
    found = next(run for run in record["runs"] if run["way"] == OURS)
    assert found["of"]["epochs"] == 0
    assert found["timed"] == found["score"]
    monkeypatch.setattr(budgets.Bench, "go_on", lambda *_: pytest.fail("it was done again"))
    monkeypatch.setattr(budgets.Bench, "prune", lambda *_: pytest.fail("it was done again"))
    assert budgets.main([*given, "--out", out, "--record-only"]) == 0
    assert read_json_object(tmp_path / "record.json") == record
    earlier = record["runs"] + [found | {"way": "K-prune"}]
    write_json(tmp_path / "record.json", record | {"runs": earlier})
    assert budgets.main([*given, "--out", out, "--record-only"]) == 0
    kept = read_json_object(tmp_path / "record.json")
    assert {run["way"] for run in kept["runs"]} == {OURS, LAYERS, "K-prune"}
    assert kept["commits"] == record["commits"]
    earlier[-1]["model"] = "another"
    write_json(tmp_path / "record.json", record | {"runs": earlier})
    with pytest.raises(ValueError, match="has another model fine-tuned on tiny"):
        budgets.main([*given, "--out", out, "--record-only"])


def test_tasks_are_made_from_the_data(tmp_path):
    words = [f"w{i}" for i in range(60)]
    paragraph = " . ".join(" ".join(words[i : i + 8]) for i in range(0, 48, 8))
    lines = [f" p{i} {paragraph} " + "x" * 60 for i in range(40)]
    pair = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n1\tA.\tB.\t3.5\tNEUTRAL\r\n"
    intents = {"train": [["hi", "greet"], ["bye", "close"]], "val": [["hey", "greet"]]}
    files = {
        "sst2/train.tsv": 'a "fine film\t1\nbad\t0\n',
        "stsb/stsb-en-dev.csv": '"A, b.",C d.,3.5\n',
        "wnut17/wnut17train.conll": "I\tO\nam\tO\n\nin\tO\nRome\tB-location\n",
        "wikitext2/valid.txt": "\n".join([" = First = ", *lines[:25], " = = Part = = ", " = Second = ", *lines[25:]]),
        "sick/SICK_test_annotated.txt": pair,
        "banking77/train.csv": "text,category\nlost it,lost\nwhere,card\n",
        "banking77/test.csv": "text,category\ngone,lost\n",
        "clinc150/data_full.json": json.dumps(intents),
        "agnews/test.csv": "".join(f'"{1 + i % 4}","T{i}","text, {i}"\n' for i in range(8)),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "mr").mkdir()
    (tmp_path / "mr" / "rt-polarity.all").write_bytes("0 caf\xe9\x85 bad \n1 good\n1 fine\n0 no\n".encode("latin-1"))

    def rows(name: str, part: str) -> list[Any]:
        return [*tasks.TASKS[name].rows(tmp_path, part)]

    assert rows("sst2", "train") == [('a "fine film', "", "1"), ("bad", "", "0")]
    assert rows("stsb", "dev") == [("A, b.", "C d.", "3.5")]
    assert rows("entities", "train") == [("I am", "", "0"), ("in Rome", "", "1")]
    assert (rows("sick", "dev"), rows("relatedness", "dev")) == ([("A.", "B.", "1")], [("A.", "B.", "3.5")])
    assert rows("banking77", "train") == [("lost it", "", "1"), ("where", "", "0")]
    assert rows("banking77", "dev") == [("gone", "", "1")]
    assert rows("clinc150", "dev") == [("hey", "", "1")]
    news = [rows("agnews", part) for part in ("train", "dev")]
    assert [len(each) for each in news] == [6, 2]
    assert {*news[0], *news[1]} == {(f"T{i}. text, {i}", "", str(i % 4)) for i in range(8)}
    assert sorted([*rows("mr", "train"), *rows("mr", "dev")])[0] == ("caf\xe9\x85 bad", "", "0")
    for name in ("next", "topic"):
        train, dev = rows(name, "train"), rows(name, "dev")
        assert {label for *_, label in train} == {"0", "1"}
        assert len(train) == 4 * len(dev)
    paragraphs = tasks.wiki_sentences(tmp_path, "train")
    pairs = [pair for _, sentences in paragraphs for pair in pairwise(sentences)]
    for (first, second), row in zip(pairs, rows("next", "train"), strict=True):
        assert row[0] == first
        assert row[2] == "0" or row[1] == second
    each = [(text, article) for article, sentences in paragraphs for text in sentences]
    for (text, article), row in zip(each, rows("topic", "train"), strict=True):
        assert row == (text, "", {"First": "0", "Second": "1"}[article])


def test_a_text_that_judges_is_not_trained_on(tmp_path, monkeypatch):
    rows = {"train": [("a", "", "0"), ("b", "", "1")], "dev": [(x, "", "0") for x in "bcdef"]}
    monkeypatch.setitem(tasks.TASKS, "new", tasks.Dataset(lambda data, part: rows[part]))
    monkeypatch.setattr(tasks, "JUDGED", 5)
    paths = tasks.write_task("new", tmp_path, tmp_path / "out")
    found = {part: [json.loads(line)["a"] for line in path.read_text().splitlines()] for part, path in paths.items()}
    assert (found["train"], sorted(found["dev"])) == (["a"], [*"bcdef"])
    monkeypatch.setattr(tasks, "JUDGED", 2)
    assert len(tasks.write_task("new", tmp_path, tmp_path / "few")["dev"].read_text().splitlines()) == 2
