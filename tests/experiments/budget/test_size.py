"""`bertlite prune vocabulary`, and targets of size."""

import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SPECIAL, make

from bertlite import BertForMaskedLM, BertForSequenceClassification, BertTokenizer, prune_heads, prune_neurons
from bertlite.cli import main
from bertlite.commands import prune_vocabulary
from bertlite.experiments.budget import search
from bertlite.pruning.importance.allocation import UnitCosts
from bertlite.stack.positions import DISTANCES

LETTERS = [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
WORDS = ["good", "fine", "bad", "poor", "film", "plot", "the", "rare", "word"]
VOCAB = [*SPECIAL, *LETTERS, *WORDS]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a tiny classifier, a language model, their tokenizer, and texts."""
    folder = tmp_path_factory.mktemp("world")
    tokenizer = BertTokenizer(VOCAB)
    for cls in (BertForSequenceClassification, BertForMaskedLM):
        make(cls).float().save_pretrained(folder / cls.__name__)
        tokenizer.save_pretrained(folder / cls.__name__)
    texts = [f"the {WORDS[i % 4]} {WORDS[4 + i // 2 % 2]}" for i in range(40)]
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    (folder / "dev.txt").write_text("a good film\nthe rare word\nno plot\nrare film\n", encoding="utf-8")
    return folder


def command_of(world: Path, out: Path, *words: str, model: str = "BertForSequenceClassification") -> list[str]:
    action, *others = words
    return ["prune", action, *others, str(world / model), "--texts", str(world / "texts.txt"), "--out", str(out)]


def prune(world: Path, out: Path, *words: str, **model: str) -> Any:
    assert main(command_of(world, out, *words, **model)) == 0
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("cls", [BertForSequenceClassification, BertForMaskedLM])
def test_a_vocabulary_is_pruned_by_a_command(cls: Any, world: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "small"
    report = prune(world, out, "vocabulary", "--dev", str(world / "dev.txt"), model=cls.__name__)["vocabulary"]
    assert (report["tokens"], report["dense_tokens"], report["changed"]) == (len(VOCAB) - 2, len(VOCAB), 0.5)
    for size, folder in (("bytes", out), ("dense_bytes", world / cls.__name__)):
        assert report[size] == (folder / "model.safetensors").stat().st_size
    models = [cls.from_pretrained(folder) for folder in (world / cls.__name__, out)]
    tokenizers = [BertTokenizer.from_pretrained(folder) for folder in (world / cls.__name__, out)]
    kept, changed = (
        [t(texts, return_tensors="pt", padding=True) for t in tokenizers]
        for texts in (["a good film", "no plot"], ["the rare word", "rare film"])
    )
    with torch.no_grad():
        states = [m.base_model(**inputs).last_hidden_state for m, inputs in zip(models, kept, strict=True)]
        assert torch.equal(*states)
        if cls is BertForSequenceClassification:
            p, q = (m(**inputs).logits.log_softmax(-1) for m, inputs in zip(models, changed, strict=True))
            assert report["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
            assert report["agreement"] == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    printed = capsys.readouterr().out
    assert f"The vocabulary has {len(VOCAB) - 2} of {len(VOCAB)} tokens" in printed
    assert "50.0 % of 4 texts of dev.txt are cut into other tokens" in printed
    assert "50.0 % of 4 texts of dev.txt are cut into other tokens" in (out / "README.md").read_text(encoding="utf-8")
    transformers = pytest.importorskip("transformers")
    stock = transformers.AutoTokenizer.from_pretrained(out)
    assert stock("the rare film")["input_ids"] == tokenizers[1].encode("the rare film")


def test_from_python_a_vocabulary_is_pruned_as_by_the_command(world: Path, tmp_path: Path, capsys: Any) -> None:
    wanted = prune(world, tmp_path / "command", "vocabulary", "--dev", str(world / "dev.txt"))
    capsys.readouterr()
    texts, dev = ((world / f"{name}.txt").read_text(encoding="utf-8").splitlines() for name in ("texts", "dev"))
    path = world / "BertForSequenceClassification"
    found = prune_vocabulary(path, texts, tmp_path / "python", dev=dev)
    model, tokenizer = BertForSequenceClassification.from_pretrained(path), BertTokenizer.from_pretrained(path)
    of_loaded = prune_vocabulary(model, texts, tmp_path / "loaded", tokenizer=tokenizer, dev=dev)
    assert of_loaded["checkpoint"] is None
    assert of_loaded["vocabulary"] == found["vocabulary"]
    with pytest.raises(ValueError, match="a loaded model has no tokenizer of its own: give tokenizer too"):
        prune_vocabulary(model, texts, tmp_path / "no")
    assert not (tmp_path / "no").exists()
    assert capsys.readouterr().out == ""
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        for way in ("python", "loaded"):
            assert (tmp_path / way / name).read_bytes() == (tmp_path / "command" / name).read_bytes(), name
    assert {*found} < {*wanted}
    assert (found["texts"]["sha256"], found["texts"]["of"]) == (wanted["texts"]["sha256"], "those given")
    names = ("tokens", "changed", "kl", "bytes")
    assert [found["vocabulary"][name] for name in names] == [wanted["vocabulary"][name] for name in names]


def test_without_dev_texts_are_held_out_and_more_tokens_change_fewer(
    world: Path, tmp_path: Path, assert_refused: Any
) -> None:
    report = prune(world, tmp_path / "a", "vocabulary", "--tokens", str(len(VOCAB) - 1))["vocabulary"]
    assert (report["tokens"], report["changed"]) == (len(VOCAB) - 1, 0.0)
    assert report["judged on"] == "8 texts held out of texts.txt"
    assert "kl" not in report
    assert "rare" in BertTokenizer.from_pretrained(tmp_path / "a").get_vocab()
    assert_refused("is there already: name another folder", *command_of(world, tmp_path / "a", "vocabulary"))


# A target of size


@pytest.mark.parametrize("kind", DISTANCES)
def test_a_unit_costs_the_bytes_of_its_weights(kind: str) -> None:
    model = make(position_embedding_type=kind, gated=kind.startswith("rotary")).bfloat16()
    unit = UnitCosts.bytes(model)
    heads, neurons = prune_heads(model, {1: [2]}), prune_neurons(model, {0: [5]})
    for smaller, cost in ((heads, unit.heads[1]), (neurons, unit.neuron)):
        assert 2 * (model.num_parameters() - smaller.num_parameters()) == cost


def test_a_checkpoint_is_pruned_to_a_size(world: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(search, "CLOCK_ROUNDS", 7)
    dense = (world / "BertForSequenceClassification" / "model.safetensors").stat().st_size
    for words, allowed in ((["150kB"], 150_000), (["60%", "--size", "--vocabulary"], 0.6 * dense)):
        out = tmp_path / words[0]
        report = prune(world, out, "to", *words, "--at", "1x16")
        size = (out / "model.safetensors").stat().st_size
        assert (report["bytes"], report["dense_bytes"], report["met"]) == (size, dense, True)
        assert 0.9 * allowed < size <= allowed
        assert report["settings"]["allocate"] == "bytes"
        assert 0 < report["macs"] < 1
        assert f"weights: {size / 1e6:.4g} MB, were {dense / 1e6:.4g} MB" in capsys.readouterr().out
        assert BertForSequenceClassification.from_pretrained(out).num_parameters() == report["parameters"]
    assert report["vocabulary"]["tokens"] == len(BertTokenizer.from_pretrained(out)) < len(VOCAB)
    assert "tokens: all that the 40 texts" in (out / "README.md").read_text(encoding="utf-8")


def test_a_size_that_heads_and_neurons_do_not_make_is_refused(
    world: Path, tmp_path: Path, assert_refused: Any
) -> None:
    message = "MB. Remove tokens too, with --vocabulary or `bertlite prune vocabulary`"
    assert_refused(message, *command_of(world, tmp_path / "out", "to", "20kB", "--at", "1x16"))
    assert not list(tmp_path.iterdir())
