"""Running a model from one layer on, with what the layers below gave when the whole of it was run.

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
    """What each layer, and the attention inside it, returned in one forward."""

    layers: list[Any] = field(default_factory=list)
    contexts: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # (…, N·H) and attention weights


@contextmanager
def own_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give one module a forward of its own within the block."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = update_wrapper(forward, module.forward, assigned=())  # called as the one it replaces
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def recording(forward: Callable[..., Any], found: list[Any]) -> Callable[..., Any]:
    """Return a forward that also appends what it returns to a list."""

    def run(*args: Any, **options: Any) -> Any:
        found.append(forward(*args, **options))
        return found[-1]

    return run


@contextmanager
def recorded_layers(model: BertLike) -> Iterator[Recorded]:
    """Record what every layer returns in the forward that is run in the block, with every gate 1."""
    known = Recorded()
    with ExitStack() as stack:
        for layer in layers_of(model):
            attention = layer.attention.self
            stack.enter_context(own_forward(layer, recording(layer.forward, known.layers)))
            stack.enter_context(own_forward(attention, recording(attention.forward, known.contexts)))
        yield known


@contextmanager
def replayed_layers(model: BertLike, known: Recorded, first: int) -> Iterator[None]:
    """Let layers below `first` return what is recorded, and the attention of `first` its recorded context, gated.

    In the block the model is run on the batch of the recording; gates of lower layers have no effect.
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
