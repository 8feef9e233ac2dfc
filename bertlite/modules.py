"""The BERT stack, bottom to top.  Attribute names are checkpoint keys.

Shapes:  B sequences · S positions · D hidden · N heads kept · H head dim;  … is (B, S) or, packed, (T,)
"""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.activations import XIELU, activation
from bertlite.attention import Attend
from bertlite.config import ConfigLike, kept_heads


class BertEmbeddings(nn.Module):
    """Add what a token is, which segment it is in and where it stands, then normalise."""

    def __init__(self, config: ConfigLike) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.absolute = config.position_embedding_type == "absolute"  # else the scores know where tokens stand

    def forward(
        self,
        input_ids: Tensor | None = None,  # (…,)
        token_type_ids: Tensor | None = None,  # (…,), zeros if not given
        position_ids: Tensor | None = None,  # (…,), (1, S) or (S,), counted from 0 if not given
        inputs_embeds: Tensor | None = None,  # (…, D), in place of input_ids
    ) -> Tensor:  # (…, D)
        x = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if token_type_ids is None:
            token_type_ids = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
        x = x + self.token_type_embeddings(token_type_ids)
        if self.absolute:
            if position_ids is None:
                position_ids = torch.arange(x.shape[-2], device=x.device)[None]
            x = x + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(x))


