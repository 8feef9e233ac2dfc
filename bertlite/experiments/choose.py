"""The choice of heads and neurons to remove in one cell of an experiment, from their scores."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from bertlite.config import ConfigLike
from bertlite.experiments.files import read_json
from bertlite.experiments.measure import latency_table
from bertlite.importance import SubsetGates, rank_by_latency, rank_by_macs, rank_heads, rank_neurons, train_gates
from bertlite.importance.allocation import Choice
from bertlite.importance.batches import Batch
from bertlite.importance.criteria import CRITERIA, Criterion, Measurement, check_scores_unit
from bertlite.importance.structures import HEADS
from bertlite.records import write_json

Times = Mapping[str, Mapping[int, float]]  # {"heads" or "neurons": {how many are kept: seconds of a sublayer}}

ALLOCATIONS = ("scores", "equal", "macs", "latency")
BUDGETS = ("macs", "latency")  # allocations by a budget of heads and neurons together
TIMED = (8, 128)  # sequences and tokens that the times of "latency" are measured with
LATER = {"allocate": "scores", "neuron_criterion": "", "rearrange": False, "gate_steps": 200}  # newer fields of a Cell
NEURON_STEPS = 16  # sizes of feed-forward sublayers that are timed, beside 0
GATES = Criterion(
    "gates",
    "trained gates that keep exactly the wanted number of heads",
    "Li et al. 2021, arXiv:2108.04657",
    Measurement("trained gates", needs_loss=True, by_token=False),
    lambda weights: weights,
)


def known_criteria() -> dict[str, Criterion]:
    """Return the criteria of experiments: those of the library, and trained gates."""
    return {**CRITERIA, GATES.name: GATES}


class CellLike(Protocol):
    """The fields of a `Cell` that determine its choice."""

    @property
    def fraction(self) -> float: ...
    @property
    def neurons(self) -> float: ...
    @property
    def uniform(self) -> bool: ...
    @property
    def at_least(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def allocate(self) -> str: ...
    @property
    def neuron_criterion(self) -> str: ...
    @property
    def rearrange(self) -> bool: ...
    @property
    def gate_steps(self) -> int: ...


def check_choice(cell: CellLike, criterion: str, neuron_criterion: str) -> None:
    """Check that the fields of a cell go together.

    Args:
        criterion, neuron_criterion: the names without options, the second that of the heads if the cell has none.

    Raises:
        ValueError: fields do not go together; the message names valid ones.
    """
    if cell.allocate not in (*BUDGETS, "scores"):
        raise ValueError(f"there is no allocation {cell.allocate!r}; have: {', '.join(ALLOCATIONS)}")
    if cell.allocate in BUDGETS:
        if cell.uniform or cell.neurons or cell.steps > 1 or cell.neuron_criterion:
            raise ValueError(
                f"allocation by {cell.allocate} takes heads and neurons from one budget, at once, by one criterion:"
                " leave --neurons, --neuron-criterion and --steps out"
            )
        check_scores_unit(known_criteria()[criterion], "neuron")
    if cell.neurons:
        check_scores_unit(known_criteria()[neuron_criterion], "neuron")
    if cell.neuron_criterion and not cell.neurons:
        raise ValueError("a criterion of neurons is given, but no neurons are removed; add --neurons SHARE")
    if cell.rearrange and cell.steps > 1:
        raise ValueError("heads are rearranged after one choice: steps must be 1")
    if cell.gate_steps < 1:
        raise ValueError(f"gate_steps is {cell.gate_steps}; it must be 1 or more")


def check_scoring(name: str, asked: Mapping[str, Any], unit: str) -> None:
    """Check that a criterion with its options scores "head"s or "neuron"s.

    Args:
        name: the criterion with its options.
        asked: what the name means, from `parse_criterion`.

    Raises:
        ValueError: it does not; the message names valid ones.
    """
    criterion = known_criteria()[asked["criterion"]]
    check_scores_unit(criterion, unit)
    if asked.get("reduction", "example") not in criterion.reductions(unit):
        have = " or ".join(criterion.reductions(unit))
        raise ValueError(f"criterion {name!r}: of {unit}s the mean is over {have}, not {asked['reduction']}")


def cell_facts(cell: Any) -> dict[str, Any]:
    """Return the fields of a cell, newer ones only if not at their default, so that old runs are found again."""
    facts = asdict(cell)
    return {name: value for name, value in facts.items() if name not in LATER or value != LATER[name]}


def choose_units(
    config: ConfigLike,
    cell: CellLike,
    heads: int,
    head_scores: Tensor,
    neuron_scores: Tensor | None = None,
    times: Times | None = None,
) -> tuple[Choice, Choice]:
    """Choose the heads and the neurons that a cell removes.

    Args:
        heads: how many to remove, without a budget.
        times: of sublayers by their sizes, for "latency".
    """
    if cell.allocate == "macs":
        budget = 1 - cell.fraction
        return rank_by_macs(config, budget, TIMED[1], head_scores, neuron_scores, at_least=cell.at_least)
    if times is not None:
        of_heads, of_neurons = times["heads"], times["neurons"]
        dense = config.num_hidden_layers * (of_heads[max(of_heads)] + of_neurons[max(of_neurons)])
        limit = (1 - cell.fraction) * dense
        return rank_by_latency(limit, head_scores, of_heads, neuron_scores, of_neurons, at_least=cell.at_least)
    chosen = rank_heads(head_scores, heads, uniform=cell.uniform, at_least=cell.at_least)
    none: Choice = {}
    others = none if neuron_scores is None else rank_neurons(neuron_scores, cell.neurons, uniform=cell.uniform)
    return chosen, others


def sublayer_times(model: Any, folder: Path, name: str, device: str) -> Times:
    """Return the times of sublayers by their sizes, measured once for all cells that share a folder."""
    path = folder / f"times-{name}.json"
    if not path.exists():
        write_json(path, latency_table(model, *TIMED, neurons=timed_neurons(model.config), device=device))
    return {unit: {int(n): each for n, each in table.items()} for unit, table in read_json(path).items()}


def timed_neurons(config: ConfigLike) -> list[int]:
    """Return the sizes of feed-forward sublayers that are timed."""
    return sorted({round(config.intermediate_size * step / NEURON_STEPS) for step in range(NEURON_STEPS + 1)})


def trained_gates(model: Any, batches: list[Batch], removed: int, steps: int, seed: int) -> Tensor:
    """Return the weights of gates trained to remove so many heads, (L, N), nan for pruned heads."""
    gates = SubsetGates(model.config, int(HEADS.present(model).sum()) - removed)
    train_gates(model, gates, batches, steps=steps, seed=seed)
    weights = gates.weight.detach().double().cpu()
    return weights.masked_fill(~gates.present.cpu(), float("nan"))
