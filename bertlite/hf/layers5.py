"""Attention, layers and the encoder as transformers 5 builds and calls them.

Arguments that transformers 4 took and 5 does not, such as `head_mask` and `output_attentions`, are keywords here.
"""

from typing import Any

from torch import Tensor, nn
from transformers.models.bert import modeling_bert as stock

from bertlite.hf import compat
from bertlite.hf.cache import past_of
from bertlite.hf.layers import Attention, Encoder, Layer, SelfAttention
from bertlite.hf.masks import head_mask_of, mask_tensor
from bertlite.hf.parts import WithoutStock
from bertlite.stack import modules
from bertlite.stack.attention import LayerContext

READ = {"head_mask", "output_attentions"}


def read_options(options: dict[str, Any], past: Any) -> dict[str, Any]:
    """Return the options that bertlite reads, from all that transformers passes to every layer, with the cache.

    Args:
        options: since 5.24 they hold the cache, as `cache`.
        past: the cache under its older name.

    Raises:
        TypeError: there are other options, which the message names, or a cache under each name.
    """
    cache = options.get("cache")
    if cache is not None and past is not None:
        raise TypeError("give cache or past_key_values, not both")
    unknown = sorted(options.keys() - {*compat.IGNORED, "use_cache", "return_dict", "cache"})
    if unknown:
        raise TypeError(f"attention has no argument {', '.join(unknown)}")
    return {"past": past if cache is None else cache, **{name: options[name] for name in READ & options.keys()}}


def options_for_other(inputs: LayerContext) -> dict[str, Any]:
    """Return the keywords for a part that is not ours, in addition to transformers 5's own."""
    gate = head_mask_of(inputs)
    options: dict[str, Any] = {} if gate is None else {"head_mask": gate}
    return options if inputs.weights is None else {**options, "output_attentions": True}


class SelfOrCrossAttention(SelfAttention, WithoutStock):
    crosses = False

    def __init__(self, config: Any, is_causal: bool = False, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx, self.crosses)
        self.is_causal = is_causal


class BertSelfAttention(SelfOrCrossAttention, stock.BertSelfAttention):
    def read(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        *,
        encoder_hidden_states: None = None,  # both kinds of attention get it
        **options: Any,
    ) -> tuple[Any, ...]:
        return (self.layer_context(hidden_states, attention_mask, **read_options(options, past_key_values)),)


class BertCrossAttention(SelfOrCrossAttention, getattr(stock, "BertCrossAttention", object)):  # type: ignore[misc]
    crosses = True

    def read(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        if encoder_hidden_states is None:
            raise ValueError("cross-attention needs encoder_hidden_states, and they are None")
        options = {**read_options(options, past_key_values), "head_mask": None}  # cross-attention has none
        return (self.layer_context(hidden_states, attention_mask, encoder_hidden_states, **options),)


class LayerSignature:
    """First base of attention with its output projection, and of a layer, which are called alike."""

    layer_context: Any  # another base has it

    def read(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        options = read_options(options, past_key_values)
        given = attention_mask, encoder_hidden_states, encoder_attention_mask
        return (self.layer_context(hidden_states, *given, **options),)


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
        self, x: Tensor, mask: Any, states: Any = None, encoder_mask: Any = None, **options: Any
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

    def read(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        *,
        head_mask: Any = None,
        output_attentions: bool | None = False,
        output_hidden_states: bool | None = False,
        return_dict: bool | None = True,
        **others: Any,
    ) -> Any:
        past = read_options(others, past_key_values)["past"]
        inputs = self.layer_context(
            hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask, head_mask=head_mask,
            past=past, output_attentions=output_attentions, output_hidden_states=output_hidden_states,
        )  # fmt: skip
        return inputs, bool(use_cache), return_dict is None or return_dict
