"""Layers with as few matmuls as they can have, and the copy of a model that is built of them.

A layer keeps its place and its meaning.  Its matmuls become one for queries, keys and values together, one that ends
in the activation, and two that end in the addition of the residual.

Shapes:  … is (B, S) or, packed, (T,) · D hidden · I inputs · O outputs · N heads · H head dim
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from bertlite import torch_private
from bertlite.activations import Activation
from bertlite.inference.linear import FixedLinear, Int8Linear, MakeLinear
from bertlite.model import BertPreTrainedModel
from bertlite.stack.layer_inputs import LayerInputs
from bertlite.stack.modules import BertAttention, BertLayer, BertOutput, BertSelfOutput

TOKENWISE = (Activation, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.PReLU)  # may take tokens in blocks
LinearKind: TypeAlias = Callable[..., FixedLinear]  # FixedLinear, a class derived from it, or a partial of one


class FusedAttention(nn.Module):
    """BertAttention with as few matmuls as it can have.

    Args:
        make: makes a linear layer whose outputs stay in the layer.
        make_heads: makes a linear layer whose outputs are queries, keys or values.
        separate_queries: queries may be computed from other tokens than keys and values.  They are in cross-attention,
            and in a last layer that computes each sequence's first token alone.
    """

    def __init__(
        self, attention: BertAttention, make: MakeLinear, make_heads: MakeLinear, separate_queries: bool
    ) -> None:
        super().__init__()
        own = attention.self
        size = own.attention_head_size
        groups = ([own.query], [own.key, own.value]) if separate_queries else ([own.query, own.key, own.value],)
        self.linears = nn.ModuleList(join_linears(make_heads, group) for group in groups)
        self.shapes = [(len(group), group[0].weight.shape[0] // size, size) for group in groups]
        self.self = copy.copy(own)  # for its relative positions; another layer may have the same attention
        self.self._modules = {name: part for name, part in own._modules.items() if name == "distance_embedding"}
        self.output = FusedOutput(attention.output, make)

    def forward(
        self, hidden_states: Tensor, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor | None]:  # (…, D) -> (…, D), (B, N, S, K)
        q, *kv = self.project(0, hidden_states)
        k, v = inputs.through_cache(lambda: kv or self.project(1, inputs.attended(hidden_states)))
        context, weights = self.self.attend(q, k, v, inputs)
        return self.output(context, hidden_states), weights

    def project(self, which: int, x: Tensor) -> list[Tensor]:  # (…, D) -> queries, keys, values: each (…, N, H)
        return list(self.linears[which](x).unflatten(-1, self.shapes[which]).unbind(-3))


class FusedOutput(nn.Module):
    """BertSelfOutput or BertOutput with the addition fused into the matmul."""

    dense: FixedLinear

    def __init__(self, output: BertSelfOutput | BertOutput, make: MakeLinear) -> None:
        super().__init__()
        self.dense = join_linears(make, [output.dense])
        self.LayerNorm = output.LayerNorm
        if type(self.LayerNorm) not in TOKENWISE:
            self.dense.rows_per_block = 0

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # (…, I), (…, D) -> (…, D)
        return run_in_blocks(self.dense.rows_per_block, self.add_and_normalise, x, residual)

    def add_and_normalise(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense.forward_add(x, residual))


class FusedLayer(BertLayer):
    """BertLayer with fixed linear layers, whose feed-forward network takes ROWS_PER_BLOCK tokens at a time."""

    output: FusedOutput  # type: ignore[assignment]

    def __init__(self, layer: BertLayer, make: MakeLinear, make_heads: MakeLinear, last: bool) -> None:
        nn.Module.__init__(self)
        self.layer_idx, self.checkpointing, self.chunk_size_feed_forward = layer.layer_idx, None, 0
        self.attention = FusedAttention(layer.attention, make, make_heads, separate_queries=last)  # type: ignore[assignment]
        if hasattr(layer, "crossattention"):
            self.crossattention = FusedAttention(layer.crossattention, make, make_heads, True)  # type: ignore[assignment]
        function = layer.intermediate.intermediate_act_fn
        if type(function) is Activation:
            self.intermediate = join_linears(make, [layer.intermediate.dense], function.name)  # type: ignore[assignment]
        else:  # an activation with parameters, or one that was put there
            self.intermediate = nn.Sequential(join_linears(make, [layer.intermediate.dense]), function)  # type: ignore[assignment]
        self.output = FusedOutput(layer.output, make)
        if type(function) not in TOKENWISE:
            self.output.dense.rows_per_block = 0

    def feed_forward(self, x: Tensor) -> Tensor:  # (…, D) -> (…, D)
        return run_in_blocks(self.output.dense.rows_per_block, super().feed_forward, x)


def join_linears(make: MakeLinear, parts: list[nn.Linear], act: str | None = None) -> FixedLinear:
    """Make one linear layer whose outputs are those of all parts, in their order."""
    weights: list[Tensor] = [part.weight for part in parts]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if all(part.bias is None for part in parts):
        return make(weight, None, act)
    biases: list[Tensor] = [
        part.weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in parts
    ]
    return make(weight, torch.cat(biases), act)


def run_in_blocks(rows: int, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Apply a function to inputs (…, I) in blocks of at most this many rows, and join the results; 0 is one block."""
    shape = inputs[0].shape[:-1]
    if not rows or shape.numel() <= rows:
        return function(*inputs)
    blocks = zip(*(x.flatten(0, -2).split(rows) for x in inputs), strict=True)
    return torch.cat([function(*block) for block in blocks]).unflatten(0, shape)


