"""Attention: the context of a layer, the kernels, and the table of backends that run them.

A kernel gets tensors and functions of tensors, never a module.

Shapes:  B sequences · S queries · K keys · T tokens · N heads · H head dim · D hidden;  … is (B, S) or, packed, (T,)
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bertlite.config import check_known
from bertlite.stack.cache import KeyValueCache
from bertlite.stack.inputs import Mask, to_mask, values_readable
from bertlite.stack.layouts import CPU, Layout, Packed, Slots
from bertlite.stack.positions import ScoreBias
from bertlite.support import torch_private

Attended = tuple[Tensor, Tensor | None]  # the context, and the attention weights if they are known or wanted
SWITCHING = RLock()  # held while a thread has cuDNN switched off, or another thread would switch it on again
BLOCK = 128  # the fewest queries of a block in `sdpa_in_window`
MOST_DRAWING = 4  # up to this many threads, one thread drawing for all in `drop` is faster than `F.dropout`


@dataclass(frozen=True)
class Requirements:
    """The requirements of one forward on a backend."""

    weights: bool = False
    dropout: bool = False  # attention dropout is live
    relative: bool = False  # relative positions are added to the scores, or layers have windows
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32  # the dtype of queries and keys
    head_dim: int = 64


@dataclass(frozen=True)
class Backend:
    """One way to compute attention, and its abilities."""

    name: str
    kernel: Callable[..., Any]  # as `eager` or, if it packs, as `grouped`
    packs: bool = False  # padding is left out, and no weights are given
    gives_dropped_weights: bool = False  # the weights after dropout, from which the context was computed
    missing: Callable[[Requirements], str | None] | None = None  # names another requirement that is missing


@dataclass(frozen=True, eq=False)
class LayerContext:
    """The inputs of the layers of one forward, except hidden states.

    Args:
        backend: computes attention.
        layout: the layout of tokens.
        mask: the keys that each query may attend to, in rows; packed tokens attend to their own sequence.
        gates: factors for the heads of each layer, (… or 1, N, 1).
        cache: the keys and values of the tokens before these, in a decoder.
        source: the source of keys and values, if it is not the hidden states: an encoder's output, (B, K, D), or all
            tokens if only the first of each sequence attend.
        encoder: the inputs of cross-attention.
        first_only: the last layer computes only the first token of each sequence.
        keep_states: return the input of each layer.
        returns_weights: attention returns its weights, even if the kernel gives none.
        weights: {layer: attention weights, (B, N, S, K)}, filled by the layers if weights are wanted.
        layer: the number of the layer that gets this.
        shared: computed once for all layers by a kind of positions, such as a table of distances.
        places: the positions of tokens, (…,); None: counted from 0 in each row.
    """

    backend: Backend
    layout: Layout
    mask: Any = field(default_factory=Mask)  # in bertlite.hf also a mask for a function registered with transformers
    gates: Sequence[Tensor | None] | Mapping[int, Tensor] | None = None
    cache: KeyValueCache | None = None
    source: Tensor | None = None
    encoder: "LayerContext | None" = None
    first_only: bool = False
    keep_states: bool = False
    returns_weights: bool = False
    weights: dict[int, Tensor] | None = None
    layer: int = 0
    shared: Any = None
    places: Tensor | None = None

    def at(self, layer: int) -> "LayerContext":
        """Return the inputs of a layer that computes every token."""
        encoder = None if self.encoder is None else self.encoder.at(layer)
        return LayerContext(  # `replace` takes four times as long, which shows on short texts
            self.backend, self.layout, self.mask, self.gates, self.cache, self.source, encoder, False,
            self.keep_states, self.returns_weights, self.weights, layer, self.shared, self.places,
        )  # fmt: skip

    @property
    def gate(self) -> Tensor | None:
        """Factors for the heads of this layer, (… or 1, N, 1)."""
        gate = None if self.gates is None else self.gates[self.layer]
        return self.layout.first(gate) if gate is not None and self.first_only else gate

    def distances(self, q: Tensor, k: Tensor) -> Tensor:  # (…, N, H) each -> (S, K)
        """Return the distance of each query behind each key: queries are the last of the keys, or the first of them.

        For packed tokens these are the longest sequence's; another sequence has the first rows and columns.
        """
        queries, keys = q.shape[1], k.shape[1]
        if isinstance(self.layout, Packed):
            queries = keys = self.layout.keys
        position = torch.arange(keys, device=q.device)
        return (position[:1, None] if self.first_only else position[keys - queries :, None]) - position[None, :]

    def within(self, window: int, q: Tensor, k: Tensor) -> "LayerContext":  # (…, N, H) each
        """Return the inputs of a layer whose queries attend only to keys at most `window` positions away.

        Kernels without weights compute only the scores in the window; for others the mask forbids the rest.
        """
        kernel = self.backend.kernel
        if self.backend.packs or (kernel is sdpa and not self.returns_weights):
            kernel = partial(sdpa_in_window if kernel is sdpa else kernel, window=window)
            return replace(self, backend=replace(self.backend, kernel=kernel))
        allowed = in_window(q.shape[1], k.shape[1], window, q.device)
        for given in (self.mask.allowed, self.mask.attends_anything):
            allowed = allowed if given is None else allowed & given.to(q.device)
        return replace(self, mask=to_mask(allowed, self.mask.bias))

    def keep_weights(self, weights: Tensor) -> None:
        """Keep a layer's attention weights, unless the layer is run again in the backward pass and they are known."""
        if self.weights is not None:
            self.weights.setdefault(self.layer, weights)


