"""Checks of the modules of a model before it is optimised."""

from operator import attrgetter

from torch import nn

from bertlite.model import BertPreTrainedModel
from bertlite.stack.body import has_hooks
from bertlite.stack.modules import (
    BertAttention,
    BertIntermediate,
    BertLayer,
    BertOutput,
    BertSelfAttention,
    BertSelfOutput,
)

DROPOUT = (nn.Dropout, nn.Identity)
ATTENTION_PARTS: dict[str, tuple[type[nn.Module], ...]] = {
    "": (BertAttention,),
    ".self": (BertSelfAttention,),
    ".self.dropout": DROPOUT,
    ".output": (BertSelfOutput,),
    ".output.dropout": DROPOUT,
}
LAYER_PARTS: dict[str, tuple[type[nn.Module], ...]] = {  # the classes of a layer's modules; linear ones have no choice
    "": (BertLayer,),
    **{
        f"{attention}{name}": kinds
        for attention in ("attention", "crossattention")
        for name, kinds in ATTENTION_PARTS.items()
    },
    "intermediate": (BertIntermediate,),
    "output": (BertOutput,),
    "output.dropout": DROPOUT,
}


def check_unaltered(model: BertPreTrainedModel) -> None:
    """Raise TypeError if a conversion would not reproduce a module of the model, and name the module.

    Linear layers, and the modules of a layer of BERT, must have exactly their classes, without hooks or methods of
    their own.  LayerNorm and activations may be anything: backends that replace them check them.
    """
    body = model.base_model
    prefix = "encoder" if body is model else f"{model.base_model_prefix}.encoder"
    check_kind(f"{prefix}.layer", body.encoder.layer, (nn.ModuleList,))
    for i, layer in enumerate(body.encoder.layer):
        for name, kinds in LAYER_PARTS.items():
            if not name.startswith("cross") or hasattr(layer, "crossattention"):
                path = f"{prefix}.layer.{i}.{name}".rstrip(".")
                check_kind(path, attrgetter(name)(layer) if name else layer, kinds)
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear) or name.endswith((".dense", ".query", ".key", ".value")):
            check_unwrapped(name, part)
        elif not name.startswith(f"{prefix}."):
            continue
        if change := own_code(part):
            raise TypeError(
                f"{name} has {change}, which an optimised model would not run: remove it first (a mask of"
                " torch.nn.utils.prune by its remove), or run the model itself"
            )


def check_kind(name: str, part: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
    """Raise TypeError unless a module's class is exactly one of these."""
    if type(part) not in kinds:
        raise TypeError(
            f"{name} is a {kind_of(part)}, not a plain {kinds[0].__name__}, the only one that an optimised model runs:"
            " optimise the model before it is compiled, wrapped or changed, or run the model itself"
        )


def check_unwrapped(name: str, part: nn.Module) -> None:
    """Raise TypeError unless a matrix is in a plain nn.Linear."""
    if type(part) is not nn.Linear:
        raise TypeError(
            f"{name} is a {kind_of(part)}, not a plain nn.Linear: merge adapters first, and start from the model"
            " that is not quantised"
        )


def own_code(part: nn.Module) -> str | None:
    """Return the code that a module runs beside its class: hooks, or a method of its own; None if none."""
    if has_hooks(part):
        return "hooks"
    own = (name for name, value in vars(part).items() if callable(value) and callable(getattr(type(part), name, None)))
    return next((f"a {name} of its own" for name in own), None)


def kind_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
