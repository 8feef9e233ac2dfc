"""Run batches on a GPU so that neither side waits: threads make inputs ahead, and results are read late."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")
THREADS = 4  # make inputs
AHEAD, LATE = 8, 4  # batches whose inputs are ready, and batches whose results are not read yet
ALIGNED = 16  # bytes at which each tensor of a transfer begins


def run_ahead(
    make: Callable[[T], Mapping[str, Any]],
    run: Callable[[T, dict[str, Any]], Tensor],
    items: Iterable[T],
    device: torch.device,
) -> Iterator[NDArray[Any]]:
    """Yield the result of each batch as an array, in order.

    Args:
        make: returns the inputs of an item on the CPU.  On another device threads call it ahead.
        run: (item, its inputs on the device) -> its result there.
        device: the model's.
    """
    if device.type == "cpu":
        for item in items:
            yield run(item, dict(make(item))).cpu().numpy()
        return

    def prepare(item: T) -> tuple[T, "Parcel"]:
        return item, Parcel(make(item), pinned=device.type == "cuda")

    yield from read_late(run(item, parcel.send(device)) for item, parcel in made_ahead(prepare, items))


def made_ahead(make: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield make(item) of each item, in order; threads make the next ones meanwhile."""
    waiting: deque[Any] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(make, item))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


class Parcel:
    """The tensors of a batch in one piece of memory, which takes one transfer."""

    def __init__(self, batch: Mapping[str, Any], pinned: bool) -> None:
        self.others = {name: x for name, x in batch.items() if not isinstance(x, Tensor)}
        self.tensors: dict[str, tuple[int, torch.dtype, torch.Size]] = {}  # {name: start in bytes, dtype, shape}
        tensors, end = {name: x for name, x in batch.items() if isinstance(x, Tensor)}, 0
        for name, x in tensors.items():
            self.tensors[name] = end, x.dtype, x.shape
            end += -(-x.nbytes // ALIGNED) * ALIGNED
        self.memory = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        for name, x in self.views(self.memory).items():
            x.copy_(tensors[name])

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the tensors that lie in the memory."""
        return {
            name: memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (start, dtype, shape) in self.tensors.items()
        }

    def send(self, device: torch.device) -> dict[str, Any]:
        """Return the batch on a device, for which the host does not wait."""
        return {**self.views(self.memory.to(device, non_blocking=True)), **self.others}


def read_late(results: Iterable[Tensor]) -> Iterator[NDArray[Any]]:
    """Yield results as arrays, in order, each when LATE more have been launched: then a GPU has long computed it."""
    waiting: deque[tuple[Tensor, Any]] = deque()
    for x in results:
        done = None
        if x.is_cuda:
            there, x = x, torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
            x.copy_(there, non_blocking=True)
            done = torch.cuda.current_stream(there.device).record_event()
        waiting.append((x, done))
        if len(waiting) > LATE:
            yield finished_copy(*waiting.popleft())
    while waiting:
        yield finished_copy(*waiting.popleft())


def finished_copy(x: Tensor, done: Any) -> NDArray[Any]:
    """Return a result as an array, when its copy to the host is done."""
    if done is not None:
        done.synchronize()
    return x.cpu().numpy()
