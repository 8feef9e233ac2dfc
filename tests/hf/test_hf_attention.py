"""Attention in bertlite.hf: functions registered with transformers, layouts of gradients, and none of padding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from conftest import F64, assert_same, distance, full_outputs, gradients, inputs_of, make_batch
from pairs import CROSS, MODELS, B, H, L, N, S, only_4, only_5, ours_of, pair, states_of
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import bertlite
from bertlite import hf
from bertlite.stack.modules import BertSelfAttention

Register = Callable[..., list[dict[str, Any]]]
PRUNED = {0: [1, 3], 2: [0, 1, 2, 3]}


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Register "recorded" with transformers for one test; it computes attention and keeps what it was called with."""

    def registering(mask: Any = None, weights: bool = False) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def recorded(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
        ) -> tuple[Tensor, Tensor | None]:
            calls.append({"module": module, "query": query, "key": key, "mask": attention_mask, **options})
            if attention_mask is None and module.is_causal:  # transformers makes no mask that says only this
                attention_mask = torch.ones(query.shape[2], key.shape[2]).tril(key.shape[2] - query.shape[2]).bool()
            scores = query @ key.transpose(-1, -2) * options["scaling"]
            if attention_mask is not None:
                scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
            found = scores.softmax(-1)
            return (found @ value).transpose(1, 2), found if weights else None

        for interface in (AttentionInterface, AttentionMaskInterface):
            monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))  # put back afterwards
        AttentionInterface.register("recorded", recorded)
        if mask is not None:
            AttentionMaskInterface.register("recorded", mask)
        return calls

    return registering


def recorded_model(
    name: str = "BertModel", heads: dict[int, list[int]] | None = None, **changes: Any
) -> tuple[Any, Any]:
    """Two models with the same weights: one with the registered function, one with ours."""
    models = [ours_of(name, backend, use_cache=False, **changes) for backend in ("recorded", "eager")]
    for model in models:
        model.prune_heads(heads or {})
    return models[0], models[1]


# A function of one's own


@pytest.mark.parametrize(
    ("changes", "asked", "message"),
    [
        ({}, {"first_token_only": True}, "attention 'recorded' cannot do first_token_only=True; use eager, sdpa"),
        ({}, {"output_attentions": True}, "attention 'recorded' cannot give attentions; use eager or sdpa"),
        (
            {"position_embedding_type": "relative_key"},
            {},
            "'recorded' cannot do 'relative_key' positions: .* use eager",
        ),
    ],
    ids=["the first token alone", "attentions that it does not return", "relative positions"],
)
def test_what_a_registered_function_cannot_do_is_refused(changes, asked, message, register):
    register()
    model, plain = recorded_model(**changes)
    ids = inputs_of()["input_ids"]
    with pytest.raises(ValueError, match=message):
        model(ids, **asked)
    assert plain(ids, **asked).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("heads", [{}, PRUNED], ids=["dense", "pruned"])
def test_a_registered_function_is_called_once_for_every_layer_with_heads(heads, register):
    calls = register()
    model, plain = recorded_model(heads=heads)
    ids = inputs_of()["input_ids"]
    assert_same(dict(model(ids)), dict(plain(ids)))
    kept = [bertlite.kept_heads(model.config, layer) for layer in range(L)]
    with_heads = [layer for layer in range(L) if kept[layer]]
    assert [call["module"] for call in calls] == [model.encoder.layer[i].attention.self for i in with_heads]
    for layer, call in zip(with_heads, calls, strict=True):
        module = call["module"]
        assert isinstance(module, BertSelfAttention)
        assert (module.layer_idx, module.is_causal) == (layer, False)
        assert module.config is model.config
        assert call["query"].shape == call["key"].shape == (B, len(kept[layer]), S, H)
        assert call["scaling"] == H**-0.5
        assert call["dropout"] == 0
        assert call["mask"] is None


