"""The inputs of a forward: one value that holds them, and what is refused before anything is computed.

Values are looked at on the CPU, where it costs nothing; on CUDA the device looks, so that the host need not wait.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bertlite.config import BertConfig, embeds_size
from bertlite.stack.masks import values_readable
from bertlite.support import torch_private

Shapes = tuple[tuple[int, ...], ...]  # any of them will do
TENSORS = (
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "head_mask"),
    *("encoder_hidden_states", "encoder_attention_mask", "cu_seqlens"),
)


@dataclass(frozen=True)
class Inputs:
    """The arguments of one forward, under the names of `BertBody.forward`."""

    input_ids: Tensor | None
    attention_mask: Tensor | None
    token_type_ids: Tensor | None
    position_ids: Tensor | None
    inputs_embeds: Tensor | None
    head_mask: Tensor | None
    encoder_hidden_states: Tensor | None
    encoder_attention_mask: Tensor | None
    cu_seqlens: Tensor | None
    first_token_only: bool
    output_attentions: bool
    output_hidden_states: bool

    @property
    def tokens(self) -> Tensor:
        """input_ids, or inputs_embeds in their place."""
        given = self.input_ids if self.input_ids is not None else self.inputs_embeds
        assert given is not None  # or it has been refused
        return given

    @cached_property
    def ends(self) -> list[int]:
        """cu_seqlens as numbers; a GPU is waited for once."""
        return [] if self.cu_seqlens is None else self.cu_seqlens.tolist()

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of sequences that come packed."""
        return tuple(end - start for start, end in pairwise(self.ends))

    def positions(self, config: BertConfig, past: int) -> Tensor | None:
        """Return the position ids that were given or, if positions skip padding, those counted; None: count from 0.

        The first token that is not padding has position 0, or `past`, and padding -1.
        """
        given, ids, first = self.position_ids, self.input_ids, first_position(config)
        if given is not None or ids is None or not getattr(config, "positions_skip_padding", False):
            return given - first if given is not None and first else given
        real = ids.ne(-1 if config.pad_token_id is None else config.pad_token_id)
        each = [real] if self.cu_seqlens is None else [*real.split(self.lengths), real[:0]]  # anew in each sequence
        count = torch.cat([sequence.cumsum(-1) for sequence in each])
        return (count + (past - 1)).masked_fill(~real, -1)


def first_position(config: Any) -> int:
    """Return the first token's number in position_ids: 0, or as in RoBERTa the one after padding's, `pad_token_id`."""
    return 1 + (config.pad_token_id or 0) if getattr(config, "positions_skip_padding", False) else 0


def check_tensor(name: str, given: Any) -> None:
    """Refuse a whole batch, a text, a list or an array where a tensor belongs; torch.fx traces with stand-ins."""
    if isinstance(given, (Tensor, type(None))):
        return
    kind = type(given).__name__
    if isinstance(given, Mapping):
        raise TypeError(f"{name} is a {kind}, a whole batch: unpack it, as in model(**batch)")
    if isinstance(given, str):
        raise TypeError(f"{name} is the text {given!r:.80}: encode it, as in model(**tokenizer(text, …))")
    if isinstance(given, (list, tuple)) or type(given).__module__ == "numpy":
        raise TypeError(f"{name} is a {kind}; make it a tensor, as in torch.tensor({name})")


def check_combination(inputs: Inputs, config: BertConfig, cached: bool, recomputes: bool) -> None:
    """Refuse inputs that are no tensors, or that exclude each other.

    Args:
        cached: whether the caller gave a cache.
        recomputes: whether layers are run again in the backward pass.
    """
    for name in TENSORS:
        if (given := getattr(inputs, name)) is not None:
            check_tensor(name, given)
    if inputs.first_token_only and (inputs.output_attentions or inputs.output_hidden_states):
        raise ValueError("first_token_only=True leaves no hidden states or attentions to return; ask for one of them")
    if cached and recomputes:
        raise ValueError("past_key_values with gradient checkpointing would be extended twice; turn one off")
    if cached and inputs.cu_seqlens is not None:
        raise ValueError("give past_key_values or cu_seqlens, not both: packed attention keeps no keys")
    if inputs.first_token_only and config.is_decoder:
        raise ValueError("first_token_only=True is for encoders: a decoder's first token sees no other")
    if inputs.encoder_hidden_states is None and inputs.encoder_attention_mask is not None:
        raise ValueError("encoder_attention_mask was given without encoder_hidden_states")


