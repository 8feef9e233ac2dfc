"""What the layers of every transformers have in common; how they are built and called is in `layers4` and `layers5`.

Each part calls the one below it as transformers does, if it is another's, so that a part which somebody has replaced,
wrapped or hooked is given and gives what its author knows from there.

Shapes:  B sequences · S positions · K keys · D hidden · N heads kept
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.bert import modeling_bert as stock

from bertlite import pruning
from bertlite.config import kept_neurons
from bertlite.hf.cache import past_of
from bertlite.hf.config import complete_config_, heads_by_layer
from bertlite.hf.masks import gate_of, read_inputs, takes_inputs
from bertlite.hf.parts import BertIntermediate, BertOutput, BertSelfOutput, WithoutStock
from bertlite.stack import modules
from bertlite.stack.layer_inputs import LayerInputs


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

    def run(self, x: Tensor, mask: Any, states: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return the context, (B, S, N·H), and the attention weights where there are some."""
        causal = self.is_causal and states is None
        inputs = read_inputs(x, mask, self.config, self.layer_idx, states=states, causal=causal, **options)
        return modules.BertSelfAttention.forward(self, x, inputs)


class Attention(modules.BertAttention, WithoutStock, stock.BertAttention):
    """Attention and its output projection."""

    def __init__(self, attention: SelfAttention, config: Any, layer_idx: int | None, cross: bool) -> None:
        nn.Module.__init__(self)
        self.self = attention
        self.output = BertSelfOutput(config, attention.all_head_size)
        self.pruned_heads = set() if cross or layer_idx is None else set(config.pruned_heads.get(layer_idx, ()))
        self.is_cross_attention = cross
        self.config, self.layer_idx = config, layer_idx  # type: ignore[assignment]  # a part alone has no number

    def run(self, x: Tensor, mask: Any, states: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return the output, (B, S, D), and the attention weights where there are some."""
        causal = bool(self.config.is_decoder) and not self.is_cross_attention
        inputs = read_inputs(x, mask, self.config, self.layer_idx, states=states, causal=causal, **options)
        return modules.BertAttention.forward(self, x, inputs)

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
        self.config = config
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

    def read(self, x: Tensor, mask: Any, states: Tensor | None, encoder_mask: Any, **options: Any) -> LayerInputs:
        """Return the arguments of a call as transformers makes it.

        Raises:
            ValueError: there is an encoder's output, and no cross-attention to look at it.
        """
        causal = bool(self.config.is_decoder)
        inputs = read_inputs(x, mask, self.config, self.layer_idx, causal=causal, **options)
        if states is None or isinstance(mask, LayerInputs) or not self.is_decoder:
            return inputs
        if not hasattr(self, "crossattention"):
            raise ValueError(
                "encoder_hidden_states are given to a layer without cross-attention; set add_cross_attention"
            )
        options.pop("head_mask", None)
        crossed = read_inputs(x, encoder_mask, self.config, self.layer_idx, states=states, **options)
        return replace(inputs, encoder=crossed)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.feed_forward_chunk(x)

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        return modules.BertLayer.feed_forward(self, attention_output)


class Encoder(modules.BertEncoder, WithoutStock, stock.BertEncoder):
    """The layers, one after the other."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        nn.Module.__init__(self)
        complete_config_(config)
        self.config, self.gradient_checkpointing = config, False
        self.layer = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_hidden_layers))

    def call(self, part: nn.Module, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Run a layer; return its output, and keep the attention weights that it gives."""
        out = part(x, inputs) if takes_inputs(part, inputs, x) else self.call_other(part, x, inputs)
        given: Sequence[Tensor | None] = ()
        if isinstance(out, tuple | list):
            out, *given = out
        if inputs.weights is not None:
            if given and given[0] is not None:
                inputs.weights[inputs.layer] = given[0]
            if inputs.layer not in inputs.weights:
                raise ValueError(f"layer {inputs.layer} is a {type(part).__name__} and gave no attention weights")
            if inputs.encoder is not None and inputs.encoder.weights is not None and len(given) > 1:
                inputs.encoder.weights[inputs.layer] = given[1]  # type: ignore[assignment]
        return out

    def call_other(self, part: nn.Module, x: Tensor, inputs: LayerInputs) -> Any:
        """Run a layer that is not ours as transformers does."""
        raise NotImplementedError

    def run(
        self,
        x: Tensor,
        mask: Any,
        head_mask: Any,
        states: Tensor | None,
        encoder_mask: Any,
        past: Any,
        returns_past: bool,
        output_attentions: bool | None,
        output_hidden_states: bool | None,
        return_dict: bool | None,
    ) -> Any:
        """Run the layers on hidden states and return transformers' output, or the tuple of what it holds."""
        inputs = mask
        if not isinstance(mask, LayerInputs):
            wanted = bool(output_attentions)
            given = read_inputs(
                x, mask, self.config, 0, past=past, output_attentions=wanted, causal=bool(self.config.is_decoder)
            )
            gates = None
            if head_mask is not None:
                gates = [gate_of(head_mask[i], self.config, i) for i in range(len(self.layer))]
            crossed = None
            if states is not None:
                crossed = read_inputs(
                    x, encoder_mask, self.config, 0, states=states, past=past, output_attentions=wanted
                )
                crossed = replace(crossed, weights={} if wanted else None)
            inputs = replace(
                given, gates=gates, encoder=crossed, keep_states=bool(output_hidden_states),
                weights={} if wanted else None,
            )  # fmt: skip
        x, kept = modules.BertEncoder.forward(self, x, inputs)
        crossed = inputs.encoder
        out = BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            past_key_values=past_of(inputs) if returns_past else None,
            hidden_states=None if kept is None else (*kept, x),
            attentions=inputs.all_weights,
            cross_attentions=tuple(crossed.weights.values()) if crossed is not None and crossed.weights else None,
        )
        return out if return_dict or return_dict is None else out.to_tuple()
