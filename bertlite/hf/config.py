"""Complete the configs of transformers with the fields that bertlite reads."""

from collections.abc import Iterable, Mapping
from typing import Any

from bertlite.config import check_values, normalise_heads, normalise_neurons, pruned_neurons


def complete_config_(config: Any) -> None:
    """Add the fields that transformers 5 lacks to a config, in place, and check its values.

    Raises:
        ValueError: a value is impossible for a BERT, or would be ignored.
    """
    if getattr(config, "position_embedding_type", None) is None:
        config.position_embedding_type = "absolute"
    check_values(config)
    gone = heads_by_layer(getattr(config, "pruned_heads", None) or {}, config)
    config.pruned_heads = {layer: list(which) for layer, which in gone.items()}
    if pruned_neurons(config):  # a field that transformers does not know, but keeps
        neurons = normalise_neurons(config.pruned_neurons, config.num_hidden_layers, config.intermediate_size)
        config.pruned_neurons = {layer: list(which) for layer, which in neurons.items()}


def heads_by_layer(heads_to_prune: Mapping[Any, Iterable[int]], config: Any) -> dict[int, tuple[int, ...]]:
    """Return heads by layer; as in transformers 4, a layer may count from the end: -1 is the last."""
    layers = config.num_hidden_layers
    forward: Any = heads_to_prune  # checked below
    if isinstance(heads_to_prune, Mapping):
        forward = {
            layer + layers if isinstance(layer, int) and -layers <= layer < 0 else layer: which
            for layer, which in heads_to_prune.items()
        }
    return normalise_heads(forward, layers, config.num_attention_heads)
