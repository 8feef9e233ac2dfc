"""Imports on demand: public names, and optional packages with a hint on how to install them."""

import ast
import opcode
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from bertlite.support.habits import habit_hint

ROOT = Path(__file__).resolve().parents[2]  # the checkout, if this is one
PUBLIC = ("bertlite", *(f"bertlite.{name}" for name in ("commands", "pruning", "inference")))


def on_demand(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a module whose public names are imported when asked for."""
    return partial(import_public, package), lambda: [*public_homes(package), "__all__"]


def import_public(package: str, name: str) -> Any:
    """Return a public name of a package, or a module of it, and add it to the package.

    A name is imported from the module that defines it, without the modules of the other names.

    Raises:
        AttributeError: there is no such name; the message says where it is, if it is elsewhere.
        ImportError: the same, for `from package import name`, which drops the words of an AttributeError.
    """
    homes = public_homes(package)
    if name == "__all__" and homes:
        value: Any = sorted(homes)
    elif name in homes:
        value = getattr(import_module(homes[name]), name)
    elif name[0] != "_" and hasattr(sys.modules[package], "__path__") and find_spec(f"{package}.{name}") is not None:
        return import_module(f"{package}.{name}")
    else:
        found = next((each for each in PUBLIC if name in public_homes(each)), None)
        hint = f"; it is {found}.{name}" if found else habit_hint(name)
        kind = ImportError if hint and is_import_from() else AttributeError
        raise kind(f"module {package!r} has no attribute {name!r}{hint}")
    setattr(sys.modules[package], name, value)
    return value


def is_import_from() -> bool:
    """Whether a statement `from package import name` asks the package for a name."""
    frame: FrameType | None = sys._getframe(2)
    if frame is not None and frame.f_globals.get("__name__") == "bertlite":  # its `__getattr__`
        frame = frame.f_back
    return frame is not None and frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]


@cache
def public_homes(package: str) -> dict[str, str]:
    """Return {name: module} of the names that a package imports for type checkers, by reading its source."""
    homes: dict[str, str] = {}
    blocks = (each for each in statements_of(package) if isinstance(each, ast.If))
    for node in (node for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING" for node in block.body):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {each.name for each in node.names}
            homes |= dict.fromkeys(literal_all(statements_of(node.module)) if "*" in names else names, node.module)
    return homes


def statements_of(module: str) -> list[ast.stmt]:
    spec = find_spec(module)
    source = spec.loader.get_source(module) if spec and isinstance(spec.loader, InspectLoader) else None
    return ast.parse(source or "").body


def literal_all(statements: list[ast.stmt]) -> set[str]:
    """Return the names that a module lists in `__all__`."""
    assigned = (node for node in statements if isinstance(node, ast.Assign))
    lists = [node.value for node in assigned if [ast.unparse(each) for each in node.targets] == ["__all__"]]
    return {name for each in lists for name in ast.literal_eval(each)}


def import_optional(name: str, feature: str, extra: str) -> Any:
    """Import a module that only an extra of bertlite installs.

    Args:
        feature: the feature that needs it, with which the message begins.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to install it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ModuleNotFoundError(
            f"{feature} needs {package}, which is not installed: {install_hint(extra)}"
        ) from None


def install_hint(extra: str, elsewhere: bool = False) -> str:
    """Return the command that installs the packages of an extra of bertlite.

    If bertlite is installed, from whatever place, pip keeps it and adds the packages.

    Args:
        elsewhere: whether the command is for another machine.
    """
    if elsewhere:
        return f"pip install 'bertlite[{extra}] @ git+URL', with the URL of the repository of bertlite"
    in_checkout = (ROOT / "pyproject.toml").is_file()
    return f"pip install '.[{extra}]' in the checkout" if in_checkout else f"pip install 'bertlite[{extra}]'"