@torch.no_grad()
def fused_copy(model: BertPreTrainedModel, dtype: torch.dtype, kind: LinearKind) -> BertPreTrainedModel:
    """Return a copy of the model that is built of fused layers.

    Args:
        dtype: what it computes in; int8 replaces `kind` by Int8Linear in the layers, and the rest is float32.
        kind: makes the linear layers.
    """
    floats = torch.float32 if dtype == torch.int8 else dtype
    model = copy_sharing_matrices(model)
    make = make_heads = other = partial(make_linear, kind, floats)
    if dtype == torch.int8:
        attends_in = torch.bfloat16 if torch_private.bfloat16_is_supported() else torch.float32
        make = partial(make_linear, Int8Linear, floats)
        make_heads = partial(make_linear, partial(Int8Linear, out=attends_in), floats)
    plain = list(model._layers())
    fused = {each: FusedLayer(each, make, make_heads, last=each is plain[-1]) for each in dict.fromkeys(plain)}
    model.base_model.encoder.layer = nn.ModuleList(fused[each] for each in plain)
    model.base_model.encoder.is_optimised = True
    fix_linears(model, other)
    return model.to(floats).requires_grad_(False)


def fix_linears(model: nn.Module, make: MakeLinear) -> None:
    """Replace every nn.Linear that is left in a model."""
    for part in list(model.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.Linear):
                setattr(part, name, join_linears(make, [child]))


def make_linear(
    kind: LinearKind, dtype: torch.dtype, weight: Tensor, bias: Tensor | None, act: str | None = None
) -> FixedLinear:
    if not weight.numel():  # the layer has lost its heads or neurons: the bias is all it gives
        kind = FixedLinear
    return kind(weight.to(dtype), None if bias is None else bias.to(dtype), act)


def copy_sharing_matrices(model: BertPreTrainedModel) -> BertPreTrainedModel:
    """Return a copy whose linear layers hold the model's own weights, since they will be packed and let go.

    A matrix that is also an embedding is copied: the embedding stays.
    """
    embeddings = {id(p) for part in model.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    memo = {
        id(p): nn.Parameter(p.detach(), requires_grad=False)
        for part in model.modules()
        if isinstance(part, nn.Linear)
        for p in part.parameters()
        if id(p) not in embeddings
    }
    return copy.deepcopy(model, memo)
