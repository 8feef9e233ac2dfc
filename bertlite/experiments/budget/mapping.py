"""A map after pooling: a linear layer that turns pooled vectors of a pruned encoder into the given model's.

It is one least-squares fit, to the texts that the pruned weights were fitted to and to all others that do not judge.

Shapes:  B texts of a batch · P numbers of a pooled vector
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.inference.clients.pooling import pool_states
from bertlite.pruning.importance.batches import eval_mode, inputs_of, real_tokens
from bertlite.pruning.importance.moments import choose_ridge, fit_matrix, gather, total
from bertlite.shipping.vectors import VectorHead, first_dense

MAP_NEEDS, MAP_TAKES = 800, 10_000  # texts that a map is fitted to: the fewest and the most


def layer_of_map(head: VectorHead, config: Any) -> nn.Linear | None:
    """Return a layer of the size that a map adds to an encoder, None if it merges into a Dense that is there."""
    width = len(head.processing.modes) * config.hidden_size
    return nn.Linear(width, width).requires_grad_(False) if first_dense(head) is None else None


@torch.no_grad()
def fit_map(model: Any, dense: Any, batches: Iterable[Mapping[str, Tensor]], head: VectorHead) -> nn.Linear:
    """Return the affine map, P -> P, that brings a model's pooled vectors nearest to the dense model's.

    The penalty that keeps it near the identity is chosen by cross-validation over texts.

    Args:
        batches: texts; those that the model was fitted to help too, if there are few others.
        head: how vectors are pooled; its modules are not run, and nothing is cut off.

    Raises:
        ValueError: there are fewer than two texts.
    """
    pool = partial(pool_states, pooling=head.processing.modes, skip=head.skip)

    def pairs() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        texts = 0
        for batch in batches:
            outputs = (each(**inputs_of(batch), return_dict=True) for each in (model, dense))
            mine, theirs = (pool(out.last_hidden_state, real_tokens(batch)) for out in outputs)
            yield mine, theirs, torch.arange(texts, texts := texts + len(mine), device=mine.device)

    # Least squares from sums over texts.  The ridge is around the identity: with few texts the map changes little.
    with eval_mode(model, dense):
        folds = gather(pairs())
    moments = total(folds)
    identity = torch.eye(len(moments.c), dtype=torch.float64, device=moments.c.device)
    weight = fit_matrix(moments, identity, choose_ridge(folds, identity))
    found = nn.Linear(len(weight), len(weight), device=weight.device, dtype=torch.float32).requires_grad_(False)
    found.weight.copy_(weight)
    found.bias.copy_(moments.bias(weight))
    return found
