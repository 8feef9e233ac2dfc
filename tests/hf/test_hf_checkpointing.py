"""Checkpointed layers of bertlite.hf learn as plain ones, switched on under the names of each transformers."""

import copy
import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import assert_same, count_runs, gradients
from pairs import (
    CHECKPOINTING,
    CROSS,
    DECODER,
    EVERY,
    F64,
    MODELS,
    VERSION,
    B,
    L,
    S,
    inputs_of,
    labels_of,
    ours_of,
    pair,
    score_of,
    states_of,
)
from torch import Tensor, nn

import bertlite
from bertlite import hf

ENABLE = getattr(hf.BertModel, f"{CHECKPOINTING}_checkpointing_enable")
HAS_EVERY = "every_n_layers" in inspect.signature(ENABLE).parameters
ON = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}


def enable(model: Any, **options: Any) -> Any:
    """Under the name that this version prefers."""
    getattr(model, f"{CHECKPOINTING}_checkpointing_enable")(**options)
    return model


def enabled(model: Any) -> bool:
    return bool(getattr(model, f"is_{CHECKPOINTING}_checkpointing"))


def learn(model: Any, name: str = "BertModel", **options: Any) -> dict[str, Tensor]:
    """The loss and its gradients, with the same dropout each time."""
    torch.manual_seed(11)
    model.zero_grad()
    out = model(**{**inputs_of(name), **labels_of(name), **options})
    loss = out.loss if "loss" in out else score_of(out)
    loss.backward()  # re-entrant checkpoints take no other way
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    return {**grads, "loss": loss.detach()}


@pytest.mark.parametrize(
    ("name", "backend"), [("BertModel", "eager"), ("BertForPreTraining", "sdpa"), ("BertLMHeadModel", "sdpa")]
)
def test_checkpointed_gradients_are_plain_ones_bit_for_bit_and_it_ends(name: str, backend: str) -> None:
    model = bertlite.prune_heads(ours_of(name, backend, **ON).train(), {0: [1], 1: [0, 1, 2, 3]})
    plain = learn(model, name)
    runs = count_runs(enable(model))
    assert enabled(model)
    assert_same(learn(model, name), plain, atol=0)
    assert [runs[i] for i in range(L)] == [2] * L
    getattr(model, f"{CHECKPOINTING}_checkpointing_disable")()
    learn(model, name)
    assert not enabled(model)
    assert [runs[i] for i in range(L)] == [3] * L


@pytest.mark.skipif(not HAS_EVERY, reason=f"transformers {VERSION} has no every_n_layers")
@pytest.mark.parametrize(("every", "wanted"), [(1, [2, 2, 2]), (2, [2, 1, 2]), (3, [2, 1, 1])])
def test_every_nth_layer_is_checkpointed(every: int, wanted: list[int]) -> None:
    model = ours_of("BertForMaskedLM", **ON).train()
    plain = learn(model, "BertForMaskedLM")
    runs = count_runs(enable(model, every_n_layers=every))
    assert_same(learn(model, "BertForMaskedLM"), plain, atol=0)
    assert [runs[i] for i in range(L)] == wanted


def test_nothing_is_computed_twice_outside_training() -> None:
    """The rule of transformers; the core's is whether gradients are recorded."""
    model = enable(ours_of("BertModel"))
    runs = count_runs(model)
    learn(model)
    with torch.no_grad():
        model.train()(**inputs_of())
    assert [runs[i] for i in range(L)] == [2] * L


@EVERY
def test_what_transformers_keeps_in_a_module_can_be_patched_and_is_restored(name: str) -> None:
    """Code outside takes its attributes for plain ones, that of checkpointed layers too."""
    pairs = zip(*(enable(model).modules() for model in pair(name, **DECODER)), strict=True)
    kept = [(ours, each) for theirs, ours in pairs for each in vars(theirs).keys() - vars(nn.Module()).keys()]
    assert sum(each == "_gradient_checkpointing_func" for _, each in kept) > L
    for module, each in [(module, each) for module, each in kept if hasattr(module, each)]:
        before = getattr(module, each)
        with mock.patch.object(module, each) as patched:
            assert getattr(module, each) is patched
        assert getattr(module, each) == before
        setattr(module, each, before)
        delattr(module, each)
        setattr(module, each, before)
        assert vars(module)[each] == before


