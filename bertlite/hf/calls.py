"""Run the stack like transformers: each part, ours or not, is called as transformers calls it."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from bertlite.hf import compat
from bertlite.hf.masks import OURS, LayerCache, gets_context, head_mask_of, is_ours, mask_tensor, past_of
from bertlite.stack.attention import BACKENDS, Backend, LayerContext
from bertlite.stack.body import BertBody
from bertlite.stack.inputs import ForwardArgs, values_readable
from bertlite.stack.layouts import Layout, Packed

TABLES = {"word": "vocab_size", "token_type": "type_vocab_size", "position": "max_position_embeddings"}
FIRST = ("last_hidden_state", "pooler_output", compat.CACHE)  # the first fields of an output
NAMES = {None: "auto", "sdpa": "auto", "auto": "auto"}  # transformers' default name lets the best kernel run


class StockCalls(BertBody[BaseModelOutputWithPoolingAndCrossAttentions]):
    """A body whose parts may be replaced, wrapped and hooked as transformers' may."""

    warn_if_padding_and_no_attention_mask: Any  # a method of PreTrainedModel
    cache_name = compat.CACHE  # an encoder that is not ours takes the cache under this name

    def attention_name(self) -> str:
        name = self.config._attn_implementation
        return NAMES.get(name, name)

    def run_encoder(self, x: Tensor, inputs: LayerContext) -> Any:
        """Run the encoder, ours or not; return its output and, if they are kept, the inputs of each layer."""
        encoder = self.encoder
        if gets_context(encoder, inputs, x):
            out = encoder(x, inputs=inputs)
        else:
            # An encoder that is not ours gets every input in the form that transformers has for it.
            options: dict[str, Any] = {"output_attentions": True} if inputs.weights is not None else {}
            if inputs.keep_states:
                options["output_hidden_states"] = True
            if inputs.gates is not None:
                options["head_mask"] = [head_mask_of(inputs.at(i)) for i in range(len(inputs.gates))]
            if inputs.cache is not None:
                options |= {self.cache_name: past_of(inputs), "use_cache": True}
            if inputs.encoder is not None:
                options["encoder_hidden_states"] = inputs.encoder.source
                options["encoder_attention_mask"] = mask_tensor(inputs.encoder, x)
            out = encoder(x, mask_tensor(inputs, x), **options)

        # Ours has left its weights in the context; another encoder returns them.
        for given, name in ((inputs, "attentions"), (inputs.encoder, "cross_attentions")):
            found = getattr(out, name, None)
            if given is not None and given.weights is not None and found is not None:
                given.weights.update(enumerate(found))
        states = getattr(out, "hidden_states", None)
        return out[0], None if states is None else states[:-1]

    def encode(self, args: ForwardArgs, cache: Any) -> tuple[dict[str, Any], Layout]:
        """Run the parts, and return the results of transformers' model: see `BertBody.encode`."""
        ids, unmasked = args.input_ids, args.attention_mask is None and args.cu_seqlens is None
        if compat.WARNS_OF_PADDING and unmasked and ids is not None and values_readable(ids):
            self.warn_if_padding_and_no_attention_mask(ids, None)
        parts, layout = super().encode(args, cache)
        named: Any = args.output_hidden_states
        if compat.INDEXES_STATES and isinstance(named, int) and not isinstance(named, bool):
            named = [named]
        if isinstance(named, Sequence) and parts["hidden_states"] is not None:
            parts["hidden_states"] = states_named(named, parts["hidden_states"])
        if compat.RECORDS_CROSS and args.output_attentions and parts["cross_attentions"] is None:
            parts["cross_attentions"] = ()
        return parts, layout

    def output(self, parts: dict[str, Any], return_dict: bool | None) -> Any:
        """Return the output of `forward`; hidden states and attentions come last in 5, and in the tuples of 4."""
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        parts[compat.CACHE] = parts.pop("past_key_values")
        if wants_dict and compat.RETURNS_TUPLES:
            return self.output_type(**parts)
        out = self.output_type(**{name: parts[name] for name in FIRST})
        for name, value in parts.items():
            if name not in FIRST and value is not None:
                out[name] = value
        if wants_dict:
            return out
        return out.to_tuple() if not compat.RETURNS_TUPLES or self.pooler is not None else (out[0], None, *out[1:])

    @property
    def limits(self) -> Any:
        """The config with the sizes of the embeddings' tables, which may have been replaced."""
        config, embeddings, sizes = self.config, self.embeddings, {}
        for name, field in TABLES.items():
            table = getattr(embeddings, f"{name}_embeddings", None)
            if isinstance(table, nn.Embedding):
                has_padding = name == "position" and getattr(embeddings, "padding_row", None) is not None
                size = table.num_embeddings - has_padding
                if size != getattr(config, field):
                    sizes[field] = size
        return SimpleNamespace(**{**vars(config), **sizes}) if sizes else config

    def recomputes(self) -> bool:
        return any(getattr(layer, "recomputes", False) for layer in getattr(self.encoder, "layer", ()))

    def may_skip_padding(self) -> bool:
        if self.config._attn_implementation not in OURS:
            return False  # "sdpa", the default, gives transformers' results
        layers = getattr(self.encoder, "layer", ())
        if not (getattr(type(self.encoder).forward, "takes_layer_context", False) and all(map(is_ours, layers))):
            return False
        return all(is_ours(layer.attention) and is_ours(layer.attention.self) for layer in layers)

    def select_backend_and_mask(
        self, args: ForwardArgs, layout: Layout, x: Tensor, cache: Any, crosses: bool = False
    ) -> tuple[Backend, Any]:
        mask, past = args.encoder_attention_mask if crosses else args.attention_mask, None
        if cache is not None and not crosses:
            past = cache.cache
            if mask is not None and mask.dim() == 4 and cache.self_attention.is_compileable:
                mask = mask[..., : cache.length + x.shape[1]]  # generate's mask covers all the room of a static cache
                args = replace(args, attention_mask=mask)
        if isinstance(layout, Packed) or args.attention == "auto" or args.attention in BACKENDS:
            return super().select_backend_and_mask(args, layout, x, cache, crosses)
        causal = bool(self.config.is_decoder) and not crosses
        states = args.encoder_hidden_states if crosses else None
        states = None if states is None else x.new_empty(states.shape)  # only its shape is read
        backend = Backend(args.attention, compat.run_registered)
        return backend, compat.registered_mask(self.config, x, mask, past, states, causal)

    def cache_for(self, past: Any, crossed: bool) -> Any:
        return LayerCache(compat.cache_of(past, self.config, crossed), self.config)

    def cache_out(self, cache: Any) -> Any:
        return cache.cache


