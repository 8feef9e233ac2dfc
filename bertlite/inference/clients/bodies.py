"""Encoders inside the objects of other libraries: found, converted, and put back in their place.

A body is a BertModel of bertlite, or a module of transformers or of bertlite.hf that `checkpoint.families` knows as a
BERT: the encoder inside a SentenceTransformer, a CrossEncoder, a pipeline or a model with a head.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bertlite.checkpoint.checks import fit_tensors_
from bertlite.checkpoint.families import FAMILIES, Origin
from bertlite.checkpoint.faults import raise_faults
from bertlite.checkpoint.skeleton import assign_tensors_, make_skeleton
from bertlite.inference.checks import DROPOUT, HOMES, is_of_home, kind_of, own_code, refuse_optimised
from bertlite.inference.clients.holders import SAVING, copy_module, copy_with, modules_of, refuse_saving_
from bertlite.inference.clients.pooling import compute_in_order_
from bertlite.inference.clients.readers import BODIES, mark_labels, reader_of, reads_labels, role_of, warn_of
from bertlite.inference.clients.verification import layer_list
from bertlite.inference.clients.verification import verify as verify_copy
from bertlite.inference.model import InferenceModel, RunsOnly, check_no_gradients, raise_missing
from bertlite.inference.native.encoder import NativeEncoder
from bertlite.inference.native.linear import NativeLinear
from bertlite.models.base import BertModel
from bertlite.stack.attention import PACKING
from bertlite.support import torch_private

Thing = TypeVar("Thing")
Optimise = Callable[[BertModel], InferenceModel]
VALUES = (bool, int, float, str, list, tuple, set, type(None), FunctionType, BuiltinFunctionType)
ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "auto", "packed", "varlen")
INPUTS = ("token_type_ids", "position_ids", "inputs_embeds", "head_mask", "cu_seqlens")
FOR_HEADS = ("first_token_only", "return_encoded")  # heads of bertlite.hf ask for these, and skip_padding
FLOATS = (torch.float32, torch.bfloat16)  # dtypes of linear layers that the kernels run
ASKED = ("output_attentions", "output_hidden_states", "return_dict")
# an encoder of transformers does not read them either; heads of ModernBERT pass the last two in 4.57
UNREAD = ("use_cache", "cache_position", "batch_size", "seq_len")
READ = (  # keywords that a body of transformers passes on and an attention reads
    *("is_causal", "position_bias", "dropout", "scaling", "sliding_window", "softcap"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)
INERT = (  # attributes without effect; the last one keeps the attention that the model was made with
    *("training", "gradient_checkpointing", "layer_idx", "n_layers", "name_or_path", "loss_type"),
    "attn_implementation",
)


def optimize_bodies(thing: Thing, optimise: Optimise, verify: bool, skip_padding: bool | None) -> Thing:
    """Return a copy of an object of torch in which each encoder that is a BERT runs optimised.

    Args:
        optimise: makes the optimised model of a BertModel.
        verify: compare outputs of the copy and the original.
        skip_padding: as for `optimize_for_inference`.

    Raises:
        TypeError: the object holds no such encoder, or a part of one would not be run; the message names the part.
        ValueError: an encoder is a decoder, or in training mode.
        RuntimeError: the copy was verified and differs.
    """
    check_around(thing)

    # Everything is looked at before the first conversion, which takes seconds.
    bodies = find_bodies(thing)
    if not bodies:
        raise TypeError(
            f"there is no encoder to optimise in a {kind_of(thing)}: give a model of bertlite, or an object that"
            f" holds one of {', '.join(f'{name}Model' for name in BODIES)}, loaded"
        )
    for name, body in bodies:
        check_body(name, body)

    # An optimised encoder stands in for each body, under the id by which the copy meets the original.
    made: dict[int, Any] = {}
    for name, body in bodies:
        reader, reads_states = reader_of(thing, body), reader_of(thing, body, states=True) is not None
        quick, config = optimise(as_bert(name, body)), copy.deepcopy(body.config, made)
        made[id(body)] = OptimizedBody(body, quick, config, reader, reads_states, skip_padding)
        if reader is not None and skip_padding is None and made[id(body)].attention not in ("eager", *PACKING):
            warn_of(name, reader, stacklevel=3)

    # torch sums a Dense's matmul in an order that depends on the number of texts; the kernels do not.
    encoders = [each.model.base_model.encoder for each in made.values() if isinstance(each, OptimizedBody)]
    kernels = next((each.kernels for each in encoders if isinstance(each, NativeEncoder)), None)
    if kernels is not None:
        made |= {id(each): NativeLinear(each, each.weight.dtype, kernels) for each in pooled_linears(thing)}

    # The copy is made at once, so that a module that two parts share stays shared.
    copied = copy_with(thing, made)
    finish_(copied, reproducible=kernels is not None and kernels.reproducible)
    if verify:
        verify_modules(thing, made, whole=not skip_padding)
    return copied


def verify_modules(thing: object, made: dict[int, Any], *, whole: bool) -> None:
    """Compare each module that holds encoders with its copy.

    Args:
        made: {id of an original: its copy}.
        whole: run the whole module; otherwise only its encoders, as when padding is left out although it is read.
    """
    verified: set[int] = set()
    for _, module in modules_of(thing):
        inside = [body for _, body in find_bodies(module)]
        if verified.issuperset(map(id, inside)):
            continue
        verified.update(map(id, inside))
        shared: dict[int, Any] = {id(x): x for x in module.parameters()}
        original, quick = copy_module(module, shared), [made[id(body)] for body in inside]
        pairs = [(shared[id(body)], each) for body, each in zip(inside, quick, strict=True)]
        if whole:
            verify_copy(original, made[id(module)], pairs, [each.model for each in quick])
        for theirs, ours in [] if whole else pairs:
            verify_copy(theirs, ours, [(theirs, ours)], [ours.model])


def pooled_linears(thing: object) -> Iterator[nn.Linear]:
    """Yield the linear layers of each Dense, which torch multiplies in an order that the number of texts decides."""
    for _, part in named_parts(thing):
        if type(part).__name__ == "Dense" and role_of(part, set()) == "each":
            yield from (x for x in part.children() if type(x) is nn.Linear and x.weight.dtype in FLOATS)


def finish_(copied: object, reproducible: bool) -> None:
    """Let poolings add in order, heads mark labels of padding, and holders of an optimised encoder refuse to save."""
    for _, part in list(named_parts(copied)):
        compute_in_order_(part, reproducible)
        if reads_labels(part):
            part.register_forward_pre_hook(mark_labels, with_kwargs=True)
        if not isinstance(part, OptimizedBody) and any(isinstance(each, OptimizedBody) for each in part.modules()):
            refuse_saving_(part, SAVING)


def check_around(thing: object) -> None:
    """Raise TypeError or ValueError, with the module's name, if a part around the bodies would not be run as it is."""
    for name, part in named_parts(thing):
        refuse_optimised(name, part)
        if torch_private.is_compiled(part):
            raise TypeError(f"{name} was compiled by torch.compile: pass the model as it was before")
        if type(part).__module__.startswith("peft."):
            raise TypeError(f"{name} is a {kind_of(part)}, an adapter that would not be run: merge it first")
        if isinstance(part, nn.Dropout) and part.training and part.p:
            raise ValueError(f"{name} is in training mode; call .eval() on what you optimise first")


