"""BERT as a decoder: what it may look at, what it remembers, and that remembering changes nothing.

Shapes:  as in conftest, and K 8 positions of the encoder that cross-attention looks at
"""

import copy
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from conftest import F64, SIZES, assert_same, distance, full_outputs, gradients, make, make_batch, tensors
from torch import Tensor, nn

from bertlite import BertConfig, BertForMaskedLM, BertLMHeadModel, BertModel, prune_heads
from bertlite.pruning import densify
from bertlite.stack.cache import KeyValueCache

B, S, K, D, L, N, H = 2, 11, 8, 48, 3, 4, 12
ENDS = torch.tensor([[K], [5]])
LOWEST = torch.finfo(F64).min
NONE = -100
PER_TOKEN = ("input_ids", "token_type_ids", "position_ids")
BOTH = pytest.mark.parametrize("backend", ["eager", "sdpa"])
CROSS = {"add_cross_attention": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "absolute": {},
    "relative_key": {"position_embedding_type": "relative_key"},
    "relative_key_query": {"position_embedding_type": "relative_key_query"},
    "disentangled": {"position_embedding_type": "disentangled"},
    "pruned": {"pruned_heads": {0: [1, 3], 1: [0, 1, 2, 3]}},
    "cross": CROSS,
    "cross-pruned": {**CROSS, "pruned_heads": {0: [0], 2: [0, 1, 2, 3]}},
    "cross-relative": {**CROSS, "position_embedding_type": "relative_key_query"},
    "chunked": {"chunk_size_feed_forward": 4},
}
EVERY = pytest.mark.parametrize("variant", VARIANTS)
ONES, CHUNKS = (1,) * S, (4, 1, 3, 3)  # how many tokens each step is fed


def build(cls: Any = BertLMHeadModel, **changes: Any) -> Any:
    return make(cls, is_decoder=True, **changes)


def encoder_of() -> dict[str, Tensor]:
    """What an encoder hands over, the second sequence with 5 of 8 positions."""
    states = torch.randn(B, K, D, generator=torch.Generator().manual_seed(7), dtype=F64)
    return {"encoder_hidden_states": states, "encoder_attention_mask": (torch.arange(K) < ENDS).long()}


def inputs_of(model: Any, side: str = "right") -> dict[str, Tensor]:
    """A batch whose second sequence is padded on one side, and for cross-attention what an encoder hands over."""
    inputs = make_batch()
    if side == "left":
        inputs["attention_mask"] = inputs["attention_mask"].flip(-1)
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return {**inputs, **(encoder_of() if model.config.add_cross_attention else {})}


def steps(model: Any, inputs: Mapping[str, Any], sizes: Iterable[int], **options: Any) -> list[Any]:
    """The outputs of a decoder that is fed so many tokens at a time."""
    outs, end, cache = [], 0, None
    for size in sizes:
        start, end = end, end + size
        part = {k: x[:, start:end] if k in PER_TOKEN else x for k, x in inputs.items()}
        if "attention_mask" in part:
            part["attention_mask"] = part["attention_mask"][:, :end]
        outs.append(model(**part, past_key_values=cache, use_cache=True, **options))
        cache = outs[-1].past_key_values
    return outs


def joined(outs: list[Any], name: str = "logits") -> Tensor:
    return torch.cat([out[name] for out in outs], 1)


# Cached decoding is full decoding


@BOTH
@pytest.mark.parametrize(("side", "sizes"), [("right", ONES), ("left", CHUNKS)], ids=["ones-right", "chunks-left"])
@EVERY
def test_cached_decoding_is_full_decoding(variant, side, sizes, backend, kernels_run):
    model = build(**VARIANTS[variant], attn_implementation=backend)
    inputs = {**inputs_of(model, side), "head_mask": torch.linspace(-0.5, 1.5, L * N, dtype=F64).view(L, N)}
    asked = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        full, pieces = model(**inputs, use_cache=False, **asked), steps(model, inputs, sizes, **asked)
    assert_same(joined(pieces), full.logits)
    assert full.logits.isfinite().all()
    assert pieces[-1].past_key_values.length == S
    for layer, states in enumerate(full.hidden_states):
        assert_same(torch.cat([out.hidden_states[layer] for out in pieces], 1), states)
    for name in ("attentions", *(["cross_attentions"] if model.config.add_cross_attention else [])):
        for layer, whole in enumerate(full[name]):  # (B, N, S, K); at each step fewer keys
            parts = [out[name][layer] for out in pieces]
            rows = [nn.functional.pad(part, (0, whole.shape[-1] - part.shape[-1])) for part in parts]
            assert_same(torch.cat(rows, 2), whole)
    assert_same(joined(steps(model, inputs, sizes)), full.logits)
    assert set(kernels_run) == {backend}


