"""A pretended GPU: tensors that say that they are on CUDA, computed on the CPU.

Each tensor is a FakeTensor of torch, which knows its device, dtype and shape and follows torch's own rules for them,
and has beside it the same tensor on the CPU, its values.  So a forward runs to its end, whatever the host reads on its
way, and what is noted is

- each mix-up: an operation that met a CPU tensor and a CUDA one, which a GPU would refuse;
- each wait: the host reads a value, a result's shape depends on values, or ordinary memory is copied to the GPU.

A fused kernel is one operation here, and what it does inside is not seen.
"""

import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path as File
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from bertlite import torch_private
from bertlite.lab.rehearsal.stand_ins import STAND_INS, IndexingWithoutGuard, is_mask

aten = torch.ops.aten
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
PACKAGE = File(__file__).resolve().parents[2]
HERE = File(__file__).resolve().parent
VALUE_READS = {aten._local_scalar_dense, aten.item, aten.is_nonzero}
SHAPES_BY_VALUE = {
    aten.nonzero, aten.masked_select, aten.unique_dim, aten.unique_consecutive, aten._unique, aten._unique2,
    aten.bincount,
}  # fmt: skip
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
COPIES = {aten._to_copy, aten.copy_, aten.copy}


@dataclass(frozen=True)
class Note:
    """A wait or a mix-up: what happened, and the line of bertlite where it did."""

    what: str
    line: str

    def __str__(self) -> str:
        return f"{self.line} ({self.what})"


@dataclass
class Notes:
    """What a rehearsed path did that a GPU would refuse, or wait for."""

    waits: list[Note] = field(default_factory=list)
    mix_ups: list[Note] = field(default_factory=list)


