"""Find the heads and neurons that a BERT can do without: scores, choices and repair.

Heads and neurons have their numbers in the unpruned model.  A choice is {layer: [units]}, the argument of
`bertlite.prune_heads` and `bertlite.prune_neurons`.
"""

from bertlite.pruning.criteria import CRITERIA, NEURON_CRITERIA, NORMALISERS, REDUCTIONS, TARGETS, Criterion
from bertlite.pruning.importance.allocation import choose_sizes, macs, rank_heads, rank_neurons
from bertlite.pruning.importance.distillation import distillation_loss
from bertlite.pruning.importance.layerwise import loss_curves, output_metrics, prune_layerwise_, prune_to_macs
from bertlite.pruning.importance.least_squares import METHODS, repair, repair_
from bertlite.pruning.importance.scores import head_importance, neuron_importance, normalise

__all__ = [
    "CRITERIA",
    "METHODS",
    "NEURON_CRITERIA",
    "NORMALISERS",
    "REDUCTIONS",
    "TARGETS",
    "Criterion",
    "choose_sizes",
    "distillation_loss",
    "head_importance",
    "loss_curves",
    "macs",
    "neuron_importance",
    "normalise",
    "output_metrics",
    "prune_layerwise_",
    "prune_to_macs",
    "rank_heads",
    "rank_neurons",
    "repair",
    "repair_",
]