@only_5
@pytest.mark.parametrize("mask", [None, sdpa_mask], ids=["without", "with"])
@pytest.mark.parametrize(("changes", "by_query"), [({}, False), ({}, True), (CROSS, False)], ids=str)
def test_a_function_is_called_as_transformers_calls_it(changes, by_query, mask, register):
    """The same tensors, the same masks and the same options, with a mask function and without."""
    calls = register(mask)
    theirs, ours = pair("BertModel", "recorded", **changes)
    inputs = {**inputs_of(), **(states_of() if changes else {})}
    if by_query:
        inputs["attention_mask"] = inputs["attention_mask"][:, None, None].bool().expand(B, 1, S, S)
    outs = []
    for model in (ours, theirs):
        outs.append((dict(model(**inputs, use_cache=False)), list(calls)))
        calls.clear()
    (got, mine), (wanted, others) = outs
    assert_same(got, wanted)
    assert len(mine) == len(others) == L * (2 if changes else 1)
    for call, other in zip(mine, others, strict=True):
        for name in ("query", "key"):
            assert_same(call[name], other[name])
        assert (call["mask"] is None) == (other["mask"] is None)
        if call["mask"] is not None:
            assert call["mask"].equal(other["mask"])
        assert (call["scaling"], call["dropout"]) == (other["scaling"], other["dropout"])
        assert call["module"].is_causal == other["module"].is_causal


@only_5
def test_a_decoder_with_a_registered_function_decodes_from_a_cache(register):
    register(sdpa_mask)
    model, plain = recorded_model("BertLMHeadModel", {0: [1, 3]}, **CROSS)
    inputs = {**inputs_of(), **states_of()}
    wanted = plain(**inputs).logits
    assert_same(model(**inputs).logits, wanted)
    first = {k: x[:, :6] if x.shape[1:2] == (S,) else x for k, x in inputs.items()}
    cache = model(**first, use_cache=True).past_key_values
    rest = {k: x[:, 6:] if k in ("input_ids", "token_type_ids") else x for k, x in inputs.items()}
    assert_same(model(**rest, past_key_values=cache, use_cache=True).logits, wanted[:, 6:])


def test_a_registered_function_obeys_head_masks_and_learns(register):
    calls = register()
    model, plain = recorded_model(attention_probs_dropout_prob=0.25, hidden_dropout_prob=0.0)
    gate = torch.linspace(-0.5, 1.5, L * N, dtype=F64).view(L, N)
    given = {"input_ids": inputs_of()["input_ids"], "head_mask": gate}
    assert_same(dict(model(**given)), dict(plain(**given)))
    calls.clear()
    model.train()(**given).last_hidden_state.sum().backward()
    assert [call["dropout"] for call in calls] == [0.25] * L
    assert all(p.grad is not None for p in model.encoder.parameters())


def test_attentions_come_from_the_function(register):
    ids = inputs_of()["input_ids"]
    register(weights=True)
    model, plain = recorded_model(heads={0: [1, 3]})
    assert_same(full_outputs(model, {"input_ids": ids}), full_outputs(plain, {"input_ids": ids}))


@only_4
def test_transformers_4_makes_no_masks_for_functions(register):
    register(sdpa_mask)
    model, plain = recorded_model()
    ids, mask = inputs_of()["input_ids"], inputs_of()["attention_mask"]
    assert_same(dict(model(ids, torch.ones_like(mask))), dict(plain(ids)))
    with pytest.raises(
        ValueError, match=rf"transformers {transformers.__version__} makes no mask for 'recorded'; use eager or sdpa"
    ):
        model(ids, mask)


def test_an_unknown_attention_is_refused_at_once_and_afterwards():
    model = ours_of("BertModel")
    for choose in (lambda name: ours_of("BertModel", name)(**inputs_of()), model.set_attn_implementation):
        with pytest.raises((ValueError, KeyError), match="bogus"):
            choose("bogus")
    assert model.config._attn_implementation == "sdpa"


# flex_attention