def test_gradients_flow_through_the_cache():
    model = build(**CROSS)
    inputs = inputs_of(model)
    full = gradients(model, model(**inputs, use_cache=False).logits.square().mean())
    cached = gradients(model, joined(steps(model, inputs, (3, 1, 7))).square().mean())
    assert_same(cached, full, atol=1e-11)  # the largest gradients are near 10, and sums over steps round otherwise


def test_a_cache_is_extended_in_place_and_a_copy_is_a_branch():
    model, ids = build().requires_grad_(False), make_batch()["input_ids"]
    cache = KeyValueCache()
    assert cache.length == 0
    assert model(ids[:, :6], past_key_values=cache).past_key_values is cache
    copies = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    straight = model(ids[:, 6:], past_key_values=cache)
    assert straight.past_key_values is cache
    assert [each.length for each in (cache, *copies)] == [S, 6, 6]
    for branch in copies:
        assert_same(model(ids[:, 6:], past_key_values=branch).logits, straight.logits, atol=0)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_left_padding_is_never_nan(dtype, backend):
    """Its first queries have nothing to attend to: under the triangle not even themselves."""
    model = build(**CROSS, attn_implementation=backend).to(dtype)
    inputs = inputs_of(model, "left")
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].to(dtype)
    full = full_outputs(model, inputs, use_cache=False)
    for place, x in tensors(full).items():
        assert x.isfinite().all(), place
    assert joined(steps(model, inputs, (1,) * S)).isfinite().all()
    assert full.attentions[0][1, :, :4].count_nonzero() == 0


# What a query may look at


@BOTH
def test_a_mask_for_every_query_is_taken_as_it_is(backend):
    """Without the triangle: so prefix language models and packed documents can be had."""
    decoder = build(BertModel, attn_implementation=backend)
    encoder = make(BertModel, attn_implementation=backend)
    encoder.load_state_dict(decoder.state_dict())
    batch, prefix = make_batch(), torch.ones(S, S).tril().bool()
    prefix[:, :4] = True
    rows, added = torch.ones(B, 1, S, S).bool(), torch.zeros(B, 1, S, S, dtype=F64)
    for mask in (torch.ones(B, S, S).long(), rows, added, prefix.expand(B, S, S).long()):
        given = {**batch, "attention_mask": mask}
        found = decoder(**given).last_hidden_state
        assert_same(found, encoder(**given).last_hidden_state)
    assert distance(found, decoder(**batch)[0]) > 1e-2
    ids = batch["input_ids"]  # masks reach into the cache too
    first = decoder(ids[:, :6], prefix[:6, :6].expand(B, 6, 6))
    second = decoder(ids[:, 6:], prefix[6:].expand(B, 5, S), past_key_values=first.past_key_values)
    assert_same(joined([first, second], "last_hidden_state"), decoder(ids, prefix.expand(B, S, S))[0])


def test_an_encoder_looks_both_ways_at_a_given_cache():
    """As prefix tuning gives one: keys and values that belong to no token."""
    model, batch = make(BertModel), make_batch()
    draw = torch.Generator().manual_seed(5)
    cache = KeyValueCache()
    for layer in range(L):
        cache.extend(layer, *torch.randn(2, B, 3, N, H, generator=draw, dtype=F64))
    mask = nn.functional.pad(batch["attention_mask"], (3, 0), value=1)
    out = model(**{**batch, "attention_mask": mask}, past_key_values=copy.deepcopy(cache), output_attentions=True)
    assert out.past_key_values is None
    assert [tuple(x.shape) for x in out.attentions] == [(B, N, S, 3 + S)] * L
    assert distance(out[0], model(**batch)[0]) > 1e-2
    hidden = nn.functional.pad(batch["attention_mask"], (3, 0))
    shifted = model(**{**batch, "attention_mask": hidden}, past_key_values=cache)[0]
    at = torch.arange(3, 3 + S)
    assert_same(shifted[0], model(**batch, position_ids=at)[0][0])  # its prefix masked, only the positions count on


# When there is a cache


