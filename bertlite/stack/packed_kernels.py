"""Attention of packed tokens: a sequence attends to itself.

Shapes:  T tokens · N heads · H head dim.  q, k, v are (T, N, H); with `first` the queries are the first token of each
sequence that has one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bertlite.stack.kernels import sdpa
from bertlite.stack.layer_inputs import LayerInputs
from bertlite.stack.packing import Packed

ScoreBias = Callable[[Tensor, Tensor, bool], Tensor | None]  # as BertSelfAttention.score_bias


def attend_packed(
    module: Any, q: Tensor, k: Tensor, v: Tensor, inputs: LayerInputs
) -> tuple[Tensor, None]:  # (T, N, H) -> (T, N, H)
    """Compute the context of packed tokens; where only first tokens are computed, of these."""
    packing: Any = inputs.layout
    if not q.shape[0]:
        return torch.cat([q, k, v]), None  # of no tokens, with the gradients of all three
    score_bias = None if module.position_embedding_type == "absolute" else module.score_bias
    dropout = module.dropout.p if module.training else 0.0
    return inputs.backend.kernel(q, k, v, packing, score_bias, dropout, inputs.first_only), None


def grouped(
    q: Tensor, k: Tensor, v: Tensor, packing: Packed, score_bias: ScoreBias | None, dropout: float, first: bool
) -> Tensor:
    """Compute attention of packed sequences by SDPA, padded in the groups of `Packed.groups`."""
    groups = packing.groups
    k, v = groups.spread(k), groups.spread(v)
    if not first:
        q = groups.spread(q)
    elif groups.rank is not None:
        q = q.index_select(0, groups.rank.argsort())
    contexts, row = [], 0
    for group in groups.groups:
        queries = slice(row, row + group.sequences) if first else group.slots
        row += group.sequences
        heads = [
            x.unflatten(0, (group.sequences, -1)).transpose(1, 2) for x in (q[queries], k[group.slots], v[group.slots])
        ]
        bias = None if score_bias is None else score_bias(heads[0], heads[1], True)
        context, _ = sdpa(heads[0], heads[1], heads[2], group.real, bias, dropout)  # (sequences, N, S, H)
        contexts.append(context.transpose(1, 2).flatten(0, 1))
    context = torch.cat(contexts) if len(contexts) > 1 else contexts[0]
    if not first:
        return groups.gather(context)
    return context if groups.rank is None else context.index_select(0, groups.rank)
