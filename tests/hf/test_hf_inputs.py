"""Every bad input that transformers meets obscurely or in silence is refused by name, here and in the core alike."""

import inspect
import re
from typing import Any

import pytest
import torch
import transformers
from conftest import SIZES, assert_same, make
from pairs import ours_of
from torch import Tensor

import bertlite
from bertlite import hf

B, S = 2, 11
IDS = torch.arange(B * S).view(B, S) % 90 + 1
LONG = SIZES["max_position_embeddings"] + 1
ONES = torch.ones(B, S)


def ids_with(value: int) -> Tensor:
    return IDS.index_put((torch.tensor([1]), torch.tensor([3])), torch.tensor(value))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"input_ids": IDS[:, :0]}, "0 tokens long; this model takes 1 to 40 (max_position_embeddings)"),
    "too many tokens": ({"input_ids": IDS.new_ones(1, LONG)}, "41 tokens long; this model takes 1 to 40"),
    "a word too many": ({"input_ids": ids_with(97)}, "input_ids holds 97; this model has 0 to 96 (vocab_size 97)"),
    "a negative word": ({"input_ids": ids_with(-1)}, "input_ids holds -1; this model has 0 to 96"),
    "a token type too many": (
        {"input_ids": IDS, "token_type_ids": torch.full((B, S), 5)},
        "token_type_ids holds 5; this model has 0 to 4 (type_vocab_size 5)",
    ),
    "a negative token type": (
        {"input_ids": IDS, "token_type_ids": torch.full((B, S), -1)},
        "token_type_ids holds -1; this model has 0 to 4 (type_vocab_size 5)",
    ),
    "a negative position": (
        {"input_ids": IDS, "position_ids": torch.arange(-1, S - 1)[None]},
        "position_ids holds -1; this model has 0 to 39",
    ),
    "a position too many": (
        {"input_ids": IDS, "position_ids": torch.arange(30, 30 + S)[None]},
        "position_ids holds 40; this model has 0 to 39 (max_position_embeddings 40)",
    ),
    "ids that are floats": ({"input_ids": IDS.float()}, "input_ids is torch.float32; indices are torch.long"),
    "ids that are bools": ({"input_ids": IDS > 3}, "input_ids is torch.bool; indices are torch.long"),
    "ids of one axis": ({"input_ids": IDS[0]}, "input_ids has shape (11,); expected (batch, length)"),
    "ids of three axes": ({"input_ids": IDS[None]}, "input_ids has shape (1, 2, 11); expected (batch, length)"),
    "both inputs": ({"input_ids": IDS, "inputs_embeds": torch.ones(B, S, 48)}, "input_ids or inputs_embeds, not both"),
    "neither input": ({}, "input_ids or inputs_embeds, not neither"),
    "embeddings of another size": ({"inputs_embeds": torch.ones(B, S, 47)}, "expected (batch, length, 48)"),
    "embeddings that are integers": (
        {"inputs_embeds": torch.ones(B, S, 48).long()},
        "inputs_embeds is torch.int64; embeddings are floats",
    ),
    "token types of another length": (
        {"input_ids": IDS, "token_type_ids": IDS[:, 1:] * 0},
        "token_type_ids has shape (2, 10); expected (2, 11)",
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
    "a mask of one sequence": (
        {"input_ids": IDS, "attention_mask": ONES[:1]},
        "attention_mask has shape (1, 11); expected (2, 11)",
    ),
    "a mask of another length": (
        {"input_ids": IDS, "attention_mask": torch.ones(B, S + 1)},
        "attention_mask has shape (2, 12); expected (2, 11)",
    ),
    "a mask of one axis": (
        {"input_ids": IDS, "attention_mask": ONES[0]},
        "attention_mask has 1 dimensions, shape (11,); expected 2, 3 or 4",
    ),
    "an additive mask of two axes": (
        {"input_ids": IDS, "attention_mask": (ONES - 1).index_fill(1, torch.tensor([9]), -1e4)},
        "attention_mask holds -10000.0: a 2-D mask holds 1 (attend) and 0 (do not)",
    ),
    "a mask of halves": ({"input_ids": IDS, "attention_mask": ONES / 2}, "attention_mask holds 0.5: a 2-D mask holds"),
    "a mask of twos": ({"input_ids": IDS, "attention_mask": ONES.long() * 2}, "attention_mask holds 2: a 2-D mask"),
    "a 4-D mask of zeros and ones": (
        {"input_ids": IDS, "attention_mask": torch.ones(B, 1, S, S).tril()},
        "is added to the scores, but this one holds 0 and 1; use mask.bool()",
    ),
    "a 4-D mask of integers": (
        {"input_ids": IDS, "attention_mask": torch.ones(B, 1, S, S).long()},
        "is bool or additive floats, not torch.int64; use mask.bool()",
    ),
    "a mask of nan": (
        {"input_ids": IDS, "attention_mask": torch.full((B, 1, S, S), torch.nan)},
        "attention_mask holds nan or +inf",
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


@pytest.mark.parametrize("made", MODELS)
def test_an_empty_batch_gives_an_empty_output(made: str) -> None:
    assert MODELS[made]()(IDS[:0]).last_hidden_state.shape == (0, S, 48)


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


@pytest.mark.parametrize("package", [bertlite, hf], ids=["core", "hf"])
@pytest.mark.parametrize(
    ("name", "labels", "message"),
    [
        ("BertForSequenceClassification", {"labels": torch.tensor([0, 6])}, "labels holds 6"),
        ("BertForTokenClassification", {"labels": torch.full((B, S), 6)}, "labels holds 6"),
        ("BertForMaskedLM", {"labels": torch.full((B, S), 97)}, "labels holds 97"),
        (
            "BertForTokenClassification",
            {"labels": torch.zeros(B, S - 1).long()},
            "of shape (2, 10); expected class indices of shape (2, 11)",
        ),
        ("BertForNextSentencePrediction", {"labels": torch.tensor([0, 2])}, "labels holds 2"),
    ],
)
def test_a_label_that_cannot_be_is_refused(package: Any, name: str, labels: Any, message: str) -> None:
    config = {**SIZES, **({"num_labels": 6} if "Classification" in name else {})}
    made = transformers.BertConfig(**config) if package is hf else bertlite.BertConfig(**config)
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(package, name)(made)(IDS, **labels)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "heads that do not divide": ({"num_attention_heads": 5}, "hidden_size 48 is not a multiple of"),
    "unknown activation": ({"hidden_act": "foo"}, "hidden_act 'foo' is unknown; have: "),
    "unknown positions": ({"position_embedding_type": "foo"}, "position_embedding_type 'foo' is unknown; have: "),
    "padding outside the vocabulary": ({"pad_token_id": 97}, "pad_token_id 97 is outside the vocabulary, 0 to 96"),
    "eps of zero": ({"layer_norm_eps": 0.0}, "layer_norm_eps is 0.0; it must be above 0"),
    "dropout above 1": ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob is 1.5; a probability"),
    "a head that never was": ({"pruned_heads": {0: [4]}}, "layer 0 has no head 4"),
    "a layer that never was": ({"pruned_heads": {3: [0]}}, "there is no layer 3: the model has 3 layers, 0 to 2"),
    "heads that are no list": ({"pruned_heads": {0: "13"}}, "all integers; not as"),
    "negative sizes": ({"vocab_size": -97}, "vocab_size is -97; it must be 1 to"),
    "cross-attention without a decoder": ({"add_cross_attention": True}, "only a decoder has cross-attention"),
}


@pytest.mark.parametrize("package", [bertlite, hf], ids=["core", "hf"])
@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_no_bert_has_is_refused(case: str, package: Any) -> None:
    changes, message = CONFIGS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        package.BertModel(package.BertConfig(**{**SIZES, **changes}))


@pytest.mark.parametrize("name", ["BertModel", "BertForSequenceClassification", "BertForQuestionAnswering"])
def test_every_argument_may_be_passed_by_place(name: str) -> None:
    """In the order of the signature, as torch.onnx passes them."""
    model, ids = ours_of(name), torch.arange(1, 12).view(1, 11)
    defaults = [each.default for each in inspect.signature(model.forward).parameters.values()]
    assert_same(dict(model(ids, *defaults[1:])), dict(model(ids)), atol=0)
