"""Pooling and normalisation as `bertlite.runtime` computes them, also in the place of sentence-transformers'.

Shapes:  B texts · S positions · D hidden · k poolings
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertlite.inference.clients.readers import role_of
from bertlite.inference.native.linear import NativeLinear, kernel_activation
from bertlite.runtime.pooling import POOLINGS, Array, normalize, pool

VECTOR = "sentence_embedding"  # sentence-transformers' name of a text's vector


def pool_states(states: Tensor, mask: Tensor, pooling: Sequence[str], skip: int = 0) -> Tensor:
    """Return a vector for each text, float32 or float64: (B, S, D) states, (B, S) mask -> (B, k·D).

    Args:
        pooling, skip: passed to `bertlite.runtime.pooling.pool`.
    """
    x = states.float() if states.dtype in (torch.float16, torch.bfloat16) else states
    texts = zip(x.cpu().numpy(), mask.bool().cpu().numpy(), strict=True)
    return torch.from_numpy(np.stack([pool(tokens[real], pooling, skip) for tokens, real in texts])).to(x.device)


def normalize_rows(vectors: Array) -> Array:
    """Return vectors of length 1, each with the same bits on every processor."""
    return np.stack([normalize(x) for x in vectors])


def compute_in_order_(part: Any, reproducible: bool) -> None:
    """Let a Pooling of sentence-transformers add tokens one by one, not in an order that the longest text decides.

    Args:
        reproducible: let a Normalize too add numbers one by one, not in an order that the processor decides, and let
            the kernels compute the activation of a Dense.
    """
    modes, kind = getattr(part, "pooling_mode", ""), type(part).__name__
    names = (modes,) if isinstance(modes, str) else tuple(modes)
    if kind == "Pooling" and {*names} <= {*POOLINGS} and role_of(part, set()) == "pools":
        part.forward = partial(pool_features, part, names)
    names_read = {vars(part).get(f"module_{end}_name", VECTOR) for end in ("input", "output")}
    if kind == "Normalize" and names_read == {VECTOR} and reproducible and role_of(part, set()) == "each":
        part.forward = normalize_features
    if reproducible and is_native_dense(part) and (act := kernel_activation(part.activation_function)) is not None:
        part.linear.activate(act)
        part.activation_function = nn.Identity()


def in_order(part: Any) -> bool:
    """Return whether `compute_in_order_` has left nothing of a module to torch whose bits the processor decides."""
    return "forward" in vars(part) or (is_native_dense(part) and type(part.activation_function) is nn.Identity)


def is_native_dense(part: Any) -> bool:
    """Return whether a module is a Dense of sentence-transformers that the kernels multiply in float32."""
    linear = getattr(part, "linear", None)
    return type(part).__name__ == "Dense" and isinstance(linear, NativeLinear) and linear.numbers == "float32"


def normalize_features(features: dict[str, Any]) -> dict[str, Any]:
    """Return the features of a batch with vectors of length 1."""
    x = features[VECTOR]
    return {**features, VECTOR: torch.from_numpy(normalize_rows(x.float().numpy())).to(x.dtype)}


def pool_features(part: Any, names: tuple[str, ...], features: dict[str, Any]) -> dict[str, Any]:
    """Return the features of a batch with vectors.

    They are sentence-transformers' own on a GPU, for weighted tokens, and where a text has no tokens.
    """
    states, mask = features["token_embeddings"], features.get("attention_mask")
    skip = 0 if part.include_prompt else int(features.get("prompt_length", 0))
    if (
        not states.is_cpu
        or mask is None
        or mask.shape != states.shape[:2]
        or not features.keys().isdisjoint(("cls_token_embeddings", "token_weights_sum"))
        or (mask.sum(1) <= skip).any()
    ):
        return type(part).forward(part, features)
    return {**features, VECTOR: pool_states(states, mask, names, skip).to(states.dtype)}
