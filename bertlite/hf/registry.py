"""Make transformers use our classes for `bert` checkpoints, and undo it.  Importing this changes nothing."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from transformers import BertConfig

from bertlite.hf import compat, modeling

_before: dict[Any, Any] = {}  # the previous entries of mappings for BertConfig, if any
_optimum: list[tuple[Any, str, Any]] = []  # optimum's TasksManager, and the methods of it that we replaced
OURS = (modeling.__name__, f"{__package__}.v4")  # the modules of our model classes
INFER = ("_infer_library_from_model_or_model_class", "_infer_task_from_model_or_model_class")


def register() -> None:
    """Make AutoModel and its kin, and what loads through them, use bertlite for BERT checkpoints in this process.

    If optimum is installed, its exporters treat our classes as models of transformers.
    """
    _register_with_optimum()
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
    while _optimum:
        setattr(*_optimum.pop())


def _register_with_optimum() -> None:
    """Make optimum's exporters infer for our classes what they infer for transformers' class of that name.

    They check whether the name of a class's module begins with "transformers", even if the caller named the library.
    """
    if _optimum or not _is_installed("optimum.exporters.tasks"):
        return
    from optimum.exporters.tasks import TasksManager

    for name in filter(vars(TasksManager).__contains__, INFER):
        _optimum.append((TasksManager, name, vars(TasksManager)[name]))
        setattr(TasksManager, name, classmethod(_asking_for_stock(getattr(TasksManager, name))))


def _asking_for_stock(infer: Callable[..., str]) -> Callable[..., str]:
    """Return a class method that calls `infer` with transformers' class in place of ours, or of a model of ours."""

    def inferred(cls: type, model: Any = None, model_class: Any = None) -> str:
        asked = type(model) if model_class is None else model_class
        stock = getattr(transformers, asked.__name__, None)
        if asked.__module__ in OURS and stock is not None and (model is None or model_class is None):
            return infer(model_class=stock)
        return infer(model=model, model_class=model_class)

    return inferred


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


@contextmanager
def registered() -> Iterator[None]:
    """Run `register` for a with-block; nested blocks change nothing."""
    already = bool(_before)
    register()
    try:
        yield
    finally:
        if not already:
            unregister()
