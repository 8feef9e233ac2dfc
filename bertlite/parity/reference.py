"""transformers' own BERT, the reference, and what each version of it supports."""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bertlite.checkpoint.families import FAMILIES
from bertlite.config import BertConfig, differs_from_bert
from bertlite.inference.clients.verification import ROUNDED
from bertlite.opened.checkpoint import Checkpoint
from bertlite.parity.cases import DECODER, PRETRAINING, RELATIVE, Case, Overrides
from bertlite.parity.inputs import CaseInputs
from bertlite.support.extras import import_optional

HONOURS = {  # {major version: features that its BERT supports}; it rejects or silently ignores other features
    4: {"head_mask", "prune_heads", "relative positions", "3-D masks"},
    5: {"4-D additive masks", "models of this family", "normalised last states"},
}
NEEDS = {  # {feature, batch or family: the features that the reference must support for it}
    **dict.fromkeys(RELATIVE, "relative positions"),
    "additive": "4-D additive masks",
    **{kind: "models of this family" for kind, each in FAMILIES.items() if each.since == 5},
}


@cache
def stock() -> Any:
    """Return the module transformers.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    return import_optional("transformers", "the parity check", "hf")


def version() -> str:
    """Return the version of the installed transformers."""
    return str(stock().__version__)


@contextmanager
def silent() -> Iterator[None]:
    """Print neither the warnings of transformers nor its progress bars, and leave its logging as it was."""
    logging = stock().utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def honours(feature: str) -> bool:
    """Return whether the installed transformers supports a feature."""
    return feature in HONOURS.get(int(version().split(".")[0]), ())


def unsupported(case: Case) -> str:
    """Return the reason why the installed transformers cannot check a case; "" if it can."""
    parts = case.feature, case.batch, case.family.partition("/")[0]
    needs = [need for part in parts if (need := NEEDS.get(part)) and not honours(need)]
    return f"transformers {version()} does not honour {needs[0]}" if needs else ""


def check_has_class(checkpoint: Checkpoint) -> None:
    """Raise ValueError if the installed transformers has no class that computes all that a checkpoint does."""
    config = checkpoint.config
    pruned = config.pruned_neurons or (config.pruned_heads and not honours("prune_heads"))
    if checkpoint.origin.kind == "bert" and (pruned or differs_from_bert(config) or config.positions_skip_padding):
        raise ValueError(
            f"{checkpoint} is {'pruned' if pruned else 'converted'}, and transformers {version()} has no class for it:"
            " compare the checkpoint that it was made from"
        )


def backend_for(case: Case) -> str:
    """Return the backend to compare with: the case's own, if transformers' supports the case."""
    no_weights = case.feature == "attentions"  # 5.x returns none under sdpa
    no_float64 = case.model == DECODER and case.dtype == "float64" and honours("head_mask")  # 4.57's sdpa overflows
    if no_weights or no_float64:
        return "eager"
    return "sdpa" if case.backend in ("packed", "native") else case.backend


def stock_class(name: str) -> Any:
    """Return transformers' model class of this name.

    Raises:
        ValueError: bertlite.hf has registered its own class instead.
    """
    cls = getattr(stock(), name)
    if cls.__module__.startswith("bertlite."):
        raise ValueError(f"transformers.{name} is bertlite's own now: call bertlite.hf.unregister() before comparing")
    return cls


def family_class(name: str, config: Any) -> Any:
    """Return transformers' class for the family of a config that corresponds to BERT's class of this name."""
    if config.model_type == "bert":
        return stock_class(name)
    kind = "ForCausalLM" if name == DECODER else name.removeprefix("BertModel").removeprefix("Bert")
    return stock_class(f"AutoModel{kind}")._model_mapping[type(config)]


@silent()
def load(
    folder: str | PathLike[str], model: str, overrides: Overrides, dtype: torch.dtype, backend: str, device: str
) -> nn.Module:
    """Return transformers' model of this class, in eval mode; a family without sdpa, such as MPNet, runs eager."""
    config = stock().AutoConfig.from_pretrained(folder, **overrides)
    cls = family_class(model, config)
    if backend == "sdpa" and not cls._supports_sdpa:
        backend = "eager"
    return cls.from_pretrained(folder, config=config, dtype=dtype, attn_implementation=backend).to(device).eval()


