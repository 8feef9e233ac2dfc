"""bertlite/runtime: a folder whose files contradict each other is refused by name, before memory is read."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from natively import native

from bertlite import BertModel, optimize_for_inference
from bertlite.inference import InferenceModel
from bertlite.runtime import load
from bertlite.runtime.packed import FILE
from bertlite.runtime.shapes import shape_from
from bertlite.runtime.structs import Blocks
from bertlite.runtime.tasks import AFTER, TOKENIZER
from bertlite.runtime.texts import has_number_from
from scripts.stress import folders as stress

pytest.importorskip("sentence_transformers")
pytestmark = native
Change = Callable[[stress.Folder], object]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pack an encoder with a Dense, a classifier, a DeBERTa and ModernBERTs, each in two dtypes."""
    kinds = ["encoder", "classifier", "deberta", "modernbert", "modern-classifier", "modern-tagger"]
    return {path.name: path for path in stress.make_folders(tmp_path_factory.mktemp("packed"), kinds)}


def forged(folder: Path, place: Path, change: Change) -> Path:
    """Return a copy of a folder with a change, and the checksums that a forger would compute."""
    shutil.copytree(folder, place)
    files = stress.Folder(place)
    change(files)
    files.write(place)
    return place


def described(*way: Any, to: Any, file: str = FILE) -> Change:
    """Return a change of a value in the description of a file."""
    return lambda folder: put(folder.files[file][2], way, to)


def entered(*way: Any, to: Any, file: str = FILE) -> Change:
    return lambda folder: put(folder.files[file][0], way, to)


def told(*way: Any, to: Any) -> Change:
    """Return a change of a value in runtime.json."""
    return lambda folder: put(folder.settings, way, to)


def put(values: Any, way: tuple[Any, ...], to: Any) -> None:
    for key in way[:-1]:
        values = values[key]
    if to is KeyError:
        del values[way[-1]]
    else:
        values[way[-1]] = to


def twice(folder: stress.Folder) -> None:
    """Let many tensors lie in the same bytes."""
    header = folder.files[FILE][0]
    header |= {f"x{i}": header["layers"] for i in range(800)}


