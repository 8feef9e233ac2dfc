"""Attention, layers and the encoder as transformers 5 builds and calls them.

What transformers 5 no longer takes and 4 did, `head_mask`, `output_attentions` and the like, is taken here by name.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.models.bert import modeling_bert as stock

from bertlite.hf import compat
from bertlite.hf.layers import Attention, Encoder, EncoderInputs, Layer, SelfAttention
from bertlite.hf.masks import SettledMask, mask_for, own, settled
from bertlite.hf.parts import WithoutStock
from bertlite.stack import modules


def refuse_unknown(options: dict[str, Any]) -> None:
    """Refuse arguments that no layer of any transformers has.

    Raises:
        TypeError: it names them.
    """
    unknown = sorted(options.keys() - {*compat.IGNORED, "use_cache", "return_dict"})
    if unknown:
        raise TypeError(f"attention has no argument {', '.join(unknown)}")


class BertSelfAttention(SelfAttention, WithoutStock, stock.BertSelfAttention):
    def __init__(self, config: Any, is_causal: bool = False, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx, False)
        self.is_causal = is_causal

    @own
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        past_key_values: Any = None,
        *,
        encoder_hidden_states: None = None,  # handed to both kinds of attention
        head_mask: Tensor | None = None,
        output_attentions: bool | None = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        refuse_unknown(others)
        return self.attend(hidden_states, attention_mask, head_mask, None, past_key_values, output_attentions)


class BertCrossAttention(SelfAttention, WithoutStock, getattr(stock, "BertCrossAttention", object)):  # type: ignore[misc]
    def __init__(self, config: Any, is_causal: bool = False, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx, True)
        self.is_causal = is_causal

    @own
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        *,
        output_attentions: bool | None = False,
        head_mask: None = None,  # cross-attention has none
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        refuse_unknown(others)
        if encoder_hidden_states is None:
            raise ValueError("cross-attention looks at encoder_hidden_states, and they are None")
        return self.attend(
            hidden_states, attention_mask, None, encoder_hidden_states, past_key_values, output_attentions
        )


class BertAttention(Attention):
    def __init__(
        self, config: Any, is_causal: bool = False, layer_idx: int | None = None, is_cross_attention: bool = False
    ) -> None:
        attention = (BertCrossAttention if is_cross_attention else BertSelfAttention)(config, is_causal, layer_idx)
        super().__init__(attention, config, layer_idx, is_cross_attention)

    @own
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        mask = encoder_attention_mask if self.is_cross_attention else attention_mask
        context, weights = self.self(
            hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            attention_mask=mask_for(self.self, mask),
            past_key_values=past_key_values,
            **options,
        )
        return self.output(context, hidden_states), weights


class BertLayer(Layer):
    def make_attention(self, config: Any, layer_idx: int | None, cross: bool) -> Attention:
        return BertAttention(config, config.is_decoder and not cross, layer_idx, cross)

    @own
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Tensor:
        x, *weights = self.attention(
            hidden_states, mask_for(self.attention, attention_mask), past_key_values=past_key_values, **options
        )
        if self.looks_at(encoder_hidden_states):
            x, *crossed = self.crossattention(
                x,
                None,  # its own mask is the next but one
                encoder_hidden_states,
                mask_for(self.crossattention, encoder_attention_mask),
                past_key_values=past_key_values,
                **options,
            )
            weights += crossed
        known = settled(attention_mask)
        if known is not None and known.weights is not None:
            known.weights.append(weights)
        return self.feed_forward_chunks(x)


class BertEncoder(Encoder):
    layer_class: type[modules.BertLayer] = BertLayer

    def call_layer(
        self, layer: Any, x: Tensor, mask: SettledMask, gate: Tensor | None, others: EncoderInputs
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        options: dict[str, Any] = {} if gate is None else {"head_mask": gate}
        if others.output_attentions:
            options["output_attentions"] = True
        found = len(mask.weights or ())
        out = layer(
            x,
            mask_for(layer, mask),
            others.encoder_states,
            mask_for(layer, others.encoder_mask),
            others.past,  # by its place: transformers drops it by its name where layers are checkpointed
            **options,
        )
        if isinstance(out, tuple | list):
            return out[0], out[1:]
        return out, mask.weights[found] if mask.weights is not None and len(mask.weights) > found else ()

    @own
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        *,
        head_mask: Any = None,
        output_attentions: bool | None = False,
        output_hidden_states: bool | None = False,
        return_dict: bool | None = True,
        **others: Any,
    ) -> Any:
        refuse_unknown(others)
        inputs = EncoderInputs(
            encoder_hidden_states, encoder_attention_mask, past_key_values, bool(use_cache), output_attentions,
            output_hidden_states,
        )  # fmt: skip
        return self.run(hidden_states, attention_mask, head_mask, inputs, bool(return_dict or return_dict is None))
