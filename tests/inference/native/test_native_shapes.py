"""bertlite/inference/native: models, batches, masks and gates of every shape give what the model gives in float64."""

import pytest
import torch
from conftest import HEADED, inputs_of, make_batch
from natively import DTYPES, ROTARY, check, dtypes, make_native, native, natively, pruned
from torch import Tensor

import bertlite
from bertlite.runtime.library import INSTRUCTION_SETS, usable_sets
from bertlite.runtime.structs import ACTIVATIONS

pytestmark = native
HEADS = [cls.__name__ for cls in HEADED]
# whole tiles of rows, keys and outputs, and one more or less; few tokens, and many for each thread
HEAD_DIMS = [(1, 16), (3, 26), (3, 32), (2, 7), (2, 64), (1, 80), (3, 128)]
LOWEST = torch.finfo(torch.float64).min  # forbids a key, as -inf does
LENGTHS = [(1,), (2, 1), (15, 16, 17), (63, 64, 65), (130, 127, 1, 128), (3,) * 40]


def batch_of(*lengths: int, seed: int = 1) -> dict[str, Tensor]:
    return make_batch(len(lengths), max(lengths), seed, lengths)


@dtypes
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_every_set_of_instructions_gives_what_the_model_gives(name, dtype):
    model = make_native(max_position_embeddings=130, hidden_size=144, num_attention_heads=3, intermediate_size=101)
    model.set_attn_implementation("packed")
    for each in (model, bertlite.prune_neurons(bertlite.prune_heads(model, {0: [1], 1: range(3)}), {1: range(101)})):
        check(each, dtype, name, **batch_of(130, 17, 1), output_hidden_states=True)
    model.set_attn_implementation("sdpa")
    mask = torch.rand(8, 3, 11, 11) > 0.4
    inputs = {**make_batch(8), "attention_mask": mask, "head_mask": torch.rand(3, 8, 3, dtype=torch.float64)}
    check(model, dtype, name, **inputs, output_attentions=True)


@dtypes
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_sizes_around_tiles_on_every_set(name, dtype):
    for heads, neurons in ((1, 1), (5, 63), (4, 64)):
        model = make_native(hidden_size=16 * heads, num_attention_heads=heads, intermediate_size=neurons)
        check(model, dtype, name, **batch_of(5, 6, 7, 1, 2), output_hidden_states=True)


@dtypes
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_every_set_adds_the_distances_of_tokens(name, dtype):
    kinds = ("disentangled", "relative_key_query", "rotary_local", "relative_key", "bucketed")
    for kind in kinds if name == usable_sets()[0].name else kinds[:3]:  # the others' products are tested above
        sizes = {"hidden_size": 60, "num_attention_heads": 3, "max_position_embeddings": 130}
        if kind == "disentangled":  # distances up to 32 have rows of their own
            sizes |= {"position_buckets": 64, "max_relative_positions": 130}
        if kind == "rotary_local":  # the last of 130 tokens see no block of the first ones
            sizes |= {**ROTARY, "first_norm": True, "embeddings_norm": False, "local_attention": 20}
        model = make_native(**{"position_embedding_type": kind, **sizes})
        model = bertlite.prune_heads(model, {1: [0], 2: range(3)})
        tables = [getattr(layer.attention.self, "distance_embedding", None) for layer in model.encoder.layer[:2]]
        with torch.no_grad():
            for table in filter(None, [*tables, getattr(model.encoder, "LayerNorm", None)]):
                table.weight.mul_(20)  # so that what it adds to the scores is seen
        model.set_attn_implementation("packed")
        together = check(model, dtype, name, **batch_of(130, 77, 17, 1), output_hidden_states=True)
        alone = natively(model, dtype, name)(**{key: x[:1] for key, x in batch_of(130, 77, 17, 1).items()})
        assert torch.equal(alone.last_hidden_state[0], together.last_hidden_state[0])
        ids = batch_of(39)["input_ids"][0]
        check(model, dtype, name, input_ids=ids, cu_seqlens=torch.tensor([0, 1, 34, 39], dtype=torch.int32))
        model.set_attn_implementation("sdpa")
        mask = torch.rand(80, 1, 11, 11) > 0.4  # of a few, rounding may be right by chance
        check(model, dtype, name, **{**make_batch(80), "attention_mask": mask}, output_attentions=True)


