"""The models of bertlite.hf without padding: asked for by name, and by "auto" only where nobody sees it."""

from typing import Any

import pytest
import torch
import transformers
from conftest import assert_same, gradients, make_batch
from pairs import CHECKPOINTING, MODELS, config_of, labels_of, ours_of, pair
from torch import Tensor

from bertlite import hf

LENGTHS = (11, 3, 7, 1, 4, 2, 3, 9)  # 45 % of 8 x 11


def sparse() -> dict[str, Tensor]:
    return make_batch(8, 11, lengths=LENGTHS)


def ran_packed(model: Any, **inputs: Any) -> bool:
    shapes: list[int] = []
    encoder = model.base_model.encoder
    forward = encoder.forward
    encoder.forward = lambda x, *args, **options: shapes.append(x.dim()) or forward(x, *args, **options)
    with torch.no_grad():
        model(**inputs)
    del encoder.forward  # no hook: "auto" leaves nothing out where one looks
    return shapes == [2]


@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_transformers_at_real_tokens(name: str) -> None:
    theirs, ours = pair(name)
    ours.set_attn_implementation("packed")
    choices = name == "BertForMultipleChoice"
    inputs = {k: x.unflatten(0, (2, 4)) for k, x in sparse().items()} if choices else sparse()
    assert ran_packed(ours, **inputs)
    got, wanted, real = ours(**inputs), theirs(**inputs), sparse()["attention_mask"].bool()
    assert list(got) == list(wanted)
    for key, value in wanted.items():
        per_token = value.shape[:2] == real.shape
        assert_same(got[key][real] if per_token else got[key], value[real] if per_token else value)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForMultipleChoice"])
def test_packed_learns_what_transformers_learns(name: str) -> None:
    theirs, ours = pair(name, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ours.set_attn_implementation("packed")
    getattr(ours.train(), f"{CHECKPOINTING}_checkpointing_enable")()
    choices = name == "BertForMultipleChoice"
    inputs = {k: x.unflatten(0, (2, 7)) for k, x in make_batch(14).items()} if choices else make_batch()
    labels = labels_of(name)
    if labels["labels"].dim() == 2:
        labels["labels"] = labels["labels"].masked_fill(make_batch()["attention_mask"] == 0, -100)
    grads = [gradients(model, model(**inputs, **labels).loss) for model in (ours, theirs)]
    assert_same(*grads, atol=1e-11)  # the largest are near 10


def test_it_is_chosen_by_name(tmp_path: Any) -> None:
    model = ours_of("BertModel", "packed")
    assert model.config._attn_implementation == "packed"
    model.save_pretrained(tmp_path)
    again = hf.BertModel.from_pretrained(tmp_path, attn_implementation="packed", dtype=torch.float64)
    assert ran_packed(again, **sparse())
    assert_same(dict(again(**sparse())), dict(model(**sparse())), atol=0)
    assert not ran_packed(hf.BertModel.from_pretrained(tmp_path), **sparse())
    with pytest.raises(ValueError, match="'packed' cannot give attentions; use 'eager' or 'auto'"):
        model(**sparse(), output_attentions=True)
    with pytest.raises((ValueError, KeyError), match="packed"):
        transformers.BertModel(config_of(backend="packed"))  # theirs knows no such name


def test_auto_leaves_padding_out_where_nobody_sees_it() -> None:
    assert not ran_packed(ours_of("BertModel", "auto"), **sparse())
    assert not ran_packed(ours_of("BertForTokenClassification", "auto"), **sparse())
    assert ran_packed(ours_of("BertModel", "auto"), **sparse(), first_token_only=True)
    model = ours_of("BertForSequenceClassification", "auto")
    assert ran_packed(model, **sparse())
    assert not ran_packed(model, **sparse(), output_hidden_states=True)
    assert_same(model(**sparse()).logits, model(**sparse(), output_hidden_states=True).logits)
