"""bertlite/inference/runtime.py: an optimised model runs and pickles, and refuses all else."""

import copy
import pickle

import pytest
import torch
from conftest import assert_same
from natively import kernels_or_skip, make_native

from bertlite import optimize_for_inference, prune_heads
from bertlite.inference import InferenceModel

BOTH = pytest.mark.parametrize("backend", ["native", "plain"])


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
