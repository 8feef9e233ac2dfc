"""bertlite/inference/native/saving.py: an optimised model that is saved is read again, or refused with a reason."""

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch
from natively import DTYPES, ROTARY, WITH_MIXED, kernels_or_skip, natively
from safetensors import safe_open

import bertlite
from bertlite import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel, optimize_for_inference
from bertlite.checkpoint.reading import State, read_weights
from bertlite.checkpoint.saving import write_safetensors
from bertlite.inference import InferenceModel
from bertlite.inference.native.rounding import rotated
from bertlite.inference.native.saving import load_native, write_packed
from bertlite.inference.native.weights import NativeWeights
from bertlite.parity.compare import rms_distance
from bertlite.runtime.library import INSTRUCTION_SETS
from bertlite.runtime.packed import FILE
from bertlite.runtime.shapes import BLOCKS

SIZES = {**conftest.SIZES, "vocab_size": 61, "hidden_size": 96, "num_attention_heads": 3, "type_vocab_size": 2}
SAMPLE = [[1 + (7 * i + j * j) % 60 for j in range(3 + i)] for i in range(25)]  # to which int8 is fitted
IDS = torch.randint(1, 61, (3, 17), generator=torch.Generator().manual_seed(0))


def pruned(cls, options=None, **changes):
    torch.manual_seed(0)
    model = cls(BertConfig(**{**SIZES, **changes}), **(options or {})).eval()
    return bertlite.prune_neurons(bertlite.prune_heads(model, {0: [0, 2], 1: [0, 1, 2]}), {2: range(37)})


MODELS = {
    "an untied decoder": (BertForMaskedLM, {"tie_word_embeddings": False}, {}),
    "no pooler": (BertModel, {}, {"add_pooling_layer": False}),
    "rotary": (BertModel, {**ROTARY, "first_norm": True, "embeddings_norm": False, "rotary_divisor": 1.5}, {}),
}


