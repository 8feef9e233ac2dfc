"""`bertlite attention`: maps are the model's own weights in the right places, and a page needs no other file."""

import base64
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SIZES, make
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE

from bertlite import BertConfig, BertForMaskedLM, BertTokenizer, kept_heads, prune_heads
from bertlite.attention_view import AttentionMaps, attention_maps, page
from bertlite.attention_view.command import short_names
from bertlite.attention_view.maps import clarity, in_letters, moved_share, target_shares, word_positions
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


def shown_weights(data: dict[str, Any], model: int = 0) -> dict[tuple[int, int], Any]:
    """Return {(layer, head): weights} of a model of a page."""
    size, found = len(data["tokens"]), {}
    for name, text in data["models"][model]["weights"].items():
        low, high = np.frombuffer(zlib.decompress(base64.b64decode(text)), "u1").reshape(2, size, size).astype("u2")
        layer, head = map(int, name.split("."))
        found[layer, head] = (low + 256 * high) / data["steps"]
    return found


def test_maps_are_the_weights_of_the_model_by_the_numbers_of_the_unpruned_one(pruned, tokenizer):
    maps = attention_maps(pruned, tokenizer, TEXT)
    assert (maps.tokens, maps.layers, maps.heads) == (TOKENS, (0, 1, 2), (0, 1, 2, 3))
    assert list(maps.weights) == [(0, 0), (0, 2), (2, 0), (2, 1), (2, 2), (2, 3)]
    with torch.no_grad():
        own = pruned(**tokenizer(TEXT, return_tensors="pt"), output_attentions=True).attentions
    for layer in range(3):
        for i, head in enumerate(kept_heads(pruned.config, layer)):
            assert torch.equal(maps.weights[layer, head], own[layer][0, i])
    torch.testing.assert_close(maps.weights[0, 2].sum(-1), torch.ones(9))


