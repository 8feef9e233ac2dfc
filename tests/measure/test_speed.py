"""scripts/measure/speed: the work is what it says, and every engine that is timed is right."""

import json
import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import SIZES
from natively import kernels_or_skip
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from bertlite import BertConfig
from bertlite.experiments.budget.work import Work, full
from bertlite.parity import reference
from bertlite.parity.command import DEMO, demo_checkpoint
from bertlite.runtime.library import usable_sets
from bertlite.support.environment import environment
from bertlite.support.files import write_json
from scripts.make.tables import read
from scripts.make.tables import speed as tables
from scripts.measure.phases import attention_rate
from scripts.measure.speed import bench, engines, sections, under
from scripts.measure.speed.__main__ import main, new_record
from scripts.measure.speed.accuracy import ERRORS, Accuracy, accuracies, accuracy
from scripts.measure.speed.batches import LENGTHS, filled, lengths_like, padding, ragged, works
from scripts.measure.speed.bench import BASELINE, Bench, ratio_pairs, section_lines
from scripts.measure.speed.engines import ENGINES
from scripts.measure.speed.roof import operations


def test_lengths_are_quantiles_of_the_data():
    lengths = lengths_like("SST-2", 32, 128)
    assert len(lengths) == 32
    assert list(lengths) != sorted(lengths)
    assert lengths_like("SST-2", 32, 20) == tuple(min(20, n) for n in lengths)
    counts = {int(n): count for n, count in json.loads(LENGTHS.read_text())["SST-2"]["counts"].items()}
    mean = sum(n * count for n, count in counts.items()) / sum(counts.values())
    assert sum(lengths_like("SST-2", 1000, 512)) / 1000 == pytest.approx(mean, rel=0.01)
    with pytest.raises(ValueError, match="no lengths of 'IMDB'; have: SST-2, WikiText-2"):
        lengths_like("IMDB", 1, 1)


def test_a_batch_has_the_tokens_it_says():
    for work in works():
        batch = work.inputs(1000)
        assert batch["input_ids"].shape == (len(work.lengths), work.width)
        assert batch["attention_mask"].sum(1).tolist() == [*work.lengths]
        assert batch["input_ids"].ne(0).equal(batch["attention_mask"].bool())


def test_texts_are_padded_to_the_longest_of_their_batch_unless_their_length_is_fixed():
    longest, fixed = ragged("SST-2", 32, 128), ragged("SST-2", 32, 128, fixed=True)
    assert [*map(padding, (longest, fixed, full(8, 128)))] == ["longest", "fixed", "none"]
    assert (longest.name, fixed.name) == ("32 x 49 SST-2", "32 x 128 SST-2")
    assert longest.lengths == fixed.lengths
    assert filled(longest) == pytest.approx(filled(fixed) * 128 / 49)
    kinds = [padding(work) for work in works()]
    assert kinds.index("longest") < kinds.index("fixed"), "what users meet is measured first"


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [(engine, dtype) for engine in ENGINES for dtype in engine.dtypes if "compiled" not in engine.name],
    ids=lambda each: getattr(each, "name", each),
)
def test_every_engine_computes_the_same(engine, dtype, kept):
    reason = engine.reason_missing("cpu")
    if reason:
        pytest.skip(reason)
    batch = ragged("SST-2", 4, 23).inputs(1000)
    truth = reference.load(kept / "base", "BertModel", {}, torch.float64, "eager", "cpu")
    (found,) = accuracies(truth, {"it": engine.build(kept / "base", dtype, "cpu")}, batch).values()
    assert found.is_right(dtype), found
    assert found.error > 0  # float64 is none of them


def test_an_engine_is_wrong_by_its_error_by_one_token_or_by_its_mask():
    right = torch.randn(7, 5, dtype=torch.float64)
    unmasked = right + 0.1 * torch.randn(7, 5, dtype=torch.float64)
    assert accuracy(right, right, unmasked).is_right("float32")
    turned = accuracy(torch.cat([-right[:1], right[1:]]), right, None)
    deaf = accuracy(unmasked, right, unmasked)  # it is near enough, but nearer to what ignores the mask
    assert turned.cosine == pytest.approx(-1)
    assert (deaf.error < ERRORS["int8"], deaf.cosine > 0.9) == (True, True)
    nan = Accuracy(float("nan"), 1.0), Accuracy(0.0, float("nan"))
    for wrong in (accuracy(right + 1, right, None), replace(turned, error=0.0), deaf, *nan):
        assert not wrong.is_right("int8"), wrong


