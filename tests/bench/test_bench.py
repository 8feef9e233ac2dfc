"""bertlite/bench and timing: the work is what it says, every engine runs, and a slower record is found out."""

import itertools
import json
import time
from dataclasses import replace

import pytest
import torch
from conftest import SIZES
from torch.utils._python_dispatch import TorchDispatchMode

from bertlite import BertConfig, BertModel, cli, timing
from bertlite.bench import ceiling, engines, sections, startup
from bertlite.bench.accuracy import ERRORS, Accuracy, accuracies, accuracy
from bertlite.bench.ceiling import Ceiling
from bertlite.bench.command import PEERS, report_worse, section_lines
from bertlite.bench.engines import ENGINES, reason_without_backend
from bertlite.bench.sections import BASELINE, Bench, gpu_demands, limit_fractions, limit_times, ratio_pairs
from bertlite.bench.work import full, lengths_like, ragged, works
from bertlite.inference import InferenceModel, optimize
from bertlite.inference.native.library import NativeKernelsError
from bertlite.records import environment, version_of
from bertlite.timing import FEWEST, LONGEST_SPIN, SETTLE, alternate, summary, wait_until_idle, with_spread

TINY = {  # heads of 16, which the native kernels take
    **SIZES,
    "vocab_size": 1000,
    "num_attention_heads": 3,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
}


@pytest.fixture
def few_rounds(monkeypatch):
    """Let a section be measured in 3 rounds, whose quartiles are the least, the middle and the most."""
    monkeypatch.setattr(timing, "FEWEST", 3)


