"""bertlite.hf beside transformers' own BERT: every class bit for bit, registration, remote code."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import bertlite.hf
from tests.clients.checks import OURS, STOCK, V5
from tests.clients.checks.common import equal, tiny
from tests.clients.checks.interchange import CLASSES, elsewhere, made, outputs

pytestmark = pytest.mark.clients
AUTO = {
    "BertModel": ("AutoModel", "AutoModelForTextEncoding"),
    "BertForPreTraining": ("AutoModelForPreTraining",),
    "BertLMHeadModel": ("AutoModelForCausalLM",),
    "BertForMaskedLM": ("AutoModelForMaskedLM",),
    "BertForNextSentencePrediction": ("AutoModelForNextSentencePrediction",),
    "BertForSequenceClassification": ("AutoModelForSequenceClassification",),
    "BertForMultipleChoice": ("AutoModelForMultipleChoice",),
    "BertForTokenClassification": ("AutoModelForTokenClassification",),
    "BertForQuestionAnswering": ("AutoModelForQuestionAnswering",),
}
NAMES = [(auto, cls) for cls, autos in AUTO.items() for auto in autos]


def found(auto: str, cls: str) -> type[Any]:
    """The class that an Auto class makes for a BERT."""
    small = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    config = transformers.BertConfig(**small, is_decoder=cls == "BertLMHeadModel")
    return type(getattr(transformers, auto).from_config(config))


@pytest.mark.skipif(not V5, reason="transformers 4.57 adds up eager attention in another order")
@pytest.mark.parametrize("cls", CLASSES)
def test_eager_float32_is_stocks_bit_for_bit(cls: str, tmp_path: Path) -> None:
    made(STOCK, cls).save_pretrained(tmp_path)
    ours, stocks = (side.load(cls, tmp_path, attn_implementation="eager") for side in (OURS, STOCK))
    got = outputs(ours, cls, output_attentions=True)
    assert got["attentions"]
    equal(got, outputs(stocks, cls, output_attentions=True), what=cls)


@pytest.mark.parametrize(("auto", "cls"), NAMES)
def test_registration_is_for_the_block_and_no_longer(auto: str, cls: str) -> None:
    stocks, ours = getattr(transformers, cls), getattr(bertlite.hf, cls)
    assert found(auto, cls) is stocks, "importing alone changed something"
    with bertlite.hf.registered():
        assert found(auto, cls) is ours
        with bertlite.hf.registered():
            assert found(auto, cls) is ours
        assert found(auto, cls) is ours, "the inner block undid the outer one"
    assert found(auto, cls) is stocks


def test_register_and_unregister_can_be_repeated() -> None:
    try:
        bertlite.hf.register()
        bertlite.hf.register()
        assert found("AutoModel", "BertModel") is bertlite.hf.BertModel
        with bertlite.hf.registered():
            pass
        assert found("AutoModel", "BertModel") is bertlite.hf.BertModel, "the block undid what stood before it"
    finally:
        bertlite.hf.unregister()
    bertlite.hf.unregister()
    assert found("AutoModel", "BertModel") is transformers.BertModel


def test_an_error_inside_the_block_undoes_the_registration() -> None:
    with pytest.raises(KeyError), bertlite.hf.registered():
        raise KeyError
    assert found("AutoModel", "BertModel") is transformers.BertModel


def test_a_class_that_was_registered_before_comes_back() -> None:
    class BertModel(transformers.BertModel):
        pass

    transformers.AutoModel.register(transformers.BertConfig, BertModel, exist_ok=True)
    try:
        with bertlite.hf.registered():
            assert found("AutoModel", "BertModel") is bertlite.hf.BertModel
        assert found("AutoModel", "BertModel") is BertModel
    finally:
        transformers.AutoModel._model_mapping._extra_content.pop(transformers.BertConfig)
    assert found("AutoModel", "BertModel") is transformers.BertModel


def test_remote_code_is_used_only_where_it_is_trusted(tmp_path: Path) -> None:
    dense, pruned = tiny(tmp_path), tiny(tmp_path, pruned=True)
    for path in (dense, pruned):
        bertlite.hf.export_remote_code(path)
    seen = elsewhere(
        tmp_path,
        ("ours", True, dense),
        ("ours-pruned", True, pruned),
        ("stocks", False, dense),
        ("stocks-pruned", False, pruned),
    )
    assert seen["ours"]["own"].endswith("hf.modeling")
    assert seen["ours-pruned"]["own"].endswith("hf.modeling")
    assert seen["stocks"]["own"] == "transformers.models.bert.modeling_bert"
    equal(torch.tensor(seen["ours"]["out"]), torch.tensor(seen["stocks"]["out"]), what="ours and stock's")
    if V5:
        assert "RuntimeError" in seen["stocks-pruned"]["error"]
    else:
        assert seen["stocks-pruned"]["own"] == "transformers.models.bert.modeling_bert"
