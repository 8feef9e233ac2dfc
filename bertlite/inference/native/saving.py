"""Save a model with packed weights, and load it again without packing.

Everything is in one safetensors file.  The packed weights are one tensor of bytes.  Embeddings, pooler and head have
their names in a checkpoint.  The metadata hold the config and the rest of the description, as JSON.  If a processor's
kernels have other blocks, a copy is packed.  All sizes follow from the config; other sizes are refused.
"""

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from bertlite.checkpoint.checks import NONFINITE, find_mismatches, nonfinite_tensors
from bertlite.checkpoint.faults import raise_faults
from bertlite.checkpoint.files import WEIGHT_FILES
from bertlite.checkpoint.folders import replacing
from bertlite.checkpoint.names import DECODER
from bertlite.checkpoint.reading import SAFETENSORS_DTYPES, State
from bertlite.checkpoint.saving import SUPERSEDED, bytes_of, lay_out, write_safetensors
from bertlite.checkpoint.skeleton import assign_tensors_, make_skeleton
from bertlite.config import POSITIONS, BertConfig, embeds_size, set_config
from bertlite.inference.native.conversion import run_natively_
from bertlite.inference.native.encoder import NativeEncoder
from bertlite.inference.native.linear import NativeLinear
from bertlite.inference.native.model import NativeBertModel
from bertlite.inference.native.weights import NativeWeights, from_int8_rows, int8_rows, stack_shape
from bertlite.inference.support import MIXED, ComputeDtype, missing_for_native
from bertlite.models.base import BertModel, BertPreTrainedModel
from bertlite.models.heads import CLASSES
from bertlite.runtime.library import load_kernels
from bertlite.runtime.packed import (
    FILE,
    FORMATS,
    LAYERS,
    ROTATES,
    ROW_SCALES,
    WAY_OUT,
    WORDS,
    PackedFile,
    checksum,
    read_packed,
)
from bertlite.runtime.shapes import BLOCKS, FLOATS, Shape
from bertlite.runtime.structs import NUMBERS, Blocks
from bertlite.support.files import to_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

REPLACED = re.compile(rf"{SUPERSEDED.pattern}|config\.json")  # files that a save removes: a checkpoint goes whole


def save_native(model: BertPreTrainedModel, folder: Path) -> None:
    """Write the copy of a model that `native_copy` made to a folder, which is replaced in one step.

    A checkpoint that `save_pretrained` wrote there is replaced.

    Raises:
        TypeError: the model's class is not one of bertlite's own.
        ValueError: its config describes other layers, or the folder holds weights of another format, whose config
            would be removed.
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
    shape = encoder.weights.shape
    described = stack_shape(model.config, shape.numbers, shape.blocks)
    if replace(described, rotated=shape.rotated, kept=shape.kept, floats=shape.floats) != shape:
        raise ValueError(f"this {name} cannot be saved: its config describes other layers")
    about = {
        "format": FORMATS[-1] if shape.rotated else ROTATES - 1,
        "byteorder": sys.byteorder,
        "class": name,
        "options": model.build_options,
        "skip_padding": encoder.skip_padding,
        "numbers": shape.numbers,
        "blocks": shape.blocks,
        "reproducible": encoder.kernels.reproducible,
        "config": model.config.to_dict(),
        **describe(model),
    }
    tensors = {LAYERS: encoder.weights.data, **plain_tensors(model)}
    if shape.numbers == "int8":
        pack_rows_(tensors)
    with replacing(folder, superseded=REPLACED) as new:
        write_packed(new / FILE, tensors, about)


def describe(model: BertPreTrainedModel) -> dict[str, Any]:
    """Return a description of a native copy's arithmetic, for a reader without modules."""
    body, config = model.base_model, model.config
    embeddings, encoder = body.embeddings, cast(NativeEncoder, body.encoder)
    pooler = {} if body.pooler is None else {"pooler": cast(NativeLinear, body.pooler.dense).activation}
    projection = "after" if config.projected_before_norm else "before"
    return {
        "shape": {**asdict(encoder.weights.shape), "blocks": None},
        "embeddings": {
            "epsilon": embeddings.LayerNorm.eps,
            "absolute": embeddings.adds_positions,
            "positions": config.max_position_embeddings,
            "padding_has_position": config.padding_has_position,
            "skips_padding": config.positions_skip_padding,
            "padding": config.pad_token_id,
            "norm": None if embeds_size(config) == config.hidden_size else projection,
        },
        **pooler,
    }


def write_packed(path: Path, tensors: State, about: dict[str, Any]) -> None:
    """Write a file of packed weights with its checksum."""
    metadata = {"native": to_json(about)}
    header, ordered = lay_out(tensors, **metadata)
    found = checksum(json.loads(header[8:]), map(bytes_of, ordered))
    write_safetensors(path, tensors, **metadata, crc32=f"{found:08x}")


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


def pack_rows_(state: State) -> None:
    """Turn word embeddings into 8-bit integers with scales, unless they are others, as from a file before format 7."""
    for name in [name for name in state if name.endswith(WORDS)]:
        rows, scales = int8_rows(state[name])
        if torch.equal(from_int8_rows(rows, scales), state[name]):
            state |= {name: rows, name.replace(WORDS, ROW_SCALES): scales}


def unpack_rows_(state: State) -> None:
    """Turn word embeddings back into floats, where they are 8-bit integers with scales that fit them."""
    for name in [name for name in state if name.endswith(ROW_SCALES)]:
        words = name.replace(ROW_SCALES, WORDS)
        if words in state and state[name].shape == state[words].shape[:1]:
            state[words] = from_int8_rows(state[words], state.pop(name))


