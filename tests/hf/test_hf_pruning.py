"""Head pruning in bertlite.hf: the method of transformers 4, and the core's functions on models and configs."""

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import assert_same, full_outputs
from pairs import F64, L, N, config_of, inputs_of, only_4, ours_of, pair
from torch import nn

import bertlite
import bertlite.pruning
from bertlite import hf

HEADS = {0: [1, 3], 2: [0]}
ALL = [0, 1, 2, 3]


# Laws


@only_4
@pytest.mark.parametrize("heads", [HEADS, {1: [3]}, {0: [0, 1, 2], 1: [2], -1: [0]}], ids=str)
def test_pruned_models_equal_those_of_transformers_4(heads: dict[int, list[int]]) -> None:
    theirs, ours = pair("BertForPreTraining", dtype=torch.float32)  # all that it prunes
    for model in (theirs, ours):
        model.prune_heads(heads)
        model.prune_heads({1: [0]})
        model.double()
    assert_same(full_outputs(ours, inputs_of()), full_outputs(theirs, inputs_of()))
    wanted = {layer % L: heads for layer, heads in theirs.config.pruned_heads.items()}  # -1 is the last layer
    assert ours.config.pruned_heads == wanted
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for mine, other in zip(ours.bert.encoder.layer, theirs.bert.encoder.layer, strict=True):
        assert mine.attention.pruned_heads == other.attention.pruned_heads
        for attribute in ("num_attention_heads", "all_head_size", "attention_head_size"):
            assert getattr(mine.attention.self, attribute) == getattr(other.attention.self, attribute)


# Configs


class Holder(transformers.BertPreTrainedModel):
    """Somebody's own class, on transformers' base, around our BertModel."""

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__(config)
        self.bert = hf.BertModel(config)
        self.post_init()


def pair_of_models() -> transformers.EncoderDecoderModel:
    decoder = hf.BertLMHeadModel(config_of(is_decoder=True, add_cross_attention=True))
    return transformers.EncoderDecoderModel(encoder=hf.BertModel(config_of()), decoder=decoder)


HOLDERS = {  # the holder, the path to the model in it, and the path to the config of that model
    "head": (lambda: ours_of("BertForMaskedLM", "eager"), "bert", "config"),
    "own class": (lambda: Holder(config_of()), "bert", "config"),
    "encoder": (pair_of_models, "encoder", "config.encoder"),
    "decoder": (pair_of_models, "decoder", "config.decoder"),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_holds_a_model_has_its_config_and_another_model_of_it_is_left_alone(holder: str) -> None:
    make, path, config_path = HOLDERS[holder]
    model, find_config = make(), attrgetter(config_path)
    before = find_config(model)
    inner, other = attrgetter(path)(model), hf.BertModel(before)
    inner.prune_heads({0: [1, 2]})
    bertlite.pruning.prune_neurons_(inner, {1: [3]})
    inner.prune_heads({2: [3]})
    assert find_config(model) is inner.config is not before
    assert inner.config._attn_implementation == before._attn_implementation
    for each in (model, bertlite.pruning.densify(model)) if holder == "head" else ():
        kept = [part.config for part in each.modules() if hasattr(part, "config")]
        assert len(kept) == 3 + 3 * L  # attention functions of transformers read it, and would go by the old one
        assert all(config is each.config for config in kept)
    assert inner.config.pruned_heads == {0: [1, 2], 2: [3]}
    assert inner.config.pruned_neurons == {1: [3]}
    bertlite.pruning.drop_layers_(inner, [1])
    assert find_config(model).pruned_heads == {0: [1, 2], 1: [3]}
    assert (find_config(model).num_hidden_layers, other.config.num_hidden_layers) == (2, 3)
    assert before.pruned_heads == other.config.pruned_heads == {}
    assert other.encoder.layer[0].attention.self.num_attention_heads == N


@pytest.mark.parametrize("pruned", ["first", "second"])
@pytest.mark.parametrize("own", [False, True], ids=["one config", "own configs"])
def test_heads_that_share_a_model_all_know_its_heads(own: bool, pruned: str, tmp_path: Path) -> None:
    """As multi-task training does it: all tasks train one encoder."""
    config = config_of()
    first = hf.BertForSequenceClassification(config)
    second = hf.BertForTokenClassification(config_of(num_labels=5) if own else config)
    other = hf.BertForMaskedLM(config)
    second.bert = first.bert
    models: dict[str, Any] = {"first": first, "second": second}
    models[pruned].prune_heads(HEADS)
    for model in (first, second):
        model.double().eval().save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path, dtype=F64)
        assert again.config.pruned_heads == HEADS
        assert again.config.num_labels == model.classifier.out_features
        gate = torch.rand(L, N, dtype=F64)
        assert_same(again(**inputs_of(), head_mask=gate).logits, model(**inputs_of(), head_mask=gate).logits, atol=0)
        assert all(part.config is model.bert.config for part in model.bert.modules() if hasattr(part, "config"))
    assert other.config.pruned_heads == {}


