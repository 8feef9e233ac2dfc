"""BertTokenizer gives what transformers' (Rust) BertTokenizer gives, and its files are read by both."""

import copy
import itertools
import json
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SPECIAL, set_entries

from bertlite import BertTokenizer
from bertlite.parity.command import demo_checkpoint
from bertlite.tokenizer import BatchEncoding
from tests.shipping.worlds import in_hub_cache

STRINGS = 8_000
WORDS = "the of and to in is that it was for on are as with his they at be this from have or by one had not but all"
PIECES = "ing ed er ly tion s es un re able ness est ity al 's t m ve"
TRICKY = [
    "",
    " ",
    "\t\n\r\x0b\x0c\x85\xa0\u2003\u3000",
    "\x00\x01\ufffd\u200b\u200d\ufeff\xad",
    "a\u200bb a\xadb a\ufffdb",
    "Héllo WÖRLD ÀÉÎÕÜ ñ ç ß ẞ ŉ",
    "e\u0301 A\u030a o\u0308\u0301 \u0301 \u0301a",
    "İstanbul ıI ſ ﬁ ﬀ Ⅷ ㎏ ½ ²",
    "ΣΊΣΥΦΟΣ Σ ς",
    "don't can't it's I'm we've they're",
    "a.b,c;d!e?f(g)h[i]j{k}l<m>n`o~p^q$r%s",
    "\u2018quoted\u2019 \u201cmore\u201d \u2026 \u2014 \u00bf\u00a1 。、「」",
    "我爱北京天安门 ｆｕｌｌ　ｗｉｄｔｈ",
    "混合Mixed文字and中文123字",
    "\U00020000\U0002a6df\U0002f800\uf900\u3400",
    "こんにちは カタカナ ｶﾀｶﾅ 안녕하세요 각",
    "שלום مرحبا नमस्ते ไทย ကမ္ဘာ",
    "😀👩\u200d👩\u200d👧 🇩🇪 ❤\ufe0f ☎",
    "[CLS] [SEP] [MASK] [PAD] [UNK]",
    "[MASK][MASK] a[MASK]b [mask] [ MASK ] [MASK",
    "##ing ## # #ing un##able",
    "x" * 100,
    "x" * 101,
    "é" * 100 + " " + "中" * 101,
    "\u0378\u0530\U000e0001\U0010ffff\ue000\uffff",
    "1,234.56 3/4 10:30 +1-2 a_b a-b @user #tag http://x.y/z?a=b&c=d",
]


def letters(first: int, last: int) -> list[str]:
    return [chr(code) for code in range(first, last + 1)]


def synthetic(characters: list[str], words: list[str]) -> list[str]:
    """Return a vocabulary of these characters, alone and inside words, and these words; some letters are unknown."""
    ascii_ = [c for c in letters(33, 126) if c not in "qQ~"]
    singles = dict.fromkeys([*ascii_, *characters])
    pieces = [f"##{piece}" for piece in (*singles, *PIECES.split())]
    return list(dict.fromkeys([SPECIAL[0], "[unused1]", *SPECIAL[1:], *singles, *pieces, *words]))


def vocabulary(kind: str) -> list[str]:
    words = WORDS.split()
    if kind == "cased":
        both = [*words, *(word.capitalize() for word in words)]
        return synthetic([*letters(0xA1, 0x17F), *letters(0x370, 0x3FF), "ẞ", "İ", "\u0301", "\u030a"], both)
    if kind == "chinese":
        return synthetic([*letters(0x4E00, 0x5400), *letters(0x3041, 0x30FE), "。", "，"], words)
    minilm = demo_checkpoint()
    if minilm is not None:
        return (minilm / "vocab.txt").read_text(encoding="utf-8").split("\n")[:30522]
    return synthetic([*letters(0x3B1, 0x3C9), *letters(0x4E00, 0x4F00), "ß"], words)