def find_bodies(thing: object) -> list[tuple[str, nn.Module]]:
    """Return the bodies, with their names, in a module or in an object that holds modules, such as a pipeline."""
    return [(name, part) for name, part in named_parts(thing) if is_body(part)]


def named_parts(thing: object) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module in an object once, with its name."""
    found: set[nn.Module] = set()
    for prefix, module in modules_of(thing):
        for name, part in module.named_modules(found, prefix):
            yield name or type(part).__name__, part


def is_body(part: nn.Module) -> bool:
    """Return whether a module is a BertModel, or the base model of a family of BERTs or of a class made from one."""
    kind = getattr(getattr(part, "config", None), "model_type", None)
    names = [each.__name__ for each in type(part).__mro__ if each.__module__.startswith(HOMES[1:])]
    return kind in FAMILIES and any(f"{name}Model" in names for name in BODIES)


def check_body(name: str, body: Any) -> None:
    """Raise TypeError or ValueError, with the module's name, if an optimised copy would not run a part of it."""
    config = body.config

    if is_causal(config):
        raise ValueError(f"{name} is a decoder, which the kernels do not run: leave it as it is")

    # The kernels compute softmax attention; a function that the user registered would be passed over in silence.
    attention = getattr(config, "_attn_implementation", None) or "sdpa"
    functions = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    eager = getattr(sys.modules.get(type(body).__module__), "eager_attention_forward", None)
    if attention not in ATTENTIONS:
        raise TypeError(f"{name} has attention {attention!r}, which would not be run; set it to 'sdpa' first")
    if not is_of_home(functions.get(attention, eager)):
        raise TypeError(f"{name} has attention {attention!r} with another function than transformers': put that back")

    # A copy is built from the config, so whatever the config does not tell has to be as in a new body.
    made = None  # the modules of a new body without weights, of this one's class and config
    if not isinstance(body, BertModel):
        may_pool = "add_pooling_layer" in inspect.signature(type(body)).parameters
        options = {"add_pooling_layer": True} if may_pool else {}
        made = dict(make_skeleton(type(body), config_as_built(body), options).named_modules())
    for path, part in body.named_modules():
        where = f"{name}.{path}".rstrip(".")
        if part.training and not isinstance(part, nn.ModuleList):
            raise ValueError(f"{where} is in training mode; call .eval() on what you optimise first")

        # Subclasses, adapters and quantised layers have code of their own, which a copy would lose.
        kind = type(part)
        adapted = hasattr(part, "base_layer") or getattr(part, "_hf_peft_config_loaded", False)
        if part is body and not (adapted or kind.__module__.startswith(HOMES)):
            raise TypeError(
                f"{where} is a {kind_of(part)}, a class of its own, whose code would not be run: give a"
                f" {kind.__mro__[1].__name__} with its weights"
            )
        if adapted or not kind.__module__.startswith(HOMES) or (isinstance(part, nn.Linear) and kind is not nn.Linear):
            raise TypeError(
                f"{where} is a {kind_of(part)}, which would not be run: merge adapters first, and start from a model"
                " that is neither quantised nor compiled"
            )

        # Hooks and changed values are the last ways in which a module can differ.
        if change := own_code(part):
            raise TypeError(f"{where} has {change}, which would not be run: remove it first")
        if made and (change := mismatch(part, made.get(path))):
            raise TypeError(f"{where} has {change}: a copy is made by the config, so make the two agree")


