"""Running the stack as transformers runs it: each part is called as transformers calls it, whoever made it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from bertlite.hf import compat
from bertlite.hf.attention import RegisteredAttention
from bertlite.hf.cache import LayerCache
from bertlite.hf.compat import V5
from bertlite.hf.masks import OURS, SettledMask, is_own, mask_for
from bertlite.stack.attention import BACKENDS
from bertlite.stack.body import BertBody
from bertlite.stack.gates import read_gates
from bertlite.stack.inputs import Inputs
from bertlite.stack.layouts import Attention, Layout
from bertlite.stack.masks import values_readable
from bertlite.stack.modules import First
from bertlite.stack.outputs import Encoded

NAMES = {None: "auto", "sdpa": "auto", "auto": "auto"}  # transformers' default name lets the best kernel run


class StockCalls(BertBody[BaseModelOutputWithPoolingAndCrossAttentions]):
    """A body whose parts may be replaced, wrapped and hooked as transformers' may."""

    warn_if_padding_and_no_attention_mask: Any  # a method of PreTrainedModel

    def attention_name(self) -> str:
        name = self.config._attn_implementation
        return NAMES.get(name, name)

    def encode(self, inputs: Inputs, cache: Any) -> Encoded:
        """Run the parts as transformers calls them, so that any of them may be another's; see `BertBody.encode`."""
        ids, unmasked = inputs.input_ids, inputs.attention_mask is None and inputs.cu_seqlens is None
        if not V5 and unmasked and ids is not None and values_readable(ids):
            self.warn_if_padding_and_no_attention_mask(ids, None)
        layout = self.choose(inputs, cache)
        x = self.embeddings(
            layout.pack_ids(inputs.input_ids),
            layout.pack_ids(inputs.token_type_ids),
            layout.positions(inputs.position_ids),
            layout.pack_ids(inputs.inputs_embeds),
        )
        attend = self.attention(layout, x, inputs.attention_mask, inputs.output_attentions, cache)
        first = First(layout.first, partial(attend, first=True)) if inputs.first_token_only else None
        rows = (x.shape[0], x.shape[-2] + (0 if cache is None else cache.length))
        mask = SettledMask(attend, rows, x.dtype, x.device, first)
        options: dict[str, Any] = {}
        if inputs.head_mask is not None:
            options["head_mask"] = self.head_gates(inputs.head_mask, layout, x, first)
        if inputs.encoder_hidden_states is not None:
            states = inputs.encoder_hidden_states
            crossed = self.memory(inputs, x, cache).attend
            options["encoder_hidden_states"] = states
            others = SettledMask(crossed, (x.shape[0], states.shape[1]), x.dtype, x.device)
            options["encoder_attention_mask"] = mask_for(self.encoder, others)
        if cache is not None:
            options |= {"past_key_values": cache.cache, "use_cache": True}
        wanted = {"output_attentions": inputs.output_attentions, "output_hidden_states": inputs.output_hidden_states}
        options |= {name: True for name, value in wanted.items() if value}
        out = self.encoder(x, mask_for(self.encoder, mask), **options)
        every, looked = getattr(out, "hidden_states", None), getattr(out, "cross_attentions", None)
        if V5 and inputs.output_attentions and looked is None:
            looked = ()
        return Encoded(
            last_hidden_state=out[0],
            hidden_states=None if every is None else states_named(inputs.output_hidden_states, every, layout),
            attentions=getattr(out, "attentions", None),
            cross_attentions=looked,
            layout=layout.firsts() if inputs.first_token_only else layout,
        )

    def unpacked(self, encoded: Encoded, return_dict: bool | None) -> Any:
        """Return what `forward` gives its caller; what is recorded comes last in 5, and in the tuples of 4."""
        states, wants_dict = encoded.hidden_states, self.config.return_dict if return_dict is None else return_dict
        recorded_last = V5 or not wants_dict
        last = None if states is None else states[-1]
        recorded = {
            "hidden_states": states,
            "attentions": encoded.attentions,
            "cross_attentions": encoded.cross_attentions,
        }
        out = self.output_type(
            last_hidden_state=encoded.layout.unpack(encoded.last_hidden_state) if last is None else last,
            pooler_output=encoded.pooler_output,
            past_key_values=encoded.past_key_values,
            **({} if recorded_last else recorded),
        )
        for name, value in recorded.items():
            if recorded_last and value is not None:
                out[name] = value
        if wants_dict:
            return out
        return out.to_tuple() if V5 or self.pooler is not None else (out[0], None, *out[1:])

    def head_gates(self, head_mask: Tensor, layout: Layout, x: Tensor, first: First | None) -> list[Tensor]:
        """Return a mask of heads for each layer, (B or 1, N, S or 1, 1); where padding is left out (T or 1, N, 1)."""
        gates = [layout.gate(g) for g in read_gates(head_mask, self.config, *layout.gate_shape, x.dtype)]
        if first is not None and gates:
            gates[-1] = first.of(gates[-1])
        return [gate.transpose(1, 2) if gate.dim() == 4 else gate for gate in gates]

    def recomputes(self) -> bool:
        return any(getattr(layer, "recomputes", False) for layer in getattr(self.encoder, "layer", ()))

    def may_skip_padding(self) -> bool:
        if self.config._attn_implementation not in OURS:
            return False  # "sdpa", the default, computes what it computes there
        layers = getattr(self.encoder, "layer", ())
        if not (getattr(type(self.encoder).forward, "takes_settled_mask", False) and all(map(is_own, layers))):
            return False
        return all(is_own(layer.attention) and is_own(layer.attention.self) for layer in layers)

    def attention(
        self, layout: Layout, x: Tensor, mask: Tensor | None, weights: bool, cache: Any = None
    ) -> Attention | RegisteredAttention:
        if mask is not None and mask.dim() == 4 and cache is not None and cache.self_attention.is_compileable:
            mask = mask[..., : cache.length + x.shape[1]]  # generate masks all the room in a cache of fixed size
        name = self.attention_name()
        if layout.packed_rows is not None or name == "auto" or name in BACKENDS:
            return super().attention(layout, x, mask, weights or name == "eager", cache)
        past, causal = None if cache is None else cache.cache, bool(self.config.is_decoder)
        return RegisteredAttention(name, compat.registered_mask(self.config, x, mask, past, None, causal), weights)

    def cross_attention(
        self, x: Tensor, keys: int, mask: Tensor | None, weights: bool
    ) -> Attention | RegisteredAttention:
        name = self.attention_name()
        if name == "auto" or name in BACKENDS:
            return super().cross_attention(x, keys, mask, weights or name == "eager")
        states = x.new_empty(x.shape[0], keys, x.shape[2])  # only its shape is looked at
        return RegisteredAttention(name, compat.registered_mask(self.config, x, mask, None, states, False), weights)

    def cache_for(self, past: Any, use_cache: bool | None, crossed: bool) -> Any:
        if past is None and not self.returns_cache(use_cache):
            return None
        past = compat.new_cache(self.config, crossed) if past is None else compat.from_legacy(past)
        if not hasattr(past, "get_seq_length"):
            raise TypeError(f"past_key_values is a {type(past).__name__}; pass a cache of transformers")
        return LayerCache(past)

    def cache_out(self, cache: Any) -> Any:
        return cache.cache


def states_named(named: Any, states: Sequence[Tensor], layout: Layout) -> tuple[Tensor | None, ...]:
    """Return the hidden states whose indices a sequence names, from the end too, and None for others; True is all."""
    count = len(states)
    indices = named if isinstance(named, Sequence) else range(count)
    wrong = [i for i in indices if not -count <= i < count]
    if wrong:
        raise ValueError(f"output_hidden_states names {wrong[0]}; there are {count}, 0 to {count - 1}")
    wanted = {i % count for i in indices}
    return tuple(layout.unpack(state) if i in wanted else None for i, state in enumerate(states))
