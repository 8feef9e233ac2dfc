"""The common code of layers for all transformers; `layers4` and `layers5` build and call them for each version.

A part that is not ours is called as transformers calls it.  So a part that a user has replaced, wrapped or hooked gets
and returns the values that its author expects.

Shapes:  B sequences · S positions · K keys · D hidden · N heads kept
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.bert import modeling_bert as stock

from bertlite.config import kept_neurons, normalise_heads
from bertlite.hf.compat import CACHE, IGNORED, complete_config_, run_registered
from bertlite.hf.masks import gate_of, gets_context, layer_context, past_of
from bertlite.hf.parts import BertIntermediate, BertOutput, BertSelfOutput, WithoutStock
from bertlite.models import structure as pruning
from bertlite.stack import modules
from bertlite.stack.attention import Attended, LayerContext

CONTEXT = {  # {argument of transformers: its name in `layer_context`}
    "attention_mask": "mask",
    "encoder_hidden_states": "states",
    "encoder_attention_mask": "encoder_mask",
    **{name: name for name in ("past_key_values", "head_mask", "output_attentions", "output_hidden_states")},
}


def with_own_weights(inputs: LayerContext) -> LayerContext:
    """Return inputs with room of their own for attention weights, also for cross-attention."""
    encoder = None if inputs.encoder is None else with_own_weights(inputs.encoder)
    return replace(inputs, weights={}, encoder=encoder)


class Part:
    """First base of attention, of a layer and of the encoder."""

    config: Any
    layer_idx: Any = 0  # the encoder has this one, and a part that is built alone may have None
    compute: Any
    layer_context: Any = layer_context  # (x, mask, states, …): the arguments of a call of transformers as one value
    call: Any  # (part, x, inputs): call a part that is not ours as transformers does
    order: tuple[str, ...]  # the arguments of transformers' forward after the hidden states
    keywords: tuple[str, ...] = ()  # more of them, which are not positional

    def forward(self, hidden_states: Tensor, *args: Any, inputs: LayerContext | None = None, **options: Any) -> Any:
        """Compute with the arguments of transformers, or with the context of a model of ours."""
        if inputs is not None:
            return self.compute(hidden_states, inputs)
        return self.compute(hidden_states, *self.read(hidden_states, self.bind(args, options)))

    forward.takes_layer_context = True  # type: ignore[attr-defined]

    def bind(self, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of transformers by name, without those that every forward may ignore.

        The cache has its name of before 5.24, past_key_values.

        Raises:
            TypeError: an argument is unknown, or given twice.
        """
        given, known = {**dict(zip(self.order, args, strict=False)), **options}, (*self.order, *self.keywords)
        unknown = sorted(given.keys() - {*known, *IGNORED})
        if unknown or len(given) < len(args) + len(options):
            wrong = f"no argument {', '.join(unknown)}" if unknown else "an argument too many, or one given twice"
            raise TypeError(f"{type(self).__name__} has {wrong}; its arguments are {', '.join(self.order)}")
        given = {name: given[name] for name in known if name in given}
        cache = given.pop("cache", None)
        if cache is not None and given.get("past_key_values") is not None:
            raise TypeError("give cache or past_key_values, not both")
        return given if cache is None else {**given, "past_key_values": cache}

    def read(self, x: Tensor, given: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of `compute` for a call of transformers."""
        return (self.layer_context(x, **{ours: given[name] for name, ours in CONTEXT.items() if name in given}),)

    def run_part(self, part: nn.Module, x: Tensor, inputs: LayerContext) -> Any:
        """Run a part of this part, ours or not."""
        return part(x, inputs=inputs) if gets_context(part, inputs, x) else self.call(part, x, inputs)


class SelfAttention(Part, modules.BertSelfAttention):
    """Attention to oneself, or in a decoder's other attention to an encoder's output."""

    def __init__(self, config: Any, layer_idx: int | None, cross: bool, positions: str | None = None) -> None:
        complete_config_(config)
        changed = config
        if positions not in (None, config.position_embedding_type):
            changed = copy.copy(config)
            changed.position_embedding_type = positions
        super().__init__(changed, layer_idx, cross)  # type: ignore[arg-type]  # without a number no head is pruned
        self.config, self.layer_idx = config, layer_idx
        self.scaling = self.attention_head_size**-0.5
        self.is_decoder, self.is_causal = config.is_decoder, config.is_decoder and not cross

    def compute(self, x: Tensor, inputs: LayerContext) -> Attended:
        if inputs.backend.kernel is run_registered:
            return run_registered(self, *self.project(x, inputs), inputs)
        return modules.BertSelfAttention.forward(self, x, inputs)


class Attention(Part, modules.BertAttention, WithoutStock, stock.BertAttention):
    """Attention and its output projection."""

    def __init__(self, attention: SelfAttention, config: Any, layer_idx: int | None, cross: bool) -> None:
        nn.Module.__init__(self)
        self.self = attention
        self.LayerNorm = modules.norm(config, modules.normalises_first(config, layer_idx or 0))
        self.output = BertSelfOutput(config, attention.all_head_size)
        self.pruned_heads = set() if cross or layer_idx is None else set(config.pruned_heads.get(layer_idx, ()))
        self.config, self.layer_idx = config, layer_idx
        self.is_cross_attention, self.is_causal = cross, attention.is_causal

    def compute(self, x: Tensor, inputs: LayerContext) -> Attended:
        context, weights = self.run_part(self.self, *(self.normalised(x, inputs) if self.LayerNorm else (x, inputs)))
        return self.output(context, x), weights

    def prune_heads(self, heads: Iterable[int]) -> None:
        """Remove heads of this layer, numbered as in the unpruned one; removed heads may be named again.

        They are entered in the config that a model and its parts share.  Other models with the same config object then
        have them too.  `model.prune_heads` gives the model a config of its own.
        """
        config: Any = self.self.config
        layer: Any = self.self.layer_idx
        number = 0 if layer is None else layer
        named = normalise_heads({number: heads}, config.num_hidden_layers, config.num_attention_heads)
        gone = self.pruned_heads.union(*named.values())
        if gone == self.pruned_heads:
            return
        pruning.check_linear_parts(pruning.attention_parts(number, self))
        before = [head for head in range(config.num_attention_heads) if head not in self.pruned_heads]
        pruning.resize_attention_(self, pruning.move_units(before, [head for head in before if head not in gone]))
        self.pruned_heads = gone
        if layer is not None:
            config.pruned_heads = {**config.pruned_heads, layer: sorted(gone)}


class LayerOrEncoder(Part):
    """First base of a layer and of the encoder."""

    def layer_context(
        self, x: Tensor, mask: Any = None, states: Tensor | None = None, encoder_mask: Any = None, **options: Any
    ) -> LayerContext:
        """Return the arguments of a call of transformers as one value.

        Raises:
            ValueError: there is an encoder's output, but no cross-attention.
        """
        inputs = layer_context(self, x, mask, **options)
        if states is None or not self.config.is_decoder:
            return inputs
        if not self.config.add_cross_attention:
            raise ValueError(
                "encoder_hidden_states are given to a layer without cross-attention; set add_cross_attention"
            )
        options.pop("head_mask", None)
        return replace(inputs, encoder=layer_context(self, x, encoder_mask, states, **options))


class Layer(LayerOrEncoder, modules.BertLayer, WithoutStock, stock.BertLayer):
    """A layer for which transformers turns checkpointing on and off, in the way of its version."""

    make_attention: Any  # (config, layer_idx, cross)
    feed_forward_chunk: Any  # as in transformers' class, for code that replaces it

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        nn.Module.__init__(self)
        complete_config_(config)
        self.config, self.layer_idx, self.checkpointing = config, layer_idx, None
        self.chunk_size_feed_forward, self.seq_len_dim = config.chunk_size_feed_forward, 1
        self.is_decoder, self.add_cross_attention = config.is_decoder, config.add_cross_attention
        self.attention = self.make_attention(config, layer_idx, False)
        if config.add_cross_attention:
            self.crossattention = self.make_attention(config, layer_idx, True)
        width = config.intermediate_size if layer_idx is None else len(kept_neurons(config, layer_idx))
        self.intermediate = BertIntermediate(config, width)
        self.output = BertOutput(config, width)

    def run_attention(self, attention: nn.Module, x: Tensor, inputs: LayerContext) -> Tensor:
        x, weights = self.run_part(attention, x, inputs)
        if weights is not None:
            inputs.keep_weights(weights)
        return x

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the function that runs a checkpointed layer, which transformers sets, is never re-entrant.

        torch's re-entrant checkpoints see only gradients of tensors among the arguments: with frozen embeddings they
        lose all gradients.  The other kind, which gives the same gradients, runs instead.  As in transformers, the
        attribute is no property: code outside patches, deletes and restores it.
        """
        if name == "_gradient_checkpointing_func" and getattr(value, "func", value) is checkpoint:
            is_reentrant = getattr(value, "keywords", {}).get("use_reentrant") is not False
            value = partial(value, use_reentrant=False) if is_reentrant else value
        super().__setattr__(name, value)

    @property
    def recomputes(self) -> bool:
        return bool(self.gradient_checkpointing and self.training and torch.is_grad_enabled())

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.feed_forward_chunk(x)


class Encoder(LayerOrEncoder, modules.BertEncoder, WithoutStock, stock.BertEncoder):
    """The layers, one after the other."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        complete_config_(config)
        super().__init__(config)
        self.config, self.gradient_checkpointing = config, False

    def run_layer(self, part: nn.Module, x: Tensor, inputs: LayerContext) -> Tensor:
        """Run a layer; return its output, and keep its attention weights."""
        out = self.run_part(part, x, inputs)
        out, *weights = out if isinstance(out, tuple | list) else (out,)
        for each, found in zip((inputs, inputs.encoder), weights, strict=False):
            if each is not None and each.weights is not None and found is not None:
                each.weights[inputs.layer] = found
        if inputs.weights is not None and inputs.layer not in inputs.weights:
            raise ValueError(f"layer {inputs.layer} is a {type(part).__name__} and gave no attention weights")
        return out

    def layer_context(  # type: ignore[override]  # `read` names the arguments
        self, x: Tensor, *, head_mask: Any = None, output_hidden_states: bool | None = False, **options: Any
    ) -> LayerContext:
        """Return the arguments of a call; attention weights, if wanted, come from all layers."""
        gates = None if head_mask is None else [gate_of(head_mask[i], self.config, i) for i in range(len(self.layer))]
        inputs = replace(super().layer_context(x, **options), gates=gates, keep_states=bool(output_hidden_states))
        return with_own_weights(inputs) if options.get("output_attentions") else inputs

    def compute(self, x: Tensor, inputs: LayerContext, returns_past: bool = True, return_dict: bool = True) -> Any:
        """Run the layers on hidden states and return transformers' output, or the tuple of its values."""
        x, kept = modules.BertEncoder.forward(self, x, inputs)
        crossed = inputs.encoder
        out = BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            hidden_states=None if kept is None else (*kept, x),
            attentions=None if inputs.weights is None else tuple(inputs.weights.values()),
            cross_attentions=tuple(crossed.weights.values()) if crossed is not None and crossed.weights else None,
            **{CACHE: past_of(inputs) if returns_past else None},
        )
        return out if return_dict else out.to_tuple()