@dtypes
def test_positions_with_gaps_rotate_by_the_gaps(dtype):
    model = make_native(**ROTARY)
    positions = torch.tensor([[0, 1, 2, 5, 9, 9, 3, 12, 13, 20, 39]])
    for attention in ("packed", "sdpa"):
        model.set_attn_implementation(attention)
        for each in (positions, positions.int()):  # whatever integers they are, kernels read 64 bits
            check(model, dtype, **make_batch(8), position_ids=each, output_hidden_states=True)


@dtypes
def test_distances_count_padding_between_tokens(dtype):
    model = make_native(position_embedding_type="relative_key")
    holes = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1]])
    ids = batch_of(4, 4)["input_ids"]
    quick = natively(model, dtype)
    with torch.no_grad():
        truth = model(input_ids=ids, attention_mask=holes).last_hidden_state
    mine = quick(input_ids=ids, attention_mask=holes).last_hidden_state
    allowed = {torch.float32: 1e-4, torch.bfloat16: 0.3, torch.int8: 0.3}[dtype]
    assert (mine - truth)[holes.bool()].abs().max() < allowed
    quick.model.set_attn_implementation("packed")
    with pytest.raises(ValueError, match="cannot use relative positions"):
        quick(input_ids=ids, attention_mask=holes)


@dtypes
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_length(lengths, dtype):
    model = make_native(max_position_embeddings=130)
    model.set_attn_implementation("packed")
    for each in (model, pruned(model)):
        check(each, dtype, **batch_of(*lengths), output_hidden_states=True)
        check(each, dtype, **batch_of(*lengths), first_token_only=True)


EVERY = range(3)
SHAPES = {  # what a model has, and what it loses: heads and neurons
    **{f"{n} heads of {size}": ({"hidden_size": n * size, "num_attention_heads": n}, {}, {}) for n, size in HEAD_DIMS},
    **{f"{n} neurons": ({"intermediate_size": n}, {}, {}) for n in (1, 2, 3, 37, 63, 64, 500)},
    **{f"{n} layers": ({"num_hidden_layers": n}, {}, {}) for n in (0, 1, 2)},
    "no heads in the first layer": ({}, {0: range(5)}, {}),
    "rotary": (ROTARY, {0: [1]}, {0: range(36), 2: range(37)}),
    "rotary, without windows": ({**ROTARY, "position_embedding_type": "rotary", "norm_first": False}, {}, {}),
    "nothing in the last layer": ({}, {2: range(5)}, {2: range(37)}),
    "few neurons": ({}, {}, {0: range(36), 2: range(37)}),
    "no heads": ({}, dict.fromkeys(EVERY, range(5)), {}),
    "nothing": ({}, dict.fromkeys(EVERY, range(5)), dict.fromkeys(EVERY, range(37))),
    "some less": ({}, {0: [0, 4], 1: [2]}, {1: [5]}),
    **{f"under {name}": ({"attn_implementation": name}, {}, {}) for name in ("auto", "packed", "sdpa", "eager")},
}


@dtypes
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, dtype):
    changes, heads, neurons = SHAPES[shape]
    model = bertlite.prune_neurons(bertlite.prune_heads(make_native(**changes), heads), neurons)
    ours = check(model, dtype, **make_batch(3, lengths=(11, 7, 1)), output_hidden_states=True)
    assert all(bool(x[1, 7:].any()) == ("eager" in shape) for x in ours.hidden_states), "what padding gives"
    many = make_batch(24)  # so many that rounding evens out: of two, 8 bits may be 2.7 times as far off by chance
    check(model, dtype, **many, first_token_only=True)
    if model.config.attn_implementation == "auto":
        check(model, dtype, **many, output_attentions=True)


