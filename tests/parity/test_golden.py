"""Outputs of transformers 4.57.6 that transformers 5 cannot compute, from the files of scripts/make/golden.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same, full_outputs
from safetensors.torch import load_file
from torch import Tensor

from bertlite import prune_heads
from scripts.make import golden

GOLDEN = Path(__file__).parents[1] / "golden"
CASES: dict[str, Any] = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))
L = 3
BOTH = pytest.mark.parametrize("backend", ["eager", "sdpa"])
ROOMS = pytest.mark.parametrize("room", ["bertlite", "bertlite.hf"])
EVERY = pytest.mark.parametrize("name", CASES)


def tensors_of(name: str, which: str) -> dict[str, Tensor]:
    """Return the inputs or the outputs of a case."""
    return {k.removeprefix(f"{which}."): x for k, x in load_file(GOLDEN / f"{name}.safetensors").items() if which in k}


def outputs_of(name: str) -> dict[str, Any]:
    out = tensors_of(name, "outputs")
    attentions = tuple(out.pop(f"attentions.{layer}") for layer in range(L))
    return {**{name: out[name] for name in ("last_hidden_state", "pooler_output")}, "attentions": attentions}


def model_class(room: str) -> Any:
    return pytest.importorskip(room).BertModel


def build(name: str, room: str, backend: str) -> Any:
    """Build the model of a case, before any pruning."""
    config = pytest.importorskip(room).BertConfig(**CASES[name]["config"], attn_implementation=backend)
    model = model_class(room)(config)
    weights = load_file(GOLDEN / "weights.safetensors")
    model.load_state_dict({key: weights[key] for key in model.state_dict()})
    return model.double().eval()


def visible(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    out = full_outputs(model, inputs)
    return {key: out[key] for key in ("last_hidden_state", "pooler_output", "attentions")}


@BOTH
@ROOMS
@EVERY
def test_bertlite_computes_what_transformers_4_did(name: str, room: str, backend: str, kernels_run: list[str]) -> None:
    model, inputs, wanted = build(name, room, backend), tensors_of(name, "inputs"), outputs_of(name)
    for heads in CASES[name]["prune_heads"]:
        model = prune_heads(model, heads)
    assert_same(visible(model, inputs), wanted)
    kernels_run.clear()  # those of the attentions
    with torch.no_grad():
        assert_same(model(**inputs).last_hidden_state, wanted["last_hidden_state"])
    assert kernels_run == [backend] * L


@BOTH
@ROOMS
def test_a_pruned_folder_of_transformers_4_loads(room: str, backend: str) -> None:
    cls = model_class(room)
    model = cls.from_pretrained(GOLDEN / "pruned", attn_implementation=backend, dtype=torch.float64)
    found = {layer: [*heads] for layer, heads in model.config.pruned_heads.items()}
    assert found == {0: [1, 3], 1: [0, 1, 2], 2: [2]}
    assert not model.training
    assert_same(visible(model, tensors_of("pruned-twice", "inputs")), outputs_of("pruned-twice"))
    if room == "bertlite":  # which takes the file's own dtype
        assert {p.dtype for p in cls.from_pretrained(GOLDEN / "pruned").parameters()} == {torch.float32}


# The files and their script


def test_the_files_are_those_of_the_script() -> None:
    assert set(CASES) == set(golden.CASES)
    assert json.loads(json.dumps({name: golden.of(case) for name, case in golden.CASES.items()})) == CASES
    versions = json.loads((GOLDEN / "versions.json").read_text(encoding="utf-8"))
    assert set(versions) == {"python", "torch", "transformers"}
    assert versions["transformers"] == golden.VERSION == "4.57.6"
    fixed = {"weights.safetensors", "cases.json", "versions.json", "pruned/config.json", "pruned/model.safetensors"}
    assert found_in(GOLDEN) == fixed | {f"{name}.safetensors" for name in CASES}


def found_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_script_writes_the_same_files_again_and_with_another_transformers_none(tmp_path: Path) -> None:
    version = pytest.importorskip("transformers").__version__
    if version != golden.VERSION:
        with pytest.raises(SystemExit, match=f"this is transformers {version}; golden files come from 4.57.6"):
            golden.main([str(tmp_path / "golden")])
        assert not (tmp_path / "golden").exists()
        return
    assert golden.main([str(tmp_path)]) == 0
    assert found_in(tmp_path) == found_in(GOLDEN)
    for name in sorted(found_in(tmp_path)):
        if name.endswith(".safetensors"):
            new, old = load_file(tmp_path / name), load_file(GOLDEN / name)
            assert_same(new, old)  # float64 outputs may round differently on another CPU
            assert all(new[key].equal(old[key]) for key in new if not key.startswith("outputs."))
        elif name != "versions.json":  # the torch and the Python may be others
            assert (tmp_path / name).read_text() == (GOLDEN / name).read_text()
