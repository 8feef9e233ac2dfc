"""Kernels in Triton for what a layer does around its matmuls: each reads and writes memory once.

They compute in float32, whatever the dtype of their inputs, and give no gradients.  `short_attention` has one more.

Shapes:  B sequences · S positions · T tokens · D hidden · N neurons
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bertlite.stack.layouts import Slots

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    triton = None

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)  # settled when a kernel is decorated

GELU_TANH = ("gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh", "gelu_pytorch_tanh")
FORMULAS = {  # {name of an activation: its formula in `activate`}
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(GELU_TANH, "gelu_tanh"),
    **dict.fromkeys(("silu", "swish"), "silu"),
    **{name: name for name in ("quick_gelu", "relu", "linear")},
}
ALIGNED = 16  # bytes: each row of a matrix that is read by blocks begins at a multiple


class Tiles(NamedTuple):
    """The sizes of `product_kernel`: of a block of the output, of a step of its sums, and of a program."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


TILES = (Tiles(64, 128, 64, 4, 4), Tiles(128, 128, 64, 4, 3), Tiles(128, 256, 64, 8, 3))  # the first for few tokens
GROUP = 8  # blocks of rows whose programs run together, and share columns in the cache

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def normalise(x, inside, weight, bias, column, eps, D: tl.constexpr):  # type: ignore[no-untyped-def]
        mean = tl.sum(x, 0) / D
        centred = tl.where(inside, x - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
        weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        return centred * scale * weights + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)

    @triton.jit  # type: ignore[untyped-decorator]
    def add_norm_kernel(  # type: ignore[no-untyped-def]
        x, add, residual, weight, bias, out, eps, D: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row, column = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BLOCK)
        inside = column < D
        found = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
        found += tl.load(add + column, mask=inside, other=0.0).to(tl.float32)
        found += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
        found = normalise(found, inside, weight, bias, column, eps, D)
        tl.store(out + row + column, found.to(out.dtype.element_ty), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def embed_kernel(  # type: ignore[no-untyped-def]
        ids, types, places, words, segments, positions, weight, bias, out, eps, padding, V, G, P,
        D: tl.constexpr, BLOCK: tl.constexpr, PLACED: tl.constexpr,
    ):  # fmt: skip
        token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside = column < D
        word, segment = tl.load(ids + token).to(tl.int64), tl.load(types + token).to(tl.int64)
        known = (word >= 0) & (word < V) & (segment >= 0) & (segment < G)
        readable = column < tl.where(known, D, 0)  # the interpreter of Triton 3.9 takes no mask `inside & known`
        found = tl.load(words + word * D + column, mask=readable, other=0.0).to(tl.float32)
        found += tl.load(segments + segment * D + column, mask=readable, other=0.0).to(tl.float32)
        if PLACED:
            place = tl.load(places + token).to(tl.int64)
            place = tl.where(place < 0, padding, place)
            placed, known = column < tl.where((place >= 0) & (place < P), D, 0), known & (place < P)
            found += tl.load(positions + place * D + column, mask=placed, other=0.0).to(tl.float32)
        found = tl.where(known, normalise(found, inside, weight, bias, column, eps, D), float("nan"))
        tl.store(out + token * D + column, found.to(out.dtype.element_ty), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def activate(x, NAME: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
        if NAME == "gelu":
            if EXACT:
                x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))

            else:  # within 2e-7, in half the time; Abramowitz and Stegun, 7.1.26
                size = tl.abs(x) * 0.7071067811865476
                t = 1.0 / (1.0 + 0.3275911 * size)
                tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
                below = 0.5 * x * tail * tl.exp(-size * size)
                x = tl.where(x < 0, below, x - below)

        # All other activations have closed forms that a GPU computes exactly enough.
        elif NAME == "gelu_tanh":
            x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        elif NAME == "silu":
            x = x * tl.sigmoid(x)
        elif NAME == "quick_gelu":
            x = x * tl.sigmoid(1.702 * x)
        elif NAME == "relu":
            x = tl.maximum(x, 0.0)
        return x

    @triton.jit  # type: ignore[untyped-decorator]
    def store_block(  # type: ignore[no-untyped-def]
        out, sums, bias, row, column, N, NAME: tl.constexpr, EXACT: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        columns = column + tl.arange(0, COLUMNS)
        sums += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None]
        out.store([row, column], activate(sums, NAME, EXACT).to(out.dtype))

    @triton.jit  # type: ignore[untyped-decorator]
    def product_kernel(  # type: ignore[no-untyped-def]
        x, weight, bias, out, T, N, D,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
        NAME: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        down, across = tl.cdiv(T, ROWS), tl.cdiv(N, COLUMNS)

        # Neighbouring blocks share rows and columns, which the cache then still holds: they are taken in groups.
        for block in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
            first = block // (GROUP * across) * GROUP
            together = tl.minimum(down - first, GROUP)
            row = (first + block % (GROUP * across) % together) * ROWS
            column = block % (GROUP * across) // together * COLUMNS

            sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for step in range(tl.cdiv(D, STEP)):
                left, right = x.load([row, step * STEP]), weight.load([column, step * STEP])
                precision: tl.constexpr = "ieee" if EXACT else "tf32"
                sums = tl.dot(left, tl.trans(right), sums, input_precision=precision)

            HALF: tl.constexpr = COLUMNS // 2  # two stores of half the memory
            halves = tl.permute(tl.reshape(sums, (ROWS, 2, HALF)), (0, 2, 1))
            one, other = tl.split(halves)
            store_block(out, one, bias, row, column, N, NAME, EXACT, HALF)
            store_block(out, other, bias, row, column + HALF, N, NAME, EXACT, HALF)

    @triton.jit(do_not_specialize=["S"])  # type: ignore[untyped-decorator]  # or each would be compiled
    def count_kernel(mask, counts, S, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        kept = tl.load(mask + row * S + column, mask=column < S, other=0) != 0
        tl.store(counts + row, tl.sum(kept.to(tl.int32), 0))

    @triton.jit(do_not_specialize=["S", "T", "B"])  # type: ignore[untyped-decorator]
    def pack_kernel(  # type: ignore[no-untyped-def]
        mask, ids, types, positions, counts, ends, slots, packed, S, T, B,
        BLOCK: tl.constexpr, ROWS: tl.constexpr, PLACED: tl.constexpr,
    ):  # fmt: skip
        row, column, rows = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, ROWS)
        start = tl.sum(tl.load(counts + rows, mask=(rows < B) & (rows < row), other=0), 0)
        tl.store(ends + row, start)
        tl.store(ends + row + 1, start + tl.load(counts + row))
        at, inside = row.to(tl.int64) * S + column, column < S
        kept = inside & (tl.load(mask + at, mask=inside, other=0) != 0)
        slot = start + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(slots + at, tl.where(kept, slot, T).to(tl.int64), mask=inside)
        tl.store(packed + slot, tl.load(ids + at, mask=kept, other=0), mask=kept)
        tl.store(packed + T + slot, tl.load(types + at, mask=kept, other=0), mask=kept)
        place = column.to(tl.int64)
        if PLACED:
            place = tl.load(positions + at, mask=kept, other=0)
        tl.store(packed + 2 * T + slot, place, mask=kept)

    @triton.jit  # type: ignore[untyped-decorator]
    def unpack_kernel(x, slots, out, T, D: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        position, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        slot = tl.load(slots + position)
        found = tl.load(x + slot * D + column, mask=column < tl.where(slot < T, D, 0), other=0.0)
        tl.store(out + position * D + column, found, mask=column < D)


def missing_for_triton(device: str, dtype: torch.dtype) -> str | None:
    """Return the reason why kernels of Triton cannot run on a type of device, in a dtype; None if they can."""
    if triton is None:
        return "Triton is not installed, or older than 3.4; torch for CUDA brings it"
    if device != "cuda" and not INTERPRETED:
        return f"Triton runs on CUDA, not on {device}"
    if dtype not in TRITON_DTYPES:
        return f"the kernels take {', '.join(map(str, TRITON_DTYPES))}, not {dtype}"
    return launch_fault(torch.cuda.current_device()) if device == "cuda" and torch.cuda.is_available() else None


@cache
def launch_fault(current: int) -> str | None:
    """Return the reason why a kernel cannot be launched here; None after one has run.  The host waits for it.

    Triton needs a C compiler for its launchers, which not every image has.

    Args:
        current: the current GPU, as Triton launches there: each is asked once.
    """
    if torch.cuda.get_device_capability(current) < (8, 0):
        return "Triton needs a GPU of compute capability 8.0 or more, as Ampere's"
    try:
        mask = torch.ones(1, 3, dtype=torch.long, device="cuda")
        counts = torch.zeros(1, dtype=torch.int32, device="cuda")
        count_kernel[(1,)](mask, counts, 3, **block_of(3))
        found = int(counts)
    except Exception as error:  # compilers, drivers and files raise many kinds
        return f"Triton cannot launch a kernel: {type(error).__name__}: {error}"
    return None if found == 3 else f"a kernel of Triton counted {found} of 3 tokens"


def block_of(width: int) -> dict[str, int]:
    """Return the settings of a kernel whose programs take a row each: a power of 2 at least as wide, and the warps."""
    block = 1 << (width - 1).bit_length()
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 8)}


def add_norm(x: Tensor, bias: Tensor, residual: Tensor, norm: nn.LayerNorm) -> Tensor:  # (…, D) twice -> (…, D)
    """Return norm(x + bias + residual)."""
    x, residual = x.contiguous(), residual.contiguous()
    out, width = torch.empty_like(residual), x.shape[-1]
    if out.numel():
        add_norm_kernel[(out.numel() // width,)](
            x, bias, residual, norm.weight, norm.bias, out, norm.eps, D=width, **block_of(width)
        )
    return out


def embed_and_norm(
    ids: Tensor,  # (…,)
    types: Tensor,  # (…,)
    positions: Tensor | None,  # (…,), below 0 for padding; None if there are none
    tables: tuple[Tensor, Tensor, Tensor | None],  # words, segments and positions
    padding: int,  # the row of padding's position; below 0 if it has none
    norm: nn.LayerNorm,
) -> Tensor:  # (…, D)
    """Return the norm of the sum of each token's embeddings; nan for a token that a table has no row for."""
    words, segments, places = tables
    ids, types = ids.contiguous(), types.contiguous()
    out = words.new_empty(*ids.shape, words.shape[1])
    if out.numel():
        embed_kernel[(ids.numel(),)](
            ids, types, ids if positions is None else positions.contiguous(), words, segments,
            words if places is None else places, norm.weight, norm.bias, out, norm.eps, padding,
            len(words), len(segments), 0 if places is None else len(places),
            D=words.shape[1], PLACED=positions is not None, **block_of(words.shape[1]),
        )  # fmt: skip
    return out


def product(x: Tensor, weight: Tensor, bias: Tensor, name: str, tiles: Tiles, programs: int) -> Tensor:
    """Return the activation of x @ weight.T + bias, (T, N), from one kernel.

    Args:
        x: (T, D), without gaps; rows of x and weight have a multiple of ALIGNED bytes.
        name: a key of FORMULAS.
        programs: how many run at once.
    """
    (tokens, width), neurons = x.shape, weight.shape[0]

    # The hardware that copies blocks needs aligned rows, so the output has padding that the view hides.
    aligned = ALIGNED // x.element_size()
    out = x.new_empty(tokens, -(-neurons // aligned) * aligned)[:, :neurons]
    blocks = [tiles.rows, tiles.step], [tiles.columns, tiles.step], [tiles.rows, tiles.columns // 2]

    described = [
        TensorDescriptor(each, list(each.shape), list(each.stride()), block)
        for each, block in zip((x, weight, out), blocks, strict=True)
    ]

    # No more programs than blocks; each takes several in turn.
    total = -(-tokens // tiles.rows) * -(-neurons // tiles.columns)
    product_kernel[(min(programs, total),)](
        *described[:2], bias, described[2], tokens, neurons, width, ROWS=tiles.rows, COLUMNS=tiles.columns,
        STEP=tiles.step, GROUP=GROUP, NAME=FORMULAS[name], EXACT=x.dtype == torch.float32, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    return out


def pack_rows(
    ids: Tensor, types: Tensor, mask: Tensor, positions: Tensor | None, room: int, longest: int
) -> tuple[Slots, tuple[Tensor, ...]]:  # (B, S) each -> the layout; (T,) each
    """Return `Slots.of_rows` and its `pack_inputs` from two kernels; by default positions count from 0."""
    (rows, length), device = mask.shape, mask.device
    counts, ends = (torch.empty(rows + more, dtype=torch.int32, device=device) for more in (0, 1))
    slots = torch.empty(rows * length, dtype=torch.long, device=device)
    packed = torch.zeros(3, room, dtype=torch.long, device=device)  # slots that are left over hold a token too
    sizes = block_of(max(length, 128))  # few sizes, each of which is compiled
    count_kernel[(rows,)](mask, counts, length, **sizes)
    pack_kernel[(rows,)](
        mask, ids, types, mask if positions is None else positions.contiguous(), counts, ends, slots, packed,
        length, room, rows, ROWS=max(1 << (rows - 1).bit_length(), 1024), PLACED=positions is not None, **sizes,
    )  # fmt: skip
    return Slots((longest,), counts, (rows, length), ends=ends, slot_of=slots, room=room), packed.unbind()


def unpack_rows(layout: Slots, x: Tensor) -> Tensor:  # (T, D) -> (B, S, D)
    """Return `layout.unpack(x)` from one kernel: zeros at padding."""
    slots: Any = layout.slot_of
    out, width = x.new_empty(*layout.shape, x.shape[-1]), x.shape[-1]
    unpack_kernel[(slots.numel(),)](x.contiguous(), slots, out, layout.room, D=width, **block_of(width))
    return out
