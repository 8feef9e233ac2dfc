"""Is our model transformers' BertModel?  `check` compares one case, `check_all` many on one checkpoint."""

import copy
import re
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from os import PathLike
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel
from torch.overrides import TorchFunctionMode

from bertlite.config import BertConfig
from bertlite.inference import optimize_for_inference
from bertlite.models.base import BertPreTrainedModel
from bertlite.models.heads import CLASSES, BertForQuestionAnswering, BertForSequenceClassification
from bertlite.models.structure import scatter_heads
from bertlite.opened.checkpoint import Checkpoint
from bertlite.parity import families, reference
from bertlite.parity.cases import DECODER, GRADIENTS, KERNELS, RELATIVE, Case, Overrides
from bertlite.parity.compare import (
    Report,
    Row,
    Rule,
    as_well,
    closely,
    compare,
    count_nonfinite,
    exactly,
    first_divergence,
    relatively,
    trace,
)
from bertlite.parity.inputs import CaseInputs, case_inputs, encoded_sentences
from bertlite.support.contexts import own_context
from bertlite.support.process import door

Tamper = Callable[[nn.Module], object]
Output = Mapping[str, Tensor | tuple[Tensor, ...]]
OTHER_ORDER_OF_SUMS = ("head_mask", "pruned", "pruned_layer", *RELATIVE)
NO_KERNEL = re.compile("No (available kernel|viable backend)")  # an error of torch


@door
@own_context(gradients=True)
def check(
    case: Case, device: str = "cpu", checkpoint: str | PathLike[str] = "", tamper: Tamper | None = None
) -> Report:
    """Run one case on both sides and compare everything they return.

    Args:
        device: "cpu" or "cuda".
        checkpoint: a hub id, a folder or a file of a BERT.
        tamper: changes our model first, to prove that the check notices.

    Returns:
        A report; `not_checked` if the installed transformers does not support the case.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        FileNotFoundError, ValueError: the checkpoint cannot be loaded.
    """
    source = Checkpoint.of(checkpoint)
    if reason := reference.unsupported(case):
        return Report(case.name, not_checked=reason)
    kernel = sdpa_kernel(KERNELS[case.mode][0]) if case.mode in KERNELS else nullcontext()
    try:
        with reference.silent(), kernel:
            return compare_sides(case, device, source, tamper)
    except RuntimeError as error:
        if case.mode not in KERNELS or not NO_KERNEL.match(str(error)):
            raise
        return Report(case.name, not_checked=f"torch {torch.__version__} has no {case.mode} kernel for it here")


def check_all(cases: Iterable[Case], device: str, checkpoint: str | PathLike[str]) -> Iterator[Report]:
    """Check one case after the other, and release the models at the end."""
    source = Checkpoint.of(checkpoint)
    try:
        for case in cases:
            yield check(case, device, source)
    finally:
        models_for.cache_clear()
        encoded_sentences.cache_clear()


