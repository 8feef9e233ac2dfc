"""The contents of a packed folder: the fields of its two descriptions, and the tensors that must then be there.

A new field is a new row of a table below.  A new weight of a layer is a new row of `Shape.pieces`.
"""

from collections.abc import Collection, Iterator
from typing import Any

from .fields import COUNT, FLAG, NAME, POSITIVE, SIZE, TEXT, Maybe, choice, every, must_be, one_of, or_null, whole
from .pooling import POOLINGS, SCORE_ACTIVATIONS, SIMILARITIES
from .shapes import BLOCKS, FLOATS, SHAPE
from .structs import ACTIVATIONS, NUMBERS

FORMATS = (5, 6, 7, 8, 9, 10, 11)  # the formats that can be read: 5 has no checksum and describes no arithmetic
# Formats from which 8-bit integers are words, of rotated rows, in mixes, and of scaled rows; and from which norms may
# come first, neurons be gated, and positions rotary.
ROUNDS_WORDS, ROTATES, MIXES, SCALES, GATES = 7, 8, 9, 10, 11
WORDS, ROW_SCALES = "word_embeddings.weight", "word_embeddings.scales"  # ends of names; scales of 8-bit integers
LAYERS = "layers"  # the tensor with the weights of all layers, which comes first
CLASSES = ("BertModel", "BertForSequenceClassification", "BertForTokenClassification")  # that run without torch
CALLS = {  # {kind of folder: its calls}
    "encoder": ("encode", "similarity"),
    "cross-encoder": ("predict", "rank"),
    "classifier": ("predict",),
    "tagger": ("tag",),
}
KINDS = dict(zip(CALLS, (CLASSES[0], CLASSES[1], CLASSES[1], CLASSES[2]), strict=True))  # {kind: class of the model}
WAY_OUT = "optimise the model again and save it"
STORED = {"float32": "F32", "bfloat16": "BF16", "int8": "F32"}  # {numbers of the layers: dtype of other tensors}
Tensors = dict[str, tuple[str, tuple[int, ...]]]  # {name: (dtype, shape)}


# Fields of the description in the file of packed weights

EMBEDDINGS = {
    "epsilon": POSITIVE,
    "absolute": FLAG,
    "positions": SIZE,
    "padding_has_position": FLAG,
    "skips_padding": FLAG,
    "padding": or_null(COUNT),
    "norm": one_of(None, "before", "after"),
}
CONFIG = {
    "vocab_size": SIZE,
    "type_vocab_size": SIZE,
    "embedding_size": Maybe(or_null(SIZE)),
    "position_biased_input": Maybe(FLAG),
    "embeddings_norm": Maybe(FLAG),
    "pooler_norm": Maybe(FLAG),
    "pooling": Maybe(one_of("cls", "mean")),
    "pooler_act": Maybe(TEXT),
    "id2label": Maybe(or_null({})),
}
DESCRIPTION = {
    "numbers": one_of(*NUMBERS),
    "blocks": one_of(*map(list, BLOCKS)),
    "reproducible": Maybe(FLAG),
    "skip_padding": Maybe(or_null(FLAG)),
    "options": {},
    "config": CONFIG,
    "shape": SHAPE,
    "embeddings": EMBEDDINGS,
    "pooler": Maybe(one_of(*ACTIVATIONS)),
}


def description_faults(_: str, about: dict[str, Any]) -> Iterator[str]:
    """Yield the faults of a description whose fields obey their own rules."""
    shape, embeddings = about["shape"], about["embeddings"]
    if shape["numbers"] != about["numbers"]:
        yield "shape.numbers is not numbers"
    if embeddings["positions"] != shape["max_positions"]:
        yield "embeddings.positions is not shape.max_positions"
    if (embeddings["padding"] or 0) >= word_count(about):
        yield "embeddings.padding is beyond the words"

    # The description says which parts there are.
    if (embeddings["norm"] is None) != (width_of(about) == shape["hidden_size"]):
        yield "embeddings.norm does not fit config.embedding_size"
    if embeddings["absolute"] and not adds_positions(about):
        yield "embeddings.absolute needs config.position_biased_input"
    if about["class"] == CLASSES[1] and "pooler" not in about:
        yield "pooler is missing, on which the class is built"


# For a reader that has only the description, and not the modules of its class.
RUNTIME = [{"class": one_of(*CLASSES), **DESCRIPTION}, description_faults]


def add_later_fields_(about: dict[str, Any]) -> None:
    """Add to a description the fields that its format lacks, with which its layers compute as then."""
    shape = about.get("shape")
    if isinstance(shape, dict) and about["format"] < SCALES:
        shape["scaled"] = False
    if isinstance(shape, dict) and about["format"] < GATES:
        shape |= {"norms_first": False, "first_norm": False, "gated": False, "rotary_divisor": 1.0}
        for layer in shape["layers"] if isinstance(shape.get("layers"), list) else ():
            if isinstance(layer, dict):
                layer |= {"rotary_base": None, "window": None}

    # The oldest of these formats have no mixes, and 8-bit integers of rows that may not be rotated.
    if about["format"] < MIXES:
        if isinstance(shape, dict):
            shape |= {"rotated": about["format"] >= ROTATES, "kept": [], "floats": FLOATS[0]}
        if isinstance(about.get("blocks"), list):
            about["blocks"] = [*about["blocks"][:2], *about["blocks"][:1]]


def word_count(about: dict[str, Any]) -> int:
    return int(about["config"]["vocab_size"])


def width_of(about: dict[str, Any]) -> int:
    """Return the width of the tables of embeddings."""
    return int(about["config"].get("embedding_size") or about["shape"]["hidden_size"])


