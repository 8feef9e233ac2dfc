"""Work that does not depend on the contexts of torch around a call."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from bertlite.support import torch_private


@contextmanager
def own_context(gradients: bool = False) -> Iterator[None]:
    """Leave the caller's autocast, inference mode, gradient mode and default device; use it as a decorator too.

    These belong to a thread.  The default dtype and the number of threads belong to the process: code names a dtype,
    and computes bits that its kernels or `inference.native.exact` fix.

    Args:
        gradients: compute gradients.
    """
    with ExitStack() as stack:
        for device in torch_private.autocast_devices():
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":  # the context takes time in each call of torch
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(gradients))
        yield