def test_candidates_run_in_turn():
    ran = []
    times = alternate({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, 3, fewest=3)
    assert ran == ["a", "b"] * 5  # two rounds do not count
    assert [len(each) for each in times.values()] == [3, 3]
    assert max(times["a"]) < SETTLE  # the pause between them is not measured


def test_rounds_end_when_their_time_is_over():
    ran = []
    times = alternate({"a": lambda: ran.append("a")}, 9, warm=1, seconds=0)
    assert (len(ran), len(times["a"])) == (8, FEWEST)
    assert len(alternate({"a": lambda: None}, 2, warm=0, seconds=0, fewest=2)["a"]) == 2


def test_a_short_candidate_runs_several_times_in_a_round():
    ran = []

    def short():
        ran.append("short")
        time.sleep(0.002)

    def long():
        ran.append("long")
        time.sleep(0.03)

    times = alternate({"short": short, "long": long}, 2, warm=1, fewest=2, burst=0.02)
    bursts = [(name, len(list(group))) for name, group in itertools.groupby(ran)]
    assert bursts[:2] == [("short", 1), ("long", 1)]  # the warm round, which says how many calls a round has
    assert {calls for name, calls in bursts[2:] if name == "long"} == {1}
    (calls,) = {calls for name, calls in bursts[2:] if name == "short"}
    assert 5 <= calls <= 11  # a call that does not count, and as many as take 20 ms
    assert 0.002 <= min(times["short"]) <= max(times["short"]) < 0.02  # of one call
    with pytest.raises(ValueError, match="a burst needs a warm round"):
        alternate({"a": short}, 2, warm=0, fewest=2, burst=0.02)


class Clock:
    """The module time of a process whose threads use the processor for some seconds, and then no more."""

    def __init__(self, busy):
        self.now, self.busy = 100.0, busy

    def perf_counter(self):
        return self.now

    def process_time(self):
        return min(self.now - 100.0, self.busy)

    def sleep(self, seconds):
        self.now += seconds


def test_a_candidate_waits_until_the_threads_of_the_one_before_no_longer_spin(monkeypatch):
    for busy, waited in ((0.0, SETTLE), (0.2, 0.2 + SETTLE), (9.0, LONGEST_SPIN)):
        clock = Clock(busy)
        monkeypatch.setattr(timing, "time", clock)
        spent = wait_until_idle()
        assert clock.now - 100 == pytest.approx(waited, abs=1.01 * SETTLE)
        assert spent == pytest.approx(min(busy, LONGEST_SPIN), abs=1.01 * SETTLE)
    clock = Clock(0.0)
    monkeypatch.setattr(timing, "time", clock)

    def spinning():
        clock.busy = clock.process_time() + 0.3

    assert timing.spin_after(spinning) == pytest.approx(0.3, abs=1.01 * SETTLE)


def test_a_figure_needs_seven_rounds():
    assert FEWEST == 7
    ran = []
    with pytest.raises(ValueError, match="rounds is 6; a median with its spread needs 7 or more"):
        alternate({"a": lambda: ran.append("a")}, 6)
    assert ran == []


def test_a_ratio_is_taken_round_by_round():
    """A machine that is slower in some rounds is slower for both, and the ratio is the same."""
    found = summary("what", {"a": [4.0, 1.0, 2.0], "b": [2.0, 0.5, 1.0]}, [("a", "b")])
    assert found["seconds"]["a"] == {"low": 1.0, "median": 2.0, "high": 4.0}
    assert found["ratios"] == {"a / b": {"low": 2.0, "median": 2.0, "high": 2.0}}
    other = summary("what", {"a": [4.0, 1.0, 2.0], "b": [1.0, 1.0, 1.0]}, [("a", "b")])
    assert with_spread(other["ratios"]["a / b"]) == "2.00 (1.00–4.00)"


def test_lengths_are_quantiles_of_the_data():
    lengths = lengths_like("SST-2", 32, 128)
    assert len(lengths) == 32
    assert list(lengths) != sorted(lengths)
    assert lengths_like("SST-2", 32, 20) == tuple(min(20, n) for n in lengths)
    assert sum(lengths_like("SST-2", 1000, 512)) / 1000 == pytest.approx(mean_of("SST-2"), rel=0.01)
    with pytest.raises(ValueError, match="no lengths of 'IMDB'; have: SST-2, WikiText-2"):
        lengths_like("IMDB", 1, 1)


def mean_of(dataset):
    from bertlite.bench.work import LENGTHS

    counts = json.loads(LENGTHS.read_text())[dataset]["counts"]
    return sum(int(n) * count for n, count in counts.items()) / sum(counts.values())


def test_a_batch_has_the_tokens_it_says():
    for work in works():
        batch = work.inputs(1000)
        assert batch["input_ids"].shape == (len(work.lengths), work.width)
        assert int(batch["attention_mask"].sum()) == work.tokens
        assert bool((batch["input_ids"].ne(0) == batch["attention_mask"].bool()).all())
    assert full(8, 128).padding == "none"


def test_texts_are_padded_to_the_longest_of_their_batch_unless_their_length_is_fixed():
    longest, fixed = ragged("SST-2", 32, 128), ragged("SST-2", 32, 128, fixed=True)
    assert (longest.name, longest.padding, fixed.name, fixed.padding) == (
        *("32 x 49 SST-2", "longest"),
        *("32 x 128 SST-2", "fixed"),
    )
    assert longest.lengths == fixed.lengths
    assert longest.filled == pytest.approx(fixed.filled * 128 / 49)
    kinds = [work.padding for work in works()]
    assert kinds.index("longest") < kinds.index("fixed"), "what users meet is measured first"


def test_operations_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    config = replace(BertConfig(**TINY), attn_implementation="eager")
    from bertlite import BertModel

    model, work = BertModel(config, add_pooling_layer=False).eval(), full(3, 17)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(**work.inputs(1000))
    assert work.operations(config) == counter.get_total_flops()


def test_the_limit_is_products_or_reading():
    bench = Bench(2)
    bench.config = BertConfig(**TINY)
    work = full(3, 17)
    operations = work.operations(bench.config)
    times = {
        "bertlite sdpa float32": [1.0, 4.0, 2.0],
        "bertlite native int8": [1.0, 1.0, 1.0],
        "matmul float32": [0.5, 1.0, 1.0],
    }
    bench.ceilings, bench.copied = {"float32": Ceiling("a library", None, operations, 1.0)}, 1e18
    limits = limit_times(times, work, bench)
    assert limits == {"float32": [0.5, 1.0, 1.0]}  # as fast as the matmul in the same round
    fractions = limit_fractions({name: each for name, each in times.items() if "bertlite" in name}, limits)
    assert fractions == {"bertlite sdpa float32": {"low": 0.25, "median": 0.5, "high": 0.5}}
    weights = 4 * 2 * (4 * 48**2 + 2 * 48 * 37)
    bench.copied = weights / 2  # two seconds for the weights
    assert limit_times(times, work, bench) == {"float32": [2.0, 2.0, 2.0]}


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


@pytest.fixture
def kept(tmp_path):
    pytest.importorskip("transformers")
    from bertlite.parity import reference

    reference.base_shaped(tmp_path / "base", **TINY)
    return tmp_path


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [(engine, dtype) for engine in ENGINES for dtype in engine.dtypes if "compiled" not in engine.name],
    ids=lambda each: getattr(each, "name", each),
)
def test_every_engine_computes_the_same(engine, dtype, kept):
    reason = engine.reason_missing("cpu", dtype)
    if reason:
        pytest.skip(reason)
    batch = ragged("SST-2", 4, 23).inputs(1000)
    (found,) = accuracies(kept / "base", {"it": engine.build(kept / "base", dtype, "cpu")}, batch).values()
    assert found.is_right(dtype), found
    assert found.error > 0  # float64 is none of them


