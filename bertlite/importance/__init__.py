"""Which heads and neurons a BERT can do without: scores, choices, schedules and repair.

Everything here speaks of heads and neurons by their numbers in the unpruned model, and of a choice as
{layer: [units]}, what `bertlite.prune_heads` and `bertlite.prune_neurons` take.
"""

from bertlite.importance.allocation import macs, rank_by_latency, rank_by_macs, rank_heads, rank_neurons, rearrange
from bertlite.importance.criteria import (
    CRITERIA,
    NEURON_CRITERIA,
    NORMALISERS,
    REDUCTIONS,
    TARGETS,
    head_gradients,
    head_importance,
    neuron_importance,
    normalise,
)
from bertlite.importance.gates import HardConcreteGates, SubsetGates, train_gates
from bertlite.importance.repair import METHODS, repair, repair_
from bertlite.importance.schedules import Step, distillation_loss, iterative, one_shot

__all__ = [
    "CRITERIA",
    "METHODS",
    "NEURON_CRITERIA",
    "NORMALISERS",
    "REDUCTIONS",
    "TARGETS",
    "HardConcreteGates",
    "Step",
    "SubsetGates",
    "distillation_loss",
    "head_gradients",
    "head_importance",
    "iterative",
    "macs",
    "neuron_importance",
    "normalise",
    "one_shot",
    "rank_by_latency",
    "rank_by_macs",
    "rank_heads",
    "rank_neurons",
    "rearrange",
    "repair",
    "repair_",
    "train_gates",
]
