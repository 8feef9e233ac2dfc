"""bertlite/inference/gpu/training.py: steps in buckets train as an eager loop does.

A recorded step runs here as it would run in a replay: again, with what its inputs hold then.
"""

import copy
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from conftest import F64, SIZES, assert_same, make, make_batch
from simulated import Noted, Pools, Tape, by_ends, graphed, record
from torch import Tensor, nn

import bertlite
from bertlite import BertForQuestionAnswering, BertForSequenceClassification, BertForTokenClassification
from bertlite.experiments.finetune import training_loss
from bertlite.experiments.settings import Recipe
from bertlite.inference import TrainingStep
from bertlite.inference.gpu import graphs, training
from bertlite.inference.gpu.training import make_recordable_, own_loss
from bertlite.stack.attention import Backend
from bertlite.support import torch_private

SMALL = {"hidden_size": 16, "intermediate_size": 19, "num_hidden_layers": 1, "num_labels": 3}
SMALL |= {"attn_implementation": "auto"}
NO_DROPOUT = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
Run = Callable[[], Tensor]


class Recorder:
    """Stands for `graphs.record_run`: a recording has no effect, reads no values, and is replayed without Python."""

    recorded, replayed = 0, 0

    def __call__(self, run: Run) -> tuple[Callable[[], None], Tensor, int]:
        tape, state = Tape(), torch.get_rng_state()
        unread = mock.patch.object(Tensor, "tolist", side_effect=AssertionError("a recording reads no values"))
        with mock.patch.object(torch_private, "is_tracing", return_value=True), unread, tape:
            out = run()
        tape.undo()
        torch.set_rng_state(state)
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            tape.replay()

        return replay, out, 0


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.TrainingStep, "backend", Backend("by ends", by_ends, packs=True))


def plain_model(cls: Any = BertForSequenceClassification, **changes: Any) -> Any:
    """Make a small model without dropout, in training."""
    return make(cls, **{**NO_DROPOUT, **changes}).train()


def step_of(model: Any, recorder: Recorder | None, *args: Any, lr: float = 1e-3, **options: Any) -> TrainingStep:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    made = TrainingStep(model, optimizer, *args, clip=0.5, schedule=schedule, capture=recorder, **options)
    if recorder is not None:
        for group in optimizer.param_groups:  # as on a GPU
            group["lr"] = torch.tensor(lr, dtype=F64)
    return made


def batches_of(count: int, rows: int = 3, kind: str = "text") -> list[dict[str, Tensor]]:
    """Return batches of random lengths, up to 11 or up to 40 tokens, with labels."""
    draw, found = random.Random(0), []
    for seed in range(count):
        width = draw.choice([11, 40])
        batch = make_batch(rows, width, seed, [draw.randint(1, width) for _ in range(rows)])
        ids, real = batch["input_ids"], batch["attention_mask"].bool()
        labels = {"text": ids[:, 0] % 3, "tokens": (ids % 3).where(real, -100)}[kind]
        found.append({**batch, "labels": labels})
    return found


def assert_trains_alike(
    step: TrainingStep,
    batches: list[dict[str, Tensor]],
    change: Callable[[int, Any, Any], object] = lambda *of: None,
    atol: float = 1e-8,
    **others: Any,
) -> None:
    """Assert that a step gives the losses and weights of a loop as people write it.

    Before each batch `change` may change the model and the optimizer; the loop may have another model or loss.
    """
    plain, loss = others.get("model", copy.deepcopy(step.model)), others.get("loss", step.loss)
    torch.manual_seed(0)
    losses = []
    for i, batch in enumerate(batches):
        change(i, step.model, step.optimizer)
        losses.append(step(batch))

    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    torch.manual_seed(0)
    wanted = []
    for i, batch in enumerate(batches):
        change(i, plain, optimizer)
        wanted.append(loss(plain, batch))
        (wanted[-1] / step.accumulate).backward()
        if (i + 1) % step.accumulate == 0:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert_same(losses, [x.detach() for x in wanted], atol=min(atol, 1e-9))
    assert_same(dict(step.model.named_parameters()), dict(plain.named_parameters()), atol=atol)


