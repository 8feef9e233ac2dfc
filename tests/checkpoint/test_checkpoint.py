"""A checkpoint is loaded whole or refused, and saved whole or not at all."""

import ctypes
import errno
import json
import logging
import os
import re
import resource
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import safetensors.torch
import torch
from conftest import HEADED, SIZES, SPECIAL, assert_same, full_outputs, inputs_of, make
from huggingface_hub import HfApi, errors, hf_hub_download, save_torch_state_dict
from safetensors.torch import load_file, save_file
from test_hostile_files import child  # type: ignore[import-not-found]
from torch import Tensor, nn

from bertlite import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLMHeadModel,
    BertModel,
    BertTokenizer,
    prune_heads,
)
from bertlite.checkpoint import folders
from bertlite.checkpoint.files import WEIGHT_FILES
from bertlite.checkpoint.names import DECODER, DECODER_BIAS, HEAD_BIAS, WORD_EMBEDDINGS
from bertlite.checkpoint.reading import SAFETENSORS_DTYPES, read_weights
from bertlite.checkpoint.saving import write_safetensors
from bertlite.checkpoint.skeleton import SkeletonMode, is_misaligned, make_skeleton
from bertlite.cli import main
from bertlite.inference import InferenceModel
from bertlite.models.remote import export_remote_code
from bertlite.opened.inspection import inspect
from bertlite.shipping.folder import write_model
from bertlite.support.files import write_text
from bertlite.support.runs import Run, read_runs
from scripts.make import hostile

JSON: dict[str, Any] = {**SIZES, "model_type": "bert"}
PRUNED = {0: [1], 2: [0, 3]}
WORDS = [*SPECIAL, "a", "b"]
SHARDS = "model{suffix}.safetensors"
State = dict[str, Tensor]


def state_of(model: nn.Module) -> State:
    """A model's tensors under all their names, each with memory of its own."""
    return {name: t.clone() for name, t in model.state_dict().items()}


def write(folder: Path, state: State, config: dict[str, Any] | None = None, file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config or JSON))
    if "{suffix}" in file:  # shards and their index
        size, safe = sum(t.nbytes for t in state.values()) // 2, not file.endswith(".bin")
        save_torch_state_dict(state, folder, filename_pattern=file, max_shard_size=size, safe_serialization=safe)
    elif file.endswith(".bin"):
        torch.save(state, folder / file)
    else:
        save_file({name: t.contiguous() for name, t in state.items()}, folder / file, metadata={"format": "pt"})
    return folder


def split(folder: Path) -> None:
    """Make shards of the weights in a folder."""
    config = json.loads((folder / "config.json").read_text())
    write(folder, load_file(folder / "model.safetensors"), config, SHARDS)


def shift(path: Path, more: int) -> None:
    """Let the tensors of a safetensors file begin so many bytes later."""
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    path.write_bytes((end - 8 + more).to_bytes(8, "little") + whole[8:end] + b" " * more + whole[end:])


def assert_same_model(got: nn.Module, wanted: nn.Module | State) -> None:
    assert_same(got.state_dict(), wanted if isinstance(wanted, dict) else wanted.state_dict(), atol=0)


# Load and save ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [BertModel, *HEADED, BertLMHeadModel])
@pytest.mark.parametrize("heads", [{}, {**PRUNED, 1: [0, 1, 2, 3]}], ids=["dense", "pruned"])
def test_loading_undoes_saving_and_draws_no_random_numbers(cls, heads, tmp_path):
    decoder = {"is_decoder": True, "add_cross_attention": True, "use_cache": False} if cls is BertLMHeadModel else {}
    saved = prune_heads(make(cls, hidden_dropout_prob=0.25, **decoder), heads)
    saved.save_pretrained(tmp_path / "new" / "folder")
    before = torch.random.get_rng_state()
    loaded = cls.from_pretrained(tmp_path / "new" / "folder")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert_same_model(loaded, saved)
    written = {"dtype": "float64", "architectures": [cls.__name__]}
    assert loaded.config.to_dict() == {**saved.config.to_dict(), **written}
    assert not any(module.training for module in loaded.modules())
    assert all(p.requires_grad and p.is_leaf and p.is_contiguous() for p in loaded.parameters())
    assert list(dict(loaded.named_parameters())) == list(dict(saved.named_parameters()))  # tied where it was
    inputs = inputs_of(cls.__name__)
    assert_same(full_outputs(loaded, inputs), full_outputs(saved, inputs), atol=0)


def test_unknown_fields_of_the_config_survive(tmp_path):
    fields = {"transformers_version": "4.1.0", "task_specific_params": {"a": [1, None]}, "torch_dtype": "float16"}
    write(tmp_path / "a", state_of(make()), {**JSON, **fields, "architectures": ["Other"]})
    BertModel.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    config = json.loads((tmp_path / "b/config.json").read_text())
    kept = {name: fields[name] for name in ("transformers_version", "task_specific_params")}
    assert config == {**config, **kept, "architectures": ["BertModel"], "dtype": "float64", "model_type": "bert"}
    assert "torch_dtype" not in config
    assert list(config) == sorted(config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtype_is_the_files_unless_another_is_asked_for(dtype, tmp_path):
    saved = make(BertForMaskedLM).to(dtype)
    saved.save_pretrained(tmp_path)
    assert_same_model(BertForMaskedLM.from_pretrained(tmp_path), saved)
    for asked in (torch.float64, "bfloat16"):
        loaded = BertForMaskedLM.from_pretrained(tmp_path, dtype=asked, device="cpu")
        assert_same_model(loaded, saved.to(getattr(torch, asked) if isinstance(asked, str) else asked))
        assert loaded.cls.predictions.decoder.weight is loaded.get_input_embeddings().weight


def test_a_skeleton_allocates_nothing_and_leaves_other_threads_alone():
    skeleton, made = make_skeleton(BertForPreTraining, BertConfig(**SIZES), {}), []
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}
    with SkeletonMode():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(5, 3)))
        thread.start()
        thread.join()
        assert torch.zeros(3).fill_(2).sum() == 6  # and leaves tensors with memory alone
    assert made[0].weight.device.type == "cpu"
    assert made[0].weight.abs().sum() > 0


