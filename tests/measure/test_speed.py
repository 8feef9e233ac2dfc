"""scripts/measure/speed: engines beside the machine's limits, and what comes before a batch."""

import json

import pytest
import torch
from conftest import SIZES
from torch.utils._python_dispatch import TorchDispatchMode

from bertlite import BertConfig, BertModel, timing
from bertlite.bench.command import environment_of
from bertlite.bench.sections import Bench
from bertlite.bench.work import full
from bertlite.inference import InferenceModel
from bertlite.inference.native.library import NativeKernelsError
from scripts.measure.speed import ceiling, sections, startup
from scripts.measure.speed.__main__ import lines, main
from scripts.measure.speed.ceiling import Ceiling
from scripts.measure.speed.sections import gpu_demands, limit_fractions, limit_times


def test_the_limit_is_products_or_reading():
    config, work = BertConfig(**SIZES), full(3, 17)
    times = {
        "bertlite sdpa float32": [1.0, 4.0, 2.0],
        "bertlite native int8": [1.0, 1.0, 1.0],
        "matmul float32": [0.5, 1.0, 1.0],
    }
    ceilings = {"float32": Ceiling("a library", lambda: None, work.operations(config), 1.0)}
    limits = limit_times(times, work, config, ceilings, copied=1e18)
    assert limits == {"float32": [0.5, 1.0, 1.0]}  # as fast as the matmul in the same round
    fractions = limit_fractions({name: each for name, each in times.items() if "bertlite" in name}, limits)
    assert fractions == {"bertlite sdpa float32": {"low": 0.25, "median": 0.5, "high": 0.5}}
    weights = 4 * 3 * (4 * 48**2 + 2 * 48 * 37)
    assert limit_times(times, work, config, ceilings, copied=weights / 2) == {"float32": [2.0, 2.0, 2.0]}


def test_the_fastest_matmul_is_the_ceiling(monkeypatch):
    monkeypatch.setattr(ceiling, "SIZE", {"cpu": 64})
    monkeypatch.setattr(ceiling, "alternate", lambda runs, *_: {name: [9.0, run()] for name, run in runs.items()})
    slow_and_quick = {"a": lambda: 2.0, "b": lambda: 0.5}
    monkeypatch.setattr(ceiling, "matmuls", lambda dtype, device: {} if dtype == "int8" else slow_and_quick)
    found = ceiling.find_ceilings("cpu")
    assert {dtype: each.library for dtype, each in found.items()} == {"float32": "b", "bfloat16": "b"}
    assert found["float32"].rate == 2 * 64**3 / 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_every_library_multiplies_by_the_same_size(dtype, monkeypatch):
    monkeypatch.setattr(ceiling, "SIZE", {"cpu": 64})
    runs = ceiling.matmuls(dtype, "cpu")
    assert set(runs) >= ({"torch"} if dtype != "int8" else set())
    for library, run in runs.items():
        out = run()
        shape = out.shape if isinstance(out, torch.Tensor) else out[0].shape
        assert tuple(shape) == (64, 64), library


def test_what_a_gpu_is_asked_is_counted():
    seen = [
        *[("gemm", True)] * 6,
        ("Memcpy HtoD (Pageable -> Device)", True),
        ("Memset (Device)", True),
        ("aten::linear", False),
        *[("cudaLaunchKernel", False)] * 5,
        ("cuLaunchKernelEx", False),
        ("cudaMemcpyAsync", False),
        ("cudaStreamSynchronize", False),
        ("cudaDeviceSynchronize", False),
    ]
    counts = gpu_demands(seen, layers=2)
    assert counts == {"kernels per layer": 3, "copies": 1, "launches": 6, "waits": 1}
    found = {"what": "it", "seconds": {"a": {"low": 1, "median": 1, "high": 1}}, "ratios": {}}
    told = "\n".join(lines("it", found | {"demands": {"a": counts}, "peak_bytes": {"a": 2**21}}))
    assert "2 MiB" in told
    assert "3 kernels per layer, 1 copies, 6 launches, 1 waits" in told


