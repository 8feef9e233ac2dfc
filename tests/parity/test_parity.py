"""The parity check against transformers, and the faults it must find.

Runs beside any transformers.  The cases of the quick choice are compared here on a tiny model, beside both versions,
and by `.ci/run` on MiniLM and on bert-base's shape, beside transformers 5; with `.ci/run --all`, every night, all are.
"""

import json
from typing import Any

import conftest
import pytest
import torch

pytest.importorskip("transformers")

import bertlite
from bertlite.cli import main
from bertlite.opened.checkpoint import Checkpoint
from bertlite.parity import CASES, Case, check, command, compare, reference
from bertlite.parity.cases import KERNELS, cases_for
from bertlite.parity.check import AttentionWatch, models_for, rule_for
from bertlite.parity.command import ParitySettings, demo_checkpoint, parity
from bertlite.parity.compare import FACTOR, NOT_FINITE, Report, Row, as_well, closely, exactly, relatively
from bertlite.parity.families import KINDS, cases_of
from bertlite.support.environment import git_state

# 0.02 leaves every head looking everywhere alike
SIZES = {**conftest.SIZES, "type_vocab_size": 2, "initializer_range": 0.2}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    yield reference.base_shaped(tmp_path_factory.mktemp("tiny"), **SIZES)
    models_for.cache_clear()


@pytest.fixture(scope="module")
def aligned(tmp_path_factory):
    """Heads of 16: the kernels of SDPA need multiples of 8."""
    yield reference.base_shaped(tmp_path_factory.mktemp("aligned"), **{**SIZES, "hidden_size": 64})
    models_for.cache_clear()