def test_a_decoder_remembers_unless_told_otherwise():
    batch, model, quiet = make_batch(), build(), build(use_cache=False)
    for each, options, remembers in (
        (model, {}, True),
        (model, {"use_cache": False}, False),
        (quiet, {}, False),
        (quiet, {"use_cache": True}, True),
        (model, {"labels": batch["input_ids"], "use_cache": True}, False),
        (make(BertModel), {"use_cache": True}, False),
    ):
        found = each(**batch, **options)
        assert isinstance(found.past_key_values, KeyValueCache) == ("past_key_values" in found) == remembers
    assert isinstance(model(**batch, return_dict=False)[1], KeyValueCache)


# Cross-attention


@BOTH
def test_masks_of_the_encoder_come_in_every_form(backend):
    model = build(**CROSS, attn_implementation=backend)
    inputs = inputs_of(model)
    mask = inputs["encoder_attention_mask"]
    wanted = model(**inputs).logits
    scores = torch.zeros(B, 1, 1, K, dtype=F64).masked_fill(mask[:, None, None] == 0, LOWEST)
    for_all, each = mask[:, None], mask[:, None].expand(B, S, K)
    for form in (mask.bool(), mask.double(), for_all, each, mask[:, None, None].bool(), scores):
        assert_same(model(**{**inputs, "encoder_attention_mask": form}).logits, wanted)
    none, ones = (model(**{**inputs, "encoder_attention_mask": form}).logits for form in (None, torch.ones(B, K)))
    assert_same(none, ones)
    assert distance(none[1], wanted[1]) > 1e-2


@BOTH
def test_an_encoder_with_nothing_to_show_adds_its_output_bias(backend):
    model = build(**CROSS, attn_implementation=backend)
    inputs = inputs_of(model)
    inputs["encoder_attention_mask"][1] = 0
    out = model(**inputs, output_attentions=True)
    assert out.logits.isfinite().all()
    assert out.cross_attentions[0][1].count_nonzero() == 0
    for layer in model.bert.encoder.layer:
        nn.init.zeros_(layer.crossattention.output.dense.weight)
    assert_same(out.logits[1], model(**inputs).logits[1])


def test_a_cross_decoder_runs_without_an_encoder():
    crossed, plain = build(BertModel, **CROSS), build(BertModel)
    plain.load_state_dict({k: x for k, x in crossed.state_dict().items() if "crossattention" not in k})
    assert_same(crossed(**make_batch())[0], plain(**make_batch())[0], atol=0)


def test_the_encoder_is_projected_once():
    """With a cache, its keys and values are kept: later steps do not look at the states again."""
    model = build(**CROSS)
    inputs = inputs_of(model)
    runs: list[int] = []
    for i, layer in enumerate(model.bert.encoder.layer):
        layer.crossattention.self.key.register_forward_pre_hook(lambda module, args, i=i: runs.append(i))
    steps(model, inputs, (4, 1, 6))
    assert runs == [0, 1, 2]


def test_cross_attention_has_no_gate_and_no_positions():
    model = build(**CROSS, position_embedding_type="relative_key")
    for layer in model.bert.encoder.layer:
        assert not hasattr(layer.crossattention.self, "distance_embedding")
    inputs = inputs_of(model)
    shut = model(**inputs, head_mask=torch.zeros(N), output_attentions=True)
    assert all(x.count_nonzero() == 0 for x in shut.attentions)
    assert all(x.count_nonzero() > 0 for x in shut.cross_attentions)


# The language model


@pytest.mark.parametrize(
    ("kept", "rows"),
    [(0, slice(None)), (1, slice(-1, None)), (4, slice(-4, None)), (torch.tensor([0, 3, 10]), [0, 3, 10])],
    ids=str,
)
def test_only_the_logits_to_keep_are_computed(kept, rows):
    model, batch = build(), make_batch()
    assert_same(model(**batch, logits_to_keep=kept).logits, model(**batch).logits[:, rows])


def test_the_loss_of_logits_that_are_kept_is_that_of_their_labels():
    model, batch = build(), make_batch()
    labels = batch["input_ids"]
    hidden = labels.masked_fill(torch.arange(S) < S - 4 + 1, NONE)
    last = model(**batch, labels=labels[:, -4:], logits_to_keep=4)
    assert_same(last.loss, model(**batch, labels=hidden).loss)


# Files


