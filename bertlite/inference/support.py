"""Checks before a model is optimised: what this torch can compute, and what the model is made of."""

import warnings

import torch
from torch import nn

from bertlite import torch_private
from bertlite.inference.linear import Int8Linear

OPERATORS = ("reorder_linear_weight", "linear_pointwise", "packed_address", "packed_size")  # of torch_private
INT8_OPERATORS = ("qlinear_prepack", "qlinear_pointwise")
DTYPE_CHECKS = {torch.bfloat16: "bfloat16_is_supported", torch.float16: "float16_is_supported"}


def require_onednn(dtype: torch.dtype) -> None:
    """Raise RuntimeError unless this torch has the operators that backend 'onednn' needs for a dtype."""
    missing = missing_for_onednn(dtype)
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which backend 'onednn' needs for {dtype}; use"
            " backend='inductor', another dtype, or a newer torch, built with oneDNN as those of PyPI for x86-64 are"
        )


def missing_for_onednn(dtype: torch.dtype) -> list[str]:
    """Return what this torch lacks for a dtype: operators, or else the dtype itself."""
    needed = (*OPERATORS, *INT8_OPERATORS) if dtype == torch.int8 else OPERATORS
    available = torch.backends.mkldnn.is_available()
    missing = [name for name in needed if not available or getattr(torch_private, name) is None]
    if missing:
        return missing
    if dtype in DTYPE_CHECKS and not getattr(torch_private, DTYPE_CHECKS[dtype])():
        return [f"{dtype} on this processor"]
    if dtype == torch.int8 and not has_signed_matmul():
        return ["matmul of signed 8-bit integers"]
    return []


def has_signed_matmul() -> bool:
    """Return whether oneDNN multiplies signed 8-bit integers; torch 2.6 lets it take unsigned ones alone."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch 2.13 announces once that quantize_per_tensor will go
            Int8Linear(torch.ones(1, 1), None)(torch.ones(1, 1))
    except RuntimeError:
        return False
    return True


def refuse_wrapped(model: nn.Module) -> None:
    """Raise TypeError if a matrix of the model is not a plain nn.Linear, and name it."""
    for name, part in model.named_modules():
        wrapped = isinstance(part, nn.Linear) and type(part) is not nn.Linear
        if wrapped or (name.endswith((".dense", ".query", ".key", ".value")) and not isinstance(part, nn.Linear)):
            raise TypeError(
                f"{name} is a {type(part).__module__}.{type(part).__qualname__}, not a plain nn.Linear: merge adapters"
                " first, and start from the model that is not quantised"
            )
