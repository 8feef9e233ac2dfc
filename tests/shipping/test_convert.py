"""`bertlite convert` writes a checkpoint of another family as a BERT's, and says how far it is from transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from worlds import PRUNED, WORDS, add_pooling, make_cross_encoder
from worlds import save as write

from bertlite import BertModel, BertTokenizer
from bertlite.cli import main
from bertlite.opened.inspection import inspect
from bertlite.shipping import convert as module
from bertlite.shipping.convert import convert

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": len(WORDS), "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
COUNTED = {**SIZES, "intermediate_size": 37, "max_position_embeddings": 42}
SPECIAL_IDS = [f"{role}_token_id" for role in ("pad", "bos", "eos", "cls", "sep")]
DISTIL = {"vocab_size": len(WORDS), "dim": 48, "n_layers": 2, "n_heads": 3, "hidden_dim": 37}


def save(folder: Path, name: str, **sizes: Any) -> Path:
    """Save a random model of transformers, with a tokenizer."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    cls(cls.config_class(**sizes)).save_pretrained(folder)
    BertTokenizer(WORDS, model_max_length=40).save_pretrained(folder)
    return folder


def test_what_transformers_computes_alike_it_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = save(tmp_path / "source", "RobertaForMaskedLM", **COUNTED), tmp_path / "out"
    assert main(["convert", str(source), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"{out}: BertForMaskedLM, from a 'roberta' checkpoint" in printed
    assert "largest difference from transformers' roberta: " in printed
    assert "largest difference from transformers' BERT that loads the result: " in printed
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["max_position_embeddings"]) == ("bert", 40)
    assert "auto_map" not in config
    for told in ("library_name: transformers", "With transformers, with padding on the right"):
        assert told in (out / "README.md").read_text()
    words, others = (BertTokenizer.from_pretrained(each)("a b").input_ids for each in (out, source))
    assert words == others
    ids = torch.randint(5, len(WORDS), (2, 9))
    stock = transformers.AutoModelForMaskedLM.from_pretrained(out).eval()
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(source).eval()
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("DistilBertForSequenceClassification", DISTIL),
        ("MPNetModel", COUNTED),
        ("MegatronBertModel", COUNTED),
        ("ModernBertModel", COUNTED | dict.fromkeys(SPECIAL_IDS, 0)),
        ("NomicBertModel", COUNTED),
    ],
    ids=str,
)
def test_what_it_would_compute_otherwise_brings_its_code(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    source, out = save(tmp_path / "source", name, **sizes), tmp_path / "out"
    found = convert(source, out)
    assert list(found["differences"]) == [f"transformers' {found['model_type']}"]
    assert max(found["differences"].values()) < 1e-12
    assert "refuses it" in found["notes"][0]
    assert json.loads((out / "config.json").read_text())["auto_map"]
    assert "transformers' own BERT would compute something else" in (out / "README.md").read_text()
    with pytest.raises(KeyError, match=r"load this model with bertlite, it is no plain BERT; bertlite:(gelu|silu)"):
        getattr(transformers, found["class"]).from_pretrained(out)
    assert inspect(out)["transformers 5"]["outcome"] == "fails"
    again = convert(out, tmp_path / "again")  # there is nothing to compare it with
    assert (again["differences"], "refuses it" in again["notes"][0]) == ({}, True)


def test_pooling_is_carried_and_a_pooler_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    source = add_pooling(save(tmp_path / "source", "XLMRobertaForMaskedLM", **COUNTED))
    found = convert(source, tmp_path / "out")
    assert found["class"] == "BertModel"
    assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file()
    names = BertModel.from_pretrained(tmp_path / "out", add_pooling_layer=False).state_dict()
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == names.keys()


def test_a_model_in_the_folder_of_its_module_is_read(tmp_path: Path) -> None:
    """As sentence-transformers laid it out in 2019, with a class of its own for each family."""
    old, out = tmp_path / "old", tmp_path / "out"
    save(old / "0_BERT", "BertModel", **COUNTED)
    add_pooling(old, "0_BERT")
    modules = json.loads((old / "modules.json").read_text())
    modules[0]["type"] = "sentence_transformers.models.BERT"
    (old / "modules.json").write_text(json.dumps(modules))
    assert main(["inspect", str(old)]) == 0
    assert convert(old, out)["differences"]
    kinds = [module["type"].split(".")[-1] for module in json.loads((out / "modules.json").read_text())]
    assert kinds == ["Transformer", "Pooling", "Normalize"]
    assert BertTokenizer.from_pretrained(out).sentences == BertTokenizer.from_pretrained(old).sentences
    assert BertTokenizer.from_pretrained(old).sentences.max_length == 24
    for folder in (old, out):
        with pytest.raises(ValueError, match=f"{folder} would be replaced, and {folder} is read: name another out"):
            convert(folder, folder)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert", "Electra", "XLMRoberta"])
def test_a_cross_encoder_keeps_its_head_and_its_modules(kind: str, tmp_path: Path) -> None:
    sizes = DISTIL if kind == "DistilBert" else COUNTED
    source = make_cross_encoder(save(tmp_path / "source", f"{kind}ForSequenceClassification", **sizes, num_labels=1))
    found, out = convert(source, tmp_path / "out"), tmp_path / "out"
    assert found["class"] == "BertForSequenceClassification"
    assert found["differences"], "logits were compared"
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        assert json.loads((out / name).read_text()) == json.loads((source / name).read_text())


HEADS_OF_DEBERTA = ("QuestionAnswering", "SequenceClassification", "TokenClassification", "MultipleChoice", "MaskedLM")


@pytest.mark.parametrize(
    "name",
    [
        "ElectraForQuestionAnswering",
        "RobertaForMultipleChoice",
        "ModernBertForSequenceClassification",
        "ModernBertForQuestionAnswering",
        *(f"DebertaV2For{head}" for head in HEADS_OF_DEBERTA),
    ],
)
def test_other_heads_are_compared(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "R": COUNTED,
        "E": {**COUNTED, "embedding_size": 24},
        # Random tokens, as its tokenizer does not fit: their padding is longer than a window.
        "M": {**COUNTED, **dict.fromkeys(SPECIAL_IDS, 0), "local_attention": 4, "vocab_size": 9},
        "D": {**COUNTED, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0},
    }[name[0]]
    found = convert(save(tmp_path / "source", name, **sizes), tmp_path / "out")
    assert max(found["differences"].values()) < 1e-12


def test_what_differs_is_not_written(tmp_path, monkeypatch, capsys):
    source, out = save(tmp_path / "source", "RobertaModel", **COUNTED), tmp_path / "out"
    monkeypatch.setattr(module, "ALLOWED", -1.0)
    assert main(["convert", str(source), "--out", str(out)]) == 2
    assert "differ by" in capsys.readouterr().err
    assert not out.exists()


def test_a_pruned_checkpoint_becomes_one_that_every_loader_of_bert_reads(tmp_path: Path) -> None:
    source, out = add_pooling(write(tmp_path / "source", **PRUNED)), tmp_path / "out"
    assert main(["convert", str(source), "--full", "--out", str(out)]) == 0
    ids = torch.randint(5, len(WORDS), (2, 9))
    with torch.no_grad():
        wanted = BertModel.from_pretrained(source)(ids).last_hidden_state
        got = transformers.BertModel.from_pretrained(out).eval()(ids).last_hidden_state
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert not (out / "modeling_bertlite.py").exists()
    assert (out / "1_Pooling" / "config.json").is_file()
    assert json.loads((out / "report.json").read_text())["heads_kept"] == [2, 4, 0], "the card says what is gone"
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    card = (out / "README.md").read_text()
    for told in ("are back in place, with weights of zero", "- pruned\n", "| 0 | 2 of 4 | 1, 3 |"):
        assert told in card
    assert "trust_remote_code" not in card
