"""`keep_used_tokens`: the texts are cut as before, their outputs are the same to the bit, and others still work."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SIZES, assert_same, make, randomise_

from bertlite import BertConfig, BertForMaskedLM, BertModel, BertTokenizer
from bertlite.pruning.vocabulary import keep_used_tokens
from bertlite.runtime.processing import Processing

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
ROLES = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
LICENSE = Path(__file__).parents[2] / "LICENSE"  # a text that does not change
LINES = [line for line in LICENSE.read_text(encoding="utf-8").splitlines() if line.strip()]
TEXTS = [*LINES[::6], "no <mask> <e> x", "İstanbul 中国 \U0001f600", "zzzzzzzz"]
OTHERS = [*LINES[1::6], "", "Ελλάδα", "abc" * 50]
KINDS = {  # the parts of a tokenizer.json: the class that reads it
    "unigram": "XLMRobertaTokenizer",
    "unigram with bytes": "PreTrainedTokenizerFast",
    "bpe of bytes": "RobertaTokenizer",
    "bpe of characters": "PreTrainedTokenizerFast",
    "wordpiece": "MPNetTokenizer",
}


def trained(kind: str) -> Any:
    """Train a small tokenizer on all lines, as a family has it."""
    options: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False, "vocab_size": 900}
    if kind.startswith("unigram"):
        backend = tokenizers.Tokenizer(models.Unigram())
        backend.normalizer = normalizers.NFKC()
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
        backend.decoder = decoders.Metaspace()
        trainer: Any = trainers.UnigramTrainer(unk_token="<unk>", **options)
    elif kind.startswith("bpe"):
        suffix = {"end_of_word_suffix": "</w>"} if kind.endswith("characters") else {}
        backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>" if suffix else None, **suffix))
        parts = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Metaspace() if suffix else parts
        alphabet = [] if suffix else parts.alphabet()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **suffix, **options)
    else:
        backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(**options)
    backend.train_from_iterator(LINES, trainer)
    if kind == "unigram with bytes":
        pieces = [tuple(piece) for piece in json.loads(backend.to_str())["model"]["vocab"]]
        pieces += [(f"<0x{i:02X}>", -20.0) for i in range(256)]
        backend.model = models.Unigram(pieces, unk_id=3, byte_fallback=True)
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    backend.add_tokens(["<e>"])
    ids = {token: backend.token_to_id(token) for token in SPECIAL}
    frame = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B:1 </s>:1", [*ids.items()])
    roberta = processors.RobertaProcessing(("</s>", ids["</s>"]), ("<s>", ids["<s>"]), add_prefix_space=False)
    backend.post_processor = frame if "bytes" not in kind else processors.Sequence([roberta])
    return backend


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a language model of transformers' XLM-R in float64, with a tokenizer of one kind."""
    folder = tmp_path_factory.mktemp("dense")
    backend = trained(request.param)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": KINDS[request.param], **ROLES}))
    sizes = {**SIZES, "vocab_size": backend.get_vocab_size() + 7, "max_position_embeddings": 2000}
    config = transformers.XLMRobertaConfig(**sizes, bos_token_id=0, eos_token_id=2, pad_token_id=1)
    randomise_(transformers.XLMRobertaForMaskedLM(config).double()).save_pretrained(folder)
    return folder


def test_the_texts_are_cut_and_computed_as_before(checkpoint: Path, tmp_path: Path) -> None:
    model, tokenizer = BertForMaskedLM.from_pretrained(checkpoint), BertTokenizer.from_pretrained(checkpoint)
    small, pruned = keep_used_tokens(model, tokenizer, TEXTS)
    assert len(pruned) == small.config.vocab_size < 0.9 * len(tokenizer)
    small.save_pretrained(tmp_path)
    pruned.save_pretrained(tmp_path)
    again, read = BertForMaskedLM.from_pretrained(tmp_path), BertTokenizer.from_pretrained(tmp_path)
    stock = transformers.AutoTokenizer.from_pretrained(tmp_path)
    dense = transformers.XLMRobertaForMaskedLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    ids = [tokenizer.get_vocab()[token] for token, _ in sorted(pruned.get_vocab().items(), key=lambda item: item[1])]
    assert ids == sorted(ids)
    for some in (TEXTS, [*pairwise(TEXTS)]):
        got = read(some, padding=True, return_tensors="pt")
        before = tokenizer(some, padding=True, return_tensors="pt")
        assert torch.equal(torch.tensor(ids)[got["input_ids"]], before["input_ids"])
        assert torch.equal(pruned(some, padding=True, return_tensors="pt")["input_ids"], got["input_ids"])
        assert stock(some)["input_ids"] == read(some)["input_ids"]
    few, old = ({n: x[:9, :40] for n, x in each.items()} for each in (got, before))
    with torch.no_grad():
        out, wanted = (each(**inputs, output_hidden_states=True) for each, inputs in ((again, few), (model, old)))
        assert_same(out.hidden_states, wanted.hidden_states, atol=0)
        assert_same(out.logits, wanted.logits[..., ids])
        real = old["attention_mask"].bool()
        assert_same(out.logits[real], dense(**old).logits[real][..., ids])


