"""Imports on demand: public names, and optional packages with a hint on how to install them."""

import json
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # of the checkout, where there is one


def import_public(package: str, name: str) -> Any:
    """Return a module of a package, or a name of its module `public`, which the package then has.

    Raises:
        AttributeError: there is no such name.
    """
    if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
        return import_module(f"{package}.{name}")
    public = import_module(f"{package}.public")
    if name not in ("__all__", *public.__all__):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    setattr(sys.modules[package], name, getattr(public, name))
    return getattr(public, name)


def import_optional(name: str, what: str, extra: str) -> Any:
    """Import a module that only an extra of bertlite installs.

    Args:
        what: the feature that needs it, at the start of the message.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to install it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ModuleNotFoundError(f"{what} needs {package}, which is not installed: {install_hint(extra)}") from None


def install_hint(extra: str, elsewhere: bool = False) -> str:
    """Return the command that installs bertlite with an extra, from where this one came.

    Args:
        elsewhere: whether the command is for another machine.
    """
    name = f"bertlite[{extra}]"
    if not elsewhere and (ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{ROOT}[{extra}]'"
    try:
        origin = json.loads(metadata.distribution("bertlite").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        elsewhere = True
    if elsewhere:
        return f"pip install '{name} @ git+URL', with the URL of the repository of bertlite"
    if not origin:  # it came from an index
        return f"pip install '{name}'"
    vcs = origin.get("vcs_info")
    url = f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs else origin["url"]
    return f"pip install '{name} @ {url}'"
