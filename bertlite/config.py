"""The config of a BERT: a frozen value with the names of config.json, checked when it is made."""

import copy
import gc
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields
from functools import partial
from operator import index
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NoReturn, get_args, get_origin

import torch
from torch import nn

from bertlite.support.activations import ACTIVATIONS, ONLY_HERE
from bertlite.support.files import read_json_object, to_json, write_text
from bertlite.support.habits import habit_hint


@dataclass(frozen=True)
class Positions:
    """A kind of positions; `bertlite.stack.positions.DISTANCES` has its part in attention."""

    in_embeddings: bool = True  # a vector for each position is added to the embeddings
    in_scores: bool = True  # something for each distance is added to the scores of attention
    rotates: bool = False  # queries and keys are rotated by their positions
    has_windows: bool = False  # some layers attend only to near keys, by the distance in rows
    in_bert: bool = True  # transformers' BERT has it
    zeroes_padding: bool = False  # an encoder's padding is embedded as zeros, and attends to all keys alike


POSITIONS = {  # {position_embedding_type: its facts}
    "absolute": Positions(in_scores=False),
    "relative_key": Positions(in_embeddings=False),
    "relative_key_query": Positions(in_embeddings=False),
    "bucketed": Positions(in_bert=False),
    "disentangled": Positions(in_bert=False, zeroes_padding=True),
    "rotary": Positions(in_embeddings=False, in_scores=False, in_bert=False, rotates=True),
    "rotary_local": Positions(in_embeddings=False, in_scores=False, in_bert=False, rotates=True, has_windows=True),
}
DISENTANGLED = ("c2p", "p2c", "c2p|p2c")
LabelKind = Literal["class", "flags", "number"]
PROBLEMS: dict[str, LabelKind] = {  # {problem_type: kind of a label}
    "regression": "number",
    "single_label_classification": "class",
    "multi_label_classification": "flags",
}
SIZES = (  # a checkpoint must state these, as defaults fit only bert-base
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
LARGEST = {"num_hidden_layers": 2**12, "num_labels": 2**20}  # for things that are made one by one
LARGEST_SIZE = 2**28  # then the number of elements of a matrix does not overflow
IN_WORDS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
IN_WORDS |= {list: "a list", Mapping: "a mapping", NoneType: "null"}
PRUNED = {"pruned_heads", "pruned_neurons"}
RUN_TIME = ("attn_implementation", "extra")  # fields that config.json does not have


def own(default: Any) -> Any:
    """Return a field of a config that only bertlite has."""
    return field(default=default, metadata={"own": True})


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """The sizes and settings of one BERT, by their names in config.json.

    In bertlite.hf transformers' BertConfig stands in its place; `own_field` reads from it the fields that it lacks.

    Args:
        position_embedding_type: "absolute", "relative_key", "relative_key_query", "bucketed", "disentangled" (as in
            DeBERTa-v2), "rotary" or "rotary_local" (with windows, as in ModernBERT).  "bucketed" is absolute with a
            score bias for each head and bucket of distances, as in MPNet.
        pooler_act: activation of the pooler; if it is not "tanh", only bertlite reads the checkpoint.
        pooler_dropout: rate of dropout before the pooler, as in RoBERTa's classifier; only bertlite reads it.
        pooler_norm: the pooler normalises its output, and heads of tokens have the same layer at each token, as in
            ModernBERT.
        pooling: the pooler reads the first token, "cls", or the mean of all tokens, "mean".
        positions_skip_padding: count positions over the tokens that are not `pad_token_id`, as RoBERTa does.
        padding_has_position: padding has a position too, the last row of the table; by default its embedding is zero.
        embedding_size: width of the embeddings, which are then projected to the hidden size, as in ELECTRA small; by
            default the hidden size, without a projection.
        projected_before_norm: project the embeddings without a bias, then normalise them, as in DeBERTa-v2.
        position_biased_input: add positions to the embeddings.
        pos_att_type: the scores that "disentangled" adds: "c2p", between contents of queries and distances to keys,
            "p2c", between contents of keys and distances from queries, or "c2p|p2c".
        share_att_key: project distances with the matrices of tokens, instead of matrices of their own.
        position_buckets: distances above half of it share logarithmic buckets; 0: each has a row of its own.
        max_relative_positions: the largest distance; it is in the last bucket.
        norm_rel_ebd: "layer_norm" to normalise the table of distances, or "none".
        norm_first: normalise before attention and before the feed-forward network, and once after the last layer.
        first_norm: with `norm_first`, layer 0 normalises before attention too; in ModernBERT it does not.
        embeddings_norm: normalise the embeddings.
        gated: multiply the activation of each neuron by a second projection, `intermediate.factor`.
        zeros: patterns, of fnmatch, of the ends of names of parameters that the family lacks: they are zeros that do
            not learn.
        rotary_base: base of the angles by which "rotary" and "rotary_local" rotate queries and keys.
        rotary_divisor: all angles are divided by it, as by NTK scaling.
        local_layers, local_rotary_base, local_attention: the layers of "rotary_local" with a window, the base of their
            angles, and the largest distance of a key in the window.
        pruned_heads: {layer: heads removed}, numbered as in the unpruned model, in transformers 4's format.
        pruned_neurons: {layer: intermediate neurons removed}, likewise; with any, only bertlite reads the checkpoint.
        num_labels: defaults to the length of `id2label`, which defaults to two labels, LABEL_0 and LABEL_1.
        attn_implementation: a name of `bertlite.stack.attention.BACKENDS`, or "auto"; chosen at run time, never saved.
        extra: fields of config.json that BERT does not use; kept, and written back.

    Raises:
        ValueError: a value is impossible; the message names the field, the value and the valid ones.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    position_embedding_type: str = "absolute"
    classifier_dropout: float | None = None
    chunk_size_feed_forward: int = 0
    is_decoder: bool = False
    add_cross_attention: bool = False
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pooler_act: str = own("tanh")
    pooler_dropout: float = own(0.0)
    pooler_norm: bool = own(False)
    pooling: str = own("cls")
    positions_skip_padding: bool = own(False)
    padding_has_position: bool = own(False)
    embedding_size: int | None = own(None)
    projected_before_norm: bool = own(False)
    position_biased_input: bool = own(True)
    pos_att_type: str = own("")
    share_att_key: bool = own(False)
    position_buckets: int = own(0)
    max_relative_positions: int = own(0)
    norm_rel_ebd: str = own("none")
    norm_first: bool = own(False)
    first_norm: bool = own(False)
    embeddings_norm: bool = own(True)
    gated: bool = own(False)
    zeros: list[str] | None = own(None)
    rotary_base: float = own(10000.0)
    rotary_divisor: float = own(1.0)
    local_layers: list[int] | None = own(None)
    local_rotary_base: float = own(10000.0)
    local_attention: int = own(0)
    pruned_heads: Mapping[int, Iterable[int]] = field(default_factory=dict)
    pruned_neurons: Mapping[int, Iterable[int]] = field(default_factory=dict)
    output_attentions: bool = False
    output_hidden_states: bool = False
    return_dict: bool = True
    num_labels: int = None  # type: ignore[assignment]  # an int once made
    id2label: Mapping[int, str] = None  # type: ignore[assignment]  # a dict once made
    label2id: Mapping[str, int] = None  # type: ignore[assignment]  # a dict once made
    problem_type: str | None = None
    attn_implementation: str = "auto"
    extra: Mapping[str, Any] = field(default_factory=dict)

    model_type: ClassVar[str] = "bert"
    read: ClassVar[Callable[..., "BertConfig"]]  # reads a checkpoint's; bertlite.checkpoint.families sets it

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name not in PRUNED:  # `normalise_units` names their form
                check_type(each.name, getattr(self, each.name), each.type, each.default)
        self._set(hidden_act=self.hidden_act.rpartition("bertlite:")[2], extra=dict(self.extra))
        check_values(self)
        layers = self.num_hidden_layers
        self._set(pruned_heads=normalise_heads(self.pruned_heads, layers, self.num_attention_heads))
        self._set(pruned_neurons=normalise_neurons(self.pruned_neurons, layers, self.intermediate_size))
        self._set_labels()

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # only while being made: afterwards the value is frozen

    def _set_labels(self) -> None:
        named, stated, label2id = (getattr(self, name) for name in ("id2label", "num_labels", "label2id"))
        if stated is not None:
            check_range("num_labels", stated, 1, LARGEST["num_labels"])

        if named is None:
            named = default_labels(2 if stated is None else stated)
        try:
            id2label = {parse_index(i): label for i, label in named.items()}  # JSON has no integer keys
            hash(tuple(id2label.values()))
        except (TypeError, ValueError):
            raise ValueError(f"id2label is {named!r}; its keys must be integers, its values names") from None

        if not id2label:
            raise ValueError("id2label is {}; name at least one label, or leave it out")

        # A number of labels may replace default names, which say nothing; given names it would contradict.
        if stated not in (None, len(id2label)):
            if id2label != default_labels(len(id2label)):
                raise ValueError(f"num_labels is {stated} but id2label names {len(id2label)}; leave one of them out")
            id2label, label2id = default_labels(stated), None  # `replace` passes on default names

        if label2id is None:
            label2id = {label: i for i, label in id2label.items()}
        self._set(num_labels=len(id2label), id2label=id2label, label2id=dict(label2id))

    @classmethod
    def from_pretrained(cls, source: str | PathLike[str], **options: Any) -> "BertConfig":
        """Read the config of a checkpoint of BERT or of one of its families, without its weights.

        Args:
            source: a hub id, a folder, or a weights file in a folder with its config.json.
            options: `revision`, `subfolder`, `cache_dir`, `token` and `local_files_only` as for `huggingface_hub`; and
                fields of the config to replace.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: its config.json is not a BERT's.
            TypeError: an option that is not a field.
        """
        return cls.read(source, **options)

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write config.json, atomically, into a folder, which is made if need be."""
        write_text(Path(folder) / "config.json", self.to_json_string())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **overrides: Any) -> "BertConfig":
        """Make a config from the content of a config.json, with fields replaced.

        Raises:
            TypeError: an override that is not a field of BertConfig.
        """
        known = {each.name for each in fields(cls)} - {"extra"}
        unknown = sorted(set(overrides) - known)
        if unknown:
            raise TypeError(f"BertConfig has no field {', '.join(unknown)}{habit_hint(*unknown)}")
        if "num_labels" in overrides and "id2label" not in overrides:  # names for another count do not apply
            if overrides["num_labels"] != len(values.get("id2label") or ()):
                values = {k: v for k, v in values.items() if k not in ("id2label", "label2id")}
        elif "id2label" in overrides:
            values = {k: v for k, v in values.items() if k not in ("num_labels", "label2id")}
        taken = {k: v for k, v in values.items() if k in known and k not in RUN_TIME}
        extra = {k: v for k, v in values.items() if k not in taken and k not in ("model_type", "extra")}
        return cls(**{**taken, "extra": extra, **overrides})

    @classmethod
    def from_json_file(cls, path: str | Path, **overrides: Any) -> "BertConfig":
        """Read the config in one file.

        Raises:
            ValueError: the file is not a JSON object, or not a BERT's, or lacks a size.
        """
        return cls.from_values(path, read_json_object(path), **overrides)

    @classmethod
    def from_values(cls, path: str | Path, values: Mapping[str, Any], **overrides: Any) -> "BertConfig":
        """Make a config from the content of the file at a path, which errors name; see `from_json_file`."""
        check_is_bert(path, values)
        missing = [name for name in SIZES if name not in values and name not in overrides]
        if missing:
            raise ValueError(f"{path} does not state {', '.join(missing)}; a default could fit the wrong model")
        try:
            return cls.from_dict(values, **overrides)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of config.json, unknown fields included; JSON makes strings of integer keys."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in RUN_TIME}
        del values["num_labels"]  # transformers derives it from id2label; 5.x does not accept both
        values["pruned_heads"] = {layer: list(heads) for layer, heads in self.pruned_heads.items()}
        values["pruned_neurons"] = {layer: list(neurons) for layer, neurons in self.pruned_neurons.items()}
        values = {name: value for name, value in values.items() if name not in UNWRITTEN or value != UNWRITTEN[name]}
        if differs_from_bert(self):
            values["hidden_act"] = ONLY_HERE + self.hidden_act
        return {**self.extra, **values, "model_type": self.model_type}

    def to_json_string(self) -> str:
        return to_json(self.to_dict(), indent=2, sort_keys=True) + "\n"