@pytest.mark.parametrize("moved", range(8))
def test_a_file_is_written_and_read_as_safetensors_does(moved, tmp_path):
    """Every dtype and shape, wherever in the file its tensors begin."""
    draw, path = torch.Generator().manual_seed(moved), tmp_path / "x.safetensors"
    state = {
        f"{shape} {dtype}": torch.randint(2, shape, generator=draw).to(dtype)
        for dtype in SAFETENSORS_DTYPES.values()
        for shape in ((), (1,), (0, 3), (5,), (4, 16), (7, 3))
    }
    state["transposed"] = torch.randn(6, 4, generator=draw).t()
    write_safetensors(path, state)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert int.from_bytes(path.read_bytes()[:8], "little") % 64 == 64 - 8  # to be mapped
    shift(path, moved)
    for found in (load_file(path), read_weights(path)):
        assert_same(dict(sorted(found.items())), dict(sorted(state.items())), atol=0)


@torch.no_grad()
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_are_changed_leave_their_file_alone(file, tmp_path):
    write(tmp_path, make().state_dict(), JSON, file)
    before = (tmp_path / file).read_bytes()
    model = BertModel.from_pretrained(tmp_path)
    for parameter in model.parameters():
        parameter.add_(1)
    del model
    assert (tmp_path / file).read_bytes() == before


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc to see what is mapped")
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "other.safetensors"])
def test_weights_are_mapped_or_copied_but_not_both(file, tmp_path):
    large = BertModel(BertConfig(**{**SIZES, "vocab_size": 200_000}))
    large.save_pretrained(tmp_path)
    path = tmp_path / file
    if file == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(large.state_dict(), path)
    elif file == "other.safetensors":  # 8 bytes from multiples of 64: mapped, matrices would add in another order
        shutil.copy(tmp_path / "model.safetensors", path)
        shift(path, 8)
    model = BertModel.from_pretrained(path)
    maps = re.findall(
        rf"{re.escape(str(path))}\nSize: *(\d+) kB(?:\n.*)*?\nAnonymous: *(\d+) kB",
        Path("/proc/self/smaps").read_text(),
    )
    assert len(maps) == (file != "other.safetensors")
    for size, copied in maps:
        assert int(size) > 37_000
        assert int(copied) < 1_000
    assert model.get_input_embeddings().weight[-1].abs().sum() > 0


def test_loading_folders_imports_neither_transformers_nor_the_hub_and_finding_files_not_even_torch(tmp_path):
    make().save_pretrained(tmp_path)
    BertTokenizer(WORDS).save_pretrained(tmp_path)
    code = f"""
import sys
import bertlite.checkpoint.files, bertlite.checkpoint.folders
print(*{{"torch", "numpy"}} & sys.modules.keys())
from bertlite.tokenizer import BertTokenizer
tokenizer = BertTokenizer.from_pretrained({str(tmp_path)!r})
tokenizer("a", return_tensors="pt"), tokenizer.save_pretrained({str(tmp_path)!r})
print(*{{"safetensors"}} & sys.modules.keys())
import bertlite
bertlite.BertModel.from_pretrained({str(tmp_path)!r})
print(*{{"transformers", "huggingface_hub"}} & sys.modules.keys())
"""
    ran = child("-c", code)
    assert (ran.returncode, ran.stdout) == (0, "\n\n\n"), ran.stderr


# Legacy names -------------------------------------------------------------------------------------------------------


def renamed(*changes: tuple[str, str]) -> Callable[[State], State]:
    def rename(state: State) -> State:
        for old, new in changes:
            state = {re.sub(old, new, name): t for name, t in state.items()}
        return state

    return rename


GAMMA = (r"LayerNorm\.weight$", "LayerNorm.gamma"), (r"LayerNorm\.bias$", "LayerNorm.beta")
LEGACY: dict[str, Callable[[State], State]] = {
    "gamma and beta": renamed(*GAMMA),
    "without bert.": renamed((r"^bert\.", "")),
    "with bert.": renamed((r"^(embeddings|encoder|pooler)", r"bert.\1")),
    "module.": renamed(("^", "module.")),
    "_orig_mod.": renamed(("^", "_orig_mod.")),
    "module._orig_mod.": renamed(("^", "module._orig_mod.")),
    "position_ids": lambda state: {**state, "embeddings.position_ids": torch.arange(40)[None]},
    "bert.position_ids": lambda state: {**state, "bert.embeddings.position_ids": torch.arange(40)[None]},
    "token_type_ids": lambda state: {**state, "bert.embeddings.token_type_ids": torch.zeros(1, 40).long()},
    "all at once": lambda state: renamed(*GAMMA, (r"^bert\.", ""), ("^", "module."))(
        {**state, "bert.embeddings.position_ids": torch.arange(40)[None]}
    ),
}


@pytest.mark.parametrize("legacy", LEGACY)
@pytest.mark.parametrize("cls", [BertModel, BertForPreTraining, BertForTokenClassification])
def test_legacy_names_load_from_a_file_and_strictly_from_a_state_dict(cls, legacy, tmp_path):
    model = make(cls)
    state = LEGACY[legacy](state_of(model))
    assert_same_model(cls.from_pretrained(write(tmp_path, state)), model)
    names, other = list(state), cls(model.config).double()
    assert other.load_state_dict(state, strict=True) == ([], [])
    assert_same_model(other, model)
    assert list(state) == names  # the caller's own is left alone


def test_legacy_names_load_strictly_into_a_model_around_it():
    inner = make(BertForMaskedLM)
    outer = nn.ModuleDict({"left": BertForMaskedLM(inner.config).double(), "out": nn.Linear(5, 3)})
    state = {f"left.{name}": t for name, t in LEGACY["all at once"](state_of(inner)).items() if DECODER not in name}
    outer.load_state_dict({**state, "out.weight": torch.zeros(3, 5), "out.bias": torch.zeros(3)}, strict=True)
    assert_same_model(outer["left"], inner)


def test_a_tensor_under_two_names_of_a_state_dict_is_refused():
    """As in a file, which is in the corpus of hostile ones."""
    state = state_of(make())
    state["bert.pooler.dense.bias"] = state["pooler.dense.bias"] + 1
    with pytest.raises(ValueError, match=r"pooler\.dense\.bias is there twice, once as bert\.pooler\.dense\.bias"):
        make().load_state_dict(state)


def test_a_google_folder_of_2018_loads(tmp_path):
    pretrained = make(BertForPreTraining, type_vocab_size=2).float()
    state = LEGACY["bert.position_ids"](LEGACY["gamma and beta"](without(DECODER_BIAS)(state_of(pretrained))))
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    config = {**SIZES, "type_vocab_size": 2, "hidden_act": "gelu", "initializer_range": 0.02}
    (tmp_path / "bert_config.json").write_text(json.dumps(config))
    assert not (tmp_path / "pytorch_model.bin").read_bytes().startswith(b"PK")
    assert_same_model(BertForPreTraining.from_pretrained(tmp_path), pretrained)
    assert_same_model(BertModel.from_pretrained(tmp_path), pretrained.bert)