def as_scores(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias in the scores' dtype; too large values stay finite, since a row of -inf would be nan."""
    if bias.dtype == dtype:
        return bias
    limit = torch.finfo(dtype).max / 2
    return bias.to(dtype).clamp(-limit, limit)


def probabilities(q: Tensor, k: Tensor, allowed: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the attention weights, (B, N, S, K)."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + as_scores(bias, scores.dtype)
    if allowed is not None:
        lowest = torch.finfo(scores.dtype).min  # not -inf, which leads to nan in half precision
        scores = scores.masked_fill(~allowed, lowest)
    return scores.softmax(-1)


def drop(x: Tensor, rate: float) -> Tensor:
    """Return `F.dropout` of x; on a CPU with other draws, of 16 bits, which take less time."""
    drawn, dropped = 2**16, round(rate * 2**16)
    few = torch.get_num_threads() <= MOST_DRAWING
    if not (x.is_cpu and few and 0 < dropped < drawn) or torch.compiler.is_compiling():
        return F.dropout(x, rate)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device="cpu").random_(-(2**63), None)
    kept = torch.ge(draws.view(torch.int16)[: x.numel()].view(x.shape), dropped - drawn // 2, out=torch.empty_like(x))
    return x * kept.mul_(drawn / (drawn - dropped))


def eager(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None, dropout: float) -> Attended:
    """Compute attention as the paper writes it, with its weights."""
    weights = probabilities(q, k, allowed, bias)
    if dropout:
        weights = F.dropout(weights, dropout)
    return torch.matmul(weights, v), weights


def sdpa(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None, dropout: float) -> Attended:
    """Compute attention with torch's fused kernels, which give no weights."""
    if q.shape[1] == 0:
        return attend_nothing(q, k, v), None
    mask = allowed if bias is None else as_scores(bias, q.dtype)
    if mask is not None and bias is not None and allowed is not None:
        mask = mask.masked_fill(~allowed, torch.finfo(q.dtype).min)
    switches = torch.is_grad_enabled() and isinstance(q, Tensor) and q.is_cuda  # torch.fx traces with stand-ins
    with without_cudnn() if switches else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout), None


def in_window(queries: int, keys: int, window: int, device: torch.device, ahead: int = 0) -> Tensor:
    """Return (S, K), True for keys at most `window` positions from a query; the first query is at key `ahead`."""
    at, of = (torch.arange(count, device=device) for count in (queries, keys))
    return (at[:, None] + ahead - of).abs() <= window


def sdpa_in_window(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None, dropout: float, window: int
) -> tuple[Tensor, None]:
    """Compute attention to the keys at most `window` positions away; a query without such a key gets zeros.

    Long rows are cut into blocks of queries, each with only the keys that its windows hold, so that time and memory
    grow with the length and not with its square.
    """
    queries, keys, size = q.shape[2], k.shape[2], max(BLOCK, 4 * window)
    by_query = bias is not None or (allowed is not None and allowed.shape[-2] > 1)
    if queries <= size or by_query or not values_readable(q):
        near = in_window(queries, keys, window, q.device)
        return sdpa_or_zeros(q, k, v, near if allowed is None else near & allowed, bias, dropout), None

    # Block c has the keys from `window` before its first query to `window` behind its last one.
    count = -(-queries // size)
    reach, behind = size + 2 * window, window + count * size - queries
    real = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=q.device) if allowed is None else allowed
    near = F.pad(real, (window, behind)).unfold(-1, reach, size).transpose(1, 3)  # (B or 1, C, 1, 1, reach)
    near = near.squeeze(2) & in_window(size, reach, window, q.device, window)
    blocks = [F.pad(x, (0, 0, window, behind)).unfold(2, reach, size).permute(0, 2, 1, 4, 3) for x in (k, v)]
    blocks = [F.pad(q, (0, 0, 0, behind - window)).unflatten(2, (count, size)).transpose(1, 2), *blocks]

    # Blocks are sequences of one call.
    near = near.expand(q.shape[0], *near.shape[1:])[:, :, None]
    q, k, v, near = (x.flatten(0, 1) for x in (*blocks, near))
    context = sdpa_or_zeros(q, k, v, near, None, dropout)
    return context.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)[:, :, :queries], None


