"""How far a student is from its teacher."""

import copy
from typing import Any

import pytest
import torch
from conftest import F64, assert_same, make, make_batch
from torch import Tensor

from bertlite import BertForQuestionAnswering, BertForSequenceClassification, BertForTokenClassification, BertModel
from bertlite.pruning import distillation_loss


def outputs(cls: Any, seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    labels = {"num_labels": 6} if "Classification" in cls.__name__ else {}
    model = make(cls, **labels)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model(**make_batch(), output_hidden_states=True, **options)


def test_distillation_is_the_divergence_at_a_temperature() -> None:
    student, teacher = (outputs(BertForSequenceClassification, seed) for seed in (1, 2))
    T = 3.0
    p, q = ((out.logits / T).softmax(-1) for out in (teacher, student))
    wanted = T**2 * (p * (p / q).log()).sum(-1).mean()
    assert wanted > 1e-3
    assert_same(distillation_loss(student, teacher, temperature=T), wanted)
    pairs = zip(student.hidden_states, teacher.hidden_states, strict=True)
    gaps = torch.stack([(a - b).square().mean() for a, b in pairs])
    assert_same(distillation_loss(student, teacher, temperature=T, hidden_weight=0.7), wanted + 0.7 * gaps.mean())
    assert_same(distillation_loss(teacher, teacher, hidden_weight=1.0), torch.zeros((), dtype=F64))


class Logits:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def test_single_logits_are_compared_by_their_squared_difference() -> None:
    mine, theirs = Logits(torch.tensor([[1.0], [2.0]])), Logits(torch.tensor([[3.0], [2.5]]))
    assert float(distillation_loss(mine, theirs)) == (4 + 0.25) / 2


def test_gradients_reach_the_student_alone() -> None:
    student, teacher = (torch.randn(2, 4, dtype=F64, requires_grad=True) for _ in range(2))
    distillation_loss(Logits(student), Logits(teacher)).backward()
    assert teacher.grad is None
    assert student.grad is not None


def test_encoders_are_compared_by_the_direction_of_their_mean_vectors() -> None:
    student, teacher = (outputs(BertModel, seed) for seed in (1, 2))
    a, b = (out.last_hidden_state.mean(1) for out in (student, teacher))
    states = zip(student.hidden_states, teacher.hidden_states, strict=True)
    gaps = torch.stack([(mine - theirs).square().mean() for mine, theirs in states])
    wanted = 1 - torch.cosine_similarity(a, b).mean() + 0.7 * gaps.mean()
    assert_same(distillation_loss(student, teacher, hidden_weight=0.7), wanted)


@pytest.mark.parametrize("cls", [BertForTokenClassification, BertForQuestionAnswering, BertModel])
def test_padding_does_not_count(cls: Any) -> None:
    student, teacher = (outputs(cls, seed) for seed in (1, 2))
    mask = make_batch()["attention_mask"]
    loss = distillation_loss(student, teacher, mask, hidden_weight=0.5)
    assert abs(float(loss.detach() - distillation_loss(student, teacher, hidden_weight=0.5).detach())) > 1e-6
    for name in ("logits", "start_logits", "end_logits"):
        if getattr(student, name, None) is not None:
            moved = getattr(student, name).detach().clone()
            moved[mask == 0] += 3
            setattr(student, name, moved)
    student.hidden_states = tuple(x + 3 * (mask == 0)[..., None] for x in student.hidden_states)
    assert_same(distillation_loss(student, teacher, mask, hidden_weight=0.5).detach(), loss.detach())


def test_what_cannot_be_compared_is_refused() -> None:
    student, teacher = (outputs(BertForSequenceClassification, seed) for seed in (1, 2))
    body = make(BertModel)(**make_batch(), output_hidden_states=True)
    without = copy.copy(student)
    without.hidden_states = None
    cases: list[tuple[Any, Any, dict[str, float], str]] = [
        (student, student, {"temperature": 0}, "temperature is 0"),
        (student, student, {"hidden_weight": -1}, "hidden_weight -1"),
        (body, body, {}, "the outputs have no logits"),
        (student, body, {}, "the student gives logits, the teacher does not"),
        (without, teacher, {"hidden_weight": 1.0}, "the outputs have 0 and 4 hidden states"),
    ]
    for mine, theirs, options, message in cases:
        with pytest.raises(ValueError, match=message):
            distillation_loss(mine, theirs, **options)
    assert distillation_loss(body, body, hidden_weight=1.0) == 0
