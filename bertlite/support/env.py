"""`bertlite env`: the versions, the processor and the kernels of this machine."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bertlite.runtime.library import NativeKernelsError, missing_platform, usable_sets
from bertlite.support.environment import environment


def env() -> dict[str, Any]:
    """Return the versions, the processor, and the sets of kernels that it runs, the best first; JSON-ready.

    Nothing is compiled.  If no kernels can run, `kernels` has the reason instead.
    """
    try:
        kernels = missing_platform() or ", ".join(each.name for each in usable_sets())
    except NativeKernelsError as error:  # BERTLITE_NATIVE names a set that cannot run here
        kernels = str(error)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {"what": "bertlite env", **environment(device), "kernels": kernels}


def summary_lines(record: Mapping[str, Any], out: object) -> Iterator[str]:
    """Yield a line for each entry."""
    for name, value in record.items():
        inner = [f"{key} {each}" for key, each in value.items() if each is not None] if isinstance(value, dict) else []
        yield f"{name}: {', '.join(inner) if inner else value}"