class BertSelfAttention(nn.Module):
    """Project to queries, keys and values, and let every head attend."""

    def __init__(self, config: ConfigLike, layer: int) -> None:
        super().__init__()
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.num_attention_heads = len(kept_heads(config, layer))
        self.all_head_size = self.num_attention_heads * self.attention_head_size
        self.query = linear(config.hidden_size, self.all_head_size)
        self.key = linear(config.hidden_size, self.all_head_size)
        self.value = linear(config.hidden_size, self.all_head_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.position_embedding_type = config.position_embedding_type
        if self.position_embedding_type != "absolute":
            self.max_position_embeddings = config.max_position_embeddings
            self.distance_embedding = nn.Embedding(2 * config.max_position_embeddings - 1, self.attention_head_size)

    def forward(
        self, hidden_states: Tensor, attend: Attend, gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:  # (…, D), -, (…, N, 1) -> (…, N·H), (B, N, S, S)
        q, k, v = (self.split(part(hidden_states)) for part in (self.query, self.key, self.value))  # (…, N, H)
        score_bias = self.distance_scores if self.position_embedding_type != "absolute" else None
        context, weights = attend(q, k, v, score_bias, self.dropout.p if self.training else 0.0)
        if gate is not None:
            context = context * gate
            weights = weights * gate.transpose(1, 2) if weights is not None else None
        return context.flatten(-2), weights

    def split(self, x: Tensor) -> Tensor:  # (…, N·H) -> (…, N, H)
        return x.unflatten(-1, (x.shape[-1] // self.attention_head_size, self.attention_head_size))

    def distance_scores(self, q: Tensor, k: Tensor) -> Tensor:  # (B, N, S, H), (B, N, K, H) -> (B, N, S, K)
        """What the distance from query to key adds to the scaled scores (Shaw et al. 2018; Huang et al. 2020)."""
        queries, keys = q.shape[-2], k.shape[-2]
        at = torch.arange(keys, device=q.device)
        distance = at[keys - queries :, None] - at[None, :]  # the queries are the last of the keys
        table = self.distance_embedding(distance + self.max_position_embeddings - 1).to(q.dtype)  # (S, K, H)
        scores = torch.einsum("bnsh,skh->bnsk", q, table)
        if self.position_embedding_type == "relative_key_query":
            scores = scores + torch.einsum("bnkh,skh->bnsk", k, table)
        return scores / math.sqrt(self.attention_head_size)


class BertSelfOutput(nn.Module):
    """Project the heads back to D, then add and normalise."""

    def __init__(self, config: ConfigLike, width: int) -> None:
        super().__init__()
        self.dense = linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, context: Tensor, residual: Tensor) -> Tensor:  # (…, N·H), (…, D) -> (…, D)
        return self.LayerNorm(self.dropout(self.dense(context)) + residual)


class BertAttention(nn.Module):
    """Self-attention and its output projection; the attribute is called `self` in checkpoints."""

    def __init__(self, config: ConfigLike, layer: int) -> None:
        super().__init__()
        self.self = BertSelfAttention(config, layer)
        self.output = BertSelfOutput(config, self.self.all_head_size)
        self.pruned_heads = set(config.pruned_heads.get(layer, ()))  # read by third-party pruning code

    def forward(
        self, hidden_states: Tensor, attend: Attend, gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:  # (…, D) -> (…, D), (B, N, S, S)
        context, weights = self.self(hidden_states, attend, gate)
        return self.output(context, hidden_states), weights


class BertIntermediate(nn.Module):
    """The wide half of the feed-forward network."""

    def __init__(self, config: ConfigLike) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = activation(config.hidden_act)

    def forward(self, hidden_states: Tensor) -> Tensor:  # (…, D) -> (…, intermediate)
        return self.intermediate_act_fn(self.dense(hidden_states))


class BertOutput(nn.Module):
    """The narrow half of the feed-forward network, then add and normalise."""

    def __init__(self, config: ConfigLike) -> None:
        super().__init__()
        self.dense = nn.Linear(config.intermediate_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:  # (…, intermediate), (…, D) -> (…, D)
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + residual)


@dataclass(frozen=True)
class Checkpointing:
    """How a layer forgets its activations and computes them again in the backward pass."""

    offload: bool = False  # keep what is kept, the layer's input, in host memory
    preserve_rng_state: bool = True
    determinism_check: str = "default"

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()) if self.offload else nullcontext():
            return checkpoint(
                run,
                *args,
                use_reentrant=False,  # the other kind loses all gradients when the embeddings are frozen
                preserve_rng_state=self.preserve_rng_state,
                determinism_check=self.determinism_check,
            )


class BertLayer(nn.Module):
    """Attention, then the feed-forward network."""

    def __init__(self, config: ConfigLike, layer: int) -> None:
        super().__init__()
        self.attention = BertAttention(config, layer)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)
        self.chunk_size_feed_forward = config.chunk_size_feed_forward
        self.checkpointing: Checkpointing | None = None

    def forward(
        self, hidden_states: Tensor, attend: Attend, gate: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:  # (…, D) -> (…, D), with the weights (B, N, S, S) if `attend` gives them
        if self.checkpointing is not None and torch.is_grad_enabled():
            return self.checkpointing(self.run, hidden_states, attend, gate)
        return self.run(hidden_states, attend, gate)

    def run(self, hidden_states: Tensor, attend: Attend, gate: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        x, weights = self.attention(hidden_states, attend, gate)
        if self.chunk_size_feed_forward:  # the same sums on fewer rows at a time
            x = torch.cat([self.feed_forward(part) for part in x.split(self.chunk_size_feed_forward, -2)], -2)
        else:
            x = self.feed_forward(x)
        return x if weights is None else (x, weights)

    def feed_forward(self, x: Tensor) -> Tensor:  # (…, D) -> (…, D)
        return self.output(self.intermediate(x), x)


class BertEncoder(nn.Module):
    """The layers, one after the other."""

    def __init__(self, config: ConfigLike) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config, layer) for layer in range(config.num_hidden_layers))

    def forward(
        self, hidden_states: Tensor, attend: Attend, gates: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """(…, D) -> the last layer's output; the input of the first and the output of every layer; their weights."""
        x, states, attentions = hidden_states, [hidden_states], []
        for i, layer in enumerate(self.layer):
            out = layer(x, attend, gates[i] if gates is not None else None)
            x, weights = out if isinstance(out, tuple) else (out, None)
            states.append(x)
            if weights is not None:
                attentions.append(weights)
        return x, states, attentions


class BertPooler(nn.Module):
    """A summary of the sequence: its first token, [CLS], through one more layer."""

    def __init__(self, config: ConfigLike) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, hidden_states: Tensor) -> Tensor:  # (B, S, D) -> (B, D)
        return self.activation(self.dense(hidden_states[:, 0]))


def linear(inputs: int, outputs: int) -> nn.Linear:
    """nn.Linear, silent about the empty matrix of a layer that has lost all its heads."""
    with warnings.catch_warnings() if not (inputs and outputs) else nullcontext():
        if not (inputs and outputs):
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        return nn.Linear(inputs, outputs)


@torch.no_grad()
def init_weights(part: nn.Module, config: ConfigLike) -> None:
    """Initialise a part and all below it as BERT does: normal matrices, zero biases, a zero row for padding."""
    for module in part.modules():
        if isinstance(module, nn.Linear):
            if module.weight.numel():
                module.weight.normal_(0.0, config.initializer_range)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, config.initializer_range)
            if module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
        elif isinstance(module, nn.LayerNorm | nn.PReLU | XIELU):
            module.reset_parameters()