def test_an_engine_is_wrong_by_its_error_by_one_token_or_by_its_mask():
    right = torch.randn(7, 5, dtype=torch.float64)
    unmasked = right + 0.1 * torch.randn(7, 5, dtype=torch.float64)
    assert accuracy(right, right, unmasked).is_right("float32")
    assert not accuracy(right + 1, right, None).is_right("int8")
    one_token = torch.cat([-right[:1], right[1:]])
    found = accuracy(one_token, right, None)
    assert found.cosine == pytest.approx(-1)
    assert not replace(found, error=0.0).is_right("int8")
    found = accuracy(unmasked, right, unmasked)
    assert found.error < ERRORS["int8"]
    assert found.cosine > 0.9
    assert not found.is_right("int8")  # it is near enough, but nearer to what ignores the mask
    assert not Accuracy(float("nan"), 1.0).is_right("int8")
    assert not Accuracy(0.0, float("nan")).is_right("int8")


def test_an_engine_that_is_wrong_is_not_timed(kept, few_rounds, monkeypatch, capsys):
    def deaf(folder, dtype, device):  # to the mask
        run = engines.transformers_engine("sdpa")(folder, dtype, device)
        return lambda batch: run({"input_ids": batch["input_ids"]})

    monkeypatch.setattr(sections, "ENGINES", (ENGINES[0], engines.Engine("quick", deaf, ("float32",))))
    found = sections.forward(ragged("SST-2", 4, 23), Bench(3, kept=kept))
    assert BASELINE in found["seconds"]
    assert "quick float32" not in found["seconds"]
    assert found["wrong"] == ["quick float32"]
    assert found["errors"]["quick float32"] > ERRORS["float32"]
    assert "WRONG  quick float32: error" in "\n".join(section_lines("ragged", found))


def test_pruned_models_stand_beside_the_whole(kept, few_rounds, monkeypatch):
    works = (None, None, full(2, 19))
    monkeypatch.setattr(sections, "works", lambda: works)
    found = sections.pruned(Bench(3, kept=kept, only=("onednn float",)))
    assert set(found["ratios"]) == {
        f"bertlite onednn whole float32 / bertlite onednn half {of} float32"
        for of in ("the heads", "the neurons", "of both")
    }
    assert found["wrong"] == []
    assert all(0 < error < 1e-5 for error in found["errors"].values())
    with pytest.raises(ValueError, match="--engines chooses none that runs here"):
        sections.pruned(Bench(3, kept=kept, only=("OpenVINO",)))


