"""The inputs of a forward: one value that holds them, their checks, and masks and gates for the layers.

On CUDA values are checked by an asynchronous assert, so that the host does not wait.

Shapes:  B sequences · S queries · K keys · L layers · N heads as built

One rule for a query with nothing to attend to: its weights are all zero, and so is its context, in every backend and
dtype.  Its layer then gives it only the output bias, like a layer without heads.  DeBERTa's padding attends to all
keys alike instead, as in transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import sub
from typing import Any

import torch
from torch import Tensor

from bertlite.config import POSITIONS, BertConfig, embeds_size, kept_heads
from bertlite.support import torch_private

INDICES = (torch.int64, torch.int32)


@dataclass(frozen=True)
class ForwardArgs:
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
    skip_padding: bool | None
    attention: str  # the name of the backend, or "auto"
    tokens: Any  # input_ids or inputs_embeds; if None, `check_tokens` raises

    @cached_property
    def ends(self) -> list[int]:
        """cu_seqlens as numbers; waits for a GPU once."""
        return [] if self.cu_seqlens is None else self.cu_seqlens.tolist()

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of packed sequences."""
        return tuple(map(sub, self.ends[1:], self.ends))

    def positions(self, config: BertConfig, past: int) -> Tensor | None:
        """Return positions that skip padding, as given or counted; None: count from 0.

        The first token that is not padding has position 0, or `past`.  Padding has -1.
        """
        given, ids = self.position_ids, self.input_ids
        if given is not None or ids is None:
            return None if given is None else given - first_position(config)
        return count_positions(ids, config, past, None if self.cu_seqlens is None else self.lengths)


TENSORS = [name for name, kind in ForwardArgs.__annotations__.items() if kind == Tensor | None]


def count_positions(ids: Tensor, config: Any, past: int = 0, lengths: Sequence[int] | None = None) -> Tensor:
    """Return positions that skip padding, by ids, from `past` on and anew in each sequence of these lengths."""
    real = ids.ne(-1 if config.pad_token_id is None else config.pad_token_id)
    each = [real] if lengths is None else [*real.split(tuple(lengths)), real[:0]]
    count = torch.cat([sequence.cumsum(-1) for sequence in each])
    return (count + (past - 1)).masked_fill(~real, -1)


def first_position(config: Any) -> int:
    """Return the first token's number in position_ids: 0, or as in RoBERTa `pad_token_id` + 1."""
    return 1 + (config.pad_token_id or 0) if getattr(config, "positions_skip_padding", False) else 0


def check_tensor(name: str, given: Any) -> None:
    """Raise TypeError for a whole batch, a text, a list or an array instead of a tensor.

    Other objects pass: torch.fx traces with stand-ins.
    """
    if isinstance(given, (Tensor, type(None))):
        return
    kind = type(given).__name__
    if isinstance(given, Mapping):
        raise TypeError(f"{name} is a {kind}, a whole batch: unpack it, as in model(**batch)")
    if isinstance(given, str):
        raise TypeError(f"{name} is the text {given!r:.80}: encode it, as in model(**tokenizer(text, …))")
    if isinstance(given, (list, tuple)) or type(given).__module__ == "numpy":
        raise TypeError(f"{name} is a {kind}; make it a tensor, as in torch.tensor({name})")


