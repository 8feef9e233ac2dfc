"""Is our model transformers' BertModel?  `check` compares one case, `check_all` many on one checkpoint."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import bertlite
from bertlite.config import BertConfig, ConfigLike
from bertlite.model import BertPreTrainedModel
from bertlite.parity import reference
from bertlite.parity.cases import DECODER, GRADIENTS, KERNELS, Case, Overrides
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
from bertlite.parity.inputs import Inputs, inputs_of
from bertlite.parity.modes import LAUNCHERS, AttentionWatch, kernel_of, matmul_precision

Tamper = Callable[[nn.Module], object]
Output = Mapping[str, Tensor | tuple[Tensor, ...]]
OTHER_ORDER_OF_SUMS = ("head_mask", "pruned", "pruned_layer", "relative_key", "relative_key_query")
OVERRIDES: dict[str, Overrides] = {  # three labels: with two, a loss that swaps them could pass
    "BertForSequenceClassification": {"num_labels": 3},
    "BertForTokenClassification": {"num_labels": 3},
    DECODER: {"is_decoder": True},
}


def check(case: Case, device: str = "cpu", checkpoint: str | Path = "", tamper: Tamper | None = None) -> Report:
    """Run one case on both sides and compare everything they return.

    Args:
        device: "cpu" or "cuda"; TF32 is off.
        checkpoint: a hub id, a folder or a file of a BERT.
        tamper: changes our model first, to prove that the check notices.

    Returns:
        A report; `not_checked` if the installed transformers does not support the case.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        FileNotFoundError, ValueError: the checkpoint cannot be loaded.
    """
    try:
        reference.require(case)
        with reference.silent(), matmul_precision(case.mode), kernel_of(case.mode):
            return compare_sides(case, device, checkpoint, tamper)
    except reference.UnsupportedError as reason:
        return Report(case.name, not_checked=str(reason))


def check_all(cases: Iterable[Case], device: str, checkpoint: str | Path) -> Iterator[Report]:
    """Check case after case, and release the models at the end."""
    try:
        for case in cases:
            yield check(case, device, checkpoint)
    finally:
        forget()


def compare_sides(case: Case, device: str, checkpoint: str | Path, tamper: Tamper | None) -> Report:
    """Run a case on both sides; report the differences and the first module to differ."""
    start = time.perf_counter()
    models = models_for(case, device, checkpoint)
    inputs = inputs_of(case, models.ours.config, models.source, device)
    ours = prepared(case, models.ours, inputs, tamper)
    references = {"theirs": their_model(case, models.theirs(reference.backend_for(case)), inputs)}
    if reads_truth(case, device):
        references["truth"] = their_model(case, models.truth, inputs)
    watch = AttentionWatch()
    with watch:
        mine = tensors(case, ours, inputs, mine=True)
    if case.mode in LAUNCHERS:  # the attention in these cannot be recorded
        mine = tensors(case, LAUNCHERS[case.mode](copy.deepcopy(ours)), inputs, mine=True)
    others = {side: tensors(case, model, inputs, mine=False) for side, model in references.items()}
    if case.mode == "beside":
        on_cpu = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in inputs.items()}
        others["theirs"] = tensors(case, copy.deepcopy(ours).cpu(), on_cpu, mine=True)
    report = Report(
        case.name,
        compared(case, device, mine, others),
        backend=watch.name,
        seconds=time.perf_counter() - start,
    )
    module_by_module = case.mode not in (*LAUNCHERS, "beside") and case.backend != "packed"
    if report.ok or not module_by_module:
        return report
    runs = {side: partial(forward, case, model, inputs, mine=False) for side, model in references.items()}
    traces = {side: trace(model, runs[side]) for side, model in references.items()}
    our_trace = trace(ours, partial(forward, case, ours, inputs, mine=True))
    first = first_divergence(our_trace, traces["theirs"], traces.get("truth"), rule_for(case, device, "forward"))
    return replace(report, first_module=first, seconds=time.perf_counter() - start)


def compared(
    case: Case, device: str, mine: Mapping[str, Tensor], others: Mapping[str, Mapping[str, Tensor]]
) -> tuple[Row, ...]:
    """Compare our tensors with theirs; a last sequence that is all padding must only be finite."""
    rows: tuple[Row, ...] = ()
    if case.batch == "emptyrow":  # transformers' backends disagree on that sequence
        rows = tuple(count_nonfinite(name, x[-1:]) for name, x in mine.items())
        mine = {name: x[:-1] for name, x in mine.items()}
        others = {side: {name: x[:-1] for name, x in found.items()} for side, found in others.items()}
    return rows + compare(mine, others["theirs"], others.get("truth"), partial(rule_for, case, device))


def rule_for(case: Case, device: str, tensor: str) -> Rule:
    """Return the rule that one tensor of a case is held to."""
    if case.dtype == "float64":
        return relatively if tensor.startswith("grad.") else closely
    exact = (
        case.dtype == "float32"
        and device == "cpu"
        and not reference.honours("prune_heads")  # 4.57 divides where 5 multiplies
        and case.backend != "packed"
        and case.feature not in OTHER_ORDER_OF_SUMS
        and case.mode in ("", *KERNELS)
        and not (case.feature == "attentions" and case.backend == "sdpa")  # theirs are eager's
        and not tensor.startswith("grad.")
    )
    return exactly if exact else as_well


def reads_truth(case: Case, device: str) -> bool:
    """Return whether the rules of a case need a float64 reference."""
    return rule_for(case, device, "grad." if case.feature in GRADIENTS else "") is as_well


def prepared(case: Case, model: BertPreTrainedModel, inputs: Inputs, tamper: Tamper | None) -> BertPreTrainedModel:
    """Return our model for the case: a copy, if it is changed."""
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


def their_model(case: Case, model: nn.Module, inputs: Inputs) -> nn.Module:
    """Return transformers' model for the case: a copy, if it is changed."""
    if case.feature in ("pruned", "pruned_layer"):
        model = reference.prune(model, heads_of(case, reference.config_of(model)))
    gate = inputs.get("head_mask")
    if isinstance(gate, Tensor) and not reference.honours("head_mask"):
        model = reference.with_gates(model, gate)
    return model.train(case.feature == "dropout")


