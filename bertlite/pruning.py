"""Removing heads and intermediate neurons for good, and undoing the look of it.

Both are numbered as in the unpruned model, always, so that pruning composes.  A layer may lose every head: its
attention is then the bias of its output projection; and likewise every neuron.  A checkpoint keeps `pruned_heads` in
config.json, as in transformers 4, which reads it.  Of `pruned_neurons`, kept beside it, no other library knows: such a
checkpoint is read by bertlite and bertlite.hf alone, until `densify` makes a full-size one of it.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from bertlite.config import (
    BertConfig,
    ConfigLike,
    kept_heads,
    kept_neurons,
    normalise_heads,
    normalise_neurons,
    pruned_heads,
    pruned_neurons,
)
from bertlite.stack.body import set_config
from bertlite.stack.modules import BertAttention, BertLayer


class Prunable(Protocol):
    """A model of bertlite or of bertlite.hf."""

    @property
    def config(self) -> Any: ...

    @property
    def base_model(self) -> Any: ...


Model = TypeVar("Model", bound=Prunable)
Config = TypeVar("Config", bound=ConfigLike)
Heads = Mapping[int, Iterable[int]]
Neurons = Mapping[int, Iterable[int]]


def with_pruned(config: Config, heads: Heads, neurons: Neurons | None = None) -> Config:
    """The config of the model without these heads and neurons, besides those it has lost already.

    Raises:
        ValueError: the model never had such a layer, head or neuron.
    """
    layers = config.num_hidden_layers
    fields = {"pruned_heads": union(pruned_heads(config), normalise_heads(heads, layers, config.num_attention_heads))}
    if neurons is not None:
        more = normalise_neurons(neurons, layers, config.intermediate_size)
        fields["pruned_neurons"] = union(pruned_neurons(config), more)
    return replaced(config, **fields)


def union(before: Heads, more: Heads) -> dict[int, list[int]]:
    return {layer: sorted({*before.get(layer, ()), *more.get(layer, ())}) for layer in sorted({*before, *more})}


def replaced(config: Any, **pruned: Any) -> Any:
    """The config with other pruned heads or neurons; transformers' own, which can change, is copied first."""
    if isinstance(config, BertConfig):
        return replace(config, **pruned)
    config = copy.deepcopy(config)
    for field, units in pruned.items():
        setattr(config, field, {layer: gone for layer, gone in units.items() if gone})
    return config


def prune_heads(model: Model, heads: Heads) -> Model:
    """A copy of the model without these heads; the model is left alone.  See `prune_heads_`."""
    return prune_heads_(copy.deepcopy(model), heads)


def prune_heads_(model: Model, heads: Heads) -> Model:
    """Remove heads from the model: their rows of query, key and value, and their columns of the output projection.

    Parameters that shrink are replaced, each with the dtype, device and requires_grad of the one it replaces; modules
    stay, so hooks and training mode do too.  An optimizer made before still holds the old parameters: make it after.

    Args:
        heads: {layer: heads}; heads that are gone already may be named again.

    Raises:
        ValueError: the model never had such a layer or head.
        TypeError: a projection is not a plain nn.Linear (LoRA, quantised): merge first, or prune first.
    """
    before, after = model.config, with_pruned(model.config, heads)
    changed = [
        (layer, attention)
        for layer, attention in enumerate(attentions_of(model))
        if kept_heads(before, layer) != kept_heads(after, layer)
    ]
    if not changed:
        return model
    for layer, attention in changed:
        refuse_wrapped(layer, attention)
    for layer, attention in changed:
        old = kept_heads(before, layer)
        stay = [place for place, head in enumerate(old) if head in set(kept_heads(after, layer))]
        rows = rows_of(stay, attention.self.attention_head_size, attention.output.dense.weight.device)
        for part in (attention.self.query, attention.self.key, attention.self.value):
            resize(part, part.weight[rows], part.bias[rows])
        dense = attention.output.dense
        resize(dense, dense.weight[:, rows], dense.bias)
        attention.self.num_attention_heads = len(stay)
        attention.self.all_head_size = len(rows)
        attention.pruned_heads = set(after.pruned_heads[layer])
    set_config(model, after)
    return model


def prune_neurons(model: Model, neurons: Neurons) -> Model:
    """A copy of the model without these intermediate neurons; the model is left alone.  See `prune_neurons_`."""
    return prune_neurons_(copy.deepcopy(model), neurons)


def prune_neurons_(model: Model, neurons: Neurons) -> Model:
    """Remove intermediate neurons from the model: their rows of the wide feed-forward matrix, and their columns of the
    narrow one.  Otherwise as `prune_heads_`; only bertlite and bertlite.hf read the checkpoint.

    Args:
        neurons: {layer: neurons}; those that are gone already may be named again.

    Raises:
        ValueError: the model never had such a layer or neuron.
        TypeError: a matrix is not in a plain nn.Linear (LoRA, quantised): merge first, or prune first.
    """
    before, after = model.config, with_pruned(model.config, {}, neurons)
    changed = [
        (layer, part)
        for layer, part in enumerate(layers_of(model))
        if kept_neurons(before, layer) != kept_neurons(after, layer)
    ]
    if not changed:
        return model
    for layer, part in changed:
        refuse_wrapped_feed_forward(layer, part)
    for layer, part in changed:
        gone = {*after.pruned_neurons[layer]}
        stay = [place for place, neuron in enumerate(kept_neurons(before, layer)) if neuron not in gone]
        wide, narrow = part.intermediate.dense, part.output.dense
        rows = torch.tensor(stay, dtype=torch.long, device=wide.weight.device)
        resize(wide, wide.weight[rows], wide.bias[rows])
        resize(narrow, narrow.weight[:, rows], narrow.bias)
    set_config(model, after)
    return model


