"""Writing with bertlite.hf: transformers' generate, its caches and its encoder-decoder pairs."""

from typing import Any

import pytest
import torch
import transformers
from conftest import F64, assert_same, inputs_of
from pairs import ALONE_OR_CROSS, BOTH, CACHE, CROSS, V5, B, H, L, N, S, only_4, ours_of, pair, states_of, tokens_of
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import bertlite
import bertlite.pruning
from bertlite import hf
from bertlite.stack.cache import KeyValueCache

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "repetition": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def left_padded() -> dict[str, torch.Tensor]:
    ids = inputs_of()["input_ids"].clone()
    mask = torch.ones(B, S).long()
    mask[1, :4] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def write(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(5)
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0, "eos_token_id": 1, **options}
    return model.generate(**inputs, **settings, return_dict_in_generate=True, output_scores=True, output_logits=True)


def assert_same_text(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    assert got.sequences.equal(wanted.sequences)
    assert_same(got.logits, wanted.logits, atol=1e-6)  # generate itself keeps scores in float32
    assert len(set(got.sequences.flatten().tolist())) > 6  # not one word again and again


# generate


@BOTH
@EVERY_WAY
def test_what_is_written_is_what_transformers_writes(way, backend):
    theirs, ours = pair("BertLMHeadModel", backend)
    for inputs in ({"input_ids": inputs_of()["input_ids"]}, left_padded()):
        assert_same_text(write(ours, inputs, **WAYS[way]), write(theirs, inputs, **WAYS[way]))


@pytest.mark.parametrize("heads", [{0: [1, 3], 1: [0, 1, 2, 3]}, {0: [0, 1, 2, 3], 2: [0]}], ids=str)
@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_pruned_models_write(way, heads):
    """Even without the first layer's heads, in whose keys transformers counts the tokens of a cache."""
    dense, model = pair("BertLMHeadModel", "sdpa")
    model.prune_heads(heads)
    dense.load_state_dict(bertlite.pruning.densify(model).state_dict())
    assert_same_text(write(model, left_padded(), **WAYS[way]), write(dense, left_padded(), **WAYS[way]))
    assert model(**inputs_of()).past_key_values.get_seq_length() == S


def test_a_head_mask_reaches_every_step():
    model = ours_of("BertLMHeadModel")
    gate = torch.ones(L, N, dtype=F64)
    gate[0, [1, 3]] = 0
    got = write(model, {**left_padded(), "head_mask": gate})
    assert_same_text(got, write(bertlite.prune_heads(model, {0: [1, 3]}), left_padded()))
    assert not got.sequences.equal(write(model, left_padded()).sequences)


@pytest.mark.parametrize(
    ("positions", "heads", "backend"),
    [("absolute", {}, "sdpa"), ("absolute", {}, "eager"), ("relative_key", {0: [0, 1, 2, 3], 2: [1]}, "sdpa")],
)
def test_a_cache_of_fixed_size_may_be_asked_for(positions, heads, backend):
    if not V5 and heads:
        pytest.skip("transformers 4 looks for the length of its static cache in the first head")
    model = ours_of("BertLMHeadModel", backend, position_embedding_type=positions)
    model.prune_heads(heads)
    fixed = {"cache_implementation": "static", "disable_compile": True}
    assert_same_text(*(write(model, left_padded(), **options) for options in (fixed, {})))
    if V5 and positions == "absolute" and not heads:
        theirs, ours = pair("BertLMHeadModel", backend)
        assert_same_text(*(write(each, left_padded(), **fixed) for each in (ours, theirs)))


# Caches


@pytest.mark.parametrize("kind", ["own", "dynamic", "both", "static"])
@ALONE_OR_CROSS
@pytest.mark.parametrize("masked", [True, False])
def test_a_given_cache_is_extended(masked, changes, kind):
    model = ours_of("BertLMHeadModel", **changes)
    inputs = {**inputs_of(), **(states_of() if changes is CROSS else {})}
    if not masked:
        del inputs["attention_mask"]
    cache = {
        "own": lambda: None,
        "dynamic": DynamicCache,
        "both": lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()),
        "static": lambda: StaticCache(config=model.config, max_cache_len=20),
    }[kind]()
    wanted = model(**inputs, use_cache=False)
    assert wanted.past_key_values is None
    logits = []
    for start, end in ((0, 6), (6, 7), (7, S)):
        part = tokens_of(inputs, start, end)
        if masked:
            part["attention_mask"] = inputs["attention_mask"][:, :end]
        out = model(**part, **{CACHE if masked else "past_key_values": cache})
        assert cache is None or out.past_key_values is cache
        cache = out.past_key_values
        logits.append(out.logits)
        assert cache.get_seq_length() == end
    assert_same(torch.cat(logits, 1), wanted.logits)


