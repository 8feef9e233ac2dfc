"""Modules triton_kernels and short_attention: each kernel against torch's operators in float64, with odd sizes."""

import re
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import interpreted
import pytest
import torch
from interpreted import FLOATS, HERE, here_or_interpreted, run_interpreted, with_triton
from simulated import by_ends
from torch import Tensor, nn
from torch.nn import functional as F

from bertlite.inference.gpu import short_attention, triton_kernels
from bertlite.inference.gpu.short_attention import attend_short, longest_for, missing_for_short
from bertlite.inference.gpu.triton_kernels import FORMULAS, TILES, Tiles, add_norm, embed_and_norm, product
from bertlite.stack.attention import Requirements
from bertlite.stack.layouts import Slots
from bertlite.support.activations import ACTIVATIONS

CUDA = torch.device("cuda")
WIDTHS = (1, 312, 384, 768, 1024)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(HERE, dtype)


def norm_of(width: int, dtype: torch.dtype) -> nn.LayerNorm:
    norm = nn.LayerNorm(width, eps=1e-7)
    norm.weight.data, norm.bias.data = draw(width, seed=1), draw(width, seed=2)
    return norm.to(HERE, dtype).requires_grad_(False)


def assert_as_near(found: Tensor, plain: Tensor, true: Tensor) -> None:
    """Assert that a result is as near to float64 as torch's operators are, or nearer, but for a step of its dtype."""
    assert (found.shape, found.dtype) == (plain.shape, plain.dtype)
    if found.numel():
        step = torch.finfo(found.dtype).eps * true.abs().max()
        assert (found - true).abs().max() <= 1.5 * (plain - true).abs().max() + step


@here_or_interpreted
@pytest.mark.parametrize("file", ["test_triton_kernels.py", "test_fused.py"])
def test_the_kernels_in_a_process_that_interprets_them(file):
    run_interpreted(Path(__file__).with_name(file))


def test_on_a_gpu_every_kernel_is_tested(monkeypatch):
    def test() -> None: ...

    monkeypatch.setattr(interpreted, "HERE", torch.device("cuda"))
    assert "gpu" in {mark.name for mark in interpreted.with_triton(test).pytestmark}  # type: ignore[attr-defined]


@with_triton
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shape", [(5,), (2, 3), (1,), (0,)], ids=str)
def test_a_residual_is_added_and_normalised(shape, width, dtype):
    norm, bias = norm_of(width, dtype), draw(width, dtype=dtype, seed=3)
    x = draw(*shape, 2 * width, dtype=dtype)[..., ::2]  # with gaps
    residual = 9 + draw(*shape, width, dtype=dtype, seed=4)
    found = add_norm(x, bias, residual, norm)
    plain = norm(x + bias + residual)
    assert_as_near(found, plain, norm.double()(x.double() + bias.double() + residual.double()))


@with_triton
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("padding", [None, -1, 2])
def test_embeddings_are_added_and_normalised(padding, width, dtype):
    """With no positions; with padding that has none; and with padding that has a row."""
    words, segments, places = (draw(n, width, dtype=dtype, seed=n) for n in (9, 2, 7))
    ids, types = torch.tensor([[0, 8, 3], [8, 8, 1]], device=HERE), torch.tensor([[1, 0, 1]], device=HERE)
    types, positions = types.expand(2, 3), torch.tensor([[0, 6, 1], [3, -1, -1]], device=HERE)
    norm, given = norm_of(width, dtype), None if padding is None else positions
    found = embed_and_norm(ids, types, given, (words, segments, places), padding or 0, norm)

    def plain(dtype: torch.dtype) -> Tensor:
        x = words.to(dtype)[ids] + segments.to(dtype)[types]
        if padding is not None:
            row = positions.where(positions >= 0, padding)
            x = x + places.to(dtype)[row] * (row >= 0)[..., None]
        return norm.to(dtype)(x)

    assert_as_near(found, plain(dtype), plain(torch.float64))
    wrong = [(ids + 1, types, given), (ids - 1, types, given), (ids, types + 1, given), (ids, types - 1, given)]
    if given is not None:
        wrong.append((ids, types, given + 1))
    for each, kinds, at in wrong:  # reads beyond a table must not pass for vectors
        outside = (each < 0) | (each > 8) | (kinds < 0) | (kinds > 1) | (0 if at is None else at > 6)
        spoilt = embed_and_norm(each, kinds, at, (words, segments, places), padding or 0, norm).isnan()
        assert (spoilt == outside[..., None]).all()
        assert outside.any()


@with_triton
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(("tokens", "width", "neurons"), [(37, 40, 72), (1, 312, 8), (130, 96, 17)])
def test_a_matmul_has_bias_and_activation(tokens, width, neurons, name, dtype):
    """Sizes are no multiples of blocks, several blocks take turns, and rows of the output may need a gap."""
    if dtype == torch.float32 and HERE.type == "cuda":
        pytest.skip("models multiply by it in 16 bits alone, and cuBLAS adds float32 in another order")
    x, weight, bias = draw(tokens, width, dtype=dtype), draw(neurons, width, dtype=dtype, seed=1), draw(neurons)
    weight, bias = weight / 4, bias.to(dtype)
    act: Any = ACTIVATIONS[name]
    tiles = Tiles(32, 32, 32, 4, 3) if dtype == torch.float32 else TILES[0]  # exact sums take minutes to compile
    found = product(x, weight, bias, name, tiles, 2)
    true = act(F.linear(x.double(), weight.double(), bias.double()))
    assert_as_near(found, act(F.linear(x, weight, bias)), true)


