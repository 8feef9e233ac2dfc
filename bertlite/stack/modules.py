"""The BERT stack, bottom to top.  Attribute names are checkpoint keys.

Shapes:  B sequences · S positions · D hidden · N heads kept · H head dim;  … is (B, S) or, packed, (T,)
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.config import POSITIONS, BertConfig, kept_heads, kept_neurons, own_field
from bertlite.stack.attention import Attended, LayerContext, attend, drop
from bertlite.stack.positions import DISTANCES, PROJECTIONS
from bertlite.support.activations import ACTIVATIONS


def drop_by(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a dropout: to packed tokens, (T, D), with `drop`; to rows with the draws of transformers."""
    if type(module) is nn.Dropout and module.training and x.dim() == 2:
        return drop(x, module.p)
    return module(x)


class BertEmbeddings(nn.Module):
    """Add the embeddings of a token's word, segment and position, then normalise."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings: Any = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.adds_positions = POSITIONS[config.position_embedding_type].in_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,  # (…,)
        token_type_ids: Tensor | None = None,  # (…,), zeros if not given
        position_ids: Tensor | None = None,  # (…,), (1, S) or (S,), counted from 0 if not given
        inputs_embeds: Tensor | None = None,  # (…, D), instead of input_ids
    ) -> Tensor:  # (…, D)
        x = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if token_type_ids is None:
            token_type_ids = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
        x = self.add_positions(x + self.token_type_embeddings(token_type_ids), position_ids)
        return drop_by(self.dropout, x if self.LayerNorm is None else self.LayerNorm(x))

    def add_positions(self, x: Tensor, position_ids: Tensor | None) -> Tensor:  # (…, D) -> (…, D)
        """Add the vector of each position, unless positions are only in the scores."""
        if not self.adds_positions:
            return x
        if position_ids is None:
            position_ids = torch.arange(x.shape[-2], device=x.device)[None]
        if hasattr(self.position_embeddings.weight, "grad_sample"):  # Opacus, which needs (B, S)
            position_ids = position_ids.expand(x.shape[:-1])
        return x + self.position_embeddings(position_ids)


class BertSelfAttention(nn.Module):
    """Project to queries, keys and values, and let every head attend; heads of cross-attention are never pruned."""

    distance_embedding: nn.Embedding  # only some kinds of positions have it

    def __init__(self, config: BertConfig, layer: int, cross: bool = False) -> None:
        super().__init__()
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.num_attention_heads = config.num_attention_heads if cross else len(kept_heads(config, layer))
        self.all_head_size = self.num_attention_heads * self.attention_head_size
        self.query = linear(config.hidden_size, self.all_head_size)
        self.key = linear(config.hidden_size, self.all_head_size)
        self.value = linear(config.hidden_size, self.all_head_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.position_embedding_type = "absolute" if cross else config.position_embedding_type
        self.layer_idx = layer
        self.window: int | None = None  # the largest distance of a key that a query may attend to
        self.max_position_embeddings = config.max_position_embeddings
        DISTANCES[self.position_embedding_type].attach_(self, config, linear)

    def forward(self, hidden_states: Tensor, inputs: LayerContext) -> Attended:  # (…, D) -> (…, N·H), (B, N, S, K)
        q, k, v = self.project(hidden_states, inputs)
        score_bias = None
        if (kind := POSITIONS[self.position_embedding_type]).in_scores or kind.rotates:
            q, k, score_bias, inputs = DISTANCES[self.position_embedding_type].apply(self, q, k, inputs)
        return attend(q, k, v, inputs, score_bias, self.dropout.p if self.training else 0.0)

    def project(self, hidden_states: Tensor, inputs: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, (…, N, H); with a cache also the keys and values in it."""
        heads, cache, crosses = (-1, self.attention_head_size), inputs.cache, inputs.source is not None
        q = self.query(hidden_states).unflatten(-1, heads)

        # The keys and values of an encoder's output are computed once.
        if cache is not None and crosses and (known := cache.get_cross(inputs.layer)) is not None:
            return q, *known
        x = hidden_states if inputs.source is None else inputs.source.to(hidden_states.device)
        k, v = self.key(x).unflatten(-1, heads), self.value(x).unflatten(-1, heads)
        if cache is not None:
            k, v = (cache.set_cross if crosses else cache.extend)(inputs.layer, k, v)
        return q, k, v

    def projections(self) -> dict[str, nn.Linear]:
        """Return the linear layers to heads, by name."""
        return {name: part for name, part in self.named_children() if name in PROJECTIONS}  # type: ignore[misc]