# Tied tensors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [{HEAD_BIAS}, {DECODER_BIAS}, {HEAD_BIAS, DECODER_BIAS}], ids=sorted)
@pytest.mark.parametrize("decoder", [True, False])
def test_either_name_of_the_decoders_bias_will_do_and_its_own_wins(there, decoder, tmp_path):
    model = make(BertForMaskedLM)
    kept = there | ({DECODER} if decoder else set())
    state = {k: t for k, t in state_of(model).items() if k in kept or k not in (HEAD_BIAS, DECODER_BIAS, DECODER)}
    if len(there) == 2:
        state[HEAD_BIAS] += 1
    write(tmp_path, state)
    loaded = BertForMaskedLM.from_pretrained(tmp_path)
    assert_same_model(loaded, model)
    assert loaded.cls.predictions.bias is loaded.cls.predictions.decoder.bias
    other = BertForMaskedLM(model.config).double()
    other.load_state_dict(state, strict=True)
    assert_same_model(other, model)


def test_a_decoder_of_its_own_under_a_tied_config_is_a_question_for_the_user(tmp_path):
    state = state_of(make(BertForMaskedLM))
    state[DECODER] += 1
    write(tmp_path, state)
    with pytest.raises(ValueError, match=r"decoder\.weight differs .*embeddings=False .* tie_word_embeddings=True"):
        BertForMaskedLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"decoder\.weight differs"):
        make(BertForMaskedLM).load_state_dict(state)
    untied = BertForMaskedLM.from_pretrained(tmp_path, tie_word_embeddings=False)
    assert torch.equal(untied.cls.predictions.decoder.weight, state[DECODER])
    for other in (state[WORD_EMBEDDINGS].half(), state[WORD_EMBEDDINGS][1:].clone()):
        with pytest.raises(ValueError, match=r"decoder\.weight differs"):
            BertForMaskedLM.from_pretrained(write(tmp_path / "other", {**state, DECODER: other}))
    with pytest.raises(ValueError, match=r"cls\.predictions\.decoder\.weight is missing"):
        BertForMaskedLM.from_pretrained(write(tmp_path / "none", without(DECODER)(state)), tie_word_embeddings=False)
    tied = BertForMaskedLM.from_pretrained(tmp_path, tie_word_embeddings=True)
    assert torch.equal(tied.cls.predictions.decoder.weight, state[WORD_EMBEDDINGS])
    assert_same_model(BertModel.from_pretrained(tmp_path, add_pooling_layer=False), tied.bert)


def test_an_untied_decoder_that_shares_the_files_memory_is_not_tied_by_it(tmp_path):
    model = make(BertForMaskedLM)
    write(tmp_path, model.state_dict(), file="pytorch_model.bin")  # one storage under two names
    loaded = BertForMaskedLM.from_pretrained(tmp_path, tie_word_embeddings=False)
    assert torch.equal(loaded.state_dict()[DECODER], loaded.state_dict()[WORD_EMBEDDINGS])
    assert loaded.state_dict()[DECODER].data_ptr() != loaded.state_dict()[WORD_EMBEDDINGS].data_ptr()


# Parts that may be missing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "cls", "parts"),
    [
        (BertForMaskedLM, BertModel, ["pooler"]),
        (BertForMaskedLM, BertForPreTraining, ["cls.seq_relationship", "pooler"]),
        (BertModel, BertForPreTraining, ["cls.predictions", "cls.seq_relationship"]),
        (BertModel, BertForMaskedLM, ["cls.predictions"]),
        (BertForPreTraining, BertForSequenceClassification, ["classifier"]),
        (BertForSequenceClassification, BertForQuestionAnswering, ["qa_outputs"]),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_missing_head_is_initialised_and_says_so_once(source, cls, parts, tied, tmp_path, caplog):
    saved = make(source, tie_word_embeddings=tied).half()
    saved.save_pretrained(tmp_path)
    torch.manual_seed(0)  # the spread of few random numbers is judged below
    with caplog.at_level(logging.WARNING):
        loaded = cls.from_pretrained(tmp_path)
    lost = " and no ".join(parts)
    told = f"{tmp_path}/model.safetensors has no {lost}: initialised at random, to be trained before use"
    assert [(record.name, record.getMessage()) for record in caplog.records] == [("bertlite", told)]
    before = {key.removeprefix("bert."): t for key, t in saved.state_dict().items()}
    for key, t in loaded.state_dict().items():
        part = key.removeprefix("bert.")
        assert t.dtype == torch.float16  # as in the file
        if not part.startswith(tuple(parts)):
            assert torch.equal(t, before[part]), key
        elif part.endswith("bias"):
            assert not t.any()
        elif not part.endswith("LayerNorm.weight") and not (tied and key == DECODER):
            assert 0.015 < t.std() < 0.025, key
    if tied and hasattr(loaded, "get_output_embeddings"):
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_a_tied_decoder_alone_is_no_head(tmp_path, caplog):
    state = state_of(make(BertForMaskedLM))
    write(tmp_path, {k: t for k, t in state.items() if k == DECODER or not k.startswith("cls.")})
    assert torch.equal(BertForMaskedLM.from_pretrained(tmp_path).state_dict()[DECODER], state[WORD_EMBEDDINGS])
    assert "has no cls.predictions" in caplog.text


def bert_with(make_part: Callable[[], nn.Module]) -> Any:
    """A user's class, whose embeddings do not learn."""

    class Tagger(BertModel):
        def build(self, config: Any, add_pooling_layer: bool = True) -> None:
            super().build(config, add_pooling_layer)
            self.part = make_part()
            self.embeddings.requires_grad_(False)

    return Tagger


def test_a_users_own_head_is_initialised_or_refused(tmp_path):
    make().save_pretrained(tmp_path)
    tagger = bert_with(lambda: nn.Conv1d(48, 3, 5)).from_pretrained(tmp_path)
    assert 0 < tagger.part.weight.std() < 1
    frozen = {name for name, p in tagger.named_parameters() if not p.requires_grad}
    assert frozen == {name for name in tagger.state_dict() if name.startswith("embeddings.")}
    with pytest.raises(ValueError, match=r"nothing initialises these of Tagger; .*reset_parameters:\n  part\.0$"):
        bert_with(lambda: nn.ParameterList([torch.zeros(3)])).from_pretrained(tmp_path)


def test_a_users_own_buffers_and_initialised_parameters_are_loaded_in_their_places(tmp_path):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = nn.Parameter(nn.init.ones_(torch.empty(7)))
            self.register_buffer("steps", torch.zeros(7))

    cls = bert_with(Scaled)
    model = cls(BertConfig(**SIZES))
    with torch.no_grad():
        model.part.factors += torch.arange(7)
        model.part.steps += 3
    model.save_pretrained(tmp_path)
    loaded = cls.from_pretrained(tmp_path)
    assert_same_model(loaded, model)
    assert [name for name, _ in loaded.named_buffers()] == ["part.steps"]
    assert not hasattr(loaded, "steps")


def test_leftover_heads_are_silent_and_what_no_bert_has_is_named(tmp_path, caplog):
    model = make(BertForPreTraining)
    heads = {"qa_outputs.weight": torch.zeros(3), "embeddings.position_ids": torch.zeros(5).long()}
    write(tmp_path, {**state_of(model), **heads})
    assert_same_model(BertModel.from_pretrained(tmp_path), model.bert)
    BertModel.from_pretrained(tmp_path, add_pooling_layer=False)
    assert not caplog.records
    write(tmp_path, {**state_of(model), **heads, "foo.bar": torch.zeros(5), "cls.crf.\x1b[2K": torch.zeros(1)})
    for cls in (BertModel, BertForPreTraining):
        caplog.clear()
        cls.from_pretrained(tmp_path)
        [record] = caplog.records
        assert record.levelname == "WARNING"
        assert "has 2 tensors that are not a BERT's and not used: 'cls.crf.\\x1b[2K', 'foo.bar'" in caplog.text
    assert inspect(tmp_path)["unused"] == ["cls.crf.\x1b[2K", "foo.bar"]


# Faults -------------------------------------------------------------------------------------------------------------

LAST = "encoder.layer.2."


def without(*names: str) -> Callable[[State], State]:
    return lambda state: {k: t for k, t in state.items() if not k.startswith(names)}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[State], State]:
    return lambda state: {**state, name: change(state[name])}


