"""Gates: what each head's context is multiplied by, read from what the user gave.

Shapes:  B sequences · S positions · L layers · N heads as built
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bertlite.config import BertConfig, kept_heads


def read_gates(head_mask: Tensor, config: BertConfig, batch: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Return what each layer multiplies its heads' contexts by: L tensors of (B or 1, S or 1, heads kept, 1).

    Raises:
        ValueError: a shape that the forward does not name.
    """
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    gate, shape = head_mask, tuple(head_mask.shape)
    if shape == (heads,):
        gate = gate.expand(layers, heads)[:, None, None]
    elif shape == (layers, heads):
        gate = gate[:, None, None]
    elif gate.dim() == 3 and shape in ((layers, 1, heads), (layers, batch, heads)):
        gate = gate[:, :, None]
    elif gate.dim() == 5 and all(
        have == want or (have == 1 and i not in (0, 2))
        for i, (have, want) in enumerate(zip(shape, (layers, batch, heads, length, 1), strict=True))
    ):
        gate = gate[..., 0].transpose(2, 3)
    else:
        raise ValueError(
            f"head_mask has shape {shape}; expected ({heads},), ({layers}, {heads}), ({layers}, {batch}, {heads}) or"
            f" ({layers}, {batch}, {heads}, 1, 1), heads in the numbering of the unpruned model"
        )
    gate = gate.to(dtype)[..., None]  # (L, B or 1, S or 1, N, 1)
    if not any(config.pruned_heads.values()):
        return list(gate)
    return [keep_heads(gate[layer], kept_heads(config, layer)) for layer in range(layers)]


def keep_heads(gate: Tensor, heads: Sequence[int]) -> Tensor:
    """Return these heads of a gate, (B or 1, S or 1, N, 1), by slices: a GPU is waited for to be sent a list."""
    return gate[:, :, :0] if not heads else torch.cat([gate[:, :, head : head + 1] for head in heads], 2)


def refuse_pruned(config: BertConfig, what: str) -> None:
    """Refuse an input for each head of all layers if layers have different heads."""
    if any(config.pruned_heads.values()):
        raise ValueError(f"a pruned model cannot take {what}: its layers have different heads")
