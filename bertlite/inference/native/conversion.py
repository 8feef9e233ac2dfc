"""A copy of a model whose layers are run by the native kernels."""

import copy
import warnings
from functools import cache, partial

import torch

from bertlite.checkpoint.saving import dtype_name
from bertlite.inference.fusion import copy_sharing_matrices, fix_linears, make_linear
from bertlite.inference.native.calls import Kernels
from bertlite.inference.native.encoder import NativeEncoder
from bertlite.inference.native.library import NativeKernelsError, load_kernels
from bertlite.inference.native.linear import NativeLinear
from bertlite.inference.native.model import take_forward_
from bertlite.inference.native.support import missing_for_native
from bertlite.inference.native.weights import NativeWeights
from bertlite.model import BertPreTrainedModel


def require_native(model: BertPreTrainedModel, dtype: torch.dtype) -> Kernels:
    """Return the kernels, or raise.

    Raises:
        ValueError: they cannot run this model in this dtype.
        NativeKernelsError: they are not available on this machine.
    """
    missing = missing_for_native(model, dtype)
    if missing is not None:
        raise ValueError(f"backend 'native' cannot run this model: {missing}; use backend='onednn' or 'auto'")
    return load_kernels()


def kernels_if_any(model: BertPreTrainedModel, dtype: torch.dtype) -> Kernels | None:
    """Return the kernels if they can run this model in this dtype; None, with one warning, if they are not available.

    A compiler that failed in this process is run again only with other settings.
    """
    if missing_for_native(model, dtype) is not None:
        return None
    try:
        return load_kernels(retry=False)
    except NativeKernelsError as error:
        warn_once(f"optimize_for_inference takes backend 'onednn', which is slower than 'native': {error}")
        return None


@cache
def warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


@torch.no_grad()
def native_copy(model: BertPreTrainedModel, dtype: torch.dtype, kernels: Kernels) -> BertPreTrainedModel:
    """Return a copy of the model whose layers are run by the native kernels; the rest is in a float dtype."""
    copied = copy_sharing_matrices(model)
    weights = NativeWeights.of(list(copied._layers()), copied.config, dtype_name(dtype), kernels)
    return run_natively_(copied, weights, kernels)


def plain_copy(model: BertPreTrainedModel, dtype: torch.dtype) -> BertPreTrainedModel:
    """Return a copy of the model as it is, in a dtype; what is asked for in int8 is computed in float32."""
    copied = copy.deepcopy(model).to(torch.float32 if dtype == torch.int8 else dtype).requires_grad_(False)
    copied.base_model.encoder.is_optimised = True
    return copied


def run_natively_(model: BertPreTrainedModel, weights: NativeWeights, kernels: Kernels) -> BertPreTrainedModel:
    """Replace the encoder of a model, its linear layers and what else the kernels can run."""
    numbers = weights.shape.numbers
    floats = torch.float32 if numbers == "int8" else getattr(torch, numbers)
    model.base_model.encoder = NativeEncoder(weights, kernels)
    fix_linears(model, partial(make_linear, partial(NativeLinear, kernels=kernels), floats))
    take_forward_(model, kernels)
    return model.to(floats).requires_grad_(False)
