"""A checkpoint of another family is the same model here: transformers' own classes beside ours, in float64."""

import itertools
import json
import shutil
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SIZES as OF_BERT
from conftest import assert_same
from torch import Tensor, nn

from bertlite import BertModel, drop_layers, prune_heads, prune_neurons
from bertlite.checkpoint import families
from bertlite.checkpoint.families import FAMILIES, REASONS, Origin
from bertlite.checkpoint.files import Source
from bertlite.models.heads import CLASSES
from bertlite.models.structure import layers_of
from bertlite.opened.inspection import inspect
from bertlite.parity.families import FIELDS, gradients_as_ours
from bertlite.parity.reference import unrounded
from bertlite.pruning import compact, densify, repair

transformers = pytest.importorskip("transformers")

SIZES = {**OF_BERT, "num_hidden_layers": 2, "num_attention_heads": 3}
del SIZES["type_vocab_size"]  # a family has its own number of segments
WITH_PADDING_FIRST = {**SIZES, "max_position_embeddings": 42, "type_vocab_size": 1}
VERSION_3 = {  # of DeBERTa
    **FIELDS["deberta-v2"],
    "legacy": transformers.__version__.startswith("4."),  # which ties a matrix of the other head to the embeddings
    "layer_norm_eps": 1e-7,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {  # by model_type: transformers' prefix of classes, and sizes
    "roberta": ("Roberta", WITH_PADDING_FIRST),
    "xlm-roberta": ("XLMRoberta", WITH_PADDING_FIRST),
    "camembert": ("Camembert", WITH_PADDING_FIRST),
    "data2vec-text": ("Data2VecText", WITH_PADDING_FIRST),
    "ernie": ("Ernie", {**SIZES, "use_task_id": True}),
    "bert-generation": ("BertGeneration", SIZES),
    "electra": ("Electra", {**SIZES, "embedding_size": 48}),
    "electra small": ("Electra", {**SIZES, "embedding_size": 24}),
    "distilbert": (
        "DistilBert",
        {"vocab_size": 97, "dim": 48, "n_layers": 2, "n_heads": 3, "hidden_dim": 37, "max_position_embeddings": 40},
    ),
    "mpnet": ("MPNet", {**SIZES, "max_position_embeddings": 42}),
    "deberta-v2": ("DebertaV2", {**SIZES, **VERSION_3}),
    "deberta-v2 apart": (  # as some of version 2, and with embeddings of another size
        "DebertaV2",
        {**SIZES, **FIELDS["deberta-v2/apart"], "max_relative_positions": 21, "embedding_size": 24},
    ),
}
CONFIGS |= {  # transformers 4 has some of them alone
    kind: (prefix, sizes)
    for kind, prefix, sizes in (
        ("modernbert", "ModernBert", {**SIZES, **FIELDS["modernbert"], "num_hidden_layers": 3}),
        ("nomic_bert", "NomicBert", SIZES),
        ("gte", "Gte", SIZES),
        ("jina_embeddings_v3", "JinaEmbeddingsV3", SIZES),
        ("roberta-prelayernorm", "RobertaPreLayerNorm", WITH_PADDING_FIRST),
        ("xlm-roberta-xl", "XLMRobertaXL", WITH_PADDING_FIRST),
        ("megatron-bert", "MegatronBert", SIZES),
    )
    if hasattr(transformers, f"{prefix}Model")
}
ROTARY = [kind for kind in ("modernbert", "nomic_bert", "gte", "jina_embeddings_v3") if kind in CONFIGS]
HEADS = ["MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice"]
TOKENS = ("", "MaskedLM", "TokenClassification")  # heads whose outputs packed tokens have, whatever is padding
CASES = [
    (kind, head)
    for kind, (prefix, _) in CONFIGS.items()
    for head in ("", *HEADS)
    if not head or hasattr(transformers, f"{prefix}For{head}")
]


@torch.no_grad()
def theirs_of(kind: str, head: str = "", **changes: Any) -> Any:
    """Make a random model of transformers in float64, whose padding embeds as zeros, as a trained one's does."""
    prefix, sizes = CONFIGS[kind]
    name = "BertGenerationEncoder" if kind == "bert-generation" else f"{prefix}{f'For{head}' if head else 'Model'}"
    if kind.startswith("deberta") and head == "SequenceClassification":
        changes["problem_type"] = "single_label_classification"  # else the loss is computed in float32
    config = getattr(transformers, f"{prefix}Config")(**{**sizes, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    for part in model.modules():
        for key, parameter in part.named_parameters(recurse=False):
            noise = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise + (isinstance(part, nn.LayerNorm) and key == "weight"))
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            part.weight[part.padding_idx] = 0
    return model


def ours_of(folder: Path, head: str = "", backend: str = "eager", **options: Any) -> Any:
    cls = CLASSES[f"BertFor{head}" if head else "BertModel"]
    return cls.from_pretrained(folder, attn_implementation=backend, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives a model of transformers and the folder where it is saved."""

    @cache
    def make(kind: str, head: str = "") -> tuple[Any, Path]:
        model, folder = theirs_of(kind, head), tmp_path_factory.mktemp("family")
        model.save_pretrained(folder)
        return model, folder

    return make


def batch_of(model: Any, head: str = "", padded: bool = True) -> dict[str, Tensor]:
    """Make three sequences of 33 positions: padded on the left, on the right, and not; or none of them."""
    ids = torch.randint(2, 97, (3, 33))
    mask = torch.ones_like(ids)
    mask[0, : 5 * padded] = mask[1, 33 - 13 * padded :] = 0
    batch = {"input_ids": ids.masked_fill(mask == 0, model.config.pad_token_id), "attention_mask": mask}
    return {name: x[None] for name, x in batch.items()} if head == "MultipleChoice" else batch


def labels_of(head: str, mask: Tensor) -> dict[str, Tensor]:
    if head == "QuestionAnswering":
        return {"start_positions": torch.tensor([6, 1, 0]), "end_positions": torch.tensor([8, 19, 32])}
    tokens = {"MaskedLM": 97, "TokenClassification": 2}
    if head in tokens:
        return {"labels": torch.randint(0, tokens[head], mask.shape).masked_fill(mask == 0, -100)}
    return {"labels": torch.tensor([0, 1, 1] if head == "SequenceClassification" else [2])}


def compared(out: Any, mask: Tensor) -> dict[str, Tensor]:
    """Return what is compared of an output: real tokens, and all that is not one of tokens."""
    names = ("loss", "last_hidden_state", "logits", "start_logits", "end_logits")
    found = {name: out[name] for name in names if getattr(out, name, None) is not None}
    return {name: x[mask.bool()] if x.shape[:2] == mask.shape and x.dim() > 1 else x for name, x in found.items()}


@pytest.mark.parametrize(("kind", "head"), CASES)
def test_a_model_of_a_family_is_the_same_here(kind, head, folders):
    """It has a pooler where theirs has one, or asked; gradients and other backends are compared in tests/parity."""
    theirs, folder = folders(kind, head)
    as_ours = not kind.startswith(("deberta", "modernbert"))  # they compute padding in another way
    as_ours |= head in TOKENS or (kind, head) == ("modernbert", "MultipleChoice")  # which reads the first real token
    ours, batch = ours_of(folder, head), batch_of(theirs, head, padded=as_ours)
    mask = batch["attention_mask"]
    labels = labels_of(head, mask) if head else {}
    with unrounded(theirs), torch.no_grad():
        wanted, got = theirs(**batch, **labels), ours(**batch, **labels)
    assert_same(compared(got, mask), compared(wanted, mask))
    if not head:
        pooled = wanted.get("pooler_output")
        assert (pooled is None) == (ours.pooler is None)
        assert ours_of(folder, add_pooling_layer=True).pooler is not None
        if pooled is not None:
            assert_same(got.pooler_output, pooled)
    if not head and kind in ("distilbert", "mpnet", "bert-generation"):  # without segments, whatever they are
        assert torch.equal(ours(**batch, token_type_ids=torch.ones_like(mask))[0], got[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"pos_att_type": "c2p"},
        {"pos_att_type": ["p2c"], "norm_rel_ebd": "none"},
        {"pos_att_type": "c2p", "share_att_key": False, "position_buckets": -1, "max_relative_positions": 9},
        {"pos_att_type": "p2c", "share_att_key": False, "position_biased_input": True, "embedding_size": 24},
        {"relative_attention": False, "position_biased_input": True},  # whose scores are divided all the same
        {"pos_att_type": None},
    ],
    ids=str,
)
def test_every_kind_of_disentangled_attention_is_the_same_here(changes, tmp_path):
    """Of texts too that are longer than max_position_embeddings, where positions are not added to embeddings."""
    theirs = theirs_of("deberta-v2", **changes)
    theirs.save_pretrained(tmp_path)
    ours, ids = ours_of(tmp_path), torch.randint(2, 97, (2, 37 if changes.get("position_biased_input") else 51))
    outs, grads = [], []
    for model in (ours, theirs):
        outs.append(model(ids).last_hidden_state)
        outs[-1].sin().sum().backward()
        grads.append({f"grad.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_same([outs[0]], [outs[1]])
    origin, name = Origin.read(Source(tmp_path)), "grad.encoder.layer.0.output.dense.bias"
    mine, expected = gradients_as_ours(origin, grads[0], {"theirs": grads[1]}, ours)
    assert mine.keys() == expected["theirs"].keys()
    fewer = {each: x for each, x in grads[0].items() if each != name}
    assert name in gradients_as_ours(origin, fewer, {"theirs": grads[1]}, ours)[1]["theirs"]  # a lost one is noticed
    assert_same(mine, {name: expected["theirs"][name] for name in mine})
    assert ("grad.encoder.rel_embeddings.weight" in mine) == bool(
        changes.get("relative_attention", True) and changes.get("pos_att_type", "c2p")
    )


@pytest.mark.parametrize(
    ("kind", "head", "rates"),
    [
        ("roberta", "SequenceClassification", {"classifier_dropout": 0.3}),
        ("roberta", "MultipleChoice", {"classifier_dropout": 0.3}),  # where it does not count
        ("electra", "SequenceClassification", {}),
        ("electra", "MultipleChoice", {"summary_last_dropout": 0.4}),
        ("mpnet", "SequenceClassification", {}),
        ("distilbert", "SequenceClassification", {"dropout": 0.0, "seq_classif_dropout": 0.4}),
        ("distilbert", "MultipleChoice", {"dropout": 0.0, "seq_classif_dropout": 0.4}),
        ("deberta-v2", "SequenceClassification", {"pooler_dropout": 0.3, "cls_dropout": 0.4}),
        ("deberta-v2 apart", "MultipleChoice", {}),
        ("modernbert", "TokenClassification", {"classifier_dropout": 0.3}),  # in layers it drops out at other places
        ("modernbert", "QuestionAnswering", {"classifier_dropout": 0.3}),
        ("nomic_bert", "SequenceClassification", {"hidden_dropout_prob": 0.1, "classifier_dropout": 0.3}),
        ("jina_embeddings_v3", "SequenceClassification", {}),
        ("roberta-prelayernorm", "SequenceClassification", {}),
    ],
)
def test_classifiers_in_training_drop_what_transformers_drops(kind, head, rates, tmp_path):
    if kind not in CONFIGS:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    theirs = theirs_of(kind, head, **rates)
    theirs.save_pretrained(tmp_path)
    padded = not kind.startswith(("deberta", "modernbert"))
    batch, logits = batch_of(theirs, head, padded=padded), []
    for model in (theirs, ours_of(tmp_path, head)):
        torch.manual_seed(0)
        with unrounded(theirs):
            logits.append(model.train()(**batch)["start_logits" if head == "QuestionAnswering" else "logits"])
    assert_same([logits[1]], [logits[0]])
    torch.manual_seed(1)
    assert not torch.equal(model(**batch)["start_logits" if head == "QuestionAnswering" else "logits"], logits[1])


def test_rates_of_dropout_that_a_config_leaves_out_are_transformers_defaults(saved):
    for kind, left_out, rates in (
        ("distilbert", ("seq_classif_dropout", "dropout"), (0.2, 0.1)),
        ("roberta", ("classifier_dropout", "hidden_dropout_prob"), (0.1, 0.1)),
    ):
        _, folder = saved(kind, "SequenceClassification", without=left_out)
        model = ours_of(folder, "SequenceClassification")
        assert (model.dropout.p, model.bert.embeddings.dropout.p) == rates
        assert model.bert.pooler.dropout is None if kind == "distilbert" else model.bert.pooler.dropout.p == 0.1


def test_faults_have_berts_names_and_say_so(folders, tmp_path):
    theirs, folder = folders("distilbert", "SequenceClassification")
    state, prefix = theirs.state_dict(), "distilbert.transformer.layer.1"
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    state[f"{prefix}.ffn.lin1.bias"], state[f"{prefix}.ffn.odd"] = torch.zeros(3), torch.zeros(1)
    for name in (f"{prefix}.attention.q_lin.weight", "pre_classifier.bias", "distilbert.embeddings.LayerNorm.bias"):
        del state[name]
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"bin, a 'distilbert' model under BERT's names, does not fit") as error:
        ours_of(tmp_path, "SequenceClassification")
    for fault in (
        "bert.encoder.layer.1.attention.self.query.weight is missing",
        "\n  bert.pooler.dense.bias is missing",
        "bert.embeddings.LayerNorm.bias is missing",
        "bert.encoder.layer.1.ffn.odd is unknown",
        "bert.encoder.layer.1.intermediate.dense.bias is (3,); by the config it is (37,)",
    ):
        assert fault in str(error.value)
    assert inspect(tmp_path)["bertlite"]["outcome"] == "fails"


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("roberta/MaskedLM", {"hidden_act": "relu"}, "language model head of 'roberta' with hidden_act 'relu'"),
        ("roberta", {"pad_token_id": None}, "has pad_token_id None"),
        ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets 16, not 32"),
        ("electra", {"summary_type": "last"}, "summary_type 'last', not 'first'"),
        ("electra", {"summary_activation": "relu"}, "summary_activation 'relu', not 'gelu'"),
        ("electra", {"summary_use_proj": False}, "summary_use_proj False, not True"),
        ("deberta-v2", {"conv_kernel_size": 3}, "conv_kernel_size 3, not 0"),
        ("deberta-v2", {"pos_att_type": "c2p|p2p"}, "pos_att_type 'c2p|p2p' is unknown; have: c2p, p2c"),
        ("distilbert", {"model_type": "neobert"}, "a 'neobert' model, which has RMSNorm in the place of Layer"),
        ("distilbert", {"model_type": "odd"}, "a 'odd' model; bertlite loads 'bert', 'roberta'"),
        ("nomic_bert", {"moe_every_n_layers": 2}, "moe_every_n_layers 2, not 0"),
        ("nomic_bert", {"use_rms_norm": True}, "use_rms_norm True, not False"),
        ("nomic_bert", {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor 2.0, not None"),
        ("nomic_bert", {"is_causal": True}, "has is_causal True, which bertlite's encoders are not"),
        ("nomic_bert", {"head_dim": 24}, "head_dim is 24; only hidden_size / num_attention_heads is supported, 16"),
        ("gte", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "scaled by 'yarn' {'factor': 2.0} are not"),
        ("gte", {"model_type": "new", "position_embedding_type": "absolute"}, "position_embedding_type"),
        # As jina v2's publishers have it.
        ("gte", {"model_type": "bert", "position_embedding_type": "alibi"}, "a 'jina_bert' model, which has ALiBi"),
        ("modernbert", {"rope_scaling": {"rope_type": "linear"}}, "scaled by 'linear'"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types is .*for each of 3 layers"),
        ("modernbert", {"layer_types": ["chunked_attention"] * 3}, "must name full_attention or sliding_attention"),
        ("modernbert", {"layer_types": None, "global_attn_every_n_layers": 0}, "every_n_layers is 0; it must be 1"),
        ("modernbert", {"rope_parameters": {"full_attention": 3}}, "rope_parameters of full_attention is 3, a int"),
        ("gte", {"rope_parameters": {"rope_theta": "far"}}, "rope_theta of full_attention is 'far', a str"),
        (
            "gte",
            {"model_type": "new", "rope_scaling": {"type": "ntk", "factor": -8.0}},
            "scaling is -8.0; it must",
        ),
        ("gte", {"rope_scaling": {"type": "ntk", "factor": 8.0}}, "scaled by 'ntk' .* not supported: only 'default'"),
        ("modernbert", {"local_attention": -8}, "local_attention is -4; it must be 0 to"),
        ("modernbert", {"num_attention_heads": 16}, "heads have 3 numbers, which rotary positions rotate in pairs"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(case, changes, message, saved):
    kind, _, head = case.partition("/")
    _, folder = saved(kind, head, **changes)
    with pytest.raises(ValueError, match=message):
        ours_of(folder, head)


def test_mpnet_counts_positions_from_1_whatever_its_padding_is(saved):
    theirs, folder = saved("mpnet", pad_token_id=0)
    ids = torch.randint(0, 4, (3, 33), generator=torch.Generator().manual_seed(0))  # 0 and 1 within sequences
    with torch.no_grad():
        wanted = type(theirs).from_pretrained(folder, dtype=torch.float64)(ids).last_hidden_state
        assert_same(ours_of(folder)(ids).last_hidden_state, wanted)


def test_a_name_that_only_looks_like_a_familys_is_not_renamed():
    """A dot in a table of names is a dot."""
    for kind, family in FAMILIES.items():
        for part, _ in family.renames:
            assert "." not in part.replace(r"\.", ""), (kind, part)


@pytest.mark.parametrize("kind", [*CONFIGS, "bert"])
def test_a_field_of_another_type_is_named(kind):
    prefix, sizes = CONFIGS.get(kind, ("Bert", {**SIZES, "max_position_embeddings": 40}))
    stated = {**getattr(transformers, f"{prefix}Config")(**sizes).to_dict(), "architectures": ["BertModel"]}
    whole = Origin.of("config.json", stated)
    del stated["model_type"]
    refused = []
    values = (3, 0.5, True, "odd", [1], {"odd": 1}, None)
    for name, value, cls in itertools.product({*stated, *families.FIELDS}, values, (None, "BertForMultipleChoice")):
        try:
            Origin.of("config.json", {**stated, name: value, "model_type": whole.kind}).config(cls)
        except ValueError as error:
            refused.append((name, value, str(error)))
    for name, value, message in refused:  # others may be of the type, and wrong beside another field
        assert not isinstance(value, list | dict) or name.removeprefix("pruned_") in message, message
    read = {name for name, _, _ in refused}
    assert {"hidden_act", "vocab_size", "architectures"} <= {whole.family.fields.get(name, name) for name in read}
    if kind.startswith("deberta"):
        assert {"pos_att_type", "norm_rel_ebd", "position_buckets", "cls_dropout", "pooler_hidden_act"} <= read


def test_no_family_is_both_known_and_refused():
    others = [kind for kinds in REASONS.values() for kind in kinds]
    assert len(set(others)) == len(others)
    assert not FAMILIES.keys() & set(others)
    alone = set() if hasattr(transformers, "GteModel") else {"nomic_bert", "gte", "jina_embeddings_v3"}
    assert {kind.partition(" ")[0] for kind in CONFIGS} | {"bert", "new"} == FAMILIES.keys() - alone
    page = (Path(__file__).parents[2] / "notebooks" / "docs" / "families.md").read_text(encoding="utf-8")
    assert [kind for kind in FAMILIES if f"`{kind}`" not in page] == []


def test_a_classifiers_own_layer_and_a_pooler_may_both_be_there(folders, tmp_path):
    """As older checkpoints of RoBERTa have them: each class reads its own."""
    (base, folder), (classifier, _) = folders("roberta"), folders("roberta", "SequenceClassification")
    state, pooler = classifier.state_dict(), base.pooler.dense
    shutil.copy(folder / "config.json", tmp_path)
    both = {**state, "roberta.pooler.dense.weight": pooler.weight.data, "roberta.pooler.dense.bias": pooler.bias.data}
    torch.save(both, tmp_path / "pytorch_model.bin")
    assert torch.equal(ours_of(tmp_path).pooler.dense.bias, pooler.bias)
    assert torch.equal(
        ours_of(tmp_path, "SequenceClassification").bert.pooler.dense.bias, state["classifier.dense.bias"]
    )


# Rotary positions, gates or norms first: configs as published, and what pruning and training do

EACH = pytest.mark.parametrize("kind", [*ROTARY, "roberta-prelayernorm", "xlm-roberta-xl", "megatron-bert"])
SINCE_5 = pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 ignores these fields")
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """Return a function that gives a model of transformers and its folder, with fields of its config.json changed."""

    def make(kind: str, head: str = "", without: Collection[str] = (), **changes: Any) -> tuple[Any, Path]:
        if kind not in CONFIGS:
            pytest.skip(f"transformers {transformers.__version__} has no {kind}")
        theirs, folder = theirs_of(kind, head), tmp_path / f"{kind}-{head}"
        theirs.save_pretrained(folder)
        values = json.loads((folder / "config.json").read_text())
        values = {name: value for name, value in {**values, **changes}.items() if name not in without}
        (folder / "config.json").write_text(json.dumps(values))
        return theirs, folder

    return make


def states(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the states of real tokens."""
    with unrounded(model) if "transformers" in type(model).__module__ else torch.no_grad():
        out: torch.Tensor = model(**batch)[0]
    return out.detach()[batch["attention_mask"].bool()]


def test_nomic_with_the_names_of_gpt_2_is_the_same(saved: Any) -> None:
    names = {"n_embd": 48, "n_layer": 2, "n_head": 3, "n_inner": 37, "n_positions": 40, "layer_norm_epsilon": 1e-12}
    names |= {"rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "activation_function": "swiglu"}
    gone = {*SIZES, "hidden_act", "rope_parameters", "layer_norm_eps", "head_dim"} - {"vocab_size"}
    off = dict.fromkeys(("qkv_proj_bias", "use_rms_norm", "causal"), False)
    theirs, folder = saved("nomic_bert", without=gone, **names, **off)
    batch = batch_of(theirs)
    assert_same([states(ours_of(folder), batch)], [states(theirs, batch)])


@pytest.mark.parametrize(
    ("kind", "stale"),
    [
        ("nomic_bert", {"n_embd": 96, "n_layer": 9, "n_head": 6, "n_inner": 99, "layer_norm_epsilon": 0.5}),
        ("nomic_bert", {"activation_function": "geglu", "local_attention": 4}),
        ("gte", {"local_attention": 4}),
        ("jina_embeddings_v3", {"local_attention": 4}),
    ],
)
def test_what_transformers_does_not_read_beside_its_own_names_changes_nothing(
    kind: str, stale: dict[str, Any], saved: Any
) -> None:
    theirs, folder = saved(kind, **stale)
    batch = batch_of(theirs)
    assert_same([states(ours_of(folder), batch)], [states(theirs, batch)])


@pytest.mark.parametrize(
    "older",
    [
        {"global_rope_theta": 160000.0, "local_rope_theta": 160000.0, "position_embedding_type": "sans_pos"},  # mmBERT
        {"global_rope_theta": 80000.0, "local_rope_theta": 10000.0, "position_embedding_type": "absolute"},  # granite
        pytest.param({"rope_scaling": {"rope_type": "default", "rope_theta": 33.0}}, marks=SINCE_5),
        pytest.param({"rope_theta": 500.0, "sliding_window": 1}, marks=SINCE_5),  # it reads the second alone
    ],
)
def test_modernbert_with_the_fields_of_older_configs_is_the_same(older: dict[str, Any], saved: Any) -> None:
    theirs, folder = saved("modernbert", without=("rope_parameters", "layer_types"), **older, layer_norm_eps=1e-3)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.global_attn_every_n_layers == 2
    config._attn_implementation = "sdpa"
    other = type(theirs)(config).double().eval()
    other.load_state_dict(theirs.state_dict())
    batch = batch_of(theirs)
    assert_same([states(ours_of(folder), batch)], [states(other, batch)])
    assert (states(other, batch) - states(theirs, batch)).abs().max() > 1e-3  # the angles matter


def test_new_is_gte_with_scaled_angles(saved: Any) -> None:
    scaling = {"rope_theta": 20000.0, "rope_scaling": {"type": "ntk", "factor": 8.0}}
    fixed = {"model_type": "new", "position_embedding_type": "rope", "layer_norm_type": "layer_norm"}
    theirs, folder = saved("gte", without=("rope_parameters",), **scaling, **fixed)
    half = torch.arange(0, 16, 2).float() / 16
    theirs.base_model.rotary_emb.inv_freq = 1.0 / (20000.0 * 8.0) ** half / 8.0 ** (2 / 16)
    batch = batch_of(theirs)
    ours = ours_of(folder)
    assert_same([states(ours, batch)], [states(theirs, batch)])
    assert "rope_scaling" not in ours.config.extra, "transformers warns of what it does not know"
    values = json.loads((folder / "config.json").read_text())
    del values["rope_theta"]  # whose default is not GTE's
    assert Origin.of(folder, values).config().rotary_base == 10000.0 * 8


def test_an_adapter_is_refused_and_merged_weights_load(saved: Any) -> None:
    published = {"model_type": "xlm-roberta", "position_embedding_type": "rotary", "rotary_emb_base": 20000.0}
    theirs, folder = saved("jina_embeddings_v3", without=("rope_parameters",), **published)
    state = {name: x.clone() for name, x in theirs.state_dict().items()}
    state["layers.0.self_attn.q_proj.lora_A"] = torch.zeros(4, 48)
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"lora_A is an adapter, which is not loaded: merge it"):
        ours_of(folder)
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="its tensors are none"):
        ours_of(folder)
    del state["layers.0.self_attn.q_proj.lora_A"]
    torch.save(state, folder / "pytorch_model.bin")
    batch = batch_of(theirs)
    assert_same([states(ours_of(folder), batch)], [states(theirs, batch)])


@EACH
def test_parameters_that_were_one_tensor_have_memory_of_their_own(kind: str, saved: Any) -> None:
    """Libraries that save a model take parts of one tensor for tied, and drop all but one."""
    theirs, folder = saved(kind)
    (folder / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")  # whose tensors stay where they are
    sizes = {name: (x.untyped_storage().nbytes(), x.nbytes) for name, x in ours_of(folder).named_parameters()}
    assert [name for name, (memory, own) in sizes.items() if memory != own] == []


def test_a_head_is_refused_and_the_encoder_loads(saved: Any) -> None:
    theirs, folder = saved("modernbert", "MaskedLM", classifier_activation="relu")
    with pytest.raises(ValueError, match="hidden_act 'gelu' and classifier_activation 'relu' is not a BERT's"):
        ours_of(folder, "MaskedLM")
    batch = batch_of(theirs)
    assert_same([states(ours_of(folder), batch)], [states(theirs.model, batch)])


@EACH
def test_zeros_for_missing_parameters_do_not_learn(kind: str, saved: Any, tmp_path: Path) -> None:
    theirs, folder = saved(kind, "MaskedLM")
    ours = ours_of(folder, "MaskedLM").train()
    missing = {name for name, x in ours.named_parameters() if not x.requires_grad}
    count = sum(x.numel() for x in theirs.parameters())
    if kind in ROTARY:  # the others have a table of positions of other length
        assert ours.num_parameters(only_trainable=True) == count
    batch = batch_of(theirs)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
    ours(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
    ours.save_pretrained(tmp_path / "saved")
    again = ours_of(tmp_path / "saved", "MaskedLM")
    assert {name for name, x in again.named_parameters() if not x.requires_grad} == missing
    assert all(not x.any() for name, x in again.named_parameters() if name in missing)
    assert bool(missing) == (kind in ("modernbert", "nomic_bert", "gte"))
    assert_same([states(again, batch)], [states(ours.eval(), batch)])


@EACH
def test_pruned_repaired_and_compacted_it_is_the_same(kind: str, saved: Any) -> None:
    theirs, folder = saved(kind)
    model, batch = ours_of(folder), batch_of(theirs)
    heads, neurons = {0: [1], 1: [0, 1, 2]}, {0: [0, 5, 36], 1: range(37)}
    small, cut = prune_neurons(prune_heads(model, heads), neurons), ours_of(folder)
    with torch.no_grad():
        for layer, block in zip((0, 1), layers_of(cut), strict=False):
            block.attention.output.dense.weight.unflatten(1, (3, 16))[:, heads[layer]] = 0
            block.output.dense.weight[:, neurons[layer]] = 0
    wanted = states(cut, batch)
    for other in (small, densify(small), compact(cut), compact(densify(small))):
        assert_same([states(other, batch)], [wanted])
    assert compact(cut).config == small.config
    whole, first = states(model, batch), prune_neurons(model, {0: range(20)})
    mended = repair(first, model, [batch])
    assert (states(mended, batch) - whole).norm() < 0.9 * (states(first, batch) - whole).norm()


def test_modernbert_without_layer_0_normalises_in_the_next(saved: Any, tmp_path: Path) -> None:
    hf = pytest.importorskip("bertlite.hf")
    theirs, folder = saved("modernbert")
    model, batch = ours_of(folder), batch_of(theirs)
    assert (model.encoder.layer[0].attention.LayerNorm, model.config.local_layers) == (None, [1])
    small = drop_layers(model, [0])
    assert (small.config.first_norm, small.config.local_layers) == (True, [0])
    with theirs.layers[0].register_forward_hook(lambda part, inputs, out: inputs[0]):  # a layer that does nothing
        wanted = states(theirs, batch)
    small.save_pretrained(tmp_path / "small")
    registered = hf.BertModel.from_pretrained(tmp_path / "small", dtype=torch.float64, add_pooling_layer=False)
    again = [small, BertModel.from_pretrained(tmp_path / "small"), registered.eval()]
    assert_same([states(each, batch) for each in again], [wanted] * 3)
    assert not drop_layers(model, [2]).config.first_norm


def test_every_kind_of_layer_is_in_the_config() -> None:
    """Which layers have windows follows from either field."""
    sizes = {"vocab_size": 97, "hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 37, **TOKENS}
    values = {**sizes, "model_type": "modernbert", "num_hidden_layers": 7, "max_position_embeddings": 40}
    named = ["sliding_attention", *["full_attention"] * 6]
    for fields, local in (
        ({}, [1, 2, 4, 5]),
        ({"global_attn_every_n_layers": 2}, [1, 3, 5]),
        ({"layer_types": named}, [0]),
        ({"global_attn_every_n_layers": 1}, []),
    ):
        config = Origin.of("config.json", {**values, **fields}).config()
        assert (config.local_layers, config.local_attention) == (local, 64)
        assert config.position_embedding_type == ("rotary_local" if local else "rotary")
