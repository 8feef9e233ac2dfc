"""The inputs of a forward whose tokens come packed: what is refused before anything is computed.

Shapes:  B sequences · T tokens
"""

from itertools import pairwise

import torch

from bertlite.config import ConfigLike
from bertlite.stack.inputs import Inputs, check_beside, check_embeds, check_ids, counts_positions, embeds_size


def check_packed(inputs: Inputs, config: ConfigLike) -> None:
    """Refuse packed tokens, (T,), that do not fit the model, or the ends of their sequences."""
    ids, embeds = inputs.input_ids, inputs.inputs_embeds
    if (ids is None) == (embeds is None):
        raise ValueError("give either input_ids or inputs_embeds beside cu_seqlens, and not both")
    given, name, wanted = inputs.tokens, "input_ids", "(tokens,)"
    fits = given.dim() == 1
    if embeds is not None:
        name, wanted = "inputs_embeds", f"(tokens, {embeds_size(config)})"
        fits = given.dim() == 2 and given.shape[-1] == embeds_size(config)
    if not fits:
        raise ValueError(f"{name} has shape {tuple(given.shape)}; beside cu_seqlens expected {wanted}")
    if ids is not None:
        check_ids("input_ids", ids, config.vocab_size, "vocab_size")
    else:
        check_embeds(given)
    longest = check_ends(inputs, name)
    if counts_positions(inputs, config) and longest > config.max_position_embeddings:
        raise ValueError(
            f"the longest sequence has {longest} tokens; this model takes 1 to {config.max_position_embeddings}"
            " (max_position_embeddings): truncate it"
        )
    tokens = (given.shape[0],)
    check_beside(inputs, config, (tokens,), (tokens,))


def check_ends(inputs: Inputs, name: str) -> int:
    """Refuse ends of sequences that are not those of the tokens given; return the longest sequence's length."""
    cu_seqlens = inputs.cu_seqlens
    assert cu_seqlens is not None  # or the tokens are in rows
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; expected torch.int32, (batch + 1,)"
        )
    device, tokens = inputs.tokens.device, inputs.tokens.shape[0]
    if cu_seqlens.device not in (device, torch.device("cpu")):
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and {name} on {device}; move one of them")
    ends = inputs.ends
    lengths = [end - start for start, end in pairwise(ends)]
    if ends[0] or ends[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens goes from {ends[0]} to {ends[-1]}; it must rise from 0 to the {tokens} tokens there are"
        )
    return max(lengths, default=0)
