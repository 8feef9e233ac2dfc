"""What the layers of every transformers have in common; how they are built and called is in `layers4` and `layers5`.

Each part calls the one below it as transformers does, so that a part which somebody has replaced, wrapped or hooked is
given and gives what its author knows from there.

Shapes:  B sequences · S positions · K keys · D hidden · N heads kept
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.bert import modeling_bert as stock

from bertlite import pruning
from bertlite.config import kept_heads, kept_neurons
from bertlite.hf.cache import LayerCache
from bertlite.hf.config import complete_config_, heads_by_layer
from bertlite.hf.masks import SettledMask, settle, settled
from bertlite.hf.parts import BertIntermediate, BertOutput, BertSelfOutput, WithoutStock
from bertlite.stack import modules


class SelfAttention(modules.BertSelfAttention):
    """Attention to oneself, or in a decoder's other attention to an encoder's output."""

    def __init__(self, config: Any, layer_idx: int | None, cross: bool, positions: str | None = None) -> None:
        complete_config_(config)
        own = config
        if positions not in (None, config.position_embedding_type):
            own = copy.copy(config)
            own.position_embedding_type = positions
        super().__init__(own, layer_idx, cross)  # type: ignore[arg-type]  # without a number it has all its heads
        self.config, self.layer_idx = config, layer_idx
        self.scaling = self.attention_head_size**-0.5
        self.is_decoder, self.is_causal = config.is_decoder, config.is_decoder and not cross

    def attend(
        self,
        x: Tensor,
        mask: Any,
        head_mask: Tensor | None = None,
        encoder_states: Tensor | None = None,
        past: Any = None,
        output_attentions: bool | None = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the context, (B, S, N·H), and the attention weights where there are some."""
        cache = None if past is None else LayerCache(past)
        if cache is not None and self.layer_idx is None:
            raise ValueError("this layer was built without layer_idx, under which a cache keeps its keys; give one")
        read = settled(mask)
        if read is None:
            cached = 0 if cache is None or encoder_states is not None else cache.length
            keys = (x if encoder_states is None else encoder_states).shape[1] + cached
            causal = self.is_causal and encoder_states is None
            read = settle(mask, self.config, x, keys, output_attentions, causal)
        attend = read.attend
        source: Any = read.source if encoder_states is None else encoder_states
        if cache is not None and self.layer_idx is not None:
            known = None if encoder_states is None else cache.kept(self.layer_idx)
            if known is None:
                remember = cache.extend if encoder_states is None else cache.keep
                attend = modules.through_cache(attend, partial(remember, self.layer_idx))
            else:
                source = known
        return modules.BertSelfAttention.forward(self, x, attend, self.gate(head_mask), source)

    def gate(self, head_mask: Tensor | None) -> Tensor | None:
        """Return what contexts are multiplied by: transformers' (B or 1, N, S or 1, 1) as (B or 1, S or 1, N, 1).

        Where padding is left out, it is (T or 1, N, 1) already.
        """
        if head_mask is None or head_mask.dim() == 3:
            return head_mask
        if head_mask.dim() != 4 or head_mask.shape[-1] != 1:
            raise ValueError(f"head_mask has shape {tuple(head_mask.shape)}; a layer takes (1 or batch, heads, 1, 1)")
        if head_mask.shape[1] == self.config.num_attention_heads != self.num_attention_heads:
            head_mask = head_mask[:, list(kept_heads(self.config, self.layer_idx))]  # type: ignore[arg-type]  # as above
        return head_mask.transpose(1, 2)


class Attention(modules.BertAttention, WithoutStock, stock.BertAttention):
    """Attention and its output projection."""

    def __init__(self, attention: SelfAttention, config: Any, layer_idx: int | None, cross: bool) -> None:
        nn.Module.__init__(self)
        self.self = attention
        self.output = BertSelfOutput(config, attention.all_head_size)
        self.pruned_heads = set() if cross or layer_idx is None else set(config.pruned_heads.get(layer_idx, ()))
        self.is_cross_attention = cross

    def prune_heads(self, heads: Iterable[int]) -> None:
        """Remove heads of this layer, numbered as in the unpruned one; those that are gone may be named again.

        They are entered in the config that a model and its parts share; any other model that was made of the same
        config object then has them too.  `model.prune_heads` gives the model a config of its own.
        """
        config: Any = self.self.config
        layer: Any = self.self.layer_idx
        number = 0 if layer is None else layer
        gone = self.pruned_heads.union(*heads_by_layer({number: heads}, config).values())
        if gone == self.pruned_heads:
            return
        pruning.check_linear_parts(pruning.attention_parts(number, self))
        before = [head for head in range(config.num_attention_heads) if head not in self.pruned_heads]
        pruning.cut_heads_(self, [i for i, head in enumerate(before) if head not in gone])
        self.pruned_heads = gone
        if layer is not None:
            config.pruned_heads = {**config.pruned_heads, layer: sorted(gone)}


