"""Checks before a model is optimised: what this torch can compute, and what the model is made of."""

import warnings

import torch
from torch import nn

from bertlite.inference.linear import Int8Linear

OPERATORS = (
    "mkldnn::_reorder_linear_weight",
    "mkldnn::_linear_pointwise",
    "mkldnn::data_ptr",
    "mkldnn::_nbytes",
)
INT8_OPERATORS = (
    "onednn::qlinear_prepack",
    "onednn::qlinear_pointwise",
    "aten::quantize_per_tensor",
)
DTYPE_CHECKS = {  # the operators that say whether this processor has a dtype
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


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
    schemas = torch._C._jit_get_all_schemas() if torch.backends.mkldnn.is_available() else []
    names = {schema.name for schema in schemas}
    missing = [name for name in needed if name not in names]
    if missing:
        return missing
    if dtype in DTYPE_CHECKS and not getattr(torch.ops.mkldnn, DTYPE_CHECKS[dtype])():
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
