"""The rehearsal on a pretended GPU finds faults that are planted, and computes what the CPU does."""

import json
from dataclasses import replace
from pathlib import Path as File

import pytest
import torch
from conftest import assert_same, gradients, make, make_batch

from bertlite import BertConfig, BertModel
from bertlite.lab.rehearsal import command, paths
from bertlite.lab.rehearsal.backward import backward
from bertlite.lab.rehearsal.device import pretended_device
from bertlite.lab.rehearsal.paths import CORE, Path
from bertlite.lab.rehearsal.stand_ins import aten, indexed_by_slices
from bertlite.stack.modules import BertIntermediate, BertPooler
from scripts.measure import gpu_checks

PLAIN = Path(CORE, "no mask")
needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="this torch is built without CUDA, and gradients of CUDA tensors end it"
)


def line_of(function, text: str) -> str:
    """Return the line, file:number, of a function's source that holds a text."""
    code = function.__code__
    lines = File(code.co_filename).read_text(encoding="utf-8").splitlines()
    return next(f":{n}" for n, line in enumerate(lines, 1) if n >= code.co_firstlineno and text in line)


@pytest.fixture
def planted(monkeypatch):
    """Return a way to replace a forward of bertlite by one with a fault, whose lines count as bertlite's."""

    def plant(part: type, forward) -> None:
        monkeypatch.setattr(part, "forward", forward)
        monkeypatch.setattr("bertlite.lab.rehearsal.device.PACKAGE", File(__file__).parent)

    return plant


def test_a_cpu_tensor_in_a_forward_is_found_with_its_line(planted):
    table = torch.ones(37)

    def forward(self, hidden_states):
        return self.intermediate_act_fn(self.dense(hidden_states)) * table

    planted(BertIntermediate, forward)
    result = command.rehearse(PLAIN)
    assert (result.verdict, result.waits) == ("mix-up", 0)
    assert len(result.lines) == 3, "one in each layer: the forward goes on"
    assert "aten::mul.Tensor of CUDA and CPU tensors" in result.lines[0]
    assert f"test_rehearsal.py{line_of(forward, '* table')}" in result.lines[0]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[0].tolist(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0, 2.0], device=x.device),
        lambda x: x[:, [0, 1]],
        lambda x: torch.cuda.synchronize(),
    ],
    ids=["item", "bool", "tolist", "cpu", "nonzero", "mask", "copy", "list", "synchronize"],
)
def test_every_wait_for_the_gpu_is_found_with_its_line(planted, read):
    def forward(self, hidden_states):
        read(hidden_states[:, 0])
        return self.activation(self.dense(hidden_states[:, 0]))

    planted(BertPooler, forward)
    result = command.rehearse(PLAIN)
    assert (result.verdict, result.waits, result.allowed) == ("too many waits", 1, 0)
    assert "test_rehearsal.py:" in result.lines[0]


@pytest.mark.parametrize(
    "harmless",
    [
        lambda x: x[:, 1:].sum(),
        lambda x: x.masked_fill(x > 0, 0),
        lambda x: x * torch.tensor(2.0),  # one number on the CPU is an argument of the kernel
        lambda x: torch.ones(3, device=x.device),
        lambda x: torch.tensor([1.0, 2.0]).to(x.device, non_blocking=True),
    ],
)
def test_what_makes_nobody_wait_is_no_wait(planted, harmless):
    def forward(self, hidden_states):
        harmless(hidden_states[:, 0])
        return self.activation(self.dense(hidden_states[:, 0]))

    planted(BertPooler, forward)
    assert command.rehearse(PLAIN).verdict == "ok"


def test_an_output_that_is_left_on_the_cpu_is_a_mix_up(planted):
    planted(BertPooler, lambda self, hidden_states: torch.zeros(3, 64))
    result = command.rehearse(PLAIN)
    assert (result.verdict, result.reason) == ("mix-up", "1 of its outputs are on the CPU")


def test_a_path_that_fails_says_where(planted):
    def forward(self, hidden_states):
        raise RuntimeError("planted")

    planted(BertPooler, forward)
    result = command.rehearse(PLAIN)
    assert (result.verdict, result.reason) == ("failed", "RuntimeError: planted")
    assert "test_rehearsal.py:" in result.lines[0]


@pytest.mark.parametrize("backend", ["eager", "sdpa", "packed"])
def test_the_values_are_those_of_the_cpu(backend):
    model, batch = make(attn_implementation=backend).requires_grad_(False), make_batch(3)
    with torch.no_grad():
        wanted = model(**batch)
        with pretended_device() as device:
            device.place_model(model)
            out = model(**{name: device.place(x) for name, x in batch.items()})
            assert out.last_hidden_state.device == torch.device("cuda", 0)
    got = {name: x.numbers for name, x in out.items()}
    assert_same(got, dict(wanted.items()))


@needs_cuda_build
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_those_of_the_cpu(checkpointed):
    model, batch = make(), make_batch(3)
    wanted = gradients(model, model(**batch).last_hidden_state.square().sum())
    if checkpointed:
        model.gradient_checkpointing_enable()
    with pretended_device() as device:
        device.place_model(model)
        backward(model(**{name: device.place(x) for name, x in batch.items()}).last_hidden_state.square().sum())
    got = {name: p.grad.numbers for name, p in model.named_parameters() if p.grad is not None}
    largest = max(grad.abs().max().item() for grad in wanted.values())
    assert_same({name: got[name] for name in wanted}, wanted, atol=1e-12 * largest)


class Doubled(torch.autograd.Function):
    """2·x with more gradients than inputs, as torch 2.15's varlen_attn has them."""

    extra = False

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None, grad if Doubled.extra else None