def test_packing_is_timed_and_its_memory_measured(tmp_path, monkeypatch):
    sizes = {**SIZES, "hidden_size": 64, "num_attention_heads": 4}
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path)
    missing: dict[str, str] = {}
    monkeypatch.setattr(timing, "FEWEST", 2)
    monkeypatch.setattr(startup, "ALL", ("bfloat16",))
    found = startup.packing(2, tmp_path, lambda: None, missing)
    if missing:
        pytest.skip(missing["packing"])
    assert list(found["seconds"]) == ["pack bfloat16", "load bfloat16"]
    assert list(found["peak_bytes"]) == ["pack bfloat16"]
    assert found["model_bytes"] == sum(4 * x.numel() for x in BertModel.from_pretrained(tmp_path).parameters())
    assert InferenceModel.load(tmp_path / "packed in bfloat16").backend == "native"


def test_without_kernels_packing_is_missing_with_the_reason(tmp_path, monkeypatch):
    def refuse() -> None:
        raise NativeKernelsError("no compiler")

    monkeypatch.setattr(startup, "load_kernels", refuse)
    missing: dict[str, str] = {}
    found = startup.packing(1, tmp_path, lambda: None, missing)
    assert missing == {"packing": "no compiler"}
    assert [*lines("packing", found)] == [f"\npacking: {found['what']}"]


def test_training_by_autocast_computes_in_bfloat16(kept, few_rounds, monkeypatch):
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if "addmm" in str(func):
                seen.add(out.dtype)
            return out

    with Watch():
        found = sections.training(Bench(3, kept=kept, seconds=0.01), autocast=True)
    assert seen == {torch.bfloat16}
    assert "bfloat16 by autocast" in found["what"]


def test_training_steps_stand_beside_those_of_transformers(kept, few_rounds):
    found = sections.training(Bench(3, kept=kept))
    assert set(found["ratios"]) == {f"transformers sdpa / bertlite {name}" for name in ("sdpa", "packed")}


def test_limits_are_recorded(kept, few_rounds, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(ceiling, "SIZE", {"cpu": 64})
    monkeypatch.setattr(sections, "machine", lambda device, threads: (ceiling.find_ceilings(device), 1e9))
    record, picture = (tmp_path / name for name in ("speed.json", "speed.png"))
    words = ["--only", "forward 1 x 16", "--engines", "bertlite native float32", "--rounds", "3", "--out"]
    assert main([*words, f"{record},{kept},{picture}"]) == 0
    assert picture.stat().st_size > 1000
    found = json.loads(record.read_text())
    section = found["sections"]["forward 1 x 16"]
    reached = section["of_limit"]["bertlite native float32"]
    assert 0 < reached["low"] <= reached["median"] <= reached["high"]
    assert section["ceilings"]["float32"]["library"] in ("torch", "oneDNN, packed", "OpenVINO")
    assert {name.split()[0] for name in section["seconds"]} == {"transformers", "bertlite"}  # no matmul
    assert "% of the limit" in capsys.readouterr().out


@pytest.mark.slow
def test_starting_is_recorded(few_rounds, tmp_path, capsys):
    path = tmp_path / "startup.json"
    assert main(["--only", "import", "--rounds", "3", "--out", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["environment"]["versions"]["torch"]
    section = record["sections"]["import"]
    assert section["rounds"] == 3
    assert set(section["seconds"]) == {"python", "torch", "bertlite", "bertlite --help", "transformers"}
    assert section["ratios"]["bertlite / torch"]["median"] > 0
    assert "bertlite / torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "names"),
    [({"cpu": "another"}, "cpu"), ({"git": {"commit": "0" * 40}}, "git"), ({"versions": {}}, "versions")],
)
def test_a_record_of_another_environment_is_not_added_to(change, names, tmp_path):
    path = tmp_path / "speed.json"
    path.write_text(json.dumps({"environment": environment_of("cpu") | change, "sections": {}}))
    with pytest.raises(ValueError, match=f"was measured in another environment, which differs in {names}: write"):
        main(["--only", "import", "--out", str(path)])


def test_bad_requests():
    with pytest.raises(ValueError, match="no section matches 'nonsense'; have: import, loading, cold start"):
        main(["--only", "nonsense"])
    assert "training by autocast" in sections.sections("cuda", ("bert-base",), (None,))
