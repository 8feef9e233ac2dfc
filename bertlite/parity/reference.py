"""transformers' own BERT, as the thing to be equal to, and what each version of it can vouch for.

transformers is imported inside functions: bertlite works without it.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.parity.cases import DECODER, Case


class UnsupportedError(Exception):
    """The installed transformers ignores or refuses what the case asks for, so it cannot vouch for it."""


HONOURS = {  # major version -> what its BERT really does; the rest it refuses, or worse, ignores
    4: {"head_mask", "prune_heads", "relative positions", "3-D masks"},
    5: {"4-D additive masks", "hardswish", "sqrtsoftplus"},
}
NEEDS = {  # what a case asks of the reference, where there is no other way to ask it
    "relative_key": "relative positions",
    "relative_key_query": "relative positions",
    "additive": "4-D additive masks",
}


@cache
def version() -> str:
    """The installed transformers.

    Raises:
        ModuleNotFoundError: there is none; it says how to get one.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the parity check compares with transformers, which is not installed: pip install 'bertlite[hf]'"
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return str(transformers.__version__)


def honours(what: str) -> bool:
    return what in HONOURS.get(int(version().split(".")[0]), ())


def require(case: Case) -> None:
    """Raise UnsupportedError unless the installed transformers does what the case asks."""
    for part in (case.feature, case.batch):
        need = NEEDS.get(part)
        if need and not honours(need):
            raise UnsupportedError(f"transformers {version()} does not honour {need}")


def backend_for(case: Case) -> str:
    """The backend to compare with: the case's own, where transformers' can do what the case asks."""
    no_weights = case.feature == "attentions"  # 5.x gives none of sdpa's
    no_float64 = case.model == DECODER and case.dtype == "float64" and honours("head_mask")  # 4.57's sdpa overflows
    if no_weights or no_float64:
        return "eager"
    return "sdpa" if case.backend == "packed" else case.backend


def load(
    checkpoint: str | Path, model: str, overrides: Mapping[str, Any], dtype: torch.dtype, backend: str, device: str
) -> nn.Module:
    """transformers' model of this class, in eval mode."""
    version()
    import transformers

    config = transformers.BertConfig.from_pretrained(checkpoint, **overrides)
    cls = getattr(transformers, model)
    out = cls.from_pretrained(checkpoint, config=config, dtype=dtype, attn_implementation=backend)
    return out.to(device).eval()


def complete(checkpoint: str | Path, model: str, overrides: Mapping[str, Any], folder: Path) -> str | Path:
    """A checkpoint with every tensor of this class: the one given, or where its head is missing a copy with one added.

    transformers loads and saves the copy; the missing tensors are drawn once, so that both sides read the same.
    """
    version()
    import transformers

    config = transformers.BertConfig.from_pretrained(checkpoint, **overrides)
    cls = getattr(transformers, model)
    theirs, info = cls.from_pretrained(checkpoint, config=config, output_loading_info=True)
    missing = set(info["missing_keys"])
    if not missing:
        return checkpoint
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name in missing:
                noise = torch.randn(parameter.shape, generator=draw)
                parameter.copy_(0.1 * noise + float(name.endswith("LayerNorm.weight")))
    theirs.save_pretrained(folder)
    return folder


def base_shaped(folder: Path, **sizes: int) -> Path:
    """A checkpoint of bert-base-uncased's shape that transformers initialises and saves, as pre-training leaves it.

    Biases and LayerNorms are moved off 0 and 1, where losing one would not show.
    """
    version()
    import transformers

    torch.manual_seed(0)
    model = transformers.BertForPreTraining(transformers.BertConfig(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") or "LayerNorm" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def inputs_for(case: Case, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same inputs, said as this version of transformers wants them."""
    said = dict(inputs)
    mask: Any = said.get("attention_mask")
    if case.batch in ("mask3d", "mask4d"):
        if honours("3-D masks"):
            said["attention_mask"] = (mask[:, 0] if mask.dim() == 4 else mask).long()
        else:
            allowed = (mask[:, None] if mask.dim() == 3 else mask).bool()
            dtype = inputs["dtype_of_masks"]
            said["attention_mask"] = torch.zeros(allowed.shape, dtype=dtype, device=mask.device).masked_fill(
                ~allowed, torch.finfo(dtype).min
            )
    del said["dtype_of_masks"]
    gate = said.pop("head_mask", None)
    if gate is not None and honours("head_mask"):
        said["head_mask"] = gate
    return said


def with_gates(model: nn.Module, gate: Tensor) -> nn.Module:
    """A copy whose heads are multiplied by these gates, (L, N), on any version: they scale output.dense's columns."""
    model = copy.deepcopy(model)
    base: Any = getattr(model, "bert", model)
    with torch.no_grad():
        for layer, gates in zip(base.encoder.layer, gate, strict=True):
            weight = layer.attention.output.dense.weight
            weight *= gates.to(weight).repeat_interleave(weight.shape[1] // len(gates))
    return model


def prune(model: nn.Module, heads: Mapping[int, Sequence[int]]) -> nn.Module:
    """A copy without these heads: pruned by transformers itself where it can, else gated shut."""
    if honours("prune_heads"):
        dtype = next(model.parameters()).dtype
        model = copy.deepcopy(model)
        model.prune_heads({layer: list(which) for layer, which in heads.items()})  # type: ignore[operator]
        return model.to(dtype)  # 4.57 makes the smaller layers float32, whatever the model; all of ours fit in float32
    config: Any = model.config
    gate = torch.ones(config.num_hidden_layers, config.num_attention_heads)
    for layer, which in heads.items():
        gate[layer, list(which)] = 0
    return with_gates(model, gate)
