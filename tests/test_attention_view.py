"""`bertlite attention`: maps are the model's own weights in the right places, and a page needs no other file."""

import base64
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SIZES, make

from bertlite import BertConfig, BertForMaskedLM, BertModel, BertTokenizer, kept_heads, prune_heads
from bertlite.attention_view import AttentionMaps, attention_maps, figure, page
from bertlite.cli import main

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s", "<", ">", "/", "script", "&", "$"]
CONFIG = BertConfig(**{**SIZES, "vocab_size": len(WORDS)})
GONE = {0: [1, 3], 1: range(4)}
TEXT = "The cats <script> sat"
TOKENS = ("[CLS]", "the", "cat", "##s", "<", "script", ">", "sat", "[SEP]")


@pytest.fixture(scope="module")
def pruned() -> Any:
    return prune_heads(make(config=CONFIG).float(), GONE)


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return BertTokenizer(WORDS)


@pytest.fixture(scope="module")
def checkpoint(pruned, tokenizer, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint")
    pruned.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def data_of(content: bytes | str) -> dict[str, Any]:
    text = content if isinstance(content, str) else content.decode()
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def test_maps_are_the_weights_of_the_model_by_the_numbers_of_the_unpruned_one(pruned, tokenizer) -> None:
    maps = attention_maps(pruned, tokenizer, TEXT)
    assert (maps.tokens, maps.layers, maps.heads) == (TOKENS, (0, 1, 2), (0, 1, 2, 3))
    assert list(maps.weights) == [(0, 0), (0, 2), (2, 0), (2, 1), (2, 2), (2, 3)]
    with torch.no_grad():
        own = pruned(**tokenizer(TEXT, return_tensors="pt"), output_attentions=True).attentions
    for layer in range(3):
        for i, head in enumerate(kept_heads(pruned.config, layer)):
            assert torch.equal(maps.weights[layer, head], own[layer][0, i])
    torch.testing.assert_close(maps.weights[0, 2].sum(-1), torch.ones(9))


def test_a_head_that_stays_has_the_map_it_had(tokenizer) -> None:
    """In the first layer, since no layer before it has changed."""
    dense = make(config=CONFIG).float()
    before = attention_maps(dense, tokenizer, TEXT)
    after = attention_maps(prune_heads(dense, {0: [0, 1]}), tokenizer, TEXT)
    torch.testing.assert_close(after.weights[0, 3], before.weights[0, 3], rtol=0, atol=1e-6)
    assert (0, 0) not in after.weights


def test_pairs_and_selections_and_models_with_a_head(tokenizer) -> None:
    model = make(BertForMaskedLM, config=CONFIG)
    maps = attention_maps(model, tokenizer, "the cat", "sat", layers=[2, 0, 2], heads=[3])
    assert maps.tokens == ("[CLS]", "the", "cat", "[SEP]", "sat", "[SEP]")
    assert (maps.layers, maps.heads, list(maps.weights)) == ((0, 2), (3,), [(0, 3), (2, 3)])
    with torch.no_grad():
        own = model(**tokenizer("the cat", "sat", return_tensors="pt"), output_attentions=True).attentions
    assert torch.equal(maps.weights[2, 3], own[2][0, 3].float())


def test_unknown_layers_and_heads_long_texts_and_nan_are_refused(pruned, tokenizer) -> None:
    for options, message in (
        ({"layers": [0, 3]}, "there is no layer 3: this model was built with 3, 0 to 2"),
        ({"heads": [-1]}, "there is no head -1: this model was built with 4, 0 to 3"),
        ({"heads": []}, "no head was chosen; leave the choice out to have all 4"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_maps(pruned, tokenizer, TEXT, **options)
    with pytest.raises(ValueError, match="the text has 41 tokens, and this model takes 40: shorten it"):
        attention_maps(pruned, tokenizer, "cat " * 39)
    broken = make(config=CONFIG)
    with torch.no_grad():
        broken.encoder.layer[1].attention.self.query.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="the attention of layer 1, head 0 is nan"):
        attention_maps(broken, tokenizer, TEXT)


# Pages ---------------------------------------------------------------------------------------------------------------


def test_a_page_holds_every_weight_and_no_pruned_head(pruned, tokenizer) -> None:
    maps = attention_maps(pruned, tokenizer, TEXT)
    data = data_of(page(maps))
    assert tuple(data["tokens"]) == TOKENS
    assert (data["layers"], data["heads"]) == ([0, 1, 2], [0, 1, 2, 3])
    assert list(data["weights"]) == ["0.0", "0.2", "2.0", "2.1", "2.2", "2.3"]
    for name, text in data["weights"].items():
        layer, head = map(int, name.split("."))
        shown = np.frombuffer(base64.b64decode(text), "<u2").reshape(9, 9) / data["steps"]
        assert np.abs(shown - maps.weights[layer, head].numpy()).max() <= 0.51 / data["steps"]


def test_a_text_cannot_break_out_of_its_page(pruned, tokenizer) -> None:
    plain, hostile = (
        page(attention_maps(pruned, tokenizer, text, layers=[0])).decode()
        for text in ("the cat", "</script><script>&$ {{data}}")
    )
    for sign in ("<script", "</script", "<title", "&amp;&"):
        assert hostile.count(sign) == plain.count(sign), sign
    assert data_of(hostile)["tokens"][1:9] == ["<", "/", "script", ">", "<", "script", ">", "&"]
    assert "<title>Attention: [CLS] &lt; / script &gt; &lt; script &gt; &amp; $ " in hostile


def test_a_page_needs_no_other_file(pruned, tokenizer) -> None:
    text = page(attention_maps(pruned, tokenizer, TEXT)).decode()
    assert "{{" not in text
    assert not re.search(r"https?:|\bsrc=|<link|@import|url\(|fetch\(|import\(", text)
    assert "default-src 'none'" in text
    assert len(text) < 12_000


def test_a_view_that_is_too_large_is_refused() -> None:
    weights = {(0, head): torch.empty(400, 400) for head in range(16)}
    maps = AttentionMaps(("a",) * 400, (0,), tuple(range(16)), weights)
    with pytest.raises(ValueError, match=r"16 maps of 400 tokens are 2,560,000 weights, and a page holds 2,000,000"):
        page(maps)
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"16 maps of 400 tokens are a PNG of \d+ million pixels, beyond 40: choose"):
        figure(maps)


def test_a_view_that_is_too_large_is_refused_before_it_is_computed(
    checkpoint, pruned, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(BertModel, "forward", lambda *args, **options: pytest.fail("it was computed first"))
    monkeypatch.setattr(
        "bertlite.attention_view.MOST_WEIGHTS", 6 * 9**2 - 1
    )  # heads that are drawn count, pruned ones do not
    monkeypatch.setattr("bertlite.attention_view.MOST_PIXELS", 99_999)
    command = ["attention", checkpoint, TEXT, "--out"]
    assert main([*command, str(tmp_path / "a.html")]) == 2
    assert "6 maps of 9 tokens are 486 weights, and a page holds 485" in capsys.readouterr().err
    if find_spec("matplotlib"):
        assert main([*command, str(tmp_path / "a.png")]) == 2
        assert "12 maps of 9 tokens are a PNG of 0 million pixels" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# Pictures ------------------------------------------------------------------------------------------------------------


def test_a_picture_has_a_map_for_every_head_and_says_which_are_pruned(pruned, tokenizer) -> None:
    pytest.importorskip("matplotlib")
    maps = attention_maps(pruned, tokenizer, "the $ cat $", heads=[1, 2])
    drawn = figure(maps)
    axes = drawn.axes[:6]
    for place, each in enumerate(axes):
        weights = maps.weights.get((place // 2, (1, 2)[place % 2]))
        assert [text.get_text() for text in each.texts] == (["pruned"] if weights is None else [])
        assert [np.array_equal(image.get_array(), weights) for image in each.images] == [True] * (weights is not None)
    assert [each.get_title() for each in axes] == ["head 1", "head 2", "", "", "", ""]
    assert [each.get_ylabel() for each in axes] == ["layer 0", "", "layer 1", "", "layer 2", ""]
    for labels in (axes[0].get_yticklabels(), axes[5].get_xticklabels()):
        assert [label.get_text() for label in labels] == ["[CLS]", "the", "$", "cat", "$", "[SEP]"]
        assert not any(label.get_parse_math() for label in labels)


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_page_and_the_weights(checkpoint, pruned, tokenizer, tmp_path, capsys) -> None:
    out, record = tmp_path / "deep" / "maps.html", tmp_path / "maps.json"
    arguments = ["attention", checkpoint, TEXT, "--layers", "0,1", "--heads", "2,3"]
    assert main([*arguments, "--out", f"{out},{record}"]) == 0
    assert capsys.readouterr().out == f"{out}, {record}: 9 tokens; heads drawn: 1, pruned: 3\n"
    wanted = attention_maps(pruned, tokenizer, TEXT)
    assert list(data_of(out.read_text("utf-8"))["weights"]) == ["0.2"]
    found = json.loads(record.read_text())
    assert tuple(found["tokens"]) == TOKENS
    assert found["weights"]["1"] == {"2": None, "3": None}
    assert found["weights"]["0"]["3"] is None
    assert torch.equal(torch.tensor(found["weights"]["0"]["2"]), wanted.weights[0, 2])
    assert [path.name for path in out.parent.iterdir()] == ["maps.html"]


def test_the_command_draws_a_png(checkpoint, tmp_path) -> None:
    image = pytest.importorskip("matplotlib.image")
    out = tmp_path / "maps.PNG"
    assert main(["attention", checkpoint, "the cat", "--pair", "sat", "--out", str(out)]) == 0
    pixels = image.imread(out, format="png")
    assert min(pixels.shape[:2]) > 200
    assert pixels[..., :3].std() > 0.05


def test_an_error_has_a_message_and_leaves_no_file(checkpoint, tmp_path, capsys, monkeypatch) -> None:
    def message(*arguments: str, model: str = checkpoint) -> str:
        try:
            status = main(["attention", model, *arguments])
        except SystemExit as end:
            status = end.code
        assert status == 2
        return capsys.readouterr().err.splitlines()[-1]

    out = ["--out", str(tmp_path / "a.html")]
    assert "a.svg' has none of the suffixes .html, .png, .json" in message("the", "--out", str(tmp_path / "a.svg"))
    assert "a' has none of the suffixes" in message("the", "--out", str(tmp_path / "a"))
    assert "add --out FILE.html or --out FILE.png or --out FILE.json" in message("the")
    assert "there is no layer 3" in message("the", *out, "--layers", "3,4")
    assert "the text has 41 tokens" in message("the " * 39, *out)
    assert "nowhere" in message("the", *out, model=str(Path(checkpoint, "nowhere")))
    assert "'first' is not an integer" in message("the", *out, "--heads", "first")
    assert "say `--heads 0,1,2`, which was `--heads 0-2` before" in message("the", *out, "--heads", "0-2")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(BertModel, "from_pretrained", lambda *args, **options: pytest.fail("it was loaded first"))
    assert "pip install 'bertlite[plot]', or write .html" in message("the", "--out", str(tmp_path / "a.png"))
    assert not list(tmp_path.iterdir())
