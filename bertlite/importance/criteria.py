"""How much each head or neuron matters: one number each, the larger the more it matters.

Shapes:  L layers · N heads as built · I neurons as built · B sequences · S positions
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

Batch = Mapping[str, Any]
Loss = Callable[[Any, Batch], Tensor]  # (model output, batch) -> (B,), each example's loss

CRITERIA = (
    "michel",
    "signed",
    "fisher",
    "taylor",
    "leave_one_out",
    "magnitude",
    "confidence",
    "entropy",
    "context_norm",
    "random",
)
REDUCTIONS = ("example", "token", "batch")
TARGETS = ("loss", "kl")
NORMALISERS = ("none", "layer_l2", "layer_sum", "minmax", "cost")


def head_importance(
    model: Any,
    batches: Iterable[Batch] = (),
    criterion: str = "michel",
    *,
    reduction: str = "example",
    target: str = "loss",
    loss: Loss | None = None,
    teacher: Any = None,
    normaliser: str = "none",
    cost: Tensor | None = None,
    seed: int = 0,
    ignored_tokens: Iterable[int] = (),
) -> Tensor:
    """How much each head matters, by one criterion of the literature.

    With g = ∂L/∂ξ, the loss's slope in the gate ξ = 1 that multiplies a head's context:

    - "michel": mean |g| (Michel et al. 2019, arXiv:1905.10650); "signed": mean g, which is minus the change of the
      loss to first order, so the sign is turned: a head whose removal would lower the loss scores below 0;
      "fisher": mean g² (Kwon et al. 2022, arXiv:2204.09656).
    - "taylor": |Σ W_O · ∂L/∂W_O| over the head's block of the output projection; equal to |g| of a batch.
    - "leave_one_out": how much the target rises without the head, measured; one forward for every head.
    - "magnitude": ‖W_O‖ of the head's block.  "random": uniform in 0 to 1, by `seed`.  Neither looks at data.
    - "confidence": mean of the largest attention weight (Voita et al. 2019, arXiv:1905.09418); "entropy": minus
      the mean entropy of the attention, in nats; "context_norm": mean ‖context‖.  Padding does not count.

    Args:
        model: of bertlite or bertlite.hf; left as found, weights, gradients, training mode and random state included.
        batches: what the model takes, with its labels; scored in eval mode.
        reduction: what the mean is over: "example", the same however the examples are batched; "token" (Michel et
            al.'s code); or "batch", one slope for each batch (run_bertology, TextPruner).
        target: "loss", or "kl", label-free: how far the prediction moves from the dense model's.  At the dense model
            KL itself has no slope, so its curvature is taken, as the Fisher information does: L is -log p(y) with y
            drawn by `seed` from the teacher's prediction, and mean g² is twice the KL that the gate would cost, to
            second order.  Classes are drawn from their softmax, independent labels one by one, and a regression, or the
            mean token vector of a BertModel, from a normal distribution of variance 1 about it.
        loss: (output, batch) -> (B,) for target "loss"; by default the model's own, of each example alone.
        teacher: for target "kl", the dense model; by default `model` itself.
        normaliser: see `normalise`; `cost` is for "cost".
        ignored_tokens: ids that "confidence" does not look at; Voita et al. leave out [SEP].

    Returns:
        (L, N), float64 on the CPU.  A pruned head is nan, not 0: "gone" and "unimportant" are different answers.

    Raises:
        ValueError: an unknown name, no batches, labels that are missing or do not fit the model, or a combination
            that means nothing; before anything is computed.
    """
    raise NotImplementedError


def neuron_importance(
    model: Any,
    batches: Iterable[Batch] = (),
    criterion: str = "michel",
    *,
    reduction: str = "example",
    target: str = "loss",
    loss: Loss | None = None,
    teacher: Any = None,
    normaliser: str = "none",
    cost: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """How much each intermediate (feed-forward) neuron matters: as `head_importance`, with a gate on its activation.

    Criteria: michel, signed, fisher, magnitude (‖its column of the output projection‖) and random.

    Returns:
        (L, I), float64 on the CPU, nan where a neuron is pruned.
    """
    raise NotImplementedError


def head_gradients(
    model: Any,
    batches: Iterable[Batch],
    *,
    target: str = "loss",
    loss: Loss | None = None,
    teacher: Any = None,
    seed: int = 0,
) -> Tensor:
    """∂L/∂ξ of every example: (examples, L, N), float64, nan where a head is pruned; for `rearrange`."""
    raise NotImplementedError


def normalise(scores: Tensor, normaliser: str, cost: Tensor | None = None) -> Tensor:
    """Scores made comparable across layers; nan stays nan and counts for nothing.

    Args:
        normaliser: "none"; "layer_l2" and "layer_sum" divide each layer by its norm or its sum; "minmax" maps the
            whole to 0…1; "cost" divides by `cost`.
        cost: what each unit costs, in MACs or milliseconds; broadcasts to the scores.

    Raises:
        ValueError: an unknown name, or a cost that is missing, does not fit or is not above 0.
    """
    raise NotImplementedError
