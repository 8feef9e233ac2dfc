"""Repair without retraining: what each method fits, layer by layer, and what it leaves alone."""

import copy
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from conftest import F64, assert_same, distance, interrupt, make, make_batches, seen_by
from left_as_found import left_as_found, state_of, worn
from torch import Tensor, nn

from bertlite import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    prune_heads,
    prune_neurons,
)
from bertlite.pruning import METHODS, repair, repair_
from bertlite.pruning.importance import least_squares as module
from bertlite.pruning.importance.predictions import FLAGS, NORMAL, Prediction
from bertlite.pruning.importance.structures import STRUCTURES

L, N, H, D, W, V = 3, 4, 12, 48, 37, 97
PRUNED = {0: [1, 3], 1: [0, 1, 2, 3], 2: [2]}
NEURONS = {0: range(3, 20), 1: range(W), 2: [0, 36]}
DEFAULT = 1e-3


def data(seed: int = 1, count: int = 19) -> list[dict[str, Tensor]]:
    return make_batches(count, seed)


def padded(batches: list[dict[str, Tensor]], more: int) -> list[dict[str, Tensor]]:
    return [{name: nn.functional.pad(x, (0, more)) for name, x in batch.items()} for batch in batches]


def block_of(model: Any, layer: int) -> Any:
    return model.base_model.encoder.layer[layer]


Part = Callable[[Any, int], Any]
PARTS: dict[str, Part] = {
    "heads": lambda model, layer: block_of(model, layer).attention.output,
    "neurons": lambda model, layer: block_of(model, layer).output,
}


def problem(pruned: Any, dense: Any, batches: Any, layer: int, part: str) -> tuple[Tensor, Tensor]:
    """Return the inputs of a projection in the pruned model, C (T, width), and its wanted output, Y (T, D)."""
    inputs, residual, _ = seen_by(PARTS[part](pruned, layer), pruned, batches)
    wanted, _ = seen_by(PARTS[part](dense, layer).LayerNorm, dense, batches)
    return inputs, wanted - residual


