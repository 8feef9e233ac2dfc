"""Pruned intermediate neurons in bertlite.hf: same laws, same files."""

import json
from pathlib import Path

import pytest
import transformers
from conftest import assert_same, full_outputs
from pairs import config_of, core_of, inputs_of, ours_of

import bertlite
from bertlite import hf

NEURONS = {0: [36, 3], 1: range(37)}


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM"])
def test_the_core_and_hf_prune_alike(name: str) -> None:
    model = ours_of(name)
    other = core_of(model)
    pruned = bertlite.prune_neurons(model, NEURONS)
    assert_same(dict(pruned(**inputs_of(name))), dict(bertlite.prune_neurons(other, NEURONS)(**inputs_of(name))))
    assert_same(dict(bertlite.densify(pruned)(**inputs_of(name))), dict(pruned(**inputs_of(name))))
    assert not hasattr(model.config, "pruned_neurons")


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM"])
def test_files_are_read_by_the_core_and_by_hf(name: str, tmp_path: Path) -> None:
    pruned = bertlite.prune_neurons(ours_of(name), NEURONS)
    pruned.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["pruned_neurons"] == {"0": [3, 36], "1": [*range(37)]}
    wanted = full_outputs(pruned, inputs_of())
    again = getattr(hf, name).from_pretrained(tmp_path, dtype="float64")
    assert again.config.pruned_neurons == {0: [3, 36], 1: [*range(37)]}
    assert_same(full_outputs(again, inputs_of()), wanted, atol=0)
    core = getattr(bertlite, name).from_pretrained(tmp_path)
    assert_same(dict(full_outputs(core, inputs_of())), dict(wanted), atol=0)


def test_transformers_itself_does_not_load_such_a_file_in_silence(tmp_path: Path) -> None:
    bertlite.prune_neurons(ours_of("BertModel"), NEURONS).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="size"):
        transformers.BertModel.from_pretrained(tmp_path)


def test_a_config_that_names_what_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 0 has no neuron 37"):
        hf.BertModel(config_of(pruned_neurons={"0": [37]}))