def test_an_encoder_becomes_a_decoder_only_by_name(tmp_path):
    encoder = make(BertForMaskedLM)
    encoder.save_pretrained(tmp_path)
    decoder = BertLMHeadModel.from_pretrained(tmp_path, is_decoder=True)
    ids = make_batch()["input_ids"]
    assert_same(decoder(ids[:, :1]).logits, encoder(ids[:, :1]).logits)
    assert distance(decoder(ids).logits, encoder(ids).logits) > 1e-2
    with pytest.raises(ValueError, match=r"encoder\.layer\.0\.crossattention\.self\.query\.weight is missing"):
        BertLMHeadModel.from_pretrained(tmp_path, is_decoder=True, add_cross_attention=True)


# Pruning


@pytest.mark.parametrize("positions", ["absolute", "relative_key_query"])
def test_pruning_a_decoder_is_gating_it_and_leaves_cross_attention_alone(positions):
    model = build(**CROSS, position_embedding_type=positions)
    inputs, heads = inputs_of(model), {0: [1, 3], 2: [0, 1, 2, 3]}
    gate = torch.ones(L, N, dtype=F64)
    for layer, gone in heads.items():
        gate[layer, gone] = 0
    pruned = prune_heads(model, heads)
    wanted = model(**inputs, head_mask=gate).logits
    assert_same(pruned(**inputs).logits, wanted)
    assert_same(joined(steps(pruned, inputs, (4, 1, 6))), wanted)
    assert_same(densify(pruned)(**inputs).logits, wanted)
    for old, new in zip(model.bert.encoder.layer, pruned.bert.encoder.layer, strict=True):
        assert_same(dict(new.crossattention.state_dict()), dict(old.crossattention.state_dict()), atol=0)
        assert new.crossattention.self.num_attention_heads == N


# What is refused


def test_inputs_that_do_not_fit_are_refused_and_leave_the_cache_alone():
    plain, crossed, ids = build().requires_grad_(False), build(**CROSS), make_batch(length=40)["input_ids"]
    cache, (states, mask) = plain(ids[:, :36]).past_key_values, encoder_of().values()
    labelled, needs = {"labels": ids[:, :S], "logits_to_keep": 4}, "it needs is_decoder=True and"
    shown, name, past = "encoder_hidden_states", "encoder_attention_mask", "past_key_values"
    form = rf"{shown} has shape .*; expected \(2, length, 48\)"
    for model, length, given, says in (
        (plain, S, encoder_of(), f"model without cross-attention; {needs}"),
        (make(BertModel), S, encoder_of(), f"model without cross-attention; {needs}"),
        *((crossed, S, {shown: x}, form) for x in (states.repeat(2, 1, 1), states[..., :-1], states[0])),
        (crossed, S, {name: mask}, f"{name} was given without encoder_hidden_states"),
        (crossed, S, {**encoder_of(), name: mask[:, 1:]}, rf"{name} has shape \(2, 7\); expected \(2, 8\)"),
        (crossed, S, {**encoder_of(), name: mask / 2}, rf"{name} holds 0\.5"),
        (plain, S, labelled, r"the labels have shape \(2, 11\); logits_to_keep leaves 4"),
        (plain, 5, {past: cache}, "5 tokens long, after 36 in the cache; this model takes 1 to 40"),
        (plain, 4, {past: cache, name[8:]: mask[:, :4]}, rf"{name[8:]} has shape \(2, 4\); expected \(2, 40\)"),
        (plain, S, {past: ()}, f"{past} is a tuple; pass the KeyValueCache that a model returned"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            model(ids[:, :length], **given)
    assert cache.length == 36
    assert plain(ids[:, 36:], past_key_values=cache).past_key_values.length == 40
    one = crossed(ids, encoder_hidden_states=states[:1], encoder_attention_mask=mask[:1]).logits
    assert_same(one, crossed(ids, encoder_hidden_states=states[:1].expand(B, K, D)).logits, atol=0)
    with pytest.raises(ValueError, match="needs is_decoder=True"):
        BertLMHeadModel(BertConfig(**SIZES))


# One graph


def test_decoding_from_a_cache_is_one_graph():
    torch._dynamo.reset()
    model = build(**CROSS, num_hidden_layers=1)  # the time to compile is that of layers
    inputs = inputs_of(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        pieces = steps(compiled, inputs, (6, 5))
        assert_same(joined(pieces), model(**inputs).logits)
    assert pieces[-1].past_key_values.length == S
