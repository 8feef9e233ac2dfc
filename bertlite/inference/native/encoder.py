"""NativeEncoder: the layers of a model, run by the native kernels."""

import ctypes
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from bertlite.inference.native.weights import NativeWeights
from bertlite.runtime.packed import Bytes
from bertlite.runtime.shapes import Shape
from bertlite.runtime.structs import Batch, Kernels
from bertlite.stack.attention import LayerContext, as_scores
from bertlite.stack.inputs import Mask, values_readable
from bertlite.stack.layouts import Packed
from bertlite.stack.modules import BertEncoder

EVEN = -1e38  # added to any score, it is itself


class NativeEncoder(BertEncoder):
    """All layers at once, instead of BertEncoder.

    Shapes:  B sequences · S positions · T tokens · D hidden · N heads;  … is (B, S) or, packed, (T,)
    """

    leaves_padding_out = is_optimised = True

    def __init__(self, weights: NativeWeights, kernels: Kernels) -> None:
        nn.Module.__init__(self)
        self.layer = nn.ModuleList()  # none that could be called one by one
        self.weights, self.kernels = weights, kernels

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "weights": (self.weights.shape, self.weights.data.numpy())}

    def __setstate__(self, state: dict[str, object]) -> None:
        shape, data = cast(tuple[Shape, Bytes], state["weights"])
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weights = NativeWeights(shape, torch.from_numpy(data)).in_blocks(self.kernels.blocks[shape.numbers])

    def forward(self, hidden_states: Tensor, inputs: LayerContext) -> tuple[Tensor, list[Tensor] | None]:
        """Run the layers; arguments and results are as for BertEncoder."""
        if not values_readable(hidden_states):
            raise RuntimeError("native kernels cannot be traced, exported or mapped; use the original model")

        # The kernels read memory by address: a wrong dtype, width or device must stop here.
        floats, width = (torch.float32, torch.bfloat16), self.weights.shape.hidden_size
        if hidden_states.dtype not in floats or hidden_states.shape[-1] != width or not hidden_states.is_cpu:
            found = f"{hidden_states.shape[-1]} of {hidden_states.dtype} on {hidden_states.device}"
            raise RuntimeError(
                f"the native kernels take {width} numbers of float32 or bfloat16 on the CPU, not {found}: change the"
                " original model, and optimise that"
            )

        # Memory for everything that the caller wants: outputs, states of layers, and attention weights.
        layers, x, first = self.weights.shape.layers, hidden_states.contiguous(), inputs.first_only
        out = torch.empty_like(inputs.layout.first(x) if first else x)
        states = x.new_empty(len(layers), *x.shape) if inputs.keep_states else None
        queries = 1 if first else x.shape[1]
        shapes = [(x.shape[0], layer.heads, queries, x.shape[1]) for layer in layers if inputs.returns_weights]
        weights = [torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in shapes]

        # Without layers or tokens there is nothing to run, and the outputs still have their shapes.
        if not (layers and x.numel()):
            for i, weight in enumerate(weights):
                inputs.at(i).keep_weights(weight.to(x.dtype))
            return inputs.layout.first(x) if first else x, None if states is None else list(states)

        # The kernels go through sequences by their first tokens, and only through those that have any.
        layout = inputs.layout
        lengths = [n for n in layout.lengths if n] if isinstance(layout, Packed) else [x.shape[1]] * x.shape[0]
        starts = (ctypes.c_int64 * (len(lengths) + 1))(0, *accumulate(lengths))

        # The batch holds addresses alone, so each tensor needs a name that lives until the kernels return.
        batch = Batch(
            tokens=starts[-1],
            sequences=len(lengths),
            starts=ctypes.addressof(starts),
            hidden=x.data_ptr(),
            output=out.data_ptr(),
            is_bfloat16=x.dtype == torch.bfloat16,
            states=address(states),
            first_only=first,
        )

        held = add_mask(batch, inputs.mask)  # keeps alive the tensors that the batch points at
        if inputs.places is not None and self.weights.model.angles:
            places = inputs.places.expand(x.shape[:-1]).long().contiguous()
            batch.places = places.data_ptr()
            held.append(places)
        if inputs.gates is not None:
            held += add_gates(batch, cast(Sequence[Tensor], inputs.gates), x)
        if weights:
            pointers = addresses(weights)
            batch.probabilities = ctypes.addressof(pointers)
            held.append(pointers)

        self.run_batch(batch)
        for i, weight in enumerate(weights):
            inputs.at(i).keep_weights(weight.to(x.dtype))
        return out, None if states is None else list(states)

    def run_batch(self, batch: Batch) -> bool:
        """Run the layers on a batch; False if it is left to Python."""
        return self.kernels.run(self.weights.model, batch, torch.get_num_threads())


def add_mask(batch: Batch, mask: Mask) -> list[object]:
    """Set the mask of a batch, the keys for each query; return the tensors that the batch then points at."""
    held: list[object] = []

    # Every kind of mask becomes one bias that is added to scores.
    if mask.allowed is not None or mask.bias is not None:
        zero = torch.zeros((), dtype=torch.float32, device="cpu")
        bias = zero if mask.bias is None else as_scores(mask.bias, torch.float32)
        if mask.allowed is not None:
            bias = torch.where(mask.allowed, bias, -torch.inf)
        if mask.evenly is not None:
            bias = bias.masked_fill(mask.evenly, EVEN)

        # The kernels walk along keys in memory; the other dimensions may be broadcast, by strides of 0.
        keys = batch.tokens // batch.sequences
        bias = bias.expand(*bias.shape[:-1], keys).contiguous()
        batch.bias, batch.bias_strides[:] = bias.data_ptr(), broadcast_strides(bias)
        held.append(bias)

    # A query without keys gives zeros; no bias could say so.
    if mask.attends_anything is not None:
        has_keys = mask.attends_anything.to(torch.uint8).contiguous()
        batch.has_keys, batch.has_keys_strides[:] = has_keys.data_ptr(), broadcast_strides(has_keys)
        held.append(has_keys)
    return held


def broadcast_strides(x: Tensor) -> list[int]:
    """Return the strides of the first three dimensions, 0 for a broadcast one."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]


def add_gates(batch: Batch, gates: Sequence[Tensor], x: Tensor) -> list[object]:
    """Set the gates of a batch, factors for heads; return the tensors that the batch then points at."""
    each_token = gates[0].shape[:-2].numel() > 1
    rows = x.shape[:-1] if each_token else gates[0].shape[:-2]
    laid = [gate[..., 0].expand(*rows, -1).float().contiguous() for gate in gates]  # (…, N) or (1, N)
    pointers = addresses(laid)
    batch.gates, batch.gates_each_token = ctypes.addressof(pointers), each_token
    return [laid, pointers]


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def addresses(tensors: Iterable[Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    pointers = [tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * len(pointers))(*pointers)
