"""The comparison of ways to prune: each meets its share, Kwon's are those of the paper, tasks are made as they say."""

import copy
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import F64, make, make_batch
from torch import Tensor

from bertlite import BertForSequenceClassification, prune_heads, prune_neurons, rank_heads, rank_neurons, with_pruned
from bertlite.importance import head_importance, macs, neuron_importance, output_metrics, prune_to_macs
from scripts.measure.budgets import kwon, methods, tasks
from scripts.measure.budgets.methods import METHODS, Subject, cheapest

L, N, W, H = 3, 4, 37, 12


def data(count: int = 40) -> list[dict[str, Tensor]]:
    whole = make_batch(count, 13, 1, tuple(13 - i % 7 for i in range(count)))
    whole["labels"] = torch.arange(count) % 3
    return [{name: x[start : start + 10] for name, x in whole.items()} for start in range(0, count, 10)]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_meets_the_share_and_leaves_the_model_alone(name: str) -> None:
    model = make(BertForSequenceClassification, num_labels=3)
    before = copy.deepcopy(model.state_dict())
    found = METHODS[name](Subject(model, data(), 16), 0.4)
    assert 0.3 < macs(found.config, 16) / macs(model.config, 16) <= 0.4
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())


@pytest.mark.parametrize("share", [1.0, 0.83, 0.31, 0.02])
def test_within_a_share_of_the_macs_no_choice_keeps_more(share: float) -> None:
    config = make(num_hidden_layers=2, intermediate_size=5).config
    scores = [torch.rand(2, count, generator=torch.Generator().manual_seed(count), dtype=F64) for count in (4, 5)]
    ranked = [scores[0].flatten().sort().values, scores[1].flatten().sort().values]  # the lowest are best to remove
    best = min(
        float(ranked[0][:few].sum() + ranked[1][:others].sum())
        for few, others in product(range(9), range(11))
        if macs(with_pruned(config, rank_heads(scores[0], few), rank_neurons(scores[1], others)), 11)
        <= share * macs(config, 11)
    )
    found = kwon.within_budget(config, share, 11, scores[0], scores[1])
    assert macs(with_pruned(config, *found), 11) <= share * macs(config, 11)
    gone = sum(
        float(each[i, units].sum()) for each, choice in zip(scores, found, strict=True) for i, units in choice.items()
    )
    assert gone == pytest.approx(best, abs=1e-12)


def test_scores_of_the_sublayers_that_are_left_are_those_of_the_library() -> None:
    model = make(BertForSequenceClassification, num_labels=3)
    pruned = prune_neurons(prune_heads(model, {0: [1]}), {0: [3, 4]})
    subject = Subject(model, data(), 16)
    found = methods.fisher_of_rest(subject, pruned, 2)
    for scores, measure in zip(found, (head_importance, neuron_importance), strict=True):
        wanted = measure(pruned, data(), "fisher", target="kl", teacher=model)
        assert scores[0].isnan().all()
        torch.testing.assert_close(scores[1:], wanted[1:])


