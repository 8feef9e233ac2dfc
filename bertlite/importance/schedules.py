"""When to score, prune and tune: at once, or in steps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bertlite.importance.allocation import Choice, rank_heads

Score = Callable[[Any], Tensor]  # model -> (L, N), such as lambda m: head_importance(m, batches)
Choose = Callable[[Tensor, int], Choice]  # scores, how many go


@dataclass(frozen=True)
class Step:
    """One step of a schedule."""

    model: Any  # pruned; the next step prunes a copy of it
    removed: Choice  # in this step
    scores: Tensor  # (L, N), of the model before this step


def one_shot(model: Any, score: Score, amount: int | float, *, choose: Choose = rank_heads) -> Step:
    """Score once, prune once.  The model given is left alone.

    Args:
        amount: of the heads still there, how many go, or which share.
    """
    raise NotImplementedError


def iterative(
    model: Any,
    score: Score,
    amount: int | float,
    *,
    steps: int,
    choose: Choose = rank_heads,
    tune: Callable[[Any], Any] | None = None,
) -> Iterator[Step]:
    """Prune in equal steps, scoring anew before each; yields after each step.

        for step in iterative(model, lambda m: head_importance(m, batches), 36, steps=6, tune=finetune):
            print(evaluate(step.model))

    Args:
        amount: heads to remove over all the steps, or their share of those still there.
        tune: called with the pruned model after every step, before it is yielded; trains it in place, and what it
            returns is not looked at.
    """
    raise NotImplementedError


def distillation_loss(
    student: Any,
    teacher: Any,
    attention_mask: Tensor | None = None,
    *,
    temperature: float = 2.0,
    hidden_weight: float = 0.0,
) -> Tensor:
    """How far a student's outputs are from its teacher's: T² · KL(teacher ‖ student) of the logits at temperature T
    (Hinton et al. 2015), plus the mean squared difference of hidden states, times their weight.

    Args:
        student, teacher: outputs of the two models on one batch; both with hidden states if these have weight.
        attention_mask: (B, S); padding does not count.
        hidden_weight: for the mean over layers, tokens and features.  Outputs without logits need it above 0.

    Returns:
        A scalar; gradients reach the student alone.
    """
    raise NotImplementedError
