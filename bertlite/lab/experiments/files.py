"""What experiments leave beside their runs: scores, and masks.  Both say which model they belong to."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertlite import kept_heads, kept_neurons, prune_heads, prune_neurons
from bertlite.records import sha256_of, write_json


def model_sha256(model: Any) -> str:
    """A hash of a model's weights, by name."""
    parts: list[str | bytes] = []
    for name, value in sorted(model.state_dict().items()):
        parts += [
            f"{name} {value.dtype} {tuple(value.shape)}",
            value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(),
        ]
    return sha256_of(*parts)


def write_scores(path: str | Path, scores: Tensor, criterion: str, model: str) -> None:
    """Write scores (layers, units) of the model with this hash; a unit that is gone is null."""
    rows = [[None if math.isnan(x) else x for x in row] for row in scores.tolist()]
    write_json(path, {"criterion": criterion, "model": model, "scores": rows})


def read_scores(path: str | Path, model: str) -> Tensor:
    """The scores (layers, units) of a file; a unit that is gone is nan.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: they are another model's.
    """
    said = read_json(path)
    refuse_other(path, said, model)
    return torch.tensor([[math.nan if x is None else x for x in row] for row in said["scores"]], dtype=torch.float64)


def mask_of(config: Any, model: str) -> dict[str, Any]:
    """What a model has lost, beside the hash of the dense model it came from; JSON-ready."""
    layers = range(config.num_hidden_layers)
    heads = {layer: sorted({*range(config.num_attention_heads)} - {*kept_heads(config, layer)}) for layer in layers}
    neurons = {layer: sorted({*range(config.intermediate_size)} - {*kept_neurons(config, layer)}) for layer in layers}
    return {
        "model": model,
        "pruned_heads": {str(layer): gone for layer, gone in heads.items() if gone},
        "pruned_neurons": {str(layer): gone for layer, gone in neurons.items() if gone},
    }


def apply_mask(path: str | Path, model: Any) -> Any:
    """The model without what a mask file names.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the mask is another model's.
    """
    said = read_json(path)
    refuse_other(path, said, model_sha256(model))
    heads, neurons = (numbered(said[name]) for name in ("pruned_heads", "pruned_neurons"))
    model = prune_heads(model, heads)
    return prune_neurons(model, neurons) if neurons else model


def units_kept(config: Any) -> tuple[list[int], list[int]]:
    """How many heads and how many neurons each layer has."""
    layers = range(config.num_hidden_layers)
    return [len(kept_heads(config, layer)) for layer in layers], [len(kept_neurons(config, layer)) for layer in layers]


def numbered(units: Mapping[str, list[int]]) -> dict[int, list[int]]:
    return {int(layer): gone for layer, gone in units.items()}


def read_json(path: str | Path) -> dict[str, Any]:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def refuse_other(path: str | Path, said: Mapping[str, Any], model: str) -> None:
    if said.get("model") != model:
        raise ValueError(
            f"{path} belongs to the model {str(said.get('model'))[:16]}; this one is {model[:16]}: score it anew"
        )
