"""Attention, layers and the encoder as transformers 5 builds and calls them.

Arguments that transformers 4 took and 5 does not, such as `head_mask` and `output_attentions`, are keywords here.
"""

from typing import Any

from torch import Tensor, nn
from transformers.models.bert import modeling_bert as stock

from bertlite.hf import compat
from bertlite.hf.layers import Attention, Encoder, Layer, SelfAttention
from bertlite.hf.masks import head_mask_of, mask_tensor, past_of
from bertlite.hf.parts import WithoutStock
from bertlite.stack import modules
from bertlite.stack.attention import LayerContext

KEYWORDS = ("head_mask", "output_attentions", "use_cache", "return_dict", "cache")


def options_for_other(inputs: LayerContext) -> dict[str, Any]:
    """Return the keywords for a part that is not ours, in addition to transformers 5's own."""
    gate = head_mask_of(inputs)
    options: dict[str, Any] = {} if gate is None else {"head_mask": gate}
    return options if inputs.weights is None else {**options, "output_attentions": True}


class SelfOrCrossAttention(SelfAttention, WithoutStock):
    crosses = False
    keywords = (*KEYWORDS, "encoder_hidden_states")  # both kinds of attention get it

    def __init__(self, config: Any, is_causal: bool = False, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx, self.crosses)
        self.is_causal = is_causal


class BertSelfAttention(SelfOrCrossAttention, stock.BertSelfAttention):
    order: tuple[str, ...] = ("attention_mask", "past_key_values")

    def read(self, x: Tensor, given: dict[str, Any]) -> tuple[Any, ...]:
        return super().read(x, {**given, "encoder_hidden_states": None})


class BertCrossAttention(SelfOrCrossAttention, getattr(stock, "BertCrossAttention", object)):  # type: ignore[misc]
    crosses = True
    order: tuple[str, ...] = ("encoder_hidden_states", "attention_mask", "past_key_values")

    def read(self, x: Tensor, given: dict[str, Any]) -> tuple[Any, ...]:
        if given.get("encoder_hidden_states") is None:
            raise ValueError("cross-attention needs encoder_hidden_states, and they are None")
        return super().read(x, {**given, "head_mask": None})  # cross-attention has none


class LayerSignature:
    """First base of attention with its output projection, and of a layer, which are called alike."""

    order: tuple[str, ...] = ("attention_mask", "encoder_hidden_states", "encoder_attention_mask", "past_key_values")
    keywords: tuple[str, ...] = KEYWORDS


class BertAttention(LayerSignature, Attention):
    def __init__(
        self, config: Any, is_causal: bool = False, layer_idx: int | None = None, is_cross_attention: bool = False
    ) -> None:
        attention = (BertCrossAttention if is_cross_attention else BertSelfAttention)(config, is_causal, layer_idx)
        super().__init__(attention, config, layer_idx, is_cross_attention)

    def call(self, part: nn.Module, x: Tensor, inputs: LayerContext) -> Any:
        return part(
            x,
            encoder_hidden_states=inputs.source,
            attention_mask=mask_tensor(inputs, x),
            **{compat.CACHE: past_of(inputs)},
            **options_for_other(inputs),
        )

    def layer_context(
        self, x: Tensor, mask: Any = None, states: Any = None, encoder_mask: Any = None, **options: Any
    ) -> LayerContext:
        if self.is_cross_attention:
            return super().layer_context(x, encoder_mask, states, **options)
        return super().layer_context(x, mask, **options)


class BertLayer(LayerSignature, Layer):
    def make_attention(self, config: Any, layer_idx: int | None, cross: bool) -> Attention:
        return BertAttention(config, config.is_decoder and not cross, layer_idx, cross)

    def call(self, part: nn.Module, x: Tensor, inputs: LayerContext) -> Any:
        mask, options = mask_tensor(inputs, x), {compat.CACHE: past_of(inputs), **options_for_other(inputs)}
        if inputs.source is None:
            return part(x, mask, **options)
        return part(x, None, inputs.source, mask, **options)


class BertEncoder(Encoder):
    layer_class: type[modules.BertLayer] = BertLayer
    order: tuple[str, ...] = (*LayerSignature.order, "use_cache")
    keywords = (*KEYWORDS, "output_hidden_states")

    def call(self, part: nn.Module, x: Tensor, inputs: LayerContext) -> Any:
        crossed = inputs.encoder
        return part(
            x,
            mask_tensor(inputs, x),
            None if crossed is None else crossed.source,
            mask_tensor(crossed, x),
            past_of(inputs),  # positional: transformers drops the keyword if layers are checkpointed
            **options_for_other(inputs),
        )

    def read(self, x: Tensor, given: dict[str, Any]) -> tuple[Any, ...]:
        wants_dict = given.get("return_dict")
        return *super().read(x, given), bool(given.get("use_cache")), wants_dict is None or wants_dict
