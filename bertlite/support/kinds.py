"""Check that what a program hands to a function is of the kinds that its annotations name."""

import inspect
import os
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

P = ParamSpec("P")
R = TypeVar("R")
LISTS: dict[Any, str] = dict.fromkeys((list, tuple, Sequence, Iterable), "a list")
NAMES: dict[Any, str] = {str: "a string", int: "an integer", float: "a number", bool: "True or False", **LISTS}
NAMES |= {NoneType: "None", os.PathLike: "a path", Mapping: "a dict", Callable: "a function"}
NUMBERS: dict[Any, type] = {int: Integral, float: Real}
WAYS = dict.fromkeys(("checkpoint", "source", "against", "model"), "the path of a folder, or a hub id")  # such paths
SHOWN = (str, bytes, bool, int, float, list, tuple, dict, NoneType, Path)  # values whose repr is short


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function raise TypeError, which names the argument, for a value of a kind that its annotation excludes."""
    signature = inspect.signature(function)
    kinds = {name: each.annotation for name, each in signature.parameters.items()}

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:  # the call itself says so with the function's name
            return function(*args, **kwargs)
        check_kinds(given.arguments, kinds)
        return function(*args, **kwargs)

    return run


def check_settings(settings: Any) -> None:
    """Raise TypeError, which names the field, for a value of a dataclass that its annotation excludes."""
    check_kinds(vars(settings), {each.name: each.type for each in fields(settings)})


def check_kinds(values: Mapping[str, object], kinds: Mapping[str, Any]) -> None:
    """Raise TypeError for the first value that is not of its kind."""
    for name, value in values.items():
        kind = kinds.get(name, Any)
        if not is_of_kind(value, kind):
            shown = reprlib.repr(value) if type(value) in SHOWN else f"of type {type(value).__name__}"
            way = "; save_pretrained(FOLDER) writes a model there" if name in WAYS and hasattr(value, "config") else ""
            raise TypeError(f"{name} is {shown}; give {' or '.join(kinds_in_words(kind, name))}{way}")

        # A list that the annotation names may name the kind of its elements.
        inner = next((get_args(each)[0] for each in members_of(kind) if get_origin(each) in LISTS), Any)
        if inner is not Any and isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping):
            named = {f"{name}[{i}]": each for i, each in enumerate(value)}
            check_kinds(named, dict.fromkeys(named, inner))


def is_of_kind(value: object, kind: Any) -> bool:
    """Return whether a value is of the kind that an annotation names, whatever the elements of a list are."""
    if get_origin(kind) in (Union, UnionType):
        is_path = any(get_origin(each) is os.PathLike for each in get_args(kind))
        is_empty = isinstance(value, str) and not value  # which would be the working directory
        return not (is_path and is_empty) and any(is_of_kind(value, each) for each in get_args(kind))

    # Annotations that name no class are not checked.
    kind = get_origin(kind) or kind
    if kind in (Any, inspect.Parameter.empty) or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True  # or a type variable, or a name in quotes

    # Numbers of numpy count, but True is no number.
    if kind in NUMBERS:
        return isinstance(value, NUMBERS[kind]) and not isinstance(value, bool)
    if kind is bool:
        return type(value).__name__ in ("bool", "bool_")  # numpy's too

    # Any sequence will do for a list, except a text, which is a sequence of letters.
    if kind not in LISTS:
        return isinstance(value, kind)
    several = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    return several and getattr(value, "ndim", 1) == 1  # 2 for a table


def members_of(kind: Any) -> tuple[Any, ...]:
    """Return the kinds of a union; any other kind alone."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def kinds_in_words(kind: Any, name: str) -> list[str]:
    """Return the kinds that an annotation names, in words; a path may be a string."""
    origins = [get_origin(each) or each for each in members_of(kind)]
    named = [each for each in origins if each is not str or os.PathLike not in origins]
    words = {**NAMES, os.PathLike: WAYS.get(name, NAMES[os.PathLike])}
    return list(dict.fromkeys(words.get(each, f"a {each.__module__}.{each.__qualname__}") for each in named))
