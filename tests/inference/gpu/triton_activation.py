"""A kernel that only activates, for test_triton_kernels.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertlite.inference.gpu.triton_kernels import activate


@triton.jit
def activate_kernel(x, out, count, NAME: tl.constexpr, EXACT: tl.constexpr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(out + at, activate(tl.load(x + at, mask=at < count), NAME, EXACT), mask=at < count)


def activate_all(x: Tensor, name: str, exact: bool) -> Tensor:
    out = torch.empty_like(x)
    activate_kernel[(-(-x.numel() // 1024),)](x, out, x.numel(), NAME=name, EXACT=exact)
    return out