class PretendedDevice(TorchDispatchMode):
    """A mode of torch in which FakeTensors on CUDA have values; each operation is noted and computed on both."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.fakes = FakeTensorMode()
        self.notes = Notes()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        flat, spec = tree_flatten((args, dict(kwargs or {}, **({"pin_memory": False} if pins(kwargs) else {}))))
        given = [self.beside(x) if type(x) in (Tensor, nn.Parameter) else x for x in flat]
        packet = func.overloadpacket
        if packet in (aten.lift, aten.lift_fresh, aten.lift_fresh_copy):
            return given[0]
        if packet is aten._fused_sdp_choice:
            return int(SDPBackend.MATH.value)  # of many operations, each of which is looked at
        self.note_waits(func, *tree_unflatten(given, spec))
        if packet in VALUE_READS:
            with _disable_current_modes():
                value = values(given[0]).item()
            return bool(value) if packet is aten.is_nonzero else value
        fake = self.run_fake(func, given, spec)
        return self.joined(fake, run_on_cpu(func, [on_cpu(x) for x in given], spec), given)

    def run_fake(self, func: Any, given: list[Any], spec: Any) -> Any:
        """Run an operation on FakeTensors alone; return `UNKNOWN` where its result depends on values."""
        args, kwargs = tree_unflatten(given, spec)
        if func.overloadpacket in (aten.index, aten._unsafe_index) and any(is_mask(x) for x in args[1]):
            return UNKNOWN
        try:
            with self.fakes:
                return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return UNKNOWN
        except RuntimeError as error:
            if not re.search("(different|two) devices|same device", str(error)) or not any(
                is_on(x, "cpu") for x in given
            ):
                raise
            self.notes.mix_ups.append(Note(f"{func.name()} of CUDA and CPU tensors", line_of_caller()))
            args, kwargs = tree_unflatten([self.place(values(x)) if is_on(x, "cpu") else x for x in given], spec)
            with self.fakes:
                return func(*args, **kwargs)

    def joined(self, fake: Any, real: Any, given: Sequence[Any]) -> Any:
        """Give each FakeTensor of a result its values."""
        device = CUDA if any(is_on(x, "cuda") for x in given) else CPU
        if fake is UNKNOWN:
            return tree_map_only(Tensor, lambda x: self.place(x, device), real)
        fakes, spec = tree_flatten(fake)
        for one, value in zip(fakes, tree_flatten(real)[0], strict=True):
            if isinstance(one, FakeTensor):
                one.numbers = laid_out_as(value, one)  # type: ignore[attr-defined]  # ours
        return tree_unflatten(fakes, spec)

    def note_waits(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note it if a GPU would be waited for, by the rules of `torch.cuda.set_sync_debug_mode`."""
        what, packet = "", func.overloadpacket
        if (packet in VALUE_READS or packet is aten.equal) and any(is_on(x, "cuda") for x in args):
            what = "a value is read"
        elif packet in SHAPES_BY_VALUE and is_on(args[0], "cuda"):
            what = "the shape of the result depends on values"
        elif packet is aten.repeat_interleave and kwargs.get("output_size") is None and is_on(args[0], "cuda"):
            what = "the shape of the result depends on values; give output_size"
        elif packet in COPIES and not kwargs.get("non_blocking"):
            what = copied(packet, args, kwargs)
        elif packet in INDEXING and is_on(args[0], "cuda"):
            what = indexed(packet, args)
        if what:
            self.wait(what)

    def wait(self, what: str) -> None:
        self.notes.waits.append(Note(what, line_of_caller()))

    def place(self, x: Tensor, device: torch.device = CUDA) -> FakeTensor:
        """Return a FakeTensor on a device, which has x for its values."""
        with _disable_current_modes(), torch.no_grad():
            numbers = x.detach()
            with self.fakes:
                fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        assert isinstance(fake, FakeTensor)
        fake.numbers = numbers  # type: ignore[attr-defined]  # ours
        return fake

    def beside(self, x: Tensor) -> FakeTensor:
        """Return the FakeTensor for an ordinary CPU tensor."""
        return self.place(x, CPU)

    def place_model(self, model: nn.Module) -> nn.Module:
        """Put the parameters and buffers of a model on the pretended GPU, in place; tied ones stay tied."""
        moved: dict[int, Tensor] = {}
        for part in model.modules():
            for held in (part._parameters, part._buffers):
                for name, x in held.items():
                    if x is None:
                        continue
                    if id(x) not in moved:
                        fake = self.place(x)
                        moved[id(x)] = nn.Parameter(fake, x.requires_grad) if isinstance(x, nn.Parameter) else fake
                    held[name] = moved[id(x)]  # type: ignore[assignment]  # a parameter for a parameter
        return model


UNKNOWN: Any = object()


def pins(kwargs: Mapping[str, Any] | None) -> bool:
    return bool(kwargs and kwargs.get("pin_memory"))


def is_on(x: Any, device: str) -> bool:
    """Return whether x is a tensor on a kind of device; a single number on the CPU may meet any device."""
    return isinstance(x, FakeTensor) and x.fake_device.type == device and (device != "cpu" or x.dim() > 0)


def values(x: Tensor) -> Tensor:
    """Return the CPU tensor that holds the values of a FakeTensor."""
    found: Tensor = x.numbers  # type: ignore[attr-defined]  # ours
    return found


def on_cpu(x: Any) -> Any:
    if isinstance(x, FakeTensor):
        return values(x)
    return CPU if isinstance(x, torch.device) else x


def run_on_cpu(func: Any, flat: Sequence[Any], spec: Any) -> Any:
    """Run an operation on the values."""
    run = STAND_INS.get(func.name(), func)
    with _disable_current_modes():
        args, kwargs = tree_unflatten(list(flat), spec)
        try:
            return run(*args, **kwargs)
        except RuntimeError:  # some kernels of the CPU do not mix dtypes as those of a GPU do
            halves = (torch.float16, torch.bfloat16)
            args, kwargs = tree_map_only(Tensor, lambda x: x.float() if x.dtype in halves else x, (args, kwargs))
            return run(*args, **kwargs)


