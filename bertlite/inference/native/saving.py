"""Save a model with packed weights, and map it again without packing.

A folder holds config.json, native.json (what the files are), layers.safetensors (the packed weights, one tensor of
bytes) and rest.safetensors (embeddings, pooler and head).  Packed weights are the same for every x86-64 processor.

The files belong together: native.json repeats the config and holds a hash of the weights, and both weights files hold
a hash of native.json.  All sizes follow from the config, and tensors that do not fit it are refused.
"""

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bertlite.checkpoint.checks import NONFINITE, find_mismatches, nonfinite_tensors
from bertlite.checkpoint.faults import raise_faults
from bertlite.checkpoint.files import WEIGHT_FILES
from bertlite.checkpoint.folders import replacing
from bertlite.checkpoint.names import DECODER
from bertlite.checkpoint.reading import State, read_metadata, read_weights
from bertlite.checkpoint.saving import SUPERSEDED, bytes_of, write_safetensors, write_sorted_json
from bertlite.checkpoint.skeleton import assign_tensors_, make_skeleton
from bertlite.config import BertConfig, read_json_object, set_config
from bertlite.heads.models import CLASSES
from bertlite.inference.native.calls import NUMBERS
from bertlite.inference.native.conversion import run_natively_
from bertlite.inference.native.encoder import NativeEncoder
from bertlite.inference.native.library import load_kernels
from bertlite.inference.native.linear import NativeLinear
from bertlite.inference.native.model import NativeBertModel
from bertlite.inference.native.weights import NativeWeights, Shape
from bertlite.inference.support import missing_for_native
from bertlite.model import BertModel, BertPreTrainedModel
from bertlite.records import sha256

FORMAT = 2  # of the folder and of the packed weights in it
FILES = ("config.json", "native.json", "layers.safetensors", "rest.safetensors")
WAY_OUT = "optimise the model again and save it"


def save_native(model: BertPreTrainedModel, folder: Path) -> None:
    """Write the copy of a model that `native_copy` made to a folder, which is replaced in one step.

    A checkpoint that `save_pretrained` wrote there is replaced.

    Raises:
        TypeError: the model's class is not one of bertlite's own.
        ValueError: its config describes other layers, or the folder holds weights of another format, which would be
            read with this model's config.
        OSError: the folder cannot be written.
    """
    kind = BertModel if type(model) is NativeBertModel else type(model)
    name = kind.__name__
    if CLASSES.get(name) is not kind:
        raise TypeError(f"{kind.__module__}.{name} cannot be saved optimised; have: {', '.join(CLASSES)}")
    others = [file for file in WEIGHT_FILES if not SUPERSEDED.fullmatch(file) and (folder / file).exists()]
    if others:
        raise ValueError(f"{folder} holds a checkpoint, {others[0]}: save the optimised model to a folder of its own")
    encoder = model.base_model.encoder
    assert isinstance(encoder, NativeEncoder)
    if encoder.weights.shape != Shape.of(model.config, encoder.weights.shape.numbers):
        raise ValueError(f"this {name} cannot be saved: its layers are not those that its config describes")
    rest, digest = plain_tensors(model), hashlib.sha256()
    for tensor in (encoder.weights.data, *rest.values()):
        digest.update(bytes_of(tensor))
    about = {
        "format": FORMAT,
        "byteorder": sys.byteorder,
        "class": name,
        "options": model.build_options,
        "numbers": encoder.weights.shape.numbers,
        "config": model.config.to_dict(),
        "weights": digest.hexdigest(),
    }
    with replacing(folder, superseded=SUPERSEDED) as new:
        write_sorted_json(new / "config.json", model.config.to_dict())
        write_sorted_json(new / "native.json", about)
        native = sha256(new / "native.json")
        write_safetensors(new / "layers.safetensors", {"layers": encoder.weights.data}, native=native)
        write_safetensors(new / "rest.safetensors", rest, native=native)


def plain_tensors(model: BertPreTrainedModel) -> State:
    """Return the tensors outside the layers, unpacked, by their names in a checkpoint."""
    state: State = {name: tensor.detach() for name, tensor in model.named_parameters()}
    for name, part in model.named_modules():
        if isinstance(part, NativeLinear):
            state[f"{name}.weight"] = part.unpack().contiguous()
            if part.bias is not None:
                state[f"{name}.bias"] = part.bias
    if model.config.tie_word_embeddings:
        state.pop(DECODER, None)  # it is the word embeddings
    return state