def compare_sides(case: Case, device: str, checkpoint: Checkpoint, tamper: Tamper | None) -> Report:
    """Run a case on both sides; report the differences and the first module to differ."""
    start = time.perf_counter()
    overrides = tuple(overrides_for(case, checkpoint.config).items())

    # Both sides read one checkpoint and get the same inputs.
    models = models_for(checkpoint, case.model, overrides, case.dtype, device)
    inputs = case_inputs(case, models.ours, models.source, device)
    ours = our_model(case, models.ours, inputs, tamper)

    # Rounding is judged by a third model, theirs in float64, where results need not be equal.
    references = {"theirs": their_model(case, models.theirs(backend=reference.backend_for(case)), inputs)}
    if rule_for(case, device, "grad." if case.feature in GRADIENTS else "") is as_well:
        references["truth"] = their_model(case, models.truth, inputs)
    if case.family:
        inputs = families.family_inputs(references["theirs"], inputs, models.ours.config.pad_token_id or 0)

    # The watch notes which backend ran, so that no case passes by another way.
    with AttentionWatch() as watch:
        our_tensors = tensors(case, ours, inputs, is_ours=True)

    others = {side: tensors(case, model, inputs, is_ours=False) for side, model in references.items()}
    if case.family and case.feature in GRADIENTS:
        our_tensors, others = families.gradients_as_ours(models.source.origin, our_tensors, others, models.ours)

    report = Report(
        case.name,
        compare_tensors(case, device, our_tensors, others),
        backend=watch.backend(native=case.backend == "native"),
        seconds=time.perf_counter() - start,
    )
    if report.ok or case.backend in ("packed", "native"):  # their modules' outputs have another shape
        return report

    # If something differs, the first module with another output tells where to look.
    runs = {side: partial(run_forward, case, model, inputs, is_ours=False) for side, model in references.items()}
    traces = {side: trace(model, runs[side]) for side, model in references.items()}
    if case.family:
        traces = {side: families.modules_as_ours(models.source.origin, found) for side, found in traces.items()}
    traces["ours"] = trace(ours, partial(run_forward, case, ours, inputs, is_ours=True))

    real: Any = {side: without_padding(case, found, inputs) for side, found in traces.items()}
    first = first_divergence(real["ours"], real["theirs"], real.get("truth"), rule_for(case, device, "forward"))
    return replace(report, first_module=first, seconds=time.perf_counter() - start)


def overrides_for(case: Case, config: BertConfig) -> Overrides:
    """Return the fields of the config to change; a head that the checkpoint has keeps its labels.

    A new head has three labels: with two, a loss that swaps them could pass.
    """
    architectures = config.extra.get("architectures") or ()
    head, labels = CLASSES[case.model], dict[str, Any]()
    if getattr(head, "own_labels", False) and case.model not in architectures:
        labels["num_labels"] = 3
    if head is BertForQuestionAnswering:
        labels["num_labels"] = 2
    if case.family.startswith("deberta") and head is BertForSequenceClassification and config.problem_type is None:
        one = config.num_labels == 1 and not labels  # without a problem type, the loss there is float32
        labels["problem_type"] = "regression" if one else "single_label_classification"
    return {**labels, **({"is_decoder": True} if case.model == DECODER else {}), **case.overrides}


def compare_tensors(
    case: Case, device: str, our_tensors: Mapping[str, Tensor], others: Mapping[str, Mapping[str, Tensor]]
) -> tuple[Row, ...]:
    """Compare our tensors with theirs; a last sequence that is all padding must only be finite."""
    rows: tuple[Row, ...] = ()
    if case.batch == "emptyrow":  # transformers' backends disagree on that sequence
        rows = tuple(count_nonfinite(name, x[-1:]) for name, x in our_tensors.items())
        our_tensors = {name: x[:-1] for name, x in our_tensors.items()}
        others = {side: {name: x[:-1] for name, x in found.items()} for side, found in others.items()}
    return rows + compare(our_tensors, others["theirs"], others.get("truth"), partial(rule_for, case, device))


def rule_for(case: Case, device: str, tensor: str) -> Rule:
    """Return the rule for one tensor of a case."""
    if case.dtype == "float64":
        return relatively if tensor.startswith("grad.") else closely
    exact = (
        case.dtype == "float32"
        and device == "cpu"
        and not reference.honours("prune_heads")  # 4.57 divides where 5 multiplies
        and case.backend != "packed"
        and not case.family
        and case.feature not in OTHER_ORDER_OF_SUMS
        and not (case.feature == "attentions" and case.backend == "sdpa")  # theirs come from eager
        and not tensor.startswith("grad.")
    )
    return exactly if exact else as_well


