"""`bertlite embed`: vectors are right after any kill, and none is mixed up or lost."""

import copy
import inspect
import json
import pickle
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SIZES, randomise_, set_entries
from natively import assert_near, kernels_or_skip, natively

import bertlite
from bertlite import BertConfig, BertModel, BertTokenizer, Embedder
from bertlite.cli import main
from bertlite.commands import EmbedSettings, embed
from bertlite.embed import job as job_module
from bertlite.embed.command import read_placement
from bertlite.embed.embedder import find_model
from bertlite.embed.job import Job, Rows, embed_missing, write_shard
from bertlite.embed.settings import ROUNDING, SHOWN_BY
from bertlite.inference.checks import MIXED
from bertlite.inference.clients.bodies import OptimizedBody
from bertlite.inference.gpu.ahead import Parcel
from bertlite.inference.native import choice
from bertlite.runtime import PackedModel
from bertlite.runtime.packed import FILE
from bertlite.runtime.pooling import normalize
from bertlite.shipping.pack import pack
from bertlite.support.extras import install_hint
from bertlite.support.progress import Progress
from scripts.measure import embed as measure_embed
from scripts.measure.speed import engines as speed_engines
from tests.shipping.worlds import in_hub_cache

pq = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")
library = pytest.importorskip("sentence_transformers")
transformers = pytest.importorskip("transformers")
modules = library.sentence_transformer.modules

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
TEXTS = ["A sentence.", "Ein zweiter Satz, LÄNGER als der erste.", "", "word " * 300, "İ don't [MASK] it", "x"]