OWN: dict[str, Any] = {each.name: each.default for each in fields(BertConfig) if "own" in each.metadata}
OWN["pruned_neurons"] = {}
UNWRITTEN = {**OWN, "pruned_heads": {}}  # values that are left out of config.json: transformers lacks these fields


def refuse_to_change(config: BertConfig, name: str, *value: Any) -> NoReturn:
    """Raise FrozenInstanceError; it says how to make another config, and a model with it."""
    new = f"{name}={value[0]!r}" if value else f"{name}=…"
    raise FrozenInstanceError(
        f"a BertConfig never changes, so {name} cannot be assigned. dataclasses.replace(config, {new}) makes another"
        f" config, and from_pretrained(…, {new}) a model with it. prune_heads and drop_layers change a model's config"
    )


BertConfig.__setattr__ = BertConfig.__delattr__ = refuse_to_change  # type: ignore[method-assign, assignment]


def check_type(name: str, value: Any, kind: Any, default: Any = ()) -> None:
    """Raise ValueError if the value of a field has the wrong type; None is allowed if it is the default."""
    kinds = [get_origin(each) or each for each in (get_args(kind) if isinstance(kind, UnionType) else [kind])]
    allowed = (*kinds, int) if float in kinds else tuple(kinds)
    fits = isinstance(value, allowed) and (bool in kinds or not isinstance(value, bool))
    if not fits and not (value is None and default is None):
        wanted = " or ".join(IN_WORDS[each] for each in kinds)
        raise ValueError(f"{name} is {value!r}, a {type(value).__name__}; it must be {wanted}")


