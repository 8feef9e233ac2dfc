"""Files to copy with a model from one checkpoint to another: the tokenizer and sentence-transformers' modules."""

import shutil
from collections.abc import Iterator
from itertools import count
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from safetensors.torch import save_file

from bertlite.checkpoint.families import Origin, read_config
from bertlite.checkpoint.files import Folder, Source, find_checkpoint, locate
from bertlite.checkpoint.reading import read_tensors
from bertlite.config import BertConfig
from bertlite.inspection import bertlite_faults, class_of
from bertlite.models.base import BertModel, BertPreTrainedModel
from bertlite.shipping.vectors import Dense, VectorHead
from bertlite.support.files import to_json, write_json
from bertlite.tokenizer import BertTokenizer
from bertlite.tokenizer.sentences import (
    LEGACY_ENCODERS,
    MODULES,
    POOLING,
    SENTENCE_CONFIG,
    TRANSFORMER_CONFIGS,
    Place,
    is_encoder,
    last_name,
    read_modules,
    read_pooling,
)

Model = TypeVar("Model", bound=BertPreTrainedModel)
TYPES = "sentence_transformers.models."  # module types, in every version
MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")  # files of one module


def carry_tokenizer(source: Source, folder: Path, config: BertConfig, tokenizer: BertTokenizer | None = None) -> None:
    """Write a checkpoint's tokenizer into a folder, without truncation or padding, with its `model_max_length`.

    Args:
        tokenizer: a tokenizer to write instead.

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
    """Return the class that a checkpoint is for: BertModel if sentence-transformers pools its states to vectors;
    otherwise config.json names it, as for a CrossEncoder."""
    return class_of(read_config(source)) if not read_pooling(locate(source))[0] else BertModel


def load_trained(cls: type[Model], checkpoint: str | PathLike[str], **options: Any) -> Model:
    """Load a checkpoint as a class, all parts of which it must have; an encoder without a pooler gets none.

    Raises:
        ValueError: it lacks a part, which would be initialised at random.
    """
    files = find_checkpoint(Source(checkpoint))
    absent, *_ = bertlite_faults(cls, Origin.read(files.config), read_tensors(files))
    if cls is BertModel and "pooler" in absent:
        absent, options = absent - {"pooler"}, {"add_pooling_layer": False, **options}
    if absent:
        raise ValueError(
            f"{checkpoint} has no {' and no '.join(sorted(absent))}, which would be random: train it first, with"
            " `bertlite prune finetune`"
        )
    return cls.from_pretrained(checkpoint, **options)


def carry_modules(source: Source, folder: Path, cls: type[BertPreTrainedModel]) -> bool:
    """Write sentence-transformers' modules of a checkpoint, such as its pooling, into a folder with weights.

    Returns:
        Whether they were written: the checkpoint has some, and they are for models of this class.

    Raises:
        ValueError: modules.json is damaged, or names a folder outside the checkpoint.
    """
    place = locate(source)
    modules = read_modules(place)
    if not modules or cls is not class_for(source):
        return False
    for module in modules:
        inner = PurePosixPath(module["path"])
        if is_encoder(module["type"]):
            if last_name(module["type"]) in LEGACY_ENCODERS:
                module["type"] = "sentence_transformers.models.Transformer"
            copy_files(place, (str(inner / name) for name in TRANSFORMER_CONFIGS), folder, flat=True)
            module["path"] = ""  # our weights are there
        elif not inner.name:  # a module without files of its own: those there are the model's
            module["path"] = unused_name(modules, last_name(module["type"]))
        else:
            copy_module_folder(place, inner, folder / inner)
    copy_files(place, (SENTENCE_CONFIG,), folder)
    write_modules(folder, modules)
    return True


def put_map(folder: Path, head: VectorHead) -> None:
    """Write the first module of a head, a Dense, after the pooling that a folder has, or else the mean."""
    modules, dense = read_modules(Folder(folder)), head.modules[0]
    assert isinstance(dense, Dense)
    if not modules:
        kinds = {"": "Transformer", "1_Pooling": POOLING}
        modules = [{"path": path, "name": str(i), "type": f"{TYPES}{kinds[path]}"} for i, path in enumerate(kinds)]
        (folder / "1_Pooling").mkdir()
        values = {"word_embedding_dimension": dense.values["in_features"], "pooling_mode_mean_tokens": True}
        write_json(folder / "1_Pooling" / "config.json", values)
    at = 1 + [last_name(each["type"]) for each in modules].index(POOLING)
    if is_new := len(modules) - at < len(head.modules):
        modules.insert(at, {"path": "", "type": f"{TYPES}Dense"})
    if is_new or [each["path"] for each in modules].count(modules[at]["path"]) > 1:
        modules[at] |= dict.fromkeys(("path", "name"), unused_name(modules, "Dense"))
    inner = folder / modules[at]["path"]
    inner.mkdir(exist_ok=True)
    for name in MODULE_FILES:
        (inner / name).unlink(missing_ok=True)
    write_json(inner / "config.json", dense.values)
    save_file(dense.state_dict(), inner / "model.safetensors")
    write_modules(folder, [{**each, "idx": i} for i, each in enumerate(modules)])


def unused_name(modules: list[dict[str, Any]], kind: str) -> str:
    """Return a name, such as "2_Dense", that no module of these has for itself or for its folder."""
    taken = {each.get(what) for each in modules for what in ("path", "name")}
    return next(name for i in count(len(modules) - 1) if (name := f"{i}_{kind}") not in taken)


def write_modules(folder: Path, modules: list[dict[str, Any]]) -> None:
    (folder / MODULES).write_text(to_json(modules, indent=2) + "\n", encoding="utf-8")


def copy_module_folder(place: Place, inner: PurePosixPath, target: Path) -> None:
    """Copy the folder of one module; on the hub, try the known names, since its files are not listed."""
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