def sdpa_or_zeros(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None, dropout: float) -> Tensor:
    """Return what `sdpa` computes, (B, N, S, H), and zeros for a query that may attend to nothing."""
    attends_anything = allowed.any(-1, keepdim=True)
    context, _ = sdpa(q, k, v, allowed | ~attends_anything, bias, dropout)
    return context.masked_fill(~attends_anything, 0)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Keep `F.scaled_dot_product_attention` from using cuDNN, unless no other kernel is enabled.

    cuDNN keeps one plan of its backward for a shape, whatever the gradient's layout: with another layout its gradients
    are wrong.  Some of its kernels give nan.  A backward uses its forward's kernel, so only forwards need this.  torch
    has one switch for all threads.
    """
    with nullcontext() if torch.compiler.is_compiling() else SWITCHING:
        others = [each for each in torch_private.enabled_kernels() if each != SDPBackend.CUDNN_ATTENTION]
        with sdpa_kernel(others) if others else nullcontext():
            yield


def attend_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the context of no heads or no tokens, with gradients; kernels on a GPU would divide by their number."""
    return q + k.sum() + v.sum()


def attend(
    q: Tensor, k: Tensor, v: Tensor, inputs: LayerContext, score_bias: ScoreBias | None, dropout: float
) -> Attended:  # (…, N, H) each -> (…, N·H), (B, N, S, K)
    """Compute the context, each head multiplied by its gate, and the attention weights if they are there or wanted.

    Args:
        score_bias: returns a bias to add to the scores, or is None.  It gets packed sequences in groups.
    """
    weights: Tensor | None = None
    if not inputs.backend.packs:
        context, weights = attend_rows(q, k, v, inputs, score_bias, dropout)
    elif q.shape[0] and q.shape[1]:
        context = inputs.backend.kernel(q, k, v, inputs.layout, score_bias, dropout, inputs.first_only)
    else:
        context = attend_nothing(q, k, v)
    if inputs.gates is not None:
        context, weights = apply_gate(context, weights, inputs)
    return context.flatten(-2), weights


