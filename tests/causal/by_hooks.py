"""An independent way to read and replace contexts of heads: forward hooks on the attention modules.

Shapes:  L 3 layers · S 11 positions · N 4 heads · H 12 head dim
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from conftest import make
from torch import Tensor

from bertlite import BertForSequenceClassification

L, N, H, S = 3, 4, 12, 11
PRUNED = {0: [1, 3], 1: [0, 1, 2, 3]}


def classifier(**changes: Any) -> Any:
    return make(BertForSequenceClassification, num_labels=6, **changes)


def row(batch: Mapping[str, Tensor], i: int) -> dict[str, Tensor]:
    return {name: x[i : i + 1] for name, x in batch.items()}


@torch.no_grad()
def run_with(model: Any, batch: Mapping[str, Tensor], changes: Mapping[int, Callable[[Tensor], Any]]) -> Any:
    """Run a model whose attention gives other contexts, (B, S, kept·H), in some layers; None changes nothing."""
    with ExitStack() as stack:
        for layer, change in changes.items():
            block = model.base_model.encoder.layer[layer].attention.self

            def hook(module: Any, args: Any, out: Any, change: Any = change) -> Any:
                new = change(out[0].clone())
                return None if new is None else (new, *out[1:])

            stack.enter_context(block.register_forward_hook(hook))
        return model(**batch)


def contexts(model: Any, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the context of every layer, (B, S, kept·H)."""
    found: list[Tensor] = []
    run_with(model, batch, dict.fromkeys(range(L), found.append))
    return found


def replaced(x: Tensor, j: int, value: Tensor, column: Any = slice(None)) -> Tensor:
    """Return a context in which head j, among those kept, has this value (S or 1, H) at some positions."""
    new = x.clone()
    new[:, column, j * H : (j + 1) * H] = value
    return new
