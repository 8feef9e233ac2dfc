"""Files to copy with a model from one checkpoint to another: the tokenizer and sentence-transformers' modules."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from bertlite.checkpoint.families import read_config
from bertlite.checkpoint.files import Folder, Repository, Source, locate
from bertlite.config import BertConfig, read_json_object
from bertlite.inspection import class_of
from bertlite.models.base import BertModel, BertPreTrainedModel
from bertlite.support.records import to_json
from bertlite.tokenizer import BertTokenizer

Place = Folder | Repository
MODULES, TRANSFORMER, POOLING = "modules.json", "Transformer", "Pooling"
MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")  # of one module
SENTENCE_FILES = ("sentence_bert_config.json", "config_sentence_transformers.json")
LEGACY_POOLINGS = {  # keys of 1_Pooling/config.json in sentence-transformers before it had one `pooling_mode`
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def carry_tokenizer(source: Source, folder: Path, config: BertConfig, tokenizer: BertTokenizer | None = None) -> None:
    """Write a checkpoint's tokenizer into a folder, without truncation or padding, with its `model_max_length`.

    Args:
        tokenizer: the one to write in its place.

    Raises:
        FileNotFoundError: the checkpoint has no tokenizer.json or vocab.txt.
        ValueError: a file is damaged, or part of the tokenizer is not in these files.
    """
    hub: dict[str, Any] = {name: getattr(source, name) for name in ("revision", "cache_dir", "token", "subfolder")}
    if tokenizer is None:
        tokenizer = BertTokenizer.from_pretrained(source.name, **hub, local_files_only=source.local_files_only)
    tokenizer.model_max_length = min(tokenizer.model_max_length, config.max_position_embeddings)
    tokenizer.save_pretrained(folder)


def class_for(source: Source) -> type[BertPreTrainedModel]:
    """Return the class that a checkpoint is for: BertModel if sentence-transformers pools its states to vectors, else
    that of config.json, as of a CrossEncoder."""
    return class_of(read_config(source)) if read_pooling(locate(source)) is None else BertModel


def carry_modules(source: Source, folder: Path, cls: type[BertPreTrainedModel]) -> bool:
    """Write sentence-transformers' modules of a checkpoint, such as its pooling, beside weights of a class.

    Returns:
        Whether they were written: the checkpoint has some, and they are for models of this class.

    Raises:
        ValueError: modules.json is damaged, or names a folder outside the checkpoint.
    """
    place = locate(source)
    modules = read_modules(place)
    if not modules or cls is not class_for(source):
        return False
    kinds = [(last_name(module["type"]), PurePosixPath(module["path"])) for module in modules]
    for module, (kind, inner) in zip(modules, kinds, strict=True):
        if kind.endswith(TRANSFORMER):  # MLMTransformer too
            copy_files(place, (str(inner / SENTENCE_FILES[0]),), folder, flat=True)
            module["path"] = ""  # where our weights are
        else:
            copy_module(place, inner, folder / inner)
    copy_files(place, SENTENCE_FILES[1:], folder)
    (folder / MODULES).write_text(to_json(modules, indent=2) + "\n", encoding="utf-8")
    return True


def copy_module(place: Place, inner: PurePosixPath, target: Path) -> None:
    """Copy the folder of one module; on the hub, try the known names, as its files are not listed."""
    target.mkdir(parents=True, exist_ok=True)
    if isinstance(place, Folder):
        if (place.path / inner).is_dir():
            shutil.copytree(place.path / inner, target, dirs_exist_ok=True)
        return
    copy_files(place, (str(inner / name) for name in MODULE_FILES), target, flat=True)


def copy_files(place: Place, names: "Iterator[str] | tuple[str, ...]", folder: Path, flat: bool = False) -> None:
    """Copy those files that exist; `flat` drops their folders from the copy's path."""
    for name in names:
        path = place.get(name)
        if path is not None:
            shutil.copyfile(path, folder / (PurePosixPath(name).name if flat else name))


# Modules of sentence-transformers


def read_modules(place: Place) -> list[dict[str, Any]]:
    """Read the modules of sentence-transformers, each with its "type" and "path"; none without a modules.json.

    Raises:
        ValueError: modules.json is damaged, or names a folder outside the checkpoint.
    """
    path = place.get(MODULES)
    if path is None:
        return []
    try:
        modules: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        folders = [PurePosixPath(module["path"]) for module in modules if module["type"].strip()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}): fetch it again") from None
    if outside := [inner for inner in folders if inner.is_absolute() or ".." in inner.parts]:
        raise ValueError(f"{path} points outside its folder, to {str(outside[0])!r}: do not trust this checkpoint")
    return modules


def read_pooling(place: Place) -> str | None:
    """Return how a checkpoint of sentence-transformers pools, such as "mean" or "cls+max"; None if it does not."""
    folders = [module["path"] for module in read_modules(place) if last_name(module["type"]) == POOLING]
    if not folders:
        return None
    path = place.get(f"{folders[0]}/config.json")
    values = {} if path is None else read_json_object(path)
    modes = values.get("pooling_mode") or [name for key, name in LEGACY_POOLINGS.items() if values.get(key)]
    return modes if isinstance(modes, str) else "+".join(modes)


def last_name(name: str) -> str:
    return name.rpartition(".")[2]
