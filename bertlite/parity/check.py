"""Is our model transformers' BertModel?  `check` answers for one case, `run` for many on one checkpoint."""

import copy
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import bertlite
from bertlite.config import BertConfig
from bertlite.parity import reference
from bertlite.parity.cases import CASES, DECODER, KERNELS, Case
from bertlite.parity.compare import (
    Report,
    Row,
    Rule,
    as_well,
    closely,
    compare,
    exactly,
    finite,
    first_divergence,
    relatively,
    trace,
)
from bertlite.parity.inputs import inputs_of

Tamper = Callable[[nn.Module], Any]
OVERRIDES: dict[str, dict[str, Any]] = {  # three labels: two could be swapped in a loss and not show
    "BertForSequenceClassification": {"num_labels": 3},
    "BertForTokenClassification": {"num_labels": 3},
    DECODER: {"is_decoder": True},
}
GRADIENTS = ("gradients", "checkpointed")
ROUNDS_DIFFERENTLY = (
    "head_mask",
    "pruned",
    "pruned_layer",
    "relative_key",
    "relative_key_query",
)  # other order of sums


@dataclass
class Models:
    """Both sides of a comparison, loaded once for the cases that share them."""

    checkpoint: str | Path
    model: str
    overrides: Mapping[str, Any]
    dtype: torch.dtype
    device: str
    folder: TemporaryDirectory[str] = field(default_factory=partial(TemporaryDirectory, prefix="bertlite-parity-"))
    loaded: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        return (str(self.checkpoint), self.model, str(self.overrides), self.dtype, self.device)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.loaded:
            self.loaded[name] = make()
        return self.loaded[name]

    @property
    def source(self) -> str | Path:
        return self.once(
            "source", lambda: reference.complete(self.checkpoint, self.model, self.overrides, Path(self.folder.name))
        )

    @property
    def ours(self) -> Any:
        def make() -> Any:
            return getattr(bertlite, self.model).from_pretrained(
                self.source, dtype=self.dtype, device=self.device, **self.overrides
            )

        return self.once("ours", make)

    def theirs(self, backend: str) -> nn.Module:
        return self.once(
            backend,
            lambda: reference.load(self.source, self.model, self.overrides, self.dtype, backend, self.device),
        )

    @property
    def truth(self) -> nn.Module:
        return self.once("truth", lambda: copy.deepcopy(self.theirs("eager")).double())


_current: Models | None = None


def models_for(case: Case, device: str, checkpoint: str | Path) -> Models:
    """The models of a case; those of the case before are kept while they serve."""
    global _current
    overrides = {**OVERRIDES.get(case.model, {}), **case.overrides}
    wanted = Models(checkpoint, case.model, overrides, getattr(torch, case.dtype), device)
    if _current is None or _current.key != wanted.key or not Path(_current.folder.name).exists():
        forget()
        _current = wanted
    return _current


def forget() -> None:
    """Let go of the models that are kept between cases, and of the files made for them."""
    global _current
    if _current is not None:
        _current.folder.cleanup()
    _current = None


def check(case: Case, device: str = "cpu", checkpoint: str | Path = "", tamper: Tamper | None = None) -> Report:
    """Run one case on both sides and compare everything they return.

    Args:
        device: "cpu" or "cuda"; TF32 is off.
        checkpoint: a hub id, a folder or a file of a BERT.
        tamper: changes our model first, to prove that the check would notice.

    Returns:
        A report; `not_checked` where the installed transformers cannot vouch for the case.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        FileNotFoundError, ValueError: the checkpoint cannot be loaded.
    """
    try:
        reference.require(case)
        with products_in(case.run), kernel_of(case.run):
            return checked(case, device, checkpoint, tamper)
    except reference.UnsupportedError as reason:
        return Report(case.name, not_checked=str(reason))


