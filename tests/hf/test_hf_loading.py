"""from_pretrained and save_pretrained, with the arguments that people pass, between transformers' classes and ours."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import EXACT, F64, SIZES, assert_same, full_outputs, inputs_of, labels_of
from pairs import CROSS, EVERY_CLASS, MODELS, TIED, L, N, core_of, only_4, ours_of, pair, states_of, theirs_of
from safetensors.torch import load, load_file, save_file

import bertlite
import bertlite.pruning
from bertlite import hf
from bertlite.checkpoint.checks import nonfinite_tensors

F32 = torch.float32
NEURONS = {0: [36, 3], 1: range(37)}


def file_of(folder: Path, name: str = "BertModel", **changes: Any) -> Any:
    """transformers' model of a class, saved in a folder in float64."""
    theirs = theirs_of(name, **changes)
    theirs.save_pretrained(folder)
    return theirs


def same(a: Any, b: Any, name: str = "BertModel", **inputs: Any) -> None:
    """Bit for bit if both are ours, else to rounding: transformers 4 divides where we multiply."""
    with torch.no_grad():
        outs = [dict(each(**inputs_of(name), **inputs, output_hidden_states=True)) for each in (a, b)]
    assert_same(*outs, atol=0 if type(a) is type(b) is getattr(hf, name) else EXACT)


# Between transformers' classes and ours


@pytest.mark.parametrize("name", [*MODELS, "BertLMHeadModel", *(f"{name}, untied" for name in TIED)])
def test_files_pass_both_ways_and_what_is_tied_stays_tied(name, tmp_path):
    name, _, untied = name.partition(", ")
    changes = {"use_cache": False, **CROSS} if name == "BertLMHeadModel" else {}
    theirs, ours = pair(name, **changes, tie_word_embeddings=not untied)
    inputs = {**inputs_of(name), **(states_of() if changes else {})}
    wanted = dict(ours(**inputs))
    for cls, model, folder in ((getattr(hf, name), theirs, "theirs"), (getattr(transformers, name), ours, "ours")):
        model.save_pretrained(tmp_path / folder)
        read, info = cls.from_pretrained(
            tmp_path / folder, dtype=F64, attn_implementation="eager", output_loading_info=True
        )
        assert not any(info.values())
        assert not read.training
        assert_same(dict(read(**inputs)), wanted)
        for each in (model, read) if name in TIED else ():
            assert (each.get_output_embeddings().weight is not each.get_input_embeddings().weight) == bool(untied)
    files = [load_file(tmp_path / each / "model.safetensors") for each in ("ours", "theirs")]
    assert_same(*(dict(sorted(each.items())) for each in files), atol=0)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [name]


def test_missing_weights_are_drawn_and_the_loaded_left_alone(tmp_path):
    """One missing bias must not cost its layer the loaded weight beside it."""
    file_of(tmp_path)
    state = load((tmp_path / "model.safetensors").read_bytes())  # not mapped, for the file is written anew
    gone = "encoder.layer.1.attention.self.query.bias"
    save_file({key: x for key, x in state.items() if key != gone}, tmp_path / "model.safetensors", {"format": "pt"})
    model, info = hf.BertModel.from_pretrained(tmp_path, dtype=F64, output_loading_info=True)
    assert set(info["missing_keys"]) == {gone}
    for key, x in model.state_dict().items():
        assert x.equal(state[key] if key != gone else torch.zeros_like(x)), key
    positions = torch.arange(model.config.max_position_embeddings)[None]
    assert model.embeddings.position_ids.equal(positions)  # which are not saved, and 5 builds on the meta device
    assert model.embeddings.token_type_ids.equal(torch.zeros_like(positions))


def test_old_names_are_read(tmp_path):
    theirs = file_of(tmp_path)
    state = load((tmp_path / "model.safetensors").read_bytes())  # not mapped, for the file is written anew
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        state = {key.replace(new, old): x for key, x in state.items()}
    state["embeddings.position_ids"] = torch.arange(SIZES["max_position_embeddings"])[None]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    same(hf.BertModel.from_pretrained(tmp_path, dtype=F64), theirs)


# Arguments


@pytest.mark.parametrize("options", [{"device_map": "auto"}, {"low_cpu_mem_usage": True}], ids=str)
def test_weights_may_be_placed_while_they_are_loaded(options, tmp_path):
    pytest.importorskip("accelerate", reason="transformers wants accelerate for it")
    theirs = file_of(tmp_path, "BertForMaskedLM")
    model = hf.BertForMaskedLM.from_pretrained(tmp_path, **options, dtype=F64)
    same(model.cpu(), theirs, "BertForMaskedLM")  # "auto" may have found a GPU
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_variants_and_subfolders_and_shards(tmp_path):
    model = bertlite.prune_heads(ours_of("BertForMaskedLM"), {1: [0]})
    model.save_pretrained(tmp_path / "inner", variant="fp16", max_shard_size="50KB")
    shards = sorted(path.name for path in (tmp_path / "inner").glob("*.safetensors"))
    assert len(shards) > 2
    assert all("fp16" in shard for shard in shards)
    again = hf.BertForMaskedLM.from_pretrained(tmp_path, subfolder="inner", variant="fp16", dtype=F64)
    same(again, model, "BertForMaskedLM")


