"""Losses: those of transformers, and the losses of the parts of a batch add up to the loss of the whole."""

from typing import Any

import pytest
import torch
from conftest import assert_same, distance, gradients
from pairs import HEADS, LABELS, NONE, V5, B, inputs_of, labels_of, ours_of, pair
from torch import Tensor

TWO_LOSSES = ["BertForPreTraining", "BertForQuestionAnswering"]
SUMMED = [*(name for name in HEADS if name not in TWO_LOSSES), "BertLMHeadModel"]
MANY = torch.rand(B, LABELS, generator=torch.Generator().manual_seed(2)).round()
KINDS: dict[str, tuple[dict[str, Any], Tensor]] = {
    "one number": ({"num_labels": 1}, torch.tensor([0.3, -1.2])),
    "one number, named": ({"num_labels": 1, "problem_type": "regression"}, torch.tensor([0.3, -1.2])),
    "numbers": ({"problem_type": "regression"}, MANY * 1.5),
    "classes": ({}, torch.tensor([5, 0])),
    "classes, named": ({"problem_type": "single_label_classification"}, torch.tensor([5, 0])),
    "several classes": ({}, MANY),
    "several classes, named": ({"problem_type": "multi_label_classification"}, MANY),
}


@pytest.mark.parametrize("kind", [int, torch.tensor], ids=["int", "tensor"])
@pytest.mark.parametrize("name", SUMMED)
def test_the_losses_of_the_parts_add_up_to_that_of_the_whole(name: str, kind: Any) -> None:
    labels = labels_of(name)["labels"]
    items = kind(int(((labels[:, 1:] if name == "BertLMHeadModel" else labels) != NONE).sum()))  # that have a label
    model, whole = ours_of(name), {**inputs_of(name), "labels": labels}
    parts = [{key: x[b : b + 1] for key, x in whole.items()} for b in range(B)]
    assert model.accepts_loss_kwargs is True  # which Trainer asks
    if labels.dim() > 1:
        assert (labels[0] != NONE).sum() != (labels[1] != NONE).sum()  # so the mean of the means is another number
    alone = [model(**part).loss for part in parts]
    losses = [model(**part, num_items_in_batch=items).loss for part in parts]
    wanted = model(**whole).loss
    assert_same(sum(losses), wanted)
    assert distance(sum(alone), wanted) > 1e-3
    summed = [gradients(model, loss) for loss in losses]
    assert_same({key: summed[0][key] + summed[1][key] for key in summed[0]}, gradients(model, wanted), atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sequence_label_adds_up_and_equals_transformers(kind: str) -> None:
    changes, labels = KINDS[kind]
    labels = labels.double() if labels.is_floating_point() else labels
    theirs, ours = pair("BertForSequenceClassification", **changes)
    wanted = theirs(**inputs_of(), labels=labels)
    got = ours(**inputs_of(), labels=labels)
    assert_same(dict(got), dict(wanted))
    assert ours.config.problem_type == theirs.config.problem_type is not None  # the first labels decide, for pipelines
    items, losses = labels.numel(), []
    for b in range(B):
        part = {key: x[b : b + 1] for key, x in {**inputs_of(), "labels": labels}.items()}
        losses.append(ours(**part, num_items_in_batch=items).loss)
    assert_same(sum(losses), got.loss)


def test_a_causal_loss_honours_the_number_of_items_as_transformers_does() -> None:
    theirs, ours = pair("BertLMHeadModel")
    given = {**inputs_of(), **labels_of("BertLMHeadModel"), "use_cache": False}
    for items in (None, 3, 1000):
        some = {} if items is None else {"num_items_in_batch": items}
        got, wanted = ours(**given, **some).loss, theirs(**given, **some).loss
        torch.testing.assert_close(got.float(), wanted.float(), rtol=1e-6, atol=0)  # theirs is summed in float32


def test_labels_may_be_shifted_already() -> None:
    theirs, ours = pair("BertLMHeadModel")
    labels = labels_of("BertLMHeadModel")["labels"]
    shifted = torch.cat([labels[:, 1:], torch.full((B, 1), NONE)], 1)
    whole = ours(**inputs_of(), labels=labels).loss
    assert_same(ours(**inputs_of(), labels=labels, shift_labels=shifted).loss, whole)
    if V5:
        wanted = theirs(**inputs_of(), labels=labels, shift_labels=shifted).loss
        torch.testing.assert_close(whole.float(), wanted.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", TWO_LOSSES)
def test_two_losses_have_no_one_number_of_items(name: str) -> None:
    """So Trainer is told not to pass it, and averages over the steps instead; given all the same, it is ignored."""
    model = ours_of(name)
    assert model.accepts_loss_kwargs is False
    given = {**inputs_of(name), **labels_of(name)}
    assert_same(model(**given, num_items_in_batch=3).loss, model(**given).loss, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*HEADS, "BertLMHeadModel"])
def test_losses_of_half_precision_have_the_dtype_of_transformers(name: str, dtype: torch.dtype) -> None:
    theirs, ours = pair(name, dtype=dtype)
    got, wanted = (model(**inputs_of(name), **labels_of(name)).loss for model in (ours, theirs))
    assert got.isfinite()
    assert got.dtype == wanted.dtype
    if V5:
        assert_same(got, wanted, atol=0)
