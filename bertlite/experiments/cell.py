"""One cell of an experiment: how it scores, prunes, repairs and retrains, and the units that it removes."""

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from bertlite.config import ConfigLike
from bertlite.experiments.data import DataSource
from bertlite.experiments.finetune import Recipe
from bertlite.importance import (
    METHODS,
    NORMALISERS,
    REDUCTIONS,
    TARGETS,
    SubsetGates,
    rank_by_macs,
    rank_heads,
    rank_neurons,
    train_gates,
)
from bertlite.importance.allocation import Choice
from bertlite.importance.batches import Batch
from bertlite.importance.criteria import CRITERIA, Criterion, Measurement, check_scores_unit
from bertlite.importance.structures import HEADS

ALLOCATIONS = ("scores", "equal", "macs")
LENGTH = 128  # of the sequence that MACs are counted for
LATER = {"allocate": "scores", "neuron_criterion": "", "gate_steps": 200}  # newer fields of a Cell
GATES = Criterion(
    "gates",
    "trained gates that keep exactly the wanted number of heads",
    "Li et al. 2021, arXiv:2108.04657",
    Measurement("trained gates", needs_loss=True, by_token=False),
    lambda weights: weights,
)
KNOWN = {**CRITERIA, GATES.name: GATES}  # the criteria of experiments
REPAIRS = ("none", *METHODS)
INVERTED = "inverted"  # remove the units with the highest scores