def apply_gate(context: Tensor, weights: Tensor | None, inputs: LayerContext) -> Attended:
    """Multiply the context of each head, and its weights, by the gate of the layer."""
    if (gate := inputs.gate) is None:
        return context, weights
    gate = gate.to(context.device)  # layers may be on several devices
    return context * gate, weights * gate.transpose(1, 2) if weights is not None else None


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, inputs: LayerContext, score_bias: ScoreBias | None, dropout: float
) -> Attended:  # (B, S, N, H), (B, K, N, H) twice -> (B, S, N, H), (B, N, S, K)
    """Compute the context of rows, and their attention weights if the kernel gives them or they are wanted.

    If only first tokens are computed, they are the queries: S is 1.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    mask = inputs.mask.first() if inputs.first_only else inputs.mask  # moved to q: layers may be on several devices
    allowed, bias, attends_anything, evenly = (
        None if x is None else x.to(q.device) for x in (mask.allowed, mask.bias, mask.attends_anything, mask.evenly)
    )

    # DeBERTa's padding attends to all keys alike: with a query of zeros every score is the same.
    if evenly is not None:
        q = q.masked_fill(evenly, 0)
    if score_bias is not None:
        shift = score_bias(q, k)
        shift = shift if evenly is None else shift.masked_fill(evenly, 0)
        bias = shift if bias is None else shift + as_scores(bias, shift.dtype)

    # A fast kernel gives no weights, so if the caller wants them they are computed a second time.
    context, weights = inputs.backend.kernel(q, k, v, allowed, bias, dropout)
    if inputs.returns_weights and weights is None:
        weights = probabilities(q, k, allowed, bias)

    # A query without keys has zeros, whatever the kernel made of an empty softmax.
    context = context.transpose(1, 2)
    if attends_anything is not None:  # filled here, so that the gradient has the layout of the kernel's result
        nothing = ~attends_anything
        context = context.masked_fill(nothing.expand_as(q[..., :1]).transpose(1, 2), 0)
        weights = weights.masked_fill(nothing, 0) if weights is not None else None
    return context, weights


def grouped(
    q: Tensor, k: Tensor, v: Tensor, packing: Packed, score_bias: ScoreBias | None, dropout: float, first: bool,
    window: int | None = None,
) -> Tensor:  # fmt: skip  # (T, N, H) each -> (T, N, H)
    """Compute attention of packed sequences by SDPA, padded in the groups of `Packed.groups`.

    If only first tokens are computed, they are the queries.  With a window it is the largest distance of a key.
    """
    groups = packing.groups
    k, v = groups.spread(k), groups.spread(v)

    # With first tokens alone there is one query for each sequence, in the order of the groups.
    if not first:
        q = groups.spread(q)
    elif groups.rank is not None:
        q = q.index_select(0, groups.rank.argsort())

    # Each group is a padded batch of its own, with little padding since its lengths are near each other.
    slots, sequences, masks = zip(*groups.groups, strict=True)
    kernel: Any = sdpa if window is None else partial(sdpa_in_window, window=window)
    queries, contexts = sequences if first else slots, []
    for rows, real, *parts in zip(
        sequences, masks, q.split(queries), k.split(slots), v.split(slots), strict=True
    ):  # not slices, whose gradients are as long as all slots
        heads = [x.unflatten(0, (rows, -1)).transpose(1, 2) for x in parts]

        bias = None if score_bias is None else score_bias(heads[0], heads[1])
        if dropout and q.is_cpu and window is None:  # sdpa too would compute the weights
            context = torch.matmul(drop(probabilities(heads[0], heads[1], real, bias), dropout), heads[2])
        else:
            context, _ = kernel(heads[0], heads[1], heads[2], real, bias, dropout)  # (sequences, N, S, H)
        contexts.append(context.transpose(1, 2).flatten(0, 1))

    # Back to the order of the caller's sequences.
    context = torch.cat(contexts) if len(contexts) > 1 else contexts[0]
    if not first:
        return groups.gather(context)
    return context if groups.rank is None else context.index_select(0, groups.rank)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, packing: Packed, score_bias: ScoreBias | None, dropout: float, first: bool
) -> Tensor:
    """Compute attention of packed sequences without moving them.

    `varlen_attn` has no dropout, and for long sequences it may take cuDNN, whose gradients `without_cudnn` describes.
    Graphs have empty sequences, which only flash attention was tried with; and `varlen_attn` launches a kernel more.
    """
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = packing.nonempty_ends, max(packing.lengths)
    q_ends = torch.arange(len(ends), dtype=torch.int32, device=ends.device) if first else ends
    lengths = (q_ends, ends, 1 if first else longest, longest)
    if torch.is_grad_enabled() or dropout or isinstance(packing, Slots):
        return torch_private.flash_attention(q, k, v, *lengths, dropout, False, False)[0]
    context = varlen_attn(q, k, v, *lengths)
    assert isinstance(context, Tensor)  # not a pair: no log-sum-exp was asked for
    return context


def missing_for_varlen(needs: Requirements) -> str | None:
    """Return the reason why `torch.nn.attention.varlen.varlen_attn` cannot compute this attention, or None."""
    if needs.device.type != "cuda":
        return f"varlen_attn runs on CUDA, not on {needs.device.type}"

    # Each line is a limit of the kernel; the first one that this forward meets is the reason.
    known = torch.cuda.is_available() and not torch.compiler.is_compiling()
    if known and torch.cuda.get_device_capability(needs.device) < (8, 0):
        return "varlen_attn needs a GPU of compute capability 8.0 or more, as Ampere's"

    if needs.dtype not in (torch.float16, torch.bfloat16):
        return f"varlen_attn takes float16 and bfloat16, not {str(needs.dtype).removeprefix('torch.')}"
    if needs.head_dim % 8 or needs.head_dim > 256:
        return f"varlen_attn takes head dims that are multiples of 8 up to 256, not {needs.head_dim}"

    if torch_private.flash_attention is None:
        return f"torch {torch.__version__} has no aten._flash_attention_forward, which gives gradients and dropout"
    if needs.relative:
        return "varlen_attn is used without relative positions in the scores and without windows"
    return None


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("eager", eager, gives_dropped_weights=True),
        Backend("sdpa", sdpa),
        Backend("packed", grouped, packs=True),
        Backend("varlen", varlen, packs=True, missing=missing_for_varlen),
    )
}
PACKING = frozenset(name for name, backend in BACKENDS.items() if backend.packs)  # they leave padding out


def check_attention_name(name: str) -> None:
    """Raise ValueError for a name that is neither "auto" nor in the table; the message lists the known names."""
    check_known("attn_implementation", name, ("auto", *BACKENDS))


def select(name: str, needs: Requirements) -> Backend:
    """Pick the backend for one forward.

    "auto" chooses between "eager" and "sdpa".  "packed" is computed by "varlen" if that can do it; on CUDA, where it
    would pay, a warning gives the reason if it cannot.  Any other name selects that backend.

    Raises:
        ValueError: the name is unknown, or its backend does not meet the requirements.
    """
    if name == "auto":
        return BACKENDS["eager" if needs.weights else "sdpa"]

    # A named backend is taken or refused, never replaced.
    if name not in BACKENDS:
        check_attention_name(name)
    backend = BACKENDS[name]
    if needs.weights and backend.packs:
        raise ValueError(f"backend {name!r} cannot give attentions; use 'eager' or 'auto'")
    if needs.weights and needs.dropout and not backend.gives_dropped_weights:
        raise ValueError(
            f"backend {name!r} cannot give attentions while attention dropout is on; use 'eager' or 'auto'"
        )
    if backend.missing is not None and (missing := backend.missing(needs)) is not None:
        raise ValueError(f"backend {name!r} cannot run here: {missing}; use 'packed'")

    # "packed" says that padding is left out and not by which kernel: on CUDA there is a faster one.
    if name == "packed" and needs.device.type == "cuda":
        missing = missing_for_varlen(needs)
        if missing is None:
            return BACKENDS["varlen"]
        warnings.warn(f"packed attention runs as groups of padded sequences: {missing}", stacklevel=2)
    return backend
