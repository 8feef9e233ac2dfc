"""Causal analysis, importance and repair of models of bertlite.hf: what is found of bertlite's own, pruned too."""

from typing import Any

import pytest
import torch
from conftest import EXACT, assert_same, make_batch
from pairs import core_of, inputs_of, labels_of, ours_of
from torch import Tensor

import bertlite
from bertlite import head_importance
from bertlite.causal import SITES, ablate, ablated, mean_contexts, patch
from bertlite.pruning import neuron_importance, repair

CLASSIFIER = "BertForSequenceClassification"


@pytest.fixture
def models() -> tuple[Any, Any]:
    """Return a model of bertlite.hf, pruned, and bertlite's own with its weights."""
    theirs = bertlite.prune_heads(ours_of(CLASSIFIER), {0: [1, 3], 1: [0, 1, 2, 3]})
    return theirs, core_of(theirs)


def same(found: Tensor, wanted: Tensor) -> None:
    assert_same(found.nan_to_num(nan=-9), wanted.nan_to_num(nan=-9), atol=10 * EXACT)


@pytest.mark.parametrize("site", SITES)
def test_every_site_is_patched(site: str, models: tuple[Any, Any]) -> None:
    clean, corrupted = inputs_of(), make_batch(seed=6)
    found, wanted = (patch(model, clean, corrupted, site, metric="kl") for model in models)
    same(found.values, wanted.values)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto", "packed"])
def test_ablation_too(backend: str, models: tuple[Any, Any]) -> None:
    theirs, own = models
    theirs.set_attn_implementation(backend)
    batches = [{**inputs_of(), **labels_of(CLASSIFIER)}]
    for method in ("zero", "mean"):
        same(*(ablate(model, batches, method).increases for model in models))
    contexts = mean_contexts(own, batches)
    with ablated(theirs, {2: [1]}, contexts), ablated(own, {2: [1]}, contexts), torch.no_grad():
        assert_same(theirs(**batches[0]).logits, own(**batches[0]).logits, atol=10 * EXACT)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "packed"])
@pytest.mark.parametrize("name", [CLASSIFIER, "BertForMaskedLM"])
def test_the_core_and_hf_are_scored_and_repaired_alike(name: str, backend: str) -> None:
    model = ours_of(name, backend)
    other = core_of(model, attn_implementation=backend)
    batches = [{**inputs_of(name), **labels_of(name)}]
    for criterion in ("fisher", "leave_one_out"):
        assert_same(
            head_importance(model, batches, criterion=criterion), head_importance(other, batches, criterion=criterion)
        )
    assert_same(neuron_importance(model, batches), neuron_importance(other, batches))
    pruned = [bertlite.prune_neurons(bertlite.prune_heads(m, {0: [1]}), {1: [3]}) for m in (model, other)]
    pairs = zip(pruned, (model, other), strict=True)
    fixed = [repair(m, dense, batches, ridge=1.0).state_dict() for m, dense in pairs]  # well conditioned
    assert_same(*fixed, atol=0)  # the same kernels
