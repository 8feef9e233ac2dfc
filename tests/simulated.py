"""Graphs as a CPU can have them: a forward that runs again into the same memory, where a GPU would replay a graph."""

import copy
import weakref
from collections import Counter
from collections.abc import Callable
from inspect import ismethod
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from bertlite.inference.gpu import graphs
from bertlite.inference.gpu.graphs import GraphedBertModel
from bertlite.stack.attention import Backend, Requirements, eager


def by_ends(q: Tensor, k: Tensor, v: Tensor, layout: Any, bias: Any, dropout: float, first: bool) -> Tensor:
    """Compute attention as a GPU does: tokens of no sequence are not written, nor are their gradients."""
    out = torch.full_like(q, torch.nan)
    for row, (start, end) in enumerate(pairwise(layout.nonempty_ends.tolist())):
        assert end - start <= layout.keys
        asks, part = slice(row, row + 1) if first else slice(start, end), slice(start, end)
        own, keys, values = (x.transpose(0, 1)[None] for x in (q[asks], k[part], v[part]))
        found = eager(own, keys, values, None, None if bias is None else bias(own, keys), dropout)[0]
        rows = torch.arange(asks.start, asks.stop, device=q.device)  # whatever the default device is
        out = out.index_copy(0, rows, found[0].transpose(0, 1))
    return out


def record(run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor, int]:
    """Stand in for `graphs.record_forward`."""
    out = run()

    def replay() -> None:
        out.copy_(run())

    return replay, out, out.nbytes


class Noted:
    """A context that notes when it is entered and when it is left."""

    def __init__(self, order: list[str], name: Any) -> None:
        self.order, self.name = order, str(name)

    def __enter__(self) -> None:
        self.order.append(self.name)

    def __exit__(self, *of: Any) -> None:
        self.order.append(f"end of {self.name}")


class Pools:
    """The memory of graphs by the rules of torch's allocator.

    Graphs of a pool share what their runs need, and each keeps its output.  Memory comes back when a pool's last graph
    goes.  Then, and after a recording that failed, its handle is refused.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graphs, "record_forward", self.record)
        monkeypatch.setattr(graphs, "record_run", self.record)
        self.graphs, self.shared, self.bytes = Counter[Any](), Counter[Any](), Counter[Any]()
        self.refused = set[Any]()

    def record(self, run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor, int]:
        """Stand in for `graphs.record_forward` and `graphs.record_run`."""
        assert pool not in self.refused
        self.refused.add(pool)
        held: Any = weakref.WeakMethod(run) if ismethod(run) else lambda: run  # a replay of CUDA holds no graph
        replay, out, size = record(lambda: held()(), pool)
        self.refused.remove(pool)
        more = max(0, 4 * size - self.shared[pool])
        self.shared[pool] += more
        self.bytes[pool] += more + size
        self.graphs[pool] += 1
        weakref.finalize(replay, self.release, pool)
        return replay, out, more + size

    def release(self, pool: Any) -> None:
        self.graphs[pool] -= 1
        if not self.graphs[pool]:
            self.refused.add(pool)
            self.bytes[pool] = 0

    def reserved(self) -> int:
        return self.bytes.total()


def use_(model: Any, packs: bool = True) -> Any:
    """Let graphs run a model on the CPU."""
    body = model.base_model
    body.__class__ = GraphedBertModel
    backend = Backend("by ends", by_ends, packs=True) if packs else None
    needs = Requirements(dtype=body.dtype)
    vars(body).update(graphs=graphs.Graphs(), fused=False, needs=needs, packed_backend=backend)
    body.encoder.leaves_padding_out = packs
    return model


def graphed(model: Any, packs: bool = True) -> Any:
    """Return a copy of a model that graphs run."""
    return use_(copy.deepcopy(model).eval(), packs)
