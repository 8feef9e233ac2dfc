"""Arguments and names of transformers, given to bertlite: the error says what they are here."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SPECIAL, make

import bertlite
from bertlite import BertConfig, BertLMHeadModel, BertModel, BertTokenizer, optimize_for_inference
from bertlite.support.habits import HABITS

CALLS: dict[str, Callable[..., Any]] = {
    "a model's from_pretrained": lambda folder, **given: BertModel.from_pretrained(folder, **given),
    "a tokenizer's": lambda folder, **given: BertTokenizer.from_pretrained(folder, **given),
    "a tokenizer": lambda folder, **given: BertTokenizer.from_pretrained(folder)("a", **given),
    "save_pretrained": lambda folder, **given: make().save_pretrained(folder, **given),
    "optimize_for_inference": lambda folder, **given: optimize_for_inference(make(), **given),
}
GIVEN = {"torch_dtype": torch.float16, "device_map": "auto", "stride": 2}  # arguments of transformers
GIVEN |= dict.fromkeys(("use_auth_token", "trust_remote_code", "return_offsets_mapping", "load_in_8bit"), True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make().save_pretrained(tmp_path)
    BertTokenizer([*SPECIAL, "a"]).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_argument_of_transformers_is_refused_with_ours(call, name, folder):
    way = f"{name}={GIVEN[name]!r} is an argument of transformers; {HABITS[name]}"
    with pytest.raises(TypeError, match=re.escape(way)):
        call(folder, **{name: GIVEN[name]})
    with pytest.raises(TypeError, match=re.escape(f"BertConfig has no field {name}; {HABITS[name]}")):
        BertConfig.from_pretrained(folder, **{name: GIVEN[name]})


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_argument_of_no_library_is_named(call, folder):
    with pytest.raises(TypeError, match=r"(argument|field) '?quantise"):
        call(folder, quantise=True)


def test_a_name_of_transformers_names_the_way(folder):
    tokenizer = BertTokenizer.from_pretrained(folder)
    for thing, name in (
        (bertlite, "AutoModel"),
        (bertlite, "KeyValueCache"),
        (tokenizer, "pad"),
        (tokenizer, "add_special_tokens"),
        (tokenizer("a"), "word_ids"),
    ):
        with pytest.raises(AttributeError, match=f"no .*{name}.*; {re.escape(HABITS[name])}"):
            getattr(thing, name)


def test_who_generates_is_sent_to_the_class_that_does():
    model = BertLMHeadModel(replace(make().config, is_decoder=True))
    with pytest.raises(NotImplementedError, match=r"no 'generate'; bertlite\.hf\.BertLMHeadModel has it"):
        model.generate(torch.ones(1, 1, dtype=torch.long), max_new_tokens=2)
