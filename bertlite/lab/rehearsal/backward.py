"""The backward pass of tensors on a pretended GPU.

torch's own engine asks the driver for streams, so the nodes of the graph are run here, one after the other.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Node = Any  # torch.autograd.graph.Node, which says too little about itself


@torch.no_grad()
def backward(loss: Tensor) -> None:
    """Give every leaf tensor that a loss was computed from its gradient, in `.grad`."""
    grads: dict[Node, list[Tensor | None]] = {}
    add_gradient(grads, (loss.grad_fn, loss.output_nr), torch.ones_like(loss))
    with mock.patch.object(torch._C, "_current_graph_task_id", return_value=0):  # checkpoints run a layer again once
        for node in in_order(loss.grad_fn):
            given = grads.pop(node, None)
            if given is None:
                continue
            if node.name() == "torch::autograd::AccumulateGrad":
                leaf, found = node.variable, given[0]
                leaf.grad = found if leaf.grad is None else leaf.grad + found
                continue
            run = node.apply if isinstance(node, torch.autograd.function.BackwardCFunction) else node
            edges, results = node.next_functions, as_tuple(run(*given))
            if any(result is not None for result in results[len(edges) :]):
                raise RuntimeError(f"{node.name()} has {len(edges)} inputs and gives {len(results)} gradients")
            for edge, result in zip(edges, results[: len(edges)], strict=True):  # torch too drops None at the end
                if edge[0] is not None and result is not None:
                    add_gradient(grads, edge, result)


def add_gradient(grads: dict[Node, list[Tensor | None]], edge: tuple[Node, int], grad: Tensor) -> None:
    """Add to what a node is given at one of its inputs, in that input's shape and dtype."""
    node, at = edge
    wanted = node._input_metadata[at]
    grad = grad.sum_to_size(wanted.shape).to(wanted.dtype)
    given = grads.setdefault(node, [None] * len(node._input_metadata))
    before = given[at]
    given[at] = grad if before is None else before + grad


def in_order(root: Node) -> Iterator[Node]:
    """Yield the nodes of a graph, each after all that give it a gradient."""
    waits_for: dict[Node, int] = {root: 0}
    stack = [root]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None:
                if node not in waits_for:
                    waits_for[node] = 0
                    stack.append(node)
                waits_for[node] += 1
    ready = [root]
    while ready:
        node = ready.pop()
        yield node
        for after, _ in node.next_functions:
            if after is not None:
                waits_for[after] -= 1
                if not waits_for[after]:
                    ready.append(after)


def as_tuple(results: Any) -> Sequence[Any]:
    return results if isinstance(results, tuple | list) else (results,)
