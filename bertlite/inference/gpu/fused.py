"""Modules that compute what theirs do with fewer kernels, on a GPU with Triton; for models that only run.

Queries, keys and values come from one matmul.  Kernels of `triton_kernels` do what surrounds matmuls.

Shapes:  T tokens · D hidden · N heads · H head dim;  … is (B, S) or, packed, (T,)
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertlite.inference.checks import norm_fault
from bertlite.inference.gpu.triton_kernels import (
    ALIGNED,
    FORMULAS,
    GELU_TANH,
    TILES,
    add_norm,
    embed_and_norm,
    missing_for_triton,
    product,
)
from bertlite.models.base import BertModel
from bertlite.runtime.shapes import round_up_by_eighths
from bertlite.stack.attention import LayerContext, attend
from bertlite.stack.body import has_hooks_within
from bertlite.stack.embeddings import FamilyEmbeddings
from bertlite.stack.layouts import Slots
from bertlite.stack.modules import (
    Activation,
    BertAttention,
    BertEmbeddings,
    BertEncoder,
    BertIntermediate,
    BertLayer,
    BertOutput,
    BertSelfAttention,
    BertSelfOutput,
)
from bertlite.stack.positions import DISTANCES, BucketedDistances, DisentangledDistances, Distances, VectorDistances
from bertlite.support import torch_private
from bertlite.support.timing import time_calls

Way = Callable[[Tensor], Tensor]
MODULES = "modules"  # the way that runs a part's modules
RUNS = 5  # runs of each way in a search for the fastest
CYCLES = 2_000_000  # about a millisecond of a GPU, in which Python launches these
FEW = 2048  # tokens: with more, large blocks keep a GPU busy
WRONG = 0.02  # the largest difference, over the largest output, that rounding to 16 bits explains
WARPS = 8  # warps of `product` that a multiprocessor runs at once
FASTEST: dict[tuple[Any, ...], str] = {}  # {device, dtype, activation, T, neurons, D: the fastest way}


def runs_as_modules(module: nn.Module, x: Tensor) -> bool:
    """Return whether a module has to run part by part: hooks or autocast see each part."""
    return torch.is_autocast_enabled(x.device.type) or has_hooks_within(module)


class FusedEmbeddings(FamilyEmbeddings):
    """Embeddings that are gathered, added and normalised by one kernel."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:  # (…, D)
        if input_ids is None or inputs_embeds is not None or runs_as_modules(self, input_ids):
            return super().forward(input_ids, token_type_ids, position_ids, inputs_embeds)
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids.expand(input_ids.shape)
        places = None
        if self.adds_positions:
            counted = torch.arange(input_ids.shape[-1], device=input_ids.device)
            places = (counted if position_ids is None else position_ids).expand(input_ids.shape)
        table = self.position_embeddings.weight if self.adds_positions else None
        tables = self.word_embeddings.weight, self.token_type_embeddings.weight, table
        padding = -1 if self.padding_row is None else self.padding_row
        x = embed_and_norm(input_ids, types, places, tables, padding, self.LayerNorm)
        return x if self.projection is None else self.projection(x)