def load_native(folder: Path) -> tuple[BertPreTrainedModel, str]:
    """Return a model that `save_native` wrote, its weights mapped from the files, and the dtype of its layers.

    Raises:
        FileNotFoundError: the folder lacks a file.
        ValueError: it was written in another format, or by a machine of another byte order, or its files do not
            belong together, or a tensor is not one of the model that the config describes, or not finite.
        NativeKernelsError: the kernels are not available on this machine.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} is not an optimised model: it has no {', '.join(missing)}")
    about = read_json_object(folder / "native.json")
    check_about(folder, about)
    config = BertConfig.from_json_file(folder / "config.json")
    numbers: str = about["numbers"]
    floats = torch.float32 if numbers == "int8" else getattr(torch, numbers)
    without_layers = replace(config, num_hidden_layers=0, pruned_heads={}, pruned_neurons={})
    try:
        model = make_skeleton(CLASSES[about["class"]], without_layers, about["options"])
    except TypeError as error:
        raise ValueError(f"{folder / 'native.json'}: options are {about['options']!r}: {error}") from None
    assign_tensors_(model, read_rest(folder / "rest.safetensors", model, floats))
    set_config(model, config)
    unsupported = missing_for_native(model, getattr(torch, numbers))
    if unsupported is not None:
        raise ValueError(f"{folder} holds no model that the native kernels run: {unsupported}")
    weights = read_layers(folder / "layers.safetensors", Shape.of(config, numbers))
    return run_natively_(model, weights, load_kernels()), numbers


def check_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Raise ValueError unless native.json has this format and belongs to the other files."""
    found = (about.get("format"), about.get("byteorder"))
    if found != (FORMAT, sys.byteorder):
        raise ValueError(
            f"{folder} has format {found[0]!r} of a {found[1]}-endian machine; this bertlite reads format {FORMAT},"
            f" {sys.byteorder}-endian: {WAY_OUT}"
        )
    faults = [
        f"{name} is {about.get(name)!r}; have: {', '.join(known)}"
        for name, known in (("class", CLASSES), ("numbers", NUMBERS))
        if about.get(name) not in [*known]
    ]
    raise_faults(f"{folder / 'native.json'} describes no model: {WAY_OUT}", faults)
    own, saved = read_json_object(folder / "config.json"), about.get("config")
    saved = saved if isinstance(saved, dict) else {}
    names = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
    faults = [f"{name} is {own.get(name)!r}; in native.json it is {saved.get(name)!r}" for name in names]
    raise_faults(f"{folder / 'config.json'} is not the config of the packed weights: {WAY_OUT}", faults)
    for path in (folder / "layers.safetensors", folder / "rest.safetensors"):
        if read_metadata(path).get("native") != sha256(folder / "native.json"):
            raise ValueError(f"{path} was saved with another native.json than the one beside it: {WAY_OUT}")


def read_rest(path: Path, model: BertPreTrainedModel, floats: torch.dtype) -> State:
    """Return the tensors of a model without layers; ValueError unless they are its own, in this dtype and finite."""
    state, wanted = read_weights(path), model.state_dict()
    if model.config.tie_word_embeddings and DECODER in wanted:
        words = f"{model.base_model_prefix}.embeddings.word_embeddings.weight"
        state |= {DECODER: state[words]} if words in state else {}
    faults = find_mismatches(state, wanted, model.config, absent=set())
    faults = faults or [f"{name} is unknown" for name in state.keys() - wanted.keys()]
    faults += [f"{name} is {t.dtype}, not {floats}" for name, t in state.items() if t.dtype != floats]
    raise_faults(f"{path} does not fit config.json: {WAY_OUT}", faults)
    raise_faults(f"{path} {NONFINITE}", nonfinite_tensors(state))
    return state


def read_layers(path: Path, shape: Shape) -> NativeWeights:
    """Return packed weights; ValueError where they are not those of a stack of this shape, or not finite."""
    state = read_weights(path)
    data = state.get("layers")
    if list(state) != ["layers"] or data is None or data.dtype != torch.uint8 or data.dim() != 1:
        found = ", ".join(f"{name} {tuple(t.shape)} of {t.dtype}" for name, t in state.items())
        raise ValueError(f"{path} holds {found or 'nothing'}, not packed layers, which are bytes: {WAY_OUT}")
    try:
        weights = NativeWeights(shape, data)
    except ValueError as error:
        raise ValueError(f"{path} does not fit config.json: {error}") from None
    raise_faults(f"{path} {NONFINITE}", nonfinite_tensors(weights.tensors()))
    return weights
