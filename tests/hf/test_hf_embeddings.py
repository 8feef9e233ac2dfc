"""The tables of embeddings of bertlite.hf: resized with the decoder, and replaced."""

import copy
from typing import Any

import pytest
import torch
import transformers
from conftest import assert_same
from pairs import F64, TIED, B, D, S, V, inputs_of, pair
from torch import nn

from bertlite import hf


def assert_tied(model: Any) -> None:
    decoder = model.get_output_embeddings()
    assert decoder.weight is model.get_input_embeddings().weight
    assert model.cls.predictions.bias is decoder.bias
    assert decoder.bias.shape[0] == model.get_input_embeddings().num_embeddings


@pytest.mark.parametrize(("size", "multiple", "wanted"), [(101, None, 101), (90, None, 90), (None, 8, 104)])
@pytest.mark.parametrize("name", TIED)
def test_a_resized_vocabulary_is_that_of_transformers_and_survives_saving(name, size, multiple, wanted, tmp_path):
    theirs, ours = pair(name)
    ids = {**inputs_of(), "input_ids": inputs_of()["input_ids"].clamp(max=80)}
    states = []
    for model in (ours, theirs):
        torch.manual_seed(3)  # new rows are drawn
        model.resize_token_embeddings(size, pad_to_multiple_of=multiple)
        states.append(model.state_dict())
        assert model.config.vocab_size == wanted
        assert model(**ids)[0].shape[-1] == wanted
    assert_tied(ours)
    decoders = [model.get_output_embeddings() for model in (ours, theirs)]
    assert len({decoder.out_features for decoder in decoders}) == 1  # 5.0 leaves the old number
    assert_same(dict(states[0]), dict(states[1]), atol=0)
    assert_same(ours(**ids)[0], theirs(**ids)[0])
    ours.save_pretrained(tmp_path)
    for library in (hf, transformers):
        again = getattr(library, name).from_pretrained(tmp_path, dtype=F64, attn_implementation="eager")
        assert again.config.vocab_size == wanted
        assert_same(again(**ids)[0], ours(**ids)[0])


def test_tables_of_other_sizes_count_as_in_transformers():
    """Whatever the config says: an outer model that resizes knows another config."""
    theirs, ours = pair("BertModel")
    sizes = {"word_embeddings": V + 20, "token_type_embeddings": 5, "position_embeddings": 60}
    for model in (theirs, ours):
        generator = torch.Generator().manual_seed(1)
        for name, size in sizes.items():
            table = nn.Embedding(size, D, _weight=torch.randn(size, D, generator=generator, dtype=F64))
            setattr(model.embeddings, name, table)
    ids = torch.arange(V + 20)[-44:].view(2, 22)
    given = {"input_ids": ids, "token_type_ids": ids % 5, "position_ids": torch.arange(16, 60).view(2, 22)}
    assert_same(dict(ours(**given)), dict(theirs(**given)))
    for name, size in zip(given, sizes.values(), strict=True):
        with pytest.raises(ValueError, match=f"{name} holds {size}; this model has 0 to {size - 1}"):
            ours(**{**given, name: torch.full_like(ids, size)})
    long = ids[:1].repeat(1, 2)[:, :42]  # more than the config says
    assert_same(ours(long)[0], ours(long, position_ids=torch.arange(42))[0])


@pytest.mark.parametrize("name", TIED)
def test_another_decoder_brings_its_bias(name):
    theirs, ours = pair(name, tie_word_embeddings=False)
    decoder = nn.Linear(D, V, dtype=F64)
    for model in (theirs, ours):
        model.set_output_embeddings(copy.deepcopy(decoder))
        assert model.get_output_embeddings().weight.equal(decoder.weight)
        assert model.cls.predictions.bias is model.get_output_embeddings().bias
    assert_same(*({**model(**inputs_of())} for model in (ours, theirs)))


@pytest.mark.parametrize("backend", ["sdpa", "packed"])
@pytest.mark.parametrize("shape", [(1, S), (S,), (B, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("name", ["token_type_ids", "position_ids"])
def test_ids_of_another_shape_are_those_that_transformers_takes(name, shape, backend):
    theirs, ours = pair("BertModel")
    ours.set_attn_implementation(backend)
    inputs = {**inputs_of(), name: torch.randint(0, 5, shape)}
    real = inputs["attention_mask"].bool()
    assert_same(ours(**inputs)[0][real], theirs(**inputs)[0][real])