@pytest.mark.parametrize(
    ("dtype", "sample"), [*((dtype, None) for dtype in WITH_MIXED), (torch.int8, SAMPLE)], ids=str
)
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_loaded_gives_the_same_bit_for_bit(kind, dtype, sample, tmp_path):
    cls, changes, options = MODELS[kind]
    model = pruned(cls, options, **changes)
    if kind == "an untied decoder":
        model.cls.predictions.decoder.weight.data.normal_()
    quick = natively(model, dtype, sample=sample)
    quick.save(tmp_path / "quick")
    again = InferenceModel.load(tmp_path / "quick")
    assert (again.backend, again.compute_dtype, again.config) == ("native", dtype, quick.config)
    outs = [each(IDS).to_tuple() for each in (quick, again)]
    assert len(outs[0]) == len(outs[1])
    assert all(map(torch.equal, *outs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_every_set_of_instructions_packs_the_same_bytes_but_for_their_blocks(name, dtype):
    model = pruned(BertModel, position_embedding_type="relative_key")  # whose tables hold bfloat16 beside int8
    numbers = str(dtype).removeprefix("torch.")
    ours, wanted = (
        NativeWeights.of(model.encoder, model.config, numbers, kernels_or_skip(each)) for each in (name, "baseline")
    )
    assert ours.at == wanted.at
    assert ours.shape.blocks in BLOCKS
    assert torch.equal(ours.in_blocks(wanted.shape.blocks).data, wanted.data)
    assert torch.equal(wanted.in_blocks(ours.shape.blocks).data, ours.data)
    for blocks in BLOCKS:
        assert torch.equal(wanted.in_blocks(blocks).in_blocks(ours.shape.blocks).data, ours.data)


@pytest.mark.parametrize("dtype", WITH_MIXED, ids=str)
def test_what_kernels_with_other_blocks_saved_or_pickled_is_packed_anew(dtype, monkeypatch, tmp_path):
    other, model = kernels_or_skip("baseline"), pruned(BertForMaskedLM)
    quick = natively(model, dtype)
    shape = quick.model.bert.encoder.weights.shape
    if shape.blocks == other.blocks[shape.numbers]:
        pytest.skip("both sets of instructions have such blocks")
    quick.save(tmp_path / "quick")
    pickled = pickle.dumps(quick)
    wanted = natively(model, dtype, "baseline")(IDS)
    for module in ("inference.native.saving", "runtime.library"):
        monkeypatch.setattr(f"bertlite.{module}.load_kernels", lambda reproducible: other)
    for again in (InferenceModel.load(tmp_path / "quick"), pickle.loads(pickled)):
        assert again.model.bert.encoder.kernels is other
        assert torch.equal(again(IDS).logits, wanted.logits)


def test_saving_replaces_what_was_there_and_nothing_else(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    optimize_for_inference(pruned(BertModel), dtype=torch.float32, backend="native").save(tmp_path)
    quick = optimize_for_inference(pruned(BertModel), dtype=torch.int8, backend="native")
    quick.save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert torch.equal(InferenceModel.load(tmp_path)(IDS).pooler_output, quick(IDS).pooler_output)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "quick"
    model = BertForSequenceClassification(BertConfig(**{**SIZES, "num_hidden_layers": 2})).eval()
    model = bertlite.prune_neurons(bertlite.prune_heads(model, {0: [0, 2]}), {1: [36]})
    optimize_for_inference(model, dtype=torch.float32, backend="native").save(folder)
    return folder


def described(path: Path) -> dict[str, Any]:
    """Return the description in a file."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["native"])


def change(folder: Path, tensors: Callable[[State], object] = len, **entries: Any) -> None:
    """Change the tensors in a file, and entries of its description."""
    path = folder / FILE
    about = {**described(path), **entries}
    state = {key: tensor.clone() for key, tensor in read_weights(path).items()}
    tensors(state)
    write_packed(path, state, about)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t["classifier.bias"].fill_(torch.nan), "classifier.bias holds nan or inf"),
        (lambda t: t.pop("classifier.bias"), "classifier.bias is missing"),
        (lambda t: t.update(more=torch.ones(2)), "'more' is unknown"),
        (lambda t: t.update({"classifier.bias": torch.ones(3)}), r"classifier.bias is F32 \(3,\), not F32 \(2,\)"),
        (
            lambda t: t.update({"classifier.bias": torch.ones(2).half()}),
            r"classifier.bias is F16 \(2,\), not F32 \(2,\)",
        ),
        (lambda t: t["layers"][:4].view(torch.float32).fill_(torch.nan), "layer 0 qkv words holds nan"),
        (lambda t: t["layers"][-4:].view(torch.float32).fill_(torch.inf), "1 output_norm_bias holds nan"),
        (lambda t: t.update(layers=t["layers"][:-64]), r"layers is U8 \(\d+,\), not U8 \(\d+,\)"),
        (lambda t: t.update(layers=t["layers"].view(torch.int8)), r"layers is I8 \(\d+,\), not U8"),
        ({"numbers": "int8"}, r"cannot be used: layers is U8 \(\d+,\), not U8 \(\d+,\)"),
        ({"numbers": "float16"}, "numbers is 'float16'; it must be one of float32, bfloat16, int8"),
        ({"class": ["BertModel"]}, r"class is \['BertModel'\]; it must be one of BertModel"),
        ({"options": 3}, "options is 3; it must be an object"),
        ({"config": []}, r"config is \[\]; it must be an object"),
        ({"skip_padding": 1}, "skip_padding is 1; it must be true or false"),
        ({"embeddings": {}}, "embeddings.epsilon is missing"),
        ({"options": {"colour": 3}}, "has options {'colour': 3}: .*unexpected keyword argument"),
        ({"blocks": [24, 1, 24]}, r"blocks is \[24, 1, 24\]; it must be one of \[8, 1, 8\], \[8, 4, 8\]"),
        ({"format": 4}, "format is 4; it must be one of 5, 6, 7, 8, 9, 10, 11; optimise the model again"),
        ({"byteorder": "big"}, "byteorder is 'big'; it must be one of little"),
        ({"class": "BertForQuestionAnswering", "config": {**SIZES, "id2label": {0: "a"}}}, "question answering has 2"),
        ({"shape": {"kept": [1]}}, "shape.kept does not name layers of int8 in their order"),
        ({"shape": {"kept": [None]}}, r"shape.kept\[0\] is None; it must be an integer, 0 or more"),
        ({"shape": {"layers": [{"heads": 3}]}}, r"shape.layers\[0\].neurons is missing"),
        ({"shape": {"epsilon": -1.0}}, "shape.epsilon is -1.0; it must be a number above 0, and finite"),
        ({"shape": {"scaled": 1}}, "shape.scaled is 1; it must be true or false"),
        ({"shape": {"epsilon": 0.5}}, r"does not fit its config: .*shape is \{.*'epsilon': 0\.5"),
        ({"shape": {"floats": "int8"}}, "shape.floats is 'int8'; it must be one of bfloat16, float32"),
    ],
)
def test_tensors_that_do_not_fit_and_another_description_are_refused(edit, message, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "edited")
    about = described(saved / FILE)
    if isinstance(edit, dict):
        change(folder, **{name: {**about[name], **x} if name == "shape" else x for name, x in edit.items()})
    else:
        change(folder, edit)
    with pytest.raises(ValueError, match=rf"(?s){folder}.*{message}"):
        InferenceModel.load(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_what_is_no_json_object_is_named(text, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "edited")
    write_safetensors(folder / FILE, dict(read_weights(saved / FILE)), native=text)
    with pytest.raises(ValueError, match=rf"{FILE} (is not JSON|cannot be used: it is \[\]; it must be an object)"):
        InferenceModel.load(folder)


def test_a_changed_byte_is_found_wherever_it_is(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "changed")
    whole = (saved / FILE).read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for place in (whole.index(b'"epsilon'), header + 8, header + 999, len(whole) // 2, len(whole) - 1):
        (folder / FILE).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=rf"{FILE} (is damaged|is not JSON|cannot be used)"):
            InferenceModel.load(folder)


@pytest.mark.parametrize("number", [5, 8, 9])
def test_a_file_of_an_older_format_loads(number, saved, tmp_path):
    """Before format 6 no shape was described, before 9 no stack was mixed, and before 10 no inputs were scaled."""
    folder = shutil.copytree(saved, tmp_path / "older")
    about = described(saved / FILE) | {"format": number}
    missing = {5: about["shape"], 8: ("kept", "floats", "scaled"), 9: ("scaled",)}[number]
    about["shape"] = {name: value for name, value in about["shape"].items() if name not in missing}
    about["blocks"] = about["blocks"][: 2 if number == 8 else 3]
    if number == 5:  # nor were there checksums
        del about["shape"], about["embeddings"], about["pooler"]
        write_safetensors(folder / FILE, dict(read_weights(saved / FILE)), native=json.dumps(about))
    else:
        change(folder, **about)
    assert torch.equal(InferenceModel.load(folder)(IDS).logits, InferenceModel.load(saved)(IDS).logits)


def test_word_embeddings_are_8_bit_integers_in_an_int8_folder_and_floats_in_older_ones(tmp_path):
    quick = optimize_for_inference(pruned(BertForMaskedLM), dtype=torch.int8, backend="native")
    quick.save(tmp_path / "new")
    name = "bert.embeddings.word_embeddings.weight"
    state, words = read_weights(tmp_path / "new" / FILE), quick.model.bert.embeddings.word_embeddings.weight
    scales = state[name.replace("weight", "scales")]
    assert (state[name].dtype, scales.shape) == (torch.int8, (61,))
    assert torch.equal(words, state[name] * scales[:, None])
    assert torch.equal(words.double(), state[name].double() * scales[:, None].double()), "products are rounded"

    def as_before(state: State) -> None:
        del state[name.replace("weight", "scales")]
        state[name] = torch.randn(61, 96, generator=torch.Generator().manual_seed(0))

    older = shutil.copytree(tmp_path / "new", tmp_path / "older")
    change(older, as_before, format=6)
    again = InferenceModel.load(older)
    again.save(tmp_path / "again")
    assert torch.equal(InferenceModel.load(tmp_path / "again")(IDS).logits, again(IDS).logits)
    assert not torch.equal(again(IDS).logits, quick(IDS).logits)


def test_8_bit_integers_of_a_folder_from_before_they_were_rotated_compute_what_they_did(tmp_path):
    model = BertModel(BertConfig(**{**SIZES, "hidden_size": 192, "intermediate_size": 130})).eval()
    wanted = optimize_for_inference(model, dtype=torch.int8, backend="native")
    backwards = copy.deepcopy(model)  # so that packing, which rotates, gives weights that are not
    for part in backwards.encoder.modules():
        if isinstance(part, torch.nn.Linear):
            part.weight.data = rotated(part.weight.data)
    optimize_for_inference(backwards, dtype=torch.int8, backend="native", verify=False).save(tmp_path)
    with pytest.raises(AssertionError):
        assert_close(InferenceModel.load(tmp_path), wanted)
    change(tmp_path, lambda state: None, format=7)
    again = InferenceModel.load(tmp_path)
    assert_close(again, wanted)
    again.save(tmp_path / "again")
    assert torch.equal(InferenceModel.load(tmp_path / "again")(IDS).pooler_output, again(IDS).pooler_output)
    assert load_native(tmp_path / "again")[0].encoder.weights.shape.rotated is False


def assert_close(*models: InferenceModel) -> None:
    ours, theirs = (each(IDS).last_hidden_state for each in models)
    assert rms_distance(ours, theirs) < 0.1 * rms_distance(theirs, torch.zeros_like(theirs))


def test_a_save_replaces_no_model_of_another_kind(tmp_path):
    """An optimised model is no way back to a checkpoint, nor the other way round."""
    quick = optimize_for_inference(pruned(BertModel), dtype=torch.float32, backend="native")
    for name in ("config.json", "model.fp16.safetensors", "pytorch_model.bin", "tf_model.h5", "runtime.json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
        with pytest.raises(ValueError, match=f"holds {name}, which is of another kind: name another folder to write"):
            quick.save(tmp_path / name)
        assert [path.name for path in (tmp_path / name).iterdir()] == [name]
    quick.save(tmp_path / "optimised")
    with pytest.raises(ValueError, match=r"optimised holds native\.safetensors, .*: name another folder to write"):
        pruned(BertModel).save_pretrained(tmp_path / "optimised")
    assert [path.name for path in (tmp_path / "optimised").iterdir()] == [FILE]


def test_other_classes_and_layers_are_not_saved(tmp_path):
    short, own = (cls(BertConfig(**SIZES)) for cls in (BertModel, type("Own", (BertModel,), {})))
    del short.encoder.layer[1]
    for model, says in (
        (short, "this BertModel cannot be saved: its config describes other layers"),
        (own, r"Own cannot be saved optimised; have: .*BertModel"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            optimize_for_inference(model, dtype=torch.float32, backend="native").save(tmp_path / "saved")
    assert not any(tmp_path.iterdir())
