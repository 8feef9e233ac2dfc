"""Save a model: config.json and safetensors, in a folder that is replaced in one step."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertlite.checkpoint.checks import find_mismatches
from bertlite.checkpoint.faults import raise_faults
from bertlite.checkpoint.folders import check_output, replacing
from bertlite.checkpoint.names import DECODER, DECODER_BIAS, LoadableModel, fill_shared_names_
from bertlite.checkpoint.reading import ALIGNMENT, SAFETENSORS_DTYPES, State, is_plain_tensor
from bertlite.checkpoint.skeleton import make_skeleton
from bertlite.support.contexts import own_context
from bertlite.support.files import naming, to_json

SUPERSEDED = re.compile(  # files of an earlier save, which a save removes
    r"model(\.[\w-]+|-\d+-of-\d+)*\.safetensors(\.index(\.[\w-]+)?\.json)?"
)
CODE_MODULE = "modeling_bertlite"  # through which transformers loads a folder with trust_remote_code
OPTIMISED = re.compile(r"(runtime|native)\.json|(native|layers|rest|after)\.safetensors")  # files of optimised models


@own_context()
def save_model(model: LoadableModel, folder: str | os.PathLike[str]) -> None:
    """Save a model; see `BertPreTrainedModel.save_pretrained`.

    Raises:
        ValueError: the model could not be loaded again: its tensors are not plain, have no values, or do not fit its
            config; or the folder holds an optimised or packed model.
        OSError: the folder cannot be written.
    """
    check_output(folder, OPTIMISED, own=False)
    state = tensors_to_save(model)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": dtype_name(model.dtype)}
    config.pop("torch_dtype", None)  # its name in transformers before 4.56
    code = Path(folder).expanduser() / f"{CODE_MODULE}.py"
    if CODE_MODULE not in str(config.get("auto_map")) or not code.exists():
        config.pop("auto_map", None)  # it names code that is not in the folder, or another model's
    with replacing(Path(folder), superseded=SUPERSEDED) as new:
        write_sorted_json(new / "config.json", config)
        write_safetensors(new / "model.safetensors", state)


def tensors_to_save(model: LoadableModel) -> State:
    """Return the model's tensors under the names that transformers keeps; shared tensors have one name.

    An untied decoder's bias is kept under both its names: transformers 5 reads two biases, transformers 4 one.
    """
    title = f"this {type(model).__name__} cannot be saved:"
    state: State = dict(model.state_dict())
    odd = {name: type(t).__name__ for name, t in state.items() if not is_plain_tensor(t)}
    raise_faults(title, [f"{name} is a {kind}, not a plain tensor" for name, kind in odd.items()])
    raise_faults(title, [f"{name} is on the meta device: it has no values" for name, t in state.items() if t.is_meta])
    wanted = make_skeleton(type(model), model.config, model.build_options).state_dict()
    faults = fill_shared_names_(state, "", model) + find_mismatches(state, wanted, model.config, absent=set())
    raise_faults(f"{title} it does not fit its own config (merge adapters first, and prune with prune_heads)", faults)
    twice = {DECODER_BIAS, DECODER} if model.config.tie_word_embeddings else set()
    return {name: t.clone() if name == DECODER_BIAS else t for name, t in state.items() if name not in twice}


def dtype_name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def file_size(model: LoadableModel) -> int:
    """Return the bytes of the file in which `save_model` writes a model's weights."""
    state = tensors_to_save(model)
    return len(lay_out(state)[0]) + sum(tensor.nbytes for tensor in state.values())


def write_safetensors(path: Path, tensors: State, **metadata: str) -> None:
    """Write a safetensors file whose matrices can be mapped without a copy."""
    header, ordered = lay_out(tensors, **metadata)
    with naming(path), path.open("wb") as file:
        file.write(header)
        for tensor in ordered:
            file.write(bytes_of(tensor))


def lay_out(tensors: State, **metadata: str) -> tuple[bytes, list[Tensor]]:
    """Return the header of a safetensors file, and its tensors in their order.

    The header is padded, and tensors whose size is a multiple of ALIGNMENT bytes come first.  So each of these begins
    at such a multiple; safetensors' own writer aligns only to 8 bytes.  Format:
    https://github.com/huggingface/safetensors#format
    """
    codes = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    ordered = sorted(tensors.items(), key=lambda item: item[1].nbytes % ALIGNMENT != 0)  # stable: else as given
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, [tensor for _, tensor in ordered]


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def write_sorted_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file in transformers' format; not atomic, since the folder is replaced in one step."""
    path.write_text(to_json(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
