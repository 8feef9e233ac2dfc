"""Check a folder for faults that transformers ignores, before transformers reads it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import transformers

from bertlite.checkpoint.checks import dtype_faults, implausible_sizes, pruning_faults
from bertlite.checkpoint.faults import raise_faults
from bertlite.checkpoint.files import ADAPTER, Folder, Source
from bertlite.checkpoint.names import WRAPPER_PREFIXES, current_name
from bertlite.checkpoint.reading import read_tensors
from bertlite.checkpoint.skeleton import make_skeleton
from bertlite.config import PRUNED, SIZES, BertConfig, check_is_bert
from bertlite.models.base import BertModel


def check_folder(source: Any, options: Mapping[str, Any], is_bert: bool) -> None:
    """Raise ValueError if a folder's config is not a BERT's, or its weights are damaged, inconsistent or unsafe.

    Tensors are not read.  Checkpoints on the hub (but see `check_hub_config`), a state_dict, other formats and folders
    that lack a file are left to transformers.

    Args:
        source: the first argument of from_pretrained.
        options: its other arguments.
        is_bert: whether the model is one of ours; a user's own class may have another config.

    Raises:
        ValueError: the message names the file and its faults.
    """
    if not isinstance(source, str | os.PathLike) or not Path(source).is_dir():
        return

    # These are read by transformers in ways of its own.
    if options.get("state_dict") is not None or options.get("gguf_file") is not None:
        return
    if (Path(source) / ADAPTER).exists():
        return  # transformers reads the model that the adapter names
    try:
        files = Source(source, subfolder=options.get("subfolder"), variant=options.get("variant")).files
    except FileNotFoundError:
        return

    # The config as transformers will see it, with the sizes that the call changes.
    config = options.get("config")
    given = {name: options[name] for name in (*SIZES, *PRUNED) if name in options}
    with nullcontext() if is_bert else suppress(ValueError):
        if config is None:
            config = BertConfig.from_json_file(files.config, **given)
        elif not isinstance(config, str | os.PathLike):
            config = BertConfig.from_dict(config.to_dict(), **given)

    if options.get("use_safetensors") is False and "safetensors" in files.weights.name:
        return  # transformers reads another file
    state = read_tensors(files)

    # transformers drops names that it does not know, and goes on with random weights.
    wrapped = [name for name in state if name.startswith(WRAPPER_PREFIXES)]
    if wrapped and not options.get("key_mapping"):
        raise ValueError(
            f"{files.weights} holds {wrapped[0]}, a wrapper's name, which transformers would initialise at random:"
            " load it with bertlite, which knows such names, and save it"
        )

    names = [(current_name(name, ""), name) for name in state]
    twice = [f"{new} is there twice, once as {old}" for new, old in names if new != old and new in state]
    if not isinstance(config, str | os.PathLike | None):
        twice += implausible_sizes(state, config)
    raise_faults(f"{files.weights} does not fit {files.config.name}:", twice)

    # Sizes and dtypes must fit the pruned model that the config describes.
    if isinstance(config, BertConfig):  # otherwise the caller gave another config
        wanted = make_skeleton(BertModel, config, {"add_pooling_layer": False}).state_dict()
        state = {new: state[old] for new, old in names if new in wanted}
        wrong = {name: tensor.shape for name, tensor in state.items() if tensor.shape != wanted[name].shape}
        faults = pruning_faults(wrong, wanted, config)
        if "quantization_config" not in {*config.extra, *options}:
            faults += dtype_faults(state, wanted)
        raise_faults(f"{files.weights} does not fit {files.config.name}:", faults)


def check_hub_config(source: Any, options: Mapping[str, Any]) -> None:
    """Raise ValueError for another family on the hub, which transformers would initialise at random."""
    known = options.get("config") is not None or options.get("gguf_file") is not None
    if isinstance(source, str | os.PathLike) and not Path(source).is_dir() and not known:
        with suppress(OSError):  # transformers' own error follows
            check_is_bert(os.fspath(source), transformers.BertConfig.get_config_dict(source, **options)[0])


@contextmanager
def says_if_missing(source: str) -> Iterator[None]:
    """Let transformers load a checkpoint; if it is missing, say so before transformers' own message.

    Raises:
        FileNotFoundError: there is no such file or folder, and the hub did not return it.
    """
    place = Source(source).place
    try:
        yield
    except OSError as error:
        if isinstance(place, Folder):
            raise
        message = str(error).partition("\n")[0]
        raise FileNotFoundError(f"there is no folder {source}, and the hub did not return it: {message}") from error
