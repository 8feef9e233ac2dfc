"""Attention: the table of its backends, and the one place where a backend is chosen."""

import warnings

from bertlite.stack.kernels import attend_rows, eager, sdpa
from bertlite.stack.layer_inputs import Backend, Needs
from bertlite.stack.packed_kernels import attend_packed, grouped
from bertlite.stack.varlen import missing_for_varlen, varlen

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("eager", attend_rows, eager, gives_dropped_weights=True),
        Backend("sdpa", attend_rows, sdpa),
        Backend("packed", attend_packed, grouped, packs=True, gives_weights=False),
        Backend("varlen", attend_packed, varlen, packs=True, gives_weights=False, missing=missing_for_varlen),
    )
}


def packs(name: str) -> bool:
    """Return whether a backend leaves padding out; "auto" and names of other libraries do not."""
    return name in BACKENDS and BACKENDS[name].packs


def check_backend(name: str) -> None:
    """Refuse a name that is neither "auto" nor in the table.

    Raises:
        ValueError: it names those that are.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"attn_implementation {name!r} is unknown; have: auto, {', '.join(BACKENDS)}")


def select(name: str, needs: Needs) -> Backend:
    """Pick the backend for one forward.

    "auto" chooses between "eager" and "sdpa".  "packed" is computed by "varlen" where that can do it; on CUDA, where
    it would pay, a warning says why not.  Any other name is what it says.

    Raises:
        ValueError: the name is unknown, or its backend cannot give what is needed.
    """
    check_backend(name)
    if name == "auto":
        return BACKENDS["eager" if needs.weights else "sdpa"]
    backend = BACKENDS[name]
    if needs.weights and not backend.gives_weights:
        raise ValueError(f"backend {name!r} cannot give attentions; use 'eager' or 'auto'")
    if needs.weights and needs.dropout and not backend.gives_dropped_weights:
        raise ValueError(
            f"backend {name!r} cannot give attentions while attention dropout is on; use 'eager' or 'auto'"
        )
    if (missing := backend.missing(needs)) is not None:
        raise ValueError(f"backend {name!r} cannot run here: {missing}; use 'packed'")
    if name == "packed" and needs.device == "cuda":
        missing = BACKENDS["varlen"].missing(needs)
        if missing is None:
            return BACKENDS["varlen"]
        warnings.warn(f"packed attention runs as groups of padded sequences: {missing}", stacklevel=2)
    return backend
