"""bertlite/shipping: the folder of a model has all that bertlite, transformers and the hub read."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make
from natively import assert_near
from worlds import PRUNED, add_pooling, in_hub_cache, read, save

import bertlite
from bertlite import BertForSequenceClassification, BertModel, BertTokenizer, Embedder
from bertlite.checkpoint.files import Source
from bertlite.models import heads
from bertlite.models.remote import AUTO_CLASSES
from bertlite.shipping.card import Figure
from bertlite.shipping.folder import write_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save(tmp_path_factory.mktemp("source") / "model", BertForSequenceClassification, num_labels=3)


@pytest.fixture
def pruned(source):
    model = bertlite.prune_heads(BertForSequenceClassification.from_pretrained(source), PRUNED["pruned_heads"])
    return bertlite.prune_neurons(model, PRUNED["pruned_neurons"])


def test_the_tokenizer_neither_truncates_nor_pads_and_says_how_long_texts_may_be(source, pruned, tmp_path):
    assert read(source / "tokenizer.json")["truncation"] is not None
    write_model(tmp_path / "out", pruned, source)
    values = read(tmp_path / "out" / "tokenizer.json")
    assert values == {**read(source / "tokenizer.json"), "truncation": None, "padding": None}
    assert read(tmp_path / "out" / "tokenizer_config.json")["model_max_length"] == 40
    ids = [BertTokenizer.from_pretrained(path).encode("a b c d e f g h i j k") for path in (source, tmp_path / "out")]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 13


@pytest.mark.parametrize(
    ("stated", "longest"), [(10**30, 40), (17, 17), (None, 40)], ids=["unlimited", "shorter", "not stated"]
)
def test_the_longest_text_fits_the_positions(source, pruned, tmp_path, stated, longest):
    copy = save(tmp_path / "source")
    settings = read(copy / "tokenizer_config.json")
    settings = {**settings, "model_max_length": stated, "name_or_path": "/home/me/model"}
    (copy / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    write_model(tmp_path / "out", pruned, copy)
    found = read(tmp_path / "out" / "tokenizer_config.json")
    assert found["model_max_length"] == longest
    assert "name_or_path" not in found


def test_a_tokenizer_without_its_config_gets_one_and_an_old_one_its_json(pruned, tmp_path):
    bare = save(tmp_path / "bare")
    (bare / "tokenizer_config.json").unlink()
    write_model(tmp_path / "a", pruned, bare)
    found = read(tmp_path / "a" / "tokenizer_config.json")
    assert found["tokenizer_class"] == "BertTokenizer"
    assert (found["cls_token"], found["mask_token"], found["do_lower_case"]) == ("[CLS]", "[MASK]", True)
    old = save(tmp_path / "old")
    (old / "tokenizer.json").unlink()
    write_model(tmp_path / "b", pruned, old)
    found = [BertTokenizer.from_pretrained(tmp_path / name).encode("a bcd e") for name in ("a", "b", "bare")]
    assert found[0] == found[1] == found[2]
    (old / "vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json or vocab\.txt"):
        write_model(tmp_path / "c", pruned, old)
    assert not (tmp_path / "c").exists()


def test_labels_have_the_names_of_the_data_unless_the_model_has_its_own(source, pruned, tmp_path):
    names = ["bad", "so-so", "good"]
    write_model(tmp_path / "out", pruned, source, class_names=names)
    config = read(tmp_path / "out" / "config.json")
    assert config["id2label"] == {"0": "bad", "1": "so-so", "2": "good"}
    assert config["label2id"] == {"bad": 0, "so-so": 1, "good": 2}
    assert pruned.config.id2label[0] == "LABEL_0"
    own = BertForSequenceClassification.from_pretrained(tmp_path / "out")
    write_model(tmp_path / "again", own, source, class_names=["x", "y", "z"])
    assert read(tmp_path / "again" / "config.json")["id2label"] == config["id2label"]
    with pytest.raises(ValueError, match="there are 2 class names, and the head has 3 outputs"):
        write_model(tmp_path / "two", pruned, source, class_names=["bad", "good"])
    with pytest.raises(ValueError, match="the class names bad, good, bad are not all different"):
        write_model(tmp_path / "two", pruned, source, class_names=["bad", "good", "bad"])
    assert not (tmp_path / "two").exists()


# The card and the report ---------------------------------------------------------------------------------------------


def card_of(folder: Path) -> Any:
    from huggingface_hub import ModelCard

    return ModelCard.load(folder / "README.md")


def test_the_hub_reads_the_card(source, pruned, tmp_path):
    figures = [Figure("accuracy", 0.91, 0.89, 0.93, "872 examples of dev.tsv", 0.925), Figure("mcc", 0.5)]
    write_model(tmp_path / "out", pruned, source, figures=figures, how=["Half of it was removed."])
    card = card_of(tmp_path / "out")
    assert card.data.to_dict() == {
        "base_model": "someone/dense",
        "language": "en",
        "library_name": "bertlite",
        "license": "apache-2.0",
        "pipeline_tag": "text-classification",
        "tags": ["bert", "bertlite", "pruned"],
    }
    assert "| accuracy | 0.91 | 0.89 to 0.93, over 872 examples of dev.tsv | 0.925 |" in card.text
    assert "| mcc | 0.5 |  |  |" in card.text
    assert "| 0 | 2 of 4 | 1, 3 | 37 of 37 |" in card.text
    assert "| 2 | 0 of 4 | 0, 1, 2, 3 | 35 of 37 |" in card.text
    assert "Half of it was removed." in card.text
    assert "AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)" in card.text
    report = read(tmp_path / "out" / "report.json")
    assert (report["heads_kept"], report["neurons_kept"]) == ([2, 4, 0], [37, 0, 35])
    assert (report["figures"][0]["dense"], report["base_model"]) == (0.925, "someone/dense")


def test_a_source_without_a_card_or_with_a_broken_one_is_no_fault(pruned, tmp_path):
    bare = save(tmp_path / "bare")
    (bare / "README.md").write_text("---\n: [\n---\n")
    with pytest.warns(UserWarning, match=r"README\.md has no readable YAML at its top .*license is left out"):
        write_model(tmp_path / "a", pruned, bare)
    (bare / "README.md").unlink()
    write_model(tmp_path / "b", pruned, bare)
    for name in "ab":
        assert "base_model" not in card_of(tmp_path / name).data.to_dict()
        assert "license" not in card_of(tmp_path / name).data.to_dict()


@pytest.mark.parametrize("base", [5, ["a/b", 7], {"name": "a/b"}, "/home/me/model", "a\n# b"])
def test_a_base_model_that_is_no_hub_id_is_left_out_with_a_warning(base, source, pruned, tmp_path):
    copy = save(tmp_path / "source")
    (copy / "README.md").write_text(f"---\nlicense: mit\nbase_model: {json.dumps(base)}\n---\n")
    with pytest.warns(UserWarning, match=r"README\.md: its base_model .* is not a hub id and is left out"):
        write_model(tmp_path / "out", pruned, copy)
    found = card_of(tmp_path / "out").data.to_dict()
    assert found["license"] == "mit"
    assert found.get("base_model") == ("a/b" if base == ["a/b", 7] else None)
    with pytest.raises(ValueError, match=r"base_model is '/home/me'; give the name of a repository on the hub"):
        write_model(tmp_path / "new", pruned, source, base_model="/home/me")
    assert not (tmp_path / "new").exists()


def test_what_a_card_is_told_is_shown_as_it_is_and_nan_is_null(source, pruned, tmp_path):
    over = "9 examples of a|b\n# c_d_<script>.tsv"
    figures = [Figure("accuracy", float("nan"), over=over, low=0.0, high=float("inf"))]
    how = ["It was fine-tuned on x\n\n## y | [z](http://z)."]
    write_model(tmp_path / "out", pruned, source, figures=figures, how=how, report={"loss": [float("-inf"), 0.5]})
    text = card_of(tmp_path / "out").text
    assert "| accuracy | nan | 0 to inf, over 9 examples of a\\|b # c\\_d\\_\\<script\\>.tsv |  |\n" in text
    assert "with bertlite. It was fine-tuned on x ## y \\| \\[z\\](http://z).\n" in text
    report = json.loads((tmp_path / "out" / "report.json").read_text(), parse_constant=pytest.fail)
    assert report["figures"] == [{"name": "accuracy", "value": None, "low": 0.0, "high": None, "over": over}]
    assert report["loss"] == [None, 0.5]


def test_a_folder_is_replaced_whole_and_keeps_what_is_not_of_a_model(source, pruned, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write_model(out, pruned, source)
    (out / "notes.txt").write_text("mine")
    (out / "onnx").mkdir()
    (out / "onnx" / "model.onnx").write_text("of the old weights")
    before = {path.name for path in out.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("bertlite.shipping.folder.make_card", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_model(out, make(BertModel), source)
    assert {path.name for path in out.iterdir()} == before
    assert read(out / "report.json")["class"] == "BertForSequenceClassification"
    write_model(out, make(BertModel).float(), source)
    left = {path.name for path in out.iterdir()}
    assert "notes.txt" in left
    assert not left & {"onnx", "modeling_bertlite.py"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# sentence-transformers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["", "0_Transformer"])
def test_pooling_comes_along_with_a_model_without_a_head(tmp_path, first):
    source = add_pooling(save(tmp_path / "source"), first)
    model = bertlite.prune_heads(BertModel.from_pretrained(source), {0: [1]})
    out = write_model(tmp_path / "out", model, source)
    assert [module["path"] for module in read(out / "modules.json")] == ["", "1_Pooling", "2_Normalize"]
    for name in ("1_Pooling/config.json", "config_sentence_transformers.json"):
        assert read(out / name) == read(source / name)
    assert read(out / "sentence_bert_config.json")["max_seq_length"] == 24
    modules = Embedder(out).settings["modules"]
    assert "'mean'" in modules["1"]
    assert modules["2"].startswith("Normalize(")
    assert card_of(out).data.pipeline_tag == "sentence-similarity"
    assert "sentence-transformers" in card_of(out).data.tags
    headed = write_model(tmp_path / "headed", make(BertForSequenceClassification).float(), source)
    assert not (headed / "modules.json").exists()


def test_pooling_comes_along_from_the_hub_whose_id_is_the_base_model(tmp_path):
    source = add_pooling(save(tmp_path / "source"))
    in_hub_cache(source, tmp_path / "hub", "someone/else")
    place = Source("someone/else", cache_dir=tmp_path / "hub", local_files_only=True)
    out = write_model(tmp_path / "out", BertModel.from_pretrained(source), place)
    for name in ("1_Pooling/config.json", "modules.json"):
        assert read(out / name) == read(source / name)
    assert (card_of(out).data.library_name, card_of(out).data.base_model) == ("sentence-transformers", "someone/else")
    write_model(out, BertModel.from_pretrained(source), source, base_model="a/b")
    assert card_of(out).data.base_model == "a/b"


@pytest.mark.parametrize("path", ["../../elsewhere", "/etc"])
def test_modules_outside_the_folder_are_refused(tmp_path, path):
    source = add_pooling(save(tmp_path / "source"))
    (source / "modules.json").write_text(json.dumps([{"path": path, "type": "x.Pooling"}]))
    with pytest.raises(ValueError, match="points outside its folder"):
        write_model(tmp_path / "out", make(BertModel).float(), source)
    (source / "modules.json").write_text("[{")
    with pytest.raises(ValueError, match=r"modules\.json is damaged"):
        write_model(tmp_path / "out", make(BertModel).float(), source)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.clients
def test_sentence_transformers_loads_a_pruned_folder(tmp_path):
    pytest.importorskip("sentence_transformers")
    source = add_pooling(save(tmp_path / "source"))
    model = bertlite.prune_heads(BertModel.from_pretrained(source), PRUNED["pruned_heads"])
    out = write_model(tmp_path / "out", model, source)
    code = f"""
