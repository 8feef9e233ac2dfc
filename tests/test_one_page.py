"""notebooks/bert_on_one_page.py computes what the stack does, and stays one page."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from conftest import EXACT, F64, assert_same, make, make_batch
from safetensors.torch import load_file, save_file

from bertlite import (
    BertForPreTraining,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    prune_heads,
)
from bertlite.parity.command import demo_checkpoint

PAGE = Path(__file__).resolve().parents[1] / "notebooks" / "bert_on_one_page.py"


@pytest.mark.parametrize("cls", [BertForPreTraining, BertForSequenceClassification])
def test_equals_the_stack_with_the_names_of_bert_base_uncased(cls, tmp_path):
    """That file has heads, `bert.` before the names of BERT, and gamma and beta in a LayerNorm."""
    make(cls).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(file)
    for name in list(tensors):
        if (end := ".".join(name.split(".")[-2:])) in old:
            tensors[name.removesuffix(end) + old[end]] = tensors.pop(name)
    assert any(name.startswith("cls.") or "classifier" in name for name in tensors)
    assert "bert.embeddings.LayerNorm.gamma" in tensors
    save_file(tensors, file, metadata={"format": "pt"})
    batch = make_batch(3, lengths=(11, 4, 1))
    with torch.no_grad():
        found = list(runpy.run_path(str(PAGE))["load"](tmp_path).double()(**batch))
        wanted = BertModel.from_pretrained(tmp_path, dtype=F64, attn_implementation="eager")(**batch)
    assert_same(found, [wanted.last_hidden_state, wanted.pooler_output], EXACT)


@pytest.mark.parametrize("tied", [True, False])
def test_fills_the_mask_with_the_words_of_the_stack(tied, tmp_path, monkeypatch, capsys):
    model = make(BertForPreTraining, vocab_size=3100, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("".join(f"w{i}\n" for i in range(3100)), encoding="utf-8")
    ids = torch.tensor([[101, 1996, 3007, 1997, 2605, 2003, 103, 1012, 102]])
    with torch.no_grad():
        page = runpy.run_path(str(PAGE))["load"](tmp_path).double()
        states, _ = page(ids, torch.ones_like(ids), torch.zeros_like(ids))
        wanted = model(ids).prediction_logits
        assert_same(page.cls.predictions(states), wanted, EXACT)
    monkeypatch.setattr("sys.argv", [str(PAGE), str(tmp_path)])
    runpy.run_path(str(PAGE), run_name="__main__")
    best = ", ".join(f"w{i}" for i in wanted[0, 6].topk(5).indices.tolist())
    assert f"the capital of france is {best}." in capsys.readouterr().out


def test_prunes_a_head_as_the_stack_does(tmp_path):
    model = make(BertModel)
    model.save_pretrained(tmp_path)
    page, batch = runpy.run_path(str(PAGE)), make_batch(3, lengths=(11, 4, 1))
    bert = page["load"](tmp_path).double()
    for head in (2, 0):  # the second is numbered among those that are left
        page["prune_head"](bert.encoder.layer[1], head)
    with torch.no_grad():
        wanted = prune_heads(model, {1: [0, 2]})(**batch)
        assert_same(list(bert(**batch)), [wanted.last_hidden_state, wanted.pooler_output], EXACT)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "No such file"),
        (lambda: prune_heads(make(), {0: [1]}), "pruned_heads is {'0': "),
        (lambda: make(BertForTokenClassification), r"it lacks pooler\.dense\.bias and 1"),
        (lambda: make(position_embedding_type="relative_key"), "relative_key"),
        (lambda: make(hidden_act="relu"), r"hidden_act is 'relu'; .* bertlite\.BertModel"),
    ],
    ids=["no folder", "pruned", "without a pooler", "other positions", "another activation"],
)
def test_a_folder_that_it_cannot_read_gets_a_line(made, message, tmp_path, monkeypatch):
    if made:
        made().save_pretrained(tmp_path / "folder")
    monkeypatch.setattr("sys.argv", [str(PAGE), str(tmp_path / "folder")])
    with pytest.raises(SystemExit, match=message) as ended:
        runpy.run_path(str(PAGE), run_name="__main__")
    assert "\n" not in str(ended.value)


def test_prints_a_vector_and_is_one_page(monkeypatch, capsys):
    source = PAGE.read_text(encoding="utf-8")
    assert source.count("\n") <= 180
    assert "import bertlite" not in source
    assert "from bertlite" not in source
    folder = demo_checkpoint()
    if folder is None:
        pytest.skip("no trained checkpoint is installed")
    monkeypatch.setattr("sys.argv", [str(PAGE), str(folder)])
    runpy.run_path(str(PAGE), run_name="__main__")
    vector, _, mask, moved = capsys.readouterr().out.splitlines()
    assert vector.startswith("[CLS] [-0.227")
    assert mask.startswith("[MASK] stays: this checkpoint has no head for masked words")
    assert 0 < float(re.fullmatch(r"without head 0 of layer 0, \[CLS\] moves by (.+)%", moved)[1]) < 20


def test_says_how_it_is_run(monkeypatch):
    monkeypatch.setattr("sys.argv", [str(PAGE)])
    with pytest.raises(SystemExit, match=r"^usage: python notebooks/bert_on_one_page\.py FOLDER"):
        runpy.run_path(str(PAGE), run_name="__main__")