@only_5
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_is_that_of_transformers(monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention
    from transformers.integrations import flex_attention as integration

    def uncompiled(*args: Any, training: bool = False, **options: Any) -> Any:
        return flex_attention(*args, **options)

    monkeypatch.setattr(integration, "compile_friendly_flex_attention", uncompiled)  # which takes tens of seconds
    theirs, ours = pair("BertModel", "flex_attention", torch.float32)
    inputs = inputs_of()
    assert_same(dict(ours(**inputs)), dict(theirs(**inputs)), atol=0)
    assert distance(ours(inputs["input_ids"])[0], ours(**inputs)[0]) > 1e-2
    pruned = bertlite.prune_heads(ours, PRUNED)
    plain = ours_of("BertModel", "eager", torch.float32)
    plain.load_state_dict(theirs.state_dict())
    plain.prune_heads(PRUNED)
    assert_same(dict(pruned(**inputs)), dict(plain(**inputs)), atol=1e-5)  # float32; the sums have another order


# Without padding: asked for by name, and by "auto" only where nobody sees it

LENGTHS = (11, 3, 7, 1, 4, 2, 3, 9)  # 45 % of 8 x 11


def sparse() -> dict[str, Tensor]:
    return make_batch(8, 11, lengths=LENGTHS)


@torch.no_grad()
def ran_packed(kernels_run: list[str], model: Any, **inputs: Any) -> bool:
    kernels_run.clear()
    model(**inputs)
    return {*kernels_run} == {"packed"}


@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_transformers_at_real_tokens_and_learns_the_same(name: str, kernels_run: list[str]) -> None:
    theirs, ours = pair(name)
    ours.set_attn_implementation("packed")
    choices = name == "BertForMultipleChoice"
    inputs = {k: x.unflatten(0, (2, 4)) for k, x in sparse().items()} if choices else sparse()
    assert ran_packed(kernels_run, ours, **inputs)
    got, wanted, real = ours(**inputs), theirs(**inputs), sparse()["attention_mask"].bool()
    assert list(got) == list(wanted)
    parts = [{key: x[real] if x.shape[:2] == real.shape else x for key, x in out.items()} for out in (got, wanted)]
    assert_same(*parts)
    scores = [sum(x.square().sum() for x in each.values()) for each in parts]
    assert_same(*map(gradients, (ours, theirs), scores), atol=1e-9)  # the largest are near 1,000


def test_it_is_chosen_by_name(tmp_path: Any, kernels_run: list[str]) -> None:
    model = ours_of("BertModel", "packed")
    assert model.config._attn_implementation == "packed"
    model.save_pretrained(tmp_path)
    again = hf.BertModel.from_pretrained(tmp_path, attn_implementation="packed", dtype=torch.float64)
    assert ran_packed(kernels_run, again, **sparse())
    assert_same(dict(again(**sparse())), dict(model(**sparse())), atol=0)
    assert not ran_packed(kernels_run, hf.BertModel.from_pretrained(tmp_path), **sparse())
    with pytest.raises(ValueError, match="'packed' cannot give attentions; use 'eager' or 'auto'"):
        model(**sparse(), output_attentions=True)
    with pytest.raises((ValueError, KeyError), match="packed"):
        pair("BertModel", "packed")  # theirs knows no such name


def test_auto_leaves_padding_out_where_nobody_sees_it(kernels_run: list[str]) -> None:
    assert not ran_packed(kernels_run, ours_of("BertModel", "auto"), **sparse())
    assert not ran_packed(kernels_run, ours_of("BertForTokenClassification", "auto"), **sparse())
    assert ran_packed(kernels_run, ours_of("BertModel", "auto"), **sparse(), first_token_only=True)
    model = ours_of("BertForSequenceClassification", "auto")
    assert ran_packed(kernels_run, model, **sparse())
    assert not ran_packed(kernels_run, model, **sparse(), output_hidden_states=True)
    assert_same(model(**sparse()).logits, model(**sparse(), output_hidden_states=True).logits)
    model.set_attn_implementation("eager")
    assert not ran_packed(kernels_run, model, **sparse())
    assert {*kernels_run} == {"eager"}
