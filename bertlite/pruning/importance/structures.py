"""The units that can be gated: heads, and intermediate neurons.

Shapes:  L layers · N units as built · B examples · S positions · I neurons kept;  rows are B, or B·choices in multiple
         choice
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.config import BertConfig, kept_heads, kept_neurons
from bertlite.models.structure import BertLike, layers_of, prune_heads_, prune_neurons_
from bertlite.pruning.importance.batches import Batch, input_shape, inputs_of, real_tokens
from bertlite.stack.attention import LayerContext
from bertlite.stack.modules import BertLayer, BertOutput, BertSelfOutput, normed


@dataclass(frozen=True)
class Structure:
    """Heads or neurons: how many there are, and how a model is run with gates on them."""

    unit: str
    built: Callable[[BertConfig], int]
    kept: Callable[[BertConfig, int], tuple[int, ...]]
    run_gated: Callable[[BertLike, Batch, Tensor], Any]  # model, batch, (L, B, N) -> output
    output: Callable[[BertLayer], BertOutput | BertSelfOutput]  # the module that projects them to the layer's output
    readers: Callable[[BertLayer], tuple[nn.Linear, ...]]  # the matrices that compute them from the layer's states
    compute: Callable[..., Tensor]  # layer, states, the layer's context -> inputs of that projection
    prune_: Callable[[Any, dict[int, list[int]]], object]
    normed: Callable[[BertLayer, Tensor], Tensor]  # layer, states -> what the readers read

    def dense(self, layer: BertLayer) -> nn.Linear:
        """Return the projection of a layer's units to its output."""
        return self.output(layer).dense

    def width(self, layer: BertLayer) -> int:
        """Return the number of inputs of that projection that belong to one unit."""
        return layer.attention.self.attention_head_size if self.unit == "head" else 1

    def shape(self, model: BertLike) -> tuple[int, int]:  # (L, N)
        return model.config.num_hidden_layers, self.built(model.config)

    def present(self, model: BertLike) -> Tensor:
        """Return (L, N) bool: the units that are not pruned."""
        there = torch.zeros(self.shape(model), dtype=torch.bool, device="cpu")
        for layer in range(there.shape[0]):
            there[layer, list(self.kept(model.config, layer))] = True
        return there


EVERY_TOKEN = {"output_hidden_states": True}  # otherwise the last layer may compute only [CLS]


def run(model: BertLike, batch: Batch, **options: Any) -> Any:
    """Run the model on a batch without its labels."""
    return model(**inputs_of(batch), **options, return_dict=True)


def run_hooked(model: BertLike, batch: Batch, see: Callable[..., None]) -> Any:
    """Run the model, and call `see` with each output projection's number, and the arguments of a forward hook."""
    parts = (structure.dense(block) for block in layers_of(model) for structure in STRUCTURES)
    with whole_layers(model), ExitStack() as hooks:
        for place, part in enumerate(parts):
            hooks.enter_context(part.register_forward_hook(partial(see, place)))
        return run(model, batch, **EVERY_TOKEN)


def row_gates(gate: Tensor, batch: Batch) -> Tensor:
    """Repeat gates of examples, (L, B, N), for each of their rows; gates of tokens, (L, rows, N, S), stay."""
    choices = input_shape(batch)[1] if len(input_shape(batch)) == 3 else 1
    return gate if gate.dim() == 4 or choices == 1 else gate.repeat_interleave(choices, 1)


def run_with_head_gates(model: BertLike, batch: Batch, gate: Tensor) -> Any:
    gate = row_gates(gate, batch)
    return run(model, batch, head_mask=gate[..., None] if gate.dim() == 4 else gate)


def run_with_neuron_gates(model: BertLike, batch: Batch, gate: Tensor) -> Any:
    gate = row_gates(gate, batch)
    with whole_layers(model), ExitStack() as hooks:
        for layer, block in enumerate(layers_of(model)):
            gates = gate[layer][:, list(kept_neurons(model.config, layer))]
            hook = partial(scale_neurons, gates, real_tokens(batch))
            hooks.enter_context(block.intermediate.register_forward_hook(hook))
        return run(model, batch, **EVERY_TOKEN)


