"""The cache of a decoder: keys and values of the tokens so far, so that each is computed only once.

Shapes:  B sequences · K tokens so far · N heads · H head dim
"""

import torch
from torch import Tensor


class KeyValueCache:
    """The keys and values of the tokens so far, (B, K, N, H), for every layer; grows as a decoder runs."""

    def __init__(self) -> None:
        self.self_attention: dict[int, tuple[Tensor, Tensor]] = {}
        self.cross_attention: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """The number of tokens so far."""
        return next(iter(self.self_attention.values()))[0].shape[1] if self.self_attention else 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add new keys and values of the layer's self-attention and return all so far."""
        if layer in self.self_attention:
            k, v = (torch.cat([old, new], 1) for old, new in zip(self.self_attention[layer], (k, v), strict=True))
        self.self_attention[layer] = k, v
        return k, v

    def set_cross(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Remember the keys and values of the layer's cross-attention, and return them."""
        self.cross_attention[layer] = k, v
        return k, v

    def get_cross(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return the keys and values that `set_cross` got for the layer, if any."""
        return self.cross_attention.get(layer)
