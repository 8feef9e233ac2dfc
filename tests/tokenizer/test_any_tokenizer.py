"""A tokenizer.json of any parts gives what transformers gives: Unigram, BPE, WordPiece, the families'."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from conftest import SIZES, set_entries
from test_tokenizer import TRICKY, assert_alike, fuzzed  # type: ignore[import-not-found]

from bertlite import BertConfig, BertModel, BertTokenizer
from bertlite.opened.checkpoint import Checkpoint
from bertlite.shipping.carried import carry_tokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

XLMR = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
ROLES = {**XLMR, "bos_token": "<s>", "eos_token": "</s>"}
MASK = AddedToken("<mask>", lstrip=True, special=True)  # as RoBERTa has it: it takes the space before it
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", MASK, "<e>"]
FAST = "PreTrainedTokenizerFast"
FAMILIES = {"bpe": "RobertaTokenizer", "unigram": "XLMRobertaTokenizer", "mpnet": "MPNetTokenizer"}


def framed(backend: Any, kind: str) -> Any:
    """Return what makes <s> A </s></s> B </s> of two texts, with token types of 1 for the second only in WordPiece."""
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    if kind in ("bpe", "mpnet"):
        return processors.RobertaProcessing(ids[1], ids[0], add_prefix_space=False)
    pair = "<s> $A </s> </s> $B:0 </s>" if kind == "unigram" else "<s>:0 $A:0 </s>:0 </s>:1 $B:1 </s>:1"
    return processors.TemplateProcessing(single="<s> $A </s>", pair=pair, special_tokens=ids)


def trained(kind: str, texts: list[str]) -> Any:
    """Train a small tokenizer whose parts are unlike BERT's."""
    options: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}
    if kind == "unigram":  # as XLM-R's
        backend = tokenizers.Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=2000, unk_token="<unk>", **options)
    elif kind == "bpe":  # as RoBERTa's
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, **options)
    else:
        backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        parts = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
        backend.normalizer = normalizers.BertNormalizer() if kind == "mpnet" else normalizers.Sequence(parts)
        own = pre_tokenizers.BertPreTokenizer()
        backend.pre_tokenizer = own if kind == "mpnet" else pre_tokenizers.Whitespace()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=400, limit_alphabet=150, **options)
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = framed(backend, kind)
    return backend


