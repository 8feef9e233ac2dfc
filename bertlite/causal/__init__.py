"""Causal analysis: change the outputs of heads and layers, and measure the effect on the model's output.

Heads have their numbers in the unpruned model, and a pruned one is nan.
"""

from bertlite.causal.ablation import ABLATIONS, Ablation, ablate, ablated, mean_contexts
from bertlite.causal.patching import DIRECTIONS, METRICS, Patching, attribution_patch, patch
from bertlite.causal.sites import SITES, activations_at

__all__ = [
    "ABLATIONS",
    "DIRECTIONS",
    "METRICS",
    "SITES",
    "Ablation",
    "Patching",
    "ablate",
    "ablated",
    "activations_at",
    "attribution_patch",
    "mean_contexts",
    "patch",
]