@pytest.mark.parametrize("cls", [BertForSequenceClassification, BertForTokenClassification, bertlite.BertForMaskedLM])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_losses_and_weights_over_many_steps_are_those_of_an_eager_loop(cls, accumulate):
    """200 steps of a classifier, in buckets that come and go, with evaluation between steps."""
    kind = "text" if cls is BertForSequenceClassification else "tokens"
    count = 200 if kind == "text" and accumulate == 1 else 24
    batches, recorder = batches_of(count, 2, kind), Recorder()
    step = step_of(plain_model(cls), recorder, accumulate=accumulate)

    def evaluate(i: int, model: Any, optimizer: Any) -> None:
        if i % 9 == 1:
            with torch.no_grad():
                model.eval()(**batches[i - 1])
            model.train()

    assert_trains_alike(step, batches, evaluate)
    assert 1 < recorder.recorded < recorder.replayed < count
    assert any(bucket.tokens for bucket, *_ in step.made)


def test_without_a_capture_a_step_is_the_eager_loop_bit_for_bit():
    """With dropout, on the CPU."""
    model = make(BertForSequenceClassification, **SMALL).train()
    assert_trains_alike(step_of(model, None), batches_of(6), atol=0)
    assert all(x.grad is None for x in model.parameters()), "as another step over it expects"