def check_known(name: str, value: Any, known: Collection[Any]) -> None:
    """Raise ValueError if a value is none of the known ones; the message lists these."""
    if value not in known:
        raise ValueError(f"{name} {value!r} is unknown; have: {', '.join(map(str, known))}")


def check_range(name: str, value: int, low: int, high: float, allowed: str | None = None) -> None:
    """Raise ValueError for a number outside a range; the message states the range, or the words given for it."""
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be {allowed or f'{low} to {high}'}")


def check_values(config: BertConfig) -> None:
    """Check the values of a config, ours or of transformers.

    Raises:
        ValueError: a value is impossible; the message names the field, the value and the valid ones.
    """
    for name in (*SIZES, "type_vocab_size"):
        low = 0 if name == "num_hidden_layers" else 1
        check_range(name, getattr(config, name), low, LARGEST.get(name, LARGEST_SIZE))
    check_range("embedding_size", embeds_size(config), 1, LARGEST_SIZE)

    # Sizes must fit together.
    size, heads = config.hidden_size, config.num_attention_heads
    if size % heads:
        raise ValueError(f"hidden_size {size} is not a multiple of num_attention_heads {heads}")
    if config.pad_token_id is not None and not 0 <= config.pad_token_id < config.vocab_size:
        raise ValueError(f"pad_token_id {config.pad_token_id} is outside the vocabulary, 0 to {config.vocab_size - 1}")
    check_numbers(config)

    # Names must be known, whatever a table looks up by them.
    for name, value, allowed in (
        ("hidden_act", config.hidden_act.rpartition("bertlite:")[2], tuple(ACTIVATIONS)),
        ("pooler_act", own_field(config, "pooler_act"), tuple(ACTIVATIONS)),
        ("position_embedding_type", config.position_embedding_type, POSITIONS),
        ("problem_type", config.problem_type, (None, *PROBLEMS)),
        ("norm_rel_ebd", own_field(config, "norm_rel_ebd"), ("none", "layer_norm")),
        ("pooling", own_field(config, "pooling"), ("cls", "mean")),
    ):
        check_known(name, value, allowed)

    # Some kinds of positions have fields of their own, and not every kind is for decoders.
    if config.position_embedding_type == "disentangled":
        check_distances(config)
    if POSITIONS[config.position_embedding_type].rotates:
        check_rotary(config)
    if config.is_decoder and (POSITIONS[config.position_embedding_type].rotates or own_field(config, "norm_first")):
        raise ValueError("is_decoder is true; only encoders have rotary positions or normalise first")
    if config.add_cross_attention and not config.is_decoder:
        raise ValueError("add_cross_attention is true but is_decoder is false; only a decoder has cross-attention")


