"""Copy a model so that the native kernels run its layers."""

import copy

import torch
from torch import nn

from bertlite.checkpoint.saving import dtype_name
from bertlite.inference.checks import ComputeDtype
from bertlite.inference.native.encoder import NativeEncoder
from bertlite.inference.native.linear import NativeLinear
from bertlite.inference.native.model import take_forward_
from bertlite.inference.native.rounding import Sample, fit_
from bertlite.inference.native.weights import NativeWeights, from_int8_rows, int8_rows
from bertlite.models.base import BertPreTrainedModel
from bertlite.runtime.structs import Kernels
from bertlite.support.contexts import own_context


@own_context()
def native_copy(
    model: BertPreTrainedModel, dtype: ComputeDtype, kernels: Kernels, sample: Sample | None = None
) -> BertPreTrainedModel:
    """Return a copy of the model whose layers the native kernels run; the rest is in a float dtype.

    Args:
        sample: as for `optimize_for_inference`.
    """
    copied = copy_sharing_matrices(model)
    numbers, encoder = dtype_name(dtype), copied.base_model.encoder
    weights = NativeWeights.of(encoder, copied.config, numbers, kernels, scaled=sample is not None)
    if sample is not None:
        fit_(weights, copied.float().eval().base_model, sample)
    if numbers == "int8":
        words = copied.base_model.embeddings.word_embeddings.weight
        words.copy_(from_int8_rows(*int8_rows(words)))
    return run_natively_(copied, weights, kernels)


def plain_copy(model: BertPreTrainedModel, dtype: ComputeDtype) -> BertPreTrainedModel:
    """Return a copy of the model as it is, in a float dtype."""
    copied = copy.deepcopy(model).to(dtype).requires_grad_(False)
    copied.base_model.encoder.is_optimised = True
    return copied


def copy_sharing_matrices(model: BertPreTrainedModel) -> BertPreTrainedModel:
    """Return a copy whose linear layers share the model's weights, since they will be packed and dropped.

    A matrix that is also an embedding is copied: the embedding stays.
    """

    def held_by(kind: type[nn.Module]) -> set[nn.Parameter]:
        return {p for part in model.modules() if isinstance(part, kind) for p in part.parameters()}

    shared = held_by(nn.Linear) - held_by(nn.Embedding)
    return copy.deepcopy(model, {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in shared})


def run_natively_(model: BertPreTrainedModel, weights: NativeWeights, kernels: Kernels) -> BertPreTrainedModel:
    """Replace the encoder of a model, its linear layers and other parts that the kernels can run."""
    numbers = weights.shape.numbers
    floats = torch.float32 if numbers == "int8" else getattr(torch, numbers)
    model.base_model.encoder = NativeEncoder(weights, kernels)
    for part in list(model.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.Linear) and child.weight.numel():
                setattr(part, name, NativeLinear(child, floats, kernels))
    take_forward_(model, kernels, floats)
    return model.to(floats).requires_grad_(False)
