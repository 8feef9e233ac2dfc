"""Files to copy with a model from one checkpoint to another: the tokenizer and sentence-transformers' modules."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from bertlite.checkpoint.files import Folder, Repository, Source, locate
from bertlite.config import BertConfig
from bertlite.support.records import to_json
from bertlite.tokenizer import BertTokenizer

Place = Folder | Repository
MODULES, TRANSFORMER = "modules.json", "Transformer"
MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")  # of one module
SENTENCE_FILES = ("sentence_bert_config.json", "config_sentence_transformers.json")


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


def carry_modules(source: Source, folder: Path) -> bool:
    """Write sentence-transformers' modules of a checkpoint, such as its pooling, into a folder with its weights.

    Returns:
        Whether the checkpoint has any.

    Raises:
        ValueError: modules.json is damaged, or names a folder outside the checkpoint.
    """
    place = locate(source)
    path = place.get(MODULES)
    if path is None:
        return False
    try:
        modules: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        kinds = [(module["type"].rpartition(".")[2], PurePosixPath(module["path"])) for module in modules]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}): fetch it again") from None
    outside = [inner for _, inner in kinds if inner.is_absolute() or ".." in inner.parts]
    if outside:
        raise ValueError(f"{path} points outside its folder, to {str(outside[0])!r}: do not trust this checkpoint")
    for module, (kind, inner) in zip(modules, kinds, strict=True):
        if kind == TRANSFORMER:
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