def check_inputs(args: ForwardArgs, config: BertConfig, embeddings: Any, cache: Any, recomputes: bool) -> None:
    """Raise ValueError or TypeError for inputs that a model cannot take, before anything is computed.

    Args:
        config: with the sizes that bound ids, which may be larger than the config's own.
        cache: the keys and values that the caller gave.
        recomputes: whether layers are run again in the backward pass.
    """
    cached = cache is not None
    for name in TENSORS:
        if (given := getattr(args, name)) is not None and not isinstance(given, Tensor):
            check_tensor(name, given)

    # Some wishes exclude each other; each message says which one to drop.
    if args.first_token_only and (args.output_attentions or args.output_hidden_states):
        raise ValueError("first_token_only=True leaves no hidden states or attentions to return; ask for one of them")
    if cached and recomputes:
        raise ValueError("past_key_values with gradient checkpointing would be extended twice; turn one off")
    if cached and args.cu_seqlens is not None:
        raise ValueError("give past_key_values or cu_seqlens, not both: packed attention keeps no keys")
    if args.first_token_only and config.is_decoder:
        raise ValueError("first_token_only=True is for encoders: a decoder's first token attends to no other")
    if args.encoder_hidden_states is None and args.encoder_attention_mask is not None:
        raise ValueError("encoder_attention_mask was given without encoder_hidden_states")

    # A mask for each head numbers heads as built, which a pruned layer does not have.
    for name in ("attention_mask", "encoder_attention_mask"):
        mask = getattr(args, name)
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1 and any(config.pruned_heads.values()):
            raise ValueError(f"a pruned model cannot take an {name} for each head: its layers have different heads")

    check_tokens(args, config, cache.length if cached else 0)
    check_devices(embeddings, args)
    if args.encoder_hidden_states is not None:
        batch = args.tokens.shape[0] if args.cu_seqlens is None else len(args.lengths)
        check_encoder_states(config, args.encoder_hidden_states, batch)


def check_tokens(args: ForwardArgs, config: BertConfig, past: int) -> None:
    """Raise ValueError for tokens, in rows or packed, that would fail later and less clearly, or not at all.

    Args:
        past: the number of tokens in the cache.
    """
    ids, embeds, in_rows = args.input_ids, args.inputs_embeds, args.cu_seqlens is None
    if (ids is None) == (embeds is None):
        which, given = ("either", "both") if ids is not None else ("one of", "neither")
        raise ValueError(f"give {which} input_ids or inputs_embeds, not {given}")

    # The shape: rows of tokens, or one row of packed ones, with another axis if they are embeddings.
    name, given = ("input_ids" if embeds is None else "inputs_embeds"), args.tokens
    axes: list[str | int] = ["batch", "length"] if in_rows else ["tokens"]
    if embeds is not None:
        axes.append(embeds_size(config))
    if given.dim() != len(axes) or (embeds is not None and embeds.shape[-1] != axes[-1]):
        beside = "" if in_rows else ", beside cu_seqlens"
        raise ValueError(f"{name} has shape {tuple(given.shape)}; expected ({', '.join(map(str, axes))}){beside}")

    # The values: an id beyond the table would stop a GPU much later, with a message that names nothing.
    if ids is not None:
        check_ids(name, ids, config.vocab_size, "vocab_size")
    elif isinstance(embeds, Tensor) and not embeds.is_floating_point():
        raise ValueError(f"inputs_embeds is {embeds.dtype}; embeddings are floats, indices go into input_ids")

    # The length: what the table of positions holds, if positions are counted at all.
    if in_rows:
        batch, longest = given.shape[:2]  # as torch.fx can trace it
    else:
        longest = check_ends(args, name)
    kind = POSITIONS[config.position_embedding_type]
    unlimited = kind.in_embeddings and not getattr(config, "position_biased_input", True)
    counted = (args.position_ids is None or kind.in_scores) and not unlimited

    if (in_rows and longest < 1) or (counted and past + longest > config.max_position_embeddings):
        raise ValueError(
            f"{'the sequences are' if in_rows else 'the longest sequence is'} {longest} tokens long"
            f"{f', after {past} in the cache' if past else ''}; this model takes 1 to"
            f" {config.max_position_embeddings} (max_position_embeddings):"
            f" {'truncate them' if longest else 'leave texts without tokens out'}"
            f"{', or load it with a larger max_position_embeddings' if longest and kind.rotates else ''}"
        )

    # Segments and positions lie like the tokens.
    for name, ids, field in (
        ("token_type_ids", args.token_type_ids, "type_vocab_size"),
        ("position_ids", args.position_ids, "max_position_embeddings"),
    ):
        if isinstance(ids, Tensor):  # torch.fx traces with stand-ins
            shape, full = tuple(ids.shape), (batch, longest) if in_rows else tuple(given.shape[:1])
            if shape != full and not (in_rows and broadcasts(shape, full)):
                beside = ", or broadcastable to it" if in_rows else ""
                raise ValueError(f"{name} has shape {shape}; expected {full}{beside}")

        if ids is not None:
            first = first_position(config) if ids is args.position_ids else 0
            check_ids(name, ids, getattr(config, field), field, first)


