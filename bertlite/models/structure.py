"""Remove attention heads, neurons and layers from a model, and make a full-size model of a pruned one.

Heads and neurons keep their numbers of the unpruned model, so that pruning composes.  A layer may lose every head:
its attention is then the bias of its output projection.  It may lose every neuron, likewise.  A checkpoint keeps
`pruned_heads` in config.json, in the format of transformers 4, which reads it.  Only bertlite and bertlite.hf read
`pruned_neurons`: for other libraries, `densify` makes a full-size checkpoint.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from bertlite.config import (
    BertConfig,
    kept_heads,
    kept_neurons,
    normalise_heads,
    normalise_neurons,
    own_field,
    parse_indices,
    pruned_heads,
    pruned_neurons,
    set_config,
)
from bertlite.stack.body import BertBody
from bertlite.stack.modules import BertAttention, BertLayer
from bertlite.stack.positions import DISTANCES

log = logging.getLogger("bertlite")


class BertLike(Protocol):
    """A model of bertlite or of bertlite.hf: a BertModel, or one with a task head."""

    @property
    def config(self) -> BertConfig: ...

    @property
    def base_model(self) -> BertBody[Any]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...  # a ModelOutput, or a tuple

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def eval(self) -> Self: ...

    def requires_grad_(self, requires_grad: bool = True) -> Self: ...


Model = TypeVar("Model", bound=BertLike)
Config = TypeVar("Config", bound=Any)  # bertlite's BertConfig or transformers'
Heads = Mapping[int, Iterable[int]]
Neurons = Mapping[int, Iterable[int]]


def with_pruned(config: Config, heads: Heads, neurons: Neurons | None = None) -> Config:
    """Return the config of a model without these heads and neurons; earlier removals stay.

    Raises:
        ValueError: the model never had such a layer, head or neuron.
    """
    layers = config.num_hidden_layers
    more_heads = normalise_heads(heads, layers, config.num_attention_heads)
    more_neurons = normalise_neurons({} if neurons is None else neurons, layers, config.intermediate_size)
    fields = {"pruned_heads": merge_units(pruned_heads(config), more_heads)}
    return with_fields(config, {**fields, "pruned_neurons": merge_units(pruned_neurons(config), more_neurons)})


def merge_units(before: Heads, more: Heads) -> dict[int, list[int]]:
    return {layer: sorted({*before.get(layer, ()), *more.get(layer, ())}) for layer in sorted({*before, *more})}


def with_fields(config: Config, fields: Mapping[str, Any]) -> Config:
    """Return a config with other fields, such as `pruned_heads`; the given config is not changed."""
    if isinstance(config, BertConfig):
        return replace(config, **fields)
    config = copy.deepcopy(config)  # transformers' config can be changed
    for field, value in fields.items():
        if isinstance(value, Mapping):
            value = {layer: gone for layer, gone in value.items() if gone}
        if value or hasattr(config, field):  # it gets no field of ours that says nothing
            setattr(config, field, value)
    return config


def copy_model(model: Model) -> Model:
    """Return a copy of a model, also where weights are computed, as with the masks of torch.nn.utils.prune."""
    check_model(model)
    held = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    return copy.deepcopy(model, {id(x): x.detach().clone() for x in held if not x.is_leaf})  # deepcopy refuses these


def prune_heads(model: Model, heads: Heads) -> Model:
    """Return a copy of the model without these heads; the model is not changed.  See `prune_heads_`."""
    return prune_heads_(copy_model(model), heads)


def prune_heads_(model: Model, heads: Heads) -> Model:
    """Remove heads from the model: their rows of query, key and value, and their columns of the output projection.

    Parameters that shrink are replaced, each with the dtype, device and requires_grad of the one it replaces.  Modules
    stay, with hooks and training mode.  Make the optimizer afterwards: an older one holds the old parameters.

    With logging.basicConfig(level=logging.INFO), the numbers of parameters before and after are shown.

    Args:
        heads: {layer: heads}; heads that were removed before may be named again.

    Raises:
        ValueError: the model never had such a layer or head.
        TypeError: a projection is not a plain nn.Linear (LoRA, quantised): merge first, or prune first.
    """
    check_model(model)
    return resize_layers_(model, with_pruned(model.config, heads))


def prune_neurons(model: Model, neurons: Neurons) -> Model:
    """Return a copy of the model without these neurons; the model is not changed.  See `prune_neurons_`."""
    return prune_neurons_(copy_model(model), neurons)


def prune_neurons_(model: Model, neurons: Neurons) -> Model:
    """Remove intermediate neurons from the model.

    Their rows of the first feed-forward matrix and their columns of the second are removed.  Parameters are replaced
    as by `prune_heads_`.  Only bertlite and bertlite.hf read the checkpoint.

    Args:
        neurons: {layer: neurons}; neurons that were removed before may be named again.

    Raises:
        ValueError: the model never had such a layer or neuron.
        TypeError: a matrix is not in a plain nn.Linear (LoRA, quantised): merge first, or prune first.
    """
    check_model(model)
    return resize_layers_(model, with_pruned(model.config, {}, neurons))


def drop_layers(model: Model, layers: Iterable[int]) -> Model:
    """Return a copy of the model without these layers; the model is not changed.  See `drop_layers_`."""
    return drop_layers_(copy_model(model), layers)


def drop_layers_(model: Model, layers: Iterable[int]) -> Model:
    """Remove whole layers from the model; the remaining layers are numbered from 0 again.

    `num_hidden_layers`, `pruned_heads` and `pruned_neurons` of the config follow, so that every BERT loader reads the
    checkpoint of a model without pruned heads.  Parameters of the other layers stay.

    Args:
        layers: their numbers in this model, such as [9, 10, 11].

    Raises:
        ValueError: there is no such layer, or `layers` is no list.
    """
    check_model(model)
    before, count = model.config, model.config.num_hidden_layers
    try:
        gone = sorted(parse_indices(layers), reverse=True)
    except (TypeError, ValueError):
        raise ValueError(
            f"layers are given as a list of their numbers, such as [9, 10, 11]; not as {layers!r}"
        ) from None

    for layer in gone:
        if not 0 <= layer < count:
            raise ValueError(f"there is no layer {layer!r}: the model has {count} layers, 0 to {count - 1}")

    # The config's entries for the remaining layers follow them to their new numbers.
    kept = [layer for layer in range(count) if layer not in gone]

    def renumber(units: Heads) -> dict[int, Iterable[int]]:
        return {new: units[old] for new, old in enumerate(kept) if old in units}

    units = {"pruned_heads": renumber(pruned_heads(before)), "pruned_neurons": renumber(pruned_neurons(before))}
    fields = {"num_hidden_layers": len(kept), **units}
    if local := own_field(before, "local_layers"):
        fields["local_layers"] = [new for new, old in enumerate(kept) if old in local]
    if own_field(before, "norm_first"):  # without ModernBERT's layer 0, all that are left normalise before attention
        fields["first_norm"] = own_field(before, "first_norm") or kept[:1] != [0]
    after = with_fields(before, fields)

    # The config was checked above, so from here on nothing can fail half-way.
    for layer in gone:
        del model.base_model.encoder.layer[layer]

    # A layer knows its number, by which it finds its part of a cache.
    for new, block in enumerate(layers_of(model)):
        parts: Iterator[Any] = block.modules()
        for part in parts:
            if "layer_idx" in vars(part):  # the layer; in bertlite.hf also the attention
                part.layer_idx = new
    set_config(model, after)
    return model


def compact(model: Model) -> Model:
    """Return a copy of the model without the heads and neurons that have no effect; the model is not changed.

    See `compact_`.
    """
    return compact_(copy_model(model))


@torch.no_grad()
def compact_(model: Model) -> Model:
    """Remove the heads and neurons whose weights are zero, as movement pruning or torch.nn.utils.prune leaves them.

    A head is removed if for each of its dimensions the row of the value's weight, or the column of the output
    projection, is zero.  A neuron is removed if its row of the first feed-forward matrix, or its column of the second,
    is zero.  Only 0.0 counts as zero.  The bias of a zero row still gives a constant, which is added to the bias of
    the output: outputs in eval mode are equal except for rounding.  Only a query that may attend to no key differs,
    since it now gets that constant.  Masks of torch.nn.utils.prune are made permanent, in all modules.  A head whose
    query and key are zero attends evenly, and stays.

    Raises:
        TypeError: as for `prune_heads_` and `prune_neurons_`.
    """
    masked = {id(module) for module, _ in pruning_masks(model)}
    for layer, block in enumerate(layers_of(model)):
        parts = attention_parts(layer, block.attention) | feed_forward_parts(layer, block)
        check_linear_parts({name: part for name, part in parts.items() if id(part) not in masked})

    # Masks are multiplied in, so that their zeros are zeros of the weights.
    for module, name in pruning_masks(model):
        torch_prune.remove(module, name)

    # A unit is idle if nothing reaches it or nothing reads it; its bias may still pass on a constant.
    heads, neurons, constants = {}, {}, []
    for layer, block in enumerate(layers_of(model)):
        attention, first, second = block.attention, block.intermediate, block.output
        value, dense, size = attention.self.value, attention.output.dense, attention.self.attention_head_size
        idle = idle_columns(value, dense).unflatten(0, (-1, size) if len(value.weight) else (0, size)).all(1)
        heads[layer] = [*compress(kept_heads(model.config, layer), idle.tolist())]
        constants.append((dense, constant_of(dense, value.bias, idle.repeat_interleave(size))))

        idle = idle_columns(first.dense, second.dense)
        if first.factor is not None:
            idle &= idle_columns(first.factor, second.dense)
        neurons[layer] = [*compress(kept_neurons(model.config, layer), idle.tolist())]
        active = first.intermediate_act_fn(first.dense.bias)
        active = active if first.factor is None else active * first.factor.bias
        constants.append((second.dense, constant_of(second.dense, active, idle)))

    # The constants of the removed units are added to the bias of the output, in float64.
    prune_neurons_(prune_heads_(model, heads), neurons)
    for part, constant in constants:
        if constant.any():
            part.bias.copy_(part.bias.double() + constant)
    return model


def idle_columns(first: nn.Linear, second: nn.Linear) -> Tensor:
    """Return True for each row of the first matrix whose activation is constant, or unused by the second."""
    return (first.weight == 0).all(1) | (second.weight == 0).all(0)


def constant_of(part: nn.Linear, values: Tensor, idle: Tensor) -> Tensor:
    """Return the constant that the idle inputs of a linear layer add to its output, in float64."""
    return part.weight[:, idle].double() @ values[idle].double()


def pruning_masks(model: BertLike) -> list[tuple[nn.Module, str]]:
    """Return the modules that torch.nn.utils.prune masks, each with the name of the masked parameter."""
    hooks = [(module, hook) for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return [(module, hook._tensor_name) for module, hook in hooks if isinstance(hook, torch_prune.BasePruningMethod)]


def densify(model: Model) -> Model:
    """Return a full-size model with equal outputs: every pruned head and neuron is back, with zero weights.

    The query, key and value of a pruned head, and its columns of the output projection, are zero; a pruned neuron's
    weights likewise.  Any BERT loader reads the result.  It is as slow as the unpruned model.

    Raises:
        TypeError: as for `prune_heads_`.
    """
    return resize_layers_(copy_model(model), with_fields(model.config, {"pruned_heads": {}, "pruned_neurons": {}}))


def resize_layers_(model: Model, after: Any) -> Model:
    """Give a model the heads and neurons of a config, and that config; units that come back have zero weights.

    Raises:
        TypeError: a matrix to change is not in a plain nn.Linear; nothing is changed then.
    """
    before, changes = model.config, list[Callable[[], None]]()

    linear = [part for block in layers_of(model) for part in block.modules() if isinstance(part, nn.Linear)]
    if len({*linear}) < len(linear):
        raise ValueError("layers share a matrix, and would all lose its heads or neurons: give each a copy of it")

    # All layers are checked before the first changes: a refusal must leave the model as it was.
    for layer, block in enumerate(layers_of(model)):
        heads, left = kept_heads(before, layer), kept_heads(after, layer)
        if heads != left:
            check_linear_parts(attention_parts(layer, block.attention))
            changes.append(partial(resize_attention_, block.attention, move_units(heads, left)))
            gone = {*range(after.num_attention_heads)} - {*left}
            changes.append(partial(setattr, block.attention, "pruned_heads", gone))

        neurons, rest = kept_neurons(before, layer), kept_neurons(after, layer)
        if neurons != rest:
            check_linear_parts(feed_forward_parts(layer, block))
            changes.append(partial(resize_feed_forward_, block, move_units(neurons, rest)))

    parameters = sum(each.numel() for each in model.parameters())
    for change in changes:
        change()
    if changes:
        set_config(model, after)
        fewer = sum(each.numel() for each in model.parameters())
        log.info("%s parameters before, %s after", f"{parameters:,}", f"{fewer:,}")
    return model


def scatter_heads(attentions: Sequence[Tensor], config: BertConfig, fill: float = 0.0) -> tuple[Tensor, ...]:
    """Return attentions with every head at its number in the unpruned model.

    Args:
        attentions: one per layer, (B, heads kept there, S, S), as a model returns them.
        fill: the weights of pruned heads.

    Returns:
        One per layer, (B, heads as built, S, S), which can be stacked.

    Raises:
        ValueError: the shapes do not fit the config.
    """
    if len(attentions) != config.num_hidden_layers:
        raise ValueError(f"{len(attentions)} layers of attentions for a model of {config.num_hidden_layers}")
    full = []
    for layer, weights in enumerate(attentions):
        kept = kept_heads(config, layer)
        if weights.dim() != 4 or weights.shape[1] != len(kept):
            raise ValueError(f"layer {layer} has attentions of shape {tuple(weights.shape)}, but {len(kept)} heads")
        shape = (weights.shape[0], config.num_attention_heads, *weights.shape[2:])
        indices = torch.tensor(kept, dtype=torch.long, device=weights.device)
        full.append(weights.new_full(shape, fill).index_copy(1, indices, weights))
    return tuple(full)


def layers_of(model: BertLike) -> Iterator[BertLayer]:
    """Return the layers of a model; see `check_model`."""
    check_model(model)
    return iter(model.base_model.encoder.layer)  # type: ignore[arg-type]  # a ModuleList of BertLayer


def check_model(model: object) -> None:
    """Raise TypeError for a model of another library, and if `optimize_for_inference` has packed the layers."""
    base = getattr(model, "base_model", None)
    if not isinstance(base, BertBody):
        name = type(model).__name__
        raise TypeError(f"{name} is not a model of bertlite or bertlite.hf: load it so, or pass the model inside")
    if getattr(base.encoder, "is_optimised", False):
        way_out = "change the original model, and optimise the result again"
        raise TypeError(f"the model was made by optimize_for_inference, and its layers can only run: {way_out}")


# Matrices with fewer or more units.  A unit is a head, `width` rows or columns wide, or a neuron, with width 1.

Change = Callable[[Tensor, int, int], Tensor]  # a weight or bias, the axis of its units, their width -> the new one


def move_units(units: Sequence[int], wanted: Sequence[int]) -> Change:
    """Return the change from a matrix of some units to a matrix of other units, with zeros for those that are new."""
    old, new = ({unit: i for i, unit in enumerate(each)} for each in (units, wanted))
    known = [unit for unit in wanted if unit in old]
    taken, places = [old[unit] for unit in known], [new[unit] for unit in known]

    def change(x: Tensor, axis: int, width: int) -> Tensor:
        found = x.index_select(axis, unit_rows(taken, width, x.device))
        if len(known) == len(wanted):
            return found
        shape = [*x.shape[:axis], len(wanted) * width, *x.shape[axis + 1 :]]
        return x.new_zeros(shape).index_copy(axis, unit_rows(places, width, x.device), found)

    return change


def unit_rows(units: Sequence[int] | Tensor, width: int, device: torch.device) -> Tensor:
    """Return the rows or columns of units, given by their positions in the matrix, not by their numbers."""
    starts = torch.as_tensor(units, dtype=torch.long, device=device) * width
    return (starts[:, None] + torch.arange(width, device=device)).flatten()


def resize_attention_(attention: BertAttention, change: Change) -> None:
    """Change the heads of an attention."""
    own, dense = attention.self, attention.output.dense
    for part in own.projections().values():
        resize_(part, *(change(x, 0, own.attention_head_size) for x in (part.weight, part.bias)))
    resize_(dense, change(dense.weight, 1, own.attention_head_size), dense.bias)
    if DISTANCES[own.position_embedding_type].per_head:
        set_table_(own.distance_embedding, change(own.distance_embedding.weight, 1, 1))
    own.all_head_size = own.query.out_features
    own.num_attention_heads = own.all_head_size // own.attention_head_size


def resize_feed_forward_(block: BertLayer, change: Change) -> None:
    """Change the neurons of a layer."""
    first, second = block.intermediate.dense, block.output.dense
    for part in (first, *filter(None, [block.intermediate.factor])):
        resize_(part, change(part.weight, 0, 1), change(part.bias, 0, 1))
    resize_(second, change(second.weight, 1, 1), second.bias)


def attention_parts(layer: int, attention: BertAttention) -> dict[str, nn.Module]:
    """Return the linear layers of a layer's attention, by name."""
    parts = {f"self.{name}": part for name, part in attention.self.projections().items()}
    parts["output.dense"] = attention.output.dense
    return {f"encoder.layer.{layer}.attention.{name}": part for name, part in parts.items()}


