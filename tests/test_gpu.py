"""What only a GPU shows: that a forward does not wait for it, and that it refuses inputs that the CPU did not check.

A value that is wrong ends the CUDA context, so those tests run in processes of their own.
"""

import copy
import os
import subprocess
import sys

import pytest
import torch
from conftest import assert_same, gradients, make, make_batch

from bertlite import BertForSequenceClassification, optimize_for_inference
from bertlite.inference import TrainingStep
from bertlite.stack.attention import varlen
from bertlite.stack.layouts import Packed
from scripts.measure.gpu_goals import count_waits as waits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def there(batch):
    return {name: x.cuda() for name, x in batch.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "packed"])
def test_a_forward_waits_for_the_gpu_to_know_its_mask_and_for_nothing_else(backend, dtype, there):
    """As on the second device of `tests/device/checks.py`, which lists every path and what it may wait for."""
    model = make(attn_implementation=backend, hidden_size=64).cuda().to(dtype)
    with torch.no_grad():
        assert waits(lambda: model(**there)) <= 1
        del there["attention_mask"]
        assert waits(lambda: model(**there)) == 0


@pytest.mark.parametrize(("device", "allowed"), [("cuda", 1), ("cpu", 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_input_is_waited_for_only_to_read_the_ends_of_its_sequences(device, allowed, dtype, there):
    model = make(attn_implementation="packed", hidden_size=64).cuda().to(dtype)
    ends = torch.tensor([0, 11, 18], dtype=torch.int32, device=device)
    ids = there["input_ids"].flatten()[:18]
    with torch.no_grad():
        assert waits(lambda: model(ids, cu_seqlens=ends)) <= allowed
        assert_same(model(ids, cu_seqlens=ends), model(ids, cu_seqlens=ends.cuda()), atol=0)


def test_a_gpu_computes_what_the_cpu_does(model, batch, there):
    wanted = model(**batch).last_hidden_state
    cpu = gradients(model, wanted.square().sum())
    got = model.cuda()(**there).last_hidden_state
    assert_same(got.cpu(), wanted)
    gpu = {name: grad.cpu() for name, grad in gradients(model, got.square().sum()).items()}
    scale = max(grad.abs().max().item() for grad in cpu.values())
    assert_same(gpu, cpu, atol=1e-12 * max(1.0, scale))


@pytest.mark.parametrize("first", ["a row of padding", "padding"])
def test_gradients_do_not_depend_on_the_batches_before(first):
    """As those of cuDNN's attention do in 16 bits, by the layout of the first gradient of a shape."""
    lengths = {"a row of padding": (56, 0, 11, 50), "padding": (56, 30, 11, 50)}
    model = make(attn_implementation="sdpa", hidden_size=64, max_position_embeddings=56).float().cuda()
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")

    def learn(model, name):
        batch = {name: x.cuda() for name, x in make_batch(4, 56, lengths=lengths[name]).items()}
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).last_hidden_state.float().square().mean()
        return torch.cat([grad.flatten() for grad in gradients(model, loss).values()])

    for name in (first, *lengths, first):
        wanted = learn(plain, name)
        assert (learn(model, name) - wanted).norm() < 0.05 * wanted.norm()  # rounding is 0.01, cuDNN was off by 0.27


def test_dropout_of_packed_attention_drops_and_keeps_the_mean():
    """And has gradients: the values are ones, so that a context is the sum of its weights after dropout."""
    packing = Packed((96, 300), torch.tensor([96, 300]).cuda(), (396,))
    q, k = torch.randn(2, 396, 4, 64, device="cuda", dtype=torch.bfloat16)
    v = torch.ones_like(q, requires_grad=True)
    found = varlen(q, k, v, packing, None, 0.25, False)
    assert found.float().std() > 0.01
    assert abs(found.float().mean().item() - 1) < 0.01
    found.sum().backward()
    assert abs(v.grad.float().mean().item() - 1) < 0.01


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("lengths", [(11, 7), (0, 0)])
def test_layers_without_heads_and_sequences_without_tokens_end_no_process(lengths, first):
    model = make(attn_implementation="packed", hidden_size=64, pruned_heads={1: range(4), 2: range(4)})
    batch = {name: x.cuda() for name, x in make_batch(2, 11, lengths=lengths).items()}
    out = model.cuda().bfloat16()(**batch, first_token_only=first).last_hidden_state
    assert all(grad.isfinite().all() for grad in gradients(model, out.float().sum()).values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("batch['input_ids'][1, 2] = 97", "input_ids holds others; this model has 0 to 96 (vocab_size 97)"),
        ("batch['token_type_ids'][0, 3] = -1", "token_type_ids holds others; this model has 0 to 4"),
        ("batch['attention_mask'][0, 3] = 2", "attention_mask holds others than 1 (attend) and 0 (do not)"),
    ],
)
def test_the_gpu_itself_refuses_what_the_cpu_would(change, message):
    code = f"""
import torch
from bertlite import BertConfig, BertModel
from conftest import SIZES, make_batch
model = BertModel(BertConfig(**SIZES)).cuda().eval()
batch = {{name: x.cuda() for name, x in make_batch().items()}}
{change}
model(**batch)
torch.cuda.synchronize()
"""
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    assert message in ran.stderr + ran.stdout


def test_checkpointing_to_the_host_gives_the_memory_of_the_gpu_back():
    """And the same gradients.  Of the inputs of 8 layers, 64 MiB, 56 at least are not there at the peak."""
    sizes = {"num_hidden_layers": 8, "hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 128}
    model = make(**sizes).float().cuda().train()
    batch = {name: x.cuda() for name, x in make_batch(64, 128).items()}
    peaks, found = [], []
    for options in (None, {}, {"offload": True}):
        model.gradient_checkpointing_disable()
        if options is not None:
            model.gradient_checkpointing_enable(**options)
        torch.manual_seed(0)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found.append(gradients(model, model(**batch).last_hidden_state.square().mean()))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] > 2 * peaks[1]
    assert peaks[1] - peaks[2] > 32 * 2**20
    assert_same(found[1], found[0], atol=1e-6)
    assert_same(found[2], found[0], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_graphs_give_what_the_model_gives_and_wait_once(dtype, there):
    """Sizes of one bucket share a graph; another stream and outputs of earlier calls are left alone."""
    model = make(hidden_size=64, attn_implementation="auto").float().cuda().to(dtype)
    quick = optimize_for_inference(model, backend="graphs")
    real, made = there["attention_mask"].bool(), quick.base_model.graphs.made
    verified, true = {*made}, copy.deepcopy(model).double()(**there).last_hidden_state[real]
    allowed = 2 * (model(**there).last_hidden_state[real] - true).norm()
    first = quick(**there).last_hidden_state
    with torch.cuda.stream(torch.cuda.Stream()):
        other = quick(**{name: x.flip(0) for name, x in there.items()}).last_hidden_state
    torch.cuda.synchronize()
    assert (first[real] - true).norm() <= allowed
    assert (other.flip(0)[real] - true).norm() <= allowed
    assert len({*made} - verified) == 1
    assert waits(lambda: quick(**there)) <= 1
    del there["attention_mask"]
    quick(**there)
    assert waits(lambda: quick(**there)) == 0


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_recorded_steps_train_as_an_eager_loop_and_wait_once(autocast, accumulate):
    """In two buckets, with a schedule and clipping; without dropout, and with it other losses in each replay."""
    sizes = {"hidden_size": 64, "attn_implementation": "auto", "num_labels": 3}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = make(BertForSequenceClassification, **sizes, **dropout).float().cuda().train()
    plain, found = copy.deepcopy(model), []
    batches = [{**make_batch(8, 40 - i // accumulate % 2 * 20, i), "labels": torch.arange(8) % 3} for i in range(60)]
    batches = [{name: x.cuda() for name, x in batch.items()} for batch in batches]
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-3, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        options = {"clip": 0.5, "schedule": schedule, "autocast": autocast, "accumulate": accumulate}
        step = TrainingStep(each, optimizer, **options)
        step.fit = step.fit if each is model else lambda batch: None
        found.append(torch.stack([step(batch) for batch in batches]).cpu())
        if each is model:
            assert len(step.made) == 2 * accumulate
            assert waits(lambda step=step: step(batches[0])) <= 1
    assert_same(found[0], found[1], atol=2e-2 if autocast else 1e-3)
    dropped = make(BertForSequenceClassification, **sizes).float().cuda().train()
    optimizer = torch.optim.AdamW(dropped.parameters(), lr=0.0, fused=True)
    step = TrainingStep(dropped, optimizer, autocast=autocast)
    assert len({step(batches[0]).item() for _ in range(6)}) == 6
