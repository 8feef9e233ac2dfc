"""Models made ready to run, and only that: weights packed for the machine, and products fused with what follows them.

`optimize_for_inference` keeps the tree of a model and replaces its matrices by products: one for queries, keys and
values together, one that ends in the activation, and two that end in the addition of the residual.

Shapes:  … is (B, S) or, packed, (T,) · I inputs · O outputs · N heads · H head dim
"""

import copy
import ctypes
import mmap
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from bertlite.activations import Activation
from bertlite.config import BertConfig
from bertlite.model import BertPreTrainedModel
from bertlite.stack.attention import Attend
from bertlite.stack.modules import BertAttention, BertLayer, BertOutput, BertSelfOutput, KeyInput

FUSED = {  # the activations that oneDNN computes inside a product: its names for the function and for the formula
    "gelu": ("gelu", "none"),
    "gelu_python": ("gelu", "none"),
    "gelu_accurate": ("gelu", "tanh"),
    "gelu_new": ("gelu", "tanh"),
    "gelu_python_tanh": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
}
BACKENDS = ("auto", "onednn", "inductor")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
ROWS = {  # that a feed-forward network takes at a time: the fastest tried at bert-base's shape; float16 as bfloat16
    torch.float32: 512,
    torch.bfloat16: 256,
    torch.float16: 256,
    torch.int8: 512,
}
COLLAPSE = 25  # MADV_COLLAPSE of madvise(2), since Linux 6.1
SMALL = 512  # up to so many tokens a GPU waits for its kernels to be launched, so they are launched as one graph


class Product(nn.Module):
    """x @ weight.T + bias, then perhaps an activation, with a weight that is fixed.

    `rows` is how many rows of x are best taken at a time, 0 for all.

    Args:
        weight: (O, I).
        bias: (O,), or None.
        act: a name of ACTIVATIONS.
    """

    rows = 0

    def __init__(self, weight: Tensor, bias: Tensor | None, act: str | None = None) -> None:
        super().__init__()
        self.weight, self.bias = self.pack(weight.detach()), bias if bias is None else bias.detach().clone()
        self.outputs = weight.shape[0]
        self.act = None if act is None else Activation(act)
        self.function, self.formula = "none", ""  # of the activation that is fused

    def pack(self, weight: Tensor) -> Any:
        """The weight as this product wants it."""
        return weight.clone()

    def unpack(self, weight: Tensor) -> Any:
        """The same as what another process can be sent; see `received`."""
        return weight

    def forward(self, x: Tensor) -> Tensor:  # (…, I) -> (…, O)
        y = F.linear(x, self.weight, self.bias)
        return y if self.act is None else self.act(y)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:  # (…, I), (…, O) -> (…, O); there is no activation
        return F.linear(x, self.weight, self.bias) + residual

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()  # type: ignore[no-untyped-call]  # without what is compiled
        return {**state, "weight": self.unpack(self.weight)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "weight": self.pack(received(state["weight"]))})  # type: ignore[no-untyped-call]


class Prepacked(Product):
    """A product whose weight lies as oneDNN's kernels read it, in float32, bfloat16 or float16."""

    def __init__(self, weight: Tensor, bias: Tensor | None, act: str | None = None) -> None:
        fused = FUSED.get(act or "")
        super().__init__(weight, bias, None if fused else act)
        if fused:
            self.function, self.formula = fused
        self.rows = ROWS.get(weight.dtype, 0)

    def pack(self, weight: Tensor) -> Tensor:
        return on_huge_pages(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None))

    def unpack(self, weight: Tensor) -> Any:
        return sendable(weight.to_dense())

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():  # oneDNN gives an output of no size
            return x.new_empty(*x.shape[:-1], self.outputs)
        y = self.multiply(x)
        return y if self.act is None else self.act(y)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.multiply_add(x, residual) if x.numel() else residual

    def multiply(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, self.function, [], self.formula)

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")


