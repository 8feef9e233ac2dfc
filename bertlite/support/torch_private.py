"""The private names of torch that bertlite uses, each with a fallback for a torch that lacks it.

Read them as `torch_private.name`.  If the names for tracing and torch.func are missing, torch itself raises when
values are read.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

FALLBACKS: dict[str, Any] = {}  # {name inside torch: fallback}


def lookup(path: str, fallback: Any = None) -> Any:
    """Return the object of a name inside torch, or the fallback."""
    FALLBACKS[path] = fallback
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return fallback if found is None else found


def wait_and_assert(condition: Tensor, message: str) -> None:
    if not bool(condition):
        raise RuntimeError(message)


assert_operator = lookup("_assert_async", wait_and_assert)


def assert_async(condition: Tensor, message: str) -> None:
    """Raise RuntimeError unless a condition holds; the host does not wait if the device has an operator for this."""
    try:
        assert_operator(condition, message)
    except NotImplementedError:
        wait_and_assert(condition, message)


is_tracing = lookup("jit.is_tracing", lambda: False)
dispatch_mode = lookup("_C._get_dispatch_mode", lambda key: None)  # None if no such mode is active
MODES = (lookup("_C._TorchDispatchModeKey.FAKE"), lookup("_C._TorchDispatchModeKey.PROXY"))
TRACERS = tuple(mode for mode in MODES if mode is not None)  # as make_fx and export use them
autocast_devices = lookup("_C._autocast_supported_devices", lambda: ["cpu", "cuda"])
transform_level = lookup("_C._functorch.maybe_current_level", lambda: None)  # None outside torch.func
is_wrapped = lookup("_C._functorch.is_functorch_wrapped_tensor", lambda tensor: False)
is_batched = lookup("_C._functorch.is_batchedtensor", lambda tensor: False)
unwrapped = lookup("_C._functorch.get_unwrapped", lambda tensor: None)
# The kernels of SDPA that are switched on.
enabled_kernels = lookup("nn.attention._cur_sdpa_kernel_backends", lambda: [*SDPBackend.__members__.values()])

flash_attention = lookup("ops.aten._flash_attention_forward")  # the operator under `varlen_attn`
keep_busy = lookup("cuda._sleep", lambda cycles: None)  # lets a GPU wait for so many cycles
addmm_activation = lookup("_addmm_activation")  # cuBLAS's matmul with ReLU or, on CUDA, GELU by tanh


def expect_plain_steps_(optimizer: Any) -> None:
    """Keep an optimizer that can be recorded from warning about a step that is not."""
    optimizer._warned_capturable_if_run_uncaptured = True


def skips_overflows(optimizer: Any) -> bool:
    """Return whether an optimizer skips steps that overflow by itself, so that a GradScaler need not read values."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def forget_gradients_(scaler: Any, optimizer: Any) -> None:
    """Let a GradScaler forget that it has divided an optimizer's gradients by its scale."""
    getattr(scaler, "_per_optimizer_states", {}).pop(id(optimizer), None)


def hooks_of_training(optimizer: Any, parameters: Iterable[Tensor]) -> list[int]:
    """Return the numbers of the hooks of an optimizer's step and of gradients, each of which is given once."""
    found = [getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")]
    for x in parameters:  # quick, since every step asks
        found += getattr(x, "_backward_hooks", None), getattr(x, "_post_accumulate_grad_hooks", None)
    return [number for hooks in filter(None, found) for number in hooks]


def is_compiled(module: Any) -> bool:
    """Return whether torch.compile made a module, or the module's own `compile` was called."""
    made = type(module).__module__.startswith("torch._dynamo")
    return made or getattr(module, "_compiled_call_impl", None) is not None


# torch.export, DDP and vmap look for tensors here
register_pytree = lookup("utils._pytree.register_pytree_node", lambda *args, **options: None)
MappingKey = lookup("utils._pytree.MappingKey", str)
