"""Make models on the meta device, and assign their tensors."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bertlite.checkpoint.names import LoadableModel, body_prefix
from bertlite.checkpoint.reading import ALIGNMENT, State, is_plain_tensor
from bertlite.config import BertConfig

Model = TypeVar("Model", bound=LoadableModel)


class SkeletonMode(TorchFunctionMode):
    """Make parameters on the meta device and skip initialisers, which have no effect there but take most of the time.

    A mode is local to one thread, unlike a patch of torch.nn.init.
    """

    skipped = frozenset(
        [getattr(nn.init, name) for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
        + [Tensor.copy_, Tensor.fill_, Tensor.normal_, Tensor.uniform_, Tensor.zero_]
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs["device"] = "meta"
        elif func in self.skipped:
            filled = args[0] if args else kwargs["tensor"]
            if filled.is_meta:
                return filled
        return func(*args, **kwargs)


def make_skeleton(cls: Callable[..., Model], config: BertConfig, options: Mapping[str, Any]) -> Model:
    """Make a model without memory: its parameters have shapes but no values."""
    with SkeletonMode():
        return cls(config, **options)


@torch.no_grad()
def init_weights(part: nn.Module, config: BertConfig) -> None:
    """Initialise a part and all below it as BERT does: normal matrices, zero biases, a zero row for padding."""
    for module in part.modules():
        if isinstance(module, nn.Linear):
            if module.weight.numel():
                module.weight.normal_(0.0, config.initializer_range)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, config.initializer_range)
            if module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
        elif isinstance(module, nn.LayerNorm | nn.PReLU):
            module.reset_parameters()


def init_missing(model: LoadableModel, part: str, dtype: torch.dtype) -> State:
    """Initialise the tensors of one part of a skeleton as in a new model; without an initialiser they are nan."""
    name = body_prefix(model) + part if part == "pooler" else part
    fresh = copy.deepcopy(model.get_submodule(name)).to_empty(device="cpu")
    for parameter in fresh.parameters():
        parameter.data.fill_(torch.nan)
    for module in fresh.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    init_weights(fresh, model.config)
    default = torch.get_default_dtype()
    return {f"{name}.{key}": t.to(dtype) if t.dtype == default else t for key, t in fresh.state_dict().items()}


def place_tensors(state: State, wanted: State, dtype: torch.dtype | None, device: torch.device | str | None) -> State:
    """Return the wanted tensors, contiguous, on one device; names share memory only if they share a tensor.

    A part of a larger tensor is copied: libraries that save a model take it for tied to the other parts.

    If the largest cannot stay mapped from the file, none does, so that the file takes no memory in addition.
    """
    done: dict[int, Tensor] = {}
    used = set()
    tensors = {id(state[name]): state[name] for name in wanted}
    unmap = any(is_misaligned(tensor) for tensor in sorted(tensors.values(), key=lambda x: x.nbytes)[-1:])
    for tensor in tensors.values():
        moved = tensor.detach().to(device, dtype if tensor.is_floating_point() else None).contiguous()
        mapped = moved.data_ptr() == tensor.data_ptr()
        copied = moved.data_ptr() in used or is_slice(moved) or is_misaligned(moved) or (unmap and mapped)
        done[id(tensor)] = moved.clone() if copied else moved
        used.add(moved.data_ptr())
    return {name: done[id(state[name])] for name in wanted}


def is_slice(tensor: Tensor) -> bool:
    """Return whether a tensor is a part of a larger one."""
    return is_plain_tensor(tensor) and tensor.untyped_storage().nbytes() > tensor.nbytes


def is_misaligned(tensor: Tensor) -> bool:
    """Return whether a matrix has an address that torch's allocator would never give it.

    A file maps its tensors at any address.  If a matrix does not begin at a multiple of ALIGNMENT, MKL sums in another
    order, and a saved and loaded model would differ by rounding.  Such a matrix is copied.  Files that bertlite writes
    need no copies.
    """
    if not is_plain_tensor(tensor) or tensor.dim() != 2 or tensor.device.type != "cpu":
        return False  # a quantised or distributed one has no address
    return tensor.data_ptr() % ALIGNMENT != 0


def assign_tensors_(model: Any, state: State) -> None:
    """Assign tensors to a model without a copy, several times faster than load_state_dict."""
    for path, module in model.named_modules():
        for name, old in [*module.named_parameters(path, recurse=False)]:
            setattr(module, name.rpartition(".")[2], nn.Parameter(state[name], old.requires_grad))
        for name, _ in [*module.named_buffers(path, recurse=False)]:
            setattr(module, name.rpartition(".")[2], state[name])