def texts_of(count: int) -> list[str]:
    return [
        " ".join(LETTERS[i % 26 :][: i % 7 + 1] + LETTERS[i * 3 % 26] for _ in range(i % 5 + 1)) for i in range(count)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def write_checkpoint(folder: Path, pruned: Mapping[int, Iterable[int]] | None = None, **changes: int) -> Path:
    model = randomise_(BertModel(BertConfig(**{**SIZES, "vocab_size": len(WORDS), **changes}))).float()
    bertlite.prune_heads(model, pruned or {}).save_pretrained(folder)
    BertTokenizer(WORDS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model with MiniLM's modules and the width of its vectors, and only one layer."""
    sizes = {"hidden_size": 384, "num_attention_heads": 12, "num_hidden_layers": 1, "max_position_embeddings": 96}
    folder = tmp_path_factory.mktemp("sentences")
    st = library.SentenceTransformer(str(write_checkpoint(folder / "body", **sizes)), device="cpu")
    st.add_module("2", modules.Normalize())
    st.max_seq_length = 64
    st.save(str(folder / "whole"))
    return folder / "whole"


@pytest.fixture(scope="module")
def embedder(checkpoint: Path) -> Embedder:
    return Embedder(checkpoint)


def test_a_name_without_a_slash_is_one_of_sentence_transformers(checkpoint, monkeypatch, tmp_path):
    for name in ("sentence-transformers/tiny", "bare"):
        in_hub_cache(checkpoint, tmp_path, name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert find_model("tiny", {}).name == "sentence-transformers/tiny"
    assert find_model("bare", {}).name == "bare"
    for name in ("nowhere", "models/nowhere", "/nowhere"):
        with pytest.raises(FileNotFoundError, match=rf"^there is no folder (or file )?{name}\b"):
            Embedder(name, options={"local_files_only": True}).encode(["a"])


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{text}\n" for text in texts_of(53)), encoding="utf-8")
    return path


def read(folder: Path) -> dict[Any, list[float]]:
    """Return {id: vector} of all shards; every id must be there once."""
    tables = [pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]
    ids = [name for table in tables for name in table["id"].to_pylist()]
    assert len(set(ids)) == len(ids)
    vectors = [vector for table in tables for vector in table["vector"].to_pylist()]
    return dict(zip(ids, vectors, strict=True))


# Vectors -------------------------------------------------------------------------------------------------------------


def test_the_vectors_are_those_of_sentence_transformers(sentences, tmp_path):
    """With its prompts, pooling without them, a Dense module and truncation."""
    st = library.SentenceTransformer(str(sentences), device="cpu")
    st.prompts, st.default_prompt_name = {"query": "query: ", "passage": "This is a PASSAGE. "}, "query"
    st.set_pooling_include_prompt(False)
    st.add_module("3", modules.Dense(384, 51))
    st.save(str(tmp_path / "model"))
    exact, found = copy.deepcopy(st).double(), []
    for options, call in (
        ({}, {}),
        ({"prompt_name": "passage"}, {"prompt_name": "passage"}),
        ({"prompt": ""}, {"prompt": ""}),
        ({"normalize": True, "truncate_dim": 7}, {"normalize_embeddings": True, "truncate_dim": 7}),
    ):
        embedder = Embedder(tmp_path / "model", **options)
        found.append(embedder.encode(TEXTS))
        assert found[-1].shape == (6, embedder.dimension)
        vectors = found[-1], st.encode(TEXTS, **call), exact.encode(TEXTS, **call)
        assert_near(*({"vectors": torch.from_numpy(each)} for each in vectors))
    assert min(np.abs(found[0] - other).max() for other in found[1:3]) > 1e-3
    assert embedder.settings["modules"]["3"].startswith("Dense(")
    with pytest.raises(ValueError, match=r"'qery' not found .*'query', .*'passage'"):
        Embedder(tmp_path / "model", prompt_name="qery").encode("a")
    with pytest.raises(ValueError, match="prompt is 'to ' and prompt_name 'query': give one of them"):
        Embedder(tmp_path / "model", prompt="to ", prompt_name="query")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_reproducible_vectors_have_the_bits_of_the_runtime(dtype, sentences, tmp_path, monkeypatch):
    """All of them, the norm too, whose sum torch orders by the processor's instructions.

    Packed int8 is rounded plainly here, as an `Embedder` of a checkpoint does it.
    """
    kernels_or_skip(reproducible=True)
    monkeypatch.setattr("bertlite.shipping.pack.texts_to_fit", lambda texts: (texts, []))
    texts, folder = [*texts_of(40), *TEXTS], shutil.copytree(sentences, tmp_path / "model")
    pack(folder, tmp_path / "packed", dtype=dtype, reproducible=True)
    wanted, options = PackedModel(tmp_path / "packed").encode(texts), {"dtype": dtype, "reproducible": True}
    assert (Embedder(folder, **options).encode(texts) == wanted).all()
    (folder / "modules.json").write_text(json.dumps(json.loads((folder / "modules.json").read_text())[:2]))
    unit = Embedder(folder, normalize=True, **options)
    assert (unit.encode(texts) == wanted).all()
    assert unit.settings["reproducible"]
    st = library.SentenceTransformer(str(folder), device="cpu")
    for act in (torch.nn.Tanh(), None):
        st.add_module("2", modules.Dense(384, 384, activation_function=act, use_residual=act is None))
        st.save(str(tmp_path / "dense"))
        for each in ({**options, "reproducible": False}, options):  # torch adds in an order that the batch decides
            found = Embedder(tmp_path / "dense", **each).encode(texts)
            alone = Embedder(tmp_path / "dense", **each, max_tokens=1).encode(texts[:9])
            assert (alone == found[:9]).all()
        if act is not None:  # the runtime has no residual
            pack(tmp_path / "dense", tmp_path / "packed", dtype=dtype, reproducible=True)
            assert (PackedModel(tmp_path / "packed").encode(texts) == found).all()
    st.add_module("2", modules.Dense(384, 5, activation_function=torch.nn.Softplus()))
    st.save(str(tmp_path / "dense"))
    with pytest.raises(ValueError, match=r"^Dense of .* depend on the processor: leave out reproducible"):
        Embedder(tmp_path / "dense", **options).encode("a")
    with pytest.raises(ValueError, match=r"bfloat16 of .* is not reproducible: use float32 or int8"):
        Embedder(folder, dtype="bfloat16", reproducible=True).encode("a")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, sentences: Path) -> Path:
    """Pack the same in int8, with a prompt."""
    kernels_or_skip()
    folder, out = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("packed") / "packed"
    st = library.SentenceTransformer(str(sentences), device="cpu")
    st.prompts = {"query": "find this: "}
    st.save(str(folder))
    pack(folder, out, dtype="int8")
    return out


def test_a_packed_folder_is_embedded_by_the_runtime(packed, lines, tmp_path, monkeypatch):
    """With every setting that it can obey, without sentence-transformers, and in jobs that go on."""
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    model, texts = PackedModel(packed), [*texts_of(40), *TEXTS]
    wanted = model.encode(texts)
    seen: list[int] = []
    assert (Embedder(packed, max_tokens=40, dtype="int8", backend="native").encode(texts, seen.extend) == wanted).all()
    assert sorted(seen) == [*range(len(texts))]
    for options in ({"prompt_name": "query"}, {"prompt": "find this: ", "dtype": torch.int8}):
        assert (Embedder(packed, **options).encode(texts) == model.encode(texts, prompt_name="query")).all()
    short = Embedder(packed, truncate_dim=9, normalize=True)
    assert short.dimension == 9
    assert (short.encode(texts) == np.stack([normalize(x[:9]) for x in wanted])).all()
    cut = Embedder(packed, max_length=7)
    assert cut.longest == 7
    assert (cut.encode("a b c d e f g") == cut.encode("a b c d e")).all()
    assert (cut.encode("a b c d e") == Embedder(packed).encode("a b c d e")).all()
    assert (Embedder(packed, max_length=80).encode(TEXTS[3]) != Embedder(packed).encode(TEXTS[3])).any()
    arguments = ["embed", str(packed), str(lines), "--out", str(tmp_path / "out"), "--shard-rows", "10"]
    assert main(arguments) == 0
    whole = read(tmp_path / "out")
    assert (np.array([*whole.values()], dtype=np.float32) == Embedder(packed).encode(texts_of(53))).all()
    sorted((tmp_path / "out").iterdir())[2].unlink()
    assert main([*arguments, "--dtype", "int8"]) == 0
    assert read(tmp_path / "out") == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "dtype is float32; .*packed, a packed folder, has int8: leave dtype out, or give"),
        ({"dtype": torch.bfloat16}, "dtype is bfloat16; .* has int8"),
        ({"pooling": "cls"}, "pooling is cls; .* has mean"),
        ({"reproducible": True}, "reproducible is True; .* has False"),
        ({"backend": "plain"}, "backend is plain; .* has native"),
        ({"device": "meta"}, "device is meta; .* has cpu"),
        ({"device": "gpu"}, "device is 'gpu'; give cpu, cuda or cuda:1"),
        ({"device": "xpu"}, "device is 'xpu'; give cpu, cuda or cuda:1"),
        ({"options": {"revision": "v1"}}, r"options is {'revision': 'v1'}; .* has {}"),
        ({"prompt_name": "qery"}, "there is no prompt 'qery'; have: .*'query'"),
        ({"max_length": 97}, "max_length is 97; this model takes 3 to 96 tokens"),
    ],
)
def test_settings_that_a_packed_folder_cannot_obey_are_refused(options, message, packed, tmp_path):
    """Before the input is read: its second row would be an error."""
    (tmp_path / "x.txt").write_text("a\n\n")
    with pytest.raises(ValueError, match=message):
        embed_missing(Job(Embedder(packed, **options), Rows((tmp_path / "x.txt",)), tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_packed_folder_of_mixed_layers_is_not_int8(checkpoint, tmp_path):
    kernels_or_skip()
    pack(checkpoint, tmp_path / "packed")
    natively(BertModel.from_pretrained(checkpoint, add_pooling_layer=False), MIXED).save(tmp_path / "weights")
    shutil.copy(tmp_path / "weights" / FILE, tmp_path / "packed")
    embedder = Embedder(tmp_path / "packed")
    assert (embedder.encode(texts_of(9)) == PackedModel(tmp_path / "packed").encode(texts_of(9))).all()
    assert embedder.settings["dtype"] == "mixed"
    with pytest.raises(ValueError, match=r"dtype is int8; .* has mixed: leave dtype out"):
        Embedder(tmp_path / "packed", dtype="int8").encode("a")


def test_an_encoder_that_is_no_BERT_runs_as_it_is(tmp_path, caplog):
    config = transformers.AlbertConfig(**{**SIZES, "vocab_size": len(WORDS), "embedding_size": 21})
    transformers.AlbertModel(config).save_pretrained(tmp_path)
    transformers.BertTokenizerFast(str(write_checkpoint(tmp_path / "bert") / "vocab.txt")).save_pretrained(tmp_path)
    plain = library.SentenceTransformer(str(tmp_path), device="cpu").encode(texts_of(9))
    assert np.abs(Embedder(tmp_path).encode(texts_of(9)) - plain).max() < 1e-6
    assert "embedding runs the model as it is: there is no encoder to optimise" in caplog.text
    half = Embedder(tmp_path, dtype="bfloat16").encode(texts_of(9))
    assert half.dtype == np.float32
    assert 0 < np.abs(half - plain).max() < 0.1
    with pytest.raises(TypeError, match="there is no encoder to optimise"):
        Embedder(tmp_path, backend="native").encode("a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "sum"}, "pooling mode: 'sum'"),
        ({"max_length": 41}, "max_length is 41; this model takes 3 to 40 tokens"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be an integer, 1 or more"),
        ({"max_tokens": "8"}, "max_tokens is '8'; give an integer"),
        ({"truncate_dim": True}, "truncate_dim is True; give an integer or None"),
        ({"dtype": "int4"}, "int4"),
        ({"dtype": "float64"}, r"dtype torch\.float64 is not among"),
        ({"dtype": "float16"}, "float16 is for GPUs"),
        ({"backend": "fast"}, "backend 'fast' is unknown; have: auto, native, graphs, plain"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message, checkpoint):
    with pytest.raises((TypeError, ValueError), match=message):
        Embedder(checkpoint, **options).encode("a")


def test_what_is_no_text_is_refused(embedder):
    with pytest.raises(TypeError, match="text 1 is None; give a string"):
        embedder.encode(["a", None])
    for wrong in (None, {"a", "b"}):  # a set has no order for its vectors
        with pytest.raises(TypeError, match=r"texts is .*; give a list of texts"):
            embedder(wrong)
    assert embedder(np.str_("a film")).ndim == 1


def test_without_sentence_transformers_it_says_how_to_install_it(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ModuleNotFoundError) as raised:
        Embedder(checkpoint).encode("a")
    assert str(raised.value).startswith("embedding texts needs sentence_transformers, which is not installed")
    assert install_hint("embed") in str(raised.value)


def test_the_backend_that_is_named_is_taken(checkpoint, embedder, monkeypatch, kernels_run):
    wanted = embedder.encode(texts_of(9))
    plain = Embedder(checkpoint, backend="plain", dtype="float64")
    assert plain.dimension == 48
    kernels_run.clear()  # of the loading
    exact = plain.encode(texts_of(9))
    assert set(kernels_run) == {"packed"}
    choice.warn_once.cache_clear()
    monkeypatch.setattr(choice, "missing_for_native", lambda *_: "none here")
    with pytest.warns(RuntimeWarning, match="plain model, without the native kernels: none here"):
        other = Embedder(checkpoint).encode(texts_of(9))
    assert_near(*({"vectors": torch.from_numpy(each)} for each in (wanted, other, exact)))
    for options in ({"backend": "native"}, {"dtype": "int8"}):
        with pytest.raises(ValueError, match="native kernels cannot run this model: none here"):
            Embedder(checkpoint, **options).encode("a")


def test_batches_are_within_the_budget_and_a_longer_text_is_alone(checkpoint, monkeypatch):
    embedder, batches = Embedder(checkpoint, max_tokens=16), []
    plain = Embedder.encode_batch

    def recorded(self: Embedder, texts: list[str]) -> Any:
        batches.append(texts)
        return plain(self, texts)

    assert embedder.dimension == 48
    monkeypatch.setattr(Embedder, "encode_batch", recorded)
    texts = [*texts_of(20), "abc " * 19]
    embedder.encode(texts)
    assert sorted(text for batch in batches for text in batch) == sorted(texts)
    assert [texts[-1]] in batches
    assert all(sum(1 + len(text) // 4 for text in batch) <= 16 or len(batch) == 1 for batch in batches)
    assert len(batches) < 16


def test_on_a_gpu_texts_are_tokenized_ahead_and_vectors_are_the_same(checkpoint, monkeypatch):
    """With prompts, truncation and lengths of 1, and where a batch does not fit into memory; the CPU is the GPU."""
    options = {"prompt": "ab ", "normalize": True, "truncate_dim": 31, "max_tokens": 24}
    embedder, texts, failed = Embedder(checkpoint, **options), texts_of(53), []
    wanted = embedder.encode(texts)
    vars(embedder)["device"] = "meta"
    monkeypatch.setattr(Parcel, "send", lambda parcel, _: parcel.views(parcel.memory))
    seen: list[int] = []
    assert (embedder.encode(texts, seen.extend) == wanted).all()
    assert sorted(seen) == [*range(53)]
    plain = type(embedder.encoder).__call__

    def fails_once(encoder: Any, features: Any) -> Any:
        if not failed:
            failed.append(features)
            raise torch.OutOfMemoryError("none")
        return plain(encoder, features)

    monkeypatch.setattr(type(embedder.encoder), "__call__", fails_once)
    vars(embedder)["encode_batch"] = replace(embedder, device="cpu").encode_batch
    assert (embedder.encode(texts) == wanted).all()
    assert failed


def test_padding_is_on_the_right_whatever_the_tokenizer_says(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "left")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "padding_side": "left"}))
    embedder = Embedder(folder)
    assert (embedder.encode(["a", "b c a b c"])[0] == embedder.encode(["a"])[0]).all()


def test_an_embedder_is_a_small_value_until_it_is_used(checkpoint):
    embedder = Embedder(checkpoint)
    before = pickle.dumps(embedder)
    wanted = embedder.encode(["a b"])
    assert any(isinstance(part, OptimizedBody) for part in embedder.encoder.modules())
    assert pickle.dumps(embedder) == before
    assert len(before) < 2000
    assert (pickle.loads(before).encode(["a b"]) == wanted).all()


def test_it_can_be_called_with_columns_or_with_texts(checkpoint, embedder):
    named, both = Embedder(checkpoint, text="body", vector="v"), ["a", "b c"]
    wanted, got = embedder.encode(both), named({"body": np.array(both), "n": [1, 2]})
    assert list(got) == ["body", "n", "v"]
    for vectors in (got["v"], *map(embedder, (both, np.array(both, dtype=object), pa.array(both)))):
        assert (vectors == wanted).all()
    for one in (embedder.encode("a"), embedder("a"), embedder({"text": "a"})["vector"]):
        assert one.shape == (48,)
        assert (one == wanted[0]).all()
    assert embedder.encode([]).shape == (0, 48)
    assert len(inspect.signature(embedder).parameters) == 1  # Spark's predict_batch_udf hands over so many columns
    with pytest.raises(ValueError, match="there is no column 'body'; have: text"):
        named({"text": ["a"]})


def test_datasets_maps_it(embedder):
    texts = {"text": texts_of(7)}
    mapped = pytest.importorskip("datasets").Dataset.from_dict(texts).map(embedder, batched=True, batch_size=3)
    np.testing.assert_allclose(np.array(mapped["vector"]), embedder.encode(texts_of(7)), atol=1e-6)


def test_the_benchmark_compares_the_same_paragraphs(checkpoint, tmp_path, monkeypatch, capsys):
    text, path = tmp_path / "wiki.txt", tmp_path / "embed.json"
    text.write_text("\n".join(f" = heading = \n\n {each} " for each in texts_of(11)))
    assert measure_embed.paragraphs(text, 99) == texts_of(11)

    def peer(model: str, dtype: str) -> Any:
        return Embedder(model, backend="plain", dtype="float64" if dtype == "float32" else dtype).encode

    def without(model: str, dtype: str, texts: list[str]) -> Any:
        if dtype == "int8":
            raise ImportError("no module named optimum")
        return Embedder(model, dtype="float32", pooling="mean" if dtype == "float32" else "max").encode

    monkeypatch.setattr(measure_embed, "with_torch", peer)
    monkeypatch.setattr(measure_embed, "with_openvino", without)
    stand_in = speed_engines.Engine("onnxruntime", speed_engines.bertlite_engine("eager"), ("float32",))
    monkeypatch.setattr(measure_embed, "ENGINES", (stand_in,))
    arguments = [str(checkpoint), str(text), "--texts", "5", "--rounds", "7", "--out", str(path)]
    assert measure_embed.main(arguments) == 0
    record = json.loads(path.read_text())
    lengths = [len(BertTokenizer(WORDS).encode(texts_of(11)[i])) for i in (0, 2, 4, 6, 8)]
    assert [record["data"][name] for name in ("texts", "tokens", "longest")] == [5, sum(lengths), max(lengths)]
    errors = record["errors"]
    assert 0 < errors["bertlite native float32"] < 1e-5 < errors["bertlite native bfloat16"] < 0.05
    assert 0 < errors["onnxruntime float32"] < 1e-5
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


def test_a_job_writes_every_row_once(checkpoint, embedder, lines, tmp_path, capsys):
    out, record = tmp_path / "out", tmp_path / "record.json"
    arguments = ["embed", str(checkpoint), str(lines), "--out", f"{out},{record}", "--shard-rows", "10"]
    assert main([*arguments, "--keep-text"]) == 0
    assert "53 rows, 48 numbers each, complete" in capsys.readouterr().out
    got, wanted = read(out), embedder.encode(texts_of(53))
    assert list(got) == list(range(53))
    np.testing.assert_allclose(np.array(list(got.values())), wanted, atol=1e-6)
    manifest = json.loads(record.read_text())
    assert manifest["shards"] == {f"part-{i:05d}-of-00006.parquet": 10 if i < 5 else 3 for i in range(6)}
    assert (manifest["model"]["sha256"], manifest["settings"]["dtype"]) == (embedder.loaded.sha256, "float32")
    assert manifest["input"]["rows"] == 53
    assert "'mean'" in manifest["settings"]["modules"]["1"]
    assert sorted(path.name for path in out.iterdir()) == [*manifest["shards"]]
    table = pq.read_table(out / "part-00005-of-00006.parquet")
    assert table["text"].to_pylist() == texts_of(53)[50:]
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 48)
    done = manifest["embedded"]
    assert (done["shards"], done["characters"]) == (6, sum(map(len, texts_of(53))))


@pytest.mark.parametrize(
    ("ids", "type"), [([-(2**63), 5], pa.int64()), ([5, 2**64 - 1], pa.uint64()), (["a", "5"], pa.string())]
)
def test_other_readers_take_the_folder_for_one_table(ids, type, checkpoint, embedder, tmp_path):
    path, out = tmp_path / "x.jsonl", tmp_path / "out"
    path.write_text("".join(json.dumps({"text": f"a {name}", "id": name}) + "\n" for name in ids))
    assert main(["embed", str(checkpoint), str(path), "--id", "id", "--out", str(out), "--shard-rows", "1"]) == 0
    table = pq.read_table(out)
    assert table["id"].to_pylist() == ids
    assert table["id"].type == type
    wanted = embedder.encode([f"a {name}" for name in ids])
    np.testing.assert_allclose(np.stack(table["vector"].to_numpy()), wanted, atol=1e-6)
    frame = pytest.importorskip("pandas").read_parquet(out)
    assert frame["id"].tolist() == ids
    np.testing.assert_allclose(np.stack(frame["vector"]), wanted, atol=1e-6)
    assert pytest.importorskip("polars").read_parquet(out)["id"].to_list() == ids
    datasets = pytest.importorskip("datasets")
    options = {"data_dir": str(out), "split": "train", "cache_dir": str(tmp_path / "cache")}
    assert datasets.load_dataset("parquet", **options)["id"] == ids


def test_a_shard_is_minutes_of_work_unless_its_rows_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(job_module, "SHARD_ROWS", 4)
    monkeypatch.setattr(job_module, "SHARD_CHARACTERS", 10)
    embedder: Any = SimpleNamespace(longest=2)  # of a longer text, 16 characters count
    path = tmp_path / "x.txt"
    lengths = [1, 1, 1, 1, 1, 5, 4, 1, 99, 99, 1]
    path.write_text("".join("x" * length + "\n" for length in lengths))

    def sizes(**options: int) -> list[list[int]]:
        job = Job(embedder, Rows((path,)), tmp_path, **options)
        return [[len(text) for _, text in rows] for _, rows in job.shards()]

    assert sizes() == [[1, 1, 1, 1], [1, 5, 4], [1], [99], [99], [1]]
    assert sizes(shard_rows=6) == [lengths[:6], lengths[6:]]


def test_a_second_run_does_only_what_is_missing_also_from_before_a_setting_was_added(embedder, lines, tmp_path):
    job = Job(embedder, Rows((lines,)), tmp_path / "out", shard_rows=10)
    manifest, wanted = embed_missing(job), read(job.out)
    before = {path.name: path.read_bytes() for path in job.out.iterdir()}
    stamps = {path.name: path.stat().st_mtime_ns for path in job.out.glob("part-*")}
    (job.out / "part-00002-of-00006.parquet").unlink()
    assert embed_missing(job)["embedded"]["shards"] == 1
    assert {path.name: path.read_bytes() for path in job.out.iterdir()} == before
    changed = [path.name for path in job.out.glob("part-*") if path.stat().st_mtime_ns != stamps[path.name]]
    assert changed == ["part-00002-of-00006.parquet"]
    assert embed_missing(job)["embedded"]["shards"] == 0
    manifest = {name: value for name, value in manifest.items() if name not in ("embedded", "shards")}
    del manifest["settings"]["reproducible"]
    metadata = {"bertlite": job_module.job_key(manifest), "bertlite manifest": json.dumps(manifest)}
    for path in sorted(job.out.glob("*.parquet")):
        pq.write_table(pq.read_table(path).replace_schema_metadata(metadata), path)
    path.unlink()
    assert embed_missing(job)["embedded"]["shards"] == 1
    assert read(job.out) == wanted


def test_a_model_without_a_tokenizer_or_a_layer_or_of_version_0_is_refused(checkpoint, tmp_path):
    transformers.RobertaModel(transformers.RobertaConfig(**SIZES)).save_pretrained(tmp_path)
    set_entries(tmp_path / "config.json", num_hidden_layers=4)  # transformers makes one up
    with pytest.raises(ValueError, match="it has 3 layers, not 4 as the config says"):
        Embedder(tmp_path).encode("a")
    BertModel.from_pretrained(checkpoint).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"has no tokenizer, only special tokens: put its tokenizer\.json"):
        Embedder(tmp_path / "model").encode("a")
    shutil.copytree(checkpoint, tmp_path / "old" / "0_BERT")
    module = {"idx": 0, "name": "0", "path": "0_BERT", "type": "sentence_transformers.models.BERT"}
    (tmp_path / "old" / "modules.json").write_text(json.dumps([module]))
    with pytest.raises(ValueError, match=r"change the type of 0_BERT in it to sentence_transformers\.models\.Transf"):
        Embedder(tmp_path / "old").encode("a")


def test_processes_share_the_shards(embedder, lines, tmp_path):
    embed_missing(Job(embedder, Rows((lines,)), tmp_path / "whole", shard_rows=10))
    for rank in (2, 0, 1):
        job = Job(embedder, Rows((lines,)), tmp_path / "shared", shard_rows=10, rank=rank, world=3)
        manifest = embed_missing(job)
        assert (manifest["embedded"]["shards"], manifest["complete"]) == (2, rank == 1)
    assert read(tmp_path / "shared") == read(tmp_path / "whole")
    assert read_placement({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, "cuda") == (5, 8, "cuda:1")
    assert read_placement({}, "cpu") == (0, 1, "cpu")


# Another value of each setting that is neither a flag nor a number.
OTHERS = {"pooling": "cls", "prompt": "a ", "prompt_name": "query"}
OTHERS |= {"dtype": "bfloat16", "device": "cpu:0", "backend": "native"}


def test_work_with_another_setting_does_not_go_on(checkpoint, lines, tmp_path):
    """Unless the setting says that vectors do not depend on it, but for rounding."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    set_entries(folder / "config_sentence_transformers.json", prompts={"query": "b ", "document": ""})
    record = embed(folder, lines, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert record["settings"].items() >= {"normalize": False, "dtype": "float32", "reproducible": False}.items()
    for each in fields(EmbedSettings):
        changed = EmbedSettings(**{each.name: OTHERS.get(each.name, True if each.default is False else 9)})
        if each.metadata.get(SHOWN_BY) == ROUNDING:
            assert embed(folder, lines, tmp_path / "out", changed)["embedded"]["shards"] == 0, each.name
        else:
            with pytest.raises(ValueError, match="holds another job's vectors"):
                embed(folder, lines, tmp_path / "out", changed)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(NotADirectoryError, match="file is a file: name a folder to write"):
            embed("no/model", lines, out)
    with pytest.raises(ValueError, match="there are no files to read: name at least one"):
        embed("no/model", [], tmp_path / "none")
    with pytest.raises(ValueError, match="shard_rows is 0; it must be an integer, 1 or more"):
        EmbedSettings(shard_rows=0)


def test_every_difference_of_another_job_is_named(checkpoint, lines, tmp_path, capsys):
    folder, out = shutil.copytree(checkpoint, tmp_path / "model"), tmp_path / "out"

    def run(**options: Any) -> Any:
        return embed_missing(Job(Embedder(folder, **options), Rows((lines,)), out, shard_rows=10))

    run()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    arguments = ["embed", str(folder), str(lines), "--out", str(out), "--shard-rows", "10"]
    assert main([*arguments, "--pooling", "cls", "--normalize", "--prompt", "query: "]) == 2
    message = capsys.readouterr().err
    assert "settings.prompt is 'query: ', there it is None" in message
    assert re.search(r"settings\.modules\.1 is .*'cls'.*, there it is .*'mean'", message)
    assert "settings.normalize is True, there it is False" in message
    with pytest.raises(ValueError, match="dimension is 9, there it is 48"):
        run(truncate_dim=9)
    with pytest.raises(ValueError, match=r"settings.max_length is 9, there it is \d\d"):
        run(max_length=9)
    set_entries(folder / "config.json")  # other spaces
    assert run()["embedded"]["shards"] == 0
    set_entries(folder / "config.json", layer_norm_eps=1e-3)
    with pytest.raises(ValueError, match=r"must not be mixed with these:\n  model\.files\.config\.json is"):
        run()
    write_checkpoint(folder, {0: [1]})
    with pytest.raises(ValueError, match=r"model\.sha256 is"):
        run()
    lines.write_text(lines.read_text().replace("a", "b", 1))
    with pytest.raises(ValueError, match=r"input\.sha256 is"):
        run()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_files_of_other_jobs_and_damaged_ones_are_refused(embedder, lines, tmp_path):
    job = Job(embedder, Rows((lines,)), tmp_path / "out", shard_rows=10)
    embed_missing(job)
    path = job.out / "part-00001-of-00006.parquet"
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    with pytest.raises(ValueError, match="belongs to another job: remove it"):
        embed_missing(job)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is damaged"):
        embed_missing(job)
    path.rename(job.out / "part-00001-of-00007.parquet")
    with pytest.raises(ValueError, match=r"part-00001-of-00007\.parquet is not a file of this job: choose another"):
        embed_missing(job)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="there are no rows to embed"):
        embed_missing(Job(embedder, Rows((tmp_path / "empty.txt",)), tmp_path / "none"))


def test_a_vector_that_is_no_number_is_not_written(lines, tmp_path):
    embedder: Any = SimpleNamespace(longest=9, encode=lambda texts, _: np.full((len(texts), 3), np.nan))
    with pytest.raises(ValueError, match=r"the vector of row 0 is not finite: 'a"):
        write_shard(
            Job(embedder, Rows((lines,)), tmp_path), tmp_path / "a", [(0, "a b")], "int64", "", Progress(9, "c")
        )
    assert not (tmp_path / "a").exists()


# Progress ------------------------------------------------------------------------------------------------------------


def test_the_forecast_is_right_on_texts_of_very_different_lengths(checkpoint, tmp_path, monkeypatch):
    """With a second for every 1000 tokens and texts sorted by length, the bar's forecast is the time that is left."""
    path, now, shown = tmp_path / "sorted.txt", 0.0, []
    path.write_text("".join(f"{'ab ' * (i // 12 + 1)}\n" for i in range(240)))
    embedder = Embedder(checkpoint, max_tokens=80)

    def timed(self: Embedder, texts: list[str]) -> Any:
        nonlocal now
        now += sum(len(text.split()) for text in texts) / 1000
        return np.zeros((len(texts), 48), np.float32)

    class Bar(Progress):
        def advance(self, count: float = 1) -> None:
            super().advance(count)
            if self.done:
                shown.append((now, self.done / self.total))

    assert embedder.dimension == 48
    monkeypatch.setattr(Embedder, "encode_batch", timed)
    monkeypatch.setattr("bertlite.embed.job.Progress", Bar)
    embed_missing(Job(embedder, Rows((path,)), tmp_path / "out", shard_rows=40))
    errors = [abs(at / share - now) / now for at, share in shown if share > 0.3]
    assert errors
    assert max(errors) < 0.15
    assert shown[-1] == pytest.approx((now, 1))
    assert all(a[1] <= b[1] + 0.05 for a, b in pairwise(shown))