def test_a_backend_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(optimize, "BACKENDS", ("auto", "onednn"))
    assert reason_without_backend("native", "float32") == "this version of bertlite has no backend 'native'"
    monkeypatch.setattr(optimize, "BACKENDS", ("auto", "onednn", "native"))
    assert reason_without_backend("native", "float32") is None


def test_an_engine_that_cannot_be_built_is_named(kept, few_rounds, monkeypatch):
    def broken(folder, dtype, device):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(sections, "ENGINES", (ENGINES[0], engines.Engine("quick", broken, ("float32",))))
    bench = Bench(3, kept=kept)
    assert list(bench.runs) == [BASELINE, "transformers sdpa bfloat16"]
    assert bench.missing == {"quick float32": "cannot be built: RuntimeError: no compiler"}


def test_openvino_stands_over_all_of_its_dtype():
    names = [BASELINE, "OpenVINO int8", "CTranslate2 int8", "bertlite onednn float32"]
    pairs = ratio_pairs(dict.fromkeys(names))
    assert [pair for pair in pairs if pair[0] == BASELINE] == [(BASELINE, name) for name in names[1:]]
    assert [pair for pair in pairs if pair[0] != BASELINE] == [("OpenVINO int8", "CTranslate2 int8")]


def test_sections_belong_to_a_model_and_a_number_of_threads(tmp_path):
    named = sections.sections("cpu", ("bert-base", "MiniLM"), (1, 2))
    assert "forward 1 x 16 1 thread" in named
    assert "forward 8 x 128 MiniLM 2 threads" in named
    assert "pruned MiniLM 1 thread" in named
    assert not any("," in name for name in named)  # --only A,B takes parts of them
    before = torch.get_num_threads()
    bench = Bench(3, kept=tmp_path)
    with bench.stack:
        first = bench.at("MiniLM", 3)
        assert (first.model, first.threads, torch.get_num_threads()) == ("MiniLM", 3, 3)
        assert bench.at("MiniLM", 3) is first
        assert bench.at("bert-base", None).threads == before == torch.get_num_threads()
        bench.at("MiniLM", 3)
    assert torch.get_num_threads() == before


def test_what_a_gpu_is_asked_is_counted(capsys):
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
    told = "\n".join(section_lines("it", found | {"demands": {"a": counts}, "peak_bytes": {"a": 2**21}}))
    assert "2 MiB" in told
    assert "3 kernels per layer, 1 copies, 6 launches, 1 waits" in told


def test_packing_is_timed_and_its_memory_measured(tmp_path, monkeypatch):
    sizes = {**SIZES, "hidden_size": 64, "num_attention_heads": 4}
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path)
    missing: dict[str, str] = {}
    monkeypatch.setattr(timing, "FEWEST", 2)
    found = startup.packing(2, tmp_path, lambda: None, missing)
    if missing:
        pytest.skip(missing["packing"])
    names = [f"{what} {dtype}" for dtype in ("float32", "bfloat16", "int8") for what in ("pack", "load")]
    assert list(found["seconds"]) == names
    assert list(found["peak_bytes"]) == names[::2]
    assert found["model_bytes"] == sum(4 * x.numel() for x in BertModel.from_pretrained(tmp_path).parameters())
    for dtype in ("float32", "bfloat16", "int8"):
        assert InferenceModel.load(tmp_path / f"packed in {dtype}").backend == "native"


def test_without_kernels_packing_is_missing_with_the_reason(tmp_path, monkeypatch):
    def refuse() -> None:
        raise NativeKernelsError("no compiler")

    monkeypatch.setattr(startup, "load_kernels", refuse)
    missing: dict[str, str] = {}
    found = startup.packing(1, tmp_path, lambda: None, missing)
    assert missing == {"packing": "no compiler"}
    assert [*section_lines("packing", found)] == [f"\npacking: {found['what']}"]


def test_a_gpu_is_given_more_to_do():
    assert set(sections.sections("cpu")) - set(sections.sections("cuda")) == {
        "import",
        "loading",
        "cold start",
        "packing",
    }
    assert set(works("cuda")) > set(works())
    assert "training by autocast" in sections.sections("cuda")


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