@pytest.fixture(scope="module", params=["unigram", "bpe", "wordpiece", "mpnet"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a BERT with another kind of tokenizer, whose files set sides, padding and a token without a role."""
    path = tmp_path_factory.mktemp(request.param)
    backend = trained(request.param, fuzzed(4000, seed=21)[::2])
    backend.enable_padding(direction="left", pad_id=1, pad_token="<pad>", pad_type_id=1, length=30)
    backend.enable_truncation(9, direction="left")
    backend.save(str(path / "tokenizer.json"))
    BertModel(BertConfig(**{**SIZES, "vocab_size": 2000})).save_pretrained(path)
    set_entries(path / "special_tokens_map.json", **{**ROLES, "mask_token": {"content": "<mask>"}})
    stated = {"model_max_length": 23, "additional_special_tokens": ["<e>"], "do_lower_case": True}
    set_entries(path / "tokenizer_config.json", **stated, tokenizer_class=FAST, name_or_path="/home")
    return path


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Any, Any]:
    return BertTokenizer.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)


def test_texts_and_pairs_give_what_transformers_gives(pair) -> None:
    ours, stock = pair
    rng, texts = random.Random(22), [*TRICKY, *fuzzed(400, seed=23)]
    texts = [text.replace("[MASK]", "<mask>").replace("[SEP]", "<e>") for text in texts]
    # Token types are left out by transformers 5 by default.
    assert_alike(ours, stock, texts, {}, padding=False, truncation=False, return_token_type_ids=True)
    for start in range(0, len(texts) - 4, 4):
        group = texts[start : start + 4]
        args = (group,) if rng.random() < 0.3 else (group[:2], group[2:])
        options = {
            "truncation": rng.choice([True, False]),
            "padding": rng.choice([False, True, "max_length"]),
            "max_length": rng.choice([9, 13, 23]),
            "return_token_type_ids": True,
        }
        if not options["truncation"] and options["padding"] != "max_length":
            del options["max_length"]
        assert dict(ours(*args, **options)) == dict(stock(*args, **options).data), (args, options)


@pytest.mark.parametrize("states_roles", [True, False])
def test_debertas_tokenizer_gives_what_transformers_gives(states_roles: bool, tmp_path: Path) -> None:
    """Texts and pairs; its SentencePiece model is in tokenizer.json."""
    backend, special = tokenizers.Tokenizer(models.Unigram()), ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    spaces = normalizers.Replace(tokenizers.Regex(r"\s{2,}|[\n\r\t]"), " ")
    backend.normalizer = normalizers.Sequence([spaces, normalizers.NFC(), normalizers.Strip(left=False)])
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=special, unk_token="[UNK]", show_progress=False)
    backend.train_from_iterator(Path(__file__).read_text(encoding="utf-8").splitlines(), trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    transformers.DebertaV2TokenizerFast.from_pretrained(tmp_path).save_pretrained(tmp_path)
    stock = transformers.AutoTokenizer.from_pretrained(tmp_path)
    if not states_roles:
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "DebertaV2Tokenizer"}')
    ours, texts = BertTokenizer.from_pretrained(tmp_path), [*TRICKY, *fuzzed(300, seed=32)]
    assert ours.all_special_tokens == stock.all_special_tokens
    for args in ((texts,), (texts, texts[::-1])):
        for options in ({}, {"truncation": True, "max_length": 17, "padding": True}):
            assert dict(ours(*args, **options)) == dict(stock(*args, **options).data)


def test_settings_come_from_its_files(pair, folder) -> None:
    ours, stock = pair
    names = ("padding_side", "truncation_side", "model_max_length")
    for name in (*names, *ROLES, *(f"{role}_id" for role in ROLES)):
        assert getattr(ours, name) == getattr(stock, name), name
    listed = {name: token for name, token in stock.special_tokens_map.items() if isinstance(token, str)}
    assert ours.special_tokens_map == listed  # transformers 4 lists further ones beside those that have a role
    assert sorted(ours.all_special_tokens) == sorted(stock.all_special_tokens)
    assert ours.padding_side == ours.truncation_side == "left"
    assert BertTokenizer.from_pretrained(folder, padding_side="right", pad_token="<e>").pad_token == "<e>"
    with pytest.raises(ValueError, match=r"do_lower_case cannot be set: the parts are not BERT's"):
        BertTokenizer.from_pretrained(folder, do_lower_case=False)


@pytest.mark.parametrize("way", ["saved", "carried"])
def test_what_is_written_is_read_by_both(way, pair, folder, tmp_path) -> None:
    ours, _ = pair
    if way == "saved":
        ours.save_pretrained(tmp_path)
    else:
        carry_tokenizer(Checkpoint(folder).tokenizer, tmp_path, BertConfig.from_json_file(folder / "config.json"))
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (config["tokenizer_class"], "name_or_path" in config) == (FAST, False)
    texts = [*TRICKY, "a <e> b <mask>", *fuzzed(100, seed=24)]
    for again in (BertTokenizer.from_pretrained(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)):
        assert again(texts, texts)["input_ids"] == ours(texts, texts)["input_ids"]
        options = {"padding": True, "truncation": True, "return_token_type_ids": True}
        assert dict(again(texts[:9], **options)) == dict(ours(texts[:9], **options))
        assert sorted(again.all_special_tokens) == sorted(ours.all_special_tokens)
        assert again.model_max_length == 23
    assert (tmp_path / "vocab.txt").exists() == (folder.name.startswith(("wordpiece", "mpnet")))


def test_a_file_without_a_template_or_pad_token_is_read_as_it_is(tmp_path) -> None:
    backend = trained("bpe", TRICKY)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    set_entries(tmp_path / "tokenizer_config.json", tokenizer_class=FAST)
    ours, stock = (each.from_pretrained(tmp_path) for each in (BertTokenizer, getattr(transformers, FAST)))
    args, options = (["a b"], ["c"]), {"return_token_type_ids": True}
    assert dict(ours(*args, **options)) == dict(stock(*args, **options).data)
    assert ours.pad_token is ours.cls_token_id is None
    with pytest.raises(ValueError, match="no padding token: pass pad_token="):
        ours(["a", "b c d"], padding=True)
    with pytest.raises(ValueError, match=r"'<none>': pass pad_token="):
        BertTokenizer.from_pretrained(tmp_path, pad_token="<none>")
    set_entries(tmp_path / "tokenizer_config.json", tokenizer_class="XYTokenizer", auto_map={"AutoTokenizer": 1})
    with pytest.raises(ValueError, match=r"is for a XYTokenizer, and tokenizer.json does not hold all of it"):
        BertTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", [None, "RobertaTokenizer", "XLMRobertaTokenizerFast"])
def test_roles_that_no_file_names_are_robertas(kind: str | None, tmp_path: Path) -> None:
    vocab = {token: i for i, token in enumerate(("<s>", "<pad>", "</s>", "<unk>", "a", "<mask>"))}
    tokenizers.Tokenizer(models.BPE(vocab, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind} if kind else {}))
    found = BertTokenizer.from_pretrained(tmp_path)
    roles = (found.cls_token, found.sep_token, found.pad_token, found.unk_token, found.mask_token)
    assert roles == ("<s>", "</s>", "<pad>", "<unk>", "<mask>")
    assert found.pad_token_id == 1


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Write a tokenizer of a family as hubs have it, and return its class; one has sides that are not the default."""
    kind, path = request.param, tmp_path_factory.mktemp(request.param)
    trained(kind, fuzzed(4000, seed=21)[::2]).save(str(path / "tokenizer.json"))
    sides = {"padding_side": "left", "truncation_side": "left"} if kind == "unigram" else {}
    set_entries(path / "tokenizer_config.json", tokenizer_class=FAMILIES[kind], model_max_length=25, **sides)
    mask = {"content": "<mask>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    set_entries(path / "special_tokens_map.json", **{**ROLES, "mask_token": mask})
    return FAMILIES[kind], path


def test_texts_and_pairs_are_those_of_the_familys_own_class(family: tuple[str, Path]) -> None:
    name, path = family
    cls = getattr(transformers, f"{name}Fast", None) or getattr(transformers, name)
    ours, own = BertTokenizer.from_pretrained(path), cls.from_pretrained(path)
    texts = [text.replace("[MASK]", "<mask>").replace("[SEP]", "</s>") for text in fuzzed(4000, seed=31)]
    others = texts[1:] + texts[:1]
    cut = {"padding": True, "truncation": True}
    for args, options in (((texts,), {}), ((texts, others), {}), ((texts[:500], others[:500]), cut)):
        got = ours(*args, **options, return_token_type_ids=True)
        theirs = own(*args, **{"padding": False, "truncation": False, **options}, return_token_type_ids=True)
        for column in ("input_ids", "attention_mask", "token_type_ids"):
            differing = [i for i, row in enumerate(theirs[column]) if row != got[column][i]]
            assert differing == [], (column, args[0][differing[0]])
    assert len({tuple(ids) for ids in got["input_ids"]}) > 400
    a, b = ours.encode("a", add_special_tokens=False), ours.encode("b", add_special_tokens=False)
    assert ours.encode("a", "b") == [0, *a, 2, 2, *b, 2]
    for ids in got["input_ids"][:200]:
        assert ours.decode(ids) == own.decode(ids)


@pytest.mark.parametrize(
    ("config", "stated", "limit"),
    [
        ({"model_type": "bert", "max_position_embeddings": 31}, None, 31),
        ({"model_type": "bert", "max_position_embeddings": 31}, int(1e30), 31),
        ({"model_type": "bert", "max_position_embeddings": 31}, 23, 23),
        ({"model_type": "gpt2", "max_position_embeddings": 31}, None, None),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, None, 512),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 8194}, None, 8192),  # as bge-m3, with its padding
        ({"model_type": "distilbert", "max_position_embeddings": 512, "pad_token_id": 0}, None, 512),
        ({"model_type": "mpnet", "max_position_embeddings": 514, "pad_token_id": 1}, None, 512),
    ],
    ids=str,
)
def test_where_no_limit_is_stated_the_models_positions_are_it(
    config: dict[str, Any], stated: int | None, limit: int | None, tmp_path: Path
) -> None:
    BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]).save_pretrained(tmp_path)
    set_entries(tmp_path / "tokenizer_config.json", model_max_length=stated)
    set_entries(tmp_path / "config.json", **config)
    tokenizer = BertTokenizer.from_pretrained(tmp_path)
    if limit is None:
        with pytest.raises(ValueError, match="has no model_max_length to truncate or pad to: pass max_length="):
            tokenizer.encode("a", truncation=True)
    else:
        assert tokenizer.model_max_length == limit
        assert len(tokenizer.encode("a " * 9999, truncation=True)) == limit
