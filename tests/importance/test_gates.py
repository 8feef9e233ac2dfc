"""Trained gates: what they are drawn from, what they cost, and that training finds the heads a task needs."""

import copy
from typing import Any

import pytest
import torch
from conftest import SIZES, assert_same, make, make_batch
from left_as_found import left_as_found, worn
from torch import Tensor

from bertlite import BertConfig, BertForSequenceClassification, prune_heads, with_pruned
from bertlite.importance import SubsetGates, train_gates

L, N = 3, 4
CONFIG = BertConfig(**SIZES)
PRUNED = with_pruned(CONFIG, {0: [1], 2: [0, 1, 2, 3]})


def spread(gates: Any) -> Any:
    """Return gates whose weights are all different."""
    gates.weight.data = torch.linspace(-3, 3, L * N).reshape(L, N)
    return gates


@pytest.mark.parametrize("keep", [1, 5, 12])
def test_subset_gates_sum_to_k_and_in_the_end_are_k_ones(keep: int) -> None:
    gates = spread(SubsetGates(CONFIG, keep))
    for temperature in (10.0, 1.0, 0.01):
        gates.temperature = temperature
        for _ in range(5):
            gate = gates()
            assert abs(float(gate.detach().sum()) - keep) < 1e-4
            assert gate.detach().min() >= 0
    gates.eval()
    assert gates().flatten().tolist() == [0.0] * (12 - keep) + [1.0] * keep
    assert sum(map(len, gates.pruned().values())) == 12 - keep


def test_cold_subset_gates_are_the_top_of_perturbed_weights() -> None:
    """One gate is drawn as often as its softmax says (the Gumbel trick)."""
    gates = spread(SubsetGates(CONFIG, 1, temperature=1e-4))
    torch.manual_seed(0)
    with torch.no_grad():
        mean = torch.stack([gates() for _ in range(4_000)]).double().mean(0).flatten()
    wanted = gates.weight.detach().double().flatten().softmax(0)
    assert ((mean - wanted).abs() < 4 * (wanted * (1 - wanted) / 4_000).sqrt() + 1e-3).all()


def test_subset_gates_have_the_gradient_of_their_weights() -> None:
    gates = spread(SubsetGates(CONFIG, 3)).double()

    def gate(weight: Tensor) -> Tensor:
        torch.manual_seed(1)
        return torch.func.functional_call(gates, {"weight": weight}, ())

    assert torch.autograd.gradcheck(gate, gates.weight.detach().clone().requires_grad_())


def test_of_a_pruned_model_subset_gates_keep_heads_that_are_there() -> None:
    gates = SubsetGates(PRUNED, 7)
    assert_same(gates.eval()(), gates.present.float(), atol=0)
    assert gates.pruned() == {}
    for _ in range(3):
        gate = gates.train()().detach()
        assert (gate[~gates.present] == 0).all()
        assert abs(float(gate.sum()) - 7) < 1e-4
    for keep in (0, 8):
        with pytest.raises(ValueError, match=f"{keep} heads cannot be kept: the model has 7; give 1 to 7"):
            SubsetGates(PRUNED, keep)


# Training

NEEDED = {(0, 2), (1, 1), (2, 3)}


def task() -> tuple[Any, list[dict[str, Tensor]]]:
    """Return a model whose other heads count a thousandth of three, and batches labelled with its own predictions."""
    model = make(BertForSequenceClassification, num_labels=6)
    for layer, block in enumerate(model.bert.encoder.layer):
        for head in range(N):
            block.attention.output.dense.weight.data[:, 12 * head : 12 * (head + 1)] *= (
                3 if (layer, head) in NEEDED else 1e-3
            )
    batches = [make_batch(8, 11, seed) for seed in range(4)]
    with torch.no_grad():
        return model, [{**batch, "labels": model(**batch).logits.argmax(-1)} for batch in batches]


def closed(gates: Any) -> set[tuple[int, int]]:
    return {(layer, head) for layer, heads in gates.pruned().items() for head in heads}


def test_subset_gates_find_the_heads_that_the_task_needs() -> None:
    model, batches = task()
    gates = SubsetGates(model.config, 3)

    def cool(step: int) -> None:
        gates.temperature = 1.0 - 0.9 * step / 60

    losses = train_gates(model, gates, batches, steps=60, lr=0.3, before=cool)
    assert closed(gates) == {(layer, head) for layer in range(L) for head in range(N)} - NEEDED
    assert not gates.training
    assert len(losses) == 60
    assert sum(losses[-8:]) < sum(losses[:8])
    (batch, *_) = batches
    assert_same(prune_heads(model, gates.pruned())(**batch).logits, model(**batch, head_mask=gates()).logits)


def test_without_an_optimizer_the_model_is_left_as_found_and_the_seed_decides() -> None:
    model, batches = task()
    found = {}
    for parameter in worn(model).parameters():
        parameter.grad = None
    with left_as_found(model):
        for name, seed in (("one", 0), ("again", 0), ("other", 1)):
            gates = SubsetGates(model.config, 3)
            found[name] = train_gates(model, gates, iter(batches), steps=5, seed=seed), gates.weight.detach()
    assert_same(found["one"][1], found["again"][1], atol=0)
    assert found["one"][0] == found["again"][0] != found["other"][0]


def test_with_an_optimizer_the_model_is_trained_in_training_mode() -> None:
    model, batches = task()
    model.classifier.weight.grad = torch.full_like(model.classifier.weight, 1e9)  # of something before
    seen: list[bool] = []
    hook = model.register_forward_pre_hook(lambda module, args: seen.append(module.training))
    before = copy.deepcopy(model.state_dict())
    gates = SubsetGates(model.config, 3)
    train_gates(model, gates, batches, steps=3, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    hook.remove()
    assert seen == [True] * 3
    assert not model.training
    moved = (model.classifier.weight - before["classifier.weight"]).abs().max()
    assert 1e-6 < moved < 1


def test_what_cannot_be_trained_is_refused_before_any_work() -> None:
    model, batches = task()
    model.register_forward_pre_hook(lambda *args: pytest.fail("the model ran"))
    gates = SubsetGates(model.config, 3)
    with pytest.raises(ValueError, match="made for a model with other heads"):
        train_gates(model, SubsetGates(PRUNED, 3), batches, steps=1)
    with pytest.raises(ValueError, match="steps is 0"):
        train_gates(model, gates, batches, steps=0)
    with pytest.raises(ValueError, match="there are no batches"):
        train_gates(model, gates, [], steps=1)
    with pytest.raises(ValueError, match="batch 0: there are no labels"):
        train_gates(model, gates, [make_batch()], steps=1)