def heads_of(case: Case, config: ConfigLike) -> dict[int, tuple[int, ...]]:
    """Return the heads that a pruning case removes.

    "pruned" removes every third head of every second layer, "pruned_layer" all heads of the last layer,
    except one beside transformers 4.57, which cannot run a layer without heads.
    """
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    if case.feature == "pruned":
        return {layer: tuple(range(layer % 3, heads, 3)) for layer in range(0, layers, 2)}
    return {layers - 1: tuple(range(1 if reference.honours("prune_heads") else 0, heads))}


def forward(case: Case, model: nn.Module, inputs: Inputs, mine: bool) -> Output:
    arguments = dict(inputs) if mine else reference.inputs_for(case, inputs)
    dtype = next(model.parameters()).dtype
    for name in ("inputs_embeds", "encoder_hidden_states"):
        value = arguments.get(name)
        if isinstance(value, Tensor):
            arguments[name] = value.to(dtype)
    torch.manual_seed(0)  # for the dropout case
    return model(**arguments)


def tensors(case: Case, model: nn.Module, inputs: Inputs, mine: bool) -> dict[str, Tensor]:
    """Return everything one side computes, by name: outputs, hidden states, attentions and loss, or gradients."""
    options = {"output_hidden_states": True, "output_attentions": case.feature == "attentions"}
    if case.feature not in GRADIENTS:
        with torch.no_grad():
            out = forward(case, model, {**inputs, **options}, mine)
        return dict(named(case, out, inputs, reference.config_of(model)))
    model.zero_grad()
    out = forward(case, model, inputs, mine)
    loss = out["loss"] if "loss" in out else weighted_sum(without_padding(case, out, inputs))
    assert isinstance(loss, Tensor)
    loss.backward()
    grads = {f"grad.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def named(case: Case, out: Output, inputs: Inputs, config: ConfigLike) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an output with their names; our attentions with each head in its original place."""
    for name, value in without_padding(case, out, inputs).items():
        if isinstance(value, Tensor):
            yield name, value
        elif value:
            ours = name == "attentions" and isinstance(config, BertConfig)
            parts = bertlite.scatter_heads(value, config) if ours else value
            yield from ((f"{name}.{i}", part) for i, part in enumerate(parts))


def without_padding(case: Case, out: Output, inputs: Inputs) -> dict[str, Tensor | tuple[Tensor, ...]]:
    """Return an output; for a packed case with zeros for padding, and no pooler output where theirs reads padding."""
    mask = inputs.get("attention_mask")
    if case.backend != "packed" or not isinstance(mask, Tensor):
        return dict(out)
    padding = mask.flatten(0, -2) == 0  # (B, S); choices are sequences of their own

    def zeroed(value: Tensor) -> Tensor:
        if value.shape[:2] != padding.shape:
            return value
        return value.masked_fill(padding.view(*padding.shape, *[1] * (value.dim() - 2)), 0)

    return {
        name: zeroed(value) if isinstance(value, Tensor) else tuple(map(zeroed, value))
        for name, value in out.items()
        if not (name == "pooler_output" and case.batch == "left")
    }


def weighted_sum(out: Output) -> Tensor:
    """Return a scalar that depends on every number of the output, each with its own weight."""
    total = None
    for value in out.values():
        assert isinstance(value, Tensor)
        draw = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        part = (value * draw.to(value)).sum()
        total = part if total is None else total + part
    assert total is not None
    return total


# Both sides, loaded once for the cases that share them ---------------------------------------------------------------


@dataclass
class Models:
    """Our model, theirs for each backend, and theirs in float64, each loaded on first use."""

    checkpoint: str | Path
    model: str
    overrides: Overrides
    dtype: torch.dtype
    device: str
    folder: TemporaryDirectory[str] = field(default_factory=partial(TemporaryDirectory, prefix="bertlite-parity-"))
    loaded: dict[str, nn.Module] = field(default_factory=dict)  # theirs, by backend

    @property
    def key(self) -> tuple[str, str, str, torch.dtype, str]:
        return (str(self.checkpoint), self.model, str(self.overrides), self.dtype, self.device)

    @cached_property
    def source(self) -> str | Path:
        """Return the checkpoint, or a copy that has the tensors of this class's head."""
        return reference.complete(self.checkpoint, self.model, self.overrides, Path(self.folder.name))

    @cached_property
    def ours(self) -> BertPreTrainedModel:
        cls: type[BertPreTrainedModel] = getattr(bertlite, self.model)
        changes: dict[str, Any] = dict(self.overrides)
        return cls.from_pretrained(self.source, dtype=self.dtype, device=self.device, **changes)

    def theirs(self, backend: str) -> nn.Module:
        if backend not in self.loaded:
            self.loaded[backend] = reference.load(
                self.source, self.model, self.overrides, self.dtype, backend, self.device
            )
        return self.loaded[backend]

    @cached_property
    def truth(self) -> nn.Module:
        return reference.in_float64(self.theirs("eager"))


_current: Models | None = None


def models_for(case: Case, device: str, checkpoint: str | Path) -> Models:
    """Return the models of a case; reuse those of the case before, if they are the same."""
    global _current
    overrides: Overrides = {**OVERRIDES.get(case.model, {}), **case.overrides}
    wanted = Models(checkpoint, case.model, overrides, getattr(torch, case.dtype), device)
    if _current is None or _current.key != wanted.key or not Path(_current.folder.name).exists():
        forget()
        _current = wanted
    return _current


def forget() -> None:
    """Release the models that are kept between cases, and delete the files made for them."""
    global _current
    if _current is not None:
        _current.folder.cleanup()
    _current = None