def is_causal(config: Any) -> bool:
    """Return whether a config describes a decoder."""
    return any(getattr(config, field, False) for field in ("is_decoder", "add_cross_attention", "is_causal"))


def config_as_built(body: Any) -> Any:
    """Return a copy of a body's config that describes its layers as they are, and the chunks that they run in."""
    config, count = copy.deepcopy(body.config), len(layer_list(body))
    config.chunk_size_feed_forward = chunk_of(body)
    if count != config.num_hidden_layers:
        config.num_hidden_layers = count
        for field in ("pruned_heads", "pruned_neurons"):
            units = getattr(config, field, None) or {}
            setattr(config, field, {layer: units[layer] for layer in units if int(layer) < count})
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:count]
    return config


def chunk_of(body: Any) -> int:
    """Return the number of which the tokens of a body must be a multiple, or 0."""
    return max(vars(part).get("chunk_size_feed_forward", 0) for part in body.modules())


def mismatch(part: nn.Module, made: nn.Module | None) -> str | None:
    """Return how a module differs from the one that its config makes, or None: a conversion goes by the config.

    It may differ in its class, a value or a buffer.
    """
    if made is None or type(part) is not type(made):
        both_drop = isinstance(part, DROPOUT) and isinstance(made, DROPOUT)
        return None if both_drop else f"class {kind_of(part)}, where its config makes {made and kind_of(made)}"

    # Dropout does nothing in eval mode, and the row of padding matters to gradients alone.
    for name, x in vars(made).items():
        irrelevant = name in INERT or name.startswith("_") or "dropout" in name
        if irrelevant or isinstance(part, nn.Dropout) or (name == "padding_idx" and isinstance(part, nn.Embedding)):
            continue
        own = vars(part).get(name)
        if isinstance(x, VALUES) and (isinstance(own, Tensor) or own != x):
            return f"{name} {own!r}, where its config makes {x!r}"

    # Buffers such as position ids may be longer or shorter than in a new body: the shared part must agree.
    for name, x in made.named_buffers(recurse=False):
        found: Any = getattr(part, name, None)
        shared = 0 if found is None or found.is_meta else min(found.shape[-1], x.shape[-1])
        if shared and not torch.equal(found[..., :shared].to(x.device), x[..., :shared]):
            rounded = found.dtype != x.dtype and torch.equal(found[..., :shared], x[..., :shared].to(found))
            why = ", as it was rounded after loading (give from_pretrained its dtype)" if rounded else ""
            return f"other values in {name} than its config makes{why}"

    unknown = [name for name, x in part.named_buffers(recurse=False) if name not in made._buffers]
    return f"a buffer {unknown[0]!r}, where its config makes none" if unknown else None