class Layer(modules.BertLayer, WithoutStock, stock.BertLayer):
    """A layer that transformers turns checkpointing on and off for, in the way of its version."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        nn.Module.__init__(self)
        complete_config_(config)
        self.layer_idx, self.checkpointing = layer_idx, None  # type: ignore[assignment]  # a part alone has no number
        self.chunk_size_feed_forward, self.seq_len_dim = config.chunk_size_feed_forward, 1
        self.is_decoder, self.add_cross_attention = config.is_decoder, config.add_cross_attention
        self.attention = self.make_attention(config, layer_idx, False)
        if config.add_cross_attention:
            self.crossattention = self.make_attention(config, layer_idx, True)
        width = config.intermediate_size if layer_idx is None else len(kept_neurons(config, layer_idx))
        self.intermediate = BertIntermediate(config, width)
        self.output = BertOutput(config, width)

    def make_attention(self, config: Any, layer_idx: int | None, cross: bool) -> Attention:
        raise NotImplementedError

    @property
    def recomputes(self) -> bool:
        return bool(self.gradient_checkpointing and self.training and torch.is_grad_enabled())

    def looks_at(self, encoder_states: Tensor | None) -> bool:
        """Return whether there is an encoder's output to look at.

        Raises:
            ValueError: the layer cannot.
        """
        if encoder_states is None or not self.is_decoder:
            return False
        if not hasattr(self, "crossattention"):
            raise ValueError(
                "encoder_hidden_states are given to a layer without cross-attention; set add_cross_attention"
            )
        return True

    def feed_forward_chunks(self, x: Tensor) -> Tensor:
        """Run the feed-forward network, on `chunk_size_feed_forward` positions at a time."""
        if not self.chunk_size_feed_forward:
            return self.feed_forward_chunk(x)
        return torch.cat([self.feed_forward_chunk(part) for part in x.split(self.chunk_size_feed_forward, -2)], -2)

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        return self.feed_forward(attention_output)


class Encoder(modules.BertEncoder, WithoutStock, stock.BertEncoder):
    """The layers, one after the other."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        nn.Module.__init__(self)
        complete_config_(config)
        self.config, self.gradient_checkpointing = config, False
        self.layer = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_hidden_layers))

    def call_layer(
        self, layer: nn.Module, x: Tensor, mask: SettledMask, gate: Tensor | None, others: "EncoderInputs"
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Run a layer as transformers does; return its output and the attention weights that it gives."""
        raise NotImplementedError

    def run(self, x: Tensor, mask: Any, head_mask: Any, others: "EncoderInputs", return_dict: bool | None) -> Any:
        """Run the layers on hidden states and return transformers' output, or the tuple of what it holds."""
        read, crossed = self.settle(x, mask, others)
        others = replace(others, encoder_mask=crossed)
        states, weights = [], []
        first, last = read.first, len(self.layer) - 1
        for i, layer in enumerate(self.layer):
            if others.output_hidden_states:
                states.append(x)
            if first is not None and i == last:
                read = replace(read, attend=first.attend, first=None, source=x)
                x = first.of(x)
            gate = None if head_mask is None else head_mask[i]
            x, given = self.call_layer(layer, x, read, gate, others)
            if others.output_attentions:
                if not given or given[0] is None:
                    raise ValueError(f"layer {i} is a {type(layer).__name__} and gave no attention weights")
                weights.append(given)
        if first is not None and not self.layer:
            x = first.of(x)
        crosses = bool(weights) and len(weights[0]) > 1
        out = BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            past_key_values=others.past if others.returns_past else None,
            hidden_states=(*states, x) if others.output_hidden_states else None,
            attentions=tuple(each[0] for each in weights) if others.output_attentions else None,
            cross_attentions=tuple(each[1] for each in weights) if crosses else None,
        )
        return out if return_dict or return_dict is None else out.to_tuple()

    def settle(self, x: Tensor, mask: Any, others: "EncoderInputs") -> tuple[SettledMask, SettledMask | None]:
        """Read the masks once, for all layers."""
        wanted, states = others.output_attentions, others.encoder_states
        read = settled(mask)
        if read is None:
            past = 0 if others.past is None else LayerCache(others.past).length
            read = settle(mask, self.config, x, x.shape[1] + past, wanted, bool(self.config.is_decoder))
        crossed = None
        if states is not None:
            crossed = settle(others.encoder_mask, self.config, x, states.shape[1], wanted)
        return replace(read, weights=[] if wanted else None), crossed


@dataclass(frozen=True)
class EncoderInputs:
    """What all layers are given beside hidden states and a mask."""

    encoder_states: Tensor | None = None
    encoder_mask: Any = None
    past: Any = None
    returns_past: bool = False
    output_attentions: bool | None = False
    output_hidden_states: bool | None = False
    cache_position: Tensor | None = None
