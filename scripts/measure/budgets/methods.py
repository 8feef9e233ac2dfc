"""The ways to prune that are compared: each makes a model with at most a share of the MACs, without training."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor

from bertlite import prune_heads, prune_neurons, with_pruned
from bertlite.pruning.importance import loss_curves, macs, output_metrics, prune_layerwise_
from bertlite.pruning.importance.allocation import Choice
from bertlite.pruning.importance.batches import Batch
from bertlite.pruning.importance.layerwise import Curves, sizes_within
from bertlite.pruning.structure import layers_of
from scripts.measure.budgets.kprune import kprune
from scripts.measure.budgets.kwon import both_gradients, kwon

RATIOS = 100  # to prune at, that Torch-Pruning is tried with: multiples of 1/100


class Subject:
    """A model with texts to prune by, and what several shares need of them, measured once."""

    def __init__(self, model: Any, batches: Sequence[Batch], length: int) -> None:
        self.model, self.batches, self.length = model, batches, length

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        return both_gradients(self.model, self.batches)

    @cached_property
    def trained(self) -> Any:
        """A copy with the gradients of the mean loss."""
        model = copy.deepcopy(self.model).eval().requires_grad_(True)
        for batch in self.batches:
            (model(**batch).loss / len(self.batches)).backward()
        return model

    @cached_property
    def curves(self) -> Curves:
        return loss_curves(self.model, self.batches, output_metrics(self.model, self.batches))


def library() -> ModuleType:
    """Return Torch-Pruning.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        return import_module("torch_pruning")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "Torch-Pruning is not installed: pip install --no-deps torch-pruning, or name other ways with --ways"
        ) from None


def torch_pruning(subject: Subject, share: float) -> Any:
    """Prune by Torch-Pruning's pruner: group taylor scores, globally, one ratio of heads and of neurons.

    The pruner leaves a layer whole that would lose all its heads or neurons, so ratios are tried one after the other:
    that which leaves most within the share is taken.
    """
    best: tuple[float, tuple[Choice, Choice]] = (0.0, ({}, {}))
    for step in range(round(RATIOS * (0.95 - share)), RATIOS):
        choice = lowest(subject, step / RATIOS)
        left = macs(with_pruned(subject.model.config, *choice), subject.length)
        if best[0] < left <= share * macs(subject.model.config, subject.length):
            best = left, choice
    heads, neurons = best[1]
    return prune_neurons(prune_heads(subject.model, heads), neurons)


def lowest(subject: Subject, ratio: float) -> tuple[Choice, Choice]:
    """Return the heads and the neurons that the pruner would remove."""
    tp, model = library(), subject.trained
    size = model.config.hidden_size // model.config.num_attention_heads
    fixed, layers = [model.classifier, model.base_model.pooler], list(layers_of(model))
    heads: dict[Any, int] = {}
    for block in layers:
        own = block.attention.self
        heads |= dict.fromkeys((own.query, own.key, own.value), model.config.num_attention_heads)
        fixed += [block.attention.output.dense, block.output.dense]
    inputs = {name: x[:2] for name, x in subject.batches[0].items() if name != "labels"}
    pruner = tp.pruner.BasePruner(
        model,
        inputs,
        tp.importance.GroupTaylorImportance(),
        global_pruning=True,
        pruning_ratio=ratio,
        head_pruning_ratio=ratio,
        prune_num_heads=True,
        prune_head_dims=False,
        num_heads=heads,
        in_channel_groups={},  # the defaults are shared by all pruners, and changed
        out_channel_groups={},
        ignored_layers=fixed,
        output_transform=lambda out: out.logits,
    )
    found: tuple[Choice, Choice] = ({}, {})
    for group in pruner.step(interactive=True):  # what it would prune
        root, units = group[0].dep.target.module, group[0].idxs
        for layer, block in enumerate(layers):
            if root is block.attention.output.dense:
                found[0][layer] = sorted({unit // size for unit in units})
            elif root is block.intermediate.dense:
                found[1][layer] = sorted(units)
    return found


def joint(subject: Subject, share: float) -> Any:
    """Prune as `bertlite prune to` does."""
    sizes = sizes_within(subject.model.config, subject.curves, share, subject.length)
    return prune_layerwise_(copy.deepcopy(subject.model), subject.model, subject.batches, subject.curves, sizes)


@dataclass(frozen=True)
class Way:
    """A way to prune, and how many texts it has: as many as its authors give it."""

    prune: Callable[[Subject, float], Any]  # the subject, the share of the MACs -> the pruned model
    texts: int = 1024
    tokens: int | None = None  # instead of a number of texts


OURS = "prune to"
WAYS = {
    "Torch-Pruning": Way(torch_pruning),
    "Kwon et al.": Way(lambda x, share: kwon(x.model, x.batches, x.gradients, share, x.length), 2048),
    "K-prune": Way(lambda x, share: kprune(x.model, x.batches, share, x.length), tokens=100_000),
    OURS: Way(joint),
    **{f"{OURS}, {texts:,} texts": Way(joint, texts) for texts in (256, 2048)},
}
