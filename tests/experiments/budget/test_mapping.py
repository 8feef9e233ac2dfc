"""A map after pooling: the fit, its place in a folder, and `bertlite prune to` with it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SPECIAL, make, make_batch
from torch import nn

from bertlite import BertModel, BertTokenizer, Embedder
from bertlite.cli import main
from bertlite.experiments.budget import command, search
from bertlite.experiments.budget.mapping import fit_map, layer_of_map
from bertlite.opened.checkpoint import Checkpoint
from bertlite.pruning.importance.batches import real_tokens
from bertlite.runtime.processing import Processing
from bertlite.shipping.folder import write_model
from bertlite.shipping.vectors import MEAN, Normalize, VectorHead, read_head, with_map

library = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.models")
D = 48
WORDS = [*SPECIAL, *(f"w{i}" for i in range(40))]


def linear() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(D, D).requires_grad_(False)


def dense(outputs: int, act: nn.Module, **options: Any) -> Any:
    torch.manual_seed(4)
    return modules.Dense(D, outputs, activation_function=act, **options)


def norm() -> Any:
    torch.manual_seed(4)
    part = modules.LayerNorm(D)
    for x in part.parameters():
        torch.nn.init.normal_(x)
    return part


UNIT = modules.Normalize()
HEADS: dict[str, tuple[list[Any], int]] = {  # modules after the pooling, and how many there are with a map
    "bare": ([], 1),
    "unit": ([UNIT], 2),
    "linear": ([dense(7, nn.Identity()), UNIT], 2),
    "tanh": ([dense(7, nn.Tanh(), bias=False)], 1),
    "residual": ([dense(D, nn.GELU(), use_residual=True), UNIT], 3),
    "square": ([dense(D, nn.Tanh())], 1),
    "norm": ([norm(), UNIT], 3),
}


def test_unfinished_work_is_found_again_by_the_same_words() -> None:
    """They are a part of the key of `prune to`, so that another spelling would begin a half-done search anew."""
    steps = Processing(modes=("mean", "cls"), similarity="dot", after=({"type": "truncate", "size": 5},))
    words = "VectorHead(pooling=('mean', 'cls'), skip=2, modules=(), size=5, similarity='dot', name='mean+cls, Dense')"
    assert repr(VectorHead(steps, 2, (Normalize(),), "mean+cls, Dense")) == words
    tokenizer = BertTokenizer(SPECIAL)
    assert tokenizer.text_settings == {
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "model_max_length": tokenizer.model_max_length,
        "padding_side": "right",
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
        "prompts": {},
        "default_prompt_name": None,
        "max_seq_length": None,
        "do_lower_case": False,
    }


def test_the_map_is_the_least_squares_fit_to_pooled_vectors() -> None:
    """A model whose last LayerNorm has other weights is mapped back to the given one."""
    given, other = make(BertModel), make(BertModel)
    norm = other.encoder.layer[-1].output.LayerNorm
    norm.weight.data *= torch.linspace(0.5, 2, D)
    norm.bias.data += torch.linspace(-1, 1, D)
    batches = [make_batch(8, seed=seed) for seed in range(30)]
    head = VectorHead(modules=(Normalize(),))
    found = with_map(head, fit_map(other, given, batches, head))
    batch = make_batch(8, seed=99)
    with torch.no_grad():
        mine, theirs = (each(**batch).last_hidden_state for each in (other, given))
    real = real_tokens(batch)
    assert (head(mine, real) * head(theirs, real)).sum(1).max() < 0.99
    torch.testing.assert_close(found(mine, real), head(theirs, real), atol=1e-3, rtol=0)


def write(folder: Path, parts: Sequence[Any] = ()) -> Any:
    """Write an encoder, with sentence-transformers' modules if there are some; return the encoder."""
    model = make(BertModel, vocab_size=len(WORDS)).float()
    model.save_pretrained(folder)
    BertTokenizer(WORDS).save_pretrained(folder)
    if parts:
        body = [modules.Transformer(str(folder)), modules.Pooling(D, "mean")]
        library.SentenceTransformer(modules=[*body, *parts], device="cpu").save(str(folder))
    return model