def laid_out_as(value: Tensor, fake: Tensor) -> Tensor:
    """Return values in the dtype and strides of a FakeTensor: kernels of the CPU sometimes choose others."""
    if value.shape != fake.shape:
        raise AssertionError(f"the values are {tuple(value.shape)}, and by torch's rules {tuple(fake.shape)}")
    if value.dtype == fake.dtype and value.stride() == fake.stride():
        return value
    with _disable_current_modes():
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).copy_(value)


def copied(packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Say why a copy makes the host wait; empty if it does not."""
    if packet is aten._to_copy:
        target = kwargs.get("device")
        if target is None:
            return ""
        source, end = args[0], torch.device(target).type
    else:
        source, end = args[1], args[0].fake_device.type
    if not source.numel():
        return ""
    return {("cuda", "cpu"): "values are copied to the CPU", ("cpu", "cuda"): "values are copied to the GPU"}.get(
        (source.fake_device.type, end), ""
    )


def indexed(packet: Any, args: tuple[Any, ...]) -> str:
    """Say why an index makes the host wait; empty if it does not."""
    indices = [x for x in args[1] if x is not None]
    if any(is_on(x, "cpu") for x in indices):
        return "indices are copied to the GPU"
    if not any(x.dtype in (torch.bool, torch.uint8) for x in indices):
        return ""
    fills = packet in (aten.index_put, aten.index_put_, aten._index_put_impl_) and args[2].numel() == 1
    return "" if fills and len(indices) == 1 else "a mask serves as an index"


def line_of_caller() -> str:
    """Return the innermost line of bertlite that is running, or else of what called torch."""
    frame: FrameType | None = sys._getframe(1)
    other = ""
    while frame is not None:
        path = File(frame.f_code.co_filename)
        if path.is_relative_to(HERE):
            if path.stem == "backward":
                return "the backward pass"
        elif path.is_relative_to(PACKAGE):
            return f"{path.relative_to(PACKAGE.parent)}:{frame.f_lineno}"
        elif not other and "torch" not in path.parts:
            other = f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return other or "no line of bertlite"


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of bertlite that an error passed through."""
    lines, trace = [""], error.__traceback__
    while trace is not None:
        path = File(trace.tb_frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and not path.is_relative_to(HERE):
            lines.append(f"{path.relative_to(PACKAGE.parent)}:{trace.tb_lineno}")
        trace = trace.tb_next
    return lines[-1]


def deepcopied(x: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a FakeTensor and its values; torch's own way swaps storages, which FakeTensors have not."""
    if id(x) not in memo:
        with torch.no_grad():
            copied = x.detach().clone()
        memo[id(x)] = nn.Parameter(copied, x.requires_grad) if isinstance(x, nn.Parameter) else copied
    found: Tensor = memo[id(x)]
    return found


@contextmanager
def pretended_device() -> Iterator[PretendedDevice]:
    """Run a block on a pretended GPU.

    What torch asks a driver for is answered here, and bertlite is kept from taking FakeTensors for those of a tracer,
    whose values it does not read.
    """
    from torch.nn.attention import varlen

    device = PretendedDevice()
    tracers = tuple(key for key in torch_private.TRACERS if key != torch._C._TorchDispatchModeKey.FAKE)

    def tolist(x: FakeTensor) -> Any:
        if is_on(x, "cuda"):
            device.wait("values are read")
        with _disable_current_modes():
            return values(x).tolist()

    def synchronize(*_: object) -> None:
        device.wait("torch.cuda.synchronize")

    patches: list[Any] = [
        mock.patch.object(torch_private, "TRACERS", tracers),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(torch.cuda, "synchronize", synchronize),
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        mock.patch.object(FakeTensor, "tolist", tolist),
        mock.patch.object(FakeTensor, "__deepcopy__", deepcopied),
        mock.patch.object(varlen, "_should_use_cudnn", return_value=False),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]))  # cuDNN's asks for the GPU
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(device.fakes)
        stack.enter_context(device)
        if not torch.backends.cuda.is_built():
            stack.enter_context(IndexingWithoutGuard())
        yield device
