"""NativeLinear: a linear layer outside the encoder, run by the native kernels.

Shapes:  … is (B, S) or, packed, (T,) · I inputs · O outputs
"""

from typing import Any

import torch
from torch import Tensor, nn

from bertlite.checkpoint.saving import dtype_name
from bertlite.inference.native.weights import aligned_tensor
from bertlite.runtime.shapes import BYTES, GROUP, round_up
from bertlite.runtime.structs import ACTIVATIONS, Kernels, Linear, Matrix

KERNEL_ACTIVATIONS: dict[type[nn.Module], str] = {  # {class of torch: name in `runtime.structs.ACTIVATIONS`}
    nn.Identity: "linear",
    nn.Tanh: "tanh",
    nn.GELU: "gelu",
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
}


def kernel_activation(act: nn.Module) -> str | None:
    """Return the name that the kernels have for an activation; None if they do not have it."""
    if type(act) is nn.GELU and act.approximate == "tanh":
        return "gelu_pytorch_tanh"
    return KERNEL_ACTIVATIONS.get(type(act))


class NativeLinear(nn.Module):
    """A linear layer in float32 or bfloat16, and an activation, whose weight is packed for the native kernels."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__()
        self.kernels, self.dtype, self.numbers = kernels, dtype, dtype_name(dtype)
        self.outputs, self.inputs = linear.weight.shape
        self.weight = self.pack(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype, copy=True)
        self.activate("linear")

    def pack(self, weight: Tensor) -> Tensor:
        """Return the weight in blocks, (blocks, words of inputs, outputs in a block, numbers in a word)."""
        floats, per_word = weight.to(self.dtype).float().contiguous(), 4 // BYTES[self.numbers]
        outputs, words = round_up(self.outputs, GROUP), -(-self.inputs // per_word)
        block = self.kernels.blocks[self.numbers].outputs
        packed = aligned_tensor(outputs * words * 4).view(self.dtype).view(outputs // block, words, block, per_word)
        sizes, threads = (self.outputs, self.inputs), torch.get_num_threads()
        self.kernels.pack(self.numbers, floats.data_ptr(), sizes, packed.data_ptr(), 0, 0, threads)
        return packed

    def unpack(self) -> Tensor:
        """Return the weight as nn.Linear has it, (O, I)."""
        return self.weight.transpose(1, 2).flatten(0, 1).flatten(1)[: self.outputs, : self.inputs]

    def activate(self, act: str) -> None:
        """Apply an activation to the outputs from now on."""
        self.activation = act
        self.padded_bias = torch.zeros(round_up(self.outputs, GROUP), dtype=torch.float32, device="cpu")
        if self.bias is not None:
            self.padded_bias[: self.outputs] = self.bias
        matrix = Matrix(self.weight.data_ptr(), self.padded_bias.data_ptr(), 0, 0, self.outputs, self.inputs)
        self.struct = Linear(matrix, ACTIVATIONS[act])

    def forward(self, x: Tensor) -> Tensor:  # (…, I) -> (…, O)
        if x.shape[-1] != self.inputs or not x.is_cpu:
            raise RuntimeError(f"the layer takes {self.inputs} numbers on the CPU, not {x.shape[-1]} on {x.device}")
        x = x.to(self.dtype).contiguous()
        out = x.new_empty(*x.shape[:-1], self.outputs)
        rows = out.shape[:-1].numel()
        if rows:
            threads = torch.get_num_threads()
            self.kernels.linear(self.numbers, self.struct, x.data_ptr(), rows, out.data_ptr(), threads)
        return out

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()  # type: ignore[no-untyped-call]

        # For a tensor, multiprocessing sends a file descriptor, which is closed when the tensor is freed: it may then
        # belong to another one before the other process opens it.  An array is sent as bytes.
        return {**state, "weight": self.unpack().contiguous().view(torch.uint8).numpy(), "struct": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weight = self.pack(torch.from_numpy(state["weight"]).view(self.dtype))
        self.activate(self.activation)
