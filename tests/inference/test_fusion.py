"""bertlite/inference/fusion.py: a fused model is the model, proved in float64 with torch's own matmuls."""

import pytest
import torch
from conftest import assert_same, make
from optimised import full, of_kind

import bertlite
from bertlite.inference.fusion import fused_copy
from bertlite.inference.linear import FixedLinear
from bertlite.model import BertPreTrainedModel

HEADS = [
    "BertForMaskedLM",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
]


@pytest.fixture(params=["whole", "pruned"])
def any_model(request, model):
    return of_kind(request.param, model)


def in_float64(model: BertPreTrainedModel) -> BertPreTrainedModel:
    """Return a fused copy that computes with torch's matmuls, as other backends do with theirs."""
    return fused_copy(model, torch.float64, FixedLinear)


@pytest.mark.parametrize("options", [{}, {"output_attentions": True}], ids=["", "attentions"])
def test_the_fused_model_is_the_model(any_model, batch, options):
    assert_same(full(in_float64(any_model), batch, **options), full(any_model, batch, **options))


@pytest.mark.parametrize("cls", HEADS)
def test_every_head_gives_what_it_gave(cls, batch):
    model = make(getattr(bertlite, cls))
    got, wanted = full(in_float64(model), batch), full(model, batch)
    assert type(got) is type(wanted)
    assert_same(got, wanted)


def test_multiple_choice(batch):
    model = make(bertlite.BertForMultipleChoice)
    choices = {name: x.reshape(1, 2, 11) for name, x in batch.items()}
    assert_same(full(in_float64(model), choices), full(model, choices))


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu", "silu", "prelu"])
def test_every_kind_of_activation(act, batch):
    model = make(hidden_act=act)
    assert_same(full(in_float64(model), batch), full(model, batch))


@pytest.mark.parametrize("positions", ["relative_key", "relative_key_query"])
def test_relative_positions(positions, batch):
    model = make(position_embedding_type=positions)
    assert_same(full(in_float64(model), batch), full(model, batch))


def test_head_masks(any_model, batch):
    gate = torch.rand(3, 4, dtype=torch.float64)
    assert_same(full(in_float64(any_model), batch, head_mask=gate), full(any_model, batch, head_mask=gate))


def test_a_decoder_with_its_cache_and_an_encoder(batch):
    model = make(bertlite.BertLMHeadModel, is_decoder=True, add_cross_attention=True)
    quick, states = in_float64(model), torch.randn(2, 5, 48, dtype=torch.float64)
    ids = batch["input_ids"]
    outs = []
    for each in (model, quick):
        with torch.no_grad():
            out = each(ids[:, :7], encoder_hidden_states=states, use_cache=True)
            outs.append(each(ids[:, 7:], encoder_hidden_states=states, past_key_values=out.past_key_values).logits)
    assert_same(outs[1], outs[0])


def test_losses_are_still_computed(batch):
    model = make(bertlite.BertForSequenceClassification)
    labels = torch.tensor([1, 0])
    assert_same(full(in_float64(model), batch, labels=labels), full(model, batch, labels=labels))


@pytest.mark.parametrize("attention", ["sdpa", "packed", "auto"])
def test_a_row_of_padding(any_model, batch, attention):
    any_model.set_attn_implementation(attention)
    mask = torch.zeros_like(batch["input_ids"])
    mask[0, :5] = 1
    padded = {**batch, "attention_mask": mask}
    assert_same(full(in_float64(any_model), padded), full(any_model, padded))


def test_sequences_that_come_packed(any_model, batch):
    packed = {"input_ids": batch["input_ids"].flatten(), "cu_seqlens": torch.tensor([0, 9, 9, 22], dtype=torch.int32)}
    assert_same(full(in_float64(any_model), packed), full(any_model, packed))


def test_masks_for_every_query(any_model, batch):
    mask = torch.rand(2, 11, 11) > 0.3
    seen = {**batch, "attention_mask": mask}
    assert_same(full(in_float64(any_model), seen), full(any_model, seen))


def test_the_model_is_left_alone(model, batch):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    quick = in_float64(model)
    for part in quick.parameters():
        part.zero_()
    for part in quick.buffers():
        part.zero_()
    assert_same(model.state_dict(), before, atol=0)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("rows", [1, 4, 22, 23])
def test_rows_taken_at_a_time_change_nothing(model, batch, rows):
    quick = in_float64(model)
    for part in quick.modules():
        if isinstance(part, FixedLinear):
            part.rows_per_block = rows
    assert_same(full(quick, batch), full(model, batch))


def test_without_padding(any_model, batch):
    quick = in_float64(any_model)
    any_model.set_attn_implementation("packed")
    quick.set_attn_implementation("packed")
    assert_same(full(quick, batch), full(any_model, batch))
    first = {**batch, "first_token_only": True}
    with torch.no_grad():
        assert_same(quick(**first), any_model(**first))
        assert quick(**first).last_hidden_state.shape == (2, 1, 48)


def test_the_first_token_alone(any_model, batch):
    first = {**batch, "first_token_only": True}
    with torch.no_grad():
        assert_same(in_float64(any_model)(**first), any_model(**first))
