"""Pruning layer by layer with joint selection: sizes, optimality, and what the curves and metrics measure."""

import copy
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from conftest import F64, assert_same, distance, make, make_batch, make_batches, seen_by
from left_as_found import left_as_found, worn
from torch import Tensor

from bertlite import BertForSequenceClassification, head_importance, prune_heads, prune_neurons
from bertlite.pruning import (
    loss_curves,
    macs,
    neuron_importance,
    output_metrics,
    prune_layerwise,
    prune_layerwise_,
    rank_heads,
    rank_neurons,
    repair,
)
from bertlite.pruning.importance import layerwise, least_squares, moments
from bertlite.pruning.importance.layerwise import GRID, RIDGE, input_sums, losses_by_size
from bertlite.pruning.importance.least_squares import mean_divergence, refit_
from bertlite.pruning.importance.moments import FOLDS, RIDGES, choose_ridge, fit_matrix, gather, total, without_each
from bertlite.pruning.importance.structures import HEADS, NEURONS
from bertlite.stack.modules import BertIntermediate
from scripts.measure.speed.memory import peak_bytes

L, N, D, W = 3, 4, 48, 37
SIZES = [(2, 20), (0, 37), (3, 0)]


def data(count: int = 60, seed: int = 1) -> list[dict[str, Tensor]]:
    return make_batches(count, seed)


def pruned(model: Any, sizes: Any, batches: Any, **options: Any) -> Any:
    found, curves = copy.deepcopy(model), loss_curves(model, batches)
    layers: list[int] = []
    assert prune_layerwise_(found, model, batches, curves, sizes, done=layers.append, **options) is found
    assert layers == [*range(L)]
    return found


def sizes_of(model: Any) -> list[tuple[int, int]]:
    present = zip(HEADS.present(model).sum(1).tolist(), NEURONS.present(model).sum(1).tolist(), strict=True)
    return [*present]


def test_every_layer_has_its_size_and_is_fitted_as_repair_fits_it():
    """What is left is the least-squares fit: to repair the result again changes nothing."""
    model, batches = make(), data()
    found = pruned(model, SIZES, batches, ridge=0.0)
    assert sizes_of(found) == SIZES
    assert_same(repair(found, model, batches, ridge=0.0).state_dict(), found.state_dict(), atol=1e-7)


