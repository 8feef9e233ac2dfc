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
from typing import Any, cast

import torch

from bertlite.checkpoint.checks import NONFINITE, nonfinite_tensors
from bertlite.checkpoint.faults import raise_faults
from bertlite.checkpoint.folders import check_output, replacing
from bertlite.checkpoint.names import DECODER
from bertlite.checkpoint.reading import SAFETENSORS_DTYPES, State
from bertlite.checkpoint.saving import OPTIMISED, SUPERSEDED, bytes_of, lay_out, write_safetensors
from bertlite.checkpoint.skeleton import assign_tensors_, make_skeleton
from bertlite.config import POSITIONS, BertConfig, embeds_size, set_config
from bertlite.inference.checks import MIXED, ComputeDtype, missing_for_native
from bertlite.inference.native.conversion import run_natively_
from bertlite.inference.native.encoder import NativeEncoder
from bertlite.inference.native.linear import NativeLinear
from bertlite.inference.native.model import NativeBertModel
from bertlite.inference.native.weights import NativeWeights, from_int8_rows, int8_rows, stack_shape
from bertlite.models.base import BertModel, BertPreTrainedModel
from bertlite.models.heads import CLASSES
from bertlite.runtime.contents import DESCRIPTION, FORMATS, LAYERS, ROTATES, ROW_SCALES, STORED, WAY_OUT, WORDS
from bertlite.runtime.fields import Maybe, one_of
from bertlite.runtime.library import load_kernels
from bertlite.runtime.packed import FILE, checksum, open_packed
from bertlite.runtime.shapes import FLOATS
from bertlite.runtime.structs import Blocks
from bertlite.support.files import to_json

CHECKPOINT = re.compile(rf"{SUPERSEDED.pattern}|(pytorch|tf|flax)_model.*|config\.json")  # files of a checkpoint
LATER = {name: Maybe(DESCRIPTION[name]) for name in ("shape", "embeddings")}  # from format 6 on
RULES = {"class": one_of(*CLASSES), **DESCRIPTION, **LATER}  # for the description of a file


def save_native(model: BertPreTrainedModel, folder: Path) -> None:
    """Write the copy of a model that `native_copy` made to a folder, which is replaced in one step.

    Raises:
        TypeError: the model's class is not one of bertlite's own.
        ValueError: its config describes other layers, or the folder holds a checkpoint or a packed model.
        OSError: the folder cannot be written.
    """
    kind = BertModel if type(model) is NativeBertModel else type(model)
    name = kind.__name__
    if CLASSES.get(name) is not kind:
        raise TypeError(f"{kind.__module__}.{name} cannot be saved optimised; have: {', '.join(CLASSES)}")
    check_output(folder, re.compile(rf"{CHECKPOINT.pattern}|runtime\.json"), own=False)

    # Sizes are read back from the config, so a model whose layers differ from it could not be loaded again.
    encoder = cast(NativeEncoder, model.base_model.encoder)
    shape = encoder.weights.shape
    described = stack_shape(model.config, shape.numbers, shape.blocks)
    same = {name: getattr(shape, name) for name in ("rotated", "kept", "floats", "scaled")}  # which no config has
    if replace(described, **same) != shape:
        raise ValueError(f"this {name} cannot be saved: its config describes other layers")

    # Weights from before rows were rotated mean something else, and keep a format that says so.
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
    with replacing(folder, superseded=OPTIMISED) as new:
        write_packed(new / FILE, tensors, about)


