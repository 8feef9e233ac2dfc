"""The corpus of hostile checkpoints, through transformers' from_pretrained."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import SIZES, assert_same, make, make_batch
from pairs import config_of, ours_of
from safetensors.torch import load, save_file

import bertlite
from bertlite import hf
from scripts.make import hostile

DRAWN = {"no tensors", "a missing tensor"}  # transformers draws what a file lacks, and says so
LEFT = {  # transformers' own errors, which name what is wrong in its log
    "a tensor of no numbers",
    "a scalar",
    "another shape",
    "large vocab_size",
    "large max_position_embeddings",
    "large type_vocab_size",
    "shard missing",
    "shard whose name is too long",
}
UNNAMED = {"a layer with no end"}  # transformers reads a layer's number before we see it


NAMED = [(name, False) for name in sorted(hostile.CASES.keys() - DRAWN - LEFT - UNNAMED)]


@pytest.mark.parametrize(("name", "with_info"), [*NAMED, ("nan", True)])
def test_the_corpus_is_refused_as_by_the_core(name, with_info, tmp_path):
    folder = hostile.write(tmp_path, name)
    with pytest.raises(ValueError, match=r"[\s\S]") as caught:
        hf.BertModel.from_pretrained(folder, output_loading_info=with_info)
    assert hostile.CASES[name][1] in str(caught.value)
    assert str(folder) in str(caught.value)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", sorted(LEFT))
def test_what_transformers_refuses_itself_is_left_to_it(name, tmp_path):
    with pytest.raises((RuntimeError, OSError)):
        hf.BertModel.from_pretrained(hostile.write(tmp_path, name))


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod."])
def test_names_of_a_wrapper_are_refused_and_the_way_out_works(wrapper, tmp_path):
    """transformers takes none of them for its own, and would give a random model."""
    ours = ours_of("BertForMaskedLM")
    ours.save_pretrained(tmp_path / "wrapped")
    path = tmp_path / "wrapped" / "model.safetensors"
    save_file({f"{wrapper}{name}": x for name, x in load(path.read_bytes()).items()}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=f"holds {wrapper}.*load it with bertlite"):
        hf.BertForMaskedLM.from_pretrained(tmp_path / "wrapped")
    bertlite.BertForMaskedLM.from_pretrained(tmp_path / "wrapped").save_pretrained(tmp_path / "saved")
    found = hf.BertForMaskedLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(found[name].equal(x) for name, x in ours.state_dict().items())


def test_what_the_caller_brings_is_not_looked_for_in_the_folder(tmp_path):
    folder = hostile.write(tmp_path, "config without fields")
    assert hf.BertModel.from_pretrained(folder, config=config_of()).config.hidden_size == SIZES["hidden_size"]
    assert hf.BertModel.from_pretrained(folder, **SIZES).config.vocab_size == SIZES["vocab_size"]


def test_a_config_that_lacks_what_is_pruned_is_refused_and_the_way_out_works(tmp_path):
    model = bertlite.prune_neurons(bertlite.prune_heads(ours_of("BertForMaskedLM"), {0: [1, 3]}), {2: [5]})
    model.save_pretrained(tmp_path)
    path, dense = tmp_path / "config.json", config_of()
    stated = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in stated.items() if not k.startswith("pruned_")}))
    for options in ({}, {"config": dense}, {"config": dense, "ignore_mismatched_sizes": True}):
        with pytest.raises(ValueError, match=r"pass pruned_heads=\{0: \[the 2 removed heads\]\}"):
            hf.BertForMaskedLM.from_pretrained(tmp_path, **options)
    given = {"pruned_heads": {0: [1, 3]}, "pruned_neurons": {2: [5]}}
    for options in (given, {"config": dense, **given}, {"config": model.config}):
        found = hf.BertForMaskedLM.from_pretrained(tmp_path, **options)
        assert all(found.state_dict()[name].equal(x) for name, x in model.state_dict().items())
        assert found.config.pruned_heads == {0: [1, 3]}
    assert not getattr(dense, "pruned_heads", None)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_an_adapter_beside_a_whole_model_is_loaded_as_transformers_does(tmp_path):
    peft = pytest.importorskip("peft")
    ours_of("BertModel").save_pretrained(tmp_path / "base")
    base = hf.BertModel.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(target_modules=["query"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "both")
    base.save_pretrained(tmp_path / "both")
    names = [name for name, _ in hf.BertModel.from_pretrained(tmp_path / "both").named_parameters()]
    assert any("lora_A" in name for name in names)


@pytest.mark.parametrize("name", ["nowhere", "models/nowhere", "/nowhere"])
def test_a_folder_that_is_not_there_is_said_to_be_missing(name):
    message = rf"^there is no folder (or file )?{name}(, and the hub did not|$)"
    for source in (name, Path(name)):
        with pytest.raises(FileNotFoundError, match=message):
            hf.BertModel.from_pretrained(source, local_files_only=True)


def test_a_model_of_another_family_on_the_hub_is_refused(tmp_path):
    """transformers would initialise it at random."""
    commit, place = "0" * 40, tmp_path / "models--me--modern"
    for name, text in ("refs/main", commit), (f"snapshots/{commit}/config.json", '{"model_type": "modernbert"}'):
        (place / name).parent.mkdir(parents=True)
        (place / name).write_text(text)
    with pytest.raises(ValueError, match=r"me/modern describes a 'modernbert'.*load it with bertlite\.BertModel"):
        hf.BertModel.from_pretrained("me/modern", cache_dir=tmp_path, local_files_only=True)


PRUNED = Path(__file__).parents[1] / "golden" / "pruned"
CODE = """from bertlite.hf import BertForMaskedLM, BertForMultipleChoice, BertForNextSentencePrediction
from bertlite.hf import BertForPreTraining, BertForQuestionAnswering, BertForSequenceClassification
from bertlite.hf import BertForTokenClassification, BertLMHeadModel, BertModel
"""  # as export_remote_code wrote in November 2026; such folders lie on hubs


def test_a_folder_that_was_pruned_before_names_moved_loads(tmp_path):
    shutil.copytree(PRUNED, tmp_path / "old")
    (tmp_path / "old" / "modeling_bertlite.py").write_text(CODE, encoding="utf-8")
    path = tmp_path / "old" / "config.json"
    auto = {"AutoModel": "modeling_bertlite.BertModel", "AutoModelForMaskedLM": "modeling_bertlite.BertForMaskedLM"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto}))
    found = transformers.AutoModel.from_pretrained(tmp_path / "old", trust_remote_code=True)
    assert type(found) is hf.BertModel
    wanted = bertlite.BertModel.from_pretrained(PRUNED).state_dict()
    assert all(found.state_dict()[name].equal(x) for name, x in wanted.items())


@pytest.mark.parametrize("kind", ["rotary_local", "absolute"])
def test_a_pruned_folder_with_rotations_or_norms_first_loads_by_its_code(kind, tmp_path, monkeypatch):
    """As the core's model: with every norm, and with zeros that do not learn."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    ends = ["intermediate.dense.bias", "factor.bias", "token_type_embeddings.weight"]
    local = {"local_layers": [1], "local_attention": 3} if kind == "rotary_local" else {"first_norm": True}
    fields = {"position_embedding_type": kind, "norm_first": True, "gated": True, "zeros": ends, **local}
    model = bertlite.prune_heads(make(**fields), {0: range(4), 1: [2]})
    model.save_pretrained(tmp_path / "model")
    hf.export_remote_code(tmp_path / "model")
    options = {"dtype": torch.float64, "attn_implementation": "sdpa"}
    found = transformers.AutoModel.from_pretrained(tmp_path / "model", trust_remote_code=True, **options)
    assert type(found) is hf.BertModel
    frozen = {name for name, x in found.named_parameters() if not x.requires_grad}
    assert frozen == {name for name, x in model.named_parameters() if not x.requires_grad}
    assert len(frozen) == 7
    batch = make_batch(3, 11, lengths=(11, 7, 1))
    real = batch["attention_mask"].bool()
    assert_same(found.eval()(**batch)[0][real], model(**batch).last_hidden_state[real])
    found.save_pretrained(tmp_path / "again")
    core = bertlite.BertModel.from_pretrained(tmp_path / "again")
    assert_same(core.state_dict(), model.state_dict(), atol=0)

    # What it saves loads in the same way, also where the core saved over it; other models are saved without code.
    core.save_pretrained(tmp_path / "again")
    again = transformers.AutoModel.from_pretrained(tmp_path / "again", trust_remote_code=True, **options)
    assert type(again) is hf.BertModel
    core.save_pretrained(tmp_path / "core")
    hf.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path / "dense")
    code = sorted(path for each in ("again", "core", "dense") for path in (tmp_path / each).glob("*.py"))
    assert code == [tmp_path / "again" / "modeling_bertlite.py"]
    assert "auto_map" not in json.loads((tmp_path / "core" / "config.json").read_text())
