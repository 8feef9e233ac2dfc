"""What stands in for the parts of torch that need a GPU, or a build with CUDA."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


def sequences(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and the keys of each packed sequence."""
    starts, ends = cu_q.tolist(), cu_k.tolist()
    for i in range(len(starts) - 1):
        yield slice(starts[i], starts[i + 1]), slice(ends[i], ends[i + 1])


def varlen_stand_in(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Compute what torch's kernel for packed sequences would, which has no CPU version."""
    out = torch.zeros_like(q)
    for queries, keys in sequences(cu_q, cu_k):
        weights = attention_weights(q[queries], k[keys])
        out[queries] = torch.einsum("nqk,knh->qnh", weights, v[keys].float()).to(q.dtype)
    return out, q.new_zeros(q.shape[1], q.shape[0]).float(), torch.zeros(2).to(torch.uint64)


def varlen_backward_stand_in(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _: Tensor, __: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Compute the gradients of queries, keys and values; modes of torch run below autograd, so by hand."""
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    scale = q.shape[-1] ** -0.5
    for queries, keys in sequences(cu_q, cu_k):
        weights, g = attention_weights(q[queries], k[keys]), grad[queries].float()
        by_weights = torch.einsum("qnh,knh->nqk", g, v[keys].float())
        scores = weights * (by_weights - (by_weights * weights).sum(-1, keepdim=True)) * scale
        grads[0][queries] += torch.einsum("nqk,knh->qnh", scores, k[keys].float()).to(q.dtype)
        grads[1][keys] += torch.einsum("nqk,qnh->knh", scores, q[queries].float()).to(q.dtype)
        grads[2][keys] += torch.einsum("nqk,qnh->knh", weights, g).to(q.dtype)
    return tuple(grads)


def attention_weights(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("qnh,knh->nqk", q.float(), k.float()).mul(q.shape[-1] ** -0.5).softmax(-1)


STAND_INS: dict[str, Callable[..., Any]] = {
    "torch_attn::_varlen_attn": varlen_stand_in,
    "torch_attn::_varlen_attn_backward": varlen_backward_stand_in,
}


OPERATIONS: dict[Any, Any] = {
    Tensor.__invert__: aten.bitwise_not,
    Tensor.nonzero: aten.nonzero,
    Tensor.contiguous: aten.contiguous,
}


class IndexingWithoutGuard(TorchFunctionMode):
    """A mode of torch in which tensors are indexed by operations, for builds of torch without CUDA.

    There Python's brackets, and `OPERATIONS`, look for the device's guard, which such a build lacks.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            viewed, indices = indexed_by_slices(*args)
            return aten.index(viewed, indices) if indices else viewed
        if func is Tensor.__setitem__:
            viewed, indices = indexed_by_slices(*args[:2])
            value = args[2] if isinstance(args[2], Tensor) else torch.full((), args[2], dtype=viewed.dtype)
            return viewed.index_put_(indices, value) if indices else viewed.copy_(value)
        return OPERATIONS.get(func, func)(*args, **(kwargs or {}))


def indexed_by_slices(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Return x indexed by the numbers, slices and new axes of an index, and the tensors that are left of it."""
    parts = list(index) if isinstance(index, tuple) else [index]
    at = next((i for i, part in enumerate(parts) if part is ...), None)
    if at is not None:
        taken = sum(part.dim() if is_mask(part) else 1 for part in parts if part is not None and part is not ...)
        parts[at : at + 1] = [slice(None)] * (x.dim() - taken)
    indices: list[Tensor | None] = []
    dim = 0
    for part in parts:
        if isinstance(part, int):
            x = x.select(dim, part)
            continue
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, slice):
            x = aten.slice(x, dim, part.start, part.stop, 1 if part.step is None else part.step)
        else:
            part = part if isinstance(part, Tensor) else torch.tensor(part)
            indices.append(part.to(x.device))
            dim += part.dim() if is_mask(part) else 1
            continue
        indices.append(None)
        dim += 1
    return x, indices if any(each is not None for each in indices) else []


def is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool
