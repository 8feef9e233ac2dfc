"""Attention, layers and the encoder as transformers 4.57 builds and calls them, on any transformers."""

from typing import Any

from torch import Tensor, nn
from transformers.models.bert import modeling_bert as stock

from bertlite.hf import compat
from bertlite.hf.layers import Attention, Encoder, Layer, SelfAttention, with_own_weights
from bertlite.hf.masks import head_mask_of, mask_tensor, past_of
from bertlite.hf.parts import WithoutStock
from bertlite.stack import modules
from bertlite.stack.attention import Attended, LayerContext


def call_attention(part: nn.Module, x: Tensor, inputs: LayerContext) -> Attended:
    """Call attention that is not ours, of any kind; return the context or output, and the weights."""
    out = part(
        x,
        attention_mask=mask_tensor(inputs, x),
        head_mask=head_mask_of(inputs),
        encoder_hidden_states=inputs.source,
        past_key_values=past_of(inputs),
        output_attentions=inputs.weights is not None,
    )
    return out[0], out[1] if len(out) > 1 else None


class AttentionSignature:
    """First base of attention, with its output projection and without; it is built and called alike."""

    build: Any
    order: tuple[str, ...] = (
        *("attention_mask", "head_mask", "encoder_hidden_states", "past_key_values", "output_attentions"),
        "cache_position",
    )
    call = staticmethod(call_attention)

    def __init__(
        self,
        config: Any,
        position_embedding_type: str | None = None,
        layer_idx: int | None = None,
        *,
        is_cross_attention: bool = False,
    ) -> None:
        self.build(config, layer_idx, is_cross_attention, position_embedding_type)


class BertSelfAttention(AttentionSignature, SelfAttention, WithoutStock, stock.BertSelfAttention):
    build = SelfAttention.__init__


class BertAttention(AttentionSignature, Attention):
    def build(self, config: Any, layer_idx: int | None, cross: bool, positions: str | None) -> None:
        attention = BertSelfAttention(config, positions, layer_idx, is_cross_attention=cross)
        Attention.__init__(self, attention, config, layer_idx, cross)


class BertLayer(Layer):
    order: tuple[str, ...] = (
        *("attention_mask", "head_mask", "encoder_hidden_states", "encoder_attention_mask", "past_key_values"),
        *("output_attentions", "cache_position"),
    )
    call = staticmethod(call_attention)

    def make_attention(self, config: Any, layer_idx: int | None, cross: bool) -> Attention:
        return BertAttention(config, layer_idx=layer_idx, is_cross_attention=cross)

    def compute(self, x: Tensor, inputs: LayerContext) -> tuple[Any, ...]:  # type: ignore[override]  # as in 4
        inputs = with_own_weights(inputs)
        kept = (inputs,) if inputs.encoder is None else (inputs, inputs.encoder)
        return super().compute(x, inputs), *((each.weights or {}).get(each.layer) for each in kept)


class BertEncoder(Encoder):
    layer_class: type[modules.BertLayer] = BertLayer
    order: tuple[str, ...] = (
        *("attention_mask", "head_mask", "encoder_hidden_states", "encoder_attention_mask", "past_key_values"),
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "cache_position"),
    )

    def call(self, part: nn.Module, x: Tensor, inputs: LayerContext) -> Any:
        crossed = inputs.encoder
        out = part(
            x,
            mask_tensor(inputs, x),
            head_mask_of(inputs),
            None if crossed is None else crossed.source,
            mask_tensor(crossed, x),
            past_of(inputs),  # positional: transformers drops the keyword if layers are checkpointed
            output_attentions=inputs.weights is not None,
        )
        return out if isinstance(out, Tensor | tuple | list) else (out[0],)  # torch.fx gives a stand-in for a tuple

    def read(self, x: Tensor, given: dict[str, Any]) -> tuple[Any, ...]:
        if given.get("use_cache") and self.config.is_decoder:
            crossed = given.get("encoder_hidden_states") is not None
            given = {**given, "past_key_values": compat.cache_of(given.get("past_key_values"), self.config, crossed)}
        return *super().read(x, given), True, bool(given.get("return_dict", True))