@with_triton
@pytest.mark.parametrize("name", sorted({*FORMULAS.values()}))
def test_the_activation_for_16_bits_is_right_in_float32(name):
    from triton_activation import activate_all  # a module: Triton reads a kernel's source

    x = torch.linspace(-12, 12, 4097, device=HERE)
    formula: Any = ACTIVATIONS["gelu_pytorch_tanh" if name == "gelu_tanh" else name]
    true = formula(x.double())
    for exact in (True, False):
        assert ((activate_all(x, name, exact) - true).abs() <= 3e-7 + 2**-22 * true.abs()).all()


@with_triton
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(
    "lengths", [(5, 0, 3), (1,), (0, 0), (7, 7, 7, 7, 7), (6,) * 33], ids=lambda lengths: str(len(lengths))
)
def test_rows_are_packed_and_unpacked(lengths, counted):
    mask = (torch.arange(7) < torch.tensor(lengths)[:, None]).long()
    mask[0, 2] = 0  # padding between tokens
    ids, types = torch.arange(mask.numel()).view_as(mask) + 100, torch.arange(mask.numel()).view_as(mask) % 3
    mask, ids, types = mask.to(HERE), ids.to(HERE), types.to(HERE)
    positions = 2 * ids if counted else None
    room, longest = int(mask.sum()) + 3, 7
    wanted = Slots.of_rows(mask.ne(0), room, longest, rest=False)
    layout, packed = triton_kernels.pack_rows(ids, types, mask, positions, room, longest)
    for mine, other in zip(packed, wanted.pack_inputs(ids, types, positions, None), strict=False):
        assert other is not None
        assert mine.equal(other)
    assert layout.nonempty_ends.equal(wanted.nonempty_ends)
    assert layout.lengths == wanted.lengths
    x = draw(room, 48)
    assert triton_kernels.unpack_rows(layout, x).equal(wanted.unpack(x))


def slots(lengths: tuple[int, ...], room: int, longest: int) -> Slots:
    rows = torch.arange(max(lengths), device=HERE) < torch.tensor(lengths, device=HERE)[:, None]
    return Slots.of_rows(rows, room, longest, rest=False)


@with_triton
@pytest.mark.parametrize(
    ("lengths", "longest", "heads", "width"),
    [((7, 0, 16, 1, 0), 16, 3, 24), ((33, 5), 64, 2, 64), ((100, 128), 128, 1, 32), ((3,), 8, 5, 12)],
)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_kernel_is_as_near_to_float64_as_eager_attention(lengths, longest, heads, width, biased, dtype):
    """With steep scores, projections that lie in one product, empty sequences, and slots of no sequence."""
    torch.manual_seed(0)
    used, layout = sum(lengths), slots(lengths, sum(lengths) + 5, longest)
    q, k, v = (3 * torch.randn(used + 5, 3, heads, width)).to(HERE, dtype).unbind(1)
    bias = torch.randn(1, heads, longest, longest).to(HERE, dtype)
    score_bias = (lambda q, k: bias[..., : q.shape[-2], : k.shape[-2]].to(q.dtype)) if biased else None
    rest = layout, score_bias, 0.0, False
    with torch.no_grad():
        found, plain = (attend(q, k, v, *rest)[:used] for attend in (attend_short, by_ends))
    true = by_ends(q.double(), k.double(), v.double(), *rest)[:used]
    assert (found - true).abs().max() <= 2 * (plain - true).abs().max() + torch.finfo(dtype).eps