def adds_positions(about: dict[str, Any]) -> bool:
    """Return whether there is a table of positions, though positions may only be in the scores."""
    return bool(about["config"].get("position_biased_input", True))


def has_transform(about: dict[str, Any]) -> bool:
    """Return whether a head has one more layer at each token, before its last one, as ModernBERT's."""
    return about["class"] == CLASSES[2] and bool(about["config"].get("pooler_norm"))


def pooler_act(about: dict[str, Any]) -> str:
    """Return the activation of the pooler, or of the layer that a head has at each token."""
    return str(about["config"].get("pooler_act", "tanh"))


def part_for_torch(about: dict[str, Any]) -> str | None:
    """Return the part of a model that only the library with torch computes, in words; None if there is none."""
    if about["embeddings"]["norm"] == "after":
        return "embeddings that are projected before they are normalised"
    if ("pooler" in about or has_transform(about)) and (act := pooler_act(about)) not in ACTIVATIONS:
        return f"a head with the activation {act!r:.60}"
    return None


# Tensors


def expected_tensors(about: dict[str, Any]) -> Tensors:
    """Return the tensors outside the layers, of a description that obeys RUNTIME and has no `part_for_torch`."""
    config, embeddings, width = about["config"], about["embeddings"], width_of(about)
    hidden: int = about["shape"]["hidden_size"]
    sizes: dict[str, tuple[int, ...]] = {
        f"embeddings.{WORDS}": (word_count(about), width),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], width),
    }
    if config.get("embeddings_norm", True):
        sizes |= {"embeddings.LayerNorm.weight": (width,), "embeddings.LayerNorm.bias": (width,)}

    # The description says which of the other parts of the embeddings there are.
    if adds_positions(about):
        rows = embeddings["positions"] + embeddings["padding_has_position"]
        sizes["embeddings.position_embeddings.weight"] = rows, width
    if embeddings["norm"]:
        sizes |= {"embeddings.projection.weight": (hidden, width), "embeddings.projection.bias": (hidden,)}

    # A model with a head keeps the encoder under a prefix; only the head itself stands outside it.
    layer: dict[str, tuple[int, ...]] = {"dense.weight": (hidden, hidden), "dense.bias": (hidden,)}
    if config.get("pooler_norm"):
        layer |= {"LayerNorm.weight": (hidden,), "LayerNorm.bias": (hidden,)}
    if "pooler" in about:
        sizes |= {f"pooler.{name}": size for name, size in layer.items()}
    if about["class"] != CLASSES[0]:
        labels = len(config.get("id2label") or ())
        sizes = {f"bert.{name}": size for name, size in sizes.items()}
        sizes |= {f"head.{name}": size for name, size in layer.items() if has_transform(about)}
        sizes |= {"classifier.weight": (labels, hidden), "classifier.bias": (labels,)}
    return {name: (STORED[about["numbers"]], size) for name, size in sizes.items()}


def with_rounded_words(tensors: Tensors, about: dict[str, Any], there: Collection[str]) -> Tensors:
    """Return tensors with words of 8-bit integers and their scales, if the file has scales.

    An int8 file lacks them if its words are other floats, as before format 7.
    """
    rounded = about["format"] >= ROUNDS_WORDS and about.get("numbers") == "int8"  # steps after pooling have none
    for name, (_, size) in [*tensors.items()]:
        scales = name.replace(WORDS, ROW_SCALES)
        if rounded and name.endswith(WORDS) and scales in there:
            tensors = {**tensors, name: ("I8", size), scales: ("F32", size[:1])}
    return tensors


# Rules for runtime.json

ABOUT_FORMAT = 1  # the version of its format
STEPS = {
    "normalize": {},
    "truncate": {"size": SIZE},
    "dense": {"name": TEXT, "activation": one_of(*ACTIVATIONS), "outputs": Maybe(SIZE), "bias": Maybe(FLAG)},
}
POOLING = {"modes": [must_be("one pooling or more", bool), every(one_of(*POOLINGS))], "include_prompt": FLAG}
VECTORS = {
    "pooling": POOLING,
    "after": Maybe(every(choice("type", STEPS))),
    "similarity": Maybe(one_of(*SIMILARITIES)),
}
SCORES = {"labels": every(NAME), "activation": one_of(*SCORE_ACTIVATIONS)}
TAGS = {"unknown": Maybe(or_null(TEXT)), "labels": every(TEXT), "activation": Maybe(one_of(*SCORE_ACTIVATIONS))}
ENTRIES: dict[str, dict[str, Any]] = dict(zip(CALLS, (VECTORS, SCORES, SCORES, TAGS), strict=True))  # {kind: entries}
TEXTS: list[Any] = [
    {
        "max_length": SIZE,
        "lower_case": Maybe(FLAG),
        "segments": Maybe(FLAG),
        "truncation_side": Maybe(one_of("right", "left")),
        "prompts": every(TEXT, named=True),
        "default_prompt": Maybe(or_null(TEXT)),
    },
    whole("texts.default_prompt is none of texts.prompts", lambda x: x.get("default_prompt") in (None, *x["prompts"])),
]
ROUNDING = {"rounding": Maybe(or_null(TEXT))}  # how weights were rounded to 8 bits, in words
RULES = [
    {"format": one_of(ABOUT_FORMAT)},
    choice("kind", ENTRIES),
    {"texts": TEXTS},
    {"made": Maybe({"checkpoint": TEXT, "bertlite": TEXT, "kept": every(or_null(NAME), named=True), **ROUNDING})},
]
