"""Making transformers use our classes for `bert` checkpoints, and undoing it.  Importing changes nothing."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import BertConfig

from bertlite.hf import compat, modeling
from bertlite.records import write_json, write_text

_before: dict[Any, Any] = {}  # what a mapping held for BertConfig before us; absent where it held nothing


def register() -> None:
    """Make AutoModel and its kin, and what loads through them, use bertlite for BERT checkpoints in this process."""
    for auto in compat.auto_classes():
        mapping = auto._model_mapping
        if auto in _before or BertConfig not in mapping:
            continue
        ours = getattr(modeling, mapping[BertConfig].__name__, None)
        if ours is not None:
            _before[auto] = mapping._extra_content.get(BertConfig)
            mapping._extra_content[BertConfig] = ours


def unregister() -> None:
    """Undo `register`."""
    for auto, before in _before.items():
        if before is None:
            auto._model_mapping._extra_content.pop(BertConfig, None)
        else:
            auto._model_mapping._extra_content[BertConfig] = before
    _before.clear()


@contextmanager
def registered() -> Iterator[None]:
    """`register` for the length of a with-block; inside another one it changes nothing."""
    already = bool(_before)
    register()
    try:
        yield
    finally:
        if not already:
            unregister()


REMOTE = '''"""Loads this checkpoint with bertlite, where transformers is told trust_remote_code=True."""

from bertlite.hf import {names}  # pip install 'bertlite[hf]'
'''


def export_remote_code(folder: str | PathLike[str]) -> None:
    """Make a saved checkpoint load through bertlite wherever that is installed, with trust_remote_code=True.

    It is the way to share a pruned checkpoint with users of transformers 5, which cannot load one.  Without
    trust_remote_code transformers uses its own class, as before.

    Raises:
        FileNotFoundError: there is no config.json in the folder.
    """
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    names = {auto.__name__: ours.__name__ for auto, ours in _ours().items()}
    config["auto_map"] = {auto: f"modeling_bertlite.{name}" for auto, name in names.items()}
    write_text(Path(folder) / "modeling_bertlite.py", REMOTE.format(names=", ".join(sorted(set(names.values())))))
    write_json(path, config)  # last: it is what names the other file


def _ours() -> dict[Any, Any]:
    """Return which of our classes each Auto class would make of a BERT."""
    with registered():
        return {
            auto: auto._model_mapping[BertConfig]
            for auto in compat.auto_classes()
            if BertConfig in auto._model_mapping and auto._model_mapping[BertConfig].__module__ == modeling.__name__
        }
