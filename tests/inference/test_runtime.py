"""bertlite/inference/runtime.py: an optimised model runs, pickles and compiles, and refuses all else."""

import copy
import multiprocessing
import pickle
import subprocess
import sys

import pytest
import torch
from conftest import assert_same
from optimised import full, onednn, skip_without

from bertlite import optimize_for_inference


@onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_it_pickles(model, batch, dtype):
    skip_without(dtype)
    quick = optimize_for_inference(model, dtype)
    again = pickle.loads(pickle.dumps(quick))
    assert_same(full(again, batch), full(quick, batch), atol=0)
    assert_same(full(copy.deepcopy(quick), batch), full(quick, batch), atol=0)


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