def with_engine(monkeypatch, build):
    """Let there be an engine named quick beside the first."""
    monkeypatch.setattr(bench, "ENGINES", (ENGINES[0], engines.Engine("quick", build, ("float32",))))


def test_an_engine_that_is_wrong_is_not_timed(kept, few_rounds, monkeypatch):
    def deaf(folder, dtype, device):  # to the mask
        run = engines.transformers_engine("sdpa")(folder, dtype, device)
        return lambda batch: run({"input_ids": batch["input_ids"]})

    with_engine(monkeypatch, deaf)
    found = bench.forward(ragged("SST-2", 4, 23), Bench(3, kept))
    assert found["seconds"].keys() & {BASELINE, "quick float32"} == {BASELINE}
    assert found["wrong"] == ["quick float32"]
    assert found["errors"]["quick float32"] > ERRORS["float32"]
    assert "WRONG  quick float32: error" in "\n".join(section_lines("ragged", found))


def fail(*_):
    raise RuntimeError("out of resources")


@pytest.mark.parametrize(
    ("build", "name", "what"),
    [(lambda *_: fail, "quick float32, 1 x 3", "run"), (fail, "quick float32", "be built")],
    ids=["fails on a batch", "cannot be built"],
)
def test_an_engine_that_fails_is_named_and_the_others_are_timed(build, name, what, kept, few_rounds, monkeypatch):
    with_engine(monkeypatch, build)
    found = Bench(3, kept, only=("float32",))
    assert list(bench.forward(full(1, 3), found)["seconds"]) == [BASELINE]
    assert found.missing == {name: f"cannot {what}: RuntimeError: out of resources"}


@pytest.mark.parametrize("fault", [SystemExit("killed"), ValueError("a kernel failed")], ids=["process", "error"])
def test_a_section_that_fails_is_named_and_the_next_run_goes_on_behind_it(
    fault, kept, few_rounds, tmp_path, monkeypatch
):
    ran = []

    def forward(work, bench):
        ran.append(work.name)
        if work.name == "1 x 128":
            raise fault
        return {"what": "", "seconds": {}, "ratios": {}}

    monkeypatch.setattr(bench, "forward", forward)
    record = tmp_path / "speed.json"
    words = ["--only", "forward 1 x 1", "--rounds", "3", "--resume", "--out", str(record)]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert str(ended.value) == ("killed" if isinstance(fault, SystemExit) else "3")
    assert main(words) == 1, "a section is missing"
    assert ran == ["1 x 16", "1 x 128"]
    found = json.loads(record.read_text())
    assert list(found["sections"]) == ["forward 1 x 16"]
    reason = "its process ended" if isinstance(fault, SystemExit) else "ValueError: a kernel failed"
    assert found["missing"] == {"forward 1 x 128": reason}


def test_llama_gets_whole_texts_up_to_its_limit():
    lengths = (5, 7, 1, 12, 20, 3)
    found = [lengths[texts] for texts in engines.slices_of(lengths, 12)]
    assert found == [(5, 7), (1,), (12,), (20,), (3,)]


def test_llama_refuses_positions_that_it_does_not_have(tmp_path):
    pytest.importorskip("gguf")
    folder = reference.base_shaped(tmp_path / "mpnet", **(SIZES | {"model_type": "mpnet"}))
    with pytest.raises(ValueError, match=re.escape("llama.cpp's BERT has absolute positions only")):
        engines.write_gguf(folder, "int8", tmp_path / "it.gguf")


def test_openvino_stands_over_all_of_its_dtype():
    names = [BASELINE, "OpenVINO int8", "CTranslate2 int8", "bertlite native float32"]
    pairs = ratio_pairs(dict.fromkeys(names))
    assert [pair for pair in pairs if pair[0] == BASELINE] == [(BASELINE, name) for name in names[1:]]
    assert [pair for pair in pairs if pair[0] != BASELINE] == [("OpenVINO int8", "CTranslate2 int8")]


