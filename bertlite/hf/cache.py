"""Caches of transformers, for bertlite's layers."""

from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache

from bertlite.config import kept_heads
from bertlite.stack.attention import LayerContext


class LayerCache:
    """A cache of transformers with the methods that layers call: keys and values token-first, lengths as numbers."""

    def __init__(self, cache: Any, config: Any) -> None:
        self.cache, self.config = cache, config
        both = isinstance(cache, EncoderDecoderCache)
        self.self_attention = cache.self_attention_cache if both else cache
        self.cross_attention = cache.cross_attention_cache if both else None

    @property
    def length(self) -> int:
        return int(self.self_attention.get_seq_length())

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        new, heads = k.shape[1:3]
        end = int(self.self_attention.get_seq_length(layer)) + new
        if not heads:  # a cache counts tokens by its tensors, and such a layer has none
            k = v = k.new_ones(k.shape[0], new, 1, k.shape[3])
        self.drop_pruned(layer)
        at = {"cache_position": torch.arange(end - new, end, device=k.device)}  # for 4.57's caches of fixed size
        k, v = (x.transpose(1, 2) for x in self.self_attention.update(k.transpose(1, 2), v.transpose(1, 2), layer, at))
        return k[:, :end, :heads], v[:, :end, :heads]  # a cache of fixed size returns all its room

    def drop_pruned(self, layer: int) -> None:
        """Cut cached keys and values of all heads, as PEFT's prefix tuning makes them, to the remaining heads."""
        heads = self.config.num_attention_heads
        for known in getattr(self.self_attention, "layers", ())[layer : layer + 1]:
            kept = list(kept_heads(self.config, layer))
            if known.keys is not None and known.keys.dim() == 4 and known.keys.shape[1] == heads > len(kept):
                heads_left = kept or [0]  # see `extend`
                known.keys, known.values = known.keys[:, heads_left], known.values[:, heads_left]

    def set_cross(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.cross_attention is not None:
            k, v = (
                x.transpose(1, 2) for x in self.cross_attention.update(k.transpose(1, 2), v.transpose(1, 2), layer)
            )
            self.cache.is_updated[layer] = True
        return k, v

    def get_cross(self, layer: int) -> tuple[Tensor, Tensor] | None:
        if self.cross_attention is None or not self.cache.is_updated.get(layer):
            return None
        known = self.cross_attention.layers[layer]
        return known.keys.transpose(1, 2), known.values.transpose(1, 2)


def past_of(inputs: LayerContext) -> Any:
    """Return the cache of transformers that a layer gets, if any."""
    return inputs.cache.cache if isinstance(inputs.cache, LayerCache) else None
