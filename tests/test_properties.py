"""Whatever comes in, in whatever model: the right answer or a refusal of ours; never another error, never nan.

Right is what the eager backend computes in float64.
"""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import EXACT, SIZES, assert_same, make
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bertlite import BertModel, optimize_for_inference, prune_heads, prune_neurons
from bertlite.runtime.library import missing_platform

L, N, NEURONS, WORDS, LONGEST = 3, 4, SIZES["intermediate_size"], SIZES["vocab_size"], SIZES["max_position_embeddings"]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OURS = (ValueError, TypeError)
EXAMPLES = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],  # a failure is shown as found: making it smaller would take minutes
    suppress_health_check=list(HealthCheck),
)

units = lambda count, most: st.dictionaries(st.integers(0, L - 1), st.sets(st.integers(0, count - 1), max_size=most))  # noqa: E731


@cache
def trained() -> BertModel:
    return make()


@st.composite
def models(draw: Any) -> BertModel:
    """Any heads and neurons gone, all of a layer's too."""
    model = prune_heads(trained(), draw(units(N, N)))
    return prune_neurons(model, draw(units(NEURONS, NEURONS)))


def ones(draw: Any, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return (torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))).long()


@st.composite
def masks(draw: Any, batch: int, length: int) -> Tensor | None:
    """Of every form; some queries may look at nothing."""
    form = draw(st.sampled_from(["none", "keys", "prefix", "queries", "bool", "scores"]))
    if form == "none":
        return None
    if form == "keys":
        return ones(draw, batch, length).to(draw(st.sampled_from([torch.long, torch.bool, torch.float32])))
    if form == "prefix":
        lengths = torch.tensor(draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch)))
        return (torch.arange(length) < lengths.view(-1, 1)).long()
    if form == "queries":
        return ones(draw, batch, length, length)
    if form == "bool":
        return ones(draw, batch, 1, length, length).bool()
    scores = ones(draw, batch, 1, 1, length).double() * -draw(st.sampled_from([0.25, 1e4, 1e300, torch.inf]))
    return scores.nan_to_num(0.0, neginf=-torch.inf)


