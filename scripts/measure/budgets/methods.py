"""The ways to prune that are compared: each makes a model with at most a share of the MACs, without training."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.experiments.budget.distil import STATES
from bertlite.models.structure import layers_of, with_fields
from bertlite.pruning import loss_curves, macs, output_metrics, prune_layerwise_, with_pruned
from bertlite.pruning.importance.allocation import Choice
from bertlite.pruning.importance.batches import Batch
from bertlite.pruning.importance.layerwise import Curves, curves_to_choose, sizes_within
from bertlite.pruning.importance.selection import Elimination
from scripts.measure.budgets.kprune import kprune
from scripts.measure.budgets.kwon import both_gradients, choose, kwon, prune

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
        return curves_to_choose(self.model, self.batches)

    @cached_property
    def curves_by_all(self) -> Curves:
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


def torch_pruning(subject: Subject, share: float) -> tuple[Choice, Choice]:
    """Choose by Torch-Pruning's pruner: group taylor scores, globally, one ratio of heads and of neurons.

    The pruner leaves a layer whole that would lose all its heads or neurons, so ratios are tried one after the other:
    that which leaves most within the share is taken.
    """
    best: tuple[float, tuple[Choice, Choice]] = (0.0, ({}, {}))
    for step in range(round(RATIOS * (0.95 - share)), RATIOS):
        choice = lowest(subject, step / RATIOS)
        left = macs(with_pruned(subject.model.config, *choice), subject.length)
        if best[0] < left <= share * macs(subject.model.config, subject.length):
            best = left, choice
    return best[1]


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


def joint(subject: Subject, share: float, curves: Curves | None = None) -> Any:
    """Prune as `bertlite prune to` does, or by other curves."""
    model, curves = subject.model, curves or subject.curves
    sizes = sizes_within(model.config, curves, share, subject.length)
    return prune_layerwise_(copy.deepcopy(model), model, subject.batches, curves, sizes)


def unfitted(subject: Subject, share: float) -> Any:
    """Choose as `bertlite prune to` does, and fit nothing."""
    sizes = sizes_within(subject.model.config, subject.curves, share, subject.length)
    pairs = [*zip(subject.curves, sizes, strict=True)]
    gone = ({i: pair[kind].removed(size[kind]) for i, (pair, size) in enumerate(pairs)} for kind in (0, 1))
    heads, neurons = gone
    return prune(subject.model, (heads, neurons))


def fitted(subject: Subject, choice: tuple[Choice, Choice]) -> Any:
    """Remove what others choose, and fit the rest as `bertlite prune to` does."""
    config, none = subject.model.config, torch.zeros(0)
    every, curves, sizes = (config.num_attention_heads, config.intermediate_size), [], []
    for layer in range(config.num_hidden_layers):
        gone = [list(each.get(layer, ())) for each in choice]
        orders = [[*own, *({*range(count)} - {*own})] for own, count in zip(gone, every, strict=True)]
        heads, neurons = (Elimination(tuple(order), none) for order in orders)
        curves.append((heads, neurons))
        sizes.append((every[0] - len(gone[0]), every[1] - len(gone[1])))
    return prune_layerwise_(copy.deepcopy(subject.model), subject.model, subject.batches, curves, sizes)


def with_fewer_layers(subject: Subject, share: float) -> Any:
    """Leave out whole layers: of each of as many groups of layers as the share allows, rounded, the first stays."""
    model, layers = subject.model, subject.model.config.num_hidden_layers
    count = max(1, round(share * layers))
    found = type(model)(with_fields(model.config, {"num_hidden_layers": count}))
    found.load_state_dict(model.state_dict(), strict=False)  # all but the layers, which are others
    for i, block in enumerate(layers_of(found)):
        block.load_state_dict(list(layers_of(model))[i * layers // count].state_dict())
    return found.eval()


class OfLayers(nn.Module):
    """A teacher for fewer layers, each of which learns what a group of the teacher's computes.

    Args:
        teacher: the model, or a record of its results.
    """

    def __init__(self, model: Any, teacher: nn.Module, count: int) -> None:
        super().__init__()
        layers = model.config.num_hidden_layers
        self.teacher, self.states = teacher, [i * layers // count for i in range(count + 1)]
        self.label_kind, self.device = getattr(model, "label_kind", None), model.device

    def forward(self, **inputs: Any) -> Any:
        out = self.teacher(**inputs)
        out.hidden_states = tuple(out.hidden_states[i] for i in self.states)
        return out

    @property
    def known_outputs(self) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
        """The function that looks outputs up, which a record of results has."""
        look_up: Any = self.teacher.known_outputs

        def known(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
            found = look_up(batch)
            return {**found, STATES: found[STATES][:, :, self.states]}

        return known


@dataclass(frozen=True)
class Way:
    """A way to prune, and how many texts it has: as many as its authors give it."""

    prune: Callable[[Subject, float], Any]  # the subject, the share of the MACs -> the pruned model
    texts: int = 1024
    tokens: int | None = None  # instead of a number of texts
    labels: bool = False  # it reads them


OURS = "prune to"
FEWER = f"{OURS}, 256 texts"
PEER = "Kwon et al."
MAIN = (OURS, PEER)  # of the main comparison
KWON = 2048  # texts
WAYS = {
    "whole": Way(lambda x, share: x.model),
    "whole layers left out": Way(with_fewer_layers),
    "Torch-Pruning": Way(lambda x, share: prune(x.model, torch_pruning(x, share)), labels=True),
    "Torch-Pruning's choice, our fit": Way(lambda x, share: fitted(x, torch_pruning(x, share)), labels=True),
    PEER: Way(lambda x, share: kwon(x.model, x.batches, x.gradients, share, x.length), KWON, labels=True),
    f"{PEER}'s choice, our fit": Way(
        lambda x, share: fitted(x, choose(x.model, x.gradients, share, x.length)), KWON, labels=True
    ),
    "K-prune": Way(lambda x, share: kprune(x.model, x.batches, share, x.length), tokens=100_000),
    f"{OURS}'s choice, no fit": Way(unfitted),
    OURS: Way(joint),
    **{f"{OURS}, {texts:,} texts": Way(joint, texts) for texts in (256, 2048)},
    f"{OURS}, sizes by all texts": Way(lambda x, share: joint(x, share, x.curves_by_all)),
}
