"""Our classes return what transformers' own return, and refuse what those ignore."""

import copy
import inspect
import pickle
from typing import Any

import pairs
import pytest
import torch
import transformers
from conftest import EXACT, F64, assert_same, distance, gradients, inputs_of, labels_of
from transformers.utils import TransformersKwargs

import bertlite
from bertlite import hf

F32 = torch.float32


@torch.no_grad()
def run(model: Any, inputs: dict[str, Any], backend: str = "eager", **options: Any) -> Any:
    """All that a model returns; of sdpa no attentions, which transformers 5 does not give."""
    return model(**inputs, output_hidden_states=True, output_attentions=backend == "eager", **options)


# Equal to transformers' own


@pairs.BOTH
@pairs.EVERY
def test_every_class_equals_transformers(name: str, backend: str, kernels_run: list[str]) -> None:
    theirs, ours = pairs.pair(name, backend)
    inputs = {**inputs_of(name), **labels_of(name)}
    got, wanted = run(ours, inputs, backend), run(theirs, inputs, backend)
    assert type(got) is type(wanted)
    assert_same(pairs.present(got), pairs.present(wanted))
    assert kernels_run == [backend] * pairs.L
    ours.config.return_dict = False
    assert type(ours(**inputs)) is tuple
    ours.config.return_dict = True
    if pairs.V5:  # bit for bit in float32: 4 divides where we multiply
        theirs, ours = theirs.float(), ours.float()
        for given in (inputs, inputs_of(name), {"input_ids": inputs["input_ids"]}):
            assert_same(pairs.present(run(ours, given, backend)), pairs.present(run(theirs, given, backend)), atol=0)


@pairs.BOTH
@pairs.ALONE_OR_CROSS
@pytest.mark.parametrize("name", ["BertModel", "BertLMHeadModel"])
def test_decoders_equal_transformers(name: str, changes: dict[str, Any], backend: str) -> None:
    for dtype, atol in ((F64, EXACT), (F32, 0))[: 2 if pairs.V5 else 1]:
        theirs, ours = pairs.pair(name, backend, dtype, **changes)
        inputs = {**inputs_of(), **(pairs.states_of(dtype) if changes is pairs.CROSS else {})}
        got, wanted = run(ours, inputs, backend), run(theirs, inputs, backend)
        assert type(got) is type(wanted)
        assert type(got.past_key_values) is type(wanted.past_key_values)
        assert got.past_key_values.get_seq_length() == pairs.S
        caches = [[x for layer in out.past_key_values for x in layer if x is not None] for out in (got, wanted)]
        assert_same(*caches, atol=atol)
        parts = [{**pairs.present(out), "past_key_values": None} for out in (got, wanted)]
        assert_same(*parts, atol=atol)
        if name == "BertLMHeadModel":
            losses = [run(model, {**inputs, **labels_of(name)}, backend).loss.to(F32) for model in (ours, theirs)]
            assert_same(*losses, atol=0 if dtype == F32 else 1e-5)  # theirs is summed in float32


@pairs.EVERY
def test_gradients_equal_those_of_transformers(name: str) -> None:
    grads = []
    for model in reversed(pairs.pair(name)):
        out = model(**inputs_of(name), **labels_of(name))
        grads.append(gradients(model, out.loss if "loss" in out else pairs.score_of(out)))
    assert_same(*grads, atol=1e-11)  # the largest are near 10


@pairs.BOTH
@pairs.EVERY
def test_dropout_draws_as_in_transformers(name: str, backend: str) -> None:
    for changes in ({}, {"classifier_dropout": 0.5}):
        outs = []
        for model in reversed(pairs.pair(name, backend, **changes)):
            torch.manual_seed(4)
            outs.append(pairs.present(model.train()(**inputs_of(name))))
        assert_same(*outs)
    assert distance(outs[0][next(iter(outs[0]))], model.eval()(**inputs_of(name))[0]) > 1e-2