def our_model(case: Case, model: BertPreTrainedModel, inputs: CaseInputs, tamper: Tamper | None) -> nn.Module:
    """Return our model for the case: a copy, if it is changed."""
    if tamper is not None or case.feature in ("pruned", "pruned_layer", "checkpointed", "dropout"):
        shared = {} if tamper is not None else {id(p): p for p in model.parameters()}  # pruning replaces weights
        model = copy.deepcopy(model, shared)
    if case.backend == "native":
        return optimize_for_inference(model, backend="native")
    model.set_attn_implementation(case.backend)
    if case.feature in ("pruned", "pruned_layer"):
        model.prune_heads(heads_of(case, model.config))
    if case.feature == "checkpointed":
        model.gradient_checkpointing_enable()
    model.train(case.feature == "dropout")
    if tamper is not None:
        tamper(model)
    return model


def their_model(case: Case, model: nn.Module, inputs: CaseInputs) -> nn.Module:
    """Return transformers' model for the case: a copy, if it is changed."""
    if case.feature in ("pruned", "pruned_layer"):
        model = reference.prune(model, heads_of(case, cast(BertConfig, model.config)))
    gate = inputs.get("head_mask")
    if isinstance(gate, Tensor) and not reference.honours("head_mask"):
        model = reference.with_gates(model, gate)
    return model.train(case.feature == "dropout")


def heads_of(case: Case, config: BertConfig) -> dict[int, tuple[int, ...]]:
    """Return the heads that a pruning case removes.

    "pruned" removes every third head of every second layer, "pruned_layer" all heads of the last layer,
    except one with transformers 4.57, which cannot run a layer without heads.
    """
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    if case.feature == "pruned":
        return {layer: tuple(range(layer % 3, heads, 3)) for layer in range(0, layers, 2)}
    return {layers - 1: tuple(range(1 if reference.honours("prune_heads") else 0, heads))}


def run_forward(case: Case, model: nn.Module, inputs: CaseInputs, is_ours: bool) -> Output:
    arguments = dict(inputs) if is_ours else reference.inputs_for(case, inputs)
    dtype = next(model.parameters()).dtype
    for name in ("inputs_embeds", "encoder_hidden_states", "labels"):
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.is_floating_point():
            arguments[name] = value.to(dtype)
    torch.manual_seed(0)  # for the dropout case
    with nullcontext() if is_ours else reference.unrounded(model):
        return model(**arguments)


def tensors(case: Case, model: nn.Module, inputs: CaseInputs, is_ours: bool) -> dict[str, Tensor]:
    """Return everything one side computes, by name: outputs, hidden states, attentions and loss, or gradients."""
    options = {"output_hidden_states": case.backend != "native", "output_attentions": case.feature == "attentions"}
    if case.feature not in GRADIENTS:
        with torch.no_grad():
            out = run_forward(case, model, {**inputs, **options}, is_ours)

        # Before version 5 transformers gives the last states as they are before the final norm.
        found = dict(named(case, out, inputs, cast(BertConfig, model.config)))
        if case.family.partition("/")[0] in families.NORMS_FIRST and not reference.honours("normalised last states"):
            found.pop(f"hidden_states.{cast(BertConfig, model.config).num_hidden_layers}", None)
        return found

    # A model without labels has no loss, so its outputs are summed with weights that tell them apart.
    model.zero_grad()
    out = run_forward(case, model, inputs, is_ours)
    loss = out["loss"] if "loss" in out else weighted_sum(without_padding(case, out, inputs))
    assert isinstance(loss, Tensor)
    loss.backward()
    every = model.named_parameters(remove_duplicate=not case.family)  # tied ones have another first name in a family
    grads = {f"grad.{name}": p.grad for name, p in every if p.grad is not None}
    model.zero_grad()
    return grads


