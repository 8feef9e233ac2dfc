"""The time of pruned models beside the dense model's."""

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from bertlite import optimize_for_inference
from bertlite.bench.work import full
from bertlite.importance import macs
from bertlite.inference.optimize import BACKENDS, check_backend
from bertlite.records import quartiles
from bertlite.timing import alternate, ratios

PLAIN = "plain"  # instead of a backend: the model itself


def prepared_models(
    models: Mapping[str, Any], dtype: torch.dtype | None = None, backend: str = "auto"
) -> dict[str, Any]:
    """Return the models to measure: all in one dtype, and optimised with one backend.

    Args:
        dtype: of `optimize_for_inference`; None is the models' own.
        backend: of `optimize_for_inference`, or "plain", which does not optimise.  The choice of "auto" for the
            first model is the backend of all.

    Raises:
        ValueError: there is no such backend, or it does not run these models in this dtype.
        RuntimeError: this torch lacks its operators, or its kernels cannot be compiled.
    """
    check_backend(backend, (PLAIN, *BACKENDS))
    prepared = {}
    for name, model in models.items():
        prepared[name] = prepare(model, dtype, backend)
        backend = backend if backend == PLAIN else prepared[name].backend
    return prepared


def prepare(model: Any, dtype: torch.dtype | None, backend: str) -> Any:
    """Return one model to measure."""
    if backend != PLAIN:
        return optimize_for_inference(model, dtype, backend)
    if dtype == torch.int8:
        raise ValueError("backend 'plain' has no int8, which needs the native kernels: use 'auto', or another dtype")
    return model if dtype in (None, model.dtype) else copy.deepcopy(model).to(dtype)


def latency(
    models: Mapping[str, Any],
    shapes: Iterable[tuple[int, int]],
    rounds: int = 21,
    device: str = "cpu",
    after_round: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Time each model beside the first, the dense one.

    Args:
        shapes: (sequences, tokens) of the inputs.
        after_round: called after each timed round.

    Returns:
        One line for each shape and model: "batch", "length", "model", "seconds" (quartiles), "speedup", the median
        over rounds of the dense model's seconds over this one's, with its quartiles, and "macs", the share of the
        dense encoder's multiply-accumulates.

    Raises:
        ValueError: fewer rounds than `bertlite.timing.FEWEST`.
    """
    dense = next(iter(models))
    lines = []
    for batch, length in shapes:
        inputs = full(batch, length).inputs(models[dense].config.vocab_size, device)
        with torch.inference_mode():
            found = alternate(
                {name: partial(model, **inputs) for name, model in models.items()},
                rounds,
                device,
                after_round=after_round,
            )
        for name, seconds in found.items():
            share = macs(models[name].config, length) / macs(models[dense].config, length)
            lines.append(
                {
                    "batch": batch,
                    "length": length,
                    "model": name,
                    "seconds": quartiles(seconds),
                    "speedup": quartiles(ratios(found, dense, name)),
                    "macs": share,
                }
            )
    return lines
