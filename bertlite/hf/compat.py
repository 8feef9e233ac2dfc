"""Differences between versions of transformers that matter here, and attention functions registered with it."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PretrainedConfig, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import TransformersKwargs

try:
    from transformers.utils import output_capturing as capturing
except ImportError:  # before 5.2
    capturing = None

from bertlite.config import check_values, normalise_heads, normalise_neurons, pruned_neurons
from bertlite.stack.attention import Attended, LayerContext, apply_gate
from bertlite.stack.modules import linear

V5 = int(transformers.__version__.split(".")[0]) >= 5
RETURNS_TUPLES = not V5  # layers do, and outputs have fields that are None
SHARES_BIAS = not V5  # a language model's head has one vector under both names; 5's model ties two
KNOWS_PRUNING = not V5  # configs have pruned_heads, and init_weights prunes by it
WARNS_OF_PADDING = not V5  # a model that is given padding and no mask
RECORDS_CROSS = capturing is not None  # it has attentions of cross-attention, or ()
INDEXES_STATES = hasattr(capturing, "selected_hidden_states")  # also by one number
TAKEN = {  # arguments of the functions that make masks
    name: tuple(inspect.signature(getattr(masking_utils, name)).parameters)
    for name in ("create_causal_mask", "create_bidirectional_mask")
    if hasattr(masking_utils, name)
}
CACHE = "cache" if "cache" in TAKEN["create_causal_mask"] else "past_key_values"  # its name, which 5.24 changed
IGNORED = (*TransformersKwargs.__annotations__, "cache_position")  # arguments that every forward takes and may ignore


def complete_config_(config: Any) -> None:
    """Add the fields that transformers 5 lacks to a config, in place, and check its values.

    Raises:
        ValueError: a value is impossible for a BERT, or would be ignored.
    """
    if getattr(config, "position_embedding_type", None) is None:
        config.position_embedding_type = "absolute"
    check_values(config)
    heads = getattr(config, "pruned_heads", None) or {}
    gone = normalise_heads(heads, config.num_hidden_layers, config.num_attention_heads)
    config.pruned_heads = {layer: list(which) for layer, which in gone.items()}
    if pruned_neurons(config):  # a field that transformers does not know, but keeps
        neurons = normalise_neurons(config.pruned_neurons, config.num_hidden_layers, config.intermediate_size)
        config.pruned_neurons = {layer: list(which) for layer, which in neurons.items()}


def cache_of(past: Any, config: PretrainedConfig, crossed: bool) -> Any:
    """Return the caller's cache, 4.57's tuples of tensors as a cache, or without any this version's default cache.

    Raises:
        TypeError: it is no cache of this version, such as a tuple under 5.x.
    """
    if past is None:
        if V5 and not (crossed or config.is_encoder_decoder):
            return DynamicCache(config=config)
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    if isinstance(past, tuple) and not V5:
        return EncoderDecoderCache.from_legacy_cache(past)
    if not hasattr(past, "get_seq_length"):
        wanted = "transformers 5 takes a DynamicCache or an EncoderDecoderCache"
        wanted = wanted if isinstance(past, tuple) else "pass a cache of transformers"
        raise TypeError(f"past_key_values is a {type(past).__name__}; {wanted}")
    return past


def registered_mask(
    config: PretrainedConfig, x: Tensor, mask: Tensor | None, cache: Any, states: Tensor | None, causal: bool
) -> Any:
    """Make the mask of a registered attention function, in the form that the function takes.

    Raises:
        ValueError: this version of transformers makes no such mask.
    """
    name = config._attn_implementation
    if name not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping and (mask is None or mask.dim() != 4):
        return None  # transformers passes such a function no mask either

    # Older versions make no mask for such functions; without padding none is needed.
    maker = "create_causal_mask" if causal else "create_bidirectional_mask"
    if maker not in TAKEN:
        if mask is None or bool(mask.all()):
            return None
        version = transformers.__version__
        raise ValueError(f"transformers {version} makes no mask for {name!r}; use eager or sdpa, or 5.x")

    # The maker's arguments have had several names; each version is given those that it takes.
    past = 0 if cache is None else cache.get_seq_length()
    known = {
        "config": config,
        "attention_mask": mask,
        CACHE: cache,
        "encoder_hidden_states": states,
        **dict.fromkeys(("inputs_embeds", "input_embeds"), x),  # before 5.2
        "cache_position": torch.arange(past, past + x.shape[1], device=x.device),  # before 5.9
    }
    return getattr(masking_utils, maker)(**{name: known[name] for name in TAKEN[maker] if name in known})


def run_registered(module: Any, q: Tensor, k: Tensor, v: Tensor, inputs: LayerContext) -> Attended:
    """Compute attention, (…, N·H), with a function registered with transformers, called as transformers calls it."""
    name, wanted = inputs.backend.name, inputs.returns_weights
    if inputs.first_only:
        raise ValueError(f"attention {name!r} cannot do first_token_only=True; use eager, sdpa or packed")
    if module.position_embedding_type != "absolute":
        kind = module.position_embedding_type
        raise ValueError(f"attention {name!r} cannot do {kind!r} positions: it knows no distances; use eager or sdpa")

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if not q.shape[1]:  # a layer without heads; not every function runs on none
        return q.transpose(1, 2).flatten(-2), q.new_zeros(*q.shape[:-1], k.shape[2]) if wanted else None

    dropout = module.dropout.p if module.training else 0.0
    function = ALL_ATTENTION_FUNCTIONS[name]
    context, weights = function(module, q, k, v, inputs.mask, dropout=dropout, scaling=q.shape[-1] ** -0.5)
    if wanted and weights is None:
        raise ValueError(f"attention {name!r} cannot give attentions; use eager or sdpa")

    # The function knows no gates of heads, so its context is multiplied afterwards.
    context, weights = apply_gate(context, weights if wanted else None, inputs)
    return context.flatten(-2), weights


def auto_classes() -> list[Any]:
    """Return every AutoModel… class of this version."""
    from transformers.models.auto import modeling_auto

    found = (getattr(modeling_auto, name) for name in dir(modeling_auto) if name.startswith("AutoModel"))
    return [auto for auto in found if hasattr(auto, "_model_mapping")]


# Functions of transformers 4's `pytorch_utils` that 5 removed or may remove, for code that prunes BERT


def find_pruneable_heads_and_indices(
    heads: Iterable[int], n_heads: int, head_size: int, already_pruned_heads: set[int]
) -> tuple[set[int], Tensor]:
    """Return the named heads that still exist, and the rows that remain without them.

    Args:
        heads: the heads to prune, numbered as in the unpruned layer.
        n_heads: the number of heads that the layer has now.
        head_size: the number of rows of each.
        already_pruned_heads: heads removed before, numbered as in the unpruned layer.
    """
    found = set(heads) - already_pruned_heads
    gone = {head - sum(before < head for before in already_pruned_heads) for head in found}
    wrong = [head for head in gone if not -n_heads <= head < n_heads]
    if wrong:
        raise IndexError(f"there is no head {wrong[0]} among the {n_heads} that are left")
    kept = torch.ones(n_heads, head_size, dtype=torch.bool, device="cpu")  # also for a model without values
    kept[list(gone)] = False
    return found, kept.flatten().nonzero().squeeze(-1)


def prune_linear_layer(layer: nn.Linear, index: Tensor, dim: int = 0) -> nn.Linear:
    """Return a new linear layer with these outputs of another (dim 0), or these inputs (dim 1).

    Its parameters have the dtype and the device of the old ones, and are trained.
    """
    index = index.to(layer.weight.device)
    weight = layer.weight.detach().index_select(dim, index).clone()
    new = linear(weight.shape[1], weight.shape[0])
    new.weight = nn.Parameter(weight)
    new.bias = None  # type: ignore[assignment]  # as in an nn.Linear without bias
    if layer.bias is not None:
        bias = layer.bias.detach()
        new.bias = nn.Parameter((bias if dim == 1 else bias.index_select(0, index)).clone())
    return new
