"""Graphs as a CPU can have them: a forward that runs again into the same memory, where a GPU would replay a graph."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bertlite.inference.gpu import graphs
from bertlite.inference.gpu.graphs import GraphedBertModel
from bertlite.stack.attention import Backend, Requirements


def by_ends(q: Tensor, k: Tensor, v: Tensor, layout: Any, bias: Any, dropout: float, first: bool) -> Tensor:
    """Compute attention of the sequences of a bucket; tokens that belong to none are nan, as on a GPU they may be."""
    assert bias is None
    assert not dropout
    assert not first
    out, ends = torch.full_like(q, torch.nan), layout.nonempty_ends.tolist()
    for start, end in pairwise(ends):
        assert end - start <= layout.keys
        part = slice(start, end)
        scores = torch.einsum("snh,knh->nsk", q[part], k[part]) * q.shape[-1] ** -0.5
        out[part] = torch.einsum("nsk,knh->snh", scores.softmax(-1), v[part])
    return out


def record(run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor, int]:
    """Stand in for `graphs.record_forward`."""
    out = run()

    def replay() -> None:
        out.copy_(run())

    return replay, out, out.nbytes


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