def solved(inputs: Tensor, wanted: Tensor, weight: Tensor, method: str, ridge: float) -> Tensor:
    """Return scikit-learn's fit with the bias as its last column, (D, width + 1); `ridge` is in inputs' mean power."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    left = wanted - inputs @ weight.T
    if method == "refit" and weight.numel():
        power = float((inputs - inputs.mean(0)).square().sum(0).mean())
        fit = linear_model.Ridge(ridge * power, solver="svd").fit(inputs.numpy(), left.numpy())
        weight, left = weight + torch.from_numpy(fit.coef_), torch.from_numpy(fit.intercept_)[None]
    return torch.cat([weight, left.mean(0)[:, None]], 1)


def joined(dense: nn.Linear) -> Tensor:
    return torch.cat([dense.weight, dense.bias[:, None]], 1).detach()


# What is fitted


@pytest.mark.parametrize("ridge", [0.0, DEFAULT, 0.3])
@pytest.mark.parametrize("method", METHODS)
def test_every_layer_is_the_least_squares_fit_given_the_repaired_ones_below(method: str, ridge: float) -> None:
    model, batches = make(), data()
    pruned = prune_neurons(prune_heads(model, PRUNED), NEURONS)
    fixed = repair(pruned, model, batches, method, ridge=ridge)
    for layer in range(L):
        for part, find in PARTS.items():
            inputs, wanted = problem(fixed, model, batches, layer, part)  # its own inputs are those from below
            old = find(pruned, layer).dense.weight.detach()
            got, best = joined(find(fixed, layer).dense), solved(inputs, wanted, old, method, ridge)
            assert distance(got, joined(find(pruned, layer).dense)) > 1e-3
            torch.testing.assert_close(got, best, rtol=0, atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_repair_of_a_model_that_lost_nothing_changes_nothing(method: str) -> None:
    model = make()
    for ridge in (0.0, DEFAULT):
        assert_same(repair(model, model, data(), method, ridge=ridge).state_dict(), model.state_dict(), atol=1e-10)


# What it may not depend on


@pytest.mark.parametrize(("method", "cls"), [("mean", BertForSequenceClassification), ("refit", BertModel)])
def test_every_backend_gives_the_same_repair(method: str, cls: Any) -> None:
    model = make(cls)
    pruned = prune_neurons(prune_heads(model, PRUNED), NEURONS)
    fixed = {}
    for name in ("sdpa", "eager", "packed", "auto"):
        for each in (model, pruned):
            each.set_attn_implementation(name)
        fixed[name] = repair(pruned, model, padded(data(), 9), method).state_dict()
        assert_same(fixed[name], fixed["sdpa"], atol=1e-9)
    model.set_attn_implementation("eager")  # and each in its own way
    assert_same(repair(pruned, model, padded(data(), 9), method).state_dict(), fixed["sdpa"], atol=1e-9)


def test_chunks_and_checkpointed_layers_change_nothing() -> None:
    model = make()
    wanted = repair(prune_neurons(model, NEURONS), model, data()).state_dict()
    other = make(chunk_size_feed_forward=4)
    other.gradient_checkpointing_enable()
    assert_same(repair(prune_neurons(other, NEURONS), other, data()).state_dict(), wanted, atol=1e-9)


@pytest.mark.parametrize(
    "cls", [BertForMaskedLM, BertForMultipleChoice, BertForPreTraining, BertForQuestionAnswering, BertLMHeadModel]
)
def test_every_model_with_a_head_is_repaired_as_its_body(cls: Any) -> None:
    model = make(cls, **({"is_decoder": True} if cls is BertLMHeadModel else {}))
    batches = data(count=10)
    given = batches
    if cls is BertForMultipleChoice:
        given = [{name: x.unflatten(0, (2, 5)) for name, x in batch.items()} for batch in batches]
    pruned, body = prune_heads(model, PRUNED), copy.deepcopy(model.bert)
    fixed = repair(pruned, model, [{**batch, "labels": None} for batch in given], "refit")
    wanted = repair(prune_heads(body, PRUNED), body, batches, "refit")
    assert_same(fixed.bert.state_dict(), wanted.state_dict(), atol=1e-12)
    head, before = fixed.state_dict(), model.state_dict()
    same = {k: x for k, x in head.items() if not k.startswith("bert.")}
    assert_same(same, {k: before[k] for k in same}, atol=0)


@pytest.mark.parametrize("crossed", [False, True])
@torch.no_grad()
def test_a_run_goes_through_the_layers_as_the_models_do(crossed: bool) -> None:
    model = make(is_decoder=crossed, add_cross_attention=crossed)
    batch = data(count=5)[0]
    if crossed:
        batch["encoder_hidden_states"] = torch.randn(5, 6, N * H, dtype=F64)
    pruned = prune_heads(model, {0: [1]})
    (found,) = module.start_runs(pruned, model, [batch])
    for layer, structure in product(range(L), STRUCTURES):
        found.run_dense(structure, block_of(model, layer))
        found.step(structure, block_of(pruned, layer), block_of(model, layer))
    for track, each in ((found.pruned, pruned), (found.dense, model)):
        assert_same(track.x[found.real], each(**batch).last_hidden_state[found.real])


def test_half_precision_is_fitted_in_float64() -> None:
    model = make().bfloat16()
    pruned = prune_heads(model, {0: [1, 3]})
    fixed = repair(pruned, model, data())
    assert {p.dtype for p in fixed.parameters()} == {torch.bfloat16}
    inputs, wanted = problem(pruned.double(), model.double(), data(), 0, "heads")
    parts = [PARTS["heads"](each.double(), 0).dense for each in (pruned, fixed)]
    before, after = (float((wanted - part(inputs)).detach().square().sum()) for part in parts)
    assert after < 0.9 * before


# What is touched


@pytest.mark.parametrize("method", METHODS)
def test_repair_leaves_both_models_alone_and_in_place_it_changes_projections_alone(method: str) -> None:
    dense, pruned = worn(make()), worn(prune_heads(make(), PRUNED))
    before, state = copy.deepcopy(pruned.state_dict()), state_of(pruned)
    with left_as_found(dense):
        with left_as_found(pruned):
            fixed = repair(pruned, dense, data(), method, ridge=DEFAULT)
        assert repair_(pruned, dense, data(), method, ridge=DEFAULT) is pruned
    assert state_of(pruned) == state
    assert_same(pruned.state_dict(), fixed.state_dict(), atol=0)
    changed = {k for k, x in pruned.state_dict().items() if not torch.equal(x, before[k])}
    assert changed <= {f"encoder.layer.{i}.attention.output.dense.{p}" for i in range(L) for p in ("weight", "bias")}
    assert len(changed) == (3 if method == "mean" else 5)  # layer 1 has no heads, only a bias


def test_a_repair_that_leaves_predictions_further_away_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers can come nearer to the dense ones while predictions do not: what "mean" may do with very little left."""
    model = make(BertForSequenceClassification, num_labels=3)
    pruned = prune_heads(model, PRUNED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        repair(pruned, model, data(), ridge=DEFAULT)
        repair(model, model, data(), ridge=DEFAULT)  # nothing to repair: rounding is no reason
    found = iter([0.309, 0.3135] * 2)
    monkeypatch.setattr(module, "mean_divergence", lambda *args: next(found))
    for method, other in ("mean", "use 'refit', or "), ("refit", ""):
        message = rf"after repair '{method}' predictions are 0.314 nats .* before, they were 0.309: {other}give more"
        with pytest.warns(UserWarning, match=message):
            repair(pruned, model, data(), method, ridge=DEFAULT)


def test_too_few_tokens_for_the_inputs_of_a_matrix_are_said() -> None:
    model = make()
    pruned, few = prune_neurons(model, {0: [1]}), data(count=6)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in few)
    assert tokens < 2 * D
    message = f"matrices with {D} inputs are fitted to {tokens} tokens, .* give {2 * D} tokens"
    with pytest.warns(UserWarning, match=message):
        repair(pruned, model, few)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        repair(pruned, model, few, "mean")
        repair(pruned, model, data(count=12))