def named(case: Case, out: Output, inputs: CaseInputs, config: BertConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an output with their names; our attentions with each head in its original place."""
    for name, value in without_padding(case, out, inputs).items():
        if isinstance(value, Tensor):
            yield name, value
        elif value:
            ours = name == "attentions" and isinstance(config, BertConfig)
            parts = scatter_heads(value, config) if ours else value
            yield from ((f"{name}.{i}", part) for i, part in enumerate(parts))


def without_padding(case: Case, out: Output, inputs: CaseInputs) -> dict[str, Tensor | tuple[Tensor, ...]]:
    """Return an output with zeros for padding if the models are packed, native or windowed: it is left out or differs.

    Likewise for a BERT made from another family ("bert"), whose positions of padding may differ.  With padding on the
    left the pooler's output is left out too, since theirs reads the first position.
    """
    mask = inputs.get("attention_mask")
    windowed = case.family.startswith("modernbert")  # a window of padding alone has other states
    computed = case.backend not in ("packed", "native") and case.family != "bert" and not windowed
    if computed or not isinstance(mask, Tensor):
        return dict(out)

    padding = mask.flatten(0, -2) == 0  # (B, S); choices are sequences of their own

    def zeroed(value: Tensor) -> Tensor:
        if value.shape[:2] != padding.shape:
            return value
        return value.masked_fill(padding.view(*padding.shape, *[1] * (value.dim() - 2)), 0)

    return {
        # A pooler that reads the first position reads padding there, if that is on the left.
        name: zeroed(value) if isinstance(value, Tensor) else tuple(map(zeroed, value))
        for name, value in out.items()
        if not (name == "pooler_output" and case.batch == "left")
    }


def weighted_sum(out: Output) -> Tensor:
    """Return a scalar that depends on every number of the output, each with its own weight."""
    parts = []
    for value in out.values():
        assert isinstance(value, Tensor)
        draw = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64, device="cpu")
        parts.append((value * draw.to(value)).sum())
    return sum(parts[1:], parts[0])


# Both sides, loaded once for the cases that share them ---------------------------------------------------------------


class Models:
    """Our model; theirs for each backend and theirs in float64, each loaded on first use."""

    def __init__(
        self, checkpoint: Checkpoint, model: str, overrides: tuple[tuple[str, Any], ...], dtype: str, device: str
    ) -> None:
        self.checkpoint, self.model, self.overrides = checkpoint, model, dict(overrides)
        self.options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}

    @cached_property
    def source(self) -> Checkpoint:
        """Return the checkpoint, or a copy that has the tensors of this class's head."""
        folder = Path(mkdtemp(prefix="bertlite-parity-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return reference.complete(self.checkpoint, self.model, self.overrides, folder)

    @cached_property
    def ours(self) -> BertPreTrainedModel:
        return CLASSES[self.model].from_pretrained(self.source, **self.options, **self.overrides)

    @cached_property
    def theirs(self) -> Callable[..., nn.Module]:
        """Return the function that gives theirs for a `backend`."""
        return cache(partial(reference.load, self.source.local, self.model, self.overrides, **self.options))

    @cached_property
    def truth(self) -> nn.Module:
        """Return theirs in float64, with the same weights."""
        theirs = self.theirs(backend="eager")
        return copy.deepcopy(theirs, {id(p): nn.Parameter(p.detach().double()) for p in theirs.parameters()})


models_for = lru_cache(maxsize=1)(Models)  # a case's, or the previous case's if they are the same


# How a case runs -----------------------------------------------------------------------------------------------------


class AttentionWatch(TorchFunctionMode):
    """A mode of torch that records which attention runs inside it."""

    sdpa = softmax = packed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sdpa |= func is F.scaled_dot_product_attention
        self.softmax |= func is Tensor.softmax
        self.packed |= func is F.embedding and args[0].dim() == 1  # all tokens in one row
        return func(*args, **(kwargs or {}))

    def backend(self, native: bool) -> str:
        """Return the backend that ran: eager, sdpa, packed, or none, as for the native kernels.

        Args:
            native: whether native kernels may have run; these may get packed embeddings.
        """
        attention = "sdpa" if self.sdpa else "eager" if self.softmax else ""
        if self.packed and (attention or not native):
            return "packed" if attention else "packed, varlen"
        return attention or "none"