def require_equal(report: Report, case: Case) -> None:
    """Check that a report found everything equal, with the backend that the case names; skip where it says why not."""
    if report.not_checked:
        assert "relative positions" in report.not_checked or "4-D additive" in report.not_checked
        pytest.skip(report.not_checked)
    assert report.ok, f"\n{report}"
    assert report.backend.partition(",")[0] == case.backend


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_tiny_model_is_transformers_model(case, tiny):
    """The quick choice of them runs in any case, by the command."""
    require_equal(check(case, "cpu", tiny), case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", cases_for("cuda"), ids=str)
def test_a_tiny_model_is_transformers_model_on_a_gpu(case, tiny, aligned):
    report = check(case, "cuda", aligned if case.mode else tiny)
    if case.mode == "cudnn" and report.not_checked:
        pytest.skip(report.not_checked)
    require_equal(report, case)


def test_the_forced_kernel_of_sdpa_is_the_one_that_runs(tiny):
    with torch.profiler.profile() as profile:
        check(Case("BertModel", "sdpa", "full", "bfloat16", mode="flash"), "cpu", tiny)
    assert any("flash" in event.key for event in profile.key_averages())
    with torch.profiler.profile() as profile:
        check(Case("BertModel", "sdpa", "full", "bfloat16", mode="math"), "cpu", tiny)
    assert not any("flash" in event.key for event in profile.key_averages())


def test_a_sequence_of_padding_alone_must_give_numbers(tiny):
    def spoiled(module, args, out):
        out[-1] = torch.nan

    def spoil(model):
        model.embeddings.LayerNorm.register_forward_hook(spoiled)

    report = check(Case("BertModel", "sdpa", "emptyrow", "float32"), "cpu", tiny, spoil)
    assert report.failed
    assert {row.tensor.partition(", ")[2] for row in report.rows if not row.ok} == {NOT_FINITE}


def test_a_kernel_that_torch_lacks_is_not_checked(tiny):
    report = check(Case("BertModel", "sdpa", "full", "float32", mode="cudnn"), "cpu", tiny)
    assert not report.ok, f"\n{report}"
    assert not report.failed
    assert "has no cudnn kernel for it here" in report.not_checked


def test_a_gpu_is_asked_all_that_a_cpu_is_and_more():
    """But not dropout, which draws other numbers for each dtype there."""
    beyond = [case for case in CASES if case not in cases_for("cuda")]
    assert {(case.feature, case.dtype == "float64") for case in beyond} == {("dropout", False)}
    assert {case.mode for case in cases_for("cuda")} == {"", *KERNELS}
    assert {case.mode for case in CASES} == {"", "math", "flash"}
    assert len(set(cases_for("cuda"))) == len(cases_for("cuda"))
    assert {case.mode for case in cases_for("cuda", shape_only=True)} >= set(KERNELS)


# Planted faults.  Each changes our model a little; each must be found, and traced to its module.


def layer(model: Any, i: int) -> Any:
    return model.base_model.encoder.layer[i]


def live_dropout(model):
    layer(model, 2).output.dropout.train()


def scores_scaled_otherwise(model):
    attention = layer(model, 1).attention.self
    inner = attention.project

    def project(*given):
        q, k, v = inner(*given)
        return q * 1.0000001, k, v

    attention.project = project


def mask_ignored(model):
    inner = model.forward
    model.forward = lambda attention_mask=None, **rest: inner(**rest)


def pools_the_last_token(model):
    pooler = model.base_model.pooler
    inner = pooler.forward
    pooler.forward = lambda hidden: inner(hidden.flip(1))


def half_a_layer_in_float32(model):
    dense = layer(model, 0).output.dense
    inner = dense.forward
    dense.forward = lambda x: inner(x.float().double())


def a_nan(model):
    norm = layer(model, 2).output.LayerNorm
    norm.register_forward_hook(lambda module, args, out: out.index_fill(-1, torch.tensor([3]), float("nan")))


def one_weight_off(model):
    with torch.no_grad():
        layer(model, 0).intermediate.dense.weight[5, 7] += 1e-6


FAULTS = {
    live_dropout: "encoder.layer.2.output.dropout",
    scores_scaled_otherwise: "encoder.layer.1.attention.self",
    mask_ignored: "encoder.layer.0.attention.self",
    pools_the_last_token: "pooler.dense",
    half_a_layer_in_float32: "encoder.layer.0.output.dense",
    a_nan: "encoder.layer.2.output.LayerNorm",
    one_weight_off: "encoder.layer.0.intermediate.dense",
}


COARSE = (mask_ignored, a_nan)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_finds_and_places_a_planted_fault_and_leaves_our_model_as_it_was(fault, tiny):
    """A packed pooler is given the first token alone, which is its last too."""
    fine = fault in (scores_scaled_otherwise, one_weight_off) and reference.honours("prune_heads")
    cases = [("eager", "float64"), ("sdpa", "float64")]
    if fault is not pools_the_last_token:
        cases.append(("packed", "float64"))
    if fault is not half_a_layer_in_float32 and not fine:  # 4.57 rounds otherwise in float32
        cases.append(("sdpa", "float32"))
    if fault in COARSE:
        cases += [("sdpa", dtype) for dtype in ("bfloat16", "float16")]
    for backend, dtype in cases:
        report = check(Case("BertModel", backend, "padded", dtype), "cpu", tiny, tamper=fault)
        assert report.failed, report.name
        if backend != "packed" and dtype == "float64":
            assert report.first_module == FAULTS[fault]
            assert FAULTS[fault] in str(report)
    report = check(Case("BertModel", "sdpa", "padded", "float64"), "cpu", tiny)
    assert report.ok, f"\n{report}"


GRADIENTS = Case("BertModel", "eager", "padded", "float64", "gradients")


def test_finds_a_gradient_that_stops(tiny):
    def detached(model):
        inner = model.embeddings.forward
        model.embeddings.forward = lambda *args: inner(*args).detach().requires_grad_()

    with pytest.raises(ValueError, match=r"only one of the two runs has grad\.embeddings"):
        check(GRADIENTS, "cpu", tiny, tamper=detached)


def test_finds_a_gradient_that_is_scaled(tiny):
    def scaled(model):
        model.encoder.layer[1].attention.self.key.weight.register_hook(lambda grad: grad * 1.000001)

    report = check(GRADIENTS, "cpu", tiny, tamper=scaled)
    assert [row.tensor for row in report.rows if not row.ok] == ["grad.encoder.layer.1.attention.self.key.weight"]
    assert report.first_module is None
    assert "every module agrees going forward" in str(report)


def test_finds_a_head_that_is_pruned_wrongly(tiny):
    def numbered_anew(model):
        attention = model.encoder.layer[0].attention.self
        attention.query.weight.data = attention.query.weight.data.roll(attention.attention_head_size, 0)

    assert check(Case("BertModel", "sdpa", "padded", "float64", "pruned"), "cpu", tiny, tamper=numbered_anew).failed


def test_what_transformers_has_no_class_for_is_refused_before_the_work(tiny, tmp_path):
    bertlite.prune_neurons(bertlite.BertModel.from_pretrained(tiny), {0: [1]}).save_pretrained(tmp_path / "pruned")
    for field in ("gated", "positions_skip_padding"):
        bertlite.BertModel(bertlite.BertConfig(**SIZES, **{field: True})).save_pretrained(tmp_path / field)
    for name, word in (("pruned", "pruned"), ("gated", "converted"), ("positions_skip_padding", "converted")):
        with pytest.raises(ValueError, match=f"{name} is {word}, and transformers .* compare the checkpoint that"):
            parity(tmp_path / name)


# The parts


def test_each_rule_allows_what_it_says():
    truth = torch.tensor([1.0, -2.0], dtype=torch.float64)
    theirs, ours = truth.float() + 1e-3, truth.float() - 1e-3
    assert exactly(theirs, theirs) == (0.0, 0.0, None)
    assert exactly(ours, theirs)[0] == pytest.approx(2e-3, rel=1e-3)
    assert closely(truth, truth)[1] == 1e-12
    assert relatively(truth, truth)[1] == 2e-12
    error, allowed, own = as_well(ours, theirs, truth)
    assert error == pytest.approx(1e-3, rel=1e-3)
    assert own == pytest.approx(1e-3, rel=1e-3)
    assert allowed == pytest.approx(FACTOR * 1e-3, rel=1e-3)


def test_where_theirs_does_not_round_ours_may_by_one_step():
    truth = torch.tensor([1.0, -2.0], dtype=torch.float64)
    step = torch.finfo(torch.bfloat16).eps * 2
    assert as_well(truth.bfloat16(), truth.bfloat16(), truth) == (0.0, step, 0.0)
    one_step_off = torch.tensor([1.0 + step / 2, -2.0 - step]).bfloat16()
    two_steps_off = 2 * one_step_off - truth.bfloat16()
    rows = [Row("x", *as_well(ours, truth.bfloat16(), truth)) for ours in (one_step_off, two_steps_off)]
    assert [row.ok for row in rows] == [True, False], rows


def test_a_loss_is_held_to_the_error_of_its_logits():
    truth = {"loss": torch.tensor(1.0, dtype=torch.float64), "logits": torch.zeros(5, dtype=torch.float64)}
    theirs = {"loss": torch.tensor(1.0), "logits": torch.full((5,), 1e-3)}  # its own error happens to be 0
    for off, fine in ((1.9e-3, True), (2.1e-3, False)):
        ours = {"loss": torch.tensor(1.0 + off), "logits": theirs["logits"]}
        assert compare(ours, theirs, truth, lambda name: as_well)[0].ok is fine


def test_a_gradient_that_is_0_is_held_to_the_largest_one():
    """The keys' bias shifts all scores of a query alike: in 16 bits both gradients are rounding alone."""
    names = ("grad.key.bias", "grad.key.weight")
    truth = {name: torch.full((4,), x, dtype=torch.float64) for name, x in zip(names, (1e-17, 2.0), strict=True)}
    theirs = {name: x.half() for name, x in truth.items()}
    theirs[names[0]] += 3e-4
    for off, fine in ((1e-3, True), (5e-3, False)):
        ours = {**theirs, names[0]: torch.full((4,), off).half()}
        assert compare(ours, theirs, truth, lambda name: as_well)[0].ok is fine
    truth[names[0]] = torch.full((4,), 1e-4, dtype=torch.float64)  # one that is small is no 0
    ours = {**theirs, names[0]: torch.full((4,), 1e-3).half()}
    assert compare(ours, theirs, truth, lambda name: as_well)[0].ok is False


@pytest.mark.parametrize("rule", [exactly, closely, relatively, as_well])
def test_nothing_is_close_to_nan_or_to_another_shape(rule):
    ok = torch.tensor([0.0])
    for ours in (torch.tensor([float("nan")]), torch.zeros(2)):
        assert Row("x", *rule(ours, ok, ok.double())).ok is False


def test_a_tensor_on_one_side_only_is_refused():
    with pytest.raises(ValueError, match="only one of the two runs has pooler_output"):
        compare({"pooler_output": torch.zeros(1)}, {}, None, lambda name: closely)


def test_a_report_of_nothing_is_not_ok():
    empty = Report("empty")
    assert not empty.ok, f"\n{empty}"
    assert empty.failed
    assert "nothing was compared" in str(empty)
    assert not Report("asked too much", not_checked="why").failed


@pytest.mark.parametrize("case", [c for c in CASES if c.feature.startswith("relative")][:2], ids=str)
def test_says_what_the_reference_cannot_vouch_for(case, tiny):
    if reference.honours("relative positions"):
        report = check(case, "cpu", tiny)
        assert report.ok, f"\n{report}"
    else:
        assert "does not honour relative positions" in check(case, "cpu", tiny).not_checked


@pytest.mark.parametrize("changes", [{"num_labels": 2}, {"num_labels": 1}, {"problem_type": "regression"}], ids=str)
def test_a_head_of_the_checkpoint_keeps_its_labels(changes, tmp_path):
    sizes = {"num_labels": 4, **SIZES, **changes}
    bertlite.BertForSequenceClassification(bertlite.BertConfig(**sizes)).save_pretrained(tmp_path)
    report = check(Case("BertForSequenceClassification", "eager"), checkpoint=tmp_path)
    assert report.ok, f"\n{report}"
    models_for.cache_clear()


def test_float32_is_held_to_zero_only_where_the_order_of_sums_is_theirs():
    plain = Case("BertModel", "sdpa", "padded", "float32")
    pruned = Case("BertModel", "sdpa", "padded", "float32", "pruned")
    rounds_alike = not reference.honours("prune_heads")  # 4.57 divides scores where 5 multiplies them
    assert rule_for(plain, "cpu", "last_hidden_state") is (exactly if rounds_alike else as_well)
    assert rule_for(pruned, "cpu", "last_hidden_state") is as_well
    assert rule_for(plain, "cuda", "last_hidden_state") is as_well
    assert rule_for(plain, "cpu", "grad.pooler.dense.weight") is as_well
    assert rule_for(Case(), "cpu", "grad.pooler.dense.weight") is relatively


# The command


def test_command_exits_0_and_writes_what_it_found_and_prints_every_case_if_asked(tiny, tmp_path, capsys):
    path = tmp_path / "new" / "parity.json"
    only = "BertModel-sdpa-embeds,mask3d-float64"
    assert main(["parity", str(tiny), "--all", "--only", only, "--out", str(path), "-v"]) == 0
    record = json.loads(path.read_text())
    assert (record["choice"], record["only"]) == ("all", only.split(","))
    (found,) = record["checkpoints"].values()
    assert all(case.get("ok", True) for case in found["cases"])
    assert record["environment"]["versions"]["transformers"] == reference.version()
    assert record["environment"]["git"] == git_state()
    assert {claim["dtype"] for claim in found["claims"]} == {"float64", "float32", "bfloat16", "float16"}
    names = [case["name"] for case in found["cases"]]
    assert names == [case.name for case in CASES if any(word in case.name for word in only.split(","))]
    printed = capsys.readouterr().out.splitlines()
    shown = [line.split()[1] for line in printed if line.startswith("  ok  ")]
    assert shown == [case["name"] for case in found["cases"] if "not_checked" not in case]
    assert printed[-1].startswith(f"equal: {len(shown)} cases, ")


def test_the_function_prints_nothing(tiny, capsys):
    parity(tiny, ParitySettings(only=("BertModel-eager-mask3d-float64",), all=True))
    assert capsys.readouterr().out == ""


def test_command_exits_1_when_a_case_differs(tiny, monkeypatch, capsys):
    monkeypatch.setattr(
        "bertlite.stack.modules.BertSelfOutput.forward", lambda self, x, residual: self.LayerNorm(residual)
    )
    assert main(["parity", str(tiny), "--only", "BertModel-sdpa-long-float64"]) == 1
    out = capsys.readouterr().out
    assert "DIFFER" in out
    assert "first module to differ: encoder.layer.0.attention.output" in out
    (row,) = [line for line in out.splitlines() if line.startswith("float64")]
    assert int(row.split()[-3]) > 0
    assert out.splitlines()[-1].startswith("DIFFERS: 1 of 1 cases, ")
    assert "the first is BertModel-sdpa-long-float64" in out.splitlines()[-1]


def test_command_checks_shapes_beside_a_checkpoint(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(command.SHAPES, "large", {**SIZES, "hidden_size": 64})
    path, only = tmp_path / "record.json", "BertModel-eager-padded-float64"
    assert main(["parity", str(tiny), "--all", "--shapes", "large", "--only", only, "--out", str(path)]) == 0
    assert "bert-large-uncased's shape (random)" in capsys.readouterr().out
    found = json.loads(path.read_text())["checkpoints"]
    names = {name: {case["name"] for case in each["cases"]} for name, each in found.items()}
    shape = names.pop("bert-large-uncased's shape (random)")
    assert shape == {case.name for case in cases_for("cpu", shape_only=True) if only in case.name}
    assert shape < names[tiny.name]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--only", "no-such-case"], "no case matches 'no-such-case'"),
        (["no/such/checkpoint"], "no/such/checkpoint"),
        (["--device", "cuda"], "sees no CUDA device"),
    ],
)
def test_command_exits_2_when_it_cannot_ask(argv, message, capsys):
    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["parity", *argv]) == 2
    assert message in capsys.readouterr().err


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="shape 'tiny' is unknown; have: base, large"):
        command.ParitySettings(shapes=("tiny",))
    with pytest.raises(TypeError, match="only is 'long'; give a list"):
        command.ParitySettings(only="long")  # type: ignore[arg-type]