def half_a_head_less(state: State) -> State:
    read, own = ("encoder.layer.1.attention.output.dense.weight", "encoder.layer.1.attention.self.")
    return {**state, **{k: t[:30] for k, t in state.items() if k.startswith(own)}, read: state[read][:, :30]}


Q0, RELATIVE = "encoder.layer.0.attention.self.query.weight", {"position_embedding_type": "relative_key"}
FAULTS: dict[str, tuple[dict[str, Any], Callable[[State], State], str]] = {  # config, tensors, what the error says
    "fewer layers": ({}, without(LAST), "it has 2 layers, not 3 as the config says: pass num_hidden_layers=2"),
    "more layers": ({"num_hidden_layers": 1}, dict, "it has 3 layers, not 1 as the config says: pass num_hid"),
    "a layer in the middle": ({}, without("encoder.layer.1."), "encoder.layer.1.output.LayerNorm.bias is missing"),
    "heads of relative positions": (
        RELATIVE,
        lambda s: state_of(make(**RELATIVE, num_attention_heads=3)),
        "layer.0.attention.self.distance_embedding.weight is (79, 16); by the config it is (79, 12)",
    ),
    "another model": ({}, renamed(("^", "roberta.")), "it is not a BERT: its tensors are roberta.embeddings."),
    "several dtypes": ({}, changed(Q0, Tensor.half), f"weight), torch.float16 ({Q0}): pass dtype="),
    "half a head": ({}, half_a_head_less, "output.dense.weight is (48, 30); by the config it is (48, 48)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_refused(fault, tmp_path):
    config, change, message = FAULTS[fault]
    write(tmp_path, change(state_of(make())), {**JSON, **config})
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        BertModel.from_pretrained(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/model.safetensors does not fit BertModel as config.json desc")
    if fault in ("more layers", "fewer layers", "another model", "several dtypes"):
        assert str(caught.value).count("\n") == 1  # one fault is one line
    if fault == "several dtypes":
        found = BertModel.from_pretrained(tmp_path, dtype="float32")
        assert {p.dtype for p in found.parameters()} == {torch.float32}


def test_all_faults_are_listed_and_very_many_counted(tmp_path):
    few = state_of(make())
    few["pooler.dense.bias"] = few.pop("pooler.dense.weight")
    few["encoder.layer.0.x"] = torch.ones(1)
    with pytest.raises(ValueError, match="does not fit") as caught:
        BertModel.from_pretrained(write(tmp_path / "few", few))
    assert str(caught.value).split("\n  ")[1:] == [
        "pooler.dense.weight is missing",
        "encoder.layer.0.x is unknown",
        "pooler.dense.bias is (48, 48); by the config it is (48,)",
    ]
    with pytest.raises(ValueError, match=r"… and 14 more$") as caught:
        BertModel.from_pretrained(write(tmp_path / "many", without("encoder.layer.0.", "encoder.layer.1.")(few)))
    assert str(caught.value).count("\n") == 21


def test_only_a_classifier_of_labels_is_told_to_have_another_number_of_them(tmp_path):
    types = "embeddings.token_type_embeddings.weight"
    config = {**JSON, "num_labels": SIZES["type_vocab_size"]}
    with pytest.raises(ValueError, match=rf"{re.escape(types)} is \(4, 48\); by the config it is \(5, 48\)$"):
        BertModel.from_pretrained(write(tmp_path / "types", changed(types, lambda t: t[:4])(state_of(make())), config))
    choices = changed("classifier.weight", lambda t: t.repeat(2, 1))(state_of(make(BertForMultipleChoice)))
    with pytest.raises(ValueError, match=r"classifier\.weight is \(2, 48\); by the config it is \(1, 48\)$"):
        BertForMultipleChoice.from_pretrained(write(tmp_path / "choices", choices, config))


def test_a_head_of_another_size_says_how_to_load_it(tmp_path):
    config = BertConfig(**SIZES, id2label=dict(enumerate("abcdef")))
    make(BertForSequenceClassification, config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"classifier\.bias is \(6,\); by the config it is \(3,\): pass num_labels=6"):
        BertForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert BertForSequenceClassification.from_pretrained(tmp_path, num_labels=6).config.id2label[5] == "f"
    BertForSequenceClassification.from_pretrained(tmp_path)


# Files --------------------------------------------------------------------------------------------------------------


def test_the_formats_are_tried_in_order(tmp_path):
    for number, file in reversed([*enumerate(WEIGHT_FILES)]):  # a sharded save removes a file of its format
        state = {name: torch.full_like(t, number) for name, t in state_of(make()).items()}
        write(tmp_path, state, file=re.sub(r"(\.\w+)\.index\.json", r"{suffix}\1", file))
    for number, file in enumerate(WEIGHT_FILES):
        assert BertModel.from_pretrained(tmp_path).pooler.dense.bias[0] == number
        assert BertModel.from_pretrained(tmp_path / file).pooler.dense.bias[0] == number  # a file can be named
        (tmp_path / file).unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors or .*json; it holds config\.json, mo"):
        BertModel.from_pretrained(tmp_path)


def test_variant_and_subfolder_choose_the_file_and_never_another(tmp_path):
    model = make()
    write(tmp_path / "a", state_of(model), file="model.fp16.safetensors")
    write(tmp_path / "b", state_of(model), file="model.fp16{suffix}.safetensors")
    (tmp_path / "b/model.fp16.safetensors.index.json").rename(tmp_path / "b/model.safetensors.index.fp16.json")
    for subfolder in "ab":
        assert_same_model(BertModel.from_pretrained(tmp_path, subfolder=subfolder, variant="fp16"), model)
        with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors or"):
            BertModel.from_pretrained(tmp_path / subfolder)


DTYPE, A_FILE = r"dtype is .*; have: float64, float32, bfloat16, float16", "model/model.safetensors"
PATHS = ("/none", Path("/none"), "./none", "../none", "~/none", Path("none/none"))
SOURCES: list[tuple[Any, dict[str, Any], Any, str]] = [
    *(("model", {"dtype": dtype}, ValueError, DTYPE) for dtype in ("float", "int8", torch.int8)),
    ("model", {"dtype": 32}, TypeError, r"dtype is 32; give a torch\.dtype or a string"),
    ("model", {"variant": "bf16"}, FileNotFoundError, r"has no model\.bf16\.safetensors or .*\.index\.bf16"),
    ("model", {"subfolder": "c"}, FileNotFoundError, r"there is no folder .*/c$"),
    *((A_FILE, {name: "fp16"}, ValueError, "is a file: leave subfolder and var") for name in ("variant", "subfolder")),
    ("model/config.json", {}, ValueError, r"config\.json is only the config: name its folder"),
    ("a/b/c", {}, FileNotFoundError, "and a hub id cannot look like that"),
    ("", {}, TypeError, "source is ''; give the path of a folder, or a hub id"),
    *((path, {}, FileNotFoundError, r"there is no folder or file .*none$") for path in PATHS),
]


@pytest.mark.parametrize(("source", "options", "error", "message"), SOURCES, ids=str)
def test_what_names_nothing_is_refused_and_a_path_is_never_asked_of_the_hub(
    source, options, error, message, tmp_path, monkeypatch
):
    write(tmp_path / "model", state_of(make()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *args, **options: pytest.fail("the hub was asked"))
    with pytest.raises(error, match=message):
        BertModel.from_pretrained(source, **options)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"model": {"a": torch.ones(1)}, "epoch": 3}, "'model' is a dict, not a plain tensor; save only a state_dict"),
        ([torch.ones(1)], "holds a list, not tensors by name"),
        ({"a": torch.eye(3).to_sparse()}, "'a' is a Tensor, not a plain tensor"),
    ],
)
def test_a_pickle_holds_tensors_by_name(held, message, tmp_path):
    write(tmp_path, held, file="pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        BertModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "of 2018"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: b"", "is empty: fetch it again"),
        (lambda whole: hostile.POINTER, "is a git-lfs pointer, not the weights: run git lfs pull"),
        (lambda whole: whole[:-100], "is damaged"),
        (lambda whole: whole[:5], "is damaged"),
        (lambda whole: bytes(range(256)) * 9, "is damaged"),
    ],
)
def test_a_damaged_pickle_is_named(change, message, zipped, tmp_path):
    path = write(tmp_path, {}, file="pytorch_model.bin") / "pytorch_model.bin"
    torch.save(state_of(make()), path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} {message}"):
        BertModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_a_disk_that_fails_is_no_damaged_file(number, tmp_path, monkeypatch):
    write(tmp_path, state_of(make()), file="pytorch_model.bin")
    monkeypatch.setattr(torch, "load", raising(OSError(number, os.strerror(number))))
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        BertModel.from_pretrained(tmp_path)
    assert caught.value.errno == number


