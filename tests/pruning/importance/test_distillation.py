"""How far a student is from its teacher."""

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
    gaps = torch.stack(
        [(a - b).square().mean() for a, b in zip(student.hidden_states, teacher.hidden_states, strict=True)]
    )
    assert_same(distillation_loss(student, teacher, temperature=T, hidden_weight=0.7), wanted + 0.7 * gaps.mean())
    assert_same(distillation_loss(teacher, teacher, hidden_weight=1.0), torch.zeros((), dtype=F64))


def test_at_high_temperature_its_gradient_is_the_difference_of_centred_logits() -> None:
    """Hinton et al. 2015, section 2.1, where it is T²-scaled."""
    student, teacher = torch.randn(2, 3, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
    student.requires_grad_()
    loss = distillation_loss(Logits(student), Logits(teacher), temperature=1e4)
    (grad,) = torch.autograd.grad(loss, student)
    centred = [x - x.mean(-1, keepdim=True) for x in (student.detach(), teacher)]
    torch.testing.assert_close(grad, (centred[0] - centred[1]) / (5 * 3), rtol=1e-3, atol=0)


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
    student = outputs(BertForSequenceClassification, 1)
    body = make(BertModel)(**make_batch(), output_hidden_states=True)
    with pytest.raises(ValueError, match="temperature is 0"):
        distillation_loss(student, student, temperature=0)
    with pytest.raises(ValueError, match="hidden_weight -1"):
        distillation_loss(student, student, hidden_weight=-1)
    with pytest.raises(ValueError, match="the outputs have no logits"):
        distillation_loss(body, body)
    assert distillation_loss(body, body, hidden_weight=1.0) == 0
    with pytest.raises(ValueError, match="the student gives logits, the teacher does not"):
        distillation_loss(student, body)
    teacher = outputs(BertForSequenceClassification, 2)
    student.hidden_states = None
    with pytest.raises(ValueError, match="the outputs have 0 and 4 hidden states"):
        distillation_loss(student, teacher, hidden_weight=1.0)