def test_queries_keys_values_and_activations_are_fitted_to_the_dense_model():
    """Each is the least-squares fit of what the dense model computes to what the pruned and fitted model reads."""
    model, batches = make(), data()
    found = pruned(model, [(2, 20), (2, 20), (4, 37)], batches, ridge=0.0)
    for layer in range(1, L):
        for structure, width in ((HEADS, D // N), (NEURONS, 1)):
            kept = torch.tensor(structure.kept(found.config, layer))
            rows = (kept[:, None] * width + torch.arange(width)).flatten()
            blocks = [each.encoder.layer[layer] for each in (found, model)]
            for part, other in zip(*map(structure.readers, blocks), strict=True):
                read, given = seen_by(part, found, batches)
                wanted = seen_by(other, model, batches)[1][:, rows]
                read = torch.cat([read, torch.ones(len(read), 1)], 1)
                best = torch.from_numpy(read.numpy() @ np.linalg.lstsq(read.numpy(), wanted.numpy())[0])
                assert_same(given, best, atol=1e-7)
                assert distance(given, wanted) > 1e-3


def test_the_heads_and_the_neurons_that_are_missed_least_go():
    """Of one head, or one neuron, less the choice is that of exhaustive search on the error that is left."""
    few = 9  # neurons
    model, batches = make(num_hidden_layers=1, intermediate_size=few), data()
    for structure, prune, sizes in ((HEADS, prune_heads, (N - 1, few)), (NEURONS, prune_neurons, (N, few - 1))):
        found, curves = copy.deepcopy(model), loss_curves(model, batches)
        prune_layerwise_(found, model, batches, curves, [sizes], ridge=RIDGE)
        (gone,) = (~structure.present(found)[0]).nonzero()[:, 0].tolist()

        def before_the_norm(model: Any, structure: Any = structure) -> Tensor:
            block = model.encoder.layer[0]
            return seen_by((block.attention if structure is HEADS else block).output.LayerNorm, model, batches)[0]

        pruned = [prune(model, {0: [unit]}) for unit in range(structure.present(model).shape[1])]
        fixed = [before_the_norm(repair(each, model, batches, ridge=1e-9)) for each in pruned]
        errors = [float((x - before_the_norm(model)).square().sum()) for x in fixed]
        assert errors[gone] < 1.02 * min(errors)  # the choice is held to old weights by RIDGE, the error is not
        assert errors[gone] < sorted(errors)[len(errors) // 2]


def test_a_model_that_keeps_everything_stays_as_it_is():
    model, batches = make(), data()
    assert_same(pruned(model, [(N, W)] * L, batches).state_dict(), model.state_dict(), atol=1e-9)


def test_the_dense_model_and_training_modes_stay_as_they_were():
    model, batches = worn(make()), data()
    with left_as_found(model):
        found = pruned(model, SIZES, batches)
    assert [module.training for module in found.modules()] == [module.training for module in model.modules()]


def test_sizes_that_cannot_be_met_are_refused_before_any_work():
    model = make()
    curves = loss_curves(model, data())
    smaller = prune_heads(model, {1: [2]})
    for each in (model, smaller):
        each.register_forward_pre_hook(lambda *args: pytest.fail("the model ran"))
    cases: list[tuple[Any, Any, Any, Any, str]] = [
        (model, model, curves, [(4, 37)] * 2, "sizes for 2 layers; the model has 3"),
        (model, model, curves, [(4, 37), (5, 37), (4, 37)], "layer 1 cannot keep 5 heads: it has 4"),
        (model, model, curves, [(4, 37), (4, 37), (4, -1)], "layer 2 cannot keep -1 neurons: it has 37"),
        (model, model, curves[:2], SIZES, "curves for 2 layers; the model has 3"),
        (smaller, model, curves, SIZES, "layer 1 has other heads than the dense model"),
        (smaller, smaller, curves, SIZES, "3 heads, its curve 4"),
    ]
    for pruned, dense, given, sizes, message in cases:
        with pytest.raises(ValueError, match=message):
            prune_layerwise_(copy.deepcopy(pruned), dense, data(), given, sizes)


def test_another_size_needs_no_new_choice(monkeypatch):
    """The curves hold the order in which units go; a smaller model keeps a part of what a larger one keeps."""
    model, batches = make(BertForSequenceClassification, num_labels=3), data()
    curves = loss_curves(model, batches, output_metrics(model, batches))
    monkeypatch.setattr(layerwise, "eliminate", lambda *args: pytest.fail("units were chosen again"))
    kept = []
    for sizes in ([(3, 30)] * L, [(1, 12)] * L):
        found = copy.deepcopy(model)
        prune_layerwise_(found, model, batches, curves, sizes)
        assert sizes_of(found) == sizes
        kept.append(torch.cat([HEADS.present(found), NEURONS.present(found)], 1))
    assert (kept[0] | ~kept[1]).all()


@pytest.mark.parametrize(("kept", "forwards"), [(2**27, 3), (0, 4)])
def test_the_dense_model_runs_twice_and_the_pruned_one_once(monkeypatch, kept, forwards):
    """For gradients and curves on some batches, and next to the pruned model; units not kept are computed again."""
    model, batches, calls = make(BertForSequenceClassification, num_labels=3), data(), list[int]()
    monkeypatch.setattr(layerwise, "DRAWS", 100)  # of which 60 texts are more than half
    wanted = prune_layerwise(model, batches, 0.9, 16)
    usual = BertIntermediate.forward
    monkeypatch.setattr(BertIntermediate, "forward", lambda *args: calls.append(1) or usual(*args))
    monkeypatch.setattr(least_squares, "KEPT", kept)
    assert_same(prune_layerwise(model, batches, 0.9, 16).state_dict(), wanted.state_dict(), atol=0)
    draws = layerwise.draws_of("kl", 60)
    some = layerwise.batches_to_choose(batches, model.config.intermediate_size)
    assert 0 < len(some) < len(batches)
    last = (kept == 0) * len(batches)  # whose outputs no layer reads
    assert len(calls) == ((forwards - 1) * len(batches) + draws * len(some)) * L - last


def test_sizes_are_chosen_by_enough_batches_of_every_length(monkeypatch):
    for texts, tokens, width, wanted in (
        (2000, 80_000, 1536, 50),  # half of much is enough
        (1000, 22_000, 1536, 56),  # 12,288 tokens
        (800, 90_000, 1536, 64),  # 512 texts
        *((count, 22 * count, 3072, 100) for count in (1000, 100)),
    ):
        monkeypatch.setattr(layerwise, "count_examples", lambda batch, texts=texts: texts // 100)
        monkeypatch.setattr(layerwise, "real_tokens", lambda batch, tokens=tokens: torch.tensor(tokens // 100))
        some: Any = layerwise.batches_to_choose([*range(100)], width)  # type: ignore[list-item]
        assert len(some) == wanted
        assert {b - a for a, b in pairwise(some)} <= {100 // wanted, -(-100 // wanted)}


# Curves and metrics


def test_curves_and_metrics_do_not_depend_on_how_layers_run():
    """Nor on whether the inputs are from the forwards of the gradients, each text once, or from their own."""
    model, batches = make(BertForSequenceClassification, num_labels=3), data()
    metrics = output_metrics(model, batches)
    curves = loss_curves(model, batches, metrics)
    checkpointed, chunked = (make(type(model), num_labels=3, chunk_size_feed_forward=size) for size in (0, 4))
    checkpointed.gradient_checkpointing_enable()
    for other in (model, checkpointed, chunked):
        inputs = input_sums(other)
        found = output_metrics(other, batches, inputs=inputs)
        for metric, same in zip(found, metrics, strict=True):
            assert_same(metric, same)
        for one, wanted in zip(loss_curves(other, batches, found, inputs=inputs), curves, strict=True):
            for a, b in zip(one, wanted, strict=True):
                assert a.order == b.order
                assert_same(a.losses, b.losses)


def test_curves_without_metrics_are_shares_of_the_variance():
    model, batches = make(), data(count=100)
    for attention, network in loss_curves(model, batches):
        for curve, units in ((attention, N), (network, W)):
            assert sorted(curve.order) == [*range(units)]
            assert curve.loss(units) == 0
            assert (curve.losses.diff() > -1e-12).all()
            assert curve.loss(0) == pytest.approx(1, abs=0.05)  # all is gone but the mean; the ridge adds a little


def test_metrics_are_mean_squares_of_the_gradient_at_the_outputs():
    """Of sequences of one token, a bias has the gradient of its output."""
    model = make(BertForSequenceClassification, num_labels=3)
    batch = {**make_batch(8, 1, lengths=(1,) * 8), "labels": torch.arange(8) % 3}
    losses = [model(**{name: x[i : i + 1] for name, x in batch.items()}).loss for i in range(8)]
    for metrics, block in zip(output_metrics(model, [batch], target="loss"), model.bert.encoder.layer, strict=True):
        for metric, part in zip(metrics, (block.attention.output, block.output), strict=True):
            grads = [torch.autograd.grad(loss, part.dense.bias, retain_graph=True)[0] for loss in losses]
            wanted = sum(torch.outer(grad, grad) / 8 for grad in grads)
            assert distance(wanted, torch.zeros_like(wanted)) > 1e-6
            assert_same(metric, wanted)


def test_metrics_do_not_depend_on_padding_or_batches():
    model = make(BertForSequenceClassification, num_labels=3)
    whole = {**make_batch(6, 11, lengths=(11, 7, 9, 3, 5, 8)), "labels": torch.arange(6) % 3}
    parts = [{name: x[i : i + 2] for name, x in whole.items()} for i in (0, 2, 4)]
    assert_same(*(dict(enumerate(output_metrics(model, each, target="loss"))) for each in ([whole], parts)))


def test_the_expected_loss_of_a_small_change_is_the_divergence_that_it_makes():
    """To second order, where the errors of tokens are independent: here each sequence has one token."""
    model = make(BertForSequenceClassification, num_labels=3)
    draw = torch.Generator().manual_seed(3)
    batches = [make_batch(200, 1, seed, lengths=(1,) * 200) for seed in range(5)]
    metric = output_metrics(model, batches * 4, target="kl")[1][1]
    shift = 1e-2 * torch.randn(D, generator=draw, dtype=F64)
    other = copy.deepcopy(model)
    other.bert.encoder.layer[1].output.dense.bias.data += shift
    divergence = mean_divergence(other, model, batches)
    assert float(shift @ metric @ shift) / 2 == pytest.approx(divergence, rel=0.15)  # labels are drawn, 4000 of them


def test_few_texts_are_made_up_for_by_more_labels(monkeypatch):
    model = make(BertForSequenceClassification, num_labels=3)
    batch = make_batch(60, 1, lengths=(1,) * 60)
    bias = model.bert.encoder.layer[0].output.dense.bias
    exact = torch.zeros(D, D, dtype=F64)
    for i in range(60):
        chances = model(**{name: x[i : i + 1] for name, x in batch.items()}).logits[0].log_softmax(-1)
        for chance in chances:
            (grad,) = torch.autograd.grad(chance, bias, retain_graph=True)
            exact += chance.exp().detach() * torch.outer(grad, grad) / 60

    def far() -> float:
        return sum(distance(output_metrics(model, [batch], seed=seed)[0][1], exact) for seed in range(4))

    several = far()
    monkeypatch.setattr(layerwise, "DRAWS", 60)
    assert several < 0.6 * far()  # of 8 draws the mean is 1 / sqrt(8) as far off


# To a budget


@pytest.mark.parametrize("share", [0.1, 0.8])
def test_a_share_of_the_macs_is_used_and_not_exceeded(share):
    model, batches = make(BertForSequenceClassification, num_labels=3), data()
    before = copy.deepcopy(model.state_dict())
    found = prune_layerwise(model, batches, share, 16)
    assert share - 0.08 < macs(found.config, 16) / macs(model.config, 16) <= share
    assert_same(model.state_dict(), before, atol=0)
    assert all(parameter.requires_grad for parameter in found.parameters())  # those that pruning made too
    for wrong in (0, 1.1):
        with pytest.raises(ValueError, match="it must be above 0 and up to 1"):
            prune_layerwise(model, batches, wrong, 16)


def test_it_stays_nearer_than_the_lowest_scores_and_a_refit():
    model, batches = make(BertForSequenceClassification, num_labels=3), data(count=120)
    others = data(count=40, seed=9)
    heads = head_importance(model, batches, criterion="fisher", target="kl")
    neurons = neuron_importance(model, batches, criterion="fisher", target="kl")
    choice = rank_heads(heads, share=0.5), rank_neurons(neurons, share=0.5)
    plain = repair(prune_neurons(prune_heads(model, choice[0]), choice[1]), model, batches)
    found = prune_layerwise(model, batches, 0.5, 16)
    assert mean_divergence(found, model, others) < 0.8 * mean_divergence(plain, model, others)


def test_sizes_that_have_a_loss_begin_with_none_and_end_with_all():
    model = make(intermediate_size=GRID * 2)
    for heads, neurons in losses_by_size(model.config, loss_curves(model, data())):
        assert [*heads] == [*range(N + 1)]
        assert [*neurons] == [*range(0, GRID * 2 + 1, 2)]
    pruned_before = prune_neurons(model, {0: range(3)})
    (_, neurons), *_ = losses_by_size(pruned_before.config, loss_curves(pruned_before, data()))
    assert [*neurons] == [*range(0, GRID * 2 - 3, 2), GRID * 2 - 3]


def test_batches_of_padding_add_nothing_and_alone_are_refused():
    model, batches = make(), data()
    empty = {name: torch.zeros_like(x) for name, x in batches[0].items()}
    for one, wanted in zip(loss_curves(model, [empty, *batches]), loss_curves(model, batches), strict=True):
        assert [each.order for each in one] == [each.order for each in wanted]
    with pytest.raises(ValueError, match="the batches hold only padding"):
        loss_curves(model, [empty])


# The ridge


def test_the_chosen_ridge_is_the_best_of_all_on_held_out_sentences():
    """Of 40 sentences of 10 tokens, whose outputs are noisy."""
    shapes, draw = ((D, W), (D, W), (400, W), (400, D)), torch.Generator().manual_seed(0)
    weight, change, c, noise = (torch.randn(*shape, generator=draw, dtype=F64) for shape in shapes)
    old, sentence = weight + 0.3 * change, torch.arange(40).repeat_interleave(10)
    folds, errors = gather([(c, c @ weight.T + 3 * noise, sentence)]), dict.fromkeys(RIDGES, 0.0)
    assert len(folds) == FOLDS
    for (fold, rest), ridge in product(zip(folds, without_each(folds), strict=True), RIDGES):
        fitted = fit_matrix(rest, old, ridge)
        errors[ridge] += float(fold.errors(fitted, rest.bias(fitted)))
    assert choose_ridge(folds, old) == min(RIDGES, key=errors.__getitem__)


def test_the_error_from_moments_is_that_of_the_tokens():
    draw = torch.Generator().manual_seed(0)
    c, y = torch.randn(50, 7, generator=draw, dtype=F64) + 2, torch.randn(50, 3, generator=draw, dtype=F64) - 1
    weight, bias = torch.randn(3, 7, generator=draw, dtype=F64), torch.randn(3, generator=draw, dtype=F64)
    each = ((y - c @ weight.T - bias).square() - y.square()).sum(1)  # by token, less the error of zeros
    folds = gather([(c, y, torch.arange(50) // 20)], folds=3)
    assert [fold.count for fold in folds] == [20, 20, 10]
    assert float(total(folds).errors(weight, bias)) == pytest.approx(float(each.sum()), rel=1e-10)
    for rest, gone in zip(without_each(folds), torch.arange(50).split(20), strict=True):
        assert float(rest.errors(weight, bias)) == pytest.approx(float(each.sum() - each[gone].sum()), rel=1e-10)


def test_moments_go_through_a_layer_of_the_outputs():
    draw = torch.Generator().manual_seed(0)
    c, y, weight = (torch.randn(*shape, generator=draw, dtype=F64) for shape in ((50, 7), (50, 3), (5, 3)))
    bias, sentence = torch.randn(5, generator=draw, dtype=F64), torch.arange(50)
    found, wanted = (total(gather([(c, x, sentence)])) for x in (y, y @ weight.T + bias))
    for name, x in vars(found.through(weight, bias)).items():
        assert_same(torch.as_tensor(x), torch.as_tensor(getattr(wanted, name)))


def test_moments_of_float32_tokens_are_exact_by_blocks_and_about_large_means(monkeypatch):
    for name, size in (("TOKENS", 64), ("ROWS", 5)):
        monkeypatch.setattr(moments, name, size)
    draw = torch.Generator().manual_seed(0)
    c, y = (torch.randn(300, width, generator=draw) + 1000 for width in (12, 3))
    found = gather([(c[at : at + 30], y[at : at + 30], torch.arange(at, at + 30)) for at in range(0, 300, 30)])
    assert len(found) == FOLDS
    around, wanted = c.double() - c.double().mean(0), y.double() - y.double().mean(0)
    for got, best in zip(total(found).centred, (around.T @ around, around.T @ wanted), strict=True):
        assert_same(got, best, atol=1e-3)  # float32 products of 1000s are off by 0.1 each


def test_a_fit_takes_the_memory_of_six_gram_matrices(monkeypatch):
    monkeypatch.setattr(moments, "ROWS", 32)
    draw, wide = torch.Generator().manual_seed(0), 512
    c, y = torch.randn(1200, wide, generator=draw), torch.randn(1200, 4, generator=draw)
    part, sentence = torch.nn.Linear(wide, 4).requires_grad_(False), torch.arange(1200)
    tokens = ((c[at : at + 100], y[at : at + 100], sentence[at : at + 100]) for at in range(0, 1200, 100))
    assert peak_bytes(lambda: refit_([part], tokens, None)) < 6 * wide**2 * 8


def test_few_sentences_do_not_make_a_model_worse():
    """24 sentences for 37 neurons and 48 dimensions: without a held-out ridge the fit follows their noise."""
    model = make()
    cut = prune_neurons(model, {0: range(5), 1: range(5), 2: range(5)})
    few, others = data(count=3), data(count=60, seed=9)

    def gap(found: Any) -> float:
        states = [seen_by(each.encoder.layer[-1].output, each, others)[-1] for each in (found, model)]
        return float((states[0] - states[1]).square().sum())

    assert gap(repair(cut, model, few, ridge=1e-6)) > gap(cut)  # the fault that the ridge is for
    assert gap(repair(cut, model, few)) < gap(cut)


def test_one_sentence_is_refused_where_a_ridge_is_to_be_chosen():
    model = make()
    cut = prune_heads(model, {0: [1]})
    with pytest.raises(ValueError, match="one sentence is too little to choose a ridge: give a few hundred"):
        repair(cut, model, data(count=1))
    repair(cut, model, data(count=1), "mean")
    repair(cut, model, data(count=1), ridge=1e-3)
