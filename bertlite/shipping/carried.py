"""Files to copy with a model from one checkpoint to another: the tokenizer and sentence-transformers' modules."""

import copy
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors.torch import save_file

from bertlite.config import BertConfig
from bertlite.models.base import BertPreTrainedModel
from bertlite.opened.checkpoint import MODULE_FILES, Checkpoint
from bertlite.shipping.vectors import Dense, VectorHead
from bertlite.support.files import write_json
from bertlite.tokenizer import BertTokenizer
from bertlite.tokenizer.sentences import LEGACY_ENCODERS, MODULES, POOLING, is_encoder, last_name

TYPES = "sentence_transformers.models."  # module types, in every version


def carry_tokenizer(tokenizer: BertTokenizer, folder: Path, config: BertConfig) -> None:
    """Write a tokenizer into a model's folder, without truncation or padding, with its `model_max_length`."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.model_max_length = min(tokenizer.model_max_length, config.max_position_embeddings)
    tokenizer.save_pretrained(folder)


def carry_modules(source: Checkpoint, folder: Path, cls: type[BertPreTrainedModel]) -> bool:
    """Write sentence-transformers' modules of a checkpoint, such as its pooling, into a folder with weights.

    Returns:
        Whether they were written: the checkpoint has some, and they are for models of this class.

    Raises:
        ValueError: modules.json is damaged, or names a folder outside the checkpoint.
    """
    modules = source.modules
    if not modules or cls is not source.model_class:
        return False

    # Our weights are at the top of the folder, so the encoder is there, and no other module is.
    for module in modules:
        inner = PurePosixPath(module["path"])
        if is_encoder(module["type"]):
            if last_name(module["type"]) in LEGACY_ENCODERS:
                module["type"] = "sentence_transformers.models.Transformer"
            module["path"] = ""  # our weights are there
        elif not inner.name:  # a module without files of its own: those there are the model's
            module["path"] = unused_name(modules, last_name(module["type"]))
        else:
            (folder / inner).mkdir(parents=True, exist_ok=True)

    for path, content in source.module_files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    write_json(folder / MODULES, modules)
    return True


def put_map(folder: Path, head: VectorHead) -> None:
    """Write the first module of a head, a Dense, after the pooling that a folder has, or else the mean."""
    modules, dense = Checkpoint(folder).modules, head.modules[0]
    assert isinstance(dense, Dense)

    # A model without modules is pooled by the mean, which has to be stated before a Dense can follow it.
    if not modules:
        kinds = {"": "Transformer", "1_Pooling": POOLING}
        modules = [{"path": path, "name": str(i), "type": f"{TYPES}{kinds[path]}"} for i, path in enumerate(kinds)]
        (folder / "1_Pooling").mkdir()
        values = {"word_embedding_dimension": dense.values["in_features"], "pooling_mode_mean_tokens": True}
        write_json(folder / "1_Pooling" / "config.json", values)

    # The map may have been merged into a Dense that the source has, whose place it takes then.
    at = 1 + [last_name(each["type"]) for each in modules].index(POOLING)
    if is_new := len(modules) - at < len(head.modules):
        modules.insert(at, {"path": "", "type": f"{TYPES}Dense"})
    if is_new or [each["path"] for each in modules].count(modules[at]["path"]) > 1:
        modules[at] |= dict.fromkeys(("path", "name"), unused_name(modules, "Dense"))

    # The Dense that was there may have its weights in another format.
    inner = folder / modules[at]["path"]
    inner.mkdir(exist_ok=True)
    for name in MODULE_FILES:
        (inner / name).unlink(missing_ok=True)
    write_json(inner / "config.json", dense.values)
    save_file(dense.state_dict(), inner / "model.safetensors")
    write_json(folder / MODULES, [{**each, "idx": i} for i, each in enumerate(modules)])


def unused_name(modules: list[dict[str, Any]], kind: str) -> str:
    """Return a name, such as "2_Dense", that no module of these has for itself or for its folder."""
    taken = {each.get(what) for each in modules for what in ("path", "name")}
    return next(name for i in count(len(modules) - 1) if (name := f"{i}_{kind}") not in taken)
