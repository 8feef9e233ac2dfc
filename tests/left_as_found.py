"""Checks for tests of functions that borrow a model or a process: afterwards it is as they found it."""

import copy
import csv
import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
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


def state_of_process() -> dict[str, Any]:
    """Return what a program can see of its process that functions it calls could change."""
    loggers = {name: x for name, x in logging.root.manager.loggerDict.items() if isinstance(x, logging.Logger)}
    state: dict[str, Any] = {
        "torch's generator": torch.get_rng_state().tolist(),
        "numpy's generator": repr(np.random.get_state()),
        "Python's generator": random.getstate(),
        # torch's defaults, which change what a caller computes afterwards.
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "numpy's errors": np.geterr(),
        "numpy's print options": repr(np.get_printoptions()),
        # Python's own state: what a program printed, caught or loaded before must still work.
        "variables": dict(os.environ),
        "working directory": os.getcwd(),
        "warnings": (list(warnings.filters), warnings.formatwarning, warnings.showwarning),
        "logging": (logging.root.level, logging.root.handlers, logging.root.manager.disable),
        "loggers": {name: (x.level, x.disabled, x.propagate) for name, x in loggers.items()},
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "cells of csv": csv.field_size_limit(),
        "recursion": sys.getrecursionlimit(),
        "path": list(sys.path),
        "streams": (sys.stdout, sys.stderr, sys.stdin),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "locale": locale.setlocale(locale.LC_ALL),
    }

    # Libraries that are already imported; asking for any other would import it.
    if "matplotlib" in sys.modules:
        state["matplotlib"] = sys.modules["matplotlib"].get_backend()
    if "transformers" in sys.modules:
        theirs = sys.modules["transformers"].utils.logging
        state["transformers"] = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    if "accelerate.state" in sys.modules:
        home = sys.modules["accelerate.state"]
        kinds = [getattr(home, f"{name}State") for name in ("Partial", "Accelerator")]
        state["accelerate"] = [dict(each._shared_state) for each in kinds]
    return state


@contextmanager
def process_left_as_found() -> Iterator[None]:
    """Fail if the block changes the process; imports may add loggers and other entries."""
    before = state_of_process()
    yield
    after = state_of_process()
    after["loggers"] = {name: x for name, x in after["loggers"].items() if name in before["loggers"]}
    assert [name for name, value in before.items() if after[name] != value] == []