import json
from sentence_transformers import SentenceTransformer
model = SentenceTransformer({str(out)!r}, trust_remote_code=True, device="cpu")
vectors = model.encode(["a b c", "d " * 30])
json.dump([type(model[0].auto_model).__module__, model.max_seq_length, vectors.tolist()], open("seen.json", "w"))
"""
    done = elsewhere(code, tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    module, longest, vectors = read(tmp_path / "seen.json")
    assert (module, longest) == ("bertlite.hf.modeling", 24)
    exactly: dict[str, Any] = {"backend": "plain", "dtype": "float64"}
    ours, exact = (Embedder(out, **options).encode(["a b c", "d " * 30]) for options in ({}, exactly))
    assert_near(*({"vectors": torch.tensor(each)} for each in (ours, vectors, exact)))


# Code for transformers -----------------------------------------------------------------------------------------------

REMOTE = """
import json, os, sys, torch, transformers
seen = {}
for name, auto, folder, inputs in json.loads(sys.argv[1]):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        out = model(**{key: torch.tensor(value) for key, value in inputs.items()})
    seen[name] = [type(model).__module__, type(model).__name__, tokenizer.model_max_length, out[0].tolist()]
json.dump(seen, open("seen.json", "w"))
os.chdir(folder)
exec(sys.argv[2])
assert type(model).__module__ == "bertlite.hf.modeling"
"""


def elsewhere(code: str, folder: Path, cache: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run code in a folder, in a process that knows nothing of bertlite, and reaches nothing."""
    environ = {**os.environ, "HF_MODULES_CACHE": str(cache / "modules"), "HF_HUB_OFFLINE": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_transformers_loads_every_pruned_head_with_trust_and_the_code_of_the_card_runs(tmp_path):
    pytest.importorskip("transformers")
    asked, wanted = [], {}
    for auto, name in AUTO_CLASSES.items():
        if name == "BertLMHeadModel" or auto in ("AutoModelWithLMHead", "AutoModelForTextEncoding"):
            continue  # a decoder; another name for a class that is here
        cls = BertModel if name == "BertModel" else getattr(heads, name)
        source = save(tmp_path / f"source-{name}", cls)
        model = bertlite.prune_heads(cls.from_pretrained(source), PRUNED["pruned_heads"])
        write_model(tmp_path / name, model, source)
        ids = torch.arange(5, 17).reshape((1, 2, 6) if name == "BertForMultipleChoice" else (2, 6))
        inputs = {"input_ids": ids, "attention_mask": (ids % 6 != 4).long()}
        with torch.no_grad():
            wanted[name] = model(**inputs).to_tuple()[0]
        asked.append((name, auto, str(tmp_path / name), {key: value.tolist() for key, value in inputs.items()}))
    assert len(asked) == 8
    code = "\n".join(part.partition("```")[0] for part in card_of(tmp_path / name).text.split("```python\n")[1:])
    assert "from transformers import" in code
    done = elsewhere(REMOTE, tmp_path, tmp_path, json.dumps(asked), code)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = read(tmp_path / "seen.json")
    for name, out in wanted.items():
        module, cls, longest, values = seen[name]
        assert (module, cls, longest) == ("bertlite.hf.modeling", name, 40)
        torch.testing.assert_close(torch.tensor(values), out, rtol=0, atol=1e-5)  # sdpa there, "auto" here: float32