HEAD_GATES = torch.rand(L, 4, dtype=F64)
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # changes of the config, and inputs
    "sdpa": ({}, {}),
    "packed": ({"attn_implementation": "packed"}, {}),
    "auto": ({"attn_implementation": "auto"}, {}),
    "gates": ({}, {"head_mask": HEAD_GATES}),
    "scores": ({}, {"attention_mask": torch.zeros(B, 1, 1, S, dtype=F64)}),
    "cross": (CROSS, states_of()),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for name in MODELS if name != "BertLMHeadModel" for way in ("packed", "auto")),
        *(("BertModel", way) for way in WAYS if way not in ("packed", "auto")),
    ],
)
def test_reentrant_checkpoints_give_the_gradients_of_plain_layers(name: str, way: str) -> None:
    """As peft asks for them, with a hook that makes the embeddings' output require a gradient; of all inputs too."""
    changes, given = WAYS[way]
    model = ours_of(name, **{**ON, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, **changes).train()
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: out.requires_grad_())
    kwargs, found = {f"{CHECKPOINTING}_checkpointing_kwargs": {"use_reentrant": True}}, []
    for each in (model, enable(copy.deepcopy(model), **kwargs)):
        inputs = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in given.items()}
        runs = count_runs(each)
        grads = learn(each, name, **inputs)
        found.append({**grads, **{name: x.grad for name, x in inputs.items() if x.requires_grad}})
    assert_same(found[1], found[0], atol=0)
    assert [runs[i] for i in range(L)] == [2] * L


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_frozen_embeddings_do_not_cost_the_gradients(reentrant: bool | None) -> None:
    """By default too: transformers 4 would checkpoint re-entrantly, and find that nothing requires a gradient."""
    model = ours_of("BertForMaskedLM", **ON).train()
    model.bert.embeddings.requires_grad_(False)
    plain = learn(model, "BertForMaskedLM")
    kwargs = {} if reentrant is None else {"use_reentrant": reentrant}
    name = f"{CHECKPOINTING}_checkpointing_kwargs"
    runs = count_runs(enable(model, **({name: kwargs} if kwargs else {})))
    assert_same(learn(model, "BertForMaskedLM"), plain, atol=0)
    assert [runs[i] for i in range(L)] == [2] * L
    assert "bert.encoder.layer.0.attention.self.query.weight" in plain


@pytest.mark.parametrize("name", ["BertModel", "BertLMHeadModel"])
def test_the_encoder_learns_through_checkpointed_cross_attention(name: str) -> None:
    model = ours_of(name, **CROSS, **ON).train()
    found = []
    for each in (model, enable(copy.deepcopy(model))):
        given = states_of()
        states = given["encoder_hidden_states"].requires_grad_()
        assert (each(**inputs_of(), **given).past_key_values is None) == enabled(each)  # or it would be filled twice
        torch.manual_seed(11)
        out = each(**inputs_of(), **given, use_cache=False)  # a cache lays keys out otherwise, which rounds otherwise
        score = out[0].square().mean()
        (grad,) = torch.autograd.grad(score, states, retain_graph=True)
        found.append({**gradients(each, score), "states": grad})
    assert_same(found[1], found[0], atol=0)


def test_a_cache_is_not_filled_twice() -> None:
    model = enable(ours_of("BertLMHeadModel"))
    ids = inputs_of()["input_ids"]
    cache = model(ids[:, :6]).past_key_values
    assert cache.get_seq_length() == 6
    model.train()
    with pytest.raises(ValueError, match="use_cache=True with gradient checkpointing"):
        model(ids, use_cache=True)
    with pytest.raises(ValueError, match="past_key_values with gradient checkpointing"):
        model(ids[:, 6:], past_key_values=cache)
    assert cache.get_seq_length() == 6
    with torch.no_grad():
        assert model(ids[:, 6:], past_key_values=cache, use_cache=True).past_key_values.get_seq_length() == 11