class Unrounded(TorchFunctionMode):
    """A mode of torch in which a model does not round float64 to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, kwargs = args[0] if args else None, dict(kwargs or {})
        if isinstance(x, Tensor) and x.dtype == torch.float64 and func in (Tensor.float, F.softmax):
            kwargs.pop("dtype", None)
            return x if func is Tensor.float else func(*args, **kwargs)
        return func(*args, **kwargs)


def unrounded(model: nn.Module) -> AbstractContextManager[Any]:
    """Return the context in which a model of the reference runs: in float64 it does not round, see ROUNDED."""
    config: Any = model.config
    exact = config.model_type in ROUNDED and next(model.parameters()).dtype == torch.float64
    return Unrounded() if exact else nullcontext()


def weights_of_layers(config: BertConfig) -> int:
    """Return the number of weights in the matrices of all layers."""
    per_layer = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    return int(config.num_hidden_layers * per_layer)


def complete(checkpoint: Checkpoint, model: str, overrides: Overrides, folder: Path) -> Checkpoint:
    """Return a checkpoint that holds every tensor of this class: the given one, or a copy with a head added.

    A head of another class, or for other labels, does not count.

    transformers loads the checkpoint and saves the copy.  Missing tensors are drawn once, so that both sides read the
    same ones.
    """
    config = stock().AutoConfig.from_pretrained(checkpoint.local, **overrides)
    cls = family_class(model, config)
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    theirs, info = cls.from_pretrained(checkpoint.local, config=config, **options)

    # A head of this checkpoint may be of other labels, whose tensors do not fit.
    missing = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    if not missing:
        return checkpoint

    # Norms begin at 1, or a drawn head would give almost nothing.
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name in missing:
                noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float32, device="cpu")
                parameter.copy_(0.1 * noise + (name.endswith("weight") and is_norm(name)))
    theirs.save_pretrained(folder)
    return Checkpoint(folder)


def is_norm(name: str) -> bool:
    """Return whether a parameter of some family is a LayerNorm's, by its name."""
    return re.search(r"norm|(^|[._])ln\.", name.lower()) is not None


@silent()
def base_shaped(folder: Path, model_type: str = "bert", **sizes: Any) -> Path:
    """Save a checkpoint of bert-base-uncased's shape that transformers initialises, and return its folder.

    Biases and LayerNorms are moved away from 0 and 1, so that a missing one is noticed.
    """
    torch.manual_seed(0)
    config = stock().AutoConfig.for_model(model_type, **sizes)
    model = family_class(PRETRAINING if model_type == "bert" else "BertModel", config)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") or is_norm(name):
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def inputs_for(case: Case, inputs: CaseInputs) -> dict[str, Tensor | bool]:
    """Return the inputs in the form of this version of transformers."""
    arguments = dict(inputs)
    mask = arguments.get("attention_mask")
    if case.batch in ("mask3d", "mask4d") and isinstance(mask, Tensor):
        if honours("3-D masks"):
            arguments["attention_mask"] = (mask[:, 0] if mask.dim() == 4 else mask).long()
        else:
            allowed = (mask[:, None] if mask.dim() == 3 else mask).bool()
            bias = torch.zeros_like(allowed, dtype=getattr(torch, case.dtype))
            arguments["attention_mask"] = bias.masked_fill(~allowed, torch.finfo(bias.dtype).min)
    if not honours("head_mask"):
        arguments.pop("head_mask", None)  # its model has the gates in its weights: see `with_gates`
    return arguments


def with_gates(model: nn.Module, gate: Tensor) -> nn.Module:
    """Return a copy whose heads are multiplied by these gates, (L, N); it shares the other weights.

    The gates scale the columns of output.dense, which every version uses.
    """
    model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    base: nn.Module = getattr(model, "bert", model)
    with torch.no_grad():
        for layer, gates in zip(base.get_submodule("encoder.layer").children(), gate, strict=True):
            dense = layer.get_submodule("attention.output.dense")
            weight = dense.get_parameter("weight")
            columns = gates.to(weight).repeat_interleave(weight.shape[1] // len(gates))
            dense.weight = nn.Parameter(weight * columns)
    return model


def prune(model: nn.Module, heads: Mapping[int, Sequence[int]]) -> nn.Module:
    """Return a copy without these heads: pruned by transformers itself if it can, else with gates of 0."""
    if honours("prune_heads"):
        dtype = next(model.parameters()).dtype
        model = copy.deepcopy(model)
        model.prune_heads({layer: list(which) for layer, which in heads.items()})  # type: ignore[operator]
        return model.to(dtype)  # 4.57 makes the smaller layers float32, whatever the model; all of ours fit in float32
    config = cast(BertConfig, model.config)
    gate = torch.ones(config.num_hidden_layers, config.num_attention_heads, dtype=torch.float32, device="cpu")
    for layer, which in heads.items():
        gate[layer, list(which)] = 0
    return with_gates(model, gate)
