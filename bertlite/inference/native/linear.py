"""NativeLinear: a linear layer outside the encoder, run by the native kernels.

Shapes:  … is (B, S) or, packed, (T,) · I inputs · O outputs
"""

from typing import Any

import torch
from torch import Tensor

from bertlite.checkpoint.saving import dtype_name
from bertlite.inference.linear import FixedLinear, TensorBytes
from bertlite.inference.native.calls import ACTIVATIONS, Kernels, Linear, Matrix
from bertlite.inference.native.weights import BLOCK, BYTES, aligned, round_up


class NativeLinear(FixedLinear):
    """A linear layer in float32 or bfloat16, and an activation, whose weight is packed for the native kernels."""

    def __init__(self, weight: Tensor, bias: Tensor | None, act: str | None = None, *, kernels: Kernels) -> None:
        self.kernels, self.numbers = kernels, dtype_name(weight.dtype)
        super().__init__(weight, bias)
        self.inputs = weight.shape[1]
        self.activate(act or "linear")

    def pack(self, weight: Tensor) -> Tensor:
        """Return the weight in blocks, (blocks, words of inputs, BLOCK, numbers in a word)."""
        per_word, floats = 4 // BYTES[self.numbers], weight.float().contiguous()
        outputs, inputs = floats.shape
        shape = torch.Size((-(-outputs // BLOCK), -(-inputs // per_word), BLOCK, per_word))
        packed = aligned(shape.numel() * BYTES[self.numbers]).view(weight.dtype).view(shape)
        threads = torch.get_num_threads()
        self.kernels.pack(self.numbers, floats.data_ptr(), (outputs, inputs), packed.data_ptr(), 0, 0, threads)
        return packed

    def unpack(self, weight: Tensor) -> TensorBytes:
        rows = weight.transpose(1, 2).flatten(0, 1).flatten(1)
        return TensorBytes.of(rows[: self.outputs, : self.inputs])

    def activate(self, act: str) -> None:
        """Apply an activation to the outputs from now on."""
        self.activation = act
        self.padded_bias = torch.zeros(round_up(self.outputs, BLOCK))
        if self.bias is not None:
            self.padded_bias[: self.outputs] = self.bias
        matrix = Matrix(self.weight.data_ptr(), self.padded_bias.data_ptr(), 0, 0, self.outputs, self.inputs)
        self.struct = Linear(matrix, ACTIVATIONS[act])

    def forward(self, x: Tensor) -> Tensor:  # (…, I) -> (…, O)
        x = x.to(self.weight.dtype).contiguous()
        out = x.new_empty(*x.shape[:-1], self.outputs)
        rows = out.shape[:-1].numel()
        if rows:
            threads = torch.get_num_threads()
            self.kernels.linear(self.numbers, self.struct, x.data_ptr(), rows, out.data_ptr(), threads)
        return out

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "struct": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.kernels, self.numbers = state["kernels"], state["numbers"]
        super().__setstate__(state)
        self.activate(self.activation)