WORDS, NORM = "embeddings.word_embeddings.weight", "embeddings.LayerNorm.bias"
LONGER = r"layers is U8 \(\d+,\), not U8 \(\d+,\)"
NO_ANGLES = "shape.layers, shape.head_size and shape.max_positions describe no rotary positions"
NATIVE = [
    ("encoder-float32", described("shape", "layers", 1, "neurons", to=4800), LONGER),
    ("encoder-int8", described("shape", "layers", 0, "heads", to=16), LONGER),
    ("encoder-float32", described("config", "embedding_size", to=16), "embeddings.norm does not fit config"),
    ("encoder-float32", described("embeddings", "positions", to=10**5), "embeddings.positions is not shape.max_pos"),
    ("encoder-float32", described("embeddings", "padding_has_position", to=True), r"F32 \(40, 32\), not F32 \(41"),
    ("encoder-float32", described("shape", "head_size", to=2**40), "shape.head_size is beyond shape.hidden_size"),
    ("deberta-float32", described("shape", "buckets", to=2**40), "shape.kinds, shape.buckets and shape.reach"),
    ("encoder-float32", described("embeddings", "absolute", to="yes"), "embeddings.absolute is 'yes'; it must be"),
    ("encoder-float32", described("pooler", to="tanh"), "pooler.dense.weight is missing"),
    ("classifier-bfloat16", described("pooler", to=KeyError), "pooler is missing"),
    ("classifier-int8", described("class", to="BertForTokenClassification"), "kind is 'classifier'; it must be"),
    ("classifier-int8", described("class", to="BertForMaskedLM"), "class is 'BertForMaskedLM'; it must be one of"),
    ("classifier-int8", described("config", "id2label", to={"0": "a"}), r"classifier.weight is F32 \(3, 32\), not"),
    ("encoder-int8", described("config", "vocab_size", to=10**30), "vocab_size is 1000.*; it must be an integer"),
    ("encoder-int8", described("numbers", to="float32"), "shape.numbers is not numbers"),
    ("encoder-int8", described("shape", "epsilon", to=float("nan")), "shape.epsilon is nan; it must be a number"),
    ("encoder-int8", described("embeddings", "padding", to=300), "embeddings.padding is beyond the words"),
    ("deberta-float32", described("shape", "kinds", to=["c2p", "c2p"]), "shape.kinds, shape.buckets and"),
    ("modernbert-float32", described("shape", "layers", 0, "rotary_base", to=1), r"\[0\].rotary_base is 1; it must"),
    ("modernbert-float32", described("shape", "layers", 0, "rotary_base", to=None), NO_ANGLES),
    ("modernbert-float32", described("shape", "layers", 1, "window", to=-1), r"\[1\].window is -1; it must be an in"),
    ("modernbert-float32", described("shape", "max_positions", to=2**40), NO_ANGLES),
    ("modernbert-float32", described("shape", "head_size", to=15), NO_ANGLES),
    ("modernbert-float32", described("shape", "positions", to="absolute"), NO_ANGLES),
    ("modernbert-float32", described("shape", "rotary_divisor", to=0), "rotary_divisor is 0; it must be a number a"),
    ("modernbert-float32", described("shape", "gated", to=False), LONGER),
    ("modernbert-float32", described("shape", "first_norm", to=True), LONGER),
    ("modern-classifier-bfloat16", described("config", "pooling", to="max"), "config.pooling is 'max'; it must be"),
    ("modern-classifier-bfloat16", described("config", "pooler_norm", to=False), "pooler.LayerNorm.*' is unknown"),
    ("modern-classifier-bfloat16", described("config", "pooler_act", to="mish"), "a head with the activation 'mish'"),
    ("modern-tagger-float32", described("config", "pooler_norm", to=KeyError), "'head.*' is unknown"),
    ("modern-tagger-float32", described("config", "pooler_norm", to=1), "config.pooler_norm is 1; it must be true"),
    ("modern-tagger-float32", described("config", "pooler_act", to="mish"), "a head with the activation 'mish': use"),
    ("modern-tagger-float32", described("config", "pooler_act", to=["gelu"]), r"config.pooler_act is \['gelu'\]; it"),
    ("modern-tagger-float32", entered("head.LayerNorm.bias", "shape", to=[16, 2]), r"LayerNorm.bias is F32 \(16, 2"),
    ("classifier-int8", described("config", "pooler_norm", to=True), "bert.pooler.LayerNorm.weight is missing"),
    ("encoder-float32", described("shape", "norms_first", to=2), "shape.norms_first is 2; it must be true or false"),
    ("encoder-float32", entered(NORM, to=KeyError), "LayerNorm.bias is missing"),
    ("encoder-float32", entered(NORM, "shape", to=[1]), r"LayerNorm.bias is F32 \(1,\), not F32 \(32,\)"),
    ("encoder-float32", entered(NORM, "dtype", to="U8"), r"LayerNorm.bias is U8 \(32,\), not F32 \(32,\)"),
    ("encoder-float32", entered(NORM, "data_offsets", to=[0, 128]), r"LayerNorm.bias is at bytes \[0, 128\], not \["),
    ("encoder-int8", entered(WORDS.replace("weight", "scales"), to=KeyError), r"words?.*weight is I8 .*, not F32"),
    ("encoder-int8", entered(WORDS, "shape", to=[300, "32"]), r"weight'\].shape\[1\] is '32'; it must be an integer"),
    ("encoder-float32", twice, "'x0' is unknown"),
    ("encoder-float32", entered("0.weight", "shape", to=[24, 640], file=AFTER), r"0.weight is F32 \(24, 640\), not"),
    ("encoder-float32", entered("0.bias", to=KeyError, file=AFTER), "0.bias is missing"),
]  # fmt: skip
TOLD = [
    (told("texts", to=KeyError), "texts is missing"),
    (told("texts", "prompts", to=["query: "]), r"texts.prompts is \['query: '\]; it must be an object"),
    (told("texts", "max_length", to=-1), "texts.max_length is -1; it must be an integer, 1 or more"),
    (told("texts", "max_length", to=41), "texts.max_length is 41; it must be an integer, 2 to 40"),
    (told("texts", "default_prompt", to="querry"), "texts.default_prompt is none of texts.prompts"),
    (told("pooling", "modes", to=["median"]), r"pooling.modes\[0\] is 'median'; it must be one of cls, lasttoken"),
    (told("pooling", "modes", to=[]), r"pooling.modes is \[\]; it must be one pooling or more"),
    (told("pooling", "modes", to=["mean"]), r"0.weight is F32 \(24, 64\), not F32 \(24, 32\)"),
    (told("kind", to=["encoder"]), r"kind is \['encoder'\]; it must be one of encoder, cross-encoder"),
    (told("kind", to="tagger"), "labels is missing"),
    (told("after", 0, "type", to="sparse"), r"after\[0\].type is 'sparse'; it must be one of normalize"),
    (told("after", 0, "outputs", to=23), r"0.weight is F32 \(24, 64\), not F32 \(23, 64\)"),
    (told("more", to=[[[[[[[[[[[[[[[[[[[[0]]]]]]]]]]]]]]]]]]]]), "is nested 20 deep"),
]  # fmt: skip


