"""A map after pooling: the fit, its place in a folder, and `bertlite prune to` with it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make, make_batch
from torch import Tensor, nn

from bertlite import BertModel, BertTokenizer
from bertlite.cli import main
from bertlite.experiments.budget import command, search
from bertlite.experiments.budget.mapping import fit_map, layer_of_map
from bertlite.opened.checkpoint import Checkpoint
from bertlite.pruning.importance.batches import real_tokens
from bertlite.runtime.processing import Processing
from bertlite.shipping.folder import write_model
from bertlite.shipping.vectors import MEAN, Dense, Normalize, VectorHead, make_norm, read_head, with_map

D = 48
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40))]


def module(kind: Any, seed: int, **values: Any) -> Any:
    """Make a module with weights that matter."""
    found = kind(values)
    generator = torch.Generator().manual_seed(seed)
    for x in found.parameters():
        x.data.copy_(0.3 * torch.randn(x.shape, generator=generator))
    return found.eval().requires_grad_(False)


def dense(outputs: int, act: str, seed: int = 0, **values: Any) -> Any:
    return module(
        Dense, seed, in_features=D, out_features=outputs, activation_function=f"torch.nn.modules.{act}", **values
    )


def linear() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(D, D).requires_grad_(False)


HEADS = {
    "bare": (MEAN, 1),
    "unit": (VectorHead(modules=(Normalize(),)), 2),
    "linear": (VectorHead(modules=(dense(7, "linear.Identity"), Normalize())), 2),
    "tanh": (VectorHead(modules=(dense(7, "activation.Tanh", bias=False),)), 1),
    "residual": (VectorHead(modules=(dense(D, "activation.GELU", use_residual=True), Normalize())), 3),
    "square": (VectorHead(modules=(dense(D, "activation.Tanh"),)), 1),
    "norm": (VectorHead(modules=(module(make_norm, 1, dimension=D), Normalize())), 3),
}


def states(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 11, D, generator=generator), (torch.arange(11) < torch.tensor([[11], [7], [2]])).long()


def test_unfinished_work_is_found_again_by_the_same_words() -> None:
    """They are a part of the key of `prune to`, so that another spelling would begin a half-done search anew."""
    steps = Processing(modes=("mean", "cls"), similarity="dot", after=({"type": "truncate", "size": 5},))
    words = "VectorHead(pooling=('mean', 'cls'), skip=2, modules=(), size=5, similarity='dot', name='mean+cls, Dense')"
    assert repr(VectorHead(steps, 2, (Normalize(),), "mean+cls, Dense")) == words
    tokenizer = BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
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


@pytest.mark.parametrize("name", HEADS)
def test_a_map_comes_right_after_the_pooling_and_merges_into_a_dense(name: str) -> None:
    head, modules = HEADS[name]
    mapped, (x, mask) = with_map(head, linear()), states()
    wanted = linear()(MEAN(x, mask))
    for each in head.modules:
        wanted = each(wanted)
    torch.testing.assert_close(mapped(x, mask), wanted)
    assert len(mapped.modules) == modules
    added = layer_of_map(head, make().config)
    assert (added is None) == (modules == len(head.modules))
    assert added is None or sum(p.numel() for p in added.parameters()) == D * D + D


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


def write(folder: Path, head: VectorHead | None = None) -> Any:
    """Write a pruned encoder, with sentence-transformers' modules where a head has some."""
    library = pytest.importorskip("sentence_transformers").sentence_transformer.modules
    from sentence_transformers import SentenceTransformer

    model = make(BertModel, vocab_size=len(WORDS)).float()
    model.save_pretrained(folder)
    BertTokenizer(WORDS).save_pretrained(folder)
    if head is None or not head.modules:
        return model
    parts = [library.Transformer(str(folder)), library.Pooling(D, "mean")]
    for each in head.modules:
        if isinstance(each, Dense):
            part = library.Dense(
                D,
                each.linear.out_features,
                each.linear.bias is not None,
                each.act,
                use_residual=hasattr(each, "residual"),
            )
            part.linear.load_state_dict(each.linear.state_dict())
        elif isinstance(each, nn.Sequential):
            part = library.LayerNorm(D)
            part.norm.load_state_dict(each.norm.state_dict())
        else:
            part = library.Normalize()
        parts.append(part)
    SentenceTransformer(modules=parts, device="cpu").save(str(folder))
    return model