def test_sections_belong_to_a_model_and_a_number_of_threads(kept, few_rounds, tmp_path, monkeypatch, capsys):
    def count(work, bench):
        seconds = dict.fromkeys(("low", "median", "high"), 1.0)
        return {"what": f"{bench.model}, {torch.get_num_threads()}", "seconds": {BASELINE: seconds}, "ratios": {}}

    monkeypatch.setattr(bench, "forward", count)
    before, record = torch.get_num_threads(), tmp_path / "speed.json"
    words = ["--models", "bert-base,MiniLM", "--threads", "1,3", "--only", "forward 1 x 16"]
    assert main([*words, "--out", str(record)]) == 0
    found = {name: each["what"] for name, each in json.loads(record.read_text())["sections"].items()}
    each = product((("", "bert-base"), (" MiniLM", "MiniLM")), (("1 thread", 1), ("3 threads", 3)))
    assert found == {f"forward 1 x 16{suffix} {of}": f"{model}, {count}" for (suffix, model), (of, count) in each}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("model", ["bge-m3", "all-mpnet"])
def test_an_engine_computes_what_the_class_of_another_family_does(model, tmp_path, few_rounds, monkeypatch):
    """On padding as the family has it."""
    pytest.importorskip("transformers")
    name, sizes = bench.MODELS[model]
    small = {**SIZES, "model_type": sizes["model_type"], "num_attention_heads": 3, "initializer_range": 0.2}
    monkeypatch.setitem(bench.MODELS, model, (name, small))
    it, work = Bench(3, tmp_path, model, only=("bertlite native float32",)), Work("2 x 11", (11, 7), 11)
    found = bench.forward(work, it)
    assert found["wrong"] == []
    assert set(found["seconds"]) == {BASELINE, "bertlite native float32"}
    assert it.config.positions_skip_padding
    batch = work.inputs(97, pad=it.config.pad_token_id or 0)
    assert ((batch["input_ids"] == 1) == (batch["attention_mask"] == 0)).all()


def test_the_command_measures_adds_to_a_record_and_draws(kept, few_rounds, tmp_path):
    pytest.importorskip("matplotlib")
    record, picture = (tmp_path / name for name in ("speed.json", "speed.png"))
    words = ["--engines", "bertlite native", "--rounds", "3", "--out", f"{record},{kept},{picture}"]
    for name in ("1 x 128", "1 x 16"):
        assert main(["--only", f"forward {name}", *words]) == 0
    assert picture.stat().st_size > 1000
    sections = json.loads(record.read_text())["sections"]
    assert list(sections) == ["forward 1 x 128", "forward 1 x 16"]
    section = sections["forward 1 x 16"]
    ours = [f"bertlite native {dtype}" for dtype in ("float32", "bfloat16", "int8")]
    assert set(section["seconds"]) == {BASELINE, *ours}
    spread = section["ratios"][f"{BASELINE} / {ours[0]}"]
    assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    assert 0 < section["errors"][BASELINE] < 1e-5 < section["errors"]["bertlite native int8"]
    assert (section["model"], section["threads"]) == ("bert-base", torch.get_num_threads())
    multiplied = ours[:1] if usable_sets()[0].name == "amx" else ours  # AMX has no roof
    assert set(section["roof"]) == {*(name.split()[-1] for name in multiplied), "read", "copy"}
    assert section["roof"]["float32"] > 1e9
    assert set(section["shares"]) == set(multiplied)
    assert all(0 < share < 1 for each in section["shares"].values() for share in each.values())


def test_operations_are_those_that_torch_counts(kept):
    work, it = Work("2 x 11", (11, 11), 11), Bench(3, kept)
    model = reference.load(it.folder, "BertModel", {}, torch.float32, "eager", "cpu").encoder
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 11, it.config.hidden_size))
    assert operations(it.config, work.lengths) == counter.get_total_flops()


def test_attentions_rate_counts_its_softmax_and_no_other_phase():
    """At 128 tokens 64 wide attention has a third of the matmuls' operations; it takes two thirds of their time."""
    half = {"up": 3.0, "down": 1.0, "output": 1.0, "queries, keys and values": 1.0, "up / finish": 9.0, "waiting": 9.0}
    half |= {"attention": 1.0, "attention / softmax and context": 2.0, "softmax and context / finish": 1.0}
    config = BertConfig(hidden_size=64, num_attention_heads=2, intermediate_size=256, num_hidden_layers=3)
    assert attention_rate([half, half], config, full(1, 128)) == pytest.approx(0.5)