@with_triton
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "not torch.float64"),
        ({"head_dim": 192}, "up to 128 tokens and 128 head dims, not 16 and 192"),
        ({"dropout": True}, "no dropout"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(change, reason):
    assert missing_for_short(Requirements(device=CUDA, head_dim=64), 128) is None
    assert "not 256 and 64" in str(missing_for_short(Requirements(device=CUDA), 256))
    assert reason in str(missing_for_short(Requirements(**{"device": CUDA, **change}), 16))
    q = torch.randn(8, 2, 16, device=HERE, requires_grad=True)
    with pytest.raises(ValueError, match="cannot run here: it has no gradients"):
        attend_short(q, q, q, slots((3, 5), 8, 8), None, 0.0, False)


@pytest.mark.parametrize(("capability", "longest"), [((8, 0), 64), ((9, 0), 128), ((12, 0), 64)])
def test_float32_is_for_as_many_tokens_as_registers_hold(capability, longest, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert [longest_for(Requirements(device=CUDA, dtype=x)) for x in (torch.float32, torch.float16)] == [longest, 128]


def test_without_triton_it_is_refused(monkeypatch):
    monkeypatch.setattr(triton_kernels, "triton", None)
    assert "Triton is not installed" in str(missing_for_short(Requirements(device=CUDA), 16))
    q = torch.randn(8, 2, 16)
    with pytest.raises(ValueError, match="short attention cannot run here: Triton is not installed"):
        attend_short(q, q, q, slots((3, 5), 8, 8), None, 0.0, False)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (None, None),
        (RuntimeError("Failed to find C compiler."), "RuntimeError: Failed to find C compiler"),
        (2, "counted 2 of 3 tokens"),
        ("Turing", "8.0 or more"),
    ],
    ids=str,
)
def test_why_no_kernel_can_be_launched_is_said(fault, reason, monkeypatch):
    """On tensors here that Triton's launcher gets as a GPU's.  A second GPU, of Hopper's kind, has its own answer."""
    gpus = [0]

    def launch(mask: Tensor, counts: Tensor, *sizes: int, **settings: int) -> None:
        if isinstance(fault, Exception):
            raise fault
        counts.fill_(fault if isinstance(fault, int) else 3)

    ones, zeros = torch.ones, torch.zeros
    monkeypatch.setattr(torch, "ones", lambda *shape, dtype, device: ones(*shape, dtype=dtype))
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpus[-1])
    old = {0: (7, 5)} if fault == "Turing" else {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *of: old.get(gpus[-1], (9, 0)))
    monkeypatch.setattr(triton_kernels, "triton", pytest)
    monkeypatch.setattr(triton_kernels, "count_kernel", {(1,): launch}, raising=False)
    monkeypatch.setattr(triton_kernels, "launch_fault", cache(triton_kernels.launch_fault.__wrapped__))
    found = triton_kernels.missing_for_triton("cuda", torch.bfloat16)
    assert found is reason is None or reason in found
    gpus.append(1)
    assert fault != "Turing" or triton_kernels.missing_for_triton("cuda", torch.bfloat16) is None


@pytest.mark.skipif(find_spec("triton") is None or triton_kernels.INTERPRETED, reason="Triton compiles nothing here")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernels_compile_for_hopper_and_keep_their_numbers_in_registers(dtype, tmp_path):
    """Triton compiles for a GPU that is not there.  A thread's stack holds what its 255 registers do not."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    exact, pointer = dtype == "fp32", f"*{dtype}"
    ints = {"padding", "V", "G", "P", "T", "N", "D", "S", "B", "q_row", "k_row", "v_row", "heads", "width"}
    longs = {"ids", "types", "places", "mask", "slots", "packed"}
    numbers = {"eps": "fp32", "scale": "fp32", "counts": "*i32", "ends": "*i32"}
    attend = short_attention.attend_kernel
    rows, norm = {"D": 768, "BLOCK": 1024}, {"D": 312, "BLOCK": 512}
    kernels: list[tuple[Any, dict[str, Any], int, int]] = [
        (triton_kernels.add_norm_kernel, norm, 2, 3),
        (triton_kernels.embed_kernel, {**rows, "PLACED": True}, 4, 3),
        (triton_kernels.unpack_kernel, rows, 4, 3),
        (triton_kernels.count_kernel, {"BLOCK": 128}, 1, 3),
        (triton_kernels.pack_kernel, {"BLOCK": 128, "ROWS": 64, "PLACED": False}, 1, 3),
        *(
            (attend, {"L": n, "H": h, "BIASED": h == 64, "EXACT": exact}, short_attention.warps_for(n, h, exact), 3)
            for n in short_attention.WARPS
            for h in ((64, 128) if n in (32, 64) else (64,))
        ),
    ]
    for tiles in () if exact else TILES:  # float32 is left to cuBLAS
        sizes = {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "STEP": tiles.step, "GROUP": triton_kernels.GROUP}
        named = {**sizes, "NAME": "gelu", "EXACT": False}
        kernels.append((triton_kernels.product_kernel, named, tiles.warps, tiles.stages))
    for kernel, constants, warps, stages in kernels:
        types = {
            name: "constexpr" if name in constants else "i32" if name in ints else "*i64" if name in longs else pointer
            for name in kernel.arg_names
        }
        types |= {name: kind for name, kind in numbers.items() if name in types}
        if kernel is triton_kernels.product_kernel:
            blocks = {"x": ("ROWS", "STEP", 1), "weight": ("COLUMNS", "STEP", 1), "out": ("ROWS", "COLUMNS", 2)}
            types |= {
                name: f"tensordesc<{dtype}[{constants[a]}, {constants[b] // parts}]>"
                for name, (a, b, parts) in blocks.items()
            }
        at = kernel.arg_names.index
        source = ASTSource(
            kernel,
            types,
            constexprs={(at(name),): value for name, value in constants.items()},
            attrs={(at(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] in "*"},
        )
        options = {"num_warps": warps, "num_stages": stages}
        binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        file = tmp_path / "kernel.cubin"
        file.write_bytes(binary.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
        stack = int(re.search(r"STACK:(\d+)", usage)[1])  # type: ignore[index]
        assert stack <= 512, (kernel, constants, usage)
        assert binary.metadata.shared <= 227 * 2**10
