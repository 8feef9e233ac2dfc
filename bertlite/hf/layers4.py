"""Attention, layers and the encoder as transformers 4.57 builds and calls them, on any transformers."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.models.bert import modeling_bert as stock

from bertlite.hf import compat
from bertlite.hf.layers import Attention, Encoder, EncoderInputs, Layer, SelfAttention
from bertlite.hf.masks import SettledMask, mask_for, own
from bertlite.hf.parts import WithoutStock
from bertlite.stack import modules


class BertSelfAttention(SelfAttention, WithoutStock, stock.BertSelfAttention):
    def __init__(
        self,
        config: Any,
        position_embedding_type: str | None = None,
        layer_idx: int | None = None,
        *,
        is_cross_attention: bool = False,
    ) -> None:
        super().__init__(config, layer_idx, is_cross_attention, position_embedding_type)

    @own
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool | None = False,
        cache_position: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        return self.attend(
            hidden_states, attention_mask, head_mask, encoder_hidden_states, past_key_values, output_attentions
        )


class BertAttention(Attention):
    def __init__(
        self,
        config: Any,
        position_embedding_type: str | None = None,
        layer_idx: int | None = None,
        *,
        is_cross_attention: bool = False,
    ) -> None:
        attention = BertSelfAttention(
            config, position_embedding_type, layer_idx, is_cross_attention=is_cross_attention
        )
        super().__init__(attention, config, layer_idx, is_cross_attention)

    @own
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool | None = False,
        cache_position: Tensor | None = None,
    ) -> tuple[Any, ...]:
        outputs = self.self(
            hidden_states,
            attention_mask=mask_for(self.self, attention_mask),
            head_mask=head_mask,
            encoder_hidden_states=encoder_hidden_states,
            past_key_values=past_key_values,
            output_attentions=output_attentions,
            cache_position=cache_position,
        )
        return (self.output(outputs[0], hidden_states), *outputs[1:])


class BertLayer(Layer):
    def make_attention(self, config: Any, layer_idx: int | None, cross: bool) -> Attention:
        positions = "absolute" if cross else None
        return BertAttention(config, positions, layer_idx, is_cross_attention=cross)

    @own
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        past_key_values: Any = None,
        output_attentions: bool | None = False,
        cache_position: Tensor | None = None,
    ) -> tuple[Any, ...]:
        x, *weights = self.attention(
            hidden_states,
            attention_mask=mask_for(self.attention, attention_mask),
            head_mask=head_mask,
            output_attentions=output_attentions,
            past_key_values=past_key_values,
            cache_position=cache_position,
        )
        if self.looks_at(encoder_hidden_states):
            x, *crossed = self.crossattention(
                x,
                attention_mask=mask_for(self.crossattention, encoder_attention_mask),
                encoder_hidden_states=encoder_hidden_states,
                past_key_values=past_key_values,
                output_attentions=output_attentions,
                cache_position=cache_position,
            )
            weights += crossed
        return (self.feed_forward_chunks(x), *weights)


class BertEncoder(Encoder):
    layer_class: type[modules.BertLayer] = BertLayer

    def cache_for(self, past: Any, use_cache: bool, crossed: bool) -> Any:
        """Return the cache that is used: one like those of 4.57 if a decoder is to have one, and is given none."""
        if not (use_cache and self.config.is_decoder):
            return past
        return compat.new_cache(self.config, crossed) if past is None else compat.from_legacy(past)

    def call_layer(
        self, layer: Any, x: Tensor, mask: SettledMask, gate: Tensor | None, others: EncoderInputs
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        out = layer(
            x,
            mask_for(layer, mask),
            gate,
            others.encoder_states,
            mask_for(layer, others.encoder_mask),
            others.past,  # by its place: transformers drops it by its name where layers are checkpointed
            output_attentions=others.output_attentions,
            cache_position=others.cache_position,
        )
        return (out, ()) if isinstance(out, Tensor) else (out[0], out[1:])

    @own
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        head_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = False,
        output_hidden_states: bool | None = False,
        return_dict: bool | None = True,
        cache_position: Tensor | None = None,
    ) -> Any:
        past = self.cache_for(past_key_values, bool(use_cache), encoder_hidden_states is not None)
        others = EncoderInputs(
            encoder_hidden_states, encoder_attention_mask, past, past is not None, output_attentions,
            output_hidden_states, cache_position,
        )  # fmt: skip
        return self.run(hidden_states, attention_mask, head_mask, others, bool(return_dict))