def check_distances(config: BertConfig) -> None:
    """Raise ValueError for values from which disentangled scores cannot be computed."""
    check_known("pos_att_type", own_field(config, "pos_att_type"), DISENTANGLED)
    buckets, farthest = (own_field(config, name) for name in ("position_buckets", "max_relative_positions"))
    check_range("position_buckets", buckets, 0, LARGEST_SIZE, f"0 (none) to {LARGEST_SIZE}")
    least = buckets // 2 + 2 if buckets else 1
    if not least <= farthest <= LARGEST_SIZE:
        allowed = f"with position_buckets {buckets} it must be {least} to {LARGEST_SIZE}"
        raise ValueError(f"max_relative_positions is {farthest}; {allowed}")


def check_rotary(config: BertConfig) -> None:
    """Raise ValueError for values from which rotary positions and windows cannot be computed."""
    for name, limit in (("rotary_base", 1), ("local_rotary_base", 1), ("rotary_divisor", 0)):
        if not limit < own_field(config, name) < math.inf:
            raise ValueError(f"{name} is {own_field(config, name)}; it must be above {limit}, and finite")
    if (size := config.hidden_size // config.num_attention_heads) % 2:
        raise ValueError(f"heads have {size} numbers, which rotary positions rotate in pairs; the size must be even")

    layers = own_field(config, "local_layers") or []
    if not all(type(layer) is int and 0 <= layer < config.num_hidden_layers for layer in layers):
        raise ValueError(f"local_layers is {layers}; it names layers, 0 to {config.num_hidden_layers - 1}")
    check_range("local_attention", own_field(config, "local_attention"), 0, LARGEST_SIZE)


def own_field(config: BertConfig, name: str) -> Any:
    """Return a field that only bertlite has; configs of transformers may lack it."""
    return getattr(config, name, OWN[name])


def embeds_size(config: BertConfig) -> int:
    """Return the width of embeddings."""
    return own_field(config, "embedding_size") or config.hidden_size


def check_is_bert(path: str | Path, values: Mapping[str, Any]) -> None:
    """Raise ValueError if the content of a config.json is another model's."""
    if (kind := values.get("model_type", "bert")) != "bert":
        raise ValueError(
            f"{path} describes a {kind!r} model, not a 'bert': load it with bertlite.BertModel, which takes other"
            " families too, or write it as one with `bertlite convert`"
        )


def embeds_as_bert(config: BertConfig) -> bool:
    """Return whether embeddings are BERT's: of the hidden size, with a position for each token of a row."""
    positions = ("positions_skip_padding", "padding_has_position", "position_biased_input")
    return all(own_field(config, name) == OWN[name] for name in ("embedding_size", "embeddings_norm", *positions))


def differs_from_bert(config: BertConfig) -> bool:
    """Return whether other libraries' BERT, with the same tensors, would compute something else or fail late."""
    projected = embeds_size(config) != config.hidden_size
    layers = ("norm_first", "embeddings_norm", "gated", "pooler_act", "pooler_norm", "pooling")
    names = (*layers, "padding_has_position", "position_biased_input")
    changed = any(own_field(config, name) != OWN[name] for name in names)
    return projected or changed or not POSITIONS[config.position_embedding_type].in_bert


def check_numbers(config: BertConfig) -> None:
    """Raise ValueError for impossible rates, ranges and counts."""
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "pooler_dropout"):
        rate = getattr(config, name, None)
        if rate is not None and not 0 <= rate <= 1:
            raise ValueError(f"{name} is {rate}; a probability lies between 0 and 1")
    if not 0 <= config.initializer_range < math.inf:
        raise ValueError(f"initializer_range is {config.initializer_range}; it must be 0 or more, and finite")
    if not 0 < config.layer_norm_eps < math.inf:
        raise ValueError(f"layer_norm_eps is {config.layer_norm_eps}; it must be above 0, and finite")
    check_range("chunk_size_feed_forward", config.chunk_size_feed_forward, 0, math.inf, "0 (off) or more")


