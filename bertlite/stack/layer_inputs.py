"""`LayerInputs`: what a layer is given beside hidden states, as one value of plain data.

Shapes:  B sequences · S queries · K keys · N heads · D hidden;  … is (B, S) or, packed, (T,)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bertlite.stack.cache import Cache
from bertlite.stack.layouts import Layout


@dataclass(frozen=True)
class Needs:
    """The requirements that one forward has of a backend."""

    weights: bool = False
    dropout: bool = False  # attention dropout is live
    relative: bool = False  # relative positions are added to the scores
    device: str = "cpu"  # its type
    dtype: torch.dtype = torch.float32  # of queries and keys
    head_dim: int = 64


@dataclass(frozen=True)
class Backend:
    """One way to compute attention, and what it can do."""

    name: str
    attend: Callable[..., tuple[Tensor, Tensor | None]]  # (module, q, k, v, LayerInputs) -> context, weights
    kernel: Callable[..., Any]  # what `attend` runs
    packs: bool = False  # padding is left out
    gives_weights: bool = True
    gives_dropped_weights: bool = False  # the weights after dropout, which is what the context was made from
    missing: Callable[[Needs], str | None] = lambda needs: None  # what else it needs and does not find


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """What the layers of one forward are given beside hidden states.

    Args:
        backend: how attention is computed.
        layout: how tokens lie; None is rows.
        mask: what each query may attend to, in rows; packed tokens attend to their own sequence.
        gates: what each layer's heads are multiplied by, (… or 1, N, 1).
        cache: the keys and values of the tokens before these, in a decoder.
        source: what keys and values are computed from, if not from the hidden states: an encoder's output, (B, K, D),
            or all tokens where only the first of each sequence attend.
        encoder: the inputs of cross-attention.
        first_only: the last layer computes the first token of each sequence alone.
        keep_states: return what each layer was given.
        returns_weights: attention returns its weights.
        weights: where layers put their attention weights, (B, N, S, K), by number, if they are wanted.
        layer: the number of the layer that is given this.
    """

    backend: Backend
    layout: Layout | None
    mask: Any  # in bertlite.hf also what a function registered with transformers takes
    gates: Sequence[Tensor | None] | Mapping[int, Tensor] | None = None
    cache: Cache | None = None
    source: Tensor | None = None
    encoder: "LayerInputs | None" = None
    first_only: bool = False
    keep_states: bool = False
    returns_weights: bool = False
    weights: dict[int, Tensor] | None = None
    layer: int = 0

    def at(self, layer: int) -> "LayerInputs":
        """Return the inputs of a layer that computes every token."""
        encoder = None if self.encoder is None else self.encoder.at(layer)
        return LayerInputs(  # `replace` takes four times as long, which short texts feel
            self.backend, self.layout, self.mask, self.gates, self.cache, self.source, encoder, False,
            self.keep_states, self.returns_weights, self.weights, layer,
        )  # fmt: skip

    def at_firsts(self, layer: int, x: Tensor) -> "LayerInputs":
        """Return the inputs of a layer that computes first tokens alone, which attend to all of x."""
        return replace(self, layer=layer, first_only=True, source=x)

    def first(self, x: Tensor) -> Tensor:
        """Take the first token of each sequence, of (…, D) or of a gate."""
        return x[:, :1] if self.layout is None else self.layout.first(x)

    @property
    def gate(self) -> Tensor | None:
        """What the heads of this layer are multiplied by, (… or 1, N, 1)."""
        gate = None if self.gates is None else self.gates[self.layer]
        return self.first(gate) if gate is not None and self.first_only else gate

    def attended(self, x: Tensor) -> Tensor:
        """Return what keys and values are computed from: the source, or the hidden states x."""
        return x if self.source is None else self.source.to(x.device)

    def through_cache(self, project: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return keys and values, (…, N, H), with those in the cache; an encoder's are computed once and kept."""
        if self.cache is None:
            return project()
        if self.source is None:
            return self.cache.extend(self.layer, *project())
        known = self.cache.kept(self.layer)
        return self.cache.keep(self.layer, *project()) if known is None else known

    @property
    def all_weights(self) -> tuple[Tensor, ...] | None:
        """The attention weights of every layer, if they are wanted."""
        return None if self.weights is None else tuple(self.weights.values())

    def keep_weights(self, weights: Tensor | None) -> None:
        """Keep a layer's attention weights; those of a layer that is run again in the backward pass are known."""
        if self.weights is not None and weights is not None:
            self.weights.setdefault(self.layer, weights)
