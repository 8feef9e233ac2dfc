"""Families with rotary positions, gates or norms first: configs as published, and what pruning and training do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same
from test_families import CONFIGS, ROTARY, batch_of, ours_of, save_as_new_, theirs_of  # type: ignore[import-not-found]

from bertlite import BertModel, drop_layers, prune_heads, prune_neurons
from bertlite.checkpoint.families import Origin
from bertlite.models.structure import layers_of
from bertlite.parity.reference import unrounded
from bertlite.pruning import compact, densify, repair

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("bertlite.hf")

EACH = pytest.mark.parametrize("kind", [*ROTARY, "roberta-prelayernorm", "xlm-roberta-xl", "megatron-bert"])
SINCE_5 = pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 ignores these fields")
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """Return a function that gives a model of transformers and its folder, with fields of its config.json changed."""

    def make(kind: str, head: str = "", without: tuple[str, ...] = (), **changes: Any) -> tuple[Any, Path]:
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
    gone = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "hidden_act",
        "rope_parameters",
    )
    own = {
        "activation_function": "swiglu",
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "qkv_proj_bias": False,
    }
    gone += ("max_position_embeddings", "layer_norm_eps", "head_dim")
    theirs, folder = saved("nomic_bert", without=gone, **names, **own, use_rms_norm=False, causal=False)
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
    theirs, folder = saved("gte")
    save_as_new_(theirs, folder)
    batch = batch_of(theirs)
    ours = ours_of(folder)
    assert_same([states(ours, batch)], [states(theirs, batch)])
    assert "rope_scaling" not in ours.config.extra, "transformers warns of what it does not know"
    values = json.loads((folder / "config.json").read_text())
    del values["rope_theta"]  # whose default is not GTE's
    assert Origin.of(folder, values).config().rotary_base == 10000.0 * 8


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("nomic_bert", {"moe_every_n_layers": 2}, "moe_every_n_layers 2, not 0"),
        ("nomic_bert", {"use_rms_norm": True}, "use_rms_norm True, not False"),
        ("nomic_bert", {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor 2.0, not None"),
        ("nomic_bert", {"is_causal": True}, "has is_causal True, which bertlite's encoders are not"),
        ("nomic_bert", {"head_dim": 24}, "head_dim is 24; only hidden_size / num_attention_heads is supported, 16"),
        (
            "gte",
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "scaled by 'yarn' {'factor': 2.0} are not supported",
        ),
        ("gte", {"model_type": "new"}, "position_embedding_type"),
        (
            "gte",
            {"model_type": "bert", "position_embedding_type": "alibi"},  # as jina v2's publishers have it
            "describes a 'jina_bert' model, which has ALiBi in the place of positions; bertlite loads 'bert'",
        ),
        ("modernbert", {"rope_scaling": {"rope_type": "linear"}}, "scaled by 'linear'"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types is .*for each of 3 layers"),
        ("modernbert", {"layer_types": ["chunked_attention"] * 3}, "must name full_attention or sliding_attention"),
        ("modernbert", {"layer_types": None, "global_attn_every_n_layers": 0}, "every_n_layers is 0; it must be 1"),
        ("modernbert", {"rope_parameters": {"full_attention": 3}}, "rope_parameters of full_attention is 3, a int"),
        ("gte", {"rope_parameters": {"rope_theta": "far"}}, "rope_theta of full_attention is 'far', a str"),
        ("gte", {"rope_scaling": {"type": "ntk", "factor": -8.0}}, "the factor of rope_scaling is -8.0; it must be 1"),
        ("modernbert", {"local_attention": -8}, "local_attention is -4; it must be 0 to"),
        ("modernbert", {"num_attention_heads": 16}, "heads have 3 numbers, which rotary positions rotate in pairs"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    kind: str, changes: dict[str, Any], message: str, saved: Any
) -> None:
    if changes.get("model_type") == "new":
        changes = {**changes, "position_embedding_type": "absolute"}
    _, folder = saved(kind, **changes)
    with pytest.raises(ValueError, match=message):
        ours_of(folder)


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
    theirs, folder = saved("modernbert")
    model, batch = ours_of(folder), batch_of(theirs)
    assert (model.encoder.layer[0].attention.LayerNorm, model.config.local_layers) == (None, [1])
    small = drop_layers(model, [0])
    assert (small.config.first_norm, small.config.local_layers) == (True, [0])
    x = []
    hook = theirs.layers[0].register_forward_hook(lambda part, inputs, out: inputs[0])  # a layer that does nothing
    x.append(states(theirs, batch))
    hook.remove()
    small.save_pretrained(tmp_path / "small")
    registered = hf.BertModel.from_pretrained(tmp_path / "small", dtype=torch.float64, add_pooling_layer=False)
    again = [small, BertModel.from_pretrained(tmp_path / "small"), registered.eval()]
    assert_same([states(each, batch) for each in again], x * 3)
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