@dtypes
def test_sequences_that_come_packed(dtype):
    ids = make_batch(1, 40)["input_ids"][0]
    for ends in ([0, 9, 9, 40], [0, 40], [0, 0, 1, 40, 40]):
        inputs = {"input_ids": ids, "cu_seqlens": torch.tensor(ends, dtype=torch.int32)}
        gates = [{"head_mask": x} for x in (gates_of(5), gates_of(3, 3, 5))] if len(ends) == 4 else []
        for model, gate in ((pruned(make_native()), {}), *((make_native(), each) for each in ({}, *gates))):
            check(model, dtype, **inputs, **gate, output_hidden_states=True)
            check(model, dtype, **inputs, **gate, first_token_only=True)


@dtypes
def test_nothing_at_all(dtype):
    model = make_native()
    none = {"input_ids": torch.zeros(0, 7, dtype=torch.long)}
    for attention in ("packed", "sdpa"):
        model.set_attn_implementation(attention)
        out = natively(model, dtype)(**none, output_hidden_states=True)
        assert [x.shape for x in out.hidden_states] == [(0, 7, 80)] * 4
        assert out.pooler_output.shape == (0, 80)
    packed = {"input_ids": torch.zeros(0, dtype=torch.long), "cu_seqlens": torch.tensor([0, 0], dtype=torch.int32)}
    model.set_attn_implementation("auto")
    assert natively(model, dtype)(**packed).last_hidden_state.shape == (0, 80)
    assert natively(model, dtype)(**packed, first_token_only=True).pooler_output.shape == (1, 80)