def leave_a_gap(folder: Path, each: Any) -> None:
    """Let the numbers of folders have a gap, and the last module lie in the root."""
    (folder / each[2]["path"]).rename(folder / "4_Dense")
    each[2]["path"], each[3]["path"] = "4_Dense", ""


def share_a_folder(folder: Path, each: Any) -> None:
    """Let the Dense run twice."""
    each.append({**each[2], "idx": 3, "name": "again"})


@pytest.mark.parametrize(
    ("name", "change"), [*((name, None) for name in HEADS), ("norm", leave_a_gap), ("square", share_a_folder)]
)
def test_a_map_comes_right_after_the_pooling_and_gives_its_vectors_everywhere(
    name: str, change: Any, tmp_path: Path
) -> None:
    """Merged with a Dense: in sentence-transformers, in `embed`, where no other text moves a bit, and read again."""
    parts, count = HEADS[name]
    given, out = tmp_path / "given", tmp_path / "out"
    model = write(given, parts)
    if change is not None:
        listed = json.loads((given / "modules.json").read_text())
        change(given, listed)
        (given / "modules.json").write_text(json.dumps(listed))
    head = read_head(Checkpoint(given))
    mapped, added = with_map(head, linear()), layer_of_map(head, model.config)
    assert (added is None) == (len(mapped.modules) == len(head.modules))
    assert added is None or sum(p.numel() for p in added.parameters()) == D * D + D
    write_model(out, model, given, mapped=mapped)
    texts = [" ".join(WORDS[5 + (i * j) % 40] for j in range(1, 3 + i % 9)) for i in range(40)]
    tokens = BertTokenizer(WORDS)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**tokens).last_hidden_state
        wanted = linear()(MEAN(states, tokens["attention_mask"]))
        for each in head.modules:
            wanted = each(wanted)
        torch.testing.assert_close(mapped(states, tokens["attention_mask"]), wanted)
    found = library.SentenceTransformer(str(out), device="cpu").encode(texts)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert len(read_head(Checkpoint(out)).modules) == len(mapped.modules)
    if change is None:
        assert len(mapped.modules) == count
        embedder = Embedder(out, backend="native")
        found = embedder.encode(texts)
        np.testing.assert_allclose(found, wanted, atol=2e-5)
        assert (np.stack([embedder.encode(text) for text in texts[:9]]) == found[:9]).all()
    written = json.loads((out / "modules.json").read_text())
    assert len({each["path"] for each in written}) == len({each["name"] for each in written}) == len(written)


@pytest.mark.parametrize("enough", [50, 800])
def test_an_encoder_gets_a_map_where_enough_texts_are_left(
    enough: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], few_rounds: None
) -> None:
    """The report has its figures with and without, the size counts it, and the folder has its Dense."""
    monkeypatch.setattr(command, "MAP_NEEDS", enough)
    monkeypatch.setattr(search, "CLOCK_ROUNDS", 3)
    write(tmp_path / "given")
    lines = [" ".join(WORDS[5 + (i * i * j) % 40] for j in range(1, 4 + i % 9)) for i in range(300)]
    (tmp_path / "texts.txt").write_text("\n".join(lines) + "\n")
    words = ["prune", "to", "30%", str(tmp_path / "given"), "--texts", str(tmp_path / "texts.txt"), "--at", "1x16"]
    main([*words, "--calibration", "60", "--out", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    said = capsys.readouterr().out
    if enough == 800:
        assert "no map after the pooling: it needs 800 texts" in said
        assert (report["texts"]["mapped"], report["without_map"]) == (0, {})
        assert not (tmp_path / "out" / "modules.json").exists()
        return
    assert report["texts"]["mapped"] == 300 - 60
    assert report["rank_correlation"] > report["without_map"]["rank_correlation"]
    assert "without the map after the pooling, fitted to 240 texts: " in said
    assert report["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").rglob("model.safetensors"))
    assert read_head(Checkpoint(tmp_path / "out")).name == "mean, Dense"
    assert "A linear layer after the pooling" in (tmp_path / "out" / "README.md").read_text()
    main([*words, "--calibration", "60", "--no-mapping", "--out", str(tmp_path / "plain")])
    assert not (tmp_path / "plain" / "modules.json").exists()
