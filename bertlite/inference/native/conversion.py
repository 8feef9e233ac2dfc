"""A copy of a model whose layers are run by the native kernels."""

import copy
import warnings
from functools import cache, partial

import torch

from bertlite.checkpoint.saving import dtype_name
from bertlite.inference.fusion import copy_sharing_matrices, fix_linears, make_linear
from bertlite.inference.linear import FixedLinear, PackedLinear
from bertlite.inference.native.calls import Kernels
from bertlite.inference.native.encoder import NativeEncoder
from bertlite.inference.native.library import NativeKernelsError, load_kernels
from bertlite.inference.native.support import missing_for_native
from bertlite.inference.native.weights import NativeWeights
from bertlite.inference.support import missing_for_onednn
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
    body = copied.base_model
    body.encoder = NativeEncoder(
        NativeWeights.of(list(copied._layers()), body.config, dtype_name(dtype), kernels), kernels
    )
    return with_fixed_linears(copied, torch.float32 if dtype == torch.int8 else dtype)


def plain_copy(model: BertPreTrainedModel, dtype: torch.dtype) -> BertPreTrainedModel:
    """Return a copy of the model as it is, in a dtype; what is asked for in int8 is computed in float32."""
    copied = copy.deepcopy(model).to(torch.float32 if dtype == torch.int8 else dtype).requires_grad_(False)
    copied.base_model.encoder.is_optimised = True
    return copied


def with_fixed_linears(model: BertPreTrainedModel, floats: torch.dtype) -> BertPreTrainedModel:
    """Fix the linear layers of the pooler and the head, and convert the rest to a float dtype."""
    kind = FixedLinear if missing_for_onednn(floats) else PackedLinear
    fix_linears(model, partial(make_linear, kind, floats))
    return model.to(floats).requires_grad_(False)
