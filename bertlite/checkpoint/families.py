"""Other names of BERT: the config fields, names of tensors and slices by which a checkpoint of a family is a BERT.

The arithmetic of a family is read from transformers 5.23.0, models/FAMILY/modeling_FAMILY.py; 4.57.6 has the same.
Remaining differences from BERT are fields of `BertConfig`: `positions_skip_padding`, `position_embedding_type`,
`pooler_act`, `embedding_size`, and the fields of disentangled positions.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertlite.checkpoint.files import CONFIG_FILES, Source, first_existing
from bertlite.checkpoint.names import WRAPPER_PREFIXES, optional_part
from bertlite.config import LARGEST, SIZES, BertConfig, check_type
from bertlite.support.kinds import checked

State = dict[str, Tensor]
Values = dict[str, Any]  # the content of a config.json
CLASSIFIER = "BertForSequenceClassification"
CHOICE = "BertForMultipleChoice"
GELU = ("gelu", "gelu_python")


@dataclass(frozen=True)
class Family:
    """A kind of checkpoint that is a BERT under other names.

    Args:
        prefix: the first part of the tensors' names in its base model.
        becomes: the changes, except names, that make it a BERT.
        fields: {its field of config.json: BERT's}.
        aliases: {another name of a field, as its publishers have it: BERT's}; of both names BERT's counts, as in
            transformers, which changes that one alone.
        defaults: defaults of its fields that differ from BERT's.
        fixed: fields of the BERT that are the same for the whole family.
        translate: returns the fields of the BERT that follow from several fields of config.json.
        renames: (pattern of a part of its tensors' names, part of BERT's); the first that fits a name is replaced.
        adapt: changes renamed tensors in place, given the config.json and the prefix of names in the base model.
        pooler: its base model has a pooler.
        pooler_act: activation between the two layers of its classifiers, or the field that names it.
        rates: {class of BERT: the field with the rate of dropout before its last layer}.
        lm_acts: values of hidden_act with which its language model head is BERT's; None: any.
        needs: {field: the only supported value}.
        head_at: the names of the layers that all of its heads have before their last one, with `pooler_act`.
        since: the first major version of transformers with its classes; None: only code of its checkpoints has them.
    """

    prefix: str
    becomes: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    translate: Callable[[Values], Values] = lambda values: {}
    renames: Sequence[tuple[str, str]] = ()
    adapt: Callable[[State, Values, str], None] = lambda state, values, base: None
    pooler: bool = True
    pooler_act: str = "tanh"
    rates: Mapping[str, str] = field(default_factory=dict)
    lm_acts: Sequence[str] | None = None
    needs: Mapping[str, Any] = field(default_factory=dict)
    head_at: str | None = None
    since: int | None = 4


POSITIONS, SEGMENTS = "embeddings.position_embeddings.weight", "token_type_embeddings.weight"


def cut_positions_(state: State, values: Values, base: str) -> None:
    """Drop the rows of positions before the first token's; move padding's row, unless it is zero, to the end."""
    name, pad = f"{base}{POSITIONS}", values["pad_token_id"]
    if name in state:
        rows = state[name]
        state[name] = torch.cat([rows[pad + 1 :], rows[pad, None]]) if has_nonzero(rows, pad) else rows[pad + 1 :]


def has_nonzero(table: Tensor, row: int) -> bool:
    """Return whether a table has a row and the row is not zero."""
    return table.dim() == 2 and len(table) > row and bool(table[row].any())


def add_first_task_(state: State, values: Values, base: str) -> None:
    """Add the embedding of the first task, which every token has by default, to each segment's embedding."""
    if values.get("use_task_id"):
        name = f"{base}embeddings.task_type_embeddings.weight"
        if name not in state:
            raise ValueError(f"{name.removeprefix(base)} is missing, and the config has use_task_id")
        tasks, segments = state.pop(name), name.replace("task", "token")
        state[segments] = state[segments] + tasks[0]


def spread_buckets_(state: State, values: Values, base: str) -> None:
    """Give every layer its own copy of the bias by distance, which all layers of MPNet share."""
    cut_positions_(state, values, base)
    name = f"{base}encoder.relative_attention_bias.weight"
    if name not in state:
        raise ValueError(f"{name.removeprefix(base)} is missing")
    table = state.pop(name)
    for layer in range(values["num_hidden_layers"]):
        state[f"{base}encoder.layer.{layer}.attention.self.distance_embedding.weight"] = table.clone()


def disentangled_kinds(values: Values) -> list[str]:
    """Return the parts of scores that a config.json of DeBERTa adds to the contents' part, sorted."""
    named = values.get("pos_att_type") or ()
    return sorted({str(each).strip().lower() for each in (named.split("|") if isinstance(named, str) else named)})


def query_scale(values: Values) -> float:
    """Return the root of the number of parts of a score, such as sqrt(3), with the rounding of transformers.

    transformers computes the root of that number times the size of a head, in float32.
    """
    size = values["hidden_size"] // values["num_attention_heads"]
    root = torch.tensor(size * (1 + len(disentangled_kinds(values))), dtype=torch.float32, device="cpu").sqrt()
    return root.item() / math.sqrt(size)


def disentangled_fields(values: Values) -> Values:
    """Return the fields of the BERT that a DeBERTa becomes; without relative attention its positions are absolute."""
    kinds, farthest = disentangled_kinds(values), values.get("max_relative_positions", -1)
    relative = bool(values.get("relative_attention") and kinds)
    norms = [each.strip() for each in str(values.get("norm_rel_ebd", "none")).lower().split("|")]
    width = values.get("embedding_size", values.get("hidden_size"))
    return {
        "projected_before_norm": width != values.get("hidden_size"),
        "tie_word_embeddings": values.get("tie_word_embeddings", True) or not values.get("legacy", True),
        # Without relative attention the fields of distances have their defaults.
        "position_embedding_type": "disentangled" if relative else "absolute",
        "pos_att_type": "|".join(kinds) if relative else "",
        "share_att_key": relative and values.get("share_att_key", False),
        "position_buckets": max(values.get("position_buckets", -1), 0) if relative else 0,
        "max_relative_positions": (farthest if farthest > 0 else values.get("max_position_embeddings", 0)) * relative,
        "norm_rel_ebd": "layer_norm" if relative and "layer_norm" in norms else "none",
    }


def scale_queries_(state: State, values: Values, base: str) -> None:
    """Divide the weights of queries by `query_scale`, by which DeBERTa divides scores.

    Drop positions and segments that the model does not add, and the table of distances if it has no relative
    attention.
    """
    if not values["type_vocab_size"]:
        state.pop(f"{base}embeddings.{SEGMENTS}", None)
    if not values["position_biased_input"]:
        state.pop(f"{base}{POSITIONS}", None)
    relative = values["relative_attention"] and disentangled_kinds(values)
    of_distances = r"encoder\.(rel_embeddings|LayerNorm)\.|pos_(key|query)_proj\."

    for name in [*state]:
        if re.search(r"encoder\.layer\.\d+\.attention\.self\.(query|pos_query_proj)\.", name):
            state[name] = state[name] / query_scale(values)
        if not relative and re.search(of_distances, name):
            del state[name]


BIASES = {  # {field of config.json: the biases that there are if it is true, as patterns of fnmatch}
    "attention_bias": ("query.bias", "key.bias", "value.bias", "attention.output.dense.bias"),
    "mlp_bias": ("intermediate.dense.bias", "factor.bias", "[0-9].output.dense.bias"),
    "norm_bias": ("LayerNorm.bias", "final_norm.bias"),
    "classifier_bias": ("transform.dense.bias", "pooler.dense.bias", "head.dense.bias"),
    "decoder_bias": ("predictions.bias", "decoder.bias"),
    "qkv_proj_bias": ("query.bias", "key.bias", "value.bias", "attention.output.dense.bias"),  # NomicBERT's names
    "mlp_fc1_bias": ("intermediate.dense.bias", "factor.bias"),
    "mlp_fc2_bias": ("[0-9].output.dense.bias",),
}
LAYER_TYPES = ("full_attention", "sliding_attention")
GATES = {"swiglu": "silu", "geglu": "gelu"}  # {activation of a gated network: activation of its neurons}


def rotary_fields(values: Values) -> Values:
    """Return the fields of rotary positions, of windows, and of missing parameters, by a config.json of any family."""
    local = [] if values.get("local_attention") is None else layers_with_windows(values)
    reach = values.get("sliding_window") if local else None  # as transformers, which takes it for half of the window
    (base, divisor), (local_base, _) = (rotary_base(values, kind) for kind in LAYER_TYPES)

    # In some families biases or segments are missing: those that a config does not deny are there.
    missing = [end for name, ends in BIASES.items() if not values.get(name, True) for end in ends]
    act = values.get("hidden_act", "gelu")

    return {
        "rotary_base": base,
        "rotary_divisor": divisor,
        "local_rotary_base": local_base,
        "local_attention": (values.get("local_attention") or 0) // 2 if reach is None else reach,  # on either side
        "local_layers": local,
        "position_embedding_type": "rotary_local" if local else "rotary",
        "hidden_act": GATES.get(act, act),
        "zeros": [*missing, *[SEGMENTS] * (values.get("type_vocab_size") == 0)],
    }


def layers_with_windows(values: Values) -> list[int]:
    """Return the layers that attend within a window; raise ValueError if a config.json does not tell them."""
    layers, every = values.get("num_hidden_layers", 0), values.get("global_attn_every_n_layers", 3)
    if every < 1:
        raise ValueError(f"global_attn_every_n_layers is {every}; it must be 1 or more")

    # They are a list, or follow from a number.
    types = values.get("layer_types") or []
    if types and not (len(types) == layers and all(kind in LAYER_TYPES for kind in types)):
        known = " or ".join(LAYER_TYPES)
        raise ValueError(f"layer_types is {types}; it must name {known} for each of {layers} layers")
    types = types or [LAYER_TYPES[i % every > 0] for i in range(min(layers, LARGEST["num_hidden_layers"]))]
    return [i for i, kind in enumerate(types) if kind == LAYER_TYPES[1]]


def rotary_base(values: Values, kind: str) -> tuple[float, float]:
    """Return the base of the angles of a kind of layers, and the divisor of all angles.

    Raises:
        ValueError: angles are scaled, in another way than Alibaba's NTK with a fixed factor, or heads have another
            size.
    """
    size = max(values.get("hidden_size", 1) // (values.get("num_attention_heads") or 1), 1)
    stated: Any = values.get("rope_parameters") or {}
    stated = (stated.get(kind) or {}) if {*LAYER_TYPES} & stated.keys() else stated
    check_type(f"rope_parameters of {kind}", stated, Mapping[str, Any])
    scaling = {**stated, **(values.get("rope_scaling") or {})}
    older = "local_rope_theta" if kind == LAYER_TYPES[1] else "global_rope_theta"
    base = scaling.pop("rope_theta", values.get(older, values["rotary_base"]))
    check_type(f"rope_theta of {kind}", base, float)

    # Alibaba's models, of type "new", scale angles by a factor; other ways depend on the length of the text.
    way = next(filter(None, [scaling.pop(name, None) for name in ("type", "rope_type")]), "default")
    factor: Any = scaling.pop("factor", 1.0) if way == "ntk" else 1.0
    rest = {name: x for name, x in scaling.items() if x not in (None, 1.0)}
    if rest or way not in ("default", "ntk" if values.get("model_type") == "new" else "default"):
        raise ValueError(
            f"rotary positions scaled by {way!r} {rest} are not supported: only 'default', and for model_type 'new'"
            " 'ntk' by a factor"
        )

    # The angles are smaller by the factor, and heads are as wide as the sizes say.
    check_type("the factor of rope_scaling", factor, float)
    if not 1 <= factor < math.inf:
        raise ValueError(f"the factor of rope_scaling is {factor}; it must be 1 or more, and finite")
    if (stated_size := values.get("head_dim")) not in (None, size):
        raise ValueError(f"head_dim is {stated_size}; only hidden_size / num_attention_heads is supported, {size}")
    return float(base * factor), factor ** (2 / size)


def split_joined_(state: State, values: Values, base: str) -> None:
    """Split tensors that have the names of several, joined by +."""
    for name in [*state]:
        owner, parts, kind = ("", "", *name.rsplit(".", 2))[-3:]
        if "+" in parts:
            joined, names = state.pop(name), parts.split("+")
            state |= {f"{owner}.{part}.{kind}": x for part, x in zip(names, joined.chunk(len(names)), strict=True)}


def add_zeros_(state: State, wanted: Mapping[str, Tensor], ends: Sequence[str]) -> None:
    """Add zeros for the parameters that a family lacks, by the ends of their names, to parts that are there."""
    parts = {optional_part(name): x for name, x in state.items() if x.is_floating_point()}
    for name, made in wanted.items():
        part = optional_part(name)
        if part in parts and name not in state and any(fnmatchcase(name, f"*{end}") for end in ends):
            state[name] = parts[part].new_zeros(made.shape)


TWO_LAYERS = ((r"classifier\.dense\.", "pooler.dense."), (r"classifier\.out_proj\.", "classifier."))
HEAD_PLACES = {  # {place of a family's common head layers: a part of the names in a model that has them there}
    "cls.predictions.transform.": "predictions.transform.dense.weight",
    "bert.pooler.": "pooler.dense.weight",
    "head.": "head.dense.weight",
}
FIRST = {"norm_first": True, "first_norm": True}
FIRST_NAMES = (  # names of the norms in families that normalise first
    (r"attention\.(self_attn_layer_norm|ln)\.", "attention.LayerNorm."),
    (r"(\d)\.(LayerNorm|ln)\.", r"\1.intermediate.LayerNorm."),
    (r"encoder\.(LayerNorm|ln)\.", "encoder.final_norm."),
    (r"^(bert\.)?LayerNorm\.", r"\1encoder.final_norm."),
)
ROTARY_NAMES = (  # names in checkpoints of families with rotary positions, and in transformers' modules
    (r"tok_embeddings\.", "word_embeddings."),
    (r"^(bert\.)?(emb_ln|embeddings\.norm)\.", r"\1embeddings.LayerNorm."),
    (r"(attn\.Wqkv|mixer\.Wqkv|attention\.qkv_proj)\.", "attention.self.query+key+value."),
    *((rf"self_attn\.{part[0]}_proj\.", f"attention.self.{part}.") for part in ("query", "key", "value")),
    (r"(attn\.Wo|(attn|mixer)\.out_proj|(attention|self_attn)\.o_proj)\.", "attention.output.dense."),
    (r"(norm1|attn_ln|post_attention_layernorm)\.", "attention.output.LayerNorm."),
    (r"attn_norm\.", "attention.LayerNorm."),
    (r"mlp_norm\.", "intermediate.LayerNorm."),
    (r"mlp\.Wi\.", "intermediate.dense+factor."),
    (r"mlp\.up_gate_proj\.", "intermediate.factor+dense."),
    (r"mlp\.(fc11|up_proj)\.", "intermediate.factor."),
    (r"mlp\.(fc12|fc1|gate_proj)\.", "intermediate.dense."),
    (r"mlp\.(fc2|Wo|down_proj)\.", "output.dense."),
    (r"(norm2|mlp_ln|post_mlp_layernorm)\.", "output.LayerNorm."),
    (r"^(bert\.)?final_norm\.", r"\1encoder.final_norm."),
)
LM_HEAD = (
    (r"(lm_predictions\.)?lm_head\.dense\.", "cls.predictions.transform.dense."),
    (r"(lm_predictions\.)?lm_head\.(layer_norm|LayerNorm|norm)\.", "cls.predictions.transform.LayerNorm."),
    (r"(lm_predictions\.)?lm_head\.", "cls.predictions."),
)


def roberta(prefix: str, becomes: str, **fixed: Any) -> Family:
    """Return a family that counts positions as RoBERTa: only tokens, no padding, from the row after padding's."""
    return Family(
        prefix,
        becomes,
        defaults={"pad_token_id": 1},
        fixed={"positions_skip_padding": True, **fixed},
        renames=(*FIRST_NAMES, *LM_HEAD, *TWO_LAYERS),
        adapt=cut_positions_,
        rates={CHOICE: "hidden_dropout_prob"},
        lm_acts=GELU,
    )


def rotary(prefix: str, becomes: str, renames: Sequence[tuple[str, str]], **options: Any) -> Family:
    """Return a family with rotary positions; by default it is gated, without a pooler, and new in transformers 5.

    Only a family with a default for `local_attention` has windows.
    """
    fixed = {"gated": True, "position_biased_input": False, **options.pop("fixed", {})}
    if "local_attention" not in options["defaults"]:
        fixed["local_attention"] = None
    options = {"pooler": False, "since": 5, **options, "fixed": fixed, "renames": (*ROTARY_NAMES, *renames)}
    return Family(prefix, becomes, translate=rotary_fields, adapt=split_joined_, **options)


BERT = Family("bert")
SKIPS_PADDING = "positions without the rows up to padding's, counted over the tokens that are not padding"
GTE = rotary(
    "(?:gte|new)",
    "rotary positions; gated; biases of zeros in the network",
    LM_HEAD,
    aliases={"rope_theta": "rotary_base"},
    defaults={"rotary_base": 160000.0, "pad_token_id": 1, "attention_probs_dropout_prob": 0.0},
    fixed={"mlp_fc1_bias": False},
    lm_acts=GELU,
)
FAMILIES = {  # {model_type: family}
    "bert": BERT,
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), roberta("roberta", SKIPS_PADDING)),
    "data2vec-text": roberta("data2vec_text", SKIPS_PADDING),
    "ernie": Family("ernie", "the first task's embedding added to the segments'", adapt=add_first_task_),
    "bert-generation": Family(
        "bert",
        "segments of zeros; no pooler, and no language model head",
        fixed={"type_vocab_size": 0},
        pooler=False,
        lm_acts=(),  # it has one layer, BERT's two
    ),
    "electra": Family(
        "electra",
        "no pooler, and classifiers with gelu; the small one's embeddings are projected to the hidden size",
        renames=(
            (r"embeddings_project\.", "embeddings.projection."),
            (r"generator_predictions\.", "cls.predictions.transform."),
            (r"generator_lm_head\.", "cls.predictions.decoder."),
            (r"sequence_summary\.summary\.", "pooler.dense."),
            *TWO_LAYERS,
        ),
        pooler=False,
        pooler_act="gelu",
        rates={CHOICE: "summary_last_dropout"},
        lm_acts=GELU,
        needs={"summary_type": "first", "summary_activation": "gelu", "summary_use_proj": True},
    ),
    "distilbert": Family(
        "distilbert",
        "segments of zeros; no pooler, and classifiers with relu",
        fields={
            "dim": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "hidden_dim": "intermediate_size",
            "activation": "hidden_act",
            "dropout": "hidden_dropout_prob",
            "attention_dropout": "attention_probs_dropout_prob",
        },
        defaults={"seq_classif_dropout": 0.2},
        fixed={"type_vocab_size": 0, "layer_norm_eps": 1e-12},
        renames=(
            *((rf"attention\.{part[0]}_lin\.", f"attention.self.{part}.") for part in ("query", "key", "value")),
            (r"attention\.out_lin\.", "attention.output.dense."),
            (r"sa_layer_norm\.", "attention.output.LayerNorm."),
            (r"ffn\.lin1\.", "intermediate.dense."),
            (r"ffn\.lin2\.", "output.dense."),
            (r"output_layer_norm\.", "output.LayerNorm."),
            (r"vocab_transform\.", "cls.predictions.transform.dense."),
            (r"vocab_layer_norm\.", "cls.predictions.transform.LayerNorm."),
            (r"vocab_projector\.", "cls.predictions.decoder."),
            (r"pre_classifier\.", "pooler.dense."),
        ),
        pooler=False,
        pooler_act="relu",
        rates=dict.fromkeys((CLASSIFIER, CHOICE), "seq_classif_dropout"),
    ),
    "mpnet": Family(
        "mpnet",
        "segments of zeros; positions as RoBERTa's; a score bias for each head and bucket of distances",
        fixed={
            "pad_token_id": 1,  # transformers counts positions from it on, whatever the config says
            "positions_skip_padding": True,
            "position_embedding_type": "bucketed",
            "type_vocab_size": 0,
        },
        renames=(
            *((rf"attention\.attn\.{part[0]}\.", f"attention.self.{part}.") for part in ("query", "key", "value")),
            (r"attention\.attn\.o\.", "attention.output.dense."),
            (r"attention\.LayerNorm\.", "attention.output.LayerNorm."),
            *LM_HEAD,
            *TWO_LAYERS,
        ),
        adapt=spread_buckets_,
        lm_acts=GELU,
        needs={"relative_attention_num_buckets": 32},
    ),
    "deberta-v2": Family(
        "deberta",
        "added scores between contents and distances; no pooler, and classifiers with gelu",
        defaults={
            "layer_norm_eps": 1e-7,
            "type_vocab_size": 0,
            "position_biased_input": True,
            "relative_attention": False,
            "pooler_hidden_act": "gelu",
        },
        fixed={"classifier_dropout": None},  # DeBERTa does not read it
        translate=disentangled_fields,
        renames=(
            *((rf"attention\.self\.{part}_proj\.", f"attention.self.{part}.") for part in ("query", "key", "value")),
            (r"embeddings\.embed_proj\.", "embeddings.projection."),
            *LM_HEAD,
        ),
        adapt=scale_queries_,
        pooler=False,
        pooler_act="pooler_hidden_act",
        rates=dict.fromkeys((CLASSIFIER, CHOICE), "cls_dropout"),
        needs={"conv_kernel_size": 0},
    ),
    "roberta-prelayernorm": roberta("roberta_prelayernorm", "RoBERTa, normalised first", **FIRST),
    "xlm-roberta-xl": replace(
        roberta("roberta", "XLM-R, normalised first", embeddings_norm=False, **FIRST),
        defaults={"pad_token_id": 1, "layer_norm_eps": 1e-5},
    ),
    "megatron-bert": Family(
        "bert",
        "normalised first",
        fixed={"embeddings_norm": False, **FIRST},
        renames=FIRST_NAMES,
    ),
    "modernbert": rotary(
        "model",
        "rotary positions, in some layers in windows; normalised first; gated; biases and segments of zeros",
        ((r"head\.norm\.", "head.LayerNorm."), (r"^decoder\.", "cls.predictions.decoder.")),
        fields={
            "norm_eps": "layer_norm_eps",
            "hidden_activation": "hidden_act",
            "classifier_pooling": "pooling",
            "mlp_dropout": "hidden_dropout_prob",
            "attention_dropout": "attention_probs_dropout_prob",
        },
        defaults={
            "layer_norm_eps": 1e-5,
            "pad_token_id": 50283,
            "local_attention": 128,
            "rotary_base": 160000.0,
            "local_rope_theta": 10000.0,
            "classifier_activation": "gelu",
            **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), 0.0),
            **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), False),
        },
        fixed={"type_vocab_size": 0, "norm_first": True, "pooler_norm": True},
        pooler_act="classifier_activation",
        head_at="head.",
        since=4,
    ),
    "nomic_bert": rotary(
        "nomic_bert",
        "rotary positions; gated; biases of zeros in layers",
        ((r"layer_norm\.", "LayerNorm."),),
        fields={"n_positions": SIZES[-1]},  # the other name often has transformers' default, a smaller one
        aliases={
            **dict(zip(("n_embd", "n_layer", "n_head", "n_inner"), SIZES[1:-1], strict=True)),
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "layer_norm_eps",
            "resid_pdrop": "hidden_dropout_prob",
            "attn_pdrop": "attention_probs_dropout_prob",
            **dict.fromkeys(("rotary_emb_base", "rope_theta"), "rotary_base"),
        },
        defaults={
            "hidden_act": "silu",
            "rotary_base": 1000.0,
            **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
            **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False),
        },
        needs={
            **dict.fromkeys(("use_rms_norm", "prenorm", "causal", "parallel_block", "rotary_emb_interleaved"), False),
            "moe_every_n_layers": 0,
            "rotary_emb_fraction": 1.0,
            "rotary_scaling_factor": None,
        },
    ),
    "gte": GTE,
    "new": replace(
        GTE,
        becomes="GTE, with a factor that scales its angles",
        lm_acts=None,
        defaults={**GTE.defaults, "rotary_base": 10000.0},
        needs={"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "logn_attention_scale": False},
        since=None,
    ),
    "jina_embeddings_v3": rotary(
        "roberta",
        "rotary positions",
        (*LM_HEAD, *TWO_LAYERS),
        aliases=dict.fromkeys(("rotary_emb_base", "rope_theta"), "rotary_base"),
        defaults={"rotary_base": 20000.0, "pad_token_id": 1, "layer_norm_eps": 1e-5},
        fixed={"gated": False},
        lm_acts=GELU,
        pooler=True,
    ),
}
REASONS = {  # the reason why a model that users take for a BERT is none
    "has RMSNorm in the place of LayerNorm": ("eurobert", "neobert"),
    "has ALiBi in the place of positions": ("jina_bert",),
    "has rotary positions of another kind": ("roformer", "esm"),
    "is a decoder": ("modernbert-decoder",),
    "embeds more than words, segments and positions": ("layoutlm", "layoutlmv2", "layoutlmv3", "lilt", "roc_bert"),
    "is the first DeBERTa, with other tensors than its second and third": ("deberta",),
    "has other layers": ("albert", "mobilebert", "squeezebert", "convbert", "funnel", "xmod", "rembert"),
    "has sparse or approximate attention": ("big_bird", "longformer", "nystromformer"),
}
FIELDS = {  # {field of config.json: (type, default)}
    **{name: (float | None, ()) for family in FAMILIES.values() for name in family.rates.values()},
    **{each.name: (each.type, each.default) for each in fields(BertConfig)},
    **dict.fromkeys(("legacy", "relative_attention", "use_task_id"), (bool, ())),
    **dict.fromkeys(BIASES, (bool, ())),
    **dict.fromkeys(("global_rope_theta", "local_rope_theta"), (float, ())),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), (Mapping[str, Any], None)),
    **dict.fromkeys(("architectures", "layer_types"), (list | None, ())),
    "global_attn_every_n_layers": (int, ()),
    **dict.fromkeys(("head_dim", "sliding_window"), (int | None, ())),
    **dict.fromkeys(("pooler_hidden_act", "classifier_activation"), (str, ())),
    "pos_att_type": (list | str | None, ()),
}
OTHERS = {kind: f", which {reason}" for reason, kinds in REASONS.items() for kind in kinds}


