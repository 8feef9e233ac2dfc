"""The table of criteria: what an entry says is true, and everything that speaks of criteria draws from it."""

import pkgutil
from importlib import reload
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import F64, assert_same, make, make_batch
from torch import Tensor

import bertlite.pruning.importance
from bertlite import BertForSequenceClassification, head_importance
from bertlite.cli import parser, prune
from bertlite.experiments.experiment import Cell
from bertlite.pruning import CRITERIA, REDUCTIONS, Criterion, neuron_importance
from bertlite.pruning.criteria import GATE_GRADIENTS, criteria_for
from bertlite.pruning.importance.measurements import ScoringTask, gate_gradients
from bertlite.pruning.importance.scores import describe_criteria
from bertlite.pruning.importance.structures import HEADS
from scripts.make import tables

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "notebooks" / "docs" / "pruning.md"
L, N, W = 3, 4, 7


@pytest.fixture
def labelled() -> tuple[Any, list[dict[str, Tensor]]]:
    model = make(BertForSequenceClassification, num_labels=6, intermediate_size=W)
    return model, [{**make_batch(2, 11, seed), "labels": torch.tensor([seed, 4])} for seed in (1, 2)]


# One table


@pytest.fixture
def cube(monkeypatch: pytest.MonkeyPatch) -> Criterion:
    added = Criterion("cube", "mean |g|³", "Nobody 2001", GATE_GRADIENTS, lambda gradients: gradients.abs() ** 3)
    monkeypatch.setitem(CRITERIA, added.name, added)
    return added


def test_a_new_entry_is_a_criterion_of_the_library(cube, labelled):
    model, batches = labelled
    gradients = torch.cat([*gate_gradients(ScoringTask(model, HEADS), batches)])
    wanted = gradients.abs().pow(3).mean(0)
    assert_same(head_importance(model, batches, criterion="cube"), wanted)
    assert neuron_importance(model, batches, criterion="cube").shape == (L, W)
    with pytest.raises(ValueError, match=r"have: .*random, cube$"):
        head_importance(model, batches, criterion="square")


def test_a_new_entry_is_in_the_docstrings_and_on_the_page(cube):
    for unit in cube.measurement.units:
        assert describe_criteria(unit).endswith('- "cube": mean |g|³ (Nobody 2001).')
    assert "| `cube` | mean \\|g\\|³ (Nobody 2001) | heads and neurons |" in tables.library.criteria()
    assert tables.main(["--check", str(PAGE)]) == 1


def test_a_new_entry_is_a_criterion_of_the_command_line(cube, capsys, monkeypatch):
    reload(prune)  # its tables are made when it is imported
    with pytest.raises(SystemExit):
        parser().parse_args(["prune", "run", "--help"])
    assert Cell("cube/batch").criterion == "cube/batch"
    monkeypatch.delitem(CRITERIA, cube.name)
    reload(prune)
    assert "random or cube; options" in " ".join(capsys.readouterr().out.split())


def test_the_page_and_the_docstrings_have_every_criterion():
    assert tables.main(["--check", str(PAGE)]) == 0, "run python -m scripts.make.tables"
    for function, unit in ((head_importance, "head"), (neuron_importance, "neuron")):
        assert describe_criteria(unit) in function.__doc__
        assert [name for name in CRITERIA if f'- "{name}": ' in function.__doc__] == list(criteria_for(unit))


def test_the_page_can_be_written_again(tmp_path):
    copy = tmp_path / "pruning.md"
    copy.write_text("before\n<!-- criteria -->\nold\n<!-- /criteria -->\nafter\n", encoding="utf-8")
    assert tables.main(["--check", str(copy)]) == 1
    assert tables.main([str(copy)]) == 0
    assert tables.main(["--check", str(copy)]) == 0
    text = copy.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert tables.library.criteria() in text


# What an entry says


@pytest.mark.parametrize("name", CRITERIA)
def test_an_entry_says_what_a_criterion_needs(name, labelled, few_steps):
    model, batches = labelled
    criterion = CRITERIA[name]
    unlabelled = [{key: x for key, x in batch.items() if key != "labels"} for batch in batches]
    if criterion.measurement.needs_loss:
        with pytest.raises(ValueError, match="there are no labels"):
            head_importance(model, unlabelled, criterion=name)
    elif criterion.measurement.needs_data:
        assert head_importance(model, unlabelled, criterion=name).isfinite().all()
        with pytest.raises(ValueError, match="there are no batches"):
            head_importance(model, [], criterion=name)
    else:
        assert head_importance(model, [], criterion=name).isfinite().all()
    assert head_importance(model, unlabelled, criterion=name, target="kl").isfinite().all()


@pytest.mark.parametrize("name", CRITERIA)
def test_an_entry_says_what_a_criterion_scores_and_averages(name, labelled, few_steps):
    model, batches = labelled
    for unit, function, shape in (("head", head_importance, (L, N)), ("neuron", neuron_importance, (L, W))):
        for reduction in REDUCTIONS:
            if unit in CRITERIA[name].measurement.units and reduction in CRITERIA[name].reductions(unit):
                scores = function(model, batches, criterion=name, reduction=reduction)
                assert (scores.shape, scores.dtype) == (shape, F64)
            else:
                with pytest.raises(ValueError, match=r"is unknown|does not score neurons|has no parts by token"):
                    function(model, batches, criterion=name, reduction=reduction)


# The package


def test_no_module_has_the_name_of_a_public_function():
    """Or `import bertlite.pruning.importance.NAME as module` would give the function."""
    modules = {each.name for each in pkgutil.iter_modules(bertlite.pruning.importance.__path__)}
    assert "scores" in modules
    assert not [name for name in modules if callable(getattr(bertlite.pruning.importance, name, None))]
