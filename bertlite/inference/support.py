"""Checks before a model is optimised: the operators of this torch, and the modules of the model."""

import time
import warnings
from functools import cache
from operator import attrgetter

import torch
from torch import nn

from bertlite import torch_private
from bertlite.inference.linear import Int8Linear, PackedLinear
from bertlite.model import BertPreTrainedModel
from bertlite.stack.body import has_hooks
from bertlite.stack.modules import (
    BertAttention,
    BertIntermediate,
    BertLayer,
    BertOutput,
    BertSelfAttention,
    BertSelfOutput,
)

OPERATORS = ("reorder_linear_weight", "linear_pointwise", "packed_address", "packed_size")  # of torch_private
INT8_OPERATORS = ("qlinear_prepack", "qlinear_pointwise")
DTYPE_CHECKS = {torch.bfloat16: "bfloat16_is_supported", torch.float16: "float16_is_supported"}
SLOW = 20  # times as long as float32 that an 8-bit matmul may take
DROPOUT = (nn.Dropout, nn.Identity)
ATTENTION_PARTS: dict[str, tuple[type[nn.Module], ...]] = {
    "": (BertAttention,),
    ".self": (BertSelfAttention,),
    ".self.dropout": DROPOUT,
    ".output": (BertSelfOutput,),
    ".output.dropout": DROPOUT,
}
LAYER_PARTS: dict[str, tuple[type[nn.Module], ...]] = {  # the classes of a layer's modules; linear ones have no choice
    "": (BertLayer,),
    **{
        f"{attention}{name}": kinds
        for attention in ("attention", "crossattention")
        for name, kinds in ATTENTION_PARTS.items()
    },
    "intermediate": (BertIntermediate,),
    "output": (BertOutput,),
    "output.dropout": DROPOUT,
}


def require_onednn(dtype: torch.dtype) -> None:
    """Raise RuntimeError unless this torch has the operators that backend 'onednn' needs for a dtype."""
    missing = missing_for_onednn(dtype)
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which backend 'onednn' needs for {dtype}; use"
            " another dtype, or a newer torch, built with oneDNN as those of PyPI for x86-64 are"
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
    """Return whether oneDNN multiplies signed 8-bit integers; in torch 2.6 it takes only unsigned ones."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch 2.13 announces once that quantize_per_tensor will go
            Int8Linear(torch.ones(1, 1), None)(torch.ones(1, 1))
    except RuntimeError:
        return False
    return True


@cache
def slowness_of_int8() -> float:
    """Return the time of a small 8-bit matmul over that in float32, which is far above 1 if torch has no kernel."""
    x, weight = torch.ones(2, 128, 128)
    seconds = []
    for linear in (Int8Linear(weight, None), PackedLinear(weight, None)):
        linear(x)  # compiles the kernel
        start = time.perf_counter()
        linear(x)
        seconds.append(time.perf_counter() - start)
    return seconds[0] / seconds[1]


def check_unaltered(model: BertPreTrainedModel) -> None:
    """Raise TypeError if a conversion would not reproduce a module of the model, and name the module.

    Linear layers, and the modules of a layer of BERT, must have exactly their classes, without hooks or methods of
    their own.  LayerNorm and activations may be anything: backends that replace them check them.
    """
    body = model.base_model
    prefix = "encoder" if body is model else f"{model.base_model_prefix}.encoder"
    check_kind(f"{prefix}.layer", body.encoder.layer, (nn.ModuleList,))
    for i, layer in enumerate(body.encoder.layer):
        for name, kinds in LAYER_PARTS.items():
            if not name.startswith("cross") or hasattr(layer, "crossattention"):
                path = f"{prefix}.layer.{i}.{name}".rstrip(".")
                check_kind(path, attrgetter(name)(layer) if name else layer, kinds)
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear) or name.endswith((".dense", ".query", ".key", ".value")):
            check_unwrapped(name, part)
        elif not name.startswith(f"{prefix}."):
            continue
        if change := own_code(part):
            raise TypeError(
                f"{name} has {change}, which an optimised model would not run: remove it first (a mask of"
                " torch.nn.utils.prune by its remove), or run the model itself"
            )


def check_kind(name: str, part: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
    """Raise TypeError unless a module's class is exactly one of these."""
    if type(part) not in kinds:
        raise TypeError(
            f"{name} is a {kind_of(part)}, not a plain {kinds[0].__name__}, the only one that an optimised model runs:"
            " optimise the model before it is compiled, wrapped or changed, or run the model itself"
        )


def check_unwrapped(name: str, part: nn.Module) -> None:
    """Raise TypeError unless a matrix is in a plain nn.Linear."""
    if type(part) is not nn.Linear:
        raise TypeError(
            f"{name} is a {kind_of(part)}, not a plain nn.Linear: merge adapters first, and start from the model"
            " that is not quantised"
        )


def own_code(part: nn.Module) -> str | None:
    """Return the code that a module runs beside its class: hooks, or a method of its own; None if none."""
    if has_hooks(part):
        return "hooks"
    own = (name for name, value in vars(part).items() if callable(value) and callable(getattr(type(part), name, None)))
    return next((f"a {name} of its own" for name in own), None)


def kind_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