@pytest.mark.parametrize("prune", ["prune_heads", "_prune_heads"])
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "BertLMHeadModel"])
def test_a_model_that_was_pruned_below_its_head_is_saved(name: str, prune: str, tmp_path: Path) -> None:
    """As TextPruner prunes; in the form of transformers 4, from which pruning can go on."""
    model, whole = ours_of(name), ours_of(name)
    getattr(model.bert, prune)({0: [1, 2]})
    model.bert.prune_heads({1: ALL})
    for _ in range(2):  # naming it again changes nothing
        model.bert.encoder.layer[2].attention.prune_heads([0])
    whole.prune_heads({0: [1, 2], 1: ALL, 2: [0]})
    assert model.config.pruned_heads == whole.config.pruned_heads
    model.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    assert stated["pruned_heads"] == {"0": [1, 2], "1": ALL, "2": [0]}
    again = type(model).from_pretrained(tmp_path, dtype=F64)
    for heads in ({}, {0: [1, 3]}):  # head 1 of layer 0 is gone: naming it again changes nothing
        again.prune_heads(heads)
        whole.prune_heads({layer: each[1:] for layer, each in heads.items()})
        assert_same(again(**inputs_of()).logits, whole(**inputs_of()).logits, atol=0)


def test_a_config_as_json_writes_it_is_changed_in_a_copy() -> None:
    """Its layers are strings, and transformers 5 leaves them so."""
    config = config_of(pruned_heads={"0": [3, 1], "2": [0]})
    assert [bertlite.kept_heads(config, layer) for layer in range(L)] == [(0, 2), (0, 1, 2, 3), (1, 2, 3)]
    pruned = bertlite.pruning.with_pruned(config, {0: [0]})
    assert type(pruned) is type(config)
    assert pruned.pruned_heads == {0: [0, 1, 3], 2: [0]}
    assert hf.BertModel(config).config.pruned_heads == HEADS


# Neurons, and layers


@pytest.mark.parametrize("name", ["BertModel", "BertForPreTraining"])
def test_layers_that_remain_run_as_before_and_take_their_heads_along(name: str, tmp_path: Path) -> None:
    model, inputs = bertlite.prune_heads(ours_of(name), {0: [1], 2: [3]}), inputs_of(name)
    small = bertlite.drop_layers(model, [1])
    assert small.config.pruned_heads == {0: [1], 1: [3]}
    assert (small.config.num_hidden_layers, model.config.num_hidden_layers) == (2, 3)
    layers = model.base_model.encoder.layer
    assert [layer.attention.self.layer_idx for layer in small.base_model.encoder.layer] == [0, 1]
    model.base_model.encoder.layer = nn.ModuleList([layers[0], layers[2]])
    wanted, got = model(**inputs), small(**inputs)
    assert_same(got[0], wanted[0], atol=0)
    small.save_pretrained(tmp_path)
    assert_same(type(small).from_pretrained(tmp_path, dtype=F64)(**inputs)[0], wanted[0], atol=0)