@pytest.mark.parametrize("decoder", [False, True])
def test_a_cache_of_all_heads_is_cut_to_those_of_a_pruned_model(decoder):
    """Pruning a head is masking it, also where PEFT's prefix tuning makes keys and values for every head."""
    dense = ours_of("BertModel", "sdpa", is_decoder=decoder)
    gone = {0: [1, 3], 1: [0, 1, 2, 3], 2: [0]}
    gate = torch.ones(L, N, dtype=F64)
    for layer, heads in gone.items():
        gate[layer, heads] = 0
    mask = torch.nn.functional.pad(inputs_of()["attention_mask"], (3, 0), value=1)
    prefix = torch.randn(L, 2, B, N, 3, H, generator=torch.Generator().manual_seed(5), dtype=F64)
    outs, gradients = [], []
    for model, given in ((dense, {"head_mask": gate}), (bertlite.prune_heads(dense, gone), {})):
        cache, learnt = DynamicCache(), prefix.clone().requires_grad_()
        for layer in range(L):
            cache.update(*learnt[layer], layer)
        out = model(**{**inputs_of(), "attention_mask": mask}, past_key_values=cache, **given).last_hidden_state
        (gradient,) = torch.autograd.grad(out.square().sum(), learnt)
        outs.append(out)
        gradients.append(gradient)
        assert cache.get_seq_length() == 3 + S
    assert_same(*outs)
    assert_same(*gradients, atol=1e-11)  # sums over all positions
    assert gradients[1].any()


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("decoder", [True, False])
@pytest.mark.parametrize("given", [False, True])
def test_a_cache_is_returned_when_transformers_returns_one(given, decoder, written, said):
    if given and not V5:
        pytest.skip("transformers 4 returns whatever cache it is given")
    for name in ("BertModel", "BertLMHeadModel"):
        outs = []
        for model in pair(name, is_decoder=decoder, use_cache=written):
            some = {CACHE: DynamicCache()} if given else {}
            outs.append(model(**inputs_of(), **some, **({} if said is None else {"use_cache": said})))
        assert (outs[0].past_key_values is None) == (outs[1].past_key_values is None)


def test_other_kinds_of_cache_are_refused_and_two_at_once():
    model, ids = ours_of("BertLMHeadModel"), inputs_of()["input_ids"]
    with pytest.raises(TypeError, match=r"no cache|argument 'cache'"):
        model(ids, past_key_values=DynamicCache(), cache=DynamicCache())
    with pytest.raises(TypeError, match="past_key_values is a KeyValueCache; pass a cache of transformers"):
        model(ids, past_key_values=KeyValueCache())
    if V5:
        with pytest.raises(TypeError, match="past_key_values is a tuple; transformers 5 takes a DynamicCache or an"):
            model(ids, past_key_values=((torch.zeros(B, N, 3, H),) * 2,) * L)


@only_4
@ALONE_OR_CROSS
def test_tuples_of_transformers_4_are_caches_too(changes):
    theirs, ours = pair("BertLMHeadModel", **changes)
    inputs = {**inputs_of(), **(states_of() if changes is CROSS else {})}
    first = {**tokens_of(inputs, 0, 6), "attention_mask": inputs["attention_mask"][:, :6]}
    rest, outs = tokens_of(inputs, 6), []
    for model in (ours, theirs):
        legacy = model(**first, use_cache=True).past_key_values.to_legacy_cache()
        assert isinstance(legacy, tuple)
        legacy = tuple(tuple(x for x in layer if x is not None) for layer in legacy)
        assert [len(layer) for layer in legacy] == [4 if changes is CROSS else 2] * L
        outs.append(model(**rest, past_key_values=legacy, use_cache=True))
    assert type(outs[0].past_key_values) is type(outs[1].past_key_values)
    assert outs[0].past_key_values.get_seq_length() == S
    assert_same(outs[0].logits, outs[1].logits)
    assert_same(outs[0].logits, ours(**inputs, use_cache=False).logits[:, 6:])


# Encoder-decoder pairs


def test_a_pair_with_pruned_parts_survives_saving(tmp_path):
    """The checks of clients compare dense pairs with those of transformers."""
    parts = ours_of("BertModel"), ours_of("BertLMHeadModel", **CROSS)
    parts[0].prune_heads({0: [1, 3]})
    parts[1].prune_heads({1: [0, 1, 2, 3]})
    model = transformers.EncoderDecoderModel(encoder=parts[0], decoder=parts[1]).eval()
    given = {"input_ids": inputs_of()["input_ids"], "decoder_input_ids": inputs_of()["input_ids"][:, :8]}
    wanted = model(**given).logits
    model.save_pretrained(tmp_path)
    with hf.registered():
        again = transformers.EncoderDecoderModel.from_pretrained(tmp_path, dtype=F64)
    assert again.encoder.config.pruned_heads == {0: [1, 3]}
    assert_same(again(**given).logits, wanted)