def densify(model: Model) -> Model:
    """The same function with every head and neuron back in place: what was pruned returns as what adds nothing.

    A head's query, key and value are zero and so are its columns of the output projection; a neuron's likewise.  Any
    BERT loader reads the result; it computes as much as the unpruned model did.

    Raises:
        TypeError: as for `prune_heads_`.
    """
    model = copy.deepcopy(model)
    whole: dict[str, Neurons] = {"pruned_neurons": {}} if pruned_neurons(model.config) else {}
    full = replaced(model.config, pruned_heads={}, **whole)
    for layer, attention in enumerate(attentions_of(model)):
        kept = kept_heads(model.config, layer)
        if len(kept) == full.num_attention_heads:
            continue
        refuse_wrapped(layer, attention)
        dense = attention.output.dense
        rows = rows_of(kept, attention.self.attention_head_size, dense.weight.device)
        for part in (attention.self.query, attention.self.key, attention.self.value):
            weight = part.weight.new_zeros(full.hidden_size, part.weight.shape[1]).index_copy(0, rows, part.weight)
            resize(part, weight, part.bias.new_zeros(full.hidden_size).index_copy(0, rows, part.bias))
        weight = dense.weight.new_zeros(dense.weight.shape[0], full.hidden_size).index_copy(1, rows, dense.weight)
        resize(dense, weight, dense.bias)
        attention.self.num_attention_heads = full.num_attention_heads
        attention.self.all_head_size = full.hidden_size
        attention.pruned_heads = set()
    for layer, block in enumerate(layers_of(model)):
        neurons = kept_neurons(model.config, layer)
        if len(neurons) == full.intermediate_size:
            continue
        refuse_wrapped_feed_forward(layer, block)
        wide, narrow = block.intermediate.dense, block.output.dense
        rows = torch.tensor(neurons, dtype=torch.long, device=wide.weight.device)
        weight = wide.weight.new_zeros(full.intermediate_size, full.hidden_size).index_copy(0, rows, wide.weight)
        resize(wide, weight, wide.bias.new_zeros(full.intermediate_size).index_copy(0, rows, wide.bias))
        weight = narrow.weight.new_zeros(full.hidden_size, full.intermediate_size)
        resize(narrow, weight.index_copy(1, rows, narrow.weight), narrow.bias)
    set_config(model, full)
    return model


def scatter_heads(attentions: Sequence[Tensor], config: ConfigLike, fill: float = 0.0) -> tuple[Tensor, ...]:
    """Attentions with every head in its original place.

    Args:
        attentions: one per layer, (B, heads kept there, S, S), as a model returns them.
        fill: the weights of heads that are gone.

    Returns:
        One per layer, (B, heads as built, S, S): layers stack again, and head numbers mean what they meant.

    Raises:
        ValueError: these are not the attentions of a model with this config.
    """
    if len(attentions) != config.num_hidden_layers:
        raise ValueError(f"{len(attentions)} layers of attentions for a model of {config.num_hidden_layers}")
    full = []
    for layer, weights in enumerate(attentions):
        kept = kept_heads(config, layer)
        if weights.dim() != 4 or weights.shape[1] != len(kept):
            raise ValueError(f"layer {layer} has attentions of shape {tuple(weights.shape)}, but {len(kept)} heads")
        shape = (weights.shape[0], config.num_attention_heads, *weights.shape[2:])
        places = torch.tensor(kept, dtype=torch.long, device=weights.device)
        full.append(weights.new_full(shape, fill).index_copy(1, places, weights))
    return tuple(full)


def layers_of(model: Any) -> Iterator[BertLayer]:
    return iter(model.base_model.encoder.layer)


def attentions_of(model: Any) -> Iterator[BertAttention]:
    return (layer.attention for layer in layers_of(model))


def rows_of(heads: Iterable[int], head_size: int, device: torch.device) -> Tensor:
    """The rows of query, key and value, and the columns of the output projection, that belong to these heads."""
    starts = torch.tensor(list(heads), dtype=torch.long, device=device) * head_size
    return (starts[:, None] + torch.arange(head_size, device=device)).flatten()


def refuse_wrapped(layer: int, attention: BertAttention) -> None:
    parts = {"self.query": attention.self.query, "self.key": attention.self.key, "self.value": attention.self.value}
    for name, part in {**parts, "output.dense": attention.output.dense}.items():
        refuse_other_than_linear(f"encoder.layer.{layer}.attention.{name}", part)


def refuse_wrapped_feed_forward(layer: int, part: BertLayer) -> None:
    refuse_other_than_linear(f"encoder.layer.{layer}.intermediate.dense", part.intermediate.dense)
    refuse_other_than_linear(f"encoder.layer.{layer}.output.dense", part.output.dense)


def refuse_other_than_linear(name: str, part: nn.Module) -> None:
    if type(part) is not nn.Linear or type(part.weight) is not nn.Parameter:
        kind = type(part) if type(part) is not nn.Linear else type(part.weight)
        raise TypeError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, not a plain nn.Linear:"
            " merge adapters before pruning, and quantise after it"
        )


@torch.no_grad()
def resize(part: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    """Give a linear layer other matrices in place, so that its hooks and mode stay; its gradients are dropped."""
    for name, value in (("weight", weight), ("bias", bias)):
        old = getattr(part, name)
        if value is not old:
            setattr(part, name, nn.Parameter(value.detach().clone(), requires_grad=old.requires_grad))
    part.out_features, part.in_features = weight.shape
