"""Helpers of the tests of optimised models."""

import pytest
import torch
from torch import Tensor, nn

from bertlite import prune_heads, prune_neurons
from bertlite.inference.support import require_onednn
from bertlite.model import BertPreTrainedModel
from bertlite.stack.outputs import ModelOutput

PRUNED = {0: range(4), 1: [1, 3], 2: [0]}
NEURONS = {0: [0, 36], 1: range(37)}
onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN")


def skip_without(dtype: torch.dtype) -> None:
    """Skip a test where this torch or this processor cannot compute in a dtype with oneDNN."""
    try:
        require_onednn(dtype)
    except RuntimeError as reason:
        pytest.skip(str(reason))


def of_kind(kind: str, model: BertPreTrainedModel) -> BertPreTrainedModel:
    """Return the model, whole or pruned."""
    return model if kind == "whole" else prune_neurons(prune_heads(model, PRUNED), NEURONS)


def full(model: nn.Module, batch: dict[str, Tensor], **options: object) -> ModelOutput:
    """Return a model's output with its hidden states, without gradients."""
    with torch.no_grad():
        return model(**batch, output_hidden_states=True, **options)
