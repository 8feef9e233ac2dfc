"""The other families: cases on random models, inputs in a family's form, and its tensors under BERT's names."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.checkpoint.families import FAMILIES, Origin, query_scale, rotary_fields
from bertlite.checkpoint.names import apply_current_names_, fill_shared_names_
from bertlite.config import SIZES, BertConfig
from bertlite.models import heads
from bertlite.models.base import BertPreTrainedModel
from bertlite.parity import reference
from bertlite.parity.cases import BACKENDS, DECODER, DTYPES, HEADS, Case, each_case
from bertlite.parity.inputs import CaseInputs

SHAPES: dict[str, dict[str, Any]] = {  # with BERT's names for fields
    "small": {
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 37,
        "max_position_embeddings": 40,
        "initializer_range": 0.2,  # 0.02 leaves every head looking everywhere alike
        "embedding_size": 48,
    },
    "base": {**{name: getattr(BertConfig, name) for name in SIZES}, "vocab_size": 4096, "embedding_size": 768},
}
PROJECTED = "electra/projected"  # its embeddings have another size, as in the small model
WINDOWS: dict[str, Any] = {
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1),
}
FIELDS: dict[str, dict[str, Any]] = {  # {kind: fields in addition to a shape}
    "deberta-v2": {  # as version 3 has them
        "relative_attention": True,
        "pos_att_type": "p2c|c2p",
        "share_att_key": True,
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "deberta-v2/apart": {  # with separate projections for distances and tokens
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "type_vocab_size": 2,
    },
    "modernbert": WINDOWS,
    "modernbert/mean": {**WINDOWS, "classifier_pooling": "mean"},
    "gte/untyped": {"type_vocab_size": 0},
}
VARIANTS = (PROJECTED, *(kind for kind in FIELDS if "/" in kind))
KINDS = (*(kind for kind in FAMILIES if kind not in ("bert", "new")), *VARIANTS)  # transformers has no "new"
NORMS_FIRST = tuple(kind for kind, each in FAMILIES.items() if each.fixed.get("norm_first"))
ROTATED = tuple(kind for kind, each in FAMILIES.items() if each.translate is rotary_fields)
SAME_MODULES = ("query", "key", "value", "dense", "LayerNorm")  # larger modules return something else
OF_BERT_ALONE = (heads.BertForPreTraining.__name__, heads.BertForNextSentencePrediction.__name__)
FAMILY_HEADS = tuple(name for name in HEADS if name not in OF_BERT_ALONE)
WITHOUT = {  # heads that transformers lacks, or bertlite, which has no decoder with rotary positions or norms first
    *((kind, DECODER) for kind in ("deberta-v2", *ROTATED, *NORMS_FIRST)),
    *((kind, heads.BertForMultipleChoice.__name__) for kind in ROTATED if kind not in NORMS_FIRST),
    *((kind, heads.BertForQuestionAnswering.__name__) for kind in ("nomic_bert", "gte")),
    *(("bert-generation", head) for head in FAMILY_HEADS),
}


def cases_of(kind: str, quick: bool = False) -> tuple[Case, ...]:
    """Return the cases of a family.

    Args:
        quick: a few of them, with every backend, and with padding on either side and without.
    """
    model_type = kind.partition("/")[0]
    known = [head for head in FAMILY_HEADS if (model_type, head) not in WITHOUT]
    windowed = model_type == "modernbert"  # its versions disagree on states of padding whose window holds no token
    batches = {head: "full" if windowed and heads.HEADS[head].padding_reader else "padded" for head in known}

    # A few cases for each family; together the families have every head.
    if quick:
        plan = [("sdpa", "left", "float64", ""), ("packed", "padded", "float64", "gradients")]
        plan += [("native", "left", "float32", ""), ("eager", "full", "float32", "gradients")]
        if model_type in (*ROTATED, *NORMS_FIRST):
            plan += [("packed", "left", "bfloat16", ""), ("sdpa", "padded", "float64", "checkpointed")]
        found = [Case("BertModel", *each, family=kind) for each in plan]
        first = KINDS.index(kind)  # so that together the families have every head
        some = [known[(first + step) % len(known)] for step in (0, 2)] if known else []
        return (*found, *(Case(head, "sdpa", batches[head], "float64", family=kind) for head in some))

    # All: first the body on every backend.
    backends, paddings, features = (*BACKENDS, "packed"), ("full", "padded", "left"), ("", "gradients")
    found = [*each_case("BertModel", backends, paddings, DTYPES[:2], features, family=kind)]
    found += each_case("BertModel", "native", paddings, "float32", family=kind)

    # Layers of their own are checked with recomputed activations too, and in the dtypes of a GPU.
    if model_type in (*ROTATED, *NORMS_FIRST):
        found += each_case("BertModel", BACKENDS, "padded", "float64", "checkpointed", family=kind)
        found += each_case("BertModel", backends, paddings, DTYPES[2:], family=kind)

    # Then each head on the two backends that transformers has.
    for head in known:
        found += each_case(head, BACKENDS, batches[head], "float64", features, family=kind)
    return tuple(found)


def save_random(folder: Path, kind: str, shape: str) -> Path:
    """Save a checkpoint of a family and a shape that transformers initialises, and return its folder."""
    model_type = kind.partition("/")[0]
    family, values = FAMILIES[model_type], {**SHAPES[shape], **FIELDS.get(kind, {})}
    values["embedding_size"] //= 1 + (kind == PROJECTED)
    if "positions_skip_padding" in family.fixed:  # as RoBERTa: two more rows, up to padding's, and one segment
        values |= {"max_position_embeddings": values["max_position_embeddings"] + 2, "type_vocab_size": 1}
    theirs = {ours: name for name, ours in family.fields.items() if name != "n_positions"}  # transformers reads ours
    sizes = {theirs.get(name, name): value for name, value in values.items()}
    return reference.base_shaped(folder, model_type, use_task_id=True, **sizes)


def family_inputs(model: nn.Module, inputs: CaseInputs, pad: int) -> dict[str, Tensor | bool]:
    """Return the inputs in a family's form: no word has the id of padding, and the model counts positions."""
    found = {name: x for name, x in inputs.items() if name != "position_ids"}
    ids, mask = found["input_ids"], found.get("attention_mask")
    assert isinstance(ids, Tensor)
    words = ids.masked_fill(ids == pad, pad + 1)
    found["input_ids"] = words.masked_fill(mask == 0, pad) if isinstance(mask, Tensor) else words
    if "token_type_ids" not in inspect.signature(model.forward).parameters:
        del found["token_type_ids"]
    return found