def test_the_command_measures_records_draws_and_checks(kept, few_rounds, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ceiling, "SIZE", {"cpu": 64})
    monkeypatch.setattr(sections, "copy_rate", lambda device: 1e9)
    record, only = tmp_path / "speed.json", ["--only", "forward 1 x 16", "--engines", "bertlite onednn"]
    monkeypatch.setattr(engines, "slowness_of_int8", lambda: 1.0)  # on a small model it may be slow
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speed.png"
    common = ["bench", *only, "--rounds", "3", "--out"]
    assert cli.main([*common, f"{record},{kept},{picture}"]) == 0
    assert picture.stat().st_size > 1000
    found = json.loads(record.read_text())
    section = found["sections"]["forward 1 x 16"]
    assert set(section["seconds"]) == {
        BASELINE,
        "bertlite onednn float32",
        "bertlite onednn bfloat16",
        "bertlite onednn int8",
    }
    for spread in (section["ratios"][f"{BASELINE} / bertlite onednn float32"], section["of_limit"][BASELINE]):
        assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    assert 0 < section["errors"][BASELINE] < 1e-5 < section["errors"]["bertlite onednn int8"]
    assert (section["model"], section["threads"]) == ("bert-base", torch.get_num_threads())
    assert {each["library"] for each in (section["ceilings"][dtype] for dtype in ("float32", "bfloat16"))} <= {
        "torch",
        "oneDNN, packed",
        "OpenVINO",
    }
    assert set(section["spins"]) == set(section["seconds"])
    for shares in section["profile"].values():
        assert min(shares["matmuls"], shares["attention"], shares["LayerNorm"]) > 0
        assert sum(shares.values()) == pytest.approx(1)
    profiles = [section["profile"][f"bertlite onednn {dtype}"] for dtype in ("float32", "int8")]
    rounding = [each.get("rounding", 0) / (1 - each["matmuls"]) for each in profiles]  # 8-bit matmuls may be slow
    assert rounding[0] < rounding[1]  # the smallest and the largest id are looked for in either
    for pair in section["ratios"]:
        section["ratios"][pair]["median"] *= 100
    (tmp_path / "better.json").write_text(json.dumps(found))
    assert cli.main([*common, f"{record},{kept}", "--check", str(tmp_path / "better.json")]) == 1
    assert "WORSE  forward 1 x 16: transformers sdpa float32 / bertlite onednn float32" in capsys.readouterr().out


def test_a_run_that_was_killed_is_resumed(kept, few_rounds, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ceiling, "SIZE", {"cpu": 64})
    monkeypatch.setattr(sections, "copy_rate", lambda device: 1e9)
    record = tmp_path / "speed.json"
    common = ["bench", "--engines", "bertlite onednn float32", "--resume", "--out", f"{record},{kept}"]
    assert cli.main([*common, "--rounds", "3", "--only", "forward 1 x 16"]) == 0
    first = json.loads(record.read_text())["sections"]["forward 1 x 16"]
    capsys.readouterr()
    assert cli.main([*common, "--rounds", "3", "--only", "forward 1 x 1"]) == 0
    assert f"kept: forward 1 x 16, which {record} holds" in capsys.readouterr().out
    found = json.loads(record.read_text())["sections"]
    assert found["forward 1 x 16"] == first
    assert set(found) == {"forward 1 x 16", "forward 1 x 128"}
    assert cli.main([*common, "--rounds", "4", "--only", "forward 1 x 16"]) == 0  # with other options it is not kept
    assert json.loads(record.read_text())["sections"]["forward 1 x 16"]["rounds"] == 4