@st.composite
def inputs(draw: Any) -> dict[str, Tensor]:
    batch, length = draw(st.integers(0, 4)), draw(st.integers(1, LONGEST))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids = torch.randint(0, WORDS, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": draw(masks(batch, length))}


def run(model: BertModel, backend: str, dtype: torch.dtype, **given: Any) -> Any:
    copied = prune_heads(model, {}).to(dtype)
    copied.set_attn_implementation(backend)
    with torch.no_grad():
        return copied(**given)


def error_of(got: Tensor, wanted: Tensor) -> float:
    return (got.double() - wanted).abs().max().item() if wanted.numel() else 0.0


def allowed_of(own: float, wanted: Tensor, dtype: torch.dtype) -> float:
    """In float64 that it is right; else a backend may round otherwise than eager, whose error is `own`, but no worse
    by an order."""
    if dtype == torch.float64 or not wanted.numel():
        return EXACT
    return 10 * own + 10 * torch.finfo(dtype).eps * wanted.abs().max().item()


def shown(out: Any, mask: Tensor | None) -> Tensor:
    """Token vectors where there are tokens: what is at padded positions is each backend's own."""
    states = out.last_hidden_state
    return states if mask is None or mask.dim() != 2 else states[mask.bool()]


@EXAMPLES
@given(models(), inputs(), st.sampled_from(["eager", "sdpa", "packed", "auto"]), st.sampled_from(DTYPES))
def test_every_backend_and_dtype_is_right_or_refuses(model, batch, backend, dtype):
    mask = batch["attention_mask"]
    truth = run(model, "eager", torch.float64, **batch)
    if backend == "packed" and mask is not None and mask.dim() != 2:
        with pytest.raises(ValueError, match="takes a 2-D attention_mask"):
            run(model, backend, dtype, **batch)
        return
    out = run(model, backend, dtype, **batch)
    assert out.last_hidden_state.isfinite().all()
    assert out.pooler_output.isfinite().all()
    wanted = shown(truth, mask)
    own = error_of(shown(run(model, "eager", dtype, **batch), mask), wanted)
    assert error_of(shown(out, mask), wanted) <= allowed_of(own, wanted, dtype)


@st.composite
def packed_inputs(draw: Any) -> dict[str, Tensor]:
    """Some sequences, packed; some have no token."""
    lengths = draw(st.lists(st.integers(0, LONGEST), max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids = torch.randint(0, WORDS, (sum(lengths),), generator=generator)
    types = torch.randint(0, SIZES["type_vocab_size"], (sum(lengths),), generator=generator)
    return {
        "input_ids": ids,
        "token_type_ids": draw(st.sampled_from([None, types])),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
    }


def alone(batch: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Each sequence that has a token as a batch of its own."""
    ends = batch["cu_seqlens"].tolist()
    given = {name: x for name, x in batch.items() if name != "cu_seqlens" and x is not None}
    return [{name: x[None, start:end] for name, x in given.items()} for start, end in pairwise(ends) if end > start]


@EXAMPLES
@given(models(), packed_inputs(), st.sampled_from(["packed", "auto"]), st.sampled_from(DTYPES), st.booleans())
def test_packed_sequences_are_each_as_if_alone(model, batch, backend, dtype, first):
    out = run(model, backend, dtype, **batch, first_token_only=first)
    filled = batch["cu_seqlens"].diff() > 0
    got = out.last_hidden_state
    assert got.isfinite().all()
    assert out.pooler_output.isfinite().all()
    assert got.shape[0] == len(filled) if first else got.shape[0] == len(batch["input_ids"])
    got = got[filled] if first else got

    def each(dtype: torch.dtype) -> Tensor:
        outs = [run(model, "eager", dtype, **one).last_hidden_state[0] for one in alone(batch)]
        return torch.cat([x[:1] if first else x for x in outs] or [got.new_zeros(0, SIZES["hidden_size"])])

    wanted = each(torch.float64)
    assert error_of(got, wanted) <= allowed_of(error_of(each(dtype), wanted), wanted, dtype)


@EXAMPLES
@given(models(), inputs(), st.sampled_from([torch.float32, torch.bfloat16, torch.int8]), st.booleans())
def test_an_optimised_model_is_right_or_refuses(model, batch, dtype, first):
    if reason := missing_platform():
        pytest.skip(reason)
    mask = batch["attention_mask"]
    floats = torch.float32 if dtype == torch.int8 else dtype
    quick = optimize_for_inference(prune_heads(model, {}).to(floats), dtype=dtype)
    out = quick(**batch, first_token_only=first)
    assert out.last_hidden_state.isfinite().all()
    assert out.pooler_output.isfinite().all()
    if first or dtype == torch.int8:  # which rounds to 255 steps: how far that may lead is test_optimize.py's
        return
    wanted = shown(run(model, "eager", torch.float64, **batch), mask)
    own = error_of(shown(run(model, "eager", dtype, **batch), mask), wanted)
    assert error_of(shown(out, mask), wanted) <= allowed_of(own, wanted, dtype)


@cache
def optimised() -> Any:
    return optimize_for_inference(prune_heads(trained(), {1: [0]}).float())


@EXAMPLES
@given(models(), inputs(), st.integers(WORDS, 2**62), st.data())
def test_whatever_is_wrong_is_refused_by_us(model, batch, high, data):
    """One thing at a time is made wrong."""
    ids = batch["input_ids"]
    rows, length = ids.shape
    pick = lambda *choices: data.draw(st.sampled_from(choices))  # noqa: E731
    place = torch.tensor([data.draw(st.integers(0, length - 1))])
    shapes = ((rows, length + 1), (rows + 2, length), (length,), (rows, 2, length + 1))
    faults: dict[str, Any] = {
        "dtype": {"input_ids": ids.to(pick(torch.float32, torch.int8, torch.bool, torch.complex64))},
        "rank": {"input_ids": pick(ids[..., None], ids.flatten(), ids.sum())},
        "long": {"input_ids": ids.new_ones(rows, LONGEST + pick(1, 2, 9)), "attention_mask": None},
        "none": {"input_ids": ids[:, :0]},
        "mask": {"attention_mask": torch.ones(pick(*shapes))},
        "types": {"token_type_ids": torch.full((rows + 2, length), pick(-9, 0, 9))},
        "positions": {"position_ids": torch.full((rows, length + 1), pick(-9, 0, 99))},
        "gates": {"head_mask": torch.ones(pick((N + 1,), (L, N + 1), (L + 1, N), (L, rows + 2, N)))},
        "both": {"inputs_embeds": torch.zeros(rows, length, SIZES["hidden_size"])},
    }
    if rows:
        faults["high"] = {"input_ids": ids.index_fill(1, place, high)}
        faults["low"] = {"input_ids": ids.index_fill(1, place, -high)}
    batch |= faults[pick(*faults)]
    for backend in ("eager", "sdpa", "packed", "auto"):
        with pytest.raises(OURS):
            run(model, backend, torch.float64, **batch)
    if torch.backends.mkldnn.is_available():
        with pytest.raises(OURS):
            optimised()(**batch)


@pytest.mark.parametrize("backend", ["packed", "auto", "eager", "sdpa"])
def test_what_holds_no_ends_of_sequences_is_refused_by_us(backend):
    for ends in (torch.tensor([]), torch.tensor(7), torch.tensor([0, 7 + 2**30]), torch.tensor([-(2**30), 7])):
        with pytest.raises(OURS):
            run(trained(), backend, torch.float64, input_ids=torch.ones(7).long(), cu_seqlens=ends.int())


@EXAMPLES
@given(units(N, N), units(N, N), units(NEURONS, 9), units(NEURONS, NEURONS), inputs())
def test_pruning_in_any_order_is_pruning_the_union_once(one, two, few, many, batch):
    heads, neurons = (
        {k: a.get(k, set()) | b.get(k, set()) for k in a.keys() | b.keys()} for a, b in ((one, two), (few, many))
    )
    once = prune_neurons(prune_heads(trained(), heads), neurons)
    twice = prune_neurons(prune_heads(prune_neurons(prune_heads(trained(), two), many), one), few)
    assert once.config == twice.config
    assert_same(once.state_dict(), twice.state_dict(), atol=0)
    with torch.no_grad():
        assert_same(once(**batch), twice(**batch), atol=0)