@contextmanager
def whole_layers(model: BertLike) -> Iterator[None]:
    """Turn off chunks and checkpointing: hooks must see all tokens at once, and are gone in the backward pass."""
    before = [(block, block.chunk_size_feed_forward, block.checkpointing) for block in layers_of(model)]
    try:
        for block, _, _ in before:
            block.chunk_size_feed_forward, block.checkpointing = 0, None
        yield
    finally:
        for block, size, checkpointing in before:
            block.chunk_size_feed_forward, block.checkpointing = size, checkpointing


@contextmanager
def own_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of one module within the block."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = update_wrapper(forward, module.forward, assigned=())  # same signature
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


class Reached(Exception):  # noqa: N818  # no error
    """Ends a forward where a layer is called; holds its arguments."""


def arguments_of(model: BertLike, layer: int, run: Callable[[], Any]) -> tuple[Tensor, LayerContext]:
    """Run a model until a layer is called; without a hook, since the last layer does more work if it has one."""

    def stop(hidden_states: Tensor, inputs: LayerContext) -> Any:
        raise Reached(hidden_states, inputs)

    try:
        with own_forward(list(layers_of(model))[layer], stop):
            run()
    except Reached as reached:
        x, inputs = reached.args
        return x, inputs
    raise AssertionError(f"layer {layer} was not called")


@contextmanager
def recorded_layers(model: BertLike) -> Iterator[list[Any]]:
    """Record the output of every layer in the forward of the block; run layers whole."""
    found: list[Any] = []

    def record(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        found.append(forward(*args, **options))
        return found[-1]

    with ExitStack() as stack:
        stack.enter_context(whole_layers(model))
        for layer in layers_of(model):
            stack.enter_context(own_forward(layer, partial(record, layer.forward)))
        yield found


@contextmanager
def started_at(model: BertLike, layer: int, below: Any) -> Iterator[None]:
    """Let every layer below `layer` return `below`, recorded before; run layers whole."""

    with ExitStack() as stack:
        stack.enter_context(whole_layers(model))
        for block in list(layers_of(model))[:layer]:
            stack.enter_context(own_forward(block, lambda *args, **options: below))
        yield


def scale_neurons(gate: Tensor, real: Tensor, module: nn.Module, args: tuple[Any, ...], activation: Tensor) -> Tensor:
    """Multiply the activation of a layer's neurons, (rows, S, I) or packed (T, I), by gates, (rows, I)."""
    gated = activation * (gate[:, None] if activation.dim() == 3 else gate[real.nonzero()[:, 0]])
    return gated.to(activation.dtype)  # gates of a model in half precision are float32


HEADS = Structure(
    unit="head",
    built=lambda config: config.num_attention_heads,
    kept=kept_heads,
    run_gated=run_with_head_gates,
    output=lambda layer: layer.attention.output,
    readers=lambda layer: (layer.attention.self.query, layer.attention.self.key, layer.attention.self.value),
    compute=lambda layer, x, inputs: layer.attention.self(normed(layer.attention, x), inputs=inputs)[0],
    prune_=prune_heads_,
    normed=lambda layer, x: normed(layer.attention, x),
)
NEURONS = Structure(
    unit="neuron",
    built=lambda config: config.intermediate_size,
    kept=kept_neurons,
    run_gated=run_with_neuron_gates,
    output=lambda layer: layer.output,
    readers=lambda layer: tuple(filter(None, (layer.intermediate.dense, layer.intermediate.factor))),
    compute=lambda layer, x, inputs: layer.intermediate(x),
    prune_=prune_neurons_,
    normed=lambda layer, x: normed(layer.intermediate, x),
)
STRUCTURES = (HEADS, NEURONS)  # in the order in which a layer runs them
