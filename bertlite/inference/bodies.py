"""Encoders inside the objects of other libraries: found, converted, and put back in their place.

A body is a module of transformers, or of bertlite.hf, that `checkpoint.families` knows as a BERT: the encoder inside a
SentenceTransformer, a CrossEncoder, a pipeline or a model with a head.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from bertlite.checkpoint.checks import fit_tensors_
from bertlite.checkpoint.families import FAMILIES, Origin
from bertlite.checkpoint.faults import raise_faults
from bertlite.checkpoint.skeleton import assign_tensors_, make_skeleton
from bertlite.inference.readers import BODIES, DEPTH, mark_labels, reader_of, reads_labels
from bertlite.inference.runtime import InferenceModel, raise_missing
from bertlite.inference.support import kind_of, own_code
from bertlite.models.base import BertModel
from bertlite.stack.attention import PACKING
from bertlite.support import torch_private

Thing = TypeVar("Thing")
Optimise = Callable[[BertModel], InferenceModel]
ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "auto", "packed", "varlen")
INPUTS = ("token_type_ids", "position_ids", "inputs_embeds", "head_mask", "cu_seqlens")
FOR_HEADS = ("first_token_only", "return_encoded")  # as heads of bertlite.hf ask, and skip_padding
ASKED = ("output_attentions", "output_hidden_states", "return_dict")
UNREAD = ("use_cache", "cache_position")  # by an encoder of transformers too
HOMES = ("torch.nn.", "transformers.", "bertlite.")  # of the classes that compute what they say


def optimize_bodies(
    thing: Thing, optimise: Optimise, compare: Callable[[BertModel, Any], None] | None, skip_padding: bool | None
) -> Thing:
    """Return a copy of an object of torch in which each encoder that is a BERT runs optimised.

    Args:
        optimise: makes the optimised model of a BertModel.
        compare: raises if a BertModel does not compute what a body does.
        skip_padding: of `optimize_for_inference`.

    Raises:
        TypeError: the object holds no such encoder, or one with a part that would not be run; it names the part.
        ValueError: an encoder is a decoder, or in training mode.
    """
    check_around(thing)
    bodies = list(find_bodies(thing))
    if not bodies:
        raise TypeError(
            f"there is no encoder to optimise in a {kind_of(thing)}: give a model of bertlite, or an object that"
            f" holds one of {', '.join(f'{name}Model' for name in BODIES)}, loaded"
        )
    for name, body in bodies:
        check_body(name, body)
    made: dict[int, Any] = {}
    for name, body in bodies:
        model = as_bert(name, body)
        if compare is not None:
            compare(model, Like(body))
        reader, reads_states = reader_of(thing, body), reader_of(thing, body, states=True) is not None
        made[id(body)] = OptimizedBody(body, optimise(model), reader, reads_states, skip_padding)
        if reader is not None and skip_padding is None and made[id(body)].attention not in ("eager", *PACKING):
            warnings.warn(
                f"{name} computes padding, since a {reader} may read it: batches of texts of different lengths take"
                " longer; if it reads none, optimize_for_inference(…, skip_padding=True) leaves padding out",
                RuntimeWarning,
                stacklevel=3,
            )
    copied = copy_with(thing, made)
    parts = {id(part): part for _, module in modules_of(copied) for part in module.modules()}
    for part in filter(pools_flat, parts.values()):
        part.register_forward_pre_hook(leave_out_padding)
        part.register_forward_hook(put_padding_back)
    for part in filter(reads_labels, parts.values()):
        part.register_forward_pre_hook(mark_labels, with_kwargs=True)
    return copied


def check_around(thing: object) -> None:
    """Raise TypeError or ValueError, which name the module, for what would not be run as it is around the bodies."""
    for prefix, module in modules_of(thing):
        for name, part in module.named_modules(prefix=prefix):
            where = name or type(part).__name__
            if isinstance(part, OptimizedBody):
                raise TypeError(f"{where} is optimised already: optimise the original again")
            if torch_private.is_compiled(part):
                raise TypeError(f"{where} was compiled by torch.compile: pass the model as it was before")
            if type(part).__module__.startswith("peft."):
                raise TypeError(f"{where} is a {kind_of(part)}, an adapter that would not be run: merge it first")
            if isinstance(part, nn.Dropout) and part.training and part.p:
                raise ValueError(f"{where} is in training mode; call .eval() on what you optimise first")


def find_bodies(thing: object) -> Iterator[tuple[str, nn.Module]]:
    """Yield each body once, with its name: of a module, or of an object that holds modules, as a pipeline does."""
    found: set[int] = set()
    for prefix, module in modules_of(thing):
        for name, part in module.named_modules(prefix=prefix):
            if is_body(part) and id(part) not in found:
                found.add(id(part))
                yield name or type(part).__name__, part


def modules_of(
    thing: object, name: str = "", depth: int = DEPTH, seen: tuple[int, ...] = ()
) -> list[tuple[str, nn.Module]]:
    """Return the modules that an object is, or holds in attributes of its own or of what it holds, by their names."""
    if isinstance(thing, nn.Module):
        return [(name, thing)]
    if not depth or id(thing) in seen or isinstance(thing, type | FunctionType | ModuleType):
        return []
    parts, seen = getattr(thing, "__dict__", {}), (*seen, id(thing))
    each = (modules_of(part, f"{name}.{own}".lstrip("."), depth - 1, seen) for own, part in parts.items())
    return list(chain.from_iterable(each))


def is_body(part: nn.Module) -> bool:
    """Return whether a module is the base model of a family of BERTs, or of a class made from one."""
    kind = getattr(getattr(part, "config", None), "model_type", None)
    names = [each.__name__ for each in type(part).__mro__ if each.__module__.startswith(HOMES[1:])]
    return kind in FAMILIES and any(f"{name}Model" in names for name in BODIES)


def check_body(name: str, body: nn.Module) -> None:
    """Raise TypeError or ValueError, which name the module, if an optimised copy would not run all that is there."""
    config: Any = body.config
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(f"{name} is a decoder, which the kernels do not run: leave it as it is")
    attention = getattr(config, "_attn_implementation", None) or "sdpa"
    if attention not in ATTENTIONS:
        raise TypeError(f"{name} has attention {attention!r}, which would not be run; set it to 'sdpa' first")
    for path, part in body.named_modules(prefix=name):
        if part.training:
            raise ValueError(f"{path} is in training mode; call .eval() on what you optimise first")
        kind = type(part)
        adapted = hasattr(part, "base_layer") or getattr(part, "_hf_peft_config_loaded", False)
        if adapted or not kind.__module__.startswith(HOMES) or (isinstance(part, nn.Linear) and kind is not nn.Linear):
            raise TypeError(
                f"{path} is a {kind_of(part)}, which would not be run: merge adapters first, and start from the model"
                " that is neither quantised nor compiled"
            )
        if (change := own_code(part)) and not only_records(part):
            raise TypeError(f"{path} has {change}, which would not be run: remove it first")


def only_records(part: nn.Module) -> bool:
    """Return whether the code that a module has beside its class is transformers' hooks that keep hidden states."""
    others = (part._forward_pre_hooks, part._backward_pre_hooks, part._backward_hooks)
    own = [hook.__module__ for hook in part._forward_hooks.values()]
    return bool(own) and not any(others) and set(own) == {"transformers.utils.output_capturing"}


