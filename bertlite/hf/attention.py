"""Attention functions that are registered with transformers."""

from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bertlite.stack.layer_inputs import Backend, LayerInputs


def attend_registered(
    module: Any, q: Tensor, k: Tensor, v: Tensor, inputs: LayerInputs
) -> tuple[Tensor, Tensor | None]:
    """Compute attention by a function registered with transformers, called as transformers calls it."""
    name, wanted = inputs.backend.name, inputs.returns_weights
    if inputs.first_only:
        raise ValueError(f"attention {name!r} cannot do first_token_only=True; use eager, sdpa or packed")
    if module.position_embedding_type != "absolute":
        raise ValueError(f"attention {name!r} cannot add relative positions to the scores; use eager or sdpa")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if not q.shape[1]:  # a layer without heads; not every function runs on none
        return q.transpose(1, 2), q.new_zeros(*q.shape[:-1], k.shape[2]) if wanted else None
    dropout = module.dropout.p if module.training else 0.0
    function = ALL_ATTENTION_FUNCTIONS[name]
    context, weights = function(module, q, k, v, inputs.mask, dropout=dropout, scaling=q.shape[-1] ** -0.5)
    if wanted and weights is None:
        raise ValueError(f"attention {name!r} cannot give attentions; use eager or sdpa")
    return context, weights if wanted else None


def registered_backend(name: str) -> Backend:
    """Return the backend of a function registered with transformers; the mask is in the form that it wants."""
    return Backend(name, attend_registered, attend_registered)
