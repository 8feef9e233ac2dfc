"""A vector for each text, made from an encoder's states as in sentence-transformers, and the similarity of two.

Letters:  B texts · S positions · D hidden
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertlite.checkpoint.files import WEIGHT_FILES, Source, locate
from bertlite.checkpoint.reading import read_weights
from bertlite.config import read_json_object
from bertlite.inference.pooling import pool_states
from bertlite.runtime.pooling import POOLINGS
from bertlite.tokenizer import BertTokenizer
from bertlite.tokenizer.sentences import (
    POOLING,
    SENTENCE_CONFIG,
    Place,
    is_encoder,
    last_name,
    read_modules,
    read_object,
    read_pooling,
)

LIBRARY = "sentence_transformers."  # its modules are in it; modules of other libraries may have the same names
ACTIVATIONS = "torch.nn.modules."
SIMILARITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # as in sentence-transformers
    "cosine": F.cosine_similarity,
    "dot": lambda a, b: (a * b).sum(1),
    "euclidean": lambda a, b: -torch.linalg.vector_norm(a - b, dim=1),
    "manhattan": lambda a, b: -torch.linalg.vector_norm(a - b, ord=1, dim=1),
}


@dataclass(frozen=True)
class VectorHead:
    """The function from a text's states to its vector: pooling, then further modules.

    Args:
        pooling: names of POOLINGS; their vectors are concatenated.
        skip: the number of tokens at the beginning that are not pooled, such as a prompt's.
        modules: applied in turn to the pooled vectors.
        similarity: the similarity of two vectors, a name of SIMILARITIES.
        name: for records.
    """

    pooling: tuple[str, ...] = ("mean",)
    skip: int = 0
    modules: tuple[nn.Module, ...] = ()
    similarity: str = "cosine"
    name: str = "mean"

    def __call__(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return a vector for each text, float32 or float64: (B, S, D) states, (B, S) mask -> (B, D')."""
        x = pool_states(states, mask, self.pooling, self.skip)
        for module in self.modules:
            x = module.to(x.device, x.dtype)(x)
        return x

    def compare(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the similarity of vectors, (B, D') and (B, D') -> (B,)."""
        return SIMILARITIES[self.similarity](one, other)


MEAN = VectorHead()


# Reading -------------------------------------------------------------------------------------------------------------


def read_head(checkpoint: str) -> VectorHead:
    """Read how a checkpoint makes vectors: by the mean of its states, unless sentence-transformers' files say more.

    Raises:
        ValueError: it makes a vector for each token, as ColBERT does, or has a module that is not supported here.
    """
    place = locate(Source(checkpoint))
    kinds = [(module["type"], str(PurePosixPath(module["path"]))) for module in read_modules(place)]
    values = read_object(place, SENTENCE_CONFIG)
    pooling, pools_prompt = read_pooling(place)
    if (kinds and not pooling) or "HF_ColBERT" in (read_object(place, "config.json").get("architectures") or []):
        raise ValueError(f"{checkpoint} makes no vector of a whole text, since it has no Pooling (is it a ColBERT?)")
    if not kinds:
        return MEAN
    known = {POOLING, *MODULES}
    ours = (kind.startswith(LIBRARY) and (is_encoder(kind) or last_name(kind) in known) for kind, _ in kinds)
    if others := [kind for (kind, _), each in zip(kinds, ours, strict=True) if not each]:
        raise ValueError(f"{checkpoint} has {' and '.join(others)}; vectors are made by {', '.join(sorted(known))}")
    at = [last_name(kind) for kind, _ in kinds].index(POOLING)
    modules = tuple(MODULES[last_name(kind)](place, inner) for kind, inner in kinds[at + 1 :])
    if unknown := {*pooling} - {*POOLINGS}:
        raise ValueError(f"{checkpoint} pools by {', '.join(sorted(unknown))}; known are {', '.join(POOLINGS)}")
    similarity = values.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise ValueError(f"{checkpoint} compares by {similarity!r}; known are {', '.join(SIMILARITIES)}")
    skip = 0 if pools_prompt else prompt_length(checkpoint)
    name = ", ".join(["+".join(pooling), *(last_name(kind) for kind, _ in kinds[at + 1 :] if "Normalize" not in kind)])
    return VectorHead(tuple(pooling), skip, modules, similarity, name)


def prompt_length(checkpoint: str) -> int:
    """Return the number of tokens up to the end of the default prompt, special ones included; 0 without a prompt."""
    tokenizer = BertTokenizer.from_pretrained(checkpoint)
    [ids] = tokenizer.encode_texts([""])["input_ids"]
    return len(ids) - (ids[-1] in tokenizer.all_special_ids) if tokenizer.sentences.prompt else 0


class Dense(nn.Module):
    """A linear layer with an activation; its input may be added to its result."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        named = str(values.get("activation_function", "torch.nn.modules.activation.Tanh"))
        act = getattr(nn, last_name(named), None) if named.startswith(ACTIVATIONS) else None
        if not (isinstance(act, type) and issubclass(act, nn.Module)):
            raise ValueError(f"a Dense module has the activation {named!r}; only activations of torch.nn are known")
        self.values, inputs, outputs = dict(values), values["in_features"], values["out_features"]
        self.linear, self.act = nn.Linear(inputs, outputs, bias=values.get("bias", True)), act()
        if values.get("use_residual"):
            self.residual = nn.Identity() if inputs == outputs else nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.linear(x))
        return out + self.residual(x) if hasattr(self, "residual") else out