def broadcasts(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Return whether a tensor of a shape broadcasts to the full shape."""
    pairs = zip(reversed(shape), reversed(full), strict=False)
    return len(shape) <= len(full) and all(have == want or have == 1 for have, want in pairs)


def check_ends(args: ForwardArgs, name: str) -> int:
    """Return the longest sequence's length; raise ValueError if the ends of sequences do not fit the tokens."""
    cu_seqlens = args.cu_seqlens
    assert cu_seqlens is not None  # otherwise the tokens are in rows
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; expected torch.int32, (batch + 1,)"
        )

    # On the CPU the ends cost nothing to read; elsewhere the host waits for them here, once.
    device, tokens = args.tokens.device, args.tokens.shape[0]
    if cu_seqlens.device not in (device, torch.device("cpu")):
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and {name} on {device}; move one of them")

    ends, lengths = args.ends, args.lengths
    if ends[0] or ends[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens goes from {ends[0]} to {ends[-1]}; it must rise from 0 to the {tokens} tokens there are"
        )
    return max(lengths, default=0)


def check_devices(embeddings: Any, args: ForwardArgs) -> None:
    """Raise ValueError for inputs on another device than the embeddings, unless accelerate's hooks move them there."""
    words = embeddings.word_embeddings
    weight = getattr(words, "weight", None)
    has_hook = hasattr(embeddings, "_hf_hook") or hasattr(words, "_hf_hook")
    given = args.tokens
    if has_hook or not isinstance(given, Tensor) or not isinstance(weight, Tensor) or weight.is_meta:
        return
    for name, ids in (("token_type_ids", args.token_type_ids), ("position_ids", args.position_ids)):
        if ids is not None and ids.device != given.device:
            raise ValueError(f"{name} is on {ids.device}, the input on {given.device}: move one of them")
    if given.device != weight.device:
        raise ValueError(f"the input is on {given.device}, the model on {weight.device}: move one of them")


def check_encoder_states(config: BertConfig, states: Tensor, batch: int) -> None:
    """Raise ValueError for an encoder's output that this model cannot attend to."""
    if not config.add_cross_attention:
        raise ValueError(
            "encoder_hidden_states were given to a model without cross-attention;"
            " it needs is_decoder=True and add_cross_attention=True"
        )
    if states.dim() != 3 or states.shape[0] not in (batch, 1) or states.shape[2] != config.hidden_size:
        raise ValueError(
            f"encoder_hidden_states has shape {tuple(states.shape)}; expected ({batch}, length, {config.hidden_size})"
        )


def check_ids(name: str, ids: Tensor, size: int, field: str, first: int = 0) -> None:
    """Raise ValueError for indices of another dtype, or outside a table.

    Args:
        first: the index of the table's first row; padding has the index before it.
    """
    if ids.dtype not in INDICES:
        raise ValueError(f"{name} is {ids.dtype}; indices are torch.long or torch.int")
    lowest, highest = max(first - 1, 0), first + size - 1
    known = f"this model has {lowest} to {highest} ({field} {size}{f', from {first} on' if first else ''})"
    if ids.device.type == "cpu" and ids.numel() and values_readable(ids):
        low, high = map(int, ids.aminmax())
        if low < lowest or high > highest:
            raise ValueError(f"{name} holds {low if low < lowest else high}; {known}")
    elif values_readable(ids) and ids.is_cuda:  # the message comes with the next call that waits for the device
        torch_private.assert_async(((ids >= lowest) & (ids <= highest)).all(), f"{name} holds others; {known}")


