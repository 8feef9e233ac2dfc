"""Attention of packed sequences of up to 128 tokens, as a kernel in Triton: one program computes a sequence's head.

Flash attention's tiles of 128 queries stay mostly empty at the lengths of sentences.

Shapes:  T tokens · N heads · H head dim · B sequences · L the longest sequence, a power of 2
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from bertlite.inference.gpu.triton_kernels import missing_for_triton
from bertlite.runtime.shapes import power_of_2
from bertlite.stack.attention import Backend, Requirements
from bertlite.stack.layouts import Packed
from bertlite.stack.positions import ScoreBias

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

LONGEST = 128  # all scores of a head are in registers at once
WARPS = {16: 2, 32: 2, 64: 4, 128: 8}

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def attend_kernel(  # type: ignore[no-untyped-def]
        q, k, v, out, ends, bias,
        q_row, k_row, v_row, heads, width, scale,
        L: tl.constexpr, H: tl.constexpr, BIASED: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        sequence, head = tl.program_id(0), tl.program_id(1)
        start = tl.load(ends + sequence)
        length = tl.load(ends + sequence + 1) - start

        # An empty sequence has no rows, and its softmax would be nan.
        if length > 0:
            row, column = tl.arange(0, L), tl.arange(0, H)
            inside = (row[:, None] < length) & (column[None] < width)
            token, at = (start + row).to(tl.int64)[:, None], head * width + column[None]
            queries = tl.load(q + token * q_row + at, mask=inside, other=0.0)
            keys = tl.load(k + token * k_row + at, mask=inside, other=0.0)
            values = tl.load(v + token * v_row + at, mask=inside, other=0.0)

            # exact sums of more would need more registers than there are
            precision: tl.constexpr = "tf32" if not EXACT else "ieee" if L <= 32 and L * H <= 2048 else "tf32x3"
            scores = tl.dot(queries, tl.trans(keys), input_precision=precision) * scale

            # Rows behind the sequence belong to the next one: they are no keys.
            both = (row[:, None] < length) & (row[None] < length)
            if BIASED:
                scores += tl.load(bias + (head * L + row[:, None]) * L + row[None], mask=both, other=0.0).to(
                    tl.float32
                )
            scores = tl.where(row[None] < length, scores, float("-inf"))
            weights = tl.exp(scores - tl.max(scores, 1)[:, None])
            inverse = (1.0 / tl.sum(weights, 1))[:, None]

            # The weights are divided by their sum at the end, where there are fewer numbers.
            context = tl.dot(weights.to(values.dtype), values, input_precision=precision) * inverse
            tl.store(out + token * heads * width + at, context.to(out.dtype.element_ty), mask=inside)


def attend_short(
    q: Tensor, k: Tensor, v: Tensor, packing: Packed, score_bias: ScoreBias | None, dropout: float, first: bool
) -> Tensor:  # (T, N, H) each -> (T, N, H)
    """Compute attention of packed sequences; tokens that belong to no sequence are not written.

    Args:
        score_bias: depends on places alone, as in MPNet: one bias for all sequences.

    Raises:
        ValueError: the kernel cannot compute this; the message names the reason.
    """
    _, heads, width = q.shape

    # A kernel reads and writes memory without a check, so whatever it cannot do is refused here.
    longest = max(16, power_of_2(packing.keys))  # as products of Triton need it
    needs = Requirements(dropout=dropout > 0, device=q.device, dtype=q.dtype, head_dim=width)
    missing = "gradients" if torch.is_grad_enabled() and q.requires_grad else "first tokens alone" if first else None
    missing = f"it has no {missing}" if missing else missing_for_short(needs, longest)
    if missing is not None:
        raise ValueError(f"the kernel for short attention cannot run here: {missing}")

    # A pointer must be given even if there is no bias; it is then not read.
    bias = q
    if score_bias is not None:
        places = q.new_empty(1, heads, packing.keys, 0)
        bias, more = score_bias(places, places), longest - packing.keys
        bias = (F.pad(bias, (0, more) * 2) if more else bias).contiguous()

    # Heads must lie one after the other, as they do in a projection; rows may lie apart.
    q, k, v = (x if x.stride()[1:] == (width, 1) else x.contiguous() for x in (q, k, v))
    out, ends = torch.empty(q.shape, dtype=q.dtype, device=q.device), packing.nonempty_ends
    size, exact = max(16, triton.next_power_of_2(width)), q.dtype == torch.float32
    attend_kernel[len(ends) - 1, heads](
        q, k, v, out, ends, bias, q.stride(0), k.stride(0), v.stride(0), heads, width, width**-0.5,
        L=longest, H=size, BIASED=score_bias is not None, EXACT=exact, num_warps=warps_for(longest, size, exact),
    )  # fmt: skip
    return out


def warps_for(longest: int, size: int, exact: bool) -> int:
    """Return the warps of a head: twice as many in float32 if it is wide, or its numbers would leave the registers."""
    return min(8, WARPS[longest] * (2 if exact and size > 64 else 1))


def longest_for(needs: Requirements) -> int:
    """Return the length of the longest sequence that the kernel computes, in tokens."""
    if needs.dtype != torch.float32 or needs.device.type != "cuda" or not torch.cuda.is_available():
        return LONGEST
    # Registers hold more on Hopper and on the Blackwell of servers alone.
    return LONGEST if torch.cuda.get_device_capability(needs.device)[0] in (9, 10) else 64


def missing_for_short(needs: Requirements, longest: int) -> str | None:
    """Return the reason why the kernel cannot compute this attention of up to `longest` tokens, or None."""
    missing = missing_for_triton(needs.device.type, needs.dtype)
    if missing is not None:
        return missing
    if longest > (most := longest_for(needs)) or needs.head_dim > LONGEST:
        return f"it takes up to {most} tokens and {LONGEST} head dims, not {longest} and {needs.head_dim}"
    return "it has no dropout" if needs.dropout else None


SHORT = Backend("short", attend_short, packs=True)
