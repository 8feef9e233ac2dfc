"""Check a model before it is optimised: its modules, and whether the native kernels can run them."""

from collections.abc import Iterator
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import nn

from bertlite.config import BertConfig
from bertlite.inference.native.weights import rotation_of
from bertlite.models.base import BertPreTrainedModel
from bertlite.runtime.library import missing_platform
from bertlite.runtime.structs import ACTIVATIONS
from bertlite.stack.modules import (
    Activation,
    BertAttention,
    BertEncoder,
    BertIntermediate,
    BertLayer,
    BertOutput,
    BertSelfAttention,
    BertSelfOutput,
    normalises_first,
)
from bertlite.stack.positions import DISTANCES

MIXED = "mixed"  # int8 with some layers in floats: the dtype of folders that were saved before format 10
ComputeDtype: TypeAlias = torch.dtype | str
HOMES = ("torch.nn.", "transformers.", "bertlite.")  # classes from here compute as their names say
RECORDING = "transformers.utils.output_capturing"  # hooks that keep hidden states
INERT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")  # on embeddings, for gradient checkpointing
DROPOUT = (nn.Dropout, nn.Identity)
LAYER_PARTS: dict[str, tuple[type[nn.Module], ...]] = {  # the classes of a layer's modules; linear ones have no choice
    "": (BertLayer,),
    "attention": (BertAttention,),
    "attention.self": (BertSelfAttention,),
    "attention.self.dropout": DROPOUT,
    "attention.output": (BertSelfOutput,),
    "attention.output.dropout": DROPOUT,
    "intermediate": (BertIntermediate,),
    "output": (BertOutput,),
    "output.dropout": DROPOUT,
}


def check_unaltered(model: BertPreTrainedModel) -> None:
    """Raise TypeError if a conversion would not reproduce a module of the model, and name the module.

    Linear layers, and the modules of a layer of BERT, must have exactly their classes, without hooks or methods of
    their own.  Embeddings and pooler may have hooks, which see the same values.  LayerNorm and activations may be
    anything: backends that replace them check them.
    """
    # The layers themselves: their number and kinds.
    body = model.base_model
    prefix = "encoder" if body is model else f"{model.base_model_prefix}.encoder"
    check_kind(f"{prefix}.layer", body.encoder.layer, (nn.ModuleList,))
    for i, layer in enumerate(body.encoder.layer):
        for name, kinds in LAYER_PARTS.items():
            check_kind(f"{prefix}.layer.{i}.{name}".rstrip("."), layer.get_submodule(name), kinds)

    # Matmuls are repacked anywhere in the model, so everywhere they must be plain.
    outside = tuple(f"{prefix.removesuffix('encoder')}{name}" for name in ("embeddings", "pooler"))
    for name, part in model.named_modules():
        multiplies = isinstance(part, nn.Linear) or name.endswith((".dense", ".query", ".key", ".value"))
        if multiplies and type(part) is not nn.Linear:
            raise TypeError(
                f"{name} is a {kind_of(part)}, not a plain nn.Linear: merge adapters first, and start from a model"
                " that is not quantised"
            )

        # Inside the encoder no module will run, so none may have code of its own.
        runs_not = multiplies or name.startswith(f"{prefix}.")
        change = own_code(part) if runs_not else own_method(part) if name.startswith(outside) else None
        if change:
            raise TypeError(
                f"{name} has {change}, which an optimised model would not run: remove it first (a mask of"
                " torch.nn.utils.prune by its remove), or run the model itself"
            )