def fuzzed(count: int, seed: int = 0) -> list[str]:
    """Return random strings of words and of all kinds of difficult characters; every other one mostly readable."""
    rng = random.Random(seed)
    words = [*WORDS.split(), *SPECIAL, "un##able", "İ", "[mask]", "don't"]
    mixed = [lambda: rng.choice(words), lambda: rng.choice(words).title() + rng.choice(PIECES.split()), lambda: " "]

    def characters(*codes: tuple[int, int]) -> list[Any]:
        return [lambda first=first, last=last: chr(rng.randint(first, last)) for first, last in codes]

    of_any = [(0, 0x24F), (0x300, 0x36F), (0x370, 0x1FFF), (0x2000, 0x33FF), (0x3400, 0x9FFF), (0xAC00, 0xD7FF)]
    kinds = [*mixed, *characters(*of_any, (0xE000, 0xFFFF), (0x10000, 0x10FFFF))]
    plain = [*mixed * 3, *characters((32, 126), (0xA0, 0x17F), (0x4E00, 0x5400))]
    return ["".join(rng.choice(kinds if i % 2 else plain)() for _ in range(rng.randint(1, 24))) for i in range(count)]


KINDS = {"uncased": {"do_lower_case": True}, "cased": {"do_lower_case": False}, "chinese": {"do_lower_case": False}}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder as google's: vocab.txt and tokenizer_config.json."""
    path = tmp_path_factory.mktemp(request.param)
    (path / "vocab.txt").write_text("\n".join(vocabulary(request.param)) + "\n", encoding="utf-8")
    config = {**KINDS[request.param], "model_max_length": 23, "tokenizer_class": "BertTokenizer"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> BertTokenizer:
    return BertTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    return pytest.importorskip("transformers").BertTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def small() -> BertTokenizer:
    return BertTokenizer(vocabulary("cased"), do_lower_case=False, model_max_length=23)


# The same as transformers' -------------------------------------------------------------------------------------------


def with_more(batch: BatchEncoding) -> dict[str, Any]:
    """Return a batch with what its encodings know besides."""
    more = {"offset_mapping": "offsets", "special_tokens_mask": "special_tokens_mask"}
    return {**batch, **{name: [getattr(each, own) for each in batch.encodings] for name, own in more.items()}}


def assert_alike(ours: Any, stock: Any, texts: list[str], decoding: dict[str, Any], **options: Any) -> None:
    """Assert that ids, offsets and masks are those of transformers, and tokens and texts of the first thousand."""
    asked = {"return_offsets_mapping": True, "return_special_tokens_mask": True, **options}
    got, wanted = with_more(ours(texts, **options)), stock(texts, **asked)
    assert set(got) == set(wanted.data)
    differing = [text for i, text in enumerate(texts) if any(got[name][i] != wanted[name][i] for name in got)]
    assert not differing, f"{len(differing)} of {len(texts)}, such as {differing[0]!a}"
    for text, encoded in zip(texts[:1000], got["input_ids"], strict=False):
        tokens = ours.tokenize(text)
        assert tokens == stock.tokenize(text)
        ids = ours.convert_tokens_to_ids(tokens)
        assert ids == stock.convert_tokens_to_ids(tokens)
        assert ours.convert_ids_to_tokens(ids) == stock.convert_ids_to_tokens(ids)
        assert encoded == ours.encode(text)
        for skip in (False, True):
            wanted_text = stock.decode(encoded, skip_special_tokens=skip, **decoding)
            assert ours.decode(encoded, skip_special_tokens=skip) == wanted_text, text
    assert ours.decode(got["input_ids"][:9]) == [ours.decode(ids) for ids in got["input_ids"][:9]]


def test_ids_tokens_and_texts_are_those_of_transformers(ours, stock) -> None:
    assert_alike(ours, stock, [*TRICKY, *fuzzed(STRINGS)], {"clean_up_tokenization_spaces": False})
    assert len({tuple(ids) for ids in ours(fuzzed(STRINGS))["input_ids"]}) > 0.6 * STRINGS, "all the same to it"


def test_pairs_truncation_and_padding_are_those_of_transformers(ours, stock) -> None:
    rng = random.Random(2)
    texts = fuzzed(1200, seed=3)
    refused = 0
    for start in range(0, len(texts), 4):
        group = texts[start : start + 4]
        paired = rng.random() < 0.6
        args = (group[:2], group[2:]) if paired else (group,)
        options = {
            "truncation": rng.choice([True, "longest_first", "only_first", "only_second"] if paired else [True]),
            "max_length": rng.choice([8, 16, 32, 8, 16, 32, *range(6, 40)]),
            "padding": rng.choice([False, True, "max_length"]),
            "add_special_tokens": rng.random() < 0.8,
        }
        if not options["add_special_tokens"]:
            options["max_length"] = rng.randint(1, 9)
        try:
            wanted = stock(*args, **options)
        except BaseException as error:  # a panic of the Rust library is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            refused += 1
            with pytest.raises(ValueError, match=r"truncation=|no room"):
                ours(*args, **options)
        else:
            got = ours(*args, **options)
            assert dict(got) == dict(wanted.data), (args, options)
    assert refused < len(texts) / 8


def test_empty_second_texts_are_those_of_transformers(ours, stock) -> None:
    for first, second, words in itertools.product(("a b", "", "x y z"), ("c", "", "d e"), (False, True)):
        one = (first.split(), second.split()) if words else (first, second)
        rows = ([["first"] if words else "", one[0]], [one[1], one[1]])
        for args, special in itertools.product((one, rows), (False, True)):
            options: dict[str, Any] = {"is_split_into_words": words, "add_special_tokens": special}
            for more in ({"padding": True}, {"truncation": True, "max_length": 6}):
                given = {**options, **more}
                assert dict(ours(*args, **given)) == dict(stock(*args, **given).data), (args, given)
        if not words:
            assert ours.encode(*one) == stock.encode(*one)
            assert ours.tokenize(*one) == stock.tokenize(*one)
    assert ours.encode("a", "") == ours.encode("a")
    assert ours.encode(["a"], "", is_split_into_words=True) == ours.encode("a")
    assert ours(["a"], [""])["input_ids"] != [ours.encode("a")]


def test_one_text_and_one_pair_are_flat_as_in_transformers(ours, stock) -> None:
    for args in (("a b",), ("a", "b c"), (["a", "b c"],), ([("a", "b"), ("c d", "e")],), (["a"], ["b"]), (("a b",),)):
        assert dict(ours(*args)) == dict(stock(*args).data), args
        for kind in ("pt", "np"):
            got, wanted = (t(*args, padding=True, return_tensors=kind) for t in (ours, stock))
            assert set(got) == set(wanted.data)
            for name in got:
                assert type(got[name]) is type(wanted[name])
                assert got[name].dtype == wanted[name].dtype
                assert got[name].tolist() == wanted[name].tolist()


def test_words_are_those_of_transformers(ours, stock) -> None:
    rng = random.Random(4)
    texts = fuzzed(600, seed=5)
    sentences = [texts[i : i + rng.randint(1, 6)] for i in range(0, len(texts), 6)]
    got, wanted = (t(sentences, is_split_into_words=True) for t in (ours, stock))
    assert dict(got) == dict(wanted.data)
    for i, each in enumerate(got.encodings):
        assert each.word_ids == wanted.word_ids(i)
        assert each.tokens == wanted.tokens(i)
        assert each.sequence_ids == wanted.sequence_ids(i)
    one = sentences[0]
    assert dict(ours(one, is_split_into_words=True)) == dict(stock(one, is_split_into_words=True).data)
    pairs = (sentences[:5], sentences[5:10])
    assert dict(ours(*pairs, is_split_into_words=True)) == dict(stock(*pairs, is_split_into_words=True).data)


def test_attributes_are_those_of_transformers(ours, stock) -> None:
    names = ["model_max_length", "padding_side", "truncation_side", "model_input_names", "all_special_ids"]
    names += ["all_special_tokens", "do_lower_case", "special_tokens_map"]
    names += [f"{role}_token{end}" for role in ("unk", "sep", "pad", "cls", "mask") for end in ("", "_id")]
    for name in names:
        got, wanted = getattr(ours, name), getattr(stock, name)
        assert (sorted(got) if "all_" in name else got) == (sorted(wanted) if "all_" in name else wanted), name
    assert len(ours) == len(stock)
    assert ours.get_vocab() == stock.get_vocab()
    assert ours.vocab_size == stock.vocab_size


# Files ---------------------------------------------------------------------------------------------------------------


def test_saved_files_are_read_by_both_libraries(ours, stock, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    written = ours.save_pretrained(tmp_path / "saved")
    assert sorted(Path(path).name for path in written) == ["tokenizer.json", "tokenizer_config.json", "vocab.txt"]
    texts = [*TRICKY, *fuzzed(500, seed=8)]
    wanted = ours(texts)["input_ids"]
    (tmp_path / "saved" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again(texts)["input_ids"] == wanted
    assert (again.model_max_length, again.do_lower_case) == (23, ours.do_lower_case)
    assert BertTokenizer.from_pretrained(tmp_path / "saved")(texts)["input_ids"] == wanted
    (tmp_path / "saved" / "model.safetensors").write_bytes(b"\xff")  # a name of it is one of its folder's tokenizer
    (tmp_path / "saved" / "model.safetensors.index.json").write_text("{}")
    for name in ("vocab.txt", "tokenizer.json", "config.json", "model.safetensors", "model.safetensors.index.json"):
        assert BertTokenizer.from_pretrained(tmp_path / "saved" / name)(texts)["input_ids"] == wanted
    (tmp_path / "saved" / "tokenizer.json").unlink()
    stock.save_pretrained(tmp_path / "theirs")
    for name in ("saved", "theirs"):
        again = BertTokenizer.from_pretrained(tmp_path / name)
        assert (again(texts)["input_ids"], again.model_max_length) == (wanted, 23)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("strip", [True, False, None])
@pytest.mark.parametrize("chinese", [True, False])
def test_settings_do_what_they_do_in_transformers(lower, strip, chinese, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary("cased")), encoding="utf-8")
    settings = {"do_lower_case": lower, "strip_accents": strip, "tokenize_chinese_chars": chinese}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    stock = transformers.BertTokenizerFast.from_pretrained(tmp_path)
    texts = [*TRICKY, *fuzzed(300, seed=10)]
    read = BertTokenizer.from_pretrained(tmp_path)
    assert read(texts)["input_ids"] == stock(texts)["input_ids"]
    read.save_pretrained(tmp_path / "again")
    (tmp_path / "again" / "tokenizer_config.json").unlink()  # tokenizer.json alone must have the settings too
    assert BertTokenizer.from_pretrained(tmp_path / "again")(texts)["input_ids"] == read(texts)["input_ids"]
    assert BertTokenizer.from_pretrained(tmp_path, do_lower_case=not lower).do_lower_case is not lower


def test_added_tokens_survive(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    words = vocabulary("cased")
    added = {
        len(words): {"content": "<e>", "special": True},
        len(words) + 1: {"content": "Foo bar", "special": False, "single_word": True},
    }
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    config = {"do_lower_case": False, "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = BertTokenizer.from_pretrained(tmp_path)
    assert len(ours) == len(words) + 2
    assert ours.tokenize("a <e>b Foo bar Foo bars") == ["a", "<e>", "b", "Foo bar", *ours.tokenize("Foo bars")]
    assert ours.decode(ours.encode("a <e> b"), skip_special_tokens=True) == "a b"
    ours.save_pretrained(tmp_path)
    texts = ["a <e>b Foo bar Foo bars", "<e><e>", *fuzzed(100)]
    stock = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for again in (BertTokenizer.from_pretrained(tmp_path), stock):
        assert again(texts)["input_ids"] == ours(texts)["input_ids"]
        assert len(words) in again.all_special_ids
        assert len(words) + 1 not in again.all_special_ids
    values = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    values["added_tokens"][0] |= {"id": 3, "content": "<x>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="added token '<x>' cannot have the id 3: it would be"):
        BertTokenizer.from_pretrained(tmp_path)


def test_files_beside_tokenizer_json_count_as_in_transformers(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    last, token = len(vocabulary("uncased")), {"content": "<e>", "lstrip": False, "rstrip": False, "normalized": False}
    config, names = "tokenizer_config.json", "special_tokens_map.json"
    files: dict[str, dict[str, dict[str, Any]]] = {
        "config": {config: {"added_tokens_decoder": {last: {**token, "single_word": False, "special": True}}}},
        "older": {"added_tokens.json": {"<e>": last}},
        "gap": {"added_tokens.json": {"<e>": last + 7, "dog": last + 3}},  # and a word of the vocabulary
        "conflict": {config: {"cls_token": "[SEP]"}, names: {"cls_token": "[MASK]"}},
    }
    for name, of in files.items():
        BertTokenizer(vocabulary("uncased")).save_pretrained(tmp_path / name)
        for file, entries in of.items():
            set_entries(tmp_path / name / file, **entries)
        ours, stock = (each.from_pretrained(tmp_path / name) for each in (BertTokenizer, transformers.AutoTokenizer))
        texts = ["the <e> dog", "<e><e>", *fuzzed(50)]
        assert ours.cls_token == stock.cls_token
        if name != "conflict":  # in which transformers 4 puts the token of tokenizer.json before a text
            assert ours(texts)["input_ids"] == stock(texts)["input_ids"]
            assert last in ours("a <e>")["input_ids"]


def test_tokens_are_added_as_transformers_adds_them(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import AddedToken

    BertTokenizer(vocabulary("uncased")).save_pretrained(tmp_path)
    ours, stock = BertTokenizer.from_pretrained(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    before = len(ours)
    calls: list[tuple[Any, bool]] = [
        ("newword", False),
        (["[E1]", "[/E1]"], True),
        (["newword", "Zürich", "", "the"], False),
        (AddedToken("<x>", lstrip=True, rstrip=True), False),
        ([AddedToken("stock", single_word=True), "two words"], False),
        ("the", False),
        ([], False),
    ]
    for tokens, special in calls:
        assert ours.add_tokens(tokens, special_tokens=special) == stock.add_tokens(tokens, special_tokens=special)
    assert before < len(ours) == len(stock)
    assert ours.vocab_size == stock.vocab_size
    texts = ["a newword Newword zürich [E1] the [/E1] b <x> c stocks stock two words [e1]", "thenewword", *fuzzed(200)]
    wanted = stock(texts)["input_ids"]
    ours.save_pretrained(tmp_path / "saved")
    reloaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    for each in (ours, pickle.loads(pickle.dumps(ours)), BertTokenizer.from_pretrained(tmp_path / "saved"), reloaded):
        assert each(texts)["input_ids"] == wanted
        assert each.get_vocab() == stock.get_vocab()
        assert each.decode(wanted[0], skip_special_tokens=True) == stock.decode(wanted[0], skip_special_tokens=True)
        assert each.convert_ids_to_tokens(len(ours) - 1) == "two words"


def test_no_token_is_added_into_a_gap_of_the_ids() -> None:
    tokenizer = BertTokenizer({token: 2 * number for number, token in enumerate(SPECIAL)})
    with pytest.raises(ValueError, match="the ids go to 8 for 5 tokens: they have gaps"):
        tokenizer.add_tokens("new")
    assert len(tokenizer) == 5


def test_special_tokens_of_other_names(tmp_path) -> None:
    words = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", "a", "b"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    with pytest.raises(ValueError, match=r"vocab\.txt: the vocabulary of 7 tokens has no '\[UNK\]': pass unk_token="):
        BertTokenizer.from_pretrained(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({**names, "mask_token": {"content": "<mask>"}}))
    ours = BertTokenizer.from_pretrained(tmp_path)
    assert ours.encode("a <mask> c") == [2, 5, 4, 1, 3]
    ours.save_pretrained(tmp_path)
    assert not (tmp_path / "special_tokens_map.json").exists()
    assert BertTokenizer.from_pretrained(tmp_path).special_tokens_map == ours.special_tokens_map


def test_a_save_that_fails_changes_nothing(small, tmp_path, monkeypatch) -> None:
    small.save_pretrained(tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    other = BertTokenizer(vocabulary("chinese"))
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="the disk is full"):
        other.save_pretrained(tmp_path / "saved")
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_hub_id_is_read_from_the_cache(ours, tmp_path) -> None:
    ours.save_pretrained(tmp_path / "saved")
    in_hub_cache(tmp_path / "saved", tmp_path, "who/what")
    read = BertTokenizer.from_pretrained("who/what", cache_dir=tmp_path, local_files_only=True)
    assert read.encode("a b") == ours.encode("a b")
    with pytest.raises(FileNotFoundError, match=r"the hub's cache has no tokenizer\.json or vocab\.txt"):
        BertTokenizer.from_pretrained("who/else", cache_dir=tmp_path, local_files_only=True)


# A value -------------------------------------------------------------------------------------------------------------


def test_it_can_be_pickled_and_copied(small) -> None:
    texts = fuzzed(50)
    before = pickle.dumps(small)
    for again in (pickle.loads(before), copy.deepcopy(small)):
        assert again(texts) == small(texts)
        assert again.special_tokens_map == small.special_tokens_map
    small("a b c d e f g", padding="max_length", truncation=True, max_length=4)
    assert pickle.dumps(small) == before, "datasets takes the pickle for the function's fingerprint"
    batch = pickle.loads(pickle.dumps(small(["a b", "c"], padding=True, return_tensors="pt")))
    assert isinstance(batch, BatchEncoding)
    assert batch.encodings[0].word_ids == [None, 0, 1, None]
    assert batch.to("cpu").input_ids is batch["input_ids"]


def test_threads_do_not_disturb_each_other(small) -> None:
    texts = fuzzed(64)
    wanted = {n: small(texts, truncation=True, max_length=n, padding=True) for n in range(5, 21)}
    barrier = threading.Barrier(4)

    def work(n: int) -> bool:
        if n < 9:
            barrier.wait(timeout=20)
        return small(texts, truncation=True, max_length=n, padding=True) == wanted[n]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, wanted))


def test_no_texts_give_no_rows(small) -> None:
    assert small([]) == {"input_ids": [], "token_type_ids": [], "attention_mask": []}
    for empty in (small([], return_tensors="pt"), small("", add_special_tokens=False, return_tensors="pt")):
        assert empty["input_ids"].numel() == 0
        assert {column.dtype for column in empty.values()} == {torch.int64}
    assert {column.dtype for column in small([], return_tensors="np").values()} == {np.dtype(np.int64)}
    assert small.decode([]) == ""


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t(3), "the text is 3, a int; expected a string, or a list of them"),
        (lambda t: t(["a", None]), "text 1 holds None, a NoneType; expected a string"),
        (lambda t: t(["a", "b\ud800c"]), r"text 1 holds '\\ud800', half a character"),
        (lambda t: t("a", is_split_into_words=True), "expected a list of words, or several"),
        (lambda t: t([["a", "b", "c"]]), "need is_split_into_words"),
        (lambda t: t(["a", "b"], ["c"]), "there are 2 texts but text_pair is 1"),
        (lambda t: t("a", padding="longst"), "padding='longst' is unknown; have: False"),
        (lambda t: t("a", truncation="first"), "truncation='first' is unknown"),
        (lambda t: t("a", max_length=8), "max_length=8 has no effect: pass truncation=True or padding='max_length'"),
        (lambda t: t("a", truncation=True, max_length=2), "max_length=2 has no room for a token between the 2"),
        (lambda t: t(["a", "b c"], return_tensors="pt"), "input_ids has rows of 3 to 4 .* pass padding=True"),
        (lambda t: t("a", return_tensors="tf"), "return_tensors='tf' is unknown; have: 'pt', 'np'"),
        (lambda t: BertTokenizer(SPECIAL, padding_side="top"), "padding_side='top' is unknown; have: 'right', 'left'"),
        (lambda t: t.decode([-100, 5]), "-100 is not a token id; this tokenizer has"),
        (lambda t: t.convert_ids_to_tokens(10**6), "1000000 is not a token id"),
        (lambda t: BertTokenizer(["[UNK]", "a"]), r"the vocabulary of 2 tokens has no '\[SEP\]': pass sep_token="),
        (lambda t: BertTokenizer([]), "the vocabulary is empty"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_value_and_the_way_out(call, message, small) -> None:
    with pytest.raises(ValueError, match=message):
        call(small)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("_config.json", {"tokenizer_class": "BertJapaneseTokenizer"}, "is for a BertJapaneseTokenizer, and tok"),
        ("_config.json", {"do_basic_tokenize": False}, "do_basic_tokenize false"),
        (".json", {"model": {"type": "BPE"}}, "not a tokenizer.json that this version of tokenizers reads"),
    ],
)
def test_files_of_other_tokenizers_are_refused(name, changes, message, small, tmp_path) -> None:
    """Damaged files are in tests/checkpoint/test_hostile_files.py."""
    small.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="do_lowercase"):
        BertTokenizer.from_pretrained(tmp_path, do_lowercase=True)
    set_entries(tmp_path / f"tokenizer{name}", **changes)
    with pytest.raises(ValueError, match=message):
        BertTokenizer.from_pretrained(tmp_path)