def describe(model: BertPreTrainedModel) -> dict[str, Any]:
    """Return a description of a native copy's arithmetic, for a reader without modules."""
    body, config = model.base_model, model.config
    embeddings, encoder = body.embeddings, cast(NativeEncoder, body.encoder)
    pooler = {} if body.pooler is None else {"pooler": cast(NativeLinear, body.pooler.dense).activation}
    projection = "after" if config.projected_before_norm else "before"

    # The runtime has no modules: all that a module would know is written as values.
    return {
        "shape": {**asdict(encoder.weights.shape), "blocks": None},
        # How ids become vectors, which a family decides.
        "embeddings": {
            "epsilon": config.layer_norm_eps if embeddings.LayerNorm is None else embeddings.LayerNorm.eps,
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
    """Turn word embeddings back into floats, where they are 8-bit integers with scales."""
    for name in [name for name in state if name.endswith(ROW_SCALES)]:
        words = name.replace(ROW_SCALES, WORDS)
        state[words] = from_int8_rows(state[words], state.pop(name))


def load_native(folder: Path) -> tuple[BertPreTrainedModel, ComputeDtype, bool | None]:
    """Return a model that `save_native` wrote, the dtype to compute in, and skip_padding.

    Raises:
        FileNotFoundError: the folder lacks the file.
        ValueError: it has another format or byte order, its description or a tensor does not belong to the model that
            the config describes, or a tensor is not finite.
        NativeKernelsError: the kernels are not available on this machine.
    """
    path = folder / FILE
    with open_packed(path, RULES) as opened:
        about, numbers = opened.about, opened.about["numbers"]

        # Sizes follow from the config, and the file must have just these tensors.
        config = BertConfig.from_values(path, about["config"])
        model = skeleton_without_layers(path, about, config)
        shape = stack_shape(config, numbers, Blocks(*map(int, about["blocks"])))

        # No config has these: they come from the description, or have the values of formats before.
        described = about.get("shape", {"kept": (), "floats": FLOATS[0], "scaled": False})  # format 5 has none
        rotated, kept = about["format"] >= ROTATES, tuple(described["kept"])
        shape = replace(shape, rotated=rotated, kept=kept, floats=described["floats"], scaled=described["scaled"])

        # A file has no tied decoder, since it is the word embeddings.
        outside = {name: (STORED[numbers], tuple(x.shape)) for name, x in model.state_dict().items()}
        is_tied = config.tie_word_embeddings and outside.pop(DECODER, None) is not None
        file = opened.read(outside, shape)

    state = {name: torch.from_numpy(x).view(SAFETENSORS_DTYPES[file.dtypes[name]]) for name, x in file.tensors.items()}
    unpack_rows_(state)
    if is_tied:
        state[DECODER] = state[f"{model.base_model_prefix}.embeddings.{WORDS}"]
    weights = NativeWeights(shape, torch.from_numpy(file.layers))
    raise_faults(f"{path} {NONFINITE}", nonfinite_tensors({**state, **weights.tensors()}))
    assign_tensors_(model, state)
    set_config(model, config)

    # A config may ask for what the kernels do not have, as in a conversion.
    unsupported = missing_for_native(model)
    if unsupported is not None:
        raise ValueError(f"{path} holds no model that the native kernels run: {unsupported}")

    kernels = load_kernels(about.get("reproducible") is True)
    model = run_natively_(model, weights.in_blocks(kernels.blocks[numbers]), kernels)

    # At last the description is compared with the one that this model would have.
    described = json.loads(to_json(describe(model))) if about["format"] > FORMATS[0] else {}
    wrong = [f"{name} is {about.get(name)!r}, not {x!r}" for name, x in described.items() if about.get(name) != x]
    raise_faults(f"{path} does not fit its config: {WAY_OUT}", wrong)
    return model, MIXED if kept else getattr(torch, numbers), about.get("skip_padding")  # older files lack it


def skeleton_without_layers(path: Path, about: dict[str, Any], config: BertConfig) -> BertPreTrainedModel:
    """Return a model of a file's class without memory and layers; raise ValueError if it cannot be one."""
    without = replace(
        config, num_hidden_layers=0, pruned_heads={}, pruned_neurons={}, norm_first=False, local_layers=None
    )
    if POSITIONS[config.position_embedding_type].in_embeddings:  # an encoder's table of distances is with the layers
        without = replace(without, position_embedding_type="absolute")
    try:
        return make_skeleton(CLASSES[about["class"]], without, about["options"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} has options {about['options']!r}: {error}") from None