def test_pickled_weights_are_read(tmp_path):
    theirs = theirs_of("BertModel")
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    same(hf.BertModel.from_pretrained(tmp_path, use_safetensors=False, dtype=F64), theirs)


# Pruned checkpoints


def test_the_config_of_an_unpruned_model_has_the_fields_of_transformers(tmp_path):
    theirs, ours = pair("BertModel")
    for model, folder in ((theirs, "theirs"), (ours, "ours"), (core_of(ours), "core")):
        model.save_pretrained(tmp_path / folder)
    fields = {
        each: set(json.loads((tmp_path / each / "config.json").read_text())) for each in ("theirs", "ours", "core")
    }
    assert fields["ours"] - fields["theirs"] <= {"position_embedding_type"}
    assert "pruned_heads" not in fields["core"]
    assert ours.config.pruned_heads == {}  # for code of transformers 4


@only_4
@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM"])
def test_pruned_files_pass_both_ways_beside_transformers_4(name, tmp_path):
    theirs, ours = pair(name, dtype=F32)  # all that transformers 4 prunes
    for model in (theirs, ours):
        model.prune_heads({0: [1, 3], 1: [0, 1, 2]})
    same(ours.double(), theirs.double(), name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    same(getattr(hf, name).from_pretrained(tmp_path / "theirs", dtype=F64, attn_implementation="eager"), ours, name)
    same(getattr(transformers, name).from_pretrained(tmp_path / "ours", dtype=F64), theirs, name)


@EVERY_CLASS
def test_the_core_and_hf_read_each_others_files_and_compute_the_same(name, tmp_path):
    """With relative positions, and pruned heads and neurons, which the core prunes in both."""
    rich = {**CROSS, "use_cache": False} if name == "BertLMHeadModel" else {}
    tied = {"tie_word_embeddings": name != "BertForMaskedLM"}
    dense = ours_of(name, position_embedding_type="relative_key_query", **tied, **rich)
    gate = torch.linspace(-0.5, 1.5, L * N, dtype=F64).view(L, N)
    inputs = {**inputs_of(name), **labels_of(name), **(states_of() if rich else {}), "head_mask": gate}
    ours = bertlite.prune_neurons(bertlite.prune_heads(dense, {1: [2]}), NEURONS)
    wanted = dict(full_outputs(ours, inputs))
    assert not hasattr(dense.config, "pruned_neurons")
    other = bertlite.prune_neurons(bertlite.prune_heads(core_of(dense), {1: [2]}), NEURONS)
    assert_same(dict(full_outputs(other, inputs)), wanted, atol=0)
    whole = bertlite.pruning.densify(ours)
    assert type(whole) is type(dense)
    assert whole.config.pruned_heads == {}
    assert_same(whole(**inputs)[0], ours(**inputs)[0])
    ours.save_pretrained(tmp_path / "hf")
    core = getattr(bertlite, name).from_pretrained(tmp_path / "hf")
    assert_same(dict(full_outputs(core, inputs)), wanted, atol=0)
    core.set_attn_implementation("sdpa")
    assert_same(dict(core(**inputs)), dict(ours(**inputs)), atol=0)
    core.save_pretrained(tmp_path / "core")
    again, info = getattr(hf, name).from_pretrained(tmp_path / "core", dtype=F64, output_loading_info=True)
    assert not any(info.values())
    assert_same(dict(full_outputs(again, inputs)), wanted, atol=0)


# Quantised while it is loaded


def test_the_parts_of_a_quantised_tensor_are_looked_at_for_nan():
    """It knows hardly an operator itself, as one of torchao."""
    for scale, faults in ((1.0, []), (torch.nan, ["w.scale holds nan or inf in float32"])):
        parts = {"codes": torch.ones(3, 2, dtype=torch.int8), "scale": torch.tensor([1, scale, 1])}
        tensor = SimpleNamespace(**parts, __tensor_flatten__=lambda parts=parts: ([*parts], None))
        assert nonfinite_tensors({"w": tensor}) == faults


def test_a_model_that_torchao_quantises_is_that_of_transformers(tmp_path):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    file_of(tmp_path, "BertForSequenceClassification", hidden_size=64, intermediate_size=32)
    config = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    name, options = "BertForSequenceClassification", {"quantization_config": config, "device_map": "cpu", "dtype": F32}
    theirs, ours = (getattr(each, name).from_pretrained(tmp_path, **options) for each in (transformers, hf))
    assert type(ours.bert.encoder.layer[0].intermediate.dense.weight) is not torch.nn.Parameter
    assert_same(ours(**inputs_of()).logits, theirs(**inputs_of()).logits, atol=0)
    with pytest.raises(TypeError, match=r"not a plain nn\.Linear: merge adapters before pruning, and quantise"):
        ours.prune_heads({0: [1]})