def checked(case: Case, device: str, checkpoint: str | Path, tamper: Tamper | None) -> Report:
    start = time.perf_counter()
    models = models_for(case, device, checkpoint)
    inputs = inputs_of(case, models.ours.config, models.source, device)
    ours = prepared(case, models.ours, inputs, tamper)
    sides = {"theirs": their_model(case, models.theirs(reference.backend_for(case)), inputs)}
    if case.dtype != "float64":
        sides["truth"] = their_model(case, models.truth, inputs)
    kernels = Kernels()
    with kernels:
        mine = tensors(case, ours, inputs, mine=True)
    if case.run in LAUNCHES:  # where no kernel can be watched
        mine = tensors(case, LAUNCHES[case.run](copy.deepcopy(ours)), inputs, mine=True)
    others = {side: tensors(case, model, inputs, mine=False) for side, model in sides.items()}
    if case.run == "beside":
        there = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in inputs.items()}
        others["theirs"] = tensors(case, copy.deepcopy(ours).cpu(), there, mine=True)
    rows: list[Row] = []
    if case.batch == "emptyrow":  # transformers' backends disagree on it
        rows = [finite(name, x[-1:]) for name, x in mine.items()]
        mine = {name: x[:-1] for name, x in mine.items()}
        others = {side: {name: x[:-1] for name, x in found.items()} for side, found in others.items()}
    rows += compare(mine, others["theirs"], others.get("truth"), partial(rule_for, case, device))
    report = Report(case.name, tuple(rows), backend=kernels.name, seconds=time.perf_counter() - start)
    beside_theirs = case.run not in (*LAUNCHES, "beside") and case.backend != "packed"  # module by module
    if report.ok or not beside_theirs:
        return report
    runs = {side: partial(forward, case, model, inputs, mine=False) for side, model in sides.items()}
    traces = {side: trace(model, runs[side]) for side, model in sides.items()}
    seen = trace(ours, partial(forward, case, ours, inputs, mine=True))
    first = first_divergence(seen, traces["theirs"], traces.get("truth"), rule_for(case, device, "forward"))
    return Report(case.name, report.rows, kernels.name, first, seconds=time.perf_counter() - start)


def rule_for(case: Case, device: str, tensor: str) -> Rule:
    """Which claim is made for one tensor of a case."""
    if case.dtype == "float64":
        return relatively if tensor.startswith("grad.") else closely
    exact = (
        case.dtype == "float32"
        and device == "cpu"
        and not reference.honours("prune_heads")  # 4.57 divides where 5 multiplies
        and case.backend != "packed"
        and case.feature not in ROUNDS_DIFFERENTLY
        and case.run in ("", *KERNELS)
        and not (case.feature == "attentions" and case.backend == "sdpa")  # theirs are eager's
        and not tensor.startswith("grad.")
    )
    return exactly if exact else as_well


def prepared(case: Case, model: Any, inputs: Mapping[str, Any], tamper: Tamper | None) -> Any:
    """Our model as the case wants it: a copy, if it is changed."""
    if tamper is not None or case.feature in ("pruned", "pruned_layer", "checkpointed", "dropout"):
        model = copy.deepcopy(model)
    model.set_attn_implementation(case.backend)
    if case.feature in ("pruned", "pruned_layer"):
        model.prune_heads(heads_of(case, model.config))
    if case.feature == "checkpointed":
        model.gradient_checkpointing_enable()
    model.train(case.feature == "dropout")
    if tamper is not None:
        tamper(model)
    return model


def their_model(case: Case, model: nn.Module, inputs: Mapping[str, Any]) -> nn.Module:
    if case.feature in ("pruned", "pruned_layer"):
        model = reference.prune(model, heads_of(case, model.config))
    if case.feature == "head_mask" and not reference.honours("head_mask"):
        model = reference.with_gates(model, inputs["head_mask"])
    return model.train(case.feature == "dropout")


def heads_of(case: Case, config: Any) -> dict[int, tuple[int, ...]]:
    """What the pruning cases prune: every third head of every second layer, or one layer's heads all but transformers'
    own limit: 4.57 cannot run a layer without heads."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    if case.feature == "pruned":
        return {layer: tuple(range(layer % 3, heads, 3)) for layer in range(0, layers, 2)}
    return {layers - 1: tuple(range(1 if reference.honours("prune_heads") else 0, heads))}


def forward(case: Case, model: nn.Module, inputs: Mapping[str, Any], mine: bool) -> Any:
    said = dict(inputs) if mine else reference.inputs_for(case, inputs)
    said.pop("dtype_of_masks", None)
    dtype = next(model.parameters()).dtype
    said = {k: v.to(dtype) if k in ("inputs_embeds", "encoder_hidden_states") else v for k, v in said.items()}
    torch.manual_seed(0)  # for the dropout case
    return model(**said)


def tensors(case: Case, model: Any, inputs: Mapping[str, Any], mine: bool) -> dict[str, Tensor]:
    """Everything one side returns, by name: outputs, hidden states, attentions, loss, gradients."""
    options = {"output_hidden_states": True, "output_attentions": case.feature == "attentions"}
    if case.feature not in GRADIENTS:
        with torch.no_grad():
            return dict(named(case, forward(case, model, {**inputs, **options}, mine), inputs, model.config))
    model.zero_grad()
    out = forward(case, model, inputs, mine)
    loss = out["loss"] if "loss" in out else weighted_sum(real_ones(case, out, inputs))
    loss.backward()
    grads = {f"grad.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def named(case: Case, out: Any, inputs: Mapping[str, Any], config: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output."""
    for name, value in real_ones(case, out, inputs).items():
        if isinstance(value, Tensor):
            yield name, value
        elif value:
            parts = (
                bertlite.scatter_heads(value, config)
                if name == "attentions" and isinstance(config, BertConfig)
                else value
            )
            yield from ((f"{name}.{i}", part) for i, part in enumerate(parts))


