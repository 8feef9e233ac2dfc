"""What can be gated: heads, and intermediate neurons.

Shapes:  L layers · N units as built · B examples · S positions;  rows are B, or B·choices in multiple choice
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.config import ConfigLike, kept_heads, kept_neurons
from bertlite.importance.batches import Batch, inputs_of, mask_shape, real_tokens
from bertlite.pruning import layers_of


@dataclass(frozen=True)
class Structure:
    unit: str
    built: Callable[[ConfigLike], int]
    kept: Callable[[ConfigLike, int], tuple[int, ...]]
    gated: Callable[[Any, Batch, Tensor], Any]  # model, batch, (L, B, N) -> output
    dense: Callable[[Any], nn.Linear]  # of a layer: what its units write through
    reductions: tuple[str, ...]

    def shape(self, model: Any) -> tuple[int, int]:  # (L, N)
        return model.config.num_hidden_layers, self.built(model.config)

    def present(self, model: Any) -> Tensor:
        """(L, N) bool: the units that are not pruned."""
        there = torch.zeros(self.shape(model), dtype=torch.bool)
        for layer in range(there.shape[0]):
            there[layer, list(self.kept(model.config, layer))] = True
        return there

    def full(self, model: Any, values: list[Tensor]) -> Tensor:
        """Values of each layer's units, (…, kept), as (…, L, N); nan for the pruned."""
        shape = (*values[0].shape[:-1], *self.shape(model))
        scattered = torch.full(shape, torch.nan, dtype=torch.float64)
        for layer, each in enumerate(values):
            scattered[..., layer, list(self.kept(model.config, layer))] = each.detach().double().cpu()
        return scattered


EVERY_TOKEN = {"output_hidden_states": True}  # else a last layer of which [CLS] alone is read may compute no other


def run(model: Any, batch: Batch, **options: Any) -> Any:
    """The model's output for a batch without its labels."""
    return model(**inputs_of(batch), **options, return_dict=True)


def by_row(gate: Tensor, batch: Batch) -> Tensor:
    """A gate for each example, (L, B, N), as one for each row; one for each token, (L, rows, N, S), stays."""
    choices = mask_shape(batch)[1] if len(mask_shape(batch)) == 3 else 1
    return gate if gate.dim() == 4 or choices == 1 else gate.repeat_interleave(choices, 1)


def gate_heads(model: Any, batch: Batch, gate: Tensor) -> Any:
    gate = by_row(gate, batch)
    return run(model, batch, head_mask=gate[..., None] if gate.dim() == 4 else gate)


def gate_neurons(model: Any, batch: Batch, gate: Tensor) -> Any:
    gate = by_row(gate, batch)
    hooks = []
    with in_one_piece(model):
        try:
            for layer, block in enumerate(layers_of(model)):
                own = gate[layer][:, list(kept_neurons(model.config, layer))]
                hooks.append(block.intermediate.register_forward_hook(partial(multiply, own, real_tokens(batch))))
            return run(model, batch, **EVERY_TOKEN)
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def in_one_piece(model: Any) -> Iterator[None]:
    """Layers that run once for all tokens: neither in chunks nor, with the hooks gone, again in the backward pass."""
    before = [(block, block.chunk_size_feed_forward, block.checkpointing) for block in layers_of(model)]
    try:
        for block, _, _ in before:
            block.chunk_size_feed_forward, block.checkpointing = 0, None
        yield
    finally:
        for block, size, checkpointing in before:
            block.chunk_size_feed_forward, block.checkpointing = size, checkpointing


def multiply(gate: Tensor, real: Tensor, module: nn.Module, args: Any, activation: Tensor) -> Tensor:
    """Scale a layer's neurons, (rows, S, I) or packed (T, I), by (rows, I)."""
    return activation * (gate[:, None] if activation.dim() == 3 else gate[real.nonzero()[:, 0]])


HEADS = Structure(
    unit="head",
    built=lambda config: config.num_attention_heads,
    kept=kept_heads,
    gated=gate_heads,
    dense=lambda layer: layer.attention.output.dense,
    reductions=("example", "token", "batch"),
)
NEURONS = Structure(
    unit="neuron",
    built=lambda config: config.intermediate_size,
    kept=kept_neurons,
    gated=gate_neurons,
    dense=lambda layer: layer.output.dense,
    reductions=("example", "batch"),
)
