"""Embeddings of another number of tokens or positions: what stays, what new rows hold, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SIZES, assert_same, full_outputs, make, make_batch
from torch import Tensor, nn

from bertlite import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
)

V, P = SIZES["vocab_size"], SIZES["max_position_embeddings"]
WITH_DECODER = [BertForMaskedLM, BertForPreTraining, BertLMHeadModel]
CLASSES = [BertModel, BertForSequenceClassification, *WITH_DECODER]


def made(cls: Any, **changes: Any) -> Any:
    return make(cls, is_decoder=cls is BertLMHeadModel, use_cache=False, **changes)


def words_of(model: Any) -> Tensor:
    return model.get_input_embeddings().weight


# Tokens


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("cls", CLASSES)
def test_new_tokens_are_the_mean_and_old_ones_stay(cls: Any, tied: bool, tmp_path: Path) -> None:
    model, before = made(cls, tie_word_embeddings=tied), made(cls, tie_word_embeddings=tied)
    words = model.get_input_embeddings()
    assert model.resize_token_embeddings(V + 5) is words
    assert (model.config.vocab_size, words.num_embeddings, words.padding_idx) == (V + 5, V + 5, 0)
    assert_same(words.weight[:V], words_of(before), atol=0)
    assert_same(words.weight[V:], words_of(before).mean(0).expand(5, -1), atol=1e-15)
    batch = make_batch()
    wanted, got = full_outputs(before, batch), full_outputs(model, batch)
    assert_same(got.hidden_states, wanted.hidden_states, atol=0)
    if cls in WITH_DECODER:
        decoder, old = model.get_output_embeddings(), before.get_output_embeddings()
        assert decoder.out_features == V + 5
        assert model.cls.predictions.bias is decoder.bias
        assert (decoder.weight is words.weight) == tied
        assert_same(decoder.weight[:V], old.weight, atol=0)
        assert_same(decoder.weight[V:], old.weight.mean(0).expand(5, -1), atol=1e-15)
        assert_same(decoder.bias[V:], old.bias.mean().expand(5), atol=1e-15)
        logits, wanted_logits = (out[0] for out in (got, wanted))
        assert_same(logits[..., :V], wanted_logits)
        assert_same(logits[..., V], wanted_logits.mean(-1))
    model(torch.full((1, 3), V + 4))
    model.save_pretrained(tmp_path)
    assert_same(full_outputs(cls.from_pretrained(tmp_path), batch), got, atol=0)


@pytest.mark.parametrize("cls", CLASSES)
def test_fewer_tokens_drop_the_last_rows(cls: Any) -> None:
    model, before = made(cls), made(cls)
    model.resize_token_embeddings(V - 7)
    assert model.config.vocab_size == V - 7
    assert_same(words_of(model), words_of(before)[: V - 7], atol=0)
    with pytest.raises(ValueError, match=f"input_ids holds {V - 7}"):
        model(torch.tensor([[V - 7]]))


def test_the_number_can_be_made_a_multiple() -> None:
    model = make()
    assert len(model.resize_token_embeddings(pad_to_multiple_of=64).weight) == 128
    assert len(model.resize_token_embeddings(129, pad_to_multiple_of=64).weight) == 192
    words = words_of(model)
    assert len(model.resize_token_embeddings().weight) == 192
    assert_same(words_of(model), words, atol=0)


def test_new_rows_take_dtype_and_requires_grad_and_train() -> None:
    model = made(BertForMaskedLM).to(torch.bfloat16)
    model.get_input_embeddings().weight.requires_grad_(False)
    model.resize_token_embeddings(V + 1)
    assert words_of(model).dtype == torch.bfloat16
    assert not words_of(model).requires_grad
    assert model.cls.predictions.bias.requires_grad
    model = made(BertForMaskedLM)
    model.resize_token_embeddings(V + 1)
    ids = torch.full((1, 4), V)
    model(ids, labels=ids).loss.backward()
    assert words_of(model).grad[V].abs().max() > 0


INTEGER = "; it must be an integer, 1 or more"


@pytest.mark.parametrize(
    ("what", "size", "message"),
    [
        *(("token", size, f"new_num_tokens is {size}{INTEGER}") for size in (0, 3.0, True)),
        ("token", 9, "pad_token_id 11 is outside the vocabulary, 0 to 8"),
        *(("position", size, f"new_num_position_embeddings is {size!r}{INTEGER}") for size in (0, -1, 2.5, "64")),
    ],
)
def test_a_wrong_number_of_rows_is_refused(what: str, size: Any, message: str) -> None:
    model = make(BertForMaskedLM, pad_token_id=11)
    before, words = model.config, words_of(model)
    with pytest.raises(ValueError, match=message):
        getattr(model, f"resize_{what}_embeddings")(size)
    assert model.config is before
    assert words_of(model) is words


def test_wrapped_tables_are_refused_before_anything_changes() -> None:
    class Lora(nn.Embedding):
        pass

    model = make(BertForMaskedLM)
    bias = model.cls.predictions.bias
    model.bert.embeddings.word_embeddings = Lora(V, 48)
    with pytest.raises(TypeError, match=r"word_embeddings is a .*Lora, not a plain nn\.Embedding"):
        model.resize_token_embeddings(V + 1)
    model.bert.embeddings.position_embeddings = Lora(P, 48)
    with pytest.raises(TypeError, match=r"position_embeddings is a .*Lora"):
        model.resize_position_embeddings(P + 1)
    assert model.cls.predictions.bias is bias
    assert model.config == BertConfig(**SIZES)


# Positions


@pytest.mark.parametrize(
    "kind", ["absolute", "relative_key", "relative_key_query", "bucketed", "disentangled", "rotary"]
)
def test_longer_texts_fit_and_short_ones_give_what_they_gave(kind: str, tmp_path: Path) -> None:
    model, before = (make(position_embedding_type=kind) for _ in range(2))
    model.resize_position_embeddings(2 * P + 9)
    assert model.config.max_position_embeddings == 2 * P + 9
    batch = make_batch(length=P, lengths=(P, 7))
    assert_same(full_outputs(model, batch), full_outputs(before, batch), atol=0)
    long = make_batch(length=2 * P + 9, lengths=(2 * P + 9, P + 1))
    got = full_outputs(model, long)
    assert got.last_hidden_state.isfinite().all()
    with pytest.raises(ValueError, match=f"this model takes 1 to {2 * P + 9}"):
        model(make_batch(length=2 * P + 10)["input_ids"])
    model.save_pretrained(tmp_path)
    assert_same(full_outputs(BertModel.from_pretrained(tmp_path), long), got, atol=0)
    model.resize_position_embeddings(P)
    assert_same(model.state_dict(), before.state_dict(), atol=0)
    assert model.config == before.config
    with pytest.raises(ValueError, match=f"this model takes 1 to {P}"):
        model(make_batch(length=P + 1)["input_ids"])


def test_new_positions_repeat_the_old_ones_from_the_first_on() -> None:
    model = make()
    old = model.embeddings.position_embeddings.weight
    model.resize_position_embeddings(2 * P + 9)
    assert model.embeddings.position_embeddings.num_embeddings == 2 * P + 9
    assert_same(model.embeddings.position_embeddings.weight, torch.cat([old, old, old[:9]]), atol=0)


def test_a_larger_distance_begins_as_the_largest_one() -> None:
    model = make(position_embedding_type="relative_key")
    attention = model.encoder.layer[1].attention.self
    old = attention.distance_embedding.weight
    model.resize_position_embeddings(P + 3)
    table = attention.distance_embedding.weight
    assert attention.max_position_embeddings == P + 3
    assert_same(table, torch.cat([old[:1].expand(3, -1), old, old[-1:].expand(3, -1)]), atol=0)
