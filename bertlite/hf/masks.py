"""Translate between transformers' calls of a part and bertlite's: arguments, masks and caches.

Parts are called as transformers calls them, with an `attention_mask` that is added to the scores.  A model that runs
its own parts passes a `LayerContext` instead, as `inputs`.  A part that is not ours, or a `forward` that replaces
ours, gets the tensor that transformers 4 would pass; the tensor remembers the context.

Shapes:  B sequences · S queries · K keys · N heads
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from bertlite.config import kept_heads
from bertlite.hf.compat import run_registered
from bertlite.stack.attention import BACKENDS, Backend, LayerContext, as_scores
from bertlite.stack.cache import KeyValueCache
from bertlite.stack.inputs import Mask, causal_mask, to_mask
from bertlite.stack.layouts import Padded

OURS = ("auto", "packed", "varlen")  # names that transformers does not know


def is_ours(module: nn.Module) -> bool:
    """Return whether a module runs a `forward` of ours, not its own class's or one that replaced ours."""
    return getattr(module.forward, "takes_layer_context", False)


def gets_context(module: nn.Module, inputs: LayerContext, x: Tensor) -> bool:
    """Return whether a module gets the inputs themselves, not arguments of transformers."""
    tracer = getattr(x, "tracer", None)
    if tracer is not None:  # torch.fx traces with stand-ins: a part that it runs whole takes a tensor
        return not tracer.is_leaf_module(module, "")
    if getattr(module.forward, "takes_layer_context", False):
        return True
    wrapped = getattr(type(module).forward, "takes_layer_context", False)  # a function around ours, which passes it on
    return wrapped and (inputs.first_only or inputs.backend.packs)


def mask_tensor(inputs: LayerContext | None, x: Tensor) -> Any:
    """Return the mask for a part that is not ours: scores to add, (B, 1, 1 or S, K), or its function's own form.

    Raises:
        ValueError: padding is left out, or only the first token of each sequence is computed.
    """
    if inputs is None:
        return None

    # Such a part has its own idea of a batch: rows, and all of their positions.
    if inputs.first_only:
        raise ValueError("first_token_only=True runs only bertlite's own layers, and one has been replaced")
    if inputs.backend.packs:
        raise ValueError("packed attention runs only bertlite's own layers, and one was replaced; use 'sdpa'")

    mask = inputs.mask
    if not isinstance(mask, Mask):
        return mask

    # Scores to add, as in transformers 4: the lowest number of the dtype forbids a key.
    scores = torch.zeros(x.shape[0], 1, 1, inputs.layout.keys, dtype=x.dtype, device=x.device)
    if mask.bias is not None:
        scores = scores + as_scores(mask.bias, x.dtype)
    if mask.allowed is not None:
        allowed = mask.allowed if mask.attends_anything is None else mask.allowed & mask.attends_anything
        scores = torch.where(allowed, scores, torch.finfo(x.dtype).min)

    # If the part is ours after all, it finds here everything that a mask cannot say.
    if not torch.compiler.is_compiling():
        scores.layer_context = inputs  # type: ignore[attr-defined]
    return scores


def head_mask_of(inputs: LayerContext) -> Tensor | None:
    """Return the gate of a layer in transformers 4's form, (B or 1, N, S or 1, 1)."""
    gate = inputs.gate
    return gate if gate is None or gate.dim() == 3 else gate.transpose(1, 2)


def gate_of(head_mask: Tensor | None, config: Any, layer: int | None) -> Tensor | None:
    """Return transformers' mask of one layer's heads, (B or 1, N, S or 1, 1), as (B or 1, S or 1, heads kept, 1)."""
    if head_mask is None or head_mask.dim() == 3:  # (T or 1, N, 1): padding is left out
        return head_mask
    if head_mask.dim() != 4 or head_mask.shape[-1] != 1:
        raise ValueError(f"head_mask has shape {tuple(head_mask.shape)}; a layer takes (1 or batch, heads, 1, 1)")
    heads = config.num_attention_heads
    kept = range(heads) if layer is None else kept_heads(config, layer)
    if head_mask.shape[1] == heads != len(kept):
        head_mask = head_mask[:, list(kept)]
    return head_mask.transpose(1, 2)


def layer_context(
    part: Any,
    x: Tensor,
    mask: Any = None,
    states: Tensor | None = None,
    *,
    head_mask: Tensor | None = None,
    past_key_values: Any = None,
    output_attentions: bool | None = False,
) -> LayerContext:
    """Return the arguments that transformers gives a part, as `LayerContext`.

    A decoder's self-attention is causal: under "sdpa" transformers makes it so if there is no mask.

    Args:
        part: attention, a layer or the encoder.  Its config names the attention: "eager", or none, gives attention
            weights; "sdpa" only if they are wanted.
        x: the hidden states, (B, S, …).
        mask: None, scores to add or, bool, the keys that may be attended to; broadcast to (B, N, S, K).
        states: an encoder's output, for cross-attention.
    """
    config, layer = part.config, part.layer_idx
    cache = None if past_key_values is None else LayerCache(past_key_values, config)
    if cache is not None and layer is None:
        raise ValueError("this layer was built without layer_idx, which a cache needs; give one")
    known = vars(mask).get("layer_context") if isinstance(mask, Tensor) else None
    if known is None:
        cached = 0 if cache is None or states is not None else cache.length
        keys = (x if states is None else states).shape[1] + cached
        causal = states is None and bool(getattr(part, "is_causal", config.is_decoder))  # attention knows it itself
        known = context_from_config(mask, config, x, keys, bool(output_attentions), causal)
    gate, number = gate_of(head_mask, config, layer), layer or 0
    return replace(known, gates=None if gate is None else {number: gate}, cache=cache, source=states, layer=number)


def context_from_config(mask: Any, config: Any, x: Tensor, keys: int, weights: bool, causal: bool) -> LayerContext:
    """Choose the backend that a config names, and read a caller's mask as transformers does."""
    name = config._attn_implementation
    layout = Padded(x.shape[0], x.shape[1], keys, x.device)
    if name is not None and name not in ("eager", "sdpa", *OURS):
        return LayerContext(Backend(name, run_registered), layout, mask, returns_weights=weights)
    eager = name in (None, "eager") or weights
    if mask is None:
        read = Mask(causal_mask(x.shape[1], keys, x.device) if causal and not eager else None)
    else:
        read = to_mask(mask) if mask.dtype == torch.bool else Mask(bias=mask)
    return LayerContext(BACKENDS["eager" if eager else "sdpa"], layout, read, returns_weights=eager)


class LayerCache(KeyValueCache):
    """A cache of transformers with the methods of ours: keys and values token-first, lengths as numbers."""

    self_attention: Any
    cross_attention: Any  # None if the cache is only for self-attention

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
