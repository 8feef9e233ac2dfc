"""The pooling of `bertlite.runtime` for states of torch, also in the place of sentence-transformers'.

Shapes:  B texts · S positions · D hidden · k poolings
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertlite.inference.readers import role_of
from bertlite.runtime.pooling import POOLINGS, pool


def pool_states(states: Tensor, mask: Tensor, pooling: Sequence[str], skip: int = 0) -> Tensor:
    """Return a vector for each text, float32 or float64: (B, S, D) states, (B, S) mask -> (B, k·D).

    Args:
        pooling, skip: of `bertlite.runtime.pooling.pool`.
    """
    x = states.float() if states.dtype in (torch.float16, torch.bfloat16) else states
    texts = zip(x.cpu().numpy(), mask.bool().cpu().numpy(), strict=True)
    return torch.from_numpy(np.stack([pool(tokens[real], pooling, skip) for tokens, real in texts])).to(x.device)


def pool_in_order_(part: Any) -> None:
    """Let a Pooling of sentence-transformers add tokens one by one, not in an order that the longest text decides."""
    modes = getattr(part, "pooling_mode", "")
    names = (modes,) if isinstance(modes, str) else tuple(modes)
    if type(part).__name__ == "Pooling" and {*names} <= {*POOLINGS} and role_of(part, set()) == "pools":
        part.forward = partial(pool_features, part, names)


def pool_features(part: Any, names: tuple[str, ...], features: dict[str, Any]) -> dict[str, Any]:
    """Return the features of a batch with vectors; those on a GPU, and those that weigh tokens, pool as before."""
    states, mask = features["token_embeddings"], features.get("attention_mask")
    theirs = states.is_cuda or mask is None or mask.shape != states.shape[:2]
    if theirs or not features.keys().isdisjoint(("cls_token_embeddings", "token_weights_sum")):
        found: dict[str, Any] = type(part).forward(part, features)
        return found
    skip = 0 if part.include_prompt else int(features.get("prompt_length", 0))
    return {**features, "sentence_embedding": pool_states(states, mask, names, skip).to(states.dtype)}
