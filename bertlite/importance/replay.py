"""Run a model from one layer on, with the outputs of the layers below recorded from a whole run.

Shapes:  N heads of one layer that are not pruned · H head dim; … is (B, S) or, packed, (T,)
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any

from torch import Tensor, nn

from bertlite.pruning import BertLike, layers_of
from bertlite.stack.layer_inputs import LayerInputs


@dataclass
class Recorded:
    """The outputs of each layer and of its attention in one forward."""

    layers: list[Any] = field(default_factory=list)
    contexts: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # (…, N·H) and attention weights


@contextmanager
def own_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of one module within the block."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = update_wrapper(forward, module.forward, assigned=())  # called as the one it replaces
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def recording(forward: Callable[..., Any], found: list[Any]) -> Callable[..., Any]:
    """Return a forward that also appends its output to a list."""

    def run(*args: Any, **options: Any) -> Any:
        found.append(forward(*args, **options))
        return found[-1]

    return run


@contextmanager
def recorded_layers(model: BertLike) -> Iterator[Recorded]:
    """Record the output of every layer in the forward of the block, with every gate 1."""
    known = Recorded()
    with ExitStack() as stack:
        for layer in layers_of(model):
            attention = layer.attention.self
            stack.enter_context(own_forward(layer, recording(layer.forward, known.layers)))
            stack.enter_context(own_forward(attention, recording(attention.forward, known.contexts)))
        yield known


@contextmanager
def replayed_layers(model: BertLike, known: Recorded, first: int) -> Iterator[None]:
    """Replay the outputs of layers below `first`, and the context of `first`, to which its gate applies.

    In the block, run the model on the recorded batch; gates of lower layers have no effect.
    """
    layers = list(layers_of(model))
    context, weights = known.contexts[first]

    attention = layers[first].attention.self

    def gated(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        (gate,) = (each.gate for each in (*args, *options.values()) if isinstance(each, LayerInputs))
        if gate is None or not gate.numel():
            return context, weights
        return (context.unflatten(-1, (gate.shape[-2], -1)) * gate).flatten(-2), weights

    def recorded(out: Any) -> Callable[..., Any]:
        return lambda *args, **options: out

    with ExitStack() as stack:
        for layer, out in zip(layers[:first], known.layers[:first], strict=True):
            stack.enter_context(own_forward(layer, recorded(out)))
        stack.enter_context(own_forward(attention, gated))
        yield
