"""bertlite/inference/optimize.py and support.py: an optimised model is near the model, or is refused with a reason."""

import copy
import gc
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import SIZES
from optimised import full, of_kind, onednn, skip_without
from torch import nn

import bertlite
from bertlite import BertConfig, BertModel, inference, optimize_for_inference
from bertlite.inference import optimize
from bertlite.inference.linear import FixedLinear
from bertlite.inference.native import conversion
from bertlite.parity.compare import as_well


@pytest.fixture(params=["whole", "pruned"])
def any_model(request, model):
    return of_kind(request.param, model)


@onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_its_error_is_no_larger_than_the_models_own(any_model, batch, dtype):
    skip_without(dtype)
    truth = full(any_model, batch)
    theirs = full(copy.deepcopy(any_model).to(dtype), batch)
    ours = full(optimize_for_inference(any_model, dtype, "onednn"), batch)
    assert type(ours) is type(theirs)
    for name in ("last_hidden_state", "pooler_output"):
        assert ours[name].dtype == dtype
        error, allowed, _ = as_well(ours[name], theirs[name], truth[name])
        assert error <= allowed, name


@onednn
def test_int8_is_near(any_model, batch):
    skip_without(torch.int8)
    truth = full(any_model, batch).last_hidden_state
    ours = full(optimize_for_inference(any_model, torch.int8, "onednn"), batch).last_hidden_state
    assert ours.dtype == torch.float32
    cosine = torch.cosine_similarity(ours.double(), truth, dim=-1)
    assert cosine.min() > 0.99
    assert (ours - truth).abs().max() > 1e-4  # it did round


@onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_no_matrix_is_held_twice(dtype):
    skip_without(dtype)
    model = BertModel(replace(BertConfig(**SIZES), hidden_size=128, intermediate_size=192))
    quick = optimize_for_inference(model, dtype, "onednn")
    matrices = sum(p.numel() for n, p in model.named_parameters() if "Linear" in type(owner(model, n)).__name__)
    theirs = {x.data_ptr() for x in model.parameters()}
    linears = [part for part in quick.modules() if isinstance(part, FixedLinear)]
    assert not any(isinstance(part, nn.Linear) for part in quick.modules())
    assert not theirs & {x.data_ptr() for x in quick.parameters()}
    assert sum(p.weight.numel() + p.bias.numel() for p in linears) == matrices
    held = sum(torch.ops.mkldnn._nbytes(p.weight) for p in linears)
    kinds = {torch.float32: 4, torch.bfloat16: 2, torch.int8: 1}
    pooler = 128 * 128 * (3 if dtype == torch.int8 else 0)  # stays in float32
    assert held <= 1.1 * (kinds[dtype] * matrices + pooler)
    del model
    gc.collect()
    names = [name for name, _ in quick.named_parameters()]
    assert all("embeddings" in name or "LayerNorm" in name for name in names), names


def owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


@onednn
def test_a_torch_whose_matmuls_take_unsigned_integers_alone_is_refused(model, monkeypatch):
    """As 2.6 is: before the first run, and for int8 alone."""

    def refuse(*_: Any) -> Any:
        raise RuntimeError("qlinear with mkldnn tensor: data type of input should be uint8 (unsigned char).")

    monkeypatch.setattr("bertlite.inference.linear.Int8Linear.matmul", refuse)
    with pytest.raises(
        RuntimeError, match=r"has no .*matmul of signed 8-bit integers, which backend 'onednn' needs for"
    ):
        optimize_for_inference(model.float(), torch.int8, "onednn")
    optimize_for_inference(model.float(), torch.float32, "onednn")


@onednn
@pytest.mark.parametrize("slowness", [1.0, 500.0])
def test_auto_takes_no_8_bit_matmuls_that_torch_has_no_kernel_for(slowness, monkeypatch):
    skip_without(torch.int8)
    conversion.warn_once.cache_clear()
    monkeypatch.setattr(optimize, "slowness_of_int8", lambda: slowness)
    with (
        nullcontext() if slowness == 1 else pytest.warns(RuntimeWarning, match="faster than backend 'onednn' on this")
    ):
        quick = optimize_for_inference(BertModel(BertConfig(**SIZES, hidden_act="mish")), torch.int8)
    wanted = ("onednn", torch.int8) if slowness == 1 else ("plain", torch.float32)
    assert (quick.backend, quick.compute_dtype) == wanted
    with pytest.raises(TypeError, match="was made by optimize_for_inference, and its layers can only run"):
        bertlite.prune_heads(quick.model, {0: [0]})


def test_requests_that_cannot_be_met(model, monkeypatch):
    with pytest.raises(ValueError, match="backend 'fast' is unknown; have: auto, native, onednn"):
        optimize_for_inference(model, torch.float32, "fast")
    with pytest.raises(ValueError, match=r"dtype torch.float64 is not among torch.float32"):
        optimize_for_inference(model)
    with pytest.raises(ValueError, match="int8 is for the CPU and the model is on meta; use 'auto' and bfloat16"):
        optimize_for_inference(copy.deepcopy(model).to("meta"), torch.int8)
    with pytest.raises(ValueError, match="'onednn' is for the CPU and the model is on meta"):
        optimize_for_inference(copy.deepcopy(model).to("meta"), torch.float32, "onednn")
    with pytest.raises(TypeError, match=r"model is a torch.nn.modules.linear.Linear; load it with bertlite"):
        optimize_for_inference(nn.Linear(2, 2))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"torch .* has no reorder_linear_weight, .*another dtype"):
        optimize_for_inference(model, torch.float32, "onednn")


def test_a_wrapped_matrix_is_refused(model):
    class Adapter(nn.Linear):
        pass

    model.encoder.layer[1].output.dense = Adapter(37, 48)
    with pytest.raises(TypeError, match=r"encoder\.layer\.1\.output\.dense is a .*Adapter, not a plain nn\.Linear"):
        optimize_for_inference(model, torch.float32)


def test_the_room_offers_it_too():
    assert inference.optimize_for_inference is bertlite.optimize_for_inference
    assert inference.optimize_for_inference.__module__ == "bertlite.inference.optimize"
