"""bertlite/inference/native/choice.py: "auto" is never slower than the plain model, on any processor."""

import warnings
from pathlib import Path

import pytest
import torch
from conftest import assert_same, make_batch
from natively import kernels_or_skip, make_native, native, no_home

from bertlite import optimize_for_inference
from bertlite.inference.native import choice
from bertlite.inference.native.choice import kernels_are_faster
from bertlite.runtime.library import INSTRUCTION_SETS, usable_sets

pytestmark = native


class Planted:
    """Kernels of a processor without a record, in which a layer takes no time unless they run."""

    def __init__(self, name: str = "avx2", runs: bool = False) -> None:
        real = kernels_or_skip(usable_sets()[0].name)
        self.path, self.blocks, self.pack = f"/cache/{name}-0.so", real.blocks, real.pack
        self.run = real.run if runs else lambda *_: True


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    kernels_or_skip(usable_sets()[0].name)  # from the user's own cache
    monkeypatch.setenv("BERTLITE_CACHE", str(tmp_path))
    monkeypatch.setattr(choice, "processor_flags", lambda: INSTRUCTION_SETS["avx2"].needs)
    choice.warn_once.cache_clear()
    yield tmp_path / "native"
    choice.warn_once.cache_clear()


@pytest.fixture
def measured(monkeypatch) -> list[torch.dtype]:
    """Return the dtypes that are measured from now on, each as twice as fast with the kernels."""
    found = []
    monkeypatch.setattr(choice, "measure", lambda _, dtype: found.append(dtype) or {"native": 1e-3, "plain": 2e-3})
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_auto_takes_the_plain_model_where_the_kernels_are_slower_and_says_so_once(dtype, monkeypatch, caplog):
    caplog.set_level("INFO", "bertlite")
    kernels = Planted(runs=True)
    monkeypatch.setattr(choice, "load_kernels", lambda **_: kernels)
    monkeypatch.setattr(choice, "measure", lambda *_: {"native": 3e-3, "plain": 2e-3})
    model, batch = make_native().float(), make_batch()
    with pytest.warns(RuntimeWarning, match=f"plain model, .*: they are slower on this processor in {dtype}; b"):
        quick = optimize_for_inference(model, dtype=dtype)
    assert (quick.backend, quick.compute_dtype) == ("plain", dtype)
    assert_same(quick(**batch), model.to(dtype)(**batch), atol=0)
    with warnings.catch_warnings(action="error"):
        assert optimize_for_inference(model, dtype=dtype).backend == "plain"
    assert caplog.text.count("measured once: native") == 1
    assert optimize_for_inference(model.float(), dtype=dtype, backend="native").backend == "native"
    assert optimize_for_inference(model, dtype=torch.int8).compute_dtype == torch.int8  # which no plain model has


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_kernels_that_are_faster_are_taken_whatever_the_default_device(device):
    with torch.device(device):
        assert kernels_are_faster(Planted(), torch.float32)


def test_a_processor_with_a_record_is_not_measured(monkeypatch, measured):
    kernels = Planted("avx512_bf16")
    monkeypatch.setattr(choice, "processor_flags", lambda: INSTRUCTION_SETS["avx512_bf16"].needs)
    assert kernels_are_faster(kernels, torch.int8)
    assert measured == []
    monkeypatch.setattr(choice, "processor_flags", lambda: INSTRUCTION_SETS["amx"].needs)  # these are its second best
    assert kernels_are_faster(kernels, torch.int8)
    assert measured == [torch.int8]


def test_times_are_kept_for_each_kind_of_work(cache, measured, monkeypatch):
    for each in (Planted(), Planted()):  # as two processes have them
        assert kernels_are_faster(each, torch.float32)
    assert measured == [torch.float32]
    assert len([*cache.iterdir()]) == 1
    assert cache.stat().st_mode & 0o777 == 0o700
    assert kernels_are_faster(Planted(), torch.bfloat16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert kernels_are_faster(Planted(), torch.bfloat16)
    assert measured[1:] == [torch.bfloat16] * 2


@pytest.mark.parametrize("text", ['{"seconds": {"native": 1', "[]", '{"seconds": {"native": null, "plain": 1}}', ""])
def test_a_damaged_file_is_measured_again(text, cache, measured):
    kernels_are_faster(Planted(), torch.float32)
    [path] = cache.iterdir()
    path.write_text(text)
    assert kernels_are_faster(Planted(), torch.float32)
    assert kernels_are_faster(Planted(), torch.float32)
    assert len(measured) == 2


def test_times_that_cannot_be_kept_are_used(tmp_path, monkeypatch, measured):
    monkeypatch.setenv("BERTLITE_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    assert kernels_are_faster(Planted(), torch.float32)
    monkeypatch.delenv("BERTLITE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert kernels_are_faster(Planted(), torch.float32)
    assert len(measured) == 2
