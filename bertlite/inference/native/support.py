"""What keeps a model from the native kernels."""

import torch

from bertlite.checkpoint.saving import dtype_name
from bertlite.inference.native.calls import ACTIVATIONS, NUMBERS
from bertlite.inference.native.library import missing_platform
from bertlite.model import BertPreTrainedModel

LANES = 16  # of kernels/vectors.h


def missing_for_native(model: BertPreTrainedModel, dtype: torch.dtype) -> str | None:
    """Say what keeps the native kernels from running a model in a dtype; None if nothing does."""
    config = model.config
    head_size = config.hidden_size // config.num_attention_heads
    faults = {
        f"they compute in {', '.join(NUMBERS)}, not in {dtype_name(dtype)}": dtype_name(dtype) not in NUMBERS,
        f"they are for the CPU, and the model is on {model.device}": model.device.type != "cpu",
        "they run encoders, and this model is a decoder": bool(config.is_decoder or config.add_cross_attention),
        f"they have no {config.position_embedding_type} positions": config.position_embedding_type != "absolute",
        f"head dims must be multiples of {LANES}, and this model's is {head_size}": bool(head_size % LANES),
        f"they have no activation {config.hidden_act!r}; have: {', '.join(ACTIVATIONS)}": config.hidden_act
        not in ACTIVATIONS,
    }
    platform = missing_platform()
    return platform or next((fault for fault, holds in faults.items() if holds), None)