class FusedSelfAttention(BertSelfAttention):
    """Attention whose queries, keys and values are one matmul."""

    weight: Tensor  # (3 N H, D); the weights of query, key and value are views of it
    bias: Tensor
    score_biases: dict[int, Tensor]  # {longest sequence of a graph: (1, N, K, K)}, of positions in buckets

    def join_(self) -> None:
        """Lay the weights of queries, keys and values in one matrix."""
        self.score_biases = {}
        parts = (self.query, self.key, self.value)
        self.weight, self.bias = torch.cat([x.weight for x in parts]), torch.cat([x.bias for x in parts])
        for part, weight in zip(parts, self.weight.split([len(x.weight) for x in parts]), strict=True):
            part.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, hidden_states: Tensor, inputs: LayerContext) -> tuple[Tensor, Tensor | None]:
        layout, kind = inputs.layout, self.position_embedding_type
        if kind != "bucketed" or not isinstance(layout, Slots) or runs_as_modules(self, hidden_states):
            return super().forward(hidden_states, inputs)
        q, k, v = self.project(hidden_states, inputs)
        bias = self.score_biases.get(layout.keys)
        if bias is None:  # twenty kernels
            places = q.new_empty(1, self.num_attention_heads, layout.keys, 0)
            bias = DISTANCES[kind].score_bias(self, q, k, inputs)(places, places).contiguous()
            self.score_biases[layout.keys] = bias
        return attend(q, k, v, inputs, lambda q, k: bias[..., : q.shape[-2], : k.shape[-2]], 0.0)

    def project(self, hidden_states: Tensor, inputs: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        if inputs.source is not None or inputs.cache is not None or runs_as_modules(self, hidden_states):
            return super().project(hidden_states, inputs)
        heads = (3, self.num_attention_heads, self.attention_head_size)
        q, k, v = F.linear(hidden_states, self.weight, self.bias).unflatten(-1, heads).unbind(-3)
        return q, k, v


class FusedOutput(BertSelfOutput):
    """A projection whose bias is added and normalised with the residual by one kernel."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:  # (…, N·H), (…, D) -> (…, D)
        if runs_as_modules(self, hidden_states):
            return super().forward(hidden_states, input_tensor)
        return add_norm(F.linear(hidden_states, self.dense.weight), self.dense.bias, input_tensor, self.LayerNorm)


class FusedIntermediate(BertIntermediate):
    """A matmul with its activation, by the fastest of some kernels for its sizes."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # (…, D) -> (…, intermediate)
        x, (neurons, width) = hidden_states, self.dense.weight.shape
        if runs_as_modules(self, x) or not x.numel() or not neurons:
            return super().forward(x)
        tokens = round_up_by_eighths(x.numel() // width, 16)
        ways = ways_of(self, x.device, x.dtype, tokens)
        key = x.device, x.dtype, self.intermediate_act_fn.name, tokens, neurons, width
        if key not in FASTEST:
            if len(ways) > 1 and x.is_cuda and torch.cuda.is_current_stream_capturing():
                return super().forward(x)  # nothing can be timed now
            FASTEST[key] = fastest(ways, x.new_empty(tokens, width)) if len(ways) > 1 else MODULES
        return ways[FASTEST[key]](x.reshape(-1, width).contiguous()).view(*x.shape[:-1], neurons)


def ways_of(part: BertIntermediate, device: torch.device, dtype: torch.dtype, tokens: int) -> dict[str, Way]:
    """Return the functions that compute a part, (T, D) -> (T, neurons), by name; the first runs its modules.

    torch's matmul has ReLU and GELU by tanh.  Ours takes 16-bit numbers from Hopper on, which copies memory by blocks.
    """
    ways: dict[str, Way] = {MODULES: partial(BertIntermediate.forward, part)}
    if device.type != "cuda" or dtype.itemsize != 2:
        return ways
    name, weight, bias = str(part.intermediate_act_fn.name), part.dense.weight, part.dense.bias
    by_torch = torch_private.addmm_activation
    if by_torch is not None and (name in GELU_TANH or name == "relu"):
        ways["cuBLAS"] = lambda x: by_torch(bias, x, weight.t(), use_gelu=name != "relu")
    if torch.cuda.get_device_capability(device) >= (9, 0) and weight.shape[1] * dtype.itemsize % ALIGNED == 0:
        count = torch.cuda.get_device_properties(device).multi_processor_count
        for tiles in TILES[:1] if tokens <= FEW else TILES[1:]:  # each takes seconds to compile
            run = partial(product, weight=weight, bias=bias, name=name, tiles=tiles)
            ways[f"{tiles.rows} x {tiles.columns}"] = partial(run, programs=count * (WARPS // tiles.warps))
    return ways


def fastest(ways: Mapping[str, Way], x: Tensor) -> str:
    """Return the name of the fastest way, of those that run and agree with the first; the host waits for them.

    Args:
        x: memory for the inputs, which are drawn here.
    """
    x.normal_(generator=torch.Generator(x.device).manual_seed(0))

    # The first way is the measure: it is torch's own, and right by definition.
    (first, *others), faults = ways, {}
    right, times = ways[first](x), {first: seconds_of_run(partial(ways[first], x), x.device)}

    # A compiler that fails, or is wrong on this GPU, costs speed and nothing else.
    for name in others:
        try:
            error = (ways[name](x) - right).abs().max() / right.abs().max()
            if error <= WRONG:
                times[name] = seconds_of_run(partial(ways[name], x), x.device)
            else:  # nan is
                faults[name] = f"its error is {float(error):.1e}"
        except Exception as error:  # Triton's compiler and drivers raise many kinds
            faults[name] = f"{type(error).__name__}: {error}"

    for name, fault in faults.items():
        warnings.warn(f"the matmul {name} is not used here: {fault}", RuntimeWarning, stacklevel=2)
    return min(times, key=times.__getitem__)


def seconds_of_run(run: Callable[[], object], device: torch.device) -> float:
    """Return the time of a run; on a GPU the least of some, without launching, which graphs save."""
    run()
    if device.type != "cuda":
        return time_calls(run, RUNS)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(RUNS)]
    torch_private.keep_busy(CYCLES)
    for start, end in events:
        start.record()
        run()
        end.record()
    events[-1][1].synchronize()  # to wait for the device would fail while another thread records
    return min(start.elapsed_time(end) for start, end in events) / 1e3


# Which parts of a model are replaced


def fuse_(model: BertModel) -> bool:
    """Replace parts of a body that only runs; one warning names each kind that stays as it is.

    Returns:
        whether kernels of Triton run here.
    """
    missing = missing_for_triton(model.device.type, model.dtype)
    if missing is not None:
        warnings.warn(f"torch's operators run what surrounds matmuls: {missing}", stacklevel=5)
        return False

    # A part that the kernels cannot compute stays as it is; all other parts are fused.
    reasons = {}
    for name, part in model.named_modules():
        known, cls = FUSED.get(type(part), (None, None))
        fault = None if known is None else fault_of(part, known)
        if fault is not None:
            reasons[fault] = name

        # The class changes and the parameters stay, so that the model keeps its names and its weights.
        elif cls is not None:
            if isinstance(part, BertEmbeddings) and not isinstance(part, FamilyEmbeddings):
                vars(part)["projection"] = None
            part.__class__ = cls
            if isinstance(part, FusedSelfAttention):
                part.join_()

    if reasons:
        found = "; ".join(f"{name} {fault}" for fault, name in reasons.items())
        warnings.warn(f"torch's operators run some parts of this model: {found}", stacklevel=5)
    return True


def fault_of(part: Any, known: str) -> str | None:
    """Return the reason why a part of a model stays as it is; None if kernels compute all of it.

    Args:
        known: the names of what kernels know in it.
    """
    held = {**part._modules, **part._parameters, **part._buffers}
    other = next((name for name, x in held.items() if x is not None and name not in known.split()), None)
    if other is not None:
        return f"has {other}, which no kernel computes"

    # Positions may change queries and keys before attention.
    kind = getattr(part, "position_embedding_type", None)
    if kind is not None and not knows_positions(kind):
        return f"has {kind} positions, for which there is no kernel"

    # From here on a part is of a kind that kernels know, and details decide.
    if isinstance(part, BertEmbeddings):
        if getattr(part, "norms_last", False):
            return "projects embeddings before they are normalised"
        return fault_of_norm(part.LayerNorm, part.word_embeddings.weight.shape[1])

    # The parts of a layer.
    if any(x.bias is None for x in part.children() if isinstance(x, nn.Linear)):
        return "has a matrix without a bias"
    if isinstance(part, BertSelfOutput):
        return fault_of_norm(part.LayerNorm, part.dense.weight.shape[0])
    if isinstance(part, BertIntermediate):
        act = part.intermediate_act_fn
        if type(act) is not Activation or act.name not in FORMULAS:
            return f"has an activation, {act!r}, for which there is no kernel"
    return None


def fault_of_norm(norm: Any, width: int) -> str | None:
    """Return the reason why the kernels do not compute a norm, whatever its eps; None if they do."""
    return "has no norm" if norm is None else norm_fault(norm, width, getattr(norm, "eps", 0.0))


def knows_positions(kind: str) -> bool:
    """Return whether graphs and kernels compute a kind of positions: others may change queries and keys."""
    return type(DISTANCES[kind]) in (Distances, VectorDistances, BucketedDistances, DisentangledDistances)


IN_EMBEDDINGS = "word_embeddings position_embeddings token_type_embeddings LayerNorm dropout"
FUSED: dict[type[nn.Module], tuple[str, type[nn.Module] | None]] = {  # {class: (its known parts, what replaces it)}
    BertEmbeddings: (IN_EMBEDDINGS, FusedEmbeddings),
    FamilyEmbeddings: (f"{IN_EMBEDDINGS} projection", FusedEmbeddings),
    BertSelfAttention: (
        "query key value dropout distance_embedding pos_key_proj pos_query_proj pos_dropout",
        FusedSelfAttention,
    ),
    BertSelfOutput: ("dense LayerNorm dropout", FusedOutput),
    BertOutput: ("dense LayerNorm dropout", FusedOutput),
    BertIntermediate: ("dense intermediate_act_fn", FusedIntermediate),
    BertAttention: ("self output", None),
    BertLayer: ("attention crossattention intermediate output", None),
    BertEncoder: ("layer rel_embeddings LayerNorm", None),
}
