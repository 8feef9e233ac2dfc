"""What a query may look at, and that every backend computes the same from it.

The rule for a query with nothing to attend to: weights zero, context zero, in every backend and dtype.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import methodcaller
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any

import pytest
import torch
from conftest import F64, ON_CPU, GradientWatch, OnCuda, assert_same, distance, full_outputs, gradients, make
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bertlite import BertModel
from bertlite.stack.attention import MOST_DRAWING, Requirements, drop, sdpa, select
from bertlite.stack.inputs import read_mask
from bertlite.support.torch_private import enabled_kernels

B, S, N, L = 2, 11, 4, 3
BACKEND_NAMES = ["eager", "sdpa"]
HALF = {torch.float16: 1e-2, torch.bfloat16: 1e-1}  # see the test of a query with nothing to attend to


def on(model: BertModel, backend: str) -> BertModel:
    model.set_attn_implementation(backend)
    return model


def keep(length: int = 7) -> Tensor:
    """Padding as booleans, (B, S): the second sequence ends after `length`."""
    return torch.arange(S) < torch.tensor([[S], [length]])


def additive(allowed: Tensor, forbid: float, dtype: torch.dtype = F64) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, forbid)


# The forms of a mask

SAME_AS_2D: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: methodcaller("to", getattr(torch, name))
        for name in ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    },
    "3d-(B,S,S)": lambda keep: keep[:, None, :].expand(B, S, S).long(),
    "3d-(B,1,S)": lambda keep: keep[:, None, :].float(),
    "4d-bool-(B,1,1,S)": lambda keep: keep[:, None, None, :],
    "4d-bool-(B,1,S,S)": lambda keep: keep[:, None, None, :].expand(B, 1, S, S),
    "4d-bool-(B,N,S,S)": lambda keep: keep[:, None, None, :].expand(B, N, S, S),
    "4d-inf": lambda keep: additive(keep[:, None, None, :], -math.inf),
    **{
        f"4d-lowest-of-{dtype}": lambda keep, dtype=dtype: additive(keep[:, None, None], torch.finfo(dtype).min, dtype)
        for dtype in (F64, torch.float32, torch.float16)
    },
    "4d-ten-thousand": lambda keep: additive(keep[:, None, None, :], -1e4),  # exp(-1e4) is 0
    "4d-(B,N,S,S)": lambda keep: additive(keep[:, None, None, :].expand(B, N, S, S), -math.inf),
}


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("form", SAME_AS_2D)
def test_every_form_of_a_padding_mask_means_the_same(form, backend, model, batch, kernels_run):
    wanted = full_outputs(on(model, backend), {**batch, "attention_mask": keep()})
    assert_same(full_outputs(model, {**batch, "attention_mask": SAME_AS_2D[form](keep())}), wanted)
    assert kernels_run == [backend] * 2 * L
    unmasked = full_outputs(model, {**batch, "attention_mask": None})
    assert distance(unmasked.last_hidden_state[1], wanted.last_hidden_state[1]) > 1e-2
    assert_same(unmasked.last_hidden_state[0], wanted.last_hidden_state[0])  # which has no padding
    assert all((weights[1, :, :, 7:] == 0).all() for weights in wanted.attentions)


@pytest.mark.parametrize("backend", ON_CPU)
def test_one_row_of_a_mask_serves_for_all(backend, model, batch):
    one = keep()[1:].long()
    forms = [one] if backend == "packed" else [one, one[:, None], one[:, None].expand(1, S, S)]
    wanted = on(model, backend)(**{**batch, "attention_mask": one.expand(B, S)})
    for form in forms:
        assert_same(dict(model(**{**batch, "attention_mask": form})), dict(wanted), atol=0)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_a_mask_for_each_head_reaches_that_head_alone(backend, model, batch):
    allowed = torch.ones(B, N, S, S, dtype=torch.bool)
    allowed[:, 2] = torch.eye(S, dtype=torch.bool)
    got = full_outputs(on(model, backend), {**batch, "attention_mask": allowed}).attentions[0]
    free = full_outputs(model, {**batch, "attention_mask": None}).attentions[0]
    assert_same(got[:, 2], torch.eye(S, dtype=F64).expand(B, S, S))
    assert_same(got[:, [0, 1, 3]], free[:, [0, 1, 3]])
    assert_same(got, full_outputs(model, {**batch, "attention_mask": additive(allowed, -math.inf)}).attentions[0])


def test_an_additive_mask_may_be_learned(model, batch):
    """Its scores are those of transformers, in a case of parity."""
    slopes = {}
    for backend in BACKEND_NAMES:
        bias = torch.zeros(1, N, S, S, dtype=F64, requires_grad=True)
        loss = on(model, backend)(**{**batch, "attention_mask": bias}).last_hidden_state.square().sum()
        (slopes[backend],) = torch.autograd.grad(loss, bias)
    assert slopes["eager"].abs().max() > 1e-3
    assert_same(slopes["sdpa"], slopes["eager"], atol=1e-10)  # sums over B·S·D squares of about 1


REFUSED = [
    (torch.ones(S), "1 dimensions, shape \\(11,\\); expected 2, 3 or 4"),
    (torch.ones(B, 1, 1, 1, S), "5 dimensions"),
    (torch.ones(B, S - 1), "shape \\(2, 10\\); expected \\(2, 11\\)"),
    (torch.ones(B, 1), "shape \\(2, 1\\); expected \\(2, 11\\), or 1 in place of any but the last"),
    (torch.ones(B + 1, S), "shape \\(3, 11\\)"),
    (torch.ones(S, B), "shape \\(11, 2\\)"),
    (torch.ones(B, S, S - 1), "shape \\(2, 11, 10\\); expected \\(2, 11, 11\\), or 1 in place"),
    (torch.ones(B, N, S), "shape \\(2, 4, 11\\)"),
    (torch.ones(B, N + 1, S, S).bool(), "\\(2, 5, 11, 11\\); expected \\(2, 4, 11, 11\\)"),
    (torch.ones(B, 1, S, S - 1).bool(), "has shape"),
    (torch.zeros(B + 1, 1, 1, S), "has shape"),
    (torch.full((B, S), 0.5), "holds 0.5: a 2-D mask holds 1 \\(attend\\) and 0"),
    (torch.full((B, S), 2), "holds 2:"),
    (torch.full((B, S), -1), "holds -1:"),
    (torch.full((B, S), math.nan), "holds nan:"),
    (torch.full((B, S), -1e4), "holds -10000.0: .*pass additive scores as a 4-D float mask"),
    (torch.full((B, S, S), -math.inf), "holds -inf: a 3-D mask"),
    (torch.ones(B, S, dtype=torch.complex64), "complex64"),
    (torch.ones(B, 1, S, S).long(), "4-D attention_mask is bool or additive floats, not torch.int64; use mask.bool"),
    (torch.ones(B, 1, S, S), "holds 0 and 1; use mask.bool"),
    (keep()[:, None, None, :].double(), "holds 0 and 1; use mask.bool"),
    (additive(keep()[:, None, None, :], math.nan), "attention_mask holds nan or \\+inf"),
    (additive(keep()[:, None, None, :], math.inf), "attention_mask holds nan or \\+inf"),
]


@pytest.mark.parametrize(("mask", "says"), REFUSED, ids=[f"{tuple(m.shape)}-{m.dtype}-{s[:12]}" for m, s in REFUSED])
def test_a_mask_that_could_be_misread_is_refused(mask, says, model, batch):
    with pytest.raises(ValueError, match=says):
        model(**{**batch, "attention_mask": mask})


# A query with nothing to attend to

NO_TOKEN = torch.tensor([[1] * S, [0] * S])
EMPTY_ROWS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "2d": lambda dtype: NO_TOKEN,
    "3d": lambda dtype: blocked(),
    "4d-bool": lambda dtype: blocked()[:, None],
    "4d-inf": lambda dtype: additive(blocked()[:, None], -math.inf, dtype),
    "4d-lowest": lambda dtype: additive(blocked()[:, None], torch.finfo(dtype).min, dtype),
    "4d-heads": lambda dtype: blocked()[:, None].expand(B, N, S, S),
}


def blocked() -> Tensor:
    """(B, S, S): in the first sequence rows 3 and 8 may look at nothing, in the second all but row 0."""
    allowed = torch.ones(B, S, S, dtype=torch.bool)
    allowed[0, [3, 8]] = False
    allowed[1, 1:] = False
    return allowed


@pytest.mark.parametrize("dtype", [F64, torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("form", EMPTY_ROWS)
def test_a_query_with_nothing_to_attend_to_gets_the_output_bias_alone(form, dtype, batch, kernels_run):
    """Half precision rounds values of up to 3 at eps, 1e-3 or 8e-3, a few times over: 5e-3 and 3e-2 were measured."""
    mask, empty = EMPTY_ROWS[form](dtype), ~(NO_TOKEN.bool() if form == "2d" else blocked().any(-1))
    outs = []
    for backend in BACKEND_NAMES:
        model = on(make().to(dtype), backend)
        contexts: list[Tensor] = []
        for layer in model.encoder.layer:
            layer.attention.self.register_forward_hook(lambda module, args, out, to=contexts: to.append(out[0]))
        out = model(**{**batch, "attention_mask": mask}, output_attentions=True)
        assert out.last_hidden_state.dtype == dtype
        assert out.last_hidden_state.isfinite().all()
        for weights, context in zip(out.attentions, contexts, strict=True):
            assert (weights.sum(-1) == 0).equal(empty[:, None].expand(B, N, S))
            assert (context == 0).all(-1).equal(empty)
        grads = gradients(model, out.last_hidden_state.float().square().mean() + out.pooler_output.float().sum())
        assert len(grads) == len(list(model.parameters()))
        assert all(grad.isfinite().all() for grad in grads.values())
        outs.append(out)
    assert kernels_run == ["eager"] * L + ["sdpa"] * L
    assert_same(outs[1], outs[0], atol=HALF.get(dtype, 1e-12 if dtype == F64 else 1e-5))


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_an_additive_mask_below_the_range_of_the_scores_is_never_nan(dtype, backend, batch):
    mask = torch.zeros(B, 1, S, S, dtype=F64)
    mask[1] = -1e9  # which float16 calls -inf
    mask[0, :, 3] = -1e300  # which float32 does
    model = on(make().to(dtype), backend)
    out = model(**{**batch, "attention_mask": mask}, output_attentions=True)
    assert all(x.isfinite().all() for x in (out.last_hidden_state, *out.attentions))
    rows = torch.cat([weights.sum(-1).flatten() for weights in out.attentions]).float()
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=2e-2)  # 11 weights rounded at bfloat16's eps
    grads = gradients(model, out.last_hidden_state.float().square().mean())
    assert all(grad.isfinite().all() for grad in grads.values())


# The layout of gradients

LAID_OUT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # changes of the config, inputs
    "plain": ({}, {"attention_mask": keep()}),
    **{form: ({}, {"attention_mask": make_mask(F64)}) for form, make_mask in EMPTY_ROWS.items()},
    "left-decoder": ({"is_decoder": True}, {"attention_mask": keep().flip(1)}),
    "cross": (
        {"is_decoder": True, "add_cross_attention": True},
        {
            "encoder_hidden_states": torch.ones(B, 5, 48, dtype=F64),
            "encoder_attention_mask": torch.tensor([[1] * 5, [0] * 5]),
        },
    ),
    **{
        f"gate-{len(shape)}-axes": ({}, {"attention_mask": NO_TOKEN, "head_mask": torch.rand(shape, dtype=F64)})
        for shape in ((N,), (L, N), (L, B, N), (L, B, N, 1, 1), (L, B, N, S, 1))
    },
    "pruned": ({"pruned_heads": {0: [1], 1: range(N)}}, {"attention_mask": NO_TOKEN}),
}
DECODING = ["left-decoder", "cross"]
ROWS_ALONE = [*DECODING, *(form for form in EMPTY_ROWS if form != "2d")]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(
    ("case", "backend", "first"),
    [
        *((case, "sdpa", first) for case in LAID_OUT for first in (False, True)[: 1 + (case not in DECODING)]),
        *((case, "packed", first) for case in LAID_OUT if case not in ROWS_ALONE for first in (False, True)),
    ],
)
def test_a_gradient_lies_as_the_result_of_the_kernel_does(case, backend, first, checkpointed, batch):
    """cuDNN makes one plan of its backward for a shape, and a gradient of another layout is wrong by it."""
    changes, inputs = LAID_OUT[case]
    model = make(attn_implementation=backend, **changes)
    if checkpointed:
        model.gradient_checkpointing_enable()
    with GradientWatch() as watch:
        out = model(**{**batch, **inputs}, first_token_only=first).last_hidden_state
        out.backward(torch.randn_like(out))
    assert len(watch.gradients) >= L - 1
    assert watch.gradients == watch.results


def test_no_gradient_comes_from_cudnn(monkeypatch):
    """Its kernels alone are switched off, for the forward alone, however many threads attend."""
    seen: list[list[SDPBackend]] = []
    entered = Barrier(2)

    def recorded(q: Tensor, *args: Any, **options: Any) -> Tensor:
        seen.append(enabled_kernels())
        with suppress(BrokenBarrierError):
            entered.wait(0.1)  # until a second thread is here too, which never comes
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    q = torch.randn(B, N, S, 3, dtype=F64).as_subclass(OnCuda)
    before = enabled_kernels()
    others = [kernel for kernel in before if kernel != SDPBackend.CUDNN_ATTENTION]
    assert len(others) == len(before) - 1
    attend = partial(sdpa, q, q, q, None, None, 0.0)
    threads = [Thread(target=attend) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        attend()
    for own in ([SDPBackend.CUDNN_ATTENTION], [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        with sdpa_kernel(own):  # a caller who says so himself
            attend()
    assert seen == [others, others, others, before, [SDPBackend.CUDNN_ATTENTION], [SDPBackend.MATH]]
    assert enabled_kernels() == before


# Backends


def test_attentions_follow_the_config_unless_the_call_says(batch):
    model = make(output_attentions=True, output_hidden_states=True)
    assert len(model(**batch).attentions) == L
    assert len(model(**batch).hidden_states) == L + 1
    assert set(model(**batch, output_attentions=False, output_hidden_states=False)) == {
        "last_hidden_state",
        "pooler_output",
    }


def test_auto_is_eager_for_attentions_and_sdpa_else(model, batch, kernels_run):
    assert model.config.attn_implementation == "auto"
    for each in (model, make().train()):  # with dropout too
        each(**batch)
        each(**batch, output_attentions=True)
        assert kernels_run == ["sdpa"] * L + ["eager"] * L
        kernels_run.clear()


def test_a_named_backend_is_the_one_that_runs(batch, kernels_run):
    model = make()
    for name in ON_CPU:
        on(model, name)(**batch)
        make(attn_implementation=name)(**batch)
        assert kernels_run == [name] * 2 * L
        kernels_run.clear()
    with pytest.raises(ValueError, match="'flash' is unknown; have: auto, eager, sdpa"):
        model.set_attn_implementation("flash")
    with pytest.raises(ValueError, match="'flash' is unknown"):
        make(attn_implementation="flash")
    with pytest.raises(ValueError, match="'flash' is unknown"):
        select("flash", Requirements())
    assert model.config.attn_implementation == ON_CPU[-1]


@pytest.mark.parametrize("name", ["auto", "eager"])
def test_dropped_attentions_come_from_eager_and_make_the_context(name, batch):
    model = make(attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0).train()
    with pytest.raises(ValueError, match="'sdpa' cannot give attentions while attention dropout is on"):
        on(model, "sdpa")(**batch, output_attentions=True)
    assert model(**batch).attentions is None
    assert len(on(make(attention_probs_dropout_prob=0.0).train(), "sdpa")(**batch, output_attentions=True)[-1]) == L
    seen: list[tuple[Tensor, Tensor]] = []
    attention = on(model, name).encoder.layer[0].attention.self
    attention.value.register_forward_hook(lambda module, args, out: seen.append((out, out)))
    attention.register_forward_hook(lambda module, args, out: seen.append(out))
    weights = model(**batch, output_attentions=True).attentions[0]
    dropped = (weights == 0).double().mean().item()
    assert 0.4 < dropped - 4 * N * S / weights.numel() * 0.5 < 0.6  # half, besides the 4 padded keys of one sequence
    (value, _), (context, _) = seen
    v = value.unflatten(-1, (N, -1)).transpose(1, 2)
    assert_same((weights @ v).transpose(1, 2).flatten(-2), context)


# read_mask


def test_what_restricts_nothing_is_dropped():
    """So that SDPA may take its fastest kernel."""
    for ones in (torch.ones(B, S), torch.ones(B, S, S), torch.ones(B, 1, S, S).bool()):
        mask = read_mask(ones, B, S, S, N)
        assert (mask.allowed, mask.bias, mask.attends_anything) == (None, None, None)
    padded = read_mask(keep(), B, S, S, N)
    assert padded.allowed is not None
    assert padded.allowed.shape == (B, 1, 1, S)
    assert padded.attends_anything is None


def test_a_gpu_looks_at_the_values_of_a_mask_itself(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    mask, full = torch.tensor([[1, 1, 0]]), (1, 3, 3, 2)
    got, wanted = (read_mask(each, *full).allowed for each in (mask.as_subclass(OnCuda), mask))
    assert got is not None
    assert_same(got.as_subclass(Tensor), wanted, atol=0)
    with pytest.raises(RuntimeError, match=r"attention_mask holds others than 1 \(attend\) and 0 \(do not\)"):
        read_mask((2 * mask).as_subclass(OnCuda), *full)


# Dropout of packed tokens


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_other_draws_drop_as_many_and_scale_the_rest(rate, dtype):
    assert torch.get_num_threads() <= MOST_DRAWING, "conftest gives tests fewer"
    x = torch.ones(103, 77, dtype=dtype, requires_grad=True)  # odd: four share a draw
    torch.manual_seed(3)
    out, again = drop(x, rate), drop(x, rate)
    torch.manual_seed(3)
    assert_same(drop(x, rate), out, atol=0)
    assert torch.equal(again, out) == (rate in (0, 1))
    kept = out != 0
    # 4.5 standard deviations of a mean of this many draws
    assert abs(kept.double().mean().item() - (1 - rate)) <= 4.5 * math.sqrt(rate * (1 - rate) / x.numel())
    if rate < 1:
        step = max(2**-15, torch.finfo(dtype).eps)  # the rate is rounded to 2^-16
        torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - rate)), rtol=step, atol=0)
    assert_same(torch.autograd.grad(out.sum(), x)[0], out, atol=0)
