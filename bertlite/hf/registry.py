"""Make transformers use our classes for `bert` checkpoints, and undo it.  Importing this changes nothing."""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import transformers
from transformers import BertConfig
from transformers.models.bert import modeling_bert as stock

from bertlite.hf import compat, modeling

__all__ = ["register", "registered", "unregister"]
NAMES = [  # the model classes of transformers that bertlite.hf replaces
    name
    for name, each in vars(modeling).items()
    if isinstance(each, type) and issubclass(each, stock.BertPreTrainedModel)
]
MODULES = ("transformers", "transformers.models.bert", stock.__name__)  # modules that have them
_lock = threading.Lock()  # for everything below
_calls: list[bool] = []  # `everywhere` of each `register` that is not undone
_blocks: list[bool] = []  # `everywhere` of each block of `registered` that runs
_before: dict[Any, Any] = {}  # the previous entries of mappings for BertConfig, if any
_names: dict[tuple[ModuleType, str], Any] = {}  # the previous class of a name in a module, if any


def register(*, everywhere: bool = False) -> None:
    """Make the Auto classes, and code that loads with them, use bertlite for BERT checkpoints in this process.

    Args:
        everywhere: also replace transformers' model classes in its modules, for code that looks a class up there by
            its name.  A name that was imported before keeps transformers' class, and one imported after keeps ours.
    """
    with _lock:
        _calls.append(everywhere)
        _update()


def unregister() -> None:
    """Undo `register`; blocks of `registered` that still run, in any thread, keep theirs."""
    with _lock:
        _calls.clear()
        _update()


@contextmanager
def registered(*, everywhere: bool = False) -> Iterator[None]:
    """Run `register` for a with-block, in the whole process; it ends with the last block of all threads.

    Earlier registrations stay.
    """
    with _lock:
        _blocks.append(everywhere)
        _update()
    try:
        yield
    finally:
        with _lock:
            _blocks.remove(everywhere)
            _update()


def _update() -> None:
    """Register or restore classes, as calls and running blocks ask."""
    asked = [*_calls, *_blocks]
    if not any(asked):
        _restore_names()
    if not asked:
        _restore_mappings()
        return

    # Each Auto class finds our model of the same name; its earlier model is kept for the way back.
    for auto in compat.auto_classes():
        mapping = auto._model_mapping
        if auto in _before or BertConfig not in mapping:
            continue
        ours = getattr(modeling, mapping[BertConfig].__name__, None)
        if ours is not None:
            _before[auto] = mapping._extra_content.get(BertConfig)
            mapping._extra_content[BertConfig] = ours

    # Calls may also ask for the names in transformers' modules, which other libraries import.
    if any(asked) and not _names:
        for module in _modules():
            for name in NAMES:
                _names[module, name] = vars(module).get(name)
                setattr(module, name, getattr(modeling, name))


def _restore_mappings() -> None:
    """Give the Auto classes their previous entries."""
    for auto, before in _before.items():
        if before is None:
            auto._model_mapping._extra_content.pop(BertConfig, None)
        else:
            auto._model_mapping._extra_content[BertConfig] = before
    _before.clear()


def _restore_names() -> None:
    """Put transformers' classes back in its modules; a module that looks names up on demand will do so again."""
    for module in _modules() if _names else ():
        for name in NAMES:
            if vars(module).get(name) is getattr(modeling, name):
                before = _names.get((module, name))
                delattr(module, name) if before is None else setattr(module, name, before)
    _names.clear()


def _modules() -> set[ModuleType]:
    """Return the modules that have BERT's classes; several have one name, since transformers loads itself again."""
    alive = (*gc.get_objects(), transformers, stock, *map(sys.modules.get, MODULES))
    return {each for each in alive if issubclass(type(each), ModuleType) and vars(each).get("__name__") in MODULES}