OTHERS = {  # names of files, and what is said of them
    "model.gguf": "GGUF.*: name the checkpoint that it was made from",
    "model.zip": "a zip archive: run `unzip",
    "model.tar.gz": "an archive: run `tar -xf",
    "model.onnx": "ONNX.*: name the checkpoint that it was exported from",
    "tf_model.h5": r"of TensorFlow: load it in transformers 4 with from_tf=True",
    "flax_model.msgpack": r"of Flax: .* from_flax=True",
    "adapter_config.json": r"an adapter of PEFT: .*merge_and_unload\(\)",
    "onnx/model.onnx": "ONNX.*: name the checkpoint",
    "openvino/openvino_model.xml": ".*: name the checkpoint",
}


@pytest.mark.parametrize("config", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_files_of_other_formats_are_named_with_the_way_out(name, config, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"GGUF")
    if config:
        (tmp_path / "config.json").write_text(json.dumps(SIZES))
    for path, error in ((tmp_path, FileNotFoundError), (tmp_path / name, ValueError)):
        for load in (BertModel.from_pretrained, BertTokenizer.from_pretrained):
            with pytest.raises(error, match=rf"{re.escape(name)} is {OTHERS[name]}"):
                load(path)
    write(tmp_path, state_of(make()))  # a whole checkpoint beside it
    with pytest.raises(FileNotFoundError, match=rf"it holds .*{name.partition('/')[0][-4:]}[^:]*$"):
        BertTokenizer.from_pretrained(tmp_path)
    if name == "adapter_config.json":
        with pytest.raises(ValueError, match=r"adapter_config\.json is an adapter of PEFT, .*merge_and_unload"):
            BertModel.from_pretrained(tmp_path)
    assert_same_model(BertModel.from_pretrained(tmp_path / "model.safetensors"), make())
    (tmp_path / "weights.npz").touch()
    with pytest.raises(ValueError, match=r"npz is not a weights file: their names end in \.safetensors, \.bin"):
        BertModel.from_pretrained(tmp_path / "weights.npz")


def test_a_folder_that_is_not_there_is_said_to_be_missing_before_the_hub_is_asked(tmp_path, monkeypatch, caplog):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, told in (("runs/dens", ["there is no folder runs/dens: asking the hub for it"]), ("some/model", [])):
        caplog.clear()
        with pytest.raises(FileNotFoundError, match=f"there is no folder {name}"):
            BertModel.from_pretrained(name, local_files_only=True)
        assert caplog.messages == told


def test_a_folder_whose_model_is_in_a_subfolder_names_it(tmp_path):
    """As a run has its model; where sentence-transformers 0.x put one, and its modules.json, it is loaded."""
    make().save_pretrained(tmp_path / "0_BERT")
    with pytest.raises(FileNotFoundError, match=rf"subfolder: name {tmp_path}/0_BERT$"):
        BertModel.from_pretrained(tmp_path)
    assert BertModel.from_pretrained(tmp_path, subfolder="0_BERT").config.hidden_size == SIZES["hidden_size"]
    (tmp_path / "modules.json").write_text('[{"path": "0_BERT"}]')
    assert BertModel.from_pretrained(tmp_path).config.hidden_size == SIZES["hidden_size"]


def test_a_path_that_is_not_utf8_is_not_called_damaged(tmp_path, monkeypatch):
    make().save_pretrained(folder := tmp_path / os.fsdecode(b"caf\xe9"))
    with pytest.raises(ValueError, match=r"is not UTF-8, so that weights cannot be read or written there: rename it$"):
        BertModel.from_pretrained(folder)
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")  # LC_ALL=C, without Python's UTF-8 mode
    with pytest.raises(ValueError, match=r"is not ascii, as this Python reads it, .* set PYTHONUTF8=1 or rename it$"):
        BertModel.from_pretrained(folder)


# Pruned checkpoints -------------------------------------------------------------------------------------------------


def test_units_that_are_said_to_be_gone_are_listed_up_to_20(tmp_path):
    write(tmp_path, state_of(make()), {**JSON, "pruned_heads": {"0": [1]}})
    message = r"says that \[1\] are removed; pass pruned_heads without layer 0 to use them all"
    with pytest.raises(ValueError, match=message):
        BertModel.from_pretrained(tmp_path)
    assert_same_model(BertModel.from_pretrained(tmp_path, pruned_heads={}), make())
    for count, said in ((20, str(list(range(20)))), (21, "21")):
        write(tmp_path, state_of(make()), {**JSON, "pruned_neurons": {"1": list(range(count))}})
        with pytest.raises(ValueError, match=re.escape(f"pruned_neurons says that {said} are removed; pass")):
            BertModel.from_pretrained(tmp_path)


# The hub ------------------------------------------------------------------------------------------------------------

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path) -> Path:
    """A hub cache that holds org/name and org/sharded, as huggingface_hub lays it out."""
    for name in ("name", "sharded"):
        repo = tmp_path / "cache" / f"models--org--{name}"
        blobs, snapshot = repo / "blobs", repo / "snapshots" / SHA
        make(BertForMaskedLM).save_pretrained(blobs)
        if name == "sharded":
            split(blobs)
        (snapshot / "sub").mkdir(parents=True)
        write_text(repo / "refs/main", SHA)
        for file in [*blobs.iterdir()]:
            file.rename(blobs / f"blob-{file.name}")
            (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")
            (snapshot / "sub" / file.name).symlink_to(f"../../../blobs/blob-{file.name}")
    return tmp_path / "cache"


@pytest.mark.parametrize("repo", ["org/name", "org/sharded"])
@pytest.mark.parametrize("options", [{}, {"revision": SHA}, {"revision": "main"}, {"subfolder": "sub"}], ids=str)
def test_the_cache_is_enough(repo, options, cache):
    loaded = BertForMaskedLM.from_pretrained(repo, cache_dir=cache, local_files_only=True, **options)
    assert_same_model(loaded, make(BertForMaskedLM))


@pytest.mark.parametrize("name", [f"cache/models--org--sharded/snapshots/{SHA}", "snapshots/a", "models--a/b/c"])
def test_a_snapshot_cannot_link_out_of_the_cache_and_a_folder_that_is_called_like_one_is_none(name, cache, tmp_path):
    """Both of its names are needed for links to lead further up."""
    is_cache, folder = name.startswith("cache"), tmp_path / name
    if not is_cache:
        write(folder, state_of(make()), file=SHARDS)
    shard = next(folder.glob("model-00001*"))
    shutil.copy(shard, tmp_path / "outside.safetensors")
    shard.unlink()
    shard.symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(ValueError, match="is a link out of its folder"):
        BertModel.from_pretrained("org/sharded" if is_cache else folder, cache_dir=cache, local_files_only=True)


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"revision": "other"}, "config.json"),
        ({"subfolder": "none"}, "config.json"),
        ({"variant": "fp16"}, "model.fp16"),
    ],
)
def test_what_the_cache_lacks_is_named(options, missing, cache):
    for repo in ("org/name", "org/none"):
        with pytest.raises(FileNotFoundError, match=rf"no folder {repo}.*the hub was not reached\. Go online"):
            BertForMaskedLM.from_pretrained(repo, cache_dir=cache, local_files_only=True, **options)
    with pytest.raises(FileNotFoundError, match=missing):
        BertForMaskedLM.from_pretrained("org/name", cache_dir=cache, local_files_only=True, **options)