def test_command_lists_its_cases(capsys):
    assert main(["parity", "--list"]) == 0
    listed = capsys.readouterr().out.split()
    assert listed[: len(CASES)] == [case.name for case in CASES]
    assert listed[len(CASES) :] == [case.name for kind in KINDS for case in cases_of(kind)]
    assert main(["parity", "--list", "--only", "left,long"]) == 0
    assert capsys.readouterr().out.split() == [name for name in listed if "left" in name or "long" in name]


def test_command_runs_the_quick_choice_and_says_how_it_stands(tiny, tmp_path, monkeypatch, capsys):
    path = tmp_path / "record.json"
    monkeypatch.setattr("bertlite.support.progress.SECONDS_BETWEEN_LINES", 0.0)
    assert main(["parity", str(tiny), "--out", str(path)]) == 0
    printed = capsys.readouterr()
    record = json.loads(path.read_text())
    (found,) = record["checkpoints"].values()
    chosen = command.quick_choice(CASES, Checkpoint(tiny))
    assert [case["name"] for case in found["cases"]] == [case.name for case in chosen]
    for case, each in zip(chosen, found["cases"], strict=True):
        assert "not_checked" in each or (each["ok"] and each["backend"].partition(",")[0] == case.backend)
    assert (record["choice"], record["only"]) == ("quick", [])
    assert f"{len(chosen)} of {len(CASES)} cases, which together cover all of them; --all" in printed.out
    assert len(printed.out.splitlines()) <= 25
    assert not [line for line in printed.out.splitlines() if line.startswith(("  ok  ", "DIFFER"))]
    tensors = sum(case.get("tensors", 0) for case in found["cases"])
    checked = sum("not_checked" not in case for case in found["cases"])
    assert f"equal: {checked} cases, {tensors:,} tensors" in printed.out.splitlines()[-1]
    assert f"parity: {len(chosen)} of {len(chosen)} cases, " in printed.err


def test_says_when_the_demo_checkpoint_is_absent(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert demo_checkpoint() is None


@pytest.mark.parametrize(
    ("native", "attends", "name"),
    [(True, False, "none"), (True, True, "packed"), (False, False, "packed, varlen"), (False, True, "packed")],
)
def test_native_kernels_after_packed_embeddings_are_not_called_varlen(native: bool, attends: bool, name: str) -> None:
    x = torch.zeros(1, 1, 2, 8)
    with AttentionWatch() as watch:
        torch.nn.functional.embedding(torch.tensor([0, 1]), torch.zeros(2, 8))
        if attends:
            torch.nn.functional.scaled_dot_product_attention(x, x, x)
    assert watch.backend(native) == name
