"""Arguments and names of transformers, given to bertlite: the error says what they are here."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make

import bertlite
from bertlite import BertConfig, BertLMHeadModel, BertModel, BertTokenizer, optimize_for_inference
from bertlite.support.habits import HABITS

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
CALLS: dict[str, Callable[..., Any]] = {
    "a model's from_pretrained": lambda folder, **given: BertModel.from_pretrained(folder, **given),
    "a tokenizer's": lambda folder, **given: BertTokenizer.from_pretrained(folder, **given),
    "a tokenizer": lambda folder, **given: BertTokenizer.from_pretrained(folder)("a", **given),
    "save_pretrained": lambda folder, **given: make().save_pretrained(folder, **given),
    "optimize_for_inference": lambda folder, **given: optimize_for_inference(make(), **given),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make().save_pretrained(tmp_path)
    BertTokenizer(VOCABULARY).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"torch_dtype": torch.float16},
            r"torch_dtype=torch\.float16 is an argument of transformers; here it is dtype=",
        ),
        ({"device_map": "auto"}, "device_map='auto' is an argument of transformers; here it is device="),
        ({"use_auth_token": True}, "use_auth_token=True is an argument of transformers; here it is token="),
        ({"trust_remote_code": True}, "trust_remote_code=True is .*; leave it out: no code of a checkpoint is run"),
        ({"stride": 2}, r"stride=2 is .*; tokenizer\.backend_tokenizer, the Rust one"),
        ({"return_offsets_mapping": True}, r"return_offsets_mapping=True is .*; batch\.encodings\[i\] has offsets"),
        ({"load_in_8bit": True}, r'load_in_8bit=True is .*; optimize_for_inference\(model, dtype="int8"\) quantises'),
    ],
)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_argument_of_transformers_is_refused_with_ours(call, given, message, folder):
    with pytest.raises(TypeError, match=message):
        call(folder, **given)
    [name] = given
    with pytest.raises(TypeError, match=re.escape(f"BertConfig has no field {name}; {HABITS[name]}")):
        BertConfig.from_pretrained(folder, **given)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_argument_of_no_library_is_named(call, folder):
    with pytest.raises(TypeError, match=r"(argument|field) '?quantise"):
        call(folder, quantise=True)


def test_a_name_of_transformers_names_the_way(folder):
    for thing, name in (
        (bertlite, "AutoModel"),
        (bertlite, "KeyValueCache"),
        (BertTokenizer.from_pretrained(folder), "pad"),
        (BertTokenizer.from_pretrained(folder), "add_special_tokens"),
        (BertTokenizer.from_pretrained(folder)("a"), "word_ids"),
    ):
        with pytest.raises(AttributeError, match=f"no .*{name}.*; {re.escape(HABITS[name])}"):
            getattr(thing, name)


def test_who_generates_is_sent_to_the_class_that_does():
    model = BertLMHeadModel(replace(make().config, is_decoder=True))
    with pytest.raises(NotImplementedError, match=r"no 'generate'; bertlite\.hf\.BertLMHeadModel has it"):
        model.generate(torch.ones(1, 1, dtype=torch.long), max_new_tokens=2)
