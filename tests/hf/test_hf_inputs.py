"""Every bad input that transformers meets obscurely or in silence is refused by name, here and in the core alike."""

import inspect
from typing import Any

import pytest
import torch
from conftest import assert_same
from pairs import ours_of

B, S = 2, 11
IDS = torch.arange(B * S).view(B, S) % 90 + 1


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": IDS.new_full((B, S), 97)}, "input_ids holds 97; this model has 0 to 96"),
        ({}, "input_ids or inputs_embeds, not neither"),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(3, S)},
            r"attention_mask has shape \(3, 11\)",
        ),
        ({"input_ids": IDS, "head_mask": torch.ones(3, 5)}, r"head_mask has shape \(3, 5\)"),
        ({"input_ids": IDS, "labels": torch.full((B, S), 6)}, "labels holds 6"),
    ],
)
def test_a_bad_input_is_refused_by_name(inputs: dict[str, Any], message: str) -> None:
    """The checks are the core's, whose tests have more."""
    with pytest.raises(ValueError, match=message):
        ours_of("BertForTokenClassification")(**inputs)


@pytest.mark.parametrize("name", ["BertModel", "BertForSequenceClassification", "BertForQuestionAnswering"])
def test_every_argument_may_be_passed_by_place(name: str) -> None:
    """In the order of the signature, as torch.onnx passes them."""
    model, ids = ours_of(name), torch.arange(1, 12).view(1, 11)
    defaults = [each.default for each in inspect.signature(model.forward).parameters.values()]
    assert_same(dict(model(ids, *defaults[1:])), dict(model(ids)), atol=0)
