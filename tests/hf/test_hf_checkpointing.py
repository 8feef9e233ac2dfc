"""Checkpointed layers of bertlite.hf learn as plain ones, switched on under the names of each transformers."""

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


def enable(model: Any, **options: Any) -> Any:
    """Under the name that this version prefers."""
    getattr(model, f"{CHECKPOINTING}_checkpointing_enable")(**options)
    return model


def enabled(model: Any) -> bool:
    return bool(getattr(model, f"is_{CHECKPOINTING}_checkpointing"))


def learn(model: Any, name: str = "BertModel", **given: Tensor) -> dict[str, Tensor]:
    """Return the loss and its gradients, of given inputs too, with the same dropout each time."""
    torch.manual_seed(11)
    model.zero_grad()
    given = {key: x.clone().requires_grad_(x.is_floating_point()) for key, x in given.items()}
    out = model(**{**inputs_of(name), **labels_of(name), **given})
    loss = out.loss if "loss" in out else score_of(out)
    loss.backward()  # re-entrant checkpoints take no other way
    named = {**dict(model.named_parameters()), **given}
    return {"loss": loss.detach(), **{key: x.grad.clone() for key, x in named.items() if x.grad is not None}}


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # changes of the config, and inputs
    **{name: ({"attn_implementation": name}, {}) for name in ("eager", "sdpa", "packed", "auto")},
    "gates": ({}, {"head_mask": torch.rand(L, 4, dtype=F64)}),
    "scores": ({}, {"attention_mask": torch.zeros(B, 1, 1, S, dtype=F64)}),
    "cross": ({**CROSS, "use_cache": False}, states_of()),  # a cache lays keys out otherwise, which rounds otherwise
}
NTH = pytest.mark.skipif(not HAS_EVERY, reason=f"transformers {VERSION} has no every_n_layers")
EITHER = [{KWARGS: {"use_reentrant": each}} for each in (True, False)]  # peft asks for the first


@pytest.mark.parametrize(
    ("name", "way", "options"),
    [
        ("BertModel", "eager", {}),
        *((name, "sdpa", {}) for name in ("BertForPreTraining", "BertLMHeadModel", "BertForMaskedLM frozen")),
        *(pytest.param("BertForMaskedLM", "sdpa", {"every_n_layers": n}, marks=NTH) for n in (2, 3)),
        *(("BertForMaskedLM frozen", "sdpa", each) for each in EITHER),
        *((name, way, EITHER[0]) for name in MODELS for way in ("packed", "auto")),
        *(("BertModel", way, EITHER[0]) for way in ("sdpa", "gates", "scores", "cross")),
        *((name, "cross", EITHER[1]) for name in ("BertModel", "BertLMHeadModel")),
    ],
    ids=str,
)
def test_checkpointed_gradients_are_plain_ones_bit_for_bit_and_it_ends(
    name: str, way: str, options: dict[str, Any]
) -> None:
    """Of frozen embeddings by default too, where transformers 4 checkpoints re-entrantly, and nothing would learn."""
    name, _, frozen = name.partition(" ")
    changes, given = WAYS[way]
    model = bertlite.prune_heads(ours_of(name, **ON, **changes).train(), {0: [1], 1: [0, 1, 2, 3]})
    model.base_model.embeddings.requires_grad_(not frozen)
    runs = count_runs(model)  # its hooks look, so that all tokens are computed each time
    plain = learn(model, name, **given)
    assert any(key.endswith("encoder.layer.0.attention.self.query.weight") for key in plain)
    assert enabled(enable(model, **options))
    assert_same(learn(model, name, **given), plain, atol=0)
    wanted = [2 + (i % options.get("every_n_layers", 1) == 0) for i in range(L)]
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
