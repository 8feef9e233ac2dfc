"""Masks and gates: what a query may attend to, and what heads are multiplied by, read from what the user gave.

Shapes:  B sequences · S queries · K keys · L layers · N heads as built

One rule for a query with nothing to attend to: its weights are all zero, and so is its context, in every backend and
dtype.  Its layer then gives it the output bias alone, as a layer does that has no heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bertlite.config import BertConfig, kept_heads
from bertlite.support import torch_private


@dataclass(frozen=True)
class Mask:
    """A mask as kernels take it.  Every field broadcasts to (B, N, S, K), and None restricts nothing."""

    allowed: Tensor | None = None  # bool; never a row of False, see `has_keys`
    bias: Tensor | None = None  # float, added to the scores
    has_keys: Tensor | None = None  # bool, (…, S, 1): False for a query with nothing to attend to

    def first(self) -> "Mask":
        """Return the mask of the first query alone."""
        parts = (self.allowed, self.bias, self.has_keys)
        return Mask(*(None if part is None else part[..., :1, :] for part in parts))


def read_mask(
    mask: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    heads: int,
    causal: Tensor | None = None,
    name: str = "attention_mask",
) -> Mask:
    """Understand a user's attention mask.

    Args:
        mask: (B, K), or (B, S, K), of 0 and 1 in any dtype; or 4-D, broadcasting to (B, heads, S, K), either bool or
            floats to add to the scores, where -inf and the dtype's lowest number forbid.
        causal: (S, K), what a decoder's queries may look at; joined to a 2-D mask or none.  A mask for every query
            says itself what it may look at.

    Raises:
        ValueError: any other rank, shape, dtype or value.
    """
    if mask is None:
        return Mask(causal)
    if isinstance(mask, Tensor):  # torch.fx traces with stand-ins
        check_shape(mask, (batch, heads, queries, keys), name)
    if mask.dim() == 4:
        return read_scores(mask, name)
    allowed = read_ones(mask, name)
    if mask.dim() == 3:
        return masked(allowed[:, None])
    return masked(allowed[:, None, None] if causal is None else allowed[:, None, None] & causal)


def check_shape(mask: Tensor, full: tuple[int, int, int, int], name: str) -> None:
    """Refuse a mask that fits neither (B, K) nor (B, S, K) nor, an axis of 1 serving for any, (B, heads, S, K)."""
    batch, _, queries, keys = full
    shape = tuple(mask.shape)
    if mask.dim() == 4:
        if any(have not in (1, want) for have, want in zip(shape, full, strict=True)):
            raise ValueError(f"{name} has shape {shape}, which does not fit {full}")
        return
    fits = {2: ((batch, keys),), 3: ((batch, queries, keys), (batch, 1, keys))}.get(mask.dim())
    if fits is None:
        raise ValueError(f"{name} has {mask.dim()} dimensions, shape {shape}; expected 2, 3 or 4")
    if shape not in fits:
        raise ValueError(f"{name} has shape {shape}; expected {' or '.join(map(str, fits))}")


def read_ones(mask: Tensor, name: str) -> Tensor:
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
        return masked(mask)
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
    return masked(allowed, mask.masked_fill(~allowed, 0), faults)


def masked(allowed: Tensor, bias: Tensor | None = None, faults: dict[str, Tensor] | None = None) -> Mask:
    """Set apart the queries that may look at nothing, and drop what restricts nothing; `faults`: {message: bool}."""
    faults = faults or {}
    has_keys = allowed.any(-1, keepdim=True)
    if values_readable(allowed):
        flags = [allowed.all(), has_keys.all(), *faults.values()]
        everything, everyone, *wrong = torch.stack(flags).tolist()  # a GPU is waited for once
        if any(wrong):
            raise ValueError(list(faults)[wrong.index(True)])
        if everyone:
            return Mask(None if everything else allowed, bias)
    sees_all = torch.logical_or(allowed, ~has_keys)  # a query without a key sees all, for now: no kernel sees -inf
    return Mask(sees_all, bias, has_keys)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Return (S, K), True where a query, one of the last S of K positions, is not before the key.

    None for a lone query, which is the last and sees all.
    """
    if queries == 1:
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def values_readable(tensor: Tensor) -> bool:
    """Return whether values may steer Python: not while a graph is traced or captured, in vmap, or on meta."""
    if torch.compiler.is_compiling() or torch_private.is_tracing() or not isinstance(tensor, Tensor):
        return False  # torch.fx traces with stand-ins
    if tensor.is_meta or torch_private.transform_level() is not None:
        return False
    if any(map(torch_private.dispatch_mode, torch_private.TRACERS)):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


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