@torch.no_grad()
def as_bert(name: str, body: Any) -> BertModel:
    """Return a bertlite model with a body's own tensors, in eval mode."""
    origin = Origin.of(f"the config of {name}", body.config.to_dict())
    pooler = getattr(body, "pooler", None) is not None
    state = dict(body.state_dict())
    options, config = origin.build(BertModel, {"add_pooling_layer": pooler}, {}, state)
    model = make_skeleton(BertModel, config, options)
    wanted = model.state_dict()
    state = origin.as_bert(state, wanted)
    fit = fit_tensors_(state, wanted, model, config)
    raise_faults(f"{name}, a {kind_of(body)}, is not the BERT of its config:", [*fit.faults, *sorted(fit.absent)])
    assign_tensors_(model, {key: state[key].detach() for key in wanted})
    return model.requires_grad_(False).eval()


def copy_with(thing: Any, memo: dict[int, Any], depth: int = DEPTH) -> Any:
    """Return a copy of an object, of what it holds and of their modules; all else is shared.

    Args:
        memo: copies that are made, by the ids of what they are copies of: with optimised bodies in place of bodies.
    """
    if id(thing) in memo:
        return memo[id(thing)]
    if isinstance(thing, nn.Module):
        return copy_module(thing, memo)
    memo[id(thing)] = copied = copy.copy(thing)
    for name, part in vars(thing).items():
        if modules_of(part, depth=depth - 1):
            object.__setattr__(copied, name, copy_with(part, memo, depth - 1))
    return copied


def copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy by attributes, also of modules that describe how they are saved, as those of flair do."""
    shells = [
        (part, type(part).__new__(type(part)))
        for part in module.modules()
        if type(part).__setstate__ is not nn.Module.__setstate__
        and not type(part).__module__.startswith(HOMES[0])
        and id(part) not in memo
    ]
    memo.update((id(part), shell) for part, shell in shells)
    for part, shell in shells:
        vars(shell).update(copy.deepcopy(vars(part), memo))
    return copy.deepcopy(module, memo)


def pools_flat(part: Any) -> bool:
    """Return whether a module is a Pooling of sentence-transformers that takes tokens without padding, from 5.7 on.

    One that leaves prompts out is not, as 5.7 pools them then.
    """
    return type(part).__name__ == "Pooling" and hasattr(part, "_forward_flattened") and part.include_prompt


def leave_out_padding(pooling: nn.Module, args: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any]]:
    """Give a Pooling its tokens without padding, or torch would sum them in an order that the longest text decides."""
    (features,) = args
    mask = features.get("attention_mask")
    if mask is None or "cu_seq_lens_q" in features or mask.shape != features["token_embeddings"].shape[:2]:
        return (features,)  # there is no padding that is known, or it was left out before
    real = mask.bool()
    ends = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0))
    padded = features["token_embeddings"]
    return ({**features, "padded": padded, "token_embeddings": padded[real][None], "cu_seq_lens_q": ends},)


def put_padding_back(pooling: nn.Module, args: object, features: dict[str, Any]) -> dict[str, Any]:
    """Return a Pooling's features with the tokens as they came."""
    if "padded" not in features:
        return features
    del features["cu_seq_lens_q"]
    features["token_embeddings"] = features.pop("padded")
    return features


class Like:
    """A body that is called by name, as a BertModel is, for a comparison of the two."""

    def __init__(self, body: Any) -> None:
        self.body, self.dtype, self.base_model = body, body.dtype, self
        self.takes = {"return_dict", *inspect.signature(body.forward).parameters}

    def __call__(self, **inputs: Any) -> Any:
        return self.body(**{name: x for name, x in inputs.items() if name in self.takes})