class BertSelfOutput(nn.Module):
    """Project the heads, or neurons, back to D, then add and normalise."""

    def __init__(self, config: BertConfig, width: int) -> None:
        super().__init__()
        self.dense = linear(width, config.hidden_size)
        self.LayerNorm: Any = norm(config, not own_field(config, "norm_first"))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:  # (…, N·H), (…, D) -> (…, D)
        x = drop_by(self.dropout, self.dense(hidden_states)) + input_tensor
        return x if self.LayerNorm is None else self.LayerNorm(x)


class BertAttention(nn.Module):
    """Attention, to oneself or to an encoder, and its output projection; its attribute is `self` in checkpoints."""

    def __init__(self, config: BertConfig, layer: int, cross: bool = False) -> None:
        super().__init__()
        self.layer_idx = layer
        self.LayerNorm: Any = norm(config, normalises_first(config, layer))
        self.self = BertSelfAttention(config, layer, cross)
        self.output = BertSelfOutput(config, self.self.all_head_size)
        self.pruned_heads = set() if cross else set(config.pruned_heads.get(layer, ()))  # third-party pruners read it

    def forward(self, hidden_states: Tensor, inputs: LayerContext) -> Attended:  # (…, D) -> (…, D), (B, N, S, K)
        x, inputs = (hidden_states, inputs) if self.LayerNorm is None else self.normalised(hidden_states, inputs)
        context, weights = self.self(x, inputs=inputs)
        return self.output(context, hidden_states), weights

    def normalised(self, x: Tensor, inputs: LayerContext) -> tuple[Tensor, LayerContext]:
        """Return normalised states; if only first tokens are computed, keys and values are of normalised ones too."""
        source = None if inputs.source is None else normed(self, inputs.source)
        return normed(self, x), inputs if source is None else replace(inputs, source=source)


class Activation(nn.Module):
    """A function of ACTIVATIONS as a module, so that it has a module name and can be hooked."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.name](x)  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return self.name


class BertIntermediate(nn.Module):
    """The wide half of the feed-forward network; `width` is the number of neurons left, by default all."""

    def __init__(self, config: BertConfig, width: int | None = None) -> None:
        super().__init__()
        width = config.intermediate_size if width is None else width
        self.LayerNorm: Any = norm(config, own_field(config, "norm_first"))
        self.dense = linear(config.hidden_size, width)
        self.factor = linear(config.hidden_size, width) if own_field(config, "gated") else None
        self.intermediate_act_fn = activation(config.hidden_act)

    def forward(self, hidden_states: Tensor) -> Tensor:  # (…, D) -> (…, intermediate)
        x = hidden_states if self.LayerNorm is None else self.LayerNorm(hidden_states)
        neurons: Tensor = self.intermediate_act_fn(self.dense(x))
        return neurons if self.factor is None else neurons * self.factor(x)


class BertOutput(BertSelfOutput):
    """The narrow half of the feed-forward network, then add and normalise: as after the heads."""

    def __init__(self, config: BertConfig, width: int | None = None) -> None:
        super().__init__(config, config.intermediate_size if width is None else width)


class BertLayer(nn.Module):
    """Attention, in a decoder also to an encoder's output, then the feed-forward network."""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__()
        self.layer_idx = layer
        self.attention = BertAttention(config, layer)
        if config.add_cross_attention:
            self.crossattention = BertAttention(config, layer, cross=True)
        width = len(kept_neurons(config, layer))
        self.intermediate = BertIntermediate(config, width)
        self.output = BertOutput(config, width)
        self.chunk_size_feed_forward = config.chunk_size_feed_forward
        self.checkpointing: Callable[..., Tensor] | None = None  # a `bertlite.models.base.Checkpointing`

    def forward(self, hidden_states: Tensor, inputs: LayerContext) -> Tensor:  # (…, D) -> (…, D)
        if self.checkpointing is not None and self.recomputes:
            return self.checkpointing(self.compute, hidden_states, inputs)
        return self.compute(hidden_states, inputs)

    @property
    def recomputes(self) -> bool:
        """True if a forward now would be run again in the backward pass."""
        return self.checkpointing is not None and torch.is_grad_enabled()

    def compute(self, x: Tensor, inputs: LayerContext) -> Tensor:
        x = self.run_attention(self.attention, x, inputs)
        if inputs.encoder is not None:
            x = self.run_attention(self.crossattention, x, inputs.encoder)
        size = self.chunk_size_feed_forward  # the same sums on fewer rows at a time
        if not size:
            return self.feed_forward(x)
        return torch.cat([self.feed_forward(part) for part in x.split(size, -2)], -2)

    def run_attention(self, attention: nn.Module, x: Tensor, inputs: LayerContext) -> Tensor:
        x, weights = attention(x, inputs=inputs)
        if weights is not None:
            inputs.keep_weights(weights)
        return x

    def feed_forward(self, x: Tensor) -> Tensor:  # (…, D) -> (…, D)
        return self.output(self.intermediate(x), x)


