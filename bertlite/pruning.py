"""Removing heads for good, and undoing the look of it.

Heads are numbered as in the unpruned model, always, so that pruning composes.  A layer may lose every head: its
attention is then the bias of its output projection.  A checkpoint keeps `pruned_heads` in config.json, as in
transformers 4.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from bertlite.config import BertConfig, ConfigLike, kept_heads, normalise_heads, pruned_heads
from bertlite.model import set_config
from bertlite.modules import BertAttention


class Prunable(Protocol):
    """A model of bertlite or of bertlite.hf."""

    @property
    def config(self) -> Any: ...

    @property
    def base_model(self) -> Any: ...


Model = TypeVar("Model", bound=Prunable)
Config = TypeVar("Config", bound=ConfigLike)
Heads = Mapping[int, Iterable[int]]


def with_pruned(config: Config, heads: Heads) -> Config:
    """The config of the model without these heads, besides those it has lost already.

    Raises:
        ValueError: the model never had such a layer or head.
    """
    more = normalise_heads(heads, config.num_hidden_layers, config.num_attention_heads)
    before = pruned_heads(config)
    gone = {layer: {*before.get(layer, ()), *more.get(layer, ())} for layer in {*before, *more}}
    return replaced(config, gone)


def replaced(config: Any, pruned_heads: Mapping[int, Iterable[int]]) -> Any:
    """The config with other pruned heads; transformers' own, which can change, is copied first."""
    if isinstance(config, BertConfig):
        return replace(config, pruned_heads=pruned_heads)
    config = copy.deepcopy(config)
    config.pruned_heads = {layer: sorted(heads) for layer, heads in sorted(pruned_heads.items()) if heads}
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


def densify(model: Model) -> Model:
    """The same function with every head back in place: a pruned head returns as one that adds nothing.

    Its query, key and value are zero and so are its columns of the output projection.  Any BERT loader reads the
    result; it computes as much as the unpruned model did.

    Raises:
        TypeError: as for `prune_heads_`.
    """
    model = copy.deepcopy(model)
    full = replaced(model.config, {})
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


def attentions_of(model: Any) -> Iterator[BertAttention]:
    return (layer.attention for layer in model.base_model.encoder.layer)


def rows_of(heads: Iterable[int], head_size: int, device: torch.device) -> Tensor:
    """The rows of query, key and value, and the columns of the output projection, that belong to these heads."""
    starts = torch.tensor(list(heads), dtype=torch.long, device=device) * head_size
    return (starts[:, None] + torch.arange(head_size, device=device)).flatten()


def refuse_wrapped(layer: int, attention: BertAttention) -> None:
    parts = {"self.query": attention.self.query, "self.key": attention.self.key, "self.value": attention.self.value}
    for name, part in {**parts, "output.dense": attention.output.dense}.items():
        if type(part) is not nn.Linear or type(part.weight) is not nn.Parameter:
            kind = type(part) if type(part) is not nn.Linear else type(part.weight)
            raise TypeError(
                f"encoder.layer.{layer}.attention.{name} is a {kind.__module__}.{kind.__qualname__}, not a plain"
                " nn.Linear: merge adapters before pruning, and quantise after it"
            )


@torch.no_grad()
def resize(part: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    """Give a linear layer other matrices in place, so that its hooks and mode stay; its gradients are dropped."""
    for name, value in (("weight", weight), ("bias", bias)):
        old = getattr(part, name)
        if value is not old:
            setattr(part, name, nn.Parameter(value.detach().clone(), requires_grad=old.requires_grad))
    part.out_features, part.in_features = weight.shape