def real_ones(case: Case, out: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """An output, for a packed case with zeros for padding, and without the pooler where theirs reads padding."""
    mask = inputs.get("attention_mask")
    if case.backend != "packed" or mask is None:
        return dict(out)
    padding = mask.flatten(0, -2) == 0  # (B, S); choices are rows

    def real(value: Tensor) -> Tensor:
        if value.shape[:2] != padding.shape:
            return value
        return value.masked_fill(padding.view(*padding.shape, *[1] * (value.dim() - 2)), 0)

    return {
        name: real(value) if isinstance(value, Tensor) else tuple(map(real, value))
        for name, value in out.items()
        if not (name == "pooler_output" and case.batch == "left")
    }


def weighted_sum(out: Mapping[str, Tensor]) -> Tensor:
    """A scalar that depends on every number of the output, each with its own weight."""
    total = None
    for value in out.values():
        draw = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        part = (value * draw.to(value)).sum()
        total = part if total is None else total + part
    assert total is not None
    return total


class Kernels(TorchFunctionMode):
    """Watches which attention really ran."""

    def __init__(self) -> None:
        super().__init__()
        self.sdpa = self.softmax = self.packed = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sdpa += func is F.scaled_dot_product_attention
        self.softmax += func is Tensor.softmax
        self.packed += func is F.embedding and args[0].dim() == 1  # tokens in one row
        return func(*args, **(kwargs or {}))

    @property
    def name(self) -> str:
        attention = "sdpa" if self.sdpa else "eager" if self.softmax else ""
        if self.packed:
            return "packed" if attention else "packed, varlen"
        return attention or "none"


def compiled(model: nn.Module) -> nn.Module:
    torch.compiler.reset()  # or after some models it would run them as they are
    model.compile()
    return model


def captured(model: nn.Module) -> nn.Module:
    """Each of its forwards is captured as a CUDA graph and replayed."""
    plain = model.forward

    def replayed(**inputs: Any) -> Any:
        aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # what is set up at a first run cannot be captured
            plain(**inputs)
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(graph):
            out = plain(**inputs)
        graph.replay()
        torch.cuda.synchronize()
        return out

    model.forward = replayed
    return model


LAUNCHES: dict[str, Callable[[nn.Module], nn.Module]] = {"compiled": compiled, "graph": captured}
KERNEL_NAMES = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@contextmanager
def kernel_of(run: str) -> Iterator[None]:
    """SDPA has this kernel and no other, if it is one.

    Raises:
        UnsupportedError: torch says that the kernel cannot do it here.
    """
    if run not in KERNELS:
        yield
        return
    try:
        with sdpa_kernel(KERNEL_NAMES[run]):
            yield
    except RuntimeError as error:
        if not re.match("No (available kernel|viable backend)", str(error)):
            raise
        raise reference.UnsupportedError(f"torch {torch.__version__} has no {run} kernel for it here") from None


@contextmanager
def products_in(run: str) -> Iterator[None]:
    """No TF32, where it is not the run's: a float32 product is one of float32 numbers."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = run == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def run(cases: Iterable[Case], device: str, checkpoint: str | Path) -> Iterator[Report]:
    """Check case after case, and let the models go at the end."""
    try:
        for case in cases:
            yield check(case, device, checkpoint)
    finally:
        forget()


__all__ = ["CASES", "check", "forget", "run"]
