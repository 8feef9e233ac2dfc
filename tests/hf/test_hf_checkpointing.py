"""Checkpointed layers of bertlite.hf learn as plain ones, switched on under the names of each transformers."""

import copy
import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import F64, assert_same, count_runs, inputs_of, labels_of
from pairs import CHECKPOINTING, CROSS, DECODER, EVERY, MODELS, VERSION, B, L, S, ours_of, pair, score_of, states_of
from torch import Tensor, nn

import bertlite
from bertlite import hf

ENABLE = getattr(hf.BertModel, f"{CHECKPOINTING}_checkpointing_enable")
HAS_EVERY = "every_n_layers" in inspect.signature(ENABLE).parameters
KWARGS = f"{CHECKPOINTING}_checkpointing_kwargs"
ON = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
OFF = dict.fromkeys(ON, 0.0)


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


NTH = pytest.mark.skipif(not HAS_EVERY, reason=f"transformers {VERSION} has no every_n_layers")


@pytest.mark.parametrize(
    ("name", "backend", "options", "wanted"),
    [
        ("BertModel", "eager", {}, [2] * L),
        ("BertForPreTraining", "sdpa", {}, [2] * L),
        ("BertLMHeadModel", "sdpa", {}, [2] * L),
        pytest.param("BertForMaskedLM", "sdpa", {"every_n_layers": 2}, [2, 1, 2], marks=NTH),
        pytest.param("BertForMaskedLM", "sdpa", {"every_n_layers": 3}, [2, 1, 1], marks=NTH),
        *(("BertForMaskedLM frozen", "sdpa", {KWARGS: {"use_reentrant": each}}, [2] * L) for each in (False, True)),
        ("BertForMaskedLM frozen", "sdpa", {}, [2] * L),
    ],
    ids=str,
)
def test_checkpointed_gradients_are_plain_ones_bit_for_bit_and_it_ends(
    name: str, backend: str, options: dict[str, Any], wanted: list[int]
) -> None:
    """Of frozen embeddings by default too, where transformers 4 checkpoints re-entrantly, and nothing would learn."""
    name, _, frozen = name.partition(" ")
    model = bertlite.prune_heads(ours_of(name, backend, **ON).train(), {0: [1], 1: [0, 1, 2, 3]})
    model.base_model.embeddings.requires_grad_(not frozen)
    plain = learn(model, name)
    assert any(key.endswith("encoder.layer.0.attention.self.query.weight") for key in plain)
    runs = count_runs(enable(model, **options))
    assert enabled(model)
    assert_same(learn(model, name), plain, atol=0)
    assert [runs[i] for i in range(L)] == wanted
    with torch.no_grad():
        model(**inputs_of(name))
    learn(model.eval(), name)  # not twice outside training: in the core, gradients that are recorded decide
    getattr(model.train(), f"{CHECKPOINTING}_checkpointing_disable")()
    learn(model, name)
    assert not enabled(model)
    assert [runs[i] for i in range(L)] == [times + 3 for times in wanted]


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
    "cross": ({**CROSS, "use_cache": False}, states_of()),  # a cache lays keys out otherwise, which rounds otherwise
}


@pytest.mark.parametrize(
    ("name", "way", "reentrant"),
    [
        *((name, way, True) for name in MODELS for way in ("packed", "auto")),
        *(("BertModel", way, True) for way in WAYS if way not in ("packed", "auto")),
        *((name, "cross", False) for name in ("BertModel", "BertLMHeadModel")),
    ],
)
def test_checkpoints_of_either_kind_give_the_gradients_of_plain_layers(name: str, way: str, reentrant: bool) -> None:
    """Re-entrant as peft asks for them, with a hook that lets the embeddings' output have one; of all inputs too."""
    changes, given = WAYS[way]
    model = ours_of(name, **(OFF if reentrant else ON), **changes).train()
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: out.requires_grad_())
    found = []
    for each in (model, enable(copy.deepcopy(model), **{KWARGS: {"use_reentrant": reentrant}})):
        inputs = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in given.items()}
        runs = count_runs(each)
        grads = learn(each, name, **inputs)
        found.append({**grads, **{name: x.grad for name, x in inputs.items() if x.requires_grad}})
    assert_same(found[1], found[0], atol=0)
    assert [runs[i] for i in range(L)] == [2] * L


def test_a_cache_is_not_filled_twice() -> None:
    model = enable(ours_of("BertLMHeadModel"))
    ids = inputs_of()["input_ids"]
    cache = model(ids[:, :6]).past_key_values
    assert cache.get_seq_length() == 6
    assert model.train()(ids).past_key_values is None
    with pytest.raises(ValueError, match="use_cache=True with gradient checkpointing"):
        model(ids, use_cache=True)
    with pytest.raises(ValueError, match="past_key_values with gradient checkpointing"):
        model(ids[:, 6:], past_key_values=cache)
    assert cache.get_seq_length() == 6
    with torch.no_grad():
        assert model(ids[:, 6:], past_key_values=cache, use_cache=True).past_key_values.get_seq_length() == 11
