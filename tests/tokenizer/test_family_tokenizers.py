"""The tokenizers of RoBERTa, XLM-R and MPNet give what transformers' own fast classes give."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from test_tokenizer import TRICKY, fuzzed  # type: ignore[import-not-found]

from bertlite import BertTokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

ROOT = Path(__file__).parents[2]
STRINGS = 5000
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
MASK = AddedToken("<mask>", lstrip=True, special=True)  # as these families have it: it takes the space before it
CLASSES = {"bpe": "RobertaTokenizerFast", "unigram": "XLMRobertaTokenizerFast", "wordpiece": "MPNetTokenizerFast"}


def corpus() -> list[str]:
    """Return lines of real text: of the data sets beside the checkout, or of the repository's own pages."""
    data = ROOT.parent / "shared" / "data" / "wikitext2" / "valid.txt"
    paths = [data] if data.is_file() else [ROOT / "README.md", *sorted((ROOT / "notebooks" / "docs").glob("*.md"))]
    found = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return found[:500]


def trained(kind: str, texts: list[str]) -> Any:
    """Train a small tokenizer with the parts of a family's."""
    options = {"special_tokens": [*SPECIAL, MASK], "show_progress": False}
    if kind == "bpe":
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=backend.pre_tokenizer.alphabet(), **options)
    elif kind == "unigram":
        backend = tokenizers.Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=900, unk_token="<unk>", **options)
    else:
        backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=900, limit_alphabet=300, **options)
    backend.train_from_iterator(texts, trainer)
    ids = {token: backend.token_to_id(token) for token in SPECIAL}
    assert ids["<pad>"] == 1
    if kind == "unigram":
        pair = "<s> $A </s> </s> $B:0 </s>"
        framing: Any = processors.TemplateProcessing("<s> $A </s>", pair, [("<s>", 0), ("</s>", ids["</s>"])])
    else:
        framing = processors.RobertaProcessing(("</s>", ids["</s>"]), ("<s>", 0), add_prefix_space=False)
    backend.post_processor = framing
    return backend


@pytest.fixture(scope="module", params=CLASSES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tokenizer of a family as hubs have it, with sides that are not the default ones."""
    kind, path = request.param, tmp_path_factory.mktemp(request.param)
    trained(kind, [*corpus(), *TRICKY]).save(str(path / "tokenizer.json"))
    sides = {"padding_side": "left", "truncation_side": "left"} if kind == "unigram" else {}
    stated = {"tokenizer_class": CLASSES[kind].removesuffix("Fast"), "model_max_length": 25, **sides}
    (path / "tokenizer_config.json").write_text(json.dumps(stated))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"}
    mask = {"content": "<mask>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    (path / "special_tokens_map.json").write_text(json.dumps({**roles, "unk_token": "<unk>", "mask_token": mask}))
    return path


def test_5000_texts_and_pairs_are_those_of_transformers(folder: Path) -> None:
    ours = BertTokenizer.from_pretrained(folder)
    kind = json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"]
    cls = getattr(transformers, f"{kind}Fast", None) or getattr(transformers, kind)
    plain, own = transformers.PreTrainedTokenizerFast.from_pretrained(folder), cls.from_pretrained(folder)
    rng, words = random.Random(0), [word for line in corpus() for word in line.split()]
    read = [" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(STRINGS // 2)]
    texts = [text.replace("[MASK]", "<mask>").replace("[SEP]", "</s>") for text in fuzzed(STRINGS // 2, seed=31)]
    texts = [*read, *texts]
    rng.shuffle(texts)
    others = texts[1:] + texts[:1]
    for stock, args, options in (
        (own, (texts,), {}),
        (own, (texts, others), {}),
        (plain, (texts[:500],), {"padding": True, "truncation": True}),
        (plain, (texts[:500], others[:500]), {"padding": "max_length", "truncation": True}),
        (own, (texts[:500], others[:500]), {"padding": True, "truncation": True}),
    ):
        got = ours(*args, **options, return_token_type_ids=True)
        theirs = stock(*args, **{"padding": False, "truncation": False, **options}, return_token_type_ids=True)
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            differing = [i for i, row in enumerate(theirs[name]) if row != got[name][i]]
            assert differing == [], (type(stock).__name__, name, args[0][differing[0]])
    assert len({tuple(ids) for ids in got["input_ids"]}) > 400
    a, b = ours.encode("a", add_special_tokens=False), ours.encode("b", add_special_tokens=False)
    assert ours.encode("a", "b") == [0, *a, 2, 2, *b, 2]
    for ids in got["input_ids"][:200]:
        assert ours.decode(ids) == own.decode(ids)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 8194}, 8192),  # as bge-m3, with the family's padding
        ({"model_type": "distilbert", "max_position_embeddings": 512, "pad_token_id": 0}, 512),
        ({"model_type": "mpnet", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_without_a_stated_limit_the_positions_of_the_family_are_the_limit(
    config: dict[str, Any], limit: int, tmp_path: Path
) -> None:
    BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    stated = json.loads(path.read_text())
    del stated["model_max_length"]
    path.write_text(json.dumps(stated))
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = BertTokenizer.from_pretrained(tmp_path)
    assert tokenizer.model_max_length == limit
    assert len(tokenizer.encode("a " * 9999, truncation=True)) == limit