@dataclass(frozen=True)
class Mask:
    """A mask for kernels.  Every field broadcasts to (B, N, S, K), and None restricts nothing."""

    allowed: Tensor | None = None  # bool; never a row of False, see `attends_anything`
    bias: Tensor | None = None  # float, added to the scores
    attends_anything: Tensor | None = None  # bool, (…, S, 1): False for a query with nothing to attend to
    evenly: Tensor | None = None  # bool, (…, S, 1): True for a query that attends to all keys alike

    def first(self) -> "Mask":
        """Return the mask of only the first query."""
        parts = (self.allowed, self.bias, self.attends_anything, self.evenly)
        return Mask(*(None if part is None else part[..., :1, :] for part in parts))


def read_mask(
    mask: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    heads: int,
    causal: Tensor | None = None,
    name: str = "attention_mask",
    evenly: bool = False,
) -> Mask:
    """Understand a user's attention mask.

    Args:
        mask: (B, K), or (B, S, K), of 0 and 1 in any dtype; or 4-D, (B, heads, S, K), bool or floats to add to the
            scores.  Floats of -inf, or the dtype's lowest number, forbid.  An axis of 1 is broadcast, except the keys
            of a mask of 0 and 1.
        causal: (S, K), the keys that a decoder's queries may attend to; joined to a 2-D mask or none.  A mask with a
            row for every query is used instead.
        evenly: queries that a 2-D mask makes padding attend to all keys alike, as in transformers' DeBERTa.

    Raises:
        ValueError: the rank, shape, dtype or a value is another.
    """
    if mask is None:
        return Mask(causal)
    if isinstance(mask, Tensor):  # torch.fx traces with stand-ins
        check_shape(mask, (batch, heads, queries, keys), name)
    if mask.dim() == 4:
        return read_scores(mask, name)
    allowed = to_bool_mask(mask, name)
    if mask.dim() == 3:
        return to_mask(allowed[:, None])
    if evenly and not (values_readable(allowed) and bool(allowed.all())):
        padding = ~allowed[:, None, :, None]
        return Mask(allowed[:, None, None] | padding, evenly=padding)
    return to_mask(allowed[:, None, None] if causal is None else allowed[:, None, None] & causal)


def check_shape(mask: Tensor, full: tuple[int, int, int, int], name: str) -> None:
    """Raise ValueError unless a mask is (B, K), (B, S or 1, K) or (B, heads, S, K); an axis may be 1.

    Only in 4 dimensions may the axis of keys be 1.
    """
    batch, _, queries, keys = full
    shape = tuple(mask.shape)
    fits = {2: (batch, keys), 3: (batch, queries, keys), 4: full}.get(mask.dim())
    if fits is None:
        raise ValueError(f"{name} has {mask.dim()} dimensions, shape {shape}; expected 2, 3 or 4")
    if shape != fits and (not broadcasts(shape, fits) or (mask.dim() < 4 and shape[-1] != keys)):
        raise ValueError(f"{name} has shape {shape}; expected {fits}, or 1 in place of any but the last")


def to_bool_mask(mask: Tensor, name: str) -> Tensor:
    """Return a mask of 1 (attend) and 0 (do not), in any dtype, as bool."""
    if mask.dtype == torch.bool:
        return mask
    if mask.is_complex():
        raise ValueError(f"{name} is {mask.dtype}; use bool, integers or floats of 0 and 1")
    allowed = mask != 0
    if values_readable(mask) and not mask.is_cpu:  # the message comes with the next call that waits for the device
        torch_private.assert_async((mask == allowed).all(), f"{name} holds others than 1 (attend) and 0 (do not)")
    elif values_readable(mask) and not bool((mask == allowed).all()):
        raise ValueError(
            f"{name} holds {mask[mask != allowed][0].item()}: a {mask.dim()}-D mask holds 1 (attend) and 0 (do not);"
            " pass additive scores as a 4-D float mask"
        )
    return allowed


