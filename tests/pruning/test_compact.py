"""compact removes what is zero and changes no output; drop_layers renumbers what remains."""

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HEADED, assert_same, full_outputs, inputs_of, make, make_batch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from bertlite import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    drop_layers,
    prune_heads,
    prune_neurons,
)
from bertlite.pruning import compact, compact_, densify, drop_layers_
from bertlite.support.activations import ACTIVATIONS

L, H, NEURONS = 3, 12, 37
CLASSES = [BertModel, *HEADED]


def rows(head: int) -> slice:
    return slice(head * H, (head + 1) * H)


def part(model: Any, layer: int, name: str) -> nn.Linear:
    return model.base_model.encoder.layer[layer].get_submodule(name)


@torch.no_grad()
def zero_(model: Any, layer: int, name: str, *, heads: tuple[int, ...] = (), neurons: Iterable[int] = ()) -> None:
    """Fill with zeros the rows (of query, key, value, intermediate) or columns (of output) of heads and neurons."""
    linear = part(model, layer, name)
    for index in (*(rows(head) for head in heads), *neurons):
        if "output" in name:
            linear.weight[:, index] = 0
        else:
            linear.weight[index] = 0


@pytest.mark.parametrize("cls", [*CLASSES, BertLMHeadModel])
def test_heads_and_neurons_of_zeros_go_and_no_output_changes(cls: Any) -> None:
    model = make(cls, is_decoder=cls is BertLMHeadModel, use_cache=False)
    zero_(model, 0, "attention.output.dense", heads=(1, 3))
    zero_(model, 1, "attention.self.value", heads=(0,))  # its bias is a constant
    for name in ("query", "key", "value"):
        zero_(model, 2, f"attention.self.{name}", heads=(2,))
    zero_(model, 0, "intermediate.dense", neurons=(0, 5, 36))
    zero_(model, 2, "output.dense", neurons=(7, 8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small = compact(model)
    assert small.config.pruned_heads == {0: (1, 3), 1: (0,), 2: (2,)}
    assert small.config.pruned_neurons == {0: (0, 5, 36), 2: (7, 8)}
    batch = inputs_of(cls.__name__)
    assert_same(model(**batch), small(**batch))
    assert_same(model.state_dict(), before, atol=0)
    assert model.config.pruned_heads == {}
    assert small.num_parameters() < model.num_parameters()
    assert_same(densify(small)(**batch), small(**batch))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_a_dead_neuron_adds_moves_into_the_bias(activation: str) -> None:
    model = make(hidden_act=activation)
    zero_(model, 1, "intermediate.dense", neurons=tuple(range(0, NEURONS, 2)))
    small = compact(model)
    assert small.config.pruned_neurons == {1: tuple(range(0, NEURONS, 2))}
    batch = make_batch()
    assert_same(full_outputs(small, batch).hidden_states, full_outputs(model, batch).hidden_states)


@pytest.mark.parametrize(
    ("zeros", "heads", "neurons"),
    [
        ({"attention.self.query": range(12)}, (), ()),  # head 0 attends evenly
        ({"attention.self.key": range(12)}, (), ()),
        ({"attention.output.dense": [3]}, (), ()),  # one column of a head
        ({"attention.self.value": [3]}, (), ()),
        ({"attention.self.value": range(24, 30), "attention.output.dense": range(30, 36)}, (2,), ()),  # together all
        ({"attention.self.value": range(48), "intermediate.dense": range(37)}, (0, 1, 2, 3), tuple(range(37))),
    ],
)
def test_what_does_nothing_goes_and_the_rest_stays(zeros: Any, heads: Any, neurons: Any) -> None:
    model = make()
    for name, numbers in zeros.items():
        zero_(model, 1, name, neurons=numbers)
    small = compact(model)
    assert small.config.pruned_heads == ({1: heads} if heads else {})
    assert small.config.pruned_neurons == ({1: neurons} if neurons else {})
    assert_same(small(**make_batch()), model(**make_batch()))
    assert_same(compact(small).state_dict(), small.state_dict(), atol=0)
    if not heads:
        assert_same(small.state_dict(), model.state_dict(), atol=0)


def test_a_number_that_is_nearly_zero_counts() -> None:
    model = make()
    zero_(model, 0, "attention.output.dense", heads=(1,))
    zero_(model, 0, "output.dense", neurons=(1,))
    with torch.no_grad():
        part(model, 0, "attention.output.dense").weight[5, rows(1)] = 1e-300
        part(model, 0, "output.dense").weight[5, 1] = 1e-300
    assert compact(model).config == model.config


def test_a_pruned_model_is_compacted_further_and_heads_keep_their_numbers() -> None:
    model = prune_neurons(prune_heads(make(), {0: [0], 1: [2]}), {0: [0, 1]})
    zero_(model, 0, "attention.output.dense", heads=(1,))  # head 2
    zero_(model, 0, "output.dense", neurons=(0,))  # neuron 2
    small = compact(model)
    assert small.config.pruned_heads == {0: (0, 2), 1: (2,)}
    assert small.config.pruned_neurons == {0: (0, 1, 2)}
    assert_same(small(**make_batch()), model(**make_batch()))


def test_compacting_what_densify_made_gives_the_pruned_model_back() -> None:
    pruned = prune_neurons(prune_heads(make(), {0: [1, 3], 2: [0, 1, 2, 3]}), {1: [4, 5]})
    again = compact(densify(pruned))
    assert again.config.pruned_heads == pruned.config.pruned_heads
    assert again.config.pruned_neurons == pruned.config.pruned_neurons
    assert_same(again.state_dict(), pruned.state_dict(), atol=0)


@pytest.mark.parametrize("run", [False, True], ids=["fresh", "after a forward"])
def test_masks_of_torch_become_permanent(run: bool, tmp_path: Path) -> None:
    model = make(BertForMaskedLM)
    for layer in range(L):
        for name in ("attention.output.dense", "output.dense"):
            torch_prune.ln_structured(part(model, layer, name), "weight", 0.5, n=2, dim=1)
    value = part(model, 0, "attention.self.value")
    mask = torch.ones_like(value.weight)
    mask[rows(1)] = 0
    torch_prune.custom_from_mask(value, "weight", mask)
    torch_prune.l1_unstructured(value, "bias", 3)
    torch_prune.l1_unstructured(model.cls.predictions.transform.dense, "weight", 0.3)
    torch_prune.random_unstructured(model.cls.predictions.transform.dense, "weight", 0.1)  # a container of two
    batch = make_batch()
    wanted = model(**batch)
    if run:
        with torch.no_grad():
            model(**batch)
    small = compact(model)
    assert 1 in small.config.pruned_heads[0]
    assert {layer: len(gone) for layer, gone in small.config.pruned_neurons.items()} == dict.fromkeys(range(L), 18)
    assert_same(small(**batch), wanted)
    assert not any("weight_mask" in name for name in small.state_dict())
    assert "encoder.layer.0.output.dense.weight_mask" in model.base_model.state_dict()
    assert_same(model(**batch), wanted, atol=0)
    small.save_pretrained(tmp_path)
    assert_same(BertForMaskedLM.from_pretrained(tmp_path)(**batch), small(**batch), atol=0)
    assert all(p.requires_grad for p in small.parameters())


def test_a_model_with_masks_of_torch_can_be_copied_for_every_change() -> None:
    model = make(BertForMaskedLM)
    torch_prune.ln_structured(part(model, 0, "output.dense"), "weight", 0.5, n=2, dim=1)
    shallow = drop_layers(model, [2])
    assert "bert.encoder.layer.0.output.dense.weight_mask" in shallow.state_dict()
    assert_same(compact(shallow)(**make_batch()), drop_layers(compact(model), [2])(**make_batch()))
    assert_same(shallow(**make_batch()), compact(shallow)(**make_batch()))
    pruned = prune_heads(compact(model), {1: [0]})
    assert_same(compact(prune_heads(model, {1: [0]}))(**make_batch()), pruned(**make_batch()))


def test_adapters_are_refused_before_anything_changes() -> None:
    class Lora(nn.Linear):
        pass

    model = make(BertForSequenceClassification)
    zero_(model, 0, "attention.output.dense", heads=(1,))
    torch_prune.random_unstructured(model.classifier, "weight", 0.5)
    model.bert.encoder.layer[2].output.dense = Lora(NEURONS, 48).double()
    before, keys = model.config, list(model.state_dict())
    with pytest.raises(TypeError, match=r"encoder\.layer\.2\.output\.dense is a .*Lora, not a plain nn\.Linear"):
        compact_(model)
    assert model.config is before
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_constant_is_summed_exactly_enough(dtype: torch.dtype) -> None:
    model = make().to(dtype)
    zero_(model, 1, "intermediate.dense", neurons=tuple(range(20)))
    small = compact(model)
    wanted = part(model, 1, "output.dense")
    with torch.no_grad():
        active = torch.nn.functional.gelu(part(model, 1, "intermediate.dense").bias[:20])
        exact = wanted.bias.double() + wanted.weight[:, :20].double() @ active.double()
    assert part(small, 1, "output.dense").bias.dtype == dtype
    assert_same(part(small, 1, "output.dense").bias, exact.to(dtype), atol=0)


def test_compact_in_place_is_the_same_and_keeps_modes() -> None:
    model = make().train()
    zero_(model, 1, "attention.output.dense", heads=(0,))
    copied = compact(model)
    dense = part(model, 1, "attention.output.dense")
    dense.requires_grad_(False)
    assert compact_(model) is model
    assert part(model, 1, "attention.output.dense") is dense
    assert not dense.weight.requires_grad
    assert model.training
    assert_same(model.state_dict(), copied.state_dict(), atol=0)


# drop_layers


@torch.no_grad()
def by_hand(model: Any, kept: list[int], batch: dict[str, Tensor]) -> Tensor:
    """Run some layers of an unpruned model, one after the other."""
    model = copy.deepcopy(model)
    model.base_model.encoder.layer = nn.ModuleList(model.base_model.encoder.layer[i] for i in kept)
    return model(**batch)


@pytest.mark.parametrize("gone", [[], [1], [0, 2], [2, 2, 0], range(3)], ids=str)
@pytest.mark.parametrize("cls", CLASSES)
def test_the_layers_that_remain_run_as_before(cls: Any, gone: Any) -> None:
    model = make(cls)
    batch = inputs_of(cls.__name__)
    small = drop_layers(model, gone)
    kept = [layer for layer in range(L) if layer not in gone]
    assert model.config.num_hidden_layers == len(model.base_model.encoder.layer) == L
    assert small.config.num_hidden_layers == len(small.base_model.encoder.layer) == len(kept)
    assert [layer.layer_idx for layer in small.base_model.encoder.layer] == list(range(len(kept)))
    assert_same(small(**batch), by_hand(model, kept, batch), atol=0)


def test_pruned_heads_and_neurons_follow_their_layers(tmp_path: Path) -> None:
    pruned = prune_neurons(prune_heads(make(), {0: [1], 1: [2], 2: [0, 3]}), {0: [7], 2: [5, 6]})
    small = drop_layers(pruned, [0])
    assert small.config.pruned_heads == {0: (2,), 1: (0, 3)}
    assert small.config.pruned_neurons == {1: (5, 6)}
    again = prune_heads(small, {1: [1]})
    assert again.config.pruned_heads == {0: (2,), 1: (0, 1, 3)}
    small.save_pretrained(tmp_path)
    loaded = BertModel.from_pretrained(tmp_path)
    assert_same(loaded(**make_batch()), small(**make_batch()), atol=0)
    assert_same(full_outputs(densify(small), make_batch()).hidden_states, full_outputs(small, make_batch())[2])
    assert "pruned_neurons" not in drop_layers(pruned, [0, 2]).config.to_dict()


def test_a_decoder_without_a_layer_keeps_its_cache_in_order() -> None:
    model = drop_layers(make(BertLMHeadModel, is_decoder=True), [0])
    ids = make_batch()["input_ids"]
    first = model(ids[:, :6], use_cache=True)
    rest = model(ids[:, 6:], past_key_values=first.past_key_values)
    assert_same(torch.cat([first.logits, rest.logits], 1), model(ids).logits)


def test_layers_may_be_numbers_of_any_library() -> None:
    for layers in ([1], torch.tensor([1, 1]), np.array([1]), [np.int64(1)]):
        assert drop_layers(make(pruned_heads={2: [0]}), layers).config.pruned_heads == {1: (0,)}


@pytest.mark.parametrize(("layers", "named"), [([3], "3"), ([0, -1], "-1")])
def test_a_layer_that_is_not_there_is_refused(layers: Any, named: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=f"there is no layer {named}: the model has 3 layers, 0 to 2"):
        drop_layers_(model, layers)
    for no_list in (0, None, "1", [True], torch.tensor([True, False, False])):
        with pytest.raises(ValueError, match=re.escape(f"such as [9, 10, 11]; not as {no_list!r}")):
            drop_layers(model, no_list)  # type: ignore[arg-type]
    assert len(model.encoder.layer) == L
