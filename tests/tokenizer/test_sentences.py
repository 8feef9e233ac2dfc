"""Texts become ids as sentence-transformers and transformers make them of the same folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import SIZES, set_entries

from bertlite import BertConfig, BertModel, BertTokenizer
from bertlite.runtime.processing import Processing
from tests.shipping.worlds import add_pooling

transformers = pytest.importorskip("transformers")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Paris", "paris", "rain", "in", "is", "query", ":", "ς", "σ"]
WORDS += ["it", ".", "'", "s", "n't"]
TEXTS = ["Paris is in rain", "RAIN [MASK] it", "", "rain " * 30, "Σ ς query"]


def write(folder: Path, name: str, values: Any) -> None:
    (folder / name).write_text(json.dumps(values), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    BertModel(BertConfig(**{**SIZES, "vocab_size": len(WORDS)})).save_pretrained(tmp_path)
    BertTokenizer(WORDS, do_lower_case=False).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("inner", ["", "0_Transformer"])
def test_prompts_length_and_lower_case_are_those_of_sentence_transformers(inner, lower, folder):
    library = pytest.importorskip("sentence_transformers")
    (folder / inner).mkdir(exist_ok=True)
    for path in [*folder.glob("*.*")] if inner else []:
        path.rename(folder / inner / path.name)
    add_pooling(folder, inner)
    set_entries(folder / inner / "tokenizer_config.json", truncation_side="left")
    write(folder / inner, "sentence_bert_config.json", {"max_seq_length": 9, "do_lower_case": lower})
    prompts: dict[str, Any] = {"prompts": {"query": "Query: ", "": ""}, "default_prompt_name": "query"}
    write(folder, "config_sentence_transformers.json", prompts)
    stock, ours = library.SentenceTransformer(str(folder), device="cpu"), BertTokenizer.from_pretrained(folder)
    assert ours.sentences.prompts.items() >= prompts["prompts"].items()
    assert (ours.sentences.max_length, ours.text_settings["truncation_side"]) == (9, "left")
    before = ours.backend_tokenizer.to_str()
    for text in TEXTS:
        for prompt in (None, ""):
            wanted = stock.preprocess([text], prompt=ours.sentences.prompt() if prompt is None else prompt)
            got = ours.encode_texts([text], ours.sentences.max_length, prompt=prompt, return_tensors="pt")
            assert got["input_ids"].tolist() == wanted["input_ids"].tolist(), text
    assert ours.backend_tokenizer.to_str() == before
    pair, prompt = ours.encode_texts([("rain", "it")])["input_ids"], ours.sentences.prompt()
    with_prompt = (prompt.lower() if lower else prompt) + "rain"
    assert pair == ours([(with_prompt, "it")])["input_ids"]
    assert json.loads(json.dumps(ours.text_settings)) == ours.text_settings


def test_settings_have_the_names_and_the_files_of_every_version(folder):
    """The first file counts; the tokenizer's arguments count more; the last of two modules of one name counts."""
    kinds = {"": "Dense", "body": "Transformer"}
    modules = [
        {"name": "0", "path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()
    ]
    write(folder, "modules.json", modules)
    (folder / "body").mkdir()
    write(folder / "body", "sentence_xlnet_config.json", {"max_seq_length": 7})
    assert BertTokenizer.from_pretrained(folder).sentences == Processing(max_length=7)
    arguments = {"model_max_length": 5, "truncation_side": "left", "padding_side": "left"}
    write(folder / "body", "sentence_albert_config.json", {"max_seq_length": 9, "tokenizer_args": arguments})
    tokenizer = BertTokenizer.from_pretrained(folder)
    assert tokenizer.sentences == Processing(max_length=5, truncation_side="left")
    assert tokenizer.encode_texts(["rain in Paris is it"], 5)["input_ids"] == tokenizer(["Paris is it"])["input_ids"]
    assert tokenizer(["rain in Paris"], truncation=True, max_length=4) == tokenizer(["rain in"])
    write(folder / "body", "sentence_bert_config.json", {"max_seq_length": 999, "config_args": {"hidden_act": "relu"}})
    tokenizer = BertTokenizer.from_pretrained(folder)
    assert tokenizer.sentences.max_length == SIZES["max_position_embeddings"], "the most that the model takes"
    with pytest.raises(
        ValueError, match=r"sentence_bert_config\.json has config_kwargs.hidden_act='relu', which only se"
    ):
        tokenizer.encode_texts(["rain"])
    assert tokenizer(["rain"])["input_ids"] == [[2, 7, 3]]


def test_without_modules_there_are_no_settings_of_sentence_transformers(folder):
    write(folder, "config_sentence_transformers.json", {"prompts": {"a": "query"}, "default_prompt_name": "a"})
    write(folder, "sentence_bert_config.json", {"max_seq_length": 9, "do_lower_case": True})
    assert BertTokenizer.from_pretrained(folder).sentences == Processing()


KINDS = ("BertTokenizerFast", "DistilBertTokenizer", "ElectraTokenizer", "RobertaTokenizer", "MPNetTokenizer")


@pytest.mark.skipif(transformers.__version__ < "5", reason="in 4 PreTrainedTokenizerFast makes token types")
@pytest.mark.parametrize("kind", [None, *KINDS, "PreTrainedTokenizerFast", "OfNobody"])
@pytest.mark.parametrize("model", ["bert", "electra", "roberta", "mpnet"])
def test_the_inputs_are_those_of_the_class_that_is_named(model, kind, folder):
    write(folder, "config.json", {"model_type": model})
    write(folder, "tokenizer_config.json", {"tokenizer_class": kind} if kind else {})
    stock, ours = transformers.AutoTokenizer.from_pretrained(folder), BertTokenizer.from_pretrained(folder)
    assert ours.model_input_names == stock.model_input_names
    assert ours(["a b"], ["c"]).keys() == stock(["a b"], ["c"]).keys()
    ours.save_pretrained(folder / "again")
    assert BertTokenizer.from_pretrained(folder / "again").model_input_names == stock.model_input_names


@pytest.mark.parametrize("kind", ["BertTokenizer", "MPNetTokenizer"])
@pytest.mark.parametrize("stated", [{}, {"do_lower_case": False}, {"do_lower_case": True, "strip_accents": False}])
def test_tokenizer_config_decides_upon_lower_case_whatever_tokenizer_json_says(kind, stated, folder):
    if kind == "MPNetTokenizer":
        stated |= {role: f"[{role[:3].upper()}]" for role in ("cls_token", "sep_token", "pad_token", "unk_token")}
        stated |= {"mask_token": "[MASK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    write(folder, "tokenizer_config.json", {"tokenizer_class": kind, **stated})
    stock, ours = transformers.AutoTokenizer.from_pretrained(folder), BertTokenizer.from_pretrained(folder)
    assert [ours(text)["input_ids"] for text in TEXTS] == [stock(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize("cleans", [True, False])
def test_decoded_texts_are_cleaned_where_the_config_says_so(cleans, folder):
    write(folder, "tokenizer_config.json", {"do_lower_case": True, "clean_up_tokenization_spaces": cleans})
    stock, ours = transformers.BertTokenizerFast.from_pretrained(folder), BertTokenizer.from_pretrained(folder)
    ids = ours("paris ' s rain . it is n't in it ' in 's")["input_ids"]
    assert ours.decode(ids) == stock.decode(ids)
    assert ("paris's rain." in ours.decode(ids)) == cleans
