"""bertlite/inference/native/saving.py: an optimised model that is saved is mapped again, or refused with a reason."""

import json
import subprocess
import sys

import pytest
import torch
from natively import DTYPES, kernels_or_skip

from bertlite import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    optimize_for_inference,
    prune_heads,
    prune_neurons,
)
from bertlite.inference import InferenceModel
from bertlite.inference.native.library import INSTRUCTION_SETS, best_instruction_set
from bertlite.inference.native.weights import NativeWeights

SIZES = {
    "vocab_size": 61,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 37,
    "max_position_embeddings": 40,
}
IDS = torch.randint(1, 61, (3, 17), generator=torch.Generator().manual_seed(0))


def pruned(cls, **changes):
    torch.manual_seed(0)
    model = cls(BertConfig(**{**SIZES, **changes})).eval()
    return prune_neurons(prune_heads(model, {0: [0, 2], 1: [0, 1, 2]}), {2: range(37)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("cls", [BertModel, BertForMaskedLM, BertForSequenceClassification])
def test_what_is_loaded_gives_the_same_bit_for_bit(cls, dtype, tmp_path):
    quick = optimize_for_inference(pruned(cls), dtype, "native")
    quick.save(tmp_path / "quick")
    again = InferenceModel.load(tmp_path / "quick")
    assert (again.backend, again.compute_dtype, again.config) == ("native", dtype, quick.config)
    for wanted, got in zip(quick(IDS).to_tuple(), again(IDS).to_tuple(), strict=True):
        assert torch.equal(got, wanted)


def test_an_untied_decoder_keeps_its_own_matrix(tmp_path):
    model = pruned(BertForMaskedLM, tie_word_embeddings=False)
    model.cls.predictions.decoder.weight.data.normal_()
    quick = optimize_for_inference(model, torch.float32, "native")
    quick.save(tmp_path)
    assert torch.equal(InferenceModel.load(tmp_path)(IDS).logits, quick(IDS).logits)


def test_a_model_without_a_pooler_has_none_again(tmp_path):
    quick = optimize_for_inference(BertModel(BertConfig(**SIZES), add_pooling_layer=False), torch.float32, "native")
    quick.save(tmp_path)
    assert InferenceModel.load(tmp_path)(IDS).pooler_output is None


def test_another_process_maps_it(tmp_path):
    quick = optimize_for_inference(pruned(BertModel), torch.float32, "native")
    quick.save(tmp_path)
    torch.save(IDS, tmp_path / "ids.pt")
    code = (
        "import sys, torch\n"
        "from bertlite.inference import InferenceModel\n"
        "quick = InferenceModel.load(sys.argv[1])\n"
        "mapped = [line.split()[-1] for line in open('/proc/self/maps')]\n"
        "assert any(path.endswith('layers.safetensors') for path in mapped)\n"
        "out = quick(torch.load(sys.argv[1] + '/ids.pt'))\n"
        "sys.stdout.buffer.write(out.last_hidden_state.numpy().tobytes())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True)
    assert done.stdout == quick(IDS).last_hidden_state.numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_every_set_of_instructions_packs_the_same_bytes(name, dtype):
    model, numbers = pruned(BertModel), str(dtype).removeprefix("torch.")
    ours, wanted = (
        NativeWeights.of(model.encoder.layer, model.config, numbers, kernels_or_skip(each))
        for each in (name, "scalar")
    )
    assert ours.at == wanted.at
    assert torch.equal(ours.data, wanted.data)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("saver", "loader"), [("scalar", "best"), ("best", "avx2"), ("avx2", "scalar")])
def test_what_one_set_of_instructions_saved_another_runs(saver, loader, dtype, tmp_path, monkeypatch):
    best = best_instruction_set().name

    def use(name):
        path = kernels_or_skip(best if name == "best" else name).path
        monkeypatch.setenv("BERTLITE_NATIVE", best if name == "best" else name)
        return path

    use(saver)
    optimize_for_inference(pruned(BertModel), dtype, "native").save(tmp_path)
    path = use(loader)
    again = InferenceModel.load(tmp_path)
    assert again.model.encoder.kernels.path == path
    own = optimize_for_inference(pruned(BertModel), dtype, "native")
    for wanted, got in zip(own(IDS).to_tuple(), again(IDS).to_tuple(), strict=True):
        assert torch.equal(got, wanted)


def test_saving_replaces_what_was_there_and_nothing_else(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    optimize_for_inference(pruned(BertModel), torch.float32, "native").save(tmp_path)
    quick = optimize_for_inference(pruned(BertModel), torch.int8, "native")
    quick.save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert torch.equal(InferenceModel.load(tmp_path)(IDS).pooler_output, quick(IDS).pooler_output)


def test_what_cannot_be_loaded_says_why(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is no optimised model: it has no config\.json, native"):
        InferenceModel.load(tmp_path)
    optimize_for_inference(pruned(BertModel), torch.float32, "native").save(tmp_path)
    about = json.loads((tmp_path / "native.json").read_text())
    (tmp_path / "native.json").write_text(json.dumps({**about, "format": 2}))
    with pytest.raises(ValueError, match="has format 2 of a little-endian machine; this bertlite reads format 1"):
        InferenceModel.load(tmp_path)
    (tmp_path / "native.json").write_text(json.dumps({**about, "byteorder": "big"}))
    with pytest.raises(ValueError, match="of a big-endian machine"):
        InferenceModel.load(tmp_path)
    about["shape"]["layers"] = about["shape"]["layers"][:-1]
    (tmp_path / "native.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"packed weights have \d+ bytes; a model of this shape has \d+"):
        InferenceModel.load(tmp_path)


def test_other_backends_and_classes_are_not_saved(tmp_path):
    class Own(BertModel):
        pass

    with pytest.raises(TypeError, match=r"Own cannot be saved optimised; have: .*BertModel"):
        optimize_for_inference(Own(BertConfig(**SIZES)), torch.float32, "native").save(tmp_path / "own")
    with pytest.raises(RuntimeError, match="backend 'inductor' packs its weights anew in every process"):
        optimize_for_inference(pruned(BertModel), torch.float32, "inductor").save(tmp_path / "other")
    assert not any(tmp_path.iterdir())