def test_prompts_and_lower_case_of_sentence_transformers_count(checkpoint: Path) -> None:
    model, tokenizer = BertModel.from_pretrained(checkpoint), BertTokenizer.from_pretrained(checkpoint)
    prompts = {"query": "Contribution: ", "passage": "Trademarks "}
    tokenizer.sentences = Processing(prompts=prompts, default_prompt="query", lower_case=True)
    small, pruned = keep_used_tokens(model, tokenizer, TEXTS[:9])
    assert len(pruned) == small.config.vocab_size < 0.9 * len(tokenizer)
    assert pruned.sentences == tokenizer.sentences
    for prompt in (None, "", "Trademarks "):
        before, after = (each.encode_texts(TEXTS[:9], prompt=prompt)["input_ids"] for each in (tokenizer, pruned))
        wanted = [tokenizer.convert_ids_to_tokens(ids) for ids in before]
        assert [pruned.convert_ids_to_tokens(ids) for ids in after] == wanted


def test_other_texts_are_cut_into_more_pieces_and_none_is_lost(checkpoint: Path) -> None:
    model, tokenizer = BertModel.from_pretrained(checkpoint), BertTokenizer.from_pretrained(checkpoint)
    _, pruned = keep_used_tokens(model, tokenizer, TEXTS)
    before, after = ([each.tokenize(text) for text in OTHERS] for each in (tokenizer, pruned))
    assert before != after
    for old, new in zip(before, after, strict=True):
        assert new.count("<unk>") == old.count("<unk>")
        assert len(new) >= len(old)


def test_fields_and_rows_follow_the_ids() -> None:
    vocab = ["a", "##b", "gone", "[CLS]", "[SEP]", "[PAD]", "ab", "[UNK]", "[MASK]"]
    tokenizer = BertTokenizer({token: i for i, token in enumerate(vocab)})
    extra = {"eos_token_id": 4, "bos_token_id": None, "sep_token_id": 50}
    model = make(BertForMaskedLM, pad_token_id=5, extra=extra, tie_word_embeddings=False)
    model.get_output_embeddings().weight.requires_grad_(False)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    small, pruned = keep_used_tokens(model, tokenizer, iter([("ab", "ab")]))
    kept = [0, 1, 3, 4, 5, 6, 7, 8]
    assert_same(model.state_dict(), before, atol=0)
    config = small.config
    assert (config.vocab_size, config.pad_token_id, small.get_input_embeddings().padding_idx) == (8, 4, 4)
    assert config.extra == {"eos_token_id": 3, "bos_token_id": None, "sep_token_id": None}
    assert [pruned.pad_token_id, pruned.unk_token_id, pruned.mask_token_id] == [4, 6, 7]
    assert pruned.encode("ab gone") == [2, 5, 6, 3]
    assert_same(small.get_input_embeddings().weight, model.get_input_embeddings().weight[kept], atol=0)
    decoder, old = small.get_output_embeddings(), model.get_output_embeddings()
    assert_same([decoder.weight, decoder.bias], [old.weight[kept], old.bias[kept]], atol=0)
    assert small.cls.predictions.bias is decoder.bias
    assert not decoder.weight.requires_grad
    tied, _ = keep_used_tokens(make(BertForMaskedLM), tokenizer, ["ab"])
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight


def test_what_cannot_be_pruned_is_refused() -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "ab", "x", "##b", "##bd"]
    tokenizer, model = BertTokenizer({token: i for i, token in enumerate(pieces)}), make()
    with pytest.raises(ValueError, match="there are no texts to prune the vocabulary to"):
        keep_used_tokens(model, tokenizer, [])
    with pytest.raises(ValueError, match="the text 'abd' would be cut in another way: leave it out"):
        keep_used_tokens(model, tokenizer, ["xbd", "abd"])  # "ab" and then nothing; without "ab" it is "a", "##bd"
    with pytest.raises(ValueError, match="the tokenizer has a token 9; the model has 0 to 6"):
        keep_used_tokens(make(vocab_size=7), tokenizer, ["xbd"])
    with pytest.raises(TypeError, match="Linear is not a model of bertlite"):
        keep_used_tokens(torch.nn.Linear(1, 1), tokenizer, ["a"])
    tokenizer.backend_tokenizer.model = models.WordLevel({"[UNK]": 1}, unk_token="[UNK]")
    with pytest.raises(ValueError, match="the tokenizer is a WordLevel; the vocabulary of WordPiece, BPE and Unigram"):
        keep_used_tokens(model, tokenizer, ["a"])


def test_what_the_page_says_of_xlm_roberta_base() -> None:
    def megabytes(tokens: int) -> int:
        with torch.device("meta"):
            return round(4 * BertModel(BertConfig(vocab_size=tokens, type_vocab_size=1)).num_parameters() / 1e6)

    page = (LICENSE.parent / "notebooks" / "docs" / "budget.md").read_text(encoding="utf-8")
    said = (250_002, round(4 * 768 * 250_002 / 1e6), megabytes(250_002), megabytes(20_000))
    wanted = "XLM-R-base's {:,} tokens are {} of its {:,} MB in float32: with 20,000 it has {} MB"
    assert wanted.format(*said) in " ".join(page.split())
