"""A checkpoint of another family is the same model here: transformers' own classes beside ours, in float64."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same
from torch import Tensor, nn

from bertlite import optimize_for_inference, prune_heads
from bertlite.checkpoint import families
from bertlite.checkpoint.families import FAMILIES, REASONS, Origin
from bertlite.checkpoint.files import Source
from bertlite.models.heads import CLASSES
from bertlite.opened.inspection import inspect
from bertlite.parity.families import FIELDS, gradients_as_ours
from bertlite.parity.reference import unrounded
from bertlite.pruning import densify

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 37,
}
WITH_PADDING_FIRST = {**SIZES, "max_position_embeddings": 42, "type_vocab_size": 1}
VERSION_3 = {  # of DeBERTa
    **FIELDS["deberta-v2"],
    "max_position_embeddings": 40,
    "legacy": transformers.__version__.startswith("4."),  # which ties a matrix of the other head to the embeddings
    "layer_norm_eps": 1e-7,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {  # by model_type: transformers' prefix of classes, and sizes
    "roberta": ("Roberta", WITH_PADDING_FIRST),
    "xlm-roberta": ("XLMRoberta", WITH_PADDING_FIRST),
    "camembert": ("Camembert", WITH_PADDING_FIRST),
    "data2vec-text": ("Data2VecText", WITH_PADDING_FIRST),
    "ernie": ("Ernie", {**SIZES, "max_position_embeddings": 40, "use_task_id": True}),
    "bert-generation": ("BertGeneration", {**SIZES, "max_position_embeddings": 40}),
    "electra": ("Electra", {**SIZES, "max_position_embeddings": 40, "embedding_size": 48}),
    "electra small": ("Electra", {**SIZES, "max_position_embeddings": 40, "embedding_size": 24}),
    "distilbert": (
        "DistilBert",
        {"vocab_size": 97, "dim": 48, "n_layers": 2, "n_heads": 3, "hidden_dim": 37, "max_position_embeddings": 40},
    ),
    "mpnet": ("MPNet", {**SIZES, "max_position_embeddings": 42}),
    "deberta-v2": ("DebertaV2", {**SIZES, **VERSION_3}),
    "deberta-v2 apart": (  # as some of version 2, and with embeddings of another size
        "DebertaV2",
        {
            **SIZES,
            "max_position_embeddings": 40,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "max_relative_positions": 21,
            "type_vocab_size": 2,
            "embedding_size": 24,
        },
    ),
}
WINDOWS = {**FIELDS["modernbert"], "num_hidden_layers": 3, "max_position_embeddings": 40}
CONFIGS |= {  # transformers 4 has some of them alone
    kind: (prefix, sizes)
    for kind, prefix, sizes in (
        ("modernbert", "ModernBert", {**SIZES, **WINDOWS}),
        ("nomic_bert", "NomicBert", {**SIZES, "max_position_embeddings": 40}),
        ("gte", "Gte", {**SIZES, "max_position_embeddings": 40}),
        ("jina_embeddings_v3", "JinaEmbeddingsV3", {**SIZES, "max_position_embeddings": 40}),
        ("roberta-prelayernorm", "RobertaPreLayerNorm", WITH_PADDING_FIRST),
        ("xlm-roberta-xl", "XLMRobertaXL", WITH_PADDING_FIRST),
        ("megatron-bert", "MegatronBert", {**SIZES, "max_position_embeddings": 40}),
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
    return CLASSES[f"BertFor{head}" if head else "BertModel"].from_pretrained(
        folder, attn_implementation=backend, **options
    )


def save_as_new_(theirs: Any, folder: Path) -> None:
    """Save a GTE as Alibaba's `new`, and scale its angles as that does."""
    theirs.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    del values["rope_parameters"]
    scaling = {"rope_theta": 20000.0, "rope_scaling": {"type": "ntk", "factor": 8.0}}
    fixed = {"model_type": "new", "position_embedding_type": "rope", "layer_norm_type": "layer_norm"}
    (folder / "config.json").write_text(json.dumps({**values, **scaling, **fixed}))
    half = torch.arange(0, 16, 2).float() / 16
    theirs.base_model.rotary_emb.inv_freq = 1.0 / (20000.0 * 8.0) ** half / 8.0 ** (2 / 16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives a model of transformers and the folder where it is saved."""
    made: dict[tuple[str, str], tuple[Any, Path]] = {}

    def make(kind: str, head: str = "") -> tuple[Any, Path]:
        if (kind, head) not in made:
            model, folder = theirs_of(kind, head), tmp_path_factory.mktemp("family")
            model.save_pretrained(folder)
            made[kind, head] = model, folder
        return made[kind, head]

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
    theirs, folder = folders(kind, head)
    as_ours = not kind.startswith(("deberta", "modernbert"))  # they compute padding in another way
    as_ours |= head in TOKENS or (kind, head) == ("modernbert", "MultipleChoice")  # which reads the first real token
    ours, batch = ours_of(folder, head), batch_of(theirs, head, padded=as_ours)
    mask = batch["attention_mask"]
    labels = labels_of(head, mask) if head else {}
    theirs.zero_grad()
    with unrounded(theirs):
        wanted, got = theirs(**batch, **labels), ours(**batch, **labels)
    assert_same(compared(got, mask), compared(wanted, mask))
    if head:
        wanted.loss.backward()
        got.loss.backward()
    else:
        for out in (wanted, got):
            (out.last_hidden_state[mask.bool()].sin().sum()).backward()
    mine, other = (
        {f"grad.{name}": p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
        for model in (ours, theirs)
    )
    grads, expected = gradients_as_ours(Origin.read(Source(folder)), mine, {"theirs": other}, ours)
    assert len(grads) > 25
    assert_same(grads, {name: expected["theirs"][name] for name in grads})
    with torch.no_grad():
        ours.set_attn_implementation("sdpa")
        assert_same(compared(ours(**batch, **labels), mask), compared(wanted, mask))
        ours.set_attn_implementation("packed")
        batch = batch_of(theirs, head, padded=head in TOKENS)
        mask = batch["attention_mask"]
        with unrounded(theirs):
            assert_same(compared(ours(**batch), mask), compared(theirs(**batch), mask))


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
    mine, expected = gradients_as_ours(Origin.read(Source(tmp_path)), grads[0], {"theirs": grads[1]}, ours)
    assert mine.keys() == expected["theirs"].keys()
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


def test_rates_of_dropout_that_a_config_leaves_out_are_transformers_defaults(folders, tmp_path):
    for kind, left_out, rates in (
        ("distilbert", ("seq_classif_dropout", "dropout"), (0.2, 0.1)),
        ("roberta", ("classifier_dropout", "hidden_dropout_prob"), (0.1, 0.1)),
    ):
        _, folder = folders(kind, "SequenceClassification")
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in left_out}))
        shutil.copy(folder / "model.safetensors", tmp_path)
        model = ours_of(tmp_path, "SequenceClassification")
        assert (model.dropout.p, model.bert.embeddings.dropout.p) == rates
        assert model.bert.pooler.dropout is None if kind == "distilbert" else model.bert.pooler.dropout.p == 0.1


@pytest.mark.parametrize("kind", ["roberta", "ernie", "mpnet"])
def test_a_pooler_is_the_same(kind, folders):
    theirs, folder = folders(kind)
    batch = batch_of(theirs)
    assert_same(ours_of(folder)(**batch).pooler_output, theirs(**batch).pooler_output)


@pytest.mark.parametrize("kind", ["bert-generation", "electra", "distilbert", "deberta-v2"])
def test_a_base_model_without_a_pooler_gets_none_unless_asked(kind, folders):
    _, folder = folders(kind)
    assert ours_of(folder).pooler is None
    assert ours_of(folder, add_pooling_layer=True).pooler is not None


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "mpnet", "electra small", "deberta-v2", "deberta-v2 apart"])
def test_densified_it_is_the_same_and_it_takes_embeddings_and_checkpoints(kind, folders):
    """What else works on a BERT is in tests/laws."""
    theirs, folder = folders(kind)
    batch, pruned = batch_of(theirs), prune_heads(ours_of(folder), {0: [2], 1: [0, 1]})
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        assert_same(densify(pruned)(**batch).last_hidden_state[real], pruned(**batch).last_hidden_state[real])
        fast = optimize_for_inference(pruned.float())
        assert fast.backend == "native"
        embeds = {"inputs_embeds": pruned.get_input_embeddings()(batch["input_ids"])}  # positions are counted from 0
        got, wanted = fast(**embeds).last_hidden_state, pruned(**embeds).last_hidden_state
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    pruned.double().gradient_checkpointing_enable()
    pruned(**batch).last_hidden_state[real].sum().backward()


def test_what_is_saved_is_a_BERT_and_stock_loads_it_or_refuses_it(folders, tmp_path):
    for kind, head in (("roberta", ""), ("distilbert", ""), ("ernie", "SequenceClassification")):
        theirs, folder = folders(kind, head)
        ours_of(folder, head).save_pretrained(tmp_path / kind)
        cls = getattr(transformers, f"Bert{f'For{head}' if head else 'Model'}")
        stock = cls.from_pretrained(tmp_path / kind, dtype=torch.float64, attn_implementation="eager").eval()
        batch = batch_of(theirs)
        batch = {name: x[1:] for name, x in batch.items()}  # padded on the right
        mask = batch["attention_mask"]
        assert_same(compared(stock(**batch), mask), compared(theirs(**batch), mask))
    for kind, head in (
        ("distilbert", "SequenceClassification"),
        ("electra", "MultipleChoice"),
        ("mpnet", ""),
        ("electra small", ""),
        ("deberta-v2", ""),
    ):
        theirs, folder = folders(kind, head)
        ours_of(folder, head).save_pretrained(tmp_path / kind)
        with pytest.raises(KeyError, match="load this model with bertlite, it is no plain BERT; bertlite:gelu"):
            getattr(transformers, f"Bert{f'For{head}' if head else 'Model'}").from_pretrained(tmp_path / kind)
        batch = batch_of(theirs, head)
        mask = batch["attention_mask"]
        assert_same(compared(ours_of(tmp_path / kind, head)(**batch), mask), compared(theirs(**batch), mask))
        assert inspect(tmp_path / kind)["transformers 5"]["outcome"] == "fails"


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
    ("kind", "head", "changes", "message"),
    [
        ("roberta", "MaskedLM", {"hidden_act": "relu"}, "language model head of 'roberta' with hidden_act 'relu'"),
        ("roberta", "", {"pad_token_id": None}, "has pad_token_id None"),
        ("mpnet", "", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets 16, not 32"),
        ("electra", "", {"summary_type": "last"}, "summary_type 'last', not 'first'"),
        ("electra", "", {"summary_activation": "relu"}, "summary_activation 'relu', not 'gelu'"),
        ("electra", "", {"summary_use_proj": False}, "summary_use_proj False, not True"),
        ("deberta-v2", "", {"conv_kernel_size": 3}, "conv_kernel_size 3, not 0"),
        ("deberta-v2", "", {"pos_att_type": "c2p|p2p"}, "pos_att_type 'c2p|p2p' is unknown; have: c2p, p2c"),
        (
            "distilbert",
            "",
            {"model_type": "neobert"},
            "a 'neobert' model, which has RMSNorm in the place of LayerNorm; bertlite loads",
        ),
        ("distilbert", "", {"model_type": "odd"}, "a 'odd' model; bertlite loads 'bert', 'roberta'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(kind, head, changes, message, folders, tmp_path):
    _, folder = folders(kind, head)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    shutil.copy(folder / "model.safetensors", tmp_path)
    with pytest.raises(ValueError, match=message):
        ours_of(tmp_path, head)


def test_mpnet_counts_positions_from_1_whatever_its_padding_is(folders, tmp_path):
    model, folder = folders("mpnet")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "pad_token_id": 0}))
    ids = torch.randint(0, 4, (3, 33), generator=torch.Generator().manual_seed(0))  # 0 and 1 within sequences
    with torch.no_grad():
        wanted = type(model).from_pretrained(tmp_path, dtype=torch.float64)(ids).last_hidden_state
        assert_same(ours_of(tmp_path, "")(ids).last_hidden_state, wanted)


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


@pytest.mark.parametrize("kind", ["distilbert", "mpnet", "bert-generation"])
def test_a_family_without_segments_takes_any_that_a_tokenizer_gives(kind, folders):
    theirs, folder = folders(kind)
    ours, batch = ours_of(folder), batch_of(theirs)
    types = torch.ones_like(batch["input_ids"])
    assert torch.equal(ours(**batch, token_type_ids=types)[0], ours(**batch)[0])
