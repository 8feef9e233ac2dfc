"""Removing intermediate neurons for good: the laws of heads, for the other half of a layer."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same, distance, full_outputs, gradients, make
from torch import Tensor, nn

from bertlite import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    densify,
    kept_neurons,
    prune_heads,
    prune_neurons,
    prune_neurons_,
    with_pruned,
)

WIDTH, D, L = 37, 48, 3
EVERY = range(WIDTH)
NEURONS: dict[str, dict[int, Any]] = {
    "one": {1: [2]},
    "some": {0: [36, 3, 5], 2: range(20)},
    "a whole layer": {1: EVERY},
    "every neuron": {0: EVERY, 1: EVERY, 2: EVERY},
    "none": {},
    "none, by name": {0: []},
}
SOME = NEURONS["some"]


def silenced(model: Any, neurons: dict[int, Any]) -> Any:
    """Return a copy whose neurons are multiplied by 0."""
    model = copy.deepcopy(model)
    for layer, gone in neurons.items():
        gate = torch.ones(WIDTH, dtype=torch.float64)
        gate[list(gone)] = 0
        block = model.base_model.encoder.layer[layer]
        block.intermediate.register_forward_hook(lambda module, args, out, gate=gate: out * gate)
    return model


@pytest.mark.parametrize("act", ["gelu", "sigmoid"])  # of 0, the second is not 0
@pytest.mark.parametrize("neurons", NEURONS.values(), ids=list(NEURONS))
def test_pruning_a_neuron_is_gating_it_to_zero(neurons: dict[int, Any], act: str, batch: dict[str, Tensor]) -> None:
    model = make(hidden_act=act)
    pruned = prune_neurons(model, neurons)
    assert_same(full_outputs(pruned, batch), full_outputs(silenced(model, neurons), batch))
    for layer in range(L):
        kept = kept_neurons(pruned.config, layer)
        assert kept == tuple(neuron for neuron in EVERY if neuron not in neurons.get(layer, []))
        block = pruned.encoder.layer[layer]
        assert block.intermediate.dense.weight.shape == (len(kept), D)
        assert block.output.dense.weight.shape == (D, len(kept))
    if any(neurons.values()):
        assert distance(pruned(**batch).last_hidden_state, model(**batch).last_hidden_state) > 1e-2


@pytest.mark.parametrize(
    ("first", "second"),
    [({0: [1]}, {0: [3]}), ({0: [1, 2]}, {0: [0], 2: [36]}), ({1: range(30)}, {1: EVERY}), ({}, SOME)],
    ids=str,
)
def test_pruning_twice_is_pruning_the_union_bit_for_bit(
    first: dict[int, Any], second: dict[int, Any], model: BertModel, batch: dict[str, Tensor]
) -> None:
    union = {layer: {*first.get(layer, []), *second.get(layer, [])} for layer in {*first, *second}}
    twice, once = prune_neurons(prune_neurons(model, first), second), prune_neurons(model, union)
    assert twice.config == once.config
    assert_same(twice.state_dict(), once.state_dict(), atol=0)
    assert_same(full_outputs(twice, batch), full_outputs(once, batch), atol=0)


def test_heads_and_neurons_go_in_either_order(model: BertModel, batch: dict[str, Tensor]) -> None:
    heads = {0: [1], 1: range(4)}
    one, other = prune_heads(prune_neurons(model, SOME), heads), prune_neurons(prune_heads(model, heads), SOME)
    assert one.config == other.config == with_pruned(model.config, heads, SOME)
    assert_same(one.state_dict(), other.state_dict(), atol=0)
    assert_same(full_outputs(densify(one), batch).hidden_states, full_outputs(one, batch).hidden_states)
    assert densify(one).config == model.config


@pytest.mark.parametrize("neurons", NEURONS.values(), ids=list(NEURONS))
def test_densified_computes_as_pruned_and_is_whole(
    neurons: dict[int, Any], model: BertModel, batch: dict[str, Tensor]
) -> None:
    pruned = prune_neurons(model, neurons)
    dense = densify(pruned)
    assert dense.config == model.config
    assert {k: x.shape for k, x in dense.state_dict().items()} == {k: x.shape for k, x in model.state_dict().items()}
    assert_same(full_outputs(dense, batch), full_outputs(pruned, batch))
    assert_same(prune_neurons(dense, neurons).state_dict(), pruned.state_dict(), atol=0)


@pytest.mark.parametrize("neurons", NEURONS.values(), ids=list(NEURONS))
def test_a_pruned_model_is_one_built_from_the_pruned_config(
    neurons: dict[int, Any], model: BertModel, recwarn: pytest.WarningsRecorder
) -> None:
    pruned = prune_neurons(model, neurons)
    built = BertModel(with_pruned(model.config, {}, neurons)).double().eval()
    assert built.config == pruned.config
    assert str(built) == str(pruned)
    built.load_state_dict(pruned.state_dict())
    assert not [str(w.message) for w in recwarn]


@pytest.mark.parametrize("cls", [BertModel, BertForMaskedLM, BertForSequenceClassification])
def test_load_after_save_is_the_same_model(cls: Any, tmp_path: Path, batch: dict[str, Tensor]) -> None:
    model = prune_neurons_(prune_heads(make(cls), {1: [0]}), {0: [36, 3], 1: EVERY})
    model.save_pretrained(tmp_path)
    again = cls.from_pretrained(tmp_path)
    assert again.config.pruned_neurons == {0: (3, 36), 1: tuple(EVERY)}
    assert_same(again.state_dict(), model.state_dict(), atol=0)
    assert_same(full_outputs(again, batch), full_outputs(model, batch), atol=0)


def test_an_unpruned_config_does_not_mention_neurons(tmp_path: Path) -> None:
    assert "pruned_neurons" not in BertConfig().to_dict()
    assert BertConfig(pruned_neurons={"0": [2, 1]}).to_dict()["pruned_neurons"] == {0: [1, 2]}


def test_a_checkpoint_with_fewer_neurons_than_its_config_is_refused_with_the_way_out(tmp_path: Path) -> None:
    prune_neurons(make(), {1: [2, 4]}).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"layer 1 has 35 of 37 neurons, but the config's pruned_neurons does not name"
    ):
        BertModel.from_pretrained(tmp_path, pruned_neurons={})
    with pytest.raises(ValueError, match=r"layer 1 has 35 of 37 neurons, but .* says that \[0, 1, 2\] are removed"):
        BertModel.from_pretrained(tmp_path, pruned_neurons={1: [0, 1, 2]})


def test_prune_neurons_leaves_its_argument_alone(model: BertModel) -> None:
    before, config = copy.deepcopy(model.state_dict()), model.config
    pruned = prune_neurons(model, SOME)
    for parameter in pruned.parameters():
        parameter.data.zero_()
    assert_same(model.state_dict(), before, atol=0)
    assert model.config == config
    assert prune_neurons_(model, SOME) is model


def test_what_is_replaced_keeps_its_kind_and_the_rest_is_the_same_parameter(model: BertModel) -> None:
    before = dict(model.named_parameters())
    model.encoder.layer[0].intermediate.dense.bias.requires_grad_(False)
    model.encoder.layer[2].train()
    model.half()
    prune_neurons_(model, SOME)
    replaced = {
        f"encoder.layer.{layer}.{part}"
        for layer in (0, 2)
        for part in ("intermediate.dense.weight", "intermediate.dense.bias", "output.dense.weight")
    }
    assert {name for name, p in model.named_parameters() if p is not before[name]} == replaced
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {
        "encoder.layer.0.intermediate.dense.bias"
    }
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert model.encoder.layer[2].output.dense.training
    assert not model.encoder.layer[0].output.dense.training


def test_a_pruned_model_learns(batch: dict[str, Tensor]) -> None:
    model = prune_neurons(make(), {0: [1], 1: EVERY})
    grads = gradients(model, model(**batch).last_hidden_state.square().mean())
    for place in ("0.intermediate.dense.weight", "0.output.dense.weight", "1.output.dense.bias"):
        assert grads[f"encoder.layer.{place}"].abs().max() > 1e-6


@pytest.mark.parametrize(
    ("neurons", "message"),
    [
        ({0: [37]}, "layer 0 has no neuron 37: it was built with 37 neurons, 0 to 36"),
        ({3: [0]}, "there is no layer 3: the model has 3 layers, 0 to 2"),
        ({0: "12"}, r"neurons are given as \{layer: \[neurons\]\}, all integers; not as \{0: '12'\}"),
        ([0, 1], "neurons are given as"),
    ],
    ids=str,
)
def test_refusals_name_the_layer_and_the_neuron(neurons: Any, message: str, model: BertModel) -> None:
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        prune_neurons_(model, neurons)
    assert_same(model.state_dict(), before, atol=0)


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base


@pytest.mark.parametrize("place", ["intermediate", "output"])
def test_adapters_are_not_lost_in_silence(place: str, model: BertModel) -> None:
    block = model.encoder.layer[2].get_submodule(place)
    block.dense = LoraLinear(block.dense)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        TypeError, match=rf"encoder\.layer\.2\.{place}\.dense is a .*LoraLinear, not a plain nn.Linear"
    ):
        prune_neurons_(model, SOME)
    assert_same(model.state_dict(), before, atol=0)


@pytest.mark.parametrize("place", ["intermediate", "output"])
def test_densify_refuses_adapters_too(place: str) -> None:
    model = prune_neurons(make(), {1: [2]})
    block = model.encoder.layer[1].get_submodule(place)
    block.dense = LoraLinear(block.dense)
    with pytest.raises(TypeError, match=rf"encoder\.layer\.1\.{place}\.dense is a .*LoraLinear"):
        densify(model)