def test_gradients_that_no_input_has_are_none(monkeypatch):
    x = torch.ones(3, requires_grad=True)
    backward(Doubled.apply(x).sum())
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    monkeypatch.setattr(Doubled, "extra", True)
    with pytest.raises(RuntimeError, match="DoubledBackward has 1 inputs and gives 3 gradients"):
        backward(Doubled.apply(x).sum())


@pytest.mark.parametrize(
    "index",
    [
        0, slice(1, None), None, (0, 1), (slice(None), slice(None, None, 2)), (..., 0), (..., slice(1, None)),
        (slice(None), None, 0), (None, ..., None), [0, 2], (slice(None), [1, 0]), torch.tensor([[0, 1], [2, 0]]),
        torch.arange(12).view(3, 4) % 2 == 0, torch.tensor([True, False, True]),
        (torch.tensor([0, 1]), torch.tensor([2, 3])), (slice(None), torch.tensor([2, 3]), slice(0, 3)),
    ],
    ids=str,
)  # fmt: skip
def test_indexing_by_operations_is_indexing(index):
    x = torch.arange(60).view(3, 4, 5)
    viewed, indices = indexed_by_slices(x, index)
    assert (aten.index(viewed, indices) if indices else viewed).equal(x[index])


def chosen(*parts: str) -> list[Path]:
    return [path for path in paths.paths() if any(part in path.name for part in parts)]


@pytest.mark.parametrize(
    "path",
    [
        *chosen(
            "bertlite · BertModel · sdpa · float32 · forward · 4-D",
            "bertlite · BertModel · sdpa · float32 · forward · pruned, head_mask (L, N)",
        ),
        *chosen(
            "bertlite · BertModel · packed · float32 · forward · 2-D",
            "bertlite · BertModel · packed · bfloat16 · forward · cu_seqlens on",
        ),
        *chosen(
            "hf · BertModel · packed · bfloat16 · forward · no mask",
            "hf · BertModel · packed · float32 · forward · first_token_only, empty row",
        ),
        *chosen(
            "bertlite · BertForQuestionAnswering · packed · float32",
            "hf · BertLMHeadModel · sdpa · float32 · decoding",
        ),
        *chosen(
            "bertlite · BertModel · sdpa · float32 · autocast",
            "sdpa · bfloat16 · optimised",
            "sdpa · float32 · offloaded",
        ),
    ],
    ids=lambda path: path.name,
)
def test_a_choice_of_paths_passes(path):
    result = command.rehearse(path)
    if result.verdict == "not rehearsed":
        pytest.skip(result.reason)
    assert result.verdict == "ok", command.row(result)


def test_names_of_paths_are_unique_and_every_room_backend_and_mask_is_there():
    names = [path.name for path in paths.paths()]
    assert len(names) == len(set(names))
    found = {(path.room, path.backend) for path in paths.paths()}
    assert found >= {
        (room, backend) for room in (CORE, "bertlite.hf") for backend in ("eager", "sdpa", "packed", "varlen")
    }
    assert {path.mask for path in paths.paths()} == {"", *paths.MASKS}
    assert {path.mode for path in paths.paths()} == set(paths.MODES)


def test_the_record_says_that_it_is_a_rehearsal_and_what_was_not_rehearsed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "paths", lambda: [PLAIN, replace(PLAIN, what="another", mask="2-D mask", waits=0)])
    assert gpu_checks.main(["--rehearse", "--out", str(tmp_path / "r.json")]) == 1
    record = json.loads((tmp_path / "r.json").read_text())
    assert "rehearsal" in record["what"]
    assert "no proof" in record["rehearsal"]
    assert "rehearsal" in record["environment"]["device"]
    assert record["verdict"] == "rehearsal: FAILED; 1 paths pass, 1 do not, 0 were not rehearsed"
    assert [path["verdict"] for path in record["paths"]] == ["ok", "too many waits"]
    assert record["paths"][1]["lines"][0].startswith("bertlite/stack/masks.py:")
    assert record["not_rehearsed"]["torch.compile and CUDA graphs"]
    out = capsys.readouterr().out
    assert "not rehearsed: pinned memory" in out
    assert out.rstrip().endswith(record["verdict"])
    assert gpu_checks.main(["--rehearse", "--only", "no mask"]) == 0


def test_a_path_that_cannot_be_rehearsed_is_listed_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    result = command.rehearse(replace(PLAIN, mode="gradients"))
    assert result.verdict == "not rehearsed"
    assert command.not_rehearsed([result])[0] == (result.path, result.reason)
    assert "is built without CUDA" in result.reason
    assert not result.is_fault


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rehearse", "--out", "folder"], "say --out folder.json"),
        (["--rehearse", "checkpoint"], "--rehearse makes its own models"),
        (["--only", "packed"], "--only chooses among the paths of --rehearse"),
        (["checkpoint"], "give a checkpoint and --out"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu_checks.main(words)
    assert message in capsys.readouterr().err


def test_a_name_of_no_path_is_refused():
    with pytest.raises(SystemExit, match="no path matches 'nonsense'"):
        gpu_checks.main(["--rehearse", "--only", "nonsense"])


def test_what_was_patched_is_as_before():
    from bertlite import torch_private

    before = torch_private.TRACERS, torch.cuda.synchronize
    with pretended_device():
        assert before[0] != torch_private.TRACERS
    assert (torch_private.TRACERS, torch.cuda.synchronize) == before
    assert BertModel(BertConfig(**paths.SIZES)).device.type == "cpu"