def test_missing_peers_are_named(kept, few_rounds, tmp_path, capsys, monkeypatch):
    gone = replace(next(each for each in ENGINES if each.name == "onnxruntime"), needs=("no_such_package",))
    monkeypatch.setattr(bench, "ENGINES", (ENGINES[0], gone))
    record = tmp_path / "speed.json"
    assert main(["--only", "forward 1 x 16", "--rounds", "3", "--out", f"{record},{kept}"]) == 0
    assert "missing: onnxruntime float32: not installed: no_such_package" in capsys.readouterr().out
    assert json.loads(record.read_text())["missing"]["onnxruntime int8"] == "not installed: no_such_package"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--only", "forward,nonsense"], "no section matches 'nonsense'; have: import, loading, cold start, forward"),
        (["--engines", "jax"], "no engine matches 'jax'; have: transformers sdpa float32"),
        (["--models", "bert-huge"], "there is no model 'bert-huge'; have: bert-base, MiniLM"),
        (["--rounds", "6"], "--rounds is 6; a median with its spread needs 7 or more"),
        (["--seconds", "0"], "--seconds is 0.0; a section needs more than 0"),
    ],
)
def test_bad_requests(words, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        main(words)


def test_float32_is_not_computed_in_lower_precision(monkeypatch):
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    with pytest.raises(ValueError, match="FPMATH_MODE is 'BF16', which lets float32 be computed in lower precision"):
        main(["--only", "1 x 16"])


def test_pruned_models_stand_beside_the_whole(kept, few_rounds, monkeypatch):
    monkeypatch.setattr(sections, "full", lambda *_: full(2, 19))
    monkeypatch.setattr(sections, "ALL", ("float32",))
    found = sections.pruned(Bench(3, kept))
    assert set(found["ratios"]) == {
        f"bertlite native whole float32 / bertlite native half {of} float32"
        for of in ("the heads", "the neurons", "of both")
    }
    assert found["wrong"] == []
    assert all(0 < error < 1e-5 for error in found["errors"].values())


def test_training_by_autocast_computes_in_bfloat16_and_is_shown(kept, few_rounds, tmp_path, monkeypatch):
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if "addmm" in str(func):
                seen.add(out.dtype)
            return out

    with Watch():
        found = sections.training(ragged("SST-2", 8, 128), Bench(3, kept, seconds=0.01), autocast=True)
    assert seen == {torch.bfloat16}
    assert "bfloat16 by autocast" in found["what"]
    assert set(found["ratios"]) == {f"transformers sdpa / bertlite {name}" for name in ("sdpa", "packed")}
    names = {name for name in sections.sections("cuda", 512) if "training" in name}
    assert names >= {f"training {work}{how}" for work in ("32 x 49 SST-2", "8 x 128") for how in ("", " by autocast")}
    shown = {"environment": {**environment(), "threads": found["threads"]}, "sections": {"training a": found}}
    write_json(tmp_path / "training.json", shown)
    monkeypatch.setattr(read, "RESULTS", tmp_path)
    assert f"| {found['model']} | {found['work']} ({found['filled']:.0%}) | " in tables.training()


@pytest.mark.slow
def test_starting_is_recorded(few_rounds, tmp_path, capsys):
    path = tmp_path / "startup.json"
    assert main(["--only", "import", "--rounds", "3", "--out", str(path)]) == 0
    section = json.loads(path.read_text())["sections"]["import"]
    assert set(section["seconds"]) == {"python", "torch", "bertlite", "bertlite --help", "transformers"}
    assert section["ratios"]["bertlite / torch"]["median"] > 0
    assert "bertlite / torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "names"),
    [({"cpu": "another"}, "cpu"), ({"git": {"commit": "0" * 40}}, "git"), ({"versions": {}}, "versions")],
)
def test_a_record_of_another_environment_is_not_added_to(change, names, tmp_path):
    path = tmp_path / "speed.json"
    path.write_text(json.dumps({"environment": new_record("cpu")["environment"] | change, "sections": {}}))
    with pytest.raises(ValueError, match=f"was measured in another environment, which differs in {names}: write"):
        main(["--only", "import", "--out", str(path)])


def test_what_runs_under_a_pipeline_is_timed_beside_torch(tmp_path, monkeypatch):
    if demo_checkpoint() is None:
        pytest.skip(f"{DEMO} is not installed")
    kernels_or_skip()
    monkeypatch.setitem(under.USES, "classify", replace(under.USES["classify"], texts=3))
    section = under.under("classify", Bench(7, tmp_path, "MiniLM", only=("bertlite int8",)))
    assert [*section["seconds"]] == ["torch float32", "bertlite int8"]
    assert section["ratios"]["torch float32 / bertlite int8"]["median"] > 0
    assert 0 < section["errors"]["bertlite int8"] < ERRORS["int8"]
