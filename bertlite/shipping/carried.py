"""Files that go with a model from one checkpoint to another: the tokenizer, and sentence-transformers' modules."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from bertlite.checkpoint.files import Folder, Repository, Source, first_existing, locate
from bertlite.checkpoint.saving import write_sorted_json
from bertlite.config import BertConfig
from bertlite.records import to_json
from bertlite.tokenizer import BertTokenizer
from bertlite.tokenizer.files import ROLES, read_json

Place = Folder | Repository
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BESIDE = ("vocab.txt", "special_tokens_map.json", "added_tokens.json")  # what older tokenizers need
LOCAL = ("name_or_path", "_name_or_path", "tokenizer_file", "special_tokens_map_file")  # paths of another machine
SPECIAL = dict(zip(ROLES, ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]"), strict=True))
MODULES, TRANSFORMER = "modules.json", "Transformer"
MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")  # of one module
SENTENCE_FILES = ("sentence_bert_config.json", "config_sentence_transformers.json")


def carry_tokenizer(source: Source, folder: Path, config: BertConfig) -> None:
    """Write a checkpoint's tokenizer into a folder, without truncation or padding, with its `model_max_length`.

    Raises:
        FileNotFoundError: the checkpoint has no tokenizer.json or vocab.txt.
        ValueError: a file is damaged.
    """
    place = locate(source)
    found = first_existing(place, (TOKENIZER, "vocab.txt"))
    if found.name == TOKENIZER:
        values = {**read_json(found), "truncation": None, "padding": None}
        text = to_json(values, indent=2, ensure_ascii=False) + "\n"
        (folder / TOKENIZER).write_text(text, encoding="utf-8")
        copy_files(place, BESIDE, folder)
        stated = place.get(TOKENIZER_CONFIG)
        settings = describe_tokenizer(values) if stated is None else read_json(stated)
    else:
        hub: dict[str, Any] = {name: getattr(source, name) for name in ("revision", "cache_dir", "token", "subfolder")}
        hub["local_files_only"] = source.local_files_only
        BertTokenizer.from_pretrained(source.name, **hub).save_pretrained(folder)
        settings = read_json(folder / TOKENIZER_CONFIG)
    limits = [settings.get(name) for name in ("model_max_length", "max_len")]
    longest = min(int(x) for x in (*limits, config.max_position_embeddings) if x is not None)
    settings = {name: value for name, value in settings.items() if name not in (*LOCAL, "max_len")}
    write_sorted_json(folder / TOKENIZER_CONFIG, {**settings, "model_max_length": longest})


def describe_tokenizer(values: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer_config.json for the content of a tokenizer.json that has none beside it."""
    model = values.get("model") or {}
    vocab, added = model.get("vocab"), values.get("added_tokens") or ()
    words = {*(vocab if isinstance(vocab, dict) else ()), *(token["content"] for token in added)}
    kind = "BertTokenizer" if model.get("type") == "WordPiece" else "PreTrainedTokenizerFast"
    normalizer = values.get("normalizer") or {}
    lower = {"do_lower_case": normalizer["lowercase"]} if "lowercase" in normalizer else {}
    return {"tokenizer_class": kind, **lower, **{role: token for role, token in SPECIAL.items() if token in words}}


def carry_modules(source: Source, folder: Path) -> bool:
    """Write sentence-transformers' modules of a checkpoint, such as its pooling, into a folder with its weights.

    Returns:
        Whether the checkpoint has any.

    Raises:
        ValueError: modules.json is damaged, or names a place outside the checkpoint.
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
    """Copy the folder of one module; the hub does not list a repository's, so there the known names are tried."""
    target.mkdir(parents=True, exist_ok=True)
    if isinstance(place, Folder):
        if (place.path / inner).is_dir():
            shutil.copytree(place.path / inner, target, dirs_exist_ok=True)
        return
    copy_files(place, (str(inner / name) for name in MODULE_FILES), target, flat=True)


def copy_files(place: Place, names: "Iterator[str] | tuple[str, ...]", folder: Path, flat: bool = False) -> None:
    """Copy those of the files that are there; `flat` leaves their folders out of the copy's path."""
    for name in names:
        path = place.get(name)
        if path is not None:
            shutil.copyfile(path, folder / (PurePosixPath(name).name if flat else name))
