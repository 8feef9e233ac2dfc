"""`optimize_for_inference`: a copy of a model that runs faster, and only runs."""

import torch

from bertlite.checkpoint.checks import parse_dtype
from bertlite.inference.fusion import fused_copy
from bertlite.inference.linear import PackedLinear
from bertlite.inference.native.calls import Kernels
from bertlite.inference.native.choice import kernels_are_faster
from bertlite.inference.native.conversion import kernels_if_any, native_copy, plain_copy, require_native, warn_once
from bertlite.inference.runtime import InferenceModel
from bertlite.inference.support import SLOW, check_unaltered, missing_for_onednn, require_onednn, slowness_of_int8
from bertlite.inference.verification import verify as verify_copy
from bertlite.model import BertPreTrainedModel

BACKENDS = ("auto", "native", "onednn")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


def optimize_for_inference(
    model: BertPreTrainedModel, dtype: torch.dtype | None = None, backend: str = "auto", verify: bool = True
) -> InferenceModel:
    """Return a copy of the model that runs faster, and only runs.

    The copy shares nothing with `model`: delete that one to free its memory, and optimise again after any change to
    its weights.

    Args:
        model: BertModel or one of the task heads, pruned or not, on the CPU or a GPU.
        dtype: to compute in: float32, bfloat16, float16, or on the CPU int8; by default the model's own.  With int8
            the matrices of the layers are 8-bit integers and their inputs are quantised at every call: "native" scales
            by the smallest and largest number of each token, "onednn" by the largest magnitude of the batch.  All else
            is float32, except attention, which is bfloat16 if the backend has it.
        backend: "native" runs all layers in one call of C++ kernels, which are compiled once, on Linux and x86-64;
            "onednn" packs the weights for oneDNN's kernels, on the CPU.  "auto" on the CPU is "native" if that can run
            the model, else "onednn", with a warning if only a compiler is missing.  It is "plain", a copy of the
            model, on a GPU and, with a warning, where these are slower than the model, which is measured on a kind of
            processor without a record; int8 is then float32.
        verify: compare outputs for a few random tokens with the model's.  The allowed difference, of rounding in this
            dtype, is measured on the model itself.

    Under "native" padding is left out, unless the model's attn_implementation is "eager": the outputs at padded
    positions are then zeros.

    Raises:
        ValueError: the backend does not exist, or not for this model, device and dtype; or the model's outputs are not
            finite.
        RuntimeError: this build of torch lacks the operators, or the native kernels cannot be compiled; or the copy
            was verified and differs.
        TypeError: `model` is not a bertlite model, or has modules that a copy would not reproduce: linear layers that
            are not plain nn.Linear, layers of other classes, hooks within the encoder.

    Source: the operators are those that torch.compile uses for linear layers on the CPU
    (torch/_inductor/fx_passes/mkldnn_fusion.py and quantization.py of torch 2.13).
    """
    if not isinstance(model, BertPreTrainedModel):
        raise TypeError(f"model is a {type(model).__module__}.{type(model).__qualname__}; load it with bertlite")
    check_unaltered(model)
    dtype = dtype or model.dtype
    check_request(backend, dtype, model.device)
    kernels = require_native(model, dtype) if backend == "native" else None
    if backend == "auto":
        kernels = kernels_if_any(model, dtype)
        backend = choose_backend(kernels, dtype, model.device)
    if kernels is not None and backend == "native":
        copied = native_copy(model, dtype, kernels)
    elif backend == "onednn":
        require_onednn(dtype)
        copied = fused_copy(model, dtype, PackedLinear)
    else:
        copied = plain_copy(model, dtype)
        dtype = copied.dtype
    if verify:
        verify_copy(model, copied.eval(), backend, dtype)
    return InferenceModel(copied, backend, dtype)


def choose_backend(kernels: Kernels | None, dtype: torch.dtype, device: torch.device) -> str:
    """Return what "auto" takes, with a warning if the plain model is faster than what else there is on the CPU."""
    if device.type != "cpu":
        return "plain"
    if kernels is not None and kernels_are_faster(kernels, dtype):
        return "native"
    slow_integers = dtype == torch.int8 and not missing_for_onednn(dtype) and slowness_of_int8() > SLOW
    if kernels is None and not slow_integers:
        return "onednn"
    other = "onednn" if kernels is None else "native"
    warn_once(
        f"optimize_for_inference returns a copy of the plain model, which is faster than backend {other!r} on this"
        f" processor in {dtype}; backend={other!r} takes that nevertheless"
    )
    return "plain"


def check_request(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError if a backend does not exist, or not for this device and dtype."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; have: {', '.join(BACKENDS)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype} is not among {', '.join(map(str, DTYPES))}; give one of them")
    on_cpu = device.type == "cpu"
    if not on_cpu and (dtype == torch.int8 or backend == "onednn"):
        asked = "int8" if dtype == torch.int8 else f"backend {backend!r}"
        raise ValueError(f"{asked} is for the CPU and the model is on {device}; use 'auto' and bfloat16 or float16")


def parse_compute_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype of a name: one of a checkpoint's, or int8.

    Raises:
        ValueError: there is no such dtype.
    """
    return torch.int8 if dtype in ("int8", torch.int8) else parse_dtype(dtype)