def test_missing_peers_are_named(kept, few_rounds, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ceiling, "SIZE", {"cpu": 64})
    monkeypatch.setattr(sections, "copy_rate", lambda device: 1e9)
    gone = replace(next(each for each in ENGINES if each.name == "onnxruntime"), needs=("no_such_package",))
    monkeypatch.setattr(sections, "ENGINES", (ENGINES[0], gone))
    record = tmp_path / "speed.json"
    assert cli.main(["bench", "--only", "forward 1 x 16", "--rounds", "3", "--out", f"{record},{kept}"]) == 0
    assert "missing: onnxruntime float32: not installed: no_such_package" in capsys.readouterr().out
    assert json.loads(record.read_text())["missing"]["onnxruntime int8"] == "not installed: no_such_package"


def test_worse_is_worse_whichever_way_a_ratio_is_written():
    def record(a, b):
        ratios = {"transformers / bertlite": {"median": a}, "bertlite / torch": {"median": b}}
        return {"sections": {"s": {"ratios": ratios}}}

    assert report_worse(record(2, 1), record(1.8, 1.1), ["s"]) == 0
    assert report_worse(record(2, 1), record(1.5, 1), ["s"]) == 1
    assert report_worse(record(2, 1), record(2, 1.5), ["s"]) == 1
    with pytest.raises(ValueError, match="no ratio of these sections"):
        report_worse({"sections": {}}, record(1, 1), ["s"])
    without_spread = {"sections": {"s": {"ratios": {"transformers / bertlite": 2.0}}}}
    with pytest.raises(ValueError, match="its ratios have no spread; make it again"):
        report_worse(without_spread, record(1, 1), ["s"])


def test_a_record_of_another_machine_is_not_added_to(tmp_path, capsys):
    path = tmp_path / "speed.json"
    path.write_text(json.dumps({"environment": environment() | {"cpu": "another"}, "sections": {}}))
    assert cli.main(["bench", "--only", "import", "--out", str(path)]) == 2
    assert "was measured in another environment, which differs in cpu, versions: write" in capsys.readouterr().err


def test_a_record_of_another_commit_is_not_added_to(tmp_path, capsys):
    path, there = tmp_path / "record.json", environment()
    there["versions"] |= {name: version_of(name) for name in PEERS}
    path.write_text(json.dumps({"environment": there | {"git": {"commit": "0" * 40}}, "sections": {}}))
    assert cli.main(["bench", "--only", "import", "--out", str(path)]) == 2
    assert "which differs in git" in capsys.readouterr().err


def test_bad_requests(capsys, monkeypatch):
    assert cli.main(["bench", "--only", "forward,nonsense"]) == 2
    assert "no section matches 'nonsense'; have: import, loading" in capsys.readouterr().err
    assert cli.main(["bench", "--engines", "jax"]) == 2
    assert "no engine matches 'jax'; have: transformers sdpa float32" in capsys.readouterr().err
    assert cli.main(["bench", "--shapes", "1x2"]) == 2
    assert "--shapes is not used without RUN" in capsys.readouterr().err
    assert cli.main(["bench", "some-run", "--only", "import", "--out", "there"]) == 2
    assert "--only is not used with RUN" in capsys.readouterr().err
    assert cli.main(["bench", "some-run"]) == 2
    assert "add --out FOLDER" in capsys.readouterr().err
    assert cli.main(["bench", "--models", "bert-huge"]) == 2
    assert "there is no model 'bert-huge'; have: bert-base, MiniLM" in capsys.readouterr().err
    assert cli.main(["bench", "--resume"]) == 2
    assert "--resume keeps sections of a record: add --out FILE.json" in capsys.readouterr().err
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    assert cli.main(["bench", "--only", "import"]) == 2
    assert "FPMATH_MODE is 'BF16', which lets float32 be computed in lower precision" in capsys.readouterr().err
    monkeypatch.delenv("ONEDNN_DEFAULT_FPMATH_MODE")
    assert cli.main(["bench", "--rounds", "6"]) == 2
    assert "--rounds is 6; a median with its spread needs 7 or more" in capsys.readouterr().err
    assert cli.main(["bench", "--seconds", "0"]) == 2
    assert "--seconds is 0.0; a section needs more than 0" in capsys.readouterr().err
