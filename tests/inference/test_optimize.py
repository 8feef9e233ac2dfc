"""bertlite/inference/optimize.py and runtime.py: what is taken, what a plain copy is, and what is refused."""

import copy
import warnings

import pytest
import torch
from conftest import SIZES, assert_same, full_outputs, make, make_batch
from natively import kernels_or_skip, make_native
from torch import nn

import bertlite
from bertlite import optimize_for_inference
from bertlite.inference import InferenceModel
from bertlite.inference.native import choice


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"is_decoder": True}, "this model is a decoder"), ({"hidden_act": "mish"}, "no activation 'mish'; have")],
)
def test_a_model_that_the_kernels_cannot_run_is_left_as_it_is(changes, reason):
    choice.warn_once.cache_clear()
    model = make(**changes).float()
    with pytest.raises(ValueError, match=rf"native kernels cannot run this model: .*{reason}.*use 'auto' in float32"):
        optimize_for_inference(model, backend="native")
    with pytest.raises(ValueError, match=reason):
        optimize_for_inference(model, dtype=torch.int8)
    with pytest.warns(RuntimeWarning, match=reason) as found:
        quick = optimize_for_inference(model)
    assert quick.backend == "plain"
    assert found[0].filename == __file__, "it names the caller's line"
    options = {"use_cache": False} if model.config.is_decoder else {}
    assert_same(*(full_outputs(each, make_batch(), **options) for each in (quick, model)), atol=0)
    with pytest.raises(TypeError, match="was made by optimize_for_inference, and its layers can only run"):
        bertlite.prune_heads(quick.model, {0: [0]})


def test_requests_that_cannot_be_met(model):
    elsewhere = copy.deepcopy(model).to("meta")
    for dtype, backend, message in (
        (torch.int8, "auto", "int8 is for the CPU and the model is on meta; use bfloat16 or float16"),
        ("int8", "auto", "int8 is for the CPU and the model is on meta; use bfloat16 or float16"),
        (torch.float32, "native", "they are for the CPU, and the model is on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            optimize_for_inference(elsewhere, dtype=dtype, backend=backend)
    for dtype, backend, message in (
        (torch.float32, "fast", "backend 'fast' is unknown; have: auto, native, graphs, plain"),
        (None, "auto", r"dtype torch.float64 is not among torch.float32"),
        (torch.float16, "auto", "float16 is for GPUs and the model is on the CPU; use dtype=torch.bfloat16 or"),
        (torch.float16, "native", "float16 is for GPUs"),
        (torch.int8, "plain", "backend 'plain' has no int8, which needs the native kernels: use 'auto'"),
        ("int8", "plain", "backend 'plain' has no int8, which needs the native kernels"),
        ("int8", "graphs", "backend 'graphs' has no int8"),
        ("int4", "auto", "dtype is 'int4'; have: float64, float32, bfloat16, float16, int8"),
        (["int8"], "auto", r"dtype is \['int8'\]; have: float64"),
    ):
        with pytest.raises(ValueError, match=message):
            optimize_for_inference(model, dtype=dtype, backend=backend)
    with pytest.raises(TypeError, match="no encoder to optimise in a torch"):
        optimize_for_inference(nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float64], ids=str)
def test_plain_is_a_copy_in_any_float_dtype_with_whatever_was_put_into_it(dtype):
    model, batch = make().float().train(), make_batch()
    model.encoder.layer[1].output = nn.Identity()
    model.encoder.layer[1].output.forward = lambda x, residual: residual + 1
    with warnings.catch_warnings(action="error"):
        quick = optimize_for_inference(model, dtype=dtype, backend="plain")
    assert type(quick) is InferenceModel
    assert (quick.backend, quick.compute_dtype, quick.dtype) == ("plain", *(dtype or torch.float32,) * 2)
    assert not any(part.training for part in quick.modules())
    assert not any(parameter.requires_grad for parameter in quick.parameters())
    assert not {x.data_ptr() for x in quick.parameters()} & {x.data_ptr() for x in model.parameters()}
    out = quick(**batch)
    assert not out.last_hidden_state.requires_grad
    assert_same(out, copy.deepcopy(model).eval().to(quick.dtype)(**batch), atol=0)
    assert (model.dtype, model.training) == (torch.float32, True)


def test_a_head_without_outputs_is_converted():
    model = make(bertlite.BertForSequenceClassification, num_labels=1).float()
    model.classifier = nn.Linear(48, 0)
    assert optimize_for_inference(model, verify=False)(**make_batch()).logits.shape == (2, 0)


@pytest.mark.parametrize(
    "ask",
    [
        lambda quick: quick.train(),
        lambda quick: quick.requires_grad_(),
        lambda quick: quick.state_dict(),
        lambda quick: quick.load_state_dict({}),
        lambda quick: quick.save_pretrained("folder"),
        lambda quick: quick.to(torch.float16),
        lambda quick: quick.half(),
        lambda quick: quick.to("meta"),
    ],
)
def test_all_else_is_refused(model, ask):
    with pytest.raises(RuntimeError, match="an optimised model has no"):
        ask(optimize_for_inference(model.float()))


def test_a_subclass_that_returns_a_tensor_runs_and_is_compared():
    class States(bertlite.BertModel):
        def forward(self, *args, **options):
            return super().forward(*args, **options).last_hidden_state

    model, batch = make(States).float(), make_batch()
    quick = optimize_for_inference(model, backend="plain")
    assert torch.equal(quick(**batch), model(**batch))
    kernels_or_skip()
    native = optimize_for_inference(make_native(States).float(), dtype=torch.float32, backend="native")
    assert native(**batch).shape == (*batch["input_ids"].shape, 80)


def test_a_class_of_its_own_inside_another_is_named():
    transformers = pytest.importorskip("transformers")
    model = type("Mine", (transformers.BertModel,), {"__module__": "elsewhere"})(
        transformers.BertConfig(**{**SIZES, "vocab_size": 61})
    ).eval()
    with pytest.raises(TypeError, match=r"Mine, a class of its own, whose code would not be run: give a BertModel"):
        optimize_for_inference(model)