class Norm(nn.Module):
    """A LayerNorm."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(values["dimension"])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


class Normalize(nn.Module):
    """Length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


def read_module(make: Callable[[Mapping[str, Any]], nn.Module], place: Place, inner: str) -> nn.Module:
    """Read a module of sentence-transformers with its weights.

    Raises:
        ValueError: it has no weights, or weights of another shape; or it reads or writes more than vectors of texts.
    """
    found = [place.get(f"{inner}/{name}") for name in ("config.json", *WEIGHT_FILES)]
    config, weights = found[0], next(filter(None, found[1:]), None)
    if config is None or weights is None:
        raise ValueError(f"{inner}, a module of sentence-transformers, lacks its config.json or its weights")
    values = read_json_object(config)
    ends = [values.get(name) or "sentence_embedding" for name in ("module_input_name", "module_output_name")]
    if {*ends} != {"sentence_embedding"}:
        raise ValueError(f"{config} makes {ends[1]} of {ends[0]}; here modules make sentence_embedding of itself")
    module = make(values)
    try:
        module.load_state_dict(read_weights(Path(weights)))
    except RuntimeError as error:
        raise ValueError(f"{weights} does not fit its config.json: {error}") from None
    return module.eval().requires_grad_(False)


def first_dense(head: VectorHead) -> Dense | None:
    """Return the Dense that a map of pooled vectors merges into, the first module; None if that is something else."""
    first = head.modules[0] if head.modules else None
    return first if isinstance(first, Dense) and not hasattr(first, "residual") else None


@torch.no_grad()
def with_map(head: VectorHead, linear: nn.Linear) -> VectorHead:
    """Return a head that first maps pooled vectors by a linear layer, which becomes a Dense or merges into one."""
    first = first_dense(head)
    layers, others = ((linear,), head.modules) if first is None else ((linear, first.linear), head.modules[1:])
    kind = nn.Identity if first is None else type(first.act)
    sizes = {"in_features": linear.in_features, "out_features": layers[-1].out_features, "bias": True}
    found = Dense({**sizes, "activation_function": f"{kind.__module__}.{kind.__qualname__}"})
    weight = torch.eye(linear.in_features, dtype=torch.float64, device=linear.weight.device)
    bias = weight.new_zeros(linear.in_features)
    for each in layers:
        own = each.weight.to(weight)
        weight, bias = own @ weight, own @ bias + (0 if each.bias is None else each.bias.to(bias))
    found.linear.load_state_dict({"weight": weight, "bias": bias})
    return replace(head, modules=(found.eval().requires_grad_(False), *others), name=f"{head.name}, mapped")


MODULES: dict[str, Callable[[Place, str], nn.Module]] = {
    "Dense": lambda place, inner: read_module(Dense, place, inner),
    "LayerNorm": lambda place, inner: read_module(Norm, place, inner),
    "Normalize": lambda place, inner: Normalize(),
    "Dropout": lambda place, inner: nn.Identity(),
}
