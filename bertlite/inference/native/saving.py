"""Save a model with packed weights, and map it again: nothing is packed a second time.

A folder holds config.json, native.json (what the files are), layers.safetensors (the packed weights, one tensor of
bytes) and rest.safetensors (embeddings, pooler and head).  Packed weights are the same for every x86-64 processor.
"""

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from bertlite.checkpoint.folders import replacing
from bertlite.checkpoint.names import DECODER
from bertlite.checkpoint.reading import read_weights
from bertlite.checkpoint.saving import dtype_name, write_safetensors, write_sorted_json
from bertlite.checkpoint.skeleton import assign_tensors_, make_skeleton
from bertlite.config import BertConfig
from bertlite.heads.models import CLASSES
from bertlite.inference.linear import FixedLinear, TensorBytes
from bertlite.inference.native.conversion import with_fixed_linears
from bertlite.inference.native.encoder import NativeEncoder
from bertlite.inference.native.library import load_kernels
from bertlite.inference.native.weights import LayerShape, NativeWeights, Shape
from bertlite.model import BertPreTrainedModel
from bertlite.stack.body import set_config

FORMAT = 1  # of the folder and of the packed weights in it
FILES = ("config.json", "native.json", "layers.safetensors", "rest.safetensors")


def save_native(model: BertPreTrainedModel, folder: Path) -> None:
    """Write the copy of a model that `native_copy` made to a folder, which is replaced in one step.

    Raises:
        TypeError: the model's class is not one of bertlite's own.
        OSError: the folder cannot be written.
    """
    name = type(model).__name__
    if CLASSES.get(name) is not type(model):
        raise TypeError(f"{type(model).__module__}.{name} cannot be saved optimised; have: {', '.join(CLASSES)}")
    encoder = model.base_model.encoder
    assert isinstance(encoder, NativeEncoder)
    about = {
        "format": FORMAT,
        "byteorder": sys.byteorder,
        "class": name,
        "options": model.build_options,
        "dtype": dtype_name(model.dtype),
        "shape": asdict(encoder.weights.shape),
    }
    with replacing(folder, superseded=re.compile("|".join(map(re.escape, FILES)))) as new:
        write_sorted_json(new / "config.json", model.config.to_dict())
        write_sorted_json(new / "native.json", about)
        write_safetensors(new / "layers.safetensors", {"layers": encoder.weights.data})
        write_safetensors(new / "rest.safetensors", plain_tensors(model))


def plain_tensors(model: BertPreTrainedModel) -> dict[str, Tensor]:
    """Return what is outside the layers, under the names of a checkpoint; weights that were packed are unpacked."""
    state = {name: tensor.detach() for name, tensor in model.named_parameters()}
    for name, part in model.named_modules():
        if isinstance(part, FixedLinear):
            weight = part.unpack(part.weight)
            state[f"{name}.weight"] = weight.tensor() if isinstance(weight, TensorBytes) else weight
            if part.bias is not None:
                state[f"{name}.bias"] = part.bias
    if model.config.tie_word_embeddings:
        state.pop(DECODER, None)  # it is the word embeddings
    return state


def load_native(folder: Path) -> tuple[BertPreTrainedModel, str]:
    """Return a model that `save_native` wrote, its weights mapped from the files, and what its layers compute in.

    Raises:
        FileNotFoundError: the folder lacks a file.
        ValueError: it was written in another format, or by a machine of another byte order, or is damaged.
        NativeKernelsError: the kernels cannot be had on this machine.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} is no optimised model: it has no {', '.join(missing)}")
    about = json.loads((folder / "native.json").read_text(encoding="utf-8"))
    found = (about.get("format"), about.get("byteorder"))
    if found != (FORMAT, sys.byteorder):
        raise ValueError(
            f"{folder} has format {found[0]} of a {found[1]}-endian machine; this bertlite reads format {FORMAT},"
            f" {sys.byteorder}-endian: optimise the model again and save it"
        )
    config = BertConfig.from_json_file(folder / "config.json")
    without_layers = replace(config, num_hidden_layers=0, pruned_heads={}, pruned_neurons={})
    model = make_skeleton(CLASSES[about["class"]], without_layers, about["options"])
    state = read_weights(folder / "rest.safetensors")
    if config.tie_word_embeddings and DECODER in model.state_dict():
        state[DECODER] = state[f"{model.base_model_prefix}.embeddings.word_embeddings.weight"]
    assign_tensors_(model, state)
    model = with_fixed_linears(model, getattr(torch, about["dtype"]))
    sizes = about["shape"]
    shape = Shape(**{**sizes, "layers": tuple(LayerShape(**layer) for layer in sizes["layers"])})
    data = read_weights(folder / "layers.safetensors")["layers"]
    model.base_model.encoder = NativeEncoder(NativeWeights(shape, data), load_kernels())
    set_config(model, config)
    return model, shape.numbers