@dataclass(frozen=True)
class Setting:
    """The settings that all cells of an experiment share.

    Args:
        model: the dense model: a folder or a hub id with its tokenizer.
        train: source of the examples for calibration and retraining.
        dev: source of the examples for evaluation.
        calibration: number of training examples for criteria and repair.
        retrain: number of training examples for retraining; None is all.
        recipe: settings of the retraining.
    """

    model: str
    task: str
    train: DataSource
    dev: DataSource
    max_length: int = 128
    calibration: int = 512
    retrain: int | None = None
    recipe: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class Cell:
    """One way of pruning.

    Args:
        criterion: a name of `bertlite.importance.CRITERIA`, followed by options such as "taylor/batch/layer_l2"
            or "michel/kl/inverted".
        fraction: share of the heads to remove.
        neurons: share of the intermediate neurons to remove.
        uniform: remove equally many from every layer ("equal" on the command line); else the lowest scores anywhere.
        at_least: heads that every layer keeps.
        steps: 1 prunes at once; with more, scores are estimated anew before each step.
        repair: "none", or a name of `bertlite.importance.METHODS`.
        epochs: passes of retraining after repair; with several steps, an equal part after each.
        seed: seed of the calibration sample, of random scores and of retraining.
        allocate: "scores"; or "macs", where `fraction` is the share of the encoder's multiply-accumulates that heads
            and neurons give up together.
        neuron_criterion: for neurons, if it is not `criterion`.
        gate_steps: training steps of the criterion "gates".
    """

    criterion: str = "michel"
    fraction: float = 0.5
    neurons: float = 0.0
    uniform: bool = False
    at_least: int = 1
    steps: int = 1
    repair: str = "refit"
    epochs: float = 0.0
    seed: int = 0
    allocate: str = "scores"
    neuron_criterion: str = ""
    gate_steps: int = 200

    @property
    def of_neurons(self) -> str:
        """The criterion of the neurons."""
        return self.neuron_criterion or self.criterion

    @property
    def prunes_neurons(self) -> bool:
        """True if neurons are scored."""
        return self.neurons > 0 or self.allocate == "macs"

    def __post_init__(self) -> None:
        self.check_units()
        for name in ("fraction", "neurons"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a share, 0 to 1")
        if self.repair not in REPAIRS:
            raise ValueError(f"there is no repair {self.repair!r}; have: {', '.join(REPAIRS)}")
        if self.steps < 1 or self.epochs < 0:
            raise ValueError(f"steps is {self.steps} and epochs {self.epochs}; at least 1 and 0")
        if self.neurons and self.steps > 1:
            raise ValueError("neurons are pruned at once: steps must be 1")

    def check_units(self) -> None:
        """Raise ValueError if the fields that choose units do not go together."""
        criterion, of_neurons = (
            KNOWN[parse_criterion(name)["criterion"]] for name in (self.criterion, self.of_neurons)
        )
        if self.allocate not in ("scores", "macs"):
            raise ValueError(f"there is no allocation {self.allocate!r}; have: {', '.join(ALLOCATIONS)}")
        if self.allocate == "macs":
            if self.uniform or self.neurons or self.steps > 1 or self.neuron_criterion:
                raise ValueError(
                    "allocation by macs takes heads and neurons from one budget, at once, by one criterion: leave"
                    " --neurons, --neuron-criterion and --steps out"
                )
            check_scores_unit(criterion, "neuron")
        if self.neurons:
            check_scores_unit(of_neurons, "neuron")
        if self.neuron_criterion and not self.neurons:
            raise ValueError("a criterion of neurons is given, but no neurons are removed; add --neurons SHARE")
        if self.gate_steps < 1:
            raise ValueError(f"gate_steps is {self.gate_steps}; it must be 1 or more")


def parse_criterion(criterion: str) -> dict[str, Any]:
    """Return the keywords of `head_importance` for a name like "michel/batch/layer_l2", and whether it is inverted.

    Raises:
        ValueError: a part is not a criterion, reduction, target or normaliser.
    """
    name, *parts = criterion.split("/")
    if name not in KNOWN:
        raise ValueError(f"there is no criterion {name!r}; have: {', '.join(KNOWN)}")
    found: dict[str, Any] = {"criterion": name, INVERTED: False}
    kinds = {"reduction": REDUCTIONS, "target": TARGETS, "normaliser": NORMALISERS}
    for part in parts:
        kind = next((kind for kind, names in kinds.items() if part in names), None)
        if part == INVERTED:
            found[INVERTED] = True
        elif kind is None or part == "cost" or name == GATES.name:
            have = ", ".join((*REDUCTIONS, *TARGETS, *(n for n in NORMALISERS if n != "cost"), INVERTED))
            raise ValueError(f"criterion {criterion!r}: there is no option {part!r}; have: {have}")
        else:
            found[kind] = part
    return found


def check_scoring(name: str, unit: str) -> None:
    """Raise ValueError if a criterion with its options does not score "head"s or "neuron"s."""
    asked = parse_criterion(name)
    criterion = KNOWN[asked["criterion"]]
    check_scores_unit(criterion, unit)
    if asked.get("reduction", "example") not in criterion.reductions(unit):
        have = " or ".join(criterion.reductions(unit))
        raise ValueError(f"criterion {name!r}: of {unit}s the mean is over {have}, not {asked['reduction']}")


def cell_facts(cell: Cell) -> dict[str, Any]:
    """Return the fields of a cell, newer ones only if not at their default, so that old runs are found again."""
    facts = asdict(cell)
    return {name: value for name, value in facts.items() if name not in LATER or value != LATER[name]}


def choose_units(
    config: ConfigLike,
    cell: Cell,
    heads: int,
    head_scores: Tensor,
    neuron_scores: Tensor | None = None,
) -> tuple[Choice, Choice]:
    """Choose the heads and the neurons that a cell removes.

    Args:
        heads: how many to remove, without a budget.
    """
    if cell.allocate == "macs":
        budget = 1 - cell.fraction
        return rank_by_macs(config, budget, LENGTH, head_scores, neuron_scores, at_least=cell.at_least)
    chosen = rank_heads(head_scores, heads, uniform=cell.uniform, at_least=cell.at_least)
    none: Choice = {}
    others = none if neuron_scores is None else rank_neurons(neuron_scores, cell.neurons, uniform=cell.uniform)
    return chosen, others


def trained_gates(model: Any, batches: list[Batch], removed: int, steps: int, seed: int) -> Tensor:
    """Return the weights of gates trained to remove so many heads, (L, N), nan for pruned heads."""
    gates = SubsetGates(model.config, int(HEADS.present(model).sum()) - removed)
    train_gates(model, gates, batches, steps=steps, seed=seed)
    weights = gates.weight.detach().double().cpu()
    return weights.masked_fill(~gates.present.cpu(), float("nan"))