@pairs.EVERY_CLASS
def test_parameters_modules_and_arguments_have_the_names_of_transformers(name: str) -> None:
    theirs, ours = pairs.theirs_of(name), pairs.ours_of(name)
    shapes = [{key: x.shape for key, x in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert {key for key, _ in ours.named_parameters()} == {key for key, _ in theirs.named_parameters()}
    assert {key for key, _ in ours.named_modules()} == {key for key, _ in theirs.named_modules()}
    assert isinstance(ours, getattr(transformers, name))
    assert isinstance(ours, transformers.BertPreTrainedModel)
    assert ours.num_parameters() == theirs.num_parameters()
    assert_same(dict(ours.named_buffers()), dict(theirs.named_buffers()), atol=0)
    assert ours.get_input_embeddings() is ours.base_model.embeddings.word_embeddings
    assert (ours.get_output_embeddings() is None) == (name not in pairs.TIED)
    arguments, others = ([*inspect.signature(model.forward).parameters] for model in (ours, theirs))
    assert [each for each in arguments if each in others][:7] == [each for each in others if each in arguments][:7]


def test_without_a_pooler() -> None:
    theirs = transformers.BertModel(pairs.config_of(), add_pooling_layer=False).double().eval()
    ours = hf.BertModel(pairs.config_of(), add_pooling_layer=False).double().eval()
    ours.load_state_dict(theirs.state_dict())
    assert_same(dict(ours(**inputs_of())), dict(theirs(**inputs_of())))
    assert len(ours(**inputs_of(), return_dict=False)) == len(theirs(**inputs_of(), return_dict=False)) == 2 - pairs.V5
    assert ours.pooler is None
    assert ours(**inputs_of()).pooler_output is None


# What transformers does not do


@pairs.EVERY_CLASS
def test_an_unknown_argument_is_an_error(name: str) -> None:
    model, inputs = pairs.ours_of(name), inputs_of(name)
    for wrong in ("headmask", "attention_masks", "foo"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'"):
            model(**inputs, **{wrong: torch.ones(1)})


@pairs.EVERY_CLASS
def test_arguments_that_transformers_ignores_are_ignored(name: str) -> None:
    model, inputs = pairs.ours_of(name, "eager"), inputs_of(name)
    wanted = dict(model(**inputs))
    known = inspect.signature(getattr(bertlite, name).forward).parameters
    for ignored in TransformersKwargs.__annotations__.keys() - known.keys():
        assert_same(dict(model(**inputs, **{ignored: torch.tensor(True)})), wanted, atol=0)
    layer = pairs.ours_of("BertModel").encoder.layer[0]
    states = torch.ones(1, 5, 48, dtype=F64)
    if pairs.V5:
        assert_same(layer(states, **dict.fromkeys(TransformersKwargs.__annotations__)), layer(states), atol=0)
    with pytest.raises(TypeError, match="headmask"):
        layer(states, headmask=None)


@pairs.only_5
def test_arguments_that_transformers_does_not_ignore_everywhere_are_refused_there() -> None:
    ids = inputs_of()["input_ids"]
    for backend, given, message in (
        ("sdpa", {"is_causal": True}, "is_causal is True; set is_decoder=True"),
        ("flex_attention", {"cu_seq_lens_q": torch.tensor([0, 11])}, "cu_seq_lens_q does not reach attention 'flex_"),
    ):
        known = given.keys() <= TransformersKwargs.__annotations__.keys()  # 5.0 and 5.1 know no is_causal
        with pytest.raises(ValueError if known else TypeError, match=message if known else "unexpected keyword"):
            pairs.ours_of("BertModel", backend)(ids, **given)


# Copies


@pytest.mark.parametrize("name", ["BertForPreTraining", "BertLMHeadModel"])
@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_a_copy_is_tied_and_its_parts_have_its_config(name: str, copied: str) -> None:
    """What it computes is a law of tests/laws."""
    model = bertlite.prune_heads(pairs.ours_of(name, use_cache=False), {0: [1], 2: [0, 1, 2, 3]})
    twin = copy.deepcopy(model) if copied == "deepcopy" else pickle.loads(pickle.dumps(model))
    predictions = twin.cls.predictions
    assert predictions.decoder.weight is twin.get_input_embeddings().weight
    assert predictions.bias is predictions.decoder.bias
    for layer in twin.base_model.encoder.layer:
        assert layer.attention.self.config is twin.config is twin.base_model.config


def test_a_language_model_that_is_no_decoder_looks_both_ways() -> None:
    theirs, ours = pairs.pair("BertLMHeadModel", is_decoder=False)
    assert_same(dict(ours(**inputs_of())), dict(theirs(**inputs_of())))
    assert_same(ours(**inputs_of(), **labels_of("BertLMHeadModel")).logits, ours(**inputs_of()).logits)


def test_hidden_states_may_be_asked_for_by_number() -> None:
    """Those that are not are None in the tuple; numbers count from the end too."""
    model = pairs.ours_of("BertModel")
    whole = model(**inputs_of(), output_hidden_states=True).hidden_states
    some = model(**inputs_of(), output_hidden_states=[0, -1]).hidden_states
    assert [state is None for state in some] == [False, True, True, False]
    assert torch.equal(some[0], whole[0])
    assert torch.equal(some[3], whole[3])
    assert model(**inputs_of(), output_hidden_states=[]).hidden_states is None
    assert len(model(**inputs_of(), output_hidden_states=[1], return_dict=False)[-1]) == 4
    for wrong in (4, -5):
        with pytest.raises(ValueError, match=f"output_hidden_states names {wrong}; there are 4, 0 to 3"):
            model(**inputs_of(), output_hidden_states=[wrong])


@pytest.mark.parametrize("number", [-1, 0, 1])
def test_one_number_is_what_it_is_to_transformers(number: int) -> None:
    """An index since 5.23, and before a flag."""
    outs = [model(**inputs_of(), output_hidden_states=number) for model in pairs.pair("BertModel")]
    theirs, ours = (out.hidden_states for out in outs)
    for states in (theirs, ours):
        assert (states is None) == (number == 0)
    if number:
        assert [state is None for state in ours] == [state is None for state in theirs]