class BertEncoder(nn.Module):
    """The layers, one after the other."""

    layer_class: type[BertLayer] = BertLayer
    leaves_padding_out = False  # wherever it can, under "auto" and "sdpa" too
    skip_padding: bool | None = None  # set by `optimize_for_inference`; overrides the caller's
    is_optimised = False  # it was made by `optimize_for_inference`, and only runs

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(self.layer_class(config, layer) for layer in range(config.num_hidden_layers))
        self.rel_embeddings: nn.Embedding | None = None  # a table of distances for all layers, as in DeBERTa
        self.final_norm: Any = norm(config, own_field(config, "norm_first"))
        self.position_embedding_type = config.position_embedding_type
        DISTANCES[config.position_embedding_type].attach_to_encoder_(self, config)

    def forward(self, hidden_states: Tensor, inputs: LayerContext) -> tuple[Tensor, list[Tensor] | None]:
        """Run the layers on (…, D); return the last one's output and, if they are kept, the inputs of each layer."""
        x = hidden_states if self.layer or not inputs.first_only else inputs.layout.first(hidden_states)
        if (kind := DISTANCES[self.position_embedding_type]).shares:
            inputs = replace(inputs, shared=kind.share(self, x, inputs))
        states: list[Tensor] | None = [] if inputs.keep_states else None
        for i, layer in enumerate(self.layer):
            if states is not None:
                states.append(x)
            if inputs.first_only and i == len(self.layer) - 1:  # first tokens attend to all of x
                x = self.run_layer(layer, inputs.layout.first(x), replace(inputs, layer=i, source=x))
            else:
                x = self.run_layer(layer, x, inputs.at(i))
        return (x if self.final_norm is None else self.final_norm(x)), states

    def run_layer(self, layer: nn.Module, x: Tensor, inputs: LayerContext) -> Tensor:
        return layer(x, inputs=inputs)


class BertPooler(nn.Module):
    """Summarise the sequence: its first token, [CLS], goes through one more layer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh() if (act := own_field(config, "pooler_act")) == "tanh" else activation(act)
        self.dropout = nn.Dropout(rate) if (rate := own_field(config, "pooler_dropout")) else None
        self.LayerNorm: Any = norm(config, own_field(config, "pooler_norm"))
        self.means = own_field(config, "pooling") == "mean"  # it reads the mean of all tokens
        self.skips_padding = False  # it reads the first token that is not padding, as for ModernBERT's choices

    def forward(self, hidden_states: Tensor) -> Tensor:  # (B, S, D) -> (B, D)
        first = hidden_states[:, 0] if self.dropout is None else self.dropout(hidden_states[:, 0])
        x = self.activation(self.dense(first))
        return x if self.LayerNorm is None else self.LayerNorm(x)


def activation(name: str) -> nn.Module:
    """Make the module for one name of ACTIVATIONS; only `prelu` carries a parameter."""
    name = name.rpartition("bertlite:")[2]
    entry = ACTIVATIONS[name]
    return entry() if isinstance(entry, type) else Activation(name)


def normalises_first(config: BertConfig, layer: int) -> bool:
    """Return whether a layer normalises before attention; in ModernBERT layer 0 has just normalised embeddings."""
    return bool(own_field(config, "norm_first") and (layer > 0 or own_field(config, "first_norm")))


def norm(config: BertConfig, wanted: bool) -> nn.LayerNorm | None:
    """Make a LayerNorm, if there is one at this place."""
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if wanted else None


def normed(part: Any, x: Tensor) -> Tensor:
    """Return x as the LayerNorm of a part normalises it, if it has one."""
    return x if part.LayerNorm is None else part.LayerNorm(x)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Make an nn.Linear, silent about the empty matrix of a layer that has lost all its heads or neurons."""
    with nullcontext() if inputs and outputs else warnings.catch_warnings(action="ignore"):
        return nn.Linear(inputs, outputs)
