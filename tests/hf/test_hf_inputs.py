"""Every bad input that transformers meets obscurely or in silence is refused by name, here and in the core alike."""

import inspect
import re
from typing import Any

import pytest
import torch
from conftest import SIZES, assert_same, make
from pairs import ours_of
from torch import Tensor

from bertlite import hf

B, S = 2, 11
IDS = torch.arange(B * S).view(B, S) % 90 + 1
LONG = SIZES["max_position_embeddings"] + 1
ONES = torch.ones(B, S)


def ids_with(value: int) -> Tensor:
    return IDS.index_put((torch.tensor([1]), torch.tensor([3])), torch.tensor(value))


BAD: dict[str, tuple[dict[str, Any], str]] = {  # tests/test_model.py and tests/stack have more, of the core alone
    "too many tokens": ({"input_ids": IDS.new_ones(1, LONG)}, "41 tokens long; this model takes 1 to 40"),
    "a word too many": ({"input_ids": ids_with(97)}, "input_ids holds 97; this model has 0 to 96 (vocab_size 97)"),
    "a negative token type": (
        {"input_ids": IDS, "token_type_ids": torch.full((B, S), -1)},
        "token_type_ids holds -1; this model has 0 to 4 (type_vocab_size 5)",
    ),
    "a negative position": (
        {"input_ids": IDS, "position_ids": torch.arange(-1, S - 1)[None]},
        "position_ids holds -1; this model has 0 to 39",
    ),
    "neither input": ({}, "input_ids or inputs_embeds, not neither"),
    "embeddings that are integers": (
        {"inputs_embeds": torch.ones(B, S, 48).long()},
        "inputs_embeds is torch.int64; embeddings are floats",
    ),
    "inputs on two devices": (
        {"input_ids": IDS, "token_type_ids": torch.zeros(B, S, dtype=torch.long, device="meta")},
        "token_type_ids is on meta, the input on cpu: move one of them",
    ),
    "inputs where the model is not": (
        {"input_ids": IDS.to("meta")},
        "the input is on meta, the model on cpu: move one of them",
    ),
    "a mask of another batch": (
        {"input_ids": IDS, "attention_mask": torch.ones(3, S)},
        "attention_mask has shape (3, 11); expected (2, 11)",
    ),
    "a mask of halves": ({"input_ids": IDS, "attention_mask": ONES / 2}, "attention_mask holds 0.5: a 2-D mask holds"),
    "a 4-D mask of zeros and ones": (
        {"input_ids": IDS, "attention_mask": torch.ones(B, 1, S, S).tril()},
        "is added to the scores, but this one holds 0 and 1; use mask.bool()",
    ),
    "a head mask of another shape": ({"input_ids": IDS, "head_mask": torch.ones(3, 5)}, "head_mask has shape (3, 5)"),
}
MODELS = {"core": make, "hf": lambda: ours_of("BertModel")}


@pytest.mark.parametrize("made", MODELS)
@pytest.mark.parametrize("case", BAD)
def test_a_bad_input_is_refused_by_name(case: str, made: str) -> None:
    inputs, message = BAD[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        MODELS[made]()(**inputs)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "packed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("made", MODELS)
def test_half_precision_on_the_CPU_is_finite(made: str, dtype: torch.dtype, backend: str) -> None:
    """With padding, a row that is all padding, and queries and keys of which a product is near the largest number."""
    model = MODELS[made]()
    with torch.no_grad():
        for part in ("query", "key"):
            getattr(model.encoder.layer[0].attention.self, part).weight.mul_(30)
    model = model.to(dtype)
    model.set_attn_implementation(backend)
    mask = torch.tensor([[1] * 7 + [0] * 4, [0] * S])
    assert model(IDS, mask).last_hidden_state.isfinite().all()


@pytest.mark.parametrize(
    ("name", "labels", "message"),
    [
        ("BertForTokenClassification", {"labels": torch.full((B, S), 6)}, "labels holds 6"),
        (
            "BertForTokenClassification",
            {"labels": torch.zeros(B, S - 1).long()},
            "of shape (2, 10); expected class indices of shape (2, 11)",
        ),
        ("BertForNextSentencePrediction", {"labels": torch.tensor([0, 2])}, "labels holds 2"),
    ],
)
def test_a_label_that_cannot_be_is_refused(name: str, labels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ours_of(name)(IDS, **labels)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5}, "hidden_size 48 is not a multiple of"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob is 1.5; a probability"),
        ({"pruned_heads": {0: "13"}}, "all integers; not as"),
        ({"add_cross_attention": True}, "only a decoder has cross-attention"),
    ],
    ids=str,
)
def test_a_config_that_no_bert_has_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.BertModel(hf.BertConfig(**{**SIZES, **changes}))


@pytest.mark.parametrize("name", ["BertModel", "BertForSequenceClassification", "BertForQuestionAnswering"])
def test_every_argument_may_be_passed_by_place(name: str) -> None:
    """In the order of the signature, as torch.onnx passes them."""
    model, ids = ours_of(name), torch.arange(1, 12).view(1, 11)
    defaults = [each.default for each in inspect.signature(model.forward).parameters.values()]
    assert_same(dict(model(ids, *defaults[1:])), dict(model(ids)), atol=0)
