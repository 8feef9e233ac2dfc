"""The criteria that score heads and neurons, in one table.

To add one, add its entry to CRITERIA: the library, `bertlite prune` and the documentation draw from the table.
Nothing here imports torch, so that `--help` is quick.

Shapes:  L layers · N units as built, heads or neurons · n units of one layer that are not pruned · W weights of a unit
         in each of D rows · K examples, tokens or batches · R rows · S positions
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CRITERIA", "NEURON_CRITERIA", "NORMALISERS", "REDUCTIONS", "TARGETS", "Criterion"]
REDUCTIONS = ("example", "token", "batch")  # a mean is over one of these
REDUCTIONS_OF = {"head": REDUCTIONS, "neuron": ("example", "batch")}  # all tokens of an example share a neuron's gate
TARGETS = ("loss", "kl")
NORMALISERS = ("none", "layer_l2", "layer_sum", "minmax")


@dataclass(frozen=True)
class Measurement:
    """A quantity that is measured of a model, and that criteria are computed from.

    Args:
        name: words for messages.
        needs_loss: it is computed from the target: the loss of each example, or its divergence under target "kl".
        needs_data: it is computed from the model's activations on batches.
        by_token: it has a value for each token, so that the mean may be over tokens.
        units: the units that have it.
    """

    name: str
    needs_loss: bool = False
    needs_data: bool = True
    by_token: bool = True
    units: tuple[str, ...] = ("head",)


HEADS_AND_NEURONS = ("head", "neuron")
GATE_GRADIENTS = Measurement("gradients of gates", needs_loss=True, units=HEADS_AND_NEURONS)
LOSS_INCREASES = Measurement("increases of the loss", needs_loss=True, by_token=False, units=HEADS_AND_NEURONS)
LEARNED_GATES = Measurement("learned gates", needs_loss=True, by_token=False, units=HEADS_AND_NEURONS)
ATTENTIONS = Measurement("attention weights")
WEIGHTS = Measurement("weights", needs_data=False, units=HEADS_AND_NEURONS)
NOISE = Measurement("random numbers", needs_data=False, units=HEADS_AND_NEURONS)


@dataclass(frozen=True)
class Criterion:
    """A way of scoring heads or neurons: the higher the score, the more a unit matters.

    Args:
        name: its name in `head_importance` and `bertlite prune`.
        description: one line.
        source: the paper, or "".
        measurement: the quantity that is measured.
        statistic: computes the score from it, for all units at once; by default the measured quantity is the score:
            GATE_GRADIENTS: ∂L/∂ξ, (K, L, N) -> (K, L, N).
            LOSS_INCREASES: increase of the loss without the unit, (K, L, N) -> (K, L, N).
            LEARNED_GATES: chance that the unit's gate is not 0, (L, N) -> (L, N).
            ATTENTIONS: (L, R, N, S, S) -> (L, R, N, S).
            WEIGHTS: the unit's weights in one layer's output projection, (D, n, W) -> (n,).
            NOISE: uniform in 0 to 1, (L, N) -> (L, N).
    """

    name: str
    description: str
    source: str
    measurement: Measurement
    statistic: "Callable[[Tensor], Tensor]" = lambda measured: measured

    def reductions(self, unit: str = "head") -> tuple[str, ...]:
        """Return the reductions that a mean may have; without data all give the same."""
        return tuple(name for name in REDUCTIONS_OF[unit] if self.measurement.by_token or name != "token")


CRITERIA = {
    criterion.name: criterion
    for criterion in (
        Criterion(
            "michel",
            "mean |g|, with g = ∂L/∂ξ the gradient of the loss in the unit's gate",
            "Michel et al. 2019, arXiv:1905.10650",
            GATE_GRADIENTS,
            lambda gradients: gradients.abs(),
        ),
        Criterion("fisher", "mean g²", "Kwon et al. 2022, arXiv:2204.09656", GATE_GRADIENTS, lambda g: g.square()),
        Criterion(
            "leave_one_out",
            "measured increase of the loss without the unit; for each a forward from its layer on",
            "",
            LOSS_INCREASES,
        ),
        Criterion(
            "hard_concrete",
            "chance that a gate is not 0, learned on the batches under a penalty on this chance; unlike in the papers,"
            " weights are not trained",
            "Louizos et al. 2018, arXiv:1712.01312; Voita et al. 2019, arXiv:1905.09418",
            LEARNED_GATES,
        ),
        Criterion(
            "magnitude",
            "norm of the unit's weights in the output projection",
            "",
            WEIGHTS,
            lambda weights: weights.square().sum((0, 2)).sqrt(),
        ),
        Criterion(
            "confidence",
            "mean of the largest attention weight; unlike in the paper, weights to [SEP] count",
            "Voita et al. 2019, arXiv:1905.09418",
            ATTENTIONS,
            lambda weights: weights.amax(-1),
        ),
        Criterion("random", "uniform in 0 to 1, by the seed", "", NOISE),
    )
}


def criteria_for(unit: str) -> dict[str, Criterion]:
    """Return the criteria that score "head"s or "neuron"s, by name."""
    return {name: criterion for name, criterion in CRITERIA.items() if unit in criterion.measurement.units}


NEURON_CRITERIA = criteria_for("neuron")
