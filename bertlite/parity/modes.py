"""Ways to run a case: one kernel of SDPA, TF32, a compiled model, a CUDA graph; and record which attention ran."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from bertlite.parity import reference
from bertlite.parity.cases import KERNELS

SDPA_KERNELS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class AttentionWatch(TorchFunctionMode):
    """A mode of torch that records which attention runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.sdpa = self.softmax = self.packed = False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.sdpa |= func is F.scaled_dot_product_attention
        self.softmax |= func is Tensor.softmax
        if func is F.embedding:
            (ids, *_) = args
            self.packed |= isinstance(ids, Tensor) and ids.dim() == 1  # all tokens in one row
        return func(*args, **(kwargs or {}))

    @property
    def name(self) -> str:
        """Return the backend that ran: eager, sdpa, packed or none."""
        attention = "sdpa" if self.sdpa else "eager" if self.softmax else ""
        if self.packed:
            return "packed" if attention else "packed, varlen"
        return attention or "none"


def compiled(model: nn.Module) -> nn.Module:
    """Have torch compile the model at its next forward."""
    torch.compiler.reset()  # or else, after many models, torch runs the next one uncompiled
    model.compile()
    return model


def captured(model: nn.Module) -> nn.Module:
    """Have each forward of the model captured as a CUDA graph and replayed."""
    plain = model.forward

    def replay(**inputs: object) -> object:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # a first run sets things up, which cannot be captured
            plain(**inputs)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            out: object = plain(**inputs)
        graph.replay()
        torch.cuda.synchronize()
        return out

    model.forward = replay
    return model


LAUNCHERS: dict[str, Callable[[nn.Module], nn.Module]] = {"compiled": compiled, "graph": captured}  # by mode


@contextmanager
def kernel_of(mode: str) -> Iterator[None]:
    """Let SDPA use one kernel and no other, if the mode names one.

    Raises:
        UnsupportedError: torch has no such kernel for this here.
    """
    if mode not in KERNELS:
        yield
        return
    try:
        with sdpa_kernel(SDPA_KERNELS[mode]):
            yield
    except RuntimeError as error:
        if not re.match("No (available kernel|viable backend)", str(error)):
            raise
        raise reference.UnsupportedError(f"torch {torch.__version__} has no {mode} kernel for it here") from None


@contextmanager
def matmul_precision(mode: str) -> Iterator[None]:
    """Allow TF32 in float32 matmuls only if that is the mode."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = mode == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