CHANGES: dict[str, Any] = {  # a change of the model and the optimizer, and the way back
    "frozen": (
        lambda model, _: model.bert.embeddings.requires_grad_(False),
        lambda model, _: model.bert.embeddings.requires_grad_(True),
    ),
    "left out": (
        lambda model, optimizer: optimizer.param_groups[0]["params"].pop(-2),
        lambda model, optimizer: optimizer.param_groups[0]["params"].insert(-1, model.classifier.weight),
    ),
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("at", [9, 10], ids=["between steps", "within a step"])
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_may_leave_and_come_back_at_any_batch(change, at, accumulate, recorded):
    """They move as in a loop: not at all by momentum or decay while they are away, though graphs keep gradients."""
    recorder, (do, undo) = Recorder() if recorded else None, CHANGES[change]
    step = step_of(plain_model(), recorder, accumulate=accumulate)
    changes = {at: do, 2 * at: undo, 3 * at: do}
    assert_trains_alike(step, batches_of(3) * 14, lambda i, *of: changes.get(i, lambda *of: None)(*of))
    assert recorder is None or recorder.recorded > 3


class Heads(nn.Module):
    """A model with two heads; the name of a number in the batch says which."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = plain_model(), nn.ModuleList(nn.Linear(3, 1, dtype=F64) for _ in range(2))

    def forward(self, ids: Tensor, **batch: Any) -> Tensor:
        head = self.heads["second" in batch]
        return (head(self.body(ids, batch["attention_mask"]).logits) - 3).square().mean()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_states_and_gradients_that_come_late_or_are_cleared_are_noticed(accumulate):
    torch.manual_seed(0)
    step = step_of(
        Heads(), Recorder(), lambda model, batch: model(ids=batch["input_ids"], **batch), accumulate=accumulate
    )
    names = [*["first"] * 4, *["second", "first"] * 9]
    batches = [{**batch, name: True} for batch, name in zip(batches_of(3) * 9, names, strict=False)]
    assert_trains_alike(step, batches, lambda i, model, _: model.zero_grad() if i in (16, 19) else None)


def test_a_bucket_whose_first_run_fails_is_not_recorded_before_another_one():
    """A recording would make the optimizer's state, and each replay would make it anew."""
    fails, (batch,) = Event(), batches_of(1)

    def loss(model: Any, batch: Any) -> Tensor:
        if fails.is_set():
            raise KeyboardInterrupt
        return own_loss(model, batch)

    step = step_of(plain_model(), recorder := Recorder(), loss)
    fails.set()
    with pytest.raises(KeyboardInterrupt):
        step(batch)
    fails.clear()
    assert_trains_alike(step, [batch] * 4)
    assert (recorder.recorded, recorder.replayed) == (1, 3)


def test_arguments_that_would_train_nothing_and_autocast_around_a_step_are_refused():
    model, other = (make(BertForSequenceClassification, **SMALL) for _ in range(2))
    optimizer, others = (torch.optim.AdamW(each.parameters()) for each in (model, other))
    rates = torch.optim.lr_scheduler
    for options, message in (
        *(({"accumulate": x}, f"accumulate is {x}; give") for x in (0, -1, 1.5, True)),
        *(({"clip": x}, f"clip is {x!r}; give") for x in (0, True, "1")),
        ({"autocast": "bfloat16"}, "autocast is 'bfloat16'; give one of torch.bfloat16"),
        ({"frozen": other}, r"frozen=\[teacher\]"),
        ({"optimizer": others}, "none of the model's parameters"),
        ({"schedule": rates.LambdaLR(others, lambda step: 1)}, "another optimizer's"),
        ({"schedule": rates.ReduceLROnPlateau(optimizer)}, "steps by a score"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainingStep(model, **{"optimizer": optimizer, **options})
    with pytest.raises(ValueError, match="returns no loss for input_ids: give labels"):
        TrainingStep(model, optimizer)({"input_ids": make_batch()["input_ids"]})
    step = TrainingStep(model, optimizer)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"autocast=torch\.bfloat16"):
        step(batches_of(1)[0])
    assert not step.steps


def test_dropout_draws_anew_in_each_replay():
    recorder, (batch,) = Recorder(), batches_of(1)
    step = step_of(make(BertForSequenceClassification, **SMALL).train(), recorder, lr=0.0)
    assert len({step(batch).item() for _ in range(6)}) == 6
    assert recorder.replayed == 5


def test_a_model_of_hf_is_packed_too(monkeypatch):
    transformers = pytest.importorskip("transformers")
    from bertlite import hf

    wanted = plain_model()
    config = transformers.BertConfig(**{**SIZES, **NO_DROPOUT})
    model = hf.BertForSequenceClassification(config).double().train()
    model.load_state_dict(wanted.state_dict())
    called: list[int] = []
    kernel = Backend("by ends", lambda *args: called.append(1) or by_ends(*args), packs=True)
    monkeypatch.setattr(TrainingStep, "backend", kernel)
    recorder, batches = Recorder(), batches_of(8)
    assert_trains_alike(step_of(model, recorder), batches, model=wanted)
    assert len(called) == len(batches)
    assert recorder.replayed


def test_a_teacher_is_packed_too_and_its_distance_is_the_eager_one():
    model = plain_model()
    teacher = make(BertForSequenceClassification, **SMALL).eval()
    loss: Any = partial(training_loss, recipe=Recipe(distil=0.5, hidden=1.0), teacher=teacher)
    layouts: list[int] = []
    teacher.bert.encoder.layer[0].register_forward_pre_hook(lambda _, inputs: layouts.append(inputs[0].dim()))
    assert_trains_alike(step_of(model, Recorder(), loss, frozen=[teacher]), batches_of(8))
    assert layouts == [2] * 8 + [3] * 8, "the loop computes padding"


@pytest.mark.parametrize("under_graphs", [False, True])
def test_a_teacher_that_another_thread_runs_while_a_step_records(under_graphs, monkeypatch):
    """Its own batch is not put into the slots of the step's bucket, and the step records no replay of the teacher."""
    monkeypatch.setattr(graphs, "record_forward", record)
    model, teacher = plain_model(), make(BertForSequenceClassification, **SMALL)
    quick = graphed(teacher) if under_graphs else copy.deepcopy(teacher)
    batches, other, found = batches_of(8), make_batch(5, 23, lengths=(23, 20, 7, 1, 23)), list[Tensor]()

    def loss(model: Any, batch: Any, run: Any = teacher) -> Tensor:
        logits = run(**{name: x for name, x in batch.items() if name != "labels"}).logits
        return own_loss(model, batch) + (model(**batch).logits - logits.detach()).square().mean()

    def shared(model: Any, batch: Any) -> Tensor:
        assert not under_graphs or not quick.bert.graphs.made
        thread = Thread(target=lambda: found.append(quick(**other).logits))
        thread.start()
        thread.join()
        return loss(model, batch, quick)

    assert_trains_alike(step_of(model, Recorder(), shared, frozen=[quick]), batches, loss=loss)
    assert_same(found, [teacher(**other).logits] * len(batches))


def test_a_step_waits_to_record_before_it_switches_cudnn_off(monkeypatch):
    """A step without a bucket that has the switch, and records a teacher, would wait for one that records forever."""
    model, order = plain_model(), list[str]()
    monkeypatch.setattr(graphs, "RECORDING", Noted(order, "recording"))
    monkeypatch.setattr(training, "without_cudnn", lambda: Noted(order, "switch"))
    step = step_of(model, Recorder(), lambda model, batch: order.append("loss") or own_loss(model, batch))
    step.device = torch.device("cuda")
    step.run(batches_of(1)[0], True, None)
    assert order == ["recording", "switch", "loss", "end of switch", "end of recording"]


def test_graphs_of_a_step_share_memory_that_torch_still_takes(monkeypatch):
    """By the rules of torch's allocator, after all graphs were dropped and after a recording that failed."""
    pools, model = Pools(monkeypatch), plain_model()
    step, batches = step_of(model, Recorder()), [{**make_batch(1, n), "labels": torch.tensor([1])} for n in (5, 40)]
    step.capture = step.record

    def learn() -> None:
        for batch in batches * 2:
            step(batch)

    learn()
    assert [*pools.graphs.values()] == [2]
    step.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
    step(batches[0])
    assert not pools.reserved(), "the state lies elsewhere"
    learn()
    assert [*pools.graphs.values()] == [0, 2]

    def fail(model: Any, batch: Any) -> Tensor:
        if failing.is_set():
            raise RuntimeError("not permitted when the stream is capturing")
        return own_loss(model, batch)

    failing, step.loss = Event(), fail
    step(batches[0])
    failing.set()
    with pytest.raises(RuntimeError, match="not permitted"):
        step(batches[0])
    failing.clear()
    learn()
    assert [*pools.graphs.values()][:2] == [0, 2]
    assert sum(pools.graphs.values()) == 4


@pytest.mark.parametrize(
    ("cls", "change", "bucketed"),
    [
        (BertForTokenClassification, lambda ids, mask: {"attention_mask": mask.flip(1)}, True),
        (BertForTokenClassification, lambda ids, mask: {"labels": ids % 3}, True),
        (BertForTokenClassification, lambda ids, mask: {"attention_mask": mask[:, None].expand(-1, 11, -1)}, False),
        (BertForQuestionAnswering, lambda x, _: {"start_positions": x[:, 0] % 2, "end_positions": x[:, 1] % 2}, True),
        (bertlite.BertForMultipleChoice, lambda ids, mask: {"labels": torch.arange(2)}, False),
    ],
    ids=["padding on the left", "labels of padding", "a mask of queries", "answers", "choices"],
)
def test_what_cannot_be_packed_is_padded_and_what_fits_no_bucket_runs_plainly(cls, change, bucketed):
    model, recorder = plain_model(cls, num_labels=2 if cls is BertForQuestionAnswering else 3), Recorder()
    batch: dict[str, Tensor] = {**make_batch(4, 11, lengths=(11, 4, 7, 2))}
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if cls is bertlite.BertForMultipleChoice:
        batch = {name: x.unflatten(0, (2, 2)) for name, x in batch.items()}
    elif cls is BertForTokenClassification:
        batch["labels"] = (ids % 3).masked_fill(mask == 0, -100)
    batch |= change(ids, mask)
    assert_trains_alike(step_of(model, recorder), [batch] * 3)
    assert bool(recorder.recorded) == bucketed


def test_lengths_of_one_bucket_share_a_graph_also_with_padding(monkeypatch):
    monkeypatch.setattr(TrainingStep, "backend", None)
    model, recorder, batches = plain_model(BertForTokenClassification), Recorder(), []
    for i, width in enumerate((11, 9, 5, 11)):
        batch = make_batch(3, width, i, (width, 3, 2))
        batches.append({**batch, "labels": (batch["input_ids"] % 3).where(batch["attention_mask"] == 1, -100)})
    assert_trains_alike(step_of(model, recorder), batches)
    assert (recorder.recorded, recorder.replayed) == (1, 3)


def test_a_module_without_a_config_gets_graphs_without_more_padding():
    class Wrapped(nn.ModuleList):
        def forward(self, **batch: Any) -> Any:
            return self[0](**batch)

    recorder = Recorder()
    assert_trains_alike(step_of(Wrapped([plain_model()]), recorder), batches_of(1) * 3)
    assert (recorder.recorded, recorder.replayed) == (1, 2)


def test_other_inputs_keep_their_shapes_and_changes_get_graphs_of_their_own():
    """Flags of as many classes as there are positions."""
    model, recorder = plain_model(num_labels=11, problem_type="multi_label_classification"), Recorder()
    batch = {**make_batch(3, 11, lengths=(11, 4, 7)), "labels": torch.rand(3, 11, dtype=F64).round()}
    step = step_of(model, recorder, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    assert_trains_alike(step, [batch] * 3)
    assert recorder.recorded == 1
    group, weight = step.optimizer.param_groups[0], model.classifier.weight
    for change in (  # that a graph would not see: OneCycleLR changes betas, and a loaded state lies elsewhere
        lambda: model.bert.embeddings.word_embeddings.weight.requires_grad_(False),
        lambda: group.update(betas=(0.5, 0.9)),
        lambda: setattr(step, "clip", 0.1),
        lambda: setattr(weight, "data", weight.detach().clone()),
        lambda: model.dropout.eval(),
        lambda: setattr(model.dropout, "p", 0.25),
        lambda: model.register_buffer("kept", torch.zeros(2)),
        lambda: model.register_buffer("kept", torch.ones(2)),
        lambda: step.optimizer.state.clear(),
        lambda: step.optimizer.state[weight].update(exp_avg=torch.zeros_like(weight)),
        lambda: model.dropout.register_forward_hook(lambda *of: None),
        lambda: model.dropout.register_full_backward_hook(lambda *of: None),
        lambda: weight.register_hook(lambda gradient: 0 * gradient),
        lambda: weight.register_post_accumulate_grad_hook(lambda parameter: None),
        lambda: step.optimizer.register_step_pre_hook(lambda *of: None),
        lambda: step.optimizer.register_step_post_hook(lambda *of: None),
        lambda: setattr(model.dropout, "forward", partial(type(model.dropout).forward, model.dropout)),
        lambda: group.update(lr=group["lr"].clone()),
        lambda: step.optimizer.load_state_dict(step.optimizer.state_dict()),
        lambda: step.scaler.set_growth_factor(4.0),
        lambda: step.optimizer.param_groups[0].update(lr=1e-4),
    ):
        step(batch), step(batch)
        before = recorder.replayed
        change()
        step(batch)
        assert recorder.replayed == before > 0
    assert recorder.recorded == 21, "each has a graph of its own"
    step.schedule, step.prepare = None, Mock()
    step.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    step(batch)
    step.prepare.assert_called_once_with(step.optimizer)
    for odd in ({"names": ["a", "b", "c"]}, {"attention_mask": batch["attention_mask"].tolist()}):
        assert step.fit({**batch, **odd}) is None, "a graph would keep the list"


@pytest.mark.parametrize("length", [1, 11])
@pytest.mark.parametrize(("name", "dtype"), [("labels", F64), ("weights", torch.int64)])
def test_values_of_tokens_that_are_not_padded_leave_the_loss_as_it_is(length, name, dtype):
    """One position would be broadcast over those that a longer bucket has, without a word."""

    def loss(model: Any, batch: Any) -> Tensor:
        given = {key: x for key, x in batch.items() if key != name}
        return (model(**given).logits[..., 0] - batch[name]).square().mean()

    model = plain_model(BertForTokenClassification)
    batch = {**make_batch(3, length), name: torch.arange(3 * length).view(3, length).to(dtype)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])  # this loss reads each position
    assert_trains_alike(step_of(model, Recorder(), loss), [batch])


def test_a_batch_with_a_gradient_runs_without_a_graph():
    """Its history would be that of the inputs that all replays share."""
    model, recorder = plain_model(), Recorder()
    soft = torch.ones(3, dtype=F64, requires_grad=True)

    def loss(model: Any, batch: Any) -> Tensor:
        return own_loss(model, {key: x for key, x in batch.items() if key != "soft"}) + batch["soft"].square().sum()

    assert_trains_alike(step_of(model, recorder, loss), [{**batches_of(1)[0], "soft": soft}] * 4)
    assert recorder.recorded == 0


def test_pinned_memory_may_be_refilled_when_a_step_returns(monkeypatch):
    """A GPU reads it late: when the steps before have run."""
    pinned, copy_, late = torch.arange(6).view(2, 3), Tensor.copy_, list[Callable[[], Any]]()

    def copied(kept: Tensor, x: Tensor, non_blocking: bool) -> None:
        run = partial(copy_, kept, x)
        late.append(run) if x is pinned and non_blocking else run()

    monkeypatch.setattr(Tensor, "is_pinned", lambda x: x is pinned)
    monkeypatch.setattr(Tensor, "copy_", copied)
    step = training.RecordedStep({"input_ids": pinned}, {"input_ids": (2, 3)}, pinned.device)
    step.copy({"input_ids": pinned})
    pinned.zero_()
    for run in late:
        run()
    assert step.batch["input_ids"].tolist() == [[0, 1, 2], [3, 4, 5]]


@dataclass
class Doubled:
    """A loss that has equals, which may hold other tensors, and so no hash."""

    factor: float = 2.0

    def __call__(self, model: Any, batch: Any) -> Tensor:
        return self.factor * own_loss(model, batch)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, model: Any, batch: Any) -> Tensor:
        return self.scale * own_loss(model, batch)


class Weighted:
    """A loss that reads numbers in each way that Python has."""

    def __init__(self, teacher: Any) -> None:
        self.teacher, self.share, self.unread = teacher, 0.5, 0

    def __call__(self, model: Any, batch: Any, factor: float = 1.0) -> Tensor:
        return self.share * factor * own_loss(model, batch) + 0 * self.teacher(**batch).loss.detach()


def test_numbers_that_a_loss_reads_and_the_modes_of_frozen_models_are_noticed(monkeypatch):
    model = plain_model()
    teacher = make(BertForSequenceClassification, **SMALL).eval()
    recorder, batch, weighted, bound = Recorder(), batches_of(1)[0], Weighted(teacher), Weighted(teacher)
    step = step_of(model, recorder, weighted, frozen=[teacher])
    settings, power = {"scale": 2.0}, torch.ones((), dtype=F64)
    rule = nn.CrossEntropyLoss()
    deep = SimpleNamespace(parts={"first": {"share": 1.0}}, weights=[1.0], at=SimpleNamespace(power=1.0))

    def closed(model: Any, batch: Any) -> Tensor:
        return settings["scale"] * own_loss(model, batch) ** power

    def from_deep(model: Any, batch: Any, factor: float = 1.0) -> Tensor:
        shares = sum(deep.parts[name]["share"] * deep.weights[i] for i, name in enumerate(deep.parts))
        return shares * factor * own_loss(model, batch) ** deep.at.power + 0 * rule(torch.eye(2), torch.arange(2))

    doubled, scaled = partial(weighted, factor=2.0), Scaled()

    def let_power_lie_elsewhere() -> None:
        nonlocal power
        power = power.clone()

    step.optimizer.param_groups[0]["tags"] = {"kind": "all"}  # without a hash
    changes: list[tuple[Any, Callable[[], Any]]] = [
        (weighted, lambda: teacher.train()),
        (bound.__call__, lambda: setattr(bound, "share", 0.25)),
        (bound.__call__, lambda: teacher.load_state_dict(copy.deepcopy(teacher.state_dict()), assign=True)),
        (doubled, lambda: doubled.keywords.update(factor=3.0)),
        (scaled, lambda: setattr(scaled, "scale", 3.0)),
        (closed, lambda: settings.update(scale=3.0)),
        (closed, let_power_lie_elsewhere),
        (Doubled(), lambda: setattr(step, "loss", Doubled())),
        (from_deep, lambda: deep.parts["first"].update(share=0.5)),
        (from_deep, lambda: deep.weights.__setitem__(0, 0.5)),
        (from_deep, lambda: setattr(deep.at, "power", 2.0)),
        (from_deep, lambda: setattr(rule, "label_smoothing", 0.5)),
        (from_deep, lambda: setattr(from_deep, "__defaults__", (0.5,))),
    ]
    for step.loss, change in changes:
        before = recorder.replayed
        for _ in range(3):
            weighted.unread += 1
            step(batch)
        assert recorder.replayed >= before + 2
        before = recorder.replayed
        change()
        step(batch)
        assert recorder.replayed == before, "it is not recorded yet"

    step.loss = from_deep
    step(batch), step(batch)
    deep.parts["first"]["unread"], before = 1.0, recorder.replayed
    step(batch)
    assert recorder.replayed == before + 1
    monkeypatch.setattr(training, "BUCKETS", 3)
    for deep.at.power in (3.0, 4.0):
        step(batch)
    deep.at.power = 5.0
    with pytest.warns(RuntimeWarning, match="3 steps in a row were new: a number that the loss"):
        step(batch)


share = 1.0


def test_a_global_in_a_generator_an_empty_cell_and_a_sparse_tensor_are_searched(monkeypatch):
    def loss(model: Any, batch: Any) -> Tensor:
        return sum(share * x for x in [own_loss(model, batch)]) if sparse.is_sparse else late

    sparse = torch.eye(2).to_sparse()
    before = training.numbers_in(loss)
    assert training.numbers_in(loss) == before
    monkeypatch.setitem(loss.__globals__, "share", 2.0)
    assert training.numbers_in(loss) != before
    if not before:
        late = sparse  # never bound: its cell is empty


def test_a_parameter_that_the_optimizer_does_not_have_is_refused():
    model, (batch,) = plain_model(), batches_of(1)
    step = step_of(model, Recorder())
    step(batch)
    model.load_state_dict(model.state_dict())
    step(batch)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(ValueError, match=r"Embedding.weight is a new parameter, .* make an optimizer and a TrainingS"):
        step(batches_of(1)[0])


def test_the_graph_unused_for_longest_goes_and_without_memory_a_step_runs_plainly(monkeypatch):
    model = plain_model()
    plain, batches = copy.deepcopy(model), [{**make_batch(1, n), "labels": torch.tensor([1])} for n in (5, 40, 40)]
    held: list[Any] = []

    def fail(run: Run) -> Any:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        for x in model.parameters():  # made by a backward that is recorded and not run
            x.grad = torch.full_like(x, torch.nan)
        step.scaler.unscale_(step.optimizer)
        raise torch.OutOfMemoryError("none")

    model.register_forward_pre_hook(lambda *of: held.append(held[0]()) if held else None)
    monkeypatch.setattr(training, "BUCKETS", 1)
    step, counts = step_of(model, Recorder(), scaler=torch.amp.GradScaler("cpu")), []
    step.capture = fail
    with pytest.warns(RuntimeWarning, match="without a CUDA graph: there was no memory for it"):
        assert_trains_alike(step, batches, lambda *of: counts.append(len(step.made)), model=plain)
    assert counts[:3] == [0, 1, 1]
    assert held[1:] == [None], "the memory of the recording is free when the step runs plainly"


def test_a_step_is_recorded_when_nobody_holds_an_earlier_output():
    """Gradients are added on the stream of the forward that first asked for them, which is not the recorded one."""
    step, (batch,) = step_of(plain_model(), recorder := Recorder()), batches_of(1)
    held, found = [own_loss(step.model, batch)], list[tuple[int, int]]()

    def change(i: int, model: Any, optimizer: Any) -> None:
        if i == 3 and model is step.model:
            held.clear()
        found.append((recorder.recorded, recorder.replayed))

    with pytest.warns(RuntimeWarning, match="without a CUDA graph: something holds an output"):
        assert_trains_alike(step, [batch] * 5, change)
    assert found[:5] == [(0, 0)] * 4 + [(1, 1)]


def test_a_step_runs_on_its_own_gpu(monkeypatch):
    """Another GPU's stream would record nothing, and its replays would train nothing."""
    order: list[str] = []

    def replay(*of: Any) -> Tensor:
        order.append("replay")
        return torch.zeros(())

    monkeypatch.setattr(torch.cuda, "device", partial(Noted, order))
    step = step_of(make(BertForSequenceClassification, **SMALL), Recorder())
    step.schedule, step.device, step.replay = None, torch.device("cuda", 1), replay  # type: ignore[method-assign]
    step(batches_of(1)[0])
    assert order == ["cuda:1", "replay", "end of cuda:1"]


def test_padding_is_left_out_in_the_dtype_that_a_step_has_now(monkeypatch):
    step = step_of(make(BertForSequenceClassification, **SMALL), Recorder())
    monkeypatch.undo()  # the backend of all other tests
    monkeypatch.setattr(type(step.bodies[0]), "may_train_packed", lambda body, device, dtype: dtype == torch.bfloat16)
    assert step.backend is None
    step.autocast = torch.bfloat16
    assert step.backend is not None


@pytest.mark.parametrize("why", ["checkpointed layers run without CUDA graphs", "'packed' would read its mask"])
def test_what_cannot_be_recorded_runs_without_a_graph(why, monkeypatch):
    step = step_of(plain_model(attn_implementation="packed"), Recorder())
    if "mask" in why:
        monkeypatch.setattr(TrainingStep, "backend", None)
    else:
        step.model.gradient_checkpointing_enable()
    with pytest.warns(RuntimeWarning, match=why):
        step(batches_of(1)[0])
    assert not step.made


def test_an_optimizer_that_a_graph_cannot_hold_is_refused():
    weights, cpu = [nn.Parameter(torch.ones(2))], torch.device("cpu")
    with pytest.raises(ValueError, match=r"SGD cannot be recorded in a CUDA graph: use torch.optim.AdamW"):
        make_recordable_(torch.optim.SGD(weights, lr=0.1), cpu)
    with pytest.raises(ValueError, match=r"AdamW with a GradScaler cannot be recorded .* fused=True"):
        make_recordable_(torch.optim.AdamW(weights), cpu, scaled=True)
    optimizer = torch.optim.AdamW(weights, lr=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    make_recordable_(optimizer, cpu, scaled=True)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.1})
    assert all(group["capturable"] for group in optimizer.param_groups)
    del optimizer.param_groups[1]
    rate = optimizer.param_groups[0]["lr"]
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.05)