@pytest.mark.parametrize("dtype", [*DTYPES[:2], pytest.param(torch.int8, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("cls", HEADS)  # the layers below them are those of the other tests
def test_every_head_gives_what_it_gave(cls, dtype):
    model, batch = make_native(getattr(bertlite, cls)), make_batch(9)  # of few numbers, others may be right by chance
    batch = inputs_of(cls) if cls == "BertForMultipleChoice" else batch
    model.set_attn_implementation("packed")
    check(model, dtype, **batch, output_hidden_states=True)
    check(model, dtype, **batch)
    model.set_attn_implementation("eager")
    check(model, dtype, **batch, output_attentions=True)


@dtypes
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_activation(act, dtype):
    """In float32 also far from zero, where exponentials would overflow or vanish."""
    model = make_native(hidden_act=act)
    check(model, dtype, **make_batch())
    if dtype == torch.float32:
        for layer in model.encoder.layer:
            layer.intermediate.dense.bias.data = torch.linspace(-1000, 1000, 37, dtype=torch.float64)
        check(model, dtype, **make_batch())


@dtypes
def test_embeddings_in_place_of_ids(dtype):
    x = torch.randn(2, 11, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    check(make_native(), dtype, inputs_embeds=x)
    strided = x.repeat_interleave(2, 0)[::2]
    check(make_native(), dtype, inputs_embeds=strided)


# Masks and gates ----------------------------------------------------------------------------------------------------


def random_of(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def rows(*texts: str) -> Tensor:
    return torch.tensor([[int(letter) for letter in text] for text in texts])


MASKS = {
    "left": rows("11111111111", "00000000111"),
    "holes": rows("11011100101", "10000000001"),
    "one": rows("10000000000", "00000100000"),
    "nothing": rows("00000000000", "00000000000"),
    "nothing in a row": rows("11111110000", "00000000000"),
    "everything": rows("1" * 11, "1" * 11),
    "3-D": random_of(2, 11, 11) > 0.4,
    "3-D, one row": random_of(2, 1, 11) > 0.4,
    "4-D": random_of(2, 5, 11, 11) > 0.4,
    "4-D, the same for all heads": random_of(2, 1, 11, 11) > 0.4,
    "4-D, the same for all sequences": random_of(1, 5, 1, 11) > 0.4,
    "4-D, the same for all keys": random_of(2, 5, 11, 1) > 0.4,
    "additive": 3 * random_of(2, 5, 11, 11),
    "additive and forbidding": (3 * random_of(2, 1, 11, 11)).masked_fill(random_of(2, 1, 11, 11) > 0.7, -torch.inf),
    "additive, one key": 3 * random_of(1, 1, 11, 1),
    "lowest": torch.zeros(2, 1, 1, 11, dtype=torch.float64).masked_fill(random_of(2, 1, 1, 11) > 0.7, LOWEST),
    "nothing for some queries": (random_of(2, 5, 11, 11) > 0.4) & (random_of(2, 5, 11, 1) > 0.3),
    "nothing for some queries of all heads": (random_of(1, 1, 11, 11) > 0.4) & (random_of(1, 1, 11, 1) > 0.3),
}


def in_every_dtype(names):
    """Return cases: each in float32, every third in bfloat16 too, whose attention int8 has; the rest is slow."""
    cases = [(i, name, dtype) for i, name in enumerate(names) for dtype in DTYPES]
    thin = [dtype == torch.float32 or (dtype == torch.bfloat16 and i % 3 == 0) for i, _, dtype in cases]
    return [
        pytest.param(name, dtype, marks=[] if taken else [pytest.mark.slow], id=f"{name}-{dtype}")
        for (_, name, dtype), taken in zip(cases, thin, strict=True)
    ]


def check_outputs(model, dtype, *attentions, **inputs):
    """Check the states that the kernels give under kinds of attention, and their weights under "eager"."""
    for attention in attentions:
        model.set_attn_implementation(attention)
        check(model, dtype, **inputs, output_hidden_states=True)
        check(model, dtype, **inputs, first_token_only=True)
    model.set_attn_implementation("eager")
    check(model, dtype, **inputs, output_attentions=True)


@pytest.mark.parametrize(("mask", "dtype"), in_every_dtype(MASKS))
def test_every_mask(mask, dtype):
    whole, dim = make_native(), MASKS[mask].dim()
    by_head = dim == 4 and MASKS[mask].shape[1] > 1  # which a pruned model refuses
    models = [whole, *[pruned(whole)] * (not by_head), *[make_native(**ROTARY)] * (mask != "holes")]
    for model in models:  # padding between tokens would move a window
        attentions = ("auto", "sdpa") if dim == 2 else ("sdpa",)
        check_outputs(model, dtype, *attentions, **{**make_batch(), "attention_mask": MASKS[mask]})


def test_scores_below_the_range_of_float32_are_never_nan():
    model = make_native().float()
    inputs = {**make_batch(), "attention_mask": torch.full((1, 1, 1, 11), -1e300, dtype=torch.float64)}
    ours, wanted = natively(model, torch.float32)(**inputs), model(**inputs)
    torch.testing.assert_close(ours.last_hidden_state, wanted.last_hidden_state, rtol=0, atol=1e-4)


def gates_of(*shape: int) -> Tensor:
    return random_of(*shape) - 0.2


GATES = {
    "heads": gates_of(5),
    "layers": gates_of(3, 5),
    "one sequence": gates_of(3, 1, 5),
    "sequences": gates_of(3, 2, 5),
    "5-D": gates_of(3, 2, 5, 1, 1),
    "5-D, the same for all sequences": gates_of(3, 1, 5, 1, 1),
    "queries": gates_of(3, 2, 5, 11, 1),
    "queries, the same for all sequences": gates_of(3, 1, 5, 11, 1),
    "zeros": (gates_of(3, 5) > 0.3).double(),
    "nothing": torch.zeros(5, dtype=torch.float64),
}


@pytest.mark.parametrize(("gate", "dtype"), in_every_dtype(GATES))
def test_every_gate(gate, dtype):
    for model in (make_native(), pruned(make_native())):
        check_outputs(model, dtype, "packed", "sdpa", **make_batch(), head_mask=GATES[gate])


@dtypes
def test_gates_with_a_mask_for_every_query(dtype):
    model = make_native()
    model.set_attn_implementation("eager")
    for gate in ("sequences", "queries"):
        for mask in ("4-D", "additive and forbidding", "nothing for some queries"):
            inputs = {**make_batch(), "attention_mask": MASKS[mask], "head_mask": GATES[gate]}
            check(model, dtype, **inputs, output_attentions=True, output_hidden_states=True)