def load_native(folder: Path) -> tuple[BertPreTrainedModel, ComputeDtype, bool | None]:
    """Return a model that `save_native` wrote, the dtype to compute in, and skip_padding.

    Raises:
        FileNotFoundError: the folder lacks the file.
        ValueError: it has another format or byte order, a tensor does not belong to the model that the config
            describes, or a tensor is not finite.
        NativeKernelsError: the kernels are not available on this machine.
    """
    path = folder / FILE
    file = read_packed(path)
    about = check_about(path, file.about)
    numbers: str = about["numbers"]
    config = BertConfig.from_values(path, about["config"])
    without_layers = replace(config, num_hidden_layers=0, pruned_heads={}, pruned_neurons={})
    if POSITIONS[config.position_embedding_type].in_embeddings:  # an encoder's table of distances is with the layers
        without_layers = replace(without_layers, position_embedding_type="absolute")
    try:
        model = make_skeleton(CLASSES[about["class"]], without_layers, about["options"])
    except TypeError as error:
        raise ValueError(f"{path} has options {about['options']!r}: {error}") from None
    state = {name: as_tensor(x, file.dtypes[name]) for name, x in file.tensors.items()}
    floats = torch.float32 if numbers == "int8" else getattr(torch, numbers)
    unpack_rows_(state)
    check_rest_(state, path, model, floats)
    assign_tensors_(model, state)
    set_config(model, config)
    unsupported = missing_for_native(model, getattr(torch, numbers))
    if unsupported is not None:
        raise ValueError(f"{path} holds no model that the native kernels run: {unsupported}")
    shape = stack_shape(config, numbers, Blocks(*map(int, about["blocks"])))
    kept, kind = layers_in_floats(about)
    shape = replace(shape, rotated=about["format"] >= ROTATES, kept=kept, floats=kind)
    kernels, weights = load_kernels(about.get("reproducible") is True), packed_weights(file, path, shape)
    model = run_natively_(model, weights.in_blocks(kernels.blocks(numbers)), kernels)
    described = json.loads(to_json(describe(model))) if about["format"] > FORMATS[0] else {}
    wrong = [f"{name} is {about.get(name)!r}, not {x!r}" for name, x in described.items() if about.get(name) != x]
    raise_faults(f"{path} does not fit its config: {WAY_OUT}", wrong)
    return model, MIXED if kept else getattr(torch, numbers), about.get("skip_padding")  # older files lack it


def as_tensor(array: "NDArray[Any]", dtype: str) -> Tensor:
    """Return an array of a file as a tensor with its dtype."""
    return torch.from_numpy(array).view(SAFETENSORS_DTYPES[dtype])


def check_about(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return a file's description of its model; raise ValueError unless it describes one of bertlite's."""
    faults = [
        f"{name} is {about.get(name)!r}; have: {', '.join(map(str, known))}"
        for name, known in (("class", CLASSES), ("numbers", NUMBERS), ("blocks", [[*each] for each in BLOCKS]))
        if about.get(name) not in [*known]
    ]
    faults += [f"{name} is {about.get(name)!r}" for name in ("options", "config") if type(about.get(name)) is not dict]
    kept, kind = layers_in_floats(about)
    if kind not in FLOATS or any(type(i) is not int for i in kept) or (kept and about.get("numbers") != "int8"):
        faults.append(f"shape has layers {[*kept]} in {kind!r}, within {about.get('numbers')!r}")
    raise_faults(f"{path} describes no model: {WAY_OUT}", faults)
    return about


def layers_in_floats(about: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Return the layers of a mixed stack that are in floats, and their dtype, as a file has them."""
    shape = about.get("shape")
    known = shape if type(shape) is dict else {}  # format 5 has none
    kept = known.get("kept", [])
    return tuple(kept) if type(kept) is list else (kept,), known.get("floats", FLOATS[0])


def check_rest_(state: State, path: Path, model: BertPreTrainedModel, floats: torch.dtype) -> None:
    """Add a tied decoder to the tensors of a model without layers; raise ValueError unless they fit and are finite."""
    wanted = model.state_dict()
    if model.config.tie_word_embeddings and DECODER in wanted:
        words = f"{model.base_model_prefix}.embeddings.word_embeddings.weight"
        state |= {DECODER: state[words]} if words in state else {}
    faults = find_mismatches(state, wanted, model.config, absent=set())
    faults = faults or [f"{name} is unknown" for name in state.keys() - wanted.keys()]
    faults += [f"{name} is {t.dtype}, not {floats}" for name, t in state.items() if t.dtype != floats]
    raise_faults(f"{path} does not fit its config: {WAY_OUT}", faults)
    raise_faults(f"{path} {NONFINITE}", nonfinite_tensors(state))


def packed_weights(file: PackedFile, path: Path, shape: Shape) -> NativeWeights:
    """Return packed weights; raise ValueError if they do not fit a stack of this shape, or are not finite."""
    dtype, data = file.dtypes.get(LAYERS), torch.from_numpy(file.layers)
    if dtype != "U8":
        raise ValueError(f"{path} holds {dtype or 'nothing'} as layers, not their packed bytes: {WAY_OUT}")
    try:
        weights = NativeWeights(shape, data)
    except ValueError as error:
        raise ValueError(f"{path} does not fit its config: {error}") from None
    raise_faults(f"{path} {NONFINITE}", nonfinite_tensors(weights.tensors()))
    return weights
