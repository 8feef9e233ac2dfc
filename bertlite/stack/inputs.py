"""The inputs of a forward, checked before anything is computed.

Values are looked at on the CPU, where it costs nothing; on CUDA the device looks, so that the host need not wait.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bertlite.config import ConfigLike, kept_heads
from bertlite.stack.masks import concrete


def refuse_pruned(config: ConfigLike, what: str) -> None:
    if any(config.pruned_heads.values()):
        raise ValueError(f"a pruned model cannot take {what}: its layers have different heads")


def check_inputs(
    config: ConfigLike,
    input_ids: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    past: int = 0,
) -> None:
    """Refuse what would fail later and less clearly, or not at all; `past` tokens are in the cache already."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(
            f"give {'either' if input_ids is not None else 'one of'} input_ids or inputs_embeds, not "
            f"{'both' if input_ids is not None else 'neither'}"
        )
    if input_ids is not None:
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; expected (batch, length)")
        check_ids("input_ids", input_ids, config.vocab_size, "vocab_size")
        batch, length = input_ids.shape
    else:
        assert inputs_embeds is not None
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != config.hidden_size:
            raise ValueError(
                f"inputs_embeds has shape {tuple(inputs_embeds.shape)}; expected (batch, length, {config.hidden_size})"
            )
        check_embeds(inputs_embeds)
        batch, length = inputs_embeds.shape[:2]
    counted = position_ids is None or config.position_embedding_type != "absolute"  # else it is theirs to say where
    if length < 1 or (counted and past + length > config.max_position_embeddings):
        raise ValueError(
            f"the sequences are {length} tokens long{f', after {past} in the cache' if past else ''}; this model takes"
            f" 1 to {config.max_position_embeddings} (max_position_embeddings): truncate them"
        )
    if token_type_ids is not None:
        fits: tuple[tuple[int, ...], ...] = ((batch, length), (batch, 1))  # one segment for a whole sequence
        check_beside("token_type_ids", token_type_ids, fits, config.type_vocab_size, "type_vocab_size")
    if position_ids is not None:
        fits = ((batch, length), (1, length), (length,))
        check_beside("position_ids", position_ids, fits, config.max_position_embeddings, "max_position_embeddings")


def check_packed(
    config: ConfigLike,
    input_ids: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    cu_seqlens: Tensor,
) -> None:
    """`check_inputs` of tokens that come packed, with where each sequence begins and the last one ends."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give either input_ids or inputs_embeds beside cu_seqlens, and not both")
    seen, name, wanted = input_ids, "input_ids", "(tokens,)"
    if inputs_embeds is not None:
        seen, name, wanted = inputs_embeds, "inputs_embeds", f"(tokens, {config.hidden_size})"
    assert seen is not None
    fits = seen.dim() == 1 if inputs_embeds is None else seen.dim() == 2 and seen.shape[-1] == config.hidden_size
    if not fits:
        raise ValueError(f"{name} has shape {tuple(seen.shape)}; beside cu_seqlens expected {wanted}")
    if input_ids is not None:
        check_ids("input_ids", input_ids, config.vocab_size, "vocab_size")
    else:
        check_embeds(seen)
    tokens = seen.shape[0]
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; expected torch.int32, (batch + 1,)"
        )
    if cu_seqlens.device != seen.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and {name} on {seen.device}; move one of them")
    ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    if ends[0] or ends[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens goes from {ends[0]} to {ends[-1]}; it must rise from 0 to the {tokens} tokens there are"
        )
    longest = max(lengths, default=0)
    counted = position_ids is None or config.position_embedding_type != "absolute"
    if counted and longest > config.max_position_embeddings:
        raise ValueError(
            f"the longest sequence has {longest} tokens; this model takes 1 to {config.max_position_embeddings}"
            " (max_position_embeddings): truncate it"
        )
    for name, ids, limit, field in (
        ("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size"),
        ("position_ids", position_ids, config.max_position_embeddings, "max_position_embeddings"),
    ):
        if ids is not None:
            check_beside(name, ids, ((tokens,),), limit, field)


def check_beside(name: str, ids: Tensor, fits: tuple[tuple[int, ...], ...], limit: int, field: str) -> None:
    """Refuse indices whose shape does not stand beside the input."""
    if isinstance(ids, Tensor) and tuple(ids.shape) not in fits:  # torch.fx traces with stand-ins
        raise ValueError(f"{name} has shape {tuple(ids.shape)}; expected {' or '.join(map(str, fits))}")
    check_ids(name, ids, limit, field)


def check_embeds(embeds: Tensor) -> None:
    if isinstance(embeds, Tensor) and not embeds.is_floating_point():
        raise ValueError(f"inputs_embeds is {embeds.dtype}; embeddings are floats, indices go into input_ids")


def check_devices(embeddings: Any, seen: Tensor, **beside: Tensor | None) -> None:
    """Refuse inputs on several devices, or where the embeddings are not, unless accelerate's hooks move them there."""
    words = embeddings.word_embeddings
    weight = getattr(words, "weight", None)
    hooked = hasattr(embeddings, "_hf_hook") or hasattr(words, "_hf_hook")
    if hooked or not isinstance(seen, Tensor) or not isinstance(weight, Tensor) or weight.is_meta:
        return
    for name, ids in beside.items():
        if ids is not None and ids.device != seen.device:
            raise ValueError(f"{name} is on {ids.device}, the input on {seen.device}: move one of them")
    if seen.device != weight.device:
        raise ValueError(f"the input is on {seen.device}, the model on {weight.device}: move one of them")


def check_encoder_states(config: ConfigLike, states: Tensor, batch: int) -> None:
    if not config.add_cross_attention:
        raise ValueError(
            "encoder_hidden_states were given to a model without cross-attention;"
            " it needs is_decoder=True and add_cross_attention=True"
        )
    if states.dim() != 3 or states.shape[0] != batch or states.shape[2] != config.hidden_size:
        raise ValueError(
            f"encoder_hidden_states has shape {tuple(states.shape)}; expected ({batch}, length, {config.hidden_size})"
        )


def check_ids(name: str, ids: Tensor, limit: int, field: str) -> None:
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} is {ids.dtype}; indices are torch.long or torch.int")
    if ids.device.type == "cpu" and ids.numel() and concrete(ids):
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= limit:
            wrong = low if low < 0 else high
            raise ValueError(f"{name} holds {wrong}; this model has 0 to {limit - 1} ({field} {limit})")
    elif concrete(ids) and ids.is_cuda:  # the message comes with the next call that waits for the device
        said = f"{name} holds others; this model has 0 to {limit - 1} ({field} {limit})"
        torch._assert_async(((ids >= 0) & (ids < limit)).all(), said)


def read_gates(head_mask: Tensor, config: ConfigLike, batch: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """What each layer multiplies its heads' contexts by: L tensors of (B or 1, S or 1, heads kept, 1).

    Raises:
        ValueError: a shape that `BertBody.forward` does not name.
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
    return [gate[layer][:, :, list(kept_heads(config, layer))] for layer in range(layers)]