def read_scores(mask: Tensor, name: str) -> Mask:
    """Read a 4-D mask, bool or added to the scores."""
    if mask.dtype == torch.bool:
        return to_mask(mask)
    if not mask.is_floating_point():
        raise ValueError(f"a 4-D {name} is bool or additive floats, not {mask.dtype}; use mask.bool()")
    faults: dict[str, Tensor] = {}
    if values_readable(mask):
        zeros_and_ones = (mask == 1).any() & ((mask == 0) | (mask == 1)).all()
        faults = {
            f"a 4-D float {name} is added to the scores, but this one holds 0 and 1; use mask.bool()": zeros_and_ones,
            f"{name} holds nan or +inf; scores are finite, or -inf to forbid": (mask.isnan() | mask.isposinf()).any(),
        }
    allowed = mask > torch.finfo(mask.dtype).min
    return to_mask(allowed, mask.masked_fill(~allowed, 0), faults)


def to_mask(allowed: Tensor, bias: Tensor | None = None, faults: dict[str, Tensor] | None = None) -> Mask:
    """Make a mask, None for parts that restrict nothing; raise ValueError for any of `faults`, {message: bool}."""
    faults = faults or {}
    attends_anything = allowed.any(-1, keepdim=True)
    if values_readable(allowed):
        flags = [allowed.all(), attends_anything.all(), *faults.values()]
        all_allowed, all_attend, *wrong = torch.stack(flags).tolist()  # waits for a GPU once
        if any(wrong):
            raise ValueError(list(faults)[wrong.index(True)])
        if all_attend:
            return Mask(None if all_allowed else allowed, bias)
    allowed = torch.logical_or(allowed, ~attends_anything)  # a row of -inf would be nan; the context becomes 0
    return Mask(allowed, bias, attends_anything)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Return (S, K), True where a query, one of the last S of K positions, is not before the key.

    None for a single query, which is the last position and attends to all.
    """
    if queries == 1:
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def values_readable(tensor: Tensor) -> bool:
    """Return whether Python may read values: not while a graph is traced or captured, in vmap, or on meta."""
    if torch.compiler.is_compiling() or torch_private.is_tracing() or not isinstance(tensor, Tensor):
        return False  # torch.fx traces with stand-ins
    if tensor.is_meta or torch_private.transform_level() is not None:
        return False
    if any(map(torch_private.dispatch_mode, torch_private.TRACERS)):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def read_gates(head_mask: Tensor, config: BertConfig, batch: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the factors of each layer's head contexts: L tensors of (B or 1, S or 1, heads kept, 1).

    Raises:
        ValueError: `head_mask` has a shape that `forward` does not name.
    """
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    gate, shape = head_mask, tuple(head_mask.shape)

    # Every accepted shape becomes one: a factor for layer, sequence, position and head.
    if shape == (heads,):
        gate = gate.expand(layers, heads)[:, None, None]
    elif shape == (layers, heads):
        gate = gate[:, None, None]
    elif gate.dim() == 3 and shape in ((layers, 1, heads), (layers, batch, heads)):
        gate = gate[:, :, None]
    elif gate.dim() == 5 and shape[:3:2] == (layers, heads) and broadcasts(shape, (layers, batch, heads, length, 1)):
        # The form of transformers has two more axes.
        gate = gate[..., 0].transpose(2, 3)
    else:
        raise ValueError(
            f"head_mask has shape {shape}; expected ({heads},), ({layers}, {heads}), ({layers}, {batch}, {heads}) or"
            f" ({layers}, {batch}, {heads}, 1, 1), heads in the numbering of the unpruned model"
        )

    # Gates are numbered as the model was built; a pruned layer has contexts of the heads it kept.
    gate = gate.to(dtype)[..., None]  # (L, B or 1, S or 1, N, 1)
    if not any(config.pruned_heads.values()):
        return list(gate)
    return [keep_heads(gate[layer], kept_heads(config, layer)) for layer in range(layers)]


def keep_heads(gate: Tensor, heads: Sequence[int]) -> Tensor:
    """Return these heads of a gate, (B or 1, S or 1, N, 1), by slices: sending a list would wait for a GPU."""
    return gate[:, :, :0] if not heads else torch.cat([gate[:, :, head : head + 1] for head in heads], 2)