def default_labels(count: int) -> dict[int, str]:
    return {i: f"LABEL_{i}" for i in range(count)}


def parse_index(value: Any) -> int:
    """Read an index from JSON or a user: "3" or 3, but neither 3.5 nor True, which a mask holds."""
    if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
        raise TypeError(value)
    return int(value) if isinstance(value, str) else index(value)


def parse_indices(named: Any) -> set[int]:
    """Read a list of indices; raise TypeError or ValueError for anything else, such as a mask."""
    if isinstance(named, str):  # "13" is not heads 1 and 3
        raise TypeError(named)
    return {parse_index(each) for each in named}


def normalise_units(
    units: Mapping[Any, Iterable[Any]], layers: int, built_with: int, unit: str
) -> dict[int, tuple[int, ...]]:
    """Return {layer: units} with integer keys (JSON has none), each layer's units sorted and unique.

    Args:
        unit: "head" or "neuron", as errors name it.

    Raises:
        ValueError: a layer or unit that a model of `layers` x `built_with` units does not have.
    """
    known = f"it was built with {built_with} {unit}s, 0 to {built_with - 1}"
    wanted = f"{unit}s are given as {{layer: [{unit}s]}}, all integers (of a mask, mask[layer].nonzero().flatten())"
    if not isinstance(units, Mapping):
        raise ValueError(f"{wanted}; not as {units!r:.80}")

    merged: dict[int, set[int]] = {}
    for key, named in units.items():
        try:
            layer, chosen = parse_index(key), parse_indices(named)
        except (TypeError, ValueError):
            raise ValueError(f"{wanted}; not as {{{key!r}: {named!r:.80}}}") from None
        if not -layers <= layer < layers:
            raise ValueError(f"there is no layer {layer}: the model has {layers} layers, 0 to {layers - 1}")

        # Units are numbered as the model was built, so that pruning twice is pruning the union.
        layer %= layers  # -1 is the last, as in transformers 4
        for each in sorted(chosen):
            if not 0 <= each < built_with:
                raise ValueError(f"layer {layer} has no {unit} {each}: {known}")

        merged.setdefault(layer, set()).update(chosen)
    return {layer: tuple(sorted(merged[layer])) for layer in sorted(merged) if merged[layer]}


