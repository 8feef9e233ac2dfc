"""bertlite/runtime: packed folders give what the original gives, and the bits of the torch path."""

import copy
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import DISENTANGLED, set_entries
from conftest import SIZES as OF_BERT
from natively import ROTARY, WITH_MIXED, kernels_or_skip, native, natively
from tokenizers import Tokenizer, models, pre_tokenizers

from bertlite import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertTokenizer,
    Embedder,
    optimize_for_inference,
    prune_heads,
    prune_neurons,
)
from bertlite.inference import InferenceModel
from bertlite.inference.checks import MIXED
from bertlite.runtime import PackedModel, load, tasks
from bertlite.runtime.encoder import Encoder
from bertlite.runtime.library import load_kernels
from bertlite.runtime.options import NAMES
from bertlite.runtime.packed import FILE, read_packed
from bertlite.runtime.pooling import POOLINGS, SIMILARITIES
from bertlite.runtime.tasks import available_processors
from bertlite.runtime.texts import batches, run_batches
from bertlite.shipping.original import spans
from bertlite.shipping.pack import (
    MOST_FITTED,
    SENTENCES,
    pack,
    sample_of,
    summary_lines,
    texts_to_compare,
    texts_to_fit,
)
from bertlite.shipping.pack import TEXTS as BUILT_IN
from tests.clients.checks.common import minilm

transformers = pytest.importorskip("transformers")
pytestmark = native

