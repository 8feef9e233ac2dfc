"""notebooks/bert_on_one_page.py computes what the stack does, and stays one page."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EXACT, F64, assert_same, make, make_batch
from safetensors.torch import load_file, save_file

from bertlite import BertConfig, BertForPreTraining, BertModel
from bertlite.parity.command import demo_checkpoint

PAGE = Path(__file__).resolve().parents[1] / "notebooks" / "bert_on_one_page.py"


def on_one_page(folder: Path, batch: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(runpy.run_path(str(PAGE))["load"](folder).double()(**batch))


def in_the_stack(folder: Path, batch: dict[str, Any]) -> list[torch.Tensor]:
    model = BertModel.from_pretrained(folder, dtype=F64, attn_implementation="eager")
    with torch.no_grad():
        out = model(**batch)
    return [out.last_hidden_state, out.pooler_output]


def test_equals_the_stack_on_trained_weights() -> None:
    folder = demo_checkpoint()
    if folder is None:
        pytest.skip("no trained checkpoint is installed")
    batch = make_batch(3, lengths=(11, 4, 1))
    batch["token_type_ids"] %= 2  # of the segments that were trained
    assert_same(on_one_page(folder, batch), in_the_stack(folder, batch), EXACT)


def test_equals_the_stack_with_the_names_of_bert_base_uncased(tmp_path: Path) -> None:
    """That file has its pre-training heads, `bert.` before the names of BERT, and gamma and beta in a LayerNorm."""
    make(BertForPreTraining).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(file)
    for name in list(tensors):
        if (end := ".".join(name.split(".")[-2:])) in old:
            tensors[name.removesuffix(end) + old[end]] = tensors.pop(name)
    assert any(name.startswith("cls.") for name in tensors)
    assert "bert.embeddings.LayerNorm.gamma" in tensors
    save_file(tensors, file, metadata={"format": "pt"})
    batch = make_batch(3, lengths=(11, 4, 1))
    assert_same(on_one_page(tmp_path, batch), in_the_stack(tmp_path, batch), EXACT)


def test_refuses_what_it_does_not_compute(tmp_path: Path) -> None:
    make(BertModel, BertConfig(hidden_act="relu", num_hidden_layers=1, vocab_size=9)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"hidden_act is 'relu'; .* bertlite\.BertModel"):
        on_one_page(tmp_path, make_batch())


def test_prints_a_vector_and_is_one_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    source = PAGE.read_text(encoding="utf-8")
    assert source.count("\n") <= 130
    assert "import bertlite" not in source
    assert "from bertlite" not in source
    folder = demo_checkpoint()
    if folder is None:
        pytest.skip("no trained checkpoint is installed")
    monkeypatch.setattr("sys.argv", [str(PAGE), str(folder)])
    runpy.run_path(str(PAGE), run_name="__main__")
    assert capsys.readouterr().out.startswith("[CLS] [0.176")
