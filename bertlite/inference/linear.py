"""Linear layers with a fixed weight, packed once for the kernels that multiply by it.

Shapes:  … is (B, S) or, packed, (T,) · I inputs · O outputs
"""

import ctypes
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertlite import torch_private
from bertlite.activations import Activation

if TYPE_CHECKING:
    import numpy as np

ONEDNN_ACTIVATIONS = {  # the activations that oneDNN fuses with a matmul: its names for the function and the formula
    "gelu": ("gelu", "none"),
    "gelu_python": ("gelu", "none"),
    "gelu_accurate": ("gelu", "tanh"),
    "gelu_new": ("gelu", "tanh"),
    "gelu_python_tanh": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
}
# How many tokens a packed matmul and the operations after it take at a time, so that they stay in the cache: the
# fastest tried at bert-base's shape.  scripts/measure/tuning.py finds these figures; its record is
# scripts/results/tuning.json.  The key is the dtype of the weight.
ROWS_PER_BLOCK = {
    torch.float32: 512,
    torch.bfloat16: 256,
    torch.float16: 256,  # like bfloat16
    torch.int8: 512,
}
MADV_COLLAPSE = 25  # advice of madvise(2), since Linux 6.1


class FixedLinear(nn.Module):
    """x @ weight.T + bias, then perhaps an activation, with a weight that never changes.

    `rows_per_block` is the best number of tokens to take at a time; 0 is all of them.

    Args:
        weight: (O, I).
        bias: (O,), or None.
        act: a name of ACTIVATIONS.
    """

    rows_per_block = 0

    def __init__(self, weight: Tensor, bias: Tensor | None, act: str | None = None) -> None:
        super().__init__()
        self.weight = self.pack(weight.detach())
        self.bias = None if bias is None else bias.detach().clone()
        self.outputs = weight.shape[0]
        self.act = None if act is None else Activation(act)
        self.fused_function, self.fused_formula = "none", ""  # the activation that the matmul itself computes

    def pack(self, weight: Tensor) -> Tensor:
        """Return the weight in the layout that the matmul reads."""
        return weight.clone()

    def unpack(self, weight: Tensor) -> "Tensor | TensorBytes":
        """Return a packed weight in a form that pickle can write and `pack` can read."""
        return weight

    def forward(self, x: Tensor) -> Tensor:  # (…, I) -> (…, O)
        y = F.linear(x, self.weight, self.bias)
        return y if self.act is None else self.act(y)

    def forward_add(self, x: Tensor, residual: Tensor) -> Tensor:  # (…, I), (…, O) -> (…, O); without activation
        return F.linear(x, self.weight, self.bias) + residual

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()  # type: ignore[no-untyped-call]  # it leaves out what is compiled
        return {**state, "weight": self.unpack(self.weight)}

    def __setstate__(self, state: dict[str, object]) -> None:
        weight = state["weight"]
        plain = weight.tensor() if isinstance(weight, TensorBytes) else weight
        assert isinstance(plain, Tensor)
        super().__setstate__({**state, "weight": self.pack(plain)})  # type: ignore[no-untyped-call]


MakeLinear: TypeAlias = Callable[[Tensor, Tensor | None, str | None], FixedLinear]  # weight, bias, name of activation


class PackedLinear(FixedLinear):
    """A linear layer whose weight is packed for oneDNN, in float32, bfloat16 or float16."""

    def __init__(self, weight: Tensor, bias: Tensor | None, act: str | None = None) -> None:
        fused = ONEDNN_ACTIVATIONS.get(act or "")
        super().__init__(weight, bias, None if fused else act)
        if fused:
            self.fused_function, self.fused_formula = fused
        self.rows_per_block = ROWS_PER_BLOCK.get(weight.dtype, 0)

    def pack(self, weight: Tensor) -> Tensor:
        return on_huge_pages(torch_private.reorder_linear_weight(weight.contiguous(), None))

    def unpack(self, weight: Tensor) -> "TensorBytes":
        return TensorBytes.of(weight.to_dense())

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():  # oneDNN would return an output of another shape
            return x.new_empty(*x.shape[:-1], self.outputs)
        y = self.matmul(x)
        return y if self.act is None else self.act(y)

    def forward_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.matmul_add(x, residual) if x.numel() else residual

    def matmul(self, x: Tensor) -> Tensor:
        return torch_private.linear_pointwise.default(
            x, self.weight, self.bias, self.fused_function, [], self.fused_formula
        )

    def matmul_add(self, x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = torch_private.linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return y


class Int8Linear(PackedLinear):
    """A linear layer in 8-bit integers.

    The weight is quantised once, with a scale for each output; the input at every call, with one scale for all tokens.
    Sums, bias and output are floats.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, act: str | None = None, out: torch.dtype = torch.float32
    ) -> None:
        self.scales = weight.detach().float().abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        super().__init__((weight / self.scales[:, None]).round().to(torch.int8), bias, act)
        self.zeros = torch.zeros_like(self.scales, dtype=torch.int64)
        self.out = out

    def pack(self, weight: Tensor) -> Tensor:
        return on_huge_pages(torch_private.qlinear_prepack(weight, None))

    def unpack(self, weight: Tensor) -> "TensorBytes":
        return TensorBytes.of(weight.to_dense().t())

    def matmul(self, x: Tensor) -> Tensor:
        rounded, scale = quantise(x)
        return torch_private.qlinear_pointwise.default(
            rounded, scale, 0, self.weight, self.scales, self.zeros, self.bias,
            1.0, 0, self.out, self.fused_function, [], self.fused_formula,
        )  # fmt: skip

    def matmul_add(self, x: Tensor, residual: Tensor) -> Tensor:
        rounded, scale = quantise(x)
        return torch_private.qlinear_pointwise.binary(
            rounded, scale, 0, self.weight, self.scales, self.zeros, residual, self.bias,
            1.0, 0, self.out, 1.0, 0, "add", 1.0, "none", [], "",
        )  # fmt: skip


def on_huge_pages(packed: Tensor) -> Tensor:
    """Return a packed weight after asking Linux for huge pages, from which a small batch reads faster.

    An older Linux leaves the weight on small pages.
    """
    ask_for_huge_pages(torch_private.packed_address(packed), torch_private.packed_size(packed))
    return packed


def ask_for_huge_pages(start: int, size: int) -> None:
    """Ask Linux to use huge pages for so many bytes from an address, now and later."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if sys.platform == "linux" and first < start + size:
        for advice in (mmap.MADV_HUGEPAGE, MADV_COLLAPSE):
            libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(start + size - first), advice)


@cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def quantise(x: Tensor) -> tuple[Tensor, float]:
    """Return x as 8-bit integers, -127 to 127, and the scale: the value of the integer 1."""
    x = x.float().contiguous()
    low, high = torch.aminmax(x) if x.numel() else (torch.zeros(()), torch.zeros(()))
    scale = max(-float(low), float(high)) / 127 or 1.0
    rounded = torch.quantize_per_tensor(x, scale, 0, torch.qint8)
    return torch.empty(0, dtype=torch.int8).set_(rounded.untyped_storage(), 0, x.shape, x.stride()), scale


@dataclass(frozen=True)
class TensorBytes:
    """The bytes of a temporary tensor, which pickle can send to another process.

    For a tensor, multiprocessing sends a file descriptor, which is closed when the tensor is freed and may belong to
    another tensor before the other process opens it.
    """

    array: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorBytes":
        return cls(tensor.contiguous().view(torch.uint8).numpy(), tensor.dtype)

    def tensor(self) -> Tensor:
        return torch.from_numpy(self.array).view(self.dtype)
