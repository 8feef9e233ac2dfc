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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from bertlite.inference.gpu import graphs
from bertlite.inference.gpu.graphs import GraphedBertModel
from bertlite.stack.attention import Backend, Requirements, eager
from bertlite.support import torch_private


def by_ends(q: Tensor, k: Tensor, v: Tensor, layout: Any, bias: Any, dropout: float, first: bool) -> Tensor:
    """Compute attention as a GPU does: tokens of no sequence are not written, nor are their gradients."""
    if torch_private.is_tracing():  # no value may be read
        ends = layout.nonempty_ends
        places = torch.arange(len(k), dtype=ends.dtype, device=q.device)
        rows = torch.searchsorted(ends, places, right=True)
        asking = torch.arange(1, 1 + len(q), device=q.device) if first else rows
        own, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
        every = eager(own, keys, values, asking[:, None] == rows, None, dropout)[0][0]
        return torch.where((asking < len(ends))[:, None, None], every.transpose(0, 1), torch.nan)
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


class Tape(TorchDispatchMode):
    """Operators that are recorded without effect and run again on the same memory: no Python runs in a replay."""

    WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.made, self.before = set[int](), dict[int, tuple[Any, Any]]()  # {the address of a storage: it, its copy}

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        schema, options = call._schema, options or {}
        assert schema.name not in self.WAITS, "a recording reads no values"
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        named = {a.name: x for a, x in zip(schema.arguments, args, strict=False)} | options
        for x in tree_leaves([named[name] for name in written if name in named]):
            if isinstance(x, Tensor) and (memory := x.untyped_storage())._cdata not in self.made:
                self.before.setdefault(memory._cdata, (memory, memory.clone()))

        found = call(*args, **options)
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, options)) if isinstance(x, Tensor)}
        with torch.no_grad():  # to hold no graph
            inputs = tree_map_only(Tensor, Tensor.detach, (args, options))
            own = [isinstance(x, Tensor) and x.untyped_storage()._cdata not in given for x in tree_leaves(found)]
            made = [x.detach() if new else None for x, new in zip(tree_leaves(found), own, strict=True)]
        self.made |= {x.untyped_storage()._cdata for x in made if x is not None}
        self.calls.append((call, *inputs, made))
        return found

    def undo(self) -> None:
        for memory, copied in self.before.values():
            memory.copy_(copied)

    @torch.no_grad()
    def replay(self) -> None:
        for call, args, options, made in self.calls:
            for kept, x in zip(made, tree_leaves(call(*args, **options)), strict=True):
                if kept is not None:
                    kept.copy_(x)


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