@pytest.mark.parametrize("taylor", [False, True])
def test_magnitude_and_taylor_are_those_of_torch_pruning(taylor: bool) -> None:
    transformers = pytest.importorskip("transformers")
    tp = pytest.importorskip("torch_pruning", reason="torch-pruning is not installed")
    model = make(BertForSequenceClassification, num_labels=3)
    config = transformers.BertConfig(**model.config.to_dict(), attn_implementation="eager")
    reference = transformers.BertForSequenceClassification(config).eval()
    reference.load_state_dict(model.state_dict())
    batches = data()
    for batch in batches:
        (reference(**batch).loss / len(batches)).backward()
    score = tp.importance.GroupTaylorImportance() if taylor else tp.importance.GroupMagnitudeImportance()
    graph = tp.DependencyGraph().build_dependency(reference, example_inputs=batches[0])

    def wanted(root: torch.nn.Linear) -> Tensor:
        found: Tensor = score(graph.get_pruning_group(root, tp.prune_linear_out_channels, [*range(root.out_features)]))
        return found.double()

    heads, neurons = methods.group_scores(model, batches, taylor)
    for i, layer in enumerate(reference.bert.encoder.layer):
        by_head = wanted(layer.attention.self.query).unflatten(0, (len(heads[i]), -1)).mean(1)
        torch.testing.assert_close(heads[i], by_head, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(neurons[i], wanted(layer.intermediate.dense), rtol=1e-4, atol=1e-5)


def test_the_commands_own_method_is_what_is_compared() -> None:
    model = make(BertForSequenceClassification, num_labels=3)
    for name, target in (("joint (prune to)", "kl"), ("joint, with labels (prune to --label)", "loss")):
        found = METHODS[name](Subject(model, data(), 16), 0.4).state_dict()
        wanted = prune_to_macs(model, data(), 0.4, 16, target=target).state_dict()
        assert all(torch.equal(x, wanted[key]) for key, x in found.items())


def test_what_several_methods_need_is_measured_once_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(model: Any, batches: Any, *, target: str) -> Any:
        asked.append(target)
        return output_metrics(model, batches, target=target)

    monkeypatch.setattr(methods, "output_metrics", counted)
    subject = Subject(make(BertForSequenceClassification, num_labels=3), data(), 16)
    for share in (0.6, 0.4):
        METHODS["joint (prune to)"](subject, share)
    assert asked == ["kl"]


def test_kwons_rearrangement_never_costs_more_and_removes_as_many() -> None:
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


def test_kwons_factors_solve_the_normal_equations_with_damp_1_about_1() -> None:
    """The neurons of layer 0, by the tokens themselves rather than by moments."""
    from scipy.sparse.linalg import lsmr

    model = make(BertForSequenceClassification, num_labels=3)
    pruned = prune_neurons(model, {0: range(20)})
    tuned = copy.deepcopy(pruned)
    assert kwon.tune_(tuned, model, data()) >= 1
    seen: dict[str, list[tuple[Tensor, ...]]] = {"pruned": [], "dense": []}
    for name, each in (("pruned", pruned), ("dense", model)):
        part = each.bert.encoder.layer[0].output
        hooks = [
            part.register_forward_pre_hook(lambda module, args, name=name: seen[name].append(args)),
            part.LayerNorm.register_forward_pre_hook(lambda module, args, name=name: seen[name].append(args)),
        ]
        with torch.no_grad():
            for batch in data():
                each(**batch)
        for hook in hooks:
            hook.remove()
    real = [batch["attention_mask"].bool() for batch in data()]
    inputs, residual = (
        torch.cat([args[i][mask] for args, mask in zip(seen["pruned"][::2], real, strict=True)]) for i in (0, 1)
    )
    wanted = torch.cat([args[0][mask] for args, mask in zip(seen["dense"][1::2], real, strict=True)]) - residual
    own = pruned.bert.encoder.layer[0].output.dense
    parts = torch.stack([torch.outer(inputs[:, i], own.weight[:, i]).flatten() for i in range(W - 20)], 1).detach()
    target = (wanted - own.bias).flatten().detach()
    gram = parts.T @ parts
    factors = 1 + lsmr(gram.numpy(), (parts.T @ target - gram.sum(1)).numpy(), damp=1.0)[0]
    assert np.abs(factors - 1).max() > 1e-3
    got = tuned.bert.encoder.layer[0].output.dense.weight
    torch.testing.assert_close(got, own.weight * torch.from_numpy(factors), rtol=1e-5, atol=1e-7)


def test_kwons_tuning_stops_at_the_first_factor_beyond_10(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(BertForSequenceClassification, num_labels=3)
    monkeypatch.setattr(kwon, "LARGEST", 0.5)
    tuned = prune_heads(model, {0: [1]})
    before = copy.deepcopy(tuned.state_dict())
    assert kwon.tune_(tuned, model, data()) == 0
    assert all(torch.equal(x, before[key]) for key, x in tuned.state_dict().items())


def test_the_cheapest_units_go_until_the_rest_is_within_the_budget() -> None:
    heads = torch.tensor([[5.0, 1.0], [2.0, torch.nan]])
    neurons = torch.tensor([[3.0, 0.5, 9.0], [0.1, 4.0, 6.0]])
    assert cheapest(heads, neurons, (10, 1), 36) == ({}, {})
    assert cheapest(heads, neurons, (10, 1), 34) == ({}, {1: [0], 0: [1]})
    assert cheapest(heads, neurons, (10, 1), 33) == ({0: [1]}, {1: [0], 0: [1]})


def test_tasks_are_made_from_the_data(tmp_path: Path) -> None:
    for name in ("sst2", "stsb", "wnut17", "wikitext2"):
        (tmp_path / name).mkdir()
    (tmp_path / "sst2" / "train.tsv").write_text('a "fine film\t1\nbad\t0\n', encoding="utf-8")
    (tmp_path / "stsb" / "stsb-en-dev.csv").write_text('"A, b.",C d.,3.5\n', encoding="utf-8")
    (tmp_path / "wnut17" / "wnut17train.conll").write_text(
        "I\tO\nam\tO\n\nin\tO\nRome\tB-location\n", encoding="utf-8"
    )
    words = [f"w{i}" for i in range(60)]
    paragraph = " . ".join(" ".join(words[i : i + 8]) for i in range(0, 48, 8))
    lines = [f" p{i} {paragraph} " + "x" * 60 for i in range(40)]
    text = "\n".join([" = First = ", *lines[:25], " = = Part = = ", " = Second = ", *lines[25:]])
    (tmp_path / "wikitext2" / "valid.txt").write_text(f"{text}\n", encoding="utf-8")

    def rows(name: str, part: str) -> list[Any]:
        return [*tasks.TASKS[name][0](tmp_path, part)]

    assert rows("sentiment", "train") == [('a "fine film', "", "1"), ("bad", "", "0")]
    assert rows("similarity", "dev") == [("A, b.", "C d.", "3.5")]
    assert rows("entities", "train") == [("I am", "", "0"), ("in Rome", "", "1")]
    for name in ("next", "topic"):
        train, dev = rows(name, "train"), rows(name, "dev")
        assert {label for *_, label in train} == {"0", "1"}
        assert len(train) == 4 * len(dev)
    paragraphs = [*tasks.wiki_sentences(tmp_path, "train")]
    pairs = [pair for _, sentences in paragraphs for pair in pairwise(sentences)]
    for (first, second), row in zip(pairs, rows("next", "train"), strict=True):
        assert row[0] == first
        assert row[2] == "0" or row[1] == second
    each = [(text, article) for article, sentences in paragraphs for text in sentences]
    for (text, article), row in zip(each, rows("topic", "train"), strict=True):
        assert row == (text, "", {"First": "0", "Second": "1"}[article])
    paths = tasks.write_task("topic", tmp_path, tmp_path / "out")
    assert sorted(path.name for path in paths.values()) == ["dev.jsonl", "train.jsonl"]
