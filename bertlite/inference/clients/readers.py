"""Readers of padding: the parts around an encoder in objects of other libraries, and whether they read padding.

An optimised encoder may leave padding out, and give zeros there, only if nothing around it reads them.  One table has
the parts that are known not to, by exact class.  For any other part padding is computed, as in the original.
"""

import inspect
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from bertlite.inference.checks import kind_of, own_method
from bertlite.inference.clients.holders import DEPTH, LEAVES, lists_of, parts_of
from bertlite.models import heads
from bertlite.models.losses import labels_padding
from bertlite.stack.body import has_hooks

Role = Literal["holds", "each", "pools", "ends"]
# "holds": computes nothing of its own.  "each": computes each position by itself, if its parts do.  "pools": makes one
# result of a text and reads no padding, but an object around it may take the positions from within.  "ends": none may.
BODIES = (
    *("Bert", "Roberta", "XLMRoberta", "Camembert", "Data2VecText", "Ernie", "Electra", "DistilBert", "MPNet"),
    *("DebertaV2", "RobertaPreLayerNorm", "XLMRobertaXL", "MegatronBert"),
    *("ModernBert", "NomicBert", "Gte", "JinaEmbeddingsV3"),
)
HEADS: dict[str, Role] = {  # without those that have padding computed
    name.removeprefix("Bert"): "each" if head.needs_tokens else "pools"
    for name, head in heads.HEADS.items()
    if not head.padding_reader
}
ST = "sentence_transformers"
OTHERS: dict[tuple[str, Role], str] = {  # {(library, role): names of classes}
    ("transformers", "ends"): "TextClassificationPipeline ZeroShotClassificationPipeline TokenClassificationPipeline"
    " FillMaskPipeline",
    (ST, "holds"): "SentenceTransformer SparseEncoder CrossEncoder Router Transformer MLMTransformer",
    # A SparseAutoEncoder reads only the pooled vector.
    (ST, "each"): "Dense Normalize Dropout LayerNorm WeightedLayerPooling WordWeights SparseAutoEncoder",
    (ST, "pools"): "Pooling SpladePooling",
    ("flair", "ends"): "TransformerDocumentEmbeddings TransformerWordEmbeddings",
    ("gliner", "each"): "Transformer",
    ("gliner", "holds"): "Encoder BiEncoder",
    # They take the words and the labels out of the positions.
    ("gliner", "ends"): "UniEncoderSpanModel UniEncoderTokenModel BiEncoderSpanModel BiEncoderTokenModel",
    ("torch", "holds"): "ModuleDict ModuleList Sequential",
    ("builtins", "holds"): "dict list tuple",
}
KNOWN: dict[tuple[str, str], Role] = {
    **{
        (library, family + head): role
        for library in ("transformers", "bertlite")
        for family in BODIES
        for head, role in HEADS.items()
        if (family, head) != ("Electra", "ForMultipleChoice")  # its summary may be a mean of all positions
    },
    **{("bertlite", name): "each" for name, head in heads.HEADS.items() if head.padding_reader},
    **{(library, name): role for (library, role), names in OTHERS.items() for name in names.split()},
}
POINTWISE = (
    *("Linear", "Embedding", "LayerNorm", "Dropout", "Identity", "Sequential", "ModuleList"),
    *("Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "CrossEntropyLoss"),
)
HOMES = ("transformers.", "bertlite.", "sentence_transformers.")


def reader_of(thing: object, body: nn.Module, states: bool = False) -> str | None:
    """Return the class that may read the padding that an encoder computes inside an object; None if none does.

    Args:
        states: all hidden states are requested; heads return them.
    """
    found = list(ways(thing, body))
    return next((reader for way in found if (reader := reader_on(way, states))), None) if found else kind_of(thing)


def warn_of(name: str, reader: str, stacklevel: int) -> None:
    """Warn, at a level above this function's caller, that padding is computed for a reader."""
    warnings.warn(
        f"{name} computes padding, since a {reader} may read it: batches of texts of different lengths take longer. If"
        " it reads none, optimize_for_inference(…, skip_padding=True) leaves padding out",
        RuntimeWarning,
        stacklevel=stacklevel + 2,  # `own_context` is a level too
    )


def ways(thing: Any, body: nn.Module, depth: int = DEPTH, seen: tuple[int, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield each way from an object to an encoder inside it: (the object, …, the encoder)."""
    if thing is body:
        yield (body,)
        return
    if not depth or isinstance(thing, LEAVES) or id(thing) in seen:
        return
    if isinstance(thing, nn.Module):
        parts = [*thing.children(), *(part for _, part in lists_of(thing))]
    else:
        parts, seen = list(parts_of(thing).values()), (*seen, id(thing))
        depth -= not isinstance(thing, list | tuple | dict)
    for part in parts:
        yield from ((thing, *way) for way in ways(part, body, depth, seen))


def reader_on(way: tuple[Any, ...], states: bool) -> str | None:
    """Return the first part on the way outwards from an encoder that is not known."""
    *holders, inner = way
    body, pooled, hidden = {id(part) for part in inner.modules()}, False, False
    for holder in reversed(holders):
        for part in (*parts_after(holder, inner), holder):
            role = role_of(part, body)
            if role == "ends" or (role is None and hidden and not isinstance(part, nn.Module)):
                return None
            if role is None:
                return kind_of(part)
            pooled |= role == "pools" and not states
            hidden |= pooled and library_of(part) == ST  # few call its encoder by itself
        inner = holder
    return None


def parts_after(holder: Any, inner: Any) -> list[Any]:
    """Return the modules that get the output of `inner` before their common holder returns."""
    if not isinstance(holder, nn.Sequential):
        return []
    parts = list(holder)
    return parts[parts.index(inner) + 1 :]


def role_of(part: Any, body: set[int]) -> Role | None:
    """Return the role of a part; None if it is not known, has code of its own, or parts of other classes.

    Args:
        body: the ids of the encoder's modules, which are checked elsewhere.
    """
    role = KNOWN.get((library_of(part), type(part).__qualname__))
    if role is None or not isinstance(part, nn.Module):
        return role
    inside = [each for each in part.modules() if id(each) not in body and each is not part]
    known = role in ("holds", "ends") or all(map(is_pointwise, inside))
    return role if known and not has_hooks(part) and own_method(part) is None else None


def library_of(part: Any) -> str:
    return type(part).__module__.partition(".")[0]


def is_pointwise(part: nn.Module) -> bool:
    """Return whether a part of a head computes each position by itself, or is a class of its library."""
    kind = type(part)
    return kind.__module__.startswith(HOMES) or (
        kind.__module__.startswith("torch.nn.modules.") and kind.__name__ in POINTWISE
    )


def mark_labels(head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Mark the mask of a batch in which labels of padding count: transformers' loss reads padding there."""
    if len(args) <= 2 and kwargs.get("labels") is None:
        return None
    bound = inspect.signature(head.forward).bind_partial(*args, **kwargs)
    given = bound.arguments
    if not labels_padding(given.get("labels"), given.get("attention_mask")):
        return None
    given["attention_mask"] = given["attention_mask"].view_as(given["attention_mask"])  # the caller's stays as it is
    given["attention_mask"].padding_counts = True
    return bound.args, bound.kwargs


def reads_labels(part: nn.Module) -> bool:
    """Return whether a module is a head of transformers whose loss compares each position with a label."""
    kind = type(part)
    return kind.__module__.startswith("transformers.") and KNOWN.get(("transformers", kind.__name__)) == "each"