@dataclass(frozen=True)
class Origin:
    """The family of a checkpoint, and its config.json.

    Args:
        kind: its model_type.
        values: its config.json, with BERT's names for fields.
    """

    path: Path | str
    kind: str
    family: Family
    values: Values

    @classmethod
    def read(cls, source: Source) -> "Origin":
        """Read the config.json of a checkpoint.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: the file is not a JSON object, or describes a model that is not a BERT; the message says why.
        """
        path = first_existing(source.place, CONFIG_FILES)
        return cls.of(path, source.place.values(path.name))

    @classmethod
    def of(cls, path: Path | str, values: Values) -> "Origin":
        """Take the content of a config.json; errors name its path.  See `read`."""
        kind = values.get("model_type", "bert")
        if kind == "xlm-roberta" and values.get("position_embedding_type") == "rotary":
            kind = "jina_embeddings_v3"  # as its publishers name it
        if kind == "bert" and values.get("position_embedding_type") == "alibi":
            kind = "jina_bert"  # its publishers name it a BERT
        family = FAMILIES.get(kind) if isinstance(kind, str) else None
        if family is None:
            known = ", ".join(map(repr, FAMILIES))
            raise ValueError(f"{path} describes a {kind!r} model{OTHERS.get(str(kind), '')}; bertlite loads {known}")

        # A value under a family's name counts more than one under BERT's, and an alias less, in any order.
        names = {**family.aliases, **family.fields}
        for name, value in values.items():
            if (own := names.get(name, name)) in FIELDS:
                check_type(f"{path}: {name}", value, *FIELDS[own])
        ordered = sorted(values.items(), key=lambda item: (item[0] in family.fields) - (item[0] in family.aliases))
        named = {names.get(name, name): value for name, value in ordered}
        values = {**family.defaults, **named, **family.fixed}

        # These fields change what a model computes in ways that bertlite's layers lack.
        for name, wanted in family.needs.items():
            if values.get(name, wanted) != wanted:
                raise ValueError(f"{path} describes a {kind!r} model with {name} {values[name]!r}, not {wanted!r}")
        if values.get("is_causal") and not values.get("is_decoder"):
            raise ValueError(f"{path} has is_causal {values['is_causal']!r}, which bertlite's encoders are not")
        return cls(path, kind, family, values)

    def build(
        self, cls: Any, options: Mapping[str, Any], overrides: Mapping[str, Any], state: State
    ) -> tuple[dict[str, Any], BertConfig]:
        """Return the options and the config that make a model of a class for the tensors of the checkpoint.

        A base model has a pooler if the family's has one, or if the options say so.
        """
        options = dict(options)
        if not self.family.pooler and not hasattr(cls, "needs_pooler"):  # heads have it
            options.setdefault("add_pooling_layer", False)
        pooled = options.get("add_pooling_layer", getattr(cls, "needs_pooler", True))
        config = self.config(cls.__name__ if pooled or self.family.head_at else None, **overrides)
        if "positions_skip_padding" in self.family.fixed:
            tables = [table for name, table in state.items() if name.endswith(POSITIONS)]
            padded = any(has_nonzero(table, self.values["pad_token_id"]) for table in tables)
            config = replace(config, padding_has_position=padded)
        return options, config

    @cached_property
    def translated(self) -> Values:
        """The fields of the BERT that follow from several fields."""
        try:
            return self.family.translate(self.values)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None

    def config(self, pooled: str | None = None, **overrides: Any) -> BertConfig:
        """Return the config of the BERT; for a class with a pooler it states the activation and the dropout rates."""
        family = self.family
        if family is BERT:
            return BertConfig.from_values(self.path, self.values, **overrides)
        values = {**self.values, **self.translated, "model_type": "bert"}
        values["type_vocab_size"] = values.get("type_vocab_size") or 2  # without segments there is a table of zeros
        for name in ("layer_types", "rope_parameters", "rope_scaling", "sliding_window"):
            values.pop(name, None)  # it is translated, and stale once layers are dropped
        if isinstance(named := values.get("architectures"), list):
            values["architectures"] = [class_name(str(name)) for name in named]

        # A family's pooler and dropouts become fields of the config, where BERT has constants.
        if pooled:
            values["pooler_act"] = values.get(family.pooler_act, family.pooler_act)
            values["classifier_dropout"] = values.get(family.rates.get(pooled, "classifier_dropout"))
            if pooled == CLASSIFIER and TWO_LAYERS[0] in family.renames:  # dropout before both of its layers
                rate = values["classifier_dropout"]
                values["pooler_dropout"] = values.get("hidden_dropout_prob", 0.1) if rate is None else rate

        # RoBERTa's positions begin behind the padding token's id, so the table has as many rows more.
        if "positions_skip_padding" in family.fixed:
            if not isinstance(pad := values["pad_token_id"], int):
                raise ValueError(
                    f"{self.path} has pad_token_id {pad!r}; a {self.kind!r} counts positions from this id on:"
                    " set it to the id of the padding token"
                )
            if isinstance(values.get("max_position_embeddings"), int):
                values["max_position_embeddings"] -= pad + 1
        return BertConfig.from_values(self.path, values, **overrides)

    def as_bert(self, state: State, wanted: Mapping[str, Tensor]) -> State:
        """Return the tensors under BERT's names.

        Args:
            wanted: the tensors of the model to fill.

        Raises:
            ValueError: a tensor is there twice or missing, or the model's head computes something else in BERT.
        """
        if self.family is BERT:
            return state
        family = self.family

        # BERT's language model head has the layers' activation, and a family's may have a fixed one.
        act, lm_act = self.values.get("hidden_act", "gelu"), family.pooler_act if family.head_at else "hidden_act"
        known, own_act = family.lm_acts, self.values.get(lm_act, act)
        if "cls.predictions.bias" in wanted and (own_act != act or (known is not None and act not in known)):
            named = f"hidden_act {act!r}" + (f" and {lm_act} {own_act!r}" if own_act != act else "")
            raise ValueError(f"the language model head of {self.kind!r} with {named} is not a BERT's")

        # Without its adapters a model would compute something else, and say nothing.
        if adapters := [name for name in state if "lora_" in name]:
            raise ValueError(f"{adapters[0]} is an adapter, which is not loaded: merge it into the weights first")
        read, unread = ("pooler.dense.", "classifier.dense.")[:: -1 if "classifier.weight" in wanted else 1]

        if any(read in name for name in state):  # a pooler and a classifier's own layer: one is read
            state = {name: tensor for name, tensor in state.items() if unread not in name}

        found, own = State(), dict[str, str]()
        for name, tensor in state.items():
            new = self.bert_name(name)
            if new in found:
                raise ValueError(f"{name} is there twice, once as {own[new]}")
            found[new], own[new] = tensor, name

        # A family with one layer for all heads has it under one name, and BERT's heads under several.
        if family.head_at:
            place = next((at for at, name in HEAD_PLACES.items() if any(name in each for each in wanted)), "head.")
            last = "qa_outputs." if "qa_outputs.weight" in wanted else "classifier."
            renamed = {name.replace(family.head_at, place): x for name, x in found.items()}
            found = {re.sub(r"^classifier\.", last, name): x for name, x in renamed.items()}
        family.adapt(found, self.values, "bert." if any(name.startswith("bert.") for name in found) else "")
        untyped = self.values.get("type_vocab_size") == 0  # so that a tokenizer's token types change nothing
        add_zeros_(found, wanted, [*self.translated.get("zeros", ()), *[SEGMENTS] * untyped])
        return found

    def bert_name(self, name: str) -> str:
        """Return BERT's name of a tensor."""
        while name.startswith(WRAPPER_PREFIXES):
            name = name.partition(".")[2]
        name = re.sub(rf"^{self.family.prefix}\.", "bert.", name)
        name = re.sub(r"^(bert\.)?((encoder|transformer)\.)?layers?\.(?=\d)", r"\1encoder.layer.", name)
        part = next((each for each in self.family.renames if re.search(each[0], name)), None)
        return re.sub(*part, name) if part else name


def class_name(name: str) -> str:
    """Return the class of bertlite for a family's class of transformers, such as RobertaForMaskedLM."""
    part = re.search(r"(?<!Electra)ForPreTraining$|For(?!PreTraining)[A-Z]\w+$", name)  # Electra's differs
    return "BertModel" if part is None else "Bert" + part[0].replace("ForCausalLM", "LMHeadModel")


@checked
def config_of_checkpoint(source: str | PathLike[str], **options: Any) -> BertConfig:
    """Read the config of a checkpoint; see `BertConfig.from_pretrained`."""
    place = [None if each.name == "variant" else options.pop(each.name, None) for each in fields(Source)[1:]]
    return Origin.read(Source.of(source, *place)).config(**options)


BertConfig.read = config_of_checkpoint
