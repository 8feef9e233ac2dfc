"""Repair without retraining: output projections refitted so that layers give again what the dense ones gave."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Model = TypeVar("Model")
METHODS = ("mean", "scale", "refit")


def repair(
    pruned: Model, dense: Any, batches: Iterable[Mapping[str, Any]], method: str = "refit", *, ridge: float = 1e-3
) -> Model:
    """A copy of the pruned model, repaired; the model is left alone.  See `repair_`."""
    raise NotImplementedError


def repair_(
    pruned: Model, dense: Any, batches: Iterable[Mapping[str, Any]], method: str = "refit", *, ridge: float = 1e-3
) -> Model:
    """Bring a pruned model back towards the dense one it came from: no labels, no gradients, seconds.

    Layer by layer from the bottom, the output projection of the attention (and of the feed-forward network, where
    neurons are gone) is fitted by least squares so that what goes into the LayerNorm is what the dense model has
    there, given what the repaired layers below now produce.  Sums are float64; padding does not count.

    Args:
        dense: the model before pruning, or any with its shape; not changed.
        batches: inputs; labels are ignored.  A few hundred sentences do.
        method: "mean" fits the bias alone, and so folds in the mean of what is gone; "scale" also a factor for each
            head (Kwon et al. 2022) or neuron; "refit" also the whole matrix (K-prune, Park et al. 2024).
        ridge: how strongly factors or matrix are held to what they were, as a share of the mean power of the inputs.

    Returns:
        The model given.  A layer without heads gets a bias.

    Raises:
        ValueError: no batches, an unknown method, a negative ridge, or models that do not belong together.
    """
    raise NotImplementedError
