"""Attention: the table of its backends, and the one place where a backend is chosen.

Shapes:  B sequences · S queries · K keys · N heads · H head dim · T tokens.  Modules hand over q, k, v token-first,
(B, S, N, H) or, packed, (T, N, H).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from bertlite.stack.kernels import Needs, ScoreBias, eager, sdpa
from bertlite.stack.packed_kernels import grouped, missing_for_varlen, varlen


class Attend(Protocol):
    """What a layer receives: attention with the mask, the backend and the layout already settled.

    `module` is the one that attends; functions registered with transformers want to see it, our own do not.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_bias: ScoreBias | None,
        dropout: float,
        module: nn.Module | None = ...,
    ) -> tuple[Tensor, Tensor | None]: ...


def nothing(needs: Needs) -> str | None:
    """Say what is missing: nothing."""
    return None


@dataclass(frozen=True)
class Backend:
    """One way to compute attention, and what it can do."""

    name: str
    kernel: Callable[..., Any]  # of rows or, if it packs, of packed tokens
    packs: bool = False  # padding is left out
    gives_weights: bool = True
    gives_dropped_weights: bool = False  # the weights after dropout, which is what the context was made from
    missing: Callable[[Needs], str | None] = nothing  # what else it needs and does not find


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("eager", eager, gives_dropped_weights=True),
        Backend("sdpa", sdpa),
        Backend("packed", grouped, packs=True, gives_weights=False),
        Backend("varlen", varlen, packs=True, gives_weights=False, missing=missing_for_varlen),
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
