"""Files of scores, masks and predictions; scores and masks name the model that they belong to, by its hash."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bertlite import kept_heads, kept_neurons, prune_heads, prune_neurons
from bertlite.experiments.data import NO_LABEL, pad_rows
from bertlite.experiments.statistics import Array
from bertlite.importance.structures import HEADS, NEURONS
from bertlite.records import Record, sha256_of, write_json

DENSE = "dense"  # the outputs of the dense model that a run pruned, in its predictions
Given: TypeAlias = tuple[Tensor | None, Tensor | None]  # (layers, heads), (layers, neurons)


def model_sha256(model: Any) -> str:
    """Return a hash of a model's weights with their names."""
    parts: list[str | bytes] = []
    for name, value in sorted(model.state_dict().items()):
        parts += [
            f"{name} {value.dtype} {tuple(value.shape)}",
            value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(),
        ]
    return sha256_of(*parts)


def write_scores(path: str | Path, scores: Tensor, criterion: str, model: str) -> None:
    """Write scores (layers, units) of the model with this hash; a pruned unit is null."""
    rows = [[None if math.isnan(x) else x for x in row] for row in scores.tolist()]
    write_json(path, {"criterion": criterion, "model": model, "scores": rows})


def read_scores(path: str | Path, model: str) -> Tensor:
    """Read the scores (layers, units) of a file; a pruned unit is nan.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the scores belong to another model.
    """
    found = read_json(path)
    check_model_hash(path, found, model)
    return torch.tensor([[math.nan if x is None else x for x in row] for row in found["scores"]], dtype=torch.float64)


@dataclass(frozen=True)
class ScoreFiles:
    """Files that `bertlite prune score` wrote; None for units that are scored."""

    heads: str | Path | None = None
    neurons: str | Path | None = None

    def contents(self) -> list[bytes]:
        """Return what the files hold, so that other files make another run."""
        heads = [Path(self.heads).read_bytes()] if self.heads is not None else []
        return heads + ([b"neurons", Path(self.neurons).read_bytes()] if self.neurons is not None else [])

    def read(self, cell: Any, model: Any, sha256: str) -> Given:
        """Read the scores of a model for a cell.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: they belong to another model or to other units, or the cell does not use them.
        """
        if self != ScoreFiles() and cell.steps > 1:
            raise ValueError(f"with {cell.steps} steps units are scored before each: give no scores, or 1 step")
        if self.neurons is not None and not cell.prunes_neurons:
            raise ValueError(f"{self.neurons} scores neurons, but none are removed: add --neurons SHARE")
        found = []
        for path, structure in ((self.heads, HEADS), (self.neurons, NEURONS)):
            scores = None if path is None else read_scores(path, sha256)
            wanted = structure.shape(model)
            if scores is not None and scores.shape != wanted:
                of = f"{' x '.join(map(str, wanted))} {structure.unit}s"
                raise ValueError(f"{path} holds {tuple(scores.shape)} scores: give those of {of}")
            found.append(scores)
        return found[0], found[1]


def prediction_lines(labels: Array, **outputs: Array) -> Iterator[dict[str, Any]]:
    """Yield a line for each example: its label and each of its named outputs, to 6 digits; of words, for each word."""
    for i, label in enumerate(labels):
        counted = label != NO_LABEL if labels.ndim > 1 else ...
        rows = {name: np.round(value[i][counted].astype(float), 6).tolist() for name, value in outputs.items()}
        yield {"label": label[counted].tolist(), **rows}


def outputs(run: Record, name: str = "outputs") -> Array:
    """Return the outputs of a run's model, (examples, classes), (examples, 1) or (examples, words, classes)."""
    return as_array([line[name] for line in run.predictions], np.nan)


def dense_outputs(run: Record) -> Array:
    """Return the outputs of the dense model that a run pruned.

    Raises:
        ValueError: the run was made before they were recorded.
    """
    if DENSE not in run.predictions[0]:
        raise ValueError(
            f"{run.folder} does not hold the outputs of its dense model: remove it and run it again to compare with"
            f" {DENSE}"
        )
    return outputs(run, DENSE)


def labels(run: Record) -> Array:
    """Return the labels of the examples that a run was evaluated on, (examples,) or (examples, words)."""
    return as_array([line["label"] for line in run.predictions], NO_LABEL)


def as_array(rows: Sequence[Any], padding: float) -> Array:
    """Return rows of numbers as an array; those of words, of several lengths, filled up."""
    nested = [isinstance(row, list) and (padding == NO_LABEL or not row or isinstance(row[0], list)) for row in rows]
    if not any(nested):
        return np.array(rows, float if math.isnan(padding) else None)  # null, as which nan is written, is nan again
    width = next(np.shape(row)[1:] for row in rows if row)
    return pad_rows([np.array(row, float).reshape(len(row), *width) for row in rows], padding)


def class_names(config: Any) -> tuple[str, ...]:
    """Return the names of a head's classes; empty if they are only numbered, LABEL_0, LABEL_1 …"""
    names = {int(i): str(name) for i, name in (getattr(config, "id2label", None) or {}).items()}
    found = tuple(names[i] for i in sorted(names))
    return () if found == tuple(f"LABEL_{i}" for i in range(len(found))) else found


def mask_of(config: Any, model: str) -> dict[str, Any]:
    """Return the heads and neurons that a model has lost, with the hash of the dense model; JSON-ready."""
    layers = range(config.num_hidden_layers)
    heads = {layer: sorted({*range(config.num_attention_heads)} - {*kept_heads(config, layer)}) for layer in layers}
    neurons = {layer: sorted({*range(config.intermediate_size)} - {*kept_neurons(config, layer)}) for layer in layers}
    return {
        "model": model,
        "pruned_heads": {str(layer): gone for layer, gone in heads.items() if gone},
        "pruned_neurons": {str(layer): gone for layer, gone in neurons.items() if gone},
    }


def apply_mask(path: str | Path, model: Any) -> Any:
    """Return a pruned copy of a model, without the heads and neurons that a mask file names.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the mask belongs to another model.
    """
    mask = read_json(path)
    check_model_hash(path, mask, model_sha256(model))
    heads, neurons = (with_layer_numbers(mask[name]) for name in ("pruned_heads", "pruned_neurons"))
    model = prune_heads(model, heads)
    return prune_neurons(model, neurons) if neurons else model


def units_kept(config: Any) -> tuple[list[int], list[int]]:
    """Return the number of heads and the number of neurons of each layer."""
    layers = range(config.num_hidden_layers)
    return [len(kept_heads(config, layer)) for layer in layers], [len(kept_neurons(config, layer)) for layer in layers]


def with_layer_numbers(units: Mapping[str, list[int]]) -> dict[int, list[int]]:
    """Turn the keys that JSON made strings back into layer numbers."""
    return {int(layer): gone for layer, gone in units.items()}


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def check_model_hash(path: str | Path, content: Mapping[str, Any], model: str) -> None:
    """Raise ValueError if a file belongs to another model than the one with this hash."""
    if content.get("model") != model:
        raise ValueError(
            f"{path} belongs to the model {str(content.get('model'))[:16]}; this one is {model[:16]}: score it anew"
        )
