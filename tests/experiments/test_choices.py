"""Which heads and neurons a cell removes: by scores, by a budget, and by gates that are trained."""

from typing import Any

import pytest
import torch
from conftest import assert_same

pytest.importorskip("accelerate")

from test_experiments import data_arguments, experiment, setting, world

from bertlite import head_importance, neuron_importance
from bertlite.cli import main
from bertlite.experiments import compare
from bertlite.experiments.cell import LATER, Cell, cell_facts, parse_criterion
from bertlite.importance import SubsetGates, macs, rank_by_macs, rank_heads, train_gates
from bertlite.records import read_runs

__all__ = ["experiment", "setting", "world"]  # fixtures


def model_of(experiment: Any, cell: Cell, cache: Any) -> Any:
    """The pruned model of a cell."""
    (found,) = experiment.pruned(cell, cache, (None, None), lambda **_: None)
    return found[0]


def gone(model: Any) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    config = model.config
    heads, neurons = config.pruned_heads, config.pruned_neurons or {}
    return tuple({i: sorted(units) for i, units in each.items() if units} for each in (heads, neurons))  # type: ignore[return-value]


@pytest.mark.parametrize("fraction", [0.3, 0.5])
def test_a_budget_of_macs_is_met_by_heads_and_neurons_together(
    experiment: Any, tmp_path: Any, fraction: float
) -> None:
    cell = Cell("fisher", fraction, allocate="macs", at_least=2, repair="none")
    pruned, dense = model_of(experiment, cell, tmp_path), experiment.dense
    batches = experiment.calibration(0)
    scores = head_importance(dense, batches, "fisher"), neuron_importance(dense, batches, "fisher")
    wanted = rank_by_macs(dense.config, 1 - fraction, 128, *scores, at_least=2)
    assert gone(pruned) == tuple({i: sorted(units) for i, units in each.items()} for each in wanted)
    assert macs(pruned.config, 128) <= (1 - fraction) * macs(dense.config, 128)
    assert all(len(heads) <= 2 for heads in gone(pruned)[0].values())


def test_neurons_may_have_a_criterion_of_their_own(experiment: Any, tmp_path: Any) -> None:
    cell = Cell("confidence", 0.5, neurons=0.4, neuron_criterion="magnitude", repair="none")
    pruned = model_of(experiment, cell, tmp_path)
    others = model_of(experiment, Cell("magnitude", 0.25, neurons=0.4, repair="none"), tmp_path)
    assert gone(pruned)[1] == gone(others)[1]
    heads = rank_heads(
        head_importance(experiment.dense, experiment.calibration(0), "confidence"), 6, at_least=cell.at_least
    )
    assert gone(pruned)[0] == heads
    assert {path.name.split("-")[0] for path in tmp_path.iterdir()} == {"confidence", "magnitude"}


def test_trained_gates_choose_the_heads(experiment: Any, tmp_path: Any) -> None:
    cell = Cell("gates", 0.5, gate_steps=7, at_least=0, repair="none")
    pruned = model_of(experiment, cell, tmp_path)
    gates = SubsetGates(experiment.dense.config, 6)
    train_gates(experiment.dense, gates, experiment.calibration(0), steps=7, seed=0)
    assert gone(pruned)[0] == gates.pruned()
    scores = experiment.scores(cell, tmp_path)
    assert_same(scores, gates.weight.detach().double())
    fewer = experiment.scores(Cell("gates", 0.25, gate_steps=7), tmp_path)
    assert not torch.equal(fewer, scores), "gates that keep more heads are others"
    assert not torch.equal(experiment.scores(Cell("gates", 0.5, gate_steps=8), tmp_path), scores)


def test_a_run_of_before_is_found_again() -> None:
    assert not LATER.keys() & cell_facts(Cell("michel", 0.5)).keys()
    assert cell_facts(Cell("michel", 0.5, allocate="macs"))["allocate"] == "macs"
    assert Cell(**cell_facts(Cell("gates", 0.5, gate_steps=9))) == Cell("gates", 0.5, gate_steps=9)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"allocate": "money"}, "there is no allocation 'money'; have: scores, equal, macs"),
        ({"allocate": "macs", "neurons": 0.5}, "from one budget, at once, by one criterion"),
        ({"allocate": "macs", "steps": 2}, "from one budget, at once, by one criterion"),
        (
            {"allocate": "macs", "criterion": "confidence"},
            "'confidence' does not score neurons: it is computed from attention weights, which",
        ),
        ({"allocate": "macs", "criterion": "gates"}, "'gates' does not score neurons"),
        ({"neurons": 0.5, "criterion": "gates"}, "'gates' does not score neurons"),
        ({"neurons": 0.5, "neuron_criterion": "entropy"}, "'entropy' does not score neurons"),
        ({"neuron_criterion": "fisher"}, "no neurons are removed; add --neurons SHARE"),
        ({"criterion": "gates", "gate_steps": 0}, "gate_steps is 0"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Cell(**fields)


def test_gates_have_no_options() -> None:
    assert parse_criterion("gates")["criterion"] == "gates"
    with pytest.raises(ValueError, match="criterion 'gates/kl': there is no option 'kl'"):
        parse_criterion("gates/kl")


def test_the_commands_have_it_all(world: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["prune", "run", *data_arguments(world), "--calibration", "11", "--repair", "none", "--out", str(tmp_path)]
    for options in (
        ["--allocate", "macs", "--criterion", "fisher", "--fraction", "0.4"],
        ["--allocate", "equal"],
        ["--criterion", "gates", "--gate-steps", "3", "--neurons", "0.4", "--neuron-criterion", "magnitude"],
    ):
        assert main([*run, *options]) == 0
    shown = capsys.readouterr().out
    assert "fisher, by macs" in shown
    assert "michel uniform" in shown
    assert "gates and magnitude of 3 steps" in shown
    rows = compare.summarise(read_runs(tmp_path))
    assert sorted(row.get("allocate", "scores") for row in rows) == ["macs", "scores", "scores"]
