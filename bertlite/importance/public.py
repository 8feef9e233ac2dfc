"""The public names of bertlite.importance, each from the module it lives in."""

from bertlite.importance.allocation import (
    choose_sizes,
    macs,
    rank_heads,
    rank_neurons,
)
from bertlite.importance.criteria import CRITERIA, NEURON_CRITERIA, NORMALISERS, REDUCTIONS, TARGETS, Criterion
from bertlite.importance.distillation import distillation_loss
from bertlite.importance.layerwise import loss_curves, output_metrics, prune_layerwise_, prune_to_macs
from bertlite.importance.least_squares import METHODS, repair, repair_
from bertlite.importance.scores import head_importance, neuron_importance, normalise

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