def as_bert(name: str, body: Any) -> BertModel:
    """Return a bertlite model with a body's own tensors, in eval mode; its layers are the body's."""
    if isinstance(body, BertModel):
        return body
    origin = Origin.of(f"the config of {name}", config_as_built(body).to_dict())
    pooler = getattr(body, "pooler", None) is not None
    state = dict(body.state_dict())
    options, config = origin.build(BertModel, {"add_pooling_layer": pooler}, {}, state)
    model = make_skeleton(BertModel, config, options)
    wanted = model.state_dict()
    state = origin.as_bert(state, wanted)
    fit = fit_tensors_(state, wanted, model)
    title = f"{name}, a {kind_of(body)}, is not the BERT of its config; set there the fields that a line says to pass:"
    raise_faults(title, [*fit.faults, *sorted(fit.absent)])
    assign_tensors_(model, {key: state[key].detach() for key in wanted})
    return model.requires_grad_(False).eval()


class OptimizedBody(RunsOnly):
    """An optimised encoder that replaces a module of transformers, with the same arguments and results.

    It keeps that module's device and dtype.  Changing them, training and saving raise an error with the way out.
    """

    model: InferenceModel

    def __init__(
        self,
        body: Any,
        model: InferenceModel,
        config: Any,
        reader: str | None,
        reads_states: bool,
        skip_padding: bool | None,
    ) -> None:
        super().__init__()
        self.leaves_padding_out, self.reads_states, self.skip_padding = reader is None, reads_states, skip_padding
        self.has_sdpa = getattr(body, "_supports_sdpa", True)  # without it, "eager" was not chosen by the user
        self._config, self.main_input_name = config, getattr(body, "main_input_name", "input_ids")
        self.anchor = nn.Parameter(torch.empty(0, dtype=body.dtype, device=body.device), requires_grad=False)
        vars(self).update(model=model)  # no child: its weights must not be counted, moved or saved
        parameters = inspect.signature(body.forward).parameters
        self.passes_on = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        self.arguments = tuple(name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD)
        ids = torch.zeros(1, chunk_of(body) or 1, dtype=torch.long, device=body.device)
        self.output_type, as_tuple = type(body(ids, return_dict=True)), body(ids, return_dict=False)
        self.gap = sum(x is None for x in as_tuple)  # transformers 4 leaves room for a pooler's output
        self.train(False)

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, *rest: Any, **given: Any
    ) -> Any:
        """Run the encoder; arguments and results are as for the module that it replaces.

        Raises:
            TypeError: there are more arguments than that module takes, or one that an encoder does not use.
            RuntimeError: its parameter or an input requires a gradient, and gradients are on.
        """
        check_no_gradients(self.anchor, input_ids, attention_mask, *rest, *given.values())
        if is_causal(self.config):
            raise_missing("causal attention, for which its config asks now")

        # Arguments are sorted by what becomes of them: tensors go to the kernels, wishes follow the config.
        if len(rest) > len(self.arguments) - 2:
            raise TypeError(f"an optimised encoder takes {len(self.arguments)} arguments, not {2 + len(rest)}")
        given = {**dict(zip(self.arguments[2:], rest, strict=False)), **given}
        inputs = {name: given.pop(name, None) for name in INPUTS if name in self.arguments}

        asked = {name: given.pop(name, None) for name in ASKED}
        asked = {name: getattr(self.config, name) if x is None else x for name, x in asked.items()}
        if not isinstance(states := asked["output_hidden_states"], bool):
            raise TypeError(f"output_hidden_states is {states!r}; an optimised encoder gives all (True) or none")

        # The rest may be None or False: an encoder would ignore anything else, and its result would be another.
        flags = {name: bool(given.pop(name, False)) for name in FOR_HEADS}
        flags["skip_padding"] = self.skips_padding(given.pop("skip_padding", None), attention_mask, states)
        asked_for = [name for name, x in given.items() if x is not None and x is not False and name not in UNREAD]
        unknown = [name for name in asked_for if not self.passes_on or name in READ or name in self.arguments]
        if unknown:
            raise TypeError(f"an optimised encoder does not support {unknown[0]}: leave it None, or keep the original")

        as_dict = asked.pop("return_dict")
        out: Any = self.model(input_ids, attention_mask, **inputs, **asked, **flags, return_dict=True)

        # Heads of bertlite.hf read the layout too; any other caller gets the output class of the module.
        if flags["return_encoded"]:
            vars(out).update({name: self.as_given(x) for name, x in out.items() if name != "layout"})
            return out

        # In transformers 4 a tuple has a gap where a pooler's output would be.
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
        names = (getattr(self.config, field, None) for field in ("_attn_implementation", "attn_implementation"))
        return next(filter(None, names), None) if self.has_sdpa else None

    def skips_padding(self, asked: bool | None, mask: Any, states: bool) -> bool:
        """Return whether padding is left out of a forward if `BertBody.why_padded` permits it.

        Args:
            asked: the choice of a head of bertlite.hf.
            mask: marked by `mark_labels` if labels of padding count.
            states: hidden states are returned.
        """
        if self.skip_padding is not None or self.attention in PACKING:
            return self.skip_padding is not False
        read = asked is False or (states and self.reads_states) or getattr(mask, "padding_counts", False)
        return self.leaves_padding_out and self.attention != "eager" and not read

    @property
    def config(self) -> Any:
        """The copy's own config; a forward reads it, as the original reads its own."""
        return self._config

    @cached_property
    def embeddings(self) -> SimpleNamespace:
        """The word embeddings, in the module's dtype, for heads that multiply by them."""
        words = self.model.base_model.embeddings.word_embeddings.weight
        return SimpleNamespace(word_embeddings=nn.Embedding.from_pretrained(words.to(self.dtype)))

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

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
                f"an optimised encoder stays on {self.device} in {self.dtype}, and cannot be {after.dtype} on"
                f" {after.device}: move the original, and optimise that"
            )
        return self
