"""bertlite/inference/runtime.py: an optimised model runs and pickles, and refuses all else."""

import copy
import multiprocessing
import pickle
import subprocess
import sys

import pytest
import torch
from conftest import assert_same
from natively import kernels_or_skip, make_native

from bertlite import optimize_for_inference, prune_heads
from bertlite.inference import InferenceModel

BOTH = pytest.mark.parametrize("backend", ["native", "plain"])
OUTPUT = "last_hidden_state"


def quickened(backend: str) -> InferenceModel:
    """Return a small model in float32, as a backend runs it."""
    if backend == "native":
        kernels_or_skip()
    return optimize_for_inference(prune_heads(make_native().float(), {0: range(5), 1: [2]}), backend=backend)


@BOTH
def test_it_pickles_and_copies(backend, batch):
    quick = quickened(backend)
    again = pickle.loads(pickle.dumps(quick))
    assert again.backend == backend
    assert_same(again(**batch), quick(**batch), atol=0)
    assert_same(copy.deepcopy(quick)(**batch), quick(**batch), atol=0)


def test_a_spawned_process_runs_it(batch, tmp_path):
    quick = quickened("native")
    torch.save((quick, batch, quick(**batch)[OUTPUT]), tmp_path / "model.pt")
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


@BOTH
def test_a_forked_process_runs_it(backend, batch):
    quick = quickened(backend)
    wanted = quick(**batch)[OUTPUT]
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def work():
        there.send_bytes(quick(**batch)[OUTPUT].numpy().tobytes())

    child = context.Process(target=work)
    child.start()
    assert here.poll(60), "the child hangs"
    assert here.recv_bytes() == wanted.numpy().tobytes()
    child.join()
    assert child.exitcode == 0


@BOTH
def test_it_says_what_it_is(backend):
    quick = quickened(backend)
    assert (quick.backend, quick.dtype, quick.device.type) == (backend, torch.float32, "cpu")
    assert quick.config == quick.model.config
    assert not quick.training
    assert not any(part.training for part in quick.modules())
    assert backend in repr(quick)
    assert quick.eval() is quick
    assert quick.requires_grad_(False) is quick


def test_a_plain_copy_has_no_packed_weights_to_save(tmp_path):
    with pytest.raises(RuntimeError, match=r"backend 'plain' has no packed weights, .* save the model itself"):
        quickened("plain").save(tmp_path / "other")
    assert not any(tmp_path.iterdir())


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