SIZES = {**OF_BERT, "vocab_size": 61, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
del SIZES["type_vocab_size"]  # each class of transformers has its own
KINDS: dict[str, dict[str, Any]] = {
    "bert": {},
    "pruned": {},
    "roberta": {"positions_skip_padding": True, "padding_has_position": True, "pad_token_id": 1},
    "relative": {"position_embedding_type": "relative_key_query"},
    "bucketed": {"position_embedding_type": "bucketed"},
    "disentangled": {"position_embedding_type": "disentangled", "position_biased_input": False, **DISENTANGLED},
    "projected": {"embedding_size": 48},
    "rotary": ROTARY,
    "norms first": {"norm_first": True, "first_norm": True, "embeddings_norm": False},
}
LENGTHS = [17, 3, 40, 1]
SAMPLE = [[2 + (7 * i + j * j) % 59 for j in range(3 + i)] for i in range(25)]  # token ids
TEXTS = ["the cat sat on the mat", "a dog", "Paris is the capital of France , and London of England"]


def made(kind: str) -> BertModel:
    torch.manual_seed(0)
    model = BertModel(BertConfig(**{**SIZES, **KINDS[kind]})).eval()
    return prune_heads(model, {0: [0, 2], 1: range(3)}) if kind == "pruned" else model


@pytest.mark.parametrize(("dtype", "sample"), [*((each, None) for each in WITH_MIXED), (torch.int8, SAMPLE)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_the_torch_path_bit_for_bit(kind, dtype, sample, tmp_path):
    quick = natively(made(kind), dtype, sample=sample)
    quick.save(tmp_path / "quick")
    file = read_packed(tmp_path / "quick" / FILE, words_later=True)
    encoder = Encoder(file, load_kernels())
    ids = torch.randint(2, 61, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    ends = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    wanted = quick(ids, cu_seqlens=ends)
    for threads in (1, 2):
        found = encoder.run(ids.numpy(), None, LENGTHS, threads=threads)
        assert np.array_equal(found.tokens, wanted.last_hidden_state.float().numpy())
        assert np.array_equal(found.pooled, wanted.pooler_output.float().numpy())
    firsts = encoder.run(ids.numpy(), np.zeros_like(ids.numpy()), LENGTHS, first_only=True)
    assert np.array_equal(firsts.tokens, found.tokens[ends[:-1].numpy()])
    assert file.words is not None
    assert {*np.flatnonzero(file.words.is_read)} == {*ids.tolist()}, "a row is read when it is needed"
    whole = read_packed(tmp_path / "quick" / FILE).tensors["embeddings.word_embeddings.weight"]
    assert np.array_equal(file.words.table, np.where(file.words.is_read[:, None], whole, 0))


def test_a_file_written_over_after_it_was_loaded_is_an_error(tmp_path: Path) -> None:
    optimize_for_inference(made("bert"), dtype=torch.float32, backend="native").save(tmp_path / "quick")
    path = tmp_path / "quick" / FILE
    encoder = Encoder(read_packed(path, words_later=True), load_kernels())
    encoder.run(np.array([3, 4]), None, [2])
    with path.open("rb+") as file:
        file.write(bytes(path.stat().st_size))
    assert len(encoder.run(np.array([4, 3]), None, [2]).tokens) == 2, "these rows were read before"
    with pytest.raises(OSError, match=r"native\.safetensors was written over after it was loaded: load the folder"):
        encoder.run(np.array([3, 5]), None, [2])


@pytest.mark.parametrize(
    ("dtype", "sample"), [(torch.float32, None), (torch.int8, None), (torch.int8, SAMPLE), (MIXED, None)], ids=str
)
@pytest.mark.parametrize("name", ["avx2", "baseline_exact"])
def test_what_kernels_with_other_blocks_packed_gives_the_same_bits(name, dtype, sample, tmp_path):
    other = kernels_or_skip(name, reproducible=True)
    natively(made("relative"), dtype, reproducible=True, sample=sample).save(tmp_path / "quick")
    ids, kernels = np.arange(2, 60) % 61, load_kernels(reproducible=True)
    numbers = "float32" if dtype == torch.float32 else "int8"
    if kernels.blocks[numbers] == other.blocks[numbers]:
        pytest.skip("both sets of instructions have such blocks")
    ours, theirs = (Encoder(read_packed(tmp_path / "quick" / FILE), each) for each in (kernels, other))
    assert np.array_equal(theirs.run(ids, None, [18, 40]).tokens, ours.run(ids, None, [18, 40]).tokens)


@pytest.mark.parametrize("kind", ["bert", "rotary", "projected"])
def test_inputs_that_do_not_fit_are_named(kind: str, tmp_path: Path) -> None:
    optimize_for_inference(made(kind), dtype=torch.float32, backend="native").save(tmp_path / "quick")
    encoder = Encoder(read_packed(tmp_path / "quick" / FILE), load_kernels())
    with pytest.raises(ValueError, match="token ids run from 3 to 61; this model has 61 words"):
        encoder.run(np.array([3, 61]), None, [2])
    with pytest.raises(ValueError, match=r"segments run from 0 to 2; this model has 2, .* take token_type_ids out of"):
        encoder.run(np.array([3, 4]), np.array([0, 2]), [2])
    with pytest.raises(ValueError, match="a sequence has 41 tokens; this model has 40 positions"):
        encoder.run(np.full(41, 5), None, [41])


# Folders


@pytest.fixture
def folders(tmp_path: Path) -> Any:
    """Return a function that saves a small model of transformers with MiniLM's tokenizer, and returns its folder."""

    def make(cls: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
        torch.manual_seed(0)
        sizes, kind = {**SIZES, "vocab_size": 30522, "initializer_range": 0.3}, getattr(transformers, cls)
        kind(kind.config_class(**{**sizes, **fields})).to(dtype).save_pretrained(tmp_path / "model")
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
            shutil.copy(minilm() / name, tmp_path / "model")
        return tmp_path / "model"

    return make


@pytest.fixture
def sentences(folders: Any, tmp_path: Path) -> Path:
    """Save such a model as sentence-transformers does, with mean pooling and a limit of 32 tokens."""
    whole = pytest.importorskip("sentence_transformers").SentenceTransformer(str(folders("BertModel")), device="cpu")
    whole.max_seq_length = 32
    whole.save(str(tmp_path / "sentences"))
    return tmp_path / "sentences"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = tmp_path_factory.mktemp("packed") / "packed"
    assert pack(minilm(), folder, dtype="int8", texts=TEXTS)["bytes"] < 28e6
    return load(folder)


def test_a_classifier_gives_the_probabilities_of_a_pipeline(folders: Any, tmp_path: Path) -> None:
    folder = folders("BertForSequenceClassification", num_labels=3, id2label={0: "no", 1: "may be", 2: "yes"})
    record = pack(folder, tmp_path / "packed", dtype="int8", texts=TEXTS)
    assert (record["kind"], record["dtype"]) == ("classifier", "int8")
    assert record["difference"] < 1e-5
    packed = load(tmp_path / "packed", threads=1)
    assert packed.labels == ["no", "may be", "yes"]
    assert packed.predict(TEXTS).sum(1) == pytest.approx(1)
    assert np.array_equal(packed.predict(TEXTS)[:1], packed.predict(TEXTS[:1]))
    with pytest.raises(TypeError, match=r"is packed as classifier, which has no encode\(\); have: predict"):
        packed.encode(TEXTS)
    with pytest.raises(ValueError, match="packed is a packed classifier, which makes no vectors: give a sentence enc"):
        Embedder(tmp_path / "packed").encode(TEXTS)
    with pytest.raises(TypeError, match="give a list of texts, or of pairs of texts"):
        packed.predict("a text")
    with pytest.raises(TypeError, match="text 0 is 3; give a string or a pair of strings"):
        packed.predict([3])
    assert packed.predict([]).shape == (0, 3)


def test_a_reranker_gives_the_scores_of_a_cross_encoder(folders: Any, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    record = pack(folders("BertForSequenceClassification", num_labels=1), tmp_path / "packed", texts=TEXTS)
    assert record["kind"] == "cross-encoder"
    packed = load(tmp_path / "packed")
    scores = packed.predict([("a dog", text) for text in TEXTS])
    assert scores.shape == (3,)
    ranked = packed.rank("a dog", TEXTS)
    assert [each["corpus_id"] for each in ranked] == np.argsort(-scores).tolist()
    assert packed.rank("a dog", TEXTS, top_k=1) == ranked[:1]
    assert packed.rank("a dog", []) == []
    texts = [each["text"] for each in packed.rank("a dog", TEXTS, return_documents=True, batch_size=1)]
    assert texts == [TEXTS[each["corpus_id"]] for each in ranked]
    with pytest.raises(TypeError, match=r"predict\(\) has no apply_softmax=True: the folder has the activation"):
        packed.rank("a dog", TEXTS, apply_softmax=True)
    with pytest.raises(TypeError, match="texts is 'abc'; give a list of texts"):
        packed.rank("a dog", "abc")
    with pytest.raises(ValueError, match="top_k is -1; it must be an integer, 1 or more"):
        packed.rank("a dog", TEXTS, top_k=-1)


@pytest.mark.parametrize(
    ("head", "labels", "fields"),
    [
        ("Sequence", 1, {"num_hidden_layers": 0}),  # other tokens have no place in the output, which has a row a text
        ("Sequence", 3, {"num_hidden_layers": 0}),
        ("Sequence", 3, {"problem_type": "regression"}),  # which has no activation
        ("Sequence", 3, {"dtype": torch.float16}),  # which is compared in float32
        ("Token", 3, {"dtype": torch.float16}),
    ],
    ids=str,
)
def test_scores_are_the_original_ones_whatever_is_in_a_batch(head, labels, fields, folders, tmp_path):
    pytest.importorskip("sentence_transformers")
    folder, texts = folders(f"BertFor{head}Classification", num_labels=labels, **fields), [x * 3 for x in TEXTS] * 8
    assert pack(folder, tmp_path / "packed", texts=texts)["difference"] < 1e-5
    packed = load(tmp_path / "packed", threads=2)
    results = packed.tag if head == "Token" else packed.predict
    found, alone = results(texts), [results([text])[0] for text in texts]
    assert all(np.array_equal(one, other) for one, other in zip(found, alone, strict=True))
    assert "problem_type" not in fields or found.min() < 0


SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
ACTIVATIONS: dict[int, dict[str, Any]] = {  # by version of the library, what a config.json states
    3: {"sbert_ce_default_activation_function": SIGMOID},
    4: {"sentence_transformers": {"activation_fn": SIGMOID}},
    6: {"sentence_transformers": {"activation_fn": IDENTITY}},  # its own files have the sigmoid
}


@pytest.mark.parametrize("version", ACTIVATIONS)
def test_a_reranker_has_the_activation_that_any_version_of_its_library_saved(version, folders, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    folder = folders("BertForSequenceClassification", num_labels=2)
    if version == 6:
        prompts = {"prompts": {"ask": "find this: "}, "default_prompt_name": "ask"}
        library.CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Sigmoid(), **prompts).save(str(folder))
    set_entries(folder / "config.json", **ACTIVATIONS[version])
    record = pack(folder, tmp_path / "packed", texts=TEXTS)
    assert (record["kind"], record["original"]) == ("cross-encoder", "sentence-transformers")
    pairs = [("a dog", text) for text in TEXTS]
    scores = load(tmp_path / "packed").predict(pairs)
    assert np.allclose(scores, library.CrossEncoder(str(folder), device="cpu").predict(pairs), atol=1e-5)
    assert scores.min() > 0


def test_results_are_compared_on_texts_or_on_a_file_of_them(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("one\ntwo\n")
    for given in (path, str(path), ["one", "two"], np.array(["one", "two"])):
        assert texts_to_compare(given) == ["one", "two"]
    with pytest.raises(TypeError, match="text 1 is None; give a string"):
        texts_to_compare(["one", None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="has no texts to compare; leave texts out for the built-in ones"):
        texts_to_compare([])


def test_int8_is_fitted_to_texts_that_are_not_compared(sentences: Path, tmp_path: Path) -> None:
    few = pack(sentences, tmp_path / "few", dtype="int8", texts=TEXTS)
    count = len(SENTENCES.read_text(encoding="utf-8").splitlines())
    assert (few["texts"], few["rounding"]) == (3, f"fitted in 8 of 8 matrices, to {count} built-in texts")
    given = [f"{text} {i}" for i in range(90) for text in TEXTS]
    many = pack(sentences, tmp_path / "many", dtype="int8", texts=given)
    assert (many["texts"], many["rounding"]) == (135, "fitted in 8 of 8 matrices, to 135 given texts")
    assert [*summary_lines(many, {"FOLDER": tmp_path})][-1] == f"  weights: {many['rounding']}"
    assert pack(sentences, tmp_path / "floats", texts=given)["rounding"] is None
    assert InferenceModel.load(tmp_path / "many").rounding == "fitted in 8 of 8 matrices"
    assert load(tmp_path / "many").processing.made["rounding"] == many["rounding"]
    for repeated, size in (([*given, *given], 135), ([*map(str, range(600))], MOST_FITTED)):
        compared, fitted = texts_to_fit(repeated)
        assert len({*fitted}) == len(fitted) == size
        assert {*compared} == {*repeated} - {*fitted}
    compared, fitted = texts_to_fit(["a"] * 200)  # of which none would be left to compare
    assert (len(compared), len(fitted)) == (200, count)


def test_int8_is_fitted_to_tokens_as_the_model_meets_them(folders: Any, tmp_path: Path) -> None:
    folder = folders("BertForSequenceClassification", num_labels=1)
    pack(folder, tmp_path / "packed", texts=TEXTS)
    tokenizer = BertTokenizer.from_pretrained(folder)
    found = sample_of(load(tmp_path / "packed"), [*TEXTS, "a " * 99])
    wanted = tokenizer([*TEXTS, "a " * 99], [*TEXTS[1:], "a " * 99, TEXTS[0]], truncation=True, max_length=40)
    assert found == {name: wanted[name] for name in ("input_ids", "token_type_ids")}


def assert_spans_of_a_pipeline(folder: Path, texts: list[str], out: Path) -> None:
    assert pack(folder, out, texts=texts)["kind"] == "tagger"
    stock = transformers.pipeline("token-classification", str(folder), aggregation_strategy="first", device="cpu")
    found = load(out).tag(texts)
    assert spans(found) == spans([stock(text) for text in texts])
    assert any(found)
    for text, row in zip(texts, found, strict=True):
        assert [text[each["start"] : each["end"]] for each in row] == [each["word"] for each in row]


@pytest.mark.parametrize(
    "labels",
    [
        ("O", "B-LOC", "I-LOC", "B-PER", "I-PER"),
        ("O", "B-PER", "I-PER", "E-PER", "S-PER"),  # a span is named by the part after the first hyphen
        ("O", "PER", "B-ORG-X", "I-ORG-X", "ORG-X"),
        ("X-O", "B-O", "O", "B_PER", "I-"),
        ("O", "B-PER", "B-PER", "I-PER", "I-PER"),
    ],
)
def test_spans_are_those_of_a_pipeline_whatever_labels_are_called(labels: Any, folders: Any, tmp_path: Path) -> None:
    folder = folders("BertForTokenClassification", num_labels=5, id2label=dict(enumerate(labels)))
    texts = [*TEXTS, "John Smith's iPhone-15 costs $1,299.99!", "NEWYORK caf\u00e9-bar \u4f60\u597d"]
    texts += ["unbelievably antidisestablishmentarian", ""]
    assert_spans_of_a_pipeline(folder, texts, tmp_path / "packed")


def test_an_unknown_token_of_any_tokenizer_begins_a_word(tmp_path: Path) -> None:
    """Unigram's unknown token is written as the text that it stands for."""
    tokens = models.Unigram([(w, -3.0) for w in (*ROLES, "\u2581", *"abcdefg")], 3)
    labels = {"num_labels": 3, "id2label": {0: "O", 1: "B-X", 2: "I-X"}}
    save_roberta(tmp_path / "model", tokens, "ForTokenClassification", **labels)
    texts = ["ab\u4f60cd, ef", "\u4f60\u597d a", "a b c"]
    assert_spans_of_a_pipeline(tmp_path / "model", texts, tmp_path / "packed")


MODERN: dict[str, Any] = {  # fields of ModernBERT, whose windows end before the sequences do
    "local_attention": 6,
    "num_hidden_layers": 3,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
}
MISH = {"classifier_activation": "mish", **MODERN}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("BertForQuestionAnswering", {}, "is a BertForQuestionAnswering, not one of BertModel"),
        ("BertForSequenceClassification", {"type_vocab_size": 1}, "segment 1; the model has 1, from 0: take token_ty"),
        ("ModernBertForSequenceClassification", MISH, "has a head with the activation 'mish': use bertlite itself, w"),
        ("ModernBertForTokenClassification", MISH, "has a head with the activation 'mish': use bertlite itself, with"),
    ],
)
def test_what_the_runtime_lacks_is_refused_before_anything_is_written(name, fields, message, folders, tmp_path):
    """Without the segment that its tokenizer gives, a reranker is packed."""
    folder = folders(name, **fields, num_labels=1)
    with pytest.raises(ValueError, match=message):
        pack(folder, tmp_path / "packed", texts=TEXTS)
    assert not (tmp_path / "packed").exists()
    if "type_vocab_size" in fields:
        set_entries(folder / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
        assert pack(folder, tmp_path / "packed", texts=TEXTS)["difference"] < 1e-5


def test_labels_may_share_a_name_but_must_be_numbered_from_0(folders: Any, tmp_path: Path) -> None:
    folder = folders("BertForSequenceClassification", num_labels=3, id2label={0: "no", 1: "no", 2: "yes"})
    assert pack(folder, tmp_path / "packed", texts=TEXTS)["difference"] < 1e-5
    assert load(tmp_path / "packed").labels == ["no", "no", "yes"]
    set_entries(folder / "config.json", id2label={"1": "a", "2": "b", "3": "c"})
    with pytest.raises(ValueError, match=r"id2label in its config\.json has the labels 1, 2, 3; number them 0 to 2"):
        pack(folder, tmp_path / "other", texts=TEXTS)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("is_pruned", [False, True])
@pytest.mark.parametrize(
    ("head", "labels", "pooling"),
    [
        (BertForSequenceClassification, 3, "cls"),
        (BertForSequenceClassification, 1, "mean"),
        (BertForTokenClassification, 5, "cls"),
    ],
)
def test_heads_of_a_ModernBERT_give_the_scores_of_the_torch_path(head, labels, pooling, is_pruned, folders, tmp_path):
    name = head.__name__.replace("Bert", "ModernBert")
    folder = folders(name, num_labels=labels, classifier_pooling=pooling, **MODERN)
    theirs = getattr(transformers, name).from_pretrained(folder)
    for parameter in theirs.parameters():
        if parameter.dim() == 1:  # as made, norms have weights of 1
            torch.nn.init.normal_(parameter, mean=1, std=0.2)
    theirs.save_pretrained(folder)
    if is_pruned:
        model = prune_heads(head.from_pretrained(folder), {0: [0, 2], 1: range(3)})
        prune_neurons(model, {0: [3]}).save_pretrained(folder)

    # A bfloat16 activation is rounded once here, and torch rounds it twice.
    for dtype, within in (("float32", 1e-6), ("int8", 1e-6), ("bfloat16", 2**-6)):
        assert pack(folder, tmp_path / dtype, dtype=dtype, texts=TEXTS)["difference"] < 1e-5
        packed, quick = load(tmp_path / dtype), InferenceModel.load(tmp_path / dtype)
        results = packed.tag if packed.kind == "tagger" else packed.predict
        alone = [results([text])[0] for text in TEXTS]
        assert all(np.array_equal(one, other) for one, other in zip(alone, results(TEXTS), strict=True))
        for encoding in packed.texts.encode(TEXTS, ""):
            wanted = quick(torch.tensor([encoding.ids])).logits[0].float().numpy()
            states = packed.encoder.run(np.array(encoding.ids), None, [len(encoding.ids)])
            found = packed.encoder.score(states.tokens if states.pooled is None else states.pooled, 1)
            assert np.abs(found - wanted).max() <= within * np.abs(wanted).max()


ROLES = ("<s>", "<pad>", "</s>", "<unk>")


def save_roberta(folder: Path, tokens: Any, head: str, **fields: Any) -> str:
    """Save a model of transformers, with a tokenizer that adds no special tokens."""
    torch.manual_seed(0)
    sizes = {**SIZES, "max_position_embeddings": 42, "type_vocab_size": 1, "initializer_range": 0.3, **fields}
    kind = getattr(transformers, f"Roberta{head}")
    kind(transformers.RobertaConfig(**sizes, pad_token_id=1)).save_pretrained(folder)
    backend, roles = Tokenizer(tokens), {"pad_token": "<pad>", "unk_token": "<unk>", "model_max_length": 32}
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.save(str(folder / "tokenizer.json"))
    set_entries(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **roles)
    return str(folder)


def test_a_text_without_tokens_is_named(tmp_path: Path) -> None:
    """By what packs, by each call, and by what is optimised; sentence-transformers adds up nothing in a batch."""
    library = pytest.importorskip("sentence_transformers")
    tokens = models.WordLevel({w: i for i, w in enumerate((*ROLES, "\u2581a", "\u2581b"))}, "<unk>")
    body = library.sentence_transformer.modules.Transformer(save_roberta(tmp_path / "model", tokens, "Model"))
    pooling = library.sentence_transformer.modules.Pooling(96, "mean", include_prompt=False)
    whole = library.SentenceTransformer(modules=[body, pooling], device="cpu")
    whole.save(str(tmp_path / "whole"))
    assert pack(tmp_path / "whole", tmp_path / "packed")["texts"] < len(BUILT_IN)
    packed, texts, quick = load(tmp_path / "packed"), ["a b", "", "b"], optimize_for_inference(whole)
    with pytest.raises(ValueError, match="text 1 is '', which has no tokens and so no result: leave it out"):
        packed.encode(texts)
    with pytest.raises(ValueError, match="text 0 is '', which has no tokens after its prompt and so no result"):
        packed.encode(["", "a"], prompt="b")
    with pytest.raises(ValueError, match="leave texts without tokens out"):
        quick.encode([""])
    truth = copy.deepcopy(whole).double()
    for some, ours, prompt in [
        (texts, quick, ""),
        *((texts[::2], packed, prompt) for prompt in ("", "b ", "b a ")),  # no last token of a prompt is special
    ]:
        exact = truth.encode(some, prompt=prompt)
        error, allowed = (np.square(x.encode(some, prompt=prompt) - exact).mean() ** 0.5 for x in (ours, whole))
        assert 0 < error <= 2 * allowed, prompt


def test_a_copy_finds_its_folder_where_a_relative_name_means_another(encoder, monkeypatch, tmp_path):
    monkeypatch.chdir(encoder.folder.parent)
    packed = load(encoder.folder.name)
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(copy.copy(packed).encode(TEXTS), packed.encode(TEXTS))


@pytest.mark.skipif(os.name == "nt" or sys.platform == "darwin", reason="there all names are UTF-8 or UTF-16")
def test_a_folder_may_have_a_name_that_is_not_utf8(sentences: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    pack(sentences, folder, texts=TEXTS)
    assert load(folder).encode(TEXTS).shape == (3, 96)


def test_an_encoder_gives_the_vectors_of_sentence_transformers(tmp_path: Path) -> None:
    """By the same calls; other modules after the pooling are compared in tests/shipping/test_vectors.py."""
    library = pytest.importorskip("sentence_transformers")
    prompts = {"prompts": {"query": "find this: ", "plain": ""}, "default_prompt_name": "query"}
    whole = library.SentenceTransformer(str(minilm()), device="cpu", truncate_dim=13, **prompts)
    whole.max_seq_length = 12
    whole.save(str(tmp_path / "model"))
    assert pack(tmp_path / "model", tmp_path / "packed")["difference"] < 1e-5
    packed, texts = load(tmp_path / "packed"), [*TEXTS, *(f"number {i}" for i in range(60))]
    for options in ({}, {"prompt_name": "plain"}, {"normalize_embeddings": True, "batch_size": 2}):
        assert np.allclose(packed.encode(texts, **options), whole.encode(texts, **options), atol=1e-5)
    assert packed.encode(texts).shape == (len(texts), packed.dimension) == (63, 13)
    assert np.array_equal(packed.encode(texts[3]), packed.encode(texts)[3])
    packed.max_seq_length = whole.max_seq_length = packed.max_seq_length - 6
    assert np.allclose(packed.encode(texts), whole.encode(texts), atol=1e-5)
    with pytest.raises(ValueError, match="max_seq_length is 1; it must be an integer, 2 to 512"):
        packed.max_seq_length = 1
    with pytest.raises(ValueError, match="there is no prompt 'querry'; have: 'document', 'plain', 'query'"):
        packed.encode(texts, prompt_name="querry")


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (3, {}, "texts is 3; give a list of texts"),
        (None, {}, "texts is None; give a list of texts"),
        ({"a": "b"}, {}, "texts is {'a': 'b'}; give a list of texts"),
        (np.array("a"), {}, r"texts is array\('a', .*; give a list of texts"),
        (np.array([["a"]]), {}, r"texts is array\(\[\['a'\]\], .*; give a list of texts"),
        (["a", 3], {}, "text 1 is 3; give a string"),
        ([("a", "b")], {}, r"text 0 is \('a', 'b'\); give a string"),
        (["a"] * 4096 + [b"b"], {}, "text 4096 is b'b'; give a string"),
        ("\ud800", {}, r"text 0 is '\\ud800': character 0 is half of a surrogate pair; decode"),
        (["a"], {"prompt": 3}, "prompt is 3; give a string"),
        (["a"], {"prompt_name": ["query"]}, r"there is no prompt \['query'\]"),
        (["a"], {"batch_size": 0}, "batch_size is 0; it must be an integer, 1 or more"),
        (["a"], {"batchsize": 1}, r"encode\(\) has no argument 'batchsize'"),
        ("a", {"convert_to_tensor": True}, r"encode\(\) has no convert_to_tensor=True: .* torch.from_numpy"),
        ([], {"precision": "int8"}, r"encode\(\) has no precision='int8': .*quantize_embeddings"),
    ],
)
def test_what_is_no_text_is_named(texts: Any, options: Any, message: str, encoder: PackedModel) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        encoder.encode(texts, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads is 0; it must be an integer, 1 to 4096"),
        ({"threads": True}, "threads is True; it must be an integer, 1 to 4096"),
        ({"threads": 10**30}, r"threads is 10+; it must be an integer, 1 to 4096"),
        ({"batch_tokens": "8"}, "batch_tokens is '8'; it must be an integer, 1 or more"),
        ({"folder": "nosuch/one"}, r"there is no folder .*nosuch/one; `bertlite pack CHECKPOINT"),
        ({"folder": ""}, "folder is ''; give a path"),
        ({"device": "cuda"}, r"load\(\) has no device='cuda': the runtime computes on the CPU"),
        ({"dtype": "int8"}, r"load\(\) has no dtype='int8': the folder keeps the dtype"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], message: str, encoder: PackedModel) -> None:
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=message):
        load(**{"folder": encoder.folder, **options})


def test_arguments_of_sentence_transformers_that_change_nothing_are_taken(encoder, capsys):
    """Whatever its `encode` takes is done, or answered without Python's own words."""
    library = pytest.importorskip("sentence_transformers")
    wanted, calls = encoder.encode(TEXTS), (library.SentenceTransformer.encode, library.CrossEncoder.predict)
    for call in calls:
        for name, each in inspect.signature(call).parameters.items():
            if each.default is not each.empty:
                assert np.array_equal(encoder.encode(TEXTS, **{name: each.default}), wanted)
    counts: list[tuple[int, int]] = []
    encoder.encode(TEXTS, batch_size=2, show_progress_bar=True, progress=lambda *done: counts.append(done))
    assert [total for _, total in counts] == [3, 3]
    assert capsys.readouterr().err.endswith("\r3 of 3 texts\n")


def test_a_method_of_sentence_transformers_names_the_way(encoder: PackedModel) -> None:
    for name in NAMES:
        with pytest.raises(AttributeError, match=f"no '{name}': (it is|encode\\()"):
            getattr(encoder, name)


@pytest.mark.parametrize("name", SIMILARITIES)
def test_similarities_are_those_of_sentence_transformers(name: str, sentences: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    set_entries(sentences / "config_sentence_transformers.json", similarity_fn_name=name)
    pack(sentences, tmp_path / "packed")
    packed, whole = load(tmp_path / "packed"), library.SentenceTransformer(str(sentences), device="cpu")
    vectors = packed.encode(TEXTS)
    assert np.allclose(packed.similarity(vectors, vectors[:2]), whole.similarity(vectors, vectors[:2]), atol=1e-4)
    assert packed.similarity(vectors[0], vectors[1]).shape == (1, 1)
    small = (vectors / np.abs(vectors).max() * 127).astype(np.int8)
    assert np.array_equal(packed.similarity(small, small), packed.similarity(1.0 * small, 1.0 * small))
    with pytest.raises(ValueError, match=r"vectors of 8 and of \d+ numbers"):
        packed.similarity(vectors[:, :8], vectors)


def test_vectors_of_no_texts_have_a_dimension(encoder: PackedModel) -> None:
    assert encoder.encode([]).shape == (0, 384)
    small = load(encoder.folder, threads=np.int64(1), batch_tokens=np.int64(9))
    assert np.array_equal(small.encode(text for text in TEXTS), encoder.encode(TEXTS))


@pytest.mark.parametrize("pools_prompt", [True, False])
def test_poolings_have_the_bits_of_embed(pools_prompt: bool, sentences: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    modules = library.sentence_transformer.modules
    pooling = modules.Pooling(96, tuple(POOLINGS), include_prompt=pools_prompt)
    prompts = {"prompts": {"query": "find this: "}, "default_prompt_name": "query"}
    body = modules.Transformer(str(sentences))
    library.SentenceTransformer(modules=[body, pooling], device="cpu", **prompts).save(str(tmp_path / "model"))
    pack(tmp_path / "model", tmp_path / "packed")
    texts = [*TEXTS, "", *(f"number {i} " * (i % 7) for i in range(40))]
    wanted = Embedder(tmp_path / "model", backend="native").encode(texts)
    assert np.array_equal(load(tmp_path / "packed").encode(texts), wanted)
    for name, part in zip(POOLINGS, np.split(wanted, len(POOLINGS), axis=1), strict=True):
        pooled = Embedder(tmp_path / "model", backend="native", pooling=name).encode(texts)
        assert np.array_equal(pooled, part) or not pools_prompt, name


ALONE = """
import os, sys
import numpy, tokenizers
before = {*sys.modules}
from bertlite import runtime
model = runtime.load(sys.argv[1], threads=2)
assert not {"hashlib", "subprocess"} & ({*sys.modules} - before), "they take 4 MB"
first = model.encode(["a dog", "the cat sat on the mat"] * 20)
if not (child := os.fork()):
    os._exit(not (model.encode(["a dog"]) == first[:1]).all())
assert os.waitpid(child, 0)[1] == 0, "a fork gives other vectors"
assert "torch" not in sys.modules and "transformers" not in sys.modules
print(first[:2].tobytes().hex())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_without_torch_a_fork_gives_the_same_bits(encoder: PackedModel) -> None:
    wanted = load(encoder.folder, threads=1).encode(["a dog", "the cat sat on the mat"] * 20)
    done = subprocess.run([sys.executable, "-c", ALONE, encoder.folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == wanted[:2].tobytes().hex()


def test_a_changed_byte_beside_the_weights_is_found(sentences: Path, tmp_path: Path) -> None:
    pack(sentences, tmp_path / "packed", texts=TEXTS)
    for name, old, new in (("runtime.json", b"mean", b"max"), ("tokenizer.json", b"##s", b"##t")):
        whole = (tmp_path / "packed" / name).read_bytes()
        assert old in whole
        (tmp_path / "packed" / name).write_bytes(whole.replace(old, new, 1))
        with pytest.raises(ValueError, match="is damaged"):
            load(tmp_path / "packed")
        (tmp_path / "packed" / name).write_bytes(whole)
    assert load(tmp_path / "packed").encode(TEXTS).shape == (3, 96)


def test_files_of_another_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is no packed folder: it has no runtime\.json; .*`bertlite pack`"):
        load(minilm())
    for text in ("{", "[]", '{"format": 9, "kind": "encoder"}', '{"format": 1, "kind": "painter"}'):
        (tmp_path / "runtime.json").write_text(text)
        with pytest.raises(ValueError, match=r"runtime\.json (is not JSON|cannot be used: (it|format|kind) is)"):
            load(tmp_path)


def test_the_loop_runs_the_longest_texts_first_and_then_all_lengths_in_turn() -> None:
    """So the share of the work that is done predicts the time left; batches are taken as they are asked for."""
    texts = ["x" * (i % 97 + 1) for i in range(1000)]
    groups = list(batches([*map(len, texts)], 300))
    taken: list[int] = []

    def run(parts: Iterable[list[str]]) -> Iterator[int]:
        for part in parts:
            taken.append(sum(map(len, part)))
            yield taken[-1]

    loop = run_batches(texts, iter(groups), run)
    rows, found = next(loop)
    assert (rows, [found]) == (groups[0], taken), "memory runs out in the batch of the longest texts or never"
    done = [rows, *(rows for rows, _ in loop)]
    assert sorted(done) == sorted(groups)

    def error(order: list[list[int]]) -> float:
        """Return the largest error of the texts in a batch so far, from a third of the work on."""
        so_far = np.cumsum([*map(len, order)]) / np.arange(1, len(order) + 1)
        return float(np.abs(so_far[len(order) // 3 :] / so_far[-1] - 1).max())

    assert 5 * error(done) < error(groups)
    assert list(run_batches([], [], run)) == []


SYS, V1, V2 = "/sys/fs/cgroup", "cgroup cgroup rw,cpu,cpuacct", "cgroup2 cgroup rw"


def first_groups(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("wanted", "groups", "mounts", "files"),
    [
        (64, "", "", {}),
        (64, "0::/", f"/ {SYS} rw - {V2}", {f"{SYS}/cpu.max": "max 100000"}),
        (2, "0::/", f"/ {SYS} rw - {V2}", {f"{SYS}/cpu.max": "150000 100000"}),
        (1, "0::/", "", {f"{SYS}/cpu.max": "5000 100000"}),
        (64, "0::/", "", {f"{SYS}/cpu.max": "9900000 100000"}),
        # the group itself, one above it, and one next to it
        (3, "0::/a/b", f"/ {SYS} rw - {V2}", {f"{SYS}/a/b/cpu.max": "300000 100000", f"{SYS}/a/cpu.max": "max 9"}),
        (2, "0::/a/b", f"/ {SYS} rw - {V2}", {f"{SYS}/a/b/cpu.max": "3 1", f"{SYS}/a/cpu.max": "2 1"}),
        (64, "0::/a/b", f"/ {SYS} rw - {V2}", {f"{SYS}/b/cpu.max": "3 1", f"{SYS}/a/c/cpu.max": "2 1"}),
        # a mount that begins at the container's group, whose path is the host's
        (2, "0::/docker/1/in", f"/docker/1 {SYS} rw - {V2}", {f"{SYS}/in/cpu.max": "2 1", f"{SYS}/cpu.max": "4 1"}),
        (4, "0::/docker/1", f"/docker/1 {SYS} rw - {V2}", {f"{SYS}/cpu.max": "4 1"}),
        (4, "0::/../2", f"/ {SYS} rw - {V2}", {f"{SYS}/cpu.max": "4 1", "/sys/fs/2/cpu.max": "1 1"}),
        # version 1, alone and next to version 2
        (2, "4:cpu,cpuacct:/", "", first_groups(f"{SYS}/cpu,cpuacct", 200_000)),
        (2, "9:cpuacct,cpu:/", f"/ {SYS}/cpu rw - {V1}", first_groups(f"{SYS}/cpu", 150_000)),
        (64, "4:cpu:/", "", first_groups(f"{SYS}/cpu", -1)),
        (3, "4:cpu:/a/b", "", first_groups(f"{SYS}/cpu", -1) | first_groups(f"{SYS}/cpu/a", 300_000)),
        (5, "4:cpu:/docker/1", f"/docker/1 {SYS}/cpu rw - {V1}", first_groups(f"{SYS}/cpu", 50_000, 10_000)),
        (7, "4:cpu:/\n0::/", f"/ {SYS}/cpu rw - {V1}\n/ {SYS}/unified rw - {V2}", first_groups(f"{SYS}/cpu", 700_000)),
        (64, "5:cpuset:/", "", first_groups(f"{SYS}/cpuset", 200_000)),
        (64, "0::/", "", {f"{SYS}/cpu.max": "1 0"}),
    ],
)
def test_threads_are_within_the_limits_of_control_groups(wanted, groups, mounts, files, monkeypatch):
    lines = "\n".join(f"31 23 0:28 {line}" for line in mounts.splitlines())
    known = {"/proc/self/cgroup": groups, "/proc/self/mountinfo": lines, **files}
    monkeypatch.setattr(tasks, "read_or_empty", lambda path: known.get(path.as_posix(), "").strip())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(64)}, raising=False)
    assert available_processors() == wanted
