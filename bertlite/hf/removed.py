"""Functions of transformers 4's `pytorch_utils` that 5 removed or may remove, for code that prunes BERT."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bertlite.stack.modules import linear


def find_pruneable_heads_and_indices(
    heads: Iterable[int], n_heads: int, head_size: int, already_pruned_heads: set[int]
) -> tuple[set[int], Tensor]:
    """Return the named heads that still exist, and the rows that remain without them.

    Args:
        heads: to prune, numbered as in the unpruned layer.
        n_heads: how many the layer has now.
        head_size: the rows of each.
        already_pruned_heads: heads removed before, numbered as in the unpruned layer.
    """
    found = set(heads) - already_pruned_heads
    gone = {head - sum(before < head for before in already_pruned_heads) for head in found}
    wrong = [head for head in gone if not -n_heads <= head < n_heads]
    if wrong:
        raise IndexError(f"there is no head {wrong[0]} among the {n_heads} that are left")
    kept = torch.ones(n_heads, head_size, dtype=torch.bool, device="cpu")  # also where a model is made without values
    kept[list(gone)] = False
    return found, kept.flatten().nonzero().squeeze(-1)


def prune_linear_layer(layer: nn.Linear, index: Tensor, dim: int = 0) -> nn.Linear:
    """Return a new linear layer with these outputs of another (dim 0), or these inputs (dim 1).

    Its parameters have the dtype and the device of the old ones, and are trained.
    """
    index = index.to(layer.weight.device)
    weight = layer.weight.detach().index_select(dim, index).clone()
    new = linear(weight.shape[1], weight.shape[0])
    new.weight = nn.Parameter(weight)
    new.bias = None  # type: ignore[assignment]  # as nn.Linear has it without one
    if layer.bias is not None:
        bias = layer.bias.detach()
        new.bias = nn.Parameter((bias if dim == 1 else bias.index_select(0, index)).clone())
    return new