def check_tokens(inputs: Inputs, config: BertConfig, past: int) -> None:
    """Refuse tokens, in rows or packed, that would fail later and less clearly, or not at all.

    Args:
        past: how many tokens are in the cache.
    """
    ids, embeds, in_rows = inputs.input_ids, inputs.inputs_embeds, inputs.cu_seqlens is None
    if (ids is None) == (embeds is None):
        few, many = ("either", "both") if ids is not None else ("one of", "neither")
        raise ValueError(f"give {few} input_ids or inputs_embeds, not {many}")
    name, given = ("input_ids" if embeds is None else "inputs_embeds"), inputs.tokens
    axes: list[str | int] = ["batch", "length"] if in_rows else ["tokens"]
    if embeds is not None:
        axes.append(embeds_size(config))
    if given.dim() != len(axes) or (embeds is not None and embeds.shape[-1] != axes[-1]):
        beside = "" if in_rows else ", beside cu_seqlens"
        raise ValueError(f"{name} has shape {tuple(given.shape)}; expected ({', '.join(map(str, axes))}){beside}")
    if ids is not None:
        check_ids(name, ids, config.vocab_size, "vocab_size")
    elif isinstance(embeds, Tensor) and not embeds.is_floating_point():
        raise ValueError(f"inputs_embeds is {embeds.dtype}; embeddings are floats, indices go into input_ids")
    if in_rows:
        batch, longest = given.shape[:2]  # as torch.fx can trace it
        segments: Shapes = ((batch, longest), (batch, 1))  # one segment for a whole sequence
        positions: Shapes = ((batch, longest), (1, longest), (longest,))
    else:
        longest, segments = check_ends(inputs, name), ((given.shape[0],),)
        positions = segments
    counted = inputs.position_ids is None or config.position_embedding_type != "absolute"
    if (in_rows and longest < 1) or (counted and past + longest > config.max_position_embeddings):
        raise ValueError(
            f"{'the sequences are' if in_rows else 'the longest sequence is'} {longest} tokens long"
            f"{f', after {past} in the cache' if past else ''}; this model takes 1 to"
            f" {config.max_position_embeddings} (max_position_embeddings): truncate them"
        )
    for name, ids, fits, field, first in (
        ("token_type_ids", inputs.token_type_ids, segments, "type_vocab_size", 0),
        ("position_ids", inputs.position_ids, positions, "max_position_embeddings", first_position(config)),
    ):
        if isinstance(ids, Tensor) and tuple(ids.shape) not in fits:  # torch.fx traces with stand-ins
            raise ValueError(f"{name} has shape {tuple(ids.shape)}; expected {' or '.join(map(str, fits))}")
        if ids is not None:
            check_ids(name, ids, getattr(config, field), field, first)


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
    ends, lengths = inputs.ends, inputs.lengths
    if ends[0] or ends[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens goes from {ends[0]} to {ends[-1]}; it must rise from 0 to the {tokens} tokens there are"
        )
    return max(lengths, default=0)


def check_devices(embeddings: Any, inputs: Inputs) -> None:
    """Refuse inputs on several devices, or where the embeddings are not, unless accelerate's hooks move them there."""
    words = embeddings.word_embeddings
    weight = getattr(words, "weight", None)
    has_hook = hasattr(embeddings, "_hf_hook") or hasattr(words, "_hf_hook")
    given = inputs.tokens
    if has_hook or not isinstance(given, Tensor) or not isinstance(weight, Tensor) or weight.is_meta:
        return
    for name, ids in (("token_type_ids", inputs.token_type_ids), ("position_ids", inputs.position_ids)):
        if ids is not None and ids.device != given.device:
            raise ValueError(f"{name} is on {ids.device}, the input on {given.device}: move one of them")
    if given.device != weight.device:
        raise ValueError(f"the input is on {given.device}, the model on {weight.device}: move one of them")


def check_encoder_states(config: BertConfig, states: Tensor, batch: int) -> None:
    """Refuse an encoder's output that this model cannot attend to."""
    if not config.add_cross_attention:
        raise ValueError(
            "encoder_hidden_states were given to a model without cross-attention;"
            " it needs is_decoder=True and add_cross_attention=True"
        )
    if states.dim() != 3 or states.shape[0] != batch or states.shape[2] != config.hidden_size:
        raise ValueError(
            f"encoder_hidden_states has shape {tuple(states.shape)}; expected ({batch}, length, {config.hidden_size})"
        )


def check_ids(name: str, ids: Tensor, size: int, field: str, first: int = 0) -> None:
    """Refuse indices of another dtype, or outside a table; `first` is of its first row, padding's the one before."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} is {ids.dtype}; indices are torch.long or torch.int")
    lowest, highest = max(first - 1, 0), first + size - 1
    known = f"this model has {lowest} to {highest} ({field} {size}{f', from {first} on' if first else ''})"
    if ids.device.type == "cpu" and ids.numel() and values_readable(ids):
        low, high = (int(end) for end in ids.aminmax())
        if low < lowest or high > highest:
            raise ValueError(f"{name} holds {low if low < lowest else high}; {known}")
    elif values_readable(ids) and ids.is_cuda:  # the message comes with the next call that waits for the device
        torch_private.assert_async(((ids >= lowest) & (ids <= highest)).all(), f"{name} holds others; {known}")