def feed_forward_parts(layer: int, block: BertLayer) -> dict[str, nn.Module]:
    """Return the linear layers of a layer's feed-forward network, by name."""
    parts = {"intermediate.dense": block.intermediate.dense, "output.dense": block.output.dense}
    if block.intermediate.factor is not None:
        parts["intermediate.factor"] = block.intermediate.factor
    return {f"encoder.layer.{layer}.{name}": part for name, part in parts.items()}


def check_linear_parts(parts: Mapping[str, nn.Module]) -> None:
    for name, part in parts.items():
        check_linear(name, part)


def check_linear(name: str, part: nn.Module) -> None:
    """Raise TypeError unless a module is a plain nn.Linear."""
    way = "merge adapters before pruning, and quantise after it"
    if any(isinstance(hook, torch_prune.BasePruningMethod) for hook in part._forward_pre_hooks.values()):
        way += "; make masks of torch.nn.utils.prune permanent with its remove, or bertlite.pruning.compact"
    check_plain(name, part, nn.Linear, way)


def check_plain(name: str, part: nn.Module, cls: type[nn.Module], way_out: str) -> None:
    """Raise TypeError unless a module is of just this class, without adapters or quantised weights."""
    tensors = (getattr(part, "weight", None), getattr(part, "bias", None))
    odd = [type(each) for each in tensors if each is not None and type(each) is not nn.Parameter]
    if type(part) is not cls or odd:
        kind = odd[0] if type(part) is cls else type(part)
        raise TypeError(f"{name} is a {kind.__module__}.{kind.__qualname__}, not a plain nn.{cls.__name__}: {way_out}")


def resize_(part: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    """Replace the weight and bias of a linear layer.  Its hooks and mode stay; its gradients are dropped."""
    for name, value in (("weight", weight), ("bias", bias)):
        old = getattr(part, name)
        if value is not old:
            setattr(part, name, nn.Parameter(value.detach().clone(), requires_grad=old.requires_grad))
    part.out_features, part.in_features = weight.shape


def set_table_(part: nn.Embedding, weight: Tensor) -> None:
    """Replace the weight of an embedding.  Its hooks and mode stay; its gradient is dropped."""
    part.weight = nn.Parameter(weight.detach().clone(), requires_grad=part.weight.requires_grad)
    part.num_embeddings, part.embedding_dim = weight.shape
