"""Causal analysis of the models of bertlite.hf: what it finds of bertlite's own, on every class, pruned too."""

from typing import Any

import pytest
import torch
from conftest import EXACT, assert_same, make_batch
from pairs import CHOICES, LABELS, B, core_of, inputs_of, labels_of, ours_of
from torch import Tensor

import bertlite
from bertlite.causal import (
    SITES,
    ablate,
    ablated,
    activations_at,
    mean_contexts,
    patch,
    shapley_values,
)

GONE = {0: [1, 3], 1: [0, 1, 2, 3]}


def pair_of(name: str) -> tuple[Any, Any]:
    """The model of bertlite.hf, pruned, and bertlite's own with its weights."""
    theirs = bertlite.prune_heads(ours_of(name), GONE)
    return theirs, core_of(theirs)


def other_of(name: str) -> dict[str, Tensor]:
    """Another batch of the same shape and lengths."""
    if name == "BertForMultipleChoice":
        return {name: x.unflatten(0, (B, CHOICES)) for name, x in make_batch(B * CHOICES, seed=6).items()}
    return make_batch(seed=6)


def same(found: Tensor, wanted: Tensor) -> None:
    assert_same(found.nan_to_num(nan=-9), wanted.nan_to_num(nan=-9), atol=10 * EXACT)


@pytest.mark.parametrize("site", SITES)
def test_every_site_is_patched(site: str) -> None:
    theirs, own = pair_of("BertForSequenceClassification")
    clean, corrupted = inputs_of(), other_of("")
    found, wanted = (patch(model, clean, corrupted, site, metric="kl") for model in (theirs, own))
    same(found.values, wanted.values)
    same(activations_at(theirs, clean, site), activations_at(own, clean, site))


@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto", "packed"])
def test_ablation_and_shapley_values_too(backend: str) -> None:
    theirs, own = pair_of("BertForSequenceClassification")
    theirs.set_attn_implementation(backend)
    batches = [{**inputs_of(), **labels_of("BertForSequenceClassification")}]
    assert theirs.config.num_labels == LABELS
    for method in ("zero", "mean", "resample"):
        found, wanted = (ablate(model, batches, method) for model in (theirs, own))
        same(found.increases, wanted.increases)
    shares, own_shares = (shapley_values(model, batches, orders=4, method="mean") for model in (theirs, own))
    same(shares.values, own_shares.values)
    contexts = mean_contexts(own, batches)
    with ablated(theirs, {2: [1]}, contexts), ablated(own, {2: [1]}, contexts), torch.no_grad():
        assert_same(theirs(**batches[0]).logits, own(**batches[0]).logits, atol=10 * EXACT)
