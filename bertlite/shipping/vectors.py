"""A vector for each text, made from an encoder's states as in sentence-transformers, and the similarity of two.

Letters:  B texts · S positions · D hidden
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertlite.checkpoint.files import WEIGHT_FILES, Place
from bertlite.checkpoint.reading import read_weights
from bertlite.inference.clients.pooling import VECTOR, pool_states
from bertlite.opened.checkpoint import ACTIVATIONS, Checkpoint
from bertlite.runtime.pooling import POOLINGS
from bertlite.runtime.processing import Processing
from bertlite.tokenizer import BertTokenizer
from bertlite.tokenizer.sentences import POOLING, SENTENCE_CONFIG, is_encoder, last_name

ENCODER = "SentenceTransformer"  # the type of models that make vectors
LIBRARY = "sentence_transformers."  # its modules are in it; modules of other libraries may have the same names
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
        processing: its pooling, the size to which vectors are truncated, and their similarity, in float64.
        skip: the number of tokens at the beginning that are not pooled, such as a prompt's.
        modules: applied in turn to the pooled vectors.
        name: for records.
    """

    processing: Processing = field(default_factory=Processing)
    skip: int = 0
    modules: tuple[nn.Module, ...] = ()
    name: str = "mean"

    def __repr__(self) -> str:
        """Return all but the modules: unfinished work is found again by it, so that it must not change."""
        start = f"pooling={self.processing.modes!r}, skip={self.skip}, modules=(), size={self.size}"
        return f"VectorHead({start}, similarity={self.processing.similarity!r}, name={self.name!r})"

    @property
    def size(self) -> int | None:
        """The number of numbers to keep of a vector; None keeps all."""
        return next((step["size"] for step in self.processing.after), None)

    def __call__(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return a vector for each text, float32 or float64: (B, S, D) states, (B, S) mask -> (B, D')."""
        x = pool_states(states, mask, self.processing.modes, self.skip)
        for module in self.modules:
            x = module.to(x.device, x.dtype)(x)
        return x[:, : self.size]

    def compare(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the similarity of vectors, (B, D') and (B, D') -> (B,)."""
        return SIMILARITIES[self.processing.similarity](one.double(), other.double())


MEAN = VectorHead()


# Reading -------------------------------------------------------------------------------------------------------------


def read_head(checkpoint: Checkpoint) -> VectorHead:
    """Read how a checkpoint makes vectors: by the mean of its states, unless sentence-transformers' files say more.

    Raises:
        ValueError: it makes a vector for each token, as ColBERT does, or has a module or an entry that is not
            supported here.
    """
    place, about = checkpoint.place, checkpoint.processing
    kinds = [(module["type"], str(PurePosixPath(module["path"]))) for module in checkpoint.modules]

    # A token's vectors are no text's.
    if not about.modes or "HF_ColBERT" in (place.values("config.json").get("architectures") or []):
        raise ValueError(f"{checkpoint} makes no vector of a whole text, since it has no Pooling (is it a ColBERT?)")
    if not kinds:
        return MEAN

    # The encoder comes first, then its Pooling, then modules that change pooled vectors.
    names = [last_name(kind) for kind, _ in kinds]
    at = names.index(POOLING)
    known = [is_encoder(names[0]), *[False] * (at - 1), True, *(name in MODULES for name in names[at + 1 :])]
    others = [
        kind + " before its Pooling" * (0 < i < at)
        for i, ((kind, _), each) in enumerate(zip(kinds, known, strict=False))
        if not (each and kind.startswith(LIBRARY))
    ]
    if others:
        what = f"vectors are made by an encoder, its Pooling, then {', '.join(sorted(MODULES))}"
        raise ValueError(f"{checkpoint} has {' and '.join(others)}; {what}")

    # Modules, poolings and entries must be known here.
    modules = tuple(read_module(last_name(kind), place, inner) for kind, inner in kinds[at + 1 :])
    if unknown := {*about.modes} - {*POOLINGS}:
        raise ValueError(f"{checkpoint} pools by {', '.join(sorted(unknown))}; known are {', '.join(POOLINGS)}")

    if (kind := place.values(SENTENCE_CONFIG).get("model_type", ENCODER)) != ENCODER:
        raise ValueError(f"{checkpoint} is a {kind} of modules, {', '.join(names)}; its vectors are no {ENCODER}'s")
    size = VectorHead(about).size
    if size is not None and not (isinstance(size, int) and size > 0):
        raise ValueError(f"{checkpoint}: truncate_dim is {size!r} in {SENTENCE_CONFIG}; it must be 1 or more")
    if about.similarity not in SIMILARITIES:
        raise ValueError(f"{checkpoint} compares by {about.similarity!r}; known are {', '.join(SIMILARITIES)}")
    skip = 0 if about.include_prompt or not about.prompt() else prompt_length(checkpoint.tokenizer)
    name = ", ".join(["+".join(about.modes), *(name for name in names[at + 1 :] if name != "Normalize")])
    return VectorHead(about, skip, modules, name)


def prompt_length(tokenizer: BertTokenizer) -> int:
    """Return the number of tokens of the default prompt before a text, special ones before it included."""
    [ids] = tokenizer.encode_texts([""], tokenizer.sentences.max_length)["input_ids"]
    return len(ids) - (not {*ids[-1:]}.isdisjoint(tokenizer.all_special_ids))


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


def make_norm(values: Mapping[str, Any]) -> nn.Module:
    """Return a LayerNorm under the name that the library has for it."""
    return nn.Sequential(OrderedDict(norm=nn.LayerNorm(values["dimension"])))


class Normalize(nn.Module):
    """Length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


def read_module(kind: str, place: Place, inner: str) -> nn.Module:
    """Read a module of sentence-transformers with its weights; one that leaves vectors as they are is an Identity.

    Raises:
        ValueError: it has no weights, or weights of another shape; or it makes vectors of other features.
    """
    config = place.get(f"{inner}/config.json")
    values = place.values(f"{inner}/config.json")
    takes = values.get("module_input_name") or VECTOR
    if (values.get("module_output_name") or takes) != VECTOR:
        return nn.Identity()  # a later module that made vectors of its output would be refused
    if takes != VECTOR:
        raise ValueError(f"{config}: this {kind} makes {VECTOR} of {takes}; here modules make it of itself")

    if (make := MODULES[kind]) in (Normalize, nn.Identity):
        return make()
    weights = next(filter(None, (place.get(f"{inner}/{name}") for name in WEIGHT_FILES)), None)
    if config is None or weights is None:
        raise ValueError(f"{inner}, a module of sentence-transformers, lacks its config.json or its weights")
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


MODULES: dict[str, Any] = {"Dense": Dense, "Dropout": nn.Identity, "LayerNorm": make_norm, "Normalize": Normalize}
