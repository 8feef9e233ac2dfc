"""bertlite/inference/native/model.py: a plain forward is one call of the kernels, with the bits of many calls."""

from dataclasses import replace

import pytest
import torch
from conftest import assert_same, make_batch
from natively import check, dtypes, make_native, native, natively

import bertlite
from bertlite.runtime.structs import Kernels
from bertlite.stack.body import BertBody

pytestmark = native
BATCH = make_batch(3, 11, lengths=(11, 7, 1))
PACKED = {"input_ids": BATCH["input_ids"].flatten(), "cu_seqlens": torch.tensor([0, 9, 22, 33], dtype=torch.int32)}
WHOLE = make_batch(3, 11, lengths=(11,) * 3)
POSITIONS = torch.arange(33).flip(0).view(3, 11) % 13
PLAIN = {
    "padded": BATCH,
    "ids alone": {"input_ids": BATCH["input_ids"]},
    "whole": WHOLE,
    "positions": {**BATCH, "position_ids": POSITIONS},
    "packed": PACKED,
    "packed positions": {**PACKED, "position_ids": POSITIONS.flatten()},
    "first tokens": {**BATCH, "first_token_only": True},
    "packed first tokens": {**PACKED, "first_token_only": True},
}


@pytest.fixture
def counted(monkeypatch):
    """Count the calls of the kernels, and the forwards that BertBody runs part by part."""
    calls = {"kernels": 0, "body": 0}
    run, encode = Kernels.run, BertBody.encode

    def counting(name, function):
        def called(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return called

    monkeypatch.setattr(Kernels, "run", counting("kernels", run))
    monkeypatch.setattr(BertBody, "encode", counting("body", encode))
    return calls


@dtypes
@pytest.mark.parametrize("changes", [{}, {"positions_skip_padding": True, "pooler_act": "relu"}], ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_forward_is_one_call_with_the_bits_of_many(name, changes, dtype, counted):
    model = make_native(**changes)
    check(model, dtype, **PLAIN[name])
    quick = natively(model, dtype)
    counted.update(kernels=0, body=0)
    ours = quick(**PLAIN[name])
    assert counted == {"kernels": 1, "body": 0}
    hook = quick.model.embeddings.register_forward_hook(lambda *_: None)
    apart = quick(**PLAIN[name])
    hook.remove()
    assert counted["body"] == 1
    assert_same(ours, apart, atol=0)


@pytest.mark.parametrize("stated", [{}, {"output_attentions": True}], ids=str)
def test_arguments_that_ask_for_nothing_change_nothing(stated, counted):
    quick = natively(make_native(attn_implementation="sdpa"), torch.float32)
    wanted = quick(input_ids=BATCH["input_ids"])
    quick.model.config = replace(quick.config, **stated)
    counted.update(kernels=0, body=0)
    nothing = {"use_cache": False, "output_attentions": False, "output_hidden_states": False, "head_mask": None}
    assert_same(quick(input_ids=BATCH["input_ids"], **nothing), wanted, atol=0)
    assert counted == {"kernels": 1, "body": 0}
    assert quick(input_ids=BATCH["input_ids"], output_hidden_states=True).hidden_states
    assert counted["body"] == 1


@dtypes
def test_heads_run_it_too(dtype, counted):
    for cls, batch, bodies in (
        (bertlite.BertForSequenceClassification, BATCH, 0),
        (bertlite.BertForTokenClassification, WHOLE, 0),
        (bertlite.BertForTokenClassification, BATCH, 1),
    ):
        check(make_native(cls), dtype, **batch)
        quick = natively(make_native(cls), dtype)
        counted["body"] = 0
        quick(**batch)
        assert counted["body"] == bodies


@pytest.mark.parametrize(
    "place", ["embeddings.word_embeddings", "embeddings.LayerNorm", "encoder", "pooler", "pooler.dense"]
)
def test_a_hook_sees_what_it_saw(place):
    quick, seen = natively(make_native(), torch.float32), []
    wanted = quick(**BATCH)
    quick.model.get_submodule(place).register_forward_hook(lambda module, args, out: seen.append(out))
    got = quick(**BATCH)
    assert len(seen) == 1
    assert_same(got, wanted, atol=1e-5)


WRONG = {
    "an id": ({**BATCH, "input_ids": BATCH["input_ids"] + 97}, "input_ids holds"),
    "a segment": ({**BATCH, "token_type_ids": BATCH["input_ids"] * 0 - 1}, "token_type_ids holds -1"),
    "a position": ({**BATCH, "position_ids": POSITIONS + 100}, "position_ids holds"),
    "a mask": ({**BATCH, "attention_mask": BATCH["attention_mask"] * 2}, "attention_mask holds 2"),
    "a length": ({"input_ids": torch.ones(1, 500, dtype=torch.long)}, "500 tokens long"),
    "a dtype": ({"input_ids": torch.ones(1, 5)}, "input_ids is torch.float32"),
    "a shape": ({**BATCH, "token_type_ids": torch.zeros(3, 10, dtype=torch.long)}, "token_type_ids has shape"),
    "ends": ({**PACKED, "cu_seqlens": torch.tensor([0, 9, 32], dtype=torch.int32)}, "goes from 0 to 32"),
    "falling ends": ({**PACKED, "cu_seqlens": torch.tensor([0, 9, 5, 33], dtype=torch.int32)}, "must rise"),
    "an unknown argument": ({**BATCH, "typo": None}, "unexpected keyword argument 'typo'"),
    "ends in a list": ({**PACKED, "cu_seqlens": [0, 33]}, "cu_seqlens is a list; make it a tensor"),
    **{
        f"{name} in a list": ({**BATCH, name: [1] * 4}, f"{name} is a list; make it a tensor")
        for name in ("attention_mask", "token_type_ids", "position_ids")
    },
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_inputs_are_named(what):
    inputs, message = WRONG[what]
    with pytest.raises((TypeError, ValueError), match=message):
        natively(make_native(), torch.float32)(**inputs)
