"""A checkpointed model computes twice and learns the same."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import F64, SIZES, assert_same, count_runs, gradients, make, make_batch
from torch import Tensor

from bertlite import prune_heads
from bertlite.pruning import prune_heads_

L = 3
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ON = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}


def loss_of(model: Any, **inputs: Any) -> tuple[Tensor, Any]:
    """A loss that every parameter and every output has a part in."""
    torch.manual_seed(11)  # the same dropout each time
    out = model(**{**make_batch(), **inputs})
    loss = out.last_hidden_state.square().mean() + out.pooler_output.mean()
    for weights in out.attentions or ():
        loss = loss + weights.square().mean()
    return loss, out


def both(model: Any, **inputs: Any) -> tuple[Any, Any, list[int]]:
    """Outputs and gradients of the plain and of the checkpointed model, and how often the latter's layers ran."""
    plain = copy.deepcopy(model)
    plain.gradient_checkpointing_disable()
    assert model.is_gradient_checkpointing
    results = []
    runs = count_runs(model)
    for each in (plain, model):
        loss, out = loss_of(each, **inputs)
        results.append({"out": dict(out.items()), "grads": gradients(each, loss)})
    return results[0], results[1], [runs[i] for i in range(L)]


def scores() -> Tensor:
    """A mask of numbers to add, with a query that may attend to nothing."""
    mask = torch.zeros(2, 1, 11, 11, dtype=F64)
    mask[0, :, :, 8:] = -torch.inf
    mask[1, :, 2] = -torch.inf
    return mask


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # fields, how to checkpoint, and inputs
    "eager": ({"attn_implementation": "eager"}, {}, {}),
    "sdpa": ({"attn_implementation": "sdpa"}, {}, {}),
    "packed": ({"attn_implementation": "packed"}, {}, {}),
    "first token": ({"attn_implementation": "sdpa"}, {"offload": True}, {"first_token_only": True}),
    "first token, packed": ({"attn_implementation": "packed"}, {"offload": True}, {"first_token_only": True}),
    "offloaded": ({}, {"offload": True}, {}),
    "relative": ({"position_embedding_type": "relative_key_query"}, {}, {}),
    "bucketed": ({"position_embedding_type": "bucketed"}, {}, {}),
    "disentangled": ({"position_embedding_type": "disentangled"}, {}, {}),
    "chunked": ({"chunk_size_feed_forward": 4}, {}, {}),
    "prelu": ({"hidden_act": "prelu"}, {}, {}),
    "pruned": ({"pruned_heads": {0: [1], 1: [0, 1, 2, 3]}}, {}, {}),
    "attentions": ({}, {}, {"output_attentions": True, "output_hidden_states": True}),
    "scores": ({}, {}, {"attention_mask": scores()}),
    "cross-attention": (
        {"is_decoder": True, "add_cross_attention": True},
        {},
        {"encoder_hidden_states": torch.ones(2, 8, 48, dtype=F64).cumsum(1), "use_cache": False},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_checkpointed_gradients_are_plain_ones_bit_for_bit(case, kernels_run):
    changes, options, inputs = CASES[case]
    model = make(**ON, **changes).train()
    model.gradient_checkpointing_enable(**options)
    plain, checkpointed, runs = both(model, **inputs)
    assert_same(checkpointed, plain, atol=0)
    assert runs == [2] * L
    assert set(kernels_run) == {"eager" if case == "attentions" else changes.get("attn_implementation", "sdpa")}
    unused = {"embeddings.position_embeddings.weight"} if case == "relative" else set()
    assert plain["grads"].keys() == dict(model.named_parameters()).keys() - unused


def test_a_gate_learns_through_a_checkpoint(model):
    slopes = []
    for enable in (False, True):
        gate = torch.full((L, 4), 0.5, dtype=F64, requires_grad=True)
        if enable:
            model.gradient_checkpointing_enable()
        loss, _ = loss_of(model, head_mask=gate)
        slopes.append(torch.autograd.grad(loss, gate)[0])
    assert_same(*slopes, atol=0)
    assert (slopes[0] != 0).all()


@pytest.mark.parametrize(
    ("frozen", "wanted"), [("", [2, 2, 2]), ("encoder.layer.0", [1, 2, 2]), ("encoder", [1, 1, 1])]
)
def test_frozen_embeddings_leave_the_rest_to_learn(frozen, wanted):
    """Where re-entrant checkpointing loses every gradient: the input of the first layer needs none."""
    model = make(**OFF).train()
    model.gradient_checkpointing_enable()
    for name in ("embeddings", *[frozen] * bool(frozen)):
        model.get_submodule(name).requires_grad_(False)
    plain, checkpointed, runs = both(model)
    assert_same(checkpointed, plain, atol=0)
    assert set(checkpointed["grads"]) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert runs == wanted


def test_it_acts_in_eval_mode_and_not_without_gradients(model):
    model.gradient_checkpointing_enable()
    assert not model.training
    plain, checkpointed, runs = both(model)
    assert_same(checkpointed, plain, atol=0)
    assert runs == [2] * L
    again = count_runs(model)
    with torch.no_grad():
        model(**make_batch())
    with torch.inference_mode():
        model(**make_batch())
    assert [again[i] for i in range(L)] == [2] * L  # two forwards


@pytest.mark.parametrize(("n", "wanted"), [(1, [2, 2, 2]), (2, [2, 1, 2]), (3, [2, 1, 1]), (9, [2, 1, 1])])
def test_every_n_layers(n, wanted, model):
    model.gradient_checkpointing_enable(every_n_layers=2)  # the last call counts
    model.gradient_checkpointing_enable(every_n_layers=n)
    runs = count_runs(model)
    gradients(model, loss_of(model)[0])
    assert [runs[i] for i in range(L)] == wanted
    assert model.is_gradient_checkpointing
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    gradients(model, loss_of(model)[0])
    assert [runs[i] - 1 for i in range(L)] == wanted


def test_hooks_on_a_layer_run_once(model):
    """It is what lies within a layer that runs twice."""
    model.gradient_checkpointing_enable()
    ran: list[str] = []
    layer = model.encoder.layer[1]
    layer.register_forward_pre_hook(lambda m, args: ran.append("before"))
    layer.register_forward_hook(lambda m, args, out: ran.append("after"))
    model.encoder.register_forward_hook(lambda m, args, out: ran.append("encoder"))
    loss, _ = loss_of(model)
    assert ran == ["before", "after", "encoder"]
    gradients(model, loss)
    assert ran == ["before", "after", "encoder"]


@pytest.mark.parametrize("offload", [False, True])
def test_offload_moves_the_inputs_of_the_layers_to_host_memory(offload, model, monkeypatch):
    moved: list[tuple[int, ...]] = []

    class Recording(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool = False) -> None:
            assert pin_memory == torch.cuda.is_available()

            def pack(x: Tensor) -> Tensor:
                moved.append(tuple(x.shape))
                return x

            super().__init__(pack, lambda x: x)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Recording)
    model.gradient_checkpointing_enable(offload=offload, every_n_layers=2)
    plain, checkpointed, runs = both(model)
    assert_same(checkpointed, plain, atol=0)
    assert runs == [2, 1, 2]
    assert [shape for shape in moved if shape == (2, 11, 48)] == ([(2, 11, 48)] * 2 if offload else [])
    assert not [shape for shape in moved if shape[-1:] == (SIZES["intermediate_size"],)]


