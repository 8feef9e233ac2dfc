"""The models of bertlite.hf without padding: asked for by name, and by "auto" only where nobody sees it."""

from typing import Any

import pytest
import torch
import transformers
from conftest import assert_same, gradients, make_batch
from pairs import HEADS, MODELS, V5, config_of, labels_of, ours_of, pair
from torch import Tensor

from bertlite import hf

LENGTHS = (11, 3, 7, 1, 4, 2, 3, 9)  # 45 % of 8 x 11


def sparse() -> dict[str, Tensor]:
    return make_batch(8, 11, lengths=LENGTHS)


def ran_packed(model: Any, **inputs: Any) -> bool:
    shapes: list[int] = []
    hook = model.base_model.encoder.register_forward_pre_hook(lambda m, args: shapes.append(args[0].dim()))
    with torch.no_grad():
        model(**inputs)
    hook.remove()
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


@pytest.mark.parametrize("name", [name for name in HEADS if name != "BertForQuestionAnswering"])
def test_packed_learns_what_transformers_learns(name: str) -> None:
    theirs, ours = pair(name, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ours.set_attn_implementation("packed")
    checkpointing = "activation_checkpointing_enable" if V5 else "gradient_checkpointing_enable"  # as each prefers
    getattr(ours.train(), checkpointing)()
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


@pytest.mark.parametrize("backend", ["sdpa", "auto"])
def test_auto_keeps_what_stands_at_padded_positions(backend: str) -> None:
    """Callers of transformers find values there; a head of the pooler shows nothing of it."""
    assert not ran_packed(ours_of("BertModel", backend), **sparse())
    assert not ran_packed(ours_of("BertForTokenClassification", backend), **sparse())
    assert ran_packed(ours_of("BertModel", backend), **sparse(), first_token_only=True)
    model = ours_of("BertForSequenceClassification", backend)
    assert ran_packed(model, **sparse())
    assert not ran_packed(model, **sparse(), output_hidden_states=True)
    assert_same(model(**sparse()).logits, model(**sparse(), output_hidden_states=True).logits)


def test_sequences_may_come_packed() -> None:
    model, batch = ours_of("BertForTokenClassification", "packed"), sparse()
    real = batch.pop("attention_mask").bool()
    ends = torch.tensor((0, *LENGTHS)).cumsum(0, dtype=torch.int32)
    packed = model(**{k: x[real] for k, x in batch.items()}, cu_seqlens=ends).logits
    assert_same(packed, model(**batch, attention_mask=real).logits[real])