normalise_heads, normalise_neurons = partial(normalise_units, unit="head"), partial(normalise_units, unit="neuron")


def kept_heads(config: BertConfig, layer: int) -> tuple[int, ...]:
    """Return the heads that one layer still has, in the numbering of the unpruned model."""
    gone = set(pruned_heads(config).get(layer, ()))
    return tuple(head for head in range(config.num_attention_heads) if head not in gone)


def kept_neurons(config: BertConfig, layer: int) -> tuple[int, ...]:
    """Return the intermediate neurons that one layer still has, in the numbering of the unpruned model."""
    gone = set(pruned_neurons(config).get(layer, ()))
    return tuple(neuron for neuron in range(config.intermediate_size) if neuron not in gone)


def pruned_heads(config: BertConfig) -> Mapping[int, Iterable[int]]:
    """Return the removed heads of a config, by layer.

    Some configs of transformers lack the field, and those read from a file have strings for layers.
    """
    return by_layer(getattr(config, "pruned_heads", None))


def pruned_neurons(config: BertConfig) -> Mapping[int, Iterable[int]]:
    """Return the removed intermediate neurons, by layer; transformers' own configs have no such field."""
    return by_layer(own_field(config, "pruned_neurons"))


def by_layer(units: Mapping[Any, Iterable[int]] | None) -> dict[int, Iterable[int]]:
    return {int(layer): gone for layer, gone in (units or {}).items()}


def set_config(model: Any, config: BertConfig) -> None:
    """Replace the config of a model, of its BertModel, of its parts and of the modules that hold it.

    In bertlite.hf such a module has the config as an attribute, as in transformers, or in a config of several.  Heads
    that share a BertModel may each have a config: the other ones and the BertModel's get the changes.
    """
    before, base, parts = model.config, model.base_model, list(model.modules())
    new = {id(before): config}

    # In bertlite.hf a model may be held by others, such as a SentenceTransformer; only the collector knows them.
    if vars(model).get("config") is before:
        for holder in gc.get_objects():
            if issubclass(type(holder), nn.Module) and any(part is base for part in holder.modules()):
                parts += [holder, getattr(holder, "config", None)]

    # Another head on the same BertModel keeps its own config, apart from what has changed here.
    changes = {name: value for name, value in vars(config).items() if vars(before).get(name) != value}
    for part in parts:
        own = getattr(part, "__dict__", {}).get("config")
        if getattr(part, "base_model", None) is base and own is not None and id(own) not in new:
            new[id(own)] = copy.copy(own)
            vars(new[id(own)]).update(changes)

    for part in parts:
        fields = getattr(part, "__dict__", {})
        for name in [name for name, value in fields.items() if id(value) in new]:
            setattr(part, name, new[id(fields[name])])
