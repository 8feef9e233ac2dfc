"""The mask helpers that transformers 5 dropped and its users still call."""

import math
from typing import Any

import pytest
import torch
import transformers
from conftest import assert_same, distance
from pairs import CROSS, F64, V5, B, L, N, S, inputs_of, only_4, ours_of, pair, states_of
from torch import Tensor

F16, F32 = torch.float16, torch.float32


def triangle(keys: int = S) -> Tensor:
    return torch.ones(S, keys).tril(keys - S).long()


def masks() -> dict[str, Tensor]:
    flat = inputs_of()["attention_mask"]
    return {
        "2-D": flat,
        "2-D bool": flat.bool(),
        "2-D float": flat.float(),
        "3-D": triangle().expand(B, S, S) * flat[:, None],
        "3-D row": flat[:, None],
    }


FORMS = pytest.mark.parametrize("form", masks())


# Written out, and as transformers 4 computes them


@pytest.mark.parametrize("dtype", [F64, F16], ids=str)
@FORMS
@pytest.mark.parametrize("decoder", [False, True])
def test_a_mask_becomes_scores_to_add(form: str, decoder: bool, dtype: torch.dtype) -> None:
    theirs, ours = pair("BertModel", dtype=dtype, is_decoder=decoder)
    mask = masks()[form]
    said = mask.long() if mask.dtype == torch.bool else mask  # which transformers 4 cannot subtract
    allowed = mask[:, None].bool() if mask.dim() == 3 else mask[:, None, None].bool()
    inverted = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    assert_same(ours.invert_attention_mask(mask), inverted, atol=0)
    if not V5:
        assert_same(theirs.invert_attention_mask(said), inverted, atol=0)
    if decoder and mask.dim() == 2:
        allowed = allowed & triangle().bool()
    for asked in (None, F32):
        kind = asked or dtype
        wanted = torch.zeros(allowed.shape, dtype=kind).masked_fill(~allowed, torch.finfo(kind).min)
        assert_same(ours.get_extended_attention_mask(mask, (B, S), dtype=asked), wanted, atol=0)
        if not V5:
            assert_same(theirs.get_extended_attention_mask(said, (B, S), dtype=asked), wanted, atol=0)


@only_4
def test_a_decoders_mask_with_a_past_is_that_of_transformers_4() -> None:
    mask = torch.ones(B, S + 3).long()
    mask[1, :2] = 0
    got, wanted = (model.get_extended_attention_mask(mask, (B, S)) for model in pair("BertModel", is_decoder=True))
    assert_same(got, wanted, atol=0)


@pytest.mark.parametrize("shape", [(N,), (L, N), (L, 1, N, 1, 1)], ids=str)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_head_mask_gets_the_axes_of_the_scores(chunked: bool, shape: tuple[int, ...]) -> None:
    theirs, ours = pair("BertForMaskedLM")
    gate = torch.linspace(-0.5, 1.5, L * N, dtype=torch.float32).view(L, N).flatten()[-math.prod(shape) :].view(shape)
    wanted = (gate.expand(L, N)[:, None, :, None, None] if len(shape) < 3 else gate).double()
    wanted = wanted[..., None] if chunked else wanted
    for model in (ours,) if V5 else (ours, theirs):
        assert_same(model.get_head_mask(gate, L, chunked), wanted, atol=0)
        assert model.get_head_mask(None, L) == [None] * L


# Usable


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@FORMS
@pytest.mark.parametrize("decoder", [False, True])
def test_what_a_helper_gives_may_be_given_to_the_model(form: str, decoder: bool, backend: str) -> None:
    model = ours_of("BertModel", backend, is_decoder=decoder, use_cache=False)
    ids, mask = inputs_of()["input_ids"], masks()[form]
    wanted = dict(model(ids, mask))
    assert_same(dict(model(ids, model.get_extended_attention_mask(mask, (B, S)))), wanted)
    assert distance(model(ids)[0], wanted["last_hidden_state"]) > 1e-2 or (decoder and form == "3-D")


def test_an_inverted_mask_may_be_given_for_the_encoder() -> None:
    model, given = ours_of("BertModel", **CROSS, use_cache=False), states_of()
    wanted = dict(model(**inputs_of(), **given))
    given["encoder_attention_mask"] = model.invert_attention_mask(given["encoder_attention_mask"])
    assert_same(dict(model(**inputs_of(), **given)), wanted)


@pytest.mark.parametrize("shape", [(S,), (B, 1, S, S), (B, 1, 1, S, S)], ids=str)
def test_masks_of_another_rank_are_refused(shape: tuple[int, ...]) -> None:
    model = ours_of("BertModel")
    for helper in (model.invert_attention_mask, lambda mask: model.get_extended_attention_mask(mask, (B, S))):
        with pytest.raises(ValueError, match=r"the mask has shape .*; expected \(batch, keys\) or"):
            helper(torch.ones(shape))
    with pytest.raises(ValueError, match=r"head_mask has shape \(3, 4, 1\); expected \(heads,\) or \(layers, heads\)"):
        model.get_head_mask(torch.ones(L, N, 1), L)


def test_padding_without_a_mask_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under transformers 4, as there; 5 does not look."""
    said: list[str] = []
    logger: Any = transformers.modeling_utils.logger
    monkeypatch.setattr(logger, "warning_once", said.append)
    model = ours_of("BertModel")
    model(torch.tensor([[3, 5, 0]]))
    assert len(said) == (0 if V5 else 1)
    model(torch.tensor([[3, 5, 0]]), torch.tensor([[1, 1, 0]]))
    assert len(said) == (0 if V5 else 1)