def test_the_divergence_is_the_mean_over_examples() -> None:
    model = make(BertForSequenceClassification, num_labels=3)
    pruned = prune_heads(model, PRUNED)
    with torch.no_grad():
        p, q = (torch.cat([each(**b).logits.log_softmax(-1) for b in data()]) for each in (model, pruned))
        wanted = (p.exp() * (p - q)).sum(-1).mean()
        assert module.mean_divergence(pruned, model, data()) == pytest.approx(float(wanted), rel=1e-10)


def test_after_an_error_nothing_hangs_on_the_models() -> None:
    places = "encoder.layer.1.attention.self", "encoder.layer.2.output.LayerNorm", "embeddings"
    for place, which in product(places, (0, 1)):
        models = worn(prune_heads(make(), PRUNED)), worn(make())
        models[which].get_submodule(place).register_forward_hook(interrupt)
        before = [*map(state_of, models)]
        with pytest.raises(KeyboardInterrupt):
            repair_(*models, data())
        assert [*map(state_of, models)] == before


# What is refused


def test_what_cannot_be_repaired_is_refused_before_any_work() -> None:
    dense, pruned = make(), prune_heads(make(), PRUNED)
    for model in (dense, pruned):
        model.register_forward_pre_hook(lambda *args: pytest.fail("a model ran"))
    cases: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((dense, data(), "lsq"), {}, ValueError, "method 'lsq' is unknown; have: mean, refit"),
        ((dense, data()), {"ridge": -1}, ValueError, "ridge is -1; it must be 0 or more"),
        ((dense, data()), {"ridge": float("nan")}, ValueError, "ridge is nan"),
        ((dense, []), {}, ValueError, "there are no batches"),
        ((make(num_hidden_layers=2), data()), {}, ValueError, "has num_hidden_layers 3, the dense one 2"),
        ((make(vocab_size=98), data()), {}, ValueError, "has vocab_size 97, the dense one 98"),
        ((nn.Linear(3, 4), data()), {}, TypeError, "Linear is not a model of bertlite"),
    ]
    for args, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            repair_(pruned, *args, **options)


def test_padding_alone_is_refused() -> None:
    batches = [{**batch, "attention_mask": 0 * batch["attention_mask"]} for batch in data()]
    with pytest.raises(ValueError, match="the batches hold only padding"):
        repair(prune_heads(make(), PRUNED), make(), batches)


def test_flags_and_numbers_disagree_too() -> None:
    p, q = torch.tensor([[[0.3, -2.0]]], dtype=F64), torch.tensor([[[-0.1, -1.0]]], dtype=F64)
    assert Prediction(FLAGS, p).disagreement(Prediction(FLAGS, q)).tolist() == [1]
    assert Prediction(NORMAL, p).disagreement(Prediction(NORMAL, q)).tolist() == [0]
