"""A check for tests of functions that borrow a model: afterwards it is as they found it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from conftest import assert_same
from torch import nn


def worn(model: Any) -> Any:
    """Return the model, with some modules in training mode, some weights frozen, and gradients of some."""
    model.base_model.encoder.layer[1].train()
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 3 > 0)
        if i % 2:
            parameter.grad = torch.full_like(parameter, 0.5)
    return model


def state_of(model: nn.Module) -> dict[str, Any]:
    modules = [*model.modules()]
    return {
        "modes": [module.training for module in modules],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules],
        "forwards": ["forward" in vars(module) for module in modules],
        "trained": [p.requires_grad for p in model.parameters()],
        "parameters": [id(p) for p in model.parameters()],
    }


def tensors_of(model: nn.Module) -> dict[str, Any]:
    grads = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return copy.deepcopy({**model.state_dict(), **grads})


@contextmanager
def left_as_found(*models: nn.Module) -> Iterator[None]:
    """Fail if the block changes the weights, gradients, modes or hooks of a model, or the random state."""
    before = [(state_of(model), tensors_of(model)) for model in models]
    random, grad = torch.get_rng_state(), torch.is_grad_enabled()
    yield
    assert torch.is_grad_enabled() == grad
    assert torch.equal(torch.get_rng_state(), random)
    for model, (state, tensors) in zip(models, before, strict=True):
        assert state_of(model) == state
        assert_same(tensors_of(model), tensors, atol=0)
