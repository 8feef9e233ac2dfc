"""Scores and repair of bertlite.hf models: those of the same model in bertlite."""

import pytest
from conftest import assert_same
from pairs import core_of, inputs_of, labels_of, ours_of

import bertlite
from bertlite.importance import head_importance, neuron_importance, repair


@pytest.mark.parametrize("backend", ["eager", "sdpa", "packed"])
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "BertForMaskedLM"])
def test_the_core_and_hf_are_scored_and_repaired_alike(name: str, backend: str) -> None:
    model = ours_of(name, backend)
    other = core_of(model, attn_implementation=backend)
    batches = [{**inputs_of(name), **labels_of(name)}]
    for criterion in ("fisher", "leave_one_out"):
        assert_same(head_importance(model, batches, criterion), head_importance(other, batches, criterion))
    assert_same(neuron_importance(model, batches), neuron_importance(other, batches))
    pruned = [bertlite.prune_neurons(bertlite.prune_heads(m, {0: [1]}), {1: [3]}) for m in (model, other)]
    pairs = zip(pruned, (model, other), strict=True)
    fixed = [repair(m, dense, batches, ridge=1.0).state_dict() for m, dense in pairs]  # well conditioned
    assert_same(*fixed, atol=0)  # the same kernels
