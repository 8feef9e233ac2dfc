"""bertlite/inference/runtime.py: an optimised model runs, pickles and compiles, and refuses all else."""

import copy
import multiprocessing
import pickle
import subprocess
import sys
from functools import partial

import pytest
import torch
from compilers import require_cpp_compiler
from conftest import assert_same, make, make_batch
from optimised import PRUNED, full, onednn, skip_without
from torch._dynamo.testing import CompileCounter
from torch._inductor import config

from bertlite import optimize_for_inference, prune_heads, prune_neurons
from bertlite.inference import InferenceModel
from bertlite.inference.linear import FixedLinear
from bertlite.inference.runtime import LAUNCH_BOUND_TOKENS, cloned
from bertlite.parity.compare import as_well


@onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_it_pickles(model, batch, dtype):
    skip_without(dtype)
    quick = optimize_for_inference(model, dtype)
    again = pickle.loads(pickle.dumps(quick))
    assert_same(full(again, batch), full(quick, batch), atol=0)
    assert_same(full(copy.deepcopy(quick), batch), full(quick, batch), atol=0)


@pytest.mark.parametrize("return_dict", [True, False])
def test_what_a_cuda_graph_will_write_over_is_copied(model, batch, return_dict):
    out = full(model, batch, return_dict=return_dict)
    again = cloned(out)
    assert type(again) is type(out)
    assert_same(again, out, atol=0)
    assert again[0].data_ptr() != out[0].data_ptr()
    assert again[-1][0].data_ptr() != out[-1][0].data_ptr()


@onednn
def test_a_spawned_process_runs_it(model, batch, tmp_path):
    quick = optimize_for_inference(model, torch.float32)
    torch.save((quick, batch, full(quick, batch).last_hidden_state), tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "quick, batch, wanted = torch.load(sys.argv[1], weights_only=False)\n"
        "assert torch.allclose(quick(**batch).last_hidden_state, wanted, atol=1e-5)\n"
        "print(type(quick).__name__)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "model.pt"], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "InferenceModel"


@onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_a_forked_process_runs_it(model, batch, dtype):
    skip_without(dtype)
    quick = optimize_for_inference(model, dtype)
    wanted = full(quick, batch).last_hidden_state
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def work():
        there.send_bytes(full(quick, batch).last_hidden_state.numpy().tobytes())

    child = context.Process(target=work)
    child.start()
    assert here.poll(60), "the child hangs"
    assert here.recv_bytes() == wanted.numpy().tobytes()
    child.join()
    assert child.exitcode == 0


@onednn
def test_it_says_what_it_is(model):
    quick = optimize_for_inference(model.float(), backend="onednn")
    assert (quick.backend, quick.dtype, quick.device.type) == ("onednn", torch.float32, "cpu")
    assert quick.config == model.config
    assert not quick.training
    assert not any(part.training for part in quick.modules())
    assert "onednn" in repr(quick)
    assert quick.eval() is quick
    assert quick.requires_grad_(False) is quick


@onednn
def test_no_gradients(model, batch):
    assert not optimize_for_inference(model.float())(**batch).last_hidden_state.requires_grad


@onednn
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


@onednn
def test_one_graph_holds_so_many_tokens_and_no_more(model):
    quick = optimize_for_inference(model.float())
    ids = torch.ones(2, LAUNCH_BOUND_TOKENS // 2, dtype=torch.long)
    assert quick.is_launch_bound(ids)
    assert quick.is_launch_bound(inputs_embeds=torch.zeros(*ids.shape, 48))
    assert not quick.is_launch_bound(torch.ones(LAUNCH_BOUND_TOKENS + 1, 1, dtype=torch.long))
    assert not quick.is_launch_bound(ids, cu_seqlens=torch.tensor([0, 3]))
    quick.model.set_attn_implementation("packed")
    assert not quick.is_launch_bound(ids), "a packed model's shapes follow the lengths"


def test_a_test_that_compiles_is_skipped_where_no_compiler_is_found():
    nothing = config.patch({"cpp.cxx": (None, "no-such-compiler")})
    with nothing, pytest.raises(pytest.skip.Exception, match="this machine has none"):
        require_cpp_compiler()


@pytest.mark.slow
def test_inductor_compiles_it(batch):
    require_cpp_compiler()
    model = make(num_hidden_layers=2)
    quick = optimize_for_inference(model.float(), backend="inductor")
    got = full(quick, batch).last_hidden_state
    torch.testing.assert_close(got, full(model, batch).last_hidden_state, rtol=0, atol=1e-5)
    again = pickle.loads(pickle.dumps(quick))
    torch.testing.assert_close(full(again, batch).last_hidden_state, got, rtol=0, atol=1e-5)


def test_the_tenth_model_is_compiled_like_the_first(batch, monkeypatch):
    """torch gives up on code that it has compiled 8 times."""
    torch._dynamo.reset()
    model = make(num_hidden_layers=1)
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    for i in range(10):
        quick = optimize_for_inference(model.float(), backend="inductor")
        assert_same(full(quick, batch), full(model, batch), atol=1e-5)
        assert counter.frame_count > i


def test_on_a_gpu_every_part_is_compiled_however_many_differ(model, monkeypatch):
    """The CPU stands for the GPU, and torch's tracing for its compiler."""
    torch._dynamo.reset()
    counter = CompileCounter()
    tracing = torch.compile

    def traced(function, mode=None, dynamic=None):
        return tracing(function, backend=counter, dynamic=dynamic)

    model = prune_neurons(prune_heads(model.float(), PRUNED), {0: range(5), 1: range(3), 2: range(7)})
    monkeypatch.setattr(torch, "compile", traced)
    monkeypatch.setattr(InferenceModel, "device", torch.device("cuda"))
    quick = optimize_for_inference(model, backend="inductor")
    many = make_batch(90)
    assert not quick.is_launch_bound(**many)
    assert_same(full(quick, many), full(model, many), atol=1e-5)
    linears = {(type(part), part.weight.shape) for part in quick.modules() if isinstance(part, FixedLinear)}
    assert counter.frame_count >= len(linears) > 8
    before, few = counter.frame_count, make_batch(2)
    assert quick.is_launch_bound(**few)
    assert_same(full(quick, few), full(model, few), atol=1e-5)
    assert counter.frame_count > before, "a small batch is no graph"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_runs_small_batches_as_graphs_and_others_without(model, dtype):
    quick = optimize_for_inference(copy.deepcopy(model).cuda(), dtype)
    for size in (2, 90):
        batch = {name: x.cuda() for name, x in make_batch(size).items()}
        truth, theirs = full(copy.deepcopy(model).cuda(), batch), full(copy.deepcopy(model).cuda().to(dtype), batch)
        for _ in range(3):  # the second call records a graph, the third plays it
            ours = full(quick, batch)
        error, allowed, _ = as_well(
            ours.last_hidden_state.cpu(), theirs.last_hidden_state.cpu(), truth.last_hidden_state.cpu()
        )
        assert error <= allowed