@pytest.mark.parametrize("name", HEADS)
def test_a_folder_with_a_map_gives_its_vectors_everywhere(name: str, tmp_path: Path) -> None:
    """In sentence-transformers, in `embed`, where no other text moves a bit, and read again."""
    library = pytest.importorskip("sentence_transformers")
    from bertlite import Embedder

    model = write(tmp_path / "given", HEADS[name][0])
    mapped = with_map(read_head(Checkpoint(tmp_path / "given")), linear())
    write_model(tmp_path / "out", model, tmp_path / "given", mapped=mapped)
    assert len(read_head(Checkpoint(tmp_path / "out")).modules) == len(mapped.modules) == HEADS[name][1]
    texts = [" ".join(WORDS[5 + (i * j) % 40] for j in range(1, 3 + i % 9)) for i in range(40)]
    tokens = BertTokenizer(WORDS)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        wanted = mapped(model(**tokens).last_hidden_state, tokens["attention_mask"]).numpy()
    np.testing.assert_allclose(
        library.SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(texts), wanted, atol=2e-5
    )
    embedder = Embedder(tmp_path / "out", backend="native")
    found = embedder.encode(texts)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert (np.stack([embedder.encode(text) for text in texts[:9]]) == found[:9]).all()


@pytest.mark.parametrize("first", ["LayerNorm", "Dense"])
def test_a_map_takes_no_other_modules_folder(first: str, tmp_path: Path) -> None:
    """Where numbers of folders have a gap, or two modules share a folder."""
    library = pytest.importorskip("sentence_transformers")
    model = write(tmp_path / "given", HEADS["norm"][0] if first == "LayerNorm" else HEADS["square"][0])
    modules = json.loads((tmp_path / "given" / "modules.json").read_text())
    if first == "LayerNorm":
        (tmp_path / "given" / modules[2]["path"]).rename(tmp_path / "given" / "4_Dense")
        modules[2]["path"] = "4_Dense"
        modules[3]["path"] = ""
    else:
        modules.append({**modules[2], "idx": 3, "name": "again"})
    (tmp_path / "given" / "modules.json").write_text(json.dumps(modules))
    mapped = with_map(read_head(Checkpoint(tmp_path / "given")), linear())
    write_model(tmp_path / "out", model, tmp_path / "given", mapped=mapped)
    written = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert len({each["path"] for each in written}) == len({each["name"] for each in written}) == len(written)
    tokens = BertTokenizer(WORDS)(["w1 w2 w3", "w7"], padding=True, return_tensors="pt")
    with torch.no_grad():
        wanted = mapped(model(**tokens).last_hidden_state, tokens["attention_mask"]).numpy()
    found = library.SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(["w1 w2 w3", "w7"])
    np.testing.assert_allclose(found, wanted, atol=2e-5)


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
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    if enough == 800:
        assert "no map after the pooling: it needs 800 texts" in said
        assert (report["texts"]["mapped"], report["without_map"]) == (0, {})
        assert not (tmp_path / "out" / "modules.json").exists()
        return
    assert report["texts"]["mapped"] == 300 - 60
    assert report["rank_correlation"] > report["without_map"]["rank_correlation"]
    assert "without the map after the pooling, fitted to 240 texts: " in said
    assert math.isclose(report["bytes"], size + 4 * (D * D + D), rel_tol=0.01)
    assert read_head(Checkpoint(tmp_path / "out")).name == "mean, Dense"
    assert "A linear layer after the pooling" in (tmp_path / "out" / "README.md").read_text()
    main([*words, "--calibration", "60", "--no-mapping", "--out", str(tmp_path / "plain")])
    assert not (tmp_path / "plain" / "modules.json").exists()
