"""Objects that hold modules: searched for modules, and copied with other modules instead.

A holder is a module, a list, tuple or dict, or an object with attributes: a pipeline, a component of Haystack.
"""

import copy
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from bertlite.inference.model import refuse_saving

DEPTH = 4  # levels of objects to search: a component of Haystack holds a backend, which holds a model
LEAVES = (type, FunctionType, BuiltinFunctionType, ModuleType, Tensor, str, bytes, int, float, type(None))
TORCHS = frozenset(vars(nn.Module()))  # attributes of every module
SAVING = ("save_pretrained", "push_to_hub", "save_to_hub", "save")


def modules_of(
    thing: object, name: str = "", depth: int = DEPTH, seen: dict[int, int] | None = None
) -> list[tuple[str, nn.Module]]:
    """Return the modules that an object is or holds, by name: in attributes, lists, tuples, dicts and their objects.

    For a module, its children are left out; modules in its own lists, tuples and dicts are returned.

    Args:
        seen: {id of a searched object: depth of the search}.
    """
    seen = {} if seen is None else seen
    if depth < 0 or isinstance(thing, LEAVES) or seen.get(id(thing), -1) >= depth:
        return []
    found, seen[id(thing)] = [], depth
    parts: Mapping[Any, Any]
    if isinstance(thing, nn.Module):
        found = [(name, thing)]
        parts = {f"{path}.{own}".lstrip("."): x for path, part in thing.named_modules() for own, x in lists_of(part)}
    else:
        parts = parts_of(thing)
        depth -= not isinstance(thing, list | tuple | dict)
    for own, part in parts.items():
        found += modules_of(part, f"{name}.{own}".lstrip("."), depth, seen)
    return found


def lists_of(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the lists, tuples and dicts among a module's own attributes."""
    return [(name, x) for name, x in vars(module).items() if name not in TORCHS and isinstance(x, list | tuple | dict)]


def parts_of(thing: Any) -> Mapping[Any, Any]:
    """Return the items of a list, tuple or dict, or the attributes of another object, slots included."""
    if isinstance(thing, list | tuple | dict):
        pairs = thing.items() if isinstance(thing, dict) else enumerate(thing)
        return {key: part for key, part in pairs if not isinstance(part, LEAVES)}
    state: Any = object.__getstate__(thing)  # with slots it is a pair; private attributes of pydantic are in one
    own, slots = state if isinstance(state, tuple) else (state, None)
    return {**(own or {}), **(slots or {})}


def copy_with(thing: Any, memo: dict[int, Any], depth: int = DEPTH) -> Any:
    """Return a copy of an object, of the objects in it and of their modules; everything else is shared.

    Args:
        memo: {id of an original: its copy}, with optimised bodies as copies of bodies.
    """
    if id(thing) in memo:
        return memo[id(thing)]
    if isinstance(thing, nn.Module):
        return copy_module(thing, memo)
    if not modules_of(thing, depth=depth):
        return thing

    # A tuple must be made from its parts; anything else is copied first, as it may hold itself.
    if isinstance(thing, tuple):
        parts = [copy_with(part, memo, depth) for part in thing]
        return type(thing)._make(parts) if hasattr(thing, "_make") else type(thing)(parts)
    memo[id(thing)] = copied = copy.copy(thing)

    # Not by setattr, which frozen dataclasses and properties refuse.
    for name, part in parts_of(thing).items():
        if isinstance(thing, list | dict):
            copied[name] = copy_with(part, memo, depth)
        elif (again := copy_with(part, memo, depth - 1)) is not part:
            object.__setattr__(copied, name, again)

    # Its own methods would write files before they notice that an optimised encoder has no state_dict.
    refuse_saving_(copied, SAVING[:-1])
    return copied


def copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy by attributes, even if the module defines how it is saved, as flair's modules do."""
    shells = [
        (part, type(part).__new__(type(part)))
        for part in module.modules()
        if type(part).__setstate__ is not nn.Module.__setstate__
        and not type(part).__module__.startswith("torch.nn.")
        and id(part) not in memo
    ]
    memo.update((id(part), shell) for part, shell in shells)
    for part, shell in shells:
        vars(shell).update(copy.deepcopy(vars(part), memo))
    return copy.deepcopy(module, memo)


def refuse_saving_(copied: object, names: tuple[str, ...]) -> None:
    """Replace methods that would write files before they notice that there is no state_dict."""
    for name in names:
        if callable(getattr(type(copied), name, None)):
            object.__setattr__(copied, name, refuse_saving)