def states_named(named: Sequence[int], states: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the hidden states with these indices, which may count from the end, and None for other states."""
    count = len(states)
    wrong = [i for i in named if not -count <= i < count]
    if wrong:
        raise ValueError(f"output_hidden_states names {wrong[0]}; there are {count}, 0 to {count - 1}")
    wanted = {i % count for i in named}
    return tuple(state if i in wanted else None for i, state in enumerate(states))


def check_unused(model: Any, attention_mask: Tensor | None, unused: dict[str, Any]) -> None:
    """Check the arguments that a model's `forward` takes because transformers' does, and ignores.

    Raises:
        TypeError: the model does not use one of them.
        ValueError: transformers ignores one too, but not with this attention and mask.
    """
    given = {name: value for name, value in unused.items() if value is not None}
    wrong = sorted(given.keys() - compat.IGNORED)
    if wrong:
        raise TypeError(f"{type(model).__name__}.forward has no {wrong[0]}; leave it None")
    name, causal = model.config._attn_implementation, given.get("is_causal")
    unmasked = attention_mask is None or (causal is not None and bool(attention_mask.all()))
    if causal not in (None, model.config.is_decoder) and unmasked and name != "eager":
        raise ValueError(f"is_causal is {causal}; set is_decoder={causal} in the config of the model instead")
    packed = [each for each in given if each.startswith(("cu_seq_lens", "max_length"))]
    if packed and name not in (None, "sdpa", "auto", *BACKENDS):
        raise ValueError(f"{packed[0]} does not reach attention {name!r}; use 'packed', and cu_seqlens")