def check_kind(name: str, part: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
    """Raise TypeError unless a module's class is exactly one of these."""
    if type(part) not in kinds:
        raise TypeError(
            f"{name} is a {kind_of(part)}, not a plain {kinds[0].__name__}, as an optimised model needs:"
            " optimise the model before it is compiled, wrapped or changed, or run the model itself"
        )


def own_code(part: nn.Module) -> str | None:
    """Return the code that a module runs in addition to its class: hooks, or a method of its own; None if none.

    Hooks of transformers and PEFT that change no output do not count: they stay after a feature was used once.
    """
    hooks = [hook for hook in part._forward_hooks.values() if not is_inert(hook)]
    hooks += [*part._forward_pre_hooks.values(), *part._backward_pre_hooks.values(), *part._backward_hooks.values()]
    if hooks:
        return "hooks"
    return own_method(part) or (None if is_of_home(type(part).forward) else "a forward put on its class")


def is_inert(hook: Any) -> bool:
    """Return whether a forward hook comes from another library and changes no output."""
    module, name = getattr(hook, "__module__", ""), getattr(hook, "__name__", "")
    return module == RECORDING or (module.startswith(("transformers.", "peft.")) and name in INERT_HOOKS)


def is_of_home(function: Any) -> bool:
    """Return whether a function is defined in torch, transformers or bertlite, or is no Python function."""
    return str(getattr(function, "__globals__", {}).get("__name__", "torch.")).startswith(("torch.", *HOMES))


def own_method(part: nn.Module) -> str | None:
    """Return the method that replaces the class's in a module; None if none does.

    The class's own, bound to the module, does not count: transformers 5.0 leaves it there after recording a call.
    """
    cls = type(part)
    own = [name for name, value in vars(part).items() if callable(value) and callable(getattr(cls, name, None))]
    return next(
        (f"a {name} of its own" for name in own if vars(part)[name] != MethodType(getattr(cls, name), part)), None
    )


def refuse_optimised(name: str, part: nn.Module) -> None:
    """Raise TypeError for a module that `optimize_for_inference` made."""
    if getattr(part, "is_optimised", False):
        raise TypeError(f"{name} is optimised already: optimise the original again")


def kind_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# Support by the native kernels


def missing_for_native(model: BertPreTrainedModel) -> str | None:
    """Return the reason why the native kernels cannot run a model; None if they can."""
    config = model.config
    devices = {each.device.type: each.device for each in model.parameters() if each.device.type != "cpu"}
    faults = {
        f"they are for the CPU, and the model is on {', '.join(map(str, devices.values()))}": bool(devices),
        "they run encoders, and this model is a decoder": bool(config.is_decoder or config.add_cross_attention),
        "they run no final norm without layers": config.norm_first and not config.num_hidden_layers,
        f"they have no activation {config.hidden_act!r}; have: {', '.join(ACTIVATIONS)}": config.hidden_act
        not in ACTIVATIONS,
    }

    # The machine comes first: where no kernels can run, no change to the model helps.
    fault = next((fault for fault, holds in faults.items() if holds), None)
    return missing_platform() or fault or next(differences(model), None)


def differences(model: BertPreTrainedModel) -> Iterator[str]:
    """Yield the features of the encoder's modules that the kernels would ignore, since they follow the config."""
    encoder = model.base_model.encoder
    if type(encoder) is not BertEncoder:
        yield f"encoder is a {kind_of(encoder)}, not a plain BertEncoder"
    if change := own_code(encoder):
        yield f"encoder has {change}"
    config = model.config

    for i, layer in enumerate(model._layers()):
        for name, fault in layer_faults(i, layer, config):
            yield f"encoder.layer.{i}.{name} {fault}"

    # If norms come first, one follows the layers; a skeleton of a saved model has neither.
    if config.norm_first and len(encoder.layer):
        last = norm_fault(encoder.final_norm, config.hidden_size, config.layer_norm_eps)
        if last is not None:
            yield f"encoder.final_norm {last}"


def layer_faults(i: int, layer: BertLayer, config: BertConfig) -> Iterator[tuple[str, str]]:
    """Yield the name of each module of a layer that differs from the config, and how it differs."""
    own = layer.attention.self

    # The kernels take one head size and kind of positions for all layers.
    wanted = (config.hidden_size // config.num_attention_heads, config.position_embedding_type)
    if (own.attention_head_size, own.position_embedding_type) != wanted:
        yield "attention.self", f"has {own.position_embedding_type} positions or another head dim"
    rotation = getattr(own, "rotary_base", None), getattr(own, "window", None)
    if rotation != rotation_of(config, i):
        yield "attention.self", f"has a base and a window of {rotation}, and the config {rotation_of(config, i)}"

    # They normalise as torch's LayerNorm with the config's epsilon.
    norms: dict[str, Any] = {"attention.output": layer.attention.output, "output": layer.output}
    if config.norm_first:
        first = {"attention": layer.attention} if normalises_first(config, i) else {}
        norms = {**first, "intermediate": layer.intermediate}
    for name, part in norms.items():
        fault = norm_fault(part.LayerNorm, config.hidden_size, config.layer_norm_eps)
        if fault is not None:
            yield f"{name}.LayerNorm", fault

    act = layer.intermediate.intermediate_act_fn
    if type(act) is not Activation or act.name != config.hidden_act:
        yield "intermediate.intermediate_act_fn", f"is {act!r}, and the config has {config.hidden_act!r}"
    if (layer.intermediate.factor is not None) != config.gated:
        yield "intermediate.factor", f"is {layer.intermediate.factor}, and the config has gated={config.gated}"

    # Pruned layers differ in size, and the config has to say so.
    for name, shape in matrix_shapes(layer, config).items():
        found = tuple(layer.get_parameter(f"{name}.weight").shape)
        if found != shape:
            yield name, f"has a weight of {found}, not of {shape}"


def norm_fault(norm: nn.Module, hidden_size: int, eps: float) -> str | None:
    """Return how a norm differs from the LayerNorm of the kernels; None if it does not."""
    if type(norm) is not nn.LayerNorm:
        return f"is a {kind_of(norm)}, not a plain LayerNorm"
    missing = [name for name in ("weight", "bias") if getattr(norm, name) is None]
    if missing:
        return f"has no {' and no '.join(missing)}"
    if norm.normalized_shape != (hidden_size,):
        return f"is for shape {tuple(norm.normalized_shape)}, not ({hidden_size},)"
    return None if norm.eps == eps else f"has eps {norm.eps}, and the config {eps}"


def matrix_shapes(layer: BertLayer, config: BertConfig) -> dict[str, tuple[int, int]]:
    """Return the shapes of a layer's matrices by its counts of heads and neurons."""
    own, neurons, hidden_size = layer.attention.self, layer.intermediate.dense.weight.shape[0], config.hidden_size
    width = own.num_attention_heads * own.attention_head_size
    heads = dict.fromkeys(("query", "key", "value"), (width, hidden_size))
    if table := DISTANCES[own.position_embedding_type].table(config, own.num_attention_heads):
        heads["distance_embedding"] = table
    factor = {} if layer.intermediate.factor is None else {"intermediate.factor": (neurons, hidden_size)}
    return {
        **{f"attention.self.{name}": shape for name, shape in heads.items()},
        "attention.output.dense": (hidden_size, width),
        "intermediate.dense": (neurons, hidden_size),
        **factor,
        "output.dense": (hidden_size, neurons),
    }


def parse_device(name: str) -> torch.device:
    """Return a device of torch; raise ValueError if there is none of this name, or torch sees no CUDA device."""
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            torch.empty(0, dtype=torch.float32, device=device)  # raises if there is no such device
    except (AssertionError, RuntimeError, TypeError):  # the first for a torch that was built without the device
        raise ValueError(f"device is {name!r}; give cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name}: this torch ({torch.__version__}) sees no CUDA device")
    return device
