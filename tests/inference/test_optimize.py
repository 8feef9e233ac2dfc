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
from bertlite.runtime.library import NativeKernelsError


@pytest.fixture
def no_kernels(monkeypatch):
    """Let this machine have no compiler, and let nothing have been said yet."""

    def fail(**_):
        raise NativeKernelsError("no C++ compiler was found: install one, such as with `apt-get install g++`")

    monkeypatch.setattr(choice, "load_kernels", fail)
    choice.warn_once.cache_clear()
    yield
    choice.warn_once.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_kernels_auto_is_a_plain_copy_and_says_once_what_to_install(dtype, no_kernels):
    model, batch = make().float().train(), make_batch()
    with pytest.warns(
        RuntimeWarning, match="plain model, without the native kernels: no .* install one, such as with `apt"
    ):
        quick = optimize_for_inference(model, dtype=dtype)
    assert type(quick) is InferenceModel
    assert (quick.backend, quick.compute_dtype, quick.dtype) == ("plain", dtype, dtype)
    assert not any(part.training for part in quick.modules())
    assert not any(parameter.requires_grad for parameter in quick.parameters())
    assert not {x.data_ptr() for x in quick.parameters()} & {x.data_ptr() for x in model.parameters()}
    out = quick(**batch).last_hidden_state
    assert not out.requires_grad
    assert torch.equal(out, copy.deepcopy(model).eval().to(dtype)(**batch).last_hidden_state)
    assert model.training
    with warnings.catch_warnings(action="error"):
        optimize_for_inference(model, dtype=dtype)
    with pytest.raises(NativeKernelsError, match="no C"):
        optimize_for_inference(model, dtype=dtype, backend="native")
    with pytest.raises(NativeKernelsError, match="no C"):
        optimize_for_inference(model, dtype=torch.int8)


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
    with pytest.raises(ValueError, match="int8 is for the CPU and the model is on meta; use bfloat16 or float16"):
        optimize_for_inference(elsewhere, dtype=torch.int8)
    with pytest.raises(ValueError, match="int8 is for the CPU and the model is on meta; use bfloat16 or float16"):
        optimize_for_inference(elsewhere, dtype="int8")
    with pytest.raises(ValueError, match="they are for the CPU, and the model is on meta"):
        optimize_for_inference(elsewhere, dtype=torch.float32, backend="native")
    with pytest.raises(TypeError, match="no encoder to optimise in a torch"):
        optimize_for_inference(nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float64], ids=str)
def test_plain_is_a_copy_in_any_float_dtype_with_whatever_was_put_into_it(dtype):
    model, batch = make().float().train(), make_batch()
    model.encoder.layer[1].output = nn.Identity()
    model.encoder.layer[1].output.forward = lambda x, residual: residual + 1
    with warnings.catch_warnings(action="error"):
        quick = optimize_for_inference(model, dtype=dtype, backend="plain")
    assert (quick.backend, quick.compute_dtype, quick.dtype) == ("plain", *(dtype or torch.float32,) * 2)
    assert_same(quick(**batch), copy.deepcopy(model).eval().to(quick.dtype)(**batch), atol=0)
    assert model.dtype == torch.float32


def test_a_wrapped_matrix_is_refused(model):
    class Adapter(nn.Linear):
        pass

    model.encoder.layer[1].output.dense = Adapter(37, 48)
    with pytest.raises(TypeError, match=r"encoder\.layer\.1\.output\.dense is a .*Adapter, not a plain nn\.Linear"):
        optimize_for_inference(model, dtype=torch.float32)


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