@pytest.mark.parametrize("sequence", [False, True])
def test_tokens_of_a_byte_level_bpe_are_shown_in_letters(sequence):
    text = "the café, 你好 世界 🙂"
    backend = Tokenizer(BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([level]) if sequence else level
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<é>"], initial_alphabet=level.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["the café, 你"] * 5, trainer)
    tokens = backend.encode(f"<é>{text}").tokens
    shown = in_letters(tokens, backend)
    assert len(shown) == len(tokens)
    assert shown[:2] == ("<é>", "the")
    assert shown[2:5] == ("Ġcafé", ",", "Ġ你")
    assert [token for token in shown if token.startswith("好")] == ["好 1/3", "好 2/3", "好 3/3"]
    assert shown[-1] == "🙂 4/4"
    assert in_letters(("caf", "##Ã©"), BertTokenizer(WORDS).backend_tokenizer) == ("caf", "##Ã©")


def test_pairs_and_selections_and_models_with_a_head(tokenizer):
    model = make(BertForMaskedLM, config=CONFIG)
    maps = attention_maps(model, tokenizer, "the cat", "sat", layers=[2, 0, 2], heads=[3])
    assert maps.tokens == ("[CLS]", "the", "cat", "[SEP]", "sat", "[SEP]")
    assert (maps.layers, maps.heads, list(maps.weights)) == ((0, 2), (3,), [(0, 3), (2, 3)])
    with torch.no_grad():
        own = model(**tokenizer("the cat", "sat", return_tensors="pt"), output_attentions=True).attentions
    assert torch.equal(maps.weights[2, 3], own[2][0, 3].float())


def test_unknown_layers_and_heads_long_texts_and_nan_are_refused(pruned, tokenizer):
    for options, message in (
        ({"layers": [0, 3]}, "there is no layer 3: this model was built with 3, 0 to 2"),
        ({"heads": [-1]}, "there is no head -1: this model was built with 4, 0 to 3"),
        ({"layers": 0}, r"layers are given as a list of their numbers, such as \[0\]; not as 0"),
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


def test_a_text_cannot_break_out_of_its_page(pruned, tokenizer):
    plain, hostile = (
        page(attention_maps(pruned, tokenizer, text, layers=[0])).decode()
        for text in ("the cat", "</script><script>&$ {{data}}")
    )
    for sign in ("<script", "</script", "<title", "&amp;&"):
        assert hostile.count(sign) == plain.count(sign), sign
    assert data_of(hostile)["tokens"][1:9] == ["<", "/", "script", ">", "<", "script", ">", "&"]
    assert "<title>Attention: &lt; / script &gt; &lt; script &gt; &amp; $ " in hostile


def test_a_title_holds_no_letter_that_hides_or_turns_text():
    maps = AttentionMaps(("a\u202eb\u200b\x00\ud800c", "##d"), (0,), (0,), {(0, 0): torch.eye(2)})
    assert b"<title>Attention: a\xef\xbf\xbdb\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbdcd</title>" in page(maps)


def test_a_page_needs_no_other_file_and_runs_only_its_own_scripts_and_styles(pruned, tokenizer):
    text = page(attention_maps(pruned, tokenizer, TEXT)).decode()
    assert "{{" not in text
    assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)|\bsrc=|<link|@import|url\(|fetch\(|import\(", text)
    assert len(text) < 60_000
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = {name: value for name, _, value in (rule.strip().partition(" ") for rule in policy.split(";"))}
    assert (rules["default-src"], rules["base-uri"], rules["form-action"]) == ("'none'",) * 3
    for name, element in (("script-src", "script"), ("style-src", "style")):
        (content,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        assert rules[name] == f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)


# What is in a map ----------------------------------------------------------------------------------------------------


def test_the_shares_of_a_head_are_of_all_tokens_and_sum_to_1():
    weights = torch.tensor([[0.2, 0, 0, 0.8], [0.1, 0.2, 0.3, 0.4], [0.5, 0.1, 0.2, 0.2], [1, 0, 0, 0]])
    maps = AttentionMaps(("[CLS]", "a", "b", "c"), (0,), (0,), {(0, 0): weights}, special=(0,))
    # of a, b and c: itself 0.2 0.2 0; before, where b's is a and c's is b: - 0.1 0; after 0.3 0.2 -; [CLS] 0.1 0.5 1
    shares = target_shares(maps, (0, 0))
    assert shares == pytest.approx([0.4 / 4, 0.1 / 4, 0.5 / 4, 1.8 / 4, 1.2 / 4])
    assert shares[3] == pytest.approx(weights.mean(0)[0].item()), "the number next to [CLS], the only special token"


def test_a_page_opens_on_the_head_whose_words_attend_to_words_of_their_own(pruned, tokenizer):
    size = 8
    places = torch.arange(size)
    special = (places == 0).float().expand(size, size)
    heads = {
        (0, 0): special.clone(),
        (0, 1): torch.eye(size),
        (0, 2): torch.eye(size)[(places - 1).clamp(min=0)],  # the token before
        (1, 0): torch.full((size, size), 1 / size),
        (1, 1): (places == 5).float().expand(size, size).clone(),  # one word for all
        (1, 2): torch.eye(size)[[0, 4, 6, 7, 1, 2, 3, 5]],
    }
    maps = AttentionMaps(tuple("Cabcdefg"), (0, 1), (0, 1, 2), heads, special=(0,))
    scores = {head: clarity(maps, head).mean().item() for head in heads}
    assert scores[1, 2] > 0.5
    assert all(score < 0.01 for head, score in scores.items() if head != (1, 2))
    first = data_of(page(maps))["first"]
    assert first["head"] == [1, 2]
    assert first["token"] == word_positions(maps)[int(clarity(maps, (1, 2)).argmax())]
    assert first["why"].startswith("Shown first: its words attend most clearly to particular other words")
    only_special = AttentionMaps(("[CLS]", "[SEP]"), (0,), (0,), {(0, 0): torch.eye(2)}, special=(0, 1))
    assert data_of(page(only_special))["first"]["head"] == [0, 0]
    nothing = AttentionMaps(("a", "b"), (3,), (2, 5), {})
    assert data_of(page(nothing))["first"] == {"head": [3, 2], "why": "Every head is pruned.", "token": 0}


# Two checkpoints -----------------------------------------------------------------------------------------------------


def test_a_comparison_holds_both_models_and_opens_on_what_changed_most(pruned, tokenizer):
    dense = make(config=CONFIG).float()
    before = attention_maps(dense, tokenizer, TEXT, name="dense")
    after = attention_maps(pruned, tokenizer, TEXT, name="pruned")
    data = data_of(page(before, after))
    assert tuple(data["tokens"]) == TOKENS
    assert (data["layers"], data["heads"]) == ([0, 1, 2], [0, 1, 2, 3])
    assert [model["name"] for model in data["models"]] == ["dense", "pruned"]
    assert 0.501 / data["steps"] < 0.00013  # as the page says: a weight is shown in tenths of a percent
    for model, maps in enumerate((before, after)):
        shown = shown_weights(data, model)
        assert list(shown) == list(maps.weights)  # no pruned head
        assert all(np.abs(shown[head] - maps.weights[head].numpy()).max() <= 0.501 / data["steps"] for head in shown)
    moved = {head: moved_share(before, after, head) for head in after.weights}
    assert data["moved"] == {f"{layer}.{head}": round(moved[layer, head], 4) for layer, head in moved}
    assert data["moved"]["0.0"] == 0  # no layer before it has changed
    most = max(moved, key=moved.__getitem__)
    assert tuple(data["first"]["head"]) == most
    assert most[0] == 2
    assert f"{100 * moved[most]:.0f}\N{NO-BREAK SPACE}% of its attention moved" in data["first"]["why"]
    assert data_of(page(before, before))["first"]["head"] == data_of(page(before))["first"]["head"]


def test_what_cannot_be_compared_is_refused(pruned, tokenizer):
    here = attention_maps(pruned, tokenizer, "the cat sat", name="here")
    words = [*WORDS[:5], "the", "c", "sat", "##s", "##a", "##t"]
    other = make(config=BertConfig(**{**SIZES, "vocab_size": len(words)})).float()
    for text, message in (("the cat sat", "'cat' and 'c'"), ("the", "'cat' and '\\[SEP\\]'")):
        with pytest.raises(ValueError, match=f"here and there have different tokens, such as {message}: compare"):
            page(here, attention_maps(other, BertTokenizer(words), text, name="there"))
    there = attention_maps(make(config=CONFIG, num_hidden_layers=2).float(), tokenizer, "the cat sat", name="there")
    with pytest.raises(ValueError, match="here and there have different layers, such as 2 and 1: compare checkpoints"):
        page(here, there)
    some = attention_maps(pruned, tokenizer, "the cat sat", heads=[1, 2], name="some")
    with pytest.raises(ValueError, match="here and some have different heads, such as 0 and 1"):
        page(here, some)


# Limits --------------------------------------------------------------------------------------------------------------


def test_a_page_that_is_too_large_is_not_written(checkpoint, tmp_path, capsys, monkeypatch):
    """Heads that are drawn count, pruned ones do not."""
    for models, against in ((1, []), (2, ["--against", checkpoint])):
        weights = models * 6 * 9**2
        monkeypatch.setattr("bertlite.attention_view.pages.MOST_WEIGHTS", weights - 1)
        out = ["--out", f"{tmp_path / 'a.html'},{tmp_path / 'a.json'}"]
        assert main(["attention", checkpoint, TEXT, *against, *out]) == 2
        message = f"{6 * models} maps of 9 tokens are {weights} weights, and a page holds {weights - 1}"
        assert message in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_page_and_the_weights(checkpoint, pruned, tokenizer, tmp_path, capsys):
    out, record = tmp_path / "deep" / "maps.html", tmp_path / "maps.json"
    arguments = ["attention", checkpoint, TEXT, "--layers", "0,1", "--heads", "2,3"]
    assert main([*arguments, "--out", f"{out},{record}"]) == 0
    assert capsys.readouterr().out == f"{out}, {record}: 9 tokens; heads drawn: 1, pruned: 3\n"
    wanted = attention_maps(pruned, tokenizer, TEXT)
    assert list(shown_weights(data_of(out.read_text("utf-8")))) == [(0, 2)]
    found = json.loads(record.read_text())
    assert tuple(found["tokens"]) == TOKENS
    assert found["weights"]["1"] == {"2": None, "3": None}
    assert found["weights"]["0"]["3"] is None
    assert torch.equal(torch.tensor(found["weights"]["0"]["2"]), wanted.weights[0, 2])
    assert [path.name for path in out.parent.iterdir()] == ["maps.html"]


def test_the_command_compares_two_checkpoints(checkpoint, tokenizer, tmp_path, capsys):
    dense = tmp_path / "a" / "model"
    make(config=CONFIG).float().save_pretrained(dense)
    tokenizer.save_pretrained(dense)
    out, record = tmp_path / "maps.html", tmp_path / "maps.json"
    arguments = ["attention", str(dense), TEXT, "--against", checkpoint, "--out", f"{out},{record}"]
    assert main(arguments) == 0
    name = Path(checkpoint).name
    said = f"9 tokens; model: heads drawn: 12, pruned: 0; {name}: heads drawn: 6, pruned: 6\n"
    assert capsys.readouterr().out == f"{out}, {record}: {said}"
    data = data_of(out.read_text("utf-8"))
    assert [model["name"] for model in data["models"]] == ["model", name]
    assert [len(shown_weights(data, model)) for model in (0, 1)] == [12, 6]
    found = json.loads(record.read_text())
    assert found["weights"]["1"].keys() == found["against"]["weights"]["1"].keys()
    assert (found["model"], found["against"]["model"]) == ("model", name)
    assert found["against"]["weights"]["1"] == {"0": None, "1": None, "2": None, "3": None}


def test_a_pruned_model_saved_alone_is_read_by_the_tokenizer_of_the_first(checkpoint, pruned, tmp_path, capsys):
    pruned.save_pretrained(tmp_path / "alone")
    words = ["attention", checkpoint, TEXT, "--against", str(tmp_path / "alone"), "--out", str(tmp_path / "maps.json")]
    with pytest.warns(UserWarning, match=f"alone has no tokenizer: the text is read with {checkpoint}'s"):
        assert main(words) == 0
    found = json.loads((tmp_path / "maps.json").read_text())
    assert found["weights"] == found["against"]["weights"]
    assert main([*words[:4], str(tmp_path / "nowhere"), *words[5:]]) == 2
    assert f"there is no folder or file {tmp_path / 'nowhere'}" in capsys.readouterr().err


def test_names_of_checkpoints_are_short_and_differ(tmp_path):
    for folder in ("dense/model", "pruned/model", "pruned/best"):
        (tmp_path / folder).mkdir(parents=True)
    dense, pruned, best = (str(tmp_path / name) for name in ("dense/model", "pruned/model", "pruned/best/"))
    assert short_names(dense, pruned) == ["dense/model", "pruned/model"]
    assert short_names(dense, best) == ["model", "best"]
    assert short_names(dense) == ["model"]
    assert short_names("google-bert/bert-base-uncased", best) == ["google-bert/bert-base-uncased", "best"]
    assert short_names(dense, dense)[0].endswith("dense/model")


def test_an_error_has_a_message_and_leaves_no_file(checkpoint, tmp_path, capsys):
    def message(*arguments: str, model: str = checkpoint) -> str:
        try:
            status = main(["attention", model, *arguments])
        except SystemExit as end:
            status = end.code
        assert status == 2
        return capsys.readouterr().err.splitlines()[-1]

    out = ["--out", str(tmp_path / "a.html")]
    assert "add --out FILE.html or --out FILE.json" in message("the")
    assert "the text ' \\n' has no words" in message("the", "--pair", " \n", *out)
    assert "nowhere" in message("the", *out, model=str(Path(checkpoint, "nowhere")))
    assert f"{checkpoint} is a folder: a checkpoint is named before its text" in message(checkpoint, *out, model="the")
    assert not list(tmp_path.iterdir())