def of_hub(kind: Any) -> Exception:
    error: Exception = kind.__new__(kind, "said the hub")
    return error


BROKEN = r"config\.json was not completely received from the hub \({}: it hung up\): try again$"
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
HUB_ERRORS = [  # what a download raises, and what is said of it
    (of_hub(errors.GatedRepoError), PermissionError, "org/name is gated: ask for access at https://huggingface.co"),
    (of_hub(errors.RepositoryNotFoundError), FileNotFoundError, "org/name is neither a folder here nor a repository"),
    (of_hub(errors.RevisionNotFoundError), FileNotFoundError, "org/name has no revision 'v2' on the hub"),
    (of_hub(errors.EntryNotFoundError), FileNotFoundError, "org/name has no config.json or bert_config.json on the"),
    (of_hub(errors.LocalEntryNotFoundError), FileNotFoundError, "the hub was not reached"),
    (RuntimeError("it hung up\nand more"), ConnectionError, BROKEN.format("RuntimeError")),
    (OSError("it hung up"), ConnectionError, BROKEN.format("OSError")),
    (NO_SPACE, OSError, "No space left"),  # which is not the hub's fault
]


@pytest.mark.parametrize(("error", "raised", "message"), HUB_ERRORS, ids=[repr(error) for error, *_ in HUB_ERRORS])
def test_a_download_that_fails_says_what_to_do(error, raised, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_hub_download", raising(error))
    monkeypatch.setattr("bertlite.checkpoint.files.hub_answers", lambda: True)
    with pytest.raises(raised, match=message) as caught:
        BertModel.from_pretrained("org/name", revision="v2")
    assert caught.value.errno == (errno.ENOSPC if error is NO_SPACE else None)


def test_without_a_network_a_name_that_is_nowhere_is_asked_for_once(tmp_path, monkeypatch):
    """hf_hub_download asks six times in half a minute, and so for each file."""
    asked: list[str] = []

    class Offline:
        def head(self, url: str, **_: object) -> None:
            asked.append(url)
            raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", Offline)
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", raising(AssertionError("asked again")))
    with pytest.raises(FileNotFoundError, match=r"^there is no folder org/nosuch, .* and the hub was not reached"):
        BertModel.from_pretrained("org/nosuch", cache_dir=tmp_path)
    assert asked == ["https://huggingface.co"]


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail


def test_all_files_come_from_one_commit_of_the_hub_which_is_asked_unless_forbidden(cache, monkeypatch):
    asked, download = [], hf_hub_download

    def record(repo: str, name: str, **options: Any) -> str:
        asked.append((name, options["revision"], options["token"], options["local_files_only"]))
        return download(repo, name, **{**options, "local_files_only": True})

    monkeypatch.setattr("huggingface_hub.hf_hub_download", record)
    monkeypatch.setattr("bertlite.checkpoint.files.hub_answers", lambda: True)
    for forbidden in (True, False):
        BertForMaskedLM.from_pretrained("org/name", cache_dir=cache, local_files_only=forbidden, token=False)
        names = {"config.json": None, "model.safetensors": SHA, "adapter_config.json": SHA}
        assert asked == [(name, revision, False, forbidden) for name, revision in names.items()]
        asked.clear()


def test_a_model_and_its_tokenizer_arrive_in_one_commit_each(monkeypatch, tmp_path):
    api, arrived, commits, tokens = create_autospec(HfApi), tmp_path / "arrived", [], []

    def upload(*, folder_path: Path, **given: Any) -> str:
        shutil.copytree(folder_path, arrived, dirs_exist_ok=True)
        commits.append((*given.values(), sorted(path.name for path in folder_path.iterdir())))
        return "the commit"

    api.create_repo.return_value = SimpleNamespace(repo_id="me/name")
    api.upload_folder.side_effect = upload
    monkeypatch.setattr("huggingface_hub.HfApi", lambda token: tokens.append(token) or api)
    model = make(vocab_size=len(WORDS))
    model.prune_heads({1: [2]})
    options = {"private": True, "token": "hf_secret", "commit_message": "a pruned BERT", "revision": "small"}
    assert model.push_to_hub("name", **options) == "the commit"
    api.create_repo.assert_called_once_with("name", private=True, exist_ok=True)
    api.create_branch.assert_called_once_with("me/name", branch="small", exist_ok=True)
    BertTokenizer(WORDS).push_to_hub("name", create_pr=True, revision="small")
    api.create_branch.assert_called_once()
    assert tokens == ["hf_secret", None]
    assert commits == [
        ("me/name", "a pruned BERT", "small", False, ["config.json", "model.safetensors"]),
        ("me/name", "Upload tokenizer", "small", True, ["tokenizer.json", "tokenizer_config.json", "vocab.txt"]),
    ]
    again = BertModel.from_pretrained(arrived)
    assert again.config.pruned_heads == {1: (2,)}
    assert_same(again.state_dict(), model.state_dict(), atol=0)
    assert BertTokenizer.from_pretrained(arrived).get_vocab() == {word: i for i, word in enumerate(WORDS)}


# Saving -------------------------------------------------------------------------------------------------------------


def test_tensors_that_are_views_of_one_memory_are_saved(tmp_path):
    model = make()
    flat, start = torch.cat([p.detach().flatten() for p in model.parameters()]), 0
    for name, p in list(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(flat[start : start + p.numel()].view(p.shape)))
        start += p.numel()
    model.save_pretrained(tmp_path)
    assert_same_model(BertModel.from_pretrained(tmp_path), make())


def test_a_disk_that_is_full_in_the_middle_of_the_weights_changes_nothing(tmp_path):
    make().save_pretrained(tmp_path / "old")
    before = (tmp_path / "old" / "model.safetensors").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))  # Python ignores the signal
    try:
        for name in ("old", "new"):
            with pytest.raises(OSError, match="File too large"):
                make(BertForMaskedLM).save_pretrained(tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old" / "model.safetensors").read_bytes() == before


def test_a_tensor_without_an_address_is_not_misaligned():
    shifted = torch.zeros(64, dtype=torch.uint8)[8:24].view(2, 8)
    assert is_misaligned(shifted)
    assert not is_misaligned(shifted.as_subclass(Twin))


def test_saving_replaces_weights_and_keeps_other_files(tmp_path):
    folder = tmp_path / "model"
    make().save_pretrained(folder)
    split(folder)
    stale = ["model.fp16.safetensors", "model.safetensors.index.fp16.json", "model.fp16-00001-of-00002.safetensors"]
    kept = ["vocab.txt", "1_Pooling/config.json", "2_Dense/model.safetensors", "model_card.md", "pytorch_model.bin"]
    for name in stale + kept:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    files = {name: (folder / name).stat().st_ino for name in kept}
    (folder / "link").symlink_to("vocab.txt")
    (folder / "dangling").symlink_to("../nowhere")
    folder.chmod(0o750)
    make(BertForMaskedLM).save_pretrained(folder)
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    assert found == sorted(["config.json", "model.safetensors", "link", "dangling", *kept])
    assert all((folder / name).read_text() == name for name in kept)
    assert (folder / "link").read_text() == "vocab.txt"
    assert os.readlink(folder / "dangling") == "../nowhere"
    assert folder.stat().st_mode & 0o777 == 0o750
    assert {name: (folder / name).stat().st_ino for name in kept} == files  # not copies
    assert (folder / "vocab.txt").stat().st_nlink == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_can_be_saved_over_the_files_it_is_mapped_from(tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    loaded = BertModel.from_pretrained(tmp_path)
    with torch.no_grad():
        for number in range(3):
            loaded.pooler.dense.bias += number
            loaded.save_pretrained(tmp_path)
            assert_same_model(BertModel.from_pretrained(tmp_path), loaded)
    assert torch.equal(loaded.pooler.dense.bias, model.pooler.dense.bias + 1 + 2)
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_an_empty_folder_and_a_link_to_a_folder_will_do(tmp_path):
    """And files can be read by whom the umask allows."""
    (tmp_path / "empty").mkdir()
    make().save_pretrained(tmp_path / "empty")
    (tmp_path / "own").touch()
    modes = {path.stat().st_mode & 0o777 for path in [tmp_path / "own", *(tmp_path / "empty").iterdir()]}
    assert len(modes) == 1
    (tmp_path / "link").symlink_to("empty")
    make(hidden_act="relu").save_pretrained(str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert BertModel.from_pretrained(tmp_path / "empty").config.hidden_act == "relu"


@pytest.mark.parametrize("target", [".", ".."])
@pytest.mark.parametrize("there", [False, True], ids=["empty", "full"])
def test_the_working_directory_can_be_saved_into_and_stays(target, there, tmp_path, monkeypatch):
    """For a shell that stands there too."""
    (tmp_path / "home/sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "home/sub")
    before = Path(".").stat().st_ino, Path("..").stat().st_ino
    if there:
        a_folder(Path(target))
    model = make(hidden_act="relu")
    model.save_pretrained(target)
    assert (Path(".").stat().st_ino, Path("..").stat().st_ino) == before
    assert Path.cwd() == tmp_path / "home/sub"
    assert_same_model(BertModel.from_pretrained(target), model)
    kept = {"vocab.txt", "1_Pooling"} if there else set()
    assert {path.name for path in Path(target).iterdir()} - {"sub"} == {"config.json", "model.safetensors"} | kept
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_tilde_is_the_home_wherever_a_path_enters(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = make().float()
    model.save_pretrained("~/model")
    assert_same_model(BertModel.from_pretrained("~/model"), model)
    assert BertConfig.from_json_file("~/model/config.json").hidden_size == model.config.hidden_size
    assert all(Path(path).is_file() for path in BertTokenizer(WORDS).save_pretrained("~/model"))
    assert BertTokenizer("~/model/vocab.txt").get_vocab() == BertTokenizer.from_pretrained("~/model").get_vocab()
    export_remote_code("~/model")
    assert write_model("~/whole", model, "~/model") == tmp_path / "whole"
    with Run("x", {}, folder="~/runs/x"):
        pass
    assert [run.folder for run in read_runs("~/runs")] == [tmp_path / "runs/x"]
    assert main(["inspect", "~/model", "--out=~/a.json"]) == 0
    assert main(["attention", "~/model", "a b", "--against=~/whole", "--out=~/b.json"]) == 0
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/model is not an optimised model"):
        InferenceModel.load("~/model")
    assert {path.name for path in tmp_path.iterdir()} >= {"a.json", "b.json", "model", "runs", "whole"}
    assert list(Path.cwd().iterdir()) == []


def prune_by_hand(model: Any) -> None:
    for part in (model.encoder.layer[1].attention.self.query, model.encoder.layer[1].attention.self.key):
        part.weight, part.bias = nn.Parameter(part.weight[:24].detach()), nn.Parameter(part.bias[:24].detach())


class Twin(Tensor):
    """A kind of tensor that safetensors does not know, as quantisation and tensor parallelism make them."""

    def data_ptr(self) -> int:
        raise RuntimeError("it has no storage")


def twin(model: Any) -> None:
    model.pooler.dense.weight = nn.Parameter(model.pooler.dense.weight.detach().as_subclass(Twin))


UNTIED = nn.Parameter(torch.ones(97, 48).double())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.to("meta"), "embeddings.word_embeddings.weight is on the meta device: it has no values"),
        (lambda m: setattr(m.bert.embeddings, "word_embeddings", nn.Embedding(98, 48)), r"weight is \(98, 48\)"),
        (lambda m: setattr(m.bert.pooler, "dense", nn.Sequential(m.bert.pooler.dense)), r"dense.0.weight is unknown"),
        (lambda m: prune_by_hand(m.bert), r"encoder.layer.1.attention.self.query.weight is \(24, 48\)"),
        (lambda m: twin(m.bert), "pooler.dense.weight is a Twin, not a plain tensor"),
        (lambda m: setattr(m.cls.predictions.decoder, "weight", UNTIED), "differs from the word embeddings, but"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved_and_nothing_is_made_on_the_hub(change, message, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: pytest.fail("the hub was asked"))
    model = make(BertForPreTraining)
    change(model)
    for save, place in ((model.save_pretrained, tmp_path / "new"), (model.push_to_hub, "org/name")):
        with pytest.raises(ValueError, match=f"^this BertForPreTraining cannot be saved:(.|\n)*{message}"):
            save(place)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_replaced_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file is a file: name a folder to write"):
        make().save_pretrained(tmp_path / "file")
    with pytest.raises(ValueError, match="/ is a mount point"):
        make().save_pretrained("/")
    locked = tmp_path / "locked"
    (locked / "inner").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: path != locked)  # root could write anywhere
    for folder in (locked / "inner", locked / "new", locked):
        with pytest.raises(PermissionError, match=f"{folder} cannot be replaced: {locked} is not writable"):
            make().save_pretrained(folder)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "inner", "locked"]


def a_folder(folder: Path) -> Path:
    make().save_pretrained(folder)
    split(folder)
    (folder / "vocab.txt").write_text("words")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSYS])
@pytest.mark.parametrize("renames", [True, False])
def test_an_exchange_that_fails_changes_nothing_or_is_done_by_two_renames_or_undone(
    number, renames, tmp_path, monkeypatch
):
    rename = os.rename

    def exchange(*args: Any) -> int:
        ctypes.set_errno(number)
        return -1

    def second(a: Path, b: Path) -> None:
        if str(a).endswith(".new") and b.name == "model" and (not b.exists()):
            raise OSError(errno.EIO, "the disk says no")
        rename(a, b)

    folder, new = a_folder(tmp_path / "model"), prune_heads(make(), PRUNED)
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **options: SimpleNamespace(renameat2=exchange))
    monkeypatch.setattr(os, "rename", rename if renames else second)
    is_saved = renames and number == errno.ENOSYS
    with nullcontext() if is_saved else pytest.raises(OSError, match="model" if renames else "model|the disk says no"):
        new.save_pretrained(folder)
    assert_same_model(BertModel.from_pretrained(folder), new if is_saved else make())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_files_are_kept_without_hard_links_and_if_they_come_during_a_save_too(links, tmp_path, monkeypatch):
    folder, exchange = a_folder(tmp_path / "model"), folders.exchange

    def late(a: Path, b: Path) -> None:
        (folder / "late.txt").write_text("here I am")
        exchange(a, b)

    monkeypatch.setattr(folders, "exchange", late)
    if not links:
        monkeypatch.setattr(os, "link", raising(OSError(errno.EPERM, "no links here")))
    make().save_pretrained(folder)
    kept = {"late.txt": "here I am", "vocab.txt": "words", "1_Pooling/config.json": "{}"}
    assert {name: (folder / name).read_text() for name in kept} == kept