def gradients_as_ours(
    origin: Origin,
    our_grads: Mapping[str, Tensor],
    others: Mapping[str, Mapping[str, Tensor]],
    model: BertPreTrainedModel,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return our gradients and theirs under our names; gradients are renamed and sliced as weights are.

    Five are special.  ERNIE's embedding of tasks is part of a sum here, whose gradient is compared instead.  A family
    without segments has no gradient for our segment embeddings of zeros.  MPNet has one position bias, and here each
    layer has a copy: the copies' gradients are added up.  The gradient of a key's bias is 0, since the bias adds the
    same to all scores of a query.  It is compared only in float64: in other dtypes it is all rounding.  DeBERTa's
    weights of queries are divided by a constant, so their gradients are multiplied by it.
    """
    untyped = origin.values.get("type_vocab_size") == 0
    left_out = ("token_type_embeddings",) * untyped + ("key.bias",) * (model.dtype != torch.float64)
    trained = {f"grad.{name}" for name, x in model.named_parameters(remove_duplicate=False) if x.requires_grad}

    def compared(grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: x for name, x in grads.items() if name in trained and not any(part in name for part in left_out)}

    # Their one table is here a copy in each layer.
    ours = compared(our_grads)
    first, *copies = [name for name in ours if name.endswith("distance_embedding.weight")] or [""]
    if copies:
        ours[first] = sum((ours.pop(name) for name in copies), ours[first])

    plain = replace(origin, values={**origin.values, "use_task_id": False})

    # Gradients take the way of the weights: renamed, and then shared or scaled like them.
    def renamed(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        state = {name.removeprefix("grad."): x for name, x in theirs.items() if "task_type" not in name}
        found = plain.as_bert(state, model.state_dict())
        if origin.kind == "deberta-v2":  # they have been divided as the weights are
            scale = query_scale(origin.values) ** 2
            found = {name: x * scale if ".query." in name or "pos_query" in name else x for name, x in found.items()}
        apply_current_names_(found, "", model)
        fill_shared_names_(found, "", model)
        return compared({name: x for each, x in found.items() if (name := f"grad.{each}") not in copies})

    return ours, {side: renamed(theirs) for side, theirs in others.items()}


def modules_as_ours(origin: Origin, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of transformers' modules that ours have under another name, by our names."""
    ours = {origin.bert_name(f"{name}.").removesuffix("."): x for name, x in found.items()}
    if origin.kind == "deberta-v2":
        scale = query_scale(origin.values)
        ours = {name: x / scale if name.endswith(".query") else x for name, x in ours.items()}
    return {name: x for name, x in ours.items() if name.rpartition(".")[2] in SAME_MODULES}
