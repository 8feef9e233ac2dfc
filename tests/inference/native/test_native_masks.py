"""bertlite/inference/native: masks and gates of every shape do what they do to the model."""

from functools import partial

import pytest
import torch
from conftest import make_batch
from natively import DTYPES, ROTARY, check, dtypes, make_native, native, natively, pruned

pytestmark = native

LOWEST = torch.finfo(torch.float64).min  # forbids a key, as -inf does


def random_of(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def rows(*texts: str) -> torch.Tensor:
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


@pytest.mark.parametrize(("mask", "dtype"), in_every_dtype(MASKS))
def test_every_mask(mask, dtype):
    whole, dim = make_native(), MASKS[mask].dim()
    by_head = dim == 4 and MASKS[mask].shape[1] > 1  # which a pruned model refuses
    models = [whole, *[pruned(whole)] * (not by_head), *[make_native(**ROTARY)] * (mask != "holes")]
    for model in models:  # padding between tokens would move a window
        inputs = {**make_batch(), "attention_mask": MASKS[mask]}
        for attention in ("auto", "sdpa") if dim == 2 else ("sdpa",):
            model.set_attn_implementation(attention)
            check(model, dtype, **inputs, output_hidden_states=True)
            check(model, dtype, **inputs, first_token_only=True)
        model.set_attn_implementation("eager")
        check(model, dtype, **inputs, output_attentions=True)


def test_scores_below_the_range_of_float32_are_never_nan():
    model = make_native().float()
    inputs = {**make_batch(), "attention_mask": torch.full((1, 1, 1, 11), -1e300, dtype=torch.float64)}
    ours, wanted = natively(model, torch.float32)(**inputs), model(**inputs)
    torch.testing.assert_close(ours.last_hidden_state, wanted.last_hidden_state, rtol=0, atol=1e-4)


def gates_of(*shape: int) -> torch.Tensor:
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
        run = partial(check, model, dtype, **make_batch(), head_mask=GATES[gate])
        for attention in ("packed", "sdpa"):
            model.set_attn_implementation(attention)
            run(output_hidden_states=True)
            run(first_token_only=True)
        model.set_attn_implementation("eager")
        run(output_attentions=True)


@dtypes
def test_gates_of_sequences_that_come_packed(dtype):
    ids = make_batch(1, 40)["input_ids"][0]
    inputs = {"input_ids": ids, "cu_seqlens": torch.tensor([0, 9, 9, 40], dtype=torch.int32)}
    for gate in (gates_of(5), gates_of(3, 3, 5)):
        check(make_native(), dtype, **inputs, head_mask=gate)
        check(make_native(), dtype, **inputs, head_mask=gate, first_token_only=True)


@dtypes
def test_gates_with_a_mask_for_every_query(dtype):
    model = make_native()
    model.set_attn_implementation("eager")
    for gate in ("sequences", "queries"):
        for mask in ("4-D", "additive and forbidding", "nothing for some queries"):
            inputs = {**make_batch(), "attention_mask": MASKS[mask], "head_mask": GATES[gate]}
            check(model, dtype, **inputs, output_attentions=True, output_hidden_states=True)