FORGED = [*NATIVE, *(("encoder-float32", *each) for each in TOLD)]


@pytest.mark.parametrize(("name", "change", "message"), FORGED, ids=range(len(FORGED)))
def test_what_contradicts_a_description_or_breaks_a_rule_is_named(name, change, message, packed, tmp_path):
    folder = forged(packed[name], tmp_path / "forged", change)
    with pytest.raises(ValueError, match=rf"{re.escape(str(folder))}/.*{message}") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("at", [0, 1, -1])
@pytest.mark.parametrize("value", [-1, 2.5, 16, 1e6, np.inf, np.nan])
def test_rows_of_distances_beyond_the_table_are_refused_by_both_loaders(value, at, packed, tmp_path):
    def change(folder: stress.Folder) -> None:
        header, data, about = folder.files[FILE]
        shape, whole = shape_from(about["shape"], Blocks(*about["blocks"])), bytearray(data)
        start, count = shape.offsets[1, "distance_rows", ""]
        rows = np.frombuffer(whole, np.float32, count // 4, header["layers"]["data_offsets"][0] + start)
        rows[at] = value
        folder.files[FILE] = header, bytes(whole), about

    folder = forged(packed["deberta-float32"], tmp_path / "forged", change)
    message = rf"{folder}/{FILE} .*distance_rows of layer 1 are not integers from 0 to 15"
    for loader in (load, InferenceModel.load):
        with pytest.raises(ValueError, match=message):
            loader(folder)


def test_folders_of_earlier_formats_give_the_same(packed: dict[str, Path], tmp_path: Path) -> None:
    """Before format 9 shapes name no layers in floats; steps after pooling once stated neither outputs nor bias.

    Before format 10 weights were not fitted, and before format 11 norms came last and positions did not rotate.
    """
    source = packed["encoder-int8"].parent / "source-encoder" / "whole"
    plain = shutil.copytree(packed["encoder-int8"], tmp_path / "plain")
    model = BertModel.from_pretrained(source, add_pooling_layer=False)
    optimize_for_inference(model, dtype=torch.int8).save(tmp_path / "weights")
    shutil.copy(tmp_path / "weights" / FILE, plain)

    def older(folder: stress.Folder) -> None:
        about = folder.files[FILE][2]
        about["format"], about["blocks"] = 8, about["blocks"][:2]
        for name in ("kept", "floats", "scaled", "norms_first", "first_norm", "gated", "rotary_divisor"):
            del about["shape"][name]
        for layer in about["shape"]["layers"]:
            del layer["rotary_base"], layer["window"]
        folder.files[AFTER][2]["format"] = 9  # any will do, as steps after pooling have no layers
        del folder.settings["after"][0]["outputs"], folder.settings["after"][0]["bias"]
        for name in ("lower_case", "segments", "truncation_side", "default_prompt"):
            del folder.settings["texts"][name]

    for each in (packed["encoder-float32"], plain):
        folder = forged(each, tmp_path / f"older-{each.name}", older)
        assert np.array_equal(load(folder).encode(stress.TEXTS), load(each).encode(stress.TEXTS))


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_refused(packed: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(packed["encoder-float32"], tmp_path / "forged")
    tokenizer = json.loads((folder / TOKENIZER).read_text())
    tokenizer["model"]["vocab"]["w1"] = 300
    (folder / TOKENIZER).write_text(json.dumps(tokenizer))
    stress.Folder(folder).write(folder)
    with pytest.raises(ValueError, match=rf"{folder}/{TOKENIZER} has token 'w1' with id 300, but the model has 300"):
        load(folder)


@pytest.mark.parametrize("size", [3, 8, 1 << 16])
def test_numbers_in_a_text_are_found(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertlite.runtime.texts.SLICE", size)
    draw = random.Random(size)
    for _ in range(300):
        text = "".join(draw.choice('0123456789999. ":,e-') for _ in range(draw.randrange(30)))
        least = draw.choice((1, 7, 10, 99, 100, 305))
        wanted = any(int(x) >= least for x in re.findall(r"(?<![\d.])\d+", text))
        assert has_number_from(text.encode(), least) or not wanted, (text, least)
    assert not has_number_from(b'{"a": 304, "b": 0.999, "c": 12}', 305)
    assert has_number_from(b"305", 305)
    assert has_number_from(b"1000", 305)


def test_random_changes_are_refused_by_name_or_run(packed: dict[str, Path]) -> None:
    found = [result for _, results in stress.results_of([*packed.values()], 3, range(150)) for result in results]
    assert [each for each in found if each.startswith("fault")] == []
    assert min(found.count(each) for each in ("run", "refused")) > 30