def test_options_of_torch_are_passed_on(model):
    default = {"use_reentrant": False, "preserve_rng_state": True, "determinism_check": "default"}
    other = {"preserve_rng_state": False, "determinism_check": "none"}
    run = torch.utils.checkpoint.checkpoint
    for given, wanted in ((other, {**default, **other}), ({"use_reentrant": False}, default)):  # as trainers say it
        model.gradient_checkpointing_enable(given)
        with mock.patch.object(torch.utils.checkpoint, "checkpoint", wraps=run) as called:
            model(**make_batch())
        assert [each.kwargs for each in called.call_args_list] == [wanted] * L


def test_what_cannot_be_is_refused(model):
    with pytest.raises(ValueError, match="use_reentrant=True loses gradients when the embeddings are frozen"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    for n in (0, -1):
        with pytest.raises(ValueError, match=f"every_n_layers is {n}; it must be 1"):
            model.gradient_checkpointing_enable(every_n_layers=n)
    with pytest.raises(TypeError, match="context"):
        model.gradient_checkpointing_enable({"context": 1})
    with pytest.raises(TypeError, match="positional"):
        model.gradient_checkpointing_enable(None, 2)  # type: ignore[misc]
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("prune", [prune_heads, prune_heads_])
def test_a_model_pruned_while_checkpointing_still_does(prune):
    model = make(**ON).train()
    model.gradient_checkpointing_enable(every_n_layers=2)
    pruned = prune(model, {0: [1, 3], 2: [0, 1, 2, 3]})
    plain, checkpointed, runs = both(pruned)
    assert_same(checkpointed, plain, atol=0)
    assert runs == [2, 1, 2]