class Quantised(Prepacked):
    """A product in 8-bit integers: the weight rounded once, with a scale for each output; the input at every call,
    with one scale for all of its rows.  What it adds up, its bias and its output are floats."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, act: str | None = None, out: torch.dtype = torch.float32
    ) -> None:
        self.scales = weight.detach().float().abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        super().__init__((weight / self.scales[:, None]).round().to(torch.int8), bias, act)
        self.zeros = torch.zeros_like(self.scales, dtype=torch.int64)
        self.out = out

    def pack(self, weight: Tensor) -> Tensor:
        return on_huge_pages(torch.ops.onednn.qlinear_prepack(weight, None))

    def unpack(self, weight: Tensor) -> Any:
        return sendable(weight.to_dense().t())

    def multiply(self, x: Tensor) -> Tensor:
        rounded, scale = quantise(x)
        return torch.ops.onednn.qlinear_pointwise.default(
            rounded, scale, 0, self.weight, self.scales, self.zeros, self.bias,
            1.0, 0, self.out, self.function, [], self.formula,
        )  # fmt: skip

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        rounded, scale = quantise(x)
        return torch.ops.onednn.qlinear_pointwise.binary(
            rounded, scale, 0, self.weight, self.scales, self.zeros, residual, self.bias,
            1.0, 0, self.out, 1.0, 0, "add", 1.0, "none", [], "",
        )  # fmt: skip


def on_huge_pages(packed: Tensor) -> Tensor:
    """A packed weight whose memory Linux was asked to lay on huge pages, which a small batch reads faster.

    A kernel that has no such call leaves the weight on small ones.
    """
    if sys.platform == "linux":
        start, size = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if first < start + size:
            libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(start + size - first), COLLAPSE)
    return packed


@cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def quantise(x: Tensor) -> tuple[Tensor, float]:
    """x as 8-bit integers, -127 to 127, and what one of them is worth."""
    x = x.float().contiguous()
    low, high = torch.aminmax(x) if x.numel() else (torch.zeros(()), torch.zeros(()))
    scale = max(-float(low), float(high)) / 127 or 1.0
    rounded = torch.quantize_per_tensor(x, scale, 0, torch.qint8)
    return torch.empty(0, dtype=torch.int8).set_(rounded.untyped_storage(), 0, x.shape, x.stride()), scale


Make = Callable[..., Product]


class FusedAttention(nn.Module):
    """BertAttention with as few products as it can have.

    Args:
        make, make_heads: of a product that stays in the layer, and of one whose outputs are queries, keys or values.
        apart: whether queries may come from elsewhere than keys and values: in cross-attention, and in a last layer of
            which the first tokens alone are wanted.
    """

    def __init__(self, attention: BertAttention, make: Make, make_heads: Make, apart: bool) -> None:
        super().__init__()
        own = attention.self
        groups = ([own.query], [own.key, own.value]) if apart else ([own.query, own.key, own.value],)
        self.products = nn.ModuleList(joined(make_heads, group) for group in groups)
        self.shapes = [(len(group), own.num_attention_heads, own.attention_head_size) for group in groups]
        del own.query, own.key, own.value
        self.self = own  # for its relative positions
        self.output = FusedOutput(attention.output, make)

    def forward(
        self, hidden_states: Tensor, attend: Attend, gate: Tensor | None = None, source: KeyInput | None = None
    ) -> tuple[Tensor, Tensor | None]:  # (…, D) -> (…, D), (B, N, S, K)
        q, *kv = self.project(0, hidden_states)
        if isinstance(source, tuple):
            k, v = source
        else:
            k, v = kv or self.project(1, hidden_states if source is None else source)
        score_bias = self.self.distance_scores if self.self.position_embedding_type != "absolute" else None
        context, weights = attend(q, k, v, score_bias, 0.0, self.self)
        if gate is not None:
            context = context * gate
            weights = weights * gate.transpose(1, 2) if weights is not None else None
        return self.output(context.flatten(-2), hidden_states), weights

    def project(self, which: int, x: Tensor) -> list[Tensor]:  # (…, D) -> so many (…, N, H)
        return list(self.products[which](x).unflatten(-1, self.shapes[which]).unbind(-3))


class FusedOutput(nn.Module):
    """BertSelfOutput or BertOutput, the addition fused with the product."""

    dense: Product

    def __init__(self, output: BertSelfOutput | BertOutput, make: Make) -> None:
        super().__init__()
        self.dense = joined(make, [output.dense])
        self.LayerNorm = output.LayerNorm

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # (…, I), (…, D) -> (…, D)
        return in_blocks(self.dense.rows, self.compute, x, residual)

    def compute(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense.add(x, residual))


def joined(make: Make, parts: list[nn.Linear], act: str | None = None) -> Product:
    """One product that computes what these linear layers compute, one after the other."""
    weights: list[Tensor] = [part.weight for part in parts]
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    return make(weights[0] if len(weights) == 1 else torch.cat(weights), torch.cat(biases) if biases else None, act)


class FusedLayer(BertLayer):
    """BertLayer with products for matrices, which take ROWS at a time."""

    def __init__(self, layer: BertLayer, make: Make, make_heads: Make, last: bool) -> None:
        nn.Module.__init__(self)
        self.layer_idx, self.checkpointing, self.chunk_size_feed_forward = layer.layer_idx, None, 0
        self.attention = FusedAttention(layer.attention, make, make_heads, apart=last)  # type: ignore[assignment]
        if hasattr(layer, "crossattention"):
            self.crossattention = FusedAttention(layer.crossattention, make, make_heads, True)  # type: ignore[assignment]
        function = layer.intermediate.intermediate_act_fn
        if isinstance(function, Activation):
            self.intermediate = joined(make, [layer.intermediate.dense], function.name)  # type: ignore[assignment]
        else:  # one with parameters
            self.intermediate = nn.Sequential(joined(make, [layer.intermediate.dense]), function)  # type: ignore[assignment]
        self.output = FusedOutput(layer.output, make)

    output: FusedOutput  # type: ignore[assignment]

    def feed_forward(self, x: Tensor) -> Tensor:  # (…, D) -> (…, D)
        return in_blocks(self.output.dense.rows, super().feed_forward, x)


def sendable(weight: Tensor) -> tuple[Any, torch.dtype]:
    """A tensor that nobody keeps, for another process.  Of a tensor multiprocessing would send a file descriptor,
    which is closed with the tensor and then given to the next one, before the process is there."""
    return weight.contiguous().view(torch.uint8).numpy(), weight.dtype


def received(sent: Any) -> Tensor:
    """What `sendable`, or a tensor, was in the process that sent it."""
    if isinstance(sent, Tensor):
        return sent
    array, dtype = sent
    return torch.from_numpy(array).view(dtype)


def in_blocks(rows: int, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """What `run` makes of each row of (…, I), computed so many rows at a time; 0 is all."""
    shape = inputs[0].shape[:-1]
    if not rows or shape.numel() <= rows:
        return run(*inputs)
    blocks = zip(*(x.flatten(0, -2).split(rows) for x in inputs), strict=True)
    return torch.cat([run(*block) for block in blocks]).unflatten(0, shape)


class InferenceModel(nn.Module):
    """A model that only runs: what `optimize_for_inference` returns.

    It is called like the model it was made from and returns the same types, without gradients.  It pickles, and packs
    its weights again where it is unpickled.  A forked process may run it after `torch.set_num_threads(1)`, as a
    DataLoader's workers do: threads do not survive a fork.
    """

    def __init__(self, model: BertPreTrainedModel, backend: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.backend, self.computes_in = model, backend, dtype
        super().train(False)
        self.arm()

    def arm(self) -> None:
        """Have the parts compiled, at their first use."""
        self.graphed: Callable[..., Any] | None = None
        if self.backend != "inductor":
            return
        if self.device.type != "cuda":
            self.model._compiled_call_impl = compiled(self.model)
            return
        self.graphed = compiled(self.model, mode="reduce-overhead")
        alike: dict[Any, list[nn.Module]] = {}
        for part in self.model.modules():
            if isinstance(part, Product | FusedOutput):  # attention stays outside: what it takes differs by batch
                product = part if isinstance(part, Product) else part.dense
                alike.setdefault((type(part), product.weight.shape, repr(product.act)), []).append(part)
        for parts in alike.values():
            run = own_copy(type(parts[0]).forward)
            for part in parts:
                part._compiled_call_impl = torch.compile(MethodType(run, part), dynamic=True)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.graphed is None or not self.small(*args, **kwargs):
            return self.model(*args, **kwargs)
        torch.compiler.cudagraph_mark_step_begin()
        return pytree.tree_map_only(Tensor, Tensor.clone, self.graphed(*args, **kwargs))  # the next call writes there

    def small(self, input_ids: Tensor | None = None, *_: Any, **others: Any) -> bool:
        x = input_ids if input_ids is not None else others.get("inputs_embeds")
        packed = others.get("cu_seqlens") is not None or self.config.attn_implementation == "packed"  # by lengths
        return x is not None and x.shape[:2].numel() <= SMALL and not packed and not self.config.is_decoder

    @property
    def config(self) -> BertConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the outputs."""
        return self.model.dtype

    def extra_repr(self) -> str:
        return f"backend={self.backend!r}, dtype={self.computes_in}"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "graphed": None}  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.arm()

    def train(self, mode: bool = True) -> "InferenceModel":
        return refuse("training mode") if mode else self

    def requires_grad_(self, requires_grad: bool = True) -> "InferenceModel":
        return refuse("gradients") if requires_grad else self

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse("state_dict: save the model it was made from")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse("load_state_dict")

    def save_pretrained(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse("save_pretrained: save the model it was made from")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NoReturn:
        refuse("other device or dtype than it was made for: move the model it was made from, and optimise that")


def compiled(module: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(MethodType(own_copy(type(module).forward), module), dynamic=True, **options)


def own_copy(function: Any) -> FunctionType:
    """The same function with code of its own: torch compiles a code 8 times, for whatever modules, and then runs it
    as it is."""
    code, scope, name = function.__code__.replace(), function.__globals__, function.__name__
    copied = FunctionType(code, scope, name, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def refuse(what: str) -> NoReturn:
    raise RuntimeError(f"an optimised model has no {what}; its weights are packed for running and nothing else")


def optimize_for_inference(
    model: BertPreTrainedModel, dtype: torch.dtype | None = None, backend: str = "auto"
) -> InferenceModel:
    """A copy of the model that runs faster, and does nothing but run.

    The copy shares nothing with `model`: let go of that one to have its memory back.

    Args:
        model: BertModel or one of the task heads, pruned or not, on the CPU or a GPU.
        dtype: what is computed in: float32, bfloat16, float16, or on the CPU int8, by default the model's own.  With
            int8 the matrices of the layers are 8-bit integers and their inputs are rounded at every call, to 255 steps
            between the largest number and its opposite; all else is float32, but for attention, which is bfloat16
            where oneDNN has it.  The rounding depends on what else is in the batch.
        backend: "onednn" packs the weights for oneDNN's kernels, on the CPU; "inductor" has torch compile the model,
            at its first run, which needs a C++ compiler on the CPU; "auto" is the first on the CPU and the second
            elsewhere.

    Raises:
        ValueError: the backend does not exist, or not for this device and dtype.
        RuntimeError: this build of torch lacks the operators.
        TypeError: `model` is not a bertlite model, or holds matrices that are not plain nn.Linear.

    Source: the operators are those that torch.compile itself writes for linear layers on the CPU
    (torch/_inductor/fx_passes/mkldnn_fusion.py and quantization.py of torch 2.13).
    """
    if not isinstance(model, BertPreTrainedModel):
        raise TypeError(f"model is a {type(model).__module__}.{type(model).__qualname__}; load it with bertlite")
    refuse_wrapped(model)
    dtype, device = dtype or model.dtype, model.device.type
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; have: {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = "onednn" if device == "cpu" else "inductor"
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype} is not among {', '.join(map(str, DTYPES))}; give one of them")
    if backend == "inductor" and dtype == torch.int8:
        raise ValueError("backend 'inductor' has no int8; use 'onednn', or bfloat16")
    if backend == "onednn":
        if device != "cpu":
            raise ValueError(f"backend 'onednn' is for the CPU and the model is on {model.device}; use 'inductor'")
        require_onednn(dtype)
    return InferenceModel(fused(model, dtype, Prepacked if backend == "onednn" else Product), backend, dtype)


def require_onednn(dtype: torch.dtype) -> None:
    """Refuse a torch without the operators that a dtype needs."""
    needed = ["mkldnn::" + name for name in ("_reorder_linear_weight", "_linear_pointwise", "data_ptr", "_nbytes")]
    if dtype == torch.int8:
        needed += ["onednn::qlinear_prepack", "onednn::qlinear_pointwise", "aten::quantize_per_tensor"]
    have = torch._C._jit_get_all_schemas if torch.backends.mkldnn.is_available() else list
    names = {schema.name for schema in have()}
    lacks = [name for name in needed if name not in names]
    support = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if not lacks and dtype in support and not getattr(torch.ops.mkldnn, support[dtype])():
        lacks = [f"{dtype} on this processor"]
    if not lacks and dtype == torch.int8 and not multiplies_signed():
        lacks = ["product of signed integers"]
    if lacks:
        raise RuntimeError(
            f"torch {torch.__version__} has no {', '.join(lacks)}, which backend 'onednn' needs for {dtype}; use"
            " backend='inductor', another dtype, or a newer torch, built with oneDNN as those of PyPI for x86-64 are"
        )


def multiplies_signed() -> bool:
    """Whether oneDNN multiplies signed 8-bit integers; torch 2.6 has it take unsigned ones alone."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch 2.13 announces once that quantize_per_tensor will go
            Quantised(torch.ones(1, 1), None)(torch.ones(1, 1))
    except RuntimeError:
        return False
    return True


def refuse_wrapped(model: nn.Module) -> None:
    for name, part in model.named_modules():
        wrapped = isinstance(part, nn.Linear) and type(part) is not nn.Linear
        if wrapped or (name.endswith((".dense", ".query", ".key", ".value")) and not isinstance(part, nn.Linear)):
            raise TypeError(
                f"{name} is a {type(part).__module__}.{type(part).__qualname__}, not a plain nn.Linear: merge adapters"
                " first, and start from the model that is not quantised"
            )


@torch.no_grad()
def fused(model: Any, dtype: torch.dtype, product: type[Product]) -> Any:
    """A copy of the model with products for matrices."""
    floats = torch.float32 if dtype == torch.int8 else dtype
    model = without_copying_matrices(model)
    layers = model.base_model.encoder.layer

    def make(
        weight: Tensor, bias: Tensor | None, act: str | None = None, kind: Callable[..., Product] = product
    ) -> Product:
        if not weight.numel():  # of a layer that has lost its heads or neurons: the bias is all it gives
            kind = Product
        return kind(weight.to(floats), None if bias is None else bias.to(floats), act)

    inner = heads = make
    if dtype == torch.int8:
        attends_in = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
        inner, heads = partial(make, kind=Quantised), partial(make, kind=partial(Quantised, out=attends_in))
    for i, layer in enumerate(layers):
        layers[i] = FusedLayer(layer, inner, heads, last=i == len(layers) - 1)
    for part in list(model.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.Linear):
                setattr(part, name, joined(make, [child]))
    return model.to(floats).requires_grad_(False)


def without_copying_matrices(model: Any) -> Any:
    """A copy whose linear layers hold the very weights of the model, since they will be packed and let go."""
    kept = {id(p) for part in model.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    memo = {
        id(p): nn.Parameter(p.detach(), requires_grad=False)
        for part in model.modules()
        if isinstance(part, nn.Linear)
        for p in part.parameters()
        if id(p) not in kept
    }
    return copy.deepcopy(model, memo)
