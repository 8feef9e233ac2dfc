"""A distillation loss."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def distillation_loss(
    student: Any,
    teacher: Any,
    attention_mask: Tensor | None = None,
    *,
    temperature: float = 2.0,
    hidden_weight: float = 0.0,
) -> Tensor:
    """Compute a distillation loss: the distance of a student's outputs from its teacher's.

    It is T² · KL(teacher ‖ student) of the logits at temperature T (Hinton et al. 2015, arXiv:1503.02531).  For a
    regression it is the mean squared difference of logits; without logits it is 1 - cosine of the mean token vectors.
    `hidden_weight` times the mean squared difference of hidden states is added.

    Args:
        student, teacher: outputs of the two models on one batch; with hidden states if hidden_weight is above 0.
        attention_mask: (B, S); padding does not count.
        hidden_weight: times the mean over layers, tokens and features.  For outputs without logits it must be above 0.

    Returns:
        A scalar; gradients flow only to the student.

    Raises:
        ValueError: there is nothing to compare, or the temperature is not above 0.
    """
    if not temperature > 0 or hidden_weight < 0:
        raise ValueError(f"temperature is {temperature}, hidden_weight {hidden_weight}; give above 0, and 0 or more")

    # Every kind of logits that both models give, at temperature T.
    terms: list[Tensor] = []
    for name in ("logits", "prediction_logits", "seq_relationship_logits", "start_logits", "end_logits"):
        if getattr(student, name, None) is not None:
            if getattr(teacher, name, None) is None:
                raise ValueError(f"the student gives {name}, the teacher does not: they are models of different tasks")
            p, q = (getattr(out, name) for out in (teacher, student))
            if p.shape[-1] == 1 and name == "logits":
                terms.append((p.detach() - q).square().mean())
                continue

            p, q = p / temperature, q / temperature
            if attention_mask is not None and name in ("start_logits", "end_logits"):
                p, q = (x.masked_fill(attention_mask == 0, torch.finfo(x.dtype).min) for x in (p, q))
            each = F.kl_div(q.log_softmax(-1), p.detach().log_softmax(-1), reduction="none", log_target=True).sum(-1)
            terms.append(temperature**2 * masked_mean(each, attention_mask if p.dim() == 3 else None))

    # Hidden states of equally many layers, one by one.
    if hidden_weight:
        states = [out.hidden_states or () for out in (student, teacher)]
        if not states[0] or len(states[0]) != len(states[1]):
            raise ValueError(
                f"hidden_weight is above 0, but the outputs have {len(states[0])} and {len(states[1])} hidden states;"
                " pass output_hidden_states=True to models with equally many layers"
            )
        pairs = zip(*states, strict=True)
        gaps = torch.stack([(mine - theirs.detach()).square().mean(-1) for mine, theirs in pairs]).mean(0)
        term = hidden_weight * masked_mean(gaps, attention_mask)

        # Without logits, the vectors that a sentence encoder would return count too.
        if not terms:
            last = (out.hidden_states[-1] for out in (student, teacher))
            mine, theirs = (F.normalize(mean_vectors(each, attention_mask), dim=-1) for each in last)
            term = term + (mine - theirs.detach()).square().sum(-1).mean() / 2
        terms.append(term)

    if not terms:
        raise ValueError("the outputs have no logits; compare hidden states, with hidden_weight above 0")
    return sum(terms[1:], terms[0])


def mean_vectors(states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Average (B, S, D) over tokens that are not padding, to (B, D)."""
    if attention_mask is None:
        return states.mean(1)
    real = attention_mask.to(states.dtype)[..., None]
    return (states * real).sum(1) / real.sum(1)


def masked_mean(each: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Average (B, S) over tokens that are not padding, or (B,) without a mask."""
    if attention_mask is None:
        return each.mean()
    real = attention_mask.to(each.dtype)
    return (each * real).sum() / real.sum()