class OptimizedBody(nn.Module):
    """An optimised encoder in the place of a module of transformers: called like it, it returns what that returns.

    It keeps that module's device and dtype.  To change them, to train and to save it are errors that say how to go on.
    """

    model: InferenceModel

    def __init__(
        self, body: Any, model: InferenceModel, reader: str | None, reads_states: bool, skip_padding: bool | None
    ) -> None:
        super().__init__()
        self.leaves_padding_out, self.reads_states, self.skip_padding = reader is None, reads_states, skip_padding
        self.has_sdpa = getattr(body, "_supports_sdpa", True)  # without, "eager" is nobody's choice
        self.config, self.main_input_name = body.config, body.main_input_name
        self.anchor = nn.Parameter(torch.empty(0, dtype=body.dtype, device=body.device), requires_grad=False)
        vars(self).update(model=model)  # no child, whose weights others would count, move and save
        self.arguments = tuple(inspect.signature(body.forward).parameters)
        with torch.no_grad():
            ids = torch.zeros(1, 1, dtype=torch.long, device=body.device)
            self.output_type, as_tuple = type(body(ids, return_dict=True)), body(ids, return_dict=False)
        self.gap = sum(x is None for x in as_tuple)  # transformers 4 leaves room for a pooler's output
        super().train(False)

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, *rest: Any, **given: Any
    ) -> Any:
        """Run the encoder; arguments and results are those of the module whose place it took.

        Raises:
            TypeError: there are more arguments than that module takes, or one that an encoder has no use for.
            RuntimeError: its parameter requires a gradient, and gradients are on.
        """
        if self.anchor.requires_grad and torch.is_grad_enabled():
            raise_missing("gradients: train the original, or run this under torch.no_grad()")
        if len(rest) > len(self.arguments) - 2:
            raise TypeError(f"an optimised encoder takes {len(self.arguments)} arguments, not {2 + len(rest)}")
        given = {**dict(zip(self.arguments[2:], rest, strict=False)), **given}
        inputs = {name: given.pop(name, None) for name in INPUTS}
        asked = {name: given.pop(name, None) for name in ASKED}
        asked = {name: getattr(self.config, name) if x is None else x for name, x in asked.items()}
        if not isinstance(states := asked["output_hidden_states"], bool):
            raise TypeError(f"output_hidden_states is {states!r}; an optimised encoder gives all (True) or none")
        flags = {name: bool(given.pop(name, False)) for name in FOR_HEADS}
        flags["skip_padding"] = self.skips_padding(given.pop("skip_padding", None), attention_mask, states)
        unknown = [name for name, x in given.items() if x is not None and x is not False and name not in UNREAD]
        if unknown:
            raise TypeError(f"an optimised encoder does not support {unknown[0]}: leave it None, or keep the original")
        as_dict = asked.pop("return_dict")
        out: Any = self.model(input_ids, attention_mask, **inputs, **asked, **flags, return_dict=True)
        if flags["return_encoded"]:
            vars(out).update({name: self.as_given(x) for name, x in out.items() if name != "layout"})
            return out
        found = self.output_type(**{name: self.as_given(x) for name, x in out.items()})
        if as_dict:
            return found
        first, *others = found.to_tuple()
        return (first, *[None] * self.gap, *others)

    def as_given(self, x: Any) -> Any:
        """Return an output, or a tuple of them, in the dtype of the module."""
        return tuple(map(self.as_given, x)) if isinstance(x, tuple) else x.to(self.dtype)

    @property
    def attention(self) -> str | None:
        """The name of attention that was chosen."""
        return getattr(self.config, "_attn_implementation", None) if self.has_sdpa else None

    def skips_padding(self, asked: bool | None, mask: Any, states: bool) -> bool:
        """Return whether padding is left out of a forward where `BertBody.why_padded` permits it.

        Args:
            asked: by a head of bertlite.hf.
            mask: marked by `mark_labels` if labels count there.
            states: hidden states are returned.
        """
        if self.skip_padding is not None or self.attention in PACKING:
            return self.skip_padding is not False
        read = asked is False or (states and self.reads_states) or getattr(mask, "padding_counts", False)
        return self.leaves_padding_out and self.attention != "eager" and not read

    def may_skip_padding(self) -> bool:
        """Return False: heads of bertlite.hf get every token."""
        return False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(f"an optimised encoder has no {name!r}: keep the original for that") from None

    @property
    def device(self) -> torch.device:
        return self.anchor.device

    @property
    def dtype(self) -> torch.dtype:
        return self.anchor.dtype

    def extra_repr(self) -> str:
        return f"{type(self.config).__name__}, {self.model.extra_repr()}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "OptimizedBody":
        after = fn(self.anchor.detach().clone())
        if (after.device, after.dtype) != (self.device, self.dtype):
            raise RuntimeError(
                f"an optimised encoder stays on {self.device} in {self.dtype}, and was asked for {after.dtype} on"
                f" {after.device}: move the original, and optimise that"
            )
        return self

    def train(self, mode: bool = True) -> "OptimizedBody":
        return raise_missing("training mode: train the original, and optimise that") if mode else self

    def state_dict(self, *args: object, **kwargs: object) -> NoReturn:
        raise_missing("state_dict: save the original")

    def _load_from_state_dict(self, *args: object) -> NoReturn:
        raise_missing("load_state_dict: load into the original, and optimise that")

    def save_pretrained(self, *args: object, **kwargs: object) -> NoReturn:
        raise_missing("save_pretrained: save the original")
