"""Make transformers use our classes for `bert` checkpoints, and undo it.  Importing this changes nothing."""

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import transformers
from transformers import BertConfig
from transformers.models.bert import modeling_bert as stock

from bertlite.hf import compat, modeling

STOCK = {  # transformers' model classes that bertlite.hf replaces
    name: getattr(stock, name)
    for name, each in vars(modeling).items()
    if isinstance(each, type) and issubclass(each, stock.BertPreTrainedModel)
}
MODULES = ("transformers", "transformers.models.bert", stock.__name__)  # where they are
_before: dict[Any, Any] = {}  # the previous entries of mappings for BertConfig, if any
_names: dict[tuple[ModuleType, str], Any] = {}  # the previous class of a name in a module, if any
_optimum: list[tuple[Any, str, Any]] = []  # optimum's TasksManager, and the methods of it that we replaced
OURS = (modeling.__name__, f"{__package__}.v4")  # the modules of our model classes
INFER = ("_infer_library_from_model_or_model_class", "_infer_task_from_model_or_model_class")


def register(*, everywhere: bool = False) -> None:
    """Make AutoModel and its kin, and what loads through them, use bertlite for BERT checkpoints in this process.

    If optimum is installed, its exporters treat our classes as models of transformers.

    Args:
        everywhere: replace transformers' model classes in its modules too, for code that looks a class up there by
            its name.  A name that was imported before keeps transformers' class, and one imported after keeps ours.
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
    if everywhere and not _names:
        for module in _modules():
            for name in STOCK:
                _names[module, name] = vars(module).get(name)
                setattr(module, name, getattr(modeling, name))


def unregister() -> None:
    """Undo `register`."""
    _restore_names()
    for auto, before in _before.items():
        if before is None:
            auto._model_mapping._extra_content.pop(BertConfig, None)
        else:
            auto._model_mapping._extra_content[BertConfig] = before
    _before.clear()
    while _optimum:
        setattr(*_optimum.pop())


def _restore_names() -> None:
    """Put transformers' classes back in its modules; one that looks names up when asked for them will do so again."""
    for module in _modules() if _names else ():
        for name in STOCK:
            if vars(module).get(name) is getattr(modeling, name):
                before = _names.get((module, name))
                delattr(module, name) if before is None else setattr(module, name, before)
    _names.clear()


def _modules() -> set[ModuleType]:
    """Return the modules that have BERT's classes; several have one name, since transformers loads itself again."""
    alive = (*gc.get_objects(), transformers, stock, *map(sys.modules.get, MODULES))
    return {each for each in alive if issubclass(type(each), ModuleType) and vars(each).get("__name__") in MODULES}


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
        if asked.__module__ in OURS and asked.__name__ in STOCK and (model is None or model_class is None):
            return infer(model_class=STOCK[asked.__name__])
        return infer(model=model, model_class=model_class)

    return inferred


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


@contextmanager
def registered(*, everywhere: bool = False) -> Iterator[None]:
    """Run `register` for a with-block; what was registered before stays registered."""
    already, names = bool(_before), bool(_names)
    register(everywhere=everywhere)
    try:
        yield
    finally:
        if not already:
            unregister()
        elif not names:
            _restore_names()
